"""The command `stepgraph`: help at once, exit codes, errors without tracebacks, pipes and interruptions."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import stepgraph as sg
from stepgraph.cli import device_argument
from stepgraph.cli import main as cli
from tests.cli_graphs import Called, saved_inference

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parent.parent
MODULE = [sys.executable, "-m", "stepgraph"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

# What pip writes for an entry point.
SCRIPT = "import sys\nfrom stepgraph.cli.main import main\nsys.exit(main())\n"


def ended(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)


# Help


@pytest.mark.parametrize("way", ["module", "script"])
def test_help_does_not_wait_for_torch(way: str, tmp_path: Path) -> None:
    script = tmp_path / "stepgraph"
    script.write_text(SCRIPT)
    start = ["-m", "stepgraph"] if way == "module" else [script]
    done = ended(sys.executable, "-X", "importtime", *start, "--help")
    assert done.returncode == 0 and "exit codes:" in done.stdout
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "stepgraph" in imported and not imported & {"torch", "numpy", "rich", "safetensors"}


@pytest.mark.parametrize("command", ["inspect", "report"])
def test_a_command_finds_its_modules_in_a_process_of_its_own(command: str, tmp_path: Path) -> None:
    done = ended(sys.executable, "-m", "stepgraph", command, tmp_path / "nowhere")
    assert done.returncode == 1 and "Fix:" in done.stderr and "Traceback" not in done.stderr


def test_elsewhere_all_public_names_are_there_at_once() -> None:
    from stepgraph import public

    names = [name for name in vars(public) if not name.startswith("_")]
    assert len(names) > 80 and all(vars(sg)[name] is getattr(public, name) for name in names)
    others = {name for name, one in vars(sg).items() if not name.startswith("_") and not isinstance(one, ModuleType)}
    assert others == set(names), "nothing else looks public"


def test_every_command_has_help_with_examples(capsys: Capture) -> None:
    commands = Path(cli.__file__).parent
    modules = {path.stem for path in commands.glob("*.py") if "\nHELP = " in path.read_text()}
    assert modules == set(cli.COMMANDS)
    for name in cli.COMMANDS:
        called = Called(capsys, name, "--help")
        assert called.code == 0 and f"usage: stepgraph {name}" in called.out
        assert f"stepgraph {name}" in called.out.partition("options:")[2], "an example"


def test_the_examples_in_the_help_are_understood() -> None:
    texts = [cli.EXAMPLES, *(import_module(f"stepgraph.cli.{name}").EXAMPLES for name in cli.COMMANDS)]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.startswith("  stepgraph ")]
    commands = [re.split(r"\s{2,}|\s\||\s>", line)[0].split()[1:] for line in lines]
    assert len(commands) > 15
    for command in commands:
        if "COMMAND" not in command:
            cli.parser().parse_args(command)


def test_version_and_no_command(capsys: Capture) -> None:
    assert Called(capsys, "--version").out == f"stepgraph {sg.__version__}\n"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == sg.__version__
    called = Called(capsys)
    assert called.code == 2 and "commands:" in called.err and called.out == ""


# Errors


@pytest.mark.parametrize(
    "given, words",
    [
        (["inspect"], "FILE"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["inspect", "x", "--batch-sizes", "1,x"], "'1,x' is not a list of batch sizes: use numbers such as 1,8,64"),
        (["inspect", "x", "--batch-sizes", "0"], "'0' is not a list of batch sizes"),
        (["inspect", "x", "--batch-sizes", ""], "'' is not a list of batch sizes"),
        (["inspect", "x", "--device", "quantum"], "'quantum' is not a device: use one of cpu, gpu"),
        (["inspect", "x", "--device", "cpu:1"], "cpu has no number"),
        (["inspect", "x", "--device", "cpu:warm"], "'warm' in 'cpu:warm' is not a setting"),
        (["compare", "x"], "--devices"),
        (["compare", "--devices", "cpu", "x"], "a comparison needs two"),
        (["compare", "--devices", "cpu,", "x"], "'' is not a device"),
        (["compare", "--devices", "cpu,cpu:float16:bfloat16", "x"], "float16 and bfloat16 cannot be combined"),
        (["compare", "--devices", "cpu,cpu:fused:deterministic", "x"], "fused and deterministic cannot be combined"),
        (["compare", "--devices", "cpu,cpu", "--tolerance", "nan", "x"], "'nan' is not a tolerance"),
        (["compare", "--devices", "cpu,cpu", "--batch-size", "-1", "x"], "'-1' is not a batch size"),
        (["demo", "--epochs", "0"], "'0' is not a number of epochs"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
        (["cache", "--measure", "--seconds", "nan"], "'nan' is not a duration: use a positive number of seconds"),
        (["cache", "--clear", "--measure"], "not allowed with argument --clear"),
    ],
)
def test_what_is_not_understood_ends_with_2(given: list[str], words: str, capsys: Capture) -> None:
    called = Called(capsys, *given)
    assert called.code == 2 and words in called.err and called.out == "" and "usage: stepgraph" in called.err


def test_a_device_that_is_not_there_is_refused(capsys: Capture, tmp_path: Path) -> None:
    path = saved_inference(tmp_path / "graph")
    for command in (["inspect", path, "--device"], ["compare", path, "--devices"], ["demo", "--device"]):
        called = Called(capsys, *command, "cpu,xpu:7" if "compare" in command else "xpu:7")
        assert called.code == 1 and called.out == ""
        assert re.match(r"device xpu:7: this machine has no such device .*\n    here   cpu", called.err)
        assert "`stepgraph devices` shows" in called.err


def test_devices_as_they_are_spelled() -> None:
    options = sg.GraphCompilationOptions
    found = device_argument.parse("cuda:1:bfloat16:fused:no-tf32")
    assert (found.name, found.index) == ("cuda", 1)
    assert found.compilation == {"options": options.FUSE_LAYERS, "compute_type": "bfloat16", "tf32": False}
    assert device_argument.parse("cpu").compilation == {}  # as it was saved
    assert device_argument.parse("cpu:default").compilation == {"options": options.NONE}
    assert device_argument.parse("cpu").device() == sg.Device.cpu()
    assert device_argument.parse("any").device() == sg.Device.any()
    every = {name for line in device_argument.SYNTAX.splitlines() for name in re.findall(r"[a-z0-9-]+", line)}
    assert {*device_argument.NAMES, *device_argument.SETTINGS} <= every, "the help explains all of it"


def test_errors_of_the_library_have_no_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(arguments: object) -> int:
        raise sg.StateError("here", "it fails", fix="do not", fact=1)

    monkeypatch.setattr("stepgraph.cli.devices.run", fails)
    called = Called(capsys, "devices")
    assert (called.code, called.out) == (1, "") and called.err == "here: it fails.\n    fact   1\nFix: do not.\n"


def test_an_interrupted_command_ends_with_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("stepgraph.cli.devices.run", interrupted)
    called = Called(capsys, "devices")
    assert (called.code, called.err) == (130, "interrupted\n")


# Real processes


def test_a_reader_that_has_gone_gets_no_traceback(tmp_path: Path) -> None:
    path = saved_inference(tmp_path / "graph")
    command = [*MODULE, "inspect", str(path), "--no-plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        process.stdout.close()  # as `| head -1` does
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_control_c_ends_the_demonstration_after_its_step() -> None:
    # That it trains at all shows that a command finds the public names when it asks for them.
    command = [*MODULE, "demo", "--epochs", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        line = next(line for line in process.stdout if line.startswith("epoch "))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert "loss" in line and process.returncode == 130
    assert errors == "interrupted\n" and "interrupted in epoch" in rest and "recognizes" not in rest
