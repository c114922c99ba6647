"""Fine-tuning: a trained body, frozen, and a new head that learns new digits from few examples.

    python examples/07_fine_tuning.py [--quick]

MNIST-1D, drawn by the generator of the `mnist1d` package: digits as curves of 40 numbers, moved, stretched and noisy. A
convolutional network learns the digits 0 to 4 and is saved. Of 5 to 9 there are five examples each. One network takes
its body from the checkpoint, frozen, and trains a new head; another one trains everything from scratch on the same
twenty-five. Both are asked about curves nobody trained on; the mean of three draws of the few examples counts.

Expect about 58% against 32%, where guessing gives 20%, and a body that did not change by a bit. The program ends with
an error below 50%, or less than 10 points ahead of scratch (--quick: one draw, 40% and 5 points), or where a frozen
number changed. Half a minute.
"""

import argparse
import sys
import tempfile

import numpy as np
from mnist1d.data import get_dataset_args, make_dataset

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer epochs and draws, for tests")
quick = options.parse_args().quick
EPOCHS, DRAWS, TARGET, AHEAD = (10, 1, 0.4, 0.05) if quick else (30, 3, 0.5, 0.1)
BATCH = 50

random = np.random.default_rng(0)
drawn = make_dataset(get_dataset_args())
curves, digits = drawn["x"].astype(np.float32)[:, np.newaxis, np.newaxis], drawn["y"]  # images one pixel high
test_curves, test_digits = drawn["x_test"].astype(np.float32)[:, np.newaxis, np.newaxis], drawn["y_test"]
old, new, test_old, test_new = digits < 5, digits >= 5, test_digits < 5, test_digits >= 5


def build(head: str, *, frozen: bool = False) -> sg.TrainingGraph:
    """A body and a head for five digits. Labels name tensors in a checkpoint: another head has another label."""
    sg.set_seed(0)
    curve, digit = sg.Tensor.image(40, 1, channels=1, batch_size=BATCH), sg.Tensor((BATCH,), "int64")
    graph, x = sg.Graph(), curve
    for name, channels, size in (("edges", 1, 5), ("strokes", 25, 3), ("shapes", 25, 3)):
        layer = sg.ConvolutionLayer.create(channels, 25, (1, size), strides=(1, 2), padding_sizes=(0, 1), label=name)
        x = graph.node(sg.ActivationLayer.relu(), graph.node(layer, x, disable_update=frozen))
    layer = sg.FullyConnectedLayer.create(25 * 5, 64, label="features")
    x = graph.node(layer, graph.reshape((BATCH, -1), x), disable_update=frozen)
    graph.node(sg.FullyConnectedLayer.create(64, 5, label=head), graph.node(sg.ActivationLayer.relu(), x))
    optimizer = sg.AdamOptimizer(learning_rate=1e-2 if frozen else 5e-3)  # a head alone bears larger steps
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
    training.add_inputs({"curve": curve}, loss_labels={"digit": digit})
    training.compile(sg.Device.any())
    return training


def body(training: sg.TrainingGraph) -> list[np.ndarray]:
    """Every number of the layers below the head."""
    training.synchronize_updates()
    layers = [layer for layer in training.layers if layer.label in ("edges", "strokes", "shapes", "features")]
    return [tensor.numpy() for layer in layers for tensor in layer.parameters.values()]


def learn_new_digits(training: sg.TrainingGraph, few: np.ndarray) -> float:
    """Trains on the few examples; the accuracy on new digits nobody trained on."""
    sg.fit(training, (curves[few], digits[few] - 5), epochs=40, progress="quiet")
    unseen = test_curves[test_new], test_digits[test_new] - 5
    return sg.evaluate(training, unseen, metrics=[sg.accuracy])["accuracy"]


print(f"learning 0 to 4 from {old.sum()} examples")
trained, unseen = build("head for 0 to 4"), (test_curves[test_old], test_digits[test_old])
sg.fit(trained, (curves[old], digits[old]), validation=unseen, epochs=EPOCHS, metrics=[sg.accuracy])

by_tuning, by_scratch, changed = [], [], 0
with tempfile.TemporaryDirectory() as folder:
    trained.save(f"{folder}/model")
    for draw in range(DRAWS):
        few = np.concatenate([random.choice(np.flatnonzero(digits == one), 5, replace=False) for one in range(5, 10)])
        tuned = build("head for 5 to 9", frozen=True)
        # Partial, because the heads differ; parameters only, because the optimizer starts afresh.
        report = tuned.restore(f"{folder}/model", partial=True, only_parameters=True)
        if draw == 0:
            print(f"\n{report}\n\n{tuned}\n\nlearning 5 to 9 from {len(few)} examples, {DRAWS} times")
        by_tuning.append(learn_new_digits(tuned, few))
        by_scratch.append(learn_new_digits(build("head for 5 to 9"), few))
        changed += sum(int(np.sum(a != b)) for a, b in zip(body(trained), body(tuned), strict=True))

accuracy, scratch = np.mean(by_tuning), np.mean(by_scratch)
print(f"{changed} of {sum(map(np.size, body(tuned))):,} frozen numbers changed")
print(f"test accuracy {accuracy:.2%} fine-tuned, {scratch:.2%} from scratch")
if changed:
    sys.exit("the frozen body is not the saved one any more")
if accuracy < max(TARGET, scratch + AHEAD):
    sys.exit(f"at least {TARGET:.0%}, and {AHEAD:.0%} more than from scratch, were expected")
