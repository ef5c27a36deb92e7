"""play a workload against a plan or a server, predicted against measured

`bench PLAN` runs the plan's engine in this process, `bench PLAN --url URL` asks a server with it, `bench URL --workload
W` any OpenAI-compatible server. The load is a backlog (everything at once) unless --concurrency (closed loop), --rate
(Poisson) or --trace-arrivals (the trace's own times) says otherwise.
"""

import argparse
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exeplan.core.models.model import ModelSpec
    from exeplan.core.plan import Plan
    from exeplan.core.profile import Profile
    from exeplan.core.runs.metrics import RequestRecord
    from exeplan.core.schedule import Estimate
    from exeplan.runner.fidelity.pass_comparison import PassComparison
    from exeplan.runner.load import EngineRun, Load
    from exeplan.runner.server_counters import ServerRun
    from exeplan.simulator.routed import Replica, RoutedRun
    from exeplan.workload.workload import Workload

POSITION = 80
_CLIENT = ("aiohttp", "prometheus_client")
_VOCABULARY = 1000
"""Tokens of random prompts for a server that does not state its own; few models have fewer."""
_FROM_PREFILL = "ttft and latency from the start of a request's first prefill, its wait left out"
_FROM_SENDING = (
    "measured ttft and latency from sending a request, its wait included: the server does not say when a prefill begins"
)
_FROM_ARRIVAL = "; the bound's latency from its arrival"
_TIMES = """
times at the client, from sending a request, its wait included: ttft, to its first token; tpot, from the first token to
the last over the tokens after the first, a mean a request; itl, between two successive tokens of a request; latency, to
the last token"""
_MOST_REQUESTS = 5000
"""Unless more are asked for."""
_SETTLE_SECONDS = 1.0
"""Until a server has counted its last requests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="PLAN|URL",
        help="a plan, or a running server such as http://127.0.0.1:8000, with or without /v1",
    )
    parser.add_argument("--url", help="with PLAN: the server that runs it")
    parser.add_argument("--workload", metavar="W", help="instead of the plan's own")
    parser.add_argument(
        "--fit-context", action="store_true", help="with URL: scale the lengths to the context that the server states"
    )
    parser.add_argument("--profile", metavar="FILE", help="instead of the plan's own")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="default: what the plan does in --duration, at most 5000"
    )
    parser.add_argument("--duration", default="30s", metavar="TIME", help="aim for a run of this length (default 30s)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop with N requests at a time")
    load.add_argument("--rate", type=float, metavar="R", help="open loop: Poisson arrivals, requests/s")
    load.add_argument("--trace-arrivals", action="store_true", help="open loop: the trace's own arrival times")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="with an https --url: trust these certificates, not the system's"
    )
    parser.add_argument(
        "--no-stream", action="store_true", help="with --url: whole answers, without times of single tokens"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"of the random prompts, without PLAN (default: what the server states, else {_VOCABULARY})",
    )
    parser.add_argument("--model-dir", metavar="DIR", help="where the model is now (default: where the plan says)")
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
        help="with PLAN: write the predicted passes, of the first replica (.json, .png, .svg, .pdf)",
    )
    parser.add_argument(
        "--engine-timeline", type=Path, metavar="FILE", help="write the passes that the engine here ran (.json)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from exeplan.errors import InputError
    from exeplan.extras import SERVING, require
    from exeplan.outputs import check_output
    from exeplan.runner.load import server_root

    args.plan = Path(args.target) if args.target else None
    if args.target and args.target.startswith(("http://", "https://")):
        if args.url:
            raise InputError(f"two servers were given, {args.target} and {args.url}")
        args.url, args.plan = args.target, None
    args.url = server_root(args.url) if args.url else None
    require("a load", *(_CLIENT if args.url else SERVING))
    for name in ("requests", "concurrency", "rate", "vocab_size"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} must be above zero, found {value}")
    if args.seed < 0:
        raise InputError(f"--seed must be at least 0, found {args.seed}")
    if args.engine_timeline and args.url:
        raise InputError("--engine-timeline goes with PLAN alone; the engine is the server's")
    if args.timeline:
        from exeplan.simulator.timeline import check_timeline

        check_timeline(args.timeline)
    for path in filter(None, (args.timeline, args.engine_timeline)):
        check_output(path)
    if args.plan is None:
        if args.timeline:
            raise InputError("--timeline goes with PLAN, whose passes are predicted")
        return _bench_url_only(args)
    if args.fit_context:
        raise InputError("--fit-context goes with URL; a plan states what fits its model")
    return _bench_plan(args)


def _bench_plan(args: argparse.Namespace) -> int:
    import math

    from exeplan.core.bounds import Bound
    from exeplan.core.plan import with_utilization
    from exeplan.core.runs.metrics import summarize
    from exeplan.errors import InputError
    from exeplan.planner.load_problem import plan_model, plan_workload, read_plan

    plan = with_utilization(read_plan(args.plan, model=args.model_dir), args.gpu_memory_utilization)
    if plan.num_replicas > 1 and not args.url:
        raise InputError(
            f"the plan has {plan.num_replicas} replicas, and bench runs one engine; start `exeplan serve {args.plan}` "
            "and give its --url"
        )
    spec = plan_model(plan)
    workload = plan_workload(plan, spec, args.workload)
    load = _load(args, workload, plan)
    profile = _profile(args, plan, spec)
    if args.timeline and profile is None:
        raise InputError("--timeline writes predicted passes, and the plan has no profile; give --profile")
    moves = load.arrivals is not None and not args.url  # By a clock that is known only when they have come.
    prediction = _prediction(plan, profile, spec, load) if profile and not moves else None
    records, shared, counted = _play(args, plan, spec, load, profile)
    if moves and shared and load.arrivals is not None:
        load = replace(load, arrivals=shared.moved(load.arrivals))
        prediction = _prediction(plan, profile, spec, load) if profile else None
    bounds = (plan.bound or Bound(seconds=math.inf), *plan.more_bounds)
    p99 = workload.output_quantile(0.99)
    measured = summarize(records, p99_output=p99, bounds=bounds, backlog=load.backlog)
    replayed = None
    if prediction is not None:
        replayed = summarize(prediction.requests, p99_output=p99, bounds=bounds, backlog=load.backlog)
    summary = partial(summarize, p99_output=p99, bounds=bounds, backlog=load.backlog)
    split = _Split.of(shared, prediction, plan, summary) if shared and load.backlog else None
    client = _Client.of(records, counted) if args.url else None
    even = None
    if counted and counted.num_reference_passes and load.backlog:
        even = summary(counted.at_profile_speed(records, num_engines=plan.num_replicas))
    slowed = None
    if profile and not load.backlog and (speed := _Speed.of(shared, counted)):
        slower = _prediction(plan, speed.slowed(profile), spec, load)
        slowed = speed, summary(slower.requests)
    gaps = _gaps(measured=records, replay=prediction.requests if prediction else None, plan=plan)
    _print(
        args,
        plan,
        workload,
        load,
        measured=measured,
        replayed=replayed,
        gaps=gaps,
        split=split,
        client=client,
        even=even,
        slowed=slowed,
    )
    if split is None and even is None and slowed is None and not args.json:
        print(f"\nno figures at the speed of the profile: {_why_no_split(shared)}")
    if args.timeline and prediction is not None:
        from exeplan.simulator.timeline import write_timeline

        write_timeline(prediction.replicas[0], args.timeline, title=f"{plan.schedule} on {workload.name}, predicted")
    return 0


@dataclass(frozen=True, kw_only=True)
class _Split:
    """What of the error is the machine's, in a backlog on an engine in this process."""

    passes: "PassComparison | None"
    on_cpu_clock: "Estimate | None"
    """None where the engine may wait, or has several threads."""
    at_profile_speed: "Estimate | None"
    """None without reference passes."""
    why_none: str
    speed: dict[str, float] | None
    """Of the machine, by its reference passes; None without."""

    @classmethod
    def of(
        cls, run: "EngineRun", prediction: "RoutedRun | None", plan: "Plan", summary: "Callable[..., Estimate]"
    ) -> "_Split":
        from exeplan.runner.fidelity.pass_comparison import compare_passes

        alone = _one_thread(plan)
        planned = prediction.replicas[0].passes if prediction else []
        return cls(
            passes=compare_passes(run, planned, one_thread=alone),
            on_cpu_clock=summary(run.on_cpu_clock()) if alone else None,
            at_profile_speed=summary(run.at_profile_speed(one_thread=alone)) if run.speed else None,
            why_none="" if run.speed else _why_no_reference(plan),
            speed={"slowness": run.speed.mean, "others": run.speed.others} if run.speed else None,
        )


@dataclass(frozen=True, kw_only=True)
class _Speed:
    """Of the machine while the engine waited for arrivals, by reference passes."""

    number: int
    slowness: float
    """How many times as long its passes took as while it was profiled, other processes on its cores included."""
    cost: float = 0.0
    """Seconds of reference passes over those of the steps of an engine in this process, whose clock stands still
    meanwhile."""

    @classmethod
    def of(cls, run: "EngineRun | None", counted: "ServerRun | None") -> "_Speed | None":
        """None where no reference pass tells it."""
        if run and run.speed and run.speed.samples:
            slowness = run.speed.mean * run.speed.others
            return cls(number=len(run.speed.samples), slowness=slowness, cost=run.reference_cost)
        if counted and counted.num_reference_passes:
            return cls(number=counted.num_reference_passes, slowness=counted.slowness)
        return None

    def slowed(self, profile: "Profile") -> "Profile":
        """The profile of a machine of that speed."""
        kept = profile.kept_rows_calibration
        return replace(
            profile,
            calibration=self.slowness * profile.calibration,
            kept_rows_calibration=None if kept is None else self.slowness * kept,
        )

    def __str__(self) -> str:
        stands = "while its clock stands still, by which requests come closer together"
        cost = f"; for these passes the engine waited {self.cost:.1%} of its time, {stands}" if self.cost else ""
        return (
            f"by {self.number} reference passes the machine took {self.slowness:.2f} times as long as while it was "
            f"profiled, other processes on its cores included{cost}; the replay of passes that take so long:"
        )


@dataclass(frozen=True, kw_only=True)
class _Client:
    """A run on a server as its client saw it, and as the server counted it."""

    times: dict[str, tuple[float, float, float]]
    """Mean, median and 99th percentile, in seconds from when requests were sent."""
    server: "ServerRun | None"
    """None of a server without such metrics."""
    differing: list[str]
    tells_prefills: bool
    """Whether the server says when the first prefill of a request began, so that its wait is told apart."""

    @classmethod
    def of(cls, records: "list[RequestRecord]", server: "ServerRun | None") -> "_Client":
        from exeplan.core.runs.metrics import client_times

        differing = server.disagreements(records) if server else []
        told = any(record.start > record.arrival for record in records)
        return cls(times=client_times(records), server=server, differing=differing, tells_prefills=told)

    def __str__(self) -> str:
        from exeplan.planner.reports.tables import table
        from exeplan.units import show_seconds

        rows = [(name, *map(show_seconds, figures)) for name, figures in self.times.items()]
        lines = [_TIMES, "", table(("", "mean", "median", "p99"), rows), ""]
        if not (server := self.server):
            return "\n".join([*lines, "the server shows no metrics that these could be held against"])
        counted = f"{server.requests} requests, {server.prompt_tokens} prompt and {server.output_tokens} output tokens"
        means = f"mean ttft {show_seconds(server.ttft)}, latency {show_seconds(server.latency)}, from arrival there"
        lines.append(f"the server's own metrics: {counted}{'' if self.differing else ', as sent'}; {means}")
        lines += [f"note: {line}; others use it at the same time, or it counts otherwise" for line in self.differing]
        return "\n".join(lines)


def _one_thread(plan: "Plan") -> bool:
    """Whether the engine computes in this thread alone, so that its CPU clock means something."""
    workers = sum(stage.tensor_parallel_size for stage in plan.placement)
    return plan.num_threads == 1 and workers == 1 and (plan.device or "cpu") == "cpu"


def _why_no_reference(plan: "Plan") -> str:
    from exeplan.core.runs.machine_speed import why_none

    return why_none(plan.device or "cpu") or "the profile has no reference passes; profile again"


def _why_no_split(run: "EngineRun | None") -> str:
    if run is None:
        return "the engine is the server's, which runs reference passes with `exeplan serve --watch-speed`"
    return "the engine waits for arrivals, which are as late on any machine, and no reference pass told its speed"


def _load(args: argparse.Namespace, workload: "Workload", plan: "Plan | None") -> "Load":
    from exeplan.policies import sampled_evenly
    from exeplan.progress import note
    from exeplan.runner.load import draw_load, enough_requests
    from exeplan.units import seconds_of_run

    duration = seconds_of_run(args.duration, "--duration")
    if plan and plan.estimate and args.rate is None:
        throughput = plan.estimate.throughput
        num_requests = enough_requests(plan.schedule, throughput=throughput, seconds=duration)
    else:
        num_requests = max(50, round((args.rate or 10.0) * duration))
    if args.requests is None and num_requests > _MOST_REQUESTS:
        note([f"{_MOST_REQUESTS} of {num_requests} requests are sent, which end before {duration:g} s; --requests N"])
    num_requests = args.requests or min(num_requests, _MOST_REQUESTS)
    return draw_load(
        workload,
        num_requests,
        seed=args.seed,
        concurrency=args.concurrency,
        rate=args.rate,
        trace_arrivals=args.trace_arrivals,
        stratified=plan is None or sampled_evenly(plan.schedule),
    )


def _profile(args: argparse.Namespace, plan: "Plan", spec: "ModelSpec") -> "Profile | None":
    """None for a plan without a profile."""
    from exeplan.core.profile import load_profile
    from exeplan.planner.load_problem import profile_for

    reference = args.profile or plan.profile
    return (
        None if reference is None else profile_for(spec, load_profile(Path(reference))).with_threads(plan.num_threads)
    )


def _prediction(plan: "Plan", profile: "Profile", spec: "ModelSpec", load: "Load") -> "RoutedRun":
    """The replay of these very requests on all replicas."""
    from exeplan.core.schedule import ROUTERS
    from exeplan.simulator.routed import routed_replay

    return routed_replay(
        _replicas(plan, profile, spec),
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
            capacity=one.capacity,
        )
        for one in single_plans(plan)
    ]


def _play(
    args: argparse.Namespace, plan: "Plan", spec: "ModelSpec", load: "Load", profile: "Profile | None"
) -> "tuple[list[RequestRecord], EngineRun | None, ServerRun | None]":
    """The records and, of an engine in this process, the whole run; of a server, what it counted."""
    from exeplan.progress import Shown
    from exeplan.runner.load import play_engine, served_model

    if args.url:
        from exeplan.core.plan import single_plans
        from exeplan.policies import pass_limits

        model = served_model(args.url, args.api_key, args.tls_ca)
        seats = sum(pass_limits(one.schedule).decode_rows or 0 for one in single_plans(plan))
        records, counted = _play_url(args, load, model.name, vocab_size=spec.vocab_size, seats=seats)
        return records, None, counted
    from exeplan.runner.engine_process.build import build_engine, engine_setup

    setup = engine_setup(plan, spec, dummy_weights=args.weights == "dummy", timeline=args.engine_timeline)
    with closing(build_engine(setup)) as engine, Shown("bench") as shown:
        passes = profile.reference_passes if profile else ()
        reference = engine.reference_passes(passes)
        played = play_engine(engine, load, vocab_size=spec.vocab_size, reference=reference, told=shown)
    return played.records, played, None


def _play_url(
    args: argparse.Namespace, load: "Load", model: str, *, vocab_size: int, seats: int = 0
) -> "tuple[list[RequestRecord], ServerRun | None]":
    """The records, and what the server's own metrics say of the same time; None of one without such metrics. Of a
    backlog so many requests are there at once that its `seats` are taken and others wait."""
    import asyncio
    import time

    from exeplan.progress import Shown
    from exeplan.runner.load import AT_ONCE, authorization, play_url
    from exeplan.runner.server_counters import between, read_counters

    read = partial(read_counters, args.url, authorization(args.api_key), args.tls_ca)
    before = read()
    with Shown("bench") as shown:
        playing = play_url(
            args.url,
            load,
            model=model,
            vocab_size=vocab_size,
            stream=not args.no_stream,
            api_key=args.api_key,
            tls_ca=args.tls_ca,
            at_once=max(AT_ONCE, 2 * seats),
            told=shown,
        )
        records = asyncio.run(playing)
    time.sleep(_SETTLE_SECONDS if before else 0.0)
    after = read() if before else None
    return records, between(before, after) if before and after else None


def _bench_url_only(args: argparse.Namespace) -> int:
    from exeplan.core.runs.metrics import summarize
    from exeplan.errors import InputError
    from exeplan.runner.load import BadRequestError, served_model
    from exeplan.workload.files import load_workload

    if not (args.url and args.workload):
        raise InputError("give a PLAN, or a URL and --workload")
    workload = load_workload(args.workload)
    model = served_model(args.url, args.api_key, args.tls_ca)
    if args.fit_context:
        if model.max_context is None:
            raise InputError(f"{args.url} does not state its model's context, to which --fit-context scales")
        workload = workload.fit_context(model.max_context)
    load = _load(args, workload, None)
    size = args.vocab_size or model.vocab_size or _VOCABULARY
    try:
        records, counted = _play_url(args, load, model.name, vocab_size=size)
    except BadRequestError as error:
        if args.vocab_size or model.vocab_size:
            raise
        raise InputError(
            f"{error}; its prompt was of random token ids below {size}, as the server does not state its vocabulary: "
            "--vocab-size N gives it"
        ) from None
    measured = summarize(records, p99_output=workload.output_quantile(0.99), backlog=load.backlog)
    client = _Client.of(records, counted)
    _print(args, None, workload, load, measured=measured, replayed=None, gaps=_gaps(measured=records), client=client)
    return 0


def _gaps(
    *,
    measured: "Sequence[RequestRecord]",
    replay: "Sequence[RequestRecord] | None" = None,
    plan: "Plan | None" = None,
) -> dict[str, float]:
    """Seconds of the longest time between two tokens of a request: as measured, in the replay, and the most that the
    plan's passes can take."""
    from exeplan.core.runs.metrics import Requests

    seen = {"measured": measured, **({"replay": replay} if replay else {})}
    found = {name: Requests.of(requests).times.longest_gap() for name, requests in seen.items()}
    return {**found, **({"at_most": plan.longest_stall["seconds"]} if plan and plan.longest_stall else {})}


def _print(
    args: argparse.Namespace,
    plan: "Plan | None",
    workload: "Workload",
    load: "Load",
    *,
    measured: "Estimate",
    replayed: "Estimate | None",
    gaps: dict[str, float],
    split: "_Split | None" = None,
    client: _Client | None = None,
    even: "Estimate | None" = None,
    slowed: "tuple[_Speed, Estimate] | None" = None,
) -> None:
    """`even` is what was measured on a server, at the speed of the profile; `slowed` is the replay at the speed that
    the machine had meanwhile, where requests arrive: their waits do not scale with it."""
    from exeplan.core.plan import as_json
    from exeplan.planner.reports.tables import evidence_rows, json_line, notes_on, predicted_and_measured
    from exeplan.units import show_seconds

    predicted = plan.estimate if plan and load.backlog and args.concurrency is None else None
    if args.json:
        body = as_json(plan) if plan else {}
        estimates = {"replay": replayed, "measured": measured, **_other_clocks(split)}
        if even:
            estimates["measured_at_profile_speed"] = even
        if slowed:
            estimates["replay_at_measured_speed"] = slowed[1]
        shown = {name: e.to_dict() if e else None for name, e in estimates.items()}
        passes = asdict(split.passes) if split and split.passes else None
        speed = asdict(slowed[0]) if slowed else split.speed if split else None
        more = {"passes": passes, "speed": speed, "evidence": evidence_rows(**estimates)}
        seen = {"client": asdict(client)} if client else {}
        print(json_line({**body, **shown, **more, **seen, "longest_gap": gaps}))
        return
    what = str(plan.schedule) if plan else args.url
    copies = f"{plan.num_replicas} replicas of " if plan and plan.num_replicas > 1 else ""
    compared = partial(predicted_and_measured, metric=_unbounded_metric(plan))
    print(f"{copies}{what} on {workload.name}, {len(load.input_tokens)} requests\n\n{_counted_from(plan, client)}\n")
    print(compared(predicted=predicted, replay=replayed, measured=measured))
    if notes := notes_on(replay=replayed, measured=measured):
        print(notes)
    words = {"at_most": "at most by the plan's passes alone"}
    where = ", ".join(f"{show_seconds(value)} {words.get(name, name)}" for name, value in gaps.items())
    print(f"\nlongest time between two tokens of a request: {where}")
    if client:
        print(client)
    if even and client and client.server:
        print(f"\n{client.server.speed}; at the speed that the machine had while it was profiled:\n")
        print(compared(predicted=predicted, replay=replayed, measured=even))
    if slowed:
        print(f"\n{slowed[0]}\n\n{compared(predicted=None, replay=slowed[1], measured=measured)}")
    if split:
        compared = partial(compared, predicted=predicted, replay=replayed)
        _print_split(split, compared, measured)


def _counted_from(plan: "Plan | None", client: _Client | None) -> str:
    """From when the times of the first table count."""
    from exeplan.core.bounds import is_deadline

    due = plan is not None and plan.bound is not None and is_deadline(plan.bound.metric)
    told = client is None or client.tells_prefills
    return (_FROM_PREFILL if told else _FROM_SENDING) + (_FROM_ARRIVAL if due else "")


def _unbounded_metric(plan: "Plan | None") -> str:
    """What the latency is of where nothing bounds it; '' where a bound does."""
    import math

    from exeplan.core.bounds import Bound

    bound = (plan.bound if plan else None) or Bound(seconds=math.inf)
    return "" if math.isfinite(bound.seconds) else bound.metric


def _other_clocks(split: "_Split | None") -> "dict[str, Estimate | None]":
    return {
        "measured_cpu_clock": split.on_cpu_clock if split else None,
        "measured_at_profile_speed": split.at_profile_speed if split else None,
    }


def _print_split(split: _Split, compared: "Callable[..., str]", measured: "Estimate") -> None:
    """`compared` is the table of what was predicted and of what was measured."""
    quiet = split.on_cpu_clock
    if split.passes:
        print(f"\n{split.passes}")
    if split.at_profile_speed:
        print("\nat the speed that the machine had while it was profiled:\n")
        print(compared(measured=split.at_profile_speed))
        return
    print(f"\nno figures at the speed of the profile: {split.why_none}")
    if quiet and measured.throughput < 0.97 * quiet.throughput:
        share = measured.throughput / quiet.throughput
        print(
            f"\nother processes used this core too (the engine had {100 * share:.0f} % of it); by its own CPU clock:\n"
        )
        print(compared(measured=quiet))
