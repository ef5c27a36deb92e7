"""SGLang: `sglang.launch_server` of 0.5.23.

Source: `sglang/srt/arg_groups/fields`, `sglang/srt/managers/scheduler.py` and `sglang/srt/distributed/utils.py` of
0.5.23.

    plan                              SGLang
    rra: prefill_batch, decode_steps  --prefill-max-requests, --prefill-decode-interval: as `rra` has them, prefills in
                                      passes of their own and so many decode steps after each
    decode_batch, max_num_seqs        --max-running-requests, for rra half a prefill more
    max_num_batched_tokens            chunked: --chunked-prefill-size, from which it takes the rows that decode
    rra: decode_steps, on a pipeline  --prefill-decode-interval counts the passes of all micro-batches, one a stage: the
                                      nearest with which each of them has prefills in turn
    tokens of a whole prefill         rra: --max-prefill-tokens, as the interval begins after each pass
    chunked: prompts beside decodes   --enable-mixed-chunk
    sglang: max_num_batched_tokens    --chunked-prefill-size
    conservativeness_percent          --schedule-conservativeness, which it multiplies by 0.3 for several ranks
    stages, their layers              --pp-size, SGLANG_PP_LAYER_PARTITION
    a pipeline on several hosts       --nnodes, --node-rank, --dist-init-addr
    data_parallel_size                --attn-dp-size, of a tensor-parallel group of all devices
    kv_cache_tokens                   --max-total-tokens
    bound on latency                  --max-queued-requests, of each rank: a request that would wait longer is told 503
    waa-c, waa-m: servers of a phase  --disaggregation-mode, behind sglang-router 0.3.2 (its `router_args.py`), whose
                                      --max-concurrent-requests has the bound: SGLang's own is ignored there
    prefill_batch, decode_batch       --prefill-max-requests, --max-running-requests, of each server

Not here: `orca`, as whole prompts are never in one pass with decodes; phases on stages that hold some layers only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, ReplicaGroup, Schedule, servers
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

_POLICIES = ("rra", "chunked", "sglang")
_APART = ("waa-c", "waa-m")
_PROGRAM = ("python3", "-m", "sglang.launch_server")
_QUANTIZING = ("--quantization", "fp8")
_BOOTSTRAP = "--disaggregation-bootstrap-port"
_BOOTSTRAP_PORT, _ROUTER_PORT = 8998, 8000
_PREFILL_TOKENS = 16384
"""Of a pass, where the plan has no budget: SGLang's own."""
_PORT = 30000
_UTILIZATION = 0.9
_WHOLE = "-1"
"""Of the size of a chunk: prompts are not cut."""
_OF_RANKS = 0.3
"""Factor of the conservativeness with attention data parallelism (`arg_groups/parallel_hook.py`)."""
_PORTS_OF_RANKS = 20
"""Between two servers of a host with attention data parallelism: each takes its port, the one 13 further and those 233
to 239 further (`server_args.py`), which at this distance differ among up to eleven servers."""
_JOIN = Join(options=("--nnodes", "{hosts}", "--node-rank", "{rank}", "--dist-init-addr", "{leader}:20000"))
_HOLDS = "SGLang holds them back only where a decode server has no room"
_SERVING = ("--disable-radix-cache", "--host", "0.0.0.0", "--port", f"{_PORT}")
"""By its default SGLang is reached from its own host, or container, alone."""
_COMMON: dict[str, Any] = {
    "engine": "SGLang",
    "versions": ("0.5.23", "0.5.23"),
    "image": "lmsysorg/sglang:v0.5.23",
    "package": "sglang",
    "port": _PORT,
    "health_path": "/health",
}


def export(plan: Plan, spec: ModelSpec, *, model: str) -> Export:
    """See `interface.Exporter`."""
    if apart(plan):
        return _export_apart(plan, spec, model)
    check_shape(plan, spec, "SGLang", _POLICIES)

    def words(group: ReplicaGroup) -> tuple[list[str], dict[str, str]]:
        options = [*_weights(plan, spec, model), *_parallel(group.placement), *_batches(plan, spec, group)]
        if plan.device == "cpu":
            options += ["--device", "cpu"]
        else:
            options += ["--mem-fraction-static", f"{plan.gpu_memory_utilization or _UTILIZATION:g}"]
        if group.kv_cache_tokens:
            options += ["--max-total-tokens", f"{of_each(group.kv_cache_tokens, group.placement)}"]
        environment = {}
        if layers := layer_partition(group.placement, _own_split):
            environment["SGLANG_PP_LAYER_PARTITION"] = layers
        return ["--model-path", model, *options, *_SERVING], environment

    return Export(
        **_COMMON,
        port_step=_PORTS_OF_RANKS if any(one.placement[0].data_parallel_size > 1 for one in plan.groups) else 1,
        instances=instances_of(plan, "sglang", _PROGRAM, words, _JOIN),
        remarks=(
            *weight_remarks(plan, spec, model, "SGLang", " ".join(_QUANTIZING)),
            *dict.fromkeys(_remarks(plan, spec)),
        ),
        as_run=with_schedules(plan, _own_schedule),
    )


def _export_apart(plan: Plan, spec: ModelSpec, model: str) -> Export:
    """Servers that only prefill or only decode, and the router in front of them."""
    check_shape(plan, spec, "SGLang", _APART, apart=True)
    check_sides(plan, spec, "SGLang")

    def words(side: Side) -> tuple[list[str], dict[str, str]]:
        longest = min(spec.max_context, side.kv_cache_tokens or spec.max_context)
        options = [*_weights(plan, spec, model), *_parallel(side.server), "--disaggregation-mode", side.phase]
        options += ["--disaggregation-transfer-backend", "nixl"]
        options += ["--context-length", f"{longest}"] if longest < spec.max_context else []
        options += ["--mem-fraction-static", f"{plan.gpu_memory_utilization or _UTILIZATION:g}"]
        if side.phase == "prefill":
            options += ["--chunked-prefill-size", _WHOLE, "--prefill-max-requests", f"{side.rows}"]
            options += ["--max-prefill-tokens", f"{pass_tokens(side, longest, _PREFILL_TOKENS)}"]
            options += [_BOOTSTRAP, f"{_BOOTSTRAP_PORT}"]
        else:
            options += ["--max-running-requests", f"{side.rows}"]
            options += ["--max-total-tokens", f"{side.kv_cache_tokens}"] if side.kv_cache_tokens else []
        return ["--model-path", model, *options, *_SERVING], {}

    instances = sides_of(plan, "sglang", _PROGRAM, words, _JOIN)
    tokens = max(option_value(one.options, "--max-prefill-tokens") for one in instances if one.phase == "prefill")
    return Export(
        **_COMMON,
        instances=tuple(
            replace(one, own_ports={_BOOTSTRAP: _BOOTSTRAP_PORT}) if one.phase == "prefill" else one
            for one in instances
        ),
        router=Router(
            program=("python3", "-m", "sglang_router.launch_router"),
            options=(
                "--pd-disaggregation",
                *("--prefill-policy", "round_robin", "--decode-policy", "power_of_two"),
                *router_limit(plan),
                *("--host", "0.0.0.0", "--port", f"{_ROUTER_PORT}"),
            ),
            version="0.3.2",
            image="lmsysorg/sgl-model-gateway:v0.3.2",
            package="sglang-router",
            port=_ROUTER_PORT,
            health_path="/health",
            bootstrap=_BOOTSTRAP,
            remarks=tuple(refill_remark(plan, "sglang-router")),
        ),
        remarks=(
            *weight_remarks(plan, spec, model, "SGLang", " ".join(_QUANTIZING)),
            *handover_remarks(plan, "SGLang", tokens, _HOLDS),
            cache_remark("the radix cache"),
        ),
        as_run=with_schedules(plan, _own_schedule),
    )


def _own_schedule(group: ReplicaGroup) -> Schedule:
    stages, left_out = len(group.placement), ("max_num_prefills", "micro_batches", "adjust_percent", "prefill_tokens")
    if group.schedule.policy in _APART:
        stages = len(servers(group.placement, "decode"))
    kept = {name: value for name, value in group.schedule.variables.items() if name not in left_out}
    if group.schedule.policy == "rra":
        kept["decode_steps"] = _interval(group)
    return Schedule(group.schedule.policy, {**kept, **({"micro_batches": stages} if stages > 1 else {})})


def _weights(plan: Plan, spec: ModelSpec, model: str) -> Iterator[str]:
    if plan.dtype == FP8:
        if quantizes(plan, spec, model):
            yield from _QUANTIZING
    elif plan.dtype:
        yield from ("--dtype", plan.dtype)
    if FP8 in (plan.kv_dtype, None if plan.kv_dtype else plan.dtype):
        yield from ("--kv-cache-dtype", "fp8_e4m3")


def _parallel(placement: Placement) -> Iterator[str]:
    first = placement[0]
    yield from ("--tp-size", f"{first.num_devices}")
    if len(placement) > 1:
        yield from ("--pp-size", f"{len(placement)}")
    if first.data_parallel_size > 1:
        yield from ("--attn-dp-size", f"{first.data_parallel_size}")
    if first.expert_parallel_size > 1:
        yield from ("--ep-size", f"{first.expert_parallel_size}")


def _batches(plan: Plan, spec: ModelSpec, group: ReplicaGroup) -> Iterator[str]:
    schedule, longest = group.schedule, longest_request(spec, group)
    variables, of_rra = schedule.variables, schedule.policy == "rra"
    rows = most_rows(plan, group) if of_rra else variables["max_num_seqs"]
    if longest < spec.max_context:
        yield from ("--context-length", f"{longest}")
    if rows:
        yield from ("--max-running-requests", f"{rows}")
    if limit := in_flight_limit(plan):
        yield from ("--max-queued-requests", f"{of_each(max(limit - (rows or 0), 1), group.placement)}")
    if not of_rra:
        yield from ("--chunked-prefill-size", f"{variables['max_num_batched_tokens']}")
        if schedule.policy == "chunked":
            yield "--enable-mixed-chunk"
        yield from _conservativeness(group)
        return
    yield from ("--chunked-prefill-size", _WHOLE)
    yield from ("--prefill-max-requests", f"{of_each(variables['prefill_batch'], group.placement)}")
    yield from ("--prefill-decode-interval", f"{_interval(group)}")
    if tokens := prefill_tokens(plan, group):
        yield from ("--max-prefill-tokens", f"{of_each(tokens, group.placement)}")


def _conservativeness(group: ReplicaGroup) -> Iterator[str]:
    percent, ranks = group.schedule.variables.get("conservativeness_percent"), group.placement[0].data_parallel_size > 1
    if group.schedule.policy == "sglang" and (percent or ranks):
        yield from ("--schedule-conservativeness", f"{(percent or 100) / 100 / (_OF_RANKS if ranks else 1):g}")


def _interval(group: ReplicaGroup) -> int:
    """The nearest to `decode_steps` with which prefills visit all micro-batches, as passes do in turn; the larger one
    where two are as near."""
    steps, stages = group.schedule["decode_steps"], len(group.placement)
    near = (max(steps + sign * far, 1) for far in range(stages + 1) for sign in (1, -1))
    return next(found for found in near if math.gcd(found + 1, stages) == 1)


def _own_split(layers: int, stages: int) -> Sequence[int]:
    """What is left over goes to the last stages."""
    each, more = divmod(layers, stages)
    return [each + (number >= stages - more) for number in range(stages)]


def _remarks(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    for group in plan.groups:
        variables = group.schedule.variables
        if "max_num_prefills" in variables:
            yield (
                f"the plan begins at most {variables['max_num_prefills']} prompts in a pass; SGLang's chunks have no "
                "such limit"
            )
        if group.schedule.policy == "rra" and (steps := _interval(group)) != variables["decode_steps"]:
            yield (
                f"the plan decodes {variables['decode_steps']} steps between prefills; SGLang {steps}: its interval "
                f"counts passes of all {len(group.placement)} micro-batches, and by the plan's some have no prefills"
            )
        if "adjust_percent" in variables:
            yield "the plan adjusts the number of prefills to their work; SGLang's is constant"
        if group.schedule.policy == "rra" and not most_rows(plan, group):
            yield "nothing says how many requests decode at once, so SGLang's own --max-running-requests holds"
    yield from prefill_remarks(plan, spec, "SGLang", "--max-prefill-tokens")
    yield from common_remarks(plan, "SGLang", "the radix cache")
