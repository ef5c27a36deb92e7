"""Readiness: what a runner on a GPU does before its first request, so that none pays for it.

Kernels are compiled, and the fastest of their few configurations is chosen, on passes like those that will come: a
choice made on contexts of one token would be kept. Then the decode iterations are recorded. Not here: how large the
cache is (`gpu_memory.py`), which must be known before.
"""

import math
import sys
import time
from collections.abc import Iterator

import torch

from exeplan.core.batch import BLOCK_SIZE, Batch, Chunk, SequenceState, num_blocks_for
from exeplan.progress import OnProgress, Progress, no_progress
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.units import show_bytes

_PROMPT, _CONTEXT, _ROWS = 2048, 1024, 32
"""Tokens of the prompt and of each decoded row that kernels are tuned on, and how many rows there are."""
_SHORT = 128
"""Tokens of a short prompt."""
_DRAWN = 8
"""Rows that tokens are drawn for."""


def make_ready(
    runner: ModelRunner,
    max_num_seqs: int,
    *,
    phase: str = "",
    shown: bool = False,
    on_progress: OnProgress = no_progress,
) -> None:
    """Tunes the kernels for the passes of a phase, and records the decode iterations of up to so many rows.

    Every rank of a stage must call it. `shown` draws a bar on a terminal.
    """
    on_progress("tuning kernels", 0.0)
    tune(runner, phase)
    if phase == "prefill":
        return
    began = time.monotonic()
    drawn = shown and sys.stderr.isatty()
    with Progress("recording decode iterations", shown=drawn, on_progress=on_progress) as bar:

        def progress(done: int, of: int) -> None:
            spent = time.monotonic() - began
            bar.update(done / of, spent * (of / done - 1), f"{done} of {of} batch sizes")

        runner.record(min(max_num_seqs, runner.cache.num_blocks), progress)
        assert runner.graphs is not None
        bar.note(f"recorded {len(runner.graphs.sizes)} batch sizes, {show_bytes(runner.graphs.num_bytes)}")


@torch.inference_mode()
def tune(runner: ModelRunner, phase: str = "") -> None:
    """Runs one pass of every kind that a phase may have."""
    for batch in _passes(runner, phase):
        rows = batch.prefill + batch.decode
        token_ids = {row.request_id: [0] * row.num_tokens for row in rows}
        hidden_NE = None
        if not runner.shard.first:
            size = (runner.num_tokens(batch), runner.spec.hidden_size)
            hidden_NE = torch.zeros(size, dtype=runner.activation, device=runner.device)
        runner.forward(batch, token_ids, hidden_NE)
        for row in rows:
            runner.free(row.request_id)
    if runner.shard.last and phase != "prefill":
        _draw(runner)


def _draw(runner: ModelRunner) -> None:
    """Draws from logits that vary as much as a model's do."""
    assert runner.kernels is not None
    logits_RV = torch.randn(_DRAWN, runner.spec.vocab_size, device=runner.device).mul_(3.0)
    temperature_R, tail_R, least_R = (logits_RV.new_full((_DRAWN,), value) for value in (0.8, 0.1, -math.inf))
    top_k_R = torch.full((_DRAWN,), 50, dtype=torch.int32, device=runner.device)
    key_R = torch.arange(_DRAWN, device=runner.device)
    runner.kernels.draw(logits_RV, temperature_R, top_k_R, tail_R, least_R, key_R)


def _passes(runner: ModelRunner, phase: str) -> Iterator[Batch]:
    """A prefill, a later part of one, decoded rows, and what comes in one pass together."""
    longest, encodes = runner.spec.max_context, runner.spec.is_encoder_decoder
    if phase == "prefill":  # Nothing is kept there.
        yield from _prefills(min(_PROMPT, longest - 1), encodes)
        return
    num_tokens = runner.cache.num_blocks * BLOCK_SIZE
    # Half of the cache for the prompt, a quarter for decoded rows, another for one that is computed again.
    prompt = max(2, min(_PROMPT, longest - 1, num_tokens // 2 - BLOCK_SIZE))
    context = max(2, min(_CONTEXT, longest - 1, num_tokens // 4 - BLOCK_SIZE))
    count = max(1, min(_ROWS, num_tokens // 4 // (context + BLOCK_SIZE)))
    if not phase:
        yield from _prefills(prompt, encodes)
    decoded = tuple(
        _row(f"{number}", context, num_outputs=max(1, context // 2 if encodes else 1)) for number in range(count)
    )
    again = _row("again", context, num_outputs=2)
    runner.assume_cached(decoded)
    yield Batch(decode=decoded)
    if encodes:
        runner.assume_cached(decoded)
        yield Batch(decode=(*decoded, again))
    elif not phase:
        rest = (Chunk(prompt // 2, prompt, last=True),)
        yield Batch(prefill=(_row("prompt", prompt),), chunks=rest)
        yield Batch(prefill=(_row("prompt", prompt),), decode=decoded)


def _prefills(num_tokens: int, encodes: bool) -> Iterator[Batch]:
    """So many tokens as one prompt, and as several short ones."""
    yield Batch(prefill=(_row("prompt", num_tokens + encodes),))
    short = min(_SHORT, num_tokens)
    yield Batch(prefill=tuple(_row(f"{number}", short + encodes) for number in range(num_tokens // short)))


def _row(request_id: str, num_tokens: int, num_outputs: int = 0) -> SequenceState:
    """One of so many tokens in all, with its blocks."""
    row = SequenceState(
        request_id=request_id,
        num_prompt_tokens=max(num_tokens - num_outputs, 1),
        num_output_tokens=num_outputs,
        max_output_tokens=num_outputs + 1,
    )
    row.num_blocks = num_blocks_for(row.num_tokens)
    return row
