"""GPU memory, measured: the largest passes of a schedule run once, and the KV cache takes what they leave.

The workspace is not computed but seen: the most that torch's allocator held for those passes is kept free beside the
cache. What libraries and kernels took meanwhile is not free any more, so that the driver's own count has it.
"""

import gc
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState, num_blocks_for
from exeplan.core.model import ModelSpec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.kernels.tuning import untimed
from exeplan.runner.compute.kv_budget import Memory, Room, largest_pass, most_rows, num_blocks_in, schedule_of
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.warm_up import tune

_LEAST_PASS = 512
_TUNING_BLOCKS = 2560
_PROMPT = 4096
_GRAPHS_SHARE = 0.01
"""Of a GPU's memory, for the decode graphs, which are recorded when the cache is there."""


class Meter(Protocol):
    """What tells how much memory there is, and how much some work needs."""

    def memory(self) -> Memory:
        """After everything that can be given back was."""

    def workspace(self, work: Callable[[], object]) -> int | None:
        """Bytes that the work held at most beside what was held before; None when they were not to be had."""


def room_for(runner: ModelRunner, setup: Mapping[str, Any]) -> Room | None:
    """Gives the runner a cache of what its GPU has room for, where the setup says so."""
    if not setup.get("gpu_memory_utilization"):
        return None
    share = setup["gpu_memory_utilization"] - _GRAPHS_SHARE
    # Kernels choose their configurations before passes over contexts of one token could mislead them.
    runner.use_blocks(_TUNING_BLOCKS)
    tune(runner)
    return fit_cache(runner, schedule_of(setup), CudaMeter(runner.device), utilization=share)


def fit_cache(runner: ModelRunner, schedule: Schedule, meter: Meter, *, utilization: float) -> Room:
    """Runs the largest passes, then gives the runner a cache of all the blocks that fit beside them.

    Where the cache could not hold the tokens of so large a pass, smaller ones are tried. Raises InputError when there
    is no room for anything.
    """
    block_bytes = runner.cache.num_bytes // runner.cache.num_blocks
    tokens = largest_pass(runner.spec, schedule)
    while True:
        runner.use_blocks(0)
        found = _room(runner, tokens, schedule, meter, utilization=utilization, block_bytes=block_bytes)
        enough = found is not None and (found.num_blocks * BLOCK_SIZE >= tokens or tokens <= _LEAST_PASS)
        if _all_say(runner, enough) and found:
            runner.use_blocks(found.num_blocks)
            return found
        if tokens <= _LEAST_PASS:
            raise InputError(f"there is no memory for a prefill of {tokens} tokens; use more GPUs, or a smaller dtype")
        tokens = max(tokens // 2, _LEAST_PASS)


def _all_say(runner: ModelRunner, yes: bool) -> bool:
    """Whether every rank of the stage says so: what they run next is one pass of all of them."""
    group = runner.shard.group
    return int(group.all_reduce(torch.tensor([float(yes)], device=runner.device))) == group.size


def _room(
    runner: ModelRunner, tokens: int, schedule: Schedule, meter: Meter, *, utilization: float, block_bytes: int
) -> Room | None:
    """What there is room for beside passes of so many tokens; None when these alone do not fit."""
    with untimed():  # Its decoded rows have contexts of a token: no measure for those that will come.
        workspace = meter.workspace(lambda: run_passes(runner, tokens, most_rows(schedule)))
    if workspace is None:
        return None
    # The cache that the passes needed is no part of what they hold beside it.
    workspace = max(0, workspace - runner.cache.num_bytes)
    runner.use_blocks(0)
    memory = meter.memory()
    try:
        number = num_blocks_in(memory, utilization=utilization, workspace=workspace, block_bytes=block_bytes)
    except InputError:
        if tokens <= _LEAST_PASS:
            raise
        return None
    return Room(number, tokens)


def run_passes(runner: ModelRunner, num_tokens: int, num_rows: int) -> None:
    """One prefill of so many tokens, and one decode pass of so many rows with the log-probabilities of all."""
    # What a flat batch takes is by its tokens, not by how long its prompts are; shorter ones take less time.
    longest = min(runner.spec.max_context, _PROMPT)
    whole, rest = divmod(num_tokens, longest)
    prompts = [_row(runner.spec, f"p{n}", length) for n, length in enumerate([longest] * whole + [rest] * (rest > 0))]
    decoding = [_row(runner.spec, f"d{n}", 1, decodes=True) for n in range(num_rows)]
    most = max(sum(row.num_blocks for row in rows) for rows in (prompts, decoding))
    runner.use_blocks(most)
    for batch in (Batch(prefill=tuple(prompts)), Batch(decode=tuple(decoding))):
        rows = batch.prefill + batch.decode
        runner.assume_cached(batch.decode)
        token_ids = {row.request_id: [0] * row.num_tokens for row in rows}
        logits_RV = runner.forward(batch, token_ids, _hidden(runner, batch))
        if runner.shard.last and len(logits_RV):
            logits_RV.log_softmax(-1)
        for row in rows:
            runner.free(row.request_id)


def _row(spec: ModelSpec, request_id: str, num_tokens: int, *, decodes: bool = False) -> SequenceState:
    begin = 1 if decodes or spec.is_encoder_decoder else 0
    row = SequenceState(request_id=request_id, num_prompt_tokens=num_tokens + begin, max_output_tokens=1)
    row.num_blocks = num_blocks_for(row.num_tokens)
    return row


def _hidden(runner: ModelRunner, batch: Batch) -> torch.Tensor | None:
    """What a stage behind the first would receive."""
    if runner.shard.first:
        return None
    size = (runner.num_tokens(batch), runner.spec.hidden_size)
    return torch.zeros(size, dtype=runner.activation, device=runner.device)


class CudaMeter:
    """Torch's own counts on one GPU."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def memory(self) -> Memory:
        gc.collect()
        torch.cuda.synchronize(self.place)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.place)
        return Memory(total, free)

    def workspace(self, work: Callable[[], object]) -> int | None:
        self.memory()
        before = torch.cuda.memory_reserved(self.place)
        torch.cuda.reset_peak_memory_stats(self.place)
        try:
            work()
            torch.cuda.synchronize(self.place)
        except torch.cuda.OutOfMemoryError:
            return None
        return torch.cuda.max_memory_reserved(self.place) - before
