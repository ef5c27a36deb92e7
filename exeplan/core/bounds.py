"""Bounds: what is promised about a request's times, several at once, and which of them binds.

    p99-length      mean time of an output of the planned 99th-percentile length (ExeGPT's SLA-b)
    pNN-requests    the time that NN % of all requests do not exceed, such as p50-requests or p99.9-requests (SLA-a)
    pNN-deadline    NN % of all requests have their answer by their deadline (see `exeplan.workload.deadlines`)
    ttft, tpot      time to the first token and per later one: means over requests, as an Estimate has them and serving
                    benchmarks report them
    pNN-ttft        the ttft that NN % of all requests do not exceed, such as p99-ttft
    pNN-tpot        the same of tpot, over the requests with at least two tokens: mostly about the shortest outputs
    max-itl         the longest time between two tokens of a request that the passes of a plan can take, by the largest
                    prefill that may run in between; of a run the longest one seen
    pNN-all         NN % of all requests keep several times at once, its targets: joint attainment. The bound's seconds
                    are those of the first target; scaled, it scales all of them

`request_times.py` defines these percentiles. The first of several bounds is the one on latency (p99-length,
pNN-requests or pNN-deadline; infinity where there is none); the others are on further fields of an Estimate. Times
count from the start of the prefill, with arrivals from the arrival. A search knows one limit: `worst` reduces all
bounds to the binding one. Not here: margins (`exeplan/planner/margins/risk.py`).
"""

import math
import re
from collections.abc import Mapping, Sequence
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
MAX_ITL = "max-itl"
"""The metric of the bound on every gap between two tokens."""
TARGETS = ("ttft", "tpot", "latency")
"""What a bound on all together can hold of each request."""
_REQUESTS = re.compile(r"p(\d{1,2}(?:\.\d+)?)-(requests|deadline)")
_FURTHER = re.compile(r"p(\d{1,2}(?:\.\d+)?)-(ttft|tpot|all)")
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A promise: at most `seconds` of the `metric`; infinity is no promise. Files call the metric `about`."""

    seconds: float
    metric: str = "p99-length"
    targets: tuple[tuple[str, float], ...] = ()
    """Only for pNN-all, the seconds of each request's own `ttft`, `tpot` and `latency`, as far as they are bounded."""

    def __post_init__(self) -> None:
        if not _is_time(self.seconds):
            raise InputError(f"a latency bound must be a positive number of seconds, found {self.seconds!r}")
        known = self.metric in ("p99-length", "ttft", "tpot", MAX_ITL) or percentile(self.metric)
        if not known and share_of_requests(self.metric) is None:
            raise InputError(
                f"a bound can be on {LATENCY_METRICS}, on ttft, tpot, {MAX_ITL}, pNN-ttft, pNN-tpot or pNN-all, not on "
                f"'{self.metric}'"
            )
        _check_targets(self)

    @property
    def on_latency(self) -> bool:
        """On whole requests, not on their first token, their pace or several of them."""
        return self.metric not in ("ttft", "tpot", MAX_ITL) and percentile(self.metric) is None

    @property
    def scaled_targets(self) -> tuple[tuple[str, float], ...]:
        """The targets that belong to the bound's seconds."""
        return tuple((name, value * (self.seconds / self.targets[0][1])) for name, value in self.targets)

    def __str__(self) -> str:
        if self.targets:
            each = ", ".join(f"{name} {show_seconds(value)}" for name, value in self.scaled_targets)
            return f"{self.metric[1:].removesuffix('-all')} % of requests with {each}"
        if self.on_latency:
            return f"bound {show_seconds(self.seconds)} on {self.metric}"
        return f"{show_seconds(self.seconds)} {self.name}"

    @property
    def name(self) -> str:
        """Its metric for people; a mean says that it is one."""
        return f"mean {self.metric}" if self.metric in ("ttft", "tpot") else self.metric


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and not math.isnan(value) and value > 0  # type: ignore[arg-type,operator] # it is a number by then


def _check_targets(bound: Bound) -> None:
    """Raises InputError unless a bound on all together, and no other, has targets, the first one its own seconds."""
    joint = (found := percentile(bound.metric)) is not None and found[0] == "all"
    if joint != bool(bound.targets):
        raise InputError(
            f"a bound on {bound.metric} needs targets such as {{ttft: 0.5, tpot: 0.05}}"
            if joint
            else f"a bound on {bound.metric} has no targets; those are for pNN-all"
        )
    for name, value in bound.targets:
        if name not in TARGETS:
            raise InputError(f"a target can be {', '.join(TARGETS)}, not '{name}'")
        if not _is_time(value) or math.isinf(value):
            raise InputError(f"the target on {name} must be a positive number of seconds, found {value!r}")


def parse_bounds(
    latency: str | None,
    metric: str,
    *,
    ttft: str | None = None,
    tpot: str | None = None,
    itl: str | None = None,
    attainment: str | None = None,
    due: Bound | None = None,
) -> tuple[Bound, ...]:
    """The bounds of a command line, the first one infinite where only others are given. Raises InputError for none.

    `ttft` and `tpot` are one or several bounds after commas: `p99:500ms` on a percentile, `500ms` on the mean. `itl` is
    on every gap between two tokens. With `attainment` the other times are of each request, and that share has to keep
    them together. `due` is a bound on deadlines, which replaces the one on latency.
    """
    if due and latency is not None:
        raise InputError(
            "give --deadline or --latency-bound, not both: either says when a whole answer has to be there"
        )
    if latency is None and ttft is None and tpot is None and itl is None and due is None:
        raise InputError("give --latency-bound (inf for none), --deadline, --ttft, --tpot or --itl")
    if (share_of_requests(metric) is None or is_deadline(metric)) and metric != "p99-length":
        raise InputError(f"--bound-on must be {LATENCY_METRICS} or p50-requests, found '{metric}'")
    gaps = () if itl is None else (Bound(seconds=seconds(itl, "--itl"), metric=MAX_ITL),)
    if attainment is not None:
        return (*_together(attainment, {"latency": latency, "ttft": ttft, "tpot": tpot}, metric, due), *gaps)
    latest = seconds(latency, "--latency-bound") if latency is not None else math.inf
    first = due or Bound(seconds=latest, metric=metric)
    more = [bound for name, text in (("ttft", ttft), ("tpot", tpot)) if text is not None for bound in _each(text, name)]
    bounds = (first, *(bound for bound in (*more, *gaps) if math.isfinite(bound.seconds)))
    check_together(bounds)
    return bounds


def _each(text: str, name: str) -> list[Bound]:
    """The bounds of `p99:500ms,200ms` on `name`."""
    found = []
    for part in text.split(","):
        percent, colon, time = part.strip().rpartition(":")
        metric = f"{percent}-{name}" if colon else name
        if colon and (not _PERCENTILE.fullmatch(percent) or percentile(metric) is None):
            raise InputError(
                f"--{name} takes a percentile above p0 and below p100, such as p99:500ms, or a time for the mean, "
                f"found '{part}'"
            )
        found.append(Bound(seconds=seconds(time, f"--{name}"), metric=metric))
    return found


def _together(share: str, times: Mapping[str, str | None], metric: str, due: Bound | None) -> tuple[Bound, ...]:
    """No bound on latency alone, and one on all these times together."""
    percent = _percent(share, "--attainment")
    if due is not None or metric != "p99-length":
        raise InputError(
            "--attainment counts requests that keep --ttft, --tpot and --latency-bound; leave out --deadline and "
            "--bound-on"
        )
    options = {"latency": "--latency-bound", "ttft": "--ttft", "tpot": "--tpot"}
    if mixed := [name for name, text in times.items() if text is not None and (":" in text or "," in text)]:
        raise InputError(
            f"with --attainment {options[mixed[0]]} is the time of each request, such as 500ms, found "
            f"'{times[mixed[0]]}'; leave the percentile out"
        )
    given = {name: seconds(text, options[name]) for name in TARGETS if (text := times[name]) is not None}
    targets = tuple((name, value) for name, value in given.items() if math.isfinite(value))
    if not targets:
        raise InputError("--attainment needs a time to keep: give --ttft, --tpot or --latency-bound below infinity")
    whole = given.get("latency", math.inf)
    for name, value in targets:
        if name != "latency" and whole <= value:
            raise InputError(
                f"{name} of {show_seconds(value)} contradicts the latency bound of {show_seconds(whole)}, by which a "
                f"whole request has to be done; give a smaller {name}"
            )
    return Bound(seconds=math.inf), Bound(seconds=targets[0][1], metric=f"p{percent:.6g}-all", targets=targets)


def _percent(share: str, name: str) -> float:
    """99 for `99%` or `0.99`. Raises InputError."""
    try:
        percent = float(share.removesuffix("%")) * (1 if share.endswith("%") else 100)
    except ValueError:
        percent = 0.0
    if not 0 < percent < 100:
        raise InputError(f"{name} must be a share between 0 % and 100 %, such as 99%, found '{share}'")
    return percent


def deadline_bound(mean: float, share: str) -> Bound:
    """A bound that a share of the requests, such as `99%`, meets deadlines of this mean. Raises InputError."""
    return Bound(seconds=mean, metric=f"p{_percent(share, '--deadline-share'):.6g}-deadline")


def percentile(metric: object) -> tuple[str, float] | None:
    """("ttft", 0.99) for `p99-ttft`; None for a metric that is no percentile of ttft, of tpot or of all together."""
    match = _FURTHER.fullmatch(metric) if isinstance(metric, str) else None
    share = float(match[1]) / 100 if match else 0.0
    return (match[2], share) if match and share > 0 else None


def targets_of(bounds: Sequence[Bound]) -> tuple[tuple[str, float], ...]:
    """What each request's own times are held to: (quantity of `RequestTimes`, seconds) of every finite bound."""
    found: list[tuple[str, float]] = []
    for bound in bounds:
        if math.isinf(bound.seconds) or bound.metric == MAX_ITL:  # Of a plan's passes, not of a request.
            continue
        found += bound.scaled_targets or [(_quantity(bound.metric), bound.seconds)]
    return tuple(found)


def quantities(bound: Bound) -> tuple[str, ...]:
    """Of `latency`, `ttft` and `tpot`, those that a bound is on; passes err as the tpot does."""
    if bound.targets:
        return tuple(name for name, _ in bound.targets)
    return ("latency",) if bound.on_latency else (_quantity(bound.metric),)


def _quantity(metric: str) -> str:
    if (found := percentile(metric)) is not None:
        return found[0]
    if metric in ("ttft", "tpot"):
        return metric
    if metric == MAX_ITL:
        return "tpot"
    return "length" if metric == "p99-length" else "due" if is_deadline(metric) else "latency"


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
    if odd := [b.metric for b in others if not _may_be_further(b.metric)]:
        allowed = ", ".join((*MORE_METRICS, MAX_ITL, "pNN-ttft", "pNN-tpot", "pNN-all"))
        raise InputError(f"a further bound can be on {allowed}, not on '{odd[0]}'")
    names = [b.metric for b in bounds]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two bounds on {twice[0]}; give the tighter one")
    for bound in others:
        if first.seconds <= bound.seconds < math.inf and _holds_too(first, bound):
            raise InputError(
                f"{bound.metric} of {show_seconds(bound.seconds)} contradicts the latency bound of "
                f"{show_seconds(first.seconds)}, by which a whole request has to be done; give a smaller {bound.metric}"
            )


def _holds_too(first: Bound, other: Bound) -> bool:
    """Whether requests that are done by a bound on latency keep another one of as many seconds: of NN % of the requests
    a percentile up to that, and no mean."""
    if other.on_latency or other.targets or is_deadline(first.metric):
        return False
    done, asked = share_of_requests(first.metric), percentile(other.metric)
    return done is None or (asked is not None and asked[1] <= done)


def _may_be_further(metric: str) -> bool:
    return metric in MORE_METRICS or metric == MAX_ITL or percentile(metric) is not None


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
    """The value of each bound's metric in an Estimate made for these bounds; None for a value it does not hold."""
    return [estimate.latency, *(_value(b.metric, estimate) for b in bounds[1:])]


def _value(metric: str, estimate: Estimate) -> float | None:
    if metric in MORE_METRICS:
        return float(getattr(estimate, MORE_METRICS[metric]))
    return estimate.percentiles.get(metric)


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
