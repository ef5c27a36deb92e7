"""write a plan as another serving engine's command line, compose file, Kubernetes objects, Ray Serve or Dynamo config

With --to exeplan: as Kubernetes objects, or a RayJob of KubeRay, that serve the plan by exeplan itself.
What the engine does otherwise than the plan says is on standard error, and in comments of what is written. Where a
policy here schedules as the engine does, the plan is replayed so, and what that costs is said too; this needs the
plan's profile and workload.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.core.models.model import ModelSpec
    from exeplan.core.plan import Plan
    from exeplan.export.interface import Export

POSITION = 65


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from exeplan.export import FORM_NAMES, exporter_names

    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--to", required=True, metavar="ENGINE", help=f"one of {', '.join(exporter_names())}")
    parser.add_argument("--as", dest="form", default="command", choices=FORM_NAMES, help="default: command")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="what the engine loads: a directory there, or an id of the Hugging Face Hub (default: the plan's model)",
    )
    parser.add_argument(
        "--plug-in", action="store_true", help="with --to vllm: exeplan's scheduler in vLLM keeps the cadence of rra"
    )
    parser.add_argument(
        "--replicas",
        metavar="MIN:MAX",
        help="with --to exeplan: as many replicas as the load needs, by KEDA, or with --as kuberay by Ray's autoscaler",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="instead of standard output")


def run(args: argparse.Namespace) -> int:
    from exeplan.export import engine_model, installed_remark, load_exporter
    from exeplan.export.forms import FORMS, form_remarks
    from exeplan.files import write_text
    from exeplan.planner.load_problem import plan_sizes, read_plan
    from exeplan.progress import note

    exporter, plan = load_exporter(args.to), read_plan(args.plan)
    spec = plan_sizes(plan)
    model = args.model or (plan.model if args.to == "exeplan" else engine_model(plan.model))
    exported = _with_plug_in(args, plan, spec, model) if args.plug_in else exporter.export(plan, spec, model=model)
    if args.replicas is not None:
        exported = _with_replicas(exported, args.replicas)
    note([*exported.remarks, *form_remarks(exported, args.form), *installed_remark(exported), *_costs(plan, exported)])
    text = FORMS[args.form](exported)
    if args.output is None:
        print(text, end="")
        return 0
    write_text(args.output, text)
    print(f"wrote {args.output}")
    return 0


def _with_replicas(exported: "Export", text: str) -> "Export":
    from exeplan.errors import InputError
    from exeplan.scheduling.scaling import parse_replicas

    if exported.plan_text is None:
        raise InputError(f"--replicas follows a metric of exeplan's, which {exported.engine} does not have")
    return replace(exported, replicas=parse_replicas(text))


def _with_plug_in(args: argparse.Namespace, plan: "Plan", spec: "ModelSpec", model: str) -> "Export":
    from exeplan.errors import InputError
    from exeplan.export import vllm

    if args.to != "vllm":
        raise InputError(f"--plug-in is a scheduler for vLLM, not for {args.to}")
    if args.form != "command":
        raise InputError(
            f"--plug-in needs exeplan beside vLLM, which its image does not have; leave --as {args.form} out"
        )
    return vllm.export_with_plug_in(plan, spec, model=model, file=args.plan)


def _costs(plan: "Plan", exported: "Export") -> Iterator[str]:
    """What the plan is expected to do as the engine schedules it, where that is otherwise than planned."""
    from exeplan import api
    from exeplan.planner.load_problem import other_times
    from exeplan.units import show_seconds

    if exported.as_run is None or plan.replay is None:
        return
    if plan.profile and not Path(plan.profile).exists():
        yield "what that costs is not known: the plan's profile is not here to replay it"
        return
    if (profile := plan.profile or api.plan_profile(plan)) is None:
        yield "what that costs is not known: the plan names no profile to replay it"
        return
    simulation = api.simulate(exported.as_run, profile=profile)
    yield from other_times(plan, simulation.request.profile)
    found, broken = simulation.replay, simulation.broken_bound
    yield (
        f"replayed as {exported.engine} schedules it: {found.throughput:.3g} requests/s where the plan has "
        f"{plan.replay.throughput:.3g}, latency {show_seconds(found.latency)} where it has "
        f"{show_seconds(plan.replay.latency)}" + (f"; this breaks the {broken}" if broken else "")
    )
