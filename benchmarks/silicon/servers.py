"""Servers that only prefill and servers that only decode: whole disaggregated runs of DeepSeek-R1, replayed.

    python -m benchmarks.silicon.servers --data FOLDER [--rows FILE]

FOLDER holds `end_to_end_moe_h100_h200.csv.gz` as AIConfigurator publishes it. Judged are SGLang's runs on servers of 16
H100s on two hosts each, as `disaggregated.py` takes them: those without speculative decoding, with as many servers that
decode as InferenceMAX's search space has for the load. That one server prefills is assumed: the file does not say.
Every time is a datasheet's or an engine's (`plans/engines`), and has seen none of these runs.

The replay is that of a plan (`waa-c`, xPyD): so many clients, who send their next request when they have an answer,
ten each, all at once at the start, as InferenceMAX does; lengths are even between 0.8 and 1 of the stated ones; prefill
passes of up to 16,384 tokens. Compared are means over all requests, of three seeds. Writes
records/silicon-servers.json.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.silicon.disaggregated import ROWS, DecodeRun, cost_of, read_decode_runs
from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.cluster import load_cluster
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.schedule import Schedule, Sharding
from exeplan.planner.problems.server_layouts import ServerLayout, server_placement
from exeplan.planner.reports.tables import table
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import kv_capacity_tokens
from exeplan.simulator.replay import replay

_PASS_TOKENS, _ROWS_DECODED = 16384, 2048
"""SGLang's own limit of a prefill pass, and more rows than any of these runs has."""
_SERVER = Sharding(16)
_SEEDS, _OF_EACH = 3, 10
_TTFT, _TPOT = ("TTFT ms", "predicted", "error %"), ("TPOT ms", "TPOT predicted", "TPOT error %")
_COLUMNS = ("lengths", "clients", "servers", *_TTFT, *_TPOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--rows", type=Path, help=f"the measured runs (default: {ROWS} in that folder)")
    args = parser.parse_args()
    runs = [run for run in read_decode_runs(args.rows or args.data / ROWS)[0] if run.engine == "sglang"]
    rows = [judged(run) for run in runs]
    print(table(_COLUMNS, [tuple(str(row[name]) for name in _COLUMNS) for row in rows]))
    of_lengths = defaultdict(list)
    for row in rows:
        of_lengths[str(row["lengths"])].append(row)
    summary = {name: _errors(some) for name, some in {**of_lengths, "all": rows}.items()}
    for name, errors in summary.items():
        print(f"{name}: {', '.join(f'{what} {value:.1f} %' for what, value in errors.items())}")
    print(f"record: {write_record('silicon-servers', {'rows': rows, 'errors': summary})}")


def _errors(rows: list[dict[str, object]]) -> dict[str, float]:
    found = {}
    for what, name in (("TTFT", "error %"), ("TPOT", "TPOT error %")):
        off = [abs(float(str(row[name]))) for row in rows]
        found |= {f"{what} mean": round(fmean(off), 1), f"{what} median": round(median(off), 1)}
    return found


def judged(run: DecodeRun) -> dict[str, object]:
    """The run with what its replay has; errors are predicted over measured, less 1."""
    by_seed = [_replayed(run, seed) for seed in range(_SEEDS)]
    ttft, tpot = (fmean(values) for values in zip(*by_seed, strict=True))
    return {
        "lengths": "/".join(map(str, run.lengths)),
        "clients": run.clients,
        "servers": f"1P{run.workers}D",
        "TTFT ms": round(1e3 * run.ttft),
        "predicted": round(1e3 * ttft),
        "error %": round(100 * (ttft / run.ttft - 1), 1),
        "TPOT ms": round(1e3 * run.tpot, 1),
        "TPOT predicted": round(1e3 * tpot, 1),
        "TPOT error %": round(100 * (tpot / run.tpot - 1), 1),
    }


def _replayed(run: DecodeRun, seed: int) -> tuple[float, float]:
    """Mean TTFT and TPOT, seconds."""
    rng, number = np.random.default_rng(seed), _OF_EACH * run.clients
    inputs, outputs = (rng.integers(int(0.8 * longest), longest, number, endpoint=True) for longest in run.lengths)
    cost = _cost(run.workers)
    variables = {"decode_batch": _ROWS_DECODED, "prefill_batch": max(1, _PASS_TOKENS // run.lengths[0])}
    groups = {"micro_batches": run.workers} if run.workers > 1 else {}
    assert cost.cluster
    room = kv_capacity_tokens(cost.profile, cost.placement, MEMORY_UTILIZATION * cost.cluster.memory_bytes)
    done = replay(
        Schedule("waa-c", {**variables, **groups}),
        cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=int(room) // BLOCK_SIZE,
        concurrency=run.clients,
        record_passes=False,
    ).requests
    paces = (done.last_tokens - done.first_tokens) / (done.output_tokens - 1)
    return float(np.mean(done.first_tokens - done.arrivals)), float(np.mean(paces))


@cache
def _cost(num_decode: int) -> CostModel:
    """One server that prefills and so many that decode, of two hosts each."""
    cluster = replace(load_cluster("h100"), num_nodes=2 * (1 + num_decode))
    layout = ServerLayout(prefill=_SERVER, decode=_SERVER, num_prefill=1, num_decode=num_decode)
    profile = cost_of("sglang", _SERVER, replace(cluster, num_nodes=2)).profile
    placement = server_placement(cluster, profile.model, layout)
    assert placement
    return CostModel(profile, placement, cluster)


if __name__ == "__main__":
    main()
