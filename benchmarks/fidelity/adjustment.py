"""Dynamic workload adjustment (ExeGPT section 5.2) on stationary traffic: rra with and without thresholds.

    python -m benchmarks.fidelity.adjustment

OPT-13B on one and on four A40s, three real traces, 3,000 requests of each replayed. Prints requests/s, the latency of
the 99th-percentile output, and how much prefill passes and decode batches vary (standard deviation over mean, in the
middle of the run). Writes records/adjustment.json.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.lib.record import write_record
from exeplan.core.cluster import load_cluster
from exeplan.core.metrics import summarize
from exeplan.core.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, Schedule, Stage
from exeplan.planner.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

TRACES = ("alpaca", "wmt17-ende", "azure-2023-conv")
SCHEDULES = ((24, 8), (48, 30))
"""Prefill batch and decode steps."""
PERCENTS = (None, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Figures:
    throughput: float
    latency: float
    prefill_spread: float
    decode_spread: float

    def __str__(self) -> str:
        spread = f"{100 * self.prefill_spread:.0f} %, {100 * self.decode_spread:.0f} %"
        return f"{self.throughput:.2f}/s {self.latency:.1f} s, {spread}"


def main() -> None:
    datasheet = with_links(load_datasheet("a40-48gb"), load_cluster("a40"))
    profile = profile_from_datasheet(load_model_spec("opt-13b"), datasheet, dtype="float16")
    rows = []
    for num_stages in (1, 4):
        placement = _placement(profile.model.num_layers, num_stages)
        for name in TRACES:
            workload = load_workload(name).fit_context(profile.model.max_context)
            for batch, steps in SCHEDULES:
                found = [_figures(profile, placement, workload, batch, steps, percent) for percent in PERCENTS]
                rows.append((f"{name}, {num_stages} GPUs, B_E {batch}, N_D {steps}", *found))
    cells = [[str(cell) for cell in row] for row in rows]
    print(table(("requests/s, latency, spread of prefills and of decode batches", *map(_name, PERCENTS)), cells))
    for index, percent in list(enumerate(PERCENTS))[1:]:
        gains = [row[1 + index].throughput / row[1].throughput - 1 for row in rows]
        print(f"{_name(percent)}: throughput {100 * min(gains):+.1f} to {100 * max(gains):+.1f} %")
    print(f"\nrecord: {write_record('adjustment', {'rows': cells})}")


def _name(percent: int | None) -> str:
    return f"within {percent} %" if percent else "none"


def _placement(layers: int, num_stages: int) -> Placement:
    cuts = [layers * number // num_stages for number in range(num_stages + 1)]
    return tuple(Stage(devices=(n,), layers=(cuts[n], cuts[n + 1])) for n in range(num_stages))


def _figures(
    profile: Profile, placement: Placement, workload: Workload, batch: int, steps: int, percent: int | None
) -> Figures:
    variables = {"prefill_batch": batch, "decode_steps": steps, "micro_batches": len(placement)}
    if percent:
        comb = workload.decode_law(first_token_from_prefill=True).comb(steps)
        loads = {"prefill_tokens": round(batch * workload.mean_input), "decode_batch": round(batch * comb.active[0])}
        variables |= {"adjust_percent": percent, **loads}
    inputs, outputs = workload.sample(3000, seed=1)
    cost = CostModel(profile, placement)
    run = replay(Schedule("rra", variables), cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6)
    summary = summarize(run.requests, p99_output=workload.output_quantile(0.99), backlog=True)
    prefills = _middle(run, [(p.start, p.end - p.start) for p in run.passes if p.num_prefill])
    decodes = _middle(run, [(p.start, p.num_decode) for p in run.passes if p.num_decode])
    return Figures(summary.throughput, summary.latency or 0.0, _spread(prefills), _spread(decodes))


def _middle(run: Run, timed: list[tuple[float, float]]) -> list[float]:
    """Those of the middle two quarters of the run, its steady state."""
    end = run.passes[-1].end
    return [value for start, value in timed if end / 4 < start < 3 * end / 4]


def _spread(values: list[float]) -> float:
    return float(np.std(values) / np.mean(values))


if __name__ == "__main__":
    main()
