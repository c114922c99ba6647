"""Linear regression: the smallest program, and one whose right answer is known.

    python examples/01_linear_regression.py [--quick]

442 patients (scikit-learn's bundled diabetes data): ten measurements each, and how far the disease went in a year.
Gradient descent with momentum finds weights; least squares has a closed form; both stand side by side at the end.

Expect the same numbers to about six digits, and 52% of the variance explained. The program ends with an error where the
largest difference exceeds 0.01 (0.5 with --quick, which takes fewer steps). Two seconds, most of them for imports.
"""

import argparse
import sys

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_diabetes

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a few steps, for tests")
quick = options.parse_args().quick
steps, tolerance = (200, 0.5) if quick else (1000, 0.01)

# Measurements with mean 0 and variance 1: one learning rate then suits them all. The graph takes float32.
diabetes = load_diabetes(scaled=False)
measured = ((diabetes.data - diabetes.data.mean(axis=0)) / diabetes.data.std(axis=0)).astype(np.float32)
progressed = diabetes.target[:, np.newaxis].astype(np.float32)
rows, columns = measured.shape

# Wire: one layer, y = x Wᵀ + b. All patients are one batch.
x, y = sg.Tensor((rows, columns)), sg.Tensor((rows, 1))
linear = sg.FullyConnectedLayer.create(columns, 1)
graph = sg.Graph()
prediction = graph.node(linear, x)

# Compile: forward pass, gradient and update become one program.
training = sg.TrainingGraph(
    [graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.2, momentum_scale=0.9)
)
training.add_inputs({"measurements": x}, loss_labels={"progression": y})
training.compile(sg.Device.any())
print(training)

# Train.
for step in range(steps):
    execution = training.execute({"measurements": measured}, {"progression": progressed})
    if step in (0, 9, 99, steps - 1):
        print(f"step {step + 1:4}   mean squared error {execution.loss:10.3f}")

# Compare. On a GPU parameters live there: synchronize_updates brings them home.
training.synchronize_updates()
found = np.append(linear.weights.numpy(), linear.biases.numpy())
exact, *_ = np.linalg.lstsq(np.c_[measured, np.ones(rows)].astype(np.float64), progressed[:, 0], rcond=None)

table = Table("measurement", "trained", "least squares", "difference", box=None)
for name, *numbers in zip([*diabetes.feature_names, "(bias)"], found, exact, found - exact, strict=True):
    table.add_row(name, *(f"{number:.4f}" for number in numbers))
Console().print(table)

worst, explained = np.abs(found - exact).max(), 1 - execution.loss / progressed.var()
print(f"largest difference {worst:.6f}, variance explained {explained:.2%}")
if worst > tolerance:
    sys.exit(f"a weight differs by {worst:.6f} from least squares, more than {tolerance}")
