"""What a file of tuned code contributes to the compiler, and what justifies it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from stepgraph.compiler.kernels.alternatives import Alternative
from stepgraph.compiler.launch_record import Record
from stepgraph.compiler.step import Step

Function = Callable[..., Sequence[torch.Tensor]]
Launcher = Callable[[Function, Any, Callable[[Record], object]], Function]


@runtime_checkable
class Launching(Protocol):
    """A fused function that can launch its kernels without the code around them.

    Attributes:
        is_direct: whether it knows its kernels, so that it can.
    """

    is_direct: bool

    def launch(
        self,
        bound: Sequence[torch.Tensor | None],
        opened: Sequence[tuple[int, Hashable]],
        others: Mapping[Any, torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """Launches the kernels.

        Args:
            bound: the given arrays. If this is the same sequence as in the last call, they have not changed.
            opened: the indices of those that are not among them, and their names; likewise.
            others: these, by name.
        """


@dataclass(eq=False)
class Tuned:
    """One row of the manifest.

    Args:
        name: a short description, and the name of its pass.
        hardware: where it applies.
        pattern: to which operators and shapes.
        gains: by network of the benchmark, the time of a whole step without it, relative to the time with it; those
            that justify it.
        results: the file in `benchmarks/results/` that has them, with the command.
        condition: the steps it applies to.
        run: changes the operators that PyTorch's compiler will fuse.
        takes_attention: whether it would replace attention over these queries, keys and values.
        offers: implementations that compete with PyTorch's in steps that are not fused.
        launches: wraps a function that PyTorch's compiler fused on the CPU, given the code it generated and what gets
            the record of its launches, once there is one.
        relaunches: makes such a function from the record of an earlier run.
        is_on: false only while its gain is measured.
    """

    name: str
    hardware: str
    pattern: str
    gains: Mapping[str, float]
    results: str
    condition: Callable[[Step], bool]
    run: Callable[[fx.Graph], Any] | None = None
    takes_attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool] | None = None
    offers: tuple[Alternative, ...] = ()
    launches: Launcher | None = None
    relaunches: Callable[[Record], Function] | None = None
    is_on: bool = True

    def applies(self, step: Step) -> bool:
        """Whether it is used for a step."""
        return self.is_on and self.condition(step)


def on_cpu(step: Step) -> bool:
    """Steps on the CPU."""
    return step.device.type == "cpu"


def on_gpu(step: Step) -> bool:
    """Steps on a GPU."""
    return not on_cpu(step)


def on_linux_arm(step: Step) -> bool:
    """Steps on ARM processors under Linux; macOS has its own libraries."""
    return on_cpu(step) and platform.machine() == "aarch64"


def on_x86(step: Step) -> bool:
    """Steps on x86 processors."""
    return on_cpu(step) and platform.machine().lower() in ("x86_64", "amd64")
