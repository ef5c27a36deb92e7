"""Warm-up: what a runner on a GPU does before its first request.

Kernels are compiled, and the fastest of their configurations is chosen, on passes like those of real requests: a
configuration chosen on contexts of one token would be kept. Then the decode iterations are captured as CUDA graphs.
Not here: the size of the KV cache (`gpu_memory.py`), which must be known before.
"""

import math
import sys
import time
from collections.abc import Iterator

import torch

from exeplan.core.batch import BLOCK_SIZE, Batch, Chunk, PackedPrompt, Packing, SequenceState, num_blocks_for
from exeplan.progress import OnProgress, Progress, no_progress, note
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.units import show_bytes

_PROMPT, _CONTEXT, _ROWS = 2048, 1024, 32
"""Kernels are tuned on a prompt of this many tokens, and on decodes of this context and this batch size."""
_SHORT = 128
"""Tokens of a short prompt."""
_SLOTS = 128, 512
"""Tokens of the slots of packed rows, on both sides of the length up to which a slot counts as short."""
_DRAWN = 8
"""Batch size on which sampling is tuned."""
_NOT_CAPTURED = (
    "triton is not installed, or TRITON_INTERPRET=1 is set: kernels are plain PyTorch's, and decode iterations are not "
    "captured as CUDA graphs, both of which is slow"
)


def warm_up_runner(
    runner: ModelRunner,
    max_num_seqs: int,
    *,
    phase: str = "",
    shown: bool = False,
    on_progress: OnProgress = no_progress,
) -> None:
    """Tunes the kernels for the passes of a phase, and captures decode iterations of up to `max_num_seqs` sequences;
    without Triton none are, which is said.

    Every rank of a stage must call it. `shown` draws a progress bar on a terminal.
    """
    on_progress("tuning kernels", 0.0)
    tune_kernels(runner, phase)
    if phase == "prefill":
        return
    if not runner.can_capture:
        note([_NOT_CAPTURED])
        return
    began = time.monotonic()
    drawn = shown and sys.stderr.isatty()
    with Progress("capturing CUDA graphs", shown=drawn, on_progress=on_progress) as bar:

        def progress(done: int, of: int) -> None:
            spent = time.monotonic() - began
            bar.update(done / of, spent * (of / done - 1), f"{done} of {of} batch sizes")

        runner.capture(min(max_num_seqs, runner.cache.num_blocks), progress)
        assert runner.graphs is not None
        bar.note(f"captured {len(runner.graphs.sizes)} batch sizes, {show_bytes(runner.graphs.num_bytes)}")


@torch.inference_mode()
def tune_kernels(runner: ModelRunner, phase: str = "") -> None:
    """Runs one pass of each kind that a phase has."""
    for batch in _passes(runner, phase):
        sequences = batch.prefill + batch.decode
        token_ids = {sequence.request_id: [0] * sequence.num_tokens for sequence in sequences}
        hidden_NE = None
        if not runner.shard.first:
            size = (runner.num_tokens(batch), runner.spec.hidden_size)
            hidden_NE = torch.zeros(size, dtype=runner.activation, device=runner.device)
        runner.forward(batch, token_ids, hidden_NE)
        for sequence in sequences:
            runner.free(sequence.request_id)
    if runner.shard.last and phase != "prefill":
        _draw(runner)


def _draw(runner: ModelRunner) -> None:
    """Samples from logits with a spread like a model's."""
    assert runner.kernels is not None
    logits_RV = torch.randn(_DRAWN, runner.spec.vocab_size, device=runner.device).mul_(3.0)
    temperature_R, tail_R, least_R = (logits_RV.new_full((_DRAWN,), value) for value in (0.8, 0.1, -math.inf))
    top_k_R = torch.full((_DRAWN,), 50, dtype=torch.int32, device=runner.device)
    key_R = torch.arange(_DRAWN, device=runner.device)
    runner.kernels.draw(logits_RV, temperature_R, top_k_R, tail_R, least_R, key_R)


def _passes(runner: ModelRunner, phase: str) -> Iterator[Batch]:
    """A prefill, a later chunk of one, decodes, and each of the former with decodes in one pass: with many of them, and
    with one, whose context is divided among programs; and packed rows."""
    longest, encodes = runner.spec.max_context, runner.spec.is_encoder_decoder
    if phase == "prefill":  # It has no KV cache.
        yield from _prefills(min(_PROMPT, longest - 1), encodes)
        return
    num_tokens = runner.cache.num_blocks * BLOCK_SIZE
    # Half of the cache for the prompt, a quarter for decodes, a quarter for a recomputed sequence.
    prompt = max(2, min(_PROMPT, longest - 1, num_tokens // 2 - BLOCK_SIZE))
    context = max(2, min(_CONTEXT, longest - 1, num_tokens // 4 - BLOCK_SIZE))
    count = max(1, min(_ROWS, num_tokens // 4 // (context + BLOCK_SIZE)))
    if not phase:
        yield from _prefills(prompt, encodes)
        yield from _packed(prompt, encodes)
    decoded = tuple(
        _sequence(f"{number}", context, num_outputs=max(1, context // 2 if encodes else 1)) for number in range(count)
    )
    again = _sequence("again", context, num_outputs=2)
    runner.assume_cached(decoded)
    yield Batch(decode=decoded)
    if encodes:
        runner.assume_cached(decoded)
        yield Batch(decode=(*decoded, again))
    elif not phase:
        rest = (Chunk(prompt // 2, prompt, last=True),)
        yield Batch(prefill=(_sequence("prompt", prompt),), chunks=rest)
        for some in (decoded, decoded[:1]) if count > 1 else (decoded,):
            yield Batch(prefill=(_sequence("prompt", prompt),), decode=some)
            yield Batch(prefill=(_sequence("prompt", prompt),), chunks=rest, decode=some)


def _prefills(num_tokens: int, encodes: bool) -> Iterator[Batch]:
    """`num_tokens` as one prompt, and as several short ones."""
    yield Batch(prefill=(_sequence("prompt", num_tokens + encodes),))
    yield Batch(prefill=_short_prompts(num_tokens, encodes))


def _packed(num_tokens: int, encodes: bool) -> Iterator[Batch]:
    """The same short prompts concatenated, in rows of one slot each: in short slots, and in long ones."""
    prompts, each = _short_prompts(num_tokens, encodes), min(_SHORT, num_tokens)
    for slot_tokens in _SLOTS:
        a_row = slot_tokens // each
        places = tuple(PackedPrompt(number // a_row, number % a_row * each) for number in range(len(prompts)))
        yield Batch(prefill=prompts, packing=Packing(slot_tokens, slot_tokens, places))


def _short_prompts(num_tokens: int, encodes: bool) -> tuple[SequenceState, ...]:
    short = min(_SHORT, num_tokens)
    return tuple(_sequence(f"{number}", short + encodes) for number in range(num_tokens // short))


def _sequence(request_id: str, num_tokens: int, num_outputs: int = 0) -> SequenceState:
    """A sequence of `num_tokens` tokens, outputs included, with its blocks."""
    sequence = SequenceState(
        request_id=request_id,
        num_prompt_tokens=max(num_tokens - num_outputs, 1),
        num_output_tokens=num_outputs,
        max_output_tokens=num_outputs + 1,
    )
    sequence.num_blocks = num_blocks_for(sequence.num_tokens)
    return sequence
