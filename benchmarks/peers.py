"""Who is compared, which of them can run here, and the same conditions for all of them."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.models import MODELS, STANDING, Model

OURS, OURS_FUSED, OURS_UNFUSED, EAGER = "stepgraph", "fused", "unfused", "pytorch"


class Peer(NamedTuple):
    """Where a peer's class is, what it needs, which devices and models it is for, and whether it must be asked for."""

    place: str
    packages: tuple[str, ...] = ("torch",)
    devices: tuple[str, ...] = ("cpu", "cuda")
    only_images: bool = False
    compiles: bool = False
    only_asked: bool = False

    def load(self) -> Any:
        """The class."""
        module, kind = self.place.split(":")
        return getattr(importlib.import_module(module), kind)

    def problem(self, device: str) -> str:
        """Why it cannot run here, or nothing."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        if device not in self.devices:
            return f"not made for {device}"
        if "jax" in self.packages and not importlib.import_module("benchmarks.in_jax").is_on(device):
            return f"this JAX cannot use {device}"
        if self.compiles and not shutil.which(os.environ.get("CXX", "c++")) and not shutil.which("g++"):
            return "torch.compile needs a C++ compiler"
        return ""


PEERS = {
    OURS: Peer("benchmarks.in_stepgraph:Stepgraph"),
    OURS_FUSED: Peer("benchmarks.in_stepgraph:Fused", devices=("cpu",), compiles=True),
    OURS_UNFUSED: Peer("benchmarks.in_stepgraph:Unfused", devices=("cpu",), only_asked=True),
    EAGER: Peer("benchmarks.in_pytorch:Eager"),
    "channels_last": Peer("benchmarks.in_pytorch:ChannelsLast", only_images=True),
    "compile": Peer("benchmarks.in_pytorch:Compiled", compiles=True),
    "reduce": Peer("benchmarks.in_pytorch:ReducedOverhead", devices=("cuda",), compiles=True),
    "jax": Peer("benchmarks.in_jax:Jax", ("jax", "optax")),
}


def usable(names: list[str], device: str, asked: bool, console: Console) -> list[str]:
    """Those that can run here. The others are named, or, if they were asked for, end the program."""
    found = []
    for name in names:
        problem = PEERS[name].problem(device)
        if problem and asked:
            sys.exit(f"{name}: {problem}")
        if problem:
            console.print(f"{name} is left out: {problem}", style="yellow")
        else:
            found.append(name)
    return found


def suits(name: str, model: Model) -> bool:
    """Whether the peer has something of its own to show for this model."""
    return model.has_images or not PEERS[name].only_images


def parser(
    program: str,
    description: str | None,
    *,
    compares: bool = True,
    models: Iterable[str] = STANDING,
    peers: str | None = None,
) -> argparse.ArgumentParser:
    """The options all programs have, and those of programs that compare.

    Args:
        program: its name.
        description: of which the first line is shown.
        compares: whether it compares models and peers.
        models: which, unless told otherwise.
        peers: which, with a comma between; by default, all but those that must be asked for.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}", description=(description or "").split("\n")[0]
    )
    if compares:
        others = ",".join(name for name in MODELS if name not in models)
        more = f"; there are also {others}" if others else ""
        made.add_argument("--models", default=",".join(models), help=f"which, comma between (%(default)s{more})")
        usual = ["all but unfused, if they can run"] if peers is None else dict.fromkeys([OURS, *peers.split(",")])
        made.add_argument("--peers", default=peers, help=f"which of {','.join(PEERS)} ({','.join(usual)})")
        made.add_argument("--batch", type=int, default=None, help="batch size (each model's own, by device)")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=False, help="timed steps on CUDA use TF32"
    )
    made.add_argument("--threads", type=int, default=None, help="CPU threads (as many as PyTorch takes by itself)")
    made.add_argument("--json", type=Path, default=None, help="a file for all the numbers")
    return made


def parsed(made: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked: `models` by name, `peers` with ours first."""
    options = made.parse_args(arguments)
    options.asked = options.peers is not None
    names = options.models.split(",")
    usual = [name for name, peer in PEERS.items() if not peer.only_asked]
    options.peers = list(dict.fromkeys([OURS, *(options.peers.split(",") if options.asked else usual)]))
    for kind, given, known in (("model", names, MODELS), ("peer", options.peers, PEERS)):
        for name in given:
            if name not in known:
                made.error(f"there is no {kind} {name!r}; there are {', '.join(known)}")
    for name in ("batch", "rounds", "steps", "threads"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            made.error(f"--{name} is {value}, it must be a whole number of at least 1")
    if options.tf32 and options.device == "cpu":
        made.error("--tf32 is for --device cuda")
    models = {name: MODELS[name].on(options.device) for name in names}
    options.models = {name: one.of_batch(options.batch) if options.batch else one for name, one in models.items()}
    return options


def prepare(options: argparse.Namespace) -> None:
    """The same conditions for everybody; before any library starts its threads."""
    options.caches = cold_caches()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves the others their memory
    for known in ("dynamo_pgo", "TensorFloat32", "Dynamo does not know how to trace the builtin"):
        warnings.filterwarnings("ignore", message=known)  # no cache and no TF32 is what was asked for
    if options.threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # the limit every library sees
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device here")


def cold_caches() -> tempfile.TemporaryDirectory:
    """An empty folder for what libraries keep between runs, so that nothing of an earlier run is used.

    stepgraph keeps there which kernels it chose. It keeps that in memory too: a first step is the first of a process.
    """
    folder = tempfile.TemporaryDirectory()
    places = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    os.environ |= {name: str(Path(folder.name) / name.lower()) for name in places}
    os.environ |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return folder


def set_tf32(on: bool) -> None:
    """Whether products and convolutions on a GPU may use TF32, for every library that is loaded."""
    import torch

    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_default_matmul_precision", "tensorfloat32" if on else "highest")


def surroundings(options: argparse.Namespace, program: str, peers: list[str]) -> dict[str, Any]:
    """What the numbers depend on."""
    import torch

    import stepgraph
    from stepgraph.compiler.kernels.choices import processor

    packages = sorted({package for name in peers for package in PEERS[name].packages} | {"numpy"})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_cpu = f"{cores}-core {platform.machine()} CPU"
    return {
        "program": program,
        "command": " ".join([f"python -m benchmarks.{program}", *_asked(sys.argv[1:])]),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else on_cpu,
        "processor": processor(),
        "tf32": options.tf32,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {OURS: stepgraph.__version__} | {one: importlib.metadata.version(one) for one in packages},
    }


def _asked(arguments: list[str]) -> list[str]:
    """The arguments that matter to the numbers: where the file goes does not."""
    dropped = {i + offset for i, one in enumerate(arguments) if one == "--json" for offset in (0, 1)}
    return [one for i, one in enumerate(arguments) if i not in dropped and not one.startswith("--json=")]
