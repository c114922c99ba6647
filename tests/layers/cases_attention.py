"""Rows of the conformance table: multihead attention."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.attention import MultiheadAttentionDescriptor, MultiheadAttentionLayer
from stepgraph.tensors.tensor import Tensor
from tests.layers import cases_dropout
from tests.layers.case import Bad, Case, Source, normal

N, L, S, E, HEADS = 2, 3, 4, 6, 2


def attention(
    *, packed: bool = False, key_width: int = E, value_width: int = E, **settings: Any
) -> MultiheadAttentionLayer:
    """A layer with random weights, biases and rows, in natural or in the original's shapes."""
    generator = np.random.default_rng(8)
    descriptor = MultiheadAttentionDescriptor(E, HEADS, **settings)
    key, value = descriptor.key_dimension, descriptor.value_dimension

    def tensor(*shape: int) -> Tensor:
        return Tensor(shape, data=generator.uniform(-1, 1, shape).astype(np.float32))

    shapes: list[tuple[int, ...]] = [(key, E), (key, key_width), (value, value_width), (E, value)]
    if packed:
        shapes = [(1, HEADS, m // HEADS, n) for m, n in shapes[:3]] + [(1, 1, E, value)]
    weights = [tensor(*shape) for shape in shapes]
    biases = [tensor(1, n, 1, 1) if packed else tensor(n) for n in (key, key, value, E)]
    rows = [tensor(1, HEADS, 1, n // HEADS) if packed else tensor(n) for n in (key, value)]
    return MultiheadAttentionLayer(
        descriptor,
        weights,
        biases if descriptor.has_biases else None,
        rows if descriptor.has_attention_biases else None,
    )


def attended(
    *, heads: int = HEADS, zero: bool = False, rate: float = 0.0, key: int = E, value: int = E
) -> Callable[..., np.ndarray]:
    """The specification's equations, head by head and query by query; a query without a key gathers zeros."""

    def project(x: np.ndarray, weights: np.ndarray, bias: Any, width: int) -> np.ndarray:
        return x @ weights.reshape(width, -1).T + (0 if bias is None else bias.reshape(-1))

    def reference(
        x_query: np.ndarray, x_key: np.ndarray, x_value: np.ndarray, *masks: np.ndarray, weights: Any, **tensors: Any
    ) -> np.ndarray:
        biases = tensors.get("biases", [None] * 4)
        q = project(x_query, weights[0], biases[0], key)
        k = project(x_key, weights[1], biases[1], key)
        v = project(x_value, weights[2], biases[2], value)
        (batch, queries), keys = q.shape[:2], k.shape[1]
        for row_k, row_v in [tensors["attention_biases"]] if "attention_biases" in tensors else []:
            k = np.concatenate([k, np.tile(row_k.reshape(1, 1, -1), (batch, 1, 1))], 1)
            v = np.concatenate([v, np.tile(row_v.reshape(1, 1, -1), (batch, 1, 1))], 1)
        if zero:
            k, v = (np.concatenate([one, np.zeros((batch, 1, one.shape[2]))], 1) for one in (k, v))
        kept = np.ones((batch, heads, queries, k.shape[1]))
        if rate:
            stream = cases_dropout.SEED, cases_dropout.STEP, cases_dropout.SALT
            kept = cases_dropout.mask(kept.shape, rate, *stream) / (1 - rate)
        gathered = np.zeros((batch, queries, value))
        for n in range(batch):
            for h in range(heads):
                of_k = slice(h * key // heads, (h + 1) * key // heads)
                of_v = slice(h * value // heads, (h + 1) * value // heads)
                for i in range(queries):
                    scores = k[n][:, of_k] @ q[n, i, of_k] / np.sqrt(key // heads)
                    scores[:keys] += bias_of(masks, n, h, i, batch, heads)
                    if (scores > -np.inf).any():
                        powers = np.exp(scores - scores.max())
                        gathered[n, i, of_v] = (powers / powers.sum() * kept[n, h, i]) @ v[n][:, of_v]
        return project(gathered, weights[3], biases[3], weights[3].size // value)

    return reference


def bias_of(masks: tuple[np.ndarray, ...], n: int, head: int, query: int, batch: int, heads: int) -> Any:
    """What the masks add to the scores of one query: -inf where a key is masked."""
    total: Any = 0.0
    for mask in masks:
        if mask.ndim == 2:
            row = mask[n]
        else:
            row = mask[{1: 0, batch: n, batch * heads: n * heads + head}[len(mask)], query]
        total = total + (np.where(row, -np.inf, 0.0) if row.dtype == bool else row)
    return total


def twin(zero: bool = False, training: bool = True) -> Callable[..., torch.Tensor]:
    """The function behind `torch.nn.MultiheadAttention`, which has one width for everything that is projected."""

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor, weights: Any, **tensors: Any
    ) -> torch.Tensor:
        biases = [one.reshape(-1) for one in tensors.get("biases", [])]
        rows = [one.reshape(1, 1, -1) for one in tensors.get("attention_biases", [None, None]) if one is not None]
        attention_mask = next((mask for mask in masks if mask.ndim == 3), None)
        if attention_mask is not None and len(attention_mask) == 1:
            attention_mask = attention_mask[0]
        q, k, v, out = (one.reshape(E, -1) for one in weights)
        y, _ = F.multi_head_attention_forward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            embed_dim_to_check=E,
            num_heads=HEADS,
            in_proj_weight=None,
            in_proj_bias=torch.cat(biases[:3]) if biases else None,
            bias_k=rows[0] if rows else None,
            bias_v=rows[1] if rows else None,
            add_zero_attn=zero,
            dropout_p=0.0,
            out_proj_weight=out,
            out_proj_bias=biases[3] if biases else None,  # type: ignore[arg-type]
            training=training,
            key_padding_mask=next((mask for mask in masks if mask.ndim == 2), None),
            need_weights=False,
            attn_mask=attention_mask,
            use_separate_proj_weight=True,
            q_proj_weight=q,
            k_proj_weight=k,
            v_proj_weight=v,
        )
        return y.transpose(0, 1)

    return call


def sequences(key_width: int = E, value_width: int = E) -> tuple[Source, ...]:
    return normal(N, L, E), normal(N, S, key_width), normal(N, S, value_width)


def key_mask(_: np.random.Generator) -> np.ndarray:
    return np.array([[False, False, True, False], [True, False, False, True]])


def some_masked(first: int) -> Source:
    """A boolean attention mask that leaves every query its second key."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        mask = generator.uniform(size=(first, L, S)) < 0.5
        mask[:, :, 1] = False
        return mask

    return draw


def added(first: int) -> Source:
    """A floating attention mask with some keys at -inf, never the second one."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        mask = generator.standard_normal((first, L, S))
        mask[:, 0, 2] = mask[:, 1, 0] = -np.inf
        return mask

    return draw


def everything_masked(boolean: bool) -> Source:
    """The first query may attend to nothing."""

    def draw(_: np.random.Generator) -> np.ndarray:
        mask = np.zeros((1, L, S), bool)
        mask[0, 0] = True
        return mask if boolean else np.where(mask, -np.inf, 0.5)

    return draw


BAD = (
    Bad(((N, L, E), (N, S, E)), ShapeError, "2 sources were passed, but 3 to 5 are needed"),
    Bad(((N, L, 5), (N, S, E), (N, S, E)), ShapeError, "query is [2, 3, 5], but its weights take [batch, steps, 6]"),
    Bad(((N, L, E), (N, S, 8), (N, S, E)), ShapeError, "the key is [2, 4, 8], but its weights take [batch, steps, 6]"),
    Bad(((N, L, E), (N, S, E), (N, E)), ShapeError, "the value is [2, 6], but its weights take [batch, steps, 6]"),
    Bad(((N, L, E), (N, S, E), (N, 5, E)), ShapeError, "query, key and value do not match"),
    Bad(((N, L, E), (3, S, E), (3, S, E)), ShapeError, "query, key and value do not match"),
    Bad(((N, L, E), np.zeros((N, S, E), np.int32), (N, S, E)), DataTypeError, "the source is int32"),
    Bad(((N, L, E), (N, S, E), (N, S, E), (N, S)), DataTypeError, "the key mask is float32, but boolean is needed"),
    Bad(
        ((N, L, E), (N, S, E), (N, S, E), np.zeros((1, L, S), np.int32)),
        DataTypeError,
        "the attention mask is int32, but boolean or a floating type is needed",
    ),
    Bad(((N, L, E), (N, S, E), (N, S, E), np.zeros((N, L), bool)), ShapeError, "a mask [2, 3] matches neither"),
    Bad(((N, L, E), (N, S, E), (N, S, E), (3, L, S)), ShapeError, "a mask [3, 3, 4] matches neither"),
    Bad(((N, L, E), (N, S, E), (N, S, E), (1, L, S), (1, L, S)), ShapeError, "two masks have 3 dimensions"),
)

MASKS: dict[str, tuple[Source, ...]] = {
    "key-mask": (key_mask,),
    "boolean-mask": (some_masked(1),),
    "boolean-mask-by-head": (some_masked(N * HEADS),),
    "floating-mask": (added(1),),
    "floating-mask-by-head": (added(N * HEADS),),
    "key-and-boolean-mask": (key_mask, some_masked(1)),
    "key-and-floating-mask": (key_mask, added(N * HEADS)),
}
EXTRAS: dict[str, dict[str, bool]] = {
    "": {},
    "-rows": {"has_attention_biases": True},
    "-zero": {"adds_zero_attention": True},
    "-rows-and-zero": {"has_attention_biases": True, "adds_zero_attention": True},
}


def masked_twin(name: str, settings: dict[str, bool]) -> Any:
    """PyTorch wants two masks of one type, and none for all heads that is not the same for all samples."""
    zero = settings.get("adds_zero_attention", False)
    if name != "key-and-floating-mask":
        return twin(zero)

    def call(query: Any, key: Any, value: Any, keys: Any, mask: Any, **tensors: Any) -> Any:
        floating = torch.zeros(keys.shape, dtype=mask.dtype).masked_fill(keys, -torch.inf)
        return twin(zero)(query, key, value, floating, mask, **tensors)

    return call


CASES: list[Case] = [
    Case("attention", attention, sequences(), attended(), twin(), bad=BAD),
    Case("attention-inference", lambda: attention(dropout=0.5), sequences(), attended(), twin(), training=False),
    Case("attention-packed", lambda: attention(packed=True), sequences(), attended(), twin()),
    Case("attention-without-biases", lambda: attention(has_biases=False), sequences(), attended(), twin()),
    Case(
        "attention-other-sources",
        lambda: attention(key_width=5, value_width=7),
        sequences(5, 7),
        attended(),
        twin(),
    ),
    Case(
        "attention-other-dimensions",
        lambda: attention(key_dimension=4, value_dimension=8, key_width=4, value_width=8, packed=True),
        sequences(4, 8),
        attended(key=4, value=8),
    ),
    Case(
        "attention-other-dimensions-and-everything",
        lambda: attention(key_dimension=4, value_dimension=8, has_attention_biases=True, adds_zero_attention=True),
        (*sequences(), added(N * HEADS), key_mask),
        attended(key=4, value=8, zero=True),
    ),
    Case(
        "attention-packed-rows",
        lambda: attention(packed=True, has_attention_biases=True),
        sequences(),
        attended(),
        twin(),
    ),
    Case("attention-mask-by-sample", attention, (*sequences(), some_masked(N)), attended()),
    Case("attention-attention-mask-first", attention, (*sequences(), added(1), key_mask), attended()),
    *(
        Case(
            f"attention{extra}{'-' if name else ''}{name}",
            lambda settings=settings: attention(**settings),
            (*sequences(), *masks),
            attended(zero=settings.get("adds_zero_attention", False)),
            masked_twin(name, settings),
        )
        for extra, settings in EXTRAS.items()
        for name, masks in {"": (), **MASKS}.items()
        if (extra or name) and (not extra or name in ("", "key-mask", "key-and-floating-mask"))
    ),
    *(
        Case(
            f"attention-dropout{'-' if name else ''}{name}",
            lambda: attention(dropout=0.4),
            (*sequences(), *masks),
            attended(rate=0.4),
        )
        for name, masks in {"": (), **MASKS}.items()
        if name in ("", "boolean-mask-by-head", "key-and-floating-mask")
    ),
    Case(
        "attention-dropout-and-everything",
        lambda: attention(dropout=0.25, has_attention_biases=True, adds_zero_attention=True),
        (*sequences(), key_mask, added(1)),
        attended(rate=0.25, zero=True),
    ),
    *(
        Case(
            f"attention-nothing-left-{'boolean' if boolean else 'floating'}{'-dropout' if rate else ''}",
            lambda rate=rate: attention(dropout=rate),
            (*sequences(), everything_masked(boolean)),
            attended(rate=rate),
        )
        for boolean in (True, False)
        for rate in (0.0, 0.4)
    ),
]
