"""A program for `test_fusion_cache.py`: fuses a step on the CPU, trains, and prints what PyTorch's cache did."""

import json
import sys

import numpy as np
import torch
from torch._dynamo.utils import counters

import stepgraph as sg
from stepgraph.compiler import fusion

torch.set_num_threads(1)


def main(width: int) -> None:
    sg.set_seed(3)
    x, y = sg.Tensor((2, 6)), sg.Tensor((2,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(sg.FullyConnectedLayer.create(6, width), x))
    graph.node(sg.FullyConnectedLayer.create(width, 3), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    compile_kernels, started = fusion._compiled, list[object]()
    fusion._compiled = lambda *given: (started.append(given), compile_kernels(*given))[1]
    training.compile("cpu", fuse=True)
    batch = {"x": np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)}, {"y": np.array([0, 1])}
    losses = [training.execute(*batch).loss for _ in range(5)]
    (executable,) = training.compilation.programs.executables.values()
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    print(json.dumps({**found, "started": len(started), "losses": losses, "direct": executable._function.is_direct}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
