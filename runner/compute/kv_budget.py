"""Room for keys and values on GPUs, as arithmetic: what a share of the memory leaves beside weights and a workspace.

The workspace is what the largest passes that a schedule allows were seen to take (`gpu_memory.py`). A prefill of more
tokens than the one that was measured is never started: the scheduler admits no more at once, and no longer request.

More room than a plan counts on is taken too: how many sequences run is bounded by the schedule's variables, so that it
only spares preemptions. Less is used as it is, with a warning, because throughput and latency may then fall short of
the plan. Not here: a CPU, whose cache has the size that the plan says.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.model import ModelSpec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import pass_limits
from exeplan.units import show_bytes

log = logging.getLogger(__name__)
PASS_TOKENS = 65_536
"""Tokens of one prefill, several times what the prefills of plans have; a single long request may have more."""
_RELATIVE_CONTEXT = 16_384
"""Longest request of a model whose positions know no limit (T5): its prefill must fit, too."""
_UNLIMITED_DECODE_ROWS = 256
"""Decode rows that are measured and captured where the policy says that the schedule does not limit them."""


class Room(NamedTuple):
    """What one device has found room for."""

    num_blocks: int
    pass_tokens: int
    """Tokens of the largest prefill that was tried."""


class Memory(NamedTuple):
    """Bytes of a GPU, as its driver counts them."""

    total: int
    free: int


def num_blocks_in(memory: Memory, *, utilization: float, workspace: int, block_bytes: int) -> int:
    """KV blocks that fit when so large a share of the whole GPU may be in use, by whomever.

    Raises InputError, naming the least share that does, when not even one block fits.
    """
    in_use = memory.total - memory.free + workspace
    room = round(utilization * memory.total) - in_use
    if room >= block_bytes:
        return room // block_bytes
    least = (in_use + block_bytes) / memory.total
    remedy = f"the least that would do is {least:.3f}" if least < 1 else "use more GPUs, or a smaller dtype"
    raise InputError(
        f"weights and a workspace of {show_bytes(workspace)} need {show_bytes(in_use)} of {show_bytes(memory.total)}; "
        f"--gpu-memory-utilization {utilization:g} leaves no room for keys and values; {remedy}"
    )


def largest_pass(spec: ModelSpec, schedule: Schedule) -> int:
    """Tokens of the largest prefill that is tried: the schedule's own limit where it has one.

    Otherwise its most prompts at full length, up to `PASS_TOKENS`, and at least one of them: no prefill of a plan comes
    near that, so that the limit that this becomes for the scheduler does not bind where a replay knew nothing of it.
    """
    limits = pass_limits(schedule)
    if limits.tokens is not None:
        return limits.tokens
    tokens = PASS_TOKENS if limits.prompts is None else limits.prompts * spec.max_context
    return max(spec.max_context, min(tokens, PASS_TOKENS))


def pass_limit(schedule: Schedule, room: Room | None) -> int | None:
    """Tokens of a prefill that the scheduler must keep to; None where nothing, or the schedule itself, limits them."""
    return None if room is None or pass_limits(schedule).tokens is not None else room.pass_tokens


def most_rows(schedule: Schedule) -> int:
    """Rows of the largest decode pass."""
    rows = pass_limits(schedule).decode_rows
    return _UNLIMITED_DECODE_ROWS if rows is None else rows


def least_room(rooms: Iterable[Room]) -> Room | None:
    """What all of several devices have room for; None where none of them measured."""
    found = list(rooms)
    return Room(*map(min, zip(*found, strict=True))) if found else None


def with_finite_context(spec: ModelSpec) -> ModelSpec:
    """The spec with a limit on the context where its positions know none, so that its largest prefill is finite."""
    relative = "relative_attention_num_buckets" in spec.config
    return replace(spec, max_context=min(spec.max_context, _RELATIVE_CONTEXT)) if relative else spec


def schedule_of(setup: Mapping[str, Any]) -> Schedule:
    """The schedule of an engine's setup."""
    return Schedule(**setup["schedule"])


def own_engine(setup: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What a runner on that device is built with: where room is measured, the cache has one block until then."""
    measured = {"num_blocks": 1} if setup["gpu_memory_utilization"] else {}
    return {**setup["engine"], "device": device, **measured}


def warn_of_shortage(found: Room, planned_blocks: int) -> None:
    """Says so where there is less room than the plan counts on."""
    if found.num_blocks < planned_blocks:
        log.warning(
            "there is room for %d tokens of keys and values, the plan counts on %d: it may preempt requests and miss "
            "its estimate; raise --gpu-memory-utilization or plan again",
            found.num_blocks * BLOCK_SIZE,
            planned_blocks * BLOCK_SIZE,
        )
