"""A picture as a function: a network that tells the color at each place, fitted to a photograph.

    python examples/10_image_fitting.py [--quick] [--out FILE.png]

The photograph is scikit-learn's bundled sample "flower.jpg" (it needs Pillow to be read), made smaller by averaging.
Places go through sines and cosines of many frequencies first: a plain network would paint a blur. The result is written
as a PNG beside the original, by a few lines around the standard library's zlib.

Expect a peak signal-to-noise ratio (PSNR) of 32 dB, where the picture's mean color has 13 dB. The program ends with an
error below 30 dB (--quick: a smaller picture and fewer steps, 24 dB). Half a minute.
"""

import argparse
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_sample_image

import stepgraph as sg

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="a small picture and few steps, for tests")
options.add_argument("--out", type=Path, default=Path("image_fitting.png"), help="the picture to write")
chosen = options.parse_args()
SMALLER, STEPS, TARGET = (8, 200, 24.0) if chosen.quick else (4, 2000, 30.0)
BATCH, FREQUENCIES, WIDTH = 1024, 64, 128
random = np.random.default_rng(0)
sg.set_seed(0)

photograph = load_sample_image("flower.jpg")[:424, :640].astype(np.float32) / 255
height, width = 424 // SMALLER, 640 // SMALLER
picture = photograph.reshape(height, SMALLER, width, SMALLER, 3).mean(axis=(1, 3))

# Places from -1 to 1, and a color for each.
down, across = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
places = np.stack([down, across], axis=2).reshape(-1, 2).astype(np.float32)
colors = picture.reshape(-1, 3)

# Wire. Frequencies are drawn once and stay as they are: a layer without updates. Sine and cosine are arithmetic.
place, color = sg.Tensor((BATCH, 2)), sg.Tensor((BATCH, 3))
graph = sg.Graph()
waves = sg.FullyConnectedLayer.create(2, FREQUENCIES, biases=False, label="waves")
waves.weights.data[:] = random.normal(0, 8, (FREQUENCIES, 2))
phase = graph.node(waves, place, disable_update=True)
parts = [
    graph.node(sg.ArithmeticLayer(kind), phase) for kind in (sg.ArithmeticOperation.SIN, sg.ArithmeticOperation.COS)
]
x, inputs = graph.concatenate(parts), 2 * FREQUENCIES
for _ in range(3):
    x = graph.node(sg.ActivationLayer.relu(), graph.node(sg.FullyConnectedLayer.create(inputs, WIDTH), x))
    inputs = WIDTH
painted = graph.node(sg.ActivationLayer.sigmoid(), graph.node(sg.FullyConnectedLayer.create(WIDTH, 3), x))

training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=3e-3))
training.add_inputs({"place": place}, loss_labels={"color": color})
training.compile(sg.Device.any())
print(training)

# Train: whole pictures, in another order each time.
epochs = -(-STEPS * BATCH // len(places))
history = sg.fit(
    training, (places, colors), epochs=epochs, schedule=sg.WarmupCosine(peak=3e-3, warmup=50), progress="quiet"
)
for row in history.epochs[:: max(1, epochs // 10)]:
    print(f"epoch {row['epoch']:3}   PSNR {-10 * np.log10(row['loss']):.1f} dB")

# Paint: all places in one call. A batch of another size is compiled once and then known.
inference = sg.InferenceGraph([graph])
inference.add_inputs({"place": place})
inference.compile(training.device)
found = inference.execute({"place": places}, batch_size=len(places)).result.numpy()


def psnr(guess: np.ndarray) -> float:
    """Decibels from the mean squared error of numbers between 0 and 1."""
    return float(-10 * np.log10(np.square(guess - colors).mean()))


def write_png(path: Path, image: np.ndarray) -> None:
    """Writes `[height, width, 3]` numbers from 0 to 1: a header, rows of 8-bit colors (0: unfiltered), an end."""
    rows = np.rint(image.clip(0, 1) * 255).astype(np.uint8).reshape(len(image), -1)
    data = zlib.compress(np.insert(rows, 0, 0, axis=1).tobytes())
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    chunks = [b"IHDR" + header, b"IDAT" + data, b"IEND"]
    framed = (struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(framed))


write_png(chosen.out, np.hstack([picture, found.reshape(picture.shape)]))
print(f"the original and the fitted picture, {width} × {height} pixels each, are in {chosen.out}")

numbers = sum(layer.parameter_count for layer in graph.layers)
print(f"PSNR {psnr(found):.1f} dB with {numbers:,} parameters; the mean color has {psnr(colors.mean(axis=0)):.1f} dB")
if psnr(found) < TARGET:
    sys.exit(f"a PSNR of {psnr(found):.1f} dB is below {TARGET} dB")
