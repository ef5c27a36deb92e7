"""Timelines: the passes of a run, for Perfetto (Chrome trace JSON) or as a picture.

The rows are made by `phases`, which is tested; writing and drawing add nothing to them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.files import write_text
from exeplan.simulator.replay import PassRecord, Run

PICTURES = (".png", ".svg", ".pdf")
_COLOURS = {"prefill": "#d1495b", "decode": "#30638e", "mixed": "#edae49"}
_PICTURE_PASSES = 400
"""Passes drawn in a picture; more would be thinner than a pixel."""


def write_timeline(run: Run, path: Path, *, title: str) -> None:
    """Writes Chrome/Perfetto JSON, or a picture when the suffix is .png, .svg or .pdf."""
    if path.suffix == ".json":
        write_text(path, json.dumps({"traceEvents": trace_events(run), "displayTimeUnit": "ms"}))
    elif path.suffix in PICTURES:
        _draw(run, path, title)
    else:
        raise InputError(f"a timeline is a .json, .png, .svg or .pdf file, not '{path.name}'")


def phase(record: PassRecord) -> str:
    """`prefill`, `decode` or `mixed`, by the rows that the pass held."""
    if record.num_prefill and record.num_decode:
        return "mixed"
    return "prefill" if record.num_prefill else "decode"


def trace_events(run: Run) -> list[dict[str, Any]]:
    """Passes as complete events on one track, requests as asynchronous spans, rows as a counter; microseconds."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "device 0"}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "stage 0"}},
    ]
    for record in run.passes:
        rows = {"prefill": record.num_prefill, "decode": record.num_decode}
        start, duration = record.start * 1e6, (record.end - record.start) * 1e6
        events.append(
            {
                "name": phase(record),
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": start,
                "dur": duration,
                "args": {**rows, "new_tokens": record.num_new_tokens},
            }
        )
        events.append({"name": "rows", "ph": "C", "pid": 0, "ts": start, "args": rows})
    for index, request in enumerate(run.requests):
        common = {"cat": "request", "id": index, "pid": 0, "name": f"request {index}"}
        args = {"input_tokens": request.input_tokens, "output_tokens": request.output_tokens}
        events.append({**common, "ph": "b", "ts": request.start * 1e6, "args": args})
        events.append({**common, "ph": "e", "ts": request.token_times[-1] * 1e6})
    return events


def _draw(run: Run, path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    passes = _middle(run.passes)
    figure, (bars, rows) = pyplot.subplots(
        2, 1, sharex=True, figsize=(11, 4.2), height_ratios=(1, 2), layout="constrained"
    )
    for name, colour in _COLOURS.items():
        spans = [(p.start, p.end - p.start) for p in passes if phase(p) == name]
        if spans:
            bars.broken_barh(spans, (0, 1), color=colour, label=name, linewidth=0.3, edgecolor="white")
    bars.set(yticks=[], title=title)
    bars.legend(loc="upper right", ncols=3, fontsize="small")
    edges = [*(p.start for p in passes), passes[-1].end]
    rows.stairs([p.num_prefill + p.num_decode for p in passes], edges, fill=True, color="#8aa6c1")
    rows.set(xlabel="seconds", ylabel="requests in the pass", xlim=(edges[0], edges[-1]))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _middle(passes: Sequence[PassRecord]) -> Sequence[PassRecord]:
    first = max(0, (len(passes) - _PICTURE_PASSES) // 2)
    return passes[first : first + _PICTURE_PASSES]
