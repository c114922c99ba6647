"""Random graphs over all layers against an independent evaluation in float64, and against themselves.

    STEPGRAPH_FUZZ_SEED=154 STEPGRAPH_FUZZ_COUNT=1 pytest tests/fuzz     one seed
    python -m tests.fuzz.shrink 154                                      its failure, made small

Every graph is trained and compared with the reference. The other checks take turns: in `make test` every third graph
goes through one of them, in `make test-deep` every graph through three.
"""

from __future__ import annotations

import os

import pytest

import stepgraph as sg
from stepgraph.layers import activation
from tests.fuzz import rows_elementwise, rows_images, rows_losses, rows_sums
from tests.fuzz.case import Case
from tests.fuzz.checks import CHECKS
from tests.fuzz.compare import Mismatch
from tests.fuzz.generate import generate
from tests.fuzz.recipe import Input, Op, Parameter, Recipe, is_loss
from tests.fuzz.shrink import failure, program, shrink
from tests.fuzz.table import TABLE

FEW, MANY = 28, 1000
TURNS = [name for name in CHECKS if name != "training"]


def seeds(count: int, first: int = 0) -> range:
    """The seeds of a run: as many as asked for, from the one asked for."""
    start = int(os.environ.get("STEPGRAPH_FUZZ_SEED", first))
    return range(start, start + int(os.environ.get("STEPGRAPH_FUZZ_COUNT", count)))


def examine(seed: int, names: list[str]) -> None:
    """Runs checks on one graph; what fails is shown with the seed and a program."""
    recipe = generate(seed)
    with Case(recipe) as case:
        for name in names:
            try:
                CHECKS[name](case)
            except Exception as error:  # shown with what reproduces it, whatever it is
                shrinking = f"python -m tests.fuzz.shrink {seed} '{name}'"
                pytest.fail(
                    f"seed {seed}, check '{name}': {type(error).__name__}: {error}\n\n"
                    f"{program(name, recipe)}\n\nMake it small: {shrinking}",
                    pytrace=not isinstance(error, AssertionError),
                )


def turns(first: int, count: int) -> list[str]:
    """The training, and so many other checks, in turn."""
    return ["training", *(TURNS[(first + i) % len(TURNS)] for i in range(count))]


@pytest.mark.parametrize("seed", seeds(FEW))
def test_a_random_graph(seed: int) -> None:
    examine(seed, turns(seed // 3, int(seed % 3 == 0)))


@pytest.mark.deep
@pytest.mark.parametrize("seed", seeds(MANY, 10_000))
def test_many_random_graphs(seed: int) -> None:
    examine(seed, turns(3 * seed, 3))


# The harness itself


def public_layers() -> set[type[sg.Layer]]:
    """Every public layer class, without the one that reads no rows but a number for all of them."""
    found = {one for one in vars(sg.public).values() if isinstance(one, type) and issubclass(one, sg.Layer)}
    return found - {sg.Layer, sg.ComputedLossLayer}


def test_every_public_layer_has_a_row() -> None:
    assert {row.layer for row in TABLE.values()} == public_layers()


@pytest.mark.parametrize(
    ("drawn", "known"),
    [
        (rows_elementwise.ACTIVATIONS, sg.ActivationType),
        ({**rows_elementwise.UNARY, **rows_elementwise.BINARY}, sg.ArithmeticOperation),
        (rows_elementwise.COMPARISONS, sg.ComparisonOperation),
        ({"NONE": None, **rows_sums.REDUCTIONS}, sg.ReductionType),
        (dict.fromkeys(rows_images.CONVOLUTIONS), sg.ConvolutionType),
        (dict.fromkeys(rows_images.POOLINGS), sg.PoolingType),
        (dict.fromkeys(rows_images.SAMPLES), sg.SampleMode),
        (rows_images.PADDINGS, sg.PaddingType),
        (dict.fromkeys(rows_losses.LOSSES), sg.LossType),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_every_kind_has_a_row(drawn: dict[str, object], known: type) -> None:
    assert set(drawn) == {member.name for member in known}  # type: ignore[attr-defined]


def test_every_row_and_every_feature_is_drawn() -> None:
    recipes = [generate(seed) for seed in range(400)]
    ops = [op for recipe in recipes for op in recipe.ops]
    assert {op.kind for op in ops} == set(TABLE)
    features = {
        "shared layers": any(op.layer is not None for op in ops),
        "shared tensors": any(_shares(recipe.ops) for recipe in recipes),
        "frozen layers": any(op.frozen for op in ops),
        "frozen tensors": any(not one.updatable for recipe in recipes for one in recipe.parameters),
        "several losses": any(len(recipe.losses) > 1 for recipe in recipes),
        "loss by constructor": any(recipe.by_constructor for recipe in recipes),
        "stops": any(recipe.stops for recipe in recipes),
        "user gradients": any(recipe.user_gradients for recipe in recipes),
        "linked graphs": any(recipe.cut for recipe in recipes),
        "groups": any(op.settings.get("groups", 1) > 1 for op in ops),
        **{f"{role}": any(i.role == role for r in recipes for i in r.inputs) for role in ("constant", "trained")},
        **{f"{kind}": any(r.compute_type == kind for r in recipes) for kind in ("bfloat16", "float16")},
        **{kind: any(r.optimizer["kind"] == kind for r in recipes) for kind in ("SGD", "Adam", "AdamW", "RMSProp")},
    }
    assert [name for name, found in features.items() if not found] == []


def _shares(ops: tuple[Op, ...]) -> bool:
    """Whether one tensor is in two layers."""
    seen = [number for op in ops if op.layer is None and not is_loss(op) for number in set(op.parameters.values())]
    return len(seen) > len(set(seen))


def test_a_recipe_is_its_own_text() -> None:
    for seed in range(20):
        recipe = generate(seed)
        names = {"Recipe": Recipe, "Input": Input, "Parameter": Parameter, "Op": Op}
        assert eval(str(recipe), names) == recipe == generate(seed)


def test_the_reference_reads_a_shared_tensor_as_the_layer_does() -> None:
    weights, hidden, biases = (3, 4), (3, 3), (3,)
    shapes = {"input_weights": weights, "hidden_weights": hidden, "biases": biases}
    names = {f"{name}.{gate}": shape for name, shape in shapes.items() for gate in range(3)}
    numbers = {name: 10 + i for i, name in enumerate(names)}
    packed = {"input_weights.2": (2, 6), "hidden_weights.0": (9,), "biases.1": (1, 3), "biases.2": (3, 1)}
    settings = {"input_size": 4, "hidden_size": 3, "layer_count": 1, "uses_biases": True, "batch_first": True}
    settings |= {"is_bidirectional": False, "returns_sequences": True, "returns_state": False, "reset_after": False}
    shared = {name: names[name] for name in packed}
    recipe = Recipe(
        seed=1,
        batch=4,
        inputs=(Input(0, (0, 2, 4)), Input(1, (0, 2, 3), role="label")),
        parameters=tuple(Parameter(numbers[name], packed.get(name, shape)) for name, shape in names.items()),
        ops=(
            Op("gru", (0,), (2,), settings, numbers, shapes=shared),
            Op("loss", (2, 1), (3,), {"type": "MEAN_SQUARED_ERROR", "reduction": "SUM"}),
        ),
        optimizer={"kind": "SGD", "learning_rate": 0.05, "momentum_scale": 0.0},
        steps=1,
    )
    with Case(recipe) as case:
        CHECKS["training"](case)


def test_a_wrong_layer_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sigmoid that is one part in a thousand off fails the training check, and little else is left of the graph."""
    right = activation.ACTIVATIONS[sg.ActivationType.SIGMOID]
    monkeypatch.setitem(activation.ACTIVATIONS, sg.ActivationType.SIGMOID, lambda *given: right(*given) * 1.001)
    recipe = Recipe(
        seed=1,
        batch=4,
        inputs=(Input(0, (0, 3)), Input(1, (0, 2), role="label")),
        parameters=(Parameter(10, (2, 3)),),
        ops=(
            Op("fully connected", (0,), (2,), {"inputs": 3, "outputs": 2}, {"weights": 10}),
            Op("activation", (2,), (3,), {"type": "SIGMOID"}),
            Op("softmax", (3,), (4,), {"operation": "SOFTMAX", "dimension": 1}),
            Op("loss", (4, 1), (5,), {"type": "MEAN_SQUARED_ERROR", "reduction": "SUM"}),
        ),
        optimizer={"kind": "SGD", "learning_rate": 0.05, "momentum_scale": 0.0},
        steps=1,
    )
    assert failure(CHECKS["training"], recipe) == "reference: value"

    def has_sigmoid(case: Case) -> None:  # the same failure, without compiling for every trial
        if any(op.settings.get("type") == "SIGMOID" for op in case.recipe.ops):
            raise Mismatch("reference", "value 3", "wrong")

    assert [op.kind for op in shrink(has_sigmoid, recipe).ops] == ["activation", "loss"]
