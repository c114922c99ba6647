"""How a compiled graph runs, in a few lines: precision, chosen kernels, fused operators."""

from __future__ import annotations

from collections import defaultdict

import torch

from stepgraph.compiler import fusion
from stepgraph.compiler.program import Program, notes
from stepgraph.compiler.step import Fusion, Step
from stepgraph.optimizers import Optimizer
from stepgraph.runtime import switch as fixed
from stepgraph.runtime.executable import FUSES_AFTER, FUSES_AT, Executable
from stepgraph.runtime.switch import Switch

WIDTH = 96  # characters per line about kernels
MOST = 5  # lines about kernels


def described(program: Program, executable: Executable | None, switch: Switch | None = None) -> list[tuple[str, str]]:
    """Lines as (name, text); the name is empty if a line continues the one before.

    Args:
        program: the traced step.
        executable: what runs it; None if the next call creates it.
        switch: what decides when it is fused, if that is at a fixed step.
    """
    step = program.step
    batch = f"{step.batch[1]} in each of {step.shards} shards" if step.shards > 1 else str(step.batch[1])
    lines = [("batch", batch), *described_step(step)]
    if step.channels_last and step.device.type == "cpu":
        lines.append(("images", "channels last in memory, which measured faster here"))
    kernels = _kernels(program)
    lines += [("kernels" if not i else "", text) for i, text in enumerate(kernels)]
    if executable is not None:
        fused = _fused(executable) if switch is None else _fused_at(switch, executable)
        lines += [("fused", fused), ("runs as", _runs(executable))]
    return lines


def described_step(step: Step) -> list[tuple[str, str]]:
    """The lines that hold for every batch size."""
    lines = [("precision", _precision(step))]
    if step.optimizer is not None and step.training:
        lines += _optimizer(step, step.optimizer)
    return lines


def _optimizer(step: Step, optimizer: Optimizer) -> list[tuple[str, str]]:
    """The optimizer, and a line per group with what is different there."""
    first = f"{type(optimizer).__name__}, learning rate {optimizer.learning_rate:g}"
    first += f", weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else ""
    lines = [("optimizer", first + (", averages the parameters" if step.averages else ""))]
    for i, group in enumerate(optimizer.groups, 1):
        count = sum(1 for number in step.groups.values() if number == i)
        changes = ", ".join(group.changes) or "nothing different"
        lines.append(("", f"group {group.shown(step.names)}: {count} parameter{'s' * (count != 1)}, {changes}"))
    return lines


def _precision(step: Step) -> str:
    types = sorted({t.data_type.debug_description for t in step.held if t.data_type.is_floating}) or ["float32"]
    text = " and ".join(types)
    if step.compute_type is not None:
        text += f", layers compute in {str(step.compute_type).removeprefix('torch.')}"
        text += ", the loss is scaled" if step.scales_loss else ""
    return f"{text}, {_tf32(*step.precision.tf32)}" if step.device.type == "cuda" else text


def _tf32(products: bool, convolutions: bool) -> str:
    if products == convolutions:
        return f"TF32 {'allowed' if products else 'off'}"
    return f"TF32 for {'matrix products' if products else 'convolutions'} only"


def _kernels(program: Program) -> list[str]:
    """Operators with several implementations, and which layers use which."""
    if not program.step.chooses_kernels:
        return ["PyTorch's own, none chosen by measurement (DETERMINISTIC)"]
    chosen: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node in program.nodes:
        if found := notes(node).implementation:
            operator, name = found
            chosen[operator][name].append(notes(node).layer)
    aten = torch.ops.aten
    on_gpu = program.step.device.type == "cuda"
    if on_gpu and any(node.target is aten.convolution.default for node in program.nodes):
        chosen["convolution"]["cuDNN's fastest"] = [
            notes(node).layer for node in program.nodes if node.target is aten.convolution.default
        ]
    if not chosen:
        return ["PyTorch's own; no operator here has an alternative"]
    lines = [f"{operator}: {_implementations(found, WIDTH - len(operator))}" for operator, found in chosen.items()]
    lines += [] if program.step.measures_kernels else ["by a rule, not by measurement: the same on every rank"]
    hidden = len(lines) - MOST
    return lines if hidden <= 0 else [*lines[: MOST - 1], f"and {hidden + 1} more operators with alternatives"]


def _implementations(implementations: dict[str, list[str]], room: int) -> str:
    """Implementations with their layers, the most used first, as many as fit on a line."""
    parts = []
    for name, layers in sorted(implementations.items(), key=lambda item: -len(item[1])):
        names, shown = list(dict.fromkeys(layers)), ""
        for count in range(len(names), 0, -1):
            more = f" and {len(names) - count} more" if count < len(names) else ""
            shown = f"{name} ×{len(layers)} ({', '.join(names[:count])}{more})"
            if len(shown) <= room // len(implementations) - 2:
                break
        parts.append(shown)
    return "; ".join(parts)


def _fused(executable: Executable) -> str:
    state, count = executable.fusing, len(executable.part.nodes)
    match state:
        case "done":
            when = "before the first step" if executable.was_fused_first else "in the background"
            return f"{count} operators, by PyTorch's compiler, {when}, in {executable.fusion_seconds:.1f} s"
        case "under way":
            return f"nothing yet: {count} operators are being fused in the background for later steps"
        case "not yet":
            return f"nothing yet: fusion starts in the background after {FUSES_AT} steps or {FUSES_AFTER:g} s"
        case "never":
            step = executable.step
            if step.shards and step.device.type == "cuda" and step.chooses_kernels:
                return "nothing; compile(..., fuse=True) fuses operators before the first step, on every rank"
            if step.fusion is not Fusion.FIXED or step.memory_limit is not None:
                return "nothing"
            more = "" if fusion.has_compiler() else ", and needs a C++ compiler"
            return f"nothing; on the CPU, only fuse=True fuses this step{more}"
        case _:
            return f"nothing: {state}"


def _fused_at(switch: Switch, executable: Executable) -> str:
    count, first = len(executable.part.nodes), f"{fixed.FUSED_FROM:,}"
    if switch.fused is not None:
        seconds = switch.fused.fusion_seconds
        return f"{count} operators, by PyTorch's compiler, from step {first} on, in {seconds:.1f} s"
    if switch.refused:
        return f"nothing: {switch.refused}"
    if switch.is_under_way:
        return f"nothing yet: {count} operators are being fused in the background, for step {first} on"
    return f"nothing yet: tiny steps are fused from step {first} on"


def _runs(executable: Executable) -> str:
    part = executable.part
    again = sum(1 for node in part.nodes if notes(node).recomputed)
    text = f"{executable.mode}, {len(part.nodes)} operators"
    return f"{text}, {again} of them recomputed to save memory" if again else text
