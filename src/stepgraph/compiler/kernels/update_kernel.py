"""An elementwise update rule as one CUDA kernel, generated from the operators that the rule itself calls.

A rule is written once, as PyTorch operators on whole arrays; run that way, each operator reads and writes memory.
`source` runs the rule on arrays without memory, notes its operators, and writes them as C, where all of them work on
one element in registers. Every operator rounds as PyTorch's own does, so the numbers are the same bits.

One launch updates many parameters. Their addresses are in its arguments: a CUDA graph keeps a copy of these, so there
is no table in memory that would have to follow arrays that move.

To support another operator, add a row to `OPERATORS`. A rule that needs anything else runs operator by operator.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from stepgraph.system import background
from stepgraph.system.torch_private import DispatchMode, assemble_cuda, compile_cuda, launch_cuda

aten = torch.ops.aten
Array = torch.Tensor
ARGUMENT_BYTES = 4096  # of one launch, on every device
NAME = "update"  # of a kernel in its source
OPTIONS = ("--fmad=false",)  # without fused multiply-adds, every operator rounds as it does alone
THREADS = 256
CHUNK = 4096  # elements per block: enough that reading the live numbers costs nothing
NO_BLOCK = (1 << 31) - 1
MOST_REORDERED = (1 << 31) - 1  # the last place in an array with an order of its own
CONSTANT = "__int_as_float"
ROUNDED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}  # types of copies, and the C function that rounds
GIVEN = {torch.float32: "float", torch.bfloat16: "unsigned short", torch.float16: "unsigned short"}  # gradients in C
WIDENED = {torch.float32: "", torch.bfloat16: "from_bfloat16", torch.float16: "from_float16"}  # to float, exactly


def _infix(sign: str) -> Callable[..., str]:
    return lambda a, b: f"{a} {sign} {b}"


def _call(name: str) -> Callable[..., str]:
    return lambda *given: f"{name}({', '.join(given)})"


def _power(base: str, exponent: str) -> str | None:
    known = {2: f"{base} * {base}", 0.5: f"sqrtf({base})", -2: f"1.0f / ({base} * {base})"}
    return {_constant(number): code for number, code in known.items()}.get(exponent)


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
    aten.lerp.Scalar: _call("between"),
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
__device__ float between(float a, float b, float w) {
  // PyTorch's own kernel is compiled to fused multiply-adds, too.
  return fabsf(w) < 0.5f ? fmaf(w, b - a, a) : fmaf(w - 1.0f, b - a, b);
}
__device__ unsigned short bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
__device__ unsigned short float16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ float from_bfloat16(unsigned short bits) { return __int_as_float(bits << 16); }
__device__ float from_float16(unsigned short bits) {
  const int sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
  if (rest >= 0x7c00 << 13) return __int_as_float(sign | 0x7f800000 | rest);
  return __int_as_float(sign | rest) * 0x1p112f;  // corrects the exponent, also that of subnormal numbers
}
template <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };
"""


class Update(NamedTuple):
    """The arrays of an update.

    Args:
        parameters: what it changes.
        gradients: one per parameter, in its type or in half precision.
        states: one list per buffer of the optimizer, with an array per parameter.
        numbers: the live numbers.
        copies: in half precision; they follow the parameters, all of them or none.
        norm: the global norm of the gradients, if the optimizer needs one.
        finite: if it is False, nothing changes.
    """

    parameters: Sequence[Array]
    gradients: Sequence[Array]
    states: Sequence[Sequence[Array]]
    numbers: Array
    copies: Sequence[Array] = ()
    norm: Array | None = None
    finite: Array | None = None


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
        stores = [f"{name} = {noted.of(one)};" for name, one in zip(_arrays(states), results, strict=True)]
    except (_Unsupported, RuntimeError, TypeError):  # arrays without memory cannot do everything that others can
        return None
    return "\n".join([*noted.lines, *stores])


def _arrays(states: int) -> list[str]:
    """What a rule changes, in the order of its results."""
    return ["P", *(f"S{i}" for i in range(states))]


class Form(NamedTuple):
    """What a kernel is generated for.

    Args:
        rule: its code for one element.
        states: how many buffers a parameter has.
        numbers: how many live numbers there are.
        gradient: the type of the gradients.
        copied: the type of the copies that it writes beside the parameters, if there are any.
        reorders: whether gradients or copies are in another order in memory than the parameters, as filters of
            convolutions with their channels last are.
    """

    rule: str
    states: int
    numbers: int
    gradient: torch.dtype = torch.float32
    copied: torch.dtype | None = None
    reorders: bool = False

    @property
    def elements(self) -> dict[str, str]:
        """The arrays with an element for each of the parameter: their C types by name."""
        changed, copies = dict.fromkeys(_arrays(self.states), "float"), {"H": "unsigned short"}
        return {**changed, "G": f"const {GIVEN[self.gradient]}", **({} if self.copied is None else copies)}

    @property
    def arrays(self) -> dict[str, str]:
        """All arrays of one parameter."""
        return {**self.elements, "NORM": "const float"}

    @property
    def reordered(self) -> list[str]:
        """The arrays that are in an order of their own, by name."""
        return [name for name in self.elements if name in "GH"] if self.reorders else []

    @property
    def counts(self) -> dict[str, Any]:
        """What a launch knows of each parameter besides its arrays."""
        strides = [f"{name}{axis}" for name in self.reordered for axis in AXES]
        extents = ("MIDDLE", "INNER") if self.reorders else ()
        return {**COUNTS, **dict.fromkeys((*extents, *strides), ctypes.c_uint)}

    @property
    def slots(self) -> int:
        """How many parameters fit into the arguments of one launch."""
        per_slot = ctypes.sizeof(ctypes.c_void_p) * len(self.arrays) + sum(map(ctypes.sizeof, self.counts.values()))
        return (ARGUMENT_BYTES - 4 * ctypes.sizeof(ctypes.c_void_p)) // per_slot


COUNTS = {  # what a launch knows of each parameter besides its arrays, by name
    "COUNT": ctypes.c_longlong,  # its elements
    "FIRST": ctypes.c_int,  # the first of its blocks
    "ALIGNED": ctypes.c_ubyte,  # whether four elements can be read at once
}
C_TYPES = {ctypes.c_longlong: "long long", ctypes.c_int: "int", ctypes.c_ubyte: "unsigned char"}
C_TYPES[ctypes.c_uint] = "unsigned"
AXES = "OMI"  # outer, middle and inner: the first, the second and all other dimensions of a parameter


@cache
def arguments(form: Form) -> type[ctypes.Structure]:
    """The only argument of a kernel, which it receives by value: `Table` in its code."""
    given: list[tuple[str, Any]] = [("N", ctypes.c_void_p), ("ALLOWED", ctypes.c_void_p)]
    given += [(name, ctypes.c_void_p * form.slots) for name in form.arrays]
    given += [(name, kind * form.slots) for name, kind in form.counts.items()]
    return type("Table", (ctypes.Structure,), {"_fields_": given})


def kernel(form: Form) -> str:
    """The kernel around a rule, for as many parameters as a launch has slots.

    Each block updates `CHUNK` elements of one parameter. Blocks are numbered over all parameters, so that each finds
    its own by bisection, and small ones leave none idle.
    """
    elements, reordered = form.elements, form.reordered
    four = {name: f"Four<{kind}>" for name, kind in elements.items() if name not in reordered}
    return "\n".join(
        [
            HELPERS,
            "struct Table {",
            "const float* N; const unsigned char* ALLOWED;",
            *(f"{kind}* {name}[{form.slots}];" for name, kind in form.arrays.items()),
            *(f"{C_TYPES[kind]} {name}[{form.slots}];" for name, kind in form.counts.items()),
            "};",
            f'extern "C" __global__ void __launch_bounds__({THREADS}) update(const Table T) {{',
            "if (T.ALLOWED && !*T.ALLOWED) return;",
            "const int block = blockIdx.x, thread = threadIdx.x;",
            "int slot = 0;",
            f"for (int width = {1 << (form.slots - 1).bit_length() - 1}; width; width /= 2)",
            f"if (slot + width < {form.slots} && T.FIRST[slot + width] <= block) slot += width;",
            f"const long long start = (block - T.FIRST[slot]) * {CHUNK}ll, rest = T.COUNT[slot] - start;",
            f"const int count = rest < {CHUNK} ? rest : {CHUNK}, fours = T.ALIGNED[slot] ? count / 4 : 0;",
            *(f"{elements[name]}* const {name} = T.{name}[slot] + start;" for name in four),
            *(_places(name, elements[name]) for name in reordered),
            "const float norm = *T.NORM[slot];",
            *(f"const float n{i} = T.N[{i}];" for i in range(form.numbers)),
            f"const auto change = [&]({', '.join(f'{kind}& {name}' for name, kind in elements.items())}) {{",
            f"const float p = P, g = {WIDENED[form.gradient]}(G);",
            *(f"const float s{i} = S{i};" for i in range(form.states)),
            form.rule,
            "" if form.copied is None else f"H = {ROUNDED[form.copied]}(P);",
            "};",
            f"for (int i = thread; i < fours; i += {THREADS}) {{",
            *(f"{kind} {name}4 = (({kind}*){name})[i];" for name, kind in four.items()),
            "for (int k = 0; k < 4; ++k)",
            f"change({', '.join(f'{name}4.at[k]' if name in four else f'at{name}(4 * i + k)' for name in elements)});",
            *(f"(({kind}*){name})[i] = {name}4;" for name, kind in four.items() if name != "G"),
            "}",
            f"for (int i = 4 * fours + thread; i < count; i += {THREADS})",
            f"change({', '.join(f'{name}[i]' if name in four else f'at{name}(i)' for name in elements)});",
            "}",
        ]
    )


def _places(name: str, kind: str) -> str:
    """A function for the element of an array that belongs to the i-th one of a block's parameter."""
    return (
        f"const auto at{name} = [&](unsigned i) -> {kind}& {{"
        "const unsigned at = start + i, row = at / T.INNER[slot];"
        f"return T.{name}[slot][row / T.MIDDLE[slot] * T.{name}O[slot] + row % T.MIDDLE[slot] * T.{name}M[slot]"
        f" + at % T.INNER[slot] * T.{name}I[slot]];"
        "};"
    )


@cache
def _compiled(form: Form, device: int) -> Any:
    """A kernel on a device; compiled once, in a fraction of a second."""
    with torch.cuda.device(device):
        return compile_cuda(kernel(form), NAME, OPTIONS)


_begun = set[tuple[Form, int]]()  # what has been assembled, or will be, by device


def prepare(update: Update, rules: Sequence[str]) -> None:
    """Assembles what `launch` will need for arrays like these, which need no memory, once and in another thread."""
    device = update.numbers.device
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    forms = [form for form in _forms(update, rules) if (form, index) not in _begun]
    _begun.update((form, index) for form in forms)

    def work() -> None:
        with suppress(RuntimeError, OSError):  # it only saves time: a launch says what is wrong
            for form in forms:
                assemble_cuda(kernel(form), NAME, OPTIONS, index)

    if forms:
        background.do("stepgraph kernels", work)


def _forms(update: Update, rules: Sequence[str]) -> dict[Form, list[int]]:
    """The kernels for some parameters, each with the parameters that it updates."""
    copied = update.copies[0].dtype if update.copies else None
    found: dict[Form, list[int]] = defaultdict(list)
    for index, (rule, gradient) in enumerate(zip(rules, update.gradients, strict=True)):
        reorders = not all(one.is_contiguous() for one in (gradient, *update.copies[index : index + 1]))
        found[Form(rule, len(update.states), len(update.numbers), gradient.dtype, copied, reorders)].append(index)
    return found


def tables(update: Update, form: Form, norms: Sequence[Array], indices: Sequence[int]) -> Iterator[tuple[Any, int]]:
    """The arguments of each launch, and its number of blocks.

    Args:
        update: the arrays.
        form: what the kernel was generated for.
        norms: those of the gradients, one per parameter.
        indices: the parameters that it updates.
    """
    for start in range(0, len(indices), form.slots):
        chosen = indices[start : start + form.slots]
        table = arguments(form)(N=update.numbers.data_ptr())
        if update.finite is not None:
            table.ALLOWED = update.finite.data_ptr()
        table.FIRST[:] = [NO_BLOCK] * form.slots
        blocks = 0
        for slot, index in enumerate(chosen):
            own = _own(update, index)
            for name, array in {**dict(zip(form.elements, own, strict=True)), "NORM": norms[index]}.items():
                getattr(table, name)[slot] = array.data_ptr()
            table.COUNT[slot], table.FIRST[slot] = own[0].numel(), blocks
            in_order = [one for name, one in zip(form.elements, own, strict=True) if name not in form.reordered]
            table.ALIGNED[slot] = all(one.data_ptr() % (4 * one.element_size()) == 0 for one in in_order)
            if form.reorders:
                _note_orders(table, slot, form, own)
            blocks += -(-own[0].numel() // CHUNK)
        if blocks:
            yield table, blocks


def _note_orders(table: Any, slot: int, form: Form, own: Sequence[Array]) -> None:
    """Notes the extents of a parameter, and the strides of the arrays that are in an order of their own."""
    _, table.MIDDLE[slot], table.INNER[slot] = _extents(own[0].shape)
    for name, array in zip(form.elements, own, strict=True):
        if name in form.reordered:
            for axis, stride in zip(AXES, _strides(array) or (), strict=True):
                getattr(table, f"{name}{axis}")[slot] = stride


def is_ordered(array: Array) -> bool:
    """Whether a kernel can follow the order of an array in memory."""
    return array.is_contiguous() or _strides(array) is not None


def _strides(array: Array) -> tuple[int, ...] | None:
    """The strides along the first, the second and all other dimensions, if these are dense and places are small."""
    shape, strides = array.shape, array.stride()
    inner = [(extent, stride) for extent, stride in zip(shape[2:], strides[2:], strict=True) if extent > 1]
    is_dense = all(one[1] == other[0] * other[1] for one, other in pairwise(inner))
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if not is_dense or max(last, array.numel()) > MOST_REORDERED:
        return None
    return (*strides[:2], *(1,) * (2 - len(strides)), inner[-1][1] if inner else 1)


def _extents(shape: Sequence[int]) -> tuple[int, int, int]:
    outer, middle, *inner = (*shape, *(1,) * (2 - len(shape)))
    return outer, middle, math.prod(inner)


def _own(update: Update, index: int) -> list[Array]:
    """The arrays of one parameter, in the order of `Form.elements`."""
    states = [slot[index] for slot in update.states]
    return [update.parameters[index], *states, update.gradients[index], *update.copies[index : index + 1]]


def launch(update: Update, rules: Sequence[str], norms: Sequence[Array]) -> None:
    """Updates parameters, buffers and copies in place, with few kernels.

    Args:
        update: contiguous arrays; gradients and copies may be in any order that `is_ordered`.
        rules: the code of each parameter's rule.
        norms: those of the gradients, one per parameter.
    """
    device = update.numbers.device
    with torch.cuda.device(device):
        for form, indices in _forms(update, rules).items():
            run = _compiled(form, device.index)
            for table, blocks in tables(update, form, norms, indices):
                launch_cuda(run, blocks, THREADS, table)
