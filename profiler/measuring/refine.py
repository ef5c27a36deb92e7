"""Which points a profile should gain, judged by how much of a whole pass interpolation may miss. Pure functions."""

from dataclasses import dataclass

from exeplan.profiler.measuring.adaptive import Gap, gaps, splittable
from exeplan.profiler.measuring.points import Point, Range, decode_row
from exeplan.profiler.measuring.samples import Key, Samples

_MAX_NOISE = 0.1


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Points that belong together, and the error that calls for them."""

    error: float
    points: tuple[Point, ...]


def suggest(samples: Samples, reach: Range, *, num_layers: int, target: float) -> list[Suggestion]:
    """Where interpolation misses more than `target` of a pass, worst first; each is a point, or a row of points."""
    found = [
        *_along_tokens(samples, "prefill", target),
        *_along_tokens(samples, "decode", target),
        *_across_decodes(samples, reach, target),
        *_rest_of_decodes(samples, reach, target),
        *_once_a_pass(samples, reach, num_layers, target),
    ]
    return sorted(found, key=lambda suggestion: -suggestion.error)


def worst_error(samples: Samples, reach: Range, *, num_layers: int) -> float:
    """The largest estimated interpolation error that more points could lower."""
    return max((s.error for s in suggest(samples, reach, num_layers=num_layers, target=0.0)), default=0.0)


def rows(samples: Samples, phase: str) -> dict[int, dict[int, Key]]:
    """Keys of whole layers: by num_seqs, then by tokens of each sequence."""
    found: dict[int, dict[int, Key]] = {}
    for key in samples.keys:
        if key[:2] == ("layer", phase):
            found.setdefault(key[2], {})[(key[3] or key[4]) // key[2]] = key
    return found


def _along_tokens(samples: Samples, phase: str, target: float) -> list[Suggestion]:
    found = []
    for num_seqs, row in rows(samples, phase).items():
        seconds = {tokens: samples.median(key) for tokens, key in row.items()}
        noise = {tokens: _noise(samples, key) for tokens, key in row.items()}
        for gap in splittable(gaps(seconds, seconds.__getitem__, noise.__getitem__), target=target):
            assert gap.middle is not None
            tokens = (
                gap.middle | 1 if gap.high - gap.low > 3 else gap.middle
            )  # As in the coarse grid: no round numbers.
            found.append(Suggestion(gap.error, (Point(phase, num_seqs, tokens),)))
    return found


def _across_decodes(samples: Samples, reach: Range, target: float) -> list[Suggestion]:
    """Between numbers of sequences, at contexts that three neighbouring rows have measured."""
    measured = rows(samples, "decode")
    worst: dict[tuple[int, int], float] = {}
    for tokens in sorted({tokens for row in measured.values() for tokens in row}):
        keys = {n: row[tokens] for n, row in measured.items() if tokens in row}
        if len(keys) < 3:
            continue
        whole = {n: samples.median(key) for n, key in keys.items()}
        attention = {n: whole[n] - samples.rest(n, "decode") for n in keys}
        noise = {n: _noise(samples, key) for n, key in keys.items()}
        for gap in splittable(gaps(attention, whole.__getitem__, noise.__getitem__), target=target):
            if not any(gap.low < n < gap.high for n in measured):
                worst[gap.low, gap.high] = max(gap.error, worst.get((gap.low, gap.high), 0.0))
    return [_decode_row(Gap(error, *ends), reach) for ends, error in worst.items()]


def _rest_of_decodes(samples: Samples, reach: Range, target: float) -> list[Suggestion]:
    """Over the number of sequences, where it is not that of prefills: as shares of a layer at its shortest context."""
    seconds = samples.curve("rest", "decode")
    whole = {n: samples.median(next(iter(row.values()))) for n, row in rows(samples, "decode").items()}
    noise = {n: _noise(samples, ("rest", "decode", 0, n, 0)) for n in seconds}
    found = gaps(seconds, whole.__getitem__, noise.__getitem__)
    return [_decode_row(gap, reach) for gap in splittable(found, target=target)]


def _once_a_pass(samples: Samples, reach: Range, num_layers: int, target: float) -> list[Suggestion]:
    """Overhead and head over the number of sequences, as shares of a pass."""
    shortest = {n: next(iter(row.values())) for n, row in rows(samples, "decode").items()}

    def whole_pass(num_seqs: int) -> float:
        nearest = min(shortest, key=lambda n: abs(n - num_seqs))
        return num_layers * samples.median(shortest[nearest])

    found = []
    for op, phase in (("overhead", "decode"), ("head", "")):
        keys = {key[2]: key for key in samples.keys if key[:2] == (op, phase)}
        seconds = {n: samples.median(key) for n, key in keys.items()}
        noise = {n: _noise(samples, key) for n, key in keys.items()}
        for gap in splittable(gaps(seconds, whole_pass, noise.__getitem__), target=target):
            found.append(_engine(gap, reach) if op == "overhead" else _decode_row(gap, reach))
    return found


def _engine(gap: Gap, reach: Range) -> Suggestion:
    assert gap.middle is not None
    return Suggestion(gap.error, (reach.engine_point(gap.middle),))


def _decode_row(gap: Gap, reach: Range) -> Suggestion:
    assert gap.middle is not None
    return Suggestion(gap.error, tuple(decode_row(gap.middle, reach)))


def _noise(samples: Samples, key: Key) -> float:
    """Seconds that a median may be off by; of a single sample a tenth is assumed."""
    return min(samples.uncertainty(key), _MAX_NOISE) * samples.median(key)
