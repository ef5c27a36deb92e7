"""Under policy `concat` every request gets the tokens that it gets alone, for any rows, slots and order.

Only requests past their deadline are dropped: a prompt longer than a slot, or than a row, is placed otherwise.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.queue_order import ORDERS, SLOTTED_DAS
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor

from ..compute.test_packed_step import prompt, runner_of

BLOCKS = 128


class Clock:
    """A clock that advances one second a step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def serve(model: str, schedule: Schedule, requests: list[tuple[int, int, float]], *, at_once: int = 3):
    """Tokens and finish reasons of requests (prompt tokens, output tokens, deadline); `at_once` arrive each second."""
    clock = Clock()
    engine = Engine(InProcessExecutor(runner_of(model)), schedule, num_blocks=BLOCKS, clock=clock)
    arrivals = [
        Request(
            request_id=str(n),
            prompt_token_ids=prompt(length, n),
            sampling=SamplingParams(temperature=0.0, max_tokens=count),
            deadline=deadline,
        )
        for n, (length, count, deadline) in enumerate(requests)
    ]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in arrivals}
    reasons: dict[str, str | None] = {}
    while arrivals or engine.has_work:
        for request in arrivals[:at_once]:
            engine.add(request)
        del arrivals[:at_once]
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            reasons[output.request_id] = output.finish_reason or reasons.get(output.request_id)
        clock.now += 1.0
    assert engine.free_blocks == BLOCKS
    assert runner_of(model).cache.free_blocks == BLOCKS
    return list(tokens.values()), [reasons[request_id] for request_id in tokens]


def concat(rows: int, row_tokens: int, slot_tokens: int | None = None, order: str = "fcfs") -> Schedule:
    slots = {} if slot_tokens is None else {"slot_tokens": slot_tokens}
    return Schedule("concat", {"rows": rows, "row_tokens": row_tokens, **slots}, order)


def check(model: str, schedule: Schedule, requests: list[tuple[int, int, float]], **options) -> list[str | None]:
    """An answered request has the tokens that it gets alone; the others have none and expired."""
    found, reasons = serve(model, schedule, requests, **options)
    for n, (length, count, _) in enumerate(requests):
        runner = runner_of(model)
        engine = Engine(InProcessExecutor(runner), Schedule("orca", {"max_num_seqs": 1}), num_blocks=BLOCKS)
        sampling = SamplingParams(temperature=0.0, max_tokens=count)
        engine.add(Request(request_id="alone", prompt_token_ids=prompt(length, n), sampling=sampling))
        alone: list[int] = []
        while engine.has_work:
            alone += [token for output in engine.step() for token in output.token_ids]
        assert found[n] == ([] if reasons[n] == "expired" else alone)
        assert reasons[n] in ("length", "expired")
    return reasons


FOREVER = float("inf")
every_model = pytest.mark.parametrize("model", ["marian", "t5", "mistral"])


@every_model
@pytest.mark.parametrize(
    ("schedule", "lengths"),
    [
        (concat(2, 3), [1] * 8),
        (concat(2, 8), [8, 4, 4, 3, 5, 2, 6]),
        (concat(2, 8, 4), [4, 4, 3, 1, 2, 2, 4]),
        (concat(2, 8, 4), [4, 7, 1, 20, 3]),
        (concat(3, 12, order=SLOTTED_DAS), [1, 12, 5, 6, 2, 30, 3]),
    ],
    ids=["one-token", "full-rows", "full-slots", "longer-than-slot-and-row", "slots-by-the-batch"],
)
def test_every_request_gets_what_it_gets_alone(model, schedule, lengths):
    requests = [(length, 1 + n % 4, FOREVER) for n, length in enumerate(lengths)]
    assert set(check(model, schedule, requests)) == {"length"}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    model=st.sampled_from(["marian", "t5", "mistral"]),
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=9),
    rows=st.integers(1, 3),
    slot=st.integers(1, 8),
    slots=st.integers(1, 3),
    order=st.sampled_from([*ORDERS, SLOTTED_DAS]),
)
def test_rows_and_deadlines_do_not_change_an_answer(model, requests, rows, slot, slots, order):
    given_slot = None if order == SLOTTED_DAS or slots == 1 else slot
    check(model, concat(rows, slot * slots, given_slot, order), [(n, count, float(d)) for n, count, d in requests])


@every_model
@pytest.mark.parametrize("order", [*ORDERS, SLOTTED_DAS])
def test_requests_that_have_all_expired_are_never_computed(model, order, monkeypatch):
    monkeypatch.setattr(runner_of(model), "forward", lambda *_: pytest.fail("an expired request was computed"))
    tokens, reasons = serve(model, concat(2, 16, order=order), [(5, 3, -1.0)] * 4)
    assert (tokens, reasons) == ([[]] * 4, ["expired"] * 4)
