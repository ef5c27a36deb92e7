"""write a plan as another serving engine's command line, compose file, Kubernetes objects, Ray Serve or Dynamo config

With --to exeplan: as Kubernetes objects, or a RayJob of KubeRay, that serve the plan by exeplan itself.
What the engine does otherwise than the plan says is on standard error, and in comments of what is written. Where a
policy here schedules as the engine does, the plan is replayed so, and what that costs is said too; this needs the
plan's profile and workload.
"""

import argparse
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


def _costs(plan: "Plan", exported: "Export") -> list[str]:
    """What the plan is expected to do as the engine schedules it, where that is otherwise than planned."""
    from exeplan.errors import InputError

    if exported.as_run is None:
        return []
    try:
        return _replayed(plan, exported.as_run, exported.engine)
    except InputError as error:
        return [f"what that costs is not known: {error}"]


def _replayed(plan: "Plan", as_run: "Plan", engine: str) -> list[str]:
    """Raises InputError where the plan's inputs are not here, or cannot be replayed so."""
    from exeplan import api
    from exeplan.errors import InputError
    from exeplan.planner.load_problem import other_times
    from exeplan.units import show_seconds

    if plan.replay is None:
        raise InputError("the plan has no replay to compare with; `exeplan simulate PLAN -o PLAN` fills it in")
    if plan.workload is None:
        raise InputError("the plan names no workload to replay")
    if plan.profile and not Path(plan.profile).exists():
        raise InputError("the plan's profile is not here to replay it")
    if (profile := plan.profile or api.plan_profile(plan)) is None:
        raise InputError("the plan names no profile to replay it")
    simulation = api.simulate(as_run, profile=profile)
    found, broken = simulation.replay, simulation.broken_bound
    return [
        *other_times(plan, simulation.request.profile),
        f"replayed as {engine} schedules it: {found.throughput:.3g} requests/s where the plan has "
        f"{plan.replay.throughput:.3g}, latency {show_seconds(found.latency)} where it has "
        f"{show_seconds(plan.replay.latency)}" + (f"; this breaks the {broken}" if broken else ""),
    ]
