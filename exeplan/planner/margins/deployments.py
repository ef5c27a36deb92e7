"""Deployments that were measured, and what their errors say of one that was not, or not often: random effects.

    deployment   one model in one dtype on one device, at one tensor parallel size, run by one engine
    family       the deployments of one engine on one device
    error        logarithm of measured / predicted, of a latency, a ttft or a tpot

An error is the sum of four: the centre of all families, the family's own, the deployment's own, and that of the
single run. Each level's centre is shrunk toward the one above it by the share of its variance that is sampling error
(empirical Bayes): without own errors a deployment has its family's law, or that of all families, and with many it has
its own. Variances of single runs are shrunk likewise, by Smyth's moments of their logarithms (2004, section 6.2).

Only errors that make a request slower than predicted break a bound, and their spread is what counts: every spread is
the root mean square above the centre, which is a median, so that predictions far too slow widen nothing. A bias that
all share moves the centre.

Predictions differ by what they are made of, and each kind has its own law: kernel times and an engine's constants,
kernel times alone, a datasheet with or without these constants. A profile that the engine measured itself has few
measured deployments, and shares the law of the first kind. Files: `plans/errors/*.yaml`, written from
`benchmarks/planner/margins/risk.py`. Not here: how errors become a margin (`risk.py`, `margins.py`).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exeplan.core.correction import Correction
from exeplan.core.profile import Profile
from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped, shipped_names
from exeplan.planner.margins.risk import QUANTITIES, ErrorLaw

_SHARED = {"measured": "tables with an engine"}
"""A kind of prediction that takes another kind's deployments in addition to its own."""
_KINDS = {"measured": "measured", "imported": "tables", "datasheet": "datasheet"}
"""By the first word of a profile's source."""
_OWN_ENGINE = "exeplan"
_MOST_ADDED = 0.95
"""Share of a bound that seconds in front of the engine may take: with more no prediction keeps it."""
_LEAST_FREEDOM, _MOST_FREEDOM = 4.0, 1e6
"""Of the variances of single runs: as few as leave them a mean square, and as many as make them equal."""
_FEW = 5
"""Errors from which a deployment's own spread is taken into the moments of all."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one quantity in one deployment."""

    count: int
    mean: float
    spread: float
    """Root mean square above the mean; 0 for a single error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What was predicted how, and its errors by quantity."""

    kind: str
    """`measured`, `tables`, `tables with an engine`, `datasheet` or `datasheet with an engine`."""
    engine: str
    device: str
    model: str
    dtype: str
    tensor_parallel_size: int
    errors: Mapping[str, Errors]

    @property
    def family(self) -> tuple[str, str]:
        return self.engine, self.device

    @property
    def name(self) -> tuple[object, ...]:
        """What two runs of the same deployment share."""
        return self.kind, self.engine, self.device, self.model, self.dtype, self.tensor_parallel_size


def errors_of(logs: Sequence[float]) -> Errors:
    """The summary of at least one error."""
    mean = float(np.mean(logs))
    return Errors(len(logs), mean, math.sqrt(_above([Errors(1, log, 0.0) for log in logs], mean)))


def deployment_of(profile: Profile, tensor_parallel_size: int) -> Deployment:
    """Where a profile's predictions belong, without any errors. Raises InputError for a source of no known kind."""
    times, _, engine = profile.source.partition(" with ")
    if (kind := _KINDS.get(times.split(" ")[0])) is None:
        raise InputError(
            f"a profile's source must begin with {', '.join(_KINDS)} for a margin, found '{profile.source}'"
        )
    return Deployment(
        kind=f"{kind} with an engine" if engine else kind,
        engine=engine or (_OWN_ENGINE if kind == "measured" else ""),
        device=profile.device.name,
        model=profile.model.name,
        dtype=profile.dtype,
        tensor_parallel_size=tensor_parallel_size,
        errors={},
    )


def deployment_law(
    new: Deployment, quantity: str, known: Sequence[Deployment], *, own_logs: Sequence[float] = ()
) -> ErrorLaw:
    """The law of an error of the `new` deployment, which may have own errors, and the `known` ones.

    Own errors keep their shape: their deviations are the law's sample. Raises InputError where no other deployment of
    its kind has errors of that quantity.
    """
    kinds = {new.kind, _SHARED.get(new.kind, new.kind)}
    here = [d for d in known if d.kind in kinds and quantity in d.errors]
    others = [d for d in here if d.name != new.name]
    own = [d.errors[quantity] for d in here if d.name == new.name]
    own += [errors_of(own_logs)] if len(own_logs) else []
    if not others:
        raise InputError(f"no other deployment has errors of {quantity} for a profile of the kind '{new.kind}'")
    families: dict[tuple[str, str], list[Errors]] = defaultdict(list)
    for one in others:
        families[one.family].append(one.errors[quantity])
    run, freedom = _run_variance([e for d in others if (e := d.errors[quantity]).count >= _FEW])
    levels = _levels(families, run)
    centre, of_family = _of_family(levels, families.get(new.family))
    parts = [(of_family, max(1.0, levels.num_families - 1.0)), (levels.within, levels.freedom)]
    mean, variance = centre, of_family + levels.within
    if own:
        count = sum(e.count for e in own)
        own_mean = sum(e.count * e.mean for e in own) / count
        squares = sum(e.count * e.spread**2 for e in own)
        run = (freedom * run + squares) / (freedom + count - 1) if count > 1 else run
        freedom += count - 1
        weight = variance / (variance + run / count) if variance else 0.0
        mean, variance = centre + weight * (own_mean - centre), variance * (1 - weight)
        parts = [(part * (1 - weight), n) for part, n in parts]
    parts.append((run, freedom))
    total = variance + run
    return ErrorLaw(
        logs=tuple(np.sort(mean + np.asarray(own_logs) - np.mean(own_logs)).tolist()) if len(own_logs) else (mean,),
        spread=math.sqrt(total),
        freedom=total**2 / sum(part**2 / n for part, n in parts) if total else math.inf,
        count=sum(d.errors[quantity].count for d in others) + sum(e.count for e in own),
        source=_said(new, others, sum(e.count for e in own), len(families.get(new.family, ()))),
    )


def correction_law(correction: Correction, quantity: str, seconds: float = math.inf) -> ErrorLaw:
    """The law of a new error of predictions that are corrected already, near a bound of so many `seconds`.

    What happens in front of the engine no pass takes: its factor on a time to the first token, and the seconds that are
    added to that and to a latency, are in the law alone. A prediction p keeps a bound b with seconds s if p f + s <= b,
    so that the factor is f / (1 - s / b).

    Raises InputError where no run was of its engine or device, so that nothing says how far it may be off.
    """
    if not (correction.own_runs or {"engine", "device"} & set(correction.shared)) or quantity not in correction.spreads:
        raise InputError(
            f"nothing comparable was measured that says how far a {quantity} may be off; run `exeplan calibrate` with "
            "runs of your own, or leave --risk out"
        )
    own = f"{correction.own_runs} runs of this deployment" if correction.own_runs else "no run of this deployment"
    added = 0.0 if quantity == "tpot" else min(correction.first_seconds / seconds, _MOST_ADDED)
    left = 0.0 if quantity == "tpot" else correction.spreads.get("first_seconds", 0.0) / seconds
    return ErrorLaw(
        logs=((correction.first if quantity == "ttft" else 0.0) - math.log(1 - added),),
        spread=math.hypot(correction.spreads[quantity], left / (1 - added)),
        freedom=max(1.0, correction.deployments - 1.0),
        count=correction.own_runs + correction.other_runs,
        source=f"deployment: errors of {correction.deployments} that were measured, after correction; {own}",
    )


@dataclass(frozen=True, slots=True)
class _Levels:
    """The centre of all families, and the variances of families about it and of deployments about their family."""

    centre: float
    between: float
    within: float
    freedom: float
    """Of the variance of deployments about their family."""
    num_families: int


def _levels(families: Mapping[tuple[str, str], Sequence[Errors]], run: float) -> _Levels:
    centres = {family: _median(found) for family, found in families.items()}
    counts = {family: sum(e.count for e in found) for family, found in families.items()}
    of_families = [Errors(counts[family], centre, 0.0) for family, centre in centres.items()]
    centre = _median(of_families)
    about = [replace(e, mean=e.mean - centres[f]) for f, found in families.items() if len(found) > 1 for e in found]
    noise = run * len(about) / max(sum(e.count for e in about), 1)
    within = max(_above(about, 0.0) - noise, 0.0)
    each = within * float(np.mean([1 / len(found) for found in families.values()]))
    # One family says nothing about others: they are then taken to differ as its deployments do.
    between = max(_above(of_families, centre) - each, 0.0) if len(centres) > 1 else within
    freedom = max(1.0, sum(map(len, families.values())) - len(centres))
    return _Levels(centre, between, within, freedom, len(centres))


def _of_family(levels: _Levels, own: Sequence[Errors] | None) -> tuple[float, float]:
    """The centre of a family and its variance; without own deployments those of any family."""
    if not own:
        return levels.centre, levels.between * (1 + 1 / levels.num_families)
    if not levels.between:
        return levels.centre, 0.0
    weight = levels.between / (levels.between + levels.within / len(own))
    return levels.centre + weight * (_median(own) - levels.centre), levels.between * (1 - weight)


def _run_variance(spreads: Sequence[Errors]) -> tuple[float, float]:
    """The variance of single runs in a deployment that is not known, and the degrees of freedom behind it."""
    from scipy.special import digamma, polygamma

    if not spreads:
        return 0.0, _MOST_FREEDOM
    halves = np.array([(e.count - 1) / 2 for e in spreads])
    logs = np.log([max(e.spread, 1e-6) ** 2 for e in spreads]) - digamma(halves) + np.log(halves)
    if len(spreads) == 1:
        return float(np.exp(logs[0])), _LEAST_FREEDOM
    excess = float(logs.var(ddof=1) - polygamma(1, halves).mean())
    half = _inverse_trigamma(excess) if excess > 0 else _MOST_FREEDOM / 2
    freedom = float(np.clip(2 * half, _LEAST_FREEDOM, _MOST_FREEDOM))
    return float(np.exp(logs.mean() + digamma(freedom / 2) - np.log(freedom / 2))), freedom


def _inverse_trigamma(value: float) -> float:
    """Where the trigamma function, which falls, has this value."""
    from scipy.optimize import brentq
    from scipy.special import polygamma

    return float(brentq(lambda x: float(polygamma(1, x)) - value, 1e-3, 1e9)) if value > 1e-8 else _MOST_FREEDOM / 2


def _median(found: Sequence[Errors]) -> float:
    """The mean that half of the runs do not exceed."""
    rising = sorted(found, key=lambda e: e.mean)
    runs = np.cumsum([e.count for e in rising])
    low, high = np.searchsorted(runs, runs[-1] / 2, side="left"), np.searchsorted(runs, runs[-1] / 2, side="right")
    return (rising[low].mean + rising[min(int(high), len(rising) - 1)].mean) / 2


def _above(found: Sequence[Errors], centre: float) -> float:
    """The mean square of what lies above the centre, a run counting once; 0 where nothing does."""
    over = [(e.count, e.mean - centre) for e in found if e.mean > centre]
    return sum(n * x * x for n, x in over) / sum(n for n, _ in over) if over else 0.0


def _said(new: Deployment, others: Sequence[Deployment], num_own: int, num_family: int) -> str:
    devices = ", ".join(sorted({d.device for d in others}))
    families = len({d.family for d in others})
    own = f"{num_own} runs of this deployment" if num_own else "no run of this deployment"
    of_engine = f"{num_family or 'none'} of the others of this engine on this device"
    if not new.engine:
        of_engine = "the profile names no engine"
    return (
        f"deployment: errors of {len(others)} others that were measured, {families} engines on {devices}; {own}, "
        f"{of_engine}"
    )


# --- files ------------------------------------------------------------------------------------------------------------


@cache
def shipped_deployments() -> tuple[Deployment, ...]:
    """All of `plans/errors`."""
    return tuple(d for name in shipped_names("errors") for d in read_deployments(shipped("errors", name)))


def read_deployments(path: Path) -> tuple[Deployment, ...]:
    """The deployments of a YAML file; each quantity has [number, mean, spread] in percent."""
    return tuple(_deployment(row) for row in read_yaml(path)["deployments"])


def _deployment(row: Mapping[str, Any]) -> Deployment:
    errors = {
        name: Errors(int(row[name][0]), row[name][1] / 100, row[name][2] / 100) for name in QUANTITIES if name in row
    }
    return Deployment(
        kind=row["kind"],
        engine=row["engine"],
        device=row["device"],
        model=row["model"],
        dtype=row["dtype"],
        tensor_parallel_size=int(row["tensor_parallel_size"]),
        errors=errors,
    )
