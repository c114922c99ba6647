"""Checkpoints: a resumed run is bit for bit the run that was never stopped; what does not fit is told."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import stepgraph as sg
from stepgraph.checkpoint import files
from tests.checkpoint_runs import BATCH, CPU, batch, compiled, network, state, train
from tests.optimizer_rules import Net
from tests.test_optimizers import RULES, descriptor, every_pair

OPTIMIZERS: dict[str, Callable[[], sg.Optimizer]] = {
    "momentum": lambda: sg.SGDOptimizer(learning_rate=0.1, momentum_scale=0.9),
    "adam": lambda: sg.AdamOptimizer(learning_rate=0.01),
    "amsgrad": lambda: sg.AdamOptimizer(learning_rate=0.01, uses_ams_grad=True),
    "rmsprop": lambda: sg.RMSPropOptimizer(learning_rate=0.01, is_centered=True, momentum_scale=0.5),
}


# Resuming


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "rmsprop"])
@pytest.mark.parametrize("when", ["before compile", "after compile", "from the file alone"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, when: str, tmp_path: Path) -> None:
    whole = compiled(network(OPTIMIZERS[name]()))
    train(whole, 0, 3)
    whole.save(tmp_path)
    if when == "from the file alone":
        resumed = sg.load(tmp_path, CPU)
    elif when == "before compile":
        resumed = network(OPTIMIZERS[name](), seed=6)
        resumed.restore(tmp_path)
        compiled(resumed)
    else:
        resumed = compiled(network(OPTIMIZERS[name](), seed=6))
        train(resumed, 90, 92)
        resumed.restore(tmp_path)
    assert state(resumed) == state(whole)
    assert train(resumed, 3, 6) == train(whole, 3, 6)
    assert state(resumed) == state(whole)


@pytest.mark.parametrize(("rule", "preparation"), list(every_pair()))
def test_every_optimizer_goes_on_with_the_same_bits(rule: str, preparation: str, tmp_path: Path) -> None:
    net, optimizer = Net(), RULES[rule](descriptor(preparation))
    whole = net.graph(optimizer)
    data = [({"x": x}, {"y": y}) for x, y in zip(net.x[:5], net.y[:5], strict=True)]
    for one in data[:3]:
        whole.execute(*one)
    optimizer.learning_rate = 0.07  # live numbers are saved as they are
    whole.save(tmp_path)
    resumed = sg.load(tmp_path, CPU)
    assert (type(resumed.optimizer), resumed.optimizer.settings) == (type(optimizer), optimizer.settings)
    assert [resumed.execute(*one).loss for one in data[3:]] == [whole.execute(*one).loss for one in data[3:]]
    assert state(resumed) == state(whole)


def test_the_loss_scale_of_float16_goes_on(tmp_path: Path) -> None:
    whole = compiled(network(), compute_type="float16")
    whole.loss_scale = 2.0**100  # infinite gradients: steps are skipped, the scale shrinks
    train(whole, 0, 3)
    whole.save(tmp_path)
    resumed, other = sg.load(tmp_path, CPU), compiled(network(seed=6), compute_type="float16")
    other.restore(tmp_path)
    assert whole.optimizer.time_step == resumed.optimizer.time_step == other.optimizer.time_step == 1
    assert resumed.loss_scale == whole.loss_scale == 2.0**97
    for one in (whole, resumed, other):
        one.loss_scale = one.loss_scale * 2.0**-80
    losses = train(whole, 3, 8)
    assert train(resumed, 3, 8) == train(other, 3, 8) == losses
    assert state(resumed) == state(whole) == state(other)
    assert whole.optimizer.time_step > 1


def _passes(training: sg.TrainingGraph, step: int, options: sg.ExecutionOptions = sg.ExecutionOptions.NONE) -> None:
    data = {**batch(step)[0], **batch(step)[1]}
    training.bind_and_write_data(data, {**training.inputs, **training.loss_labels}, CPU)
    training.execute_forward()
    training.execute_gradient(options=options)


@pytest.mark.parametrize("when", ["compiled", "file"])
def test_gradients_in_the_middle_of_accumulation_are_part_of_it(when: str, tmp_path: Path) -> None:
    adding, whole = sg.ExecutionOptions.ACCUMULATE_GRADIENTS, compiled(network())
    train(whole, 0, 2)
    _passes(whole, 2)
    _passes(whole, 3, adding)
    whole.save(tmp_path)
    resumed = sg.load(tmp_path, CPU) if when == "file" else compiled(network())
    if when == "compiled":
        resumed.restore(tmp_path)
    for one in (whole, resumed):
        _passes(one, 4, adding)
        one.execute_optimizer_update()
    assert state(resumed) == state(whole)
    whole.save(tmp_path)
    assert not files.read(tmp_path).description["graphs"][0]["progress"]["gradients"]  # used: not kept


def test_numbers_assigned_after_restoring_win(tmp_path: Path) -> None:
    whole = compiled(network())
    train(whole, 0, 3)
    whole.save(tmp_path)
    resumed = network()
    resumed.restore(tmp_path)
    resumed.optimizer.time_step, resumed.optimizer.learning_rate = 40, 0.5
    compiled(resumed)
    whole.optimizer.time_step, whole.optimizer.learning_rate = 40, 0.5
    assert train(resumed, 3, 5) == train(whole, 3, 5)
    assert state(resumed) == state(whole)


def test_an_optimizer_of_two_graphs_keeps_their_counts_apart(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["adam"]()
    one, other = compiled(network(optimizer)), compiled(network(optimizer))
    train(one, 0, 4)
    train(other, 0, 1)
    one.save(tmp_path)
    reference = state(one), train(one, 4, 6)
    train(other, 1, 2)
    count = files.read(tmp_path).description["graphs"][0]["progress"]["time_step"]
    assert count == 5  # four updates of its own
    resumed = sg.load(tmp_path, CPU)
    assert train(resumed, 4, 6) == reference[1]
    one.restore(tmp_path)
    assert train(one, 4, 6) == reference[1]
    assert other.progress().time_step == 3


def test_restoring_writes_into_the_memory_in_use(tmp_path: Path) -> None:
    training = compiled(network())
    weights = training.layers[0].weights.data
    training.save(tmp_path)
    before = weights.copy()
    train(training, 0, 1)
    assert not np.array_equal(weights, before)
    training.restore(tmp_path)
    assert np.array_equal(weights, before)
    assert training.executables == [("step", BATCH)]  # nothing was compiled for it


def test_optimizer_buffers_bound_before_compiling_are_saved(tmp_path: Path) -> None:
    training = network(OPTIMIZERS["momentum"]())
    bound = np.full((2, 1, 3, 3), 0.25, np.float32)
    training.layers[0].weights.bind_optimizer_data([bound])
    training.save(tmp_path)
    resumed = compiled(sg.load(tmp_path))
    assert bytes(resumed.layers[0].weights.optimizer_data[0].bytes) == bound.tobytes()


@pytest.mark.gpu
def test_a_checkpoint_moves_between_devices(tmp_path: Path) -> None:
    whole = compiled(network())
    train(whole, 0, 3)
    whole.save(tmp_path / "cpu")
    there = sg.load(tmp_path / "cpu", sg.Device.gpu())
    expected = train(whole, 3, 6)
    np.testing.assert_allclose(train(there, 3, 6), expected, rtol=1e-4)
    there.save(tmp_path / "gpu")
    back = network(seed=6)
    back.restore(tmp_path / "gpu")
    np.testing.assert_allclose(train(compiled(back), 6, 9), train(whole, 6, 9), rtol=1e-3)
    there.restore(tmp_path / "cpu")
    np.testing.assert_allclose(train(there, 3, 6), expected, rtol=1e-4)


# What a checkpoint holds


def test_tensors_have_plain_names_that_other_programs_can_read(tmp_path: Path) -> None:
    training = compiled(network())
    training.save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    arrays = load_file(file)
    assert np.array_equal(arrays["conv.weights"].numpy(), training.layers[0].weights.numpy())
    assert {"norm.mean", "norm.variance", "square.weights", "conv.weights@momentum"} <= arrays.keys()
    assert sum(name.startswith("square.weights") for name in arrays) == 4  # shared by two nodes, saved once


def test_notes_come_back(tmp_path: Path) -> None:
    training = network()
    sg.save(tmp_path, training, notes={"epoch": 3, "scores": [0.5, None], "name": "ü"})
    assert training.restore(tmp_path).notes == {"epoch": 3, "scores": [0.5, None], "name": "ü"}


@pytest.mark.parametrize("notes", [[1], {"a": float("nan")}, {"a": object()}, {"a": np.float32(1)}])
def test_notes_that_are_no_json_are_refused(notes: Any, tmp_path: Path) -> None:
    with pytest.raises(sg.DataTypeError, match=r"save: the notes cannot be written as JSON.*\nFix:"):
        network().save(tmp_path / "a", notes=notes)
    assert not (tmp_path / "a").exists()


def test_data_bound_for_a_call_is_not_saved(tmp_path: Path) -> None:
    training = compiled(network())
    _passes(training, 0)
    training.save(tmp_path)
    held = [one["label"] for one in files.read(tmp_path).description["tensors"] if "data" in one]
    assert "image" not in held and "label" not in held


# What does not fit


def test_partial_loading_takes_what_fits_and_tells_the_rest(tmp_path: Path) -> None:
    old = compiled(network())
    train(old, 0, 2)
    old.save(tmp_path)
    new = compiled(network(seed=6, classes=4))
    new.node(sg.FullyConnectedLayer.create(4, 4, label="more"), new.nodes[-1].results[0])
    before = state(new)
    with pytest.raises(sg.CheckpointError) as caught:
        new.restore(tmp_path)
    shapes = r"out.weights ([4, 32] float32 here, [3, 32] float32 there)"
    assert "missing      more.weights, more.biases\n" in str(caught.value) and shapes in str(caught.value)
    assert state(new) == before
    report = new.restore(tmp_path, partial=True)
    assert report.missing == ("more.weights", "more.biases") and not report.unexpected and not report.is_complete
    assert [one.name for one in report.mismatched] == ["out.weights", "out.biases"]
    names = "out.weights, out.biases, more.weights, more.biases"
    assert report.state == (f"no optimizer state of {names} in the checkpoint, which is at update 3",)
    assert "8 of 12 tensors restored" in str(report) and shapes in str(report)
    after, wanted = state(new), state(old)
    assert all(after[name] == wanted[name] for name in wanted if name[0] in "01" or name == "time_step")
    assert after["6.weights"] == before["6.weights"]  # the mismatched one stayed


def test_unexpected_names_are_told(tmp_path: Path) -> None:
    old, new = network(), network()
    old.node(sg.FullyConnectedLayer.create(3, 3, label="more"), old.nodes[-1].results[0])
    old.save(tmp_path)
    with pytest.raises(sg.CheckpointError, match=r"unexpected   more\.weights, more\.biases"):
        new.restore(tmp_path)
    assert new.restore(tmp_path, partial=True).unexpected == ("more.weights", "more.biases")


def test_another_optimizer_is_told_and_its_state_left_alone(tmp_path: Path) -> None:
    old, new = compiled(network()), compiled(network(OPTIMIZERS["momentum"](), seed=6))
    train(old, 0, 2)
    train(new, 0, 1)
    old.save(tmp_path)
    with pytest.raises(sg.CheckpointError, match="state   adam amsgrad in the checkpoint, sgd momentum here"):
        new.restore(tmp_path)
    buffers = bytes(new.layers[0].weights.optimizer_data[0].bytes)
    report = new.restore(tmp_path, partial=True)
    assert report.state == ("adam amsgrad in the checkpoint, sgd momentum here",)
    assert bytes(new.layers[0].weights.optimizer_data[0].bytes) == buffers
    assert np.array_equal(new.layers[0].weights.numpy(), old.layers[0].weights.numpy())


def test_parameters_alone_leave_the_optimizer_where_it_is(tmp_path: Path) -> None:
    old, new = compiled(network(seed=6)), compiled(network())
    train(old, 0, 5)
    train(new, 0, 2)
    old.save(tmp_path)
    assert new.restore(tmp_path, only_parameters=True).is_complete
    assert new.optimizer.time_step == 3
    assert np.array_equal(new.layers[0].weights.numpy(), old.layers[0].weights.numpy())


def test_an_inference_graph_takes_the_parameters_of_a_training_graph(tmp_path: Path) -> None:
    old, new = compiled(network()), network(seed=6)
    train(old, 0, 2)
    old.save(tmp_path)
    inference = sg.InferenceGraph([new._graphs[0]])
    assert inference.restore(tmp_path).is_complete
    inference.compile(CPU)
    reference = sg.InferenceGraph([old._graphs[0]])
    reference.compile(CPU)
    for one in (inference, reference):
        one.execute(batch(0)[0])
    assert inference.nodes[-1].results[0].numpy().tobytes() == reference.nodes[-1].results[0].numpy().tobytes()


def test_an_inference_graph_may_be_a_part_of_what_was_saved(tmp_path: Path) -> None:
    network().save(tmp_path)
    part = sg.InferenceGraph()
    convolution = sg.ConvolutionLayer.create(1, 2, kernel_sizes=3, label="conv")
    part.node(convolution, sg.Tensor((1, 1, 4, 4)))
    report = part.restore(tmp_path)
    assert report.loaded == ("conv.weights", "conv.biases") and "square.weights" in report.unexpected
    part.node(sg.FullyConnectedLayer.create(4, 4, label="more"), part.nodes[0].results[0])
    with pytest.raises(sg.CheckpointError, match=r"missing      more\.weights, more\.biases"):
        part.restore(tmp_path)


def test_a_checkpoint_from_before_training_begins_anew(tmp_path: Path) -> None:
    network().save(tmp_path)
    training = compiled(network(seed=6))
    train(training, 0, 3)
    training.restore(tmp_path)
    weights = training.layers[0].weights
    assert training.optimizer.time_step == training.progress().time_step == 1
    assert not any(any(bytes(data.bytes)) for data in weights.optimizer_data)
    assert np.array_equal(weights.numpy(), network().layers[0].weights.numpy())


def test_other_settings_are_told(tmp_path: Path) -> None:
    network().save(tmp_path)
    new = network()
    new.layers[3].__dict__["rate"] = 0.5
    report = new.restore(tmp_path)
    assert report.is_complete and report.changed == ("drop.rate is 0.5, was 0.2",)
    assert "changed      drop.rate is 0.5, was 0.2" in str(report)


# Series


def test_old_checkpoints_of_a_series_are_rotated(tmp_path: Path) -> None:
    training = compiled(network())
    assert sg.latest(tmp_path) is None and sg.latest(tmp_path / "nothing") is None
    for step in range(5):
        path = training.save(tmp_path / "run", keep=2, notes={"step": step})
        assert sg.latest(tmp_path / "run") == path
    assert [one.name for one in sorted((tmp_path / "run").iterdir())] == ["checkpoint-000004", "checkpoint-000005"]
    assert training.restore(tmp_path / "run").notes["step"] == 4
    assert training.restore(tmp_path / "run" / "checkpoint-000004").notes["step"] == 3


def test_rotation_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    training = network()
    training.save(tmp_path / "best")
    first = training.save(tmp_path, keep=1)
    (first / "mine.txt").write_text("notes")
    (tmp_path / "checkpoint-000002").mkdir()  # as a killed process leaves it
    assert sg.latest(tmp_path) == first
    assert training.save(tmp_path, keep=1).name == "checkpoint-000003"
    assert [one.name for one in first.iterdir()] == ["mine.txt"]
    assert not (tmp_path / "checkpoint-000002").exists()
    training.restore(tmp_path / "best")


@pytest.mark.parametrize("keep", [0, -1, True, 2.0, "3"])
def test_bad_counts_are_refused(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(sg.ArgumentError, match="save: keep is"):
        network().save(tmp_path, keep=keep)


# Failing file systems


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.*cannot be written.*\nFix:") as caught:
        network().save(tmp_path / "file")
    assert isinstance(caught.value, sg.StorageError)
    with pytest.raises(sg.StorageError, match="no such directory"):
        network().restore(tmp_path / "nothing")
    with pytest.raises(sg.DataTypeError, match="restore: the path is int"):
        network().restore(3)
    with pytest.raises(sg.CheckpointError, match=r"no complete checkpoint: no graph\.json"):
        network().restore(tmp_path)


@pytest.mark.parametrize("failing", ["save_file", "fsync", "replace", "description"])
@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_leaves_the_old_checkpoint(
    failing: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, path = compiled(network()), tmp_path / "model"
    if there:
        training.save(path)
    old = {one.name: one.read_bytes() for one in path.iterdir()} if there else None
    train(training, 0, 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if failing == "fsync":
            patch.setattr(os, "fsync", full)
        elif failing == "replace":
            patch.setattr(Path, "replace", full)
        else:
            patch.setattr(files, "save_file" if failing == "save_file" else "_write_description", full)
        with pytest.raises(sg.StorageError, match="No space left on device") as caught:
            training.save(path)
        assert caught.value.errno == 28
    assert ({one.name: one.read_bytes() for one in path.iterdir()} if there else path.exists()) == (old or False)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX limit")
def test_a_file_that_may_not_grow_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The real thing: the system refuses to write on."""
    import resource

    training = compiled(network())
    training.save(tmp_path)
    old = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    train(training, 0, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(sg.StorageError, match="cannot be written"):
            training.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == old
    training.restore(tmp_path)


def test_tensors_that_a_layer_makes_from_its_settings_are_not_asked_of_a_checkpoint(tmp_path: Path) -> None:
    """YOLO's loss makes its anchors from the descriptor; they are in no file, and no graph misses them there."""
    x, y = sg.Tensor((1, 14, 3, 3)), sg.Tensor((1, 14, 3, 3))
    graph = sg.Graph()
    graph.node(sg.ConvolutionLayer.create(14, 14, 1), x)
    loss = sg.YOLOLossLayer.create([(1.0, 2.0), (4.0, 3.0)])
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    training.save(tmp_path / "saved")
    assert training.restore(tmp_path / "saved").is_complete
    loaded = sg.load(tmp_path / "saved", sg.Device.cpu())
    batch = {"x": np.ones(x.shape, np.float32)}, {"y": np.ones(y.shape, np.float32)}
    assert np.array_equal(loaded.execute(*batch).loss, training.execute(*batch).loss)


@pytest.mark.parametrize("name", [".tmpR9DYIM", "tensors.partial", "graph.json.partial"])
def test_what_a_killed_save_leaves_is_removed(tmp_path: Path, name: str) -> None:
    """The names are those of our own drafts, and of the library that writes tensors."""
    training = compiled(network())
    for number in range(1, 4):
        folder = tmp_path / "series" / f"checkpoint-{number:06d}"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"half")
    training.save(tmp_path / "series", keep=1)
    assert [path.name for path in (tmp_path / "series").iterdir()] == ["checkpoint-000004"]
    (tmp_path / "one").mkdir()
    for file in (name, "notes.txt", ".tmpfile"):
        (tmp_path / "one" / file).write_bytes(b"half")
    training.save(tmp_path / "one")
    left = {path.name for path in (tmp_path / "one").iterdir() if not path.name.startswith("tensors-")}
    assert left == {"graph.json", "notes.txt", ".tmpfile"}
