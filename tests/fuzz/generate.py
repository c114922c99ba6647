"""Recipes from seeds: layers of all kinds, wired at random into something that can be trained."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from tests.fuzz.data import parameter_data
from tests.fuzz.draw import Draw, Unfit
from tests.fuzz.recipe import Recipe, Settings, cleaned, is_loss, pruned
from tests.fuzz.row import Array, Context, Row, shaped
from tests.fuzz.table import LAYERS, TABLE

PIXELS = (2, 3, 5, 6, 7, 8)  # extents of images, none of them a batch size
CHANNELS = (1, 2, 3, 5, 8)
BATCHES = (4, 9)


def generate(seed: int, *, images: bool = False, most: int = 8) -> Recipe:
    """A graph with data, losses, an optimizer and settings, the same for the same seed."""
    draw = Draw(seed, 2 if images and seed % 2 else BATCHES[seed % 2], TABLE)
    _inputs(draw, images)
    rows = {kind: row for kind, row in LAYERS.items() if row.image or not images}
    for _ in range(draw.whole(2, most)):
        _layer(draw, rows)
    recipe = _grouped(draw, _finished(draw, images))
    return recipe if recipe.losses and _learns(recipe) else generate(seed + 1_000_003, images=images, most=most)


def _inputs(draw: Draw, images: bool) -> None:
    flavors = ["image"] if images else ["image", "sequence", "flat"]
    for flavor in [draw.choose(flavors) for _ in range(draw.choose([1, 1, 2]))]:
        match flavor:
            case "image":
                draw.input((0, draw.choose(CHANNELS), draw.choose(PIXELS), draw.choose(PIXELS)))
            case "sequence":
                draw.input((0, draw.choose((1, 2, 3, 5)), draw.choose(CHANNELS)))
            case _:
                draw.input((0, draw.choose(CHANNELS)))


def _layer(draw: Draw, rows: dict[str, Row]) -> None:
    if draw.chance(0.12):
        _once_more(draw)
        return
    (kind,) = draw.random.choices(list(rows), [row.weight for row in rows.values()])
    _try(draw, kind)


def _try(draw: Draw, kind: str) -> None:
    with suppress(Unfit):
        drawn = TABLE[kind].draw(draw)
        if drawn is not None:
            draw.add(kind, drawn)


def _once_more(draw: Draw) -> None:
    """Uses a layer that is there for another source of the same shapes."""
    again = [op for op in draw.ops if op.layer is None and (op.parameters or op.kind == "dropout")]
    if not again:
        return
    op = draw.choose(again)
    shapes = [(draw.values[n].shape, draw.values[n].dtype) for n in op.sources]
    sources = [draw.pick(lambda x, like=like: (x.shape, x.dtype) == like) for like in shapes]
    arrays = {name: shaped(op, name, _array(draw, number)) for name, number in op.parameters.items()}
    values = [draw.values[n] for n in sources if n is not None]
    if op.kind in ("gather", "scatter") or len(values) < len(sources):
        return
    found = TABLE[op.kind].evaluate(Context(True, draw.batch, draw.batch), op.settings, arrays, *values)
    results = found if isinstance(found, tuple) else (found,)
    numbers = tuple(draw.number() for _ in results)
    draw.values |= dict(zip(numbers, results, strict=True))
    draw.read |= {n for n in sources if n is not None}
    wired = tuple(n for n in sources if n is not None)
    draw.ops.append(replace(op, sources=wired, results=numbers, layer=op.results[0]))


def _array(draw: Draw, number: int) -> Array:
    one = next(p for p in draw.parameters if p.number == number)
    return torch.from_numpy(parameter_data(draw.recipe, one)).double()


def _finished(draw: Draw, images: bool) -> Recipe:
    for _ in range(draw.choose([1, 1, 1, 2, 3])):
        _try(draw, "yolo" if draw.chance(0.06) else "loss")
    recipe = replace(
        draw.recipe,
        inputs=tuple(draw.inputs),
        parameters=tuple(draw.parameters),
        ops=tuple(draw.ops),
        optimizer=_optimizer(draw),
        rows=draw.choose([n for n in range(1, draw.batch + 4) if n != draw.batch]),
    )
    recipe = cleaned(recipe) if draw.chance(0.75) else pruned(recipe)
    recipe = _frozen(draw, recipe)
    return _wired(draw, recipe) if not images else recipe


def _frozen(draw: Draw, recipe: Recipe) -> Recipe:
    frozen = {op.results[0] for op in recipe.ops if op.parameters and op.layer is None and draw.chance(0.1)}
    ops = tuple(replace(op, frozen=True) if {op.results[0], op.layer} & frozen else op for op in recipe.ops)
    parameters = tuple(replace(one, updatable=not draw.chance(0.08)) for one in recipe.parameters)
    return replace(recipe, ops=ops, parameters=parameters)


def _wired(draw: Draw, recipe: Recipe) -> Recipe:
    """Stops, gradients from outside, mixed precision, a cut into two graphs, the loss in the constructor."""
    floats = [n for op in recipe.ops if not is_loss(op) for n in op.results if draw.values[n].is_floating_point()]
    if floats and draw.chance(0.12):
        recipe = replace(recipe, stops=(draw.choose(floats),))
    free = [n for n in floats if n not in recipe.stops]
    if free and draw.chance(0.15):
        recipe = replace(recipe, user_gradients=(draw.choose(free),))
    if draw.chance(0.15):
        recipe = replace(recipe, compute_type=draw.choose(["bfloat16", "bfloat16", "float16"]))
    cuts = [cut for cut in range(1, len(recipe.ops)) if may_cut(recipe, cut)]
    if cuts and draw.chance(0.3):
        recipe = replace(recipe, cut=draw.choose(cuts))
    if may_construct(recipe) and draw.chance(0.6):
        recipe = replace(recipe, by_constructor=True)
    return recipe


def may_cut(recipe: Recipe, cut: int) -> bool:
    """Whether the ops before `cut` end in something that those after it read, and both learn what one would."""
    first, second = recipe.ops[:cut], recipe.ops[cut:]
    read = {n for op in second for n in op.sources}
    trained = {one.number for one in recipe.inputs if one.role == "trained"}
    both = trained & read & {n for op in first for n in op.sources}
    joint = recipe.optimizer.get("gradient_clipping_type") == "BY_GLOBAL_NORM"
    ends = not is_loss(first[-1]) and set(first[-1].results) <= read
    return ends and not both and not joint and any(map(is_loss, second)) and not any(map(is_loss, first))


def may_construct(recipe: Recipe) -> bool:
    """Whether the last op is a loss of the op before it, as the constructor's loss layer is."""
    if len(recipe.ops) < 2 or not is_loss(recipe.ops[-1]):
        return False
    return recipe.ops[-1].sources[0] == recipe.ops[-2].results[0] and not is_loss(recipe.ops[-2])


def _learns(recipe: Recipe) -> bool:
    """Whether there is anything to train, and a batch to feed."""
    fed = [one for one in recipe.inputs if one.role == "input"]
    trained = any(one.role == "trained" for one in recipe.inputs)
    return bool(fed) and fed[0].shape[0] == 0 and (trained or bool(trainable(recipe)))


def trainable(recipe: Recipe) -> list[int]:
    """Parameters that the optimizer updates."""
    found: dict[int, None] = {}
    for op in recipe.ops:
        if not op.frozen:
            statistics = TABLE[op.kind].statistics
            found |= {number: None for name, number in op.parameters.items() if name not in statistics}
    return [number for number in found if recipe.parameter(number).updatable]


def _grouped(draw: Draw, recipe: Recipe) -> Recipe:
    """Sometimes with one or two parameter groups; what is drawn before stays the same for a seed."""
    if not draw.chance(0.3):
        return recipe
    settings = recipe.optimizer
    decays = settings["kind"] == "AdamW" or settings.get("regularization_type") != "L1"
    groups = []
    for remainder in range(draw.choose([1, 2])):
        group: Settings = {"remainder": remainder, "learning_rate_factor": draw.choose([0.5, 1.0, 2.0])}
        group |= {"weight_decay": draw.choose([0.0, 0.05])} if decays and draw.chance(0.6) else {}
        group |= {"clipping": False} if draw.chance(0.4) else {}
        groups.append(group | ({"frozen": True} if draw.chance(0.25) else {}))
    return replace(recipe, optimizer={**settings, "groups": groups})


def _optimizer(draw: Draw) -> Settings:
    kind = draw.choose(["SGD", "SGD", "Adam", "AdamW", "RMSProp"])
    settings: Settings = {"kind": kind, "learning_rate": draw.choose([0.05, 0.02])}
    if draw.chance(0.25):
        settings["gradient_rescale"] = draw.choose([0.5, 2.0])
    if draw.chance(0.4):
        clipping = draw.choose(["BY_VALUE", "BY_NORM", "BY_GLOBAL_NORM"])
        settings |= {"applies_gradient_clipping": True, "gradient_clipping_type": clipping}
        if clipping == "BY_VALUE":
            settings |= {"gradient_clip_max": draw.choose([0.1, 1.0]), "gradient_clip_min": -0.2}
        else:
            settings["maximum_clipping_norm"] = draw.choose([0.1, 0.5])
            settings |= {"custom_global_norm": 2.0} if clipping == "BY_GLOBAL_NORM" and draw.chance(0.2) else {}
    if draw.chance(0.4):
        kind_of = draw.choose(["L1", "L2"])
        settings |= {"regularization_type": kind_of, "regularization_scale": draw.choose([0.1, 0.01])}
    match kind:
        case "SGD":
            settings |= {"momentum_scale": draw.choose([0.0, 0.9])}
            settings |= {"uses_nesterov_momentum": True} if settings["momentum_scale"] and draw.chance(0.5) else {}
        case "RMSProp":
            settings |= {"momentum_scale": draw.choose([0.0, 0.9]), "alpha": 0.9, "epsilon": 1e-2}
            settings |= {"is_centered": True} if draw.chance(0.5) else {}
        case _:
            settings |= {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-2}
            settings |= {"uses_ams_grad": True} if draw.chance(0.4) else {}
    return settings
