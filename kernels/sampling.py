"""Sampling on the device: a token drawn from those that top-k, top-p and min-p keep.

Letters: R rows, V tokens of the vocabulary, K tokens kept.

Drawing adds Gumbel noise to the scaled logits and takes the largest; the noise is the hash of
`runner/compute/tokens/noise.py`, bit for bit up to its logarithm. So tokens equal the CPU's, except where two scores
differ by less than rounding (about 1e-6), where top-p cuts between tokens whose mass differs from 1 - p by less than
that, and where tokens tie for the k-th place: all of those are kept.

The cut needs no sort: the difference between the largest scaled logit and a token's is a non-negative float, whose bits
are ordered as integers. Bisection over these finds the token where the count reaches k, or where the mass of the rest
falls to 1 - p, and ends once at most one token is between its bounds: on 128,000 normal logits of standard deviation 1
to 8 after 16 steps for the 50 most likely, 10 to 27 for 90 % of the mass, always within 31.

Bytes: 4 * V a row, read twice, and once for each step of a bisection and once or twice before it, from the device's
cache. Operations: about 40 for every token that noise is computed for, under 10 a step.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import math

import torch
from torch import Tensor

from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, tl
from exeplan.kernels.most_likely import best_in, first_best, load_logits, most_likely_reference
from exeplan.kernels.tuning import Config, best_config

CONFIGS = (
    Config(columns=4096, num_warps=8),
    Config(columns=8192, num_warps=16),
    Config(columns=2048, num_warps=4),
    Config(columns=1024, num_warps=4),
)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_TO_UNIFORM = tl.constexpr(2.0**-63 * (1 - 2.0**-24))


def draw(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    tail_R: Tensor,
    least_R: Tensor,
    key_R: Tensor,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """For each row a token (int64), and whether its largest logit is finite; if not, the token is meaningless.

    A row of temperature 0 takes the most likely token. `top_k_R` (int32) is 0 where all are kept, `tail_R` is 1 -
    top-p, `least_R` the logarithm of min-p; `key_R` (int64) are the keys of `noise_key`, as signed numbers. Logits and
    other parameters are float32. The order is min-p, top-k, top-p.
    """
    rows, size = logits_RV.shape
    assert logits_RV.is_contiguous()
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    sound_R = torch.empty(rows, dtype=torch.bool, device=logits_RV.device)
    if not rows:
        return token_R, sound_R

    def launch(config: Config) -> None:
        _draw[(rows,)](
            logits_RV,
            size,
            temperature_R,
            top_k_R,
            tail_R,
            least_R,
            key_R,
            token_R,
            sound_R,
            BLOCK=config.columns,
            num_warps=config.num_warps,
        )

    launch(config or best_config("draw", (size,), CONFIGS, launch, logits_RV.device))
    return token_R, sound_R


def draw_reference(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, tail_R: Tensor, least_R: Tensor, key_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, by sorting."""
    token_R, sound_R = most_likely_reference(logits_RV)
    for row in (sound_R & (temperature_R > 0)).nonzero()[:, 0].tolist():
        below_V = (logits_RV[row].max() - logits_RV[row]) / temperature_R[row]
        kept_V = -below_V >= least_R[row]
        if 0 < top_k_R[row] < kept_V.sum():
            kept_V &= below_V <= below_V[kept_V].sort().values[top_k_R[row] - 1]
        if tail_R[row] > 0:
            kept_V &= below_V <= _top_p_cut(below_V[kept_V], tail_R[row])
        score_V = -below_V - _log_noise_reference(key_R[row], len(below_V))
        token_R[row] = score_V.masked_fill(~kept_V, -math.inf).argmax()
    return token_R, sound_R


def _top_p_cut(below_K: Tensor, tail: Tensor) -> Tensor:
    """The bound of the least likely token kept: less likely ones have at most `tail` of the mass."""
    descending_K = below_K.sort(descending=True).values
    mass_K = (-descending_K).exp().cumsum(0)
    num_cut = (mass_K <= tail * mass_K[-1]).sum().clamp(max=len(mass_K) - 1)
    return descending_K[num_cut]


def _log_noise_reference(key: Tensor, size: int) -> Tensor:
    bits_V = torch.arange(size, device=key.device) * (0x9E3779B97F4A7C15 - (1 << 64)) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits_V = (bits_V ^ (bits_V >> shift)) * (factor - (1 << 64))
    bits_V = bits_V ^ (bits_V >> 31)
    return (-(-(bits_V.float() * (2.0**-63 * (1 - 2.0**-24)))).log1p()).log()


@jit
def _below(row, i, size, top, temperature):
    """How far tokens lie below the largest, over the temperature."""
    return (top - load_logits(row, i, size)) / temperature


@jit
def _tally(row, size, top, temperature, cut, bound, BLOCK: tl.constexpr):
    """Of the tokens within `bound` (the bits of how far below): how many are within `cut`, and the mass of the
    others."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    rest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        below = _below(row, i, size, top, temperature)
        bits = below.to(tl.int32, bitcast=True)
        kept = (i < size) & (bits <= bound)
        count += (kept & (bits <= cut)).to(tl.int32)
        rest += tl.where(kept & (bits > cut), tl.exp(-below), 0.0)
    return tl.sum(count, 0), tl.sum(rest, 0)


@jit
def _cut(row, size, top, temperature, bound, num_kept, top_k, tail, BLOCK: tl.constexpr):
    """The least bound that keeps `top_k` tokens, and all but a mass of `tail`, of the `num_kept` within `bound`."""
    low, num_low = -1, 0
    high, num_high = bound, num_kept
    while (high - low > 1) & (num_high - num_low > 1):
        middle = low + (high - low) // 2
        count, rest = _tally(row, size, top, temperature, middle, bound, BLOCK)
        enough = (count >= top_k) & (rest <= tail)
        high = tl.where(enough, middle, high)
        num_high = tl.where(enough, count, num_high)
        low = tl.where(enough, low, middle)
        num_low = tl.where(enough, num_low, count)
    return high


@jit
def _log_noise(key, i):
    """`log_exponential_noise` of `runner/compute/tokens/noise.py`."""
    bits = i.to(tl.int64) * _GOLDEN + key
    bits = (bits ^ (bits >> 30)) * _FACTOR_1
    bits = (bits ^ (bits >> 27)) * _FACTOR_2
    bits = bits ^ (bits >> 31)
    uniform = bits.to(tl.float32) * _TO_UNIFORM
    # log(1 - u) to the last places without log1p: the rounding of 1 - u cancels in the quotient (Goldberg 1991, th. 4).
    rest = 1.0 - uniform
    exact = rest == 1.0
    exponential = tl.where(exact, uniform, tl.log(rest) * uniform / tl.where(exact, -1.0, rest - 1.0))
    return tl.log(exponential)


@jit
def _draw(
    logits,
    size,
    temperatures,
    top_ks,
    tails,
    leasts,
    keys,
    token,
    sound,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * size
    temperature = tl.load(temperatures + number)
    top, choice = best_in(row, 0, size, size, BLOCK)
    finite = (top < float("inf")) & (top > float("-inf"))
    if finite & (temperature > 0.0):
        bound = (0.0 - tl.load(leasts + number)).to(tl.int32, bitcast=True)
        top_k, tail = tl.load(top_ks + number), tl.load(tails + number)
        if (top_k > 0) & (top_k < size):
            num_kept, _ = _tally(row, size, top, temperature, bound, bound, BLOCK)
            if top_k < num_kept:
                bound = _cut(row, size, top, temperature, bound, num_kept, top_k, float("inf"), BLOCK)
        if tail > 0.0:
            num_kept, _ = _tally(row, size, top, temperature, bound, bound, BLOCK)
            _, mass = _tally(row, size, top, temperature, -1, bound, BLOCK)
            bound = _cut(row, size, top, temperature, bound, num_kept, 1, tail * mass, BLOCK)
        best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        place = tl.arange(0, BLOCK)
        key = tl.load(keys + number)
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            below = _below(row, i, size, top, temperature)
            kept = (i < size) & (below.to(tl.int32, bitcast=True) <= bound)
            score = tl.where(kept, -below - _log_noise(key, i), float("-inf"))
            place = tl.where(score > best, i, place)
            best = tl.maximum(best, score)
        _, choice = first_best(best, place)
    tl.store(token + number, choice)
    tl.store(sound + number, finite)


KERNELS = (
    Kernel("draw", draw, "cuda", MODEL_DTYPES),
    Kernel("draw", draw_reference),
)
