"""Ctrl-C at moments drawn at random: work that is interrupted, and what must be true afterwards.

A moment is a number of places in Python code where CPython looks for signals: the beginning of a function, and the
return from a function written in C. Counting them makes a moment repeatable, which a timer does not, and reaches the
few microseconds in which something is half done as often as the long waits. Generators are left out: CPython does not
unwind one that a profiler interrupts as it unwinds one that a signal does.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch

import stepgraph as sg
from stepgraph.report.run import Run
from tests.checkpoint_runs import CPU, compiled, state

torch.set_num_threads(1)
BATCH, FEATURES = 6, 5

OURS = str(Path(sg.__file__).parent)
STEPS = 5
LAST = 150  # moments of our own code that are the end of some work
# Of which kind, and whether near the end, in turns.
MOMENTS = (("own", False), ("edge", False), ("own", True), ("edge", False), ("all", False))
MOST_SHOWN = 3


class Clock:
    """Counts moments by their kind, and interrupts this process at one of them.

    Kinds are `all`; `own`, in our code or in what it calls itself; `edge`, where a context manager begins or ends; and
    `own edge`, where one of our code does.
    """

    def __init__(self, kind: str = "", moment: int = 0) -> None:
        self.kind, self.moment = kind, moment
        self.counts = {"all": 0, "own": 0, "edge": 0, "own edge": 0}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "c_return" or (event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR):
            code, caller = frame.f_code, frame.f_back if event == "call" else None
            self._count("all")
            own = code.co_filename.startswith(OURS) or (caller and caller.f_code.co_filename.startswith(OURS))
            edge = event == "call" and code.co_name in ("__enter__", "__exit__")
            for kind, counts in (("own", own), ("edge", edge), ("own edge", own and edge)):
                if counts:
                    self._count(kind)

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1
        if self.kind == kind and self.counts[kind] == self.moment:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    def run(self, work: Callable[[], object]) -> KeyboardInterrupt | None:
        """Does some work; the interrupt that ended it, if one did."""
        try:
            sys.setprofile(self)
            work()
        except KeyboardInterrupt as interrupt:
            return interrupt
        finally:
            sys.setprofile(None)
        return None


class Trial(Protocol):
    """Something that is interrupted."""

    def prepare(self) -> None:
        """Goes back to the beginning."""

    def work(self) -> None:
        """What is interrupted."""

    def check(self) -> None:
        """Raises unless everything is as before the work or as after it, and goes on as if nothing had happened."""


def network(seed: int = 5, further: int = 0) -> sg.TrainingGraph:
    """A small network with statistics, random numbers and optimizer buffers; not compiled."""
    sg.set_seed(seed)
    x, y = sg.Tensor((BATCH, FEATURES), label="x"), sg.Tensor((BATCH, 1), label="y")
    graph = sg.Graph()
    h = graph.node(sg.FullyConnectedLayer.create(FEATURES, 4, label="first"), x)
    h = graph.node(sg.BatchNormalizationLayer.create(4, label="norm"), graph.reshape((BATCH, 4, 1, 1), h))
    h = graph.node(sg.DropoutLayer(0.3, label="drop"), graph.reshape((BATCH, 4), h))
    for _ in range(further):
        h = graph.node(sg.ActivationLayer.tanh(), h)
    graph.node(sg.FullyConnectedLayer.create(4, 1, label="last"), h)
    optimizer = sg.AdamOptimizer(learning_rate=0.01)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    return training


def batch(step: int, rows: int = BATCH) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    numbers = np.random.default_rng(step).standard_normal((rows, FEATURES + 1)).astype(np.float32)
    return {"x": numbers[:, :-1]}, {"y": numbers[:, -1:]}


def train(training: sg.TrainingGraph, start: int, stop: int) -> list[float]:
    return [training.execute(*batch(step)).loss for step in range(start, stop)]


def mark(training: sg.TrainingGraph) -> dict[str, Any]:
    """Everything a phase may change."""
    progress = training.progress()
    gradients = [array.numpy().tobytes() for array in progress.gradients.values()]
    return {**state(training), "stream": progress.stream, "gradients": gradients}


def steps_of(training: sg.TrainingGraph) -> int:
    assert training.optimizer is not None
    return training.optimizer.time_step - 1


class Steps:
    """A loop over whole steps."""

    def __init__(self, folder: Path) -> None:
        self.training = compiled(network())
        self.start, self.marks = self.training.save(folder / "start"), [mark(self.training)]
        for step in range(STEPS):
            train(self.training, step, step + 1)
            self.marks.append(mark(self.training))

    def prepare(self) -> None:
        self.training.restore(self.start)

    def work(self) -> None:
        train(self.training, steps_of(self.training), STEPS)

    def check(self) -> None:
        assert mark(self.training) == self.marks[steps_of(self.training)], "the state is not that of its step"
        self.work()
        assert mark(self.training) == self.marks[STEPS], "it did not go on as if nothing had happened"


class Phases:
    """A loop over forward pass, gradient pass and update."""

    def __init__(self, folder: Path) -> None:
        self.training, self.done = compiled(network()), 0
        self.start, self.marks = self.training.save(folder / "start"), [mark(self.training)]
        for phase in range(3 * STEPS):
            self.phase(phase)
            self.marks.append(mark(self.training))

    def phase(self, number: int) -> None:
        training = self.training
        if number % 3 == 0:
            inputs, labels = batch(number // 3)
            training.bind_and_write_data(inputs | labels, training.inputs | training.loss_labels, CPU)
            training.execute_forward()
        elif number % 3 == 1:
            training.execute_gradient()
        else:
            training.execute_optimizer_update()

    def prepare(self) -> None:
        self.training.restore(self.start)
        self.done = 0

    def work(self) -> None:
        for phase in range(self.done, 3 * STEPS):
            self.phase(phase)
            self.done = phase + 1

    def check(self) -> None:
        """The phase that was interrupted has happened or not: its results tell."""
        found = mark(self.training)
        here = [number for number in (self.done, self.done + 1) if self.marks[number : number + 1] == [found]]
        assert here, f"the state is neither that after {self.done} phases nor that of the next one"
        self.done = here[-1]
        self.work()
        assert mark(self.training) == self.marks[-1], "it did not go on as if nothing had happened"


class Fit:
    """A recorded run with short batches, accumulated gradients and a checkpoint after every second update."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.training = folder, 0, compiled(network())
        self.start = self.training.save(folder / "start")
        self.data = batch(0, 3 * BATCH - 2)
        self.prepare()
        self.work()
        self.after, self.steps = mark(self.training), Run(self.run).steps

    def prepare(self) -> None:
        if self.number:
            shutil.rmtree(self.run)
        self.number += 1
        self.run = self.folder / f"run {self.number}"
        self.training.restore(self.start)

    def work(self, resume: bool = False) -> None:
        settings: dict[str, Any] = {"epochs": 3, "accumulate": 2, "save_every": 2, "progress": "quiet"}
        if sg.fit(self.training, self.data, run=self.run, resume=resume, **settings).stopped == "interrupted":
            raise KeyboardInterrupt

    def check(self) -> None:
        self.work(resume=True)
        assert mark(self.training) == self.after, "the resumed run learned something else"
        assert Run(self.run).steps == self.steps, "the record does not hold each step once"


class Save:
    """A checkpoint that is new, replaces another one, or is the next of a series: one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder / "saved", -1
        self.training, self.other = compiled(network()), compiled(network(seed=6))
        train(self.training, 0, 1)
        self.start = self.training.save(folder / "start")
        self.marks = {"old": mark(self.training)}
        train(self.training, 1, 2)
        self.marks["new"] = mark(self.training)
        self.later = self.training.save(folder / "later")

    def prepare(self) -> None:
        self.number += 1
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.number % 3:
            self.training.restore(self.start)
            self.training.save(self.folder, keep=self.keep, notes={"which": "old"})
        self.training.restore(self.later)

    @property
    def keep(self) -> int | None:
        return 1 if self.number % 3 == 2 else None

    def work(self) -> None:
        self.training.save(self.folder, keep=self.keep, notes={"which": "new"})

    def check(self) -> None:
        assert mark(self.training) == self.marks["new"], "saving changed the graph"
        if self.number % 3 or (self.folder / "graph.json").exists():
            which = self.other.restore(self.folder).notes["which"]
            assert mark(self.other) == self.marks[which], f"the {which} checkpoint is not whole"
        self.work()
        assert self.other.restore(self.folder).notes == {"which": "new"}
        folder = sg.latest(self.folder) or self.folder
        assert len(list(folder.iterdir())) == 2, "something was left behind"


class Restore:
    """A checkpoint taken over into a graph that has learned something else."""

    def __init__(self, folder: Path) -> None:
        self.training, self.marks, self.afterwards = compiled(network()), [], []
        self.saved = []
        for number in range(2):
            train(self.training, 10 * number, 10 * number + 2)
            self.saved.append(self.training.save(folder / f"{number}"))
            self.marks.append(mark(self.training))
        for saved in self.saved:
            self.training.restore(saved)
            self.afterwards.append(train(self.training, 30, 32))

    def prepare(self) -> None:
        self.training.restore(self.saved[0])

    def work(self) -> None:
        self.training.restore(self.saved[1])

    def check(self) -> None:
        found = mark(self.training)
        assert found in self.marks, "the checkpoint was taken over in part"
        assert train(self.training, 30, 32) == self.afterwards[self.marks.index(found)]


class Load:
    """A graph rebuilt from a checkpoint and compiled."""

    def __init__(self, folder: Path) -> None:
        training = compiled(network())
        train(training, 0, 2)
        self.path = training.save(folder / "saved")
        self.losses, self.after = train(training, 2, 4), mark(training)
        self.loaded: sg.TrainingGraph | None = None

    def prepare(self) -> None:
        self.loaded = None

    def work(self) -> None:
        self.loaded = sg.load(self.path, CPU)

    def check(self) -> None:
        if self.loaded is None:
            self.work()
        assert self.loaded is not None
        assert train(self.loaded, 2, 4) == self.losses and mark(self.loaded) == self.after


class Wire:
    """A graph being built: each node infers its shapes."""

    def __init__(self, _: Path) -> None:
        self.before = state(network())

    def prepare(self) -> None:
        """Nothing is there yet."""

    def work(self) -> None:
        network()

    def check(self) -> None:
        assert state(network()) == self.before, "the next graph is another one"


class Compile:
    """The first compilation of a graph."""

    def __init__(self, _: Path) -> None:
        self.prepare()
        self.work()
        self.losses, self.after = train(self.training, 0, 2), mark(self.training)

    def prepare(self) -> None:
        self.training = network()  # sets the seed

    def work(self) -> None:
        compiled(self.training)

    def check(self) -> None:
        if self.training.device is None:
            self.work()
        assert train(self.training, 0, 2) == self.losses, "the losses are others"
        assert mark(self.training) == self.after


class CompileAgain:
    """A compilation of a graph that has learned something, with another option."""

    def __init__(self, folder: Path) -> None:
        self.training, self.checks = compiled(network()), False
        train(self.training, 0, 2)
        self.start, self.before = self.training.save(folder / "start"), mark(self.training)
        self.losses, self.after = train(self.training, 2, 4), mark(self.training)

    def prepare(self) -> None:
        self.training.restore(self.start)
        self.checks = not self.checks

    def work(self) -> None:
        options = sg.GraphCompilationOptions.DETERMINISTIC
        self.training.compile(CPU, options | sg.GraphCompilationOptions.CHECK_NUMERICS if self.checks else options)

    def check(self) -> None:
        assert mark(self.training) == self.before, "compiling changed what was learned"
        assert train(self.training, 2, 4) == self.losses, "the losses are others"
        assert mark(self.training) == self.after


class Outputs:
    """An output declared on a compiled graph, whose executables are made anew."""

    def __init__(self, folder: Path) -> None:
        self.training, self.number = compiled(network(further=30)), 0
        self.start, self.before = self.training.save(folder / "start"), mark(self.training)
        self.losses = train(self.training, 0, 2)

    def prepare(self) -> None:
        self.number += 1
        self.training.restore(self.start)
        self.tensor = self.training.nodes[self.number].results[0]  # another one that was dropped so far

    def work(self) -> None:
        self.training.add_outputs({f"{self.number}": self.tensor})

    def check(self) -> None:
        assert mark(self.training) == self.before
        if f"{self.number}" not in self.training.outputs:
            self.work()
        assert train(self.training, 0, 2) == self.losses and np.isfinite(self.tensor.numpy()).all()


class BatchSize:
    """The first call with a batch size, beside a graph that is left alone."""

    def __init__(self, folder: Path) -> None:
        self.training, self.other, self.size = compiled(network()), compiled(network()), BATCH
        self.start, self.before = self.training.save(folder / "start"), mark(self.training)

    def prepare(self) -> None:
        self.size += 1
        for training in (self.training, self.other):
            training.restore(self.start)

    def step(self, training: sg.TrainingGraph) -> None:
        training.execute(*batch(0, self.size), batch_size=self.size)

    def work(self) -> None:
        self.step(self.training)

    def check(self) -> None:
        if steps_of(self.training) == 0:
            assert mark(self.training) == self.before, "a step that did not happen left something"
            self.work()
        self.step(self.other)
        assert mark(self.training) == mark(self.other), "the step is not that of a graph that was left alone"


KINDS: dict[str, Callable[[Path], Trial]] = {
    "steps": Steps,
    "phases": Phases,
    "fit": Fit,
    "save": Save,
    "restore": Restore,
    "wire": Wire,
    "load": Load,
    "compile": Compile,
    "compile again": CompileAgain,
    "outputs": Outputs,
    "batch size": BatchSize,
}


def surroundings() -> dict[str, object]:
    """What a program finds set in its process, and may not find changed."""
    return {
        "handler": signal.getsignal(signal.SIGINT),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "type": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "a sum": torch.ones(2).sum().item(),
    }


@dataclass
class Counts:
    """What a number of interrupts did."""

    kind: str
    seed: int
    tried: int = 0
    came: int = 0
    wrong: list[str] = field(default_factory=list)


def place(error: BaseException | None) -> str:
    """Where an interrupt came: the last line of our own code, and the last one of all."""
    frames = traceback.extract_tb(None if error is None else error.__traceback__)
    frames = [one for one in frames if one.filename != __file__]
    own = [one for one in frames if one.filename.startswith(OURS)]
    return " in ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in (*frames[-1:], *own[-1:]))


def rehearsed(trial: Trial) -> Clock:
    """The moments of the work when nobody interrupts it."""
    trial.prepare()
    clock = Clock()
    assert clock.run(trial.work) is None
    trial.check()
    return clock


def drawn(counts: dict[str, int], dice: random.Random, times: int | None) -> Iterator[tuple[str, int]]:
    """Moments: so many at random, or with None every one where a context manager of our code begins or ends.

    At random: in our own code, near its end, where new things take the places of old ones, anywhere in Python code, and
    where any context manager begins or ends, in turns.
    """
    if times is None:
        yield from (("own edge", moment) for moment in range(1, counts["own edge"] + 1))
        return
    for number in range(times):
        kind, at_the_end = MOMENTS[number % len(MOMENTS)]
        yield kind, dice.randint(max(1, counts[kind] - LAST) if at_the_end else 1, counts[kind])


def interrupt(kind: str, seed: int, times: int | None, folder: Path) -> Counts:
    """Interrupts one kind of work at so many moments, or with None at every edge of our own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    counts, dice, before = Counts(kind, seed), random.Random(f"{kind} {seed}"), surroundings()
    trial = KINDS[kind](folder)
    for of_kind, moment in drawn(rehearsed(trial).counts, dice, times):
        clock = Clock(of_kind, moment)
        trial.prepare()
        came = clock.run(trial.work)
        counts.tried, counts.came = counts.tried + 1, counts.came + (came is not None)
        try:
            for check in (lambda: None, trial.check):
                check()
                assert surroundings() == before, f"the surroundings were {before}, they are {surroundings()}"
        except Exception as error:
            where, told = place(came), f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
            counts.wrong.append(f"{kind}, seed {seed}, {of_kind} {moment} ({where or 'held back'}): {told}")
            if len(counts.wrong) == MOST_SHOWN:
                break
    return counts


def interrupt_and_tell(kind: str, seed: int, times: int | None, folder: Path, told: Path) -> None:
    """The same in a process of its own, which writes down what happened."""
    told.write_text(json.dumps(asdict(interrupt(kind, seed, times, folder))))
