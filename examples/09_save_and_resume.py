"""Save and resume: stopped after a few epochs, resumed in a new graph, the same bits as in one go.

    python examples/09_save_and_resume.py [--quick]

A perceptron with dropout learns 1797 handwritten digits (scikit-learn's bundled set; a fifth is kept for the test). One
graph trains without a pause; another one is stopped and a third, new one goes on from its checkpoint. Parameters,
optimizer, learning rate, dropout, the order of rows and the history all come from there.

Expect 96% of the test digits and not one bit of difference. The program ends with an error if the resumed run differs
from the uninterrupted one, or below 95% (--quick: 3 epochs instead of 12, 85%). Ten seconds.
"""

import argparse
import sys
import tempfile

import numpy as np
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a few epochs, for tests")
EPOCHS, STOP, TARGET = (3, 1, 0.85) if options.parse_args().quick else (12, 4, 0.95)
BATCH = 32

digits = load_digits()
pixels, classes = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
train_pixels, test_pixels, train_classes, test_classes = train_test_split(
    pixels, classes, test_size=0.2, stratify=classes, random_state=0
)


def build() -> sg.TrainingGraph:
    """A perceptron with dropout, compiled."""
    sg.set_seed(0)
    image, label = sg.Tensor((BATCH, 64)), sg.Tensor((BATCH,), "int64")
    graph = sg.Graph()
    x = graph.node(sg.FullyConnectedLayer.create(64, 128), image)
    x = graph.node(sg.DropoutLayer(0.2), graph.node(sg.ActivationLayer.relu(), x))
    graph.node(sg.FullyConnectedLayer.create(128, 10), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=3e-3))
    training.add_inputs({"image": image}, loss_labels={"label": label})
    training.compile(sg.Device.cpu())
    return training


def fit(training: sg.TrainingGraph, epochs: int, folder: str | None = None) -> sg.History:
    """Trains; with a folder, from where the latest checkpoint there left off."""
    steps = EPOCHS * -(-len(train_pixels) // BATCH)
    return sg.fit(
        training,
        {"image": train_pixels, "label": train_classes},
        validation={"image": test_pixels, "label": test_classes},
        epochs=epochs,
        schedule=sg.WarmupCosine(peak=3e-3, warmup=50, steps=steps),
        metrics=[sg.accuracy],
        watch="accuracy",
        checkpoints=folder,
        resume=folder is not None,
    )


console = Console()
uninterrupted = build()
console.print(uninterrupted, "")
expected = fit(uninterrupted, EPOCHS)

with tempfile.TemporaryDirectory() as folder:
    console.print(f"\nthe same, stopped after {STOP} of {EPOCHS} epochs")
    fit(build(), STOP, folder)
    console.print("resumed in a new graph")
    resumed = build()
    history = fit(resumed, EPOCHS, folder)

weights = [training.layers[0].weights.numpy() for training in (uninterrupted, resumed)]
if history.steps != expected.steps or not np.array_equal(*weights):
    sys.exit("the resumed run differs")
accuracy = history["validation accuracy"][-1]
console.print(f"\ntest accuracy {accuracy:.2%}, best in epoch {history.best_epoch}", highlight=False)
if accuracy < TARGET:
    sys.exit(f"test accuracy {accuracy:.2%} is below {TARGET:.0%}")
