"""`benchmarks.parallel`: ratios, plans of large models against formulas, and a small run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import parallel, rank_plans
from stepgraph.compiler.ranks.slices import BLOCK

ROOT = Path(__file__).parents[1]
FLOAT = 4  # bytes


def test_ratios_are_of_the_same_round() -> None:
    seconds = {"tree": [2.0, 3.0], "ddp": [2.0, 6.0]}
    found = parallel.summary({"seconds": seconds, "planned": {"tree": 8}, "formula": {}, "wire": {}})
    assert found["medians"] == {"tree": 2.5, "ddp": 4.0}
    assert found["ratios"]["tree"]["ddp"] == [0.625, 0.75, 0.875]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(parallel.table("mlp", {2: found}, "cpu"))
    assert "0.750" in shown.get() and "8 B" in shown.get()


@pytest.mark.parametrize("is_llama", [False, True])
def test_the_plan_of_a_language_model_is_what_formulas_say(is_llama: bool, tmp_path: Path) -> None:
    model = rank_plans.Language(2, 64, 4, 256, 100, 16, is_llama=is_llama)
    console = Console(width=150)
    with console.capture() as shown:
        rank_plans.show(console, [1, 8], tmp_path / "plans.json", {"small": model})
    plans = json.loads((tmp_path / "plans.json").read_text())["small"]
    for ranks, plan in ((int(ranks), plan) for ranks, plan in plans.items()):
        formulas = model.formulas(ranks)
        assert plan["parameters"] == formulas["parameters"] == FLOAT * model.parameters
        tolerance = 2 * FLOAT * BLOCK  # a block more or less of both buffers
        assert plan["optimizer_state"] == pytest.approx(formulas["optimizer_state"], abs=tolerance)
        assert plan["sent"] == pytest.approx(formulas["sent"], abs=ranks * tolerance)
        assert plan["total"] == sum(size for line, size in plan.items() if line not in ("total", "sent"))
    assert f"{model.parameters:,} parameters" in shown.get() and "by hand" in shown.get()


def test_known_models_have_their_known_sizes() -> None:
    gpt2, llama = rank_plans.MODELS.values()
    assert gpt2.parameters == 124_439_808  # as OpenAI's, whose last layer shares the embedding
    assert llama.parameters == 6_738_415_616  # as Meta's


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--models", "x"], "no model 'x'"), (["--ranks", "1,0"], "--ranks is 1,0")):
        with pytest.raises(SystemExit):
            parallel.main(arguments)
        assert message in capsys.readouterr().err


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.parallel", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
def test_small_worlds_are_compared(tmp_path: Path) -> None:
    shown = run("--small", "--models", "mlp", "--rounds", "2", "--seconds", "0.01", "--json", str(tmp_path / "a.json"))
    worlds = json.loads((tmp_path / "a.json").read_text())["models"]["mlp"]
    assert set(worlds) == {"1", "2"} and "ddp" in shown
    assert set(worlds["2"]["ratios"]["tree"]) == {"any", "ddp"}
    if worlds["2"]["wire"]:  # with the headers of small packets, and whatever else runs here
        assert worlds["2"]["wire"]["tree"] >= worlds["2"]["planned"]["tree"]


@pytest.mark.deep
def test_large_models_are_planned_in_time() -> None:
    assert "6,738,415,616 parameters" in run("--plan")
