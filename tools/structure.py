"""Measure the structure of the package, and fail when a number differs from its limit.

    python tools/structure.py [PACKAGE]

Files are only parsed, never imported. Without PACKAGE, the script measures `src/stepgraph` beside its folder.
"""

import argparse
import ast
import json
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Limit:
    """One measure: the number allowed now, the number to reach, and what to do when it is exceeded."""

    measure: str
    now: int
    target: int
    advice: str


CIRCLES = "import circles"
IN_CIRCLES = "modules in import circles"
REACHES = "private reaches into own objects"
PRIVATE = "files with private PyTorch names"
ENTRIES = "entries in the root folder"
DEPTH = "classes below Graph, longest chain"
META = "files that touch node.meta"

# A ratchet: `now` may only go down, to the target. Lower it in the commit that lowers the number.
# Never raise it: change the code instead. Merging two circles lowers their number, so their modules are counted, too.
LIMITS = (
    #     measure      now target
    Limit(CIRCLES,      0,  0, "move what both modules need into a module below them"),
    Limit(IN_CIRCLES,   0,  0, "move what both modules need into a module below them"),
    Limit(REACHES,      0,  0, "give the owner a public method, or move the code to the owner"),
    Limit(PRIVATE,      1,  1, "use a public name, or the file that already holds the private ones"),
    Limit(ENTRIES,     22, 22, "put the new file into the folder it belongs to"),
    Limit(DEPTH,        2,  2, "use functions or a member object instead of another base class"),
    Limit(META,         1,  1, "read and write the notes of an operator through the file that owns them"),
)  # fmt: skip

HERE = "tools/structure.py"
LARGEST = 5  # how many of the largest files and of the longest functions are printed
NO_ENTRIES = {"__pycache__", "py.typed"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WHERE = {"module": "", "annotation": ", for annotations", "function": ", in a function"}


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Source:
    """One file of the package, parsed."""

    module: str
    path: Path
    label: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Everything in the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def names(self) -> dict[str, str]:
        """Full dotted names of what imports and the file's own aliases bind: `aten` is `torch.ops.aten`."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {one.asname: one.name for one in node.names if one.asname}
                found |= {_root(one.name): _root(one.name) for one in node.names if not one.asname}
            elif isinstance(node, ast.ImportFrom):
                found |= {one.asname or one.name: f"{self.base(node)}.{one.name}" for one in node.names}
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and (full := _full(node.value, found)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {one.id: full for one in targets if isinstance(one, ast.Name)}
        return found

    def base(self, node: ast.ImportFrom) -> str:
        """The module that `from … import` names, relative ones resolved."""
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        up = node.level - (self.path.name == "__init__.py")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def sources(package: Path) -> dict[str, Source]:
    """All files of a package by their module names."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        module = ".".join([package.name, *inside.with_suffix("").parts]).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found[module] = Source(module, path, inside.as_posix(), text, ast.parse(text, path))
    return found


def _root(name: str) -> str:
    return name.partition(".")[0]


def _chain(node: ast.AST) -> str:
    """`a.b.c` as text; empty where something else than names and attributes takes part."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if inner := _chain(value):
            return f"{inner}.{name}"
    return ""


def _full(node: ast.AST, names: Mapping[str, str]) -> str:
    """The full dotted name behind `a.b.c`; empty where `a` is neither imported nor an alias."""
    head, dot, rest = _chain(node).partition(".")
    return names[head] + dot + rest if head in names else ""


# ------------------------------------------------------------------------------------------------------- circles


@dataclass(frozen=True)
class Edge:
    """One module imports another; `kind` is a key of `WHERE`."""

    importer: str
    imported: str
    kind: str
    place: str


def edges(files: Mapping[str, Source]) -> dict[str, dict[str, Edge]]:
    """Who imports whom, wherever the import stands: in the module, for annotations, in a function, as a string."""
    found: dict[str, dict[str, Edge]] = {name: {} for name in files}
    for name, source in files.items():
        for node, kind in _with_kinds(source.tree, "module"):
            for target in _imported(node, source, files):
                if target != name:
                    edge = Edge(name, target, kind, f"{source.label}:{getattr(node, 'lineno', 0)}")
                    found[name].setdefault(target, edge)
    return found


def _with_kinds(node: ast.AST, kind: str) -> Iterator[tuple[ast.AST, str]]:
    """A node and all nodes below it, each with the kind that an import has there."""
    yield node, kind
    below = "function" if isinstance(node, FUNCTIONS) else kind
    guarded = node.body if isinstance(node, ast.If) and _chain(node.test).endswith("TYPE_CHECKING") else []
    for one in ast.iter_child_nodes(node):
        yield from _with_kinds(one, "annotation" if one in guarded else below)


def _imported(node: ast.AST, source: Source, files: Mapping[str, Source]) -> list[str]:
    """The modules of the package that one statement imports: of `a.b.c` the longest part that is a module."""
    match node:
        case ast.Import(names=names):
            asked = [one.name for one in names]
        case ast.ImportFrom(names=names):
            asked = [f"{source.base(node)}.{one.name}" for one in names]
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _is_import(function):
            asked = [name]
        case _:
            return []
    return [found for one in asked if (found := _module(one, files))]


def _is_import(function: ast.AST) -> bool:
    return _chain(function).rpartition(".")[2] in {"import_module", "__import__"}


def _module(name: str, files: Mapping[str, Source]) -> str:
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


def circles(imports: Mapping[str, Mapping[str, Edge]]) -> list[set[str]]:
    """Groups of modules each of which reaches all others of its group by imports, the largest first."""
    reached = {name: _reached(name, imports) for name in imports}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return sorted((set(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), min(group)))


def _reached(start: str, imports: Mapping[str, Mapping[str, Edge]]) -> set[str]:
    found, waiting = set[str](), [start]
    while waiting:
        new = imports[waiting.pop()].keys() - found
        found |= new
        waiting += new
    return found


def cycle(group: set[str], imports: Mapping[str, Mapping[str, Edge]]) -> list[Edge]:
    """The shortest cycle of imports in a circle."""
    return min((_cycle_through(start, group, imports) for start in sorted(group)), key=len)


def _cycle_through(start: str, group: set[str], imports: Mapping[str, Mapping[str, Edge]]) -> list[Edge]:
    """The shortest cycle through one module of a circle, found breadth first."""
    paths: dict[str, list[Edge]] = {}
    waiting: list[tuple[str, list[Edge]]] = [(start, [])]
    for name, path in waiting:
        for edge in imports[name].values():
            if edge.imported in group and edge.imported not in paths:
                paths[edge.imported] = [*path, edge]
                waiting.append((edge.imported, paths[edge.imported]))
    return paths[start]


# ----------------------------------------------------------------------------------------------- private reaches


def reaches(package: Path, files: Mapping[str, Source]) -> dict[str, Counter[str]]:
    """Per file, how often it reaches for a private member of an `own`, a `PyTorch` or an `other` object.

    An access that starts at an import from elsewhere belongs to what was imported. Any other is our own where a class
    of the package has a member of that name, or where it goes to a module of the package.
    """
    members = {name for source in files.values() for name in _members(source)}
    by_path = {source.path.resolve(): source for source in files.values()}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for finding in _ruff(package):
        source = by_path[Path(finding["filename"]).resolve()]
        access = ast.parse(f"({_text(source, finding)})", mode="eval").body
        found[source.label][_owner(access, source, members, files)] += 1
    return dict(found)


def _ruff(package: Path) -> list[dict[str, Any]]:
    """What ruff's SLF001 finds, whatever a configuration or a comment allows."""
    options = ["--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--quiet", "--output-format", "json"]
    command = [sys.executable, "-m", "ruff", "check", *options, "--select", "SLF001", str(package)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return [one for one in json.loads(done.stdout) if one["code"] == "SLF001"]


def _text(source: Source, finding: dict[str, Any]) -> str:
    """The source text that a finding points at."""
    start, end = finding["location"], finding["end_location"]
    lines = source.text.split("\n")[start["row"] - 1 : end["row"]]
    lines[-1] = lines[-1][: end["column"] - 1]
    lines[0] = lines[0][start["column"] - 1 :]
    return "\n".join(lines)


def _owner(access: ast.AST, source: Source, members: set[str], files: Mapping[str, Source]) -> str:
    full = _full(access, source.names)
    if full and _root(full) != _root(source.module):
        return "PyTorch" if _root(full) == "torch" else "other"
    is_member = isinstance(access, ast.Attribute) and access.attr in members
    return "own" if is_member or full.rpartition(".")[0] in files else "other"


def _members(source: Source) -> Iterator[str]:
    """Names of the members of a file's classes: methods, fields, attributes of `self`, names in `__slots__`."""
    for node in source.nodes:
        match node:
            case ast.ClassDef(body=body):
                yield from (one.name for one in body if isinstance(one, FUNCTIONS))
                fields = [one for one in body if isinstance(one, ast.Assign | ast.AnnAssign)]
                for one in (inner for field in fields for inner in ast.walk(field)):
                    match one:
                        case ast.Name(id=name, ctx=ast.Store()) | ast.Constant(value=str(name)):
                            yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


# --------------------------------------------------------------------------------------- private names of PyTorch


def private_names(source: Source) -> tuple[set[str], set[str]]:
    """Private names of PyTorch in a file: imported, reached by attributes from `torch`, or written as a string.

    Operators (`torch.ops.aten._softmax`) come second, apart: some of them belong to PyTorch's published operator set.
    """
    found = {name for name in _dotted_names(source) if _is_private(name)}
    operators = {name for name in found if name.startswith("torch.ops.")}
    return found - operators, operators


def _dotted_names(source: Source) -> Iterator[str]:
    inner = {id(node.value) for node in source.nodes if isinstance(node, ast.Attribute)}
    for node in source.nodes:
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(names=names):
                yield from (f"{source.base(node)}.{one.name}" for one in names)
            case ast.Constant(value=str(name)):
                yield name
            case ast.Attribute() if id(node) not in inner:
                # What an import or an alias has made private is counted there, not again where it is used.
                if not _is_private(source.names.get(_root(_chain(node)), "")):
                    yield _full(node, source.names)


def _is_private(name: str) -> bool:
    """Whether a dotted name starts at `torch` and has a part that begins with a single underscore."""
    first, *rest = name.split(".")
    is_name = first == "torch" and all(part.isidentifier() for part in rest)
    return is_name and any(part.startswith("_") and not part.startswith("__") for part in rest)


# ------------------------------------------------------------------------------------------------- other measures


def entries(package: Path) -> list[str]:
    """Files and folders in the root folder of the package, without hidden ones and folders that hold only caches."""
    found = (one for one in package.iterdir() if one.name not in NO_ENTRIES and not one.name.startswith("."))
    return sorted(one.name for one in found if _holds_something(one))


def _holds_something(path: Path) -> bool:
    return path.is_file() or any(one.is_file() and "__pycache__" not in one.parts for one in path.rglob("*"))


def longest_chain(files: Mapping[str, Source], root: str = "Graph") -> list[str]:
    """The longest chain of subclasses of the class `root`, which comes first."""
    below: dict[str, list[str]] = defaultdict(list)
    starts = []
    for source in files.values():
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                own = f"{source.module}.{node.name}"
                starts += [own] if node.name == root else []
                for base in node.bases:
                    below[_class(base, source, files)].append(own)
    chains = [_deepest(one, below) for one in starts]
    return [name.rpartition(".")[2] for name in max(chains, key=len, default=[])]


def _class(base: ast.expr, source: Source, files: Mapping[str, Source]) -> str:
    """The full name of a base class, followed through modules that only pass it on."""
    plain = base.value if isinstance(base, ast.Subscript) else base
    name = _full(plain, source.names) or f"{source.module}.{_chain(plain)}"
    seen = set[str]()
    while name not in seen:
        seen.add(name)
        module, _, last = name.rpartition(".")
        name = files[module].names.get(last, name) if module in files else name
    return name


def _deepest(name: str, below: Mapping[str, Sequence[str]]) -> list[str]:
    return [name, *max((_deepest(one, below) for one in below.get(name, ())), key=len, default=[])]


def touches_meta(source: Source) -> bool:
    """Whether a file reads or writes an attribute `meta`. Methods of that name, which are called, do not count."""
    called = {id(node.func) for node in source.nodes if isinstance(node, ast.Call)}
    attributes = (node for node in source.nodes if isinstance(node, ast.Attribute))
    return any(node.attr == "meta" and id(node) not in called for node in attributes)


def functions(source: Source) -> Iterator[tuple[int, str]]:
    """Lines and place of each function."""
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{source.label}:{node.lineno} {node.name}"


# ------------------------------------------------------------------------------------------------------- printing


def measure(package: Path) -> tuple[dict[str, int], list[str]]:
    """The numbers of a package by measure, and the lines that explain them."""
    files = sources(package)
    imports = edges(files)
    groups = circles(imports)
    found = reaches(package, files)
    private = {source.label: private_names(source) for source in files.values()}
    names = {label: plain for label, (plain, _) in private.items() if plain}
    operators = {label: special for label, (_, special) in private.items() if special}
    chain = longest_chain(files)
    meta = [source.label for source in files.values() if touches_meta(source)]
    numbers = {
        CIRCLES: len(groups),
        IN_CIRCLES: sum(map(len, groups)),
        REACHES: sum(count["own"] for count in found.values()),
        PRIVATE: len(names),
        ENTRIES: len(entries(package)),
        DEPTH: max(len(chain) - 1, 0),
        META: len(meta),
    }
    details = [
        *_section(CIRCLES, (line for group in groups for line in _circle(group, imports))),
        *_section("private reaches, by file", _reach_table(found)),
        *_section(PRIVATE, _listed(names)),
        *_section("files with private operators of PyTorch (no limit)", _listed(operators)),
        *_section(ENTRIES, _wrapped(entries(package))),
        *_section(DEPTH, [" → ".join(chain)] if chain else []),
        *_section(META, _wrapped(meta)),
        *_section("largest files, lines (no limit)", _top((len(s.text.splitlines()), s.label) for s in files.values())),
        *_section("longest functions, lines (no limit)", _top(one for s in files.values() for one in functions(s))),
    ]
    return numbers, details


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in list(lines) or ["none"])]


def _circle(group: set[str], imports: Mapping[str, Mapping[str, Edge]]) -> Iterator[str]:
    yield f"{len(group)} modules:"
    yield from (f"  {line}" for line in _wrapped(sorted(group)))
    yield "shortest cycle:"
    for edge in cycle(group, imports):
        yield f"  {edge.importer} → {edge.imported}  ({edge.place}{WHERE[edge.kind]})"


def _reach_table(found: Mapping[str, Counter[str]]) -> Iterator[str]:
    width = max(map(len, found), default=0)
    total = sum(found.values(), Counter[str]())
    yield f"{'':{width}}  own  PyTorch  other"
    for label, count in [*found.items(), ("total", total)]:
        yield f"{label:{width}}  {count['own']:3}  {count['PyTorch']:7}  {count['other']:5}"


def _listed(names: Mapping[str, set[str]]) -> Iterator[str]:
    """Names below the files they are in."""
    for label, found in names.items():
        yield label
        yield from (f"  {line}" for line in _wrapped(sorted(found)))


def _top(counted: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{lines:4}  {label}" for lines, label in sorted(counted, key=lambda one: (-one[0], one[1]))[:LARGEST]]


def _wrapped(words: Iterable[str]) -> list[str]:
    return textwrap.wrap("  ".join(words), width=110, break_long_words=False, break_on_hyphens=False)


def table(numbers: Mapping[str, int], limits: Sequence[Limit]) -> list[str]:
    """The numbers beside their limits and targets."""
    width = max(len(limit.measure) for limit in limits)
    rows = (f"{one.measure:{width}}  {numbers[one.measure]:6}  {one.now:5}  {one.target:6}" for one in limits)
    return [f"{'':{width}}  number  limit  target", *rows]


def verdicts(numbers: Mapping[str, int], limits: Sequence[Limit]) -> list[str]:
    """What is wrong with the numbers, a message for each that differs from its limit."""
    found = []
    for limit in limits:
        number = numbers[limit.measure]
        if number > limit.now:
            found.append(f"structure: {limit.measure}: {number}, the limit is {limit.now}.\nFix: {limit.advice}.")
        elif number < limit.now and limit.now > limit.target:
            better = f"structure: {limit.measure}: {number}, which is better than the limit of {limit.now}."
            found.append(f"{better}\nFix: lower the limit to {number} in {HERE}, so that the number cannot rise again.")
    return found


def main(arguments: Sequence[str] | None = None, limits: Sequence[Limit] = LIMITS) -> int:
    """Prints all measures of a package; 1 when a number differs from its limit."""
    parser = argparse.ArgumentParser(description="Measure the structure of a package against its limits.")
    default = Path(__file__).resolve().parent.parent / "src" / "stepgraph"
    parser.add_argument("package", nargs="?", type=Path, default=default, help="its folder (default: src/stepgraph)")
    package = parser.parse_args(arguments).package.resolve()
    if not (package / "__init__.py").is_file():
        parser.error(f"{package} is not a package: it has no __init__.py")
    numbers, details = measure(package)
    wrong = verdicts(numbers, limits)
    print(*table(numbers, limits), *details, sep="\n")
    print("", *wrong or ["All numbers are at their limits."], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
