"""What the sections of the GPU benchmark share: device, sizes, measured ceilings, a clock, and timing.

A smoke setting has a toy's sizes, a CPU and the kernels' references: it proves that a section runs, and measures
nothing. Work is timed as a captured CUDA graph, as the engine runs it, over several sets of inputs that together exceed
the cache.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exeplan.core.models.model import ModelSpec, load_model_spec, model_spec
from exeplan.kernels.products.fp8_linear import multiplies_fp8
from exeplan.kernels.select import REFERENCE, Kernels, kernels_for
from exeplan.profiler.measuring.captured_decode import replay_seconds
from exeplan.profiler.measuring.device import cache_bytes, synchronize
from exeplan.runner.compute.passes.graph_capture import GraphCapturer

_MOST_SETS = 16
TOY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates that were measured on this device."""

    copy_bytes_per_second: float
    """Read and written, counted both."""
    flops_per_second: float
    """Of a large matrix product of random numbers."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where, how large, and what it is measured against."""

    place: torch.device
    smoke: bool
    spec: ModelSpec
    dtype: str
    cache_bytes: int
    ceilings: Ceilings | None = None

    @property
    def kernels(self) -> Kernels:
        return REFERENCE if self.smoke else kernels_for(self.place, self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def in_fp8(self) -> bool:
        """Whether the GPU has kernels over 8-bit floats."""
        return multiplies_fp8(self.place)

    def size(self, full: int, toy: int) -> int:
        return toy if self.smoke else full

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype == torch.float8_e4m3fn:  # Of which torch draws none.
            return self.random(*shape).to(dtype)
        return torch.randn(shape, dtype=dtype or self.torch_dtype, device=self.place)

    def share(self, seconds: float, *, num_bytes: float = 0.0, flops: float = 0.0) -> tuple[float, str]:
        """Of the ceiling that binds, what was reached, and which it is."""
        assert self.ceilings is not None
        moving, computing = num_bytes / self.ceilings.copy_bytes_per_second, flops / self.ceilings.flops_per_second
        return max(moving, computing) / seconds, "bandwidth" if moving >= computing else "rate"


@dataclass(kw_only=True)
class Section:
    """What a section found: a table, and the figures behind it."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, cells: tuple[str, ...], **figures: Any) -> None:
        self.rows.append(cells)
        self.figures.append(figures)


class Case(NamedTuple):
    """One kernel at one size; inputs are made several times."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    ours: Callable[..., object]
    theirs: Callable[..., object] | None
    """Torch's own way, over the same inputs."""
    num_bytes: float
    flops: float = 0.0


class Clock:
    """How much of a section's time is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def setting_for(*, smoke: bool) -> Setting:
    """The GPU of this machine, or the toy on a CPU."""
    if smoke:
        spec = model_spec(TOY, name="toy")
        return Setting(place=torch.device("cpu"), smoke=True, spec=spec, dtype="float32", cache_bytes=2**16)
    place = torch.device("cuda", 0)
    torch.cuda.set_device(place)
    spec = load_model_spec("llama-3.1-8b")
    return Setting(place=place, smoke=False, spec=spec, dtype="bfloat16", cache_bytes=cache_bytes(place))


def measure_ceilings(setting: Setting) -> Ceilings:
    """The better of a few runs of a large copy, and of a large product."""
    source = setting.random(setting.size(2**31, 2**16), dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copied = min(seconds_of([lambda: target.copy_(source)], setting) for _ in range(3))
    size = setting.size(8192, 64)
    left, right = setting.random(size, size), setting.random(size, size)
    product = torch.empty_like(left)
    multiplied = min(seconds_of([lambda: torch.mm(left, right, out=product)], setting) for _ in range(3))
    return Ceilings(copy_bytes_per_second=2 * source.nbytes / copied, flops_per_second=2 * size**3 / multiplied)


def num_sets(setting: Setting, num_bytes: float) -> int:
    """Sets of inputs that together are four times the cache."""
    return max(1, min(_MOST_SETS, math.ceil(4 * setting.cache_bytes / max(num_bytes, 1))))


def seconds_of(works: Sequence[Callable[[], object]], setting: Setting) -> float:
    """Mean seconds of one work, all of them captured in one graph one after another."""

    def run() -> tuple[Tensor, ...]:
        for work in works:
            found = work()
        return (found,) if isinstance(found, Tensor) else ()

    replay = GraphCapturer(setting.place).capture(run).replay
    seconds = (
        seconds_as_it_comes(replay, setting, repeats=1) if setting.smoke else replay_seconds(replay, setting.place)
    )
    return seconds / len(works)


@torch.inference_mode()
def seconds_as_it_comes(work: Callable[[], object], setting: Setting, *, repeats: int = 5) -> float:
    """The median of a few synchronized runs."""
    work()
    found = []
    for _ in range(repeats):
        synchronize(setting.place)
        start = time.perf_counter()
        work()
        synchronize(setting.place)
        found.append(time.perf_counter() - start)
    return median(found)


def give_back(setting: Setting) -> None:
    """Frees the memory of the previous section."""
    gc.collect()
    if setting.place.type == "cuda":
        torch.cuda.empty_cache()
