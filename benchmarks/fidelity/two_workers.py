"""Predicted against measured on two workers: tensor parallel, pipeline, and one for prefill and one for decode.

    python -m benchmarks.fidelity.two_workers [--model demo] [--workload alpaca] [--duration 20] [--rounds 2]
        [--profile FILE]

rra, orca and static run as one tensor-parallel stage and as a pipeline of two; waa-c has one worker for prefills and
one for decodes. Each worker has one compute thread. Each plan has its own bound, a few times the latency of one request
alone on that placement, and runs as `bench_runs.py` says: the replay of its requests against what was measured, as it
was and at the speed of the profile. Needs two idle cores. Writes records/fidelity-workers-<model>.json.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.fidelity.bench_runs import profiled, report, run_rounds
from exeplan.core.bounds import Bound
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile, load_profile
from exeplan.core.schedule import Placement, Stage
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import fitted, profiled_host
from exeplan.planner.problems.problem import make_problem
from exeplan.policies import load_policy
from exeplan.workload.files import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", type=Path, help="made with --devices 2; instead of measuring one now")
    parser.add_argument("--workload", default="alpaca")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slack", type=float, default=3.0, help="bound over what one request alone needs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = profiled(args.model, args.profile, Path(folder), "--devices", "2", "--budget", "150s")
        profile = load_profile(path)
        rows = [
            {"case": f"{where} {plan.schedule}", "plan": plan, "name": args.workload, "runs": []}
            for where, policy, placement in cases(profile.model)
            for plan in [planned(profile, args.workload, policy, placement, slack=args.slack)]
        ]
        run_rounds(rows, path, rounds=args.rounds, least=args.duration)
        report(rows, profile, record=f"fidelity-workers-{args.model}")


def cases(spec: ModelSpec) -> list[tuple[str, str, Placement]]:
    """A case's name, policy, and placement on two devices."""
    layers, half = spec.num_layers, spec.num_layers // 2
    parallel = (Stage(devices=(0, 1), layers=(0, layers)),)
    pipeline = (Stage(devices=(0,), layers=(0, half)), Stage(devices=(1,), layers=(half, layers)))
    apart = (
        Stage(devices=(0,), layers=(0, layers), phase="prefill"),
        Stage(devices=(1,), layers=(0, layers), phase="decode"),
    )
    both = {"TP 2": parallel, "PP 2": pipeline}
    everywhere = [(where, policy, both[where]) for policy in ("rra", "orca", "static") for where in both]
    return [*everywhere, ("1+1", "waa-c", apart)]


def planned(profile: Profile, workload: str, policy: str, placement: Placement, *, slack: float) -> Plan:
    """The policy's best plan on that placement."""
    law = fitted(load_workload(workload), profile.model, fit=True)
    problem = make_problem(profile, law, Bound(seconds=float("inf")), cluster=profiled_host(profile, 2))
    problem = replace(problem, one_pipeline=True)
    problem = replace(problem.at(placement), cluster=None)
    lowest = {knob.name: knob.values[0] for knob in load_policy(policy).knobs(law, 1)}
    alone = problem.evaluate(load_policy(policy).schedule(lowest, law)).latency
    problem = replace(problem, bound=Bound(seconds=float(f"{slack * alone:.2g}")))
    return optimize(problem, policies=(policy,)).plan


if __name__ == "__main__":
    main()
