"""Pictures of the papers' figures, in their axes, from the record of `benchmarks.paper`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.record import RECORDS

Row = Mapping[str, Any]
_COLOURS = ("#9aa5b1", "#c9d1d9", "#e0a458", "#30638e", "#d1495b")
_SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "fig6": ("FT", "FT, padded", "ORCA, chunked", "RRA", "WAA"),
    "fig7": ("FT", "FT, padded", "DSI", "ORCA", "chunked"),
    "fig8": ("FT", "FT, padded", "ORCA, chunked", "RRA", "WAA"),
    "fig10": ("FT", "better of ORCA, chunked", "RRA", "WAA"),
}
"""By figure the bars of a group."""


def read_part(part: str) -> Row:
    """A part of the record paper.json."""
    found: Row = json.loads((RECORDS / "paper.json").read_text(encoding="utf-8"))["parts"][part]
    return found


def bar_groups(part: str) -> dict[str, list[tuple[str, dict[str, float]]]]:
    """By scenario a group for each bound: its label, and requests/s by system, 0 where none keeps the bound."""
    groups: dict[str, list[tuple[str, dict[str, float]]]] = {}
    for row in read_part(part)["rows"]:
        values = {
            **row,
            "ORCA, chunked": _most(row, ("ORCA", "chunked")),
            "WAA": _most(row, ("WAA-C", "WAA-M")),
        }
        label = "none" if row["bound s"] == "inf" else f"{row['bound s']:.3g} s"
        bars = {system: values[system] or 0.0 for system in _SYSTEMS[part]}
        groups.setdefault(row["scenario"], []).append((label, bars))
    return groups


def _most(row: Row, columns: Sequence[str]) -> float:
    return max((row[column] for column in columns if row.get(column)), default=0.0)


def draw_bars(part: str, path: Path, *, columns: int) -> None:
    """A panel a scenario, a group of bars a bound."""
    from matplotlib import pyplot

    groups = bar_groups(part)
    lines = -(-len(groups) // columns)
    figure, panels = pyplot.subplots(lines, columns, figsize=(3.4 * columns, 2.4 * lines), layout="constrained")
    for axes, (scenario, found) in zip(panels.flat, groups.items(), strict=False):
        systems = list(found[0][1])
        width = 0.8 / len(systems)
        for number, system in enumerate(systems):
            at = [position + (number - (len(systems) - 1) / 2) * width for position in range(len(found))]
            heights = [bars[system] for _, bars in found]
            axes.bar(at, heights, width, label=system, color=_COLOURS[number])
            for x, height in zip(at, heights, strict=True):
                if not height:
                    axes.text(x, 0, "NS", rotation=90, ha="center", va="bottom", fontsize=6)
        axes.set_xticks(range(len(found)), [label for label, _ in found], fontsize=8)
        axes.set_title(scenario, fontsize=9)
        axes.tick_params(axis="y", labelsize=8)
    for axes in panels.flat[len(groups) :]:
        axes.set_axis_off()
    figure.supylabel("requests/s", fontsize=9)
    figure.supxlabel("latency bound", fontsize=9)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_drift(path: Path) -> None:
    """Figure 11: throughput of the planned schedule and of one planned anew, and p99 latency over the planned one's."""
    from matplotlib import pyplot

    rows = [row for row in read_part("drift")["rows"] if row["policy"] == "waa-c" and row["bound s"] != "inf"]
    base = next(row for row in rows if row["outputs"] == "mean x 1")
    middle = {"mean": "mean x 1", "std": "mean x 1", "skewness": "mean x 1"}
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3), layout="constrained")
    for axes, kind in zip(panels, middle, strict=True):
        own = [row for row in rows if row["outputs"].startswith(kind) and row is not base]
        half = len(own) // 2
        own = [*own[:half], base, *own[half:]]
        at = range(len(own))
        axes.bar([x - 0.2 for x in at], [row["as planned"] for row in own], 0.4, label="as planned", color=_COLOURS[3])
        anew = [row["anew"] or 0.0 for row in own]
        axes.bar([x + 0.2 for x in at], anew, 0.4, label="planned anew (none: no schedule keeps it)", color=_COLOURS[2])
        axes.set_xticks(at, [_change(row["outputs"], kind) for row in own], fontsize=8)
        axes.set(title=f"outputs of another {kind}", ylabel="requests/s")
        other = axes.twinx()
        other.plot(at, [row["p99 s"] / base["p99 s"] for row in own], "o-", color="#555555", label="p99 latency")
        other.set(ylim=(0, None), ylabel="p99 latency over the planned")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _change(outputs: str, kind: str) -> str:
    own = outputs.startswith(kind)
    return outputs.removeprefix(kind).strip() if own else ("0" if kind == "skewness" else "x 1")


def draw_orca(path: Path, part: str = "orca10") -> None:
    """ORCA's figure 10 for 175B, or 11 with 128 tokens in and 32 out: median seconds a token over throughput."""
    from matplotlib import pyplot

    curves = read_part(part)["curves"]
    figure, axes = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    for system in dict.fromkeys(point["system"] for point in curves):
        own = [point for point in curves if point["system"] == system]
        style = "o-" if system.startswith("ORCA") else "s--"
        axes.plot([p["requests/s"] for p in own], [1000 * p["seconds a token"] for p in own], style, label=system)
    axes.set(xscale="log", yscale="log", xlabel="throughput, requests/s", ylabel="median latency a token, ms")
    axes.set_title("GPT-3 175B on 16 A100-40GB, Poisson arrivals, predicted", fontsize=10)
    axes.set_ylim(20, 5000)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
