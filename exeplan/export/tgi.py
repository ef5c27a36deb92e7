"""Text Generation Inference: `text-generation-launcher` of 3.0 to 3.3.

Source: `launcher/src/main.rs`, as of 3.3.

    plan                              TGI
    rra: decode_steps                 --max-waiting-tokens, one more: its count begins at 1 with the decode after a
                                      prefill; with --waiting-served-ratio so high that nothing else begins a
                                      prefill while requests decode, and PREFILL_CHUNKING=0, as chunks ignore both
    decode_batch, half a prefill more  --max-batch-size
    tokens of a whole prefill         --max-batch-prefill-tokens, at least those of the longest request
    tensor_parallel_size              --num-shard
    kv_cache_tokens                   none, as it ignores --max-batch-total-tokens with flash attention; the cache takes
                                      what is left of --cuda-memory-fraction
    bound on latency                  --max-concurrent-requests: who would wait longer is told 429

Not here: chunks of prompts, pipelines and experts on several devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.schedule import ReplicaGroup
from exeplan.export.interface import Export, Instance
from exeplan.export.shape import (
    check_one_stage,
    check_shape,
    common_remarks,
    in_flight_limit,
    instances_of,
    longest_request,
    most_rows,
    option_value,
    prefill_remarks,
    prefill_tokens,
    quantizes,
    weight_remarks,
    with_schedules,
    without_adjustment,
)

_PORT = 3000
_QUANTIZING = ("--quantize", "fp8")
_NEVER = "1000"
"""Waiting requests over running ones at which it would prefill earlier."""


def export(plan: Plan, spec: ModelSpec, *, model: str) -> Export:
    """See `interface.Exporter`."""
    check_shape(plan, spec, "TGI", ("rra",))
    check_one_stage(plan, "TGI")

    def words(group: ReplicaGroup) -> tuple[list[str], dict[str, str]]:
        options = ["--model-id", model, *_weights(plan, spec, model), *_batches(plan, spec, group)]
        if plan.gpu_memory_utilization:
            options += ["--cuda-memory-fraction", f"{plan.gpu_memory_utilization:g}"]
        if limit := in_flight_limit(plan):
            options += ["--max-concurrent-requests", f"{limit}"]
        return [*options, "--port", f"{_PORT}"], {"PREFIX_CACHING": "0", "PREFILL_CHUNKING": "0"}

    instances = tuple(_own(one) for one in instances_of(plan, "tgi", ("text-generation-launcher",), words))
    return Export(
        engine="TGI",
        versions=("3.0", "3.3"),
        image="ghcr.io/huggingface/text-generation-inference:3.3.5",
        package="text-generation-server",
        port=_PORT,
        health_path="/health",
        cache_path="/data",
        instances=instances,
        remarks=(
            *weight_remarks(plan, spec, model, "TGI", " ".join(_QUANTIZING)),
            *dict.fromkeys(_remarks(plan, spec)),
            *_host_remarks(instances),
        ),
        as_run=with_schedules(plan, without_adjustment),
    )


def _own(instance: Instance) -> Instance:
    """With what a second server of a host may not share."""
    ports = {"--prometheus-port": 9000}
    if option_value(instance.options, "--num-shard") > 1:
        ports["--master-port"] = 29500
    return replace(instance, own_ports=ports, own_paths={"--shard-uds-path": "/tmp/text-generation-server"})


def _host_remarks(instances: Sequence[Instance]) -> Iterator[str]:
    hosts = [host for one in instances for host in one.hosts]
    if len(set(hosts)) < len(hosts):
        yield "TGI before 3.3 has no --prometheus-port, and runs one server a host unless each is in a container"


def _weights(plan: Plan, spec: ModelSpec, model: str) -> Iterator[str]:
    if plan.dtype == FP8:
        if quantizes(plan, spec, model):
            yield from _QUANTIZING
    elif plan.dtype:
        yield from ("--dtype", plan.dtype)
    if FP8 in (plan.kv_dtype, None if plan.kv_dtype else plan.dtype):
        yield from ("--kv-cache-dtype", "fp8_e4m3fn")


def _batches(plan: Plan, spec: ModelSpec, group: ReplicaGroup) -> Iterator[str]:
    variables, longest = group.schedule.variables, longest_request(spec, group)
    yield from ("--num-shard", f"{group.placement[0].tensor_parallel_size}")
    yield from ("--max-input-tokens", f"{longest - 1}", "--max-total-tokens", f"{longest}")
    yield from ("--max-waiting-tokens", f"{variables['decode_steps'] + 1}", "--waiting-served-ratio", _NEVER)
    if rows := most_rows(plan, group):
        yield from ("--max-batch-size", f"{rows}")
    yield from ("--max-batch-prefill-tokens", f"{max(prefill_tokens(plan, group) or 0, longest)}")


def _remarks(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    for group in plan.groups:
        yield (
            f"the plan prefills {group.schedule['prefill_batch']} requests at a time; TGI as many as it has places and "
            "the tokens of a prefill allow"
        )
        if "adjust_percent" in group.schedule.variables:
            yield "the plan adjusts the number of prefills to their work; TGI does not"
    yield from prefill_remarks(plan, spec, "TGI", "--max-batch-prefill-tokens")
    yield from common_remarks(plan, "TGI", "prefix caching")
