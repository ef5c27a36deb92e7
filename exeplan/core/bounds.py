"""Bounds: what is promised about a request's times, several at once, and which of them binds.

    p99-length      mean time of an output of the planned 99th-percentile length (ExeGPT's SLA-b)
    pNN-requests    the time that NN % of all requests do not exceed, such as p50-requests or p99.9-requests (SLA-a)
    pNN-deadline    NN % of all requests have their answer by their deadline (see `exeplan.workload.deadlines`)
    ttft, tpot      time to the first token and per later one: means over requests, as an Estimate has them and serving
                    benchmarks report them; a percentile of tpot over requests would describe the shortest outputs

The first of several bounds is the one on latency (p99-length, pNN-requests or pNN-deadline; infinity where there is
none); the others are on further fields of an Estimate. Times count from the start of the prefill, with arrivals from
the arrival. A search knows one limit: `worst` reduces all bounds to the binding one. Not here: margins
(`exeplan/planner/risk.py`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exeplan.core.schedule import Estimate
from exeplan.errors import InputError
from exeplan.units import seconds, show_seconds

LATENCY_METRICS = "p99-length or pNN-requests, such as p99-requests"
"""The metrics of a bound on latency, as error messages name them."""
MORE_METRICS = {
    "ttft": "ttft",
    "tpot": "tpot",
    "p50-requests": "latency_p50",
    "p99-requests": "latency_p99",
}
"""The metrics of further bounds: the field of an Estimate that holds each."""
_REQUESTS = re.compile(r"p(\d{1,2}(?:\.\d+)?)-(requests|deadline)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A promise: at most `seconds` of the `metric`; infinity is no promise. Files call the metric `about`."""

    seconds: float
    metric: str = "p99-length"

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not number or math.isnan(self.seconds) or self.seconds <= 0:
            raise InputError(f"a latency bound must be a positive number of seconds, found {self.seconds!r}")
        if self.metric not in ("p99-length", "ttft", "tpot") and share_of_requests(self.metric) is None:
            raise InputError(f"a bound can be on {LATENCY_METRICS}, on ttft or on tpot, not on '{self.metric}'")

    @property
    def on_latency(self) -> bool:
        """On whole requests, not on their first token or their pace."""
        return self.metric not in ("ttft", "tpot")

    def __str__(self) -> str:
        kind = f"bound {show_seconds(self.seconds)} on " if self.on_latency else f"{show_seconds(self.seconds)} "
        return kind + self.metric


def parse_bounds(
    latency: str | None,
    metric: str,
    *,
    ttft: str | None = None,
    tpot: str | None = None,
    due: Bound | None = None,
) -> tuple[Bound, ...]:
    """The bounds of a command line, the first one infinite where only others are given. Raises InputError for none.

    `due` is a bound on deadlines, which replaces the one on latency.
    """
    if due and latency is not None:
        raise InputError(
            "give --deadline or --latency-bound, not both: either says when a whole answer has to be there"
        )
    if latency is None and ttft is None and tpot is None and due is None:
        raise InputError("give --latency-bound (inf for none), --deadline, --ttft or --tpot")
    if (share_of_requests(metric) is None or is_deadline(metric)) and metric != "p99-length":
        raise InputError(f"--bound-on must be {LATENCY_METRICS} or p50-requests, found '{metric}'")
    latest = seconds(latency, "--latency-bound") if latency is not None else math.inf
    first = due or Bound(seconds=latest, metric=metric)
    given = {"ttft": ttft, "tpot": tpot}
    more = [Bound(seconds=seconds(text, f"--{name}"), metric=name) for name, text in given.items() if text is not None]
    bounds = (first, *(bound for bound in more if math.isfinite(bound.seconds)))
    check_together(bounds)
    return bounds


def deadline_bound(mean: float, share: str) -> Bound:
    """A bound that a share of the requests, such as `99%`, meets deadlines of this mean. Raises InputError."""
    try:
        percent = float(share.removesuffix("%")) * (1 if share.endswith("%") else 100)
    except ValueError:
        percent = 0.0
    if not 0 < percent < 100:
        raise InputError(f"--deadline-share must be a share between 0 % and 100 %, such as 99%, found '{share}'")
    return Bound(seconds=mean, metric=f"p{percent:.6g}-deadline")


def share_of_requests(metric: object) -> float | None:
    """0.999 for `p99.9-requests` or `p99.9-deadline`; None for a metric that is no percentile of requests."""
    match = _REQUESTS.fullmatch(metric) if isinstance(metric, str) else None
    share = float(match[1]) / 100 if match else 0.0
    return share if share > 0 else None


def is_deadline(metric: str) -> bool:
    """Whether a metric counts requests that meet their own deadline."""
    return metric.endswith("-deadline")


def check_together(bounds: Sequence[Bound]) -> None:
    """Raises InputError for a first bound that is not on latency, two on one metric, and one that contradicts it."""
    first, *others = bounds
    if not first.on_latency:
        raise InputError(
            f"the first bound must be on {LATENCY_METRICS}, not on {first.metric}; give {first.metric} in addition"
        )
    if odd := [b.metric for b in others if b.metric not in MORE_METRICS]:
        raise InputError(f"a further bound can be on {', '.join(MORE_METRICS)}, not on '{odd[0]}'")
    names = [b.metric for b in bounds]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two bounds on {twice[0]}; give the tighter one")
    for bound in others:
        if not bound.on_latency and first.seconds <= bound.seconds < math.inf:
            raise InputError(
                f"{bound.metric} of {show_seconds(bound.seconds)} contradicts the latency bound of "
                f"{show_seconds(first.seconds)}, by which a whole request has to be done; give a smaller {bound.metric}"
            )


def limit(bounds: Sequence[Bound]) -> float:
    """Seconds of the first finite bound, in which `worst` counts; infinity where nothing is bounded."""
    return next((b.seconds for b in bounds if math.isfinite(b.seconds)), math.inf)


def worst(bounds: Sequence[Bound], values: Sequence[float]) -> float:
    """The binding bound's utilization times `limit`: all bounds hold when it does not exceed that.

    The first value where no bound is finite.
    """
    finite = [(b.seconds, value) for b, value in zip(bounds, values, strict=True) if math.isfinite(b.seconds)]
    if not finite:
        return values[0]
    (first, value), *others = finite  # The first one is taken as it is: no rounding where it stands alone.
    return max([value, *(other / bound * first for bound, other in others)])


def values_of(bounds: Sequence[Bound], estimate: Estimate) -> list[float | None]:
    """The value of each bound's metric in an Estimate made for these bounds; None for a latency it does not hold."""
    return [estimate.latency, *(getattr(estimate, MORE_METRICS[b.metric]) for b in bounds[1:])]


def utilizations(bounds: Sequence[Bound], estimate: Estimate) -> list[float]:
    """Value over bound for each: above 1 it is broken; 0 where the bound is infinite or the value unknown."""
    values = values_of(bounds, estimate)
    return [(value or 0.0) / b.seconds for b, value in zip(bounds, values, strict=True)]


def binding(bounds: Sequence[Bound], estimate: Estimate) -> tuple[Bound, float] | None:
    """The bound of the highest utilization, and that; None where no bound is finite."""
    pairs = zip(bounds, utilizations(bounds, estimate), strict=True)
    finite = [(bound, utilization) for bound, utilization in pairs if math.isfinite(bound.seconds)]
    return max(finite, key=lambda pair: pair[1], default=None)


def scaled(bounds: Sequence[Bound], factors: Sequence[float]) -> tuple[Bound, ...]:
    """Each bound times its factor."""
    return tuple(replace(b, seconds=b.seconds * factor) for b, factor in zip(bounds, factors, strict=True))
