"""Vidur's tables (github microsoft/vidur, data/profiling): milliseconds, medians of repeats, float16.

    layer       one layer's shard by operation: `rest` is the sum of all of them but the embedding. Vidur times one of
                the layer's two residual sums, so where it has a second norm its `add` counts twice
    links       all_reduce and send_recv by bytes and devices a node, or by tokens and hidden size
    overheads   host times of an iteration by model, batch and degree. Vidur's sampler holds the output head too, so
                where the model is in the table its sampler time is the `head`

Vidur does not time the output head itself. Not here: its attention (`vidur_attention.py`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.profile import Measurement
from exeplan.errors import InputError
from exeplan.profiler.datasheets.roofline import Datasheet
from exeplan.profiler.importing.imported_rows import ImportedRows, rounded, thinned
from exeplan.profiler.importing.pointwise import sampling_seconds
from exeplan.profiler.importing.tables import Table, cells, numbers

_MS = 1e-3
_HOST_PARTS = ("schedule_median", "prepare_inputs_e2e_median", "process_model_outputs_median", "ray_comm_time_mean")
_MLP = ("mlp_up_proj", "mlp_down_proj")
_TOKENS_RATIO, _BYTES_RATIO = 1.02, 1.25
"""Neighbours closer than this are thinned out."""
_MOST_ROWS = 2048
"""Rows of the output head at most."""


def layer_part(tables: Sequence[Table], spec: ModelSpec, *, sheet: Datasheet) -> ImportedRows:
    """`rest`, `embed` and `head`. Raises InputError when no table has the model's shape."""
    import pandas

    frames = [_operations(table) for table in tables]
    frame = pandas.concat(frames, ignore_index=True)
    own = frame[(frame[list(_shape(spec))] == list(_shape(spec).values())).all(axis=1)]
    if not len(own):
        shapes = frame[list(_shape(spec))].drop_duplicates().to_dict("records")
        raise InputError(
            f"{tables[0].path} is about a model of {'; '.join(_said(shape) for shape in shapes[:4])}, while "
            f"{spec.name} has {_said(_shape(spec))}"
        )
    times = own.groupby(["degree", "num_tokens"])[["rest", "embed", "mlp"]].median()
    rows: list[Measurement] = []
    for degree, of_degree in times.groupby(level=0):
        kept = of_degree.droplevel(0)
        kept = kept.loc[thinned(kept.index, _TOKENS_RATIO)]
        rows += _layer_rows(kept, spec, int(degree), sheet)
    mlp = "gate, up and down" if spec.gated_mlp else "up and down"
    return ImportedRows(
        tuple(rows),
        (
            "rest: Vidur's operations of a layer summed, the residual sum counted twice where there are two norms",
            f"head: not measured by Vidur; taken from its {mlp} products of as many rows, by weights, and sampling",
        ),
    )


def _operations(table: Table) -> Any:
    """One row a timed pass: its keys, and seconds of `rest`, `embed` and the MLP's `mlp` products."""
    import pandas

    found = {column.split(".")[1]: column for column in table.frame.columns if column.endswith(".median")}
    seconds = {op: _MS * numbers(table, column, positive=False) for op, column in found.items()}
    rest = sum(values for op, values in seconds.items() if op != "emb")
    if "post_attention_layernorm" in seconds:
        rest = rest + seconds.get("add", 0.0)
    gated = table.frame["use_gated_mlp"].astype(str).str.lower() == "true" if "use_gated_mlp" in table.frame else False
    return pandas.DataFrame(
        {
            **{name: numbers(table, name).astype(int) for name in ("n_embd", "n_head", "n_kv_head", "n_expanded_embd")},
            "use_gated_mlp": gated,
            "degree": numbers(table, "num_tensor_parallel_workers").astype(int),
            "num_tokens": numbers(table, "num_tokens").astype(int),
            "rest": rest,
            "embed": seconds.get("emb", 0.0),
            "mlp": sum(_MS * numbers(table, f"time_stats.{op}.median", positive=False) for op in _MLP),
        }
    )


def _shape(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_embd": spec.hidden_size,
        "n_head": spec.num_heads,
        "n_kv_head": spec.num_kv_heads,
        "n_expanded_embd": spec.intermediate_size,
        "use_gated_mlp": spec.gated_mlp,
    }


def _said(shape: dict[str, Any]) -> str:
    return (
        f"hidden size {shape['n_embd']}, {shape['n_head']} heads, {shape['n_kv_head']} key/value heads and a "
        f"{'gated' if shape['use_gated_mlp'] else 'plain'} MLP of {shape['n_expanded_embd']}"
    )


def _layer_rows(times: Any, spec: ModelSpec, degree: int, sheet: Datasheet) -> list[Measurement]:
    """`times` has the tokens as its index."""
    weights = spec.vocab_size / ((3 if spec.gated_mlp else 2) * spec.intermediate_size)
    row = partial(Measurement, tensor_parallel_size=degree)
    rows = []
    for tokens, rest, embed in times[["rest", "embed"]].itertuples():
        rows.append(row(op="rest", num_tokens=int(tokens), seconds=rounded(rest)))
        if embed > 0:
            rows.append(row(op="embed", num_tokens=int(tokens), seconds=rounded(embed)))
    for tokens, mlp in times["mlp"].loc[thinned([n for n in times.index if n <= _MOST_ROWS], 1.2)].items():
        seconds = mlp * weights + sampling_seconds(sheet, spec, tokens)
        rows.append(row(op="head", num_seqs=int(tokens), seconds=rounded(seconds), repeats=0))
    return rows


def links_part(tables: Sequence[Table]) -> ImportedRows:
    """`all_reduce` and `send`: the median over ranks and repeats of each size, thinned."""
    import pandas

    found = [_link_times(table) for table in _of_one_machine(tables)]
    if not found:
        return ImportedRows()
    times = pandas.concat(found).groupby(["op", "phase", "degree", "bytes"])["seconds"].median()
    rows: list[Measurement] = []
    for (op, phase, degree), of_link in times.groupby(level=[0, 1, 2]):
        sizes = of_link.droplevel([0, 1, 2])
        rows += [
            Measurement(
                op=str(op),
                phase=str(phase),
                tensor_parallel_size=int(degree),
                bytes=int(size),
                seconds=rounded(seconds),
            )
            for size, seconds in sizes.loc[thinned(sizes.index, _BYTES_RATIO)].items()
        ]
    return ImportedRows(
        tuple(rows),
        ("links: timed eagerly from Python by Vidur, so that small messages take as long as their launch",),
    )


def _of_one_machine(tables: Sequence[Table]) -> Sequence[Table]:
    """Raises InputError when links of several machines lie together, which would be mixed up."""
    for column in ("all_reduce", "send_recv"):
        there = [table.path for table in tables if f"time_stats.{column}.median" in table.frame.columns]
        if len({path.parent for path in there}) > 1:
            raise InputError(f"{column} tables of several machines: {', '.join(map(str, there))}; give those of one")
    return tables


def _link_times(table: Table) -> Any:
    """Columns op, phase, degree, bytes, seconds. A send's degree is 1."""
    import pandas

    summed = "collective" in table.kind
    op = "all_reduce" if summed else "send"
    workers = numbers(table, "num_workers").astype(int) if "num_workers" in table.frame.columns else np.array([2])
    phase: Any
    if "size" in table.frame.columns:
        size = numbers(table, "size")
        phase = np.where(workers > numbers(table, "devices_per_node"), "inter", "intra")
    else:
        parts = 1 if summed else numbers(table, "num_tensor_parallel_workers")
        size = DTYPE_BYTES["float16"] * numbers(table, "n_embd") * numbers(table, "num_tokens", positive=False) / parts
        phase = "intra" if summed else _link_named(table)
    column = "time_stats.all_reduce.median" if summed else "time_stats.send_recv.median"
    times = pandas.DataFrame(
        {
            "op": op,
            "phase": phase,
            "degree": workers if summed else 1,
            "bytes": size,
            "seconds": _MS * numbers(table, column),
        }
    )
    return times[times["bytes"] >= 1].astype({"bytes": "int64"})


def _link_named(table: Table) -> str:
    """These tables do not say which link they timed, other than in their name."""
    for phase in ("intra", "inter"):
        if phase in table.path.name:
            return phase
    raise InputError(f"{table.path} does not say which link it timed; have 'intra' or 'inter' in its name")


def overhead_part(tables: Sequence[Table], spec: ModelSpec, degrees: Sequence[int]) -> ImportedRows:
    """`overhead` of both phases and, where the model itself is in the table, `head`; degrees that are not there have
    the times of the nearest one."""
    import pandas

    if not tables:
        return ImportedRows()
    frame = pandas.concat([_host_times(table) for table in tables], ignore_index=True)
    own = frame[frame["model"] == _plain(spec.name)]
    times = (own if len(own) else frame).groupby(["degree", "batch_size"])[["overhead", "head"]].median()
    rows: list[Measurement] = []
    for degree in degrees:
        near = min(times.index.levels[0], key=lambda other: (abs(np.log(other / degree)), other))
        row = partial(Measurement, tensor_parallel_size=degree, repeats=int(near == degree))
        for batch, overhead, head in times.loc[near].itertuples():
            for phase in ("prefill", "decode"):
                rows.append(row(op="overhead", phase=phase, num_seqs=int(batch), seconds=rounded(overhead)))
            if len(own):
                rows.append(row(op="head", num_seqs=int(batch), seconds=rounded(head)))
    if len(own):
        return ImportedRows(tuple(rows), ("head: Vidur's sampler time of the model, which holds its output head",))
    models = ", ".join(sorted(set(frame["model"])))
    return ImportedRows(tuple(rows), (f"overhead: {spec.name} is not among {models}; the median over them counts",))


def _host_times(table: Table) -> Any:
    import pandas

    parts = [_MS * numbers(table, part, positive=False) for part in _HOST_PARTS if part in table.frame.columns]
    return pandas.DataFrame(
        {
            "model": [_plain(name) for name in cells(table, "model_name").astype(str)],
            "degree": numbers(table, "tensor_parallel_degree").astype(int),
            "batch_size": numbers(table, "batch_size").astype(int),
            "overhead": sum(parts),
            "head": _MS * numbers(table, "sampler_e2e_median"),
        }
    )


def _plain(name: str) -> str:
    """A model's name without its author and the suffixes of its checkpoint's format."""
    return name.split("/")[-1].lower().removesuffix("-hf")
