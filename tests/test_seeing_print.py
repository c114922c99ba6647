"""What graphs tell about themselves: as text, in notebooks, and as a profile by phase."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.compiler import fusion
from stepgraph.compiler.kernels import measure
from stepgraph.compiler.kernels.choices import Choices
from stepgraph.compiler.program import PartName
from stepgraph.compiler.step import Fusion
from stepgraph.draw.notebook import html_table
from stepgraph.runtime.description import described
from stepgraph.runtime.profile import Profile

CPU = sg.Device.cpu()
OPTIONS = sg.GraphCompilationOptions
IMAGES, CLASSES = np.ones((8, 3, 12, 12), np.float32), np.zeros(8, np.int64)


def digits(options: OPTIONS = OPTIONS.NONE, **settings: object) -> sg.TrainingGraph:
    images, classes, graph = sg.Tensor.image(12, 12, 3, 8), sg.Tensor((8,), "int64"), sg.Graph()
    hidden = graph.node(sg.ConvolutionLayer.create(3, 4, 3, label="edges"), images)
    hidden = graph.node(sg.ConvolutionLayer.create(4, 4, 3, label="shapes"), hidden)
    graph.node(sg.FullyConnectedLayer.create(4 * 144, 5, label="<head>"), graph.reshape((8, -1), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=2e-3))
    training.add_inputs({"picture & frame": images}, {"class": classes})
    training.compile(CPU, options, **settings)
    return training


def printed(graph: sg.TrainingGraph | sg.InferenceGraph) -> dict[str, str]:
    """The lines of `How it runs`, by name; a line without one goes on with the one before."""
    lines = str(graph).split("How it runs\n")[1].splitlines()
    found: dict[str, str] = {}
    for line in lines:
        name = line[:14].strip() or name  # noqa: F821
        found[name] = f"{found[name]}\n{line[14:]}" if name in found else line[14:]
    return found


def test_an_open_graph_tells_its_optimizer_before_the_first_call() -> None:
    x, y, graph = sg.Tensor((sg.BATCH, 3)), sg.Tensor((sg.BATCH, 2)), sg.Graph()
    graph.dense(x, 2)
    optimizer = sg.AdamWOptimizer(1e-3, weight_decay=0.1, groups=sg.DECAY_MATRICES_ONLY)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    assert "memory_plan_for(rows)" in str(training) and training.executables == []
    before = printed(training)
    assert set(before) == {"precision", "optimizer"} and "group not_a_matrix: 1 parameter" in before["optimizer"]
    training.execute({"x": np.ones((4, 3), np.float32)}, {"y": np.ones((4, 2), np.float32)})
    assert {name: printed(training)[name] for name in before} == before


def test_a_training_graph_tells_how_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    last = lambda known, *_: measure.Measurement(list(known)[-1], {}, {}, disturbed=False)  # noqa: E731
    monkeypatch.setattr(measure, "measure", last)  # the last is the fastest
    monkeypatch.setattr(fusion, "has_compiler", lambda: True)
    unknown = Choices()
    unknown.file = None  # nothing is remembered
    monkeypatch.setattr(measure, "CHOICES", unknown)
    training = digits()
    lines = printed(training)
    assert lines["batch"] == "8" and lines["precision"] == "float32"
    assert lines["optimizer"] == "AdamOptimizer, learning rate 0.002"
    assert "convolution: gemm ×2 (edges, shapes)" in lines["kernels"]
    assert re.search(r"convolution weights: (winograd|gemm) ×2 \(shapes, edges\)", lines["kernels"])  # ARM, others
    assert lines["fused"] == "nothing yet: tiny steps are fused from step 20,000 on"
    assert lines["runs as"].startswith("traced, ") and "again" not in lines["runs as"]
    assert len(str(training).split("How it runs")[1].splitlines()) <= 15
    training.optimizer.learning_rate = 0.5
    assert printed(training)["optimizer"].endswith("rate 0.5")


def test_options_show_in_how_it_runs() -> None:
    lines = printed(digits(OPTIONS.DETERMINISTIC, compute_type="bfloat16"))
    assert lines["precision"] == "float32, layers compute in bfloat16"
    assert lines["kernels"] == "PyTorch's own, none chosen by measurement (DETERMINISTIC)"
    assert lines["fused"] == "nothing"


def test_recomputing_shows() -> None:
    x, graph = sg.Tensor((512, 32)), sg.Graph()
    for _ in range(4):
        x = graph.node(sg.ActivationLayer.gelu(), graph.node(sg.FullyConnectedLayer.create(32, 32), x))
    graph.node(sg.ReductionLayer.mean((0, 1)), x)
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    training.compile(CPU)
    assert "again" not in printed(training)["runs as"]
    training.compile(CPU, memory_limit=int(0.8 * training.memory_plan.total))
    assert "recomputed to save memory" in printed(training)["runs as"]


def test_how_far_fusing_has_come_shows() -> None:
    training = digits()
    programs = training.compilation.programs
    program, executable = programs.program(8), programs.executable(PartName.STEP, 8)
    said = lambda: dict(described(program, executable))["fused"]  # noqa: E731
    object.__setattr__(executable.step, "fusion", Fusion.LATER)
    assert said() == "nothing yet: fusion starts in the background after 10 steps or 1 s"
    executable._fusing = object()  # type: ignore[assignment]
    assert "being fused in the background" in said()
    executable._fusing, executable.is_fused = None, True
    assert re.search(r"operators, by PyTorch's compiler, in the background, in \d+\.\d s$", said())
    executable.is_fused, executable._refused = False, "no compiler was found"
    assert said() == "nothing: no compiler was found"
    assert "fused" not in dict(described(program, None))


def test_many_kernels_stay_a_few_lines() -> None:
    x, graph = sg.Tensor.image(8, 8, 2, 1), sg.Graph()
    for index in range(30):
        x = graph.node(sg.ConvolutionLayer.create(2, 2, 1, label=f"convolution_number_{index}"), x)
    inference = sg.InferenceGraph([graph])
    inference.compile(CPU)
    lines = str(inference).split("How it runs")[1].splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 112
    assert " more)" in printed(inference)["kernels"]


# Notebooks


class Checked(HTMLParser):
    """Every tag is closed in order, and nothing comes from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        assert tag != "script" and not {"src", "href", "onload", "onclick"} & {name for name, _ in attrs}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_graphs_render_in_notebooks() -> None:
    training = digits()
    page = training._repr_html_()
    assert {"svg", "table", "pre"} <= set(Checked(page).tags)
    for words in ("TrainingGraph on cpu", "Memory plan", "How it runs", "&lt;head&gt;", "picture &amp; frame"):
        assert words in page
    assert "<head>" not in page
    root = ET.fromstring(training._repr_svg_())
    assert {group.get("data-input") for group in root.iter() if group.get("data-input")} == {"picture & frame", "class"}
    graph = sg.Graph()
    graph.node(sg.ActivationLayer.relu(), sg.Tensor((2, 3)))
    assert {"svg", "table"} <= set(Checked(graph._repr_html_()).tags)
    assert "not compiled" in sg.TrainingGraph([graph])._repr_html_()


def test_a_history_renders_in_notebooks() -> None:
    rows = [{"epoch": i, "step": 10 * i, "loss": 1 / i, "rate": 0.1, "seconds": 1.0, "matrix": []} for i in (1, 2)]
    page = sg.History(rows, best_epoch=2, stopped="finished")._repr_html_()
    assert Checked(page).tags.count("tr") == 3 and '<tr class="best">' in page and "finished" in page
    Checked(sg.History()._repr_html_())


def test_cells_are_quoted() -> None:
    assert "&lt;b&gt;" in html_table(["<a>"], [["<b>"]]) and "&lt;a&gt;" in html_table(["<a>"], [["<b>"]])


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_it_without_a_complaint(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset='utf-8'>{digits()._repr_html_()}")
    settings = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    page = (tmp_path / "page.html").as_uri()
    done = subprocess.run(
        [BROWSER, *settings, f"--user-data-dir={tmp_path}", page],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.count('class="node ') == 5 and "CONSOLE" not in done.stderr


# Profiles

ROWS = (
    ("conv", "forward", 0.002, 1024),
    ("conv", "gradient", 0.003, 2048),
    ("conv.weights", "gradient", 0.001, 0),
    ("conv.weights", "update", 0.001, 0),
    ("block.one", "forward", 0.004, 512),
    ("optimizer", "update", 0.0005, 16),
)


def test_a_profile_is_a_table_by_phase() -> None:
    profile = Profile(ROWS)
    conv, block, optimizer = profile.layers
    assert (conv.layer, conv.forward, conv.gradient, conv.update) == ("conv", 0.002, pytest.approx(0.004), 0.001)
    assert conv.memory == 3072 and block.layer == "block.one" and optimizer.update == 0.0005
    lines = [[cell.strip() for cell in line.split("│")] for line in str(profile).splitlines()]
    assert ["conv", "2.000", "4.000", "1.000", "7.000", "60.9%", "3.00 KiB"] in lines
    assert ["block.one", "4.000", "", "", "4.000", "34.8%", "512 B"] in lines
    assert ["together", "6.000", "4.000", "1.500", "11.500", "100.0%", "3.52 KiB"] in lines
    assert Checked(profile._repr_html_()).tags.count("tr") == 5


def test_the_best_of_several_profiles_has_the_least_time_of_each_row() -> None:
    best = Profile.best_of([Profile((("a", "forward", 0.2, 8),)), Profile((("a", "forward", 0.1, 8),))])
    assert best.rows == (("a", "forward", 0.1, 8),)


def test_a_training_graph_profiles_a_batch_and_learns_nothing() -> None:
    training = digits()
    weights = training.nodes[0].layer.weights.numpy().copy()
    profile = training.profile({"picture & frame": IMAGES}, {"class": CLASSES}, repeat=2)
    names = {cost.layer: cost for cost in profile.layers}
    assert {"edges", "shapes", "<head>", "Loss"} <= names.keys()
    assert min(names["edges"].forward, names["edges"].gradient) > 0
    assert sum(cost.update for cost in profile.layers) > 0
    assert np.array_equal(training.nodes[0].layer.weights.numpy(), weights) and training.optimizer.time_step == 1
    with pytest.raises(sg.ArgumentError, match="repeat is 0"):
        training.profile({"picture & frame": IMAGES}, {"class": CLASSES}, repeat=0)


def test_an_empty_profile_prints() -> None:
    assert "together" in str(Profile(()))


def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fusion, "has_compiler", lambda: True)
    page = (Path(__file__).parent.parent / "docs" / "seeing-problems.md").read_text()
    names: dict = {}
    for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(program, "seeing-problems.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "NaN in its result, in the forward pass of step 1." in printed and "root forward 1" in printed
    assert "Everything is finite in step 1." in printed and "[3, 5]" in printed
    (shown,) = re.findall(r"```text\n(How it runs\n.*?)```", page, re.DOTALL)
    without_count = [re.sub(r"\d+ operators", "", text) for text in (shown, printed)]  # it is PyTorch's
    assert without_count[0] in without_count[1]
    assert ET.parse("graph.svg").getroot().tag.endswith("svg")
