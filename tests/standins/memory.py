"""A stand-in for a GPU's memory: starts the product on it without a byte of it, and counts what would be taken.

Tensors are torch's fakes: shapes and dtypes on a GPU that is not there. Every storage counts from the operation that
makes it until it is freed, in the allocator's blocks of 512 bytes; kernels are not launched, what their host code
allocates is; a captured graph's pool keeps the peak of its capture. `torch.cuda`'s counts of free, reserved and peak
memory are read from there, so that the product's own measurement of its workspace runs unchanged.

Not here: what the allocator loses between its blocks, and the driver's own memory, which `taken` stands for.
"""

import contextlib
import importlib
import pkgutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import exeplan.kernels
from exeplan.kernels import select, tuning
from exeplan.kernels.to_device import to_device
from exeplan.runner.compute.passes.graph_capture import GraphCapturer

_BLOCK = 512
_MULTIPROCESSORS = 132
"""Of an H100; attention over blocks has a result for each part of a context, more of them on more multiprocessors."""


class Accounting(TorchDispatchMode):
    """The memory of one GPU."""

    def __init__(self, total: int, taken: int) -> None:
        super().__init__()
        self.total, self.taken = total, taken
        self.live = self.peak = self.graphs = 0
        self._known: set[int] = set()

    @property
    def free(self) -> int:
        return self.total - self.taken - self.live - self.graphs

    @property
    def most(self) -> int:
        """Bytes in use at the peak."""
        return self.taken + self.peak + self.graphs

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._known:
            return
        num_bytes = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._known.add(key)
        self.live += num_bytes
        if self.live + self.graphs + self.taken > self.total:
            self.live -= num_bytes
            self._known.discard(key)
            raise torch.cuda.OutOfMemoryError(f"{num_bytes} bytes where {self.free} are free")
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, num_bytes).atexit = False

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes

    def captured(self, function: Callable[[], tuple[Tensor, ...]]) -> SimpleNamespace:
        """Outputs stay; what else the largest capture needed stays in the pool of all graphs."""
        seen = self.peak
        self.reset_peak()
        outputs = function()
        self.graphs = max(self.graphs, self.peak - self.live)
        self.peak = max(seen, self.peak)
        return SimpleNamespace(outputs=outputs, replay=lambda: outputs)


@dataclass(frozen=True)
class Ranks:
    """The group of one of several ranks, as far as memory sees it."""

    size: int
    rank: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, -1)

    def muted(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Indexing(TorchFunctionMode):
    """Indexing enters a device guard, which a build of torch without CUDA does not have."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and args[0].device.type == "cuda":
            return self._get(*args)
        if name == "__setitem__" and args[0].device.type == "cuda":
            return None  # Of its memory nothing changes.
        if name == "copy_" and args[0].device.type == "cuda":
            return torch.ops.aten.copy_(args[0], args[1])
        if name == "__invert__" and args[0].device.type == "cuda":
            return torch.bitwise_not(args[0])
        if name == "contiguous" and args[0].device.type == "cuda":
            return args[0] if args[0].is_contiguous() else torch.ops.aten.clone(args[0])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _get(x: Tensor, index: Any) -> Tensor:
        with unset_fake_temporarily(), _disable_current_modes():
            probe = torch.empty_strided(x.size(), x.stride(), device="meta")
            chosen = probe[tuple(_on_meta(part) for part in (index if isinstance(index, tuple) else (index,)))]
        if chosen.untyped_storage()._cdata != probe.untyped_storage()._cdata:
            return torch.empty(chosen.shape, dtype=x.dtype, device=x.device)
        return torch.as_strided(x, chosen.size(), chosen.stride(), x.storage_offset() + chosen.storage_offset())


def _on_meta(part: Any) -> Any:
    return torch.empty(part.shape, dtype=part.dtype, device="meta") if isinstance(part, Tensor) else part


class _NotLaunched:
    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: None


_KERNELS = ("_activate", "_expert_product", "_quantize", "_copy_slots", "_mixed", "_best_of_part", "_best_of_row")
_KERNELS += ("_norm", "_decode", "_join", "_prefill", "_rotate", "_draw", "_slot")


@contextlib.contextmanager
def fake_gpu(total: int, *, taken: int = 0) -> Iterator[Accounting]:
    """A GPU of `total` bytes, `taken` of which the driver and libraries have."""
    memory = Accounting(total, taken)

    def fake_to_device(values: Any, device: torch.device) -> Tensor:
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=device)

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    cuda = {
        "mem_get_info": lambda device=None: (memory.free, memory.total),
        "memory_reserved": lambda device=None: memory.live,
        "max_memory_reserved": lambda device=None: memory.peak,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": object,
        "Stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(GraphCapturer, "capture", lambda self, function: memory.captured(function))
        patch.setattr("exeplan.kernels.attention.paged_attention._num_multiprocessors", lambda device: _MULTIPROCESSORS)
        patch.setattr(
            "exeplan.runner.compute.weights.checkpoint.RandomWeights._draw",
            lambda self, name, sizes: torch.empty(sizes, dtype=self.dtype, device=self.device),
        )
        # Takes half of a start's time, and nothing here is freed by it.
        patch.setattr("exeplan.runner.compute.gpu_memory.gc", SimpleNamespace(collect=lambda: None))
        # Ranks of a stage have equal memory: what one can, all can.
        patch.setattr("exeplan.runner.compute.gpu_memory._on_all_ranks", lambda runner, yes: yes)
        patch.setattr("exeplan.runner.compute.gpu_memory._least_on_all_ranks", lambda runner, number: number)
        patch.setattr(tuning, "_table", lambda device: SimpleNamespace(best=lambda key, configs, seconds: configs[0]))
        patch.setattr(
            "exeplan.runner.compute.model_runner.kernels_for", lambda device, dtype: select._table("cuda", dtype)
        )
        for package in (exeplan.kernels, importlib.import_module("exeplan.runner.compute")):
            for file in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                module = importlib.import_module(file.name)
                for name in _KERNELS if package is exeplan.kernels else ():
                    if name in vars(module):
                        patch.setattr(module, name, _NotLaunched())
                if vars(module).get("to_device") is to_device:
                    patch.setattr(module, "to_device", fake_to_device)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes its values on the CPU.
        try:
            with FakeTensorMode(), memory, _Indexing():
                yield memory
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
