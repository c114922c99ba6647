"""Rows of the conformance table: the GRU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.gru import GRUDescriptor, GRULayer
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from tests.layers.case import Bad, Case, normal

BATCH, STEPS, INPUTS, HIDDEN = 3, 4, 3, 2


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclass(frozen=True)
class Setting:
    """A GRU under test, and the same thing in NumPy and in PyTorch."""

    layers: int = 1
    biases: bool = True
    batch_first: bool = True
    both: bool = False
    sequences: bool = True
    state_out: bool = False
    state_in: bool = False
    lengths: tuple[int, ...] | None = None
    after: bool = True
    dropout: float = 0.0

    @property
    def directions(self) -> int:
        return 2 if self.both else 1

    def layer(self) -> GRULayer:
        """The layer, always with the same numbers; small, so that no gate is saturated."""
        generator = np.random.default_rng(17)

        def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
            return [Tensor(shape, data=generator.normal(0, 0.5, shape).astype(np.float32)) for shape in shapes]

        count = self.layers * self.directions
        sizes = [INPUTS, *[HIDDEN * self.directions] * (self.layers - 1)] * self.directions
        return GRULayer(
            GRUDescriptor(
                INPUTS,
                HIDDEN,
                self.layers,
                uses_biases=self.biases,
                batch_first=self.batch_first,
                is_bidirectional=self.both,
                returns_sequences=self.sequences,
                returns_state=self.state_out,
                dropout=self.dropout,
                reset_after=self.after,
            ),
            tensors(*((HIDDEN, size) for size in sizes for _ in range(3))),
            tensors(*[(HIDDEN, HIDDEN)] * (3 * count)),
            tensors(*[(HIDDEN,)] * (3 * count)) if self.biases else None,
            tensors(*[(HIDDEN,)] * count) if self.biases and self.after else None,
        )

    def sources(self) -> tuple[Any, ...]:
        x = (BATCH, STEPS) if self.batch_first else (STEPS, BATCH)
        lengths = np.array(self.lengths or (), dtype=np.int64)
        return (
            normal(*x, INPUTS),
            *((normal(self.layers, self.directions, BATCH, HIDDEN),) if self.state_in else ()),
            *((lambda generator: lengths,) if self.lengths else ()),
        )

    def reference(self, x: np.ndarray, *others: np.ndarray, **tensors: Any) -> Any:
        """Sequence by sequence, step by step, gate by gate."""
        x = x if self.batch_first else x.swapaxes(0, 1)
        shape = self.layers, self.directions, BATCH, HIDDEN
        first, final = others[0] if self.state_in else np.zeros(shape), np.empty(shape)
        output = np.zeros((BATCH, STEPS, self.directions * HIDDEN))
        for n in range(BATCH):
            count = STEPS if self.lengths is None else self.lengths[n]
            rows = x[n, :count]
            for layer in range(self.layers):
                found = np.zeros((count, self.directions * HIDDEN))
                for direction in range(self.directions):
                    h, index = first[layer, direction, n], direction * self.layers + layer
                    for t in range(count)[:: -1 if direction else 1]:
                        h = self.step(rows[t], h, index, **tensors)
                        found[t, direction * HIDDEN : (direction + 1) * HIDDEN] = h
                    final[layer, direction, n] = h
                rows = found
            output[n, :count] = rows
        if not self.sequences:
            output = final[-1].swapaxes(0, 1).reshape(BATCH, 1, -1)
        output = output if self.batch_first else output.swapaxes(0, 1)
        return (output, final) if self.state_out else output

    def step(
        self,
        x: np.ndarray,
        h: np.ndarray,
        index: int,
        input_weights: Any,
        hidden_weights: Any,
        biases: Any = None,
        hidden_biases: Any = None,
    ) -> np.ndarray:
        w, u = (tensors[3 * index : 3 * index + 3] for tensors in (input_weights, hidden_weights))
        b = [0.0] * 3 if biases is None else biases[3 * index : 3 * index + 3]
        d = 0.0 if hidden_biases is None else hidden_biases[index]
        r, z = (sigmoid(w[i] @ x + u[i] @ h + b[i]) for i in (0, 1))
        hidden = r * (u[2] @ h + d) if self.after else u[2] @ (r * h)
        return (1 - z) * np.tanh(w[2] @ x + b[2] + hidden) + z * h

    def twin(self, x: torch.Tensor, *others: torch.Tensor, **tensors: Any) -> Any:
        """`torch.nn.GRU` with our tensors in its place; the second biases are zero except the candidate's."""
        module = torch.nn.GRU(INPUTS, HIDDEN, self.layers, self.biases, self.batch_first, 0.0, self.both).double()
        own = {}
        for layer in range(self.layers):
            for direction in range(self.directions):
                index, end = direction * self.layers + layer, f"_l{layer}{'_reverse' if direction else ''}"
                some = slice(3 * index, 3 * index + 3)
                own[f"weight_ih{end}"] = torch.cat(tensors["input_weights"][some])
                own[f"weight_hh{end}"] = torch.cat(tensors["hidden_weights"][some])
                if self.biases:
                    own[f"bias_ih{end}"] = torch.cat(tensors["biases"][some])
                    zeros = x.new_zeros(2 * HIDDEN)
                    own[f"bias_hh{end}"] = torch.cat([zeros, tensors["hidden_biases"][index]])
        given = (others[0].flatten(0, 1),) if self.state_in else ()
        y, final = torch.func.functional_call(module, own, (x, *given))
        return (y, final.unflatten(0, (self.layers, self.directions))) if self.state_out else y

    def case(self, name: str, twin: bool = True, **more: Any) -> Case:
        return Case(f"GRU, {name}", self.layer, self.sources(), self.reference, self.twin if twin else None, **more)


X, STATE = (BATCH, STEPS, INPUTS), (1, 1, BATCH, HIDDEN)
BAD = (
    Bad(((3, 4, 5),), ShapeError, "the source is [3, 4, 5], but [batch, steps, 3] is needed"),
    Bad((X, (1, 1, 3, 5)), ShapeError, "h0 is [1, 1, 3, 5] float32, but [1, 1, 3, 2] float32 is needed"),
    Bad((X, STATE, STATE), ArgumentError, "two of the sources are floating besides the sequences"),
    Bad((X, TensorDescriptor((4,), np.int64)), ShapeError, "sequence lengths are [4], but the batch has 3 sequences"),
    Bad((X, TensorDescriptor((3,), "boolean")), DataTypeError, "sequence lengths are integers"),  # type: ignore[arg-type]
    Bad((np.zeros(X, np.float16),), DataTypeError, "the source is float16, but the weights are float32"),
)
CASES: list[Case] = [
    Setting().case("plain", bad=BAD),
    Setting(state_in=True, state_out=True, biases=False, batch_first=False).case("states, steps first", deep=True),
    Setting(layers=2, both=True, state_in=True, state_out=True).case("stacked both ways", deep=True),
    Setting(both=True, sequences=False, after=False).case("reset before", twin=False, deep=True),
    Setting(both=True, lengths=(4, 1, 3), state_in=True, state_out=True).case("lengths", twin=False, deep=True),
    Setting(both=True, lengths=(2, 4, 3), after=False, state_out=True).case("lengths, reset before", twin=False),
]
