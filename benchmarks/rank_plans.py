"""Plans of large language models for many ranks, beside formulas by hand."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import stepgraph as sg
from stepgraph.compiler.ranks.plan import RankPlan

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Language:
    """A language model.

    Args:
        depth: blocks.
        width: features of a token.
        heads: heads of the attention.
        hidden: features inside a block.
        words: tokens of the vocabulary.
        steps: tokens of a row.
        is_llama: RMS normalization, rotary positions, SwiGLU and no biases; otherwise, as GPT-2.
    """

    depth: int
    width: int
    heads: int
    hidden: int
    words: int
    steps: int
    is_llama: bool

    @property
    def parameters(self) -> int:
        """Its parameters, counted by hand."""
        width, hidden = self.width, self.hidden
        if self.is_llama:  # four projections, gate, up and down, two scales; an embedding, a scale and the last layer
            return self.depth * (4 * width**2 + 3 * width * hidden + 2 * width) + (2 * self.words + 1) * width
        attention, forward, norms = 4 * (width**2 + width), 2 * width * hidden + hidden + width, 4 * width
        return self.depth * (attention + forward + norms) + (self.words + self.steps + 2) * width

    def training(self) -> sg.TrainingGraph:
        """The graph, without memory."""
        with sg.without_memory():
            tokens, following = (sg.Tensor((sg.BATCH, self.steps), "int64") for _ in range(2))
            graph, optimizer = sg.Graph(), sg.AdamWOptimizer(3e-4, weight_decay=0.1, clip_norm=1.0)
            inputs: dict[str, sg.Tensor] = self._llama(graph, tokens) if self.is_llama else self._gpt(graph, tokens)
            training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(axis=-1), optimizer)
            training.add_inputs({"tokens": tokens, **inputs}, {"following": following})
            training.set_training_tensor_parameters([sg.TensorParameter(one) for one in inputs.values()])
        return training

    def _llama(self, graph: sg.Graph, tokens: sg.Tensor) -> dict[str, sg.Tensor]:
        x = graph.embedding(tokens, self.words, self.width)
        for _ in range(self.depth):
            inner = graph.rms_normalization(x)
            x = x + graph.attention(inner, self.heads, causal=True, rotary_base=10_000.0, has_biases=False)
            x = x + graph.gated_feed_forward(graph.rms_normalization(x), hidden=self.hidden)
        graph.dense(graph.rms_normalization(x), self.words, biases=False)
        return {}

    def _gpt(self, graph: sg.Graph, tokens: sg.Tensor) -> dict[str, sg.Tensor]:
        """The last layer has the weights of the embedding."""
        embedding = sg.EmbeddingLayer.create(self.words, self.width)
        places = sg.Tensor((self.steps, self.width), fill=0.0)
        x = graph.add(graph.node(embedding, tokens), places)
        for _ in range(self.depth):
            x = x + graph.attention(graph.layer_normalization(x), self.heads, causal=True)
            x = x + graph.dense(graph.gelu(graph.dense(graph.layer_normalization(x), self.hidden)), self.width)
        descriptor = sg.ConvolutionDescriptor(1, self.width, self.words)
        graph.node(sg.FullyConnectedLayer(embedding.weights, None, descriptor), graph.layer_normalization(x))
        return {"places": places}

    def formulas(self, ranks: int) -> dict[str, float]:
        """The same numbers of a rank by hand: AdamW in float32, and a sum of gradients by slices."""
        return {
            "parameters": FLOAT * self.parameters,
            "optimizer_state": 2 * FLOAT * self.parameters / ranks,
            "sent": 2 * FLOAT * self.parameters * (ranks - 1) / ranks,
        }


MODELS = {
    "GPT-2, 124 million": Language(12, 768, 12, 3072, 50257, 1024, is_llama=False),
    "Llama, 7 billion": Language(32, 4096, 32, 11008, 32000, 4096, is_llama=True),
}
LINES = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "gradients": "gradients",
    "buckets": "buckets",
    "workspace": "workspace",
    "total": "total",
    "sent": "sent per update",
}


def show(console: Console, worlds: list[int], path: Path | None = None, models: dict[str, Language] = MODELS) -> None:
    """Prints the plans of all models, one row of tokens for each rank, in bfloat16."""
    report: dict[str, Any] = {}
    for name, model in models.items():
        began = time.perf_counter()
        training = model.training()
        plans = {ranks: plan_of(training, ranks) for ranks in worlds}
        report[name] = {ranks: {line: getattr(plan, line) for line in LINES} for ranks, plan in plans.items()}
        console.print(table(f"{name}: {model.parameters:,} parameters", model, plans))
        console.print(f"planned in {time.perf_counter() - began:.1f} s\n", style="dim")
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def plan_of(training: sg.TrainingGraph, ranks: int) -> RankPlan:
    """A plan with one row for each rank."""
    parallel = sg.Parallel(shards=ranks)
    found = training.memory_plan_for(ranks, ranks=ranks, parallel=parallel, device="cpu", compute_type="bfloat16")
    assert isinstance(found, RankPlan)
    return found


def table(title: str, model: Language, plans: dict[int, RankPlan]) -> Table:
    """One column per world, and the formula beside it where there is one."""
    drawn = Table("a rank has", title=title, title_justify="left", show_edge=False, pad_edge=False)
    for ranks in plans:
        drawn.add_column(f"{ranks:,} ranks", justify="right")
        drawn.add_column("by hand", justify="right", style="dim")
    for line, words in LINES.items():
        cells = []
        for ranks, plan in plans.items():
            formula = model.formulas(ranks).get(line)
            cells += [_gibibytes(getattr(plan, line)), "" if formula is None else _gibibytes(formula)]
        drawn.add_row(words, *cells)
    return drawn


def _gibibytes(count: float) -> str:
    return f"{count / 2**30:,.3f} GiB"
