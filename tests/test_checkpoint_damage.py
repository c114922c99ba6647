"""A checkpoint that was damaged, cut, mixed up or made by somebody else is refused, and the graph stays as it was."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

import stepgraph as sg
from stepgraph.checkpoint import files
from tests.checkpoint_runs import CPU, compiled, network, state, train

MESSAGE = r"(?s)^[^\n]+: .+\.\n(    .+\n)*Fix: .+\.$"


class Victim:
    """A checkpoint to damage, and a compiled graph that must not notice."""

    def __init__(self, folder: Path) -> None:
        self.training, self.other = compiled(network(seed=6)), folder / "other"
        train(self.training, 0, 1)
        self.path = self.training.save(folder / "whole")
        self.training.save(self.other)
        train(self.training, 1, 2)
        self.training.save(self.path)
        train(self.training, 2, 3)
        self.before = state(self.training)
        (self.tensors,), self.json = self.path.glob("*.safetensors"), self.path / files.DESCRIPTION
        self.originals = {file: file.read_bytes() for file in (self.tensors, self.json)}

    def repair(self) -> None:
        for file, content in self.originals.items():
            file.write_bytes(content)

    def refuses(self, words: str = "", kind: type[Exception] = sg.CheckpointError) -> None:
        """Both ways in are closed, and nothing has changed."""
        for way in (self.training.restore, lambda path: self.training.restore(path, partial=True), sg.load):
            with pytest.raises(kind, match=f"(?s){words}") as caught:
                way(self.path)
            assert str(caught.value).startswith(str(self.path))
        assert caught.match(MESSAGE)

    def untouched(self) -> None:
        assert state(self.training) == self.before
        self.repair()
        self.training.restore(self.path)  # the damage was what made the difference
        assert state(self.training) != self.before


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path)


def _flipped(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]


def _positions(length: int, count: int) -> Iterator[tuple[int, int]]:
    """Positions over the whole length, first and last byte included, and a bit for each."""
    for i, position in enumerate(np.unique(np.linspace(0, length - 1, count).astype(int))):
        yield int(position), i % 8


@pytest.mark.parametrize("which", ["tensors", "json"])
def test_a_flipped_bit_anywhere_is_noticed(which: str, victim: Victim) -> None:
    file = getattr(victim, which)
    content = victim.originals[file]
    for position, bit in _positions(len(content), 150):
        file.write_bytes(_flipped(content, position, bit))
        victim.refuses()
    victim.untouched()


@pytest.mark.deep
@pytest.mark.parametrize("which", ["tensors", "json"])
def test_a_changed_byte_is_noticed_nearly_everywhere(which: str, victim: Victim) -> None:
    file = getattr(victim, which)
    content = victim.originals[file]
    for position in range(0, len(content), 5 if which == "tensors" else 1):
        file.write_bytes(_flipped(content, position, position % 8))
        with pytest.raises(sg.CheckpointError):
            files.read(victim.path)
    victim.untouched()


@pytest.mark.parametrize("which", ["tensors", "json"])
def test_a_cut_or_longer_file_is_noticed(which: str, victim: Victim) -> None:
    file = getattr(victim, which)
    content = victim.originals[file]
    for length, _ in _positions(len(content), 60):
        file.write_bytes(content[:length])
        victim.refuses()
    for longer in (content + b"\0", content + b"\n", content + content, b" " + content):
        file.write_bytes(longer)
        victim.refuses()
    victim.untouched()


def test_mixed_up_and_missing_files_are_noticed(victim: Victim) -> None:
    (others,) = victim.other.glob("*.safetensors")
    victim.tensors.write_bytes(others.read_bytes())
    victim.refuses("is damaged")
    victim.repair()
    victim.json.write_bytes((victim.other / files.DESCRIPTION).read_bytes())
    victim.refuses("cannot be read", sg.StorageError)
    victim.repair()
    victim.tensors.write_bytes(victim.originals[victim.json])
    victim.json.write_bytes(victim.originals[victim.tensors])
    victim.refuses("damaged or not JSON")
    victim.repair()
    victim.tensors.unlink()
    victim.refuses("cannot be read", sg.StorageError)
    victim.repair()
    victim.json.unlink()
    victim.refuses(r"no complete checkpoint: no graph\.json")
    victim.repair()
    victim.untouched()


FOREIGN: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(1000),
    "a list": b"[]",
    "a number": b"3",
    "nothing": b"null",
    "an object": b"{}",
    "another program's": b'{"format": "other", "version": 1}',
    "text": "Überraschung".encode(),
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00",
    "deep": b"[" * 100_000,
    "latin": "ü".encode("latin-1"),
    "huge number": b'{"format": "stepgraph", "version": ' + b"9" * 5000 + b"}",
    "no version": b'{"format": "stepgraph"}',
    "true version": b'{"format": "stepgraph", "version": true}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_refused(name: str, victim: Victim) -> None:
    victim.json.write_bytes(FOREIGN[name])
    victim.refuses()
    victim.repair()
    victim.tensors.write_bytes(FOREIGN[name])
    victim.refuses("is damaged")
    victim.untouched()


def _signed(victim: Victim, description: dict[str, Any]) -> None:
    description.pop("sha256", None)
    files._write_description(victim.path, description)


def test_other_versions_are_refused_with_both_numbers(victim: Victim) -> None:
    _signed(victim, {**json.loads(victim.originals[victim.json]), "version": 7})
    victim.refuses("its format has version 7, but this stepgraph reads 1.*Fix: update stepgraph")
    victim.untouched()


def test_a_tensors_file_elsewhere_is_not_followed(victim: Victim) -> None:
    description = json.loads(victim.originals[victim.json])
    for name in ("../other/x.safetensors", "/etc/passwd", "tensors.safetensors", 3, None):
        _signed(victim, {**description, "tensors_file": {**description["tensors_file"], "name": name}})
        victim.refuses("names no tensors file")
    victim.untouched()


def test_signed_tensors_that_are_not_what_the_description_says_are_refused(victim: Victim) -> None:
    description = json.loads(victim.originals[victim.json])
    for content in (b"", b"no tensors", save({"other": torch.zeros(2)}), save({"conv.weights": torch.zeros(2)})):
        digest = hashlib.sha256(content).hexdigest()
        name = f"tensors-{digest[:16]}.safetensors"
        (victim.path / name).write_bytes(content)
        _signed(victim, {**description, "tensors_file": {"name": name, "bytes": len(content), "sha256": digest}})
        victim.refuses()
    victim.untouched()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in nested JSON, as (container, key)."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.deep) for i in range(1, 20))])
def test_a_whole_description_that_makes_no_sense_changes_nothing(seed: int, victim: Victim) -> None:
    """Well signed, but wrong in one place: refused with our own error, or taken as what it says."""
    generator = np.random.default_rng(seed)
    refused = 0
    for _ in range(40):
        description = json.loads(victim.originals[victim.json])
        places = [(container, key) for container, key in _places(description) if container is not description]
        container, key = places[generator.integers(len(places))]
        junk = [None, -1, 10**6, "junk", [], {}, [[1]], {"tensor": 10**6}, {"opaque": "function"}, 1.5]
        container[key] = junk[generator.integers(len(junk))]
        _signed(victim, description)
        try:
            fresh = sg.load(victim.path, CPU)
            victim.training.restore(victim.path)
            train(fresh, 3, 4)
        except sg.StepgraphError:
            refused += 1
            assert state(victim.training) == victim.before
        victim.before = state(victim.training)
    assert refused > 10


def test_a_damaged_member_names_the_others(tmp_path: Path) -> None:
    training = network()
    for _ in range(2):
        training.save(tmp_path, keep=3)
    (file,) = (tmp_path / "checkpoint-000002").glob("*.safetensors")
    file.write_bytes(_flipped(file.read_bytes(), 500, 0))
    with pytest.raises(sg.CheckpointError, match="others   checkpoint-000001"):
        training.restore(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-000002")
    training.restore(tmp_path)
