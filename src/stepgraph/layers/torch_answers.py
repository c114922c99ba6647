"""What a PyTorch module calls, answered as a graph needs it: random numbers from its stream, batch norm as a function.

PyTorch's own answers read its global generator, or write running statistics in place where no one sees it. `Answers`
replaces them while a module runs; `stepgraph.random.Refusals` stops at whatever still draws from its generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from stepgraph.layers.failures import OWN_SEED
from stepgraph.layers.layer import Scope
from stepgraph.layers.normalization import batch_normalize
from stepgraph.layers.torch_grouped import grouped_product
from stepgraph.layers.torch_recurrent import in_type, is_packed, recurrent
from stepgraph.system import torch_private

# Constants of SELU, from which alpha dropout keeps mean and variance.
_SELU = 1.7580993408473766
_COARSE = 2**24  # how many different numbers one uniform draw can produce


class Answers(TorchFunctionMode):
    """Answers PyTorch's functions from a scope while a module, or a part of one, runs.

    Args:
        scope: where random numbers come from.
        start: how many draws were made before, by other parts of the same call.

    Attributes:
        moved: new values of running statistics, by the `id` of the buffer they belong to.
        draws: the number of draws so far.
        single: draws of one number in `[0, 1)`, by their `id`.
    """

    def __init__(self, scope: Scope, start: int = 0) -> None:
        super().__init__()
        self.draws = start
        self.moved: dict[int, torch.Tensor] = {}
        self._scope, self._seed = scope, torch.initial_seed()
        self.single: dict[int, torch.Tensor] = {}  # single draws of `torch.rand`, by id
        self._opened: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if _is_open(function) and function not in self._opened:
            with self._inside(function):
                return _open(function)(*args, **given)
        # An operator that writes into memory of its caller is not recorded as one.
        out = given.get("out")
        if out is not None:
            given = {name: value for name, value in given.items() if name != "out"}
        answer = _ANSWERS.get(function)
        if given.get("generator") is not None:
            raise RuntimeError(OWN_SEED)
        found = function(*args, **given) if answer is None else answer(self, function, *args, **given)
        return found if out is None else _written(out, found)

    @contextmanager
    def _inside(self, function: Any) -> Iterator[None]:
        """Sees what a function of `torch.nn.functional` calls; PyTorch switches a mode off while it answers."""
        self._opened.append(function)
        try:
            with self:
                yield
        finally:
            self._opened.pop()

    # Draws

    def uniform(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers in `[0, 1)`, float32."""
        self._count()
        return self._scope.random(shape)

    def positive(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers in `(0, 1]`, whose logarithm is finite."""
        return 1 - self.uniform(shape)

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Standard normal numbers, by Box and Muller."""
        return (-2 * self.positive(shape).log()).sqrt() * (2 * math.pi * self.uniform(shape)).cos()

    def exponential(self, shape: Sequence[int]) -> torch.Tensor:
        """Exponential numbers of mean 1; never 0, by which multinomial divides."""
        return (-self.positive(shape).log()).clamp_min(torch.finfo(torch.float32).tiny)

    def integers(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        """Integers in `[low, high)`."""
        count = high - low
        if count <= _COARSE:
            found = (self.uniform(shape).double() * count).long()
        else:
            fine = self.uniform(shape).double() + self.uniform(shape).double() / _COARSE
            found = (fine * count).long().clamp_max(count - 1)
        return found + low

    def keep(self, x: torch.Tensor, shape: Sequence[int], rate: float) -> torch.Tensor:
        """1 with probability `1 - rate`, else 0, in the type of `x`."""
        self._count()
        return self._scope.keep_mask(x.new_empty(tuple(shape)), rate).to(x.dtype)

    def _count(self) -> None:
        if torch.initial_seed() != self._seed:
            raise RuntimeError(OWN_SEED)
        self.draws += 1


def _written(out: Any, found: Any) -> Any:
    """Results in the memory that the caller passed for them."""
    if isinstance(out, torch.Tensor):
        return out.copy_(found)
    return type(found)(one.copy_(new) for one, new in zip(out, found, strict=True))


# Functions of `torch.nn.functional` call others, which a mode sees only if it is on while they run.


def _is_open(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__globals__ is F.__dict__


@cache
def _open(function: FunctionType) -> FunctionType:
    """The same function without its question whether a mode is on, which would pass the call back to the mode."""
    no = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    twin = FunctionType(
        function.__code__, {**F.__dict__, **no}, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


# Dropout


def _dropped(x: torch.Tensor, factor: torch.Tensor, in_place: bool) -> torch.Tensor:
    return x.mul_(factor) if in_place else x * factor


def _dropout(by_feature: bool, in_place: bool = False) -> Callable[..., torch.Tensor]:
    """Dropout of elements, or of whole channels."""

    def answer(self: Answers, _: Any, input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
        if not train or p == 0:
            return input
        shape = _channels(input) if by_feature else input.shape
        if p == 1:
            return _dropped(input, torch.zeros_like(input), in_place)
        return _dropped(input, self.keep(input, shape, p) * (1 / (1 - p)), in_place)

    return answer


def _alpha_dropout(by_feature: bool, in_place: bool = False) -> Callable[..., torch.Tensor]:
    """Dropout that keeps mean and variance of self-normalizing networks."""

    def answer(self: Answers, _: Any, input: torch.Tensor, p: float = 0.5, train: bool = False) -> torch.Tensor:
        if not train or p == 0:
            return input
        if p == 1:
            return _dropped(input, torch.zeros_like(input), in_place)
        scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p))
        mask = self.keep(input, _channels(input) if by_feature else input.shape, p)
        offset = (mask - 1) * (_SELU * scale) + _SELU * scale * p
        return _dropped(input, mask * scale, in_place).add_(offset)

    return answer


def _channels(x: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *(1 for _ in x.shape[2:]))


def _native_dropout(self: Answers, _: Any, input: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0:
        return input, torch.ones_like(input, dtype=torch.bool)
    mask = self.keep(input, input.shape, p)
    return input * (mask * (1 / (1 - p) if p < 1 else 0.0)), mask.bool()


def _rrelu(in_place: bool) -> Callable[..., torch.Tensor]:
    """A leaky ReLU with a random slope per element."""

    def answer(
        self: Answers,
        _: Any,
        input: torch.Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        **_generator: Any,
    ) -> torch.Tensor:
        middle = (lower + upper) / 2
        slope = lower + (upper - lower) * self.uniform(input.shape).to(input.dtype) if training else middle
        found = torch.where(input > 0, input, input * slope)
        return input.copy_(found) if in_place else found

    return answer


# New random arrays. They are on the device of the graph, wherever the caller asks for them.


def _created(draw: Callable[[Answers, tuple[int, ...]], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def answer(
        self: Answers, _: Any, *size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False, **others: Any
    ) -> torch.Tensor:
        shape = _extents(others.get("size", size))
        return draw(self, shape).to(dtype or torch.get_default_dtype()).requires_grad_(requires_grad)

    return answer


def _rand(self: Answers, function: Any, *size: Any, **settings: Any) -> torch.Tensor:
    found = _created(Answers.uniform)(self, function, *size, **settings)
    if found.numel() == 1:
        self.single[id(found)] = found
    return found


def _compared(holds: bool, at_zero: bool) -> Callable[..., torch.Tensor]:
    """A comparison; of a single draw in `[0, 1)` with a number outside, the answer is known without the draw.

    Models whose probability is 0 compare with it: `if torch.rand([]) < self.layerdrop`.

    Args:
        holds: whether it holds for draws below the number.
        at_zero: whether the answer is known for 0, too.
    """

    def answer(self: Answers, function: Any, x: Any, other: Any, **settings: Any) -> torch.Tensor:
        if id(x) in self.single and isinstance(other, int | float):
            if other >= 1:
                return torch.tensor(holds).reshape(x.shape)
            if other < 0 or (other == 0 and at_zero):
                return torch.tensor(not holds).reshape(x.shape)
        return function(x, other, **settings)

    return answer


def _extents(size: Any) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)


def _created_like(draw: Callable[[Answers, Sequence[int]], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def answer(
        self: Answers, _: Any, input: torch.Tensor, *, dtype: torch.dtype | None = None, **_others: Any
    ) -> torch.Tensor:
        return draw(self, input.shape).to(dtype or input.dtype)

    return answer


def _randint(
    self: Answers, _: Any, *numbers: Any, dtype: torch.dtype | None = None, low: int = 0, **others: Any
) -> torch.Tensor:
    """`randint(high, size)` or `randint(low, high, size)`; each may be a keyword."""
    given = list(numbers)
    size = others["size"] if "size" in others else given.pop()
    high = others["high"] if "high" in others else given.pop()
    return self.integers(given.pop() if given else low, high, tuple(size)).to(dtype or torch.int64)


def _randint_like(
    self: Answers,
    _: Any,
    input: torch.Tensor,
    *numbers: int,
    dtype: torch.dtype | None = None,
    low: int = 0,
    **others: Any,
) -> torch.Tensor:
    given = list(numbers)
    high = others["high"] if "high" in others else given.pop()
    return self.integers(given.pop() if given else low, high, input.shape).to(dtype or input.dtype)


def _randperm(self: Answers, _: Any, n: int, *, dtype: torch.dtype | None = None, **_others: Any) -> torch.Tensor:
    return self.uniform((n,)).argsort().to(dtype or torch.int64)


def _normal(self: Answers, _: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **others: Any) -> torch.Tensor:
    """`normal(mean, std)` with arrays, or `normal(mean, std, size)` with numbers."""
    arrays = [one for one in (mean, std) if isinstance(one, torch.Tensor)]
    shape = tuple(size) if size is not None else torch.broadcast_shapes(*(one.shape for one in arrays))
    kind = others.get("dtype") or (arrays[0].dtype if arrays else torch.get_default_dtype())
    return self.normal(shape).to(kind) * std + mean


def _bernoulli(self: Answers, _: Any, input: torch.Tensor, p: float | None = None, **_others: Any) -> torch.Tensor:
    """1 with a probability for all, or with each element of `input` as a probability."""
    return (self.uniform(input.shape) < (input if p is None else p)).to(input.dtype)


def _multinomial(
    self: Answers, _: Any, input: torch.Tensor, num_samples: int, replacement: bool = False, **_others: Any
) -> torch.Tensor:
    """Indices drawn with the weights in the rows of `input`."""
    weights = input.float()
    if not replacement or num_samples == 1:  # the largest of weights divided by exponential numbers
        return (weights / self.exponential(weights.shape)).topk(num_samples, dim=-1).indices
    sums = weights.cumsum(-1)
    drawn = self.uniform((*weights.shape[:-1], num_samples)) * sums[..., -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp_max(weights.shape[-1] - 1)


# Random numbers written in place


def _filled(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def answer(self: Answers, _: Any, array: torch.Tensor, *numbers: Any, **named: Any) -> torch.Tensor:
        named.pop("generator", None)
        if "from" in named:
            named["low"] = named.pop("from")
        return array.copy_(draw(self, array.shape, *numbers, **named))

    return answer


def _fill_uniform(self: Answers, shape: Sequence[int], low: float = 0.0, to: float = 1.0) -> torch.Tensor:
    return low + (to - low) * self.uniform(shape)


def _fill_normal(self: Answers, shape: Sequence[int], mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return mean + std * self.normal(shape)


def _fill_exponential(self: Answers, shape: Sequence[int], lambd: float = 1.0) -> torch.Tensor:
    return self.exponential(shape) / lambd


def _fill_bernoulli(self: Answers, shape: Sequence[int], p: Any = 0.5) -> torch.Tensor:
    return self.uniform(shape) < p


def _fill_cauchy(self: Answers, shape: Sequence[int], median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return median + sigma * (math.pi * (self.uniform(shape) - 0.5)).tan()


def _fill_log_normal(self: Answers, shape: Sequence[int], mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return (mean + std * self.normal(shape)).exp()


def _fill_geometric(self: Answers, shape: Sequence[int], p: float) -> torch.Tensor:
    return (self.positive(shape).log() / math.log1p(-p)).ceil().clamp_min(1)


def _fill_integers(self: Answers, shape: Sequence[int], low: int = 0, to: int | None = None) -> torch.Tensor:
    """`random_(to)` or `random_(from, to)`; without bounds, what float32 holds exactly."""
    low, to = (low, to) if to is not None else (0, low or _COARSE)
    return self.integers(low, to, shape)


# Attention and recurrent networks: dropout is inside them


def _attention(
    self: Answers,
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with dropout is written out: its weights exist, and lose elements."""
    if dropout_p == 0:
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return function(query, key, value, attn_mask, 0.0, **options)
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        excluded = attn_mask.logical_not() if attn_mask.dtype is torch.bool else None
        scores = scores + attn_mask if excluded is None else scores.masked_fill(excluded, -math.inf)
    weights = scores.softmax(-1)
    kept = self.keep(weights, weights.shape, dropout_p) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    return (weights * kept) @ value


def _recurrent(self: Answers, function: Any, *given: Any) -> Any:
    """Layer by layer, with dropout between them; packed sequences keep PyTorch's own, whose dropout is refused."""
    if is_packed(given):
        return function(*given)
    dropout, train = given[5:7]
    kind = given[0].device.type
    if torch.is_autocast_enabled(kind):
        given = in_type(given, torch.get_autocast_dtype(kind))
    return recurrent(function, given, lambda x: _ANSWERS[torch.dropout](self, None, x, dropout, train))


# Normalization: PyTorch writes running statistics in place without counting it as a change


def _batch_norm(
    self: Answers,
    function: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *others: Any,
) -> torch.Tensor:
    if not training or mean is None or variance is None:
        return function(x, weight, bias, mean, variance, training, momentum, eps, *others)
    y, found, biased = batch_normalize(x, weight, bias, epsilon=eps)
    count = x.numel() // x.shape[1]
    _move(self, momentum, (mean, found), (variance, biased * (count / (count - 1))))
    return y


def _instance_norm(
    self: Answers,
    function: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *others: Any,
) -> torch.Tensor:
    if not use_input_stats or mean is None or variance is None:
        return function(x, weight, bias, mean, variance, use_input_stats, momentum, eps, *others)
    y: torch.Tensor = function(x, weight, bias, None, None, True, momentum, eps, *others)
    unbiased, means = torch.var_mean(x.detach().float(), tuple(range(2, x.ndim)))
    _move(self, momentum, (mean, means.mean(0)), (variance, unbiased.mean(0)))
    return y


def _move(self: Answers, momentum: float, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Remembers `(1 - momentum) * running + momentum * found` for each pair; a second call continues from there."""
    with torch.no_grad():
        for running, found in pairs:
            before = self.moved.get(id(running), running)
            self.moved[id(running)] = before * (1 - momentum) + found.to(running.dtype) * momentum


# What PyTorch computes for some rows only: a step needs arrays of known shapes


def _dense(position: int) -> Callable[..., Any]:
    """Rows whose gradient is dense, with the same numbers; `position` is that of the argument `sparse`."""

    def answer(_: Answers, function: Any, *given: Any, **settings: Any) -> Any:
        given = tuple(False if n == position else one for n, one in enumerate(given))
        return function(*given, **{name: one for name, one in settings.items() if name != "sparse"})

    return answer


def _set(_: Answers, function: Any, array: torch.Tensor, index: Any, value: Any) -> None:
    """`array[mask] = value`, without finding the positions if the value is the same for all of them."""
    mask = _mask(index)
    if mask is None:
        return function(array, index, value)
    new = torch.as_tensor(value, dtype=array.dtype, device=array.device)
    further = array.ndim - mask.ndim
    if new.ndim == further + 1 and new.shape[0] == 1:
        new = new[0]
    if new.ndim > further:
        return function(array, index, value)
    array.copy_(torch.where(mask.reshape(*mask.shape, *(1 for _ in range(further))), new, array))


def _mask(index: Any) -> torch.Tensor | None:
    """The mask that an index is, alone or followed by all of the further dimensions."""
    first, *others = index if isinstance(index, tuple) and index else (index,)
    is_mask = isinstance(first, torch.Tensor) and first.dtype is torch.bool
    return first if is_mask and all(one is ... or one == slice(None) for one in others) else None


def _assigned(*_: Any) -> None:
    raise RuntimeError("an array's .data is assigned")  # `failures` knows it


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data.__set__: _assigned,  # type: ignore[attr-defined]
    torch.dropout: _dropout(by_feature=False),
    torch.dropout_: _dropout(by_feature=False, in_place=True),
    torch.feature_dropout: _dropout(by_feature=True),
    torch.feature_dropout_: _dropout(by_feature=True, in_place=True),
    torch.alpha_dropout: _alpha_dropout(by_feature=False),
    torch.alpha_dropout_: _alpha_dropout(by_feature=False, in_place=True),
    torch.feature_alpha_dropout: _alpha_dropout(by_feature=True),
    torch.feature_alpha_dropout_: _alpha_dropout(by_feature=True, in_place=True),
    torch.native_dropout: _native_dropout,
    torch.rrelu: _rrelu(in_place=False),
    torch.rrelu_: _rrelu(in_place=True),
    torch.rand: _rand,
    torch.lt: _compared(holds=True, at_zero=True),
    torch.Tensor.lt: _compared(holds=True, at_zero=True),
    torch.ge: _compared(holds=False, at_zero=True),
    torch.Tensor.ge: _compared(holds=False, at_zero=True),
    torch.le: _compared(holds=True, at_zero=False),
    torch.Tensor.le: _compared(holds=True, at_zero=False),
    torch.gt: _compared(holds=False, at_zero=False),
    torch.Tensor.gt: _compared(holds=False, at_zero=False),
    torch.randn: _created(Answers.normal),
    torch.rand_like: _created_like(Answers.uniform),
    torch.randn_like: _created_like(Answers.normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.uniform_: _filled(_fill_uniform),
    torch.Tensor.normal_: _filled(_fill_normal),
    torch.Tensor.exponential_: _filled(_fill_exponential),
    torch.Tensor.bernoulli_: _filled(_fill_bernoulli),
    torch.Tensor.cauchy_: _filled(_fill_cauchy),
    torch.Tensor.log_normal_: _filled(_fill_log_normal),
    torch.Tensor.geometric_: _filled(_fill_geometric),
    torch.Tensor.random_: _filled(_fill_integers),
    F.scaled_dot_product_attention: _attention,
    torch_private.grouped_mm: lambda _, *given, **settings: grouped_product(*given, **settings),
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
    torch.embedding: _dense(position=4),
    torch.embedding_bag: _dense(position=5),
    torch.Tensor.__setitem__: _set,
    torch.batch_norm: _batch_norm,
    torch.instance_norm: _instance_norm,
}
