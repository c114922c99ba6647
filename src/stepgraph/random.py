"""Random numbers: one seed for new tensors, and a counter-based stream for layers that draw in every step.

`set_seed` makes programs reproducible; without it every process draws other numbers. The stream of a step is a pure
function of (seed, step, node): forward and gradient see the same numbers, a resumed run draws what an uninterrupted
one would have drawn, every device draws the same, and PyTorch's global generator is neither read nor advanced.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch

from stepgraph.errors import ArgumentError, MemoryLimitError
from stepgraph.system.torch_private import DispatchMode, OpOverload, schema
from stepgraph.types import RandomInitializerType

_Result = TypeVar("_Result")
_generator = torch.Generator()
_generator.seed()
_seed: int | None = None
_describes: ContextVar[bool] = ContextVar("stepgraph_without_memory", default=False)
_SHARES = ("p", "dropout_p", "dropout")  # dropout probabilities; at 0, the operator draws nothing
_SWITCHES = ("train", "training")


def set_seed(seed: int) -> None:
    """Seeds everything that stepgraph draws from now on: initializers, and the dropout of graphs compiled later.

    Example:
        >>> set_seed(7)
        >>> first = Tensor((2,), random=RandomInitializerType.UNIFORM).data
        >>> set_seed(7)
        >>> bool((Tensor((2,), random=RandomInitializerType.UNIFORM).data == first).all())
        True
    """
    global _seed  # noqa: PLW0603  the process has one seed, as in the original
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ArgumentError("set_seed", f"the seed is {seed!r}, not an integer", fix="pass an int")
    _seed = int(seed)
    _generator.manual_seed(_seed % 2**63)


def get_seed() -> int | None:
    """The current seed, or None before the first `set_seed`."""
    return _seed


def draw_seed() -> int:
    """A seed for a graph's own stream, drawn from the global one."""
    return int(torch.randint(2**31 - 1, (), generator=_generator, device="cpu"))


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside the block, new tensors have a shape and a type, but no memory and no numbers.

    A graph of any size can be wired there, and `memory_plan_for` plans it. It can be compiled once its tensors have
    received data, from a checkpoint or a file of weights.

    Example:
        >>> with without_memory():
        ...     layer = FullyConnectedLayer.create(1_000_000, 1_000_000)
        >>> layer.weights.has_data
        False
    """
    token = _describes.set(True)
    try:
        yield
    finally:
        _describes.reset(token)


def describes() -> bool:
    """Whether new tensors have no memory."""
    return _describes.get()


def new_array(where: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for an array on the host; raises an error with the size if there is not enough.

    Inside `without_memory`, an array on PyTorch's device "meta", which has none.
    """
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="meta" if describes() else "cpu")
    except (RuntimeError, MemoryError, TypeError):  # the exception depends on how the size is too large
        needed = math.prod(shape) * dtype.itemsize
        raise MemoryLimitError(
            where, f"there is not enough memory for {needed:,} bytes, shape {tuple(shape)}", fix="use a smaller shape"
        ) from None


def initialize(
    kind: RandomInitializerType, shape: Sequence[int], fan_in: int, fan_out: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """New random values: `U[0, 1)`, `U[-a, a]` with `a = sqrt(6 / (in + out))`, or `N(0, 2 / (in + out))`."""
    if not dtype.is_floating_point:
        raise ArgumentError(
            "initialize",
            f"{kind} produces real numbers, but the tensor holds {str(dtype).removeprefix('torch.')}",
            fix="fill it instead",
        )
    values = new_array("initialize", shape, dtype)
    match kind:
        case RandomInitializerType.UNIFORM:
            return values.uniform_(0, 1, generator=_generator)
        case RandomInitializerType.GLOROT_UNIFORM:
            bound = math.sqrt(6 / (fan_in + fan_out))
            return values.uniform_(-bound, bound, generator=_generator)
        case RandomInitializerType.XAVIER:
            return values.normal_(0, math.sqrt(2 / (fan_in + fan_out)), generator=_generator)
    raise ArgumentError("initialize", f"{kind!r} is not a random initializer", fix="use RandomInitializerType")


def draw_mask(stream: torch.Tensor, salt: int, shape: Sequence[int], rate: float) -> torch.Tensor:
    """True with probability `1 - rate`, per element, from `stream = [seed, step]` and the node's `salt`.

    The finalizer's last shift would change only low bits, which hardly affect a comparison; it is omitted.
    """
    threshold = min(round(rate * 2**32), 2**32 - 1) - 2**31  # a rate close to 1 must not exceed 32 bits
    return (_draw_bits(stream, salt, shape) >= threshold).view(tuple(shape))


def draw_uniform(stream: torch.Tensor, salt: int, shape: Sequence[int]) -> torch.Tensor:
    """Multiples of 2⁻²⁴ in `[0, 1)`, all equally likely, from `stream = [seed, step]` and the node's `salt`."""
    bits = _draw_bits(stream, salt, shape)
    bits = bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return ((bits >> 8).bitwise_and_(0xFFFFFF).float() * 2.0**-24).view(tuple(shape))


def _draw_bits(stream: torch.Tensor, salt: int, shape: Sequence[int]) -> torch.Tensor:
    """32 random bits per element, as a flat array.

    The element's index is scattered by a step-dependent odd factor and offset, then mixed by a 32-bit finalizer of
    multiplications and shifts: integer arithmetic only, so that every device produces the same bits. The finalizer's
    last shift is left to the caller.
    """
    seed, step = stream.tolist() if stream.is_cpu else stream  # elsewhere reading them would synchronize
    key = _mix(_mix(seed + salt) + step)
    factor, offset = _signed(_mix(key + 1) | 1), _signed(_mix(key + 2))
    bits = torch.arange(math.prod(shape), dtype=torch.int32, device=stream.device).mul_(factor).add_(offset)
    for shift, multiplier in ((16, 0x7FEB352D), (15, -0x7B935975)):
        shifted = (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        bits.bitwise_xor_(shifted).mul_(multiplier)
    return bits


_mask_operator = torch.library.custom_op("stepgraph::keep_mask", draw_mask, mutates_args=())
_uniform_operator = torch.library.custom_op("stepgraph::uniform", draw_uniform, mutates_args=())


def keep_mask(stream: torch.Tensor, salt: int, shape: Sequence[int], rate: float) -> torch.Tensor:
    """`draw_mask` as a compiled step records it: one operator on the CPU, fusible arithmetic elsewhere."""
    return (_mask_operator if stream.is_cpu else draw_mask)(stream, salt, shape, rate)


def uniform(stream: torch.Tensor, salt: int, shape: Sequence[int]) -> torch.Tensor:
    """`draw_uniform` as a compiled step records it."""
    return (_uniform_operator if stream.is_cpu else draw_uniform)(stream, salt, shape)


@_mask_operator.register_fake
def _(stream: torch.Tensor, salt: int, shape: Sequence[int], rate: float) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device=stream.device)


@_uniform_operator.register_fake
def _(stream: torch.Tensor, salt: int, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.float32, device=stream.device)


def seed_of_shard(seed: Any, shard: int) -> Any:
    """The seed that a part of a batch draws from; the first part draws what a whole batch would."""
    return seed ^ _mix(shard)


def draws_from_generator(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator of PyTorch, called with these arguments, draws from its global generator."""
    if not isinstance(operator, OpOverload) or torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    declared = schema(operator).arguments
    defaults = {one.name: one.default_value for one in declared if one.has_default_value()}
    given = defaults | {one.name: value for one, value in zip(declared, args, strict=False)} | dict(kwargs)
    switched_off = any(given.get(name) is False for name in _SWITCHES)
    drops_nothing = any(isinstance(given.get(name), int | float) and given[name] == 0 for name in _SHARES)
    return not (switched_off or drops_nothing)


class Drawn(Exception):
    """An operator drew from PyTorch's generator; its name is the argument."""


class Refusals(DispatchMode):
    """Raises `Drawn` at the first operator that draws from PyTorch's generator."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_from_generator(operator, args, kwargs or {}):
            raise Drawn(str(operator).rpartition(".")[0])
        return operator(*args, **(kwargs or {}))


def refusal(where: str, operator: Any) -> ArgumentError:
    """The error for a layer whose forward calls a random operator of PyTorch."""
    return ArgumentError(
        where,
        f"its forward calls PyTorch's random operator {operator}, which a step cannot reproduce",
        fix="draw from the graph's stream: scope.keep_mask(x, rate), or scope.random(shape) for [0, 1)",
    )


def require_no_python_draws(where: str, record: Callable[[], _Result]) -> _Result:
    """What a function returns; an error if it draws from the generators of Python or NumPy.

    A recording would keep such a number for good. Other threads may draw at the same time, so a call during which a
    generator moved is repeated before it is refused.
    """
    drew = ""
    for _ in range(2):
        states = _python_states()
        found = record()
        drew = next((name for name, state in _python_states().items() if state != states[name]), "")
        if not drew:
            return found
    raise ArgumentError(
        where,
        f"its forward draws from {drew}, and every step would repeat the numbers of the first call",
        fix="draw from the graph's stream: torch.rand, torch.randint or torch.randperm in a PyTorch module, "
        "scope.random(shape) in a layer",
    )


def _python_states() -> dict[str, Any]:
    kind, keys, *others = np.random.get_state()
    return {"Python's random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *others)}


def _mix(value: Any) -> Any:
    """The same finalizer on one integer, in Python or on a device."""
    mask = 0xFFFFFFFF
    value = value & mask
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & mask
    value = ((value ^ (value >> 15)) * 0x846CA68B) & mask
    return value ^ (value >> 16)


def _signed(value: Any) -> Any:
    """The 32 bits of `value` as an int32."""
    return ((value + 2**31) & 0xFFFFFFFF) - 2**31
