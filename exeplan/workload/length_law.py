"""Laws of lengths, and the steady state that follows from them: the survival comb.

Source: a renewal argument, exact for any law of the lengths and any correlation between them; Little's law gives
sum_u active(u) = E[D]. The formula of ExeGPT section 6, which forgets that long requests stay longer, is there to
reproduce its figures (`PaperLaw`).

    symbol   name            meaning
    I, S     input, output   tokens of the prompt, tokens generated, of one request
    D        decode steps    decode iterations of one request: S - 1 where the prefill yields the first token, else S
    F(k)     survival        Pr(D >= k)
    B_E      batch           requests admitted per cycle; combs are per ONE request, the caller multiplies
    N_D      steps           decode iterations per cycle
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exeplan.arrays import Floats

Ints = NDArray[np.int64]


def added_up(bins: Ints, weights: Floats, *, minlength: int = 0) -> Floats:
    """The sum of the weights that fall into bin 0, 1, ..."""
    return np.bincount(bins, weights, minlength).astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class LengthLaw:
    """The law of one length: `tokens` never falling, `weights` summing to 1."""

    tokens: Ints
    weights: Floats

    @cached_property
    def cdf(self) -> Floats:
        """Pr(length <= tokens[i])."""
        cdf = np.cumsum(self.weights)
        return cdf / cdf[-1]

    @cached_property
    def mean(self) -> float:
        return float(self.tokens @ self.weights)

    @cached_property
    def std(self) -> float:
        return float(np.sqrt(np.square(self.tokens - self.mean) @ self.weights))

    @property
    def min(self) -> int:
        return int(self.tokens[0])

    @property
    def max(self) -> int:
        return int(self.tokens[-1])

    def quantile(self, q: float) -> int:
        """The smallest length that a share of at least `q` of the requests does not exceed."""
        return int(self.quantiles(np.array([q]))[0])

    def quantiles(self, shares: ArrayLike) -> Ints:
        """`quantile` of each share."""
        index = np.searchsorted(self.cdf, np.asarray(shares) - 1e-9)  # Sums of weights are not exact.
        return self.tokens[np.minimum(index, len(self.tokens) - 1)]

    def slice_means(self, num_slices: int) -> Floats:
        """The mean of each of `count` slices of equal probability, rising; their mean is the law's."""
        reached, mass = self._reached
        edges = np.linspace(0.0, 1.0, num_slices + 1)
        return np.diff(np.interp(edges, reached, mass)) * num_slices

    @cached_property
    def _reached(self) -> tuple[Floats, Floats]:
        """The distribution, and the share of the mean, up to each length, from 0 on."""
        return np.append(0.0, self.cdf), np.append(0.0, np.cumsum(self.weights * self.tokens))

    def longest_of(self, batch: float) -> "LengthLaw":
        """The law of the longest among `batch` independent draws."""
        below = np.concatenate(([0.0], self.cdf)) ** batch
        return LengthLaw(self.tokens, np.diff(below))


@dataclass(frozen=True, slots=True)
class Comb:
    """Steady state of a cycle of `steps` decode iterations that admits ONE request; arrays over u = 1..steps.

    Multiply by the number admitted: means and variances add up over independent requests, logarithms too.
    """

    active: Floats
    """Requests that decode in iteration u."""
    context: Floats
    """Tokens in the KV cache before iteration u, summed over the requests that decode in it."""
    log_empty: Floats
    """log Pr(a request does not decode in iteration u); `exp(batch * log_empty)` for a batch; -inf where it always
    does."""
    active_var: Floats
    """Variance of the number of requests that decode."""
    kv_var: Floats
    """Variance of the tokens in the KV cache after iteration u, whose mean is `context + active`."""


@dataclass(frozen=True, eq=False)
class DecodeLaw:
    """How long requests decode and what they hold meanwhile; arrays of length K, entry i standing for k = i + 1."""

    survival: Floats
    """F(k) = Pr(D >= k)."""
    input_sum: Floats
    """G(k) = E[I; D >= k]."""
    input_square: Floats
    """H(k) = E[I^2; D >= k]."""

    @classmethod
    def of(cls, steps: Ints, inputs: Ints, weights: Floats) -> "DecodeLaw":
        """The law of points that decode `steps` times (0 is allowed) after `inputs` tokens; weights sum to 1."""
        survival, input_sum, input_square = (
            # From the far end, so that small tails keep their digits; entry 0 is k = 0, which every request reaches.
            np.cumsum(added_up(steps, terms, minlength=2)[::-1])[::-1][1:]
            for terms in (weights, weights * inputs, weights * np.square(inputs, dtype=np.float64))
        )
        survival = np.minimum(survival, 1.0)
        survival[: int(steps.min())] = 1.0  # Exactly: log(1 - F) must be -inf where a request always decodes.
        return cls(survival, input_sum, input_square)

    @property
    def mean_steps(self) -> float:
        """E[D]."""
        return float(self.survival.sum())

    @property
    def std_steps(self) -> float:
        """Standard deviation of D."""
        k = np.arange(1, len(self.survival) + 1)
        square = float((2 * k - 1) @ self.survival)
        return float(np.sqrt(max(square - self.mean_steps**2, 0.0)))

    def max_survival(self, batch: float) -> Floats:
        """Pr(the longest of `batch` independent requests decodes for >= k steps), over k."""
        return 1.0 - (1.0 - self.survival) ** batch

    def comb(self, steps: int) -> Comb:
        """The steady state of a cycle of `steps` decode iterations. O(K)."""
        terms = self._terms
        rows = -(-terms.shape[1] // steps)
        padded = np.zeros((len(terms), rows * steps))
        padded[:, : terms.shape[1]] = terms
        return Comb(*padded.reshape(len(terms), rows, steps).sum(axis=1))

    @cached_property
    def _terms(self) -> Floats:
        """What iteration k adds to each field of a comb: one row a field, one column a k."""
        F, G, H = self.survival, self.input_sum, self.input_square
        k = np.arange(1, len(F) + 1)
        with np.errstate(divide="ignore"):
            log_empty = np.log1p(-F)
        # After the iteration a request that decodes holds I + k tokens.
        kv_var = H + 2 * k * G + k * k * F - (G + k * F) ** 2
        return np.stack([F, G + (k - 1) * F, log_empty, F * (1 - F), np.maximum(kv_var, 0.0)])


class PaperLaw(DecodeLaw):
    """The steady state as ExeGPT section 6 has it.

    A request of D steps is said to be completed in iteration U = 1 + (D - 1) mod N_D of a cycle with probability
    1 / ceil(D / N_D), whatever share of the residents are long ones; B_D = B_E / sum_U P_D(U). A request always
    decodes. What a row holds, and how much that varies, is not in the paper and taken from the comb.
    """

    def completions(self, steps: int) -> Floats:
        """P_D(U) for U = 1..steps, of a request that decodes at all."""
        chance = (self.survival - np.append(self.survival[1:], 0.0)) / self.survival[0]
        k = np.arange(len(chance))
        return added_up(k % steps, chance / (k // steps + 1), minlength=steps)

    def comb(self, steps: int) -> Comb:
        exact = super().comb(steps)
        if steps == 1:  # The paper, too, sets B_D to B_E E[D] there.
            return exact
        completed = self.completions(steps)
        active = self.survival[0] * (1 - np.cumsum(completed) + completed) / completed.sum()
        ratio = np.divide(active, exact.active, out=np.ones_like(active), where=exact.active > 0)
        return Comb(
            active=active,
            context=exact.context * ratio,
            log_empty=np.full(steps, -np.inf),
            active_var=exact.active_var,
            kv_var=exact.kv_var,
        )
