"""ONNX: train, export, and serve the file with ONNX Runtime, without stepgraph.

    python examples/18_onnx.py [--quick]

A small convolutional network learns 1797 handwritten digits (scikit-learn's bundled set; a fifth is kept for the test),
with one layer for inference alone: a softmax. `save_onnx` writes the network with a free batch size and compares every
number with ONNX Runtime before the file is in place. Then ONNX Runtime alone recognizes digits, one by one and all at
once, and a second graph takes the weights back out of the file.

Expect 97% of the test digits, the same classes from both programs and the same weights. The program ends with an error
below 96% (--quick: 4 epochs instead of 16, 85%). Without the packages for ONNX it says what to install, and ends.
Fifteen seconds.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a few epochs, for tests")
EPOCHS, TARGET = (4, 0.85) if options.parse_args().quick else (16, 0.96)

try:
    import onnxruntime
    import onnxscript  # noqa: F401 - what save_onnx needs
except ImportError as missing:
    sys.exit(f"This example needs the packages for ONNX ({missing}): pip install 'stepgraph[onnx]' onnxruntime")

digits = load_digits()
pixels = (digits.images[:, None] / 16).astype(np.float32)
train_pixels, test_pixels, train_classes, test_classes = train_test_split(
    pixels, digits.target.astype(np.int64), test_size=0.2, stratify=digits.target, random_state=0
)


def build() -> tuple[sg.TrainingGraph, sg.Tensor]:
    """The network with its loss, and the result that the loss compares."""
    sg.set_seed(0)
    image, label = sg.Tensor((sg.BATCH, 1, 8, 8)), sg.Tensor((sg.BATCH,), "int64")
    graph = sg.Graph()
    x = graph.sequence(
        image,
        sg.ConvolutionLayer.create(16, (3, 3), label="convolution"),
        sg.BatchNormalizationLayer.create(label="normalization"),
        sg.ActivationLayer.relu(label="activation"),
        sg.PoolingLayer.max((2, 2), label="pool"),
    )
    logits = graph.dense(x.reshape(sg.BATCH, -1), 10, label="classes")
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(5e-3))
    training.add_inputs({"image": image}, loss_labels={"label": label})
    return training, logits


training, logits = build()
training.compile("cpu")
data, schedule = {"image": train_pixels, "label": train_classes}, sg.WarmupCosine(peak=5e-3, warmup=20)
sg.fit(training, data, batch_size=32, epochs=EPOCHS, schedule=schedule, progress="quiet")

inference = training.inference()
probabilities = inference.softmax(logits, label="softmax")
inference.compile("cpu")
inference.add_outputs({"probabilities": probabilities})
ours = sg.predict(inference, {"image": test_pixels})["probabilities"]

with tempfile.TemporaryDirectory() as folder:
    path = inference.save_onnx(Path(folder) / "digits.onnx")  # compared with ONNX Runtime before it is in place
    print(f"{path.name}: {path.stat().st_size:,} bytes")

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (together,) = session.run(["probabilities"], {"image": test_pixels})
    one_by_one = [session.run(["probabilities"], {"image": one[None]})[0] for one in test_pixels[:50]]

    other, _ = build()
    print(sg.load_onnx_weights(other, path))

accuracy, apart = (together.argmax(1) == test_classes).mean(), np.abs(together - ours).max()
print(f"test accuracy {accuracy:.1%} with ONNX Runtime; probabilities differ by at most {apart:.1e}")

weights = zip(training.state_dict().values(), other.state_dict().values(), strict=True)
if accuracy < TARGET or apart > 1e-4 or not all(np.array_equal(one, two) for one, two in weights):
    sys.exit(f"expected {TARGET:.0%} of the test digits, the same probabilities and the same weights")
if not np.allclose(np.concatenate(one_by_one), together[:50], atol=1e-5):
    sys.exit("ONNX Runtime computes something else for one digit at a time")
