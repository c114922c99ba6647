"""Reports on non-finite numbers: a report to print, and the same as an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepgraph.compiler.step import SCALE, Key, KeyKind, Step, gradient, layer_tensors, state, value
from stepgraph.errors import NumericsError
from stepgraph.layers.node import Node
from stepgraph.runtime.blame import Origin, Search
from stepgraph.runtime.finite import Contents
from stepgraph.runtime.trial import Trial
from stepgraph.tensors.tensor import Tensor

FIXES = {
    "input": "clean the data of this batch; no layer is at fault",
    "parameter": "go back to an earlier checkpoint; compiled with GraphCompilationOptions.CHECK_NUMERICS, training "
    "stops at the step that produces the first one",
    "user gradient": "check the values that outside code wrote there",
    "result": "keep the layer's sources and parameters in a range it can handle",
    "gradient": "keep the layer's sources away from points with an infinite derivative, or reduce the loss",
    "update": "lower the learning rate, or clip gradients",
}


@dataclass(frozen=True)
class NumericsReport:
    """Where a step's numbers stopped being finite, if they did.

    Args:
        step: the number of the step, from 1, if an optimizer counts them.
        layer: the layer that produced the first NaN or infinity, or that read it first if it came from outside.
        phase: `"forward"`, `"gradient"` or `"update"`.
        what: what was not finite first: `"input"`, `"parameter"`, `"user gradient"`, `"result"`, `"gradient"` or
            `"update"`.
        name: which one: the name of the input, parameter or result.
        where: its description, with the line of the user's program.
        problem: a description of the problem.
        contents: how many NaNs and infinities, and where.
        facts: other observations: sources, parameters, gradients.
        notes: remarks that are not problems.

    Example:
        >>> print(NumericsReport(step=3))
        Everything is finite in step 3.
    """

    step: int | None = None
    layer: str | None = None
    phase: str | None = None
    what: str | None = None
    name: str | None = None
    where: str = ""
    problem: str = ""
    contents: Contents | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that counts is finite."""
        return self.what is None

    def error(self, **facts: object) -> NumericsError:
        """The same as an exception."""
        every = {**self.facts, **facts}
        error = NumericsError(self.where, self.problem, fix=FIXES[self.what or "result"], **every)
        error.layer, error.phase, error.step, error.report = self.layer, self.phase, self.step, self
        return error

    def __str__(self) -> str:
        first = f"Everything is finite{_in_step(self.step)}." if self.ok else str(self.error())
        return "\n".join([first, *(f"Note: {note}." for note in self.notes)])


def report(trial: Trial, step: int | None, titles: Mapping[Tensor, str]) -> NumericsReport:
    """What a trial shows.

    Args:
        trial: a step and everything it computed.
        step: its number.
        titles: the titles of inputs and labels in messages.
    """
    search = Search(trial)
    if search.origin is None:
        return NumericsReport(step, notes=_notes(search))
    return _Description(search, search.origin, step, titles).report()


def _notes(search: Search) -> tuple[str, ...]:
    if not search.overflowed:
        return ()
    scale = float(search.trial.before[SCALE][0])
    return (
        f"gradients were too large for float16 at a loss scale of {scale:g}; such an update is skipped and the scale "
        "halved, which is how loss scaling finds its scale",
    )


@dataclass
class _Description:
    """Describes an origin in words."""

    search: Search
    origin: Origin
    step: int | None
    titles: Mapping[Tensor, str]

    def report(self) -> NumericsReport:
        origin, node = self.origin, self.origin.node
        array = self.search.array(origin.key, origin.after)
        assert array is not None
        contents = Contents.of(array)
        what, name, problem = self._problem(contents.kinds)
        where = node.where if node is not None else "the step"
        if what == "input":
            where = self.titles.get(origin.key.owner, f"Tensor '{origin.key.owner.label}'")
        names = self.search.step.names
        layer = None if node is None else names.get(node.layer, node.layer.label)
        facts = {name if what != "input" else "data": contents, **self._seen(what)}
        return NumericsReport(self.step, layer, origin.phase, what, name, where, problem, contents, facts)

    def _problem(self, kinds: str) -> tuple[str, str, str]:
        """Its kind, its name, and what is wrong with it."""
        key, step = self.origin.key, _in_step(self.step)
        of_step = step.replace(" in ", " of ")
        tensor = key.owner if isinstance(key.owner, Tensor) else None
        given, is_value = self.origin.given, key.kind == KeyKind.VALUE
        if given and is_value and (key.owner in self.titles or not self._of_layer(key.owner)):
            return "input", key.owner.label, f"{kinds} in its data{step}"
        if given and key.kind == KeyKind.USER_GRADIENT:
            return "user gradient", key.owner.label, f"{kinds} in the gradient passed for its result{step}"
        if given:
            name = self._parameter(key)
            begins = "the step" if self.step is None else f"step {self.step}"
            return "parameter", name, f"{kinds} in its {name} when {begins} begins; an earlier step produced it"
        if self.origin.after:
            name = self._parameter(key)
            if self.origin.phase == "forward":
                return "result", name, f"{kinds} in its new {name}, in the forward pass{of_step}"
            return "update", name, f"{kinds} in its {name} after the update{of_step}"
        if is_value:
            return "result", "result", f"{kinds} in its result, in the forward pass{of_step}"
        by = f"source {key.position + 1}" if tensor is None else self._parameter(key) or "result"
        return (
            "gradient",
            f"gradient of {by}",
            f"{kinds} in its gradient with respect to {by}, in the gradient pass{of_step}",
        )

    def _of_layer(self, tensor: Tensor) -> bool:
        return self.origin.node is not None and tensor in set(layer_tensors(self.origin.node))

    def _parameter(self, key: Key) -> str:
        """The layer's name for a tensor or, for a buffer, the optimizer's."""
        node, optimizer = self.origin.node, self.search.step.optimizer
        fields = {} if node is None else _fields(node)
        name = next((field for field, tensor in fields.items() if tensor is key.owner), "")
        if node is not None and not name and key.owner in node.sources:
            name = f"source {node.sources.index(key.owner) + 1}"
        if key.kind == KeyKind.STATE and optimizer is not None:
            return f"{self.search.step.slots_of(key.owner)[key.position]} of {name}"
        if key.kind == KeyKind.AVERAGE:
            return f"the average of {name}"
        return name

    def _seen(self, what: str) -> dict[str, object]:
        """Other observations at that moment."""
        node, found = self.origin.node, self.search.array
        if node is None:
            return {}
        if what in ("input", "parameter"):
            return {"read_by": node.where, **self._others()} if what == "input" else self._others()
        if what == "update":
            return self._update()
        keys: dict[str, Key] = {}
        if what == "gradient":
            keys |= {_numbered("gradient of result", i, node.results): gradient(t) for i, t in enumerate(node.results)}
        keys |= {_numbered("source", i, node.sources): value(t) for i, t in enumerate(node.sources)}
        keys |= {_numbered("label", i, node.labels): value(t) for i, t in enumerate(node.labels)}
        keys |= {name: value(t) for name, t in _fields(node).items()}
        if what == "gradient":
            keys |= {_numbered("result", i, node.results): value(t) for i, t in enumerate(node.results)}
        seen: dict[str, object] = {
            name: Contents.of(array) for name, key in keys.items() if (array := found(key)) is not None
        }
        nan = self.search.first_nan
        if what == "result" and nan is not None and nan is not node:
            seen["first NaN"] = nan.where
        return seen

    def _update(self) -> dict[str, object]:
        tensor, search, optimizer = self.origin.key.owner, self.search, self.search.step.optimizer
        assert optimizer is not None
        keys = {"before": value(tensor), "gradient": gradient(tensor)}
        keys |= {f"{slot} before": state(tensor, i) for i, slot in enumerate(search.step.slots_of(tensor))}
        seen = {name: Contents.of(a) for name, key in keys.items() if (a := search.array(key)) is not None}
        return {**seen, "learning rate": f"{optimizer.learning_rate:g}"}

    def _others(self) -> dict[str, object]:
        """Other parameters that were not finite before the step."""
        step, mine = self.search.step, self.origin.key.owner
        bad = [_named(step, t) for t in step.held if t is not mine and not _finite(self.search, t)]
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        return {"also not finite": ", ".join(bad[:4]) + more} if bad else {}


def _finite(search: Search, tensor: Tensor) -> bool:
    array = search.trial.before.get(value(tensor))
    return array is None or not array.is_floating_point() or bool(array.isfinite().all())


def _fields(node: Node) -> dict[str, Tensor]:
    layer = node.layer
    return {name: t for name, t in {**layer.parameters, **layer.statistics}.items() if t not in node.labels}


def _named(step: Step, tensor: Tensor) -> str:
    """The full name of a parameter or statistic."""
    for node in step.nodes:
        for name, one in _fields(node).items():
            if one is tensor:
                return f"{step.names.get(node.layer, node.layer.label)}.{name}"
    return tensor.label


def _numbered(name: str, index: int, among: tuple[Tensor, ...]) -> str:
    return name if len(among) == 1 else f"{name} {index + 1}"


def _in_step(step: int | None) -> str:
    return "" if step is None else f" in step {step}"
