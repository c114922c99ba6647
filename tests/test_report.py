"""The record of a run: true, cheap, readable after a kill, and without influence on what is learned."""

import copy
import errno
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.fitting.data import Batch
from stepgraph.report import budget, facts, page, structure
from stepgraph.report.budget import Budget
from stepgraph.report.distribution import BINS, COUNTED, distribution
from stepgraph.report.probe import Probe
from stepgraph.report.record import FILE
from stepgraph.report.recorder import Recorder, look_after
from stepgraph.report.run import Run
from stepgraph.report.view import POINTS, view
from tests.forked import forked
from tests.junk import JUNK
from tests.report_runs import BATCH, NASTY, QUIET, ROWS, arrays, deep, network, slow_training, state, time_to_look


@pytest.fixture(scope="module", autouse=True)
def _generous() -> Iterator[None]:
    with time_to_look(1e9):
        yield


@pytest.fixture(scope="module")
def finished(_generous: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sg.History, Any]:
    """A run of 24 updates."""
    folder, training = tmp_path_factory.mktemp("runs") / "small", network()
    return folder, sg.fit(training, arrays(), validation=arrays(9, 1), epochs=4, run=folder, **QUIET), training


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in map(json.loads, (folder / FILE).read_text().splitlines()) if one.get("kind") == kind]


# What is learned


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [(sg.GraphCompilationOptions.NONE, 1), (sg.GraphCompilationOptions.DETERMINISTIC, 4)],
    ids=["chosen kernels", "accumulated"],
)
def test_recording_changes_nothing_about_training(tmp_path: Path, options: Any, accumulate: int) -> None:
    settings = {**QUIET, "epochs": 5, "accumulate": accumulate, "validation": arrays(9, 1)}
    recorded, plain = network(options), network(options)
    random = torch.get_rng_state()
    a = sg.fit(recorded, arrays(), run=tmp_path / "run", **settings)
    b = sg.fit(plain, arrays(), **settings)
    assert a.losses == b.losses and state(recorded) == state(plain)
    assert torch.equal(random, torch.get_rng_state())
    assert len(lines(tmp_path / "run", "distributions")) >= 2 and lines(tmp_path / "run", "profile")
    again = {**settings, "epochs": 2}
    assert sg.fit(recorded, arrays(), **again).losses == sg.fit(plain, arrays(), **again).losses  # nor afterwards


def test_a_probe_finds_the_gradients_that_the_next_update_uses() -> None:
    looked, mine = network(), network()
    x, y = arrays(BATCH)
    before = state(looked)
    found = Probe(looked).gradients(Batch(({"picture": x}, {"class": y}, {}), BATCH))
    assert state(looked) == before
    mine.bind_and_write_data({"picture": x}, mine.inputs, mine.device)
    mine.bind_and_write_data({"class": y}, mine.loss_labels, mine.device)
    mine.execute_forward()
    mine.execute_gradient()
    pairs = zip(looked.layers, mine.layers, strict=True)
    expected = {t: mine.gradient_data(b.parameters[n], b) for a, b in pairs for n, t in a.parameters.items()}
    assert {t for t, array in expected.items() if array is not None} == set(found)
    for tensor, array in found.items():
        assert np.array_equal(array.numpy(), expected[tensor])


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_recorded(tmp_path: Path) -> None:
    training = network()
    training.compile(sg.Device.gpu())
    history = sg.fit(training, arrays(), epochs=8, run=tmp_path / "run", **QUIET)
    run = Run(tmp_path / "run")
    assert [loss for _, loss, _ in run.steps] == pytest.approx(history.losses, rel=1e-5)
    assert len(run.profiles) == 2 and not run.missing
    assert run.distributions[0]["gradients"].keys() == run.distributions[0]["parameters"].keys()


# What is recorded


def test_the_record_says_what_happened(finished: tuple[Path, sg.History, Any]) -> None:
    folder, history, training = finished
    run = Run(folder)
    assert [step for step, _, _ in run.steps] == list(range(1, 25))
    assert [loss for _, loss, _ in run.steps] == pytest.approx(history.losses, rel=1e-5)
    assert run.epochs == history.epochs and run.status == "finished" and run.end["step"] == 24
    assert 0 < run.end["looking"] < run.end["at"]
    assert sum(rows for _, rows, _ in run.speeds) == 4 * ROWS and all(seconds > 0 for _, _, seconds in run.speeds)
    assert [one["step"] for one in run.distributions] == [1, 11, 21, 25]
    assert [(one["when"], one["step"]) for one in run.profiles] == [("early", 11), ("end", 24)]
    last = run.distributions[-1]["parameters"]["last.weights"]
    weights = training.layers[-2].parameters["weights"].numpy()
    assert last["count"] == weights.size == sum(last["bins"])
    assert last["rms"] == pytest.approx(np.sqrt(np.mean(weights.astype(np.float64) ** 2)), rel=1e-5)
    begin = run.begins[0]
    assert begin["total"] == 24 and not begin["resumed"] and begin["environment"]["torch"] == torch.__version__
    assert begin["settings"]["optimizer"].startswith("AdamOptimizer(learning_rate=0.01")


def test_the_profile_names_layers_in_all_phases(finished: tuple[Path, sg.History, Any]) -> None:
    run = Run(finished[0])
    rows = {(layer, phase): (seconds, size) for layer, phase, seconds, size in run.profiles[-1]["rows"]}
    assert {"forward", "gradient", "update"} == {phase for _, phase in rows}
    assert rows["last", "forward"][0] > 0 and rows["fixed", "forward"][1] >= 4 * BATCH * 4 * 6 * 6
    assert ("fixed", "gradient") not in rows  # frozen, and nothing before it learns


def test_memory_over_time_is_the_plan(finished: tuple[Path, sg.History, Any]) -> None:
    folder, _, training = finished
    memory, plan = Run(folder).memory, training.memory_plan
    totals = [sum(row[2:]) for row in memory["timeline"]]
    assert max(totals) == totals[memory["peak"]] == plan.intermediates
    assert sum(size for *_, size in memory["alive"]) == plan.intermediates
    assert [size for *_, size in plan.timeline] == totals and memory["plan"]["total"] == plan.total


def test_it_says_where_gradients_stop_and_why() -> None:
    x, index = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 3), "int64", label="index")
    graph = sg.Graph()
    a = graph.node(sg.FullyConnectedLayer.create(3, 3, label="frozen"), x, disable_update=True)
    b = graph.node(sg.FullyConnectedLayer.create(3, 3, label="cut"), a)
    graph.node(sg.FullyConnectedLayer.create(3, 3, label="free"), graph.gather(1, b, index))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x, "index": index}, {"y": sg.Tensor((4, 3))})
    training.stop_gradient([b])
    training.compile(sg.Device.cpu())
    found = structure.graph(training)
    why = {(layer, what): reason for layer, what, reason in found["gradients"]}
    assert "disable_update" in why["frozen", "frozen.weights"] and "nothing" in why["frozen", "its result"]
    assert "stop_gradient" in why["cut", "its result"] and not any(layer == "free" for layer, _ in why)
    assert found["drawing"].count('class="edge stopped"') >= 3


def test_looks_lie_further_and_further_apart() -> None:
    steps = [1]
    while steps[-1] < 100_000:
        steps.append(look_after(steps[-1]))
    assert steps[:6] == [1, 11, 21, 31, 46, 69] and len(steps) < 30


@pytest.mark.parametrize("by_magnitude", [False, True])
@pytest.mark.parametrize(
    "values",
    [[0.0], [1.0] * 7, [0.0, 0.0], [1e-30, 1.0, -1e30], [math.nan, 1.0, math.inf], [math.nan], [3e38, -3e38], [1e-44]],
)
def test_any_numbers_have_a_distribution(values: list[float], by_magnitude: bool) -> None:
    found = distribution(torch.tensor(values), by_magnitude)
    json.dumps(found, allow_nan=False)
    finite = [one for one in torch.tensor(values).tolist() if math.isfinite(one)]
    assert found["count"] == len(values) and found["not_finite"] == len(values) - len(finite)
    counted = [one for one in finite if one or not by_magnitude]
    if counted:
        assert len(found["bins"]) == BINS and sum(found["bins"]) == len(counted) and found["from"] < found["to"]
    else:
        assert "bins" not in found


def test_a_histogram_of_many_numbers_counts_some_from_everywhere() -> None:
    kernels = torch.arange(9.0).expand(160_000, 9).contiguous()  # ninefold: a stride of 9, 18 … would see one value
    found = distribution(kernels)
    assert found["count"] == kernels.numel() and found["zeros"] == 160_000 and found["mean"] == 4.0
    seen = [one for one in found["bins"] if one]
    assert COUNTED / 2 < sum(seen) <= COUNTED and len(seen) == 9 and max(seen) - min(seen) <= 1
    sparse = torch.zeros(1 << 20)
    sparse[12345] = 1e-3
    assert sum(distribution(sparse, by_magnitude=True)["bins"]) == 1  # what is not zero is looked for, not sampled


# What it costs


def test_a_budget_is_a_share_of_the_time_and_a_little_more() -> None:
    now = [100.0]
    spends = Budget(clock=lambda: now[0])
    with time_to_look(0.5):
        assert spends.has_room(0.49) and not spends.has_room(0.51)
        with spends.spending():
            now[0] += 2.0
        assert spends.spent == 2.0 and not spends.has_room(0.0)
        now[0] = 100.0 + 2.5 / budget.SHARE
        assert spends.has_room(0.99) and not spends.has_room(1.01)


def test_without_time_it_looks_at_parameters_and_takes_what_a_report_needs(tmp_path: Path) -> None:
    with time_to_look(-1e9):
        sg.fit(network(), arrays(), epochs=7, run=tmp_path / "long", **QUIET)
        sg.fit(network(), arrays(), epochs=1, run=tmp_path / "short", **QUIET)
    run = Run(tmp_path / "long")
    assert [one["step"] for one in run.distributions if one["parameters"]] == [1, 11, 21, 31, 43]
    assert [one["step"] for one in run.distributions if one["gradients"]] == [1, 11]
    assert [(one["when"], one["step"]) for one in run.profiles] == [("early", 11)]
    assert run.end is not None and not run.missing and (tmp_path / "long" / "report.html").exists()
    run = Run(tmp_path / "short")
    assert [one["step"] for one in run.distributions if one["gradients"]] == [1, 7] and len(run.profiles) == 1


def test_a_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    x, y = arrays()
    x[20:] = np.nan
    history = sg.fit(network(), (x, y), shuffle=False, epochs=2, on_nan="continue", run=tmp_path, **QUIET)
    told = view(Run(tmp_path))
    assert math.isnan(history.losses[-1]) and told["loss"]["not_finite"] == 3 and told["epochs"][0]["loss"] == "nan"
    assert told["distributions"][-1]["gradients"]["last.weights"]["not_finite"] > 0
    page.page([Run(tmp_path)])


def test_what_does_not_fit_into_the_memory_limit_is_left_out_and_said(tmp_path: Path) -> None:
    training = network(memory_limit=network().memory_plan.total)
    plain = network(memory_limit=network().memory_plan.total)
    a = sg.fit(training, arrays(), epochs=3, run=tmp_path, **QUIET)
    assert a.losses == sg.fit(plain, arrays(), epochs=3, **QUIET).losses
    run = Run(tmp_path)
    assert not run.profiles and "profile" in {one["what"] for one in run.missing}
    assert "memory_limit" in run.missing[0]["why"]


ENVIRONMENT = ["stepgraph", "python", "torch", "numpy", "system", "processor", "cores", "threads", "device"]


def test_no_secrets_and_no_long_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = [
        sys.executable,
        str(tmp_path / "train.py"),
        "--token",
        "abc",
        "--api-key=def",
        "--password",
        "--epochs",
        "3",
    ]
    monkeypatch.setattr(sys, "orig_argv", given)
    monkeypatch.chdir(tmp_path)
    told = facts.command(tmp_path / "runs" / "one")
    wanted = ["train.py", "--token", "…", "--api-key=…", "--password", "--epochs", "3"]
    assert told == {"arguments": [Path(sys.executable).name, *wanted], "directory": str(Path("..", ".."))}
    assert set(facts.environment(sg.Device.cpu())) == set(ENVIRONMENT)  # whoever adds to it thinks of what it tells


# The folder


def test_everything_is_in_one_folder(finished: tuple[Path, sg.History, Any], tmp_path: Path) -> None:
    assert {path.name for path in finished[0].iterdir()} == {FILE, "report.html", "checkpoints"}
    assert (finished[0] / "checkpoints" / "best").is_dir() and sg.latest(finished[0] / "checkpoints")
    sg.fit(network(), arrays(), run=tmp_path / "run", checkpoints=tmp_path / "elsewhere", **QUIET)
    assert not (tmp_path / "run" / "checkpoints").exists() and sg.latest(tmp_path / "elsewhere")


def test_a_resumed_run_appends_and_says_so(tmp_path: Path) -> None:
    whole = sg.fit(network(), arrays(), epochs=4, **QUIET)
    sg.fit(network(), arrays(), epochs=2, run=tmp_path, **QUIET)
    with pytest.raises(sg.ArgumentError, match="there is already a run"):
        sg.fit(network(), arrays(), epochs=4, run=tmp_path, **QUIET)
    resumed = sg.fit(network(), arrays(), epochs=4, run=tmp_path, resume=True, **QUIET)
    run = Run(tmp_path)
    assert resumed.losses == whole.losses and [step for step, _, _ in run.steps] == list(range(1, 25))
    assert [loss for _, loss, _ in run.steps] == pytest.approx(whole.losses, rel=1e-5)
    assert [(one["step"], one["resumed"]) for one in run.begins] == [(0, False), (12, True)]
    assert len(run.epochs) == 4 and run.status == "finished"


def test_an_early_end_and_an_error_are_recorded(tmp_path: Path) -> None:
    sg.fit(network(), arrays(), epochs=9, patience=1, watch="accuracy", run=tmp_path / "early", **QUIET)
    assert Run(tmp_path / "early").status in ("no improvement", "finished")

    def broken(epoch: int) -> Any:
        yield arrays(BATCH)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        sg.fit(network(), broken, run=tmp_path / "failed", **QUIET)
    assert Run(tmp_path / "failed").status == "failed" and (tmp_path / "failed" / "report.html").exists()


@pytest.mark.skipif(os.name == "nt", reason="kills with POSIX signals")
def test_killed_at_any_moment_it_can_be_read_and_goes_on(tmp_path: Path) -> None:
    whole = sg.fit(network(), arrays(), validation=arrays(9, 1), epochs=6, **QUIET)
    for number in range(3):  # killed twice
        process = forked().Process(target=slow_training, args=(tmp_path, 0.01, True))
        process.start()
        deadline = time.monotonic() + 120
        while process.is_alive() and time.monotonic() < deadline:
            if number < 2 and _epochs(tmp_path) >= 2 * number + 1:
                time.sleep(0.02 * (number + 1))
                process.kill()
            time.sleep(0.002)
        process.join()
        run = Run(tmp_path)  # readable at once
        page.page([run])
        assert (process.exitcode, run.status) == ((-9, "running") if number < 2 else (0, "finished"))
    assert len(run.begins) == 3 and [step for step, _, _ in run.steps] == list(range(1, 37))
    assert [loss for _, loss, _ in run.steps] == pytest.approx(whole.losses, rel=1e-5)


def _epochs(folder: Path) -> int:
    return (folder / FILE).read_bytes().count(b'"kind":"epoch"') if (folder / FILE).exists() else 0


def test_a_torn_last_line_is_left_out_and_removed_by_who_goes_on(tmp_path: Path) -> None:
    sg.fit(network(), arrays(), epochs=1, run=tmp_path, **QUIET)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"kind":"steps","first":7,"lo')
    assert len(Run(tmp_path).steps) == 6
    sg.fit(network(), arrays(), epochs=2, run=tmp_path, resume=True, **QUIET)
    assert len(Run(tmp_path).steps) == 12
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / FILE).write_bytes(b'{"format":"step')  # killed while it wrote its first line
    sg.fit(network(), arrays(), epochs=1, run=tmp_path / "new", **QUIET)
    assert len(Run(tmp_path / "new").steps) == 6


HEADER = '{"format":"stepgraph run","version":1}\n'
BAD_RECORDS = {
    "is not the record of a run": "hello\n",
    "has version 2, but stepgraph reads 1": HEADER.replace("1", "2"),
    "has version True": HEADER.replace("1", "true"),
    "line 3 of run.jsonl is damaged": HEADER + '{"kind":"end","step":1,"stopped":"x"}\n{"ki\n',
    "line 2 of run.jsonl is damaged": HEADER + '{"kind":"begin"}\n',
    "ends before training began": HEADER + '{"kind":"of another time"}\n',
}


@pytest.mark.parametrize("message", BAD_RECORDS)
def test_a_folder_that_cannot_be_read_says_why(tmp_path: Path, message: str) -> None:
    (tmp_path / FILE).write_text(BAD_RECORDS[message])
    with pytest.raises(sg.RunError, match=message) as caught:
        Run(tmp_path)
    assert isinstance(caught.value, ValueError) and "Fix:" in str(caught.value)


def test_a_folder_that_is_no_run_or_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(sg.RunError, match=r"holds no run.*\nFix: pass a folder that fit"):
        Run(tmp_path)
    for number in range(8):
        (tmp_path / "runs" / f"{number}").mkdir(parents=True)
        (tmp_path / "runs" / f"{number}" / FILE).write_text("")
    with pytest.raises(sg.RunError, match=r"below it .*5 and 2 more\nFix: pass one of those below it"):
        Run(tmp_path)
    with pytest.raises(sg.StorageError, match="there is no such folder"):
        Run(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["hello", "hello\n", '{"format":"another"}'])
def test_fit_leaves_a_file_of_another_program_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(sg.RunError, match="is not the record of a run"):
        sg.fit(network(), arrays(), run=tmp_path, resume=True, **QUIET)
    assert (tmp_path / FILE).read_text() == content


def test_fit_refuses_a_folder_before_it_trains(tmp_path: Path) -> None:
    training = network()
    before = state(training)
    (tmp_path / "file").write_text("")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / FILE).write_text('{"format":"stepgraph run","version":9}\n')
    for run, resume, error in (("file", False, sg.StorageError), ("newer", True, sg.RunError), (3, False, TypeError)):
        with pytest.raises(error):
            sg.fit(training, arrays(), run=run if run == 3 else tmp_path / run, resume=resume, **QUIET)
    assert state(training) == before and [path.name for path in (tmp_path / "newer").iterdir()] == [FILE]


# What the page is told


def test_a_long_run_is_thinned_and_keeps_its_extremes(finished: tuple[Path, sg.History, Any]) -> None:
    run = Run(finished[0])
    run.steps = [(n, 1.0 if n != 70_001 else 99.0, 0.1) for n in range(1, 100_001)]
    run.speeds = [(n, 64, 0.5) for n in range(64, 100_001, 64)]
    told = view(run)
    assert len(told["loss"]["x"]) <= POINTS and max(told["loss"]["high"]) == 99.0 and told["loss"]["x"][-1] == 100_000
    assert told["rate"] == {"x": [1, 100_000], "y": [0.1, 0.1]} and set(told["speed"]["y"]) == {128.0}


def test_many_parameters_are_thinned_to_a_page(finished: tuple[Path, sg.History, Any]) -> None:
    run = Run(finished[0])
    one = run.distributions[0]["parameters"]["last.weights"]
    many = {f"layer {i}": one for i in range(400)}
    run.distributions = [{"step": n, "parameters": many, "gradients": many} for n in range(1, 40)]
    told = view(run)["distributions"]
    assert told[0]["step"] == 1 and told[-1]["step"] == 39 and 3 <= len(told) < 39


def test_the_page_is_one_file_that_asks_for_nothing(finished: tuple[Path, sg.History, Any]) -> None:
    text = (finished[0] / "report.html").read_text()
    assert len(text) < 1_000_000 and "default-src 'none'" in text.replace("&#x27;", "'")
    outside = [
        part[:60] for part in text.split("http")[1:] if not part.startswith(("://www.w3.org/2000/svg", "-equiv"))
    ]
    assert outside == []


def test_no_label_becomes_markup(tmp_path: Path) -> None:
    training = deep(5)
    rows = np.zeros((8, 8), np.float32)
    sg.fit(training, (rows, rows), run=tmp_path / "<b>run&", progress="quiet")
    text = page.page([Run(tmp_path / "<b>run&")])
    assert NASTY not in text and "<img" not in text and "onerror=alert(1)>" not in text and "<b>" not in text
    assert text.count("<script") == text.count("</script>") == 2
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["runs"][0]["graph"]["nodes"][0]["layer"] == NASTY


# A file system that says no


class Full:
    """A file that takes some bytes of some lines, and then no more, until there is room again."""

    def __init__(self, file: Any, room: list[int]) -> None:
        self.file, self.room = file, room

    def write(self, content: Any) -> int:
        if len(content) > self.room[0]:
            taken, self.room[0] = self.room[0], 0
            if not taken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(content[:taken])
        self.room[0] -= len(content)
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("again", [False, True])
def test_a_full_disk_costs_the_report_and_not_the_training(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, recorded, room = network(), network(), [10**6]
    expected = sg.fit(plain, arrays(), epochs=4, **QUIET)
    begin, epoch = Recorder.begin, Recorder.epoch

    def filling(self: Recorder, *arguments: Any) -> None:
        begin(self, *arguments)
        self.record._file, room[0] = Full(self.record._file, room), 700

    def emptied(self: Recorder, row: Any) -> None:
        room[0] = 10**6 if again and row["epoch"] == 3 else room[0]
        epoch(self, row)

    monkeypatch.setattr(Recorder, "begin", filling)
    monkeypatch.setattr(Recorder, "epoch", emptied)
    with caplog.at_level("WARNING", "stepgraph"):
        history = sg.fit(recorded, arrays(), epochs=4, run=tmp_path, **QUIET)
    assert history["loss"] == expected["loss"] and state(recorded) == state(plain)
    assert [one.getMessage() for one in caplog.records if one.name == "stepgraph"] == [
        f"training continues, but the record of its report could not be written: {tmp_path}: it cannot be written: "
        "No space left on device"
    ]
    run = Run(tmp_path)  # whole lines only
    told = [one["why"] for one in run.missing if one["what"] == "lines of the record"]
    assert told == (["it cannot be written: No space left on device"] if again else [])
    assert (run.status == "finished") is again and [row["epoch"] for row in run.epochs] == ([3, 4] if again else [])
    monkeypatch.undo()
    sg.fit(network(), arrays(), epochs=5, run=tmp_path, resume=True, **QUIET)  # and it can be gone on with
    assert Run(tmp_path).status == "finished"


def test_a_page_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stepgraph.report.recorder.PAGE_SECONDS", 0.0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with caplog.at_level("WARNING", "stepgraph"):
        assert sg.fit(network(), arrays(), epochs=3, run=tmp_path, **QUIET).stopped == "finished"
    assert [one.getMessage() for one in caplog.records if "the page of its report" in one.getMessage()] == [
        f"training continues, but the page of its report could not be written: {tmp_path}: it cannot be written: "
        "No space left on device"
    ]
    assert Run(tmp_path).status == "finished"
    assert not list(tmp_path.glob("report.html*"))


def test_a_record_that_somebody_spoils_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def spoiling(prediction: torch.Tensor, labels: torch.Tensor) -> float:
        with (tmp_path / FILE).open("ab") as file:
            file.write(b"{junk}\n")
        return 0.0

    with caplog.at_level("WARNING", "stepgraph"):
        history = sg.fit(network(), arrays(), epochs=2, run=tmp_path, metrics={"spoiling": spoiling}, progress="quiet")
    assert history.stopped == "finished" and "the page of its report" in caplog.text


def test_a_folder_for_checkpoints_that_cannot_be_written_is_told_before_the_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, began = network(), []
    before = state(training)

    def read_only(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", read_only)
    monkeypatch.setattr(training, "execute", lambda *_, **__: began.append(1))
    with pytest.raises(sg.StorageError, match="it cannot be written: Read-only file system"):
        sg.fit(training, arrays(), checkpoints=tmp_path, **QUIET)
    (tmp_path / "file").write_text("")
    with pytest.raises(sg.StorageError, match="it cannot be written"):
        sg.fit(training, arrays(), checkpoints=tmp_path / "file" / "model", **QUIET)
    assert not began and state(training) == before and {one.name for one in tmp_path.iterdir()} == {"file"}


@pytest.mark.skipif(os.name == "nt", reason="makes POSIX files")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_record_that_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / FILE
    {"pipe": os.mkfifo, "device": lambda one: one.symlink_to("/dev/zero"), "directory": Path.mkdir}[kind](path)
    with pytest.raises(sg.RunError, match=rf"run\.jsonl is a {kind}, not a regular file.*\nFix:"):
        Run(tmp_path)
    for resume in (False, True):
        with pytest.raises(sg.RunError, match=f"is a {kind}, not a regular file"):
            sg.fit(network(), arrays(), run=tmp_path, resume=resume, **QUIET)


def test_a_record_beyond_any_sense_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(sg.RunError, match="has 1,099,511,627,776 bytes, more than the maximum of 1,073,741,824"):
        Run(tmp_path)


def somewhere(value: Any, dice: random.Random) -> tuple[Any, Any]:
    """A place in nested JSON, near the top more often than deep in a long list."""
    key = dice.choice(list(value) if isinstance(value, dict) else range(len(value)))
    below = value[key]
    return somewhere(below, dice) if isinstance(below, dict | list) and below and dice.random() < 0.5 else (value, key)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.deep) for i in range(1, 30))])
def test_a_senseless_record_is_refused_as_a_run(
    seed: int, finished: tuple[Path, sg.History, Any], tmp_path: Path
) -> None:
    """Whole lines of JSON with one wrong place: a page is made of it, or it is a RunError."""
    dice, original = random.Random(seed), [json.loads(one) for one in (finished[0] / FILE).read_bytes().splitlines()]
    refused = 0
    for _ in range(60):
        entries = copy.deepcopy(original)
        container, key = somewhere(dice.choice(entries[1:]), dice)
        container[key] = copy.deepcopy(dice.choice(JUNK))
        (tmp_path / FILE).write_bytes(b"".join(json.dumps(one).encode() + b"\n" for one in entries))
        try:
            page.write(tmp_path / page.FILE, [Run(tmp_path)])
        except sg.RunError as error:
            refused += 1
            assert str(error).startswith(str(tmp_path)) and "\nFix: " in str(error)
    assert refused > 10


def test_a_number_beyond_all_is_refused_as_a_run(finished: tuple[Path, sg.History, Any], tmp_path: Path) -> None:
    lines = (finished[0] / FILE).read_bytes().splitlines(keepends=True)
    steps = b'{"kind":"steps","first":1,"loss":[1%s],"rate":0.1,"rows":8,"seconds":1}\n' % (b"0" * 400)
    (tmp_path / FILE).write_bytes(b"".join([*lines, steps]))
    with pytest.raises(sg.RunError, match=rf"line {len(lines) + 1} of run\.jsonl is damaged: OverflowError"):
        Run(tmp_path)


def test_a_page_shows_what_a_label_would_do(tmp_path: Path) -> None:
    training = network()
    training.layers[0].label = "new\nline \x1b[2J \u202egnp.exe größe שלום"
    sg.fit(training, arrays(), run=tmp_path, **QUIET)
    text = (tmp_path / "report.html").read_text()
    data = json.loads(text.split('type="application/json"')[1].split(">", 1)[1].split("</script>")[0])
    shown = json.dumps(data, ensure_ascii=False)
    label = "new\\nline \\x1b[2J \\u202egnp.exe größe שלום"
    (run,) = data["runs"]
    assert run["graph"]["nodes"][0]["layer"] == label
    assert f'data-layer="{label}"' in run["drawing"]
    assert "\u202e" not in shown and "\\u001b" not in shown
