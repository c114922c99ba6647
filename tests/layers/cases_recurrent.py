"""LSTM cases, with a reference that runs each sequence, layer and direction by itself, one step after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.activation import ActivationDescriptor, ActivationType
from stepgraph.layers.recurrent import LSTMDescriptor, LSTMLayer, LSTMResultMode
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from tests.layers.case import Bad, Case, normal

Function = Callable[[Any], Any]

ACTIVATIONS: dict[ActivationType, Function] = {
    ActivationType.NONE: lambda x: x,
    ActivationType.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    ActivationType.TANH: np.tanh,
    ActivationType.HARD_SIGMOID: lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    ActivationType.SOFT_SIGN: lambda x: x / (1 + np.abs(x)),
    ActivationType.GELU_ERF: np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
}
USUAL = (ActivationType.SIGMOID, ActivationType.SIGMOID, ActivationType.TANH, ActivationType.SIGMOID)


@dataclass(frozen=True)
class Setting:
    """An LSTM under test, and the same thing in NumPy and in PyTorch."""

    inputs: int = 3
    hidden: int = 2
    layers: int = 1
    biases: bool = True
    batch_first: bool = True
    both: bool = False
    sequences: bool = True
    states_out: bool = False
    states_in: bool = False
    lengths: tuple[int, ...] | None = None
    batch: int = 3
    steps: int = 4
    peepholes: str = ""  # "matrix" or "diagonal"
    gates: tuple[ActivationType, ...] = USUAL
    result: ActivationType = ActivationType.TANH
    dropout: float = 0.0
    packed: bool = False  # Apple's parameter shapes

    @property
    def directions(self) -> int:
        return 2 if self.both else 1

    def descriptor(self) -> LSTMDescriptor:
        return LSTMDescriptor(
            self.inputs,
            self.hidden,
            self.layers,
            uses_biases=self.biases,
            batch_first=self.batch_first,
            is_bidirectional=self.both,
            returns_sequences=self.sequences,
            dropout=self.dropout,
            result_mode=LSTMResultMode.OUTPUT_AND_STATES if self.states_out else LSTMResultMode.OUTPUT,
        )

    def layer(self, kind: type[LSTMLayer] = LSTMLayer) -> LSTMLayer:
        """The layer, always with the same numbers; small, so that no gate is saturated."""
        generator = np.random.default_rng(17)

        def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
            packed = [(1, math.prod(shape), 1, 1) if self.packed else shape for shape in shapes]
            return [Tensor(shape, data=generator.normal(0, 0.5, shape).astype(np.float32)) for shape in packed]

        hidden, count = self.hidden, self.layers * self.directions
        sizes = [self.inputs, *[hidden * self.directions] * (self.layers - 1)] * self.directions
        look = (hidden,) if self.peepholes == "diagonal" else (hidden, hidden)
        return kind(
            self.descriptor(),
            tensors(*((hidden, size) for size in sizes for _ in range(4))),
            tensors(*[(hidden, hidden)] * (4 * count)),
            tensors(*[look] * (4 * count)) if self.peepholes else None,
            tensors(*[(hidden,)] * (4 * count)) if self.biases else None,
            [ActivationDescriptor(kind) for kind in self.gates],
            ActivationDescriptor(self.result),
        )

    def sources(self) -> tuple[Any, ...]:
        x = (self.batch, self.steps) if self.batch_first else (self.steps, self.batch)
        state = normal(self.layers, self.directions, self.batch, self.hidden)
        lengths = np.array(self.lengths or (), dtype=np.int32)
        return (
            normal(*x, self.inputs),
            *((state, state) if self.states_in else ()),
            *((lambda generator: lengths,) if self.lengths else ()),
        )

    def reference(self, x: np.ndarray, *others: np.ndarray, **tensors: Any) -> Any:
        """Sequence by sequence."""
        x = x if self.batch_first else x.swapaxes(0, 1)
        batch, steps, _ = x.shape
        states = others[:2] if self.states_in else np.zeros((2, self.layers, self.directions, batch, self.hidden))
        finals = np.empty((2, self.layers, self.directions, batch, self.hidden))
        output = np.zeros((batch, steps, self.directions * self.hidden))
        last = np.empty((batch, 1, self.directions * self.hidden))
        for n in range(batch):
            sequence = x[n, : self.lengths[n]] if self.lengths else x[n]
            for layer in range(self.layers):
                results = []
                for direction in range(self.directions):
                    position = direction * self.layers + layer
                    order = slice(None, None, -1 if direction else 1)
                    h, c = states[0][layer, direction, n], states[1][layer, direction, n]
                    result, h, c = self._walk(sequence[order], h, c, self._gates(tensors, position))
                    results.append(result[order])
                    finals[:, layer, direction, n] = h, c
                sequence = np.concatenate(results, axis=1)
            output[n, : len(sequence)] = sequence
            last[n, 0] = finals[0, -1, :, n].reshape(-1)
        output = output if self.sequences else last
        output = output if self.batch_first else output.swapaxes(0, 1)
        return (output, *finals) if self.states_out else output

    def _gates(self, tensors: Any, position: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """W, U, P and b of the four gates of one layer and direction."""
        hidden, zero = self.hidden, np.zeros(self.hidden)
        found = []
        for index in range(4 * position, 4 * position + 4):
            look = tensors["peephole_weights"][index] if self.peepholes else np.zeros((hidden, hidden))
            look = np.diag(look.reshape(-1)) if self.peepholes == "diagonal" else look.reshape(hidden, hidden)
            bias = tensors["biases"][index].reshape(-1) if self.biases else zero
            input_weights = tensors["input_weights"][index].reshape(hidden, -1)
            found.append((input_weights, tensors["hidden_weights"][index].reshape(hidden, hidden), look, bias))
        return found

    def _walk(self, sequence: np.ndarray, h: np.ndarray, c: np.ndarray, gates: Any) -> tuple[np.ndarray, ...]:
        act_i, act_f, act_g, act_o = (ACTIVATIONS[kind] for kind in self.gates)
        outputs = np.empty((len(sequence), self.hidden))
        for t, x in enumerate(sequence):
            (wi, ui, pi, bi), (wf, uf, pf, bf), (wg, ug, pg, bg), (wo, uo, po, bo) = gates
            i = act_i(wi @ x + ui @ h + pi @ c + bi)
            f = act_f(wf @ x + uf @ h + pf @ c + bf)
            g = act_g(wg @ x + ug @ h + pg @ c + bg)
            c = f * c + i * g
            o = act_o(wo @ x + uo @ h + po @ c + bo)
            h = o * ACTIVATIONS[self.result](c)
            outputs[t] = h
        return outputs, h, c

    def twin(self, x: torch.Tensor, *others: torch.Tensor, **tensors: Any) -> Any:
        """`torch.nn.LSTM` on the same arrays."""
        module = self.module(tensors)
        states = tuple(state.flatten(0, 1) for state in others[:2]) if self.states_in else None
        if self.lengths:
            packed = pack_padded_sequence(x, torch.tensor(self.lengths), self.batch_first, enforce_sorted=False)
            output, finals = module(packed, states)
            output, _ = pad_packed_sequence(output, self.batch_first, total_length=self.steps)
        else:
            output, finals = module(x, states)
        finals = [state.unflatten(0, (self.layers, self.directions)) for state in finals]
        if not self.sequences:
            output = torch.cat(list(finals[0][-1]), 1).unsqueeze(1 if self.batch_first else 0)
        return (output, *finals) if self.states_out else output

    def module(self, tensors: Any) -> torch.nn.LSTM:
        """PyTorch's module over our arrays: gates one below the other, the second bias 0."""
        kind = {"bias": self.biases, "batch_first": self.batch_first, "bidirectional": self.both}
        module, flat = torch.nn.LSTM(self.inputs, self.hidden, self.layers, **kind), []
        for layer in range(self.layers):
            for direction in range(self.directions):
                four = slice(4 * (direction * self.layers + layer), 4 * (direction * self.layers + layer) + 4)
                flat.append(torch.cat([one.reshape(self.hidden, -1) for one in tensors["input_weights"][four]]))
                flat.append(torch.cat([one.reshape(self.hidden, -1) for one in tensors["hidden_weights"][four]]))
                if self.biases:
                    biases = torch.cat([one.reshape(self.hidden) for one in tensors["biases"][four]])
                    flat += [biases, torch.zeros_like(biases)]
        module._flat_weights = flat
        return module

    def case(self, name: str, *, twin: bool = True, training: bool = True, bad: tuple[Bad, ...] = ()) -> Case:
        theirs = self.twin if twin else None
        return Case(name, self.layer, self.sources(), self.reference, theirs, training=training, bad=bad)


def only(index: int, kind: ActivationType) -> tuple[ActivationType, ...]:
    """The usual activations but for one gate."""
    return (*USUAL[:index], kind, *USUAL[index + 1 :])


X, STATE, LENGTHS = (3, 4, 3), (1, 1, 3, 2), TensorDescriptor((3,), np.int32)
BAD = (
    Bad(((3, 4),), ShapeError, "the source is [3, 4], but [batch, steps, 3] is needed"),
    Bad(((3, 4, 5),), ShapeError, "the source is [3, 4, 5], but [batch, steps, 3] is needed"),
    Bad((TensorDescriptor(X, np.int32),), DataTypeError, "a floating type is needed"),
    Bad((TensorDescriptor(X, np.float64),), DataTypeError, "the source is float64, but the weights are float32"),
    Bad((X, STATE), DataTypeError, "the last source is [1, 1, 3, 2] float32, but sequence lengths are integers"),
    Bad((X, STATE, STATE, (3,)), DataTypeError, "is [3] float32, but sequence lengths are integers"),
    Bad((X, TensorDescriptor((4,), np.int64)), ShapeError, "sequence lengths are [4], but the batch has 3 sequences"),
    Bad((X, STATE, LENGTHS), ShapeError, "c0 is [3] int32, but [1, 1, 3, 2] float32 is needed"),
    Bad((X, (1, 3, 2), STATE), ShapeError, "h0 is [1, 3, 2] float32, but [1, 1, 3, 2] float32 is needed"),
    Bad((X, STATE, STATE, LENGTHS, LENGTHS), ShapeError, "5 sources were passed, but 1 to 4 are needed"),
)

CASES = [
    Setting().case("LSTM", bad=BAD),
    Setting(biases=False).case("LSTM, no biases"),
    Setting(layers=3).case("LSTM, three layers"),
    Setting(both=True).case("LSTM, bidirectional"),
    Setting(both=True, layers=2, hidden=3).case("LSTM, bidirectional, two layers"),
    Setting(batch_first=False, both=True).case(
        "LSTM, steps first",
        bad=(Bad(((4, 3, 5),), ShapeError, "the source is [4, 3, 5], but [steps, batch, 3] is needed"),),
    ),
    Setting(sequences=False).case("LSTM, last output"),
    Setting(sequences=False, both=True, layers=2).case("LSTM, last outputs, bidirectional"),
    Setting(sequences=False, batch_first=False, both=True, lengths=(2, 4, 1)).case("LSTM, last outputs, steps first"),
    Setting(states_out=True, layers=2, both=True).case("LSTM, states out"),
    Setting(states_in=True).case("LSTM, states in"),
    Setting(states_in=True, states_out=True, layers=2, both=True, batch_first=False).case("LSTM, states in and out"),
    Setting(lengths=(4, 3, 1)).case("LSTM, sorted lengths"),
    Setting(lengths=(2, 4, 1), states_out=True, both=True).case("LSTM, lengths"),
    Setting(lengths=(2, 3, 1), states_in=True, states_out=True, layers=2, both=True).case("LSTM, lengths and states"),
    Setting(lengths=(0, 4, 2), states_in=True, states_out=True, both=True).case("LSTM, empty sequence", twin=False),
    Setting(steps=1, states_in=True, both=True).case("LSTM, one step"),
    Setting(packed=True, layers=2).case("LSTM, packed parameters"),
    Setting(layers=2, dropout=0.5).case("LSTM, dropout in inference", training=False),
    Setting(peepholes="matrix").case("LSTM, peepholes", twin=False),
    Setting(peepholes="matrix", packed=True, both=True, layers=2, states_in=True, states_out=True, biases=False).case(
        "LSTM, packed peepholes", twin=False
    ),
    Setting(peepholes="diagonal", both=True, lengths=(2, 4, 1), states_in=True, states_out=True).case(
        "LSTM, diagonal peepholes", twin=False
    ),
    Setting(gates=only(0, ActivationType.HARD_SIGMOID)).case("LSTM, input activation", twin=False),
    Setting(gates=only(1, ActivationType.HARD_SIGMOID), both=True).case("LSTM, forget activation", twin=False),
    Setting(gates=only(2, ActivationType.SOFT_SIGN), batch_first=False).case("LSTM, candidate activation", twin=False),
    Setting(gates=only(3, ActivationType.GELU_ERF), sequences=False).case("LSTM, output activation", twin=False),
    Setting(result=ActivationType.NONE, lengths=(3, 1, 4), both=True).case("LSTM, result activation", twin=False),
]
