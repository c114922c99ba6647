"""Rows of the conformance table: multihead attention."""

from collections.abc import Callable
from dataclasses import replace
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
    groups = descriptor.key_value_head_count
    key, value = (width * groups // HEADS for width in (descriptor.key_dimension, descriptor.value_dimension))

    def tensor(*shape: int) -> Tensor:
        return Tensor(shape, data=generator.uniform(-1, 1, shape).astype(np.float32))

    shapes: list[tuple[int, ...]] = [
        (descriptor.key_dimension, E),
        (key, key_width),
        (value, value_width),
        (E, descriptor.value_dimension),
    ]
    if packed:
        shapes = [(1, HEADS, m // HEADS, n) for m, n in shapes[:3]] + [(1, 1, E, value)]
    weights = [tensor(*shape) for shape in shapes]
    biases = [tensor(1, n, 1, 1) if packed else tensor(n) for n in (descriptor.key_dimension, key, value, E)]
    rows = [tensor(1, HEADS, 1, n // HEADS) if packed else tensor(n) for n in (key, value)]
    return MultiheadAttentionLayer(
        descriptor,
        weights,
        biases if descriptor.has_biases else None,
        rows if descriptor.has_attention_biases else None,
    )


def attended(
    *,
    heads: int = HEADS,
    zero: bool = False,
    rate: float = 0.0,
    key: int = E,
    value: int = E,
    groups: int | None = None,
    sees: Callable[[int, int], bool] = lambda query, key: True,
    turn: Callable[[np.ndarray], np.ndarray] = lambda vectors: vectors,
) -> Callable[..., np.ndarray]:
    """The specification's equations, head by head and query by query; a query without a key gathers zeros.

    `groups` is the number of key and value heads, `sees(i, j)` whether query i sees key j, `turn` rotates the vectors
    `[steps, d]` of one head.
    """
    groups = heads if groups is None else groups
    wide_key, wide_value = key // heads, value // heads
    key_width, value_width = wide_key * groups, wide_value * groups

    def project(x: np.ndarray, weights: np.ndarray, bias: Any, width: int) -> np.ndarray:
        return x @ weights.reshape(width, -1).T + (0 if bias is None else bias.reshape(-1))

    def reference(
        x_query: np.ndarray, x_key: np.ndarray, x_value: np.ndarray, *masks: np.ndarray, weights: Any, **tensors: Any
    ) -> np.ndarray:
        biases = tensors.get("biases", [None] * 4)
        q = project(x_query, weights[0], biases[0], key)
        k = project(x_key, weights[1], biases[1], key_width)
        v = project(x_value, weights[2], biases[2], value_width)
        (batch, queries), keys = q.shape[:2], k.shape[1]
        for x in (q, k):
            for n in range(batch):
                for start in range(0, x.shape[2], wide_key):
                    x[n, :, start : start + wide_key] = turn(x[n, :, start : start + wide_key])
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
                shared = h // (heads // groups)
                of_k = slice(shared * wide_key, (shared + 1) * wide_key)
                of_v = slice(shared * wide_value, (shared + 1) * wide_value)
                for i in range(queries):
                    scores = k[n][:, of_k] @ q[n, i, h * wide_key : (h + 1) * wide_key] / np.sqrt(wide_key)
                    scores[:keys] += bias_of(masks, n, h, i, batch, heads)
                    scores[:keys] += [0.0 if sees(i, j) else -np.inf for j in range(keys)]
                    if (scores > -np.inf).any():
                        powers = np.exp(scores - scores.max())
                        shares = powers / powers.sum() * kept[n, h, i]
                        gathered[n, i, h * wide_value : (h + 1) * wide_value] = shares @ v[n][:, of_v]
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


def turned(base: float, dimension: int, interleaved: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Rotary positions, pair by pair, as a product with a rotation of the plane."""

    def turn(vectors: np.ndarray) -> np.ndarray:
        found = vectors.copy()
        for t in range(len(vectors)):
            for i in range(dimension // 2):
                pair = [2 * i, 2 * i + 1] if interleaved else [i, i + dimension // 2]
                angle = t / base ** (2 * i / dimension)
                cosine, sine = np.cos(angle), np.sin(angle)
                found[t, pair] = np.array([[cosine, -sine], [sine, cosine]]) @ vectors[t, pair]
        return found

    return turn


def modern_twin(
    *,
    groups: int,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    base: float | None = None,
    interleaved: bool = False,
) -> Callable[..., torch.Tensor]:
    """PyTorch's own operator over projected heads; rotations are Meta's complex products, or Hugging Face's halves."""

    def rotated(x: torch.Tensor) -> torch.Tensor:
        if base is None:
            return x
        d = x.shape[-1]
        angles = torch.outer(torch.arange(x.shape[-2]).double(), base ** (-torch.arange(0, d, 2).double() / d))
        if interleaved:
            turns = torch.polar(torch.ones_like(angles), angles)
            return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)
        twice = torch.cat([angles, angles], -1)
        return x * twice.cos() + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * twice.sin()

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, weights: Any, biases: Any = None
    ) -> torch.Tensor:
        added = biases or [None] * 4
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights[:3], added[:3], strict=True))
        q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in ((q, HEADS), (k, groups), (v, groups)))
        q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=groups != HEADS)
        return F.linear(y.transpose(1, 2).flatten(2), weights[3], added[3])

    return call


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


def same(steps: int = 5) -> tuple[Source, ...]:
    return (normal(N, steps, E),) * 3


def hidden_keys(_: np.random.Generator) -> np.ndarray:
    """The first key of the second sample is masked, and with it everything that its first query may see."""
    return np.array([[False] * 5, [True, False, False, True, False]])


def before(window: int | None = None) -> Callable[[int, int], bool]:
    return lambda i, j: j <= i and (window is None or i - j < window)


def around(window: int) -> Callable[[int, int], bool]:
    return lambda i, j: abs(i - j) < window


BAND = torch.ones(5, 5, dtype=torch.bool)
FOUR: dict[str, Any] = {"key_dimension": 4 * HEADS, "value_dimension": 3 * HEADS}  # heads of other widths
ORDINARY = ("attention-causal", "attention-window", "attention-grouped-packed-rows-mask", "attention-as-in-llama")
POSITIONS = [
    Case(
        "attention-causal",
        lambda: attention(causal=True),
        same(),
        attended(sees=before()),
        modern_twin(groups=HEADS, causal=True),
        bad=(
            Bad(((N, L, E), (N, S, E), (N, S, E)), ShapeError, "causal compares positions, but there are 3 queries"),
            Bad(((N, 5, E), (N, 5, E), (N, 5, E), (1, 4, 5)), ShapeError, "a mask [1, 4, 5] matches neither"),
        ),
    ),
    Case("attention-causal-one-step", lambda: attention(causal=True), same(1), attended(sees=before())),
    Case("attention-causal-key-mask", lambda: attention(causal=True), (*same(), hidden_keys), attended(sees=before())),
    Case(
        "attention-causal-rows-and-zero",
        lambda: attention(causal=True, has_attention_biases=True, adds_zero_attention=True),
        same(),
        attended(sees=before(), zero=True),
    ),
    Case(
        "attention-causal-dropout",
        lambda: attention(causal=True, dropout=0.4),
        same(),
        attended(sees=before(), rate=0.4),
    ),
    Case(
        "attention-causal-window",
        lambda: attention(causal=True, window=2),
        same(),
        attended(sees=before(2)),
        modern_twin(groups=HEADS, mask=BAND.tril() & BAND.triu(-1)),
    ),
    Case(
        "attention-window",
        lambda: attention(window=2),
        same(),
        attended(sees=around(2)),
        modern_twin(groups=HEADS, mask=BAND.tril(1) & BAND.triu(-1)),
        bad=(Bad(((N, L, E), (N, S, E), (N, S, E)), ShapeError, "window compares positions, but there are 3 queries"),),
    ),
    Case(
        "attention-wide-window",
        lambda: attention(causal=True, window=5),
        same(),
        attended(sees=before()),
        modern_twin(groups=HEADS, causal=True),
    ),
    Case(
        "attention-grouped",
        lambda: attention(key_value_head_count=1),
        sequences(),
        attended(groups=1),
        modern_twin(groups=1),
    ),
    Case(
        "attention-grouped-packed-rows-mask",
        lambda: attention(key_value_head_count=1, has_attention_biases=True, **FOUR),
        (*sequences(), added(N * HEADS)),
        attended(groups=1, key=8, value=6),
    ),
    Case(
        "attention-grouped-dropout",
        lambda: attention(key_value_head_count=1, dropout=0.4),
        (*sequences(), key_mask),
        attended(groups=1, rate=0.4),
    ),
    *(
        Case(
            f"attention-rotary{'-interleaved' if interleaved else ''}",
            lambda interleaved=interleaved: attention(rotary_base=100.0, rotary_interleaved=interleaved, **FOUR),
            sequences(),
            attended(key=8, turn=turned(100.0, 4, interleaved)),
            modern_twin(groups=HEADS, base=100.0, interleaved=interleaved),
        )
        for interleaved in (False, True)
    ),
    *(
        Case(
            f"attention-rotary-partly{'-interleaved' if interleaved else ''}",
            lambda interleaved=interleaved: attention(
                rotary_base=10_000.0, rotary_dimension=2, rotary_interleaved=interleaved
            ),
            sequences(),
            attended(turn=turned(10_000.0, 2, interleaved)),
        )
        for interleaved in (False, True)
    ),
    Case(
        "attention-as-in-llama",
        lambda: attention(
            causal=True, key_value_head_count=1, rotary_base=500.0, has_biases=False, key_dimension=4 * HEADS
        ),
        same(),
        attended(groups=1, key=8, sees=before(), turn=turned(500.0, 4, interleaved=False)),
        modern_twin(groups=1, causal=True, base=500.0),
    ),
    Case(
        "attention-as-in-mistral",
        lambda: attention(
            causal=True, window=3, key_value_head_count=1, rotary_base=500.0, key_dimension=4 * HEADS, dropout=0.3
        ),
        (*same(), hidden_keys),
        attended(groups=1, key=8, sees=before(3), turn=turned(500.0, 4, interleaved=False), rate=0.3),
    ),
]

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
    *(replace(case, deep=case.name not in ORDINARY) for case in POSITIONS),
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
