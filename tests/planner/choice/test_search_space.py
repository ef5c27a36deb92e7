"""On a cluster the search over all variants equals exhaustive search, and every placement fits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.pass_memory import LEAST_PASSES
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice.candidates import candidate, candidates
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.choice.search_space import Outcomes, Variant, concave_ceiling, search_variants, variants
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.policies import load_policy, policy_names
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.search.grid import Limits
from exeplan.search.search import Result
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

A40 = load_cluster("a40")
SHORT = "normal:in=40,10,80;out=12,5,24"


def profile_of(model: str) -> Profile:
    sheet = with_links(load_datasheet("a40-48gb"), A40)
    return profile_from_datasheet(load_model_spec(model), sheet, dtype="float16")


@pytest.fixture(scope="module")
def opt() -> Profile:
    return profile_of("opt-13b")


@pytest.fixture(scope="module")
def t5() -> Profile:
    return profile_of("t5-11b")


def has_falls(policy: str) -> bool:
    return any(knob.falls for knob in load_policy(policy).knobs(load_workload(SHORT), 8))


def asked(profile: Profile, cluster: Cluster, bound: float, *, max_seqs: int | None = None) -> Problem:
    return make_problem(profile, load_workload(SHORT), Bound(seconds=bound), cluster=cluster, max_seqs=max_seqs)


def assert_kept(problem: Problem, policy: str, found: tuple[Result, Placement], bound: float) -> None:
    """The best point keeps bound and memory, evaluated anew on its placement."""
    assert found[0].best is not None
    schedule = load_policy(policy).schedule(found[0].best.point, problem.workload)
    outcome = problem.at(found[1]).evaluate(schedule)
    assert outcome == found[0].best.outcome
    assert outcome.latency <= bound
    assert outcome.memory <= 1


def test_of_an_engine_only_placements_with_one_sharding_are_searched(opt: Profile) -> None:
    def shapes(profile: Profile) -> set[tuple[int, ...]]:
        found = variants(asked(profile, A40.part(3), 10.0), load_policy("chunked"))
        return {tuple(stage.num_devices for stage in variant.problem.cost.placement) for variant in found}

    assert shapes(opt) == {(1, 1, 1), (2, 1)}
    assert shapes(replace(opt, source=f"{opt.source} with vllm")) == {(1, 1, 1)}


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
def test_every_placement_holds_every_layer_once_and_fits(policy: str, model: str) -> None:
    problem = asked(profile_of(model), A40.part(4), 10.0)
    spec, found = problem.profile.model, list(variants(problem, load_policy(policy)))
    assert found
    for variant in found:
        placement = variant.problem.cost.placement
        devices = [d for stage in placement for d in stage.devices]
        assert sorted(devices) == [0, 1, 2, 3]
        assert variant.problem.cost.memory.max_bytes(0.0, passes=LEAST_PASSES) <= problem.memory
        for phase in {stage.phase for stage in placement}:
            stages = [stage for stage in placement if stage.phase == phase]
            decoder = [n for stage in stages for n in range(*stage.layers)]
            encoder = [n for stage in stages for n in range(*stage.encoder_layers)]
            assert encoder == list(range(spec.num_encoder_layers if phase != "decode" else 0))
            decodes = phase != "prefill" or not spec.is_encoder_decoder
            assert decoder == list(range(spec.num_layers if decodes else 0))


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("bound", [0.9, 2.0, float("inf")])
def test_branch_and_bound_finds_the_exhaustive_optimum(policy: str, bound: float, opt: Profile) -> None:
    problem = asked(opt, A40.part(2), bound, max_seqs=16)
    found, everything = (
        search_variants(problem, policy, method=method, bound=bound) for method in ("branch-and-bound", "exhaustive")
    )
    assert found is not None
    assert everything is not None
    if everything[0].best is None:
        assert found[0].best is None
        return
    assert found[0].best is not None
    # Values between the listed ones may be better.
    assert found[0].best.outcome.throughput >= (1 - 1e-9) * everything[0].best.outcome.throughput
    assert_kept(problem, policy, found, bound)
    assert_kept(problem, policy, everything, bound)


@pytest.mark.parametrize("share", [0.98, 0.93, 0.89, 0.86])
@pytest.mark.parametrize("policy", ["waa-c", "waa-m"])
def test_waa_keeps_tight_bounds_with_fewer_rows_than_finish_a_request_an_iteration(
    policy: str, share: float, opt: Profile
) -> None:
    lengths = load_workload("normal:in=40,10,80;out=60,25,120")
    problem = make_problem(opt, lengths, Bound(seconds=math.inf), cluster=A40.part(2), max_seqs=80)
    corner = load_policy(policy).schedule({"decode_batch": 60}, lengths)
    bound = share * min(v.problem.evaluate(corner).latency for v in variants(problem, load_policy(policy)))
    found, everything = (
        search_variants(problem, policy, method=method, bound=bound) for method in ("branch-and-bound", "exhaustive")
    )
    assert found is not None
    assert everything is not None
    assert (everything[0].best is None) is (share < 0.88)
    assert found[0].best == everything[0].best
    if everything[0].best:
        assert everything[0].best.point["decode_batch"] < 60
        assert_kept(problem, policy, found, bound)


@pytest.mark.parametrize(
    ("lengths", "bound"), [("normal:in=424,75,1000;out=15,7,45", 1.72), ("normal:in=312,175,1000;out=6,3,18", math.inf)]
)
def test_the_best_of_packed_batches_is_found_though_each_row_more_costs_throughput(
    lengths: str, bound: float, opt: Profile
) -> None:
    """The best batch fills its rows; one of a request more, with a row more, has up to 19 % less throughput."""
    whole = A40.part(4)
    problem = make_problem(opt, load_workload(lengths), Bound(seconds=bound), cluster=whole, max_seqs=96)
    found, everything = (
        search_variants(problem, "concat", method=method, bound=bound) for method in ("branch-and-bound", "exhaustive")
    )
    assert found is not None
    assert everything is not None
    assert found[0].best is not None
    assert everything[0].best is not None
    assert found[0].best.outcome.throughput >= (1 - 1e-9) * everything[0].best.outcome.throughput
    assert_kept(problem, "concat", found, bound)
    assert_kept(problem, "concat", everything, bound)


def test_the_best_on_a_plateau_with_falls_is_found(t5: Profile) -> None:
    """Between two sizes of the prefill batch the throughput of WAA goes up and down by a few parts in ten thousand."""
    lengths = load_workload("normal:in=227,199,1000;out=13,6,39")
    problem = make_problem(t5, lengths, Bound(seconds=math.inf), cluster=A40.part(2), max_seqs=96)
    found, everything = (
        search_variants(problem, "waa-m", method=method, bound=math.inf)
        for method in ("branch-and-bound", "exhaustive")
    )
    assert found is not None
    assert everything is not None
    assert found[0].best is not None
    assert found[0].best == everything[0].best
    assert found[0].num_points < everything[0].num_points
    assert_kept(problem, "waa-m", found, math.inf)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [name for name in policy_names() if has_falls(name)])
def test_throughput_and_latency_fall_no_further_than_a_policy_says(policy: str, seed: int, opt: Profile) -> None:
    rng = np.random.default_rng(seed)
    mean = int(rng.integers(3, 40))
    lengths = f"normal:in={rng.integers(20, 600)},{rng.integers(5, 200)},1000;out={mean},{mean // 2},{3 * mean}"
    problem = make_problem(opt, load_workload(lengths), Bound(seconds=1.0), cluster=A40.part(2), max_seqs=60)
    (knob,) = load_policy(policy).knobs(problem.workload, problem.max_seqs)
    for variant in variants(problem, load_policy(policy)):
        grid = variant.grid(load_policy(policy), (knob,), Limits(1.0, 1.0))
        for position in range(len(knob.values)):
            grid((position,))
        assert grid.dips().throughput <= knob.falls
        assert grid.dips().load <= knob.falls


def test_a_system_that_cannot_fork_finds_the_same_plan(opt: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = asked(opt, A40.part(2), 2.0, max_seqs=16)
    side_by_side = optimize(problem, policies=("orca", "static")).plan
    monkeypatch.setattr("exeplan.forked.get_all_start_methods", lambda: ["spawn"])
    monkeypatch.setattr("exeplan.planner.choice.candidates.ProcessPoolExecutor", None)  # Not even tried.
    one_by_one = optimize(problem, policies=("orca", "static")).plan
    assert replace(one_by_one, search={}) == replace(side_by_side, search={})


def test_where_the_closed_form_is_far_off_another_variant_is_taken_and_not_a_tighter_bound(opt: Profile) -> None:
    # With more groups than stages the requests of few prefills seem to crowd into few of them: 3.9 s, replayed 4.5 s.
    problem = make_problem(opt, load_workload("S"), Bound(seconds=3.987), cluster=A40.part(4))
    found = search_variants(problem, "waa-m", method="branch-and-bound", bound=3.987)
    assert found is not None
    assert found[0].best is not None
    plan = optimize(problem, policies=("waa-m",)).plan
    assert plan.estimate is not None
    assert plan.replay is not None
    assert plan.replay.latency is not None
    assert plan.replay.latency <= 3.987
    assert plan.estimate.throughput > 0.99 * found[0].best.outcome.throughput


def test_the_exhaustive_search_tries_every_point_of_every_variant(opt: Profile) -> None:
    found = search_variants(asked(opt, A40.part(2), 0.9, max_seqs=4), "orca", method="exhaustive", bound=0.9)
    assert found is not None
    assert found[0].num_points == found[0].grid_size


def test_a_schedule_is_evaluated_once_whatever_points_and_policies_of_its_law_lead_to_it(opt: Profile) -> None:
    problem, outcomes, counts = asked(opt, A40.part(2), 2.0), Outcomes(), dict[str, int]()
    results = {}
    for policy in ("chunked", "waa-c", "waa-m"):
        seen = list[None]()
        results[policy] = search_variants(
            problem,
            policy,
            method="branch-and-bound",
            bound=2.0,
            evaluated=lambda seen=seen: seen.append(None),
            outcomes=outcomes,
        )
        counts[policy] = len(seen)
    chunked, computed, by_memory = (results[policy] for policy in counts)
    assert chunked is not None
    assert counts["chunked"] < chunked[0].num_points  # More slots than the budget has tokens are as many as it has.
    assert counts["waa-c"] > 0
    assert counts["waa-m"] == 0  # On two GPUs both split them in the same way.
    assert computed is not None
    assert by_memory is not None
    assert computed[0].best == by_memory[0].best
    assert len(outcomes) == sum(counts.values())


def test_a_model_too_large_names_the_shortfall_and_the_cluster_that_would_do() -> None:
    with pytest.raises(
        Infeasible, match=r"gpt3-341b does not fit cluster a40: each of its 8 GPUs lacks 40\..* GiB .* 24 of these GPUs"
    ):
        asked(profile_of("gpt3-341b"), A40.part(8), 100.0)


def test_a_model_that_does_not_fit_is_refused_with_its_checkpoint_of_smaller_weights() -> None:
    cluster = load_cluster("h200").part(8)
    sheet = with_links(load_datasheet("h200-141gb"), cluster)
    profile = profile_from_datasheet(load_model_spec("deepseek-v3"), sheet, dtype="bfloat16")
    with pytest.raises(Infeasible, match="deepseek-ai/DeepSeek-V3 has smaller weights"):
        asked(profile, cluster, 10.0)


def test_encoder_and_decoder_layers_are_apart_where_some_stages_only_prefill(t5: Profile) -> None:
    problem = asked(t5, A40.part(4), 10.0)
    placement = next(variants(problem, load_policy("waa-c"))).problem.cost.placement
    assert {(s.phase, s.layers[1] > s.layers[0], s.encoder_layers[1] > 0) for s in placement} == {
        ("prefill", False, True),
        ("decode", True, False),
    }


def test_what_searches_of_other_processes_evaluated_is_not_evaluated_again(opt: Profile) -> None:
    problem, outcomes = replace(asked(opt, A40.part(2), 10.0), one_pipeline=True), Outcomes()
    found = candidates(problem, {2: problem}, ("orca", "rra"), "branch-and-bound", outcomes=outcomes)
    evaluated = len(outcomes)
    assert evaluated > 0
    again = candidate(problem, "orca", "branch-and-bound", outcomes=outcomes)
    assert (again.schedule, again.estimate) == (found[2, "orca"].schedule, found[2, "orca"].estimate)
    assert len(outcomes) == evaluated


def test_at_a_rate_no_more_micro_batches_than_stages_are_searched(opt: Profile) -> None:
    backlog = asked(opt, A40.part(4), 10.0)
    at_rate = replace(backlog, arrivals=Arrivals(rate=1.0))
    for policy in ("orca", "waa-c"):
        beyond, none = (
            [v for v in variants(one, load_policy(policy)) if more_micro_batches_than_stages(v)]
            for one in (backlog, at_rate)
        )
        assert beyond
        assert not none


def more_micro_batches_than_stages(variant: Variant) -> bool:
    return variant.enumerated.get("micro_batches", 1) > len(variant.problem.cost.decode_stages)


def test_budgets_between_the_listed_powers_of_two_are_found(opt: Profile) -> None:
    """A budget of 384 serves 14 % more here than the best power of two."""
    problem = make_problem(opt, load_workload("S"), Bound(seconds=9.7), cluster=A40.part(4))
    found = search_variants(problem, "chunked", method="branch-and-bound", bound=9.7)
    assert found is not None
    result, placement = found
    assert result.best is not None
    variables = {"max_num_seqs": 279, "micro_batches": 4, "max_num_batched_tokens": 384}
    by_hand = problem.at(placement).evaluate(Schedule("chunked", variables))
    assert by_hand.latency <= 9.7
    assert result.best.outcome.throughput >= 0.999 * by_hand.throughput


def test_a_value_that_gains_nothing_is_not_taken_for_a_listed_one(opt: Profile) -> None:
    """Without a bound larger budgets all do the same: the listed one stays."""
    found = search_variants(asked(opt, A40.part(1), 1e9, max_seqs=8), "chunked", method="branch-and-bound", bound=1e9)
    assert found is not None
    assert found[0].best is not None
    assert found[0].best.point["max_num_batched_tokens"].bit_count() == 1


@given(st.lists(st.integers(-50, 49), min_size=10, max_size=99), st.sets(st.integers(0, 99), min_size=3, max_size=8))
def test_no_concave_function_exceeds_the_ceiling_next_to_its_best_value(steps: list[int], chosen: set[int]) -> None:
    heights = [1000.0, *(1000.0 + np.cumsum(sorted(steps, reverse=True))).tolist()]
    points = sorted({x % len(heights) for x in chosen})
    assume(len(points) >= 3)
    best = max(points, key=lambda x: heights[x])
    at = points.index(best)
    around = heights[points[max(0, at - 1)] : points[min(at + 1, len(points) - 1)] + 1]
    assert concave_ceiling({x: heights[x] for x in points}, best) >= max(around) - 1e-6


def test_the_ceiling_is_where_the_lines_from_both_sides_meet() -> None:
    # Up by one a step from 10, and up by one a step back from 20: both are at 16 there.
    assert concave_ceiling({0: 0.0, 10: 10.0, 20: 12.0, 30: 2.0}, 20) == pytest.approx(16.0)
    assert concave_ceiling({10: 5.0, 11: 6.0, 12: 5.5}, 11) == 6.0


def test_what_is_to_be_beaten_hides_no_value_between_the_listed_ones(opt: Profile) -> None:
    # Two pipelines of two GPUs serve 14.24 requests/s; one of four stages more, at 192 tokens a pass, not listed.
    law = load_workload("normal:in=75,37,300;out=294,147,882")
    problem = make_problem(opt, law, Bound(seconds=130.0), cluster=A40.part(4))
    found = search_variants(problem, "chunked", method="branch-and-bound", bound=130.0, at_least=14.24)
    assert found is not None
    assert found[0].best is not None
    assert found[0].best.outcome.throughput > 14.5


def test_what_is_to_be_beaten_hides_no_split_of_gpus_between_the_listed_ones() -> None:
    # Two pipelines of eight GPUs serve 11.15 requests/s; one of sixteen 14 % more, by a number of GPUs that prefill and
    # of micro-batches that are not listed.
    cluster = load_cluster("a100").part(16)
    sheet = with_links(load_datasheet(cluster.device), cluster)
    profile = profile_from_datasheet(load_model_spec("llama-2-70b"), sheet, dtype="bfloat16")
    law = load_workload("normal:in=1462,731,5848;out=116,58,348").fit_context(profile.model.max_context)
    problem = make_problem(profile, law, Bound(seconds=24.0), cluster=cluster)
    found = search_variants(problem, "waa-c", method="branch-and-bound", bound=24.0, at_least=11.15)
    assert found is not None
    assert found[0].best is not None
    assert found[0].best.outcome.throughput > 12.5


def test_a_policy_with_stages_apart_says_why_one_gpu_has_no_place_for_it() -> None:
    found = candidate(asked(profile_of("opt-13b"), A40.part(1), 10.0), "waa-c", "branch-and-bound")
    assert found.refusal.startswith("waa-c needs devices that prefill and others that decode")
