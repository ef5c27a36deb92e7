"""The queue is bounded, and a request that would be late by the plan can be refused at once, with the time to wait."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, ReplicaGroup, Schedule, Stage, single_stage
from exeplan.errors import InputError
from exeplan.runner.engine.tokenizer import Tokenizer
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.server.admission import Admission, default_max_queue
from exeplan.runner.server.network.clients import Client
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.service import Service

ESTIMATE = Estimate(
    throughput=2.0,
    token_throughput=20.0,
    ttft=1.0,
    tpot=0.1,
    latency=5.0,
    latency_p50=3.0,
    latency_p99=5.0,
    kv_tokens=100.0,
    memory_bytes_per_gpu=1.0,
)


def plan(**fields):
    defaults = {"bound": Bound(seconds=8.0), "estimate": ESTIMATE}
    return Plan(
        model="m",
        schedule=Schedule("orca", {"max_num_seqs": 4}),
        placement=(Stage(layers=(0, 1)),),
        **defaults | fields,
    )


def refusal(waiting, *, count=1, max_tokens=None, refuse_late=True, **fields):
    admission = Admission(plan(**fields), max_queue=100, refuse_late=refuse_late)
    return admission.refusal(count, num_waiting=waiting, max_tokens=max_tokens)


def test_a_full_queue_says_when_the_plan_will_have_worked_it_off():
    found = refusal(100, refuse_late=False)
    assert (found.status, found.code, found.retry_after) == (429, "queue_full", 50)
    assert refusal(99, refuse_late=False) is None


def test_more_than_the_queue_ever_holds_is_no_matter_of_time():
    found = refusal(0, count=101)
    assert (found.status, found.param) == (400, "n")


def test_waiting_and_own_time_together_must_keep_the_bound():
    assert refusal(6) is None  # 3 s of waiting and 5 s for a long output: just in time.
    found = refusal(12)
    assert (found.status, found.code, found.retry_after) == (429, "late", 3)
    assert "3 s late" in str(found)


def test_at_a_rate_a_queue_is_worked_off_by_full_batches():
    """Of two replicas that serve 5 requests/s each where 2 arrive."""
    at_rate = {"arrival_rate": 2.0, "capacity": 5.0, "replicas": (0, 1), "router": "random"}
    assert refusal(30, **at_rate) is None  # 3 s of waiting and 5 s for a long output: just in time.
    assert refusal(60, **at_rate).code == "late"
    assert refusal(100, refuse_late=False, **at_rate).retry_after == 10
    unknown = {"arrival_rate": 2.0}
    assert refusal(100, refuse_late=False, **unknown).retry_after == 50  # At most.
    with pytest.raises(InputError, match=r"the plan, for a rate, lacks its capacity; `exeplan simulate` adds it"):
        refusal(0, **unknown)


def test_a_queue_is_worked_off_by_the_replicas_that_serve():
    """Of a plan whose two replicas serve 5 requests/s each, and of one with 4 and 1."""
    at_rate = {"arrival_rate": 2.0, "capacity": 5.0, "replicas": (0, 1), "router": "random"}
    other = ReplicaGroup(
        schedule=plan().schedule, placement=(Stage(devices=(2,), layers=(0, 1)),), first_devices=(2,), capacity=2.0
    )
    for fields, waits in (
        (at_rate, {(0, 1): 3.0, (0,): 6.0, (0, 1, 2, 3): 1.5, (): 6.0}),
        ({**at_rate, "capacity": 4.0, "more_replicas": (other,)}, {(0, 1, 2): 3.0, (2,): 15.0, (0, 1): 3.75}),
        ({"replicas": (0, 1)}, {(0, 1): 15.0, (1,): 30.0}),
    ):
        admission = Admission(plan(**fields), max_queue=100, refuse_late=True)
        for numbers, seconds in waits.items():
            admission.serving = lambda numbers=numbers: numbers
            assert admission.wait(30) == pytest.approx(seconds)
            assert (admission.refusal(1, num_waiting=30, max_tokens=None) is None) == (seconds <= 3.0)


def test_a_server_asks_its_replicas_which_serve():
    spec = load_model_spec("demo")
    served = replace(plan(), placement=single_stage(spec), replicas=(0, 1))

    async def waits() -> list[float]:
        engine = ReplicaSet([engine_setup(served, spec)] * 4, "random", num_first=4)
        admission = Admission(served, max_queue=8, refuse_late=False)
        service = Service(
            engine,
            Tokenizer.load(spec),
            admission,
            plan=served,
            spec=spec,
            model_name="demo",
            request_seconds=60.0,
        )
        try:
            found = [admission.wait(6)]
            engine.drain(2)
            return [*found, admission.wait(6)]
        finally:
            await service.close()

    assert asyncio.run(waits()) == [1.5, 2.0]


def test_a_short_answer_may_wait_longer():
    assert refusal(13, max_tokens=1) is None  # 6.5 s and one prefill of 1 s.
    assert refusal(15, max_tokens=1).code == "late"
    assert refusal(7, max_tokens=10_000).code == "late"  # No longer than what the bound is about.


def test_the_sequences_of_one_request_wait_for_each_other():
    assert refusal(3, count=4) is None
    assert refusal(3, count=5).code == "late"


def test_a_bound_on_the_first_token_counts_too():
    assert refusal(3, more_bounds=(Bound(seconds=2.0, metric="ttft"),)).code == "late"
    assert refusal(2, more_bounds=(Bound(seconds=2.0, metric="ttft"),)) is None
    assert refusal(2, more_bounds=(Bound(seconds=0.05, metric="tpot"),)) is None  # Waiting does not change the pace.


def test_a_request_that_would_not_begin_by_its_own_deadline_is_late():
    admission = Admission(plan(), max_queue=100, refuse_late=True)
    assert admission.refusal(1, num_waiting=4, max_tokens=1, deadline=1.5).code == "late"  # 2 s of waiting.
    assert admission.refusal(1, num_waiting=2, max_tokens=1, deadline=1.5) is None


def test_an_idle_server_admits_every_request():
    assert refusal(0, bound=Bound(seconds=1e-3)) is None


@pytest.mark.parametrize("fields", [{"bound": None}, {"estimate": None}, {"bound": Bound(seconds=float("inf"))}])
def test_without_a_promise_no_request_is_late(fields):
    assert refusal(50, refuse_late=False, **fields) is None
    with pytest.raises(InputError, match="the plan lacks"):
        refusal(50, **fields)


def test_another_plan_has_other_rules():
    admission = Admission(plan(), max_queue=100, refuse_late=True)
    admission.adopt(plan(bound=Bound(seconds=20.0)))
    assert admission.refusal(1, num_waiting=12, max_tokens=None) is None


def test_the_default_queue_is_a_few_times_what_runs():
    assert default_max_queue(plan()) == 64
    assert default_max_queue(plan(max_seqs=100)) == 400


def test_a_refused_request_counts_with_all_its_sequences_as_load_and_one_that_is_pushed_out_once():
    spec = load_model_spec("demo")
    served = replace(plan(), placement=single_stage(spec))

    async def refuse() -> list[int]:
        engine, tokenizer = EngineClient(engine_setup(served, spec)), Tokenizer.load(spec)
        admission = Admission(served, max_queue=8, refuse_late=False)
        service = Service(engine, tokenizer, admission, plan=served, spec=spec, model_name="demo", request_seconds=60.0)
        found = []
        try:
            for name, count in (("a", 4), ("a", 4), ("a", 3), ("b", 1)):  # The last one makes a place for itself.
                with contextlib.suppress(RequestError):
                    service.place(count, Client(name=name), max_tokens=1, deadline=None)
                found.append(service.num_refused())
            assert service.metrics.rejected["queue_full"] == 2
        finally:
            await service.close()
        return found

    assert asyncio.run(refuse()) == [0, 0, 3, 3]
