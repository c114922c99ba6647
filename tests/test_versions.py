"""Versions: what `make test-oldest` installs is the oldest that the package accepts."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
TOOLS = {"bench", "dev", "docs", "test"}  # extras of this repository, not of users


def limits() -> dict[str, Version]:
    """The oldest version of each library that has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (rows for name, rows in project["optional-dependencies"].items() if name not in TOOLS)
    rows = map(Requirement, [*project["dependencies"], *(row for rows in extras for row in rows)])
    return {row.name: Version(one.version) for row in rows for one in row.specifier if one.operator == ">="}


def installed() -> dict[str, Version]:
    """The first version that each constraint allows."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints-oldest.txt").read_text().splitlines())
    rows = map(Requirement, filter(None, lines))
    return {row.name: Version(one.version.removesuffix(".*")) for row in rows for one in row.specifier}


def test_the_oldest_versions_that_are_accepted_are_tested() -> None:
    oldest, tested = limits(), installed()
    assert {"numpy", "torch"} <= oldest.keys()
    assert {name: tested.get(name) for name in oldest} == oldest
