"""What mixed precision gains: one transformer's training step in float32 and in bfloat16, interleaved.

python -m benchmarks.precision --device cuda
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import stepgraph as sg

TOKENS, CLASSES = 128, 64


def transformer(device: sg.Device, batch: int, width: int, depth: int, compute_type: str | None) -> sg.TrainingGraph:
    """`depth` blocks of attention and a two-layer perceptron on `width` features, one class a token."""
    sg.set_seed(0)
    x, y = sg.Tensor((batch, TOKENS, width)), sg.Tensor((batch * TOKENS,), "int64")
    graph, value = sg.Graph(), x
    for _ in range(depth):
        normal = graph.node(sg.LayerNormalizationLayer.create((width,)), value)
        attention = sg.MultiheadAttentionLayer.create(width, head_count=width // 64)
        value = graph.node(sg.ArithmeticLayer.add(), value, graph.node(attention, normal, normal, normal))
        hidden = graph.node(sg.LayerNormalizationLayer.create((width,)), value)
        hidden = graph.node(sg.FullyConnectedLayer.create(width, 4 * width), hidden)
        hidden = graph.node(sg.ActivationLayer.gelu(), hidden)
        hidden = graph.node(sg.FullyConnectedLayer.create(4 * width, width), hidden)
        value = graph.node(sg.ArithmeticLayer.add(), value, hidden)
    value = graph.node(sg.FullyConnectedLayer.create(width, CLASSES), value)
    graph.reshape((-1, CLASSES), value)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamWOptimizer(learning_rate=1e-3))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(device, compute_type=compute_type)
    return training


def seconds(training: sg.TrainingGraph, data: tuple[dict, dict], steps: int) -> float:
    """Time of one step, over `steps`."""
    start = time.perf_counter()
    for _ in range(steps):
        execution = training.execute(*data)
    execution.wait()
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = sg.Device.of(options.device)
    if device is None:
        raise SystemExit(f"there is no {options.device} here")
    generator = np.random.default_rng(0)
    shape = (options.batch, TOKENS, options.width)
    arrays = (generator.standard_normal(shape, dtype=np.float32), generator.integers(0, CLASSES, shape[0] * shape[1]))
    x, y = (torch.from_numpy(array).to(device.torch) for array in arrays)
    data = {"x": x}, {"y": y}
    graphs = {
        name: transformer(device, options.batch, options.width, options.depth, kind)
        for name, kind in (("float32", None), ("bfloat16", "bfloat16"))
    }
    losses = {name: [training.execute(*data).loss for _ in range(5)] for name, training in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(options.rounds):
        for name, training in graphs.items():
            times[name].append(seconds(training, data, options.steps))
    ratios = [full / half for full, half in zip(times["float32"], times["bfloat16"], strict=True)]
    memory = {name: training.memory_plan.intermediates for name, training in graphs.items()}
    result = {"times": times, "losses": losses, "memory": memory, "device": str(device), "torch": torch.__version__}
    console = Console()
    for name in graphs:
        median = 1e3 * statistics.median(times[name])
        console.print(f"{name:9} {median:8.3f} ms   {memory[name] / 2**20:8.1f} MiB   losses {losses[name]}")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    console.print(f"float32 / bfloat16: {statistics.median(ratios):.2f} ({spread}) on {device}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
