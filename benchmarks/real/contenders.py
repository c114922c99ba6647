"""Who trains a model: stepgraph in its forms, PyTorch's eager loop and compiler, and JAX (`in_jax.py`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.real.contender import DECAY, SETTLED, Contender, Inputs, copied
from benchmarks.real.models import Model
from benchmarks.real.modules import loss

CAPTURED = "CUDA graph"  # in the mode of steps that are replays


class Eager(Contender):
    """The loop everybody writes: autocast, `backward`, fused AdamW; pictures and convolutions channels last."""

    stream = torch.float32

    def __init__(self, model: Model, device: str) -> None:
        super().__init__(model, device)
        torch.backends.cudnn.benchmark = True
        more = {} if model.pixels and model.kind != "vit" else {"stream": self.stream}
        self.module = model.module(device, **more)
        if model.pixels:
            self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def make(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), self.model.learning_rate, weight_decay=DECAY, fused=True
        )

        def forward(inputs: Inputs, labels: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                return loss(self.module(*inputs.values()), labels)

        self.forward = self.compiled(forward)

    def remember(self) -> None:
        self.start = copied(self.module.state_dict())

    def compiled(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The function that steps call."""
        return forward

    def step(self, inputs: Inputs, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.last = self.forward(inputs, labels)
        self.last.backward()
        self.optimizer.step()
        self.steps += 1

    def reset(self) -> None:
        self.module.load_state_dict(self.start)
        self.optimizer.state.clear()

    @property
    def loss(self) -> float:
        return self.last.item()


class Compiled(Eager):
    """The same loop, with loss and gradient compiled by `torch.compile`."""

    mode = "default"

    def compiled(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.compile(forward, mode=self.mode)


class ReducedOverhead(Compiled):
    """The same, with CUDA graphs."""

    mode, hides_memory = "reduce-overhead", True


class Autotuned(Compiled):
    """The same, with CUDA graphs and products chosen by measuring."""

    mode, hides_memory = "max-autotune", True


class HalfStream(Compiled):
    """`torch.compile` with the residual stream of a transformer in bfloat16, as stepgraph has it."""

    @property
    def stream(self) -> torch.dtype:  # type: ignore[override]
        return torch.bfloat16 if self.device == "cuda" else torch.float32


class Stepgraph(Contender):
    """stepgraph's own layers, as a user compiles them: on a GPU, the first steps run while the step is being fused."""

    settings: Mapping[str, Any] = {}

    def __init__(self, model: Model, device: str) -> None:
        super().__init__(model, device)
        self.state = copied(model.module(device).state_dict())
        self.first = model.batch(0, "cpu")

    def make(self) -> None:
        import stepgraph as sg

        inputs = {name: sg.Tensor(tuple(one.shape), one.dtype) for name, one in self.first[0].items()}
        labels = sg.Tensor(tuple(self.first[1].shape), "int64")
        self.names = list(inputs)
        self.training = self.wired(inputs, labels)
        half = "bfloat16" if self.device == "cuda" else None
        self.training.compile(self.device, compute_type=half, **self.settings)

    def remember(self) -> None:
        self.start = copied(self.training.state_dict())

    def wired(self, inputs: dict[str, Any], labels: Any) -> Any:
        """The training graph."""
        import stepgraph as sg
        from benchmarks.real.graphs import KINDS, Wiring

        self.wiring = on = Wiring(self.state)
        result = KINDS[self.model.kind](on, *inputs.values(), **self.model.sizes)
        training = sg.TrainingGraph([on.graph], self.compared(result), self.optimizer())
        training.add_inputs({**inputs, **on.trained}, {"labels": labels})
        training.set_training_tensor_parameters([sg.TensorParameter(one) for one in on.trained.values()])
        return training

    def compared(self, result: Any) -> Any:
        """The loss layer: classes are last in sequences, second in pictures."""
        import stepgraph as sg

        axis = 2 if len(result.shape) == 3 else 1
        return sg.LossLayer.softmax_cross_entropy(axis=axis, ignored_label=self.model.ignored)

    def optimizer(self) -> Any:
        import stepgraph as sg

        return sg.AdamWOptimizer(self.model.learning_rate, weight_decay=DECAY, formula="torch")

    def step(self, inputs: Inputs, labels: torch.Tensor) -> None:
        self.last = self.training.execute(dict(zip(self.names, inputs.values(), strict=True)), {"labels": labels})
        self.steps += 1

    def wait(self) -> None:
        self.last.wait()

    def reset(self) -> None:
        self.training.load_state_dict(self.start)
        now = self.training.progress()
        zeros = {tensor: tuple(map(torch.zeros_like, buffers)) for tensor, buffers in now.buffers.items()}
        self.training.resume(replace(now, buffers=zeros))
        self.training.optimizer.time_step = 1

    @property
    def loss(self) -> float:
        return float(self.last.loss)

    @property
    def _executable(self) -> Any:
        return list(self.training.compilation.programs.executables.values())[-1]

    @property
    def settled(self) -> bool:
        """Whether the step is fused and captured, or will never be fused."""
        one, is_cuda = self._executable, self.device == "cuda"
        waits = one.fusing == "under way" or (is_cuda and one.fusing == "not yet")
        return self.steps >= SETTLED and not waits and (not is_cuda or CAPTURED in one.mode)

    @property
    def mode(self) -> str:
        return self._executable.mode

    def facts(self) -> dict[str, Any]:
        one = self._executable
        return {"plan": self.training.memory_plan.total, "mode": one.mode, "fusing": one.fusing}


class Unfused(Stepgraph):
    """The same step, never fused: how training runs until the fused step takes over."""

    settings: Mapping[str, Any] = {"fuse": False}


class Imported(Stepgraph):
    """The PyTorch module, imported by `stepgraph.from_torch`."""

    def __init__(self, model: Model, device: str) -> None:
        super().__init__(model, device)
        self.module = self.original()

    def original(self) -> nn.Module:
        """The module, on the CPU, with the same weights as everybody."""
        made = self.model.module("cpu")
        made.load_state_dict(self.state)
        return made

    def wired(self, inputs: dict[str, Any], labels: Any) -> Any:
        import stepgraph as sg

        example = tuple(one[:2] for one in self.first[0].values())
        imported = sg.from_torch(self.module, example, check=False)
        self.names = list(imported.inputs)
        labels = sg.Tensor((sg.BATCH, *labels.shape[1:]), "int64")  # an imported model takes any number of rows
        return imported.training(self.compared(next(iter(imported.outputs.values()))), self.optimizer(), labels)


class FromTransformers(Imported):
    """GPT-2 of the package transformers, imported by `stepgraph.from_torch`."""

    def original(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = self.model.sizes
        config = GPT2Config(
            vocab_size=sizes["vocabulary"],
            n_positions=sizes["steps"],
            n_embd=sizes["width"],
            n_layer=sizes["depth"],
            n_head=sizes["heads"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        made = GPT2LMHeadModel(config)
        made.load_state_dict({_in_transformers(name): _turned(name, one) for name, one in self.state.items()})
        return made


def _in_transformers(name: str) -> str:
    """The name that a parameter of `modules.GPT2` has in transformers."""
    if name == "positions":
        return "transformer.wpe.weight"
    for ours, theirs in (
        ("tokens", "wte"),
        ("blocks", "h"),
        ("norm1", "ln_1"),
        ("norm2", "ln_2"),
        ("norm.", "ln_f."),
        ("attention.joint", "attn.c_attn"),
        ("attention.output", "attn.c_proj"),
        ("full1", "mlp.c_fc"),
        ("full2", "mlp.c_proj"),
    ):
        name = name.replace(ours, theirs)
    return name.replace("head.", "lm_head.") if name.startswith("head.") else f"transformer.{name}"


def _turned(name: str, one: torch.Tensor) -> torch.Tensor:
    """Linear layers of transformers' GPT-2 have their weights as `[inputs, outputs]`."""
    is_linear = name.startswith("blocks.") and one.ndim == 2
    return one.t() if is_linear else one


def in_jax(model: Model, device: str) -> Contender:
    """The contender in another framework, which only its own process loads."""
    from benchmarks.real.in_jax import InJax

    return InJax(model, device)


class Row(NamedTuple):
    """How a contender is made, and what it is for.

    Args:
        place: makes it.
        kinds: the models it can train; all if empty.
        devices: where it runs.
        package: what must be installed.
        usual: the models for which it is measured unless the command line says otherwise; all if None.
    """

    place: Callable[[Model, str], Contender]
    kinds: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    package: str = "torch"
    usual: tuple[str, ...] | None = None

    def problem(self, model: Model, device: str) -> str:
        """Why it cannot train this model here, or nothing."""
        if self.kinds and model.kind not in self.kinds:
            return f"not for {model.kind}"
        if device not in self.devices:
            return f"not for {device}"
        return "" if importlib.util.find_spec(self.package) else f"{self.package} is not installed"


OURS, EAGER = "stepgraph", "eager"
OURSELVES = (OURS, "unfused", "imported", "transformers")
TRANSFORMERS = ("gpt2", "llama", "bert", "vit")
CONTENDERS: dict[str, Row] = {
    OURS: Row(Stepgraph),
    "unfused": Row(Unfused),
    "imported": Row(Imported, usual=("gpt2",)),
    "transformers": Row(FromTransformers, ("gpt2",), package="transformers", usual=("gpt2",)),
    EAGER: Row(Eager),
    "compile": Row(Compiled),
    "stream": Row(HalfStream, TRANSFORMERS, ("cuda",), usual=()),
    "reduce": Row(ReducedOverhead, (), ("cuda",), usual=()),
    "autotune": Row(Autotuned, (), ("cuda",), usual=()),
    "jax": Row(in_jax, ("gpt2",), package="optax", usual=()),
}
