"""Quantiles of Student's and of Poisson's law, without scipy, whose import takes a quarter of a second.

Not here: what they are quantiles of.
"""

import math
from statistics import NormalDist

import numpy as np

from exeplan.arrays import Floats

_NEARLY_NORMAL = 1000.0
"""Degrees of freedom from which four terms of the expansion about the normal law leave less than 1e-13."""
_STEPS, _EXACT = 60, 1e-14
_LOG_FACTORIALS = np.cumsum(np.log(np.maximum(np.arange(32), 1)))
"""Of numbers for which Stirling's series is not exact enough."""


def student_quantile(freedom: float, share: float) -> float:
    """What a draw of the law stays below with the chance `share`, to 1e-11 of it for shares of 0.6 and more;
    infinite freedom is the normal law.

    Newton's steps on the distribution; from 1000 degrees of freedom on the expansion in 1 / freedom. Sources:
    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.5.8, 26.7.1 and 26.7.5.
    """
    if share < 0.5:
        return -student_quantile(freedom, 1 - share)
    start = _expanded(NormalDist().inv_cdf(share), freedom)
    if freedom >= _NEARLY_NORMAL or share == 0.5:
        return start
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    low, high, value = 0.0, math.inf, start
    for _ in range(_STEPS):
        over = 1 - share - _above(value, freedom)
        low, high = (low, value) if over > 0 else (value, high)
        step = over / (scale * (1 + value**2 / freedom) ** (-(freedom + 1) / 2))
        nearer = value - step
        if not low <= nearer <= high:
            nearer = 2 * value if math.isinf(high) else (low + high) / 2
        if abs(nearer - value) <= _EXACT * value:
            return nearer
        value = nearer
    return value


def _expanded(normal: float, freedom: float) -> float:
    """About the normal law's quantile."""
    if math.isinf(freedom):
        return normal
    square = normal**2
    terms = (
        (square + 1) / 4,
        ((5 * square + 16) * square + 3) / 96,
        (((3 * square + 19) * square + 17) * square - 15) / 384,
        ((((79 * square + 776) * square + 1482) * square - 1920) * square - 945) / 92160,
    )
    return normal * (1 + sum(term / freedom**power for power, term in enumerate(terms, 1)))


def _above(value: float, freedom: float) -> float:
    """The chance of a draw above a value of at least 0."""
    share = freedom / (freedom + value**2)
    if share * (freedom / 2 + 2.5) < freedom / 2 + 1:
        return _beta(freedom / 2, 0.5, share, value**2 / (freedom + value**2)) / 2
    return 0.5 - _beta(0.5, freedom / 2, value**2 / (freedom + value**2), share) / 2


def _beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularized incomplete beta function, by its continued fraction; `rest` is 1 - x. It converges fast while
    x < (a + 1) / (a + b + 2)."""
    if x == 0:
        return 0.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)) / a
    above, found = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    below = found
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            below, above = 1 / (1 + term * below), 1 + term / above
            found *= below * above
        if abs(below * above - 1) < 1e-16:
            break
    return front * found


def poisson_quantiles(chance: Floats, mean: Floats | float) -> Floats:
    """[draws] The least whole numbers that Poisson variables of these means, above 0, do not exceed with these chances.

    Chances lie above 1e-12 and below 1 - 1e-12. From the mean they are reached one by one, some sqrt(mean) steps.
    """
    found = np.floor(mean) + 0.0 * chance
    point = _poisson_point(np.floor(mean), mean) + 0.0 * chance
    reached = _poisson_up_to(np.floor(mean), mean) + 0.0 * chance
    mean = mean + 0.0 * chance
    while len(short := np.flatnonzero(reached < chance)):
        found[short] += 1
        point[short] *= mean[short] / found[short]
        reached[short] += point[short]
    while len(over := np.flatnonzero((found > 0) & (reached - point >= chance))):
        reached[over] -= point[over]
        point[over] *= found[over] / mean[over]
        found[over] -= 1
    return found


def _poisson_up_to(number: Floats, mean: Floats | float) -> Floats:
    """The chance of at most that many, which are not more than the mean."""
    term = _poisson_point(number, mean)
    total, below = term + 0.0, number
    while np.any(term > 1e-17 * total):
        term, below = term * below / mean, below - 1
        total = total + term
    return np.asarray(total)


def _poisson_point(number: Floats, mean: Floats | float) -> Floats:
    """The chance of exactly that many. Stirling's series: Abramowitz and Stegun, 6.1.41."""
    few = np.minimum(number, len(_LOG_FACTORIALS) - 1).astype(int)
    n = np.maximum(number, 1.0)
    rest = (1 - (1 - 2 / (7 * n**2)) / (30 * n**2)) / (12 * n)
    stirling = (n + 0.5) * np.log(n) - n + math.log(2 * math.pi) / 2 + rest
    log_factorial = np.where(number < len(_LOG_FACTORIALS), _LOG_FACTORIALS[few], stirling)
    return np.asarray(np.exp(number * np.log(mean) - mean - log_factorial))
