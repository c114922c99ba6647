"""Phases by hand, with a SciPy solver in the middle of the step.

    python examples/06_phases_with_scipy.py [--quick]

A rod is heated in four ways and its temperature measured (the generator below solves the heat equation and adds noise).
How well does it conduct, from place to place? A network proposes a conductivity k(x); SciPy solves the heat equation
with it; the difference from the measured temperatures must go back through the solver. The solver is outside of the
graph, so its gradient comes from outside too: for A(k) u = f the adjoint solve A λ = dL/du gives dL/dk = -λᵀ (dA/dk) u.

Expect k within 7% of the truth, its jump a little blurred. The program ends with an error above 10% (--quick: 30%), or
where the gradient that came through SciPy differs from finite differences by more than 1%. Fifteen seconds.
"""

import argparse
import sys

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer steps, for tests")
STEPS, LIMIT = (300, 0.3) if options.parse_args().quick else (3000, 0.1)
CELLS, random = 100, np.random.default_rng(0)
sg.set_seed(0)

# The rod: CELLS cells with a conductivity each, points between them, both ends kept at temperature 0.
places, points = ((np.arange(CELLS) + 0.5) / CELLS)[:, np.newaxis], (np.arange(1, CELLS) / CELLS)[:, np.newaxis]
slope = CELLS * sparse.diags([1.0, -1.0], [0, -1], (CELLS, CELLS - 1), format="csc")  # temperature → slope in a cell
heat = np.exp(-(((points - [0.2, 0.4, 0.6, 0.8]) / 0.1) ** 2))  # four heaters, one at a time


def rod(conductivity: np.ndarray) -> sparse.linalg.SuperLU:
    """The heat equation -(k u')' = f, factorized: `solve` gives the temperature u for heat f."""
    return splu((slope.T @ sparse.diags(conductivity) @ slope).tocsc())


truth = 1 + 0.5 * np.sin(2 * np.pi * places) + (places > 0.6)
measured = rod(truth[:, 0]).solve(heat)
measured += random.normal(0, 1e-4, measured.shape)

# The network: place → conductivity, positive by its last layer. No loss layer: the loss is outside.
place = sg.Tensor((CELLS, 1))
graph = sg.Graph()
first = sg.FullyConnectedLayer.create(1, 64)
x = graph.node(sg.ActivationLayer.tanh(), graph.node(first, place))
x = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(64, 64), x))
conductivity = graph.node(sg.ActivationLayer.soft_plus(), graph.node(sg.FullyConnectedLayer.create(64, 1), x))

training = sg.TrainingGraph([graph], None, sg.AdamOptimizer(learning_rate=1e-2))
training.add_inputs({"place": place})
outside = training.allocate_user_gradient(conductivity)  # where dL/dk is written
training.compile(sg.Device.any())
training.bind_and_write_data({"place": (20 * places - 10).astype(np.float32)}, {"place": place}, training.device)


def solve() -> tuple[float, np.ndarray, np.ndarray]:
    """Forward: the network in the graph, the rod in SciPy. The loss, the temperature, and dL/df: the adjoint."""
    training.execute_forward()
    solver = rod(conductivity.numpy()[:, 0].astype(np.float64))
    temperature = solver.solve(heat)
    wrong = temperature - measured
    adjoint = solver.solve(2 * wrong / wrong.size)  # A is symmetric: the same factors serve the adjoint
    return np.square(wrong).mean(), temperature, adjoint


def walk_back(temperature: np.ndarray, adjoint: np.ndarray) -> None:
    """Gradient: through the rod by its adjoint, through the network by the graph."""
    gradient = -((slope @ adjoint) * (slope @ temperature)).sum(axis=1, keepdims=True)
    training.bind_and_write_data({"k": gradient.astype(np.float32)}, {"k": outside}, training.device)
    training.execute_gradient()


# Check the gradient before trusting it: the first weights a little along some direction, and a little back.
_, *solution = solve()
walk_back(*solution)
weights, direction = first.weights.numpy().copy(), random.normal(size=(64, 1)).astype(np.float32)
claimed, around = np.sum(training.gradient_data(first.weights, first) * direction), []
for shift in (1e-3, -1e-3, 0):
    first.weights.bind_and_write_data(weights + np.float32(shift) * direction, training.device)
    around.append(solve()[0])
differences = (around[0] - around[1]) / 2e-3
print(f"slope of the loss {claimed:+.5e} by the adjoint, {differences:+.5e} by finite differences")

for step in range(STEPS):
    loss, *solution = solve()
    walk_back(*solution)
    training.execute_optimizer_update()
    if step in (0, 9, 99, 999, STEPS - 1):
        print(f"step {step + 1:4}   temperatures are off by {np.sqrt(loss):.6f}")

found = conductivity.numpy()
for name, values in (("true", truth), ("found", found)):
    print(f"{name:6}", "".join(" ▁▂▃▄▅▆▇█"[int(value * 3)] for value in values[::2, 0]))
error = np.sqrt(np.square(found - truth).mean() / np.square(truth).mean())
print(f"the conductivity is found to {error:.2%}")
if error > LIMIT or abs(claimed - differences) > 0.01 * abs(differences):
    sys.exit(f"a conductivity within {LIMIT:.0%} and a gradient within 1% were expected")
