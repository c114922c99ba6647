"""Measured choices: what disturbs a measurement is noticed, measured again later, and kept in a file that survives."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepgraph.compiler.kernels import choose, choose_convolution, measure
from stepgraph.compiler.kernels.choices import CHOICES, TRIES, Choice, Choices, Question, other_files
from stepgraph.compiler.tuned import MANIFEST

QUESTION = Question("sum", ("a", "b"), ({"shape": [2], "strides": [1], "type": "torch.float32"},), 1)
CHOICE = Choice(QUESTION, "b", {"a": 2.0, "b": 1.0}, {"a": 0.0, "b": 0.1}, False, 1, "2026-11-17T00:00:00+00:00")


class Machine:
    """A clock that implementations advance: by their own time, and by what something else takes from them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = self.running = 0.0
        monkeypatch.setattr(measure, "elapsed", lambda: self.time)
        monkeypatch.setattr(measure, "ran", lambda: self.running)

    def takes(self, own: float, lost: Sequence[float] = (0.0,)) -> Callable[..., torch.Tensor]:
        """An implementation that loses these seconds in its first runs, and the last of them in all others."""
        left = list(lost)

        def run(*_: object) -> torch.Tensor:
            gone = left.pop(0) if len(left) > 1 else left[0]
            self.running += own
            self.time += own + gone
            return torch.ones(2)

        return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def file(nothing_fuses: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of choices, in a folder of its own."""
    CHOICES.forget()
    path = tmp_path / "stepgraph" / "kernels-x.jsonl"
    monkeypatch.setattr(Choices, "file", path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield path
    CHOICES.forget()


def stored() -> list[Choice]:
    """What another process would find."""
    return Choices().stored()


# Disturbance


@pytest.mark.parametrize(
    ("reference", "other", "chosen", "disturbed"),
    [
        ((1.0, [0.0]), (0.5, [0.0]), "b", False),  # quiet
        ((1.0, [0.0]), (0.95, [0.0]), "a", False),  # too small a gain
        ((1.0, [0.0]), (0.5, [2.0]), "a", True),  # the faster one was kept from running
        ((1.0, [2.0]), (0.95, [0.0]), "b", True),  # the reference was
        ((1.0, [2.0]), (0.5, [0.0]), "b", False),  # it was, but would have lost anyway
        ((1.0, [0.0]), (0.5, [0.02]), "b", False),  # everything loses a little
        ((0.001, [0.0]), (0.0005, [0.002, 0.002, 0.0]), "b", False),  # the fastest run counts
    ],
    ids=str,
)
def test_a_choice_that_lost_time_decides_is_disturbed(
    machine: Machine, reference: tuple, other: tuple, chosen: str, disturbed: bool
) -> None:
    found = measure.measure({"a": machine.takes(*reference), "b": machine.takes(*other)}, ())
    assert (found.chosen, found.disturbed) == (chosen, disturbed)


@pytest.mark.parametrize(("times", "disturbed"), [([3, 3, 3], False), ([3, 3.6, 4], False), ([3, 4.5, 5], True)])
def test_runs_that_differ_without_lost_time_are_disturbance_too(times: list[float], disturbed: bool) -> None:
    # Something else that uses the caches or the memory takes no time from the thread.
    runs = {"a": [measure.Run(2.5, 0.0)] * 3, "b": [measure.Run(one, 0.0) for one in times]}
    found = measure.Measurement.of(runs, 0.9)
    assert (found.chosen, found.disturbed) == ("a", disturbed)
    assert found.seconds == {"a": 2.5, "b": 3} and found.spread["b"] == times[1] / 3 - 1


def test_a_disturbed_measurement_goes_on_for_a_while(machine: Machine) -> None:
    lost = [0.01] * 7 + [0.0]
    found = measure.measure({"a": machine.takes(0.001), "b": machine.takes(0.0005, lost)}, ())
    assert (found.chosen, found.disturbed) == ("b", False) and machine.time > 0.07
    machine.time = 0.0
    found = measure.measure({"a": machine.takes(0.001), "b": machine.takes(0.0005, [0.01])}, ())
    assert (found.chosen, found.disturbed) == ("a", True) and machine.time < 2 * measure.PATIENCE


def test_a_quiet_measurement_takes_no_longer_than_necessary(machine: Machine) -> None:
    measure.measure({"a": machine.takes(0.001), "b": machine.takes(0.0005)}, ())
    assert machine.time == pytest.approx((1 + measure.ROUNDS) * 0.0015)


# Later processes


def test_a_disturbed_choice_is_measured_again_by_the_next_process_and_then_stays(machine: Machine, file: Path) -> None:
    calls: list[int] = []

    def ask(lost: float) -> str:
        implementations = {"a": machine.takes(1.0), "b": machine.takes(0.5, [lost])}
        before = machine.time
        found = measure.fastest("sum", implementations, ())
        calls.append(machine.time > before)
        return found

    assert [ask(3.0), ask(0.0)] == ["a", "a"] and calls == [True, False], "one process computes the same throughout"
    CHOICES.forget()
    assert ask(0.0) == "b" and calls[-1], "the next one measures again"
    CHOICES.forget()
    assert ask(3.0) == "b" and not calls[-1], "what was not disturbed stays"


def test_after_some_tries_a_disturbed_choice_is_accepted(machine: Machine, file: Path) -> None:
    for number in range(TRIES + 2):
        CHOICES.forget()
        before = machine.time
        implementations = {"a": machine.takes(1.0), "b": machine.takes(0.5, [3.0 if number else 0.45])}
        assert measure.fastest("sum", implementations, ()) == "a"
        assert (machine.time > before) == (number < TRIES)
    (found,) = stored()
    assert found.tries == TRIES and found.disturbed and found.settled
    assert found.seconds == {"a": 1.0, "b": 0.95}, "the fastest of all tries"


def test_a_disturbed_measurement_does_not_replace_another(machine: Machine, file: Path) -> None:
    CHOICES.keep(CHOICE)
    implementations = {"a": machine.takes(1.0), "b": machine.takes(0.5, [3.0])}
    assert measure.chosen_anew(QUESTION, implementations, ()) == CHOICE and stored() == [CHOICE]
    implementations = {"a": machine.takes(0.5), "b": machine.takes(1.0)}
    assert measure.chosen_anew(QUESTION, implementations, ()).chosen == "a" and stored()[0].chosen == "a"


# The file


def test_a_line_says_everything_about_a_choice(machine: Machine, file: Path) -> None:
    array = torch.empty_strided((2, 3), (1, 2))
    measure.fastest("sum", {"a": machine.takes(1.0), "b": machine.takes(0.5)}, (array, [1, 2], None), gain=0.8)
    (line,) = [json.loads(line) for line in file.read_text().split("\n") if line]
    assert line["format"] == 2 and line["torch"] == torch.__version__ and line["processor"]
    assert line["operator"] == "sum" and line["threads"] == torch.get_num_threads()
    assert line["arguments"] == [{"shape": [2, 3], "strides": [1, 2], "type": "torch.float32"}, [1, 2], None]
    assert line["implementations"] == ["a", "b"] and line["chosen"] == "b" and line["rules"] == {"gain": 0.8}
    assert line["seconds"] == {"a": 1.0, "b": 0.5} and line["spread"] == {"a": 0.0, "b": 0.0}
    assert not line["disturbed"] and line["tries"] == 1 and line["measured"].endswith("+00:00")
    (found,) = stored()
    assert found.question.key == next(iter(CHOICES._known))


DAMAGES = {
    "truncated": lambda line: line[:-9],
    "other format": lambda line: line.replace('"format": 2', '"format": 3'),
    "other PyTorch": lambda line: line.replace(torch.__version__, "1.0"),
    "other processor": lambda line: line.replace('"processor": "', '"processor": "x'),
    "not an object": lambda line: "[1, 2]",
    "nested": lambda line: "[" * 100_000,
    "binary": lambda line: "\udcff\udc80",
    "unknown choice": lambda line: line.replace('"chosen": "b"', '"chosen": "c"'),
    "no times": lambda line: line.replace('"seconds"', '"minutes"'),
    "text for a number": lambda line: line.replace('"b": 1.0', '"b": "1.0"'),
    "not finite": lambda line: line.replace('"b": 1.0', '"b": NaN'),
    "no tries": lambda line: line.replace('"tries": 1', '"tries": 0'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_costs_only_its_choice(file: Path, damage: str) -> None:
    CHOICES.keep(CHOICE)
    line = file.read_text()
    other = replace(CHOICE, question=replace(QUESTION, operator="other"))
    for text in (DAMAGES[damage](line).rstrip("\n"), line.replace("sum", "first") + DAMAGES[damage](line)):
        file.write_text(text, errors="surrogateescape")
        CHOICES.forget()
        assert CHOICES.standing(QUESTION) is None and CHOICES.damaged() == 1
        CHOICES.keep(other)
        assert other in stored(), "what follows an incomplete line is readable"


def test_the_last_of_several_lines_counts(file: Path) -> None:
    for chosen in "aba":
        CHOICES.keep(replace(CHOICE, chosen=chosen))
    assert [one.chosen for one in stored()] == ["a"] and file.read_text().count('"sum"') == 3
    assert CHOICES.drop(lambda one: False) == 0 and file.read_text().count('"sum"') == 1


def test_files_of_the_first_format_are_left_alone(file: Path) -> None:
    old = file.with_name("kernels-aarch64-torch-2.12.0.json")
    old.parent.mkdir()
    old.write_text('{"[\\"sum\\"]": "b"}')
    CHOICES.keep(CHOICE)
    assert stored() == [CHOICE] and list(other_files()) == [old]


def test_a_file_that_is_too_large_does_not_grow(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CHOICES.keep(CHOICE)
    size = file.stat().st_size
    monkeypatch.setattr("stepgraph.compiler.kernels.choices.LARGEST", size)
    CHOICES.keep(replace(CHOICE, question=replace(QUESTION, operator="other")))
    assert file.stat().st_size == size


def _write(name: str) -> None:
    for number in range(200):
        CHOICES.keep(replace(CHOICE, question=replace(QUESTION, operator=f"{name} {number}")))


@pytest.mark.skipif(os.name == "nt", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork")  # nothing but files is used in these processes
def test_processes_that_write_at_once_lose_nothing(file: Path) -> None:
    context = multiprocessing.get_context("fork")
    writing = [context.Process(target=_write, args=(name,)) for name in "xyz"]
    for one in writing:
        one.start()
    for one in writing:
        one.join()
    assert len(stored()) == 600 and CHOICES.damaged() == 0


# All of it


def test_every_question_of_a_step_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_convolution, "has_nnpack", lambda: True)
    offered = [one for row in MANIFEST for one in row.offers]
    asked = {
        "convolution": ("pytorch", "nnpack", "gemm"),
        "convolution, channels last": ("pytorch", "taps"),
        "convolution data": ("pytorch", "native", "flipped"),
        "convolution weights": ("pytorch", "gemm", "winograd"),
        "convolution weights, channels last": ("pytorch", "taps", "winograd 4"),
        "aten.addmm.default": ("pytorch", "convolution"),
        "aten.mm.default": ("pytorch", "float32"),
        "aten.native_batch_norm.default": ("pytorch", "rows"),
        "cross entropy": ("pytorch", "gradient"),
        "product in bfloat16": ("float32", "bfloat16", "rounded"),
    }
    for operator, names in asked.items():
        found = choose.implementations(Question(operator, names, (), 1), offered)
        assert found is not None and tuple(found) == names and all(map(callable, found.values())), operator
    for operator in ("layout 08927422204a9a6a", "sum"):
        assert choose.implementations(Question(operator, ("pytorch",), (), 1), offered) is None
    assert choose.implementations(Question("cross entropy", ("pytorch", "gone"), (), 1), offered) is None


def test_without_nnpack_its_questions_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_convolution, "has_nnpack", lambda: False)
    for operator, names in (("convolution", ("pytorch", "nnpack")), ("convolution data", ("pytorch", "flipped"))):
        assert choose.implementations(Question(operator, names, (), 1), ()) is None
    assert choose.implementations(Question("convolution", ("pytorch", "gemm"), (), 1), ()) is not None


MEASURES = """
import torch
from stepgraph.compiler.kernels import choose, measure
from stepgraph.compiler.kernels.choices import Question

asked = choose.implementations(Question("convolution", ("pytorch", "nnpack"), (), 1), ())
images, weights = torch.empty(8, 4, 12, 12), torch.empty(4, 4, 3, 3)
print(*measure.measure(asked, (images, weights, None, [1, 1], [1, 1])).seconds)
"""


@pytest.mark.deep  # seconds, for another process
@pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="needs NNPACK")
def test_nnpack_can_be_measured_in_a_process_that_compiles_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", MEASURES], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["pytorch", "nnpack"]


def _busy() -> None:
    while True:
        pass


@pytest.mark.deep
def test_busy_processes_are_noticed() -> None:
    """On a machine with more busy processes than cores, long runs lose time, and a close choice is disturbed."""
    a, b = torch.ones(900, 900), torch.ones(930, 930)
    implementations = {"a": lambda: (a @ a)[:1, :1] * 0, "b": lambda: (b @ b)[:1, :1] * 0}
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_busy, daemon=True) for _ in range(4 * (os.cpu_count() or 1))]
    for one in others:
        one.start()
    try:
        time.sleep(2)
        assert any(measure.measure(implementations, ()).disturbed for _ in range(10))
    finally:
        for one in others:
            one.kill()
