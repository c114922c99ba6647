"""Multihead attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.attending import (
    append_rows,
    attend,
    attention_weights,
    join_masks,
    position_mask,
    split_heads,
    weighted,
)
from stepgraph.layers.dropout import drop
from stepgraph.layers.found import found_at_node, last_extent
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.layers.rotary import rotate
from stepgraph.layers.shape import require_same_type
from stepgraph.layers.sliding import Sliding
from stepgraph.random import initialize
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import DataType, RandomInitializerType

_PROJECTIONS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class MultiheadAttentionDescriptor:
    """The settings of multihead attention.

    Args:
        model_dimension: width of the query and of the result.
        head_count: number of attention heads; it must divide the key and the value dimension.
        key_dimension: width of the projected queries, all heads together; default: the model dimension.
        value_dimension: width of the gathered values, all heads together; default: the model dimension.
        key_value_head_count: heads of keys and values, each shared by `head_count / key_value_head_count` adjacent
            query heads (grouped-query attention; 1: multi-query attention); default: one for each query head.
        causal: whether query `i` sees only keys up to `i`.
        window: query `i` sees only keys `j` with `|i - j| < window`; with `causal`, the last `window` keys up to `i`.
        rotary_base: turn queries and keys by their positions (RoPE), with this base: 10000 in most models, 500000 in
            Llama 3. Default: no rotation.
        rotary_dimension: rotate only so many features at the start of each head; default: all of them.
        rotary_interleaved: rotate the pairs `(2 i, 2 i + 1)`, as in Meta's Llama files, GPT-J and Cohere's models,
            instead of `(i, i + dimension / 2)`, as in Hugging Face's Llama, Mistral, Qwen, Gemma and GPT-NeoX.
        dropout: the fraction of attention weights dropped in training, at least 0 and below 1.
        has_biases: whether the four projections have biases.
        has_attention_biases: whether one learned row is appended to the projected keys and to the projected values.
        adds_zero_attention: whether a row of zeros is appended to both, so that a query can attend to nothing.

    Example:
        >>> MultiheadAttentionDescriptor(64, 8).key_dimension
        64
        >>> MultiheadAttentionDescriptor(64, 8, key_value_head_count=2).projected
        (64, 16, 16, 64)
    """

    model_dimension: int
    head_count: int
    _: KW_ONLY
    key_dimension: int = None  # type: ignore[assignment]  # set by __post_init__
    value_dimension: int = None  # type: ignore[assignment]
    dropout: float = 0.0
    has_biases: bool = True
    has_attention_biases: bool = False
    adds_zero_attention: bool = False
    key_value_head_count: int = None  # type: ignore[assignment]
    causal: bool = False
    window: int | None = None
    rotary_base: float | None = None
    rotary_dimension: int | None = None
    rotary_interleaved: bool = False

    def __post_init__(self) -> None:
        where, heads = "MultiheadAttentionDescriptor", self.head_count
        for name, default in (
            ("key_dimension", self.model_dimension),
            ("value_dimension", self.model_dimension),
            ("key_value_head_count", heads),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("model_dimension", "head_count", "key_dimension", "value_dimension", "key_value_head_count"):
            _require_count(name, getattr(self, name))
        if self.window is not None:
            _require_count("window", self.window)
        for name, width in (("key_dimension", self.key_dimension), ("value_dimension", self.value_dimension)):
            if width % heads:
                raise ArgumentError(
                    where, f"{heads} heads do not divide {name} {width}", fix=f"use a multiple of {heads}"
                )
        if heads % self.key_value_head_count:
            problem = f"{self.key_value_head_count} key and value heads do not divide {heads} heads"
            raise ArgumentError(where, problem, fix=f"pass a key_value_head_count that divides {heads}")
        if not 0 <= self.dropout < 1:
            problem = f"dropout is {self.dropout}, not in [0, 1)"
            raise ArgumentError(where, problem, fix="pass the fraction to drop, for example 0.1")
        self._check_rotary(where)

    def _check_rotary(self, where: str) -> None:
        """Checks the base and that an even number of features is rotated, or that nothing is set without a base."""
        base, width, dimension = self.rotary_base, self.key_dimension // self.head_count, self.rotary_dimension
        if base is None:
            if dimension is not None or self.rotary_interleaved:
                name = "rotary_interleaved" if dimension is None else "rotary_dimension"
                raise ArgumentError(where, f"{name} has no effect without rotary_base", fix="pass rotary_base=10000.0")
            return
        if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < math.inf:
            raise ArgumentError(where, f"rotary_base is {base!r}", fix="pass a number > 0, such as 10000.0")
        rotated = width if dimension is None else dimension
        if isinstance(rotated, bool) or not isinstance(rotated, int) or not 2 <= rotated <= width or rotated % 2:
            problem = f"{rotated!r} features of a head {width} wide cannot be rotated in pairs"
            raise ArgumentError(where, problem, fix=f"use an even rotary_dimension from 2 to {width}")

    @property
    def projected(self) -> tuple[int, int, int, int]:
        """Output widths of the query, key, value and output projections."""
        widths = self.key_dimension, self.value_dimension
        key, value = (width // self.head_count * self.key_value_head_count for width in widths)
        return self.key_dimension, key, value, self.model_dimension


class MultiheadAttentionLayer(Layer):
    """Multihead attention: each query gathers the values whose keys match it, in several parallel heads.

        q = X_q Wqᵀ + bq,   k = X_k Wkᵀ + bk,   v = X_v Wvᵀ + bv       then, for each head's columns
        q = rotated(q),     k = rotated(k)                             with `rotary_base`
        k = [k; row; 0],    v = [v; row; 0]                            with attention biases, with zero attention
        head = dropout(softmax(q kᵀ / sqrt(K / heads) + mask)) v
        y = [head ... head] Woᵀ + bo

    The sources are `[query, key, value]`, then either mask, both or none, distinguished by their rank:

    | source | shape | type |
    |---|---|---|
    | query, key, value | `[N, L, E]`, `[N, S, ·]`, `[N, S, ·]` | floating |
    | key mask | `[N, S]` | boolean, True: this key is masked |
    | attention mask | `[1, L, S]`, `[N * heads, L, S]`, ours: `[N, L, S]` | floating, added; or boolean, True: masked |

    The result is `[N, L, E]`. Appended rows are never masked. A query whose keys are all masked gathers nothing: its
    heads are zero, its result is the output bias, its gradient is zero (`torch.nn.MultiheadAttention` gives NaN).

    `causal` and `window` compare positions, so they need as many queries as keys; masks apply in addition. Causal
    attention without other masks needs no mask in memory. A window over long sequences is computed in blocks, unless
    there is an attention mask: memory grows with `L * window`. Both sequences of rotary attention start at position 0.

    Weights are query, key, value, output: `[K, E]`, `[K', width of the key source]`, `[V', width of the value source]`,
    `[E, V]`, or Apple's `[1, heads, K / heads, E]`, …, `[1, 1, E, V]`: the same numbers in memory. Biases hold K, K',
    V' and E numbers, attention biases (key, value) K' and V', in any shape. With fewer heads for keys and values,
    K' and V' are that share of K and V; otherwise they are K and V.

    `torch.nn.MultiheadAttention(batch_first=True)` has K = V = E and one key head per query head, and neither
    positions nor windows; otherwise it is the same.

    Example:
        >>> layer = MultiheadAttentionLayer.create(64, 8)
        >>> layer.infer(*[TensorDescriptor((2, 10, 64))] * 3)[0].shape
        (2, 10, 64)
        >>> llama = MultiheadAttentionLayer.create(
        ...     64, 8, key_value_head_count=2, causal=True, rotary_base=10_000.0, has_biases=False
        ... )
        >>> [weights.shape for weights in llama.weights]
        [(64, 64), (16, 64), (16, 64), (64, 64)]
    """

    descriptor: MultiheadAttentionDescriptor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor] | None = None
    attention_biases: Sequence[Tensor] | None = None

    default_label = "MultiheadAttention"
    weights_parameters = ParameterOf("weights")
    biases_parameters = ParameterOf("biases")
    source_counts = (3, 5)

    def __post_init__(self) -> None:
        settings, widths = self.descriptor, self.descriptor.projected
        for name, wanted, counts in (
            ("weights", True, [None] * 4),
            ("biases", settings.has_biases, widths),
            ("attention_biases", settings.has_attention_biases, widths[1:3]),
        ):
            tensors = getattr(self, name)
            object.__setattr__(self, name, tuple(tensors) if tensors else None)
            _require_tensors(self, name, list(tensors or ()), list(counts) if wanted else [])
        sources = (settings.model_dimension, None, None, settings.value_dimension)
        for name, tensor, rows, columns in zip(_PROJECTIONS, self.weights, widths, sources, strict=True):
            count = tensor.descriptor.element_count
            if count % rows or (columns is not None and count != rows * columns):
                raise ShapeError(
                    self.where,
                    f"the {name} weights hold {count} numbers, but need [{rows}, {columns or 'width of the source'}]",
                    fix=f"pass {rows * columns if columns else f'a multiple of {rows}'} numbers",
                    **{name: tensor.descriptor},
                )

    @classmethod
    @found_at_node("model_dimension", last_extent)
    def create(
        cls,
        model_dimension: int,
        head_count: int,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
        **settings: Any,
    ) -> MultiheadAttentionLayer:
        """A layer with new weights and zero biases; other settings as for `MultiheadAttentionDescriptor`.

        `key_width` and `value_width` are the widths of these sources; default: the model dimension.
        """
        descriptor = MultiheadAttentionDescriptor(model_dimension, head_count, **settings)
        outputs, model = descriptor.projected, descriptor.model_dimension
        inputs = model, key_width or model, value_width or model, descriptor.value_dimension
        shapes = list(zip(outputs, inputs, strict=True))
        weights = [Tensor((m, n), data=initialize(initializer, (m, n), n, m)) for m, n in shapes]
        biases = [Tensor((m,), fill=0.0) for m in outputs] if descriptor.has_biases else None
        rows = [Tensor((m,), data=initialize(initializer, (m,), 1, m)) for m in outputs[1:3]]
        return cls(descriptor, weights, biases, rows if descriptor.has_attention_biases else None, label=label)

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Floating types, and booleans for masks."""
        return data_type.is_floating or data_type is DataType.BOOLEAN

    @property
    def source_widths(self) -> tuple[int, int, int]:
        """Widths of the query, key and value sources, according to the weights."""
        counts = [tensor.descriptor.element_count for tensor in self.weights]
        query, key, value, _ = (count // rows for count, rows in zip(counts, self.descriptor.projected, strict=True))
        return query, key, value

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that three sequences match the weights and one another, and masks match them."""
        sequences, masks = sources[:3], sources[3:]
        for name, source, width in zip(_PROJECTIONS, sequences, self.source_widths, strict=False):
            self.require_floating(source)
            require_same_type(self, sources[0], source)
            if source.dimension_count != 3 or source.shape[2] != width:
                raise ShapeError(
                    self.where,
                    f"the {name} is {list(source.shape)}, but its weights take [batch, steps, {width}]",
                    fix=f"pass sequences of width {width}, or {name} weights for the width of the source",
                )
        query, key, value = sequences
        if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            raise ShapeError(
                self.where,
                "query, key and value do not match",
                query=query,
                key=key,
                value=value,
                fix="use one batch size for all three, and as many keys as values",
            )
        self._check_positions(query, key)
        _require_masks(self, masks, query.shape[0], query.shape[1], key.shape[1], self.descriptor.head_count)

    def _check_positions(self, query: TensorDescriptor, key: TensorDescriptor) -> None:
        """Rejects a causal or sliding window between sequences of different lengths, whose positions do not match."""
        limit = "causal" if self.descriptor.causal else "window"
        if (self.descriptor.causal or self.descriptor.window is not None) and query.shape[1] != key.shape[1]:
            raise ShapeError(
                self.where,
                f"{limit} compares positions, but there are {query.shape[1]} queries and {key.shape[1]} keys",
                query=query,
                key=key,
                fix="pass as many queries as keys, or pass an attention mask instead",
            )

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Projects, attends per head, and projects back."""
        settings = self.descriptor
        q, k, v = (self._project(i, x, scope) for i, x in enumerate((query, key, value)))
        q, k = self._rotate(q, settings.head_count), self._rotate(k, settings.key_value_head_count)
        rows = [None, None] if self.attention_biases is None else [scope.array(t) for t in self.attention_biases]
        k, v = (append_rows(x, row, zero=settings.adds_zero_attention) for x, row in zip((k, v), rows, strict=True))
        q = split_heads(q, heads=settings.head_count)
        k, v = (split_heads(x, heads=settings.key_value_head_count) for x in (k, v))
        mask = join_masks(*masks, batch=q.shape[0], keys=k.shape[2], dtype=q.dtype)
        sliding = self._sliding(mask, key.shape[1])
        if sliding is None:
            heads = self._attend(q, k, v, *self._limits(mask, q, k, key.shape[1], scope), scope)
        else:
            folded, batch = mask is not None, q.shape[0]
            seen = sliding.mask(mask, keys=k.shape[2], like=q)
            q, k, v = sliding.queries(q, folded=folded), *(sliding.keys(x, folded=folded) for x in (k, v))
            heads = sliding.joined(self._attend(q, k, v, seen, False, scope), batch)
        return self._project(3, heads.transpose(1, 2).flatten(2), scope)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scope: Scope,
    ) -> torch.Tensor:
        """The gathered values of every head."""
        if not self._drops(scope):
            return attend(q, k, v, mask, causal=causal)
        rate, weights = self.descriptor.dropout, attention_weights(q, k, mask)
        return weighted(drop(weights, scope.keep_mask(weights, rate), rate=rate), v, mask)

    def _drops(self, scope: Scope) -> bool:
        return scope.training and self.descriptor.dropout > 0

    def _sliding(self, mask: torch.Tensor | None, steps: int) -> Sliding | None:
        """How to attend block by block, if that pays; a mask of queries and keys is as large as all of them anyway."""
        settings = self.descriptor
        if settings.window is None or not (mask is None or mask.shape[1:3] == (1, 1)):
            return None
        sliding = Sliding(steps, settings.window, settings.causal)
        return sliding if sliding.pays else None

    def _limits(
        self, mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, steps: int, scope: Scope
    ) -> tuple[torch.Tensor | None, bool]:
        """An additive mask for what a query may see, and whether the operator is to be causal instead."""
        settings = self.descriptor
        window = settings.window if settings.window is not None and settings.window < steps else None
        if window is None and not settings.causal:
            return mask, False
        if window is None and mask is None and not self._drops(scope) and k.shape[2] == steps:
            return None, True
        seen = position_mask(steps, k.shape[2], causal=settings.causal, window=window, like=q)
        return seen if mask is None else mask + seen, False

    def _rotate(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        settings = self.descriptor
        if settings.rotary_base is None:
            return x
        dimension = settings.rotary_dimension or x.shape[-1] // heads
        return rotate(
            x, heads=heads, base=settings.rotary_base, dimension=dimension, interleaved=settings.rotary_interleaved
        )

    def _project(self, index: int, x: torch.Tensor, scope: Scope) -> torch.Tensor:
        rows = self.descriptor.projected[index]
        biases = None if self.biases is None else scope.array(self.biases[index], rows)
        return F.linear(x, scope.array(self.weights[index], rows, x.shape[-1]), biases)


def _require_count(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ArgumentError("MultiheadAttentionDescriptor", f"{name} is {number!r}", fix="pass an integer ≥ 1")


def _require_tensors(layer: Layer, name: str, tensors: list[Tensor], counts: list[int | None]) -> None:
    """Rejects a wrong number of tensors, and tensors with a wrong number of elements."""
    words = name.replace("_", " ")
    if len(tensors) != len(counts):
        parts = ", ".join(_PROJECTIONS if len(counts) == 4 else _PROJECTIONS[1:3]) if counts else f"has_{name} is False"
        raise ArgumentError(
            layer.where,
            f"{len(tensors)} {words} were passed, but {len(counts)} are needed ({parts})",
            fix=f"pass {len(counts)} tensors" if counts else f"set has_{name} in the descriptor, or pass none",
        )
    for tensor, count in zip(tensors, counts, strict=True):
        if count is not None and tensor.descriptor.element_count != count:
            raise ShapeError(
                layer.where,
                f"the {words} hold {[one.descriptor.element_count for one in tensors]} numbers, not {counts}",
                fix=f"pass {words} of these sizes",
            )


def _require_masks(
    layer: Layer, masks: Sequence[TensorDescriptor], batch: int, queries: int, keys: int, heads: int
) -> None:
    """Rejects masks that are neither a key mask nor an attention mask, and two of one kind."""
    for mask in masks:
        is_key_mask = mask.dimension_count == 2
        if mask.data_type is not DataType.BOOLEAN and (is_key_mask or not mask.data_type.is_floating):
            kind, wanted = ("key", "boolean") if is_key_mask else ("attention", "boolean or a floating type")
            problem = f"the {kind} mask is {mask.data_type.debug_description}, but {wanted} is needed"
            raise DataTypeError(layer.where, problem, mask=mask)
        firsts = (1, batch, batch * heads)
        fits = mask.shape == (batch, keys) if is_key_mask else mask.shape in {(n, queries, keys) for n in firsts}
        if not fits:
            raise ShapeError(
                layer.where,
                f"a mask {list(mask.shape)} matches neither the keys nor the attention",
                key_mask=[batch, keys],
                attention_mask=f"{[1, queries, keys]} or {[batch * heads, queries, keys]}",
                fix="use one of these shapes",
            )
    if len(masks) == 2 and masks[0].dimension_count == masks[1].dimension_count:
        raise ShapeError(
            layer.where,
            f"two masks have {masks[0].dimension_count} dimensions",
            fix="pass at most one key mask and one attention mask",
        )
