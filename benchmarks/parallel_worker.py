"""One rank of `benchmarks.parallel`: all contenders take turns, and the first rank writes what was measured."""

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import stepgraph as sg
from benchmarks import in_pytorch
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import BETAS, EPSILON, MODELS, SMALL, Model
from benchmarks.peers import set_tf32
from stepgraph.runtime import world

TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}  # relative difference of losses
OPTIONS = {"cpu": sg.GraphCompilationOptions.NONE, "cuda": sg.GraphCompilationOptions.DISABLE_LAYER_FUSION}
LOOPBACK = Path("/proc/net/dev")


class Alone(Stepgraph):
    """One process without `parallel`; on a GPU, unfused, since compiling would take most of the time."""

    options = OPTIONS


class Tree(Alone):
    """One shard for each rank, added in a fixed order."""

    order = "tree"

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        self.parallel, self.rows = sg.Parallel(shards=_world_size(), order=self.order), model.batch_size
        super().__init__(model, device, dropout)

    @property
    def planned(self) -> int:
        """The bytes that a rank should send in a step."""
        return self.training.memory_plan_for(self.rows, ranks=_world_size()).sent


class Any_(Tree):
    """The same, added in the order of the communication library."""

    order = "any"


class Exchanging(Tree):
    """A single rank that runs all collectives, with itself."""

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        world.ALWAYS_EXCHANGES = True
        try:
            super().__init__(model, device, dropout)
        finally:
            world.ALWAYS_EXCHANGES = False


class Network(nn.Module):
    """A network of `networks.py` as a module."""

    def __init__(self, model: Model, device: str) -> None:
        super().__init__()
        self.model, values = model, model.parameters()
        self.names = list(values)
        self.values = nn.ParameterList([torch.from_numpy(one).to(device) for one in values.values()])
        statistics = {name: torch.from_numpy(one).to(device) for name, one in model.statistics().items()}
        self.on = in_pytorch.Operators({}, statistics, dropout=False)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parameters = dict(zip(self.names, self.values, strict=True))
        return F.cross_entropy(self.model.network(self.on, parameters, inputs), labels)


class DDP:
    """PyTorch's loop; each rank has its rows of the batch."""

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        self.module = self.wrapped(Network(model, device))
        settings = {"lr": model.learning_rate, "betas": BETAS, "eps": EPSILON, "fused": True}
        self.optimizer = torch.optim.Adam(self.module.parameters(), **settings)
        own = (torch.from_numpy(one).to(device).chunk(_world_size()) for one in model.batch())
        self.inputs, self.labels = (parts[_rank()].contiguous() for parts in own)
        self.last: torch.Tensor | None = None

    def wrapped(self, module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.last = self.module(self.inputs, self.labels)
        self.last.backward()
        self.optimizer.step()

    def wait(self) -> None:
        if self.inputs.is_cuda:
            torch.cuda.synchronize()

    @property
    def loss(self) -> float:
        assert self.last is not None
        total = self.last.detach().clone()
        dist.all_reduce(total)
        return total.item() / _world_size()


class Eager(DDP):
    """The same loop of one process, without DistributedDataParallel."""

    def wrapped(self, module: nn.Module) -> nn.Module:
        return module


def contenders(ranks: int, fuse: bool) -> dict[str, Any]:
    """Who is compared in a world."""
    if ranks > 1:
        found: dict[str, Any] = {"tree": Tree, "any": Any_, "ddp": DDP}
    else:
        found = {"tree": Tree, "exchanging": Exchanging, "alone": Alone, "ddp": DDP, "eager": Eager}
    fused = dict.fromkeys(OPTIONS, sg.GraphCompilationOptions.FUSE_LAYERS)
    return {
        name: type(name, (kind,), {"options": fused}) if fuse and issubclass(kind, Alone) else kind
        for name, kind in found.items()
    }


def main(settings: Mapping[str, Any]) -> None:
    """Measures one world."""
    torch.set_num_threads(settings["threads"])
    # A barrier takes the current device, which is the right one here, and warns of it.
    warnings.filterwarnings("ignore", message=".*barrier.*device")
    device = settings["device"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        set_tf32(False)
    dist.init_process_group(world.BACKENDS[device])
    ranks = _world_size()
    model = (SMALL if settings["small"] else MODELS)[settings["model"]].on(device)
    if model.batch_size % ranks:
        model = model.of_batch(math.ceil(model.batch_size / ranks) * ranks)
    running = {name: kind(model, device, dropout=False) for name, kind in contenders(ranks, settings["fuse"]).items()}
    check(running, TOLERANCE[device])
    seconds, wire = measured(running, settings["rounds"], settings["seconds"])
    formula = 2 * (ranks - 1) / ranks * 4 * model.parameter_count
    found = {
        "rows": model.batch_size,
        "parameters": model.parameter_count,
        "seconds": seconds,
        "planned": {name: one.planned for name, one in running.items() if isinstance(one, Tree) and ranks > 1},
        "formula": dict.fromkeys(running, formula),
        "wire": wire,
    }
    if _rank() == 0:
        Path(settings["found"]).write_text(json.dumps(found))
    del running
    world.leave()  # captured collectives end before the group
    dist.destroy_process_group()


def check(running: Mapping[str, Any], tolerance: float) -> None:
    """Ends the program if the losses of three steps differ."""
    losses = {name: [] for name in running}
    for _ in range(3):
        for name, one in running.items():
            one.step()
            losses[name].append(one.loss)
    first, *others = losses
    for name in others:
        pairs = zip(losses[first], losses[name], strict=True)
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs):
            sys.exit(f"{name} computes other losses: {losses[first]} and {losses[name]}")


def measured(
    running: Mapping[str, Any], rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of a step by contender and round, and bytes that a rank has sent through the loopback device."""
    times: dict[str, list[float]] = {name: [] for name in running}
    sent: dict[str, int] = dict.fromkeys(running, 0)
    steps = _steps(running, seconds)
    for index in range(rounds):
        order = list(running)
        for name in order[index % len(order) :] + order[: index % len(order)]:
            before = _loopback()
            times[name].append(_turn(running[name], steps[name]) / steps[name])
            sent[name] += _loopback() - before
    sizes = {name: sent[name] / (rounds * steps[name] * _world_size()) for name in running}
    return times, sizes if _loopback() and _world_size() > 1 else {}


def _steps(running: Mapping[str, Any], seconds: float) -> dict[str, int]:
    """The steps of a turn, the same on all ranks."""
    found = {}
    for name, one in running.items():
        count = torch.tensor([max(1, min(500, round(seconds / _turn(one, 3) * 3)))])
        dist.broadcast(count, 0)
        found[name] = int(count)
    return found


def _turn(one: Any, steps: int) -> float:
    """Seconds until all ranks have run some steps."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        one.step()
    one.wait()
    dist.barrier()
    return time.perf_counter() - began


def _loopback() -> int:
    """Bytes sent through the loopback device so far; 0 where that is not known."""
    if not LOOPBACK.exists():
        return 0
    lines = (line.split(":", 1) for line in LOOPBACK.read_text().splitlines() if ":" in line)
    return next((int(numbers.split()[8]) for name, numbers in lines if name.strip() == "lo"), 0)


def _rank() -> int:
    return dist.get_rank()


def _world_size() -> int:
    return dist.get_world_size()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
