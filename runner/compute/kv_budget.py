"""KV cache budget of a GPU, as arithmetic: a share of its memory less weights and workspace.

The workspace is measured with the largest passes that a schedule allows (`gpu_memory.py`). No prefill of more tokens
than that is started: the scheduler admits neither more tokens at once nor a longer request.

A budget above the plan's is used: the schedule's variables bound the number of running sequences, so that it only
avoids preemptions. A budget below it is used with a warning, because throughput and latency may then fall short of the
plan. Not here: a CPU, whose cache has the plan's size.
"""

import logging
import math
from collections.abc import Iterable
from typing import NamedTuple

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import pass_limits
from exeplan.units import show_bytes

log = logging.getLogger(__name__)


class KVBudget(NamedTuple):
    """What fits into the memory of one device."""

    num_blocks: int
    pass_tokens: int
    """Tokens of the largest prefill that was measured."""


class GPUMemory(NamedTuple):
    """Bytes of a GPU, as its driver counts them."""

    total: int
    free: int


def num_kv_blocks(
    memory: GPUMemory, *, utilization: float, reserve: float = 0.0, workspace: int, block_bytes: int
) -> int:
    """KV blocks that fit when this share of the GPU's memory may be in use, by all processes together.

    Of that share `reserve` is kept for what is not there yet, such as captured graphs. Raises InputError, naming the
    smallest sufficient share, when not even one block fits.
    """
    in_use = memory.total - memory.free + workspace
    left = round((utilization - reserve) * memory.total) - in_use
    if left >= block_bytes:
        return left // block_bytes
    least = math.ceil(1000 * ((in_use + block_bytes) / memory.total + reserve)) / 1000
    remedy = f"the smallest that suffices is {least:.3f}" if least <= 1 else "use more GPUs, or a smaller dtype"
    raise InputError(
        f"weights and a workspace of {show_bytes(workspace)} need {show_bytes(in_use)} of {show_bytes(memory.total)}; "
        f"--gpu-memory-utilization {utilization:g} leaves no memory for keys and values; {remedy}"
    )


def pass_limit(schedule: Schedule, budget: KVBudget | None) -> int | None:
    """The scheduler's limit on the tokens of a prefill; None where nothing, or the schedule itself, limits them."""
    return None if budget is None or pass_limits(schedule).tokens is not None else budget.pass_tokens


def smallest_budget(budgets: Iterable[KVBudget]) -> KVBudget | None:
    """What fits on each of several devices; None where none was measured."""
    found = list(budgets)
    return KVBudget(*map(min, zip(*found, strict=True))) if found else None


def warn_if_below_plan(found: KVBudget, planned_blocks: int) -> None:
    """Logs a warning where the budget is below the plan's."""
    if found.num_blocks < planned_blocks:
        log.warning(
            "the KV cache holds %d tokens, the plan counts on %d: it may preempt requests and miss "
            "its estimate; raise --gpu-memory-utilization or plan again",
            found.num_blocks * BLOCK_SIZE,
            planned_blocks * BLOCK_SIZE,
        )
