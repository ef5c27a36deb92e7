"""vLLM: `vllm serve` of 0.31 to 0.33.

Source: `vllm/engine/arg_utils.py`, `vllm/config/scheduler.py`, `vllm/distributed/utils.py` and `vllm/envs.py` of
0.32.0.

    plan                              vLLM
    max_num_seqs                      --max-num-seqs, of each data-parallel rank
    max_num_batched_tokens            --max-num-batched-tokens
    rra: a whole prefill's tokens      --max-num-batched-tokens, and one more for each row that decodes
    orca: whole prompts               --no-enable-chunked-prefill, and a budget for the longest prompt
    rra: decode_steps                 --prefill-schedule-interval: steps from one with new prompts to the next, while no
                                      requests are left waiting
    rra, all of it, with the plug-in  --scheduler-cls exeplan.vllm_plugin.scheduler.RraScheduler
    stages, their layers              --pipeline-parallel-size, VLLM_PP_LAYER_PARTITION
    replicas                          a server each, behind a router
    a pipeline on several hosts       --nnodes, --node-rank, --master-addr; --headless on all but the first
    expert_parallel_size              --enable-expert-parallel
    bound on latency                  --max-num-queued-reqs: who would wait longer is told 503
    waa-c, waa-m: servers of a phase  --kv-transfer-config with NixlConnector (`nixl/connector.py`), behind vllm-router
                                      0.1.17 (its `router_args.py`), whose --max-concurrent-requests has the bound,
                                      but not for streams
    prefill_batch, decode_batch       --max-num-seqs of each server

Not here: phases on stages that hold some layers only.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, ReplicaGroup, Schedule, servers
from exeplan.errors import InputError
from exeplan.export.interface import Export, Join, Router
from exeplan.export.shape import (
    Side,
    apart,
    cache_remark,
    check_shape,
    check_sides,
    common_remarks,
    handover_remarks,
    in_flight_limit,
    instances_of,
    layer_partition,
    longest_request,
    most_rows,
    of_each,
    option_value,
    pass_tokens,
    prefill_remarks,
    prefill_tokens,
    quantizes,
    refill_remark,
    router_limit,
    sides_of,
    weight_remarks,
    with_schedules,
)
from exeplan.vllm_plugin.cadence import PLAN_VARIABLE

_POLICIES = ("chunked", "orca", "rra")
_APART = ("waa-c", "waa-m")
_SIDE_CHANNEL, _SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_NIXL_SIDE_CHANNEL_HOST"
_SIDE_CHANNEL_PORT, _SERVER_PORT = 5600, 8100
_ROUTER_IMAGE = "vllm-router:0.1.17"
_JOIN = Join(
    options=("--nnodes", "{hosts}", "--node-rank", "{rank}", "--master-addr", "{leader}"), followers=("--headless",)
)
_HOLDS = "vLLM never does, and a prefill server gives up what is not taken over in 30 s"
_DECODE_TOKENS = 2048
"""Of a pass of a server that only decodes, at least: vLLM's least default."""
_IMAGES = {"cuda": "vllm/vllm-openai:v0.33.0", "cpu": "vllm/vllm-openai-cpu:v0.33.0"}
_PORT = 8000
_QUANTIZING = ("--quantization", "fp8_per_tensor")
_GIB = 1 << 30
_UTILIZATION = 0.9
_PLUG_IN = "exeplan.vllm_plugin.scheduler"
_MOST_ROWS = 2
"""Rows that may decode over those that do in the mean: the cycle, and not vLLM, says how many there are."""
_PREFILL_TOKENS = 16384
"""Of a pass with the plug-in at most, but for one request that is longer: their activations take memory."""


def export(plan: Plan, spec: ModelSpec, *, model: str) -> Export:
    """See `interface.Exporter`."""
    if apart(plan):
        return _export_apart(plan, spec, model)
    check_shape(plan, spec, "vLLM", _POLICIES)
    return _exported(plan, spec, model, plug_in=None)


def export_with_plug_in(plan: Plan, spec: ModelSpec, *, model: str, file: Path) -> Export:
    """As `export`, with exeplan's scheduler in vLLM, which reads the cadence of the plan in `file`.

    Raises InputError for plans whose cadence it does not keep.
    """
    check_shape(plan, spec, "vLLM", ("rra",))
    if plan.more_replicas or len(plan.placement) > 1:
        raise InputError(
            "the plug-in keeps the cadence of one plan on one stage; this one has unequal replicas or more"
        )
    return _exported(plan, spec, model, plug_in=file)


def _exported(plan: Plan, spec: ModelSpec, model: str, *, plug_in: Path | None) -> Export:

    def words(group: ReplicaGroup) -> tuple[list[str], dict[str, str]]:
        options = [*_weights(plan, spec, model), *_parallel(group.placement)]
        options += _cadence(plan, spec, group) if plug_in else _batches(plan, spec, group)
        if plan.device != "cpu":
            options += ["--gpu-memory-utilization", f"{plan.gpu_memory_utilization or _UTILIZATION:g}"]
        if limit := in_flight_limit(plan):
            options += ["--max-num-queued-reqs", f"{limit}"]
        variables = {PLAN_VARIABLE: str(plug_in.resolve())} if plug_in else {}
        options += ["--no-enable-prefix-caching", "--port", f"{_PORT}"]
        return [model, *options], {**_environment(plan, spec, group), **variables}

    return Export(
        engine="vLLM",
        versions=("0.31", "0.33"),
        image=_IMAGES[plan.device or "cuda"],
        package="vllm",
        port=_PORT,
        health_path="/health",
        instances=instances_of(plan, "vllm", ("vllm", "serve"), words, _JOIN),
        remarks=(
            *weight_remarks(plan, spec, model, "vLLM", " ".join(_QUANTIZING)),
            *dict.fromkeys(_remarks(plan, spec, plug_in=plug_in is not None)),
        ),
        as_run=None if plug_in else _as_run(plan),
    )


def _export_apart(plan: Plan, spec: ModelSpec, model: str) -> Export:
    """Servers that only prefill or only decode, and the router in front of them."""
    check_shape(plan, spec, "vLLM", _APART, apart=True)
    check_sides(plan, spec, "vLLM")

    def words(side: Side) -> tuple[list[str], dict[str, str]]:
        longest = min(spec.max_context, side.kv_cache_tokens or spec.max_context)
        role = "kv_producer" if side.phase == "prefill" else "kv_consumer"
        options = [*_weights(plan, spec, model), *_parallel(side.server)]
        options += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
        options += ["--max-model-len", f"{longest}"] if longest < spec.max_context else []
        options += ["--max-num-seqs", f"{side.rows}", "--max-num-batched-tokens", f"{_pass_tokens(side, longest)}"]
        options += ["--gpu-memory-utilization", f"{plan.gpu_memory_utilization or _UTILIZATION:g}"]
        return [model, *options, "--no-enable-prefix-caching", "--port", f"{_SERVER_PORT}"], {}

    instances = sides_of(plan, "vllm", ("vllm", "serve"), words, _JOIN)
    tokens = max(option_value(one.options, "--max-num-batched-tokens") for one in instances if one.phase == "prefill")
    return Export(
        engine="vLLM",
        versions=("0.31", "0.33"),
        image=_IMAGES["cuda"],
        package="vllm",
        port=_SERVER_PORT,
        health_path="/health",
        instances=tuple(
            replace(one, own_ports={_SIDE_CHANNEL: _SIDE_CHANNEL_PORT}, address_variable=_SIDE_CHANNEL_HOST)
            for one in instances
        ),
        router=Router(
            program=("vllm-router",),
            options=(
                *("--vllm-pd-disaggregation", "--kv-connector", "nixl"),
                *("--prefill-policy", "round_robin", "--decode-policy", "power_of_two"),
                *("--worker-startup-timeout-secs", "1800"),
                *router_limit(plan),
                *("--host", "0.0.0.0", "--port", f"{_PORT}"),
            ),
            version="0.1.17",
            image=_ROUTER_IMAGE,
            package="vllm-router",
            port=_PORT,
            remarks=(
                f"the image {_ROUTER_IMAGE} is one that you build, with the package vllm-router 0.1.17",
                *_limit_remarks(plan),
            ),
            health_path="/health",
        ),
        remarks=(
            *weight_remarks(plan, spec, model, "vLLM", " ".join(_QUANTIZING)),
            *handover_remarks(plan, "vLLM", tokens, _HOLDS),
            "vLLM needs the package nixl beside it",
            cache_remark("prefix caching"),
        ),
        as_run=with_schedules(plan, _own_schedule),
    )


def _limit_remarks(plan: Plan) -> Iterator[str]:
    yield from refill_remark(plan, "vllm-router")
    if in_flight_limit(plan):
        yield "vllm-router counts a streamed request until its response begins: streams are not limited"


def _pass_tokens(side: Side, longest: int) -> int:
    """Those that decode have one each."""
    if side.phase == "prefill":
        return max(pass_tokens(side, longest, _PREFILL_TOKENS), side.rows)
    return max(side.rows, _DECODE_TOKENS)


def _as_run(plan: Plan) -> Plan | None:
    """Without what vLLM has no option for; no policy here is its interval."""
    if any(group.schedule.policy == "rra" for group in plan.groups):
        return None
    return with_schedules(plan, _own_schedule)


def _own_schedule(group: ReplicaGroup) -> Schedule:
    stages, left_out = len(group.placement), ("max_num_prefills", "micro_batches", "adjust_percent", "prefill_tokens")
    if group.schedule.policy in _APART:
        stages = len(servers(group.placement, "decode"))
    kept = {name: value for name, value in group.schedule.variables.items() if name not in left_out}
    return Schedule(group.schedule.policy, {**kept, **({"micro_batches": stages} if stages > 1 else {})})


def _weights(plan: Plan, spec: ModelSpec, model: str) -> Iterator[str]:
    """Their dtype, and that of keys and values."""
    if plan.dtype == FP8:
        if quantizes(plan, spec, model):
            yield from _QUANTIZING
    elif plan.dtype:
        yield from ("--dtype", plan.dtype)
    if FP8 in (plan.kv_dtype, None if plan.kv_dtype else plan.dtype):
        yield from ("--kv-cache-dtype", "fp8")


def _parallel(placement: Placement) -> Iterator[str]:
    first = placement[0]
    yield from ("--tensor-parallel-size", f"{first.tensor_parallel_size}")
    if len(placement) > 1:
        yield from ("--pipeline-parallel-size", f"{len(placement)}")
    if first.data_parallel_size > 1:
        yield from ("--data-parallel-size", f"{first.data_parallel_size}")
    if first.expert_parallel_size > 1:
        yield "--enable-expert-parallel"


def _batches(plan: Plan, spec: ModelSpec, group: ReplicaGroup) -> Iterator[str]:
    """The batch, the tokens of a step and, for `rra`, the steps between prompts."""
    schedule, longest = group.schedule, longest_request(spec, group)
    rows = most_rows(plan, group) if schedule.policy == "rra" else schedule["max_num_seqs"]
    if longest < spec.max_context:
        yield from ("--max-model-len", f"{longest}")
    if rows:
        yield from ("--max-num-seqs", f"{of_each(rows, group.placement)}")
    if schedule.policy == "rra":
        yield from ("--prefill-schedule-interval", f"{schedule['decode_steps']}")
        if tokens := prefill_tokens(plan, group):
            tokens += 0 if "max_num_batched_tokens" in schedule.variables else rows or 0
            yield from ("--max-num-batched-tokens", f"{of_each(tokens, group.placement)}")
        return
    if schedule.policy == "orca":
        tokens = max(schedule.variables.get("max_num_batched_tokens", 0), longest + schedule["max_num_seqs"])
        yield from ("--no-enable-chunked-prefill", "--max-num-batched-tokens", f"{tokens}")
    elif budget := schedule.variables.get("max_num_batched_tokens"):
        yield from ("--max-num-batched-tokens", f"{of_each(budget, group.placement)}")


def _cadence(plan: Plan, spec: ModelSpec, group: ReplicaGroup) -> Iterator[str]:
    """Whole prompts, as many in a pass as the plan prefills if its tokens allow, and the scheduler that holds them
    to the cycle."""
    schedule, longest = group.schedule, longest_request(spec, group)
    tokens = max(min(longest * schedule["prefill_batch"], _PREFILL_TOKENS), longest)
    if longest < spec.max_context:
        yield from ("--max-model-len", f"{longest}")
    if rows := most_rows(plan, group):
        yield from ("--max-num-seqs", f"{_MOST_ROWS * rows}")
    yield from ("--no-enable-chunked-prefill", "--max-num-batched-tokens", f"{tokens}")
    yield from ("--scheduler-cls", f"{_PLUG_IN}.{'RraSyncScheduler' if plan.device == 'cpu' else 'RraScheduler'}")


def _environment(plan: Plan, spec: ModelSpec, group: ReplicaGroup) -> dict[str, str]:
    found = {}
    if layers := layer_partition(group.placement, _own_split):
        found["VLLM_PP_LAYER_PARTITION"] = layers
    if plan.device == "cpu":
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": f"{plan.num_threads}"}
        if group.kv_cache_tokens:  # In whole GiB.
            kv_bytes = group.kv_cache_tokens * spec.kv_bytes_per_token(plan.kv_dtype or plan.dtype or "float32")
            found["VLLM_CPU_KVCACHE_SPACE"] = f"{-(-kv_bytes // _GIB)}"
    return found


def _own_split(layers: int, stages: int) -> Sequence[int]:
    """What is left over goes to the stages before the last one."""
    each, more = divmod(layers, stages)
    return [each + (stages - 1 - more <= number < stages - 1) for number in range(stages)]


def _remarks(plan: Plan, spec: ModelSpec, *, plug_in: bool) -> Iterator[str]:
    if plug_in:
        yield "exeplan must be installed in vLLM's environment, and the plan stay where it is: vLLM reads it there"
    for group in () if plug_in else plan.groups:
        variables = group.schedule.variables
        if "max_num_prefills" in variables:
            yield (
                f"the plan begins at most {variables['max_num_prefills']} prompts in a pass; vLLM has no such limit "
                "since 0.31, and begins as many as the tokens of a step allow"
            )
        if group.schedule.policy == "rra":
            yield (
                f"the plan prefills {variables['prefill_batch']} requests at a time in a pass of their own; vLLM "
                "begins as many as it has places and a step's tokens allow, in one pass with those that decode"
            )
            yield (
                "vLLM's --prefill-schedule-interval is off for as long as a step that begins prompts leaves others "
                "waiting, so under a backlog, and up to 0.32 for all but models with experts and --data-parallel-size "
                "above 1; on one stage --plug-in keeps the planned cadence"
            )
            if not most_rows(plan, group):
                yield "nothing says how many requests decode at once, so vLLM's own --max-num-seqs holds"
    if not plug_in:
        yield from prefill_remarks(plan, spec, "vLLM", "--max-num-batched-tokens")
    yield from common_remarks(plan, "vLLM", "prefix caching")
