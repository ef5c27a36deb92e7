"""Serving runs of mixtures of experts, predicted from datasheets alone: no constant has seen one of them.

    python -m benchmarks.silicon.experts --data FOLDER [--rows FILE] [--kv-dtype bfloat16]

FOLDER holds `end_to_end_moe_h100_h200.csv.gz` as AIConfigurator publishes it: mean TTFT and TPOT of runs on H100s and
H200s. Judged are aggregated runs on one stage, of models that are shipped here. Devices' constants were fitted to
tables of dense kernels, and exchanges with experts to tables of TensorRT-LLM's; engines' (`plans/engines`) to runs of
dense models. Experts lie as the run placed them, and all are as likely; `E2E % cut by width` is of the same runs with
every expert cut over all GPUs. With attention data parallelism each rank admits as many prompts as an engine without.

TensorRT-LLM's runs of DeepSeek-R1 lie as their search space says, and those that decode speculatively are left out
(`rows.py`). Every deployment is its own row; those said to be of several hosts are left out: 15 of them have another
run's names in their ids (`tp4_ep4`, where the columns say 16 GPUs) and its figures, of another day, to a median of
0.5 %: their columns are taken to be wrong. TensorRT-LLM's prompts may wait until every rank has one, which is not
predicted. Writes records/silicon-experts.json.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.silicon.engines import DEVICES, predict, shipped_setting
from benchmarks.silicon.left_out import deployment_name
from benchmarks.silicon.rows import Pair, Prediction, Row, errors, read_rows
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Sharding, Stage
from exeplan.planner.problems.layouts import show_sharding
from exeplan.planner.reports.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.profiler.datasheets.engine_constants import load_engine, with_engine
from exeplan.simulator.cost import CostModel

_HOST = 8
"""GPUs."""
_ROWS = "end_to_end_moe_h100_h200.csv.gz"
_COLUMNS = (
    "engine", "model", "layout", "GPUs", "runs", "TTFT %", "TPOT %", "E2E %", "E2E % cut by width",
    "E2E mean with sign %", "device",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--rows", type=Path, help=f"the measured runs (default: {_ROWS} in that folder)")
    parser.add_argument("--kv-dtype", choices=("fp8", "bfloat16"), default="fp8", help="of keys and values")
    args = parser.parse_args()
    rows, num_others = read_rows(args.rows or args.data / _ROWS, with_ranks=True)
    rows, across = [row for row in rows if row.sharding.num_devices <= _HOST], len(rows)
    num_others += across - len(rows)
    pairs = [(row, _predicted(args.data, row, row.sharding, args.kv_dtype)) for row in rows]
    whole = {row: _predicted(args.data, row, Sharding(row.sharding.num_devices), args.kv_dtype) for row in rows}
    found = [_judged(group, [(row, whole[row]) for row, _ in group]) for group in _deployments(pairs).values()]
    print(table(_COLUMNS, [tuple(str(one[name]) for name in _COLUMNS) for one in found]))
    overall = median(float(one["E2E %"]) for one in found)
    print(f"\nmedian over {len(found)} deployments of the mean absolute error of E2E: {overall:.1f} %")
    print(f"{len(rows)} runs; {num_others} others are of models, dtypes or layouts that are not planned")
    record = {"kv_dtype": args.kv_dtype, "rows": found, "median_e2e_percent": overall, "others": num_others}
    print(f"record: {write_record('silicon-experts', record)}")


def _predicted(data: Path, row: Row, sharding: Sharding, kv_dtype: str) -> Prediction:
    cost = _cost(row.system, row.model, row.dtype, kv_dtype, sharding, row.engine)
    return predict(data, row, shipped_setting(row.engine), cost)


@cache
def _cost(system: str, model: str, dtype: str, kv_dtype: str, sharding: Sharding, engine: str) -> CostModel:
    kernels = profile_from_datasheet(
        load_model_spec(model),
        load_datasheet(DEVICES[system]),
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel_sizes=(sharding.tensor_parallel_size,),
        shardings=(sharding,) if sharding.expert_parallel_size > 1 else (),
        passes_over=load_engine(engine).expert_rows,
    )
    profile = with_engine(kernels, load_engine(engine))
    stage = Stage(
        devices=tuple(range(sharding.num_devices)),
        layers=(0, profile.model.num_layers),
        data_parallel_size=sharding.data_parallel_size,
        expert_parallel_size=sharding.expert_parallel_size,
    )
    return CostModel(profile, (stage,))


def _deployments(pairs: Sequence[Pair]) -> Mapping[tuple[object, ...], list[Pair]]:
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for row, prediction in pairs:
        groups[*deployment_name(row), row.system, row.sharding].append((row, prediction))
    return groups


def _judged(group: Sequence[Pair], cut_by_width: Sequence[Pair]) -> dict[str, Any]:
    row, found = group[0][0], errors(group)
    layout = show_sharding(row.sharding) or "one GPU"
    shown = (f"{100 * found[name][0]:.1f}" for name in ("ttft", "tpot", "e2e"))
    names = (row.engine, row.model, layout, row.sharding.num_devices, len(group))
    others = f"{100 * errors(cut_by_width)['e2e'][0]:.1f}", f"{100 * found['e2e'][2]:+.1f}", DEVICES[row.system]
    return dict(zip(_COLUMNS, (*names, *shown, *others), strict=True))


if __name__ == "__main__":
    main()
