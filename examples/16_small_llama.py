"""A small language model built like Llama, trained with the usual recipe.

    python examples/16_small_llama.py [--quick]

RMS normalization, rotary positions, grouped key and value heads, SwiGLU, no biases; AdamW that decays matrices only,
clipped gradients, a cosine schedule with warm-up, an average of the weights for the evaluation, and bfloat16 on a GPU.
The text is Python's own manual, as in `04_character_model.py`; the last tenth is the test.

Expect 2 bits per character. The program ends with an error above 2.2 (--quick: 40 of 1000 steps, and 4.2). Two minutes.
"""

import argparse
import sys
from pydoc_data.topics import topics

import numpy as np

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer steps, for tests")
quick = options.parse_args().quick

LENGTH, WIDTH, HEADS, GROUPS, BLOCKS = 64, 64, 4, 2, 2
STEPS, EPOCH, DECAY = (40, 20, 0.9) if quick else (1000, 100, 0.99)
random = np.random.default_rng(0)
sg.set_seed(0)

letters, text = np.unique(list("\n".join(topics.values())), return_inverse=True)
train, test = np.split(text, [len(text) * 9 // 10])

# Wire: a block attends and then transforms each place, both on normalized copies that are added to the stream.
characters, following = sg.Tensor((sg.BATCH, LENGTH), "int64"), sg.Tensor((sg.BATCH, LENGTH), "int64")
graph = sg.Graph()
x = graph.embedding(characters, len(letters), WIDTH)
for _ in range(BLOCKS):
    settings = {"key_value_head_count": GROUPS, "causal": True, "rotary_base": 10_000.0, "has_biases": False}
    x = x + graph.attention(graph.rms_normalization(x), HEADS, **settings)
    x = x + graph.gated_feed_forward(graph.rms_normalization(x), hidden=WIDTH * 8 // 3)
scores = graph.dense(graph.rms_normalization(x), len(letters), biases=False)

# Train.
device = sg.Device.any()
optimizer = sg.AdamWOptimizer(3e-3, weight_decay=0.1, clip_norm=1.0, groups=sg.DECAY_MATRICES_ONLY)
training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(axis=-1), optimizer, average=DECAY)
training.add_inputs({"text": characters}, {"next": following})
training.compile(device, compute_type="bfloat16" if device.is_cuda else None)
print(training.optimizer)


def pieces(source: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Characters from each start on, and those that follow them."""
    found = source[starts[:, np.newaxis] + np.arange(LENGTH + 1)]
    return found[:, :-1], found[:, 1:]


def batches(_: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [pieces(train, random.integers(0, len(train) - LENGTH - 1, 32)) for _ in range(EPOCH)]


schedule = sg.WarmupCosine(peak=3e-3, warmup=STEPS // 20, steps=STEPS)
sg.fit(training, batches, epochs=STEPS // EPOCH, schedule=schedule, metrics=["accuracy"])

# Evaluate with the averaged weights.
unseen = pieces(test, np.arange(0, len(test) - LENGTH - 1, LENGTH * (8 if quick else 1)))
last = sg.evaluate(training, unseen)["loss"] / np.log(2)
with training.averaged():
    found = sg.evaluate(training, unseen)["loss"] / np.log(2)

print(f"bits per character: {last:.2f} with the last weights, {found:.2f} with their average")
if found > (limit := 4.2 if quick else 2.2):
    sys.exit(f"{found:.2f} bits per character are more than {limit}")
