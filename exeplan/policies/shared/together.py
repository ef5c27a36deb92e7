"""Shared by static, turbo and concat: a batch is prefilled and decodes until its longest output is complete."""

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.length_law import DecodeLaw


def generated(law: DecodeLaw) -> Floats:
    """E[min(k - 1, D)]: tokens that a row has decoded before iteration k; a finished one stays at its own length."""
    return np.concatenate([[0.0], np.cumsum(law.survival)[:-1]])


def latency(own_prefill: float, ends: Floats, first_tokens: float, output_tokens: Floats) -> Floats:
    """The prefill and one decode iteration for every further token."""
    decodes = np.asarray(output_tokens, dtype=float) - first_tokens
    return np.where(decodes > 0, np.interp(decodes, np.arange(1, len(ends) + 1), ends), own_prefill)
