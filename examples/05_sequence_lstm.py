"""A recurrent network that must remember: the adding problem.

    python examples/05_sequence_lstm.py [--quick]

The generator below draws sequences of 20 to 40 steps, each with a number from 0 to 1 and a mark. Two marks are set, one
in each half of the sequence; the sum of the two marked numbers is wanted at the end. Nothing near the end tells it: who
forgets can only answer 1 every time, with a mean squared error of 1/6.

Expect an error below 0.005. The program ends with an error above 0.01 (--quick: sequences of 6 to 8 steps, above 0.1).
One minute.
"""

import argparse
import sys

import numpy as np

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="short sequences and fewer steps, for tests")
quick = options.parse_args().quick

BATCH, HIDDEN = 64, 32
SHORTEST, LONGEST, STEPS, LIMIT = (6, 8, 300, 0.1) if quick else (20, 40, 2000, 0.01)
random = np.random.default_rng(0)
sg.set_seed(0)


def draw(count: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sequences `[count, LONGEST, 2]` of numbers and marks, their lengths, and the sums of the marked numbers."""
    lengths = random.integers(SHORTEST, LONGEST + 1, count)
    numbers, marks, rows = random.random((count, LONGEST)), np.zeros((count, LONGEST)), np.arange(count)
    marks[rows, random.integers(0, lengths // 2)] = 1
    marks[rows, random.integers(lengths // 2, lengths)] = 1
    sums = (numbers * marks).sum(axis=1, keepdims=True)
    inputs = {"sequence": np.stack([numbers, marks], axis=2).astype(np.float32), "length": lengths}
    return inputs, {"sum": sums.astype(np.float32)}


# Wire. With lengths, a sequence ends at its own end: what stands after it is not read, and the state stays.
sequence, length = sg.Tensor.sequence(LONGEST, channels=2, batch_size=BATCH), sg.Tensor((BATCH,), "int64")
wanted = sg.Tensor((BATCH, 1))
graph = sg.Graph()
last = graph.node(sg.LSTMLayer.create(2, HIDDEN, returns_sequences=False), sequence, length)  # [BATCH, 1, HIDDEN]
graph.node(sg.FullyConnectedLayer.create(HIDDEN, 1), graph.reshape((BATCH, HIDDEN), last))

# Clipping: gradients that went back through many steps are now and then very large.
clipped = sg.OptimizerDescriptor(
    5e-3, gradient_clipping_type=sg.GradientClippingType.BY_GLOBAL_NORM, maximum_clipping_norm=1.0
)
training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(clipped))
training.add_inputs({"sequence": sequence, "length": length}, loss_labels={"sum": wanted})
training.compile(sg.Device.any())
print(training)

# Train on sequences that never come twice: there is nothing to learn by heart.
schedule = sg.WarmupCosine(peak=5e-3, warmup=50, steps=STEPS)
sg.fit(training, lambda epoch: (draw(BATCH) for _ in range(100)), epochs=STEPS // 100, schedule=schedule)

# Test, and look at a few.
inputs, sums = draw(1000)
found = sg.evaluate(training, (inputs, sums))["loss"]
forgetful = np.square(sums["sum"] - sums["sum"].mean()).mean()
inference = sg.InferenceGraph([graph])
inference.add_inputs({"sequence": sequence, "length": length})
inference.compile(training.device)
answers = inference.execute(inputs, batch_size=5).result.numpy()[:, 0]
for row, answer in enumerate(answers):
    marked = inputs["sequence"][row, inputs["sequence"][row, :, 1] == 1, 0]
    print(f"of {inputs['length'][row]:2} numbers {marked[0]:.3f} + {marked[1]:.3f} = {marked.sum():.3f}: {answer:.3f}")

print(f"mean squared error {found:.5f}; without memory {forgetful:.5f}")
if found > LIMIT:
    sys.exit(f"the mean squared error {found:.5f} is above {LIMIT}")
