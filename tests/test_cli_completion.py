"""Shells really complete: bash through the function that `complete` calls, zsh at a terminal, fish by asking it."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from stepgraph.cli import completion, device_argument
from stepgraph.cli.main import COMMANDS, parser
from tests.cli_graphs import Called

Capture = pytest.CaptureFixture[str]

# Words as bash hands them to a completion function: a:b is three of them.
BASH = """
source "$1"; shift
[[ $(complete -p stepgraph) == "complete -F _stepgraph stepgraph" ]] || exit 1
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stepgraph; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell, write in completion.SHELLS.items():
        (folder / shell).write_text(write(completion.described(parser())))
    for name in ("network", "net.svg"):
        (folder / name).touch()
    return folder


CASES = [
    ("stepgraph |", {*COMMANDS, "-h", "--help", "--version"}),
    ("stepgraph co|", {"compare", "completion"}),
    ("stepgraph inspect --b|", {"--batch-sizes"}),
    ("stepgraph inspect --no-plan --s|", {"--svg"}),
    ("stepgraph inspect net|", {"network", "net.svg"}),
    ("stepgraph inspect --svg net.|", {"net.svg"}),
    ("stepgraph inspect --batch-sizes |", set()),
    ("stepgraph demo |", set()),
    ("stepgraph demo --device c|", {"cpu", "cuda"}),
    ("stepgraph demo --device cpu :|", set(device_argument.SETTINGS)),
    ("stepgraph demo --device cpu : de|", {"default", "deterministic"}),
    ("stepgraph compare --devices cpu,g|", {"cpu,gpu"}),
    ("stepgraph compare --devices cpu : default,g|", {"default,gpu"}),
    ("stepgraph compare --devices cpu,gpu --t|", {"--tolerance"}),
    ("stepgraph completion |", {"bash", "zsh", "fish"}),
    ("stepgraph cache |", set()),
    ("stepgraph cache --d|", {"--disturbed"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("line, wanted", CASES)
def test_bash_completes(line: str, wanted: set[str], scripts: Path) -> None:
    words = line.removesuffix("|").split(" ")
    command = ["bash", "--norc", "-c", BASH, "bash", str(scripts / "bash"), *words]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and set(done.stdout.split()) == wanted


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize("line, wanted", [case for case in CASES if ":" not in case[0] and "," not in case[0]])
def test_fish_completes(line: str, wanted: set[str], scripts: Path) -> None:
    program = f"source {scripts}/fish; complete -C '{line.removesuffix('|')}'"
    done = subprocess.run(["fish", "-N", "-c", program], cwd=scripts, capture_output=True, text=True, check=False)
    found = {one.split("\t")[0] for one in done.stdout.splitlines()}
    assert done.stderr == "" and found == {one for one in wanted if not one.startswith("-") or "-" in line[-4:]}


def typed(shell: list[str], *lines: tuple[str, str], seconds: float = 60) -> str:
    """What a shell shows at a terminal after the last keys were typed; each wait for the text behind those before."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvp(shell[0], shell)
    shown = ""
    try:
        until = time.monotonic() + seconds
        for keys, wanted in lines:
            os.write(terminal, keys.encode())
            shown = ""
            while wanted not in shown and time.monotonic() < until:
                if select.select([terminal], [], [], 0.2)[0]:
                    read = os.read(terminal, 65536).decode(errors="replace")
                    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown + read)
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)
    return shown


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.filterwarnings("ignore:os.fork")  # JAX, where benchmarks have loaded it; here the shell takes over at once
@pytest.mark.parametrize(
    "line, wanted",
    [
        ("stepgraph insp", "stepgraph inspect"),
        ("stepgraph inspect --bat", "--batch-sizes"),
        ("stepgraph completion z", "completion zsh"),
        ("stepgraph demo --device xp", "--device xpu"),
        ("stepgraph inspect netw", "inspect network"),
    ],
)
def test_zsh_completes(line: str, wanted: str, scripts: Path) -> None:
    # A tab that comes before the prompt may be lost; the prompt is spelled so that the line itself does not show it.
    setup = f"autoload -U compinit && compinit -u -D && source {scripts}/zsh && cd {scripts} && PS1='rea''dy '\n"
    shown = typed(["zsh", "-f", "-i"], (setup, "ready "), (f"{line}\t", wanted))
    assert wanted in shown, shown


def test_every_option_of_the_parser_is_there(capsys: Capture) -> None:
    flags = {flag for one in completion.described(parser()) for flag in one.flags.split()}
    assert {"--devices", "--svg", "--live", "--save"} <= flags
    for shell in completion.SHELLS:
        called = Called(capsys, "completion", shell)
        assert called.code == 0 and called.err == ""
        spelled = called.out if shell != "fish" else called.out.replace(" -l ", " --").replace(" -s ", " -")
        assert all(flag in spelled for flag in flags) and all(name in called.out for name in COMMANDS)
