"""Length laws that are stated, not observed: parametric ones, quantiles, and two sides joined by a rank correlation.

    normal, lognormal   mean, std, max   on 1..max, such that the law WITH its cut ends has this mean and std
    uniform             min, max         every length alike
    fixed               tokens           one length
    quantiles           p50, p90, ...    what a user knows; a monotone curve through the points

The truncated normal is ExeGPT's (section 7.1, Table 3). Putting Table 3's mean and std into a normal and then cutting
it would raise the mean (task T: 132 for 128) and miss the 99th percentiles that the table gives (T: 281 for 292);
solving for the moments after the cut gives 63, 292, 417, 136, 579 where the table has 63, 292, 417, 137, 579. A std
that no cut normal with that mean can have (the inputs of S and T) becomes the largest possible: the curvature vanishes
and the law is a cut exponential. Likewise for the lognormal.
"""

from collections.abc import Mapping

import numpy as np

from exeplan.arrays import Floats
from exeplan.errors import InputError
from exeplan.workload.length_law import Ints, LengthLaw, added_up

MAX_LENGTH = 10_000_000
"""Tokens; anything longer is taken for a mistake."""
_MAX_SUPPORT = 1_000_000
_MAX_POINTS = 1 << 18
"""Points of a joint histogram of two laws; finer laws are coarsened, their means kept."""
_MAX_OUTPUT_POINTS = 1024
_CURVE_POINTS = 20_000
_END = 1e-4
"""Where p0 and p100 stand on the curve through the quantiles, and where it stops without them."""
_STRATA = 512
_IN_STEP = 0.999
"""Above this rank correlation one side decides the other: the strata of the copula are too wide to tell."""


def fixed(tokens: int) -> LengthLaw:
    """One length."""
    return LengthLaw(np.array([tokens]), np.ones(1))


def uniform(low: int, high: int) -> LengthLaw:
    """Every length from `low` to `high`, both included."""
    if low > high:
        raise InputError(f"a uniform law from {low} to {high} is empty")
    if high - low >= _MAX_SUPPORT:
        raise InputError(f"a uniform law may span {_MAX_SUPPORT:,} lengths, {low} to {high} is more")
    tokens = np.arange(low, high + 1)
    return LengthLaw(tokens, np.full(len(tokens), 1 / len(tokens)))


def normal(mean: float, std: float, longest: int, *, logarithmic: bool = False) -> LengthLaw:
    """A normal (or lognormal) on 1..longest whose mean and std, ends cut off, are those given: see the module."""
    if not 1 < mean < longest:
        raise InputError(f"mean {mean:g} must lie between 1 and the maximum {longest}")
    if longest > _MAX_SUPPORT:
        raise InputError(f"a maximum of {longest:,} is above {_MAX_SUPPORT:,} tokens, the largest for a parametric law")
    if std <= 0:
        raise InputError(f"std must be above 0, found {std:g}; a single length is a fixed law")
    tokens = np.arange(1, longest + 1)
    scale = np.log(tokens) if logarithmic else tokens.astype(np.float64)
    centre, near = (np.log((mean, mean + 0.2))) if logarithmic else (mean, mean + 0.2)
    span = scale[-1] - scale[0]
    weights = _with_moments(tokens, (scale - centre) / span, (mean, std), float(near - centre) / span)
    seen = weights > 1e-12
    return LengthLaw(tokens[seen], weights[seen] / weights[seen].sum())


def _with_moments(tokens: Ints, x: Floats, moments: tuple[float, float], narrowest: float) -> Floats:
    """Weights exp(tilt x - x^2 / (2 width^2)) of mean and std as given; without curvature where that is too narrow."""
    mean, std = moments
    flat, tilt = _tilted(tokens, x, np.zeros_like(x), mean=mean, tilt=0.0)
    if _std(tokens, flat, mean) <= std:
        return flat
    low, high = np.log(narrowest), np.log(1e3)
    weights, tilt = flat, 0.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        weights, tilt = _tilted(tokens, x, -0.5 * (x / np.exp(middle)) ** 2, mean=mean, tilt=tilt)
        low, high = (middle, high) if _std(tokens, weights, mean) < std else (low, middle)
    return weights


def _tilted(tokens: Ints, x: Floats, log_weights: Floats, *, mean: float, tilt: float) -> tuple[Floats, float]:
    """Weights exp(log_weights + tilt x) of that mean, by Newton steps in a bracket: the mean rises with the tilt."""
    low, high = -np.inf, np.inf
    while True:
        exponent = log_weights + tilt * x
        weights = np.exp(exponent - exponent.max())
        weights /= weights.sum()
        error = float(weights @ tokens) - mean
        if abs(error) < 1e-9 * mean or high - low < 1e-12 * (1 + abs(tilt)):
            return weights, tilt
        low, high = (tilt, high) if error < 0 else (low, tilt)
        slope = float(weights @ (tokens * (x - weights @ x)))
        reach = 1 + abs(tilt)
        step = error / slope if slope > 0 else np.copysign(np.inf, error)
        tilt -= float(np.clip(step, -10 * reach, 10 * reach))
        if not low < tilt < high:
            tilt = (low + high) / 2


def _std(tokens: Ints, weights: Floats, mean: float) -> float:
    return float(np.sqrt(weights @ np.square(tokens - mean)))


def quantiles(points: Mapping[float, float]) -> LengthLaw:
    """A law through known quantiles, percent to tokens.

    Between them the logarithm of the length is a monotone cubic of the normal score, so that two points alone give a
    lognormal. Beyond the first and the last point it is extended as a straight line (a lognormal tail), to 0.01 % and
    99.99 %; p0 and p100, if given, stand there and end the law.
    """
    from scipy.interpolate import PchipInterpolator
    from scipy.special import ndtri

    percent = sorted(points)
    tokens = np.array([points[p] for p in percent], dtype=np.float64)
    _check_quantiles(percent, tokens)
    inner = [p / 100 for p in percent if 0 < p < 100]
    end = min([_END, *(p / 2 for p in inner), *((1 - p) / 2 for p in inner)])
    score = ndtri(np.clip(np.array(percent) / 100, end, 1 - end))
    curve = PchipInterpolator(score, np.log(tokens))
    at = ndtri((np.arange(_CURVE_POINTS) + 0.5) / _CURVE_POINTS).clip(ndtri(_END), ndtri(1 - _END))
    logs = curve(np.clip(at, score[0], score[-1]))
    first, last = (np.diff(np.log(tokens[s])) / np.diff(score[s]) for s in (slice(2), slice(-2, None)))
    if percent[0] > 0:
        logs += first * np.minimum(at - score[0], 0)
    if percent[-1] < 100:
        logs += last * np.maximum(at - score[-1], 0)
    lengths = np.rint(np.exp(np.minimum(logs, np.log(MAX_LENGTH)))).clip(min=1).astype(np.int64)
    values, counts = np.unique(lengths, return_counts=True)
    return LengthLaw(values, counts / _CURVE_POINTS)


def _check_quantiles(percent: list[float], tokens: Floats) -> None:
    if len(percent) < 2:
        raise InputError("a law of quantiles needs at least two, such as p50:100,p99:900")
    falls = np.flatnonzero(np.diff(tokens) < 0)
    if len(falls):
        p, q = percent[falls[0]], percent[falls[0] + 1]
        a, b = tokens[falls[0]], tokens[falls[0] + 1]
        raise InputError(f"quantiles must not fall, but p{p:g} is {a:g} and p{q:g} is {b:g}")


def joint(inputs: LengthLaw, outputs: LengthLaw, rank_correlation: float = 0.0) -> tuple[Ints, Ints, Floats]:
    """Points (input, output, weight) with these two laws and a Gaussian copula of this Spearman correlation.

    At most 2^18 points: longer supports are coarsened, keeping mean and maximum of either side.
    """
    outputs = _coarse(outputs, max(_MAX_OUTPUT_POINTS, _MAX_POINTS // len(inputs.tokens)))
    inputs = _coarse(inputs, _MAX_POINTS // len(outputs.tokens))
    if abs(rank_correlation) > _IN_STEP:
        return _in_step(inputs, outputs, falling=rank_correlation < 0)
    weights = np.outer(inputs.weights, outputs.weights)
    if rank_correlation:
        weights = _copula(inputs, outputs, 2 * np.sin(np.pi * rank_correlation / 6))
    row, column = np.nonzero(weights)
    return inputs.tokens[row], outputs.tokens[column], weights[row, column]


def _copula(inputs: LengthLaw, outputs: LengthLaw, correlation: float) -> Floats:
    """Cell weights: the conditional law of the output over strata of the input's score, fitted to both margins."""
    from scipy.special import ndtr, ndtri

    edges = np.union1d(inputs.cdf[:-1], ndtr(np.linspace(-4, 4, _STRATA)))
    edges = np.concatenate(([0.0], edges, [1.0]))
    middle = (edges[1:] + edges[:-1]) / 2
    bounds = ndtri(np.minimum(outputs.cdf, 1.0))
    bounds[-1] = np.inf
    below = ndtr((bounds - correlation * ndtri(middle)[:, None]) / np.sqrt(1 - correlation**2))
    strata = np.diff(below, axis=1, prepend=0.0) * np.diff(edges)[:, None]
    owner = np.searchsorted(inputs.cdf, middle).clip(max=len(inputs.tokens) - 1)
    weights = np.add.reduceat(strata, np.searchsorted(owner, np.arange(len(inputs.tokens))), axis=0)
    for _ in range(4):
        weights *= _ratio(outputs.weights, weights.sum(axis=0))
        weights *= _ratio(inputs.weights, weights.sum(axis=1))[:, None]
    return weights


def _ratio(wanted: Floats, found: Floats) -> Floats:
    return np.divide(wanted, found, out=np.zeros_like(wanted), where=found > 1e-300)


def _in_step(inputs: LengthLaw, outputs: LengthLaw, *, falling: bool) -> tuple[Ints, Ints, Floats]:
    """The input decides the output: a larger one comes with a larger one, or with a smaller one."""
    output_cdf = np.cumsum(outputs.weights[::-1]) if falling else outputs.cdf
    edges = np.union1d(inputs.cdf[:-1], output_cdf[:-1])
    edges = np.concatenate(([0.0], edges, [1.0]))
    middle = (edges[1:] + edges[:-1]) / 2
    tokens = outputs.tokens[::-1] if falling else outputs.tokens
    of_input, of_output = (np.searchsorted(cdf, middle).clip(max=len(cdf) - 1) for cdf in (inputs.cdf, output_cdf))
    return inputs.tokens[of_input], tokens[of_output], np.diff(edges)


def _coarse(law: LengthLaw, points: int) -> LengthLaw:
    """The law on at most `count` lengths: neighbours become the two whole lengths around their mean."""
    if len(law.tokens) <= points:
        return law
    bins = max(points // 4, 1)
    by_length = np.linspace(law.tokens[0], law.tokens[-1], bins + 1)[1:-1]
    by_weight = law.tokens[np.searchsorted(law.cdf, np.arange(1, bins) / bins)]
    group = np.searchsorted(np.union1d(by_length, by_weight), law.tokens)
    group[-1] += 1  # The longest length stays itself.
    weights = added_up(group, law.weights)
    means = added_up(group, law.weights * law.tokens)[weights > 0] / weights[weights > 0]
    low = np.floor(means).astype(np.int64)
    up = means - low
    tokens = np.concatenate([low, low + 1])
    values, inverse = np.unique(tokens, return_inverse=True)
    merged = added_up(inverse, np.concatenate([1 - up, up]) * np.tile(weights[weights > 0], 2))
    seen = merged > 1e-12  # Splitting leaves dust.
    return LengthLaw(values[seen], merged[seen] / merged[seen].sum())
