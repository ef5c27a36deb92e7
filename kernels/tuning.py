"""Tuning: the fastest of a kernel's few configurations on this GPU, measured once and stored in a file.

A kernel lists its configurations, the best guess first. The key is what decides between them (dtype, head size, ...):
the first launch with a new key times all of them, later launches and processes read the result. Without a result the
first is taken where timing is impossible (the interpreter, CUDA graph capture) or disabled (`untimed`).
Not here: a search over more configurations, which would cost more than it gains.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from exeplan.errors import InputError
from exeplan.files import read_json, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The tile sizes of a kernel's programs, and their compile options."""

    rows: int = 16
    """Rows of queries of a program."""
    columns: int = 64
    """Keys, or columns of the matrix, that it reads at a time."""
    num_warps: int = 4
    num_stages: int = 2
    library: bool = False
    """Torch's own attention instead, which ignores the numbers above."""


class AttentionConfigs(NamedTuple):
    """The configurations of an attention kernel, by its operands' use of registers and shared memory.

    Each was compiled for sm_90 with heads of that width, and spills no registers.
    """

    usual: tuple[Config, ...]
    """For 16-bit elements and heads of up to 128."""
    wide: tuple[Config, ...]
    """For 16-bit elements and heads of 256."""
    exact: tuple[Config, ...]
    """For float32, whose products do not use the matrix units: larger tiles compile for a minute, and spill."""

    def of(self, dtype: torch.dtype, head_dim: int) -> tuple[Config, ...]:
        if dtype == torch.float32:
            return self.exact
        return self.usual if head_dim <= 128 else self.wide


_untimed: list[None] = []
"""One entry for each active `untimed`."""


@contextmanager
def untimed() -> Iterator[None]:
    """Disables timing, for launches unlike real ones: an unknown key uses the first configuration and stays unknown."""
    _untimed.append(None)
    try:
        yield
    finally:
        _untimed.pop()


def best_config(
    kernel: str,
    key: Sequence[object],
    configs: Sequence[Config],
    launch: Callable[[Config], object],
    device: torch.device,
) -> Config:
    """The fastest of `configs` for a kernel that may be launched repeatedly with the same result."""
    if device.type != "cuda":
        return configs[0]
    return _table(device).best(f"{kernel} {' '.join(map(str, key))}", configs, functools.partial(_seconds, launch))


class TuningTable:
    """The best configuration by key, in a JSON file; a damaged or missing file counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.known = read_json(path)
        except InputError:
            self.known = {}
        self._chosen: dict[str, Config] = {}

    def best(self, key: str, configs: Sequence[Config], seconds: Callable[[Config], float | None]) -> Config:
        """The known one if it is still listed, else the fastest by `seconds`; the first where that gives None."""
        if key in self._chosen:
            return self._chosen[key]
        for config in configs:
            if self.known.get(key) == asdict(config):
                return self._chosen.setdefault(key, config)
        times = [seconds(config) for config in configs]
        measured = [(time, number) for number, time in enumerate(times) if time is not None]
        if not measured:
            return configs[0]
        best = configs[min(measured)[1]]
        self._chosen[key], self.known[key] = best, asdict(best)
        write_text(self.path, json.dumps(self.known, indent=1, sort_keys=True) + "\n")
        return best


@functools.cache
def _table(device: torch.device) -> TuningTable:
    import triton

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = torch.cuda.get_device_name(device).replace(" ", "-")
    return TuningTable(home / "exeplan" / f"kernels-{name}-triton-{triton.__version__}.json")


def _seconds(launch: Callable[[Config], object], config: Config) -> float | None:
    """The median time of a launch; None where it cannot be timed or needs too much shared memory."""
    if _untimed or torch.cuda.is_current_stream_capturing():
        return None
    from triton import testing
    from triton.runtime.errors import OutOfResources

    try:
        return float(testing.do_bench(lambda: launch(config), warmup=5, rep=20, return_mode="median"))
    except OutOfResources:
        return None
