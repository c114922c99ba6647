"""Checkpoints made by an enemy: whole and well signed, but senseless, endless or not files at all."""

import argparse
import copy
import hashlib
import json
import math
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.checkpoint import files
from stepgraph.checkpoint.files import DESCRIPTION
from stepgraph.cli import inspect
from tests.checkpoint_runs import CPU, compiled, network, state, train
from tests.junk import JUNK, nested, places


def mutated(description: dict[str, Any], dice: random.Random) -> None:
    """Changes one place, or two: drops, replaces, exchanges, repeats, renumbers or nests what is there."""
    for more in dice.choice(((False,), (False,), (True, False))):
        found = [one for one in places(description) if one != (description, "tensors_file")]
        found = [(container, key) for container, key in found if container is not description["tensors_file"]]
        container, key = dice.choice(found)
        match dice.randrange(7):
            case 0:
                del container[key]
            case 1 | 2 | 3:
                container[key] = copy.deepcopy(dice.choice(JUNK))
            case 4:
                other, name = dice.choice(found)
                container[key] = copy.deepcopy(other[name])
            case 5 if isinstance(container, list):
                container.append(copy.deepcopy(container[key]))
            case 5 if isinstance(container[key], str):
                container[key] = dice.choice((container[key] + "x", container[key][:-1], container[key].upper()))
            case 6 if isinstance(container[key], int):
                container[key] += dice.choice((-1, 1, 2, -100))
            case _:
                container[key] = nested(3 if more else dice.choice((3, 200, 400)))


def one_batch() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((6, 1, 4, 4), np.float32), np.zeros(6, np.int64)


class Enemy:
    """Signs what is wrong, and looks what happens."""

    def __init__(self, folder: Path) -> None:
        self.training = compiled(network(seed=6))
        train(self.training, 0, 1)
        self.path = self.training.save(folder / "model", notes={"fit": 0.5, "epoch": [1, 2.5, "x"]})
        train(self.training, 1, 2)
        self.before = state(self.training)
        self.json = self.path / files.DESCRIPTION
        (self.tensors,) = self.path.glob("*.safetensors")
        self.original = json.loads(self.json.read_bytes())
        self.cases = self.refused = 0

    def sign(self, description: dict[str, Any]) -> None:
        files._write_description(self.path, {name: one for name, one in description.items() if name != "sha256"})

    def attempt(self, read: Callable[[], Any]) -> Any:
        """What reading gave; refused as a checkpoint and as nothing else, or taken."""
        self.cases += 1
        try:
            return read()
        except sg.CheckpointError as error:
            self.refused += 1
            assert str(error).startswith(str(self.path)) and "\nFix: " in str(error)
            assert not any(0xD800 <= ord(letter) <= 0xDFFF or letter == "\x1b" for letter in str(error))
            return None

    def attack(self, dice: random.Random) -> None:
        """All that may read one senseless description."""
        description = copy.deepcopy(self.original)
        mutated(description, dice)
        self.sign(description)
        assert sg.latest(self.path.parent) is None  # no series
        for device in (None, CPU) if dice.randrange(3) == 0 else (None,):
            graph = self.attempt(lambda device=device: sg.load(self.path, device))
            if graph is not None:
                shown = str(graph) + graph.summarized_dot_description + graph._repr_html_()
                assert "\x1b" not in shown
                graph.save(self.path.parent / "again")
        self.attempt(lambda: sg.load(self.path, inference=True))
        self.attempt(lambda: inspect.run(self.asked()))
        partial = dice.random() < 0.5
        report = self.attempt(lambda: self.training.restore(self.path, partial=partial))
        if report is None:
            assert state(self.training) == self.before
        else:
            assert isinstance(str(report), str) and isinstance(report.notes, dict)
            train(self.training, 2, 3)
            self.before = state(self.training)

    def asked(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        inspect.arguments(parser)
        return parser.parse_args([str(self.path), "--no-plan"])


@pytest.fixture
def enemy(tmp_path: Path) -> Enemy:
    return Enemy(tmp_path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.deep) for i in range(1, 32))])
def test_senseless_descriptions_are_refused_as_checkpoints_and_change_nothing(
    seed: int, enemy: Enemy, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(seed)
    for _ in range(10):
        enemy.attack(dice)
    assert enemy.cases > 40 and enemy.refused > 10
    with capsys.disabled():
        print(f" seed {seed}: {enemy.cases} reads, {enemy.refused} refused", end="")


# Senseless in ways that need aim


def everything(enemy: Enemy, words: str) -> None:
    """All that reads a checkpoint refuses it, with these words."""
    reads: list[Callable[[], Any]] = [
        lambda: sg.load(enemy.path),
        lambda: sg.load(enemy.path, CPU),
        lambda: enemy.training.restore(enemy.path),
        lambda: enemy.training.restore(enemy.path, partial=True),
        lambda: inspect.run(enemy.asked()),
    ]
    for read in reads:
        with pytest.raises(sg.CheckpointError, match=f"(?s){words}"):
            read()
    assert sg.latest(enemy.path.parent) is None
    assert state(enemy.training) == enemy.before


def test_a_layer_that_holds_itself_is_refused(enemy: Enemy) -> None:
    description = copy.deepcopy(enemy.original)
    description["layers"][0]["fields"]["label"] = {"layer": 0}
    enemy.sign(description)
    with pytest.raises(sg.CheckpointError, match="instead of a str"):
        sg.load(enemy.path)
    description["layers"][0]["fields"] = {"label": "conv", "descriptor": {"layer": 1}}
    description["layers"][1]["fields"] = {"label": "norm", "descriptor": {"layer": 0}}
    enemy.sign(description)
    with pytest.raises(sg.CheckpointError, match="the layer 0 contains itself"):
        sg.load(enemy.path)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_json_is_refused_though_python_reads_it(text: str, enemy: Enemy) -> None:
    body = enemy.json.read_bytes().replace(b'"epoch": [1, 2.5', b'"epoch": [1, ' + text.encode())
    signed = body[: body.rindex(b'"sha256"') + len(b'"sha256": "')]
    enemy.json.write_bytes(signed + hashlib.sha256(signed).hexdigest().encode() + b'"\n}\n')
    everything(enemy, f"{text} is not JSON")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", [2**63, 0]), ("stream", [-1, 0]), ("stream", [True, 0]), ("time_step", 10**400), ("time_step", -1),
        ("loss_scale", [1, 2]), ("loss_scale", "x"), ("buffers", {"x": []}), ("gradients", {"0": "conv.weights@none"}),
    ],
)  # fmt: skip
def test_progress_that_no_array_can_hold_is_refused_before_anything_is_written(
    name: str, value: Any, enemy: Enemy
) -> None:
    description = copy.deepcopy(enemy.original)
    description["graphs"][0]["progress"][name] = value
    enemy.sign(description)
    for read in (sg.load, enemy.training.restore):
        with pytest.raises(sg.CheckpointError, match="its description is invalid"):
            read(enemy.path)
    assert state(enemy.training) == enemy.before


def test_buffers_of_another_shape_are_refused_and_not_spread(enemy: Enemy) -> None:
    """One number would fill a whole buffer if it was copied without a look."""
    description = copy.deepcopy(enemy.original)
    buffers, tensors = description["graphs"][0]["progress"]["buffers"], description["tensors"]
    by_size = sorted(buffers, key=lambda one: math.prod(tensors[int(one)]["shape"]))
    buffers[by_size[-1]] = buffers[by_size[0]]
    enemy.sign(description)
    for read in (sg.load, enemy.training.restore):
        with pytest.raises(sg.CheckpointError, match="a different shape or type"):
            read(enemy.path)


@pytest.mark.parametrize("place", ["place", "history", "tally"])
def test_fit_refuses_notes_that_it_never_wrote(place: str, tmp_path: Path) -> None:
    training = compiled(network())
    sg.fit(training, one_batch(), checkpoints=tmp_path, keep=1, progress="quiet")
    (member,) = tmp_path.glob("checkpoint-*")
    original = json.loads((member / DESCRIPTION).read_bytes())
    for junk in (None, [], {}, "x", 3, {"epoch": "x"}, {"rows": 1, "loss": {}}, {"steps": [[1]]}):
        description = copy.deepcopy(original)
        description["notes"]["fit"][place] = junk
        files._write_description(member, {name: one for name, one in description.items() if name != "sha256"})
        before = state(training)
        with pytest.raises(sg.CheckpointError, match="its description is invalid"):
            sg.fit(training, one_batch(), checkpoints=tmp_path, epochs=2, resume=True, progress="quiet")
        assert state(training) == before


# What is no file, or too much of one


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = {"a pipe": _pipe, "a socket": _socket, "a device": _endless, "a directory": Path.mkdir}


@pytest.mark.skipif(os.name == "nt", reason="makes POSIX files")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["json", "tensors"])
def test_what_is_no_file_is_refused_at_once(
    which: str, kind: str, monkeypatch: pytest.MonkeyPatch, enemy: Enemy
) -> None:
    file = getattr(enemy, which)
    file.unlink()
    monkeypatch.chdir(file.parent)  # the path of a socket may not be long
    KINDS[kind](Path(file.name))
    everything(enemy, f"{file.name} is {kind}, not a regular file.*Fix:")


def test_a_description_beyond_any_sense_is_not_read(enemy: Enemy, monkeypatch: pytest.MonkeyPatch) -> None:
    with enemy.json.open("r+b") as file:
        file.truncate(files.LARGEST_DESCRIPTION + 1)  # holes: it takes no room
    everything(enemy, r"graph\.json has 268,435,457 bytes, more than the maximum of 268,435,456")
    monkeypatch.setattr(files, "LARGEST_DESCRIPTION", 1000)
    with pytest.raises(sg.ArgumentError, match=r"graph\.json would have [\d,]+ bytes, more than the maximum of 1,000"):
        enemy.training.save(enemy.path.parent / "large")
    assert not (enemy.path.parent / "large").exists()


def test_tensors_of_another_length_are_not_read(enemy: Enemy) -> None:
    with enemy.tensors.open("r+b") as file:
        file.truncate(2**40)
    everything(enemy, "is damaged: its 1099511627776 bytes")


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.deep) for i in range(1, 20))])
def test_senseless_tensors_are_refused(seed: int, enemy: Enemy) -> None:
    """A file of tensors with a header of its own: types nobody has, shapes that do not fit, bytes from elsewhere."""
    dice, raw = random.Random(seed), enemy.tensors.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    refused = 0
    for _ in range(60):
        header = json.loads(raw[8 : 8 + length])
        container, key = dice.choice(list(places(header)))
        container[key] = dice.choice((*JUNK, "F8_E4M3", "BOOL", "C64", "U16", [2**62, 4], [-1], [0, 2**40]))
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + raw[8 + length :]
        digest = hashlib.sha256(content).hexdigest()
        name = f"tensors-{digest[:16]}.safetensors"
        (enemy.path / name).write_bytes(content)
        stored = {"name": name, "bytes": len(content), "sha256": digest}
        enemy.sign({**enemy.original, "tensors_file": stored})
        try:
            sg.load(enemy.path)
            enemy.training.restore(enemy.path)
            enemy.before = state(enemy.training)
        except sg.CheckpointError:
            refused += 1
        assert state(enemy.training) == enemy.before
        (enemy.path / name).unlink()
    assert refused > 30


# What is written


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_every_file_of_a_checkpoint_follows_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        training = network()
        for _ in range(2):  # new, and in place of one that is there
            path = training.save(tmp_path / "model")
        sg.fit(compiled(training), one_batch(), run=tmp_path / "run", progress="quiet")
    finally:
        os.umask(before)
    found = [path, *path.iterdir(), *(tmp_path / "run").rglob("*")]
    assert len(found) > 6
    for one in found:
        assert stat.S_IMODE(one.stat().st_mode) == (0o777 if one.is_dir() else 0o666) & ~mask, one


def test_notes_of_any_depth_are_written_or_refused(tmp_path: Path) -> None:
    training = network()
    for depth in (10, 100, 300):
        training.save(tmp_path, notes={"deep": nested(depth)})
        assert training.restore(tmp_path).notes == {"deep": nested(depth)}
    with pytest.raises(sg.DataTypeError, match=r"the notes.*\nFix:"):
        training.save(tmp_path, notes={"deep": nested(3000)})


def test_a_label_of_half_a_character_is_saved(tmp_path: Path) -> None:
    training = network()
    training.layers[0].label = "a\ud800"
    training.save(tmp_path)
    assert sg.load(tmp_path).layers[0].label == "a\ud800"
