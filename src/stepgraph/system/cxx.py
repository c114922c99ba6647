"""The C++ compiler that PyTorch's compiler calls on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def name() -> str:
    """What PyTorch's compiler calls."""
    return os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")


def path() -> str | None:
    """Where it is, if it is installed."""
    found = shutil.which(name())
    # macOS has programs in the places of missing tools that offer to install them.
    if found is None or (sys.platform == "darwin" and not _answers("xcode-select", "-p")):
        return None
    return found


def works() -> bool:
    """Whether it is installed and answers; this takes milliseconds."""
    found = path()
    return found is not None and (sys.platform == "win32" or _answers(found, "--version"))


def how_to_get() -> str:
    """What to do if there is none."""
    if sys.platform == "darwin":
        return "xcode-select --install"
    if sys.platform == "win32":
        return "install Visual Studio's C++ build tools and start from their command prompt, or set CXX"
    return "install g++ (package g++ on Debian and Ubuntu, gcc-c++ on Fedora), or set CXX to another compiler"


def _answers(*command: str) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:  # not a program, or of another kind of processor
        return False
