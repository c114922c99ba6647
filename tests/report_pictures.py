"""Takes the pictures of docs/reports.md anew, from a real run on handwritten digits.

python -m tests.report_pictures
"""

import base64
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import stepgraph as sg
from tests.browser import browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 1180


def train(folder: Path) -> None:
    """A small residual network, with its first layer frozen so that there is a place where gradients stop."""
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
    sg.set_seed(1)
    x, y = sg.Tensor((64, 1, 8, 8), label="image"), sg.Tensor((64,), "int64", label="digit")
    same = {"kernel_sizes": 3, "padding_policy": sg.PaddingPolicy.SAME}
    graph = sg.Graph()
    edges = graph.node(sg.ConvolutionLayer.create(1, 16, label="edges", **same), x, disable_update=True)
    h = graph.node(sg.ActivationLayer.relu(label="relu 1"), graph.node(sg.BatchNormalizationLayer.create(16), edges))
    parts = graph.node(sg.ConvolutionLayer.create(16, 16, label="parts", **same), h)
    parts = graph.node(sg.ActivationLayer.relu(label="relu 2"), parts)
    h = graph.node(sg.ArithmeticLayer(sg.ArithmeticOperation.ADD, label="add"), parts, h)
    h = graph.reshape((64, -1), graph.node(sg.PoolingLayer.max(2), h))
    graph.node(sg.FullyConnectedLayer.create(256, 10, label="classes"), graph.node(sg.DropoutLayer(0.3), h))
    loss, optimizer = sg.LossLayer.softmax_cross_entropy(label="loss"), sg.AdamWOptimizer(learning_rate=4e-3)
    training = sg.TrainingGraph([graph], loss, optimizer)
    training.add_inputs({"image": x}, {"digit": y})
    training.compile(sg.Device.cpu())
    sg.fit(
        training,
        (images[:1400], labels[:1400]),
        validation=(images[1400:], labels[1400:]),
        epochs=30,
        metrics=[sg.accuracy],
        schedule=sg.WarmupCosine(peak=4e-3, warmup=60),
        run=folder,
        progress="quiet",
    )


def picture(driver: Any, name: str, selector: str, height: int | None = None, before: str = "") -> None:
    """One section with some room around it, or the page from its top, as high as asked for."""
    driver.execute_script(before)
    time.sleep(0.5)
    box = driver.execute_script(
        "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.top + scrollY, b.height]",
        selector,
    )
    top, tall = (0, height) if height else (box[0] - 16, box[1] + 32)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": tall, "scale": 1}
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    (IMAGES / f"report-{name}.png").write_bytes(base64.b64decode(taken["data"]))


def main() -> None:
    """Trains, opens the page and takes the pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser(WIDTH, 900) as driver:
        run = Path(folder) / "digits"
        train(run)
        driver.get((run / "report.html").as_uri())
        scheme = "document.documentElement.dataset.scheme = '{}'; document.querySelector('#scheme').textContent = '{}'"
        light, dark = (scheme.format(one, f"Colors: {one}") for one in ("light", "dark"))
        smooth = ";const s = document.querySelector('input[type=range]'); s.value = 0.8;"
        smooth += "s.dispatchEvent(new Event('input'));document.querySelector('#curves [data-value=log]').click()"
        chosen = "document.querySelector('.node[data-layer=parts]').dispatchEvent(new MouseEvent('click'))"
        weights = "document.querySelector('[data-parameter=\"classes.weights\"]').click()"
        picture(driver, "curves", "header", 1010, light + smooth)
        picture(driver, "graph", "#graph", before=chosen)
        picture(driver, "time", "#profile")
        picture(driver, "memory", "#memory")
        picture(driver, "histograms", "#histograms", before=weights)
        picture(driver, "dark", "header", 1010, dark)


if __name__ == "__main__":
    main()
