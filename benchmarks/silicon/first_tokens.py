"""Time to the first token of servers that prefill apart, predicted from datasheets: DeepSeek-R1 on SGLang and 16 H100s.

    python -m benchmarks.silicon.first_tokens --data FOLDER [--rows FILE]

FOLDER holds `end_to_end_moe_h100_h200.csv.gz` as AIConfigurator publishes it. Nothing is fitted to its runs. One worker
of two hosts prefills, which is assumed, as the file does not say: passes of up to 8,192 tokens from one queue. Clients
all start at once, and each sends its next prompt when its answer has come at the measured time a token, ten in all.
Lengths are evenly 0.8 to 1 of the stated ones, as InferenceMAX draws them. Sums over the two hosts are priced as one
ring over one adapter, and by parts through the eight adapters of a host. TensorRT-LLM's runs are left out: their first
tokens come after seconds with six clients. Writes records/silicon-first-tokens.json.
"""

import argparse
import csv
import gzip
import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.silicon.disaggregated import LAYOUTS, ROWS, cost_of
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.cluster import load_cluster
from exeplan.core.schedule import Sharding
from exeplan.planner.reports.tables import table

_WORKER, _PASS_TOKENS, _EACH, _SHORTEST, _SEED = Sharding(16), 8192, 10, 0.8, 0
_CLUSTERS = {
    "one adapter": replace(load_cluster("h100"), num_nodes=2, adapters_per_node=1),
    "eight": replace(load_cluster("h100"), num_nodes=2),
}
_COLUMNS = ("lengths", "clients", "TTFT s", *(f"{name} s" for name in _CLUSTERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """A measured run. Seconds and tokens."""

    lengths: tuple[int, int]
    clients: int
    ttft: float
    tpot: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--rows", type=Path, help=f"the measured runs (default: {ROWS} in that folder)")
    args = parser.parse_args()
    runs = sorted(set(_read(args.rows or args.data / ROWS)), key=lambda run: (run.lengths, run.clients, run.ttft))
    found = [{name: predicted_ttft(run, name) for name in _CLUSTERS} for run in runs]
    rows = [
        ("/".join(map(str, run.lengths)), run.clients, f"{run.ttft:.3f}", *(f"{value:.3f}" for value in one.values()))
        for run, one in zip(runs, found, strict=True)
    ]
    print(table(_COLUMNS, [tuple(map(str, row)) for row in rows]))
    errors = {name: _errors([one[name] / run.ttft for run, one in zip(runs, found, strict=True)]) for name in _CLUSTERS}
    for name, error in errors.items():
        print(f"{name}: " + ", ".join(f"{what} {value}" for what, value in error.items()))
    record = {"rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows], "errors": errors}
    print(f"record: {write_record('silicon-first-tokens', record)}")


def _errors(ratios: Sequence[float]) -> dict[str, float]:
    """Of predicted over measured times; the last is what one factor for all of them would leave."""
    factor = median(ratios)
    return {
        "mean error %": round(100 * fmean(abs(one - 1) for one in ratios), 1),
        "median error %": round(100 * median(abs(one - 1) for one in ratios), 1),
        "median ratio": round(factor, 2),
        "mean error behind it %": round(100 * fmean(abs(one / factor - 1) for one in ratios), 1),
    }


def _read(path: Path) -> Iterator[FirstTokens]:
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        lines_apart = [line for line in csv.DictReader(lines) if line["mode"] == "disagg"]
    for line in lines_apart:
        clients = re.search(r"_c(\d+)_", line["id"])
        lengths = int(float(line["isl"])), int(float(line["osl"]))
        of_load = clients and int(clients[1]) in LAYOUTS.get((line["backend"], *lengths), {})
        if clients and of_load and (line["backend"], line["system"]) == ("sglang", "h100_sxm"):
            yield FirstTokens(
                lengths=lengths,
                clients=int(clients[1]),
                ttft=float(line["silicon_ttft_ms"]) / 1e3,
                tpot=float(line["silicon_tpot_ms"]) / 1e3,
            )


def predicted_ttft(run: FirstTokens, adapters: str) -> float:
    """Seconds, the mean over all requests."""
    rng = np.random.default_rng(_SEED)
    prompts, answers = (
        np.rint(length * rng.uniform(_SHORTEST, 1.0, (run.clients, _EACH))).astype(int) for length in run.lengths
    )
    arriving = [(0.0, client, 0) for client in range(run.clients)]
    now, waited = 0.0, []
    while arriving:
        now = max(now, arriving[0][0])
        begun: list[tuple[float, int, int]] = []
        tokens = 0
        while arriving and arriving[0][0] <= now:
            more = int(prompts[arriving[0][1:]])
            if begun and tokens + more > _PASS_TOKENS:
                break
            begun, tokens = [*begun, heapq.heappop(arriving)], tokens + more
        now += _prefill_seconds(adapters, tuple(sorted(int(prompts[one[1:]]) for one in begun)))
        for sent, client, number in begun:
            waited.append(now - sent)
            if number + 1 < _EACH:
                answered = now + (int(answers[client, number]) - 1) * run.tpot
                heapq.heappush(arriving, (answered, client, number + 1))
    return fmean(waited)


@cache
def _prefill_seconds(adapters: str, prompts: Sequence[int]) -> float:
    sequences = (
        SequenceState(request_id=str(number), num_prompt_tokens=tokens, max_output_tokens=2)
        for number, tokens in enumerate(prompts)
    )
    return sum(cost_of("sglang", _WORKER, _CLUSTERS[adapters]).stage_seconds(Batch(prefill=tuple(sequences))))


if __name__ == "__main__":
    main()
