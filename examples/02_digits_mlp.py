"""Handwritten digits with a perceptron, trained by `fit`.

    python examples/02_digits_mlp.py [--quick]

1797 digits of 8 × 8 pixels (scikit-learn's bundled set); a fifth of them is kept for the test. `sg.fit` shuffles, cuts
batches, follows a learning-rate schedule, measures after each epoch and returns the numbers as a `History`.

Expect 97% of the test digits, printed with a table of which digit was taken for which. The program ends with an error
below 95% (90% with --quick, which trains for 5 epochs instead of 20). Five seconds.
"""

import argparse
import sys

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a few epochs, for tests")
quick = options.parse_args().quick
epochs, target = (5, 0.9) if quick else (20, 0.95)

BATCH = 64
sg.set_seed(0)  # parameters, dropout and the order of rows repeat from run to run

digits = load_digits()
pixels, classes = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
train_x, test_x, train_y, test_y = train_test_split(pixels, classes, test_size=0.2, stratify=classes, random_state=0)

# Labels are class numbers: int64, one for each row.
image, label = sg.Tensor((BATCH, 64)), sg.Tensor((BATCH,), "int64")
graph = sg.Graph()
x = graph.node(sg.FullyConnectedLayer.create(64, 128), image)
x = graph.node(sg.ActivationLayer.relu(), x)
x = graph.node(sg.DropoutLayer(0.2), x)
graph.node(sg.FullyConnectedLayer.create(128, 10), x)

training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
training.add_inputs({"image": image}, loss_labels={"label": label})
training.compile(sg.Device.any())

# What adds up over batches, like the confusion matrix, is a metric as well as what is averaged.
history = sg.fit(
    training,
    (train_x, train_y),
    validation=(test_x, test_y),
    epochs=epochs,
    schedule=sg.WarmupCosine(peak=1e-2, warmup=20),
    metrics=[sg.accuracy, sg.ConfusionMatrix(10)],
)

confused = np.array(history["validation confusion"][-1])
table = Table("digit", *map(str, range(10)), title="taken for", box=None)
for digit, counts in enumerate(confused):
    table.add_row(str(digit), *(str(count) if count else "·" for count in counts))
Console().print(table)

accuracy = history["validation accuracy"][-1]
print(f"test accuracy {accuracy:.2%}: {confused.sum() - confused.trace()} of {len(test_x)} digits are wrong")
if accuracy < target:
    sys.exit(f"test accuracy {accuracy:.2%} is below {target:.0%}")
