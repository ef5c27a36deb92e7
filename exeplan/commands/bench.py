"""play a workload against a plan or a server, predicted against measured

Without --url the plan's engine runs in this process. The load is a backlog (everything at once) unless --concurrency
(closed loop), --rate (Poisson) or --trace-arrivals (the trace's own times) says otherwise.
"""

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.core.metrics import RequestRecord
    from exeplan.core.model import ModelSpec
    from exeplan.core.plan import Plan
    from exeplan.core.profile import Profile
    from exeplan.core.schedule import Estimate
    from exeplan.runner.load import EngineRun, Load
    from exeplan.simulator.routed import Replica, RoutedRun
    from exeplan.workload.workload import Workload

POSITION = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, nargs="?", metavar="PLAN", help="not needed with --url and --workload")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--workload", metavar="W", help="instead of the plan's own")
    parser.add_argument("--profile", metavar="FILE", help="instead of the plan's own")
    parser.add_argument("--requests", type=int, metavar="N", help="default: what the plan does in --duration")
    parser.add_argument("--duration", default="30s", metavar="TIME", help="aim for a run of this length (default 30s)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop with N requests at a time")
    load.add_argument("--rate", type=float, metavar="R", help="open loop: Poisson arrivals, requests/s")
    load.add_argument("--trace-arrivals", action="store_true", help="open loop: the trace's own arrival times")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--no-stream", action="store_true", help="with --url: whole answers, without times of single tokens"
    )
    parser.add_argument("--vocab-size", type=int, default=1000, help="of the random prompts for a server without PLAN")
    parser.add_argument("--weights", choices=("auto", "dummy"), default="auto")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="of each GPU's memory that the engine here may use (default: the plan's, 0.9)",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the predicted passes, of the first replica (.json, .png, .svg, .pdf)",
    )
    parser.add_argument(
        "--engine-timeline", type=Path, metavar="FILE", help="write the passes that the engine here ran (.json)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from exeplan.errors import InputError
    from exeplan.extras import SERVING, require

    require("a load", *(("aiohttp",) if args.url else SERVING))
    for name in ("requests", "concurrency", "rate", "vocab_size"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} must be above zero, found {value}")
    if args.seed < 0:
        raise InputError(f"--seed must be at least 0, found {args.seed}")
    if args.plan is None:
        return _bench_url_only(args)
    return _bench_plan(args)


def _bench_plan(args: argparse.Namespace) -> int:
    import math

    from exeplan.core.bounds import Bound
    from exeplan.core.metrics import summarize
    from exeplan.core.plan import with_utilization
    from exeplan.errors import InputError
    from exeplan.planner.load_problem import plan_model, plan_workload, read_plan

    plan = with_utilization(read_plan(args.plan), args.gpu_memory_utilization)
    if plan.num_replicas > 1 and not args.url:
        raise InputError(
            f"the plan has {plan.num_replicas} replicas, and bench runs one engine; start `exeplan serve {args.plan}` "
            "and give its --url"
        )
    spec = plan_model(plan)
    workload = plan_workload(plan, spec, args.workload)
    load = _load(args, workload, plan)
    prediction = _prediction(args, plan, load)
    records, shared = _play(args, plan, spec, load)
    bounds = (plan.bound or Bound(seconds=math.inf), *plan.more_bounds)
    p99 = workload.output_quantile(0.99)
    measured = summarize(records, p99_output=p99, bounds=bounds, backlog=load.backlog)
    replayed = None
    if prediction is not None:
        replayed = summarize(prediction.requests, p99_output=p99, bounds=bounds, backlog=load.backlog)
        if args.timeline:
            from exeplan.simulator.timeline import write_timeline

            write_timeline(
                prediction.replicas[0], args.timeline, title=f"{plan.schedule} on {workload.name}, predicted"
            )
    on_cpu_clock = None
    if shared is not None:
        quiet = shared.on_cpu_clock()
        on_cpu_clock = summarize(quiet, p99_output=p99, bounds=bounds, backlog=load.backlog)
    _print(args, plan, workload, load, measured=measured, replayed=replayed, on_cpu_clock=on_cpu_clock)
    return 0


def _load(args: argparse.Namespace, workload: "Workload", plan: "Plan | None") -> "Load":
    from exeplan.runner.load import draw_load, enough_requests
    from exeplan.units import seconds

    duration = seconds(args.duration, "--duration")
    if plan and plan.estimate and args.rate is None:
        throughput = plan.estimate.throughput
        num_requests = enough_requests(plan.schedule, throughput=throughput, seconds=duration)
    else:
        num_requests = max(50, round((args.rate or 10.0) * duration))
    num_requests = args.requests or min(num_requests, 5000)
    return draw_load(
        workload,
        num_requests,
        seed=args.seed,
        concurrency=args.concurrency,
        rate=args.rate,
        trace_arrivals=args.trace_arrivals,
    )


def _prediction(args: argparse.Namespace, plan: "Plan", load: "Load") -> "RoutedRun | None":
    """The replay of these very requests on all replicas; None for a plan without a profile."""
    from exeplan.core.profile import load_profile
    from exeplan.core.schedule import ROUTERS
    from exeplan.planner.load_problem import plan_model, profile_for
    from exeplan.simulator.routed import routed_replay

    reference = args.profile or plan.profile
    if reference is None:
        return None
    spec = plan_model(plan)
    return routed_replay(
        _replicas(plan, profile_for(spec, load_profile(Path(reference))), spec),
        plan.router or ROUTERS[0],
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        arrivals=load.arrivals,
        concurrency=load.concurrency,
        deadlines=load.deadlines,
    )


def _replicas(plan: "Plan", profile: "Profile", spec: "ModelSpec") -> "list[Replica]":
    from exeplan.core.plan import single_plans
    from exeplan.planner.load_problem import engine_blocks, plan_cluster
    from exeplan.simulator.cost import CostModel
    from exeplan.simulator.routed import Replica

    cluster = plan_cluster(plan, profile)
    return [
        Replica(
            schedule=one.schedule,
            cost=CostModel(profile, one.placement, cluster),
            num_blocks=engine_blocks(one, spec),
        )
        for one in single_plans(plan)
    ]


def _play(
    args: argparse.Namespace, plan: "Plan", spec: "ModelSpec", load: "Load"
) -> "tuple[list[RequestRecord], EngineRun | None]":
    """The records and, where the CPU clock means something (one thread that never waits), the whole run."""
    import asyncio

    from exeplan.runner.load import play_engine, served_model

    if args.url:
        model = served_model(args.url, args.api_key)
        return asyncio.run(_play_url(args, load, model, vocab_size=spec.vocab_size)), None
    from exeplan.runner.engine_process.build import build_engine, engine_setup

    setup = engine_setup(plan, spec, dummy_weights=args.weights == "dummy", timeline=args.engine_timeline)
    with closing(build_engine(setup)) as engine:
        played = play_engine(engine, load, vocab_size=spec.vocab_size)
    one_thread = plan.num_threads == 1 and sum(stage.tensor_parallel_size for stage in plan.placement) == 1
    comparable = load.backlog and one_thread and (plan.device or "cpu") == "cpu"
    return played.records, played if comparable else None


async def _play_url(args: argparse.Namespace, load: "Load", model: str, *, vocab_size: int) -> "list[RequestRecord]":
    from exeplan.runner.load import play_url

    stream = not args.no_stream
    return await play_url(args.url, load, model=model, vocab_size=vocab_size, api_key=args.api_key, stream=stream)


def _bench_url_only(args: argparse.Namespace) -> int:
    import asyncio

    from exeplan.core.metrics import summarize
    from exeplan.errors import InputError
    from exeplan.runner.load import served_model
    from exeplan.workload.files import load_workload

    if not (args.url and args.workload):
        raise InputError("give a PLAN, or --url and --workload")
    workload = load_workload(args.workload)
    load = _load(args, workload, None)
    model = served_model(args.url, args.api_key)
    records = asyncio.run(_play_url(args, load, model, vocab_size=args.vocab_size))
    measured = summarize(records, p99_output=workload.output_quantile(0.99), backlog=load.backlog)
    _print(args, None, workload, load, measured=measured, replayed=None)
    return 0


def _print(
    args: argparse.Namespace,
    plan: "Plan | None",
    workload: "Workload",
    load: "Load",
    *,
    measured: "Estimate",
    replayed: "Estimate | None",
    on_cpu_clock: "Estimate | None" = None,
) -> None:
    from exeplan.core.plan import as_json
    from exeplan.planner.tables import evidence_rows, json_line, notes_on, predicted_and_measured

    predicted = plan.estimate if plan and load.backlog and args.concurrency is None else None
    if args.json:
        body = as_json(plan) if plan else {}
        estimates = {"replay": replayed, "measured": measured, "measured_cpu_clock": on_cpu_clock}
        shown = {name: e.to_dict() if e else None for name, e in estimates.items()}
        print(json_line({**body, **shown, "evidence": evidence_rows(**estimates)}))
        return
    what = str(plan.schedule) if plan else args.url
    copies = f"{plan.num_replicas} replicas of " if plan and plan.num_replicas > 1 else ""
    print(f"{copies}{what} on {workload.name}, {len(load.input_tokens)} requests\n")
    print(predicted_and_measured(predicted=predicted, replay=replayed, measured=measured))
    if notes := notes_on(replay=replayed, measured=measured):
        print(notes)
    if on_cpu_clock and measured.throughput < 0.97 * on_cpu_clock.throughput:
        share = measured.throughput / on_cpu_clock.throughput
        print(
            f"\nother processes used this core too (the engine had {100 * share:.0f} % of it); by its own CPU clock:\n"
        )
        print(predicted_and_measured(predicted=predicted, replay=replayed, measured=on_cpu_clock))
