"""vLLM's scheduler is held to the cycle of an rra plan: B_E requests in a pass of prompts, then N_D passes without."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.vllm_plugin.cadence import PLAN_VARIABLE, TRACE_VARIABLE, Cadence, CadenceMixin

PLAN = """model: demo
schedule: {{policy: rra, prefill_batch: {prefill}, decode_steps: {steps}, decode_batch: 6}}
placement: [{{devices: [0], layers: [0, 6]}}]
"""


@dataclass
class Request:
    """As much of vLLM's as the mixin looks at; `left` are tokens of its prompt that are not computed."""

    left: int
    outputs: int
    is_prefill_chunk: bool = False


@dataclass
class Scheduler:
    """As vLLM's: rows that run first, then those that wait, within the tokens of a pass and the room there is."""

    waiting: list[Request]
    budget: int = 1000
    room: int = 1000
    """Requests that fit the KV cache."""
    running: list[Request] = field(default_factory=list)
    max_num_active_reqs: int = 6
    admitted: list[Request] = field(default_factory=list)

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        budget, scheduled = self.budget, {}
        for request in self.running:
            budget -= self._compute(request, budget, scheduled)
        while self.waiting and budget and len(self.running) < self.max_num_active_reqs:
            if sum(request.outputs > 0 for request in self.admitted) == self.room:
                break
            request = self.waiting.pop(0)
            self.admitted.append(request)
            self.running.append(request)
            budget -= self._compute(request, budget, scheduled)
        self.running = [request for request in self.running if request.outputs > 0]
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=None,
        )

    def _compute(self, request: Request, budget: int, scheduled: dict[int, int]) -> int:
        tokens = min(request.left, budget) if request.left else 1
        request.left -= tokens if request.left else 0
        request.is_prefill_chunk = request.left > 0
        request.outputs -= not request.is_prefill_chunk
        assert id(request) not in scheduled
        scheduled[id(request)] = tokens
        return tokens

    def shutdown(self) -> None:
        pass


class Held(CadenceMixin, Scheduler):
    """The mixin before it, as before vLLM's."""


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a scheduler that follows the plan `tmp_path / "plan.yaml"`; `passes()` runs it and reads its trace."""

    def make(*requests: Request, prefill: int = 3, steps: int = 4, **settings: int) -> Held:
        (tmp_path / "plan.yaml").write_text(PLAN.format(prefill=prefill, steps=steps))
        monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.yaml"))
        monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "trace.jsonl"))
        made.append(Held(waiting=list(requests), **settings))
        return made[-1]

    made: list[Held] = []
    yield make
    for scheduler in made:
        scheduler.shutdown()


def passes(scheduler: Held, path: Path, count: int) -> list[tuple[str, int]]:
    for _ in range(count):
        scheduler.schedule()
    return [(row["pass"][0], row["num_seqs"]) for row in map(json.loads, path.read_text().splitlines())]


def requests(count: int, outputs: int = 100) -> list[Request]:
    return [Request(left=10, outputs=outputs) for _ in range(count)]


def test_a_cycle_prefills_a_batch_and_then_decodes_its_steps(held, tmp_path: Path) -> None:
    found = passes(held(*requests(20)), tmp_path / "trace.jsonl", 11)
    assert found == [("p", 3), *[("d", 3)] * 4, ("p", 3), *[("d", 6)] * 5]  # As many as --max-num-seqs.


@pytest.mark.parametrize(("prefill", "steps", "seed"), [(3, 4, 0), (1, 2, 1), (4, 9, 2), (6, 1, 3), (5, 3, 4)])
def test_its_passes_are_those_of_the_policy(held, tmp_path: Path, cost: CostModel, prefill, steps, seed) -> None:
    """Of the replay, which runs `policies/rra.py`."""
    outputs, many = np.random.default_rng(seed).integers(1, 25, 60), {"max_num_active_reqs": 1000}
    schedule = Schedule("rra", {"prefill_batch": prefill, "decode_steps": steps, "decode_batch": 6})
    run = replay(schedule, cost, input_tokens=np.full(60, 10), output_tokens=outputs, num_blocks=1000)
    wanted = [("p", one.num_prefill) if one.num_prefill else ("d", one.num_decode) for one in run.passes]
    scheduler = held(*(Request(left=10, outputs=int(count)) for count in outputs), prefill=prefill, steps=steps, **many)
    assert passes(scheduler, tmp_path / "trace.jsonl", len(wanted)) == wanted


def test_what_has_ended_makes_room(held, tmp_path: Path) -> None:
    found = passes(held(*requests(9, outputs=6)), tmp_path / "trace.jsonl", 12)
    assert [number for kind, number in found if kind == "p"] == [3, 3, 3]
    assert found[:6] == [("p", 3), *[("d", 3)] * 4, ("p", 3)]


def test_nothing_left_to_decode_begins_the_next_cycle(held, tmp_path: Path) -> None:
    found = passes(held(*requests(6, outputs=2)), tmp_path / "trace.jsonl", 4)
    assert found == [("p", 3), ("d", 3), ("p", 3), ("d", 3)]


def test_decoding_goes_on_while_nobody_waits(held, tmp_path: Path) -> None:
    scheduler = held(*requests(2))
    assert passes(scheduler, tmp_path / "trace.jsonl", 8) == [("p", 2), *[("d", 2)] * 7]
    scheduler.waiting += requests(1)
    assert passes(scheduler, tmp_path / "trace.jsonl", 1)[-1] == ("p", 1)


def test_a_prompt_that_is_cut_is_prefilled_to_its_end_alone(held, tmp_path: Path) -> None:
    scheduler = held(*requests(1), Request(left=25, outputs=9), prefill=1, steps=2, budget=10)
    found = passes(scheduler, tmp_path / "trace.jsonl", 7)
    assert found == [("p", 1), ("d", 1), ("d", 1), ("p", 1), ("p", 1), ("p", 1), ("d", 2)]
    assert dict(scheduler._deviations) == {"a prompt took several passes": 2}


def test_no_room_for_a_prefill_decodes_on_and_is_said(held, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    scheduler = held(*requests(6), prefill=3, steps=2, room=3)
    found = passes(scheduler, tmp_path / "trace.jsonl", 8)
    assert found == [("p", 3), ("d", 3), ("d", 3), ("d", 3), ("d", 3)]
    scheduler.shutdown()
    assert "the cadence was kept but 3 times there was no room for a prefill" in caplog.text


def test_a_plan_that_changes_changes_the_cadence(held, tmp_path: Path, caplog) -> None:
    scheduler = held(*requests(40, outputs=9), prefill=2, steps=3)
    passes(scheduler, tmp_path / "trace.jsonl", 1)
    (tmp_path / "plan.yaml").write_text(PLAN.format(prefill=1, steps=12))
    passes(scheduler, tmp_path / "trace.jsonl", 4)
    assert scheduler._cadence.decode_steps == 12
    (tmp_path / "plan.yaml").write_text("schedule: 7\n")
    passes(scheduler, tmp_path / "trace.jsonl", 20)
    assert scheduler._cadence.decode_steps == 12
    assert "the changed plan is not taken" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (Schedule("orca", {"max_num_seqs": 4}), "the plan's policy is orca"),
        (Schedule("rra", {"prefill_batch": 1, "decode_steps": 2, "micro_batches": 2}), "one micro-batch"),
        (Schedule("rra", {"prefill_batch": 1, "decode_steps": 2, "adjust_percent": 5}), "not keep .* adjust_percent"),
    ],
)
def test_other_plans_are_refused(schedule: Schedule, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Cadence.of_schedule(schedule)


def test_no_plan_and_another_vllm_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    with pytest.raises(InputError, match="set EXEPLAN_PLAN"):
        Held(waiting=[])
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="there is no plan"):
        Held(waiting=[])

    class Older(CadenceMixin):
        running: tuple[Request, ...] = ()

    with pytest.raises(InputError, match=r"has no 'waiting'; the plug-in is for vLLM 0\.31 to 0\.33"):
        Older()
