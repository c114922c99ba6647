"""A language model of transformers, trained with `fit` and handed back: `generate` uses what it learned.

    pip install transformers
    python examples/19_fine_tune_transformers.py [--quick]

`from_torch` turns the model into a graph whose layers are its modules, under their own names. Training then has what
every graph has: a plan of its memory, checkpoints, a schedule, averaged weights. The weights are shared on the CPU, so
nothing is converted back. The model is small and starts from random weights; nothing is downloaded. The text is
Python's own manual, by characters.

Expect 2.8 bits per character. The program ends with an error above 3 (--quick: 30 of 1000 steps, and 5). Two minutes.
"""

import argparse
import sys
from pydoc_data.topics import topics

import numpy as np
import torch

import stepgraph as sg

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    sys.exit("This example needs transformers: pip install transformers")

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--quick", action="store_true", help="fewer steps, for tests")
quick = options.parse_args().quick

LENGTH, BATCH, STEPS, EPOCH = 64, 16, *((30, 15) if quick else (1000, 100))
letters, text = np.unique(list("\n".join(topics.values())), return_inverse=True)
train, test = np.split(text, [len(text) * 9 // 10])
random = np.random.default_rng(0)
torch.manual_seed(0)
sg.set_seed(0)

sizes = {"vocab_size": len(letters), "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def pieces(source: np.ndarray, count: int) -> tuple[dict, dict]:
    """Pieces of text, and each of them one character later."""
    found = source[random.integers(0, len(source) - LENGTH, (count, 1)) + np.arange(LENGTH + 1)]
    return {"input_ids": found[:, :-1]}, {"labels": found[:, 1:]}


# Import: the example tells shapes and types only; the batch is free.
imported = sg.from_torch(model, {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)}, outputs=["logits"])
optimizer = sg.AdamWOptimizer(2e-3, weight_decay=0.1, clip_norm=1.0, groups=sg.DECAY_MATRICES_ONLY)
labels = sg.Tensor((sg.BATCH, LENGTH), "int64")
training = imported.training(sg.LossLayer.softmax_cross_entropy(axis=-1), optimizer, labels)
training.compile(sg.Device.any())
print(training.memory_plan_for(BATCH))

schedule = sg.WarmupCosine(peak=2e-3, warmup=STEPS // 20, steps=STEPS)
sg.fit(training, lambda _: [pieces(train, BATCH) for _ in range(EPOCH)], epochs=STEPS // EPOCH, schedule=schedule)
bits = sg.evaluate(training, pieces(test, 16 * BATCH), batch_size=BATCH)["loss"] / np.log(2)
print(f"{bits:.2f} bits per character of the test text")

# Hand it back: the model has the weights, its own methods work.
model.load_state_dict(imported.state_dict())
model.eval()
written = model.generate(torch.from_numpy(test[None, :8]), max_length=LENGTH, do_sample=True, top_k=5)
print("".join(letters[written[0]]))
if bits > (limit := 5 if quick else 3):
    sys.exit(f"{bits:.2f} bits per character are more than {limit}")
