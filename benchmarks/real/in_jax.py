"""GPT-2 in JAX, as a JAX program writes it: one compiled function for the step, in which parameters are donated.

As in stepgraph, layers compute in bfloat16 on a GPU, with float32 parameters; losses and normalization are float32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.real.contender import DECAY, Contender, Inputs, copied
from benchmarks.real.models import Model

EPSILON = 1e-5


class InJax(Contender):
    """The same weights, batches and optimizer in JAX and optax."""

    def __init__(self, model: Model, device: str) -> None:
        super().__init__(model, device)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # so that the peak is what a step needs
        os.environ.setdefault("JAX_PLATFORMS", "cuda" if device == "cuda" else "cpu")
        state = copied(model.module(device).state_dict())
        del state["head.weight"]  # it is that of the embedding
        self.start = {name: one.numpy() for name, one in state.items()}

    def make(self) -> None:
        import jax
        import optax

        sizes, on_gpu = self.model.sizes, self.device == "cuda"
        self.optimizer = optax.adamw(self.model.learning_rate, weight_decay=DECAY)

        def step(parameters: Any, state: Any, tokens: Any, labels: Any) -> Any:
            def mean_loss(parameters: Any) -> Any:
                logits = gpt2(parameters, tokens, sizes, "bfloat16" if on_gpu else "float32", on_gpu)
                return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels).mean()

            loss, gradients = jax.value_and_grad(mean_loss)(parameters)
            updates, state = self.optimizer.update(gradients, state, parameters)
            return loss, optax.apply_updates(parameters, updates), state

        self.compiled = jax.jit(step, donate_argnums=(0, 1))
        self.reset()

    def remember(self) -> None:
        """The first weights are kept from the beginning."""

    def step(self, inputs: Inputs, labels: torch.Tensor) -> None:
        given = (self._moved(one) for one in (*inputs.values(), labels))
        self.last, self.parameters, self.state = self.compiled(self.parameters, self.state, *given)
        self.steps += 1

    def _moved(self, indices: torch.Tensor) -> Any:
        """Indices without a copy through the host; 32 bits are what JAX computes with."""
        import jax

        narrow = indices.int()
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        return jax.dlpack.from_dlpack(narrow)

    def reset(self) -> None:
        import jax

        self.parameters = {name: jax.numpy.array(one) for name, one in self.start.items()}
        self.state = self.optimizer.init(self.parameters)

    @property
    def loss(self) -> float:
        return float(self.last)

    def wait(self) -> None:
        self.last.block_until_ready()

    def peak(self) -> dict[str, int] | None:
        """JAX's own peak since the start, and what PyTorch holds: the batch."""
        if self.device != "cuda":
            return None
        import jax

        found = jax.devices()[0].memory_stats()
        batch = torch.cuda.memory_allocated()
        return {"allocated": found["peak_bytes_in_use"] + batch, "reserved": found["peak_bytes_in_use"] + batch}


def gpt2(parameters: Mapping[str, Any], tokens: Any, sizes: Mapping[str, int], kind: str, by_cudnn: bool) -> Any:
    """As `modules.GPT2`, with the residual stream in the type of the layers."""
    import jax

    half = {name: one.astype(kind) for name, one in parameters.items()}
    x = half["tokens.weight"][tokens] + half["positions"]
    for i in range(sizes["depth"]):
        own = {name.removeprefix(f"blocks.{i}."): one for name, one in half.items() if name.startswith(f"blocks.{i}.")}
        x = x + _attention(_normalized(x, own, "norm1"), own, sizes["heads"], by_cudnn)
        inner = jax.nn.gelu(_linear(_normalized(x, own, "norm2"), own, "full1"), approximate=True)
        x = x + _linear(inner, own, "full2")
    return _normalized(x, half, "norm") @ half["tokens.weight"].T


def _attention(x: Any, own: Mapping[str, Any], heads: int, by_cudnn: bool) -> Any:
    import jax

    batch, steps, width = x.shape
    q, k, v = (one.reshape(batch, steps, heads, -1) for one in _split(_linear(x, own, "attention.joint"), 3))
    found = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if by_cudnn else None)
    return _linear(found.reshape(batch, steps, width), own, "attention.output")


def _split(x: Any, count: int) -> Any:
    import jax

    return jax.numpy.split(x, count, axis=-1)


def _linear(x: Any, own: Mapping[str, Any], path: str) -> Any:
    return x @ own[f"{path}.weight"].T + own[f"{path}.bias"]


def _normalized(x: Any, own: Mapping[str, Any], path: str) -> Any:
    import jax

    full = x.astype("float32")
    centered = full - full.mean(-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + EPSILON)
    return (scaled * own[f"{path}.weight"] + own[f"{path}.bias"]).astype(x.dtype)
