"""A network with two heads and two losses: which digit it is, and how much ink it took.

    python examples/15_two_heads.py [--quick]

Both heads read the same hidden layers, so each learns from the other's labels too. Every loss is a node of the training
graph, with labels and a weight of its own; the step minimizes their sum. The inference graph has no losses and
returns both results by name.

Expect 97% of the test digits, and their ink within 3% of all pixels. The program ends with an error below 95% or
above 4% (--quick: 88%, 8%). Eight seconds.
"""

import argparse
import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer epochs, for tests")
EPOCHS, ACCURACY, ERROR = (10, 0.88, 0.08) if options.parse_args().quick else (30, 0.95, 0.04)
BATCH, LEARNING_RATE = 64, 3e-3
sg.set_seed(0)

digits = load_digits()
pixels, kinds = (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)
ink = pixels.mean((1, 2, 3)).reshape(-1, 1)
split = train_test_split(pixels, kinds, ink, test_size=0.2, stratify=kinds, random_state=0)
train_x, test_x, train_kind, test_kind, train_ink, test_ink = split

# The trunk that both heads read.
image, kind, amount = sg.Tensor((BATCH, 1, 8, 8)), sg.Tensor((BATCH,), "int64"), sg.Tensor((BATCH, 1))
graph = sg.Graph()
x = graph.node(sg.ActivationLayer.relu(), graph.node(sg.ConvolutionLayer.create(1, 16, 3), image))
x = graph.node(sg.ActivationLayer.relu(), graph.node(sg.ConvolutionLayer.create(16, 32, 3, strides=2), x))
x = graph.node(sg.FullyConnectedLayer.create(512, 64), graph.reshape((-1, 512), x))
x = graph.node(sg.ActivationLayer.relu(), x)

# The heads: scores for ten digits, and one number.
scores = graph.node(sg.FullyConnectedLayer.create(64, 10), x)
guess = graph.node(sg.FullyConnectedLayer.create(64, 1), x)

optimizer = sg.AdamOptimizer(LEARNING_RATE)
training = sg.TrainingGraph([graph], None, optimizer)
training.node(sg.LossLayer.softmax_cross_entropy(label="digit"), scores, loss_labels=kind)
training.node(sg.LossLayer.mean_squared_error(weight=10.0, label="ink"), guess, loss_labels=amount)
training.add_inputs({"image": image}, loss_labels={"kind": kind, "amount": amount})
training.compile(sg.Device.any())

# With a constant learning rate, the guesses would swing around the right amounts to the end.
random = np.random.default_rng(0)
for epoch in range(EPOCHS):
    optimizer.learning_rate = LEARNING_RATE * (1 - epoch / EPOCHS)
    order = random.permutation(len(train_x))
    for rows in np.array_split(order, range(BATCH, len(order), BATCH)):
        inputs, labels = {"image": train_x[rows]}, {"kind": train_kind[rows], "amount": train_ink[rows]}
        training.execute(inputs, labels, batch_size=len(rows))

inference = sg.InferenceGraph([graph])
inference.add_inputs({"image": image})
inference.add_outputs({"scores": scores, "guess": guess})
inference.compile(training.device)
right, missed = [], []
for start in range(0, len(test_x), BATCH):
    rows = slice(start, start + BATCH)
    inference.execute({"image": test_x[rows]}, batch_size=len(test_x[rows]))
    right.append(scores.numpy().argmax(1) == test_kind[rows])
    missed.append(guess.numpy() - test_ink[rows])
accuracy, error = np.concatenate(right).mean(), np.sqrt(np.square(np.concatenate(missed)).mean())
print(f"test accuracy {accuracy:.1%}, ink missed by {error:.1%} of all pixels")
if accuracy < ACCURACY or error > ERROR:
    sys.exit(f"accuracy {accuracy:.1%} below {ACCURACY:.0%}, or error {error:.1%} above {ERROR:.0%}")
