"""A layer and a loss of your own: ten lines each, and everything else follows.

    python examples/11_custom_layer.py [--quick]

`Swish` learns its own slope; `FocalLoss` weighs hard digits more. Subclassing `sg.Layer` makes a dataclass: tensors in
fields are parameters that the optimizer updates, everything else is a setting. Shapes, gradients, the three phases, the
table, the profile and mixed precision come from `forward` alone. The data is scikit-learn's 1797 handwritten digits.

Expect 97% of the test digits. The program ends with an error below 95% (--quick: 5 epochs instead of 30, 85%). Five
seconds.
"""

import argparse
import sys

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a few epochs, for tests")
BATCH = 64
EPOCHS, TARGET = (5, 0.85) if options.parse_args().quick else (30, 0.95)


class Swish(sg.Layer):
    """`x · sigmoid(βx)` with a trained β."""

    beta: sg.Tensor

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * torch.sigmoid(scope.array(self.beta) * x)


class FocalLoss(sg.Layer):
    """`-(1 - p)ᵞ log p` of the right class's probability `p`, averaged over the batch."""

    gamma: float = 2.0

    is_loss = True
    source_counts = (2, 2)  # logits, class numbers

    def check(self, *sources: sg.TensorDescriptor) -> None:
        logits, labels = sources
        if labels.shape != logits.shape[:1]:
            raise sg.ShapeError(self.where, f"labels {labels} for logits {logits}", fix="give one class number a row")

    def forward(self, logits: torch.Tensor, labels: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        log_p = F.log_softmax(logits, 1).gather(1, labels[:, None])
        return (-((1 - log_p.exp()) ** self.gamma) * log_p).mean(0)


def main() -> None:
    random = np.random.default_rng(0)
    sg.set_seed(0)
    digits = load_digits()
    pixels, classes = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, classes, test_size=0.2, stratify=classes, random_state=0
    )

    image, label = sg.Tensor((BATCH, 64)), sg.Tensor((BATCH,), "int64")
    swish = Swish(sg.Tensor((1,), fill=1.0), label="swish")
    graph = sg.Graph()
    x = graph.node(swish, graph.node(sg.FullyConnectedLayer.create(64, 64), image))
    graph.node(sg.FullyConnectedLayer.create(64, 10), x)

    training = sg.TrainingGraph([graph], FocalLoss(label="focal loss"), sg.AdamOptimizer(learning_rate=3e-3))
    training.add_inputs({"image": image}, {"label": label})
    training.compile(sg.Device.any())
    print(training)
    for _ in range(EPOCHS):
        order = random.permutation(len(train_x))
        for rows in np.split(order, range(BATCH, len(order), BATCH)):
            data = {"image": train_x[rows]}, {"label": train_y[rows]}
            step = training.execute(*data, batch_size=len(rows))

    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"image": image})
    inference.compile(training.device)
    found = inference.execute({"image": test_x}, batch_size=len(test_x)).result.numpy().argmax(1)
    accuracy = float(np.mean(found == test_y))
    training.synchronize_updates()
    print(f"last loss {step.loss:.4f}, learned β {swish.beta.numpy().item():.3f}, test accuracy {accuracy:.2%}")
    if accuracy < TARGET:
        sys.exit(f"test accuracy {accuracy:.2%} is below {TARGET:.0%}")


if __name__ == "__main__":
    main()
