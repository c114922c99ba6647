"""The documentation page *Coming from ML Compute*, generated from the tables."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.mlc.coverage import symbols
from stepgraph.mlc.names import CLASSES
from stepgraph.mlc.refusals import KINDS
from stepgraph.mlc.table import Class, Row
from stepgraph.mlc.tables.enumerations import ENUMERATIONS, Enumeration

_HEAD = """# Coming from ML Compute

`import stepgraph.mlc as MLCompute` runs a PyObjC program for ML Compute on Linux, CUDA or a Mac. All
{count} public symbols are available, spelled as in PyObjC. This page lists them; it is generated from the tables
that define the module (`python -m stepgraph.mlc --page`). [Porting from Swift](porting-from-swift.md) shows whole
programs.

## Conventions

- Selectors have `_` for `:`. Properties are methods without arguments (`tensor.descriptor().shape()`), setters are
  `setX_`; `tensor.label = "x"` works too. Every class has `alloc().init()` and `new()`.
- Constants are module names with Apple's raw values. Numbers read back in single precision. `NSData` is a
  bytes-like array with `bytes()` and `length()`; dictionaries and lists are Python's own.
- A completion handler is a function `(resultTensor, error, executionTime)`. On the CPU it has run when the call
  returns. Exceptions it raises are logged, and the call still counts as accepted. Its tensor belongs to the call and
  keeps its values; it has the `tensorID` of the graph's tensor, which shows the values of the last call.
- **Nothing is raised.** A rejected call returns nil (`None`), NO (`False`) or an empty list, changes nothing, and is
  logged once per reason (logger `stepgraph.mlc`). `MLCompute.lastError()` (ours) says why this thread's last call
  was rejected, and is `None` after a call that was accepted: `localizedDescription()` uses the names on this page,
  `code()` is one of [the codes below](#error-codes), `domain()` is `"stepgraph"`, and `native` is the stepgraph
  exception. A wrong number of arguments is rejected in the same way.
- The column *stepgraph* shows the native call: each argument under stepgraph's name, its value under
  the original's. A leading dot marks a member of the object. The names are those of `import stepgraph as sg`.
- `face.native` is the stepgraph object; the same object has the same face. stepgraph's own objects can be passed
  wherever a face is expected, so a program can mix both styles.
- A training step of a small convolutional network takes 1 to 4% longer through the face than with native calls
  (`python -m benchmarks.face`, one CPU core).

## Deliberate differences from the original

| subject | here |
|---|---|
| shapes the original did not check (reshape, split lengths, weights, concatenation) | checked: nil or NO |
| convolution and normalization with mismatched tensors | nil, not an empty layer |
| short data | rejected; longer data is allowed, the first bytes are used |
| gradient pass without a forward pass, update without gradients | NO (the original accepted both and did nothing) |
| results after a whole `execute` | the loss, its sources, the last result and declared outputs; others have no data |
| Glorot and Xavier initializers | textbook ranges; unseeded runs differ |
| comparison results | booleans |
| quantization | works; the newest original returns zeros |
| copies of matrix product and YOLO descriptors | complete; the original lost settings |
| embedding | on any device, anywhere in a graph |
| `bindAndWriteData:toDevice:` on a tensor without data | accepted; the newest original returns NO |
| reduction of a loss by anything but None, Sum, Mean | rejected when the descriptor is created |
| `NSRangeException` and similar exceptions | nil or NO |
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD.format(count=len(symbols())), *(_class(one) for one in CLASSES), "## Enumerations\n"]
    parts += [_enumeration(one) for one in ENUMERATIONS]
    return "\n".join([*parts, _functions(), _codes()])


def _codes() -> str:
    lines = [("code", "stepgraph's class", "meaning"), ("---",) * 3]
    lines += [
        (str(code), f"`{kind.__name__}`", f"{kind.__doc__}".splitlines()[0]) for code, kind in enumerate(KINDS, start=1)
    ]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"## Error codes\n\nThe values of an error's `code()`; 0 is an error of another library.\n\n{text}"


def _table(rows: Iterator[tuple[str, str, str, str, str]]) -> str:
    head = ("Swift", "Objective-C", "PyObjC", "stepgraph", "notes")
    lines = [head, ("---",) * 5, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(name: str) -> str:
    return name if name in ("", "–") else f"`{name}`"


def _class(table: Class) -> str:
    title = f"## {table.name}\n\n"
    kind = f"A `{table.base}`. " if table.base != "NSObject" else ""
    native = f"{kind}stepgraph's `{table.native_name}`." if table.native else f"{kind}Functions of stepgraph."
    note = f" {table.note[0].upper()}{table.note[1:]}." if table.note else ""
    setters = {row.selector for row in table.rows if row.kind.endswith("setter")}
    rows = (_row(table, row, setters) for row in table.rows if row.selector not in setters)
    return f"{title}{native}{note}\n\n{_table(rows)}" if table.rows else f"{title}{native}{note}\n"


def _row(table: Class, row: Row, setters: set[str]) -> tuple[str, str, str, str, str]:
    setter = f"set{row.selector[:1].upper()}{row.selector[1:]}:"
    spelling = f"`{row.spelling}()`" if row.kind in ("property", "class property") else f"`{row.spelling}`"
    if setter in setters:
        spelling += f", `{setter.replace(':', '_')}`"
    native = row.native.replace("<class>", table.native_name)
    return _code(row.swift), f"`{row.selector}`", spelling, _code(native), row.note


def _enumeration(one: Enumeration) -> str:
    values = one.values()
    rows = (
        (
            _code(one.swift(suffix)),
            f"`{one.name}{suffix}`",
            f"`{one.name}{suffix}`",
            "–" if member.isdigit() else f"`{one.native.__name__}.{member}`",
            f"raw value {values[one.name + suffix]}",
        )
        for suffix, member in one.pairs
    )
    return f"### {one.name}\n\nstepgraph's `{one.native.__name__}`.\n\n{_table(rows)}"


def _functions() -> str:
    rows = (
        (
            f"`{one.name}.debugDescription`",
            f"`{one.name}DebugDescription`",
            f"`{one.name}DebugDescription`",
            f"`{one.native.__name__}(value).debug_description`",
            "a value out of range gives the first constant's",
        )
        for one in ENUMERATIONS
        if one.is_described
    )
    handler = "`MLCGraphCompletionHandler` is the type of completion handlers: stepgraph's `completion=` arguments.\n"
    return f"## Functions and blocks\n\n{_table(rows)}\n{handler}"
