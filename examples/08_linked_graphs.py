"""Linked graphs: a controller that learns by the gradients of another graph, which stays as it is.

    python examples/08_linked_graphs.py [--quick]

Throw a ball so that it lands at a given distance, in head or tail wind. The world (`throw` below: gravity, drag, wind)
has no gradient. So a model graph first learns from random throws where they land; then a controller graph that knows
distance and wind chooses angle and speed, and the model tells it which way to change them.

Why two linked graphs and not one: each has an optimizer of its own and is trained at its own time, on its own data, and
what the model computes for the controller it does not have to learn from. Linked, the model reads the controller's
result and hands its gradient back; which of them updates is decided by who calls `execute_optimizer_update`.

Expect to miss by half a metre, the textbook's formula by eight. Error above 1 m (--quick: 5 m). Twenty seconds.
"""

import argparse
import sys
from itertools import pairwise

import numpy as np

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer steps, for tests")
EPOCHS, STEPS, LIMIT = (10, 300, 5.0) if options.parse_args().quick else (60, 2000, 1.0)
BATCH, LINKED, random = 128, sg.GraphCompilationOptions.LINK_GRAPHS, np.random.default_rng(0)
sg.set_seed(0)


def throw(angle: np.ndarray, speed: np.ndarray, wind: np.ndarray) -> np.ndarray:
    """Where a ball lands (m), thrown at an angle (radians) and speed (m/s) into wind (m/s): steps of 10 ms."""
    x, y, dt = np.zeros_like(angle), np.full_like(angle, 1e-6), 0.01
    vx, vy = speed * np.cos(angle), speed * np.sin(angle)
    while np.any(y > 0):
        drag = 0.01 * np.hypot(vx - wind, vy)
        vx, vy = vx - dt * drag * (vx - wind), vy - dt * (9.81 + drag * vy)
        x, y = np.where(y > 0, x + dt * vx, x), np.where(y > 0, y + dt * vy, y)
    return x


def in_the_world(action: np.ndarray, wind: np.ndarray) -> np.ndarray:
    """The same for numbers from -1 to 1: angles of 15° to 75°, speeds of 15 to 35 m/s, wind of ±8 m/s."""
    return throw(np.radians(45 + 30 * action[:, 0]), 25 + 10 * action[:, 1], 8 * wind[:, 0])[:, np.newaxis]


def dense(graph: sg.Graph, x: sg.Tensor, *widths: int) -> sg.Tensor:
    """Layers with tanh after each."""
    for inputs, outputs in pairwise(widths):
        x = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(inputs, outputs), x))
    return x


# The controller: distance and wind → action. No loss of its own.
task, wind, landing = sg.Tensor((BATCH, 2)), sg.Tensor((BATCH, 1)), sg.Tensor((BATCH, 1))
control = sg.Graph()
action = dense(control, task, 2, 64, 64, 2)
controller = sg.TrainingGraph([control], None, sg.AdamOptimizer(learning_rate=2e-3))
controller.add_inputs({"task": task})
controller.compile(sg.Device.any(), LINKED)

# The model: action and wind → landing place, in tens of metres. It reads the controller's result.
world = sg.Graph()
hidden = dense(world, world.concatenate([action, wind]), 3, 64, 64)
world.node(sg.FullyConnectedLayer.create(64, 1), hidden)
model = sg.TrainingGraph([world], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=5e-3))
model.add_inputs({"action": action, "wind": wind}, loss_labels={"landing": landing})
model.compile(controller.device, LINKED)

# First the model alone, from random throws. It is not linked yet, so the action is data like any other.
actions, winds = (random.uniform(-1, 1, (10_000, columns)).astype(np.float32) for columns in (2, 1))
throws = {"action": actions, "wind": winds, "landing": in_the_world(actions, winds).astype(np.float32) / 10}
sg.fit(model, throws, epochs=EPOCHS, schedule=sg.WarmupCosine(peak=5e-3, warmup=50))

# Then the controller through the model: forward in this order, back in the other one, and only the controller updates.
controller.link([model])
for step in range(STEPS):
    goal = np.c_[random.uniform(2, 5, BATCH), random.uniform(-1, 1, BATCH)].astype(np.float32)
    controller.bind_and_write_data({"task": goal}, {"task": task}, controller.device)
    controller.execute_forward()
    model.bind_and_write_data({"wind": goal[:, 1:]}, {"wind": wind}, model.device)
    model.bind_and_write_data({"landing": goal[:, :1]}, {"landing": landing}, model.device)
    loss = model.execute_forward().loss
    model.execute_gradient()
    controller.execute_gradient()
    controller.execute_optimizer_update()
    if step in (0, 99, STEPS - 1):
        print(f"step {step + 1:4}   the model expects to miss by {10 * np.sqrt(loss):.2f} m")

# Throw in the real world.
controller.execute_forward()
distance = 10 * goal[:, :1]
missed = in_the_world(action.numpy(), goal[:, 1:]) - distance
naive = throw(np.full(BATCH, np.pi / 4), np.sqrt(9.81 * distance[:, 0]), 8 * goal[:, 1])[:, np.newaxis] - distance
found, before = (np.sqrt(np.square(distances).mean()) for distances in (missed, naive))
for row in range(5):
    print(f"{distance[row, 0]:.1f} m in {8 * goal[row, 1]:+.1f} m/s of wind: missed by {missed[row, 0]:+.2f} m")
print(f"missed by {found:.2f} m; with the formula of the textbook, 45° and no air, by {before:.2f} m")
if found > LIMIT:
    sys.exit(f"missed by {found:.2f} m, more than {LIMIT} m")
