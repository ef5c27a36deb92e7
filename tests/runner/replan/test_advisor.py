"""The advisor watches the plan that the service runs, and yields the processors, also where they are shared out by
session; late replies are not mixed up."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, as_json
from exeplan.core.profile import Profile, save_profile
from exeplan.core.schedule import ReplicaGroup, Schedule, single_stage
from exeplan.drift.state import RequestLengths, Rules
from exeplan.planner.load_problem import load_plan
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.messages import AdvisorReady, GetFrontier, Look, Looked, PlanAdopted, ProposedPlan, WatchPlan
from exeplan.runner.replan import advisor_process
from exeplan.runner.replan.advisor import Advisor
from exeplan.runner.replan.advisor_process import AdvisorProcess

CODE = """
import os
from exeplan.runner.replan.advisor import yield_to_others
yield_to_others()
print(os.nice(0))
print(open("/proc/self/autogroup").read().split()[-1] if os.path.exists("/proc/self/autogroup") else "")
"""


def test_it_yields_within_its_session_and_as_a_session():
    found = subprocess.run(
        [sys.executable, "-P", "-c", CODE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    own, session = found.stdout.split("\n")[:2]
    assert own == "19"
    assert session == ("10" if Path("/proc/self/autogroup").exists() else "")


def test_a_reply_that_takes_too_long_ends_the_process(monkeypatch):
    """A late reply is not read as that to another request."""

    async def ask() -> None:
        advisor = await AdvisorProcess.start()
        try:
            monkeypatch.setattr(advisor_process, "SEARCH_SECONDS", 0.0)
            with pytest.raises(TimeoutError):
                await advisor.ask(GetFrontier())
            monkeypatch.setattr(advisor_process, "SEARCH_SECONDS", 10.0)
            with pytest.raises((EOFError, ConnectionError)):
                await advisor.ask(GetFrontier())
        finally:
            await advisor.close()

    asyncio.run(ask())


def test_something_else_than_a_request_ends_the_process_with_a_sentence():
    found = subprocess.run(
        [sys.executable, "-P", "-m", "exeplan.runner.replan.advisor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        input=frame(AdvisorReady()),
        start_new_session=True,
        capture_output=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (1, b"")
    assert found.stderr.startswith(b"exeplan.replan: a message of 19 bytes does not fit AdvisorRequest: ")


def test_it_logs_as_its_server():
    code = "from exeplan.runner.replan import advisor; advisor.main(); advisor.log.info('here')"
    paths = os.pathsep.join(filter(None, sys.path))
    found = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "EXEPLAN_LOG": "json,info"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        capture_output=True,
        check=True,
    )
    record = json.loads(found.stderr)
    assert (record["logger"], record["message"]) == ("exeplan.replan", "here")


RULES = Rules(every=1.0, dwell=0.0, least_requests=16, least_for_search=32)


@pytest.fixture
def plan(profile: Profile, tmp_path: Path) -> Plan:
    """For outputs of ninety tokens."""
    save_profile(profile, tmp_path / "p.json")
    return Plan(
        model="demo",
        schedule=Schedule("rra", {"prefill_batch": 1, "decode_steps": 90}),
        placement=single_stage(load_model_spec("demo")),
        workload="fixed:in=40;out=90",
        profile=str(tmp_path / "p.json"),
        bound=Bound(seconds=20.0),
    )


def look(advisor: Advisor, now: float, *, outputs: int) -> Looked:
    """Once many requests have ended with so many tokens."""
    left = [RequestLengths(now + i / 1000, 20, outputs, True) for i in range(800)]
    looked = advisor.take(Look(now=now + 1, left=left, running=[], vetoed=False))
    assert isinstance(looked, Looked)
    return looked


def proposed(advisor: Advisor, first: int, *, outputs: int) -> ProposedPlan:
    return next(p for now in range(first, first + 20) if (p := look(advisor, now, outputs=outputs).proposal))


def test_it_watches_the_plan_that_was_adopted_though_it_proposed_another_one_later(plan):
    advisor = Advisor(WatchPlan(plan=as_json(plan), rules=RULES, file=None))
    first = proposed(advisor, 0, outputs=5)
    later = proposed(advisor, 100, outputs=40)
    assert (first.number, later.number) == (1, 2)
    assert first.plan["schedule"] != later.plan["schedule"]
    assert advisor.take(PlanAdopted(now=130.0, plan=first.number)) == AdvisorReady()
    assert look(advisor, 131, outputs=40).planned.outputs.mean == pytest.approx(5, abs=1)


def test_lengths_of_proposals_that_were_not_adopted_are_removed_by_name(plan, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "next.yaml"
    advisor = Advisor(WatchPlan(plan=as_json(plan), rules=RULES, file=str(file)))
    first, second, third = (
        proposed(advisor, 100 * number, outputs=outputs) for number, outputs in enumerate((5, 40, 15))
    )

    def there() -> list[bool]:
        return [Path(one.plan["workload"]).exists() for one in (first, second, third)]

    assert there() == [True, True, True]  # Each may yet be adopted by its number.
    assert advisor.take(PlanAdopted(now=330.0, plan=first.number)) == AdvisorReady()
    assert there() == [True, False, True]
    (said,) = [record.getMessage() for record in caplog.records if record.name == "exeplan.replan"]
    assert said == f"removed {second.plan['workload']}, the lengths of a proposal that was replaced and not adopted"
    assert load_plan(file).workload in third.plan["workload"]
    fourth = proposed(advisor, 400, outputs=40)
    assert advisor.take(PlanAdopted(now=430.0, plan=fourth.number)) == AdvisorReady()
    assert there() == [True, Path(fourth.plan["workload"]) == Path(second.plan["workload"]), False]
    assert Path(fourth.plan["workload"]).exists()


def test_a_plan_with_another_number_of_groups_is_watched_as_well(plan):
    two = replace(plan, replicas=(0, 1), router="shortest-queue")
    group = ReplicaGroup(schedule=plan.schedule, placement=plan.placement, first_devices=(1,))
    unequal = replace(two, replicas=(0,), more_replicas=(group,))
    advisor = Advisor(WatchPlan(plan=as_json(two), rules=RULES, file=None))
    for other in (unequal, two):
        assert advisor.take(PlanAdopted(now=1.0, plan=as_json(other))) == AdvisorReady()
        assert look(advisor, 2, outputs=90).planned.outputs.mean == 90


@pytest.mark.parametrize("blocks", [[40], [None, 40]])
def test_it_predicts_with_the_blocks_that_the_engine_has(plan, blocks):
    """Of one replica, or of the second of two that are not equal."""
    wide = replace(plan, schedule=Schedule("orca", {"max_num_seqs": 32}))
    if len(blocks) > 1:
        group = ReplicaGroup(schedule=wide.schedule, placement=plan.placement, first_devices=(1,))
        wide = replace(wide, more_replicas=(group,), router="shortest-queue")
    advisor = Advisor(WatchPlan(plan=as_json(wide), rules=RULES, file=None))
    left = [RequestLengths(i / 1000, 40, 90, True) for i in range(800)]
    rates = []
    for now, known in ((1.0, []), (2.0, blocks)):
        looked = advisor.take(Look(now=now, left=left, running=[], vetoed=False, num_blocks=known))
        assert isinstance(looked, Looked)
        assert looked.state.predicted
        rates.append(looked.state.predicted.throughput)
    assert rates[1] < 0.95 * rates[0]


def test_it_says_when_a_search_has_found_nothing_better(plan):
    advisor = Advisor(WatchPlan(plan=as_json(plan), rules=replace(RULES, gain=1e9), file=None))
    looks = [look(advisor, now, outputs=5) for now in range(4)]
    assert [one.none_better for one in looks].count(True) == 1
    assert not any(one.proposal for one in looks)
