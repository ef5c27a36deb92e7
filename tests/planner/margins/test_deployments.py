"""A deployment without own errors has the law of those that were measured, one with many has its own; and the share of
bounds that break on deployments that no error was seen of stays near the stated risk."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.profile import Profile
from exeplan.errors import InputError
from exeplan.planner.margins.deployments import (
    Deployment,
    deployment_law,
    deployment_of,
    errors_of,
    shipped_deployments,
)
from exeplan.planner.margins.risk import QUANTITIES

FAMILY_SPREAD, DEPLOYMENT_SPREAD, RUN_SPREAD = 0.05, 0.03, 0.02


def deployment(logs: Sequence[float], *, engine: str = "a", size: int = 1, kind: str = "tables") -> Deployment:
    return Deployment(
        kind=kind,
        engine=engine,
        device="gpu",
        model="m",
        dtype="bfloat16",
        tensor_parallel_size=size,
        errors={"latency": errors_of(logs)} if len(logs) else {},
    )


NEW = deployment([], engine="new")


def world(rng: np.random.Generator, *, families: int = 6, sizes: int = 4, runs: int = 20) -> list[Deployment]:
    found = []
    for family in range(families):
        centre = rng.normal(0, FAMILY_SPREAD)
        for size in range(sizes):
            own = centre + rng.normal(0, DEPLOYMENT_SPREAD)
            logs = rng.normal(own, RUN_SPREAD, runs).tolist()
            found.append(deployment(logs, engine=str(family), size=size))
    return found


def test_without_own_errors_the_law_is_that_of_the_measured_deployments() -> None:
    known = world(np.random.default_rng(0), families=40, sizes=8)
    law = deployment_law(NEW, "latency", known)
    spread = math.hypot(FAMILY_SPREAD, DEPLOYMENT_SPREAD, RUN_SPREAD)
    assert law.spread == pytest.approx(spread, rel=0.25)
    assert abs(law.logs[0]) < 0.02


def test_few_own_errors_move_the_law_little_and_many_replace_it() -> None:
    rng = np.random.default_rng(1)
    known = world(rng)
    general = deployment_law(NEW, "latency", known).logs[0]
    centre, own = general + 0.2, 0.004
    laws = [
        deployment_law(NEW, "latency", known, own_logs=rng.normal(centre, own, count)) for count in (1, 4, 400, 4000)
    ]
    moved = [(float(np.mean(law.logs)) - general) / 0.2 for law in laws]
    assert moved == sorted(moved)
    assert 0.5 < moved[0] < 0.97
    assert moved[-1] == pytest.approx(1, abs=0.01)
    assert [law.spread for law in laws] == sorted((law.spread for law in laws), reverse=True)
    assert laws[-1].spread == pytest.approx(own, rel=0.1)
    assert laws[0].spread > 3 * own


def test_a_noisy_run_says_less_about_its_deployment() -> None:
    # Runs spread more than deployments: one run is mostly that.
    rng = np.random.default_rng(2)
    known = [
        deployment(rng.normal(rng.normal(0, 0.01), 0.1, 30).tolist(), engine=str(n), size=k)
        for n in range(6)
        for k in range(3)
    ]
    moved = deployment_law(NEW, "latency", known, own_logs=[0.3]).logs[0]
    assert moved < 0.1


def test_an_engine_that_is_always_slower_moves_the_centre_of_its_own_deployments_alone() -> None:
    rng = np.random.default_rng(3)
    others = [deployment(rng.normal(0, 0.02, 20).tolist(), engine=str(n), size=k) for n in range(5) for k in range(4)]
    slow = [deployment(rng.normal(0.15, 0.02, 20).tolist(), engine="slow", size=k) for k in range(4)]
    of_slow = deployment_law(deployment([], engine="slow", size=8), "latency", [*others, *slow])
    assert of_slow.logs[0] == pytest.approx(0.15, abs=0.02)
    assert abs(deployment_law(NEW, "latency", [*others, *slow]).logs[0]) < 0.02


def test_predictions_that_were_far_too_slow_widen_nothing() -> None:
    known = world(np.random.default_rng(4))
    fast = [deployment([-0.6], engine="0", size=9)]
    before, after = (deployment_law(NEW, "latency", group) for group in (known, [*known, *fast]))
    assert after.margin(0.01) == pytest.approx(before.margin(0.01), rel=0.15)


# The spread of six families, seen from above only, is known to a half.
@pytest.mark.parametrize(("families", "risk", "most"), [(6, 0.01, 0.03), (6, 0.05, 0.08), (16, 0.01, 0.02)])
def test_bounds_of_unseen_deployments_break_at_about_the_stated_risk(families: int, risk: float, most: float) -> None:
    rng, broken = np.random.default_rng(5), []
    for _ in range(400):
        margin = deployment_law(NEW, "latency", world(rng, families=families)).margin(risk)
        errors = (rng.normal(0, s, 50) for s in (FAMILY_SPREAD, DEPLOYMENT_SPREAD, RUN_SPREAD))
        broken.append(np.mean(np.exp(sum(errors)) > 1 + margin))
    assert risk / 4 < np.mean(broken) < most


def test_bounds_of_a_known_engine_break_at_about_the_stated_risk_with_margins_of_its_own_family() -> None:
    """Of 800 deployments 6.7 % of the bounds break at a risk of 5 %, with a standard error of 0.6 %: the spreads are
    those of few."""
    broken, margins, rngs = [], [], [np.random.default_rng(6 + number) for number in range(4)]
    for left_out in np.repeat(range(4), 200):
        rng = rngs[left_out]
        known = world(rng)
        new = next(d for d in known if d.engine == "0" and d.tensor_parallel_size == left_out)
        others = [d for d in known if d.name != new.name]
        margin = deployment_law(replace(new, errors={}), "latency", others).margin(0.05)
        mean = new.errors["latency"].mean
        broken.append(np.mean(np.exp(rng.normal(mean, RUN_SPREAD, 20)) > 1 + margin))
        margins.append(margin)
    assert 0.04 < np.mean(broken) < 0.075
    assert np.mean(margins) < 1.3 * 1.645 * math.hypot(DEPLOYMENT_SPREAD, RUN_SPREAD)


def test_a_profile_says_which_errors_are_like_its_own(profile: Profile) -> None:
    sources = {
        "measured": ("measured", "exeplan"),
        "datasheet a40-48gb, links of cluster a40": ("datasheet", ""),
        "datasheet a40-48gb with vllm": ("datasheet with an engine", "vllm"),
        "imported aiconfigurator": ("tables", ""),
        "imported aiconfigurator with sglang": ("tables with an engine", "sglang"),
    }
    for source, (kind, engine) in sources.items():
        found = deployment_of(replace(profile, source=source), 2)
        assert (found.kind, found.engine, found.tensor_parallel_size) == (kind, engine, 2)


def test_a_profile_of_an_unknown_source_is_refused(profile: Profile) -> None:
    with pytest.raises(InputError, match="must begin with measured, imported, datasheet for a margin, found 'a guess'"):
        deployment_of(replace(profile, source="a guess"), 1)


@pytest.mark.parametrize(
    "kind", ["measured", "tables", "tables with an engine", "datasheet", "datasheet with an engine"]
)
def test_errors_are_shipped_for_every_kind_of_profile(kind: str) -> None:
    new = replace(NEW, kind=kind)
    for quantity in QUANTITIES:
        law = deployment_law(new, quantity, shipped_deployments())
        assert 0.03 < law.margin(0.01) < 6
        assert law.count > 100
        assert "no run of this deployment" in law.source


def test_an_unseen_device_gets_the_spread_between_deployments_not_that_of_one_demo() -> None:
    demo = [d for d in shipped_deployments() if d.kind == "measured"]
    new = replace(NEW, kind="measured")
    assert deployment_law(new, "latency", shipped_deployments()).count > 10 * sum(
        d.errors["latency"].count for d in demo
    )


def test_a_kind_without_measured_deployments_is_refused() -> None:
    with pytest.raises(InputError, match="no other deployment has errors of ttft for a profile of the kind 'tables'"):
        deployment_law(NEW, "ttft", world(np.random.default_rng(0)))
