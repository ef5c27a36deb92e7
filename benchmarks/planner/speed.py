"""Planning time: a whole search over all policies, and a replay of 10,000 requests.

    python -m benchmarks.planner.speed [--repeats 3]

OPT-13B on 4 A40s and GPT-3 341B on 48, all policies, after start-up (profile and workload loaded); wall seconds, best
and median of the repeats. The paper's search takes three seconds to five minutes (section 7.7). Writes
records/planner-speed.json.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

from benchmarks.lib.record import write_record
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.planner.balance_stages import Balance
from exeplan.planner.layouts import Layout
from exeplan.planner.optimize import optimize, resolve_policies
from exeplan.planner.problem import Problem, make_problem
from exeplan.planner.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.simulator.replay import replay
from exeplan.workload.files import load_workload

SEARCHES = (
    ("opt-13b", 4, "S", 11.5),
    ("opt-13b", 4, "T", 30.0),
    ("gpt3-175b", 32, "C1", 60.0),
    ("gpt3-341b", 48, "G", 150.0),
)
REPLAYS = (("S", 128), ("T", 128), ("G", 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for model, gpus, workload, bound in SEARCHES:
        problem = _problem(model, gpus, workload, bound)
        policies = resolve_policies("auto", problem.cluster)
        plan = optimize(problem, policies=policies).plan
        seconds = _timed(lambda p=problem, names=policies: optimize(p, policies=names), args.repeats)
        points = f"{plan.search['points']} of {plan.search['grid']}"
        rows.append((f"optimize {model} on {gpus} GPUs, {workload}, {bound:g} s", str(plan.schedule), points, *seconds))
    for workload, residents in REPLAYS:
        problem = _problem("opt-13b", 4, workload, 1e9)
        placement = Balance(problem.cost.timings, problem.cluster, problem.workload, problem.memory).placement(Layout())
        cost = problem.at(placement).cost
        steps = round(problem.workload.mean_output / 2)
        schedule = Schedule("rra", {"prefill_batch": residents // 2, "decode_steps": steps, "micro_batches": 4})
        inputs, outputs = problem.workload.sample(10_000, seed=0)
        seconds = _timed(
            lambda s=schedule, c=cost, i=inputs, o=outputs: replay(
                s, c, input_tokens=i, output_tokens=o, num_blocks=10**6
            ),
            args.repeats,
        )
        rows.append(
            (f"replay 10,000 requests of {workload}, 4 stages", str(schedule), f"{outputs.sum()} tokens", *seconds)
        )
    print(table(("", "schedule", "size", "best", "median"), rows))
    print(f"\nrecord: {write_record('planner-speed', {'rows': rows})}")


def _problem(model: str, gpus: int, workload: str, bound: float) -> Problem:
    cluster = load_cluster("a40")
    profile = profile_from_datasheet(
        load_model_spec(model), with_links(load_datasheet(cluster.device), cluster), dtype="float16"
    )
    return make_problem(profile, load_workload(workload), Bound(seconds=bound), cluster=cluster.part(gpus))


def _timed(work: Callable[[], object], repeats: int) -> tuple[str, str]:
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return f"{min(found):.2f} s", f"{median(found):.2f} s"


if __name__ == "__main__":
    main()
