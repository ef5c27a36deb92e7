"""What `import exeplan` offers: load inputs, `optimize`, `simulate`, `compare`. The command line calls these functions.

A path may be a `str` or any `os.PathLike`; where a path is taken, so is the object that it would give. Options take
text as on the command line (`"2s"`, `"30GiB"`, `"1%"`), and numbers: seconds, bytes, shares, requests/s.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from exeplan.core import cluster as clusters
from exeplan.core import plan as plans
from exeplan.core import profile as profiles
from exeplan.core.bounds import Bound, check_together, deadline_bound, parse_bounds
from exeplan.core.cluster import Cluster
from exeplan.core.models.model import ModelSpec, load_model_sizes
from exeplan.core.models.uneven_routing import EVEN
from exeplan.core.plan import Plan, check_utilization
from exeplan.core.profile import Profile
from exeplan.errors import InputError
from exeplan.extras import require
from exeplan.planner.choice.optimize import resolve_policies
from exeplan.planner.comparison import Comparison, ComparisonRow, compare_row, default_row, matched
from exeplan.planner.load_problem import cluster_for, plan_request, profile_for, profiled_host, read_plan
from exeplan.planner.margins.margins import Risk
from exeplan.planner.margins.risk import load_errors, parse_risk
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.simulation import Simulation, simulate_plan
from exeplan.planner.solution import Solution
from exeplan.planner.threads import solve_by_threads
from exeplan.profiler.datasheets.datasheet import (
    load_datasheet,
    other_links,
    profile_from_datasheet,
    tensor_parallel_sizes_of,
    with_links,
)
from exeplan.profiler.datasheets.engine_constants import (
    engine_defaults,
    engine_policies,
    expert_shardings,
    has_servers,
    load_engine,
    with_engine,
)
from exeplan.progress import SILENT, Told
from exeplan.units import num_bytes, seconds, show_bytes
from exeplan.workload import files as workloads
from exeplan.workload.arrivals import parse_arrivals, parse_rate
from exeplan.workload.deadlines import Deadlines, parse_deadlines
from exeplan.workload.laws import MAX_LENGTH
from exeplan.workload.workload import Trace, Workload

File = str | PathLike[str]
Quantity = float | str
"""A number in the base unit, or text with a unit."""
MAX_SEQS = 65536
"""Most residents that a search considers, far beyond any device and few enough to list."""


# --- inputs -----------------------------------------------------------------------------------------------------------


def load_model(model: ModelSpec | File) -> ModelSpec:
    """The sizes of a model: a shipped name, a Hugging Face model directory or id, or a `config.json`. Weights stay
    unread."""
    return model if isinstance(model, ModelSpec) else load_model_sizes(fspath(model))


def load_profile(profile: Profile | File) -> Profile:
    """A profile that `exeplan profile` or `save_profile` wrote."""
    return profile if isinstance(profile, Profile) else profiles.load_profile(Path(profile))


def save_profile(profile: Profile, path: File) -> None:
    """Writes a profile as JSON."""
    profiles.save_profile(profile, Path(path))


def load_cluster(cluster: Cluster | File) -> Cluster:
    """A cluster: a shipped name or a YAML file."""
    return cluster if isinstance(cluster, Cluster) else clusters.load_cluster(fspath(cluster))


def load_plan(path: File) -> Plan:
    """A plan, the files that it names as seen from here."""
    return read_plan(Path(path))


def save_plan(plan: Plan, path: File) -> None:
    """Writes a plan as YAML, its names of files as they are; `Solution.save` makes them relative to the plan."""
    plans.save_plan(plan, Path(path))


def load_workload(
    source: Workload | File | Mapping[str, ArrayLike] | Any = None,
    *,
    input_tokens: ArrayLike | None = None,
    output_tokens: ArrayLike | None = None,
    arrival_s: ArrayLike | None = None,
    name: str = "requests",
) -> Workload:
    """The lengths of requests, and when they arrive.

    `source` is a trace file, a shipped name, a law such as `normal:in=128,81,256;out=128,68,320`, or a table with the
    columns input_tokens, output_tokens and optionally arrival_s: a pandas DataFrame or a mapping of arrays. Or give
    these as arrays, one entry a request. Raises InputError naming what is wrong.
    """
    if isinstance(source, Workload):
        return source
    if isinstance(source, str | PathLike):
        return workloads.load_workload(fspath(source))
    if source is not None:
        return _workload_of_table(source, name)
    if input_tokens is None or output_tokens is None:
        raise InputError("a workload needs a file, a name, a law or a table, or input_tokens and output_tokens")
    trace = _trace(input_tokens, output_tokens, arrival_s)
    return Workload.of_trace(name, trace, source=f"{name}, {len(trace.inputs)} requests")


def datasheet_profile(
    model: ModelSpec | File,
    device: File,
    *,
    cluster: Cluster | File | None = None,
    dtype: str = "auto",
    kv_dtype: str | None = None,
    tensor_parallel_sizes: Sequence[int] | None = None,
    constants: Mapping[str, Quantity] | None = None,
    engine: File | None = None,
    routing: str = EVEN,
) -> Profile:
    """A profile without a device: times from a roofline of its datasheet (`plans/devices`, or a YAML file).

    `cluster` gives the links, `constants` replaces constants of the datasheet, such as {"gemm_efficiency": 0.6}, and
    `engine` (`plans/engines`, or a YAML file) adds what a serving engine takes besides its kernels; times of a shipped
    one are corrected by measured serving runs (`plans/calibration`). `routing` of a mixture's experts is `even`, or
    uneven as `power_law_1.2` (`exeplan/core/models/uneven_routing.py`).
    """
    sheet = load_datasheet(fspath(device), {key: str(value) for key, value in (constants or {}).items()})
    if cluster is not None:
        sheet = with_links(sheet, load_cluster(cluster))
    spec = load_model(model)
    if dtype == "auto":
        stored = spec.quantization.planned_dtype if spec.quantization else None
        dtype = stored or ("bfloat16" if sheet.kind == "cuda" else "float32")
    sizes = tuple(sorted(set(tensor_parallel_sizes))) if tensor_parallel_sizes is not None else None
    times = partial(
        profile_from_datasheet,
        spec,
        sheet,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel_sizes=sizes,
        routing=routing,
    )
    if engine is None:
        return times()
    from exeplan.profiler.calibration.calibrate import with_shipped_engine  # Not needed to plan by a profile.

    name, constants_of_engine = fspath(engine), load_engine(fspath(engine))
    shardings = expert_shardings(constants_of_engine, spec, sizes or tensor_parallel_sizes_of(spec))
    profile = times(shardings=shardings, passes_over=constants_of_engine.expert_rows)
    return with_shipped_engine(profile, name) or with_engine(profile, constants_of_engine)


def plan_profile(plan: Plan) -> Profile | None:
    """The times of a datasheet that a plan without a profile was made with, made again; None where the plan does not
    say them, or they are others now."""
    if plan.profile or plan.cluster is None or plan.profile_fingerprint is None:
        return None
    gpus = load_cluster(plan.cluster)
    try:
        found = datasheet_profile(
            plan.model,
            gpus.device,
            cluster=gpus,
            dtype=plan.dtype or "auto",
            kv_dtype=plan.kv_dtype,
            engine=plan.engine,
            routing=plan.routing or EVEN,
        )
    except InputError:  # Of a device without a datasheet, or an engine whose constants are not here.
        return None
    return found if found.fingerprint == plan.profile_fingerprint else None


# --- answers ----------------------------------------------------------------------------------------------------------


def optimize(
    profile: Profile | File | None,
    workload: Workload | File | Mapping[str, ArrayLike] | Any,
    *,
    latency_bound: Bound | Quantity | None = None,
    bound_on: str | None = None,
    ttft: Quantity | None = None,
    tpot: Quantity | None = None,
    itl: Quantity | None = None,
    attainment: Quantity | None = None,
    deadline: Quantity | None = None,
    deadline_share: Quantity | None = None,
    arrival_rate: Quantity | None = None,
    arrivals: Literal["trace"] | None = None,
    min_throughput: Quantity | None = None,
    order: str | None = None,
    risk: Quantity | None = None,
    errors: File | None = None,
    cluster: Cluster | File | None = None,
    gpus: int | str | None = None,
    across_nodes: bool = False,
    one_pipeline: bool = False,
    policy: File = "auto",
    method: str = "branch-and-bound",
    fit_context: bool = False,
    memory: Quantity | None = None,
    gpu_memory_utilization: float | None = None,
    max_num_seqs: int | None = None,
    model: ModelSpec | File | None = None,
    engine: File | None = None,
    routing: str | None = None,
    told: Told = SILENT,
) -> Solution:
    """The plan with the most throughput within the bounds; options are those of `exeplan optimize`.

    Without a profile, `model` and `cluster` are needed, and the times are those of the datasheet of its devices, with
    the constants of a serving `engine` where one is given, and of a mixture's experts as `routing` says (`even`, or
    uneven as `power_law_1.2`).
    At least one of `latency_bound` (infinity for none), `deadline`, `ttft`, `tpot` and `itl` is required.
    `ttft="p99:500ms"` bounds a percentile, `ttft="500ms"` the mean; with `attainment` each is of every request. `itl`
    bounds every gap between two tokens that the plan's passes can make. `told` hears how far the search is
    (`exeplan.progress`). Raises InputError for wrong input, Infeasible where no schedule keeps the bounds.
    """
    if method == "bayesian":
        require("--method bayesian", "optuna")
    margin = _risk(risk, errors)
    deadlines, due = _deadlines(deadline, deadline_share, arrives=arrival_rate is not None or arrivals is not None)
    bounds = _bounds(latency_bound, bound_on, ttft=ttft, tpot=tpot, itl=itl, attainment=attainment, due=due)
    if max_num_seqs is not None and not 1 <= max_num_seqs <= MAX_SEQS:
        raise InputError(f"--max-num-seqs must lie between 1 and {MAX_SEQS}, found {max_num_seqs}")
    measured = _times_of(profile, model, cluster, engine, routing)
    lengths = load_workload(workload)
    bytes_of_each = num_bytes(str(memory), "--memory") if memory is not None else None
    _check_utilization(gpu_memory_utilization, measured)
    rate = parse_arrivals(_text(arrival_rate), lengths, of_trace=arrivals == "trace")
    least = parse_rate(str(min_throughput), "--min-throughput") if min_throughput is not None else 0.0
    part, whole = _gpus(measured, cluster, gpus)
    _note_other_links(told, [(measured, part if whole else None)])
    _check_memory(bytes_of_each, measured, part)
    if gpus == "auto" and rate is None and not least:
        raise InputError("--gpus auto needs an --arrival-rate, --arrivals trace or --min-throughput to meet")
    return solve_by_threads(
        PlanRequest(
            profile=measured,
            workload=lengths,
            fit_context=fit_context,
            bounds=bounds,
            deadlines=deadlines,
            arrivals=rate,
            min_throughput=least,
            cluster=part,
            whole=whole,
            fewest_gpus=gpus == "auto",
            across_nodes=across_nodes,
            one_pipeline=one_pipeline,
            policy=fspath(policy),
            engine_policies=engine_policies(measured),
            whole_servers=has_servers(measured),
            method=method,
            order=order or ("das" if deadlines else "fcfs"),
            risk=margin,
            memory=bytes_of_each,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_seqs=max_num_seqs,
        ),
        told=told,
    )


def simulate(
    plan: Plan | File,
    *,
    profile: Profile | File | None = None,
    workload: Workload | File | Mapping[str, ArrayLike] | Any = None,
    cluster: Cluster | File | None = None,
    arrival_rate: Quantity | None = None,
    arrivals: Literal["trace"] | None = None,
    requests: int | None = None,
    seed: int = 0,
    steady_state: str = "comb",
    told: Told = SILENT,
) -> Simulation:
    """Replays a plan request by request; profile, workload and cluster replace the plan's own, and so do the arrivals.

    `requests` is how many are replayed (default: enough for a steady window), and `told` hears how far the replay is
    (`exeplan.progress`). Raises InputError for wrong input.
    """
    found = plan if isinstance(plan, Plan) else load_plan(plan)
    if arrival_rate is not None and arrivals is not None:
        raise InputError("--arrival-rate and --arrivals trace exclude each other; leave one out")
    if arrival_rate is not None or arrivals is not None:
        rate = parse_rate(str(arrival_rate), "--arrival-rate") if arrival_rate is not None else None
        found = replace(found, arrival_rate=rate, trace_arrivals=arrivals == "trace")
    request = plan_request(
        found,
        profile=load_profile(profile) if profile is not None else plan_profile(found),
        workload=load_workload(workload) if workload is not None else None,
        cluster=load_cluster(cluster) if cluster is not None else None,
    )
    if cluster is not None:
        found = replace(found, gpus=None)
    return simulate_plan(found, request, num_requests=requests, seed=seed, steady_state=steady_state, told=told)


def compare(
    profiles: Iterable[Profile | File],
    workloads: Iterable[Workload | File | Mapping[str, ArrayLike] | Any],
    latency_bounds: Iterable[Quantity],
    *,
    models: Iterable[ModelSpec | File] = (),
    engines: Sequence[File] = ("exeplan",),
    bound_on: str = "p99-length",
    clusters: Iterable[Cluster | File] = (),
    gpus: Sequence[int] = (),
    policy: File = "auto",
    fit_context: bool = False,
    told: Told = SILENT,
) -> Comparison:
    """Optimizes every profile under every workload and bound, on one device or on every cluster of its device.

    `gpus` are numbers of GPUs to take of each cluster. Instead of profiles, `models` with `engines` (shipped names,
    files, or `exeplan` for kernels alone) have times by the datasheets of the clusters' devices. After the row of a
    profile with a serving engine's times comes one of that engine without options, where these are known. `told` hears
    how far it is. A row without a plan says why; wrong input raises InputError.
    """
    bounds = [Bound(seconds=seconds(str(value), "--latency-bound"), metric=bound_on) for value in latency_bounds]
    check_together(bounds[:1])
    policy = fspath(policy)
    resolve_policies(policy)  # A wrong name is refused before anything is searched.
    places = [load_cluster(one) for one in clusters]
    given = [load_profile(one) for one in profiles]
    pairs = _pairs(given, places, gpus, list(_engine_times(models, engines, places)))
    _note_other_links(told, pairs)
    asked = list(product(pairs, [load_workload(one) for one in workloads], bounds))
    requests = [
        PlanRequest(
            profile=profile,
            workload=workload,
            fit_context=fit_context,
            bounds=(bound,),
            cluster=cluster,
            policy=policy,
            engine_policies=engine_policies(profile),
            whole_servers=has_servers(profile),
        )
        for (profile, cluster), workload, bound in asked
    ]
    count = len(requests)
    parts = [told.part(n / count, (n + 1) / count, f"row {n + 1} of {count}") for n in range(count)]
    return Comparison(tuple(row for one, part in zip(requests, parts, strict=True) for row in _compared(one, part)))


def _compared(request: PlanRequest, told: Told) -> Iterator[ComparisonRow]:
    """The row of a request, and of its engine without options."""
    row = compare_row(request, told=told)
    yield row
    defaults = engine_defaults(request.profile)
    if row.plan and defaults:
        yield default_row(request, row, defaults)


def _engine_times(
    models: Iterable[ModelSpec | File], engines: Sequence[File], clusters: Sequence[Cluster]
) -> Iterator[tuple[Profile, Cluster]]:
    """Each model with each engine on each cluster, by the datasheet of its devices and its own links."""
    for model, cluster, engine in product(models, clusters, engines):
        times = None if fspath(engine) == "exeplan" else engine
        yield datasheet_profile(model, cluster.device, cluster=cluster, engine=times), cluster


def _note_other_links(told: Told, pairs: Iterable[tuple[Profile, Cluster | None]]) -> None:
    found = [sentence for profile, cluster in pairs if cluster for sentence in other_links(profile, cluster)]
    for sentence in dict.fromkeys(found):
        told.note(f"note: {sentence}")


# --- options ----------------------------------------------------------------------------------------------------------


def _bounds(
    latency: Bound | Quantity | None,
    bound_on: str | None,
    *,
    ttft: Quantity | None,
    tpot: Quantity | None,
    itl: Quantity | None,
    attainment: Quantity | None,
    due: Bound | None,
) -> tuple[Bound, ...]:
    if due is not None and bound_on is not None:
        raise InputError("--bound-on goes with --latency-bound; of deadlines --deadline-share says how many are met")
    if isinstance(latency, Bound):
        if bound_on is not None:
            raise InputError(f"{latency} says what it is on; leave --bound-on out")
        bound_on, latency = latency.metric, latency.seconds
    return parse_bounds(
        _text(latency),
        bound_on or "p99-length",
        ttft=_text(ttft),
        tpot=_text(tpot),
        itl=_text(itl),
        attainment=_text(attainment),
        due=due,
    )


def _text(value: Quantity | None) -> str | None:
    return None if value is None else str(value)


def _deadlines(
    deadline: Quantity | None, share: Quantity | None, *, arrives: bool
) -> tuple[Deadlines | None, Bound | None]:
    """The deadlines that were asked for, and the bound that they make."""
    if deadline is None:
        if share is not None:
            raise InputError("--deadline-share needs a --deadline, such as 2s")
        return None, None
    if not arrives:
        raise InputError("a deadline counts from the arrival; give --arrival-rate or --arrivals trace with --deadline")
    deadlines = parse_deadlines(str(deadline))
    return deadlines, deadline_bound(deadlines.mean, "99%" if share is None else str(share))


def _risk(risk: Quantity | None, errors: File | None) -> Risk | None:
    if risk is None:
        if errors is not None:
            raise InputError("--errors needs a --risk, such as 1%")
        return None
    share = parse_risk(str(risk))
    return Risk(share=share, own=load_errors(Path(errors)) if errors is not None else {})


def _times_of(
    profile: Profile | File | None,
    model: ModelSpec | File | None,
    cluster: Cluster | File | None,
    engine: File | None,
    routing: str | None,
) -> Profile:
    """The profile that is given, or one by the datasheet of a cluster's devices."""
    if profile is not None:
        if engine is not None:
            raise InputError("--engine goes with the times of a datasheet; give it to `exeplan profile` instead")
        found = load_profile(profile)
        if routing is not None and routing != (found.routing or EVEN):
            has = f"routing '{found.routing}'" if found.routing else "no table of uneven routing"
            raise InputError(
                f"--routing {routing} goes with the times of a datasheet, and this profile has {has}; give --routing "
                "to `exeplan profile` instead"
            )
        return _profile_of(found, model)
    if model is None or cluster is None:
        raise InputError(
            "give --profile FILE, as `exeplan profile` makes it; or --model and --cluster, for times by the datasheet "
            "of its devices"
        )
    gpus = load_cluster(cluster)
    return datasheet_profile(model, gpus.device, cluster=gpus, engine=engine, routing=routing or EVEN)


def _profile_of(profile: Profile, model: ModelSpec | File | None) -> Profile:
    """The profile, its model where that is now."""
    if model is None:
        return profile
    spec = load_model(model)
    return profile_for(spec, profile)


def _check_utilization(share: float | None, profile: Profile) -> None:
    if share is None:
        return
    check_utilization(share, "--gpu-memory-utilization")
    if profile.device.kind != "cuda":
        raise InputError("--gpu-memory-utilization is for GPUs, the profile is of a CPU; use --memory")


def _check_memory(asked: int | None, profile: Profile, cluster: Cluster | None) -> None:
    """Raises InputError for more than a device has."""
    there = cluster.memory_bytes if cluster else profile.device.memory_bytes
    if asked is not None and asked > there:
        where = "a cluster file can say that it has more" if profile.device.kind == "cuda" else "leave it out for 90 %"
        raise InputError(
            f"--memory is of each device, and {profile.device.name} has {show_bytes(there)}, less than "
            f"{show_bytes(asked)}; {where}"
        )


def _gpus(
    profile: Profile, cluster: Cluster | File | None, gpus: int | str | None
) -> tuple[Cluster | None, Cluster | None]:
    """The GPUs that were asked for, all of them for `auto`, and the whole cluster."""
    if gpus not in (None, "auto") and not str(gpus).isdecimal():
        raise InputError(f"--gpus must be a number of GPUs or auto, found '{gpus}'")
    if cluster is None:
        if gpus == "auto":
            raise InputError("--gpus auto needs a --cluster")
        return (profiled_host(profile, int(gpus)) if gpus is not None else None), None
    whole = cluster_for(profile, load_cluster(cluster))
    return whole if gpus in (None, "auto") else whole.part(int(str(gpus))), whole


def _pairs(
    profiles: Sequence[Profile],
    clusters: Sequence[Cluster],
    counts: Sequence[int],
    own: Sequence[tuple[Profile, Cluster]],
) -> Sequence[tuple[Profile, Cluster | None]]:
    """Every profile with the clusters of its device, and those of a cluster's `own` times, or with that many GPUs of
    them."""
    if not clusters:
        if counts:
            raise InputError("--gpus needs a --cluster")
        return [(profile, None) for profile in profiles]
    whole = matched(profiles, clusters, own)
    return [(p, part) for p, cluster in whole for part in ([cluster.part(n) for n in counts] or [cluster])]


# --- requests in memory -----------------------------------------------------------------------------------------------


def _workload_of_table(table: Any, name: str) -> Workload:
    columns = list(table.keys()) if hasattr(table, "keys") else []
    if not {"input_tokens", "output_tokens"} <= set(columns):
        found = ", ".join(map(str, columns)) or type(table).__name__
        raise InputError(f"a table of requests needs the columns input_tokens and output_tokens; found {found}")
    arrivals = table["arrival_s"] if "arrival_s" in columns else None
    trace = _trace(table["input_tokens"], table["output_tokens"], arrivals)
    return Workload.of_trace(name, trace, source=f"{name}, {len(trace.inputs)} requests")


def _trace(inputs: ArrayLike, outputs: ArrayLike, arrivals: ArrayLike | None) -> Trace:
    lengths = [_lengths("input_tokens", inputs), _lengths("output_tokens", outputs)]
    if len(lengths[0]) != len(lengths[1]):
        raise InputError(f"there are {len(lengths[0])} input_tokens and {len(lengths[1])} output_tokens")
    if arrivals is None:
        return Trace(lengths[0], lengths[1])
    times = _numbers("arrival_s", arrivals)
    if len(times) != len(lengths[0]):
        raise InputError(f"there are {len(lengths[0])} requests and {len(times)} arrival_s")
    if (times < 0).any() or (np.diff(times) < 0).any():
        raise InputError("arrival_s must not be negative and must not fall; sort the requests by it")
    return Trace(lengths[0], lengths[1], times)


def _lengths(name: str, values: ArrayLike) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = _numbers(name, values)
    if wrong := found[(found < 1) | (found > MAX_LENGTH) | (found != np.floor(found))].tolist():
        raise InputError(f"{name} must be whole numbers from 1 to {MAX_LENGTH:,}, found {wrong[0]:g}")
    return found.astype(np.int64)


def _numbers(name: str, values: ArrayLike) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be numbers, found {type(values).__name__}") from None
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise InputError(f"{name} must be one finite number a request, and at least one")
    return found
