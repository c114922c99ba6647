"""What a machine offers for training, as plain values."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepgraph import __version__
from stepgraph.compiler.kernels.choices import CHOICES, processor
from stepgraph.device import Device
from stepgraph.system import cxx, torchrun
from stepgraph.types import DeviceType

INSTALL = "https://pytorch.org/get-started/locally"


def look() -> dict[str, Any]:
    """Everything that `stepgraph devices` shows."""
    every = Device.of(DeviceType.GPU, selects_multiple_compute_devices=True)
    gpus = () if every is None else every.gpu_devices
    return {
        "any": str(Device.any()),
        "devices": [_cpu(), *(_gpu(gpu) for gpu in gpus)],
        "versions": _versions(),
        "compiler": _compiler(bool(gpus)),
        "kernels": _kernels(),
        "processes": processes(gpus),
        "missing": missing(gpus),
    }


def _cpu() -> dict[str, Any]:
    total, free = _host_memory()
    cores = _cores()
    name = processor()
    name = f"{platform.machine()}, part {name}" if name.startswith("0x") else name or platform.machine()
    threads = torch.get_num_threads()
    more = f"{threads} threads (OMP_NUM_THREADS sets them), {cores} cores"
    return {"device": "cpu", "name": name, "memory": total, "free": free, "threads": threads, "more": more}


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_memory() -> tuple[int | None, int | None]:
    """Total and free bytes, if the system provides them."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, macOS no count of free pages
        return None, None


def _gpu(gpu: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": str(gpu), "name": gpu.type, "memory": None, "free": None, "more": ""}
    if gpu.type == "cuda":
        facts = torch.cuda.get_device_properties(gpu)
        free, total = torch.cuda.mem_get_info(gpu)
        return found | {
            "name": facts.name,
            "memory": total,
            "free": free,
            "more": f"compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} multiprocessors",
        }
    if gpu.type == "mps":
        return found | {"name": "Apple GPU (Metal)", "memory": torch.mps.recommended_max_memory()}
    return found


def _versions() -> dict[str, str]:
    built = _built()
    found = {
        "stepgraph": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "torch": f"{torch.__version__}, built {'for ' + built if built else 'without CUDA and ROCm'}",
    }
    for name in ("numpy", "safetensors", "rich"):
        found[name] = metadata.version(name)
    if torch.cuda.is_available() and torch.version.cuda:
        found["cudnn"] = str(torch.backends.cudnn.version())
    driver = _nvidia_driver()
    return found | ({"nvidia driver": driver} if driver else {})


def _built() -> str:
    """The GPU platform this PyTorch was built for; empty if none."""
    return (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    )


def _nvidia_driver() -> str | None:
    """The version of the kernel's driver, if Linux provides it."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def _compiler(has_gpu: bool) -> dict[str, str]:
    """What PyTorch's compiler needs: a C++ compiler and Python's headers on the CPU, Triton on GPUs."""
    found = {"C++ compiler": cxx.path() or "none", "Python.h": str(_header() or "none")}
    triton = util.find_spec("triton") is not None
    return found | ({"triton": _version("triton") if triton else "none"} if has_gpu or triton else {})


def _header() -> Path | None:
    path = Path(sysconfig.get_path("include")) / "Python.h"
    return path if path.is_file() else None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _kernels() -> dict[str, Any]:
    file = CHOICES.file
    if file is None:
        return {"file": None, "exists": False, "choices": 0}
    return {"file": str(file), "exists": file.is_file(), "choices": len(CHOICES.stored())}


def processes(gpus: tuple[torch.device, ...]) -> dict[str, Any]:
    """What torchrun would find here: how many processes have a GPU or a core each, and what to type for them."""
    counts = {"cuda": len([gpu for gpu in gpus if gpu.type == "cuda"]), "cpu": _cores()}
    found = {"cuda": dist.is_available() and dist.is_nccl_available(), "cpu": dist.is_available()}
    usable = {kind: count for kind, count in counts.items() if count and found[kind]}
    commands = {kind: torchrun.command(count, "train.py") for kind, count in usable.items()}
    return {"counts": counts, "commands": commands, "started_by_torchrun": torchrun.environment()}


# What is missing


def missing(gpus: tuple[torch.device, ...]) -> list[dict[str, str]]:
    """What would make training faster or possible, and how to install it."""
    found = [] if gpus else [_no_gpu()]
    if cxx.path() is None:
        found.append({"what": "A C++ compiler: without one FUSE_LAYERS fails on the CPU", "fix": cxx.how_to_get()})
    elif _header() is None:
        fix = "install your Python's development files (python3-dev on Debian and Ubuntu, python3-devel on Fedora)"
        found.append({"what": "Python's headers: without them FUSE_LAYERS fails on the CPU", "fix": fix})
    if any(gpu.type == "cuda" for gpu in gpus) and util.find_spec("triton") is None:
        fix = f"pip install triton, or install PyTorch as described at {INSTALL}, which includes it on Linux"
        found.append({"what": "Triton: without it steps on CUDA are replayed, not fused", "fix": fix})
    return found


def _no_gpu() -> dict[str, str]:
    """Why PyTorch sees no GPU here, as far as is known."""
    what = "A GPU that PyTorch can use: graphs train on the CPU"
    if sys.platform == "darwin":
        if not torch.backends.mps.is_built():
            return {"what": what, "fix": f"this PyTorch was built without Metal: install the one from {INSTALL}"}
        return {"what": what, "fix": "PyTorch finds no Metal device: it needs Apple silicon and a recent macOS"}
    nvidia, amd = _has_nvidia(), Path("/dev/kfd").exists()
    if _built():
        return {"what": what, "fix": _no_driver(nvidia or amd)}
    if nvidia or amd:
        kind = "CUDA" if nvidia else "ROCm"
        return {"what": what, "fix": f"a {kind} driver is installed: install PyTorch's build for {kind}, see {INSTALL}"}
    fix = "no GPU driver was found; if you have a GPU, install its driver and the matching build of PyTorch"
    return {"what": what, "fix": f"{fix}, see {INSTALL}"}


def _has_nvidia() -> bool:
    return Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi") is not None


def _no_driver(has_driver: bool) -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs: unset it"
    if has_driver:
        return f"the installed driver does not work with this PyTorch, built for {_built()}: update the driver"
    return f"this PyTorch is built for {_built()}, but no driver was found: install the one for your GPU"
