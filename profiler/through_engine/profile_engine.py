"""profile_engine(): times whole passes on an installed serving engine, at all layers of a model and at few, in turn."""

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import torch

from exeplan.core.models.layer_costs import model_parameters
from exeplan.core.models.model import DTYPE_BYTES, FP8, ModelSpec
from exeplan.core.profile import Profile, save_profile
from exeplan.errors import InputError
from exeplan.profiler.measuring.device import available_memory, check_device, measure_device, versions
from exeplan.profiler.through_engine.batches import Batch, DecodeBatch, PrefillBatch, Reach, batches
from exeplan.profiler.through_engine.decompose import Timed, rows_of
from exeplan.profiler.through_engine.driver import EngineDriver
from exeplan.progress import Progress
from exeplan.runner.compute.weights.precision import activation_dtype

ENGINES = ("vllm",)
_SEQS = {"cpu": 32, "cuda": 256}
_CONTEXT = 2048
_TOKENS = {"cpu": 2048, "cuda": 8192}
_FEW_LAYERS = 1
_LEAST_ROUNDS = 3
_PASS_SHARE = 1 / 20
"""Largest share of the budget that a batch may take."""
_KV_SHARE = 0.25
"""Of the device's memory, for keys and values of the measured batches."""
_CUDA_SETTINGS = {"gpu_memory_utilization": 0.05}
"""vLLM refuses to start where less than this share is free, and takes what it needs where its KV cache has a size."""
_RUNTIME_BYTES = 1 << 30
"""Of the engine itself on a GPU."""


def profile_engine(
    spec: ModelSpec,
    engine: str,
    *,
    python: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    output: Path,
    budget_seconds: float = 60.0,
    max_num_seqs: int | None = None,
    max_context: int | None = None,
    num_threads: int = 1,
    progress: bool = True,
) -> Profile:
    """Measures the model on the engine that the interpreter `python` has (this one's by default), with random weights.

    The budget is for passes; the engine's two starts come on top. Raises InputError where it cannot run the model.
    """
    _check(spec, engine, dtype)
    place = check_device(device)
    reach = Reach.within(
        spec,
        dtype,
        kv_bytes=_KV_SHARE * available_memory(place),
        max_num_seqs=max_num_seqs or _SEQS[place.type],
        max_context=min(max_context or _CONTEXT, spec.max_context),
        max_num_tokens=_TOKENS[place.type],
    )
    torch.set_num_threads(num_threads)
    environment = _environment(place.type, num_threads)
    settings = _CUDA_SETTINGS if place.type == "cuda" else {}
    with Progress(f"profile {spec.name} on {engine}", shown=progress) as bar, ExitStack() as drivers:
        layers = f"{_FEW_LAYERS} and {spec.num_layers} layers"
        bar.note(f"starting {engine} twice, with {layers} and random weights, which takes minutes")
        started = [
            drivers.enter_context(
                EngineDriver(
                    python or sys.executable,
                    spec,
                    layers,
                    dtype=dtype,
                    reach=reach,
                    environment=environment,
                    settings=settings,
                )
            )
            for layers in (_FEW_LAYERS, spec.num_layers)
        ]
        few, whole = started
        version = {driver.version() for driver in started}.pop()
        found = measure_device(device, activation_dtype(dtype))
        wanted = _affordable(few, whole, batches(reach), budget_seconds, bar)
        samples: dict[Batch, list[tuple[float, float]]] = defaultdict(list)
        begun, rounds = time.monotonic(), 0
        while rounds < _LEAST_ROUNDS or time.monotonic() - begun < budget_seconds:
            for number, batch in enumerate(wanted, start=1):
                samples[batch].append((_seconds(whole, batch), _seconds(few, batch)))
                spent = time.monotonic() - begun
                share = min(spent / budget_seconds, (rounds + number / len(wanted)) / _LEAST_ROUNDS)
                bar.update(share, budget_seconds - spent, f"round {rounds + 1}")
            rounds += 1
            bar.round(f"round {rounds}, {time.monotonic() - begun:.0f} s")
    profile = Profile(
        model=spec,
        dtype=dtype,
        device=found,
        weight_bytes=model_parameters(spec) * DTYPE_BYTES[dtype],
        workspace_bytes=_workspace_bytes(spec, reach, place.type),
        measurements=rows_of(_medians(samples), num_layers=spec.num_layers, few_layers=_FEW_LAYERS),
        source=f"measured with {engine}",
        versions={**versions(), engine: version},
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    save_profile(profile, output)
    return profile


def _check(spec: ModelSpec, engine: str, dtype: str) -> None:
    if engine not in ENGINES:
        raise InputError(f"profiles are measured on the engine {' or '.join(ENGINES)}, found '{engine}'")
    if spec.is_encoder_decoder:
        raise InputError(f"{spec.name} has an encoder and a decoder, which vLLM does not run")
    if spec.quantization or dtype == FP8:
        raise InputError("quantized weights are not measured through vLLM: take --dtype bfloat16 or a --datasheet")
    if spec.layers_differ:
        raise InputError(f"the layers of {spec.name} differ, and fewer of them would be another mixture of them")
    if spec.num_layers <= _FEW_LAYERS:
        raise InputError(f"{spec.name} has one layer; layers are timed by the difference that more of them make")


def _environment(kind: str, num_threads: int) -> dict[str, str]:
    """As `exeplan export` starts it."""
    if kind == "cuda":
        return {}
    return {"OMP_NUM_THREADS": str(num_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _affordable(
    few: EngineDriver, whole: EngineDriver, wanted: Sequence[Batch], budget_seconds: float, bar: Progress
) -> list[Batch]:
    """Runs every batch once, as an engine compiles and allocates at first, and leaves out those that take too long, and
    larger ones than these."""
    kept: list[Batch] = []
    slow: list[Batch] = []
    for batch in sorted(wanted, key=lambda batch: batch.tokens):
        if any(batch.covers(other) for other in slow):
            continue
        _seconds(few, batch), _seconds(whole, batch)
        started = time.monotonic()
        _seconds(whole, batch)
        (kept if time.monotonic() - started <= budget_seconds * _PASS_SHARE else slow).append(batch)
        bar.update(len(kept) / len(wanted) / _LEAST_ROUNDS, budget_seconds, "warming up")
    if slow:
        least = min(slow, key=lambda batch: batch.tokens)
        bar.note(
            f"left out: {least}, and larger batches, which take over {budget_seconds * _PASS_SHARE:.1f} s; a larger "
            "--budget has them"
        )
    if {type(batch) for batch in kept} != {DecodeBatch, PrefillBatch}:
        raise InputError(f"no pass takes less than {budget_seconds * _PASS_SHARE:.1f} s; give a larger --budget")
    return kept


def _seconds(driver: EngineDriver, batch: Batch) -> float:
    """Of a pass."""
    if isinstance(batch, DecodeBatch):
        return median(driver.decode_seconds(batch))
    return driver.prefill_seconds(batch)


def _medians(samples: Mapping[Batch, Sequence[tuple[float, float]]]) -> dict[Batch, Timed]:
    found = {}
    for batch, pairs in samples.items():
        whole, few = np.array(pairs).T
        low, middle, high = np.quantile(whole, (0.25, 0.5, 0.75))
        found[batch] = Timed(float(middle), float(np.median(few)), len(pairs), float((high - low) / 2 / middle))
    return found


def _workspace_bytes(spec: ModelSpec, reach: Reach, kind: str) -> int:
    """Activations of the largest pass, and the runtime's own memory on a GPU."""
    widest = 2 * spec.hidden_size + 2 * spec.intermediate_size
    rows = 4 * (reach.max_num_tokens * widest + reach.max_num_seqs * spec.vocab_size)
    return rows + (_RUNTIME_BYTES if kind == "cuda" else 0)
