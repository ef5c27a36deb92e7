"""What no serving run can be: on devices that do not hold the weights, or faster than these read and compute.

    tpot    at least the weights that one token is multiplied with, read once a pass by all devices together
    ttft    at least that, and the products of its prompt

Both at the peaks that the profile states of its device. Not here: whether a run is plausible, which its deployment's
other runs say (`law.py`).
"""

from collections.abc import Iterator

from exeplan.core.models.layer_costs import layer_parameters, layer_parameters_used
from exeplan.core.models.model import DTYPE_BYTES
from exeplan.core.profile import Profile
from exeplan.errors import InputError
from exeplan.profiler.calibration.predict import cost_of
from exeplan.profiler.calibration.serving_run import ServingRun
from exeplan.simulator.memory import weight_bytes
from exeplan.units import show_bytes, show_seconds

_TOLERANCE = 1.15
"""Peaks that were measured are exceeded by so much."""
_UNIT, _FAR = 1000.0, 10.0
"""Between one unit of a time's column and the next, and from where on a time is off as if by another unit."""


def check_possible(profile: Profile, run: ServingRun) -> None:
    """Raises InputError for a run that cannot be, with what it would need."""
    devices = run.tensor_parallel_size
    where = f"{run.devices} of {show_bytes(profile.device.memory_bytes)}"
    held = weight_bytes(profile, cost_of(profile, devices, run.expert_parallel_size).placement, 0)
    if held > profile.device.memory_bytes:
        raise InputError(
            f"{run}: {profile.model.name} in {profile.dtype} has {show_bytes(devices * held)} of weights, which do not "
            f"fit {where}; its tensor_parallel_size is another"
        )
    for name, seconds, least, what in _floors(profile, run):
        if _TOLERANCE * seconds < least:
            other = _FAR * seconds < least < _UNIT * seconds
            unit = f"; {_UNIT:g} times as long would be possible: is its unit right?" if other else ""
            raise InputError(
                f"{run}: a {name} of {show_seconds(seconds)} is impossible: {what} takes {run.devices} at least "
                f"{show_seconds(least)}{unit}"
            )


def _floors(profile: Profile, run: ServingRun) -> Iterator[tuple[str, float, float, str]]:
    """Of a time: its name, its seconds, the least that there can be, and what takes these."""
    spec, device, devices = profile.model, profile.device, run.tensor_parallel_size
    of_each = (
        profile.layer_weight_bytes / layer_parameters(spec)
        if profile.layer_weight_bytes is not None
        else DTYPE_BYTES[profile.dtype]
    )
    read = spec.num_layers * layer_parameters_used(spec) * of_each
    reading = max(0.0, read / devices - device.cache_bytes) / device.copy_bytes_per_second
    of_prompts = (
        spec.num_encoder_layers * layer_parameters_used(spec, encoder=True)
        if spec.is_encoder_decoder
        else spec.num_layers * layer_parameters_used(spec)
    )
    computing = 2 * run.input_tokens * of_prompts / devices / device.flops_per_second
    weights, prompt = f"to read {show_bytes(read)} of weights", f"to compute {run.input_tokens:,} tokens of a prompt"
    yield "tpot", run.tpot, reading, weights
    yield "ttft", run.ttft, *max((reading, weights), (computing, prompt))
