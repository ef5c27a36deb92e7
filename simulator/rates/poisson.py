"""Quantiles of Poisson variables by summing their chances: scipy takes as long to import as a small search takes."""

import numpy as np

from exeplan.arrays import Floats

_DEVIATIONS = 9.0
"""Below the expectation where the sum begins: what lies before it is less than a sum's rounding."""
_NONE = 1e-300


def poisson_quantiles(chance: Floats, expected: Floats | float) -> Floats:
    """The least numbers that such a share of the variables do not exceed; the arguments are broadcast."""
    chances, means = (np.ravel(each) for each in np.broadcast_arrays(chance, np.maximum(expected, 1e-9)))
    number = np.maximum(np.floor(means - _DEVIATIONS * np.sqrt(means)), 0.0)
    factorials = np.append(0.0, np.cumsum(np.log(np.arange(1.0, number.max(initial=0.0) + 1))))
    own = np.exp(number * np.log(means) - means - factorials[number.astype(int)])
    found, left = number.copy(), np.arange(len(number))
    lacking = chances - own
    while len(left := left[more := (lacking > 0) & (own > _NONE)]):
        number, means = number[more] + 1, means[more]
        own = own[more] * means / number
        lacking = lacking[more] - own
        found[left] = number
    return found.reshape(np.broadcast_shapes(np.shape(chance), np.shape(expected)))
