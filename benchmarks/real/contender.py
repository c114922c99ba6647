"""What every contender offers, and what all of them train with.

A contender is made with the weights and knows nothing of time. `make` is what a user waits for before the first step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.real.models import Model

Inputs = Mapping[str, torch.Tensor]
DECAY = 0.1
SETTLED = 3  # steps until `torch.compile` has also recorded its CUDA graphs, where it uses them


def copied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU; entries that share memory still do."""
    known = dict[int, torch.Tensor]()
    for one in state.values():
        if one.data_ptr() not in known:
            known[one.data_ptr()] = one.detach().cpu().clone()
    return {name: known[one.data_ptr()] for name, one in state.items()}


class Contender(ABC):
    """Trains a model step by step, in bfloat16 on a GPU and in float32 on a CPU.

    Args:
        model: what to train.
        device: `cpu` or `cuda`.
    """

    hides_memory = False  # whether the allocator no longer sees the memory of its steps once they have settled

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device, self.steps = model, device, 0

    @abstractmethod
    def make(self) -> None:
        """Builds and compiles what a step needs."""

    @abstractmethod
    def remember(self) -> None:
        """Keeps the first weights, between `make` and the first step."""

    @abstractmethod
    def step(self, inputs: Inputs, labels: torch.Tensor) -> None:
        """One training step, not awaited."""

    @abstractmethod
    def reset(self) -> None:
        """Starts again from the first weights, without compiling again."""

    @property
    @abstractmethod
    def loss(self) -> float:
        """The loss of the last step."""

    @property
    def settled(self) -> bool:
        """Whether steps have reached their final form."""
        return self.steps >= SETTLED

    @property
    def mode(self) -> str:
        """How its steps run, if it says so."""
        return ""

    def facts(self) -> dict[str, Any]:
        """What it says about itself once it has settled."""
        return {}

    def wait(self) -> None:
        """Waits for the last step."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> dict[str, int] | None:
        """The most memory since PyTorch's counters were reset; None on a device that does not count."""
        if self.device != "cuda":
            return None
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
