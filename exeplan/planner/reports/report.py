"""An optimum in lines for people: the winner, where it runs, its estimates, what it promises, and every policy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exeplan.core.bounds import Bound, binding, utilizations, values_of
from exeplan.core.models.uneven_routing import busiest_load, busiest_part, routing_exponent
from exeplan.core.plan import Plan
from exeplan.core.profile import UNSURE, Profile
from exeplan.core.schedule import Estimate, Schedule, num_devices
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.choice.candidates import Candidate
from exeplan.planner.problems.headroom import is_most
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import CONFIDENCE, FAR, certain, half_interval
from exeplan.planner.problems.replays import FullBatches, most_of_trace, trace_part
from exeplan.planner.reports.placement_text import show_copies, show_group, show_placement
from exeplan.planner.reports.tables import group_table, side_by_side, table
from exeplan.policies import load_policy
from exeplan.scheduling.largest_passes import with_finite_context
from exeplan.simulator.memory import weight_bytes
from exeplan.units import show_bytes, show_seconds

_PLACES = "a place to decode or room in the KV cache"
_NOTICED = 1.0
"""Seconds between two tokens from which a reader takes a stream for stuck."""
_OF_A_SEND = 2
"""Processes between which every profile of several times sends."""
OF_REPLAYS = "all figures are of replays"
"""Of the arrivals of a trace."""
IN_REPLAY = "in the replay"
"""By which figure a bound is used, of a plan without margins."""
POLICY_COLUMNS = ("policy", "best schedule", "req/s", "replayed", "latency", "points")


def optimum_report(optimum: Optimum, problem: Problem) -> str:
    """Everything that `exeplan optimize` prints but for what the search took."""
    lines = [
        *headline(optimum, problem),
        "",
        side_by_side(**columns(optimum)),
        *(["", group_table(optimum.groups)] if optimum.groups else []),
        "",
        *promises(optimum, problem),
        "",
        table(POLICY_COLUMNS, policy_rows(optimum)),
        *(["", str(optimum.order)] if optimum.order else []),
    ]
    return "\n".join(lines)


def promises(optimum: Optimum, problem: Problem) -> list[str]:
    """What the plan promises, how certain that is, and what full batches take."""
    return [
        *promise_report(problem, optimum.plan),
        *proof_line(optimum, problem),
        *full_line(optimum.full),
        *stall_lines(optimum, problem),
        *remarks(optimum, problem),
    ]


def columns(optimum: Optimum) -> dict[str, Estimate]:
    """The plan's figures side by side; a mean of several replays is called so."""
    number = len(optimum.seeds)
    replay = f"mean of {number} replays" if number > 1 else "replay"
    return {replay if name == "replay" else name: one for name, one in optimum.plan.figures.items()}


def proof_line(optimum: Optimum, problem: Problem) -> list[str]:
    """How certain it is that the bounds hold, of a plan for a rate of arrivals by chance; nothing where its replays are
    too short to say so."""
    if problem.arrivals is None or problem.arrivals.of_trace or math.isinf(problem.limit) or optimum.unproven:
        return []
    shares = list(zip(*(utilizations(problem.bounds, one) for one in optimum.seeds), strict=True))
    if len(optimum.seeds) == 1:
        if max(map(max, shares)) <= FAR:
            return [f"one replay proves the bounds: it uses at most {100 * FAR:.0f} % of each"]
        return ["one replay alone keeps the bounds: others may not"]
    values = zip(*(values_of(problem.bounds, one) for one in optimum.seeds), strict=True)
    each = [
        f"{bound.metric} {show_seconds(float(np.mean(given)))} +- {show_seconds(half_interval(given))}"
        for bound, found in zip(problem.bounds, values, strict=True)
        if math.isfinite(bound.seconds) and (given := [value or 0.0 for value in found])
    ]
    hold = "hold at" if certain(shares) else "hold in the mean, not for certain at"
    return [
        f"{len(optimum.seeds)} replays of other requests: the bounds {hold} {100 * CONFIDENCE:.0f} % confidence; "
        + ", ".join(each)
    ]


def headline(optimum: Optimum, problem: Problem) -> list[str]:
    """The model, the workload, the winner under its bounds and its placement."""
    profile, workload, plan = problem.profile, problem.workload, optimum.plan
    return [
        f"{profile.model.name} on {profile.device.name} ({profile.dtype}), workload "
        f"{workload.name}: mean {workload.mean_input:.0f} in, {workload.mean_output:.0f} out, "
        f"p99 {workload.output_quantile(0.99)} out",
        *([f"  {workload.source}"] if workload.source else []),
        f"{show_bounds(problem.bounds)}: {show_copies(plan) if plan.more_replicas else plan.schedule}",
        *_placement_lines(optimum, problem),
        *_cache_lines(optimum.plan, profile),
        *_routing_lines(optimum.plan, profile),
    ]


def _cache_lines(plan: Plan, profile: Profile) -> list[str]:
    """What an engine on CPUs allocates when it starts, of which the figures count what is in use."""
    tokens, model = plan.kv_cache_tokens, profile.model
    if tokens is None or profile.device.kind != "cpu":
        return []
    size = show_bytes(tokens * model.kv_bytes_per_token(profile.kv_dtype or profile.dtype))
    longest = min(with_finite_context(model).max_context, tokens)
    each = " of each replica" if plan.num_replicas > 1 else ""
    return [f"KV cache{each}: {tokens:,} tokens, {size}, with room for a request of {longest:,} tokens"]


def stall_lines(optimum: Optimum, problem: Problem) -> list[str]:
    """The longest stall of a stream, and a sentence where nothing bounds one that readers notice."""
    stall, plan = optimum.plan.longest_stall, optimum.plan
    if not stall or plan.estimate is None:
        return []
    prompts, tokens = stall["num_prompts"], stall["num_tokens"]
    several = "s" if prompts != 1 else ""
    by = f"a prefill of {prompts} prompt{several}, {tokens} tokens" if prompts else "a decode pass of all streams"
    seen, seconds = optimum.run.requests.times.longest_gap(), show_seconds(stall["seconds"])
    waits = f", with waits for {_PLACES} that it leaves out" if seen > 1.001 * stall["seconds"] else ""
    lines = [
        f"longest stall of a stream by passes: at most {seconds} ({by}); {show_seconds(seen)} in the replay{waits}"
    ]
    if problem.bounds_gaps:
        return lines
    pace = problem.tpot_bound
    if pace is not None and stall["seconds"] > pace:
        return [*lines, f"the tpot of {show_seconds(pace)} is that of whole requests; --itl bounds every single gap"]
    if pace is None and stall["seconds"] > _NOTICED:
        return [
            *lines,
            f"nothing bounds how long streams stall: when many requests arrive at once, all wait up to {seconds} for "
            "their next tokens; give --itl or --tpot",
        ]
    return lines


def full_line(full: FullBatches | None) -> list[str]:
    """What full batches take and serve, for a plan whose figures are those of its rate."""
    if full is None:
        return []
    return [
        f"full batches: {full.residents:.0f} residents hold {full.kv_tokens:.0f} tokens in the KV cache, "
        f"{show_bytes(full.memory_bytes_per_gpu)} of a GPU, and serve {full.throughput:.3g} requests/s"
    ]


def remarks(optimum: Optimum, problem: Problem) -> list[str]:
    """What makes the prediction less certain."""
    unfinished = "the profile is unfinished: run `exeplan profile` on it again for a sharper prediction"
    part = trace_part(problem, most_of_trace(optimum.plan.num_replicas))
    return [
        *([str(part)] if part else []),
        *([] if problem.profile.complete else [unfinished]),
        *_workspace_of(problem.profile),
        *_older_engine(problem.profile),
        *_speed_of(problem.profile, optimum.plan.schedule),
        *_untimed_processes(problem),
        *([problem.profile.correction.said] if problem.profile.correction else []),
        *(f"beyond the profile: {sentence}" for sentence in optimum.beyond),
        *optimum.unproven,
    ]


def _workspace_of(profile: Profile) -> list[str]:
    """That one workspace is taken for all passes, where exeplan's engine on a GPU would measure each schedule's."""
    if profile.engine or profile.device.kind != "cuda" or profile.runtime_bytes is not None:
        return []
    return [
        f"the profile has no runtime_bytes: {show_bytes(profile.workspace_bytes)} of workspace are assumed for all "
        "passes and placements, and the engine may find another KV cache; make it again with `exeplan profile`"
    ]


def _older_engine(profile: Profile) -> list[str]:
    """That the profile was measured of an engine that computed more for a prompt than today's does."""
    if profile.source != "measured" or profile.last_layer_saving or profile.model.is_encoder_decoder:
        return []
    return [
        "the profile has no last_layer_saving: it was made of an older engine, whose last layer computed every token "
        "of a prompt, so that prompts are predicted too slow; make it again with `exeplan profile`"
    ]


def _speed_of(profile: Profile, schedule: Schedule) -> list[str]:
    """How sure the profile's times are, and how steady its machine was, where reference passes told."""
    if not profile.reference_passes:
        return []
    error = profile.error_of(keeps_finished_rows=load_policy(schedule.policy).KEEPS_FINISHED_ROWS)
    sure = f"the profile's times are sure to +-{error:.1%} (one standard error)" if error else UNSURE
    moved = f"its machine's speed moved by +-{profile.speed_spread:.0%} meanwhile"
    return [f"{sure}; {moved}, and predictions are at its geometric mean"]


def _untimed_processes(problem: Problem) -> list[str]:
    """That a host of CPUs may lack what is planned for, where its profile has fewer processes at once."""
    if problem.cluster is None or not problem.shares_memory:
        return []
    timed = max(_OF_A_SEND, *problem.profile.tensor_parallel_sizes)
    if problem.cluster.num_gpus <= timed:
        return []
    return [
        f"{problem.cluster.num_gpus} processes on the profiled host are planned with, of which its profile shows "
        f"{timed} at once: whether the host has cores for all of them, and how much slower they are together, is not "
        "known"
    ]


def search_line(optimum: Optimum) -> str:
    """The search method, the points it tried, the seconds of all its processes together, and its gap with what makes
    that an estimate."""
    search = optimum.plan.search
    gap = "" if search["gap"] is None else f", gap {100 * search['gap']:.2g} %{_estimated(search)}"
    return f"{search['method']}: {search['points']} points, {show_seconds(search['seconds'])} of computing{gap}"


def _estimated(search: Mapping[str, Any]) -> str:
    """That the gap is no bound, and why: falls that the search saw and that it does not count."""
    names = (("throughput", "throughput"), ("load", "latency or memory"))
    dips = search["uncounted_dips"] or {}
    fell = [f"{shown} fell by {100 * dips[name]:.2g} %" for name, shown in names if dips.get(name)]
    return f" (an estimate: with more of a variable, {' and '.join(fell)})" if fell else ""


def policy_rows(optimum: Optimum) -> list[tuple[str, ...]]:
    """Each policy's best schedule, or why it has none; the columns are `POLICY_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for c in optimum.candidates:
        points = str(c.search.num_points) if c.search else "0"
        if c.schedule is None or c.estimate is None:
            rows.append((c.policy, c.refusal, "-", "-", "-", points))
            continue
        variables = ", ".join(f"{name}={value}" for name, value in c.schedule.variables.items())
        rows.append(
            (
                c.policy,
                f"{_copies(c)}{variables}",
                f"{c.estimate.throughput:.3g}",
                f"{c.replayed:.3g}" if c.replayed else "-",
                show_seconds(c.estimate.latency),
                points,
            )
        )
    return rows


def _copies(candidate: Candidate) -> str:
    """`8 x `, and what else there is, in front of the variables of the first group."""
    if candidate.num_replicas == 1:
        return ""
    others = candidate.num_replicas - len(candidate.replicas)
    return f"{len(candidate.replicas)} x " if not others else f"{len(candidate.replicas)} (and {others} others) x "


def _placement_lines(optimum: Optimum, problem: Problem) -> list[str]:
    """Where the plan runs and what that takes of each GPU; nothing for one device without a cluster."""
    plan = optimum.plan
    if problem.cluster is None or plan.estimate is None:
        return []
    weights = [
        weight_bytes(problem.profile, group.placement, number)
        for group in plan.groups
        for number in range(len(group.placement))
    ]
    least, most = show_bytes(min(weights)), show_bytes(max(weights))
    where = f"{plan.gpus} GPU{'s' if plan.gpus != 1 else ''} of cluster {problem.cluster.name}"
    places = [f"{where}, {show_placement(plan.placement)}"]
    if plan.num_replicas > 1:
        places = [f"{where}, {plan.num_replicas} replicas{_idle(plan)}; router {plan.router}"]
        places += [f"  {show_group(group)}" for group in plan.groups]
    used = f"at most {show_bytes(plan.estimate.memory_bytes_per_gpu)}"
    # The replay's is its most at any time, that of full batches their mean.
    if optimum.full and optimum.full.memory_bytes_per_gpu > plan.estimate.memory_bytes_per_gpu:
        used += f" at this rate, {show_bytes(optimum.full.memory_bytes_per_gpu)} with full batches,"
    return [
        *places,
        f"memory per GPU: {used} of {show_bytes(problem.memory)}; "
        f"weights {least if least == most else f'{least} to {most}'}",
    ]


def _routing_lines(plan: Plan, profile: Profile) -> list[str]:
    """What uneven routing makes of a decode pass, of as many tokens as a replica decodes at once by Little's law."""
    experts, estimate = profile.model.experts, plan.estimate
    if profile.routing is None or experts is None or estimate is None:
        return []
    tokens = max(1.0, estimate.token_throughput * estimate.tpot / plan.num_replicas)
    shares, exponent = [], routing_exponent(profile.routing)
    for parts in sorted({stage.expert_parallel_size for group in plan.groups for stage in group.placement}):
        if parts == 1:
            read, even = busiest_part(experts, tokens, 1, exponent)[1], experts.touched(tokens)
            shares.append(f"reads {read:.0f} of a layer's {experts.count} experts (by even routing {even:.0f})")
        else:
            load, even = (busiest_load(experts, tokens, parts, one) for one in (exponent, 0.0))
            shares.append(
                f"gives the busiest of {parts} parts of the experts {load:.1f} times an even share of the rows "
                f"(by even routing {even:.1f})"
            )
    return [f"routing {profile.routing}: a decode pass of about {tokens:.0f} tokens {', '.join(shares)}"]


def _idle(plan: Plan) -> str:
    used = sum(group.num_replicas * num_devices(group.placement) for group in plan.groups)
    return f", {plan.gpus - used} idle" if plan.gpus and plan.gpus > used else ""


def show_bounds(bounds: Sequence[Bound]) -> str:
    """`bound 5 s on p99-length, ttft 500 ms`."""
    first, *others = bounds
    shown = [str(bound) for bound in others]
    return ", ".join([str(first) if math.isfinite(first.seconds) else "no latency bound", *shown])


def promise_report(problem: Problem, plan: Plan) -> list[str]:
    """The bounds, the rate, the headroom and the margin of a plan; empty where it promises none of them."""
    return [
        *_bound_lines(problem, plan),
        *_rate_lines(problem, plan),
        *_headroom_lines(problem, plan),
        *_risk_lines(plan),
    ]


def _bound_lines(problem: Problem, plan: Plan) -> list[str]:
    """Several bounds one by one, and the binding one."""
    if plan.estimate is None or plan.replay is None or not problem.more_bounds:
        return []
    each = [values_of(problem.bounds, one) for one in plan.figures.values()]
    rows = [
        (bound.name, show_seconds(bound.seconds), *map(show_seconds, found))
        for bound, *found in zip(problem.bounds, *each, strict=True)
        if math.isfinite(bound.seconds)
    ]
    lines = [table(("bound on", "at most", *plan.figures), rows)]
    if full := binding_bound(problem, plan):
        bound, share, by = full
        lines.append(f"binding bound: {bound.name}, {100 * share:.0f} % used {by}")
    return [*lines, ""]


def binding_bound(problem: Problem, plan: Plan) -> tuple[Bound, float, str] | None:
    """The binding bound of a plan, its utilization, and by which figure; None where no bound is finite.

    In the replay; at a stated risk by what the margin that is promised is of. Margins of unequal replicas
    are of each one's own closed form, which the plan has not: then in the replay too.
    """
    assert plan.replay is not None
    if plan.promise and not plan.promise.get("more_groups") and plan.estimate is not None:
        by = f"by {_promised_by(plan)} with its margin"
        margin = plan.promise["margin"]
        shares = utilizations(problem.bounds, plan.estimate)
        promised = [
            (bound, share * (1 + margin.get(bound.metric, 0.0)))
            for bound, share in zip(problem.bounds, shares, strict=True)
            if math.isfinite(bound.seconds)
        ]
        return (*max(promised, key=lambda pair: pair[1]), by) if promised else None
    full = binding(problem.bounds, plan.replay)
    return (*full, IN_REPLAY) if full else None


def _rate_lines(problem: Problem, plan: Plan) -> list[str]:
    if problem.arrivals is None or plan.rate_headroom is None:
        return []
    more = 100 * plan.rate_headroom
    return [
        f"arrivals: {problem.arrivals}; times count from the arrival, the wait for a slot included; {OF_REPLAYS}",
        *([f"all {plan.num_replicas} replicas are replayed behind the router"] if plan.num_replicas > 1 else []),
        f"rate headroom: the bounds hold{_with_margin(plan)} {_until(plan.rate_headroom)} the rate is {more:.0f} % "
        "higher, by the closed form, scaled to the replay",
    ]


def _headroom_lines(problem: Problem, plan: Plan) -> list[str]:
    if plan.drift_headroom is None:
        return []
    hold = "bounds hold" if problem.more_bounds else "bound holds"
    more = 100 * plan.drift_headroom
    until = _until(plan.drift_headroom)
    return [f"drift headroom: the {hold}{_with_margin(plan)} {until} outputs are {more:.0f} % longer"]


def _until(headroom: float) -> str:
    return "at least until" if is_most(headroom) else "until"


def _with_margin(plan: Plan) -> str:
    return " with the margin below" if plan.promise else ""


def _risk_lines(plan: Plan) -> list[str]:
    if not plan.promise:
        return []
    groups = [plan.promise, *plan.promise.get("more_groups", ())]
    lines = []
    for number, group in enumerate(groups, 1):
        of_group = f" in replicas of group {number}" if len(groups) > 1 else ""
        lines += [
            f"margin{of_group}: {_promised_by(plan)} keeps every bound with {_shown_margin(group['margin'])} added, so "
            f"that a bound breaks with a chance of at most {100 * plan.promise['risk']:g} %",
            *(f"  {_shown_part(part)}" for part in group["parts"]),
        ]
    return lines


def _promised_by(plan: Plan) -> str:
    return "the replay" if plan.has_arrivals else "the closed form"


def _shown_part(part: Mapping[str, Any]) -> str:
    """One reason for a margin, with what it alone would take."""
    if "margin" not in part:
        return str(part["from"])
    return f"{_shown_margin(part['margin'])} alone, {part['observations']} observations: {part['from']}"


def _shown_margin(margin: Mapping[str, float]) -> str:
    return ", ".join(f"{100 * value:.1f} % on {about}" for about, value in margin.items())
