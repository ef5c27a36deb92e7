"""LightLLM: `lightllm.server.api_server` of 1.1.

Source: `lightllm/server/api_cli.py` of its main branch, October 2026.

    plan                              LightLLM
    rra: decode_steps                 --router_max_wait_tokens, with --disable_aggressive_schedule, without which it
                                      prefills earlier
    decode_batch, half a prefill more  --running_max_req_size
    tokens of a whole prefill         --batch_max_tokens, at least those of the longest request
    tensor_parallel_size              --tp
    kv_cache_tokens                   --max_total_token_num

Not here: chunks of prompts, pipelines and experts on several devices.
"""

from collections.abc import Iterator

from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.schedule import ReplicaGroup
from exeplan.errors import InputError
from exeplan.export.interface import Export
from exeplan.export.shape import (
    check_one_stage,
    check_shape,
    common_remarks,
    instances_of,
    longest_request,
    most_rows,
    prefill_remarks,
    prefill_tokens,
    queue_remark,
    with_schedules,
    without_adjustment,
)

_PORT = 8000
_UTILIZATION = 0.9
_LISTENS = ("--host", "0.0.0.0", "--port", f"{_PORT}")
"""By its default LightLLM is reached from its own host, or container, alone."""


def export(plan: Plan, spec: ModelSpec, *, model: str) -> Export:
    """See `interface.Exporter`."""
    check_shape(plan, spec, "LightLLM", ("rra",))
    check_one_stage(plan, "LightLLM")
    if FP8 in (plan.kv_dtype, plan.dtype):
        raise InputError("LightLLM keeps keys and values in fp8 by a file of calibrated scales only; plan in bfloat16")

    def words(group: ReplicaGroup) -> tuple[list[str], dict[str, str]]:
        variables, longest = group.schedule.variables, longest_request(spec, group)
        options = ["--model_dir", model, "--tp", f"{group.placement[0].tensor_parallel_size}"]
        options += ["--max_req_total_len", f"{longest}"]
        options += ["--router_max_wait_tokens", f"{variables['decode_steps']}", "--disable_aggressive_schedule"]
        if rows := most_rows(plan, group):
            options += ["--running_max_req_size", f"{rows}"]
        if tokens := prefill_tokens(plan, group):
            options += ["--batch_max_tokens", f"{max(tokens, longest)}"]
        if group.kv_cache_tokens:
            options += ["--max_total_token_num", f"{group.kv_cache_tokens}"]
        options += ["--mem_fraction", f"{plan.gpu_memory_utilization or _UTILIZATION:g}"]
        return [*options, "--disable_chunked_prefill", "--disable_dynamic_prompt_cache", *_LISTENS], {}

    return Export(
        engine="LightLLM",
        versions=("1.1", "1.1"),
        image="ghcr.io/modeltc/lightllm:main",
        package="lightllm",
        port=_PORT,
        health_path="/health",
        instances=instances_of(plan, "lightllm", ("python3", "-m", "lightllm.server.api_server"), words),
        remarks=tuple(dict.fromkeys(_remarks(plan, spec))),
        as_run=with_schedules(plan, without_adjustment),
    )


def _remarks(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    for group in plan.groups:
        yield (
            f"the plan prefills {group.schedule['prefill_batch']} requests at a time; LightLLM as many as it has "
            "places and the tokens of a prefill allow"
        )
        if "adjust_percent" in group.schedule.variables:
            yield "the plan adjusts the number of prefills to their work; LightLLM does not"
    yield from queue_remark(plan, "LightLLM")
    yield "--model_dir is a directory on its machine: LightLLM downloads nothing; its image is not of a fixed version"
    yield from prefill_remarks(plan, spec, "LightLLM", "--batch_max_tokens")
    yield from common_remarks(plan, "LightLLM", "its prompt cache")
