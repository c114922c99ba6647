"""A PyTorch training loop, and the same training by stepgraph: the model stays a PyTorch model.

    python examples/17_from_pytorch.py [--quick]

The loop below is a usual one: a convolutional network with batch normalization, cross entropy, AdamW. Ten lines bring
it over: import the model, take over the optimizer, `fit`. Both start from the same weights and read the same batches.
Afterwards the model holds what stepgraph trained, since both share their memory on the CPU.

Expect a test accuracy of 95%, and the same losses up to rounding. The program ends with an error below 94%, or if the
losses of the first epoch differ by more than 1% (--quick: one of twelve epochs, and 60%). Fifteen seconds.
"""

import argparse
import copy
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer epochs, for tests")
quick = options.parse_args().quick

BATCH, EPOCHS = 32, 1 if quick else 12
images, classes = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
train, test = slice(0, 1408), slice(1408, None)  # 44 whole batches

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
)

# The loop in PyTorch, with a copy of the model
theirs = copy.deepcopy(model)
optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3, weight_decay=0.01)
losses = []
for _ in range(EPOCHS):
    for first in range(0, train.stop, BATCH):
        rows = slice(first, first + BATCH)
        loss = nn.functional.cross_entropy(theirs(torch.from_numpy(images[rows])), torch.from_numpy(classes[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

# The same in stepgraph
imported = sg.from_torch(model, torch.from_numpy(images[:BATCH]))
labels = sg.Tensor((sg.BATCH,), "int64")
adamw = sg.optimizers.from_torch(torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01))
training = imported.training(sg.LossLayer.softmax_cross_entropy(), adamw, labels)
training.compile(sg.Device.any())
data = {"input": images[train]}, {"labels": classes[train]}
history = sg.fit(training, data, epochs=EPOCHS, batch_size=BATCH, shuffle=False)
model.load_state_dict(imported.state_dict())  # on the CPU it has these values already

print(imported)
ours, first = history.epochs[0]["loss"], np.mean(losses[: train.stop // BATCH])
print(f"loss of the first epoch: PyTorch {first:.4f}, stepgraph {ours:.4f}")
model.eval()
accuracy = (model(torch.from_numpy(images[test])).argmax(1).numpy() == classes[test]).mean()
print(f"test accuracy of the PyTorch model: {accuracy:.1%}")
if abs(ours - first) > 0.01 * first or accuracy < (0.6 if quick else 0.94):
    sys.exit("the losses differ, or the accuracy is too low")
