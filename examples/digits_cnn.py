"""Handwritten digits: a convolutional network, trained in a few seconds on a CPU.

    python examples/digits_cnn.py [seed] [bfloat16 | float16]

A program has four parts: wire the layers into a graph, compile it for training, execute one step after the other, and
compile the same layers for inference. It ends with an error if it recognizes less than 98% of digits it has not seen.
"""

import sys
import time

import numpy as np
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

BATCH, EPOCHS, LEARNING_RATE, TARGET = 32, 15, 3e-3, 0.98

console = Console()
began = time.perf_counter()
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
compute_type = sys.argv[2] if len(sys.argv) > 2 else None  # mixed precision, for GPUs
random = np.random.default_rng(seed)
sg.set_seed(seed)  # parameters and dropout repeat from run to run

# 1797 digits of 8 × 8 pixels; a fifth of them is kept for the test.
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
training.compile(sg.Device.any(), compute_type=compute_type)
console.print(training, "")

# Train. The last batch of an epoch is a short one: batch_size says how many rows it has.
with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
    bar = progress.add_task("training", total=EPOCHS * len(train_images))
    for epoch in range(EPOCHS):
        optimizer.learning_rate = LEARNING_RATE * (1 - epoch / EPOCHS)  # takes effect at once, compiles nothing
        order, loss, correct = random.permutation(len(train_images)), 0.0, 0
        for rows in np.split(order, range(BATCH, len(order), BATCH)):
            batch = {"image": shifted(train_images[rows])}
            step = training.execute(batch, {"label": train_labels[rows]}, batch_size=len(rows))
            loss += step.loss * len(rows)
            correct += np.sum(logits.numpy().argmax(axis=1) == train_labels[rows])
            progress.advance(bar, len(rows))
        mean, share = loss / len(order), correct / len(order)
        console.print(f"epoch {epoch + 1:2}  loss {mean:.4f}  accuracy {share:.2%}", highlight=False)

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
console.print(f"\ntest accuracy {accuracy:.2%}, {time.perf_counter() - began:.1f} s in all", highlight=False)
if accuracy < TARGET:
    sys.exit(f"test accuracy {accuracy:.2%} is below {TARGET:.0%}")
