"""Experts of a layer from AIConfigurator's `moe_perf` tables: all kernels between the router and the sum.

A row is one layer's experts on one GPU: `num_tokens` of all together, `hidden_size`, `inter_size` (one expert's width,
whole), `topk`, `num_experts`, `moe_tp_size` (GPUs that share every expert's width), `moe_ep_size`, `moe_dtype`,
`distribution` and `latency` in milliseconds. Taken are rows of the model's own sizes: other shapes say little, and of
the routing that is asked for. Where none is, uneven (`power_law_...`) is taken before even (`balanced`, `uniform`), as
real routers are uneven; of several the median. Between two numbers of tokens the logarithms of both are interpolated,
beyond the last the time is proportional.

Rows with `moe_ep_size` above 1 are of whole experts divided among so many GPUs, on that to which most tokens go; those
that divide their width as well are left aside.
Not here: the router and shared experts, which are products like others (`aiconfigurator.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.models.sparse_layers import Experts
from exeplan.core.models.uneven_routing import routing_exponent
from exeplan.errors import InputError
from exeplan.profiler.importing.tables import Table, numbers

_MS = 1e-3
_SIZES = ("hidden_size", "inter_size", "topk", "num_experts")
_DTYPES = {FP8: ("fp8_block", "fp8"), "bfloat16": ("bfloat16", "float16"), "float16": ("float16", "bfloat16")}
"""Spellings by a model's dtype, the first that is there."""
_UNEVEN, _EVEN = "power_law_", ("balanced", "uniform")


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Of one model's layer of experts, by the GPUs that share it and the parts of whole experts among them."""

    curves: dict[tuple[int, int], tuple[Floats, Floats]]
    """Numbers of tokens, rising, and seconds."""
    note: str

    def seconds(self, degree: int, parts: int, num_tokens: Floats) -> Floats:
        """At any numbers of tokens."""
        tokens, seconds = self.curves[degree, parts]
        inside = np.exp(np.interp(np.log(num_tokens), np.log(tokens), np.log(seconds)))
        return np.where(num_tokens > tokens[-1], seconds[-1] * num_tokens / tokens[-1], inside)


def expert_times(
    tables: Sequence[Table], spec: ModelSpec, experts: Experts, dtype: str, routing: str | None = None
) -> ExpertTimes:
    """Raises InputError where no row is of the model's sizes, dtype and routing, naming those that are there."""
    import pandas

    if not tables:
        raise InputError(
            f"{spec.name} has {experts.count} experts in a layer, and no table times them; add AIConfigurator's "
            "moe_perf table, or use a datasheet"
        )
    frame = pandas.concat([_numbered(table) for table in tables], ignore_index=True)
    wanted = (spec.hidden_size, experts.width, experts.per_token, experts.count)
    own = frame[(frame[list(_SIZES)].to_numpy() == np.array(wanted)).all(axis=1)]
    if not (own["moe_ep_size"] == 1).any():
        there = sorted({tuple(map(int, row)) for row in frame[list(_SIZES)].itertuples(index=False)})
        near = "; ".join("/".join(map(str, sizes)) for sizes in there[:6])
        raise InputError(
            f"{tables[0].path}: no row of {'/'.join(map(str, wanted))} ({', '.join(_SIZES)}) with moe_ep_size 1, which "
            f"{spec.name} has; there are {near}"
        )
    kinds = [kind for kind in _DTYPES[dtype] if kind in set(own["moe_dtype"])]
    if not kinds:
        found = ", ".join(sorted(set(own["moe_dtype"])))
        raise InputError(f"{tables[0].path}: experts of {spec.name} are timed in {found}, not in {dtype}")
    own = own[own["moe_dtype"] == kinds[0]]
    routed = sorted(set(own["distribution"]))
    chosen = _chosen(routed, routing) if routing else [name for name in routed if name.startswith(_UNEVEN)] or routed
    if not chosen:
        raise InputError(
            f"{tables[0].path}: experts of {spec.name} are timed with routing {', '.join(routed)}, not {routing}"
        )
    own = own[own["distribution"].isin(chosen)]
    curves = {}
    for (shared, parts), of_both in own.groupby(["moe_tp_size", "moe_ep_size"]):
        curve = of_both.groupby("num_tokens")["latency"].median().sort_index()
        seconds = _MS * np.maximum.accumulate(curve.to_numpy())
        curves[int(shared * parts), int(parts)] = curve.index.to_numpy(dtype=float), seconds
    note = f"rest: a layer's experts from the table ({kinds[0]}, routing {', '.join(chosen)})"
    return ExpertTimes(curves, note)


def _chosen(routed: Sequence[str], routing: str) -> list[str]:
    """Of the table's spellings, that of a routing; raises InputError for a text that is none."""
    exponent = routing_exponent(routing)
    return [
        name
        for name in routed
        if (name in _EVEN if not exponent else name.startswith(_UNEVEN) and routing_exponent(name) == exponent)
    ]


def _numbered(table: Table) -> Any:
    import pandas

    columns = ("num_tokens", *_SIZES, "moe_tp_size", "latency")
    values = {name: numbers(table, name) for name in columns}
    ranks = numbers(table, "moe_ep_size") if "moe_ep_size" in table.frame.columns else np.ones(len(table.frame))
    texts = {"moe_dtype": _texts(table, "moe_dtype", "bfloat16"), "distribution": _texts(table, "distribution", "")}
    return pandas.DataFrame({**values, "moe_ep_size": ranks, **texts})


def _texts(table: Table, column: str, otherwise: str) -> Sequence[str]:
    there = column in table.frame.columns
    return list(table.frame[column].astype(str)) if there else [otherwise] * len(table.frame)
