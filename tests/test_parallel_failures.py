"""Ranks that are stopped, killed, hang or do something else: what the others do, and what can be read afterwards."""

import io
import itertools
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.checkpoint import files
from stepgraph.cli import machine
from stepgraph.cli.main import main
from stepgraph.report import page
from stepgraph.report.run import Run
from stepgraph.runtime.heartbeat import Place
from stepgraph.runtime.world import joined, leave, own_gpu, unused_gpus
from stepgraph.system.interrupts import StopSignals
from tests.forked import forked
from tests.parallel_runs import batch, compiled, fitted, mlp, new, rows, together

DEEP = pytest.mark.deep
POSIX = pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")


# ----------------------------------------------------------------------------------------------------------- SIGTERM


class Signalled(sg.Callback):
    """Gets a signal in a step, on one rank."""

    def __init__(self, step: int, rank: str = "0") -> None:
        self.when, self.rank = step, rank

    def step(self, moment: sg.Moment) -> None:
        if moment.step == self.when and os.environ.get("RANK", "0") == self.rank:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def own_handler() -> Iterator[list[int]]:
    """A program's own handler of SIGTERM, and the signals that it has got."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


@POSIX
def test_sigterm_ends_the_program_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    one = forked().Process(target=terminated, args=(str(tmp_path / "stopped"),))
    one.start()
    one.join(60)
    assert one.exitcode == 128 + signal.SIGTERM
    assert (tmp_path / "stopped" / "finally").read_text() == "default handler"
    assert fitted(str(tmp_path / "stopped"), 2) == fitted(str(tmp_path / "whole"), 2)


def terminated(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        fitted(folder, 9, callbacks=[Signalled(3)])
    finally:  # programs may clean up
        default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        Path(folder, "finally").write_text("default handler" if default else "another handler")


def test_a_programs_own_handler_gets_the_sigterm_when_all_is_saved(tmp_path: Path, own_handler: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[bool] = []

    class Watching(Signalled):
        def end(self, moment: sg.Moment) -> None:
            seen.append(bool(own_handler))
            assert moment.stopped == "terminated"

    found = fitted(str(tmp_path), 9, callbacks=[Watching(3)])
    assert (found["stopped"], len(found["steps"])) == ("terminated", 3)
    assert seen == [False] and own_handler == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
    assert sg.fit(compiled(mlp()), rows(44), epochs=0, batch_size=13, checkpoints=tmp_path, resume=True).steps


def test_the_second_sigterm_takes_effect_at_once(own_handler: list[int]) -> None:
    class Twice(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            signal.raise_signal(signal.SIGTERM)
            assert not own_handler
            signal.raise_signal(signal.SIGTERM)
            assert own_handler

    sg.fit(compiled(mlp()), rows(13), batch_size=13, callbacks=[Twice()], progress="quiet")


def test_an_error_after_sigterm_does_not_swallow_it(own_handler: list[int], caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Signalled):
        def step(self, moment: sg.Moment) -> None:
            super().step(moment)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        sg.fit(compiled(mlp()), rows(26), batch_size=13, callbacks=[Failing(1)], progress="quiet")
    assert own_handler and "training failed after SIGTERM: no" in caplog.text


def test_a_sigterm_that_a_program_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        history = sg.fit(compiled(mlp()), rows(26), batch_size=13, callbacks=[Signalled(1)], progress="quiet")
        assert history.stopped == "finished"
    finally:
        signal.signal(signal.SIGTERM, before)


@POSIX
def test_workers_that_are_forked_meanwhile_end_as_before() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with StopSignals() as signals:
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert signals.came is None
    finally:
        signal.signal(signal.SIGTERM, before)


def terminated_rank(folder: str) -> None:
    fitted(folder, 5, callbacks=[Signalled(3, rank="1")])


def test_all_ranks_end_when_one_gets_sigterm(tmp_path: Path) -> None:
    assert together(2, terminated_rank, str(tmp_path / "stopped")) == ["SystemExit: 143"] * 2
    assert fitted(str(tmp_path / "stopped"), 2) == fitted(str(tmp_path / "whole"), 2)


class SignalledWhileSaving(sg.Callback):
    """Gets a signal while the first checkpoint is written."""

    def start(self, moment: sg.Moment) -> None:
        written = os.fsync

        def fsync(*given: Any) -> None:
            os.fsync = written
            signal.raise_signal(signal.SIGTERM)
            written(*given)

        if os.environ["RANK"] == "0":
            os.fsync = fsync


def terminated_while_saving(folder: str) -> None:
    fitted(folder, 5, save_every=1, network="wide", callbacks=[SignalledWhileSaving()])


@DEEP
def test_sigterm_while_saving_ends_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    assert together(3, terminated_while_saving, str(tmp_path / "stopped")) == ["SystemExit: 143"] * 3
    settings: dict[str, Any] = {"save_every": 1, "network": "wide"}
    assert fitted(str(tmp_path / "stopped"), 2, **settings) == fitted(str(tmp_path / "whole"), 2, **settings)


# ------------------------------------------------------------------------------------------------- a rank that hangs


def hanging(timeout: float, before: str, how: str) -> None:
    """The second rank hangs before an exchange of the second step."""
    training = new("mlp")
    training.execute(*batch("mlp", 13, 0))
    joined(torch.device("cpu"), timeout)  # after what takes ranks unequally long on a busy machine
    start = Place.start

    def hang(place: Place, what: str) -> int:
        if what.startswith(before):
            if how == "stop":
                time.sleep(1.2)  # so that its last message is about this step
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        return start(place, what)

    if os.environ["RANK"] == "1":
        Place.start = hang  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        training.execute(*batch("mlp", 13, 0))
    finally:
        assert time.perf_counter() - began < timeout + 8  # the machine may be busy


def test_a_rank_that_hangs_is_named() -> None:
    for rank, answer in zip((0, 2), together(3, hanging, 1.5, "losses", "sleep", lost=[1]), strict=True):
        assert f"ExecutionError: rank {rank} of 3: rank 1 did not come to exchange losses" in answer
        assert "in step 2" in answer and "rank 1     it " in answer and "it runs" in answer, answer
        assert "test_parallel_failures.py" in answer and "its last exchange was" in answer
        waited = re.search(r"waited +(\d+\.\d) s", answer)
        assert waited is not None and 1.5 <= float(waited[1]) < 8  # the machine may be busy
        assert "Parallel(timeout=...)" in answer


@POSIX
def test_a_rank_that_does_not_answer_is_named_with_the_gradients_it_holds_up() -> None:
    (answer,) = together(2, hanging, 2.0, "bucket", "stop", lost=[1])
    assert "rank 1 did not come to exchange bucket 0 (gradients of 4 parameters, 'FullyConnected2" in answer
    assert "rank 1     it does not answer; when last heard, it runs" in answer and "in step 2" in answer


def waiting_on_a_gpu(replays: bool) -> list[str]:
    """As where an exchange raises no error: the thread has to notice. Later the second rank comes after all.

    If steps are replayed, exchanges are not counted.
    """
    training = new("mlp")
    training.execute(*batch("mlp", 13, 0))
    if replays:
        Place.start = lambda place, what: place.number  # type: ignore[method-assign]
    heart, logged = training.world.heartbeat, io.StringIO()
    assert heart is not None and heart.alarm is None
    heart.alarm = 1.0
    logging.getLogger("stepgraph").addHandler(logging.StreamHandler(logged))
    if os.environ["RANK"] == "1":
        time.sleep(4)
    training.execute(*batch("mlp", 13, 0))
    return logged.getvalue().splitlines()


@pytest.mark.parametrize("replays", [True, pytest.param(False, marks=DEEP)])
def test_a_rank_that_others_wait_for_on_a_gpu_is_named(replays: bool) -> None:
    first, second = together(2, waiting_on_a_gpu, replays)
    assert len(first) == 1 and "rank 0 of 2: rank 1 did not come to exchange" in first[0], first
    assert "in step 2: it runs" in first[0] and second == []


def ending() -> None:
    training = new("mlp")
    training.execute(*batch("mlp", 13, 0))
    if os.environ["RANK"] == "1":
        return
    training.execute(*batch("mlp", 13, 0))


def test_a_rank_that_has_ended_is_named() -> None:
    first, second = together(2, ending)
    assert "rank 1 did not come" in first and "its program has ended after step 1" in first and second is None


# ------------------------------------------------------------------------------------- killed, and started again


Moments = list[tuple[int, str, float]]  # which rank, and how many seconds or operations on files after its start


class Killed(sg.Callback):
    """Kills this process at a moment."""

    def __init__(self, how: str, when: float) -> None:
        self.how, self.when, self.count = how, when, itertools.count()

    def start(self, moment: sg.Moment) -> None:
        if self.how == "seconds":
            threading.Timer(self.when, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return
        os.fsync, files.save_file = self.deadly(os.fsync), self.deadly(files.save_file)
        for name in ("mkdir", "replace", "unlink"):
            setattr(Path, name, self.deadly(getattr(Path, name)))

    def deadly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **settings: Any) -> Any:
            if next(self.count) == self.when:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **settings)

        return call


def killed(folder: str, epochs: int, moments: Moments) -> tuple[int, dict[str, Any]]:
    """Trains to the end; one rank of each start is killed."""
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mine = [one for one in moments[restarts : restarts + 1] if one[0] == int(os.environ["RANK"])]
    found = fitted(folder, epochs, save_every=1, callbacks=[Killed(how, when) for _, how, when in mine])
    leave()
    return restarts, found


def restarting(folder: str, epochs: int, moments: Moments, back: Any) -> None:
    """What `torchrun --standalone --nproc-per-node=2 --max-restarts=…` does, for a function."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["OMP_NUM_THREADS"] = "1"
    agent: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "test"}
    restarts = {"max_restarts": len(moments), "monitor_interval": 0.05}
    config = LaunchConfig(1, 1, 2, start_method="fork", **agent, **restarts)
    back.send(elastic_launch(config, killed)(folder, epochs, moments))


def survived(folder: Path, epochs: int, moments: Moments) -> int:
    """Whether a job that was killed ends like one that was not; returns how often it was."""
    context = forked()
    ours, theirs = context.Pipe(duplex=False)
    one = context.Process(target=restarting, args=(str(folder / "killed"), epochs, moments, theirs))
    one.start()
    theirs.close()
    found = ours.recv()
    one.join(30)
    restarts, expected = found[0][0], fitted(str(folder / "whole"), epochs)
    assert found == {0: (restarts, expected), 1: (restarts, expected)}
    return restarts


@POSIX
def test_killed_while_saving_under_torchrun(tmp_path: Path) -> None:
    assert survived(tmp_path, 2, [(0, "operations", 17)]) == 1


@DEEP
@POSIX
def test_killed_at_random_moments_under_torchrun(tmp_path: Path) -> None:
    dice, moments = np.random.default_rng(16), []
    for _ in range(8):
        moments.append((int(dice.integers(2)), "seconds", float(dice.uniform(0, 1))))
        moments.append((0, "operations", float(dice.integers(40))))
    count = survived(tmp_path, 60, moments)
    print(f"killed {count} times, at {moments[:count]}")
    assert count >= 10


# --------------------------------------------------------------------------------------------- ranks that differ


def differing() -> dict[str, str]:
    """What is said when the second rank differs in one thing; none of it leaves a compiled graph behind."""
    other, found = os.environ["RANK"] == "1", {}

    def attempt(name: str, width: int = 8, rate: float = 0.1, activation: str = "tanh", **settings: Any) -> None:
        average = settings.pop("average", None)
        x, y, graph = sg.Tensor((sg.BATCH, 6)), sg.Tensor((sg.BATCH, 3)), sg.Graph()
        graph.dense(getattr(graph, activation)(graph.dense(x, width)), 3)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(rate), average=average)
        training.add_inputs({"x": x}, {"y": y})
        try:
            compiled(training, **settings)
        except sg.StateError as error:
            assert training.session is None
            found[name] = str(error)

    attempt("shapes", width=9 if other else 8)
    attempt("layers", activation="relu" if other else "tanh")
    attempt("optimizer", rate=0.2 if other else 0.1)
    attempt("average", average=0.5 if other else 0.9)
    attempt("shards", shards=4 if other else 8)
    attempt("numerics", check_numerics=other)
    attempt("precision", compute_type="bfloat16" if other else None)
    version = sg.__version__
    sys.modules["stepgraph"].__version__ = "0.0.1" if other else version  # type: ignore[attr-defined]
    attempt("version")
    sys.modules["stepgraph"].__version__ = version  # type: ignore[attr-defined]
    machine, platform.machine = platform.machine, lambda: "riscv64" if other else "aarch64"
    attempt("processor")
    platform.machine = machine
    attempt("nothing")
    x, y, graph = sg.Tensor((16, 3, 8, 8)), sg.Tensor((16,), "int64"), sg.Graph()  # of a known size: kernels are chosen
    graph.dense(graph.reshape((16, -1), graph.relu(graph.convolution(x, 4, 3))), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    compiled(training)
    return found


def test_ranks_with_another_program_are_refused_with_both_digests() -> None:
    first, second = together(2, differing)
    assert first == second
    assert list(first) == [
        "shapes",
        "layers",
        "optimizer",
        "average",
        "shards",
        "numerics",
        "precision",
        "version",
        "processor",
    ]
    for text in first.values():
        assert "rank 1 has another program than rank 0" in text
        digests = [line.split()[-1] for line in text.splitlines() if line.lstrip().startswith("rank ")]
        assert len(digests) == len(set(digests)) == 2 and all(len(digest) == 16 for digest in digests)


def failing_to_compile() -> list[str]:
    """The second rank cannot compile, in several places; then all of them can."""
    found: list[str] = []
    for reason in ("layers", "shards", ""):
        training, other = mlp(), os.environ["RANK"] == "1"
        if other and reason == "layers":
            training = sg.TrainingGraph([sg.Graph()], None, sg.SGDOptimizer(0.1))
        try:
            compiled(training, shards=1 if other and reason == "shards" else 8)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return [*found, repr(training.execute(*batch("mlp", 13, 0)).loss)]


def test_a_rank_that_cannot_compile_keeps_no_other_waiting() -> None:
    began = time.perf_counter()
    first, second = together(2, failing_to_compile)
    assert time.perf_counter() - began < 60  # the timeout of an exchange
    told = "StateError: TrainingGraph.compile: rank 1 could not compile.\nFix: see the error of that rank."
    assert first[:2] == [told] * 2 and first[2:] == second[2:]
    assert "the graph has no layers" in second[0] and "1 shards cannot be divided among 2 ranks" in second[1]


def other_calls(folder: str) -> list[str]:
    rank, found = int(os.environ["RANK"]), []
    training = compiled(mlp())
    for settings in (
        {"epochs": 2 + rank},
        {"batch_size": 13 + rank},
        {"checkpoints": f"{folder}/{rank}", "resume": True},
    ):
        given: dict[str, Any] = {"batch_size": 13, "progress": "quiet", **settings}
        try:
            sg.fit(training, rows(26), **given)
        except sg.ArgumentError as error:
            found.append(str(error))
    return found


def test_ranks_that_call_fit_otherwise_are_refused(tmp_path: Path) -> None:
    """The third call finds a checkpoint on one rank only: its folder is on a disk that the other does not see."""
    sg.fit(compiled(mlp()), rows(26), batch_size=13, checkpoints=tmp_path / "1", progress="quiet")
    first, second = together(2, other_calls, str(tmp_path))
    assert [len(first), len(second)] == [3, 3]
    for rank, texts in enumerate((first, second)):
        assert "fit: rank 0 and rank 1 have different arguments: epochs." in texts[0]
        assert f"epochs on rank {rank}   {2 + rank}" in texts[0] and "batch_size" in texts[1]
        assert "different checkpoints: epoch, step." in texts[2] and "all ranks can read" in texts[2]


def test_what_cannot_be_divided_is_refused() -> None:
    """Passes by themselves, linked graphs, gradients from outside, and memory limits of fit."""
    training = new("mlp")
    for call in (lambda: training.execute_forward(8), training.execute_gradient, training.execute_optimizer_update):
        with pytest.raises(sg.StateError, match=r"compiled with parallel[\s\S]*Fix: call execute or fit"):
            call()
    with pytest.raises(sg.StepgraphError, match=r"link"):
        training.link([new("mlp")])
    with pytest.raises(sg.ArgumentError, match=r"memory_limit divides batches[\s\S]*more shards"):
        sg.fit(training, rows(13), batch_size=13, memory_limit="1 GiB")
    given = mlp()
    given.allocate_user_gradient(given.nodes[0].results[0])
    with pytest.raises(sg.StateError, match="takes a gradient from outside"):
        compiled(given)
    assert given.session is None


# ------------------------------------------------------------------------------------------------ reports and exits


def reported(folder: str) -> tuple[list[dict[str, Any]], str]:
    training, rank = new("mlp"), os.environ.get("RANK", "0")
    settings: dict[str, Any] = {"callbacks": [sg.CSVLog(f"{folder}/{rank}.csv")], "progress": "quiet"}
    history = sg.fit(training, rows(44), epochs=2, batch_size=13, run=folder, **settings)
    return history.ranks, str(history)


def test_the_report_has_a_line_per_rank(tmp_path: Path) -> None:
    (ranks, shown), (same, _) = together(2, reported, str(tmp_path))
    assert ranks == same and [one["rank"] for one in ranks] == [0, 1]
    on_gpus = str(sg.History(ranks=[{**one, "waiting": None} for one in ranks]))  # where it is not measured
    assert "waiting" not in on_gpus and f"rank 1: {ranks[1]['seconds'] * 1000:.1f} ms per update, " in on_gpus
    for one in ranks:
        assert 0 < one["seconds"] < 60 and 0 <= one["waiting"] <= 1 and one["memory"] > 10_000_000
        assert f"rank {one['rank']}: {one['seconds'] * 1000:.1f} ms per update" in shown
    run = Run(tmp_path)
    assert [one.name for one in tmp_path.glob("*.csv")] == ["0.csv"]  # logs are those of the first rank
    assert [one["memory"] for one in run.ranks] == [one["memory"] for one in ranks]
    assert page.data([run])["runs"][0]["ranks"] == run.ranks and "waiting for others" in page.page([run])
    assert reported(str(tmp_path / "alone"))[0] == Run(tmp_path / "alone").ranks == []


PROGRAM = """
import os
from pathlib import Path
from tests.parallel_runs import batch, new

training = new("mlp")
training.execute(*batch("mlp", 13, 0))
lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
addresses = {line[9]: line[1].split(":")[0] for line in lines}
for one in list(Path("/proc/self/fd").iterdir()):
    if one.is_symlink() and os.readlink(one).startswith("socket:["):
        print(addresses.get(os.readlink(one)[8:-1], "-"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_loopback_only_and_end_without_a_word(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    port = str(29600 + os.getpid() % 300)
    ranks = []
    for rank in ("0", "1"):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
        environment = {**os.environ, **places, "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([sys.executable, program], env=environment, cwd=root, **pipes))
    for one in ranks:
        out, complaints = one.communicate(timeout=120)
        assert (one.returncode, complaints) == (0, "")
        addresses = {line for line in out.split() if line != "-"}
        assert addresses and addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}, addresses


# ------------------------------------------------------------------------------------------------- several GPUs


GPUS = sg.Device(sg.DeviceType.GPU, tuple(torch.device("cuda", index) for index in (0, 1, 3)))


@pytest.mark.parametrize("world, is_parallel", [("1", False), ("1", True), ("3", False), ("3", True)])
def test_several_gpus_in_one_process_say_what_to_type(
    world: str, is_parallel: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["my train.py", "--epochs", "3"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", world)
    said = unused_gpus(GPUS, is_parallel)
    if world == "3" and is_parallel:
        assert said is None
        return
    assert said is not None and "the device has 3 GPUs, but a process uses one: this one trains on cuda:0" in said
    assert ("compile with parallel=stepgraph.Parallel(shards=3)" in said) is not is_parallel
    command = "torchrun --standalone --nproc-per-node=3 'my train.py' --epochs 3"
    assert said.endswith(command) is (world == "1")


def test_each_process_gets_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, index in enumerate((0, 1, 3)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert own_gpu(GPUS).torch_devices == (torch.device("cuda", index),)
    assert own_gpu(sg.Device.cpu()) == sg.Device.cpu() and unused_gpus(sg.Device.cpu(), False) is None


def test_devices_shows_what_torchrun_would_find(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_cores", lambda: 6)
    assert main(["devices"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"6 cores +torchrun --standalone --nproc-per-node=6 train.py", printed)
    assert re.search(r"started by torchrun +no: this process is on its own", printed)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["devices"]) == 0 and "RANK=2 WORLD_SIZE=4" in capsys.readouterr().out
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    several = machine.processes(GPUS.torch_devices)
    assert several["commands"]["cuda"] == "torchrun --standalone --nproc-per-node=3 train.py"
