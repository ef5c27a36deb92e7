"""An explanation as text and as JSON values (see `exeplan.planner.reports.explain`)."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, Schedule
from exeplan.planner.reports.explain import Explanation, RunnerUp, WhatIf, percent
from exeplan.planner.reports.placement_text import show_copies, show_equal, show_gpus
from exeplan.planner.reports.tables import table
from exeplan.simulator.breakdown import KINDS, Breakdown

_STAGES = 16
"""Most stages that are listed; of more, only the mean is shown."""


def explanation_lines(explanation: Explanation) -> str:
    """The explanation for people."""
    e = explanation
    first, *rest = e.limits
    lines = [
        f"what limits {_what(e)}: {first}",
        *rest,
        *e.bounds,
        "",
        *_stage_tables(e),
        "",
        f"best plan of another policy: {_runner_up(e)}",
        *(f"no schedule: {refusal}" for refusal in e.refusals),
        *(f"no plan of {refusal}" for refusal in e.unplanned),
        *(f"{what.change}: {_show_what_if(what)}" for what in (e.more_gpus, e.more_latency, e.more_memory)),
    ]
    return "\n".join(lines)


def _what(e: Explanation) -> str:
    if e.of_full_batches:
        return "full batches"
    if e.at_rate:
        return "the highest rate within the bounds"
    return " and ".join(dict.fromkeys(group.schedule.policy for group in e.groups))


def _stage_tables(e: Explanation) -> list[str]:
    """One for each group of replicas, under its name where there are several."""
    found = []
    for number, (group, breakdown) in enumerate(zip(e.groups, e.breakdowns, strict=True)):
        name = [*([""] if number else []), f"one replica of {show_equal(group)}"] if len(e.groups) > 1 else []
        found += [*name, _stage_table(group.placement, breakdown)]
    return found


def _stage_table(placement: Placement, breakdown: Breakdown) -> str:
    header = ("stage", "GPUs", "layers", *(kind.replace("_", "-") for kind in KINDS), "idle")
    rows = []
    if 1 < len(placement) <= _STAGES:
        for number, (stage, shares) in enumerate(zip(placement, breakdown.stages, strict=True)):
            name = f"{number} {stage.phase}".strip()
            held = sum(last - first for first, last in (stage.layers, stage.encoder_layers))
            rows.append((name, show_gpus(stage.devices).split()[1], str(held), *map(percent, shares.values())))
    devices = sum(stage.num_devices for stage in placement)
    layers = sum(last - first for s in placement for first, last in (s.layers, s.encoder_layers))
    rows.append(("all", str(devices), str(layers), *map(percent, breakdown.mean.values())))
    return table(header, rows)


def _runner_up(e: Explanation) -> str:
    if (r := e.runner_up) is None:
        if e.unplanned:
            return "none, no schedule of another policy keeps what is asked in its replays"
        return "none, no other policy has a schedule" if e.refusals else f"none, only {e.schedule.policy} was searched"
    less = f"{100 * abs(r.less):.1f} % {'less' if r.less >= 0 else 'more'}"
    chance = ", within noise" if abs(r.less) <= r.noise else ""
    return f"{show_copies(r.plan)}, {_rate(r)}, {less}{chance}"


def _show_what_if(what: WhatIf) -> str:
    if what.throughput is None or what.gain is None or what.plan is None:
        return what.note
    if not what.gains:
        return "no gain" if what.gain == 0 else f"{100 * what.gain:+.1f} %, within noise"
    return f"{_rate(what)} ({100 * what.gain:+.1f} %) with {show_copies(what.plan)}"


def _rate(found: RunnerUp | WhatIf) -> str:
    return f"{found.throughput:.3g} req/s{' of full batches' if found.of_full_batches else ''}"


def as_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation for programs: shares, requests/s; null where there is no value.

    `groups` are the shares of each group of replicas, those without a group the first's.
    """
    e = explanation
    runner_up = None
    if r := e.runner_up:
        runner_up = {
            **_plan_json(r.plan),
            "throughput": r.throughput,
            "less": r.less,
            "of_full_batches": r.of_full_batches,
        }
    return {
        "limits": list(e.limits),
        "bounds": list(e.bounds),
        **_breakdown_json(e.breakdowns[0]),
        "groups": [
            {"replicas": group.num_replicas, "schedule": _flat(group.schedule), **_breakdown_json(one)}
            for group, one in zip(e.groups, e.breakdowns, strict=True)
        ],
        "runner_up": runner_up,
        "refusals": list(e.refusals),
        "unplanned": list(e.unplanned),
        "more_gpus": _what_if_json(e.more_gpus),
        "more_latency": _what_if_json(e.more_latency),
        "more_memory": _what_if_json(e.more_memory),
    }


def _breakdown_json(breakdown: Breakdown) -> dict[str, Any]:
    return {
        "stages": [dict(shares) for shares in breakdown.stages],
        "mean": dict(breakdown.mean),
        "phases": {
            name: {**asdict(time), "bound_by": "compute" if time.compute_bound else "memory bandwidth"}
            for name, time in breakdown.phases.items()
        },
    }


def _what_if_json(what: WhatIf) -> Mapping[str, Any]:
    body = {name: getattr(what, name) for name in ("change", "throughput", "gain", "noise", "of_full_batches")}
    found = _plan_json(what.plan) if what.plan else {"schedule": None, "groups": []}
    return {**body, **found, "note": what.note or None}


def _plan_json(plan: Plan) -> dict[str, Any]:
    """The schedule of the first group of replicas, and those of all with their numbers."""
    groups = [{"replicas": group.num_replicas, "schedule": _flat(group.schedule)} for group in plan.groups]
    return {"schedule": _flat(plan.schedule), "groups": groups}


def _flat(schedule: Schedule) -> dict[str, Any]:
    return {"policy": schedule.policy, **schedule.variables}
