"""A profile corrected by serving runs that were measured, its own and those of other deployments.

A profile of a datasheet with an engine shares the effects of the shipped runs (`law.py`), which were predicted like it;
one that was measured or imported was not, and only its own runs move it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.correction import MOST_LOG, Correction
from exeplan.core.models.model import load_model_sizes, shipped_twin
from exeplan.core.profile import Profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.profiler.calibration.law import (
    QUANTITIES,
    CalibrationLaw,
    Observation,
    observation,
    own_evidence,
    placement_name,
    shipped_law,
)
from exeplan.profiler.calibration.pooled_effects import Evidence, PlacementName
from exeplan.profiler.calibration.possible_runs import check_possible
from exeplan.profiler.calibration.predict import predict_run
from exeplan.profiler.calibration.serving_run import Prediction, ServingRun
from exeplan.profiler.datasheets.engine_constants import with_engine
from exeplan.progress import SILENT, Told
from exeplan.units import show_seconds

_ROUNDS = 3
"""Gauss and Newton's: what a run says of a correction is linear near the one of the round before."""
_OF_ROUNDS = 0.86
"""Share of the time that they take: four replays of a run each, and two at the end."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The profile, and each run with its predictions before and after."""

    profile: Profile
    runs: tuple[tuple[ServingRun, Prediction, Prediction], ...]


def with_shipped_engine(profile: Profile, engine: str) -> Profile | None:
    """A datasheet's profile as that engine's runs take it, corrected by the measured ones; None for an engine of which
    none was measured."""
    law = shipped_law()
    if engine not in law.engines or profile.model.is_encoder_decoder:
        return None
    based = with_engine(profile, replace(law.constants, name=engine))
    return replace(based, correction=_correction(based, engine, law, ()))


def calibrate(profile: Profile, runs: Sequence[ServingRun], *, told: Told = SILENT) -> Calibrated:
    """The profile with the correction that these runs, and the shipped ones where they are comparable, say.

    Raises InputError for no runs, for runs of several engines, for what the profile is not of, and for what no run can
    be (`possible_runs.py`).
    """
    engine = _engine_of(profile, runs)
    law = shipped_law()
    if not _is_shared(profile):
        law = replace(law, evidence=())
    found: Correction | None = None
    for number in range(_ROUNDS):
        part = told.part(_OF_ROUNDS * number / _ROUNDS, _OF_ROUNDS * (number + 1) / _ROUNDS, f"round {number + 1}")
        seen = [observation(profile, run, found) for run in _told(runs, part)]
        if number == 0:
            _check_units(runs, seen)
        groups: dict[PlacementName, list[Observation]] = defaultdict(list)
        for run, one in zip(runs, seen, strict=True):
            groups[_name(profile, engine, run.tensor_parallel_size)].append(one)
        found = _correction(profile, engine, law, own_evidence(law, groups))
    corrected, part = replace(profile, correction=found), told.part(_OF_ROUNDS, 1.0, "predictions")
    predicted = ((run, predict_run(profile, run), predict_run(corrected, run)) for run in _told(runs, part))
    return Calibrated(corrected, tuple(predicted))


def _check_units(runs: Sequence[ServingRun], seen: Sequence[Observation]) -> None:
    """Raises InputError for times so far above the prediction that no correction says it: a time between tokens, or
    the time to the first one of all runs, as that of one may be a wait that is not predicted."""
    above = [one.logs > MOST_LOG for one in seen]
    of_all = np.logical_and.reduce(above)
    for run, one, far in zip(runs, seen, above, strict=True):
        for number, (name, seconds) in enumerate(zip(QUANTITIES, (run.ttft, run.tpot), strict=True)):
            if far[number] and (of_all[number] or name == "tpot"):
                factor = math.exp(one.logs[number])
                raise InputError(
                    f"{run}: a {name} of {show_seconds(seconds)} is {factor:.0f} times what is predicted, "
                    f"{show_seconds(seconds / factor)}, and a correction says {math.exp(MOST_LOG):.0f} times at most: "
                    "is its unit right?"
                )


def _told(runs: Sequence[ServingRun], told: Told) -> Iterator[ServingRun]:
    """The runs, each told when it is done."""
    for number, run in enumerate(runs, 1):
        yield run
        told(f"run {number} of {len(runs)}", number / len(runs))


def _correction(profile: Profile, engine: str, law: CalibrationLaw, own: Sequence[Evidence]) -> Correction:
    return law.correction(_name(profile, engine, min(profile.tensor_parallel_sizes)), own)


def _name(profile: Profile, engine: str, size: int) -> PlacementName:
    return placement_name(
        profile.model, engine=engine, device=profile.device.name, dtype=profile.dtype, tensor_parallel_size=size
    )


def _is_shared(profile: Profile) -> bool:
    """Whether it was predicted as the shipped runs were."""
    return profile.source.startswith("datasheet") and " with " in profile.source


def _engine_of(profile: Profile, runs: Sequence[ServingRun]) -> str:
    if not runs:
        raise InputError("no measured run: the file has no row")
    engines = sorted({run.engine for run in runs})
    if len(engines) > 1:
        raise InputError(f"the runs are of {', '.join(engines)}; calibrate one profile for each engine")
    if (of := profile.source.partition(" with ")[2]) and of != engines[0]:
        raise InputError(f"the profile is '{profile.source}', the runs are of {engines[0]}")
    for run in runs:
        for what, theirs, ours in (
            ("model", _model_of(run.model, profile), profile.model.name),
            ("device", run.device, profile.device.name),
            ("dtype", run.dtype, profile.dtype),
        ):
            if theirs != ours:
                raise InputError(
                    f"a run is of {what} {theirs}, the profile of {ours}; where another name means the same, leave the "
                    f"column {what} out"
                )
        if run.tensor_parallel_size not in profile.tensor_parallel_sizes:
            there = ", ".join(map(str, profile.tensor_parallel_sizes))
            raise InputError(f"a run has tensor_parallel_size {run.tensor_parallel_size}, the profile has {there}")
        _check_experts(run, profile)
        check_possible(profile, run)
    return engines[0]


def _check_experts(run: ServingRun, profile: Profile) -> None:
    size, parts = run.tensor_parallel_size, run.expert_parallel_size
    there = [one.expert_parallel_size for one in profile.expert_shardings if one.num_devices == size]
    if parts > 1 and Sharding(size, 1, parts) not in profile.expert_shardings:
        raise InputError(
            f"a run has expert_parallel_size {parts} on {size} devices, for which the profile has "
            f"{', '.join(map(str, sorted({1, *there})))}"
        )


def _model_of(name: str, profile: Profile) -> str:
    """The profile's name for a run of a model of its sizes under another name."""
    if name == profile.model.name:
        return name
    try:
        spec = load_model_sizes(name)
    except InputError:
        return name
    return profile.model.name if shipped_twin(spec) == shipped_twin(profile.model) else name
