"""Noise for sampling as a pure function of (seed, position, token id): no state, so draws need no order.

Source: splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) as a hash. It is
integer arithmetic modulo 2^64, so every device gives the same bits. Not cryptographic.

Letters: K token ids.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """A 64-bit key for the noise of one output position of one request."""
    return _mix64(_mix64(seed & _MASK) + position * _GOLDEN)


def _mix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def signed(value: int) -> int:
    """The same 64 bits as a signed integer, as tensors store them."""
    return value - (1 << 64) if value >> 63 else value


def log_exponential_noise(key: int, ids_K: "Tensor") -> "Tensor":
    """The logarithm of standard exponential noise, float32, for token ids (int64): minus it is Gumbel noise."""
    import torch

    bits_K = ids_K * signed(_GOLDEN)
    bits_K += signed(key)
    # torch shifts signed integers; each of these steps clears the sign bit, which leaves 63 random bits.
    for shift, factor in _MIX:
        bits_K ^= bits_K >> shift
        bits_K *= signed(factor)
    bits_K ^= bits_K >> 31
    # Small numbers, which win, keep their relative precision; the factor keeps all numbers below 1.
    uniform_K = bits_K.to(torch.float32).mul_(2.0**-63 * (1 - 2.0**-24))
    return uniform_K.neg_().log1p_().neg_().log_()
