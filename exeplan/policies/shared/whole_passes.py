"""The passes of one group where prompts cannot be cut: how many of those that wait fit into a pass.

An encoder attends to a whole prompt, so a prompt that is longer than what is left of the pass waits for the next one,
and one that is longer than all of it runs in it nevertheless, as its first. With the names of `shared/chunk_passes.py`:

    w          slots that are left waiting by the pass before; the chain's state
    k          slots that become free meanwhile, Binomial(b - w, 1/mu) as there; m = w + k wait, b - m rows decode
    r          C - (b - m), what the rows leave of the budget
    j          prompts of the pass: the largest j with S_j = I_1 + ... + I_j <= r, at least 1, at most m
    next w     m - j

I_1 is not a prompt like others: the pass before had no room for it. With M(y) = sum_j Pr(I_2 + ... + I_j <= y) the
expected number of sums up to y, the next first prompt has, behind a pass of room r that began with x, the law

    g(x') = p(x') [M(r - x) - M(r - x - x')] for x <= r, p(x') for x > r

(the interval that straddles r in a renewal process, Feller II, XI.4). Its fixed point is taken in r; a prompt that
nothing has held up is an even draw. Sums of prompts are counted in cells of the budget.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from exeplan.arrays import Floats
from exeplan.policies.shared.chunk_passes import SPREAD, binomials, stationary
from exeplan.workload.length_law import Ints, LengthLaw, added_up

_CELLS = 128
"""Cells of the budget."""
_LEVELS, _NEW = 96, 24
"""Most values of w and of k."""
_ROOMS = 8
"""Values of r for which the law of a first prompt that was held up is computed."""
_TURNS = 6
"""Passes after which that law is steady."""
_OVER = 6
"""Lengths of a first prompt that exceeds r."""
_SIGMAS = 5
"""Standard deviations of w that the levels cover."""
_KINDS = 12
"""Kinds of passes with prompts, by their tokens."""
_NEVER = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePasses:
    """Arrays over kinds of passes: the first without prompts, then by rising prompt tokens."""

    probability: Floats
    rows: Floats
    """Rows that decode."""
    prompt_tokens: Floats
    num_prompts: Floats
    waiting_std: float
    """Standard deviation of w."""

    @property
    def completed(self) -> float:
        """Prompts completed a pass."""
        return float(self.probability @ self.num_prompts)


@lru_cache(maxsize=4096)
def whole_passes(prompts: LengthLaw, steps: float, slots: float, budget: float) -> WholePasses:
    """The steady state where requests occupy a slot for `steps` passes from the one that prefills them.

    `slots` may be the mean over groups, and no whole number. Remembered, as it is the same on every placement.
    """
    fitting = _fitting(prompts, budget, _most(slots / steps))
    levels, slots = _levels(fitting.busy_rate(steps), prompts, steps, slots)
    new, chance = _fewer(*binomials(slots - levels, 1 / steps))
    waiting = levels[:, None] + new
    rows = np.maximum(slots - waiting, 0.0)
    ways = fitting.passes(waiting, budget - rows, levels > 0)
    moves = chance[:, :, None] * ways.chance
    left = np.maximum(waiting[:, :, None] - ways.count, 0.0)
    weights = stationary(levels, left, moves)[:, None, None] * moves
    mean_left, count = float((weights * left).sum()), float((weights * ways.count).sum())
    # Every token is prefilled once: cells and slices have lost some.
    kept = count * prompts.mean / max(float((weights * ways.tokens).sum()), 1e-300)
    return WholePasses(
        **_kinds(weights, rows, kept * ways.tokens, kept * ways.deviation, ways.count),
        waiting_std=float(np.sqrt((weights * (left - mean_left) ** 2).sum())),
    )


def _fewer(values: Floats, chance: Floats) -> tuple[Floats, Floats]:
    """At most _NEW of the values 0, 1, ...; the chances of those between go to both neighbours, the means kept."""
    apart = -(-len(values) // _NEW)
    if apart == 1:
        return values, chance
    kept = np.arange(0.0, values[-1] + apart, apart)
    share = np.maximum(1.0 - np.abs(values[:, None] - kept) / apart, 0.0)
    return kept, chance @ share


def _most(rate: float) -> int:
    """Prompts of a pass that are counted; a power of two, so that few tables are needed."""
    most = rate + 6 * np.sqrt(rate) + 8
    return int(2 ** np.ceil(np.log2(most)))


def _levels(busy: float, prompts: LengthLaw, steps: float, slots: float) -> tuple[Floats, float]:
    """Whole numbers around what waits in the mean, and the slots that matter: with more of them more wait, no more.

    With `busy` prompts a pass while some wait, w is near slots - busy * steps, or has a tail of a queue above 0.
    """
    spread = 1 + (prompts.std / prompts.mean) ** 2
    deviation = np.sqrt(busy * steps * spread / 2)
    slots = min(slots, float(np.ceil(busy * steps + _SIGMAS * deviation + 2)) + slots % 1.0)
    middle, rate = slots - busy * steps, slots / steps
    low = max(np.floor(middle - _SIGMAS * deviation), 0.0)
    high = max(middle, 0.0) + _SIGMAS * deviation
    if middle < 0.0:
        high = min(high, _SIGMAS * (spread * rate / (busy - rate) + np.sqrt(rate)))
    high = min(np.ceil(high) + 2, np.floor(slots))
    # No denser than one pass moves it.
    count = min(_LEVELS, int(np.ceil((high - low) / max(np.sqrt(min(busy, rate) * spread) / 2, 1.0))) + 8)
    power = 1 if low > 0.0 else 2
    return np.unique(np.rint(low + (high - low) * np.linspace(0, 1, count) ** power)), slots


@dataclass(frozen=True, slots=True)
class _Ways:
    """Ways to fill a pass, [levels, new, ways]: none; one that exceeds the room, by its length; all that wait; 1, 2,
    ... of them."""

    count: Floats
    tokens: Floats
    deviation: Floats
    """Standard deviation of the tokens."""
    chance: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """How many prompts fit, by the law of the first one; tables [laws, sums S_1, S_2, ..., cells of r].

    Law 0 is that of any prompt, the others are of one that was held up by a pass of room `rooms`.
    """

    cell: float
    """Tokens."""
    rooms: Floats
    exactly: Floats
    """Pr(S_j <= r < S_j + I), and the means of S_j and S_j^2 times that."""
    exactly_tokens: Floats
    exactly_square: Floats
    least: Floats
    """Pr(S_j <= r), and the means of S_j and S_j^2 times that."""
    least_tokens: Floats
    least_square: Floats
    over: Floats
    """[laws, cells]: Pr(S_1 > r)."""
    over_lengths: Floats
    """[laws, cells, _OVER]: equally likely lengths of such a prompt."""

    def busy_rate(self, steps: float) -> float:
        """Prompts a pass where some always wait: as many as the rows, which they become, leave room for."""
        low, high = 0.0, self.cell * _CELLS / max(steps - 1.0, _NEVER)
        for _ in range(40):
            rate = (low + high) / 2
            if self._mean(self.cell * _CELLS - rate * (steps - 1.0)) > rate:
                low = rate
            else:
                high = rate
        return low

    def _mean(self, room: float) -> float:
        law, at = self._law(np.array(room)), room / self.cell - 0.5
        low = min(max(int(at), 0), _CELLS - 1)
        share = min(max(at - low, 0.0), 1.0)
        sums = self.least[law, 1:, low : low + 2].sum(axis=0)
        return 1.0 + float(sums[0] + share * (sums[1] - sums[0]))

    def _law(self, room: Floats) -> Ints:
        return 1 + np.abs(self.rooms - room[..., None]).argmin(axis=-1)

    def passes(self, waiting: Floats, room: Floats, held_up: NDArray[np.bool_]) -> _Ways:
        """[levels, new]: requests that wait, and the tokens that the rows leave."""
        law = np.where(held_up, self._law(np.clip(room[:, 0], 0.0, self.cell * _CELLS)), 0)[:, None]
        at = np.clip(room / self.cell - 0.5, 0.0, _CELLS - 1e-9)
        low = at.astype(np.int64)
        most = min(self.least.shape[1], max(int(waiting.max()), 1))
        some, waiting = (waiting > 0)[:, :, None], np.clip(waiting, 1.0, most)
        last = waiting.astype(np.int64) - 1

        def several(table: Floats) -> Floats:
            below = table[law, :most, low]
            return np.asarray(below + (at - low)[:, :, None] * (table[law, :most, low + 1] - below))

        def all_of_them(table: Floats) -> Floats:
            below = table[law, last, low]
            return np.asarray(below + (at - low) * (table[law, last, low + 1] - below))

        count = np.arange(1.0, most + 1)
        fits = np.where(count < waiting[:, :, None], several(self.exactly), 0.0).clip(0.0)
        some_tokens = _moments(fits, several(self.exactly_tokens), several(self.exactly_square))
        together = all_of_them(self.least).clip(0.0)
        all_tokens = _moments(together, all_of_them(self.least_tokens), all_of_them(self.least_square))
        over = np.repeat(self.over[law, low][:, :, None] / _OVER, _OVER, axis=2)
        none, each = 0.0 * some, together[:, :, None]
        chance = np.concatenate([1.0 * ~some, *(some * part for part in (over, each, fits))], axis=2)
        counts = [none, np.ones_like(over), waiting[:, :, None], count + 0.0 * fits]
        tokens = [none, self.over_lengths[law, low], all_tokens[0][:, :, None], some_tokens[0]]
        deviations = [none, 0.0 * over, all_tokens[1][:, :, None], some_tokens[1]]
        return _Ways(
            np.concatenate(counts, axis=2),
            np.concatenate(tokens, axis=2),
            np.concatenate(deviations, axis=2),
            chance / chance.sum(axis=2, keepdims=True),
        )


def _moments(chance: Floats, first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation, from moments times the chance; 0 of what never happens."""
    likely = np.maximum(chance, _NEVER)
    mean = np.where(chance > _NEVER, first / likely, 0.0)
    return mean, np.sqrt(np.where(chance > _NEVER, np.maximum(second / likely - mean**2, 0.0), 0.0))


@lru_cache(maxsize=256)
def _fitting(prompts: LengthLaw, budget: float, most: int) -> _Fitting:
    cell, size = budget / _CELLS, _CELLS + 1
    single = _in_cells(prompts, cell, size)
    following = _toeplitz(single[:size])
    any_sums = _sums(single[None, :size], following, most)
    renewals = np.concatenate([[1.0], np.zeros(size - 1)]) + any_sums[0].sum(axis=0)
    rooms = np.unique(np.rint(np.linspace(0.1, 1.0, _ROOMS) * _CELLS - 0.5)).astype(int)
    laws = np.stack([single, *(_held_up(single, _toeplitz(np.cumsum(renewals)), room) for room in rooms)])
    sums = _sums(laws[:, :size], following, most)
    lengths = np.arange(size) * cell
    more = _toeplitz(1.0 - np.cumsum(single[:size]))
    below = np.cumsum(laws, axis=1)[:, :size]
    return _Fitting(
        cell=cell,
        rooms=(rooms + 0.5) * cell,
        exactly=sums @ more,
        exactly_tokens=(sums * lengths) @ more,
        exactly_square=(sums * lengths**2) @ more,
        least=np.cumsum(sums, axis=2),
        least_tokens=np.cumsum(sums * lengths, axis=2),
        least_square=np.cumsum(sums * lengths**2, axis=2),
        over=np.maximum(1.0 - below, 0.0),
        over_lengths=np.stack([_beyond(law, below, cell) for law, below in zip(laws, below, strict=True)]),
    )


def _in_cells(prompts: LengthLaw, cell: float, size: int) -> Floats:
    """The law over multiples of `cell`, its mean kept; at least `size` of them."""
    at = prompts.tokens / cell
    low = np.floor(at).astype(np.int64)
    count = max(int(low[-1]) + 2, size)
    return added_up(low, (low + 1 - at) * prompts.weights, minlength=count) + added_up(
        low + 1, (at - low) * prompts.weights, minlength=count
    )


def _toeplitz(values: Floats) -> Floats:
    """The matrix that convolves a row with the values."""
    apart = np.arange(len(values)) - np.arange(len(values))[:, None]
    return np.where(apart >= 0, values[np.abs(apart)], 0.0)


def _sums(firsts: Floats, following: Floats, most: int) -> Floats:
    """The laws of S_1, S_2, ... up to the budget, [laws, sums, cells], while one of them may fit."""
    found = [firsts]
    while found[-1].sum() > _NEVER and len(found) < most:
        found.append(found[-1] @ following)
    return np.stack(found, axis=1)


def _held_up(single: Floats, renewals: Floats, room: int) -> Floats:
    """The law of the first prompt of passes with that room, where each but the first was held up by the one before."""
    law, size = single, len(renewals)
    for _ in range(_TURNS):
        reached = law[:size] @ renewals
        over = float(law[room + 1 :].sum())
        before = np.zeros(len(law))
        before[: room + 1] = reached[room::-1]
        following = single * np.maximum(reached[room] - before + over, 0.0)
        if following.sum() <= _NEVER:
            return single  # All sums that are counted fit.
        law = following / following.sum()
    return law


def _beyond(law: Floats, below: Floats, cell: float) -> Floats:
    """Of lengths above each cell, [cells, _OVER], the middles of slices of equal probability."""
    shares = below[:, None] + (1.0 - below[:, None]) * (np.arange(_OVER) + 0.5) / _OVER
    return np.asarray(np.searchsorted(np.cumsum(law), shares - _NEVER).clip(max=len(law) - 1) * cell)


def _kinds(weights: Floats, rows: Floats, tokens: Floats, deviation: Floats, count: Floats) -> dict[str, Floats]:
    """Probability, and means of decode rows, prompt tokens and prompts, of every kind of pass."""
    tokens = np.maximum(tokens + deviation * SPREAD[:, None, None, None], 0.0)
    weights, count = np.broadcast_to(weights / len(SPREAD), tokens.shape), np.broadcast_to(count, tokens.shape)
    some = count > 0
    weight = weights * some
    total = max(float(weight.sum()), 1e-300)
    middle = float((weight * tokens).sum()) / total
    width = max(float(np.sqrt((weight * (tokens - middle) ** 2).sum() / total)), _NEVER) * 5 / _KINDS
    kind = np.floor((tokens - middle) / width + _KINDS / 2).clip(0, _KINDS - 1) + 1
    kind = np.where(some, kind, 0).astype(np.int64).ravel()
    values = (np.ones_like(tokens), rows[:, :, None] + 0.0 * tokens, tokens, count)
    sums = [added_up(kind, (weights * value).ravel(), minlength=_KINDS + 1) for value in values]
    happens = sums[0] > 1e-12
    # What never happens is irrelevant, but must be finite.
    means = [
        np.where(happens, each / np.maximum(sums[0], 1e-300), float(each.sum())) * (np.arange(_KINDS + 1) > 0)
        for each in sums[2:]
    ]
    decode = np.where(happens, sums[1] / np.maximum(sums[0], 1e-300), float(sums[1].sum()))
    probability = np.where(happens, sums[0], 0.0)
    return {
        "probability": probability / probability.sum(),
        "rows": decode,
        "prompt_tokens": means[0],
        "num_prompts": means[1],
    }
