"""rows_of(): seconds of whole passes at two numbers of layers, as rows of a profile. A pure function.

    layer(batch)                  (whole(batch) - few(batch)) / (layers of `whole` - layers of `few`)
    around(batch)                 few(batch) - its layers * layer(batch)

    rest(tokens)                  of decode passes, their context extrapolated to none; beyond of many short prompts
    attention decode, prefill     layer(batch) - rest
    embed(tokens)                 what grows with the tokens of one prompt in `around`
    overhead(rows)                the others of it: scheduling, sampling, and the output head, not told apart
    head(rows)                    nothing, for that

so that the sum of a batch's rows is what was measured. The split inside a layer only matters where batches are mixed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from exeplan.core.profile import Measurement
from exeplan.profiler.through_engine.batches import Batch, DecodeBatch, PrefillBatch

_LEAST = 1e-9
"""Seconds of what takes none: rows must be above zero."""
_LEAST_REST = 0.5
"""Share of a decode layer at the shortest context that is no attention, whatever the slope says."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one batch by both engines, medians over rounds."""

    whole: float
    few: float
    repeats: int
    spread: float = 0.0
    """Half the interquartile range over the median, of `whole`."""


@dataclass(frozen=True, slots=True)
class _Part:
    layer: float
    around: float


def rows_of(timed: Mapping[Batch, Timed], *, num_layers: int, few_layers: int) -> tuple[Measurement, ...]:
    """Rows by tensor parallel size 1. `timed` has the batches of `batches()`."""
    parts = {batch: _part(times, num_layers, few_layers) for batch, times in timed.items()}
    decodes = sorted((b for b in parts if isinstance(b, DecodeBatch)), key=lambda b: (b.num_seqs, b.context))
    prefills = sorted((b for b in parts if isinstance(b, PrefillBatch)), key=lambda b: (b.num_tokens, b.num_seqs))
    rest = _rest(decodes, prefills, parts)
    tokens, seconds = np.array(sorted(rest.items())).T

    rows = [Measurement(op="rest", num_tokens=number, seconds=each) for number, each in sorted(rest.items())]
    for decode in decodes:
        attention = max(parts[decode].layer - rest[decode.num_seqs], _LEAST)
        context = round(decode.num_seqs * decode.context)
        row = Measurement(
            op="attention", phase="decode", num_seqs=decode.num_seqs, context_tokens=context, seconds=attention
        )
        rows.append(_seen(row, timed[decode]))
    alone = [batch for batch in prefills if batch.num_seqs == 1]
    for prompt in alone:
        attention = max(parts[prompt].layer - float(np.interp(prompt.num_tokens, tokens, seconds)), _LEAST)
        row = Measurement(op="attention", phase="prefill", num_seqs=1, num_tokens=prompt.num_tokens, seconds=attention)
        rows.append(_seen(row, timed[prompt]))
    return (*rows, *_around_rows(decodes, prefills, parts))


def _part(times: Timed, num_layers: int, few_layers: int) -> _Part:
    layer = max((times.whole - times.few) / (num_layers - few_layers), _LEAST)
    return _Part(layer, max(times.few - few_layers * layer, _LEAST))


def _seen(row: Measurement, times: Timed) -> Measurement:
    return replace(row, repeats=times.repeats, spread=times.spread)


def _rest(
    decodes: Sequence[DecodeBatch], prefills: Sequence[PrefillBatch], parts: Mapping[Batch, _Part]
) -> dict[int, float]:
    """Seconds of a layer without its attention, by tokens."""
    found: dict[int, float] = {}
    for number, group in groupby(decodes, key=lambda batch: batch.num_seqs):
        by_context = list(group)
        shortest, longest = by_context[0], by_context[-1]
        least = parts[shortest].layer
        slope = (parts[longest].layer - least) / (longest.context - shortest.context or 1.0)
        found[number] = float(np.clip(least - slope * shortest.context, _LEAST_REST * least, least))
    most_rows = max(found)
    many = {batch.num_tokens: batch for batch in prefills if batch.num_seqs > 1 and batch.num_tokens > most_rows}
    found |= {tokens: parts[batch].layer for tokens, batch in many.items()}
    return found


def _around_rows(
    decodes: Sequence[DecodeBatch], prefills: Sequence[PrefillBatch], parts: Mapping[Batch, _Part]
) -> list[Measurement]:
    """Of what a pass takes beyond its layers."""
    alone = [batch for batch in prefills if batch.num_seqs == 1]
    tokens = np.array([batch.num_tokens for batch in alone], dtype=float)
    slope = float(np.polyfit(tokens, [parts[batch].around for batch in alone], 1)[0]) if len(alone) > 1 else 0.0
    token_seconds = max(slope, 0.0)

    def without_tokens(batch: PrefillBatch) -> float:
        return max(parts[batch].around - token_seconds * batch.num_tokens, _LEAST)

    rows = [
        Measurement(op="embed", num_tokens=number, seconds=max(token_seconds * number, _LEAST))
        for number in (1, prefills[-1].num_tokens)
    ]
    rows += [Measurement(op="head", num_seqs=number, seconds=_LEAST) for number in (1, decodes[-1].num_seqs)]
    for number, group in groupby(decodes, key=lambda batch: batch.num_seqs):
        seconds = float(np.median([parts[batch].around for batch in group]))
        rows.append(Measurement(op="overhead", phase="decode", num_seqs=number, seconds=seconds))
    for number, prompts in groupby(sorted(prefills, key=lambda batch: batch.num_seqs), key=lambda b: b.num_seqs):
        same = list(prompts)
        seconds = float(np.median([without_tokens(batch) for batch in same]))
        mean = round(np.mean([batch.num_tokens for batch in same]))
        rows.append(Measurement(op="overhead", phase="prefill", num_seqs=number, num_tokens=mean, seconds=seconds))
    return rows
