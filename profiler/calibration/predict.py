"""A serving run predicted: its engine's admission of requests, replayed with a profile's times.

    trtllm    chunked, whole prompts (the pass has room for them), one a pass; slots reserved at full length
    vllm      chunked, prompts cut by the tokens of a pass
    sglang    rra with decode_steps=1: prompts first, 8192 tokens a pass, while decodes pause

vLLM and TensorRT-LLM are taken to have concurrency + input + 1500 tokens a pass, as the runs had that were published
with AIConfigurator; an engine that is not listed is taken for vllm.
"""

from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.correction import Correction
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.profiler.calibration.serving_run import Prediction, ServingRun
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import kv_capacity_tokens
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run

_SPARE_TOKENS = 1500
_SGLANG_TOKENS = 8192
REQUESTS_PER_CLIENT = 10
"""As in most measurements, and enough for every kind of pass; of runs that do not say it."""
_MOST_PER_CLIENT = 30
"""Replayed; the first burst weighs little in more."""
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of an engine and its clients that are no kernel times."""

    max_num_prefills: int | None = None
    """Prompts of a pass at most."""
    think_seconds: float = 0.01
    """Between an answer and the next request, as the engine sees it: the client's and the front end's."""
    reserved: float = 1.0
    """Share of the answer for which room in the KV cache must be free when a request is admitted."""
    idle_slots: int = 0
    """Requests fewer than there are clients that the engine was launched to serve at once."""


OPTIONS = {
    "trtllm": EngineOptions(max_num_prefills=1, think_seconds=0.025),
    "vllm": EngineOptions(max_num_prefills=2, reserved=0.5),
    "sglang": EngineOptions(reserved=0.5),
}


def predict_run(profile: Profile, run: ServingRun) -> Prediction:
    """By a profile that has the run's parallel sizes, its correction included. Raises InputError without it."""
    corrected = predicted_by_passes(profile, run)
    if profile.correction is None:
        return corrected
    return replace(corrected, ttft=profile.correction.first_token(corrected.ttft))


def predicted_by_passes(profile: Profile, run: ServingRun) -> Prediction:
    """Without what the correction adds in front of the engine."""
    cost = cost_of(profile, run.tensor_parallel_size, run.expert_parallel_size)
    return replayed_means(replayed(cost, run, options_of(run.engine)))


def options_of(engine: str) -> EngineOptions:
    return OPTIONS.get(engine, OPTIONS["vllm"])


def cost_of(profile: Profile, size: int, expert_parts: int = 1) -> CostModel:
    """Of one stage on that many devices, which hold a mixture's experts in so many parts."""
    of_any = ("overhead", "control", "send")
    own = [m for m in profile.measurements if m.tensor_parallel_size == size or m.op in of_any]
    return CostModel(
        replace(profile, measurements=tuple(own)),
        (Stage(devices=tuple(range(size)), layers=(0, profile.model.num_layers), expert_parallel_size=expert_parts),),
    )


def with_theta(profile: Profile, theta: tuple[float, ...]) -> Profile:
    """The profile with these values of `correction.THETA`."""
    level, slope, prefill, links, first, first_seconds = theta
    correction = Correction(
        level=level, slope=slope, prefill=prefill, links=links, first=first, first_seconds=first_seconds
    )
    return replace(profile, correction=correction)


def replayed_means(run: Run) -> Prediction:
    """Of all requests of a replay."""
    first = run.requests.first_tokens - run.requests.arrivals
    rest = run.requests.last_tokens - run.requests.first_tokens
    later = np.maximum(run.requests.output_tokens - 1, 1)
    return Prediction(float(np.mean(first)), float(np.mean(rest / later)))


def replayed(cost: CostModel, row: ServingRun, options: EngineOptions, per_client: int | None = None) -> Run:
    """The run's requests, or `per_client` of each client, by the engine's policy."""
    room = kv_capacity_tokens(cost.profile, cost.placement, MEMORY_UTILIZATION * cost.profile.device.memory_bytes)
    admitted = row.input_tokens + options.reserved * row.output_tokens
    slots = max(1, min(row.concurrency - options.idle_slots, int(room / admitted)))
    draw, count = np.random.default_rng(_SEED), _num_requests(row, per_client)
    inputs, outputs = (
        draw.integers(max(1, int(row.least_share * most)), most, size=count, endpoint=True)
        for most in (row.input_tokens, row.output_tokens)
    )
    return replay(
        _schedule(row, options, slots, cost.num_ranks),
        cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=int(max(room, row.input_tokens + row.output_tokens)) // BLOCK_SIZE + slots,
        concurrency=row.concurrency,
        think_seconds=options.think_seconds,
        seed=_SEED,
    )


def _num_requests(row: ServingRun, per_client: int | None) -> int:
    if per_client is None and row.num_requests is not None:
        return min(row.num_requests, _MOST_PER_CLIENT * row.concurrency)
    return row.concurrency * (per_client or REQUESTS_PER_CLIENT)


def _schedule(row: ServingRun, options: EngineOptions, slots: int, num_ranks: int) -> Schedule:
    """Each rank has the limits of an engine: together they have as many times the tokens and prompts of a pass."""
    if row.engine == "sglang":
        tokens = num_ranks * _SGLANG_TOKENS
        return Schedule("rra", {"prefill_batch": slots, "decode_steps": 1, "max_num_batched_tokens": tokens})
    tokens = row.concurrency + num_ranks * (row.input_tokens + _SPARE_TOKENS)
    variables = {"max_num_seqs": slots, "max_num_batched_tokens": tokens}
    if options.max_num_prefills:
        variables["max_num_prefills"] = num_ranks * options.max_num_prefills
    return Schedule("chunked", variables)
