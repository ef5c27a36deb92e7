"""Time a token on servers that only decode, predicted from datasheets: disaggregated runs of DeepSeek-R1 on H100s.

    python -m benchmarks.silicon.disaggregated --data FOLDER [--rows FILE]

FOLDER holds `end_to_end_moe_h100_h200.csv.gz` as AIConfigurator publishes it. Every constant is a datasheet's or an
engine's (`plans/engines`), and has seen none of these runs. Only TPOT is judged: first tokens come after seconds even
with six clients, which is no prefill but the start of the load, and its length is not said.

The file has neither workers nor layouts as they ran; InferenceMAX's search spaces have them by load
(SemiAnalysisAI/InferenceX, Apache-2.0: dsr1-fp8-h100-dynamo-trt at 1cb92d2, dsr1-fp8-h100-dynamo-sglang at d3f0375).
They hold each load twice, with speculative decoding and without, and the file does not say which. Taken are loads that
only occur without; and where two runs of a load differ by 1.3 times and more, the slower one, so that the choice looks
at measured figures. A worker decodes for its share of the clients, but those that wait for their first token, by the
measured TTFT. Two runs of Qwen3-235B on vLLM are left out: of a worker, 24 rows would read more experts than the memory
delivers in the measured time, so that what their batch counts is not known. Writes records/silicon-disaggregated.json.
"""

import argparse
import csv
import gzip
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

from benchmarks.lib.record import write_record
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.cluster import Cluster, load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Sharding, Stage
from exeplan.planner.problems.layouts import show_sharding
from exeplan.planner.reports.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.profiler.datasheets.engine_constants import load_engine, with_engine
from exeplan.simulator.cost import CostModel

ROWS = "end_to_end_moe_h100_h200.csv.gz"
_TEP, _DEP, _TP = Sharding(16, 1, 16), Sharding(1, 16, 16), Sharding(16)
LAYOUTS: Mapping[tuple[str, int, int], Mapping[int, tuple[int, Sharding]]] = {
    ("trtllm", 1024, 1024): {
        **dict.fromkeys((6, 9, 30, 60), (3, _TEP)),
        **dict.fromkeys((231, 462, 924, 1845), (3, _DEP)),
        4916: (1, _DEP),
    },
    ("trtllm", 8192, 1024): {**dict.fromkeys((6, 9, 30), (3, _TEP)), 154: (2, _TEP), 308: (1, _DEP)},
    ("sglang", 1024, 1024): dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128), (2, _TP)),
    ("sglang", 1024, 8192): dict.fromkeys((1, 2, 4, 8, 16, 32), (2, _TP)),
    ("sglang", 8192, 1024): dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128), (1, _TP)),
}
"""Workers that decode, and how each divides the model, by engine, lengths and clients; without speculation."""
_ONLY_WITHOUT = {("trtllm", 1024, 924), ("trtllm", 1024, 1845), ("trtllm", 1024, 4916), ("trtllm", 8192, 308)}
"""Engine, prompt and clients of loads that no search space with speculation has."""
_APART = 1.3
_STEPS = 20
_COLUMNS = (
    "engine",
    "decodes on",
    "workers",
    "lengths",
    "clients",
    "rows",
    "TPOT ms",
    "predicted ms",
    "error %",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """A measured run, and the workers of it that decode. Seconds and tokens."""

    engine: str
    sharding: Sharding
    workers: int
    lengths: tuple[int, int]
    clients: int
    ttft: float
    tpot: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--rows", type=Path, help=f"the measured runs (default: {ROWS} in that folder)")
    args = parser.parse_args()
    runs, num_others = read_decode_runs(args.rows or args.data / ROWS)
    found = [_judged(run) for run in runs]
    print(table(_COLUMNS, [tuple(str(one[name]) for name in _COLUMNS) for one in found]))
    groups: dict[str, list[float]] = defaultdict(list)
    for one in found:
        groups[f"{one['engine']} {one['decodes on']}"].append(abs(float(str(one["error %"]))))
    errors = {name: round(fmean(values), 1) for name, values in groups.items()}
    for name, error in errors.items():
        print(f"mean absolute error of TPOT, {name}: {error} %, {len(groups[name])} runs")
    print(f"median over {len(errors)} deployments: {median(errors.values()):.1f} %")
    print(f"{num_others} other rows are copies, or speculative, or nothing says that they are not")
    record = {"rows": found, "errors": errors, "median_tpot_percent": median(errors.values()), "others": num_others}
    print(f"record: {write_record('silicon-disaggregated', record)}")


def read_decode_runs(path: Path) -> tuple[list[DecodeRun], int]:
    """Those to be judged, each once, and how many other disaggregated rows there are."""
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        lines_apart = [line for line in csv.DictReader(lines) if line["mode"] == "disagg"]
    by_load: dict[tuple[str, int, int, int], set[tuple[float, float]]] = defaultdict(set)
    for line in lines_apart:
        clients = re.search(r"_c(\d+)_", line["id"])
        if line["model_path"].endswith("DeepSeek-R1") and line["system"] == "h100_sxm" and clients:
            load = line["backend"], int(float(line["isl"])), int(float(line["osl"])), int(clients[1])
            by_load[load].add((float(line["silicon_tpot_ms"]) / 1e3, float(line["silicon_ttft_ms"]) / 1e3))
    runs = list(_without_speculation(by_load))
    return runs, len(lines_apart) - len(runs)


def _without_speculation(
    by_load: Mapping[tuple[str, int, int, int], set[tuple[float, float]]],
) -> Iterator[DecodeRun]:
    for (engine, prompt, answer, clients), measured in sorted(by_load.items()):
        times, layout = sorted(measured), LAYOUTS.get((engine, prompt, answer), {}).get(clients)
        apart = len(times) > 1 and times[-1][0] > _APART * times[0][0]
        if layout and (apart or (engine, prompt, clients) in _ONLY_WITHOUT):
            yield DecodeRun(
                engine=engine,
                sharding=layout[1],
                workers=layout[0],
                lengths=(prompt, answer),
                clients=clients,
                ttft=times[-1][1],
                tpot=times[-1][0],
            )


def _judged(run: DecodeRun) -> dict[str, object]:
    rows, predicted = predicted_tpot(run)
    names = run.engine, show_sharding(run.sharding), run.workers, "/".join(map(str, run.lengths))
    times = f"{1e3 * run.tpot:.1f}", f"{1e3 * predicted:.1f}", f"{100 * (predicted / run.tpot - 1):+.1f}"
    return dict(zip(_COLUMNS, (*names, run.clients, f"{rows:.0f}", *times), strict=True))


def predicted_tpot(run: DecodeRun) -> tuple[float, float]:
    """Rows that a worker decodes at once, and the seconds of its pass, which agree with each other."""
    share, rows = run.clients / run.workers, 1.0
    for _ in range(_STEPS):
        decoding = (run.lengths[1] - 1) * _pass_seconds(run, rows)
        rows = max(1.0, share * decoding / (run.ttft + decoding))
    return rows, _pass_seconds(run, rows)


def _pass_seconds(run: DecodeRun, rows: float) -> float:
    """Between whole numbers of rows a straight line."""
    below = int(rows)
    low, high = (_pass_of(run.engine, run.sharding, run.lengths, count) for count in (below, below + 1))
    return low + (rows - below) * (high - low)


@cache
def _pass_of(engine: str, sharding: Sharding, lengths: tuple[int, int], rows: int) -> float:
    """Of rows halfway through their answers; ranks have as many, or one more."""
    cluster = load_cluster("h100")
    cluster = replace(cluster, num_nodes=-(-sharding.num_devices // cluster.gpus_per_node))
    cost, tokens = cost_of(engine, sharding, cluster), lengths[0] + lengths[1] // 2
    batch = Batch(
        decode=tuple(
            SequenceState(
                request_id=str(number),
                num_prompt_tokens=lengths[0],
                max_output_tokens=lengths[1],
                num_output_tokens=lengths[1] // 2,
            )
            for number in range(rows)
        )
    )
    ranks = sharding.data_parallel_size
    counts = [rows // ranks + (number < rows % ranks) for number in range(ranks)]
    return sum(cost.stage_seconds(batch, decoding=[(count, count * tokens) for count in counts]))


@cache
def cost_of(engine: str, sharding: Sharding, cluster: Cluster) -> CostModel:
    """Of DeepSeek-R1's sizes on one worker of H100s."""
    kernels = profile_from_datasheet(
        load_model_spec("deepseek-v3"),
        with_links(load_datasheet("h100-80gb"), cluster),
        dtype="fp8",
        kv_dtype="bfloat16" if engine == "sglang" else "fp8",
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
    return CostModel(profile, (stage,), cluster)


if __name__ == "__main__":
    main()
