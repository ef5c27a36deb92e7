"""profile_model(): measures a model on a device until interpolation is good enough or the budget is spent.

Here: what to measure, the range of the profile, and the unfinished profile that is resumed. Not here: the measuring
itself (`measuring/campaign.py`).
"""

import time
from dataclasses import replace
from pathlib import Path

import torch

from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.profile import Device, Profile, load_profile
from exeplan.errors import InputError
from exeplan.profiler.measuring.campaign import Campaign, Goal, num_copies
from exeplan.profiler.measuring.device import available_memory, check_device, device_name, measure_device, versions
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.memory import give_back_unused, tensor_bytes
from exeplan.profiler.measuring.points import Work, choose_range
from exeplan.profiler.multi_device.multi_device import ONE_DEVICE_SHARE, MultiDeviceProfiler, check_num_devices
from exeplan.progress import Progress
from exeplan.runner.compute.families import load_model
from exeplan.runner.compute.weights.precision import activation_dtype, check_precision, holding_remarks

_CPU_SEQS, _CUDA_SEQS = 64, 256
_KV_SHARE_OF_MEMORY = 0.25
_KV_BYTES_A_SECOND = 50e6
"""Share of the budget on a CPU: allocating memory takes half a second a GB, up to three on a virtual machine."""
_LEAST_CONTEXT = 16
_UNLIMITED_CONTEXT = 2048
"""Context of an encoder-decoder model unless another is given: its relative positions have no limit."""
_PASS_SHARE = 1 / 40
"""Largest share of the budget for one pass of the coarse grid."""


def profile_model(
    spec: ModelSpec,
    *,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    device: str = "cpu",
    output: Path,
    budget_seconds: float = 60.0,
    target_error: float = 0.03,
    max_num_seqs: int | None = None,
    max_context: int | None = None,
    dummy_weights: bool = False,
    num_threads: int = 1,
    num_devices: int = 1,
    progress: bool = True,
    captured: bool | None = None,
    complete: bool = True,
) -> Profile:
    """Measures the model and writes the profile to `output`, after every round and at the end.

    `captured` times decode iterations as captured graphs, the default on a GPU. With several devices the profile also
    has shards of layers, links, control and bursts on workers. An unfinished profile in `output` is resumed when it was
    made for the same model, dtype, device and versions; one that is not `complete` stays unfinished, because more is to
    come. Raises InputError for what cannot be measured, and KeyboardInterrupt with a sentence on interruption.
    """
    started = time.monotonic()
    _check(
        spec,
        budget_seconds=budget_seconds,
        target_error=target_error,
        max_num_seqs=max_num_seqs,
        max_context=max_context,
    )
    if spec.is_encoder_decoder:  # Its positions set no limit to the context, so the measured range does.
        spec = replace(spec, max_context=max_context or min(spec.max_context, _UNLIMITED_CONTEXT))
    place = check_device(device)
    check_precision(dtype, kv_dtype, place)
    torch.set_num_threads(num_threads)
    remark = check_num_devices(spec, num_devices, place, num_threads)
    with Progress(f"profile {spec.name}", shown=progress) as bar:
        for line in (*([remark] if remark else []), *holding_remarks(spec, dtype, place)):
            bar.note(line)
        bar.update(0.0, budget_seconds, "measuring the device")
        before = _unfinished(spec, dtype=dtype, kv_dtype=kv_dtype, place=place, output=output, bar=bar)
        found = before.device if before else measure_device(device, activation_dtype(dtype), fp8=dtype == FP8)
        layer_bytes, encoder_bytes = _layer_bytes(spec, dtype=dtype, device=device)
        work = Work(
            spec=spec,
            dtype=dtype,
            device=found,
            layer_bytes=layer_bytes,
            encoder_layer_bytes=encoder_bytes,
            kv_dtype=kv_dtype,
        )
        copies = num_copies(work)
        reach = choose_range(
            work,
            copies=copies,
            max_num_seqs=max_num_seqs or (_CUDA_SEQS if place.type == "cuda" else _CPU_SEQS),
            max_context=min(max_context or spec.max_context, spec.max_context),
            memory_bytes=_kv_bytes(found, place, budget_seconds),
            pass_seconds=budget_seconds * _PASS_SHARE * (ONE_DEVICE_SHARE if num_devices > 1 else 1.0),
        )
        rig = Rig(
            spec,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            copies=copies,
            num_blocks=reach.num_blocks,
            dummy_weights=dummy_weights,
            captured=captured,
        )
        goal = Goal(started=started, budget_seconds=budget_seconds, target_error=target_error)
        if num_devices == 1:
            return Campaign(rig, work, reach, goal=goal, output=output, bar=bar, before=before).run(complete=complete)
        alone = replace(goal, budget_seconds=budget_seconds * ONE_DEVICE_SHARE)
        profile = Campaign(rig, work, reach, goal=alone, output=output, bar=bar, before=before).run(complete=False)
        del rig
        give_back_unused(place)  # To the shards, and to the processes of several ranks.
        multi_device = MultiDeviceProfiler(
            num_devices=num_devices, work=work, reach=reach, device=device, dummy_weights=dummy_weights
        )
        return multi_device.extend(profile, goal=goal, output=output, bar=bar, complete=complete)


def _check(
    spec: ModelSpec, *, budget_seconds: float, target_error: float, max_num_seqs: int | None, max_context: int | None
) -> None:
    if not budget_seconds > 0:
        raise InputError(f"a budget must be above zero seconds, found {budget_seconds:g}")
    if not 0 < target_error < 1:
        raise InputError(f"a target error is a share between 0 and 1, found {target_error:g}")
    for name, value in (("max_num_seqs", max_num_seqs), ("max_context", max_context)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, found {value}")
    context = spec.max_context if max_context is None else max_context
    if context < _LEAST_CONTEXT:
        raise InputError(
            f"a profile needs a context of at least {_LEAST_CONTEXT} tokens, {spec.name} is given {context}"
        )
    if len(spec.windows) > 1 and context > (window := min(window for window in spec.windows if window is not None)):
        raise InputError(
            f"the layers of {spec.name} differ in their sliding windows, and one layer is measured for all: measure up "
            f"to --max-context {window}, below which they do not, or derive a profile with --datasheet"
        )
    if max_context is not None and max_context > spec.max_context:
        raise InputError(f"max_context {max_context} is beyond the {spec.max_context} tokens that {spec.name} can hold")


def _kv_bytes(device: Device, place: torch.device, budget_seconds: float) -> int:
    """Bytes that the KV cache of the measurements may take: on a GPU a share of what is free."""
    if place.type == "cuda":
        return int(_KV_SHARE_OF_MEMORY * available_memory(place))
    return int(min(_KV_SHARE_OF_MEMORY * device.memory_bytes, budget_seconds * _KV_BYTES_A_SECOND))


def _layer_bytes(spec: ModelSpec, *, dtype: str, device: str) -> tuple[int, int]:
    """Bytes of weights of a layer, the mean of all, and of an encoder layer (0 for none), as the engine holds them."""
    num_layers = spec.num_layers if spec.layers_differ else 1
    smallest = replace(spec, num_layers=num_layers, num_encoder_layers=min(1, spec.num_encoder_layers))
    with torch.inference_mode():
        model, _ = load_model(smallest, dtype=dtype, device=device, dummy_weights=True)
    encoder_layers = getattr(model, "encoder_layers", ())
    return max(1, sum(map(tensor_bytes, model.layers)) // num_layers), sum(map(tensor_bytes, encoder_layers))


def _unfinished(
    spec: ModelSpec, *, dtype: str, kv_dtype: str | None, place: torch.device, output: Path, bar: Progress
) -> Profile | None:
    """The profile to resume; None, with a note on the progress bar, where it belongs to something else."""
    if not output.exists():
        return None
    try:
        profile = load_profile(output)
    except InputError as error:
        raise InputError(
            f"{output} is there but cannot be resumed ({error}); remove it or choose another file"
        ) from None
    if profile.complete:
        bar.note(f"{output} is a finished profile; measuring anew")
        return None
    threads = torch.get_num_threads() if place.type == "cpu" else 1
    pairs = {
        "model": (profile.model.fingerprint, spec.fingerprint),
        "quantization": (str(profile.model.quantization), str(spec.quantization)),
        "dtype": (profile.dtype, dtype),
        "dtype of keys and values": (profile.cache_dtype, kv_dtype or dtype),
        "device": (_shown(profile.device), f"{device_name(place)}, {threads} thread(s)"),
        "versions": (dict(profile.versions), versions()),
    }
    for what, (old, new) in pairs.items():
        if old != new:
            bar.note(f"{output} was made for another {what} ({old}, now {new}); measuring anew")
            return None
    bar.note(f"resuming {output} with its {len(profile.measurements)} measurements")
    return profile


def _shown(device: Device) -> str:
    return f"{device.name}, {device.num_threads} thread(s)"
