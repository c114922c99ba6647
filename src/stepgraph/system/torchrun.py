"""torchrun, which starts one program in several processes: what it tells each of them, and how it is called."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # needed to find the other processes
_MORE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS")


def has_started_several() -> bool:
    """Whether this process is one of several that torchrun started."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def environment() -> dict[str, str]:
    """What torchrun has told this process; empty if something else started it."""
    if "RANK" not in os.environ:
        return {}
    return {name: os.environ[name] for name in (*NAMES, *_MORE) if name in os.environ}


def command(processes: int, program: str | None = None) -> str:
    """What to type for this many processes of a program on this machine; by default, of this one.

    Example:
        >>> command(4, "train.py")
        'torchrun --standalone --nproc-per-node=4 train.py'
    """
    return f"torchrun --standalone --nproc-per-node={processes} {program or _this_program()}"


def _this_program() -> str:
    """The program with its arguments, as torchrun takes it; a placeholder for a session without one."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name and spec.name != "__main__":  # python -m
        return shlex.join(["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])
    if not sys.argv or not Path(sys.argv[0]).is_file():
        return "train.py"
    path, here = Path(sys.argv[0]), os.path.relpath(sys.argv[0])
    return shlex.join([here if not here.startswith("..") else str(path), *sys.argv[1:]])
