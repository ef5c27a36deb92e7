"""watch the plan that another engine's server runs, by its metrics, and write a better one when the traffic changes

Every few seconds the engine's Prometheus metrics are read: lengths by histograms, times, queue. Where the lengths have
changed, and another plan is better by the rules of `exeplan serve --replan`, it is written with its command line; with
--plug-in it replaces PLAN, which exeplan's scheduler in vLLM reads again. Predicted and observed figures are shown to
Prometheus on --port.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.core.profile import Profile
    from exeplan.runner.engine_watch.readings import Readings
    from exeplan.runner.engine_watch.sidecar import Sidecar

POSITION = 67
_PORT = 9400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from exeplan.commands.drift import add_rules

    parser.add_argument("plan", type=Path, nargs="?", metavar="PLAN")
    parser.add_argument("--engine", metavar="ENGINE", help="vllm or sglang (default: the one of the plan's profile)")
    parser.add_argument(
        "--metrics",
        action="append",
        metavar="URL",
        help="of the server, such as http://127.0.0.1:8000; once for each replica",
    )
    parser.add_argument("--model", metavar="NAME", help="what the engine loads (default: the plan's model)")
    parser.add_argument(
        "--plug-in", action="store_true", help="the server has exeplan's scheduler: change its cadence while it runs"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="for the new plan, its command line beside it (PLAN-next.yaml)",
    )
    add_rules(parser)
    parser.add_argument("--host", default="127.0.0.1", help="of the figures shown (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=_PORT, metavar="N", help=f"default: {_PORT}; 0 for any free one")
    parser.add_argument("--for", dest="duration", metavar="TIME", help="end after this time (default: when stopped)")
    parser.add_argument(
        "--grafana", type=Path, metavar="FILE", help="write a dashboard to import, and end where no PLAN is given"
    )


def run(args: argparse.Namespace) -> int:
    import json

    from exeplan.errors import InputError
    from exeplan.extras import require
    from exeplan.files import write_text

    require("watching a server", "prometheus_client", "msgspec")
    if args.grafana:
        from exeplan.runner.engine_watch.dashboard import grafana_dashboard

        write_text(args.grafana, json.dumps(grafana_dashboard(), indent=2) + "\n")
        print(f"wrote {args.grafana}, a dashboard that Grafana imports")
        if args.plan is None:
            return 0
    if args.plan is None:
        raise InputError("name the PLAN that the server runs")
    if not args.metrics:
        raise InputError("say where the server is with --metrics URL, such as http://127.0.0.1:8000")
    if wrong := [url for url in args.metrics if not url.startswith(("http://", "https://"))]:
        raise InputError(f"--metrics takes a URL such as http://127.0.0.1:8000, found '{wrong[0]}'")
    if not 0 <= args.port < 1 << 16:
        raise InputError(f"--port must lie between 0 and 65535, found {args.port}")
    _watch(args, _sidecar(args))
    return 0


def _sidecar(args: argparse.Namespace) -> "Sidecar":
    from dataclasses import replace

    from exeplan import api
    from exeplan.commands.drift import rules_of
    from exeplan.core.profile import load_profile, save_profile
    from exeplan.errors import InputError
    from exeplan.outputs import check_output
    from exeplan.planner.load_problem import plan_sizes, read_plan
    from exeplan.profiler.datasheets.engine_constants import engine_policies
    from exeplan.runner.engine_watch.readings import ENGINES
    from exeplan.runner.engine_watch.sidecar import Server, Sidecar, model_of

    rules, plan = rules_of(args), read_plan(args.plan)
    by_datasheet = api.plan_profile(plan)
    times = by_datasheet or (load_profile(Path(plan.profile)) if plan.profile else None)
    engine = args.engine or _engine_of(times)
    if engine not in ENGINES:
        raise InputError(f"the metrics of {' and '.join(ENGINES)} are known, not those of '{engine}'")
    if args.plug_in and engine != "vllm":
        raise InputError(f"--plug-in is a scheduler for vLLM, not for {engine}")
    server = Server(
        engine=engine,
        model=model_of(plan, args.model),
        plug_in=args.plug_in,
        file=args.plan,
        output=args.output or args.plan.with_name(f"{args.plan.stem}-next.yaml"),
    )
    if server.output.resolve() == args.plan.resolve():
        raise InputError(f"--output is the plan that the server runs, {args.plan}; name another file")
    check_output(server.output)
    if by_datasheet:
        path = server.output.with_name(f"{server.output.stem}-profile.json")
        save_profile(by_datasheet, path)
        print(f"wrote {path}, the plan's times ({by_datasheet.source}): what is planned again names them")
        plan = replace(plan, profile=str(path.absolute()))
    others = engine_policies(times) if times and not args.plug_in else ()
    policies = tuple(dict.fromkeys((plan.schedule.policy, *others)))
    return Sidecar(plan, server, plan_sizes(plan), rules=rules, policies=policies)


def _engine_of(times: "Profile | None") -> str:
    """Raises InputError where they are of exeplan's own engine, or of none."""
    from exeplan.errors import InputError
    from exeplan.runner.engine_watch.readings import ENGINES

    engine = times.engine if times else ""
    if engine in ENGINES:
        return engine
    raise InputError("the plan's profile is of no engine that is known; say which --engine runs the plan")


def _watch(args: argparse.Namespace, sidecar: "Sidecar") -> None:
    """Reads and tells until it is stopped, or for so long."""
    import math

    from exeplan.drift.state import DriftState
    from exeplan.errors import InputError
    from exeplan.runner.engine_watch.dashboard import SidecarMetrics, serve_metrics
    from exeplan.runner.engine_watch.sidecar import Look, Observed
    from exeplan.units import seconds

    lasts = seconds(args.duration, "--for") if args.duration else math.inf
    readings = _readings(sidecar.server.engine, args.metrics, every=sidecar.rules.every, lasts=lasts)
    first = next(readings)
    look = Look(state=DriftState(), observed=Observed())
    metrics = SidecarMetrics(sidecar.server.model, lambda: (sidecar.plan, look, sidecar.num_replans))
    try:
        port = serve_metrics(metrics, args.host, args.port)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot show figures on {args.host}:{args.port}: {_reason(error)}") from None
    _tell(
        f"watching {sidecar.plan.schedule} on {', '.join(args.metrics)}; figures on http://{args.host}:{port}/metrics"
    )
    for now, reading in chain((first,), readings):
        look = sidecar.take(now, reading)
        for remark in look.remarks:
            _tell(remark)


def _readings(engine: str, urls: list[str], *, every: float, lasts: float) -> Iterator[tuple[float, "Readings"]]:
    """Seconds from the first one, and what the servers show then: none while one of them does not answer.

    Raises InputError where the first does not come.
    """
    from exeplan.errors import InputError
    from exeplan.runner.engine_watch.readings import read

    started, answers = time.monotonic(), True
    try:
        yield 0.0, read(engine, urls)
    except (OSError, ValueError) as error:
        raise InputError(f"no metrics from {', '.join(urls)}: {_reason(error)}") from None
    while (left := started + lasts - time.monotonic()) > 0:
        time.sleep(min(every, left))
        try:
            reading = read(engine, urls)
        except (OSError, ValueError, InputError) as error:
            if answers:
                _tell(f"no metrics: {_reason(error)}; asking on")
            answers = False
            continue
        if not answers:
            _tell("the server answers again")
        answers = True
        yield time.monotonic() - started, reading


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
