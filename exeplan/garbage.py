"""The collector of cyclic garbage, kept away from work that makes none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = 200_000
"""Containers more than there were, from which it looks for cycles; Python's own number is 700 to 2,000."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """What there is now is not looked through, and what is new seldom: a search makes many values and no cycles."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_SELDOM, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
