"""A character-level language model with attention, trained on Python's own manual.

    python examples/04_character_model.py [--quick]

The text is what `help("assert")` and its like print: `pydoc_data.topics`, which every Python carries, some hundred
thousand characters of the language reference (© Python Software Foundation, PSF license). The last tenth is the test.
Two blocks of a transformer read 64 characters and predict the next one at each place, from those before it.

Expect about 2 bits per character where counts of single letters need 4.7 and of pairs 3.4, and a sample that looks like
a manual from afar. The program ends with an error above 2.3 bits (--quick: 60 of 1500 steps, and half a bit less than
by letters). Two and a half minutes.
"""

import argparse
import sys
from pydoc_data.topics import topics

import numpy as np

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer steps, for tests")
quick = options.parse_args().quick

LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2
STEPS, EPOCH = (60, 30) if quick else (1500, 100)
random = np.random.default_rng(0)
sg.set_seed(0)

letters, text = np.unique(list("\n".join(topics.values())), return_inverse=True)
train, test = np.split(text, [len(text) * 9 // 10])
print(f"{len(train):,} characters to learn from, {len(test):,} for the test, {len(letters)} different ones")


def bits(counts: np.ndarray) -> float:
    """Bits per character of the test text under counts `[before, character]` of the training text, plus one each."""
    chances = (counts + 1) / (counts + 1).sum(axis=1, keepdims=True)
    return -np.log2(chances[test[:-1] % len(chances), test[1:]]).mean()


pairs = np.zeros((len(letters), len(letters)))
np.add.at(pairs, (train[:-1], train[1:]), 1)
by_letter, by_pair = bits(pairs.sum(axis=0, keepdims=True)), bits(pairs)

# Wire, for any number of pieces: a program is made for each that comes.
characters, following = sg.Tensor((sg.BATCH, LENGTH), "int64"), sg.Tensor((sg.BATCH, LENGTH), "int64")
graph = sg.Graph()
places = graph.constant(np.arange(LENGTH)[np.newaxis])
x = graph.embedding(characters, len(letters), WIDTH) + graph.embedding(places, LENGTH, WIDTH)
for _ in range(BLOCKS):
    x = x + graph.attention(graph.layer_normalization(x), HEADS, causal=True)
    hidden = graph.gelu(graph.dense(graph.layer_normalization(x), 4 * WIDTH))
    x = x + graph.dense(hidden, WIDTH)
scores = graph.dense(graph.layer_normalization(x), len(letters))

training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(axis=-1), sg.AdamOptimizer(3e-3))
training.add_inputs({"text": characters}, loss_labels={"next": following})
training.compile("any")


def pieces(source: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Characters from each start on, and those that follow them."""
    found = source[starts[:, np.newaxis] + np.arange(LENGTH + 1)]
    return found[:, :-1], found[:, 1:]


# Train on pieces from anywhere: data may be a function of the epoch that gives batches.
def batches(_: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [pieces(train, random.integers(0, len(train) - LENGTH - 1, 32)) for _ in range(EPOCH)]


unseen = pieces(test, np.arange(0, len(test) - LENGTH - 1, LENGTH))
sg.fit(training, batches, epochs=STEPS // EPOCH, schedule=sg.WarmupCosine(peak=3e-3, warmup=20, steps=STEPS))
found = sg.evaluate(training, unseen)["loss"] / np.log(2)

# Sample with an inference graph over the same layers: one piece of text, read at its last place.
inference = training.inference()
written = list(test[:LENGTH])
for _ in range(40 if quick else 400):
    scored = inference.execute({"text": np.array([written[-LENGTH:]])}).result.numpy()[0, -1]
    chances = np.exp((scored - scored.max()) / 0.7, dtype=np.float64)  # sharper than learned: below 1, safer letters
    written.append(random.choice(len(letters), p=chances / chances.sum()))
print("…", "".join(letters[written]), "…\n")

print(f"bits per character: {by_letter:.2f} by letter, {by_pair:.2f} by pair, {found:.2f} by the model")
if found > (limit := by_letter - 0.5 if quick else 2.3):
    sys.exit(f"{found:.2f} bits per character are more than {limit:.2f}")
