"""How labels and label weights match a prediction. Dimensions of 1 do not count: `[4, 1, 1, 1]` and `[4]` match."""

Shape = tuple[int, ...]


def label_shape(prediction: Shape, labels: Shape, class_numbers: bool) -> Shape | None:
    """The prediction's shape with or without the classes, whichever matches the labels; None if neither does."""
    if _long(labels) == _long(prediction):
        return prediction
    without_classes = prediction[:1] + prediction[2:]
    return without_classes if class_numbers and _long(labels) == _long(without_classes) else None


def weight_shape(prediction: Shape, weights: Shape, has_classes: bool) -> Shape | None:
    """The shape with which label weights broadcast against a prediction; None if there is none."""
    ones = (1,) * (len(prediction) - 1)
    pixels = (*prediction[:1], 1, *prediction[2:])
    fitting = [(1, *ones), prediction, prediction[:1] + ones, *([pixels] if has_classes else [])]
    return next((shape for shape in fitting if _long(shape) == _long(weights)), None)


def _long(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if extent != 1)
