"""LMDeploy: `lmdeploy serve api_server` of 0.18 with its PyTorch engine.

Source: `lmdeploy/cli/serve.py`, `lmdeploy/cli/utils.py`, `lmdeploy/messages.py` and
`lmdeploy/pytorch/engine/inputs_maker.py` of 0.18.0.

    plan                              LMDeploy
    rra: decode_steps                 16 at most, its `prefill_interval`, which the command line cannot set; none as
                                      soon as --max-prefill-token-num tokens wait, so under a backlog
    decode_batch, half a prefill more  --max-batch-size
    tokens of a whole prefill         --max-prefill-token-num
    tensor_parallel_size              --tp
    kv_cache_tokens                   --num-gpu-blocks, of 64 tokens
    bound on latency                  none: --max-concurrent-requests counts health checks, and no streams

Not here: its other engine (TurboMind); pipelines, which it has not; attention data parallelism.
"""

from collections.abc import Iterator

from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.schedule import ReplicaGroup
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
)

_PORT = 23333
_INTERVAL = 16
_BLOCK = 64
_UTILIZATION = 0.9


def export(plan: Plan, spec: ModelSpec, *, model: str) -> Export:
    """See `interface.Exporter`."""
    check_shape(plan, spec, "LMDeploy", ("rra",))
    check_one_stage(plan, "LMDeploy")

    def words(group: ReplicaGroup) -> tuple[list[str], dict[str, str]]:
        options = ["--backend", "pytorch", *_weights(plan), *_batches(plan, spec, group)]
        if group.kv_cache_tokens:
            options += ["--num-gpu-blocks", f"{group.kv_cache_tokens // _BLOCK}", "--cache-block-seq-len", f"{_BLOCK}"]
        options += ["--cache-max-entry-count", f"{plan.gpu_memory_utilization or _UTILIZATION:g}"]
        return [model, *options, "--server-port", f"{_PORT}"], {}

    return Export(
        engine="LMDeploy",
        versions=("0.18", "0.18"),
        image="openmmlab/lmdeploy:v0.18.0",
        package="lmdeploy",
        port=_PORT,
        port_option="--server-port",
        health_path="/health",
        instances=instances_of(plan, "lmdeploy", ("lmdeploy", "serve", "api_server"), words),
        remarks=tuple(dict.fromkeys(_remarks(plan, spec))),
    )


def _weights(plan: Plan) -> Iterator[str]:
    if plan.dtype and plan.dtype != FP8:
        yield from ("--dtype", plan.dtype)
    if FP8 in (plan.kv_dtype, None if plan.kv_dtype else plan.dtype):
        yield from ("--quant-policy", "fp8")


def _batches(plan: Plan, spec: ModelSpec, group: ReplicaGroup) -> Iterator[str]:
    longest = longest_request(spec, group)
    yield from ("--tp", f"{group.placement[0].tensor_parallel_size}")
    if longest < spec.max_context:
        yield from ("--session-len", f"{longest}")
    if rows := most_rows(plan, group):
        yield from ("--max-batch-size", f"{rows}")
    if tokens := prefill_tokens(plan, group):
        yield from ("--max-prefill-token-num", f"{tokens}")


def _remarks(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    for group in plan.groups:
        variables = group.schedule.variables
        if variables["decode_steps"] != _INTERVAL:
            yield (
                f"the plan decodes {variables['decode_steps']} steps between prefills; LMDeploy at most {_INTERVAL}, "
                "and its command line cannot say otherwise (prefill_interval of PytorchEngineConfig can)"
            )
        yield (
            "as soon as waiting prompts have --max-prefill-token-num tokens, which under a backlog is always so, "
            "LMDeploy prefills at every step that has a place: the plan's interval does not hold then, and no policy "
            "here schedules so, so that what it costs is not known"
        )
        yield (
            f"the plan prefills {variables['prefill_batch']} requests at a time; LMDeploy as many as it has places and "
            "the tokens of a prefill allow, and earlier where less than half of its places are taken"
        )
        if not most_rows(plan, group):
            yield "nothing says how many requests decode at once, so LMDeploy's own --max-batch-size holds"
        if plan.dtype == FP8:
            yield "weights are as the checkpoint has them: LMDeploy quantizes none to fp8 when it loads them"
    yield from queue_remark(plan, "LMDeploy")
    yield from prefill_remarks(plan, spec, "LMDeploy", "--max-prefill-token-num")
    yield from common_remarks(plan, "LMDeploy", "prefix caching")
