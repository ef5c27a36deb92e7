"""Picks under bounds: exact predictions break none and lose nothing, optimistic ones break, and a margin mends that."""

from dataclasses import replace

import numpy as np

from benchmarks.silicon.corrected_picks import RISK, Tally, picks
from benchmarks.silicon.pooled_fit import Sample
from benchmarks.silicon.rows import Row, spread_bounds, tight_bounds
from exeplan.core.correction import THETA, Correction
from exeplan.profiler.calibration.law import Observation
from exeplan.profiler.calibration.pooled_effects import PlacementName

NAME = PlacementName(
    engine="vllm", device="h100-80gb", model="m", dtype="fp8", family="f", kind="dense", tensor_parallel_size=1
)
LAW = Correction(deployments=9, shared=("engine",), spreads={"latency": 0.15, "ttft": 0.1, "tpot": 0.1})


def runs(slower: float) -> list[Sample]:
    """Six loads, each run measured at some times what is predicted."""
    moves = np.zeros((2, len(THETA)))
    return [
        Sample(
            Row(
                engine="vllm",
                model="m",
                dtype="fp8",
                system="h100_sxm",
                input_tokens=100,
                output_tokens=101,
                concurrency=4 * 2**number,
                tensor_parallel_size=1,
                ttft=0.1,
                tpot=0.01 * 1.4**number,
            ),
            NAME,
            Observation(np.log([slower, slower]), moves),
        )
        for number in range(6)
    ]


def test_exact_predictions_lose_nothing_and_a_margin_costs_the_best_on_the_bound() -> None:
    assert picks(runs(1.0), LAW, tight_bounds, risk=None) == Tally(6, 0, 0, [1.0] * 6)
    careful = picks(runs(1.0), LAW, tight_bounds, risk=RISK)
    assert (careful.broken, careful.refused) == (0, 2)
    assert all(share < 1 for share in careful.kept)


def test_optimistic_predictions_break_bounds_that_a_margin_keeps() -> None:
    for bounds in (tight_bounds, spread_bounds):
        assert picks(runs(1.45), LAW, bounds, risk=None).broken > 0
        assert picks(runs(1.45), LAW, bounds, risk=RISK).broken == 0


def test_a_wider_spread_keeps_less() -> None:
    wide = replace(LAW, spreads={**LAW.spreads, "latency": 0.3})
    narrow, wider = (picks(runs(1.0), law, spread_bounds, risk=RISK) for law in (LAW, wide))
    assert wider.refused > narrow.refused
    assert np.mean(wider.kept) <= np.mean(narrow.kept)
