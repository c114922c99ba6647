"""The programs of `benchmarks/`: what they work out from times, what they ask for, and that they run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import first_step, fit, limits, memory, peers, scaling, step
from benchmarks.models import FURTHER, MODELS, SMALL, STANDING

ROOT = Path(__file__).parents[1]


def test_the_headline_is_the_ratio_to_the_best_peer() -> None:
    found = step.summary({"stepgraph": [1.0, 2.0, 1.0], "pytorch": [3.0, 6.0, 3.0], "jax": [2.0, 3.0, 2.0]})
    assert found["best_peer"] == "jax"
    assert found["ratio_to_best_peer"] == [1.75, 2.0, 2.0]  # of the same round, quartiles
    assert found["peers"]["pytorch"]["ratio_quartiles"] == [3.0, 3.0, 3.0]
    assert step.summary({"stepgraph": [1.0]})["best_peer"] is None


def test_losses_that_differ_end_the_program() -> None:
    class Other:
        def __init__(self, *_: object, **__: object) -> None:
            self.loss = 1.0

        def step(self) -> None: ...

    class Ours(Other):
        def step(self) -> None:
            self.loss *= 1 + 2e-4

    with pytest.raises(SystemExit, match="pytorch computes other losses"):
        step.check(SMALL["tiny"], {"stepgraph": Ours, "pytorch": Other}, "cpu")


def test_a_limit_counts_what_a_step_multiplies() -> None:
    work = limits.products(SMALL["mlp"])  # 5 → 6 → 7 → 10, three rows; no gradient for the first source
    forward, sources = 2 * 3 * (5 * 6 + 6 * 7 + 7 * 10), 2 * 3 * (6 * 7 + 7 * 10)
    assert sum(one.flops for one in work) == 2 * forward + sources
    assert limits.limit(work, 1.0, 1e9) == 2 * forward + sources  # arithmetic is slow: it alone counts
    assert limits.limit(work, 1e9, 1.0) == sum(one.size for one in work) > 4 * 3 * (5 + 6 + 7 + 10)


def test_a_limit_counts_a_channel_that_is_filtered_by_itself_once() -> None:
    work = limits.products(SMALL["separable"])  # 12 × 12 pixels, 3 images; 3 → 4 → 6 channels, both with a stride of 2
    stem, depth, point, full = 3 * 36 * 4 * 27, 3 * 9 * 4 * 9, 3 * 9 * 6 * 4, 3 * 6 * 10
    assert sum(one.flops for one in work) == 2 * (2 * stem + 3 * (depth + point + full))


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_model_has_a_limit(name: str) -> None:
    assert sum(one.flops for one in limits.products(SMALL[name])) > 0


def test_limits_of_recorded_steps_are_below_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["limits", str(ROOT / "benchmarks/results/step-h200.json")])
    limits.main()
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert {row[0].strip() for row in rows} == {"cnn", "transformer", "mlp", "tiny"}
    assert all(float(row[2]) < min(float(row[3]), float(row[5])) for row in rows)


def test_slopes_are_powers() -> None:
    points = [{"size": n, "wire": 3.0, "compile": 2.0 * n, "step": n * n / 7} for n in (10, 100, 1000)]
    assert scaling.slopes(points) == {"wire": [0.0, 0.0], "compile": [1.0, 1.0], "step": [2.0, 2.0]}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--models", "mpl"], "there is no model 'mpl'"),
        (["--peers", "torch"], "there is no peer 'torch'"),
        (["--batch", "0"], "--batch is 0"),
        (["--tf32"], "--tf32 is for --device cuda"),
    ],
)
def test_a_wrong_option_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit):
        peers.parsed(peers.parser("step", ""), arguments)
    assert words in capsys.readouterr().err


def test_programs_measure_the_standing_set_unless_told_otherwise() -> None:
    def chosen(*arguments: str) -> tuple[str, ...]:
        return tuple(peers.parsed(peers.parser("step", ""), list(arguments)).models)

    assert STANDING == ("mlp", "cnn", "resnet18", "lstm", "transformer", "tiny", "demo")
    assert chosen() == STANDING and chosen("--models", ",".join(FURTHER)) == FURTHER
    assert tuple(MODELS) == STANDING + FURTHER


def test_options_choose_the_batch_by_device() -> None:
    def batch(*arguments: str) -> int:
        return peers.parsed(peers.parser("step", ""), ["--models", "mlp", *arguments]).models["mlp"].batch_size

    assert (batch(), batch("--device", "cuda"), batch("--device", "cuda", "--batch", "7")) == (128, 4096, 7)


def test_the_measured_peak_has_all_that_lasts_and_agrees_with_the_plan() -> None:
    found = memory.measure(MODELS["mlp"], ["stepgraph", "pytorch"], "cpu")
    numbers = 4 * MODELS["mlp"].parameter_count
    assert all(size > 3 * numbers for size in found["measured"].values())  # parameters and Adam's two moments
    assert found["planned"] > 3 * numbers and abs(found["error"]) < 0.15


def test_fit_and_a_loop_by_hand_take_turns() -> None:
    found = fit.measure(SMALL["tiny"], "cpu", steps=3, rounds=2, recorded=True, progress="quiet")
    assert set(found) == {"by hand", "fit"} and all(len(times) == 2 and min(times) > 0 for times in found.values())


def test_a_first_step_has_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        monkeypatch.setenv(name, "elsewhere")
    for name in ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "JAX_ENABLE_COMPILATION_CACHE"):
        monkeypatch.setenv(name, "")
    with peers.cold_caches() as folder:
        assert os.environ["XDG_CACHE_HOME"].startswith(folder) and not any(Path(folder).iterdir())


@pytest.mark.deep
def test_the_programs_run_and_their_results_are_drawn(tmp_path: Path) -> None:
    short = ["--models", "tiny", "--peers", "pytorch"]
    for program, arguments in {
        "step": [*short, "--rounds", "2", "--steps", "2"],
        "first_step": [*short, "--rounds", "1"],
        "memory": short,
        "shares": [*short, "--rounds", "1"],
        "curves": short,
        "scaling": ["--most", "40", "--only", "depth,nodes"],
    }.items():
        file = tmp_path / f"{program}.json"
        command = [sys.executable, "-m", f"benchmarks.{program}", *arguments, "--json", str(file)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        assert json.loads(file.read_text())["program"] == program
        if program not in ("curves", "shares") and importlib.util.find_spec("matplotlib"):
            subprocess.run([sys.executable, "-m", "benchmarks.plot", str(file)], cwd=ROOT, check=True)
            assert "<svg" in file.with_suffix(".svg").read_text()


def test_files_are_drawn_together() -> None:
    plot = pytest.importorskip("benchmarks.plot", reason="needs matplotlib", exc_type=ImportError)
    one = {"program": "step", "device": "x", "command": "a", "models": {"mlp": 1, "cnn": 2}}
    other = one | {"command": "b", "models": {"cnn": 3, "lstm": 4}}
    found = plot.together([one, other])
    assert found["models"] == {"mlp": 1, "cnn": 2, "lstm": 4} and found["command"] == "a\nb"
    with pytest.raises(SystemExit, match="several programs or devices"):
        plot.together([one, other | {"device": "y"}])


def test_models_of_real_sizes_are_drawn_with_the_commands_that_measured_them(tmp_path: Path) -> None:
    plot = pytest.importorskip("benchmarks.plot", reason="needs matplotlib", exc_type=ImportError)
    report = json.loads((ROOT / "benchmarks/results/real-h200.json").read_text())
    drawn = plot.draw(report, plot.kind(report), tmp_path / "real.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in [*report["models"], "compile"])
    assert {model["command"] for model in report["models"].values()} == set(plot.command(report).split("\n"))


def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(SystemExit, match="nobody gave no first step of tiny"):
        first_step.measure("tiny", ["nobody"], 1, [])
