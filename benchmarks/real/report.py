"""What the numbers of a model mean: rates, shares, ratios to stepgraph, distances between losses; and their table."""

import statistics
from typing import Any

from rich.table import Table

from benchmarks.real.contenders import EAGER, OURS, OURSELVES
from benchmarks.real.models import Model

SHEETS = {  # dense operations a second in bfloat16, by PyTorch's name of the device
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}
GIB = 2**30
FAR = 0.02  # relative distance between losses that rounding does not explain


def quartiles(values: list[float]) -> list[float]:
    """The quartiles of some values, or of one."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def distance(losses: list[float], others: list[float]) -> float:
    """The largest relative distance between two curves.

    Example:
        >>> distance([2.0, 1.0], [2.0, 1.25])
        0.2
    """
    return max((abs(a - b) / abs(b) for a, b in zip(losses, others, strict=False)), default=0.0)


def summed_up(model: Model, rows: dict[str, dict[str, Any]], device: str, ours: str = OURS) -> dict[str, Any]:
    """What follows from the rows of a model: per contender, and the ratios to the best peer.

    Args:
        model: what was trained.
        rows: what each contender said, with its times and ours of the same rounds.
        device: PyTorch's name of it.
        ours: the contender that peers are compared with.
    """
    flops, sheet = model.flops, SHEETS.get(device)
    reference = rows.get(EAGER, {}).get("losses") or rows.get(ours, {}).get("losses", [])
    found = dict[str, dict[str, Any]]()
    for name, row in rows.items():
        if "rounds" not in row:
            found[name] = {"failed": row.get("failed", "not measured")}
            continue
        low, middle, high = quartiles(row["rounds"])
        found[name] = {
            "step_ms": [round(1e3 * one, 3) for one in (low, middle, high)],
            "per_second": round(model.units / middle, 1),
            "share_of_sheet": flops / middle / sheet if sheet else None,
            "loss_distance": distance(row["losses"], reference),
        }
        if row.get("ours"):
            ratios = [a / b for a, b in zip(row["rounds"], row["ours"], strict=True)]
            found[name]["ratio"] = [round(one, 3) for one in quartiles(ratios)]
    return {"ours": ours, "contenders": found, **_best(rows, found, ours)}


def _best(rows: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]], ours: str) -> dict[str, Any]:
    """The fastest peer and the one with the least memory, with what we take for each of theirs."""
    peers = [name for name in found if name not in OURSELVES and "ratio" in found[name]]
    if ours not in found or not peers:
        return {}
    fastest = min(peers, key=lambda name: found[name]["ratio"][1])
    best: dict[str, Any] = {"fastest_peer": fastest, "ratio_to_fastest": found[fastest]["ratio"]}
    sizes = {name: rows[name]["peak"]["allocated"] for name in (ours, *peers) if rows[name].get("peak")}
    if len(sizes) > 1 and ours in sizes:
        smallest = min((name for name in sizes if name != ours), key=lambda name: sizes[name])
        best |= {"smallest_peer": smallest, "memory_to_smallest": round(sizes[ours] / sizes[smallest], 3)}
    return best


def table(name: str, model: Model, rows: dict[str, dict[str, Any]], result: dict[str, Any]) -> Table:
    """One row per contender."""
    title = f"{name}: batch {model.batch_size}, {model.parameter_count:,} parameters, {model.flops / 1e12:.4g} TFLOP"
    drawn = Table(title=title, caption=_headline(result), show_edge=False, pad_edge=False)
    drawn.title_justify = drawn.caption_justify = "left"
    drawn.add_column("")
    memory = ("GiB", "reserved", "kept", "until ready", "plan, data")
    for column in ("step, ms", "ratio", f"{model.unit}/s", "of sheet", *memory, "first step", "ready", "loss distance"):
        drawn.add_column(column, justify="right")
    for contender, row in rows.items():
        one = result["contenders"][contender]
        if "failed" not in one:
            drawn.add_row(contender, *_speed(one), *_memory(row), *_times(row), f"{one['loss_distance']:.1e}")
    return drawn


def _headline(result: dict[str, Any]) -> str | None:
    """The ratios to the best peers, and who could not be measured."""
    notes = [f"{name}: {one['failed']}" for name, one in result["contenders"].items() if "failed" in one]
    for name, one in result["contenders"].items():
        if one.get("loss_distance", 0.0) > FAR:
            notes.append(f"{name} does not train the same: its losses are up to {one['loss_distance']:.0%} away")
    if "fastest_peer" in result:
        low, middle, high = result["ratio_to_fastest"]
        notes.append(f"step, to the fastest peer, {result['fastest_peer']}: {middle:.3f} ({low:.3f} to {high:.3f})")
    if "smallest_peer" in result:
        notes.append(f"memory, to the smallest peer, {result['smallest_peer']}: {result['memory_to_smallest']:.2f}")
    return "\n".join(notes) or None


def _speed(one: dict[str, Any]) -> list[str]:
    low, middle, high = one["step_ms"]
    ratio, share = one.get("ratio"), one["share_of_sheet"]
    return [
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        f"{ratio[1]:.3f}" if ratio else "",
        f"{one['per_second']:,.0f}",
        f"{share:.1%}" if share is not None else "",
    ]


def _memory(row: dict[str, Any]) -> list[str]:
    peak, before = row.get("peak") or {}, row.get("peak_until_ready") or {}
    plan = row["plan"] + row.get("data", 0) if "plan" in row else None
    sizes = *map(peak.get, ("allocated", "reserved")), row.get("kept"), before.get("allocated"), plan
    return [f"{size / GIB:.2f}" if size is not None else "" for size in sizes]


def _times(row: dict[str, Any]) -> list[str]:
    """Seconds to the first step and to the final form, the latter with `>` if it was given up, and both warm."""
    found = []
    for name in ("first_step", "ready"):
        one, again = (_seconds(own, name) for own in (row, row.get("warm", {})))
        found.append(f"{one}, warm {again}" if again else one)
    return found


def _seconds(row: dict[str, Any], name: str) -> str:
    unfinished = name == "ready" and not row.get("settled", True)
    return f"{'> ' * unfinished}{row[name]:.1f} s" if name in row else ""
