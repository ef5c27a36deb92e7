"""Timelines: the passes of a run, for Perfetto (Chrome trace JSON) or as a picture.

The rows are made by `phases`, which is tested; writing and drawing add nothing to them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exeplan.errors import InputError
from exeplan.figures import SUFFIXES, check_picture, new_figure, save_figure
from exeplan.files import write_text
from exeplan.simulator.run import PassRecord, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"decode": "#30638e", "mixed": "#edae49", "prefill": "#d1495b"}
"""Drawn in this order: where stages are separate, prefills of few requests stay visible before decodes of many."""
_PICTURE_PASSES = 400
"""Passes drawn in a picture; more would be thinner than a pixel."""
_EDGED = 0.005
"""Bars wider than this share of the picture have an edge."""
_LABELS = 16
"""Stages named at most in a picture."""


def check_timeline(path: Path) -> None:
    """Raises InputError for a name that is neither JSON nor a picture, MissingPackage where no picture can be drawn."""
    if path.suffix != ".json" and path.suffix not in SUFFIXES:
        raise InputError(f"a timeline is a .json, .png, .svg or .pdf file, not '{path.name}'")
    if path.suffix in SUFFIXES:
        check_picture(path)


def write_timeline(run: Run, path: Path, *, title: str) -> None:
    """Writes Chrome/Perfetto JSON, or a picture when the suffix is .png, .svg or .pdf."""
    check_timeline(path)
    if path.suffix == ".json":
        write_text(path, json.dumps({"traceEvents": trace_events(run), "displayTimeUnit": "ms"}))
    else:
        _draw(run, path, title)


def phase(record: PassRecord) -> str:
    """`prefill`, `decode` or `mixed`, by the rows that the pass held."""
    if record.num_prefill and record.num_decode:
        return "mixed"
    return "prefill" if record.num_prefill else "decode"


def trace_events(run: Run) -> list[dict[str, Any]]:
    """One track per stage with its part of each pass; requests as asynchronous spans, rows as a counter; in us."""
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "replay"}}]
    events += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}}
        for stage in _stages(run.passes)
    ]
    for number, record in enumerate(run.passes):
        rows = {"prefill": record.num_prefill, "decode": record.num_decode}
        args = {"pass": number, **rows, "new_tokens": record.num_new_tokens}
        common = {"name": phase(record), "ph": "X", "pid": 0, "args": args}
        events += [
            {**common, "tid": stage, "ts": start * 1e6, "dur": (end - start) * 1e6}
            for stage, start, end in record.spans
        ]
        events.append({"name": "rows", "ph": "C", "pid": 0, "ts": record.start * 1e6, "args": rows})
    requests = run.requests
    ends = np.where(requests.answered, requests.last_tokens, requests.starts)
    sizes = zip(requests.input_tokens.tolist(), requests.output_tokens.tolist(), strict=True)
    for index, ((given, answered), start, end) in enumerate(
        zip(sizes, requests.starts.tolist(), ends.tolist(), strict=True)
    ):
        common = {"cat": "request", "id": index, "pid": 0, "name": f"request {index}"}
        args = {"input_tokens": given, "output_tokens": answered}
        events.append({**common, "ph": "b", "ts": start * 1e6, "args": args})
        events.append({**common, "ph": "e", "ts": end * 1e6})
    return events


def _stages(passes: Sequence[PassRecord]) -> list[int]:
    return sorted({stage for record in passes for stage, _, _ in record.spans})


def _draw(run: Run, path: Path, title: str) -> None:
    """Two pictures over one axis of seconds: the stages, and the requests in each pass."""
    lanes = 0.8 + min(0.3 * len(_stages(_shown(run))), 6.0)
    figure = new_figure(11, lanes + 3)
    bars, rows = figure.subplots(2, 1, sharex=True, height_ratios=(lanes, 2.2))
    draw_stages(run, bars)
    _draw_requests(run, rows)
    bars.set_title(title, fontsize="medium", loc="left")
    bars.set_xlabel("")
    save_figure(figure, path)


def draw_stages(run: Run, axes: "Axes") -> None:
    """A lane for each stage with its part of the passes in the middle of the run, prefill and decode apart."""
    (begin, end), passes = _middle(run.passes), _shown(run)
    stages = _stages(passes)
    for name, colour in _COLOURS.items():
        own = [record for record in passes if phase(record) == name]
        for lane, stage in enumerate(stages):
            spans = [(a, b - a) for record in own for number, a, b in record.spans if number == stage]
            # An edge would hide a bar that is about as narrow as itself.
            edges = [0.4 if width > _EDGED * (end - begin) else 0.0 for _, width in spans]
            axes.broken_barh(
                spans, (lane - 0.45, 0.9), facecolor=colour, edgecolor="white", linewidth=edges, antialiased=False
            )
        if own:
            axes.plot([], [], color=colour, linewidth=6, label=name)
    every = -(-len(stages) // _LABELS)
    axes.set(yticks=range(0, len(stages), every), yticklabels=[f"stage {stage}" for stage in stages[::every]])
    axes.set(xlabel="seconds", xlim=(begin, end))
    axes.invert_yaxis()
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize="small", frameon=False, borderpad=0)


def _draw_requests(run: Run, axes: "Axes") -> None:
    """What each pass holds, prefills below decodes; a pass is as wide as the time that it keeps its first stage."""
    passes = _shown(run)
    starts, widths = zip(
        *((begin, end - begin) for _, begin, end in (record.spans[0] for record in passes)), strict=True
    )
    num_prefill, num_decode = [record.num_prefill for record in passes], [record.num_decode for record in passes]
    for name, heights, below in (("prefill", num_prefill, 0), ("decode", num_decode, num_prefill)):
        colour = _COLOURS[name]
        axes.bar(starts, heights, widths, below, align="edge", color=colour, antialiased=False, label=name)
    axes.set(xlabel="seconds", ylabel="requests in the pass", xlim=_middle(run.passes))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize="small", frameon=False, borderpad=0)


def _shown(run: Run) -> list[PassRecord]:
    begin, end = _middle(run.passes)
    shown = np.flatnonzero((run.passes.starts < end) & (run.passes.ends > begin))
    return [run.passes[number] for number in shown.tolist()]


def _middle(passes: Sequence[PassRecord]) -> tuple[float, float]:
    """Seconds from the start of the first to the end of the last of the `_PICTURE_PASSES` passes in the middle."""
    first = max(0, (len(passes) - _PICTURE_PASSES) // 2)
    shown = passes[first : first + _PICTURE_PASSES]
    return shown[0].start, max(record.end for record in shown)
