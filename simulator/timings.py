"""A profile's measurements as curves, made once and used by every placement: layers by shard, links, host.

Between measured points times are interpolated (`curves.py`). Not here: what a stage is made of (`cost.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.profile import Measurement, Profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.simulator.corrected_rows import corrected_rows, prefill_factor_of
from exeplan.simulator.curves import Curve, curve_of, surface_of
from exeplan.workload.length_law import LengthLaw

_QUADRATURE = 9
"""Points of the prompt-length law at which a pass with prefills is timed."""
_LAWS = 256
"""Prompt laws whose mean attention is cached: a search repeats them."""


class Shard:
    """One device's share of a layer, and of what stands around the layers, under one sharding.

    With attention data parallelism `rest` is without the routed experts, which are in `experts`, of all ranks' tokens.
    """

    def __init__(self, rows: Sequence[Measurement], sharding: Sharding, *, prefill_factor: float = 1.0) -> None:
        """`prefill_factor` is on what passes with prefills take for their products and for attention to prompts."""
        plain = Sharding(sharding.tensor_parallel_size)
        own = [m for m in rows if m.sharding == plain]
        if not any(m.op == "rest" for m in own):
            sizes = sorted({m.tensor_parallel_size for m in rows if m.op == "rest" and m.expert_parallel_size == 1})
            raise InputError(
                f"the profile has tensor-parallel sizes {', '.join(map(str, sizes))}, not {plain.tensor_parallel_size}"
            )
        products, self.experts = own, dict[str, Curve]()
        ranks = sharding.data_parallel_size > 1
        if sharding != plain:
            further = [m for m in rows if m.sharding == sharding and m.op == ("experts" if ranks else "rest")]
            if not further:
                raise InputError(
                    f"the profile has no expert_parallel_size {sharding.expert_parallel_size} at tensor_parallel_size "
                    f"{sharding.tensor_parallel_size} and data_parallel_size {sharding.data_parallel_size}"
                )
            products = own if ranks else further
        around = {op: [m for m in own if m.op == op] or [m for m in rows if m.op == op] for op in ("embed", "head")}
        factors = {"prefill": prefill_factor, "decode": 1.0}
        self.rest = {
            phase: curve_of(_times(_either(products, "dense" if ranks else "rest", phase), factor), "num_tokens")
            for phase, factor in factors.items()
        }
        if ranks:
            self.experts = {
                phase: curve_of(_times(_either(further, "experts", phase), factor), "num_tokens")
                for phase, factor in factors.items()
            }
        self.embed = curve_of(around["embed"], "num_tokens")
        self.head = curve_of(around["head"], "num_seqs")
        self.decode_attention = surface_of(_either(own, "attention", "decode"), "context_tokens")
        self.prefill_attention = surface_of(_times(_either(own, "attention", "prefill"), prefill_factor), "num_tokens")
        # A replay asks for one scalar at a time, thousands of times: the same interpolation without numpy's overhead.
        self.decode_curve = cache(self.decode_attention.at_num_seqs)
        self.prefill_curve = cache(self.prefill_attention.at_num_seqs)
        self.prefill_shares = lru_cache(_LAWS)(self._prefill_shares)

    def _prefill_shares(self, prompts: LengthLaw) -> Floats:
        """The mean attention over a law of prompts, on the curve of each measured number of sequences."""
        return np.array([curve(prompt_points(prompts)).mean() for curve in self.prefill_attention.curves])


class Timings:
    """A profile's measurements as curves; made once, used by every placement."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.rows = _times(corrected_rows(profile), profile.calibration)
        controls = [m for m in self.rows if m.op == "control"]
        self.control = curve_of(controls, "num_seqs") if controls else None
        """Of iterations run by worker processes; None where the profile has no such rows."""
        self.overhead = cache(self._overhead)
        """By phase and tensor parallel size: of that size, else of the next smaller one, else of the smallest."""
        self.shard = cache(self._shard)
        """By sharding, and whether the other devices of a host compute at the same time."""
        self.all_reduce = cache(self._all_reduce)
        self.all_to_all = cache(self._all_to_all)
        self.send = cache(self._send)

    @cached_property
    def of_kept_rows(self) -> "Timings":
        """Of passes that keep their rows until all are done; these where the profile does not tell them apart."""
        profile, factor = self.profile, self.profile.kept_rows_calibration
        if factor is None:
            return self
        prefills = profile.prefill_calibration * profile.calibration / factor
        return Timings(replace(profile, calibration=factor, prefill_calibration=prefills, kept_rows_calibration=None))

    def _overhead(self, phase: str, size: int) -> Curve:
        every = self.profile.pass_seconds * self.profile.calibration
        rows = _either(self.rows, "overhead", phase)
        sizes = {m.tensor_parallel_size for m in rows}
        nearest = max((timed for timed in sizes if timed <= size), default=min(sizes, default=size))
        of_size = (m for m in rows if m.tensor_parallel_size == nearest)
        return curve_of((replace(m, seconds=m.seconds + every) for m in of_size), "num_seqs")

    def _shard(self, sharding: Sharding, multi_device: bool = False) -> Shard:
        slower = self.slowdown(sharding.num_devices) if multi_device else 1.0
        return Shard(_times(self.rows, slower), sharding, prefill_factor=prefill_factor_of(self.profile))

    def slowdown(self, size: int) -> float:
        """A device's time in a plan for several, over that in a process alone; 1 where it was not measured."""
        passes = [m for m in self.rows if m.op == "pass"]
        nearest = max((m.tensor_parallel_size for m in passes if m.tensor_parallel_size <= size), default=size)
        found = {m.phase: m.seconds for m in passes if m.tensor_parallel_size == nearest}
        return found["together"] / found["alone"] if len(found) == 2 else 1.0

    def _all_reduce(self, size: int, link: str) -> Curve | None:
        rows = [m for m in self.rows if (m.op, m.phase, m.tensor_parallel_size) == ("all_reduce", link, size)]
        return curve_of(rows, "bytes") if rows else None

    def _all_to_all(self, num_devices: int, link: str) -> Curve | None:
        rows = [m for m in self.rows if (m.op, m.phase, m.tensor_parallel_size) == ("all_to_all", link, num_devices)]
        return curve_of(rows, "bytes") if rows else None

    def _send(self, link: str) -> Curve | None:
        rows = [m for m in self.rows if (m.op, m.phase) == ("send", link)]
        return curve_of(rows, "bytes") if rows else None


@lru_cache(_LAWS)
def prompt_points(prompts: LengthLaw) -> Floats:
    """A few points of the prompt law with equal weights, exact in the mean."""
    return prompts.slice_means(_QUADRATURE)


def _times(rows: Sequence[Measurement], factor: float) -> list[Measurement]:
    """The rows with their seconds times a factor."""
    return list(rows) if factor == 1.0 else [replace(m, seconds=m.seconds * factor) for m in rows]


def _either(rows: Sequence[Measurement], op: str, phase: str) -> list[Measurement]:
    return [m for m in rows if m.op == op and m.phase in ("", phase)]
