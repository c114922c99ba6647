"""Handwritten digits, trained by one process or by several, with the same numbers.

    python examples/20_parallel.py [--quick]
    torchrun --standalone --nproc-per-node=2 examples/20_parallel.py [--quick]

A small convolutional network with batch normalization and dropout. Each batch is cut into 8 shards, which the processes
divide among themselves. The program ends with a digest of all parameters: it is the same for any number of processes,
if each has as many threads (torchrun sets OMP_NUM_THREADS=1).

Expect 98% of the test digits. The program ends with an error below 96% (90% with --quick, 3 epochs instead of 12).
Fifteen seconds.
"""

import argparse
import hashlib
import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a few epochs, for tests")
quick = options.parse_args().quick
epochs, target = (3, 0.9) if quick else (12, 0.96)

sg.set_seed(0)
digits = load_digits()
pictures, classes = (digits.images[:, np.newaxis] / 16).astype(np.float32), digits.target.astype(np.int64)
train_x, test_x, train_y, test_y = train_test_split(pictures, classes, test_size=0.2, stratify=classes, random_state=0)

image, label, graph = sg.Tensor((sg.BATCH, 1, 8, 8)), sg.Tensor((sg.BATCH,), "int64"), sg.Graph()
x = graph.relu(graph.batch_normalization(graph.convolution(image, 16, 3), momentum=0.9))
x = graph.relu(graph.convolution(graph.dropout(x, 0.1), 32, 3))
graph.dense(graph.reshape((sg.BATCH, -1), x), 10)

# Every process runs this program with all data. The batch size is that of an update, not of a process.
training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.003))
training.add_inputs({"image": image}, {"label": label})
training.compile("cpu", parallel=sg.Parallel(shards=8))
sg.fit(training, (train_x, train_y), validation=(test_x, test_y), batch_size=64, epochs=epochs, metrics=["accuracy"])

score = sg.evaluate(training, (test_x, test_y), metrics=["accuracy"])["accuracy"]
if training.world.is_first:
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in training.state_dict().values())).hexdigest()[:16]
    print(f"ranks: {training.world.size}, {score:.1%} of the test digits, parameters {digest}")
if score < target:
    sys.exit(f"expected at least {target:.0%}")
