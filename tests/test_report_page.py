"""The page in a real browser: it draws, answers, stays quick, and asks nobody for anything."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.report import page
from stepgraph.report.drawing import harmless
from stepgraph.report.live import LiveServer
from stepgraph.report.run import Run
from tests.browser import browser, why_missing
from tests.forked import forked
from tests.report_runs import NASTY, QUIET, arrays, deep, network, slow_training, time_to_look

needs_browser = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
LAYERS = 200


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small run."""
    folder, metrics = tmp_path_factory.mktemp("runs") / "small", [sg.accuracy, sg.ConfusionMatrix(3)]
    with time_to_look(1e9):
        sg.fit(network(), arrays(), validation=arrays(9, 1), epochs=4, run=folder, **{**QUIET, "metrics": metrics})
    return folder


@pytest.fixture
def shown(driver: Any, small: Path) -> Iterator[Any]:
    """The page of the small run, opened; afterwards nothing was complained about and nothing asked for."""
    yield opened(driver, (small / "report.html").as_uri())
    quiet(driver)


def opened(driver: Any, address: str) -> Any:
    driver.get_log("performance")
    driver.get_log("browser")
    driver.get(address)
    return driver


def quiet(driver: Any) -> None:
    """No message in the console, no request but the page's own."""
    assert driver.get_log("browser") == []
    events = [json.loads(one["message"])["message"] for one in driver.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert [one for one in asked if not one.startswith(("file:", "data:"))] == []


def js(driver: Any, code: str, *given: Any) -> Any:
    return driver.execute_script(code, *given)


def eventually(check: Callable[[], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@needs_browser
def test_every_section_tells_something(shown: Any) -> None:
    texts = js(
        shown, "return Object.fromEntries([...document.querySelectorAll('section')].map(s => [s.id, s.innerText]))"
    )
    expected = {
        "curves": ["Loss", "Accuracy", "Learning rate", "Throughput", "Numbers of 4 epochs", "validation"],
        "graph": ["fixed", "Convolution", "8 × 1 × 6 × 6", "frozen", "forward"],
        "profile": ["last", "FullyConnected", "optimizer", "update 24"],
        "memory": ["Known before the first step", "Alive at the peak", "activations"],
        "gradients": ["fixed.weights", "disable_update", "it depends on nothing that is trained"],
        "histograms": ["last.weights", "norm.gamma", "before an update"],
        "environment": ["python", "torch", "AdamOptimizer(learning_rate=0.01", "Training began", "finished"],
    }
    for section, words in expected.items():
        for word in words:
            assert word in texts[section], (section, word)
    assert "finished" in js(shown, "return document.querySelector('header').innerText")
    assert "null" not in " ".join(texts.values()) and "undefined" not in " ".join(texts.values())
    axes = js(shown, "return [...document.querySelectorAll('.plot .title')].map(t => t.textContent)")
    assert {"update", "loss", "rows / s", "bytes alive", "value"} <= set(axes)
    assert js(shown, "return Object.keys(window).filter(k => ['view', 'drawCurves', 'latest'].includes(k))") == []


@needs_browser
def test_a_click_on_a_layer_shows_its_facts(shown: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    node = shown.find_element("css selector", '.node[data-layer="last"]')
    ActionChains(shown).move_to_element(node).click().perform()
    facts = js(shown, "return document.querySelector('#facts').innerText")
    assert facts.startswith("last") and "3 × 144" in facts and "435" in facts and "gradient" in facts
    ActionChains(shown).send_keys(Keys.ARROW_DOWN).perform()  # the keyboard goes on from there
    assert js(shown, "return document.querySelector('#facts h3').textContent") == "loss"
    js(
        shown,
        "const s = document.querySelector('#layer'); s.value = 'norm'; s.dispatchEvent(new Event('change'))",
    )
    assert js(shown, "return document.querySelector('#facts h3').textContent") == "norm"
    assert js(shown, "return document.querySelectorAll('.node.chosen').length") == 1


@needs_browser
def test_the_graph_zooms_and_moves(shown: Any) -> None:
    from selenium.webdriver import ActionChains

    def box() -> list[float]:
        found = js(shown, "return document.querySelector('.canvas svg').getAttribute('viewBox')")
        return [float(one) for one in found.split()]

    first = box()
    shown.find_element("css selector", ".zoom button").click()
    closer = box()
    assert closer[2] == pytest.approx(first[2] / 1.3, rel=1e-3)
    canvas = shown.find_element("css selector", ".canvas")
    js(shown, "arguments[0].scrollIntoView({block: 'center'})", canvas)
    chosen = js(shown, "return document.querySelector('#facts h3').textContent")
    ActionChains(shown).move_to_element_with_offset(canvas, 150, 100).click_and_hold().move_by_offset(
        -60, -40
    ).release().perform()
    moved = box()
    assert moved[0] > closer[0] and moved[1] > closer[1] and moved[2] == closer[2]
    assert js(shown, "return document.querySelector('#facts h3').textContent") == chosen  # a drag chooses nothing
    shown.find_element("css selector", ".zoom button:last-child").click()
    assert box()[:2] == [0, 0]


@needs_browser
def test_tables_sort(shown: Any) -> None:
    def names() -> list[str]:
        return js(shown, "return [...document.querySelectorAll('#profile tbody tr')].map(r => r.dataset.row)")

    def head(number: int) -> Any:
        return shown.find_elements("css selector", "#profile thead button")[number]

    times = names()
    js(shown, "arguments[0].scrollIntoView({block: 'center'})", head(0))
    head(0).click()
    assert names() == sorted(times, key=str.casefold) and names() != times
    assert js(shown, "return document.querySelector('#profile th').getAttribute('aria-sort')") == "ascending"
    head(0).click()
    assert names() == sorted(times, key=str.casefold, reverse=True)
    head(5).click()
    assert names() == times  # by time, longest first
    js(shown, "document.querySelector('#profile .choice button').click()")
    assert "update 11" in js(shown, "return document.querySelector('#profile .lead').textContent")


@needs_browser
def test_curves_have_values_a_logarithmic_axis_and_smoothing(shown: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    ticks = "return [...document.querySelectorAll('.chart')[0].querySelectorAll('.tick text')].map(t => t.textContent)"
    line = "return document.querySelectorAll('.chart')[0].querySelectorAll('.line').length"
    linear, lines = eventually(lambda: js(shown, ticks)), js(shown, line)
    shown.find_element("css selector", '#curves [data-value="log"]').click()
    eventually(lambda: js(shown, ticks) not in ([], linear))
    js(
        shown,
        "const s = document.querySelector('input[type=range]'); s.value = 0.9; s.dispatchEvent(new Event('input'))",
    )
    eventually(lambda: js(shown, line) == lines + 1)
    plot = shown.find_element("css selector", ".chart .plot")
    js(shown, "arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(shown).move_to_element(plot).perform()
    readout = "return document.querySelector('.chart .readout').innerText"
    assert "update 1" in js(shown, readout) and "validation" in js(shown, readout)
    js(shown, "arguments[0].focus()", plot)
    ActionChains(shown).send_keys(Keys.END).perform()
    assert "update 24" in js(shown, readout)
    ActionChains(shown).move_to_element_with_offset(plot, -100, 0).click_and_hold().move_by_offset(
        120, 0
    ).release().perform()
    domain = (
        "return [...document.querySelector('.chart').querySelectorAll('text.tick')].map(t => Number(t.textContent))"
    )
    assert max(js(shown, domain)) < 24 and min(js(shown, domain)) > 1


@needs_browser
def test_it_fits_a_narrow_screen_and_has_two_schemes(shown: Any) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    seen = []
    for _ in range(3):
        shown.find_element("css selector", "#scheme").click()
        seen.append((js(shown, "return document.documentElement.dataset.scheme || 'auto'"), js(shown, paper)))
    assert [name for name, _ in seen] == ["light", "dark", "auto"] and seen[0][1] != seen[1][1]
    try:
        shown.set_window_size(500, 900)  # as narrow as this browser's window gets
        eventually(lambda: js(shown, "return innerWidth") <= 500)
        assert js(shown, "return document.documentElement.scrollWidth - innerWidth") <= 0
    finally:
        shown.set_window_size(1280, 900)


@needs_browser
def test_everything_can_be_reached_with_the_keyboard(shown: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    reached = set()
    for _ in range(60):
        ActionChains(shown).send_keys(Keys.TAB).perform()
        reached.add(js(shown, "return document.activeElement.closest('section')?.id || document.activeElement.tagName"))
    assert {"curves", "graph", "profile", "memory", "gradients", "histograms", "environment"} <= reached
    unnamed = js(shown, "return [...document.querySelectorAll('button, select, input')].filter(e => "
                 "!(e.innerText || e.getAttribute('aria-label') || e.closest('label')?.innerText)).length")  # fmt: skip
    assert unnamed == 0


@needs_browser
@pytest.mark.deep
def test_two_hundred_layers_stay_usable_and_no_label_runs(driver: Any, tmp_path: Path) -> None:
    rows = np.zeros((48, 8), np.float32)
    sg.fit(deep(LAYERS), (rows, rows), run=tmp_path, progress="quiet")
    began = time.monotonic()
    opened(driver, (tmp_path / "report.html").as_uri())
    eventually(lambda: js(driver, "return document.querySelectorAll('.node').length") >= LAYERS - 2)
    assert time.monotonic() - began < 10
    assert js(driver, "return document.querySelector('#facts h3').textContent") == NASTY
    assert js(driver, "return document.images.length") == 0
    # From the click to the facts on the screen, in the page's own time.
    took = driver.execute_async_script("""
        const done = arguments[arguments.length - 1];
        const node = [...document.querySelectorAll('.node')].find(n => n.dataset.layer.startsWith('block 30 '));
        const began = performance.now();
        node.dispatchEvent(new MouseEvent('click', {bubbles: true}));
        const facts = () => document.querySelector('#facts h3').textContent;
        requestAnimationFrame(() => setTimeout(() => done([performance.now() - began, facts()])));
    """)
    assert took[1].startswith("block 30 ") and took[0] < 1000  # some 20 ms, on a machine that does nothing else
    assert (tmp_path / "report.html").stat().st_size < 4_000_000
    quiet(driver)


def updates(driver: Any) -> int:
    """What the tile says."""
    tiles = js(driver, "return [...document.querySelectorAll('#tiles div')].map(tile => tile.innerText.split('\\n'))")
    return next(int(number) for name, number, *_ in tiles if name == "Updates")


@needs_browser
def test_a_live_page_follows_a_training_process(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.report.live.AFTERWARDS", 3.0)  # enough for the page to ask once more
    process = forked().Process(target=slow_training, args=(tmp_path, 0.1, False))
    process.start()
    eventually(lambda: (tmp_path / "run.jsonl").exists() and b'"memory"' in (tmp_path / "run.jsonl").read_bytes(), 120)
    server = LiveServer([Run(tmp_path)])
    thread = threading.Thread(target=server.serve, kwargs={"until_finished": True})
    thread.start()
    try:
        opened(driver, server.url)
        assert "training" in js(driver, "return document.querySelector('#status').innerText")
        js(driver, "document.querySelector('#curves [data-value=log]').click()")
        first = updates(driver)
        second = eventually(lambda: updates(driver) if updates(driver) > first else 0, 60)
        assert 0 < second < 36  # it moved on while the process was at work
        eventually(lambda: "finished" in js(driver, "return document.querySelector('#status').innerText"), 120)
        assert updates(driver) == 36
        pressed = "return document.querySelector('#curves [data-value=log]').getAttribute('aria-pressed')"
        assert js(driver, pressed) == "true"  # what the reader chose stays
        assert driver.get_log("browser") == []
    finally:
        process.join(60)
        thread.join(60)
    assert not thread.is_alive() and process.exitcode == 0


@needs_browser
def test_runs_are_compared_in_one_page(driver: Any, small: Path, tmp_path: Path) -> None:
    sg.fit(network(), arrays(seed=5), epochs=2, run=tmp_path / "other", **QUIET)
    page.write(tmp_path / "both.html", [Run(small), Run(tmp_path / "other")])
    opened(driver, (tmp_path / "both.html").as_uri())
    legend = js(driver, "return document.querySelector('.chart .legend').innerText")
    assert "small: training" in legend and "other: training" in legend
    js(driver, "const s = document.querySelector('#run'); s.value = 1; s.dispatchEvent(new Event('change'))")
    assert "of 12" in js(driver, "return document.querySelector('#tiles').innerText")
    quiet(driver)


HARMFUL = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" onload="alert(1)">
<script>alert(1)</script><style>body{display:none}</style><foreignObject><b>x</b></foreignObject>
<a href="javascript:alert(1)"><rect/></a><image xlink:href="http://evil.example/x"/><use href="#x"/>
<g class="node" data-layer="a" onclick="alert(1)" style="fill:url(http://evil.example)"><rect fill="url(http://evil.example)"
 x="1"/><text>a &lt;b&gt;</text></g></svg>"""


def test_a_drawing_from_elsewhere_is_only_shapes() -> None:
    found = harmless(HARMFUL)
    for word in ("alert", "script", "style", "foreign", "evil", "<a", "image", "use", "onclick", "href"):
        assert word not in found, word
    assert 'data-layer="a"' in found and 'x="1"' in found and "a &lt;b&gt;" in found
    assert harmless("<svg") == harmless("<html/>") == harmless("") == ""
