"""Bounds: what is promised about a request's times, several at once, and which of them is fullest.

    p99-length      mean time of an output of the planned 99th-percentile length (ExeGPT's SLA-b)
    pNN-requests    the time that NN % of all requests do not exceed, such as p50-requests or p99.9-requests (SLA-a)
    pNN-deadline    NN % of all requests have their answer by their deadline (see `exeplan.workload.deadlines`)
    ttft, tpot      time to the first token and per later one: means over requests, as an Estimate has them and serving
                    benchmarks report them; a percentile of tpot over requests would be about the shortest outputs

The first bound of several is the one on latency (p99-length, pNN-requests or pNN-deadline; infinity where there is
none), the others are about what an Estimate holds beside it. Times count from the start of the prefill, with arrivals
from the arrival. A search knows one limit: `worst` turns all bounds into the one that is fullest. Not here: margins
(`risk.py`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exeplan.core.schedule import Estimate
from exeplan.errors import InputError
from exeplan.units import seconds, show_seconds

LATENCY_ABOUT = "p99-length or pNN-requests, such as p99-requests"
"""What a bound on latency can be on, for people."""
MORE_ABOUT = {
    "ttft": "ttft",
    "tpot": "tpot",
    "p50-requests": "latency_p50",
    "p99-requests": "latency_p99",
}
"""What further bounds can be on: the field of an Estimate that holds it."""
_REQUESTS = re.compile(r"p(\d{1,2}(?:\.\d+)?)-(requests|deadline)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A promise: at most `seconds` for what `about` says; infinity is no promise."""

    seconds: float
    about: str = "p99-length"

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not number or math.isnan(self.seconds) or self.seconds <= 0:
            raise InputError(f"a latency bound must be a positive number of seconds, found {self.seconds!r}")
        if self.about not in ("p99-length", "ttft", "tpot") and share_of_requests(self.about) is None:
            raise InputError(f"a bound can be on {LATENCY_ABOUT}, on ttft or on tpot, not on '{self.about}'")

    @property
    def on_latency(self) -> bool:
        """About whole requests, not about their first token or their pace."""
        return self.about not in ("ttft", "tpot")

    def __str__(self) -> str:
        kind = f"bound {show_seconds(self.seconds)} on " if self.on_latency else f"{show_seconds(self.seconds)} "
        return kind + self.about


def parse_bounds(
    latency: str | None,
    about: str,
    *,
    ttft: str | None = None,
    tpot: str | None = None,
    due: Bound | None = None,
) -> tuple[Bound, ...]:
    """The bounds of a command line, the first one infinite where only others are given. Raises InputError for none.

    `due` is the one on deadlines, in the place of that on latency.
    """
    if due and latency is not None:
        raise InputError(
            "give --deadline or --latency-bound, not both: either says when a whole answer has to be there"
        )
    if latency is None and ttft is None and tpot is None and due is None:
        raise InputError("give --latency-bound (inf for none), --deadline, --ttft or --tpot")
    if (share_of_requests(about) is None or is_deadline(about)) and about != "p99-length":
        raise InputError(f"--bound-on must be {LATENCY_ABOUT} or p50-requests, found '{about}'")
    latest = seconds(latency, "--latency-bound") if latency is not None else math.inf
    first = due or Bound(seconds=latest, about=about)
    given = {"ttft": ttft, "tpot": tpot}
    more = [Bound(seconds=seconds(text, f"--{name}"), about=name) for name, text in given.items() if text is not None]
    bounds = (first, *(bound for bound in more if math.isfinite(bound.seconds)))
    check_together(bounds)
    return bounds


def deadline_bound(mean: float, share: str) -> Bound:
    """That a share of the requests such as `99%` keeps deadlines of this mean. Raises InputError for what is none."""
    try:
        percent = float(share.removesuffix("%")) * (1 if share.endswith("%") else 100)
    except ValueError:
        percent = 0.0
    if not 0 < percent < 100:
        raise InputError(f"--deadline-share must be a share between 0 % and 100 %, such as 99%, found '{share}'")
    return Bound(seconds=mean, about=f"p{percent:.6g}-deadline")


def share_of_requests(about: object) -> float | None:
    """0.999 for `p99.9-requests` or `p99.9-deadline`; None for what is no percentile of requests."""
    match = _REQUESTS.fullmatch(about) if isinstance(about, str) else None
    share = float(match[1]) / 100 if match else 0.0
    return share if share > 0 else None


def is_deadline(about: str) -> bool:
    """Whether a bound is about requests that have a deadline each."""
    return about.endswith("-deadline")


def check_together(bounds: Sequence[Bound]) -> None:
    """Raises InputError for a first bound that is not on latency, two on the same, and what contradicts the first."""
    first, *others = bounds
    if not first.on_latency:
        raise InputError(f"the first bound must be on {LATENCY_ABOUT}, not on {first.about}; give {first.about} beside")
    if odd := [b.about for b in others if b.about not in MORE_ABOUT]:
        raise InputError(f"a further bound can be on {', '.join(MORE_ABOUT)}, not on '{odd[0]}'")
    names = [b.about for b in bounds]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two bounds on {twice[0]}; give the tighter one")
    for bound in others:
        if not bound.on_latency and first.seconds <= bound.seconds < math.inf:
            raise InputError(
                f"{bound.about} of {show_seconds(bound.seconds)} contradicts the latency bound of "
                f"{show_seconds(first.seconds)}, by which a whole request has to be done; give a {bound.about} below it"
            )


def limit(bounds: Sequence[Bound]) -> float:
    """Seconds of the first finite bound, in which `worst` counts; infinity where nothing is bounded."""
    return next((b.seconds for b in bounds if math.isfinite(b.seconds)), math.inf)


def worst(bounds: Sequence[Bound], values: Sequence[float]) -> float:
    """The fullest bound's share times `limit`: all bounds hold when it does not exceed that; the first value if none
    is finite."""
    finite = [(b.seconds, value) for b, value in zip(bounds, values, strict=True) if math.isfinite(b.seconds)]
    if not finite:
        return values[0]
    (first, value), *others = finite  # The first one is taken as it is: no rounding where it stands alone.
    return max([value, *(other / bound * first for bound, other in others)])


def values_of(bounds: Sequence[Bound], estimate: Estimate) -> list[float | None]:
    """What an Estimate made for these bounds says of each; None for a latency that it could not tell."""
    return [estimate.latency, *(getattr(estimate, MORE_ABOUT[b.about]) for b in bounds[1:])]


def shares(bounds: Sequence[Bound], estimate: Estimate) -> list[float]:
    """How full each bound is: above 1 it is broken, 0 where there is none or nothing to tell."""
    values = values_of(bounds, estimate)
    return [(value or 0.0) / b.seconds for b, value in zip(bounds, values, strict=True)]


def fullest(bounds: Sequence[Bound], estimate: Estimate) -> tuple[Bound, float] | None:
    """The fullest bound and its share; None where nothing is bounded."""
    full = [(share, b) for b, share in zip(bounds, shares(bounds, estimate), strict=True) if math.isfinite(b.seconds)]
    if not full:
        return None
    share, bound = max(full, key=lambda pair: pair[0])
    return bound, share


def scaled(bounds: Sequence[Bound], factors: Sequence[float]) -> tuple[Bound, ...]:
    """Each bound times its factor."""
    return tuple(replace(b, seconds=b.seconds * factor) for b, factor in zip(bounds, factors, strict=True))
