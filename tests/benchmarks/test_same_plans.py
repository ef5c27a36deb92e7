"""`benchmarks.quality.same_plans` reports a plan that differs, forgives words alone, and tries all of plans/."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def same_plans() -> ModuleType:
    return importlib.import_module("benchmarks.quality.same_plans")


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("latency bound 0.5 s, but rra(prefill_batch=1, decode_steps=8) needs 0.016 s", [0.016, 0.5, 1, 8]),
        ("no plan of t5-11b on a40-48gb keeps the p99-length, which llama-3.1-8b does", []),
        ("1,653 points, 31.4GiB, 1e-05 s, -7.1 % and +6.4 %", [-7.1, 1e-05, 6.4, 31.4, 1653]),
        ("uniform:in=16-240 ends here: 64.", [16, 64, 240]),
    ],
)
def test_numbers_of_a_sentence_are_those_that_are_no_part_of_a_name(
    same_plans: ModuleType, sentence: str, found: list[float]
) -> None:
    assert same_plans.numbers(sentence) == found


def test_every_field_of_a_plan_counts_but_the_time_of_the_search(same_plans: ModuleType) -> None:
    ours = {"schedule": {"policy": "rra", "prefill_batch": 4}, "search": {"points": 9, "seconds": 0.2}}
    assert not [*same_plans.differences(ours, {**ours, "search": {"points": 9, "seconds": 3.1}}, "plan.yaml")]
    theirs = {"schedule": {"policy": "rra", "prefill_batch": 5}, "search": {"points": 8, "seconds": 0.2}}
    assert [(d.where, d.ours, d.theirs) for d in same_plans.differences(ours, theirs, "plan.yaml")] == [
        ("plan.yaml.schedule.prefill_batch", "4", "5"),
        ("plan.yaml.search.points", "9", "8"),
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (4, 4.0),
        (0.1, 0.1 + 2e-17),
        (True, 1),
        (None, 0),
        ([1, 2], [1, 2, 3]),
        ("rra", "orca"),
        ({"a": 1}, [1]),
        (1.0, float("nan")),
    ],
)
def test_the_last_digit_and_the_type_count(same_plans: ModuleType, ours: object, theirs: object) -> None:
    assert len([*same_plans.differences({"x": ours}, {"x": theirs}, "plan.yaml")]) == 1
    assert not [*same_plans.differences({"x": ours}, {"x": ours}, "plan.yaml")]


def test_of_a_refusal_only_the_numbers_count(same_plans: ModuleType) -> None:
    def compared(field: str, text: str) -> list[str]:
        rows = ({"rows": [{field: words}]} for words in ("rra needs 3.2 s of 2 s", text))
        return [difference.where for difference in same_plans.differences(*rows, "stdout")]

    assert compared("refusal", "2 s is the limit, the schedule takes 3.2 s") == []
    assert compared("refusal", "rra needs 3.3 s of 2 s") == ["stdout.rows.0.refusal"]
    assert compared("policy", "2 s is the limit, the schedule takes 3.2 s") == ["stdout.rows.0.policy"]


def test_a_key_of_one_tree_is_listed_where_it_is_printed_and_a_difference_in_a_file(same_plans: ModuleType) -> None:
    for file, listed_only in (("stdout", True), ("plan.yaml", False)):
        (found,) = same_plans.differences({"gpus": 2}, {"gpus": 2, "seed": 1}, file)
        assert (found.where, found.only_in, found.listed_only) == (f"{file}.seed", "the other tree", listed_only)


def test_a_command_that_fails_is_compared_by_its_status_and_numbers(same_plans: ModuleType) -> None:
    def outcome(status: int, said: str, **values: object) -> object:
        return same_plans.Outcome(status=status, said=said, values=values)

    refused = outcome(2, "the bound of 1 s is too tight: 2.5 s is possible")
    assert not [*same_plans.outcome_differences(refused, outcome(2, "2.5 s is possible, 1 s is asked for"))]
    for other in (outcome(1, refused.said), outcome(0, refused.said), outcome(2, "1 s is too tight")):
        assert len([*same_plans.outcome_differences(refused, other)]) == 1
    (found,) = same_plans.outcome_differences(outcome(0, "", plan={"gpus": 2}), outcome(0, ""))
    assert (found.where, found.only_in, found.listed_only) == ("plan", "this tree", False)


def test_a_report_counts_problems_by_kind_and_says_what_differed(same_plans: ModuleType) -> None:
    problem = same_plans.Problem("random", ("optimize A", "simulate B"))
    refused = same_plans.Outcome(status=2, said="no plan within 1 s", values={})
    planned, other = (same_plans.Outcome(status=0, said="", values={"plan.yaml": {"x": x}}) for x in (1, 2))
    report = same_plans.Report()
    report.add(problem, [planned, planned], [planned, planned])
    report.add(problem, [refused], [refused])
    report.add(problem, [planned, planned], [planned, other])
    assert report.total == {"problems": 3, "commands": 5, "same": 2, "exit 2": 1, "faults": 0}
    assert report.values == 4
    assert report.different == [{"command": "simulate B", "where": "plan.yaml.x", "ours": "1", "theirs": "2"}]
    assert report.refusals == [{"command": "optimize A", "status": "2", "ours": "no plan within 1 s"}]
    assert [*report.lines()][-2:] == ["  simulate B", "    plan.yaml.x: ours 1, theirs 2"]


def test_values_of_one_tree_alone_do_not_count_as_compared(same_plans: ModuleType) -> None:
    ours = {"plan": {"gpus": 2, "placement": [{"devices": [0, 1]}], "bound": None}, "old": 1}
    assert same_plans.num_shared(ours, ours) == 5
    assert same_plans.num_shared(ours, {"plan": {"gpus": 2, "bound": 1}, "new": 1}) == 2


def test_every_shipped_file_has_a_problem(same_plans: ModuleType) -> None:
    found = same_plans.problems(0, 0)
    assert same_plans.unused(found) == []
    without = [problem for problem in found if not any("mooncake" in command for command in problem.commands)]
    assert same_plans.unused(without) == ["plans/workloads/mooncake-conv.yaml"]


def test_one_seed_makes_one_set_of_problems(same_plans: ModuleType) -> None:
    assert same_plans.problems(20, 3) == same_plans.problems(20, 3)
    assert same_plans.problems(20, 3) != same_plans.problems(20, 4)
    assert same_plans.given_files(3) == same_plans.given_files(3)
