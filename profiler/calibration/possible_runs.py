"""What no serving run can be: on devices that do not hold the weights.

Not here: whether a run is plausible, which its deployment's other runs say (`law.py`).
"""

from exeplan.core.profile import Profile
from exeplan.errors import InputError
from exeplan.profiler.calibration.predict import cost_of
from exeplan.profiler.calibration.serving_run import ServingRun
from exeplan.simulator.memory import weight_bytes
from exeplan.units import show_bytes


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
