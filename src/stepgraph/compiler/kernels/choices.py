"""The implementations chosen so far, in memory and in a file in the user's cache folder.

The file has one line of JSON per choice. A choice is appended in one write, so several processes can use the file at
once, and an incomplete line costs one choice. If a choice was made several times, its last line counts.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from stepgraph.errors import StorageError
from stepgraph.system.storage import append_regular, read_regular, replace_file

FORMAT = 2  # of a line; the first format was a single object that had only names
LARGEST = 2**26  # maximum size of the file of choices in bytes; one takes about 500
TRIES = 3  # processes that measure a choice again before a disturbed measurement is accepted


@dataclass(frozen=True)
class Question:
    """Which implementation is the fastest?

    Args:
        operator: the name of the operator.
        implementations: the names to choose from; the first is the reference.
        arguments: settings, and arrays as `{"shape": …, "strides": …, "type": …}`; values that JSON can hold.
        threads: how many threads PyTorch uses.
    """

    operator: str
    implementations: tuple[str, ...]
    arguments: tuple[Any, ...]
    threads: int

    @cached_property
    def key(self) -> str:
        """A text that equal questions share, whatever the order of their implementations."""
        return json.dumps([self.operator, sorted(self.implementations), self.arguments, self.threads])


@dataclass(frozen=True)
class Choice:
    """The answer to a question, and how it was found.

    Args:
        question: what was asked.
        chosen: the name of the implementation.
        seconds: the fastest run of each implementation whose results were right.
        spread: by which share the second fastest run of each was slower.
        disturbed: whether something else that ran may have decided it.
        tries: how many processes have measured it without success, this one included, if it is disturbed.
        measured: when, as ISO 8601 in UTC.
        rules: how the implementations were compared, as `measure` takes them.
    """

    question: Question
    chosen: str
    seconds: Mapping[str, float]
    spread: Mapping[str, float]
    disturbed: bool
    tries: int
    measured: str
    rules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether later processes use it without measuring again."""
        return not self.disturbed or self.tries >= TRIES


class Choices:
    """What was found fastest. There is one for the process: a graph that is compiled again must compute the same."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()  # names of implementations, while their gain is measured

    @cached_property
    def file(self) -> Path | None:
        """The file with the choices for this processor and this PyTorch; None if the user has no cache folder."""
        folder = cache_folder()
        machine = "".join(c if c.isalnum() else "-" for c in f"{platform.machine()}-{processor()}")
        return None if folder is None else folder / f"kernels-{machine}-torch-{torch.__version__}.jsonl"

    @cached_property
    def _known(self) -> dict[str, Choice]:
        return {one.question.key: one for one in self.stored()}

    @cached_property
    def _own(self) -> set[str]:
        """The keys of what this process has measured."""
        return set()

    def standing(self, question: Question) -> Choice | None:
        """A previous choice that need not be measured again: it is settled, or was made in this process."""
        found = self._known.get(question.key)
        return found if found is not None and (found.settled or question.key in self._own) else None

    def earlier(self, question: Question) -> Choice | None:
        """A previous choice, settled or not."""
        return self._known.get(question.key)

    def keep(self, choice: Choice) -> None:
        """Keeps a choice, for later runs too if its file can be written."""
        self._known[choice.question.key] = choice
        self._own.add(choice.question.key)
        path = self.file
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The line may follow an incomplete one, which must not swallow it.
            append_regular(path, b"\n" + _as_line(choice), LARGEST, StorageError)
        except OSError:  # if the folder is not writable, the next run measures again
            return

    def stored(self) -> list[Choice]:
        """The choices in the file, as far as they are readable; none if the file is not."""
        found = filter(None, map(_from_line, self._lines()))
        return list({one.question.key: one for one in found}.values())

    def damaged(self) -> int:
        """How many lines of the file hold no choice for this processor and PyTorch."""
        return sum(_from_line(line) is None for line in self._lines())

    def _lines(self) -> list[bytes]:
        try:
            found = b"" if self.file is None else read_regular(self.file, LARGEST, StorageError)
        except OSError:  # missing, or of another kind: measure again
            return []
        return [line for line in found.split(b"\n") if line.strip()]

    def drop(self, drops: Callable[[Choice], bool]) -> int:
        """Removes choices from the file, and lines that are not readable; returns how many choices these were.

        Args:
            drops: which choices to remove.
        """
        every = self.stored()
        left = [one for one in every if not drops(one)]
        if self.file is not None and self.file.exists():
            replace_file(self.file, b"".join(map(_as_line, left)))
        self.forget()
        return len(every) - len(left)

    def forget(self) -> None:
        """Drops what is in memory, as a new process would."""
        for name in ("file", "_known", "_own"):
            self.__dict__.pop(name, None)


CHOICES = Choices()


def _as_line(choice: Choice) -> bytes:
    """A choice as a line of the file, with the machine it was made on."""
    values = asdict(choice)
    made_on = {"format": FORMAT, "torch": torch.__version__, "processor": processor()}
    return json.dumps(made_on | values.pop("question") | values, allow_nan=False).encode() + b"\n"


def _from_line(line: bytes) -> Choice | None:
    """The choice in a line of the file; None if the line is empty, damaged, of another format or machine."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    if (found.get("torch"), found.get("processor")) != (torch.__version__, processor()):
        return None
    return _checked(found)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, float) and math.isfinite(one) for one in value.values())


_VALID: dict[str, Callable[[Any], bool]] = {
    "operator": lambda value: isinstance(value, str),
    "implementations": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "arguments": lambda value: isinstance(value, list),
    "threads": _is_count,
    "chosen": lambda value: isinstance(value, str),
    "seconds": _are_numbers,
    "spread": _are_numbers,
    "disturbed": lambda value: isinstance(value, bool),
    "tries": _is_count,
    "measured": lambda value: isinstance(value, str),
    "rules": lambda value: isinstance(value, dict),
}


def _checked(found: Mapping[str, Any]) -> Choice | None:
    """The choice that these values describe; None if one of them is not valid."""
    if not all(name in found and is_valid(found[name]) for name, is_valid in _VALID.items()):
        return None
    if found["chosen"] not in found["implementations"] or not {*found["seconds"]} <= {*found["implementations"]}:
        return None
    names, arguments = tuple(found["implementations"]), tuple(found["arguments"])
    question = Question(found["operator"], names, arguments, found["threads"])
    rest = ("chosen", "seconds", "spread", "disturbed", "tries", "measured", "rules")
    return Choice(question, **{name: found[name] for name in rest})


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/stepgraph` or `~/.cache/stepgraph`; the XDG specification requires absolute paths."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "stepgraph"
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor the account defines it
        return None
    return home / ".cache" / "stepgraph" if home.is_absolute() else None


def other_files() -> Iterable[Path]:
    """Files of choices for other processors, other versions of PyTorch, or by an older stepgraph."""
    folder = cache_folder()
    try:
        found = [] if folder is None else sorted(folder.iterdir())
    except OSError:
        return []
    return [one for one in found if one.name.startswith("kernels-") and one != CHOICES.file and one.is_file()]


@cache
def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "CPU part", "Hardware")
    return next((line.split(":")[1].strip() for line in lines if line.startswith(wanted)), platform.processor())
