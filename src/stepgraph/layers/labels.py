"""How labels and label weights match a prediction. Dimensions of 1 do not count: `[4, 1, 1, 1]` and `[4]` match."""

Shape = tuple[int, ...]


def label_shape(prediction: Shape, labels: Shape, axis: int | None) -> Shape | None:
    """The prediction's shape, or for class indices that without the classes at `axis`; None if neither matches."""
    if _long(labels) == _long(prediction):
        return prediction
    if axis is None:
        return None
    without_classes = prediction[:axis] + prediction[axis + 1 :]
    return without_classes if _long(labels) == _long(without_classes) else None


def weight_shape(prediction: Shape, weights: Shape, axis: int | None) -> Shape | None:
    """The shape with which label weights broadcast against a prediction with classes at `axis`; None if none does."""
    ones = (1,) * (len(prediction) - 1)
    fitting = [(1, *ones), prediction, *([] if axis == 0 else [prediction[:1] + ones])]
    if axis is not None:
        fitting.append((*prediction[:axis], 1, *prediction[axis + 1 :]))
    return next((shape for shape in fitting if _long(shape) == _long(weights)), None)


def _long(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if extent != 1)
