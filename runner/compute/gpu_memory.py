"""GPU memory, measured: the largest passes of a schedule run once, and the KV cache takes the memory that they leave.

The workspace is measured: the peak of torch's allocator during those passes is kept free. Memory that libraries and
kernels took meanwhile is in the driver's count of used memory. A plan counts the same by arithmetic
(`core/pass_memory.py`), from the same passes (`scheduling/largest_passes.py`).
"""

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import ModelSpec
from exeplan.core.pass_memory import GRAPHS_SHARE, LEAST_PASSES, captured_logits_bytes
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.kernels.tuning import untimed
from exeplan.runner.compute.kv_budget import (
    GPUMemory,
    KVBudget,
    num_kv_blocks,
)
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.warm_up import tune_kernels
from exeplan.scheduling.largest_passes import captured_rows, most_rows, pass_sizes
from exeplan.units import show_bytes

_TUNING_BLOCKS, _LEAST_TUNING_BLOCKS = 2560, 8
"""Of the cache in which kernels choose their configurations; fewer where they would take more than a share of what the
weights have left free: passes need some, too."""
_TUNING_SHARE = 0.5
_PROMPT = 4096


class Meter(Protocol):
    """Measures how much memory there is, and how much some work needs."""

    def memory(self) -> GPUMemory:
        """Total and free bytes, after unused memory was returned to the driver."""

    def workspace(self, work: Callable[[], object]) -> int | None:
        """Peak bytes that the work allocated; None when it ran out of memory."""


def measure_kv_budget(runner: ModelRunner, schedule: Schedule, utilization: float | None) -> KVBudget | None:
    """Gives the runner a KV cache that fills its GPU, where a memory utilization is given."""
    if utilization is None:
        return None
    meter = CudaMeter(runner.device)
    # Kernels choose their configurations before passes over contexts of one token could mislead them.
    left = meter.memory().free
    try:
        runner.use_blocks(tuning_blocks(runner, meter))
        tune_kernels(runner)
    except torch.cuda.OutOfMemoryError:
        raise InputError(
            f"the weights leave {show_bytes(left)} of {show_bytes(meter.memory().total)}, too little for one pass; "
            "use more GPUs, or a smaller dtype"
        ) from None
    return fit_cache(runner, schedule, meter, utilization=utilization, reserve=GRAPHS_SHARE)


def tuning_blocks(runner: ModelRunner, meter: Meter) -> int:
    """Blocks of the cache for tuning, equal on all ranks of the stage: their passes are collective ones."""
    block_bytes, blocks = runner.cache.num_bytes // runner.cache.num_blocks, _TUNING_BLOCKS
    room = _TUNING_SHARE * meter.memory().free
    while not _on_all_ranks(runner, blocks * block_bytes <= room) and blocks > _LEAST_TUNING_BLOCKS:
        blocks //= 2
    return blocks


def fit_cache(
    runner: ModelRunner, schedule: Schedule, meter: Meter, *, utilization: float, reserve: float = 0.0
) -> KVBudget:
    """Runs the largest passes, then gives the runner a KV cache of all the blocks that fit into the remaining memory.

    Of the share `utilization` of the memory `reserve` is left for what is captured afterwards. Tries smaller passes
    where the cache could not hold the tokens of the largest, unless the schedule itself limits them: it would run
    passes of its limit whatever was measured. Raises InputError when not even the last pass fits.
    """
    block_bytes, sizes = runner.cache.num_bytes // runner.cache.num_blocks, pass_sizes(runner.spec, schedule)
    for tokens in sizes:
        runner.use_blocks(0)
        last = tokens == sizes[-1]
        found = _budget_for(
            runner,
            tokens,
            schedule,
            meter,
            utilization=utilization,
            reserve=reserve,
            block_bytes=block_bytes,
            last=last,
        )
        enough = found is not None and (last or found.num_blocks * BLOCK_SIZE >= tokens)
        if _on_all_ranks(runner, enough) and found:
            # Equal on all: ranks of a stage capture iterations of the same sizes, which blocks limit.
            found = found._replace(num_blocks=_least_on_all_ranks(runner, found.num_blocks))
            runner.use_blocks(found.num_blocks)
            return found
    less = "a smaller max_num_batched_tokens, " * (sizes == (tokens,) and tokens > LEAST_PASSES.tokens)
    raise InputError(f"there is no memory for a prefill of {tokens} tokens; use {less}more GPUs, or a smaller dtype")


def _on_all_ranks(runner: ModelRunner, yes: bool) -> bool:
    """Whether it holds on every rank of the stage: their next pass is a collective one."""
    group = runner.shard.group
    return int(group.all_reduce(torch.tensor([float(yes)], device=runner.device))) == group.size


def _least_on_all_ranks(runner: ModelRunner, number: int) -> int:
    return int(runner.shard.group.all_gather(torch.tensor([number], device=runner.device)).min())


def _budget_for(
    runner: ModelRunner,
    tokens: int,
    schedule: Schedule,
    meter: Meter,
    *,
    utilization: float,
    reserve: float,
    block_bytes: int,
    last: bool,
) -> KVBudget | None:
    """The KV cache budget next to passes of `tokens` tokens; None when the passes alone do not fit. Raises InputError
    when they fit, but no block next to them, and these are the last passes to try."""
    # Decodes have contexts of one token, unlike real ones. Of a stage's ranks one alone may run out of memory: amid its
    # layers, while the others would wait for its next sum. What NCCL takes it has taken in the passes of the tuning.
    with untimed(), runner.shard.group.muted():
        workspace = meter.workspace(lambda: run_passes(runner, tokens, most_rows(schedule)))
    if workspace is None:
        return None
    # The workspace excludes the cache that the passes needed; captured iterations keep their logits beside it.
    workspace = max(0, workspace - runner.cache.num_bytes) + logits_bytes(runner, schedule)
    runner.use_blocks(0)
    memory = meter.memory()
    try:
        number = num_kv_blocks(
            memory, utilization=utilization, reserve=reserve, workspace=workspace, block_bytes=block_bytes
        )
    except InputError:
        if last:
            raise
        return None
    return KVBudget(number, tokens)


def logits_bytes(runner: ModelRunner, schedule: Schedule) -> int:
    """Of the logits that captured decode iterations of the last stage keep; 0 where none are captured."""
    if not runner.can_capture or not runner.shard.last:
        return 0
    return captured_logits_bytes(runner.spec, captured_rows(schedule))


def run_passes(runner: ModelRunner, num_tokens: int, num_seqs: int) -> None:
    """A prefill of `num_tokens` tokens, and a decode of `num_seqs` sequences with log-probabilities of all.

    Of a prompt of the prefill log-probabilities are wanted: the last layer then computes all tokens.
    """
    # Memory depends on the tokens of the flat batch, not on the lengths of its prompts; short ones take less time.
    longest = min(runner.spec.max_context, _PROMPT)
    whole, rest = divmod(num_tokens, longest)
    prompts = [
        _sequence(runner.spec, f"p{n}", length) for n, length in enumerate([longest] * whole + [rest] * (rest > 0))
    ]
    decoding = [_sequence(runner.spec, f"d{n}", 1, decodes=True) for n in range(num_seqs)]
    most = max(sum(sequence.num_blocks for sequence in sequences) for sequences in (prompts, decoding))
    runner.use_blocks(most)
    for batch in (Batch(prefill=tuple(prompts)), Batch(decode=tuple(decoding))):
        sequences = batch.prefill + batch.decode
        runner.assume_cached(batch.decode)
        token_ids = {sequence.request_id: [0] * sequence.num_tokens for sequence in sequences}
        reported = {sequence.request_id: 0 for sequence in batch.prefill[:1]}
        logits_RV = runner.forward(batch, token_ids, _hidden(runner, batch), reported=reported)
        if runner.shard.last and len(logits_RV):
            logits_RV.log_softmax(-1)
        for sequence in sequences:
            runner.free(sequence.request_id)


def _sequence(spec: ModelSpec, request_id: str, num_tokens: int, *, decodes: bool = False) -> SequenceState:
    begin = 1 if decodes or spec.is_encoder_decoder else 0
    sequence = SequenceState(request_id=request_id, num_prompt_tokens=num_tokens + begin, max_output_tokens=1)
    sequence.num_blocks = num_blocks_for(sequence.num_tokens)
    return sequence


def _hidden(runner: ModelRunner, batch: Batch) -> torch.Tensor | None:
    """The hidden states that a stage after the first would receive."""
    if runner.shard.first:
        return None
    size = (runner.num_tokens(batch), runner.spec.hidden_size)
    return torch.zeros(size, dtype=runner.activation, device=runner.device)


class CudaMeter:
    """The counts of torch's allocator and of the driver on one GPU."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def memory(self) -> GPUMemory:
        gc.collect()
        torch.cuda.synchronize(self.place)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.place)
        return GPUMemory(total, free)

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
