"""Multihead attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.dropout import drop
from stepgraph.layers.found import found_at_node, last_extent
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.layers.shape import require_same_type
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
        key_dimension: width of projected queries and keys, all heads together; default: the model dimension.
        value_dimension: width of projected values, all heads together; default: the model dimension.
        dropout: the fraction of attention weights dropped in training, at least 0 and below 1.
        has_biases: whether the four projections have biases.
        has_attention_biases: whether one learned row is appended to the projected keys and to the projected values.
        adds_zero_attention: whether a row of zeros is appended to both, so that a query can attend to nothing.

    Example:
        >>> MultiheadAttentionDescriptor(64, 8).key_dimension
        64
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

    def __post_init__(self) -> None:
        where, heads = "MultiheadAttentionDescriptor", self.head_count
        for name in ("key_dimension", "value_dimension"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.model_dimension)
        for name in ("model_dimension", "head_count", "key_dimension", "value_dimension"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ArgumentError(where, f"{name} is {number!r}", fix="pass an integer ≥ 1")
        for name, width in (("key_dimension", self.key_dimension), ("value_dimension", self.value_dimension)):
            if width % heads:
                raise ArgumentError(
                    where, f"{heads} heads do not divide {name} {width}", fix=f"use a multiple of {heads}"
                )
        if not 0 <= self.dropout < 1:
            problem = f"dropout is {self.dropout}, not in [0, 1)"
            raise ArgumentError(where, problem, fix="pass the fraction to drop, for example 0.1")

    @property
    def projected(self) -> tuple[int, int, int, int]:
        """Output widths of the query, key, value and output projections."""
        return self.key_dimension, self.key_dimension, self.value_dimension, self.model_dimension


class MultiheadAttentionLayer(Layer):
    """Multihead attention: each query gathers the values whose keys match it, in several parallel heads.

        q = X_q Wqᵀ + bq,   k = X_k Wkᵀ + bk,   v = X_v Wvᵀ + bv       then, for each head's columns
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

    Weights are query, key, value, output: `[K, E]`, `[K, width of the key source]`, `[V, width of the value source]`,
    `[E, V]`, or Apple's `[1, heads, K / heads, E]`, …, `[1, 1, E, V]`: the same numbers in memory. Biases hold K, K, V
    and E numbers, attention biases (key, value) K and V, in any shape.

    `torch.nn.MultiheadAttention(batch_first=True)` has K = V = E; otherwise it is the same.

    Example:
        >>> layer = MultiheadAttentionLayer.create(64, 8)
        >>> layer.infer(*[TensorDescriptor((2, 10, 64))] * 3)[0].shape
        (2, 10, 64)
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
        _require_masks(self, masks, query.shape[0], query.shape[1], key.shape[1], self.descriptor.head_count)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Projects, attends per head, and projects back."""
        settings = self.descriptor
        q, k, v = (self._project(i, x, scope) for i, x in enumerate((query, key, value)))
        rows = [None, None] if self.attention_biases is None else [scope.array(t) for t in self.attention_biases]
        k, v = (append_rows(x, row, zero=settings.adds_zero_attention) for x, row in zip((k, v), rows, strict=True))
        q, k, v = (split_heads(x, heads=settings.head_count) for x in (q, k, v))
        mask = join_masks(*masks, batch=query.shape[0], keys=k.shape[2], dtype=q.dtype)
        drops = scope.training and settings.dropout > 0
        if drops:
            weights = attention_weights(q, k, mask)
            kept = drop(weights, scope.keep_mask(weights, settings.dropout), rate=settings.dropout)
            heads = weighted(kept, v, mask)
        else:
            heads = attend(q, k, v, mask)
        return self._project(3, heads.transpose(1, 2).flatten(2), scope)

    def _project(self, index: int, x: torch.Tensor, scope: Scope) -> torch.Tensor:
        rows = self.descriptor.projected[index]
        biases = None if self.biases is None else scope.array(self.biases[index], rows)
        return F.linear(x, scope.array(self.weights[index], rows, x.shape[-1]), biases)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`softmax(q kᵀ / sqrt(d) + mask) v` in one operator, zero for queries whose keys are all masked."""
    return F.scaled_dot_product_attention(q, k, v, mask)


def attention_weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`softmax(q kᵀ / sqrt(d) + mask)`; the smallest finite number represents -∞, so that no row becomes NaN."""
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
    return torch.softmax(scores if mask is None else (scores + mask).clamp_min(torch.finfo(q.dtype).min), -1)


def weighted(weights: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The values, weighted; zero for queries whose keys are all masked."""
    return weights @ v if mask is None else (weights @ v).masked_fill(all_masked(mask), 0)


def split_heads(x: torch.Tensor, *, heads: int) -> torch.Tensor:
    """`[N, T, heads * d] → [N, heads, T, d]`, without a copy."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def append_rows(x: torch.Tensor, row: torch.Tensor | None, *, zero: bool) -> torch.Tensor:
    """`[x; row; 0]` along the steps, each only if it exists."""
    shape = x.shape[0], 1, x.shape[2]
    rows = [] if row is None else [row.reshape(1, 1, -1).expand(shape)]
    rows += [x.new_zeros(shape)] if zero else []
    return torch.cat([x, *rows], 1) if rows else x


def join_masks(*masks: torch.Tensor, batch: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
    """One additive mask for scores `[N, heads, L, keys]`, against which it broadcasts: -∞ where a key is masked.

    Keys beyond those of a mask are appended rows, which are not masked. Booleans become numbers here because not every
    implementation behind PyTorch's operator returns zeros for a row of a boolean mask that masks everything.
    """
    joined: torch.Tensor | None = None
    for mask in masks:
        if mask.dtype is torch.bool:
            mask = mask.new_zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
        mask = F.pad(mask.to(dtype), (0, keys - mask.shape[-1])) if keys > mask.shape[-1] else mask.to(dtype)
        rows = batch if mask.shape[0] > 1 else 1
        mask = mask[:, None, None] if mask.ndim == 2 else mask.reshape(rows, -1, *mask.shape[1:])
        joined = mask if joined is None else joined + mask
    return joined


def all_masked(mask: torch.Tensor) -> torch.Tensor:
    """`[..., L, 1]`: whether all keys of a query are masked."""
    return (mask == -math.inf).all(-1, keepdim=True)


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
