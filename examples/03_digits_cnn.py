"""Handwritten digits: a convolutional network, and a training loop of one's own.

    python examples/03_digits_cnn.py [--quick] [--seed N] [--compute-type bfloat16 | float16] [--device cpu | gpu]

A program has four parts: wire the layers into a graph, compile it for training, execute one step after the other, and
compile the same layers for inference. 1797 digits of 8 × 8 pixels (scikit-learn's bundled set), moved about a little;
a fifth of them is kept for the test.

Expect 99% of the test digits. The program ends with an error below 98% (93% with --quick: 3 epochs instead of 15). Ten
seconds; mixed precision is for GPUs and slower on most CPUs.
"""

import argparse
import sys
import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a few epochs, for tests")
options.add_argument("--seed", type=int, default=0)
options.add_argument("--compute-type", choices=["bfloat16", "float16"], help="mixed precision")
options.add_argument("--device", choices=["any", "cpu", "gpu"], default="any")
chosen = options.parse_args()

BATCH, LEARNING_RATE = 32, 3e-3
EPOCHS, TARGET = (3, 0.93) if chosen.quick else (15, 0.98)

began = time.perf_counter()
random = np.random.default_rng(chosen.seed)
sg.set_seed(chosen.seed)  # parameters and dropout repeat from run to run

digits = load_digits()
pixels, classes = (digits.images[:, np.newaxis] / 16).astype(np.float32), digits.target.astype(np.int64)
train_images, test_images, train_labels, test_labels = train_test_split(
    pixels, classes, test_size=0.2, stratify=classes, random_state=0
)


def shifted(images: np.ndarray) -> np.ndarray:
    """The images, each moved by up to one pixel in each direction: digits nobody has written, but could have."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(2, 3))
    y, x = random.integers(0, 3, (2, len(images)))
    return windows[np.arange(len(images)), :, y, x]


# Wire. Tensors declare shapes, batch included; a node takes what another one returned, and shapes follow.
image, label = sg.Tensor.image(8, 8, channels=1, batch_size=BATCH), sg.Tensor((BATCH,), "int64")
graph = sg.Graph()
x = graph.node(sg.ConvolutionLayer.create(1, 16, kernel_sizes=3), image)
x = graph.node(sg.BatchNormalizationLayer.create(16, momentum=0.9), x)
x = graph.node(sg.ActivationLayer.relu(), x)
x = graph.node(sg.ConvolutionLayer.create(16, 32, kernel_sizes=3), x)
x = graph.node(sg.ActivationLayer.relu(), x)
x = graph.node(sg.PoolingLayer.max(2), x)
x = graph.node(sg.DropoutLayer(0.2), x)
x = graph.reshape((BATCH, -1), x)
x = graph.node(sg.FullyConnectedLayer.create(32 * 4 * 4, 128), x)
x = graph.node(sg.ActivationLayer.relu(), x)
logits = graph.node(sg.FullyConnectedLayer.create(128, 10), x)

# Compile. From here on the step is one program, and its memory is known.
optimizer = sg.AdamOptimizer(learning_rate=LEARNING_RATE)
training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
training.add_inputs({"image": image}, loss_labels={"label": label})
training.add_outputs({"logits": logits})  # readable after each step
training.compile(getattr(sg.Device, chosen.device)(), compute_type=chosen.compute_type)
print(training, "\n")

# Train. The last batch of an epoch is a short one: batch_size says how many rows it has.
for epoch in range(EPOCHS):
    optimizer.learning_rate = LEARNING_RATE * (1 - epoch / EPOCHS)  # takes effect at once, compiles nothing
    order, loss, correct = random.permutation(len(train_images)), 0.0, 0
    for rows in np.split(order, range(BATCH, len(order), BATCH)):
        batch = {"image": shifted(train_images[rows])}
        step = training.execute(batch, {"label": train_labels[rows]}, batch_size=len(rows))
        loss += step.loss * len(rows)
        correct += np.sum(logits.numpy().argmax(axis=1) == train_labels[rows])
    print(f"epoch {epoch + 1:2}  loss {loss / len(order):.4f}  accuracy {correct / len(order):.2%}")

# Test. An inference graph over the same layers shares their parameters; its dropout and normalization are at rest.
inference = sg.InferenceGraph([graph])
inference.add_inputs({"image": image})
inference.compile(training.device)
correct = 0
for start in range(0, len(test_images), BATCH):
    batch, wanted = test_images[start : start + BATCH], test_labels[start : start + BATCH]
    found = inference.execute({"image": batch}, batch_size=len(batch)).result.numpy().argmax(axis=1)
    correct += np.sum(found == wanted)
accuracy = correct / len(test_images)
print(f"\ntest accuracy {accuracy:.2%}, {time.perf_counter() - began:.1f} s in all")
if accuracy < TARGET:
    sys.exit(f"test accuracy {accuracy:.2%} is below {TARGET:.0%}")
