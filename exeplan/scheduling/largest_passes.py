"""The largest passes of a schedule: what a GPU keeps memory free for, in a plan and in a running engine.

A schedule that limits the tokens of its passes is held to them. Of others the engine tries ever smaller passes until
the KV cache beside them holds their tokens (`runner/compute/gpu_memory.py`), and starts none larger; a plan counts on
what it finds (`simulator/memory.py`). The sizes it tries are the same for all schedules of a model, so that a larger
batch never takes less memory.
"""

from dataclasses import replace

from exeplan.core.models.model import ModelSpec
from exeplan.core.pass_memory import LEAST_PASSES
from exeplan.core.schedule import Schedule
from exeplan.policies import pass_limits

PASS_TOKENS = 65_536
"""Tokens of one prefill, several times those of plans; a single long request may have more."""
_RELATIVE_CONTEXT = 16_384
"""Longest request of a model without a limit on positions (T5): its prefill must fit."""
_UNLIMITED_DECODE_ROWS = 256
"""Decode rows that are measured and captured where the policy says that the schedule does not limit them."""


def pass_sizes(spec: ModelSpec, schedule: Schedule) -> tuple[int, ...]:
    """Tokens of the largest prefill, falling: the schedule's own limit alone where it has one. A model with an encoder
    then has at least full length: its prompts are not cut, and one that exceeds the limit runs all the same.

    Otherwise its largest number of prompts at full length, up to `PASS_TOKENS` and rounded up to a power of two, and at
    least one of them; then full length, if that is less, and smaller powers of two. No prefill of a plan comes near
    that, so this limit does not bind where the replay did not apply it.
    """
    limits = pass_limits(schedule)
    if limits.tokens is not None:
        return (max(limits.tokens, spec.max_context) if spec.is_encoder_decoder else limits.tokens,)
    tokens = PASS_TOKENS if limits.prompts is None else min(limits.prompts * spec.max_context, PASS_TOKENS)
    if max(tokens, spec.max_context) <= LEAST_PASSES.tokens:
        return (max(tokens, spec.max_context),)
    most = max(1 << (tokens - 1).bit_length(), spec.max_context)
    powers = (1 << n for n in range(LEAST_PASSES.tokens.bit_length() - 1, most.bit_length()))
    return tuple(sorted({size for size in (*powers, spec.max_context) if LEAST_PASSES.tokens <= size <= most})[::-1])


def most_rows(schedule: Schedule) -> int:
    """Sequences of the largest decode pass."""
    rows = pass_limits(schedule).decode_rows
    return _UNLIMITED_DECODE_ROWS if rows is None else rows


def captured_rows(schedule: Schedule) -> int:
    """Sequences of the largest decode iteration that is captured: those of a micro-batch."""
    return -(-most_rows(schedule) // schedule.num_micro_batches)


def with_finite_context(spec: ModelSpec) -> ModelSpec:
    """The spec with a limit on the context where its positions have none, so that its largest prefill is finite."""
    relative = "relative_attention_num_buckets" in spec.config
    return replace(spec, max_context=min(spec.max_context, _RELATIVE_CONTEXT)) if relative else spec
