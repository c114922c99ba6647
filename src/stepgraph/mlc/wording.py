"""Messages in the original's terms: stepgraph's names become selectors, properties and constants as PyObjC spells them.

Quoted text is the caller's own (labels, names of inputs) and stays unchanged, as do lines of the caller's program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from stepgraph.errors import StepgraphError
from stepgraph.mlc.table import Class
from stepgraph.mlc.tables.enumerations import Enumeration

# What a program writes in another form here, not only under another name.
_PHRASES = (
    (re.compile(r"\badd_inputs\(\.\.\., loss_labels=\{\.\.\.\}\)"), "addInputs_lossLabels_"),
    (re.compile(r"\bDevice\.any\(\)"), "MLCDevice.deviceWithType_(MLCDeviceTypeAny)"),
    (re.compile(r"\bDevice\.cpu\(\)"), "MLCDevice.cpuDevice()"),
    (re.compile(r"\bcompile\(device\)"), "compileWithOptions_device_"),
    (re.compile(r"\bcompile_optimizer\(optimizer\)"), "compileOptimizer_"),
    (re.compile(r"\bnode\(\)"), "nodeWithLayer_sources_"),
    (re.compile(r"\bTensorParameter\(tensor\)"), "MLCTensorParameter.parameterWithTensor_(tensor)"),
    (re.compile(r"\bdata, fill or random\b"), "data, fillWithData or randomInitializerType"),
    (re.compile(r",? or use (?:\w+\.)?create(?:\([^)]*\))?"), ""),  # only factories exist
    (re.compile(r"\bbatch_size=None\b"), "batchSize 0"),
    (re.compile(r"\bbatch_size="), "batchSize"),
)
_KEPT = re.compile(r"""((?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|\([^()\s]+:\d+\))""")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MEMBER = re.compile(r"\b([A-Z][A-Za-z]+)\.([A-Z][A-Z0-9_]*)\b")
_CONSTANT = re.compile(r"\b[A-Z][A-Z0-9_]{2,}\b")
_CALL = re.compile(r"[A-Za-z_]+(?:\.[a-z_]+)?")


class Wording(NamedTuple):
    """The original's terms by stepgraph's, and the constants of each enumeration by the names of its members."""

    words: Mapping[str, str]
    constants: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, classes: Sequence[Class], enumerations: Sequence[Enumeration]) -> Wording:
        """The terms in the tables."""
        words = {one.native_name: one.name for one in classes if one.native is not None}
        words |= {one.native.__name__: one.name for one in enumerations}
        constants = {
            one.native.__name__: {member: f"{one.name}{suffix}" for suffix, member in one.pairs if not member.isdigit()}
            for one in enumerations
        }
        several = {f"{name}s": f"{here}s" for name, here in words.items()}
        return cls({**_labels(classes), **_selectors(classes), **several, **words}, constants)

    def message(self, error: StepgraphError, call: str = "") -> str:
        """The complete message of an error raised by `call`."""
        where = call if call and _CALL.fullmatch(error.where) else error.where
        facts = {name: str(value) for name, value in error.facts.items()}
        chosen = self._chosen(" ".join([error.problem, error.fix or "", *facts.values()]))

        def reword(text: str) -> str:
            return self._translated(text, chosen)

        facts = {name: reword(value) for name, value in facts.items()}
        return str(StepgraphError(reword(where), reword(error.problem), fix=error.fix and reword(error.fix), **facts))

    def _translated(self, text: str, chosen: Mapping[str, str]) -> str:
        parts = _KEPT.split(text)
        parts[::2] = [self._reworded(part, chosen) for part in parts[::2]]
        return "".join(parts)

    def _reworded(self, text: str, chosen: Mapping[str, str]) -> str:
        for phrase, here in _PHRASES:
            text = phrase.sub(here, text)
        text = _MEMBER.sub(lambda found: self.constants.get(found[1], {}).get(found[2], found[0]), text)
        text = _CONSTANT.sub(lambda found: chosen.get(found[0], found[0]), text)
        return _WORD.sub(lambda found: self.words.get(found[0], found[0]), text)

    def _chosen(self, text: str) -> Mapping[str, str]:
        """The constants of the one enumeration that has every member the text names, if it is unique."""
        members = {name for names in self._named_by_members() for name in names}
        named = {word for part in _KEPT.split(text)[::2] for word in _CONSTANT.findall(part)} & members
        fitting = [names for names in self._named_by_members() if named <= names.keys()]
        return fitting[0] if named and len(fitting) == 1 else {}

    def _named_by_members(self) -> Iterator[Mapping[str, str]]:
        """All but those whose members are words of prose: CPU, GPU; CELU, GELU."""
        return (names for kind, names in self.constants.items() if kind not in ("DeviceType", "ActivationType"))


def _labels(classes: Iterable[Class]) -> dict[str, str]:
    """Properties, and arguments as selectors name them: `group_count` as `groupCount`."""
    found: dict[str, str] = {}
    for row in (row for table in classes for row in table.rows):
        pairs = dict(zip(row.takes, row.labels, strict=True))
        if row.kind.endswith("property"):
            pairs[row.native.removeprefix(".")] = row.selector
        for name, label in pairs.items():
            is_plain = label.lower() == name.replace("_", "").lower()
            if re.fullmatch(r"[a-z0-9]+(?:_[a-z0-9]+)+", name) and (is_plain or name not in found):
                found[name] = label
    return found


def _selectors(classes: Iterable[Class]) -> dict[str, str]:
    """Methods: of several selectors for one, the shortest."""
    found: dict[str, str] = {}
    for row in (row for table in classes for row in table.rows if row.kind.endswith("method")):
        named = re.fullmatch(r"(?:<class>)?\.([a-z]+(?:_[a-z]+)+)\(.*", row.native)
        if named and len(row.spelling) < len(found.get(named[1], row.spelling + "_")):
            found[named[1]] = row.spelling
    return found
