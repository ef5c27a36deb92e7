"""Uneven routing: the rows of each expert where some are chosen far more often than others, by a power law.

Source: the loads that AIConfigurator's tables of experts were measured with (`collector/helper.py`,
`_generate_power_law_distribution`; Apache-2.0), `power_law_<alpha>` in them: an expert's load has a density of x^-alpha
from 1 to 0.8 of the tokens, or from 0.01 to 2 where there are no more rows than experts, scaled to the rows there are;
none has more rows than tokens. How uneven a router is, a model's config does not say: it is stated for a profile.

Not here: even routing (`sparse_layers.py`), and routers that balance while they run.
"""

import re
from functools import lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.models.sparse_layers import Experts
from exeplan.errors import InputError

EVEN = "even"
_DRAWS, _SEED = 32, 0
"""Loads are drawn so often; the same uniform numbers for all numbers of tokens, so that nothing jumps."""
_MOST = 4.0


def routing_exponent(routing: str) -> float:
    """0 for `even`, 1.2 for `power_law_1.2`. Raises InputError for another text, and beyond 4."""
    if routing == EVEN:
        return 0.0
    match = re.fullmatch(r"power_law_(\d+(?:\.\d+)?)", routing, re.ASCII)
    if match is None or not 0 < float(match[1]) <= _MOST:
        raise InputError(
            f"routing is even or power_law_<exponent>, such as power_law_1.2, up to {_MOST:g}; found '{routing}'"
        )
    return float(match[1])


def check_uneven(routing: object) -> None:
    """Raises InputError unless it is the text of an uneven routing, as a profile or a plan keeps it."""
    if not isinstance(routing, str):
        raise InputError(f"routing must be text, found {routing!r}")
    if not routing_exponent(routing):
        raise InputError(f"a file keeps an uneven routing only, such as power_law_1.2; found '{routing}'")


def busiest_part(experts: Experts, num_tokens: float, parts: int, exponent: float) -> tuple[float, float]:
    """Rows of the busiest of `parts` of whole experts, and the experts that it reads, on average; of 0 as `Experts`."""
    if not exponent:
        return experts.busiest_rows(num_tokens, parts), experts.busiest_touched(num_tokens, parts)
    rows_DX = _rows(experts.count, experts.per_token, num_tokens, exponent)
    rows_DPX = rows_DX.reshape(_DRAWS, parts, experts.count // parts)
    busiest_D = rows_DPX.sum(axis=2).argmax(axis=1)
    rows_DX = rows_DPX[np.arange(_DRAWS), busiest_D]
    return float(rows_DX.sum(axis=1).mean()), float(np.minimum(rows_DX, 1.0).sum(axis=1).mean())


def busiest_load(experts: Experts, num_tokens: float, parts: int, exponent: float) -> float:
    """Rows of the busiest of `parts` of whole experts, as a multiple of an even share of all rows."""
    rows, _ = busiest_part(experts, num_tokens, parts, exponent)
    return rows * parts / (num_tokens * experts.per_token)


@lru_cache(512)
def _rows(count: int, per_token: int, num_tokens: float, exponent: float) -> Floats:
    """[draws, experts]: rows of each expert, `per_token` for each token together."""
    low, high = (1.0, max(0.8 * num_tokens, 1.0)) if num_tokens * per_token > count else (0.01, 2.0)
    uniform_DX = np.random.default_rng(_SEED).random((_DRAWS, count))
    if exponent == 1.0:
        loads_DX = low * (high / low) ** uniform_DX
    else:
        power = 1.0 - exponent
        loads_DX = ((high**power - low**power) * uniform_DX + low**power) ** (1.0 / power)
    wanted = num_tokens * per_token
    rows_DX = np.minimum(loads_DX * wanted / loads_DX.sum(axis=1, keepdims=True), num_tokens)
    # What is above the tokens goes to those that have room, in proportion to it.
    room_DX = num_tokens - rows_DX
    left_D1 = wanted - rows_DX.sum(axis=1, keepdims=True)
    return np.asarray(rows_DX + room_DX * left_D1 / np.maximum(room_DX.sum(axis=1, keepdims=True), 1e-30))
