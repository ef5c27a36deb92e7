"""Serving runs of mixtures of experts, predicted from datasheets alone: no constant has seen one of them.

    python -m benchmarks.silicon.experts --data FOLDER [--rows FILE] [--kv-dtype bfloat16]

FOLDER holds `end_to_end_moe_h100_h200.csv.gz` as AIConfigurator publishes it: mean TTFT and TPOT of runs on H100s and
H200s. Judged are aggregated runs on one stage without attention data parallelism, of models that are shipped here.
Devices' constants were fitted to tables of dense kernels, engines' (`plans/engines`) to runs of dense models.
Experts are cut by width over the tensor-parallel group and are all as likely, however a run placed them. Every
deployment is its own row; those of several hosts are left out. Writes records/silicon-experts.json.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.lib.record import write_record
from benchmarks.silicon.engines import DEVICES, predict, shipped_setting
from benchmarks.silicon.left_out import deployment_name
from benchmarks.silicon.rows import Pair, Prediction, Row, errors, read_rows
from exeplan.api import datasheet_profile
from exeplan.core.schedule import Stage
from exeplan.planner.tables import table
from exeplan.profiler.datasheets.engine_constants import load_engine, with_engine
from exeplan.simulator.cost import CostModel

_HOST = 8
"""GPUs."""
_ROWS = "end_to_end_moe_h100_h200.csv.gz"
_COLUMNS = ("engine", "model", "device", "GPUs", "runs", "TTFT %", "TPOT %", "E2E %", "E2E mean with sign %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--rows", type=Path, help=f"the measured runs (default: {_ROWS} in that folder)")
    parser.add_argument("--kv-dtype", choices=("fp8", "bfloat16"), default="fp8", help="of keys and values")
    args = parser.parse_args()
    rows, num_others = read_rows(args.rows or args.data / _ROWS)
    rows, across = [row for row in rows if row.tensor_parallel_size <= _HOST], len(rows)
    num_others += across - len(rows)
    pairs = [(row, _predicted(args.data, row, args.kv_dtype)) for row in rows]
    found = [_judged(group) for group in _deployments(pairs).values()]
    print(table(_COLUMNS, [tuple(str(one[name]) for name in _COLUMNS) for one in found]))
    overall = median(float(one["E2E %"]) for one in found)
    print(f"\nmedian over {len(found)} deployments of the mean absolute error of E2E: {overall:.1f} %")
    print(f"{len(rows)} runs; {num_others} others are of models, dtypes or layouts that are not planned")
    record = {"kv_dtype": args.kv_dtype, "rows": found, "median_e2e_percent": overall, "others": num_others}
    print(f"record: {write_record('silicon-experts', record)}")


def _predicted(data: Path, row: Row, kv_dtype: str) -> Prediction:
    cost = _cost(row.system, row.model, row.dtype, kv_dtype, row.tensor_parallel_size, row.engine)
    return predict(data, row, shipped_setting(row.engine), cost)


@cache
def _cost(system: str, model: str, dtype: str, kv_dtype: str, size: int, engine: str) -> CostModel:
    kernels = datasheet_profile(model, DEVICES[system], dtype=dtype, kv_dtype=kv_dtype, tensor_parallel_sizes=(size,))
    profile = with_engine(kernels, load_engine(engine))
    return CostModel(profile, (Stage(devices=tuple(range(size)), layers=(0, profile.model.num_layers)),))


def _deployments(pairs: Sequence[Pair]) -> Mapping[tuple[object, ...], list[Pair]]:
    groups: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for row, prediction in pairs:
        groups[*deployment_name(row), row.system].append((row, prediction))
    return groups


def _judged(group: Sequence[Pair]) -> dict[str, object]:
    row, found = group[0][0], errors(group)
    shown = (f"{100 * found[name][0]:.1f}" for name in ("ttft", "tpot", "e2e"))
    names = (row.engine, row.model, DEVICES[row.system], row.tensor_parallel_size, len(group))
    return dict(zip(_COLUMNS, (*names, *shown, f"{100 * found['e2e'][2]:+.1f}"), strict=True))


if __name__ == "__main__":
    main()
