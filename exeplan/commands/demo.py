"""profile, plan and run a small model on this machine: predicted against measured

Profiles the demo model on the CPU, plans it for three policies under one latency bound, and runs the plans on one
engine, in slices of load in the order A B C C B A. Prints what was predicted and measured, as it was and at the speed
that the machine had while it was profiled, and draws it. Under 100 seconds on two cores.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from exeplan.extras import SERVING, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from exeplan.core.models.model import ModelSpec
    from exeplan.core.plan import Plan
    from exeplan.core.profile import Profile
    from exeplan.planner.plan_request import PlanRequest
    from exeplan.planner.problems.problem import Problem
    from exeplan.planner.solution import Solution
    from exeplan.runner.fidelity.interleaved import Error, Measured

POSITION = 90
POLICIES = ("static", "orca", "rra")
_BOUND_FACTOR = 4.0
"""The demo's bound over what one request alone needs, so that there is a trade-off on any machine."""
_ROOM = 0.8
"""Share of the bound that is planned for: the machine may become slower than it was while it was profiled."""
_OWN_ERROR = 0.05
"""From this error on a sentence says what it is made of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("exeplan-demo"), help="where profile, plans and picture go")
    parser.add_argument("--model", default="demo", help="a shipped name or a model directory")
    parser.add_argument("--workload", default="alpaca", metavar="W")
    parser.add_argument("--latency-bound", metavar="TIME", help="default: four times what one request alone needs")
    parser.add_argument("--budget", default="30s", metavar="TIME", help="for profiling (default 30s)")
    parser.add_argument("--duration", default="7s", metavar="TIME", help="of each slice, two a policy (default 7s)")


def run(args: argparse.Namespace) -> int:
    from exeplan.outputs import check_output
    from exeplan.units import seconds, seconds_of_run, show_seconds

    require("the demo", *SERVING, "matplotlib")
    check_output(args.dir / "demo.png")
    began, duration = time.monotonic(), seconds_of_run(args.duration, "--duration")
    budget = seconds_of_run(args.budget, "--budget")
    asked = seconds(args.latency_bound, "--latency-bound") if args.latency_bound else None
    _say(f"1. profile {args.model} for at most {show_seconds(budget)}")
    spec, profile = _profiled(args, budget)
    bound, request = _request(args, profile, asked)
    problem = request.problem(None)
    length = problem.workload.output_quantile(0.99)
    _say(
        f"2. plan {problem.workload.name} under {show_seconds(bound)} for an output of the 99th-percentile length, "
        f"{length} tokens; planned for {_ROOM:.0%} of it, as other load may slow this machine down"
    )
    planned = [_planned(args, request, policy, bound) for policy in POLICIES]
    order = " ".join([*POLICIES, *reversed(POLICIES)])
    _say(f"3. run the plans on one engine, {2 * len(POLICIES)} slices of {show_seconds(duration)}: {order}")
    rows = _run([plan for plan, _ in planned], problem, spec, profile, duration)
    _say(
        f"4. predicted against measured: {spec.name} on {profile.device.name}, {problem.workload.name}, "
        f"bound {show_seconds(bound)}"
    )
    _print(rows, bound, profile)
    picture = args.dir / "demo.png"
    _draw(rows, [solution for _, solution in planned], bound, picture)
    print(f"\npicture: {picture}; profile and plans are in {args.dir}; next: exeplan serve {args.dir}/rra.yaml")
    print(f"all this took {show_seconds(time.monotonic() - began)}")
    return 0


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _profiled(args: argparse.Namespace, budget: float) -> "tuple[ModelSpec, Profile]":
    from exeplan import api
    from exeplan.planner.load_problem import profile_for
    from exeplan.profiler.profile_model import profile_model
    from exeplan.progress import note
    from exeplan.runner.compute.families import check_family

    spec = api.load_model(args.model)
    check_family(spec)
    note(spec.remarks)
    path = args.dir / f"{Path(args.model).name}.profile.json"
    profile_model(spec, output=path, budget_seconds=budget)
    return spec, profile_for(spec, api.load_profile(path))


def _request(args: argparse.Namespace, profile: "Profile", bound: float | None) -> "tuple[float, PlanRequest]":
    """The bound in seconds, one for the machine where None was given, and what is asked under the share of it that
    leaves room."""
    from exeplan import api
    from exeplan.core.bounds import Bound
    from exeplan.core.schedule import Schedule
    from exeplan.planner.plan_request import PlanRequest

    asked = PlanRequest(
        profile=profile,
        workload=api.load_workload(args.workload),
        fit_context=True,
        bounds=(Bound(seconds=math.inf),),
    )
    if bound is None:
        alone = asked.problem(None).evaluate(Schedule("static", {"batch_size": 1})).latency
        bound = float(f"{_BOUND_FACTOR * alone:.1g}")
    return bound, replace(asked, bounds=(Bound(seconds=_ROOM * bound),))


def _planned(args: argparse.Namespace, request: "PlanRequest", policy: str, bound: float) -> "tuple[Plan, Solution]":
    """The plan, saved; the one returned promises the whole bound."""
    from exeplan.core.bounds import Bound
    from exeplan.planner.solution import solve
    from exeplan.units import show_seconds

    solution = solve(replace(request, policy=policy))
    plan = solution.save(args.dir / f"{policy}.yaml")
    assert plan.estimate is not None
    print(
        f"   {plan.schedule}: {plan.estimate.throughput:.3g} req/s, {show_seconds(plan.estimate.latency)}", flush=True
    )
    return replace(plan, bound=Bound(seconds=bound)), solution


def _run(
    plans: "Sequence[Plan]", problem: "Problem", spec: "ModelSpec", profile: "Profile", duration: float
) -> "list[Measured]":
    from exeplan.progress import Shown
    from exeplan.runner.fidelity.interleaved import play_interleaved

    with Shown("demo") as told:

        def tell(number: int, of: int, plan: "Plan") -> None:
            told(f"slice {number + 1} of {of}: {plan.schedule}", number / of)

        return play_interleaved(
            plans, spec=spec, profile=profile, workload=problem.workload, seconds=duration, on_slice=tell
        )


def _print(rows: "Sequence[Measured]", bound: float, profile: "Profile") -> None:
    """Tables of throughput and latency, then what a reader should know of each figure."""
    from exeplan.planner.reports.tables import table
    from exeplan.units import show_seconds

    header = ("", "predicted", "measured", "error", "at profiling speed", "error", "90 % interval")
    cells = []
    for row in rows:
        for figure, show in (("throughput", _requests_a_second), ("latency", show_seconds)):
            shown = [show(row.mean(column, figure)) for column in ("predicted", "measured", "at_profile_speed")]
            errors = [row.error(figure, column=column) for column in ("measured", "at_profile_speed")]
            cells.append(
                (
                    str(row.plan.schedule) if figure == "throughput" else "",
                    *shown[:2],
                    _percent(errors[0]),
                    shown[2],
                    _percent(errors[1]),
                    _interval(errors[1]),
                )
            )
    print(table(header, cells))
    print(f"\nlatency is that of an output of the 99th-percentile length; {_about_speed(rows, profile)}")
    for sentence in (*_errors(rows), *_broken(rows, bound), *_ranking(rows)):
        print(f"- {sentence}")


def _about_speed(rows: "Sequence[Measured]", profile: "Profile") -> str:
    if not profile.reference_passes:
        return "this profile has no reference passes, so that nothing is known of the machine's speed"
    return (
        "at profiling speed is what reference passes between the engine's own say it would have been on the machine as "
        f"it was while it was profiled, when its speed moved by +-{profile.speed_spread:.0%}"
    )


def _errors(rows: "Sequence[Measured]") -> Iterator[str]:
    """Why the figures as measured are off, where they are, and what was estimated from little."""
    for row in rows:
        error = row.error("throughput", column="measured")
        for number, one in enumerate(row.slices, start=1):
            where = f"{row.plan.schedule}, slice {number}"
            if one.passes is None:
                yield f"{where}: the engine did not begin with the planned pass, so that its error has no interval"
            elif error is None or abs(error.value) > _OWN_ERROR or not one.passes.same:
                yield f"{where}: {one.passes}"
        if row.mean("measured", "latency") is None:
            yield f"{row.plan.schedule}: no latency, as no output of that length was in a steady window"
        for number, one in enumerate(row.slices, start=1):
            for note in one.measured.notes:
                if not note.startswith("bounds:"):  # No figure of the table is of them.
                    yield f"{row.plan.schedule}, slice {number}: {note}"


def _broken(rows: "Sequence[Measured]", bound: float) -> Iterator[str]:
    from exeplan.units import show_apart

    for row in rows:
        latency, even = row.mean("measured", "latency"), row.mean("at_profile_speed", "latency")
        if latency and latency > bound:
            why = "the machine is slower than it was" if even and even <= bound else "so it would at profiling speed"
            yield f"{row.plan.schedule} breaks the bound with {show_apart(latency, bound)[0]}: {why}"


def _ranking(rows: "Sequence[Measured]") -> Iterator[str]:
    """Each policy against the one behind it, by what it would sustain at profiling speed."""
    from exeplan.runner.fidelity.interleaved import differ

    for one, other in pairwise(sorted(rows, key=lambda row: -row.sustained())):
        best, behind = one.plan.schedule.policy, other.plan.schedule.policy
        apart = differ(one, other)
        if apart:
            yield f"{best} serves {one.sustained() / other.sustained():.2f} times what {behind} does"
        elif apart is None:
            yield f"{best} and {behind}: the slices were too short to tell which serves more"
        else:
            yield f"{best} and {behind} are within noise"


def _requests_a_second(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} req/s"


def _percent(error: "Error | None") -> str:
    return "-" if error is None else f"{100 * error.value:+.1f} %"


def _interval(error: "Error | None") -> str:
    if error is None or error.low is None or error.high is None:
        return "-"
    return f"{100 * error.low:+.1f} to {100 * error.high:+.1f} %"


def _draw(rows: "Sequence[Measured]", solutions: "Sequence[Solution]", bound: float, path: Path) -> None:
    """Predicted against measured with intervals, and the frontier of every policy."""
    from exeplan.figures import new_figure, save_figure
    from exeplan.planner.reports.frontier_plot import plot_frontier

    figure = new_figure(13, 4.5)
    for axes, name, unit in zip(
        figure.subplots(1, 3)[:2], ("throughput", "latency"), ("requests/s", "s, 99th-percentile output"), strict=True
    ):
        _draw_pairs(axes, rows, name, unit)
    frontier = [row for solution in solutions for row in solution.frontier()]
    most = max((row.throughput for row in frontier if row.wins), default=0.0)
    frontier = [replace(row, wins=row.wins and row.throughput == most) for row in frontier]
    plot_frontier(frontier, figure.axes[2], bound=bound)
    save_figure(figure, path)


def _draw_pairs(axes: "Axes", rows: "Sequence[Measured]", name: str, unit: str) -> None:
    """One figure of each plan: predicted, as measured and at profiling speed, the last two with intervals."""
    columns = (
        ("predicted", "predicted"),
        ("measured", "measured"),
        ("at_profile_speed", "measured, at profiling speed"),
    )
    for number, (column, label) in enumerate(columns):
        at = [place + 0.28 * (number - 1) for place in range(len(rows))]
        values = [row.mean(column, name) or 0.0 for row in rows]
        axes.bar(at, values, width=0.26, label=label, color=("0.75", "tab:blue", "tab:orange")[number])
        for place, value, row in zip(at, values, rows, strict=True):
            error = row.error(name, column=column) if number else None
            if error and error.low is not None and error.high is not None:
                half = value * (error.high - error.low) / 2 / (1 + error.value)
                axes.errorbar(place, value, yerr=half, color="black", capsize=3)
    axes.set_xticks(range(len(rows)), [row.plan.schedule.policy for row in rows])
    axes.set(ylabel=unit, title=f"{name}, 90 % intervals")
    axes.set_ylim(0, 1.35 * max((row.mean(column, name) or 0.0 for row in rows for column, _ in columns), default=1.0))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
