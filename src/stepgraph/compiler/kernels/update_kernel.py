"""An elementwise update rule as one CUDA kernel, generated from the operators that the rule itself calls.

A rule is written once, as PyTorch operators on whole arrays; run that way, each operator reads and writes memory.
`source` runs the rule on arrays without memory, notes its operators, and writes them as C, where all of them work on
one element in registers. Every operator rounds as PyTorch's own does, so the numbers are the same bits.

To support another operator, add a row to `OPERATORS`. A rule that needs anything else runs operator by operator.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from stepgraph.system.torch_private import DispatchMode, compile_cuda

aten = torch.ops.aten
Array = torch.Tensor
SLOTS = 16  # parameters per launch
THREADS = 256
MOST_BLOCKS = 4096  # a thread that has more elements reads the live numbers only once
LARGEST = 1 << 31  # elements; their number is a C int
CONSTANT = "__int_as_float"
ROUNDED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # types of copies, and the C function that rounds


def _infix(sign: str) -> Callable[..., str]:
    return lambda a, b: f"{a} {sign} {b}"


def _call(name: str) -> Callable[..., str]:
    return lambda *given: f"{name}({', '.join(given)})"


def _power(base: str, exponent: str) -> str | None:
    return {_constant(2): f"{base} * {base}", _constant(0.5): f"sqrtf({base})"}.get(exponent)


def _quotient(a: str, b: str) -> str:
    # PyTorch multiplies by the reciprocal of a constant.
    return f"{a} * (1.0f / {b})" if b.startswith(CONSTANT) else f"{a} / {b}"


def _constant(number: float) -> str:
    """A number as C, in float32, exactly."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return f"{CONSTANT}({bits:#x})"


KINDS = {torch.float32: "float", torch.bool: "bool"}
OPERATORS: dict[Any, Callable[..., str | None]] = {
    aten.abs.default: _call("fabsf"),
    aten.add.Tensor: _infix("+"),
    aten.bitwise_and.Tensor: _infix("&&"),
    aten.clamp.Tensor: _call("clamped"),
    aten.clamp_max.default: _call("smaller"),
    aten.clamp_min.default: _call("larger"),
    aten.clone.default: lambda a: a,
    aten.detach.default: lambda a: a,
    aten.div.Tensor: _quotient,
    aten.eq.Scalar: _infix("=="),
    aten.eq.Tensor: _infix("=="),
    aten.gt.Scalar: _infix(">"),
    aten.gt.Tensor: _infix(">"),
    aten.lt.Scalar: _infix("<"),
    aten.lt.Tensor: _infix("<"),
    aten.maximum.default: _call("larger"),
    aten.minimum.default: _call("smaller"),
    aten.mul.Tensor: _infix("*"),
    aten.ne.Scalar: _infix("!="),
    aten.ne.Tensor: _infix("!="),
    aten.neg.default: lambda a: f"-{a}",
    aten.ones_like.default: lambda a: "1.0f",
    aten.pow.Tensor_Scalar: _power,
    aten.rsub.Scalar: lambda a, b: f"{b} - {a}",
    aten.sign.default: lambda a: f"(0.0f < {a}) - ({a} < 0.0f)",
    aten.sqrt.default: _call("sqrtf"),
    aten.sub.Tensor: _infix("-"),
    aten.where.self: lambda c, a, b: f"{c} ? {a} : {b}",
    aten.zeros_like.default: lambda a: "0.0f",
}

HELPERS = """
__device__ float larger(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
__device__ float smaller(float a, float b) { return a != a ? a : b != b ? b : fminf(a, b); }
__device__ float clamped(float x, float low, float high) { return smaller(larger(x, low), high); }
__device__ unsigned short bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
__device__ unsigned short float16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
"""


class _Unsupported(Exception):
    """The rule calls something that a kernel for single elements cannot do."""


class _Noted(DispatchMode):
    """Notes the operators that run as lines of C."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self._shapes = {torch.Size(shape), torch.Size(())}
        self._names: dict[int, str] = {}
        self._alive: list[Array] = []  # an array that is gone could pass its identity on to a later one
        self.lines: list[str] = []

    def name(self, array: Array, name: str) -> Array:
        """Names an array."""
        self._alive.append(array)
        self._names[id(array)] = name
        return array

    def of(self, given: Any) -> str:
        """The name of an array, or a number as C."""
        if isinstance(given, Array) and id(given) in self._names:
            return self._names[id(given)]
        if isinstance(given, int | float) and not isinstance(given, bool):
            return _constant(given)
        raise _Unsupported(f"the argument {given!r}")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = {name: one for name, one in (kwargs or {}).items() if name not in ("pin_memory", "device", "layout")}
        if function not in OPERATORS or any(one is not None for one in settings.values()):
            raise _Unsupported(str(function))
        found = function(*args, **(kwargs or {}))
        if found.dtype not in KINDS or found.shape not in self._shapes:
            raise _Unsupported(f"{function} returns {found.dtype} {list(found.shape)}")
        code = OPERATORS[function](*map(self.of, args))
        if code is None:
            raise _Unsupported(f"{function} of {args}")
        self.lines.append(f"const {KINDS[found.dtype]} v{len(self.lines)} = {code};")
        return self.name(found, f"v{len(self.lines) - 1}")


# From a parameter, its gradient, its buffers, the norm of the gradient and the live numbers to the new parameter and
# buffers.
Rule = Callable[[Array, Array, Sequence[Array], Array, Sequence[Array]], Sequence[Array]]


@torch.inference_mode(False)  # in inference mode, PyTorch would not decompose operators
def written(rule: Rule, shape: Sequence[int], states: int, numbers: int) -> str | None:
    """A rule as C code for one element, or None if it does more than elementwise arithmetic in float32.

    Args:
        rule: the update of one parameter.
        shape: that of the parameter.
        states: how many buffers a parameter has.
        numbers: how many live numbers there are.
    """
    noted = _Noted(shape)

    def array(name: str, *extents: int) -> Array:
        return noted.name(torch.empty(extents, dtype=torch.float32, device="meta"), name)

    p, g, norm = array("p", *shape), array("g", *shape), array("norm")
    own = [array(f"s{i}", *shape) for i in range(states)]
    live = [array(f"n{i}") for i in range(numbers)]
    try:
        with torch.no_grad(), noted:
            results = rule(p, g, own, norm, live)
        if len(results) != 1 + states or any(one.shape != p.shape for one in results):
            return None
        stores = [f"{name}[i] = {noted.of(one)};" for name, one in zip(_arrays(states), results, strict=True)]
    except (_Unsupported, RuntimeError, TypeError):  # arrays without memory cannot do everything that others can
        return None
    return "\n".join([*noted.lines, *stores, f"fresh = {noted.of(results[0])};"])


def _arrays(states: int) -> list[str]:
    """What a rule changes, in the order of its results."""
    return ["P", *(f"S{i}" for i in range(states))]


def kernel(rule: str, states: int, numbers: int, copied: torch.dtype | None) -> str:
    """The kernel around a rule, for several parameters: each is a row of blocks.

    Args:
        rule: its code for one element.
        states: how many buffers a parameter has.
        numbers: how many live numbers there are.
        copied: the type of the copies that it writes beside the parameters, if there are any.
    """
    given = [*(f"float* {name}" for name in _arrays(states)), "const float* G", "const float* NORM", "int COUNT"]
    given += [] if copied is None else ["unsigned short* H"]
    names = [one.split()[-1] for one in given]
    chosen = [f"case {i}: {' '.join(f'{name} = {name}_{i};' for name in names)} break;" for i in range(SLOTS)]
    return "\n".join(
        [
            HELPERS,
            'extern "C" __global__ void update(const float* N, const unsigned char* ALLOWED, int CHECKS,',
            ",\n".join(", ".join(f"{one}_{i}" for one in given) for i in range(SLOTS)) + ") {",
            "if (CHECKS && !*ALLOWED) return;",
            *(f"{one};" for one in given),
            f"switch (blockIdx.y) {{ {' '.join(chosen)} default: return; }}",
            "const float norm = *NORM;",
            *(f"const float n{i} = N[{i}];" for i in range(numbers)),
            "const long long step = gridDim.x * (long long)blockDim.x;",
            "for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < COUNT; i += step) {",
            "const float p = P[i], g = G[i];",
            *(f"const float s{i} = S{i}[i];" for i in range(states)),
            "float fresh;",
            rule,
            "" if copied is None else f"H[i] = {ROUNDED[copied]}(fresh);",
            "} }",
        ]
    )


@cache
def _compiled(code: str, device: int) -> Callable[..., None]:
    """A kernel on a device; compiled once, in a fraction of a second."""
    # Without contraction to fused multiply-adds, every operator rounds as it does alone.
    with torch.cuda.device(device):
        return compile_cuda(code, "update", nvcc_options=["--fmad=false"])


def launch(
    rules: Sequence[str],
    parameters: Sequence[Array],
    gradients: Sequence[Array],
    states: Sequence[Sequence[Array]],
    copies: Sequence[Array],
    numbers: Array,
    norms: Sequence[Array],
    allowed: Array | None,
) -> None:
    """Updates parameters, buffers and copies in place, up to `SLOTS` parameters with one kernel.

    Args:
        rules: the code of each parameter's rule.
        parameters: contiguous arrays, like all others.
        gradients: one per parameter.
        states: one list per buffer.
        copies: in half precision, one per parameter, or none.
        numbers: the live numbers.
        norms: of the gradients, one per parameter.
        allowed: whether anything may change.
    """
    alike: dict[str, list[int]] = defaultdict(list)
    for index, rule in enumerate(rules):
        alike[rule].append(index)
    for rule, indices in alike.items():
        code = kernel(rule, len(states), len(numbers), copies[0].dtype if copies else None)
        run = _compiled(code, numbers.device.index)
        for start in range(0, len(indices), SLOTS):
            chunk = indices[start : start + SLOTS]
            counts = [parameters[i].numel() for i in chunk]
            given = [numbers, numbers if allowed is None else allowed, int(allowed is not None)]
            # Slots without a parameter repeat one; no block reads them.
            for i, count in zip(chunk + chunk[:1] * (SLOTS - len(chunk)), counts + [0] * SLOTS, strict=False):
                given += [parameters[i], *(slot[i] for slot in states), gradients[i], norms[i], count]
                given += copies[i : i + 1]
            blocks = min(-(-max(counts) // THREADS), MOST_BLOCKS)
            with torch.cuda.device(numbers.device):
                run(grid=(blocks, len(chunk), 1), block=(THREADS, 1, 1), args=given)
