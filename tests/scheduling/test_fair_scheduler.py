"""Clients share an engine by their weights, whatever they send; a single one is served as without shares."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.scheduling.fair_queue import (
    LINGER_SECONDS,
    OUTPUT_TOKEN,
    ClientLines,
    ClientSequence,
    VirtualTokenCounters,
)
from exeplan.scheduling.fair_scheduler import FairScheduler
from exeplan.scheduling.scheduler import Scheduler
from exeplan.scheduling.takeover import can_keep_blocks, take_over

SCHEDULES = (
    Schedule("orca", {"max_num_seqs": 5}),
    Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    Schedule("static", {"batch_size": 4}),
    Schedule("chunked", {"max_num_seqs": 6, "max_num_batched_tokens": 40}),
    Schedule("orca", {"max_num_seqs": 5}, "sjf"),
)
LENGTHS = st.tuples(st.integers(1, 60), st.integers(1, 40))


def sequence(name: str, prompt: int, output: int, client: str = "", weight: float = 1.0) -> ClientSequence:
    return ClientSequence(
        request_id=name, num_prompt_tokens=prompt, max_output_tokens=output, client=client, client_weight=weight
    )


def fair(schedule: Schedule, num_blocks: int = 1000, clock: Callable[[], float] = lambda: 0.0) -> FairScheduler:
    return FairScheduler(schedule, num_blocks, counters=VirtualTokenCounters(), clock=clock)


def finish(scheduler: Scheduler, batch: Batch) -> list[str]:
    """Every row has its token. Returns the clients of those, one a token."""
    rows = [*batch.whole_prefills, *batch.decode]
    for row in rows:
        row.num_output_tokens += 1
        row.finished = row.num_output_tokens >= row.max_output_tokens
    scheduler.complete(batch)
    return [row.client for row in rows if isinstance(row, ClientSequence)]


def run(scheduler: Scheduler, prompt_tokens: Counter[str] | None = None) -> list[str]:
    """One pass. Returns the clients of its tokens; those of prompts are added to `prompt_tokens`."""
    batch = scheduler.next_batch()
    assert batch is not None, "work waits, nothing is in flight, and nothing runs"
    if prompt_tokens is not None:
        for row in batch.prefill:
            prompt_tokens[getattr(row, "client", "")] += row.num_prompt_tokens
    return finish(scheduler, batch)


def clients_waiting(scheduler: Scheduler) -> set[str]:
    return {getattr(row, "client", "") for row in scheduler.waiting}


@pytest.mark.parametrize("order", ["", "edf"])
def test_a_sequence_that_may_begin_late_keeps_its_place_when_its_deadline_has_passed(order: str) -> None:
    scheduler = fair(Schedule("orca", {"max_num_seqs": 1}, *[order] * bool(order)))
    rows = [sequence(name, 4, 1) for name in "abc"]
    for row, deadline in zip(rows, (1.0, 1.0, 5.0), strict=True):
        row.deadline = deadline
        scheduler.add(row)
    rows[1].may_begin_late = True
    for now in (2.0, 3.0):
        assert scheduler.expire(now) == rows[:1] * (now == 2.0)
        assert [*scheduler.waiting] == rows[1:]
    assert scheduler.expire(6.0) == rows[2:]
    batch = scheduler.next_batch()
    assert batch
    assert batch.prefill == (rows[1],)


def names(rows: Sequence[object]) -> list[str]:
    return [getattr(row, "request_id", "") for row in rows]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), LENGTHS), min_size=1, max_size=30),
    num_blocks=st.integers(8, 40),
    client=st.sampled_from(["", "a"]),
)
def test_one_client_is_served_as_without_shares(
    schedule: Schedule, arrivals: list[tuple[int, tuple[int, int]]], num_blocks: int, client: str
) -> None:
    """Pass by pass, while its requests come; each is some passes behind the one before."""
    plain, shared = Scheduler(schedule, num_blocks), fair(schedule, num_blocks)
    for number, (pause, (prompt, output)) in enumerate(arrivals):
        for _ in range(pause):
            same_pass(plain, shared)
        for scheduler in (plain, shared):
            scheduler.add(sequence(str(number), prompt, output, client, weight=2.0))
    while plain.has_work:
        same_pass(plain, shared)
    assert not shared.has_work


def same_pass(plain: Scheduler, shared: FairScheduler) -> None:
    wanted, found = plain.next_batch(), shared.next_batch()
    assert (wanted is None) == (found is None) == (not plain.has_work)
    if wanted and found:
        assert (names(found.prefill), names(found.decode), found.chunks) == (
            names(wanted.prefill),
            names(wanted.decode),
            wanted.chunks,
        )
        finish(plain, wanted)
        shared.took(found, 1.0)
        finish(shared, found)


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    outputs=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    prompts=st.lists(st.integers(1, 60), min_size=4, max_size=4),
)
def test_backlogged_clients_are_served_in_proportion_to_their_weights(
    weights: list[float], outputs: list[int], prompts: list[int]
) -> None:
    """Within the bound of the source: twice the larger of a prompt and the tokens of a full batch."""
    places = 8
    scheduler = fair(Schedule("orca", {"max_num_seqs": places}))
    for number in range(150):
        for client, weight in enumerate(weights):
            scheduler.add(sequence(f"{client}-{number}", prompts[client], outputs[client], str(client), weight))
    bound = 2 * max(max(prompts), OUTPUT_TOKEN * places * max(outputs)) / min(weights)
    tokens, prompt_tokens = Counter[str](), Counter[str]()
    while clients_waiting(scheduler) == {str(client) for client in range(len(weights))}:
        tokens.update(run(scheduler, prompt_tokens))
        served = [
            (prompt_tokens[str(client)] + OUTPUT_TOKEN * tokens[str(client)]) / weight
            for client, weight in enumerate(weights)
        ]
        assert max(served) - min(served) <= bound
        assert served == pytest.approx([scheduler._counters.served(str(client)) for client in range(len(weights))])


def test_a_client_of_four_times_the_weight_gets_four_times_the_tokens() -> None:
    scheduler, tokens = fair(Schedule("orca", {"max_num_seqs": 10})), Counter[str]()
    for number in range(400):
        for client, weight in (("heavy", 4.0), ("light", 1.0)):
            scheduler.add(sequence(f"{client}-{number}", 5, 10, client, weight))
    while len(clients_waiting(scheduler)) == 2:
        tokens.update(run(scheduler))
    assert tokens["heavy"] >= 3900
    assert tokens["heavy"] / tokens["light"] == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(st.tuples(st.sampled_from("abcd"), LENGTHS), min_size=1, max_size=30),
    num_blocks=st.integers(8, 40),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.1, 1.0, 10.0])),
)
def test_every_request_is_served_to_its_end_and_no_pass_is_left_out(
    schedule: Schedule, requests: list[tuple[str, tuple[int, int]]], num_blocks: int, weights: dict[str, float]
) -> None:
    scheduler = fair(schedule, num_blocks)
    for number, (client, (prompt, output)) in enumerate(requests):
        scheduler.add(sequence(str(number), prompt, output, client, weights.get(client, 1.0)))
    passes = 0
    while scheduler.has_work:
        run(scheduler)
        passes += 1
        assert passes <= 200 * len(requests)
    assert scheduler.free_blocks == num_blocks


@given(places=st.integers(2, 40), num_clients=st.integers(2, 5))
def test_all_places_are_taken_where_all_clients_want_them(places: int, num_clients: int) -> None:
    scheduler = fair(Schedule("orca", {"max_num_seqs": places}))
    for number in range(places):
        for client in range(num_clients):
            scheduler.add(sequence(f"{client}-{number}", 1, 9, str(client)))
    run(scheduler)
    rows = Counter(getattr(s, "client", "") for s in scheduler.running)
    assert rows.total() == places
    assert max(rows.values()) - min(rows.values()) <= 1


def test_a_client_that_comes_back_starts_with_the_next_pass() -> None:
    """A flood of long outputs never takes the last place while the other client was here a moment ago."""
    now = [0.0]
    scheduler = fair(Schedule("orca", {"max_num_seqs": 4}), clock=lambda: now[0])
    scheduler.add(sequence("hello", 1, 1, "polite"))
    run(scheduler)
    for number in range(20):
        scheduler.add(sequence(str(number), 1, 1000, "flood"))
    for _ in range(5):
        run(scheduler)
    assert len(scheduler.running) == 3
    scheduler.add(sequence("again", 1, 1, "polite"))
    assert "polite" in run(scheduler)
    now[0] = LINGER_SECONDS + 1
    run(scheduler)
    assert len(scheduler.running) == 4  # It is gone for good: nothing is kept for it.


def test_another_schedule_goes_on_with_the_same_counters() -> None:
    """What waits behind another client's output is not taken for one that has just come."""
    counters = VirtualTokenCounters()
    before, after = (
        FairScheduler(Schedule("orca", {"max_num_seqs": places}), 100, counters=counters, clock=lambda: 0.0)
        for places in (1, 2)
    )
    before.add(sequence("0", 10, 40, "a"))
    run(before)
    before.add(sequence("1", 10, 40, "b"))
    for _ in range(5):
        run(before)
    served = counters.served("a"), counters.served("b")
    assert served[0] > served[1]
    take_over(after, before, keep=can_keep_blocks(after, before))
    assert (counters.served("a"), counters.served("b")) == served


def test_idleness_earns_nothing() -> None:
    """b was away while a was served; then both have the same share, b no debt to collect."""
    scheduler = fair(Schedule("orca", {"max_num_seqs": 2}))
    scheduler.add(sequence("b", 1, 1, "b"))
    for number in range(100):
        scheduler.add(sequence(f"a{number}", 5, 10, "a"))
    for _ in range(200):
        run(scheduler)
    for number in range(100):
        scheduler.add(sequence(f"b{number}", 5, 10, "b"))
    tokens = Counter(client for _ in range(100) for client in run(scheduler))
    assert abs(tokens["a"] - tokens["b"]) <= 20


def test_a_client_that_comes_while_none_is_there_is_not_ahead_of_those_that_were() -> None:
    """a and b had the same, and return in the minute in which their counters are kept."""
    scheduler = fair(Schedule("orca", {"max_num_seqs": 2}))
    for number in range(50):
        for client in "ab":
            scheduler.add(sequence(f"{client}{number}", 5, 10, client))
    while scheduler.has_work:
        run(scheduler)
    for number in range(100):
        scheduler.add(sequence(f"c{number}", 5, 10, "c"))
    for number in range(10):
        scheduler.add(sequence(f"again{number}", 5, 10, "a"))
    tokens = Counter(client for _ in range(100) for client in run(scheduler))
    assert abs(tokens["a"] - tokens["c"]) <= 20


def test_a_client_that_is_alone_for_a_while_is_not_ahead_of_the_next() -> None:
    """Those before it, whose counters had grown, are forgotten."""
    now = [0.0]
    scheduler = fair(Schedule("orca", {"max_num_seqs": 2}), clock=lambda: now[0])
    for number in range(50):
        for client in "ab":
            scheduler.add(sequence(f"{client}{number}", 5, 10, client))
    while scheduler.has_work:
        run(scheduler)
    now[0] = 2 * LINGER_SECONDS
    for client in "cd":
        for number in range(50):
            scheduler.add(sequence(f"{client}{number}", 5, 10, client))
        run(scheduler)
        now[0] += LINGER_SECONDS
    tokens = Counter(client for _ in range(100) for client in run(scheduler))
    assert abs(tokens["c"] - tokens["d"]) <= 20


def test_the_client_that_holds_the_most_gives_up_its_youngest() -> None:
    """The flood's outputs grow out of the cache; the polite sequence, the youngest of all, stays."""
    scheduler = fair(Schedule("rra", {"prefill_batch": 8, "decode_steps": 100}), num_blocks=12)
    for number in range(5):
        scheduler.add(sequence(f"flood{number}", BLOCK_SIZE, 5 * BLOCK_SIZE, "flood"))
    scheduler.add(sequence("polite", BLOCK_SIZE, 2 * BLOCK_SIZE, "polite"))
    while any(s.request_id == "polite" for s in (*scheduler.waiting, *scheduler.running)):
        run(scheduler)
        assert all(s.preemptions == 0 for s in scheduler.waiting if s.request_id == "polite")
    assert scheduler.num_preemptions


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[1], SCHEDULES[3]], ids=str)
@pytest.mark.parametrize(("fixed", "a_row"), [(1.0, 0.2), (1.0, 0.0), (0.1, 1.0)])
def test_a_light_client_runs_at_a_share_of_its_own_speed(schedule: Schedule, fixed: float, a_row: float) -> None:
    """Passes take a fixed time and some for each row: in company an output takes 1.5 times its time alone, and the pass
    that runs when it comes. The flood keeps a third of the time."""
    now = 0.0
    scheduler = fair(schedule, clock=lambda: now)
    flood = 0.0

    def step() -> None:
        nonlocal now, flood
        batch = scheduler.next_batch()
        assert batch is not None
        rows = (*batch.prefill, *batch.decode)
        seconds = fixed + a_row * len(rows)
        now += seconds
        flood += seconds if any(getattr(row, "client", "") == "flood" for row in rows) else 0.0
        finish(scheduler, batch)
        scheduler.took(batch, seconds)

    def answer(name: str) -> float:
        began, polite = now, sequence(name, 4, 50, "polite")
        scheduler.add(polite)
        while not polite.finished:
            step()
        return now - began

    alone = answer("alone")
    for number in range(100):
        scheduler.add(sequence(f"flood{number}", 4, 200, "flood"))
    for _ in range(20):
        step()
    longest = fixed + a_row * 8
    answer("first")  # What an express pass takes is learned.
    began, flood = now, 0.0
    for number in range(3):
        assert answer(f"again{number}") <= 1.6 * alone + 8 * longest
    assert flood >= (now - began) / 3.5
    assert scheduler._counters.served("flood") > 0


def test_a_warm_up_is_no_client() -> None:
    """Otherwise the only client would share with it for a minute."""
    scheduler = fair(Schedule("orca", {"max_num_seqs": 4}))
    scheduler.add(sequence("warm-up", 1, 1))
    run(scheduler)
    for number in range(8):
        scheduler.add(sequence(str(number), 1, 9, "only"))
    run(scheduler)
    assert len(scheduler.running) == 4


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["come", "come", "come", "front", "leave", "unseen"]), st.integers(0, 99)),
        max_size=60,
    )
)
def test_lines_are_the_queue_by_client(moves: list[tuple[str, int]]) -> None:
    """Whatever comes to either end, leaves, or leaves behind its back."""
    lines, queue = ClientLines(), deque[SequenceState]()
    for number, (move, chance) in enumerate(moves):
        one = sequence(str(number), 1, 1, client="abc"[chance % 3])
        if move == "come":
            queue.append(one)
        elif move == "front":
            queue.appendleft(one)
        elif queue and move == "leave":
            lines.take_out(queue, [queue[chance % len(queue)]])
        elif queue:
            del queue[chance % len(queue)]
        found = {name: list(line) for name, line in lines.lines(queue).items()}
        order = sorted(pair for line in found.values() for pair in line)
        assert [id(row) for _, row in order] == [id(row) for row in queue]
        assert all(row.client == name for name, line in found.items() for _, row in line)
        assert lines.sizes(queue) == Counter(name for name, line in found.items() for _ in line)


class Counted(ClientSequence):
    """A sequence that counts how often its client is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "client":
            Counted.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("has_light", [False, True])
def test_neither_a_request_nor_a_pass_looks_at_all_that_wait(has_light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor an express pass, which is looked for whenever the engine has said how long the last pass took."""
    number, scheduler = 1000, fair(Schedule("orca", {"max_num_seqs": 2}))
    monkeypatch.setattr(Counted, "looks", 0)

    def come(name: str, client: str) -> None:
        scheduler.add(Counted(request_id=name, num_prompt_tokens=4, max_output_tokens=2, client=client))

    for n in range(number):
        come(str(n), "abc"[n % 3])
    for n in range(100):
        if has_light:
            come(f"light{n}", "d")
        batch = scheduler.next_batch()
        assert batch is not None
        scheduler.took(batch, 0.1 if set(finish(scheduler, batch)) == {"d"} else 1.0)
    assert Counted.looks < 20 * number


def test_sequences_of_light_clients_are_prefilled_in_the_order_of_the_queue() -> None:
    scheduler = fair(Schedule("orca", {"max_num_seqs": 32}))
    scheduler.add(sequence("first", 4, 9, "x"))
    for number in range(20):
        scheduler.add(sequence(f"flood{number}", 4, 200, "flood"))
    run(scheduler)
    for name in ("y0", "flood20", "x0", "flood21", "y1"):
        scheduler.add(sequence(name, 4, 9, name.rstrip("0123456789")))
    scheduler._credit = 1.0
    express = scheduler.next_batch()
    assert express is not None
    assert (names(express.decode), names(express.prefill)) == (["first"], ["y0", "x0", "y1"])


def test_an_express_pass_admits_none_whose_output_has_no_room_where_the_policy_reserves_it() -> None:
    """The flood's two requests need all blocks in the end."""
    scheduler = fair(Schedule("orca", {"max_num_seqs": 8}), num_blocks=12)
    for number in range(10):
        scheduler.add(sequence(f"flood{number}", BLOCK_SIZE, 5 * BLOCK_SIZE, "flood"))
    run(scheduler)
    assert names(scheduler.running) == ["flood0", "flood1"]
    scheduler.add(sequence("polite", BLOCK_SIZE, 5 * BLOCK_SIZE, "polite"))
    scheduler._credit = 1.0
    while scheduler.has_work:
        run(scheduler)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("chunked", {"max_num_seqs": 32, "max_num_batched_tokens": 40}),
        Schedule("orca", {"max_num_seqs": 32, "max_num_batched_tokens": 40}),
        Schedule("rra", {"prefill_batch": 8, "decode_steps": 4, "max_num_batched_tokens": 40}),
    ],
    ids=lambda schedule: schedule.policy,
)
def test_an_express_pass_has_no_more_tokens_than_a_pass_may(schedule: Schedule) -> None:
    """Eight sequences of a light client decode; 32 tokens are left for its prompts. Where prompts stay whole a longer
    one has a pass of its own."""
    scheduler = fair(schedule)
    for number in range(8):
        scheduler.add(sequence(f"light{number}", 4, 99, "light"))
    run(scheduler)
    for number in range(100):
        scheduler.add(sequence(f"flood{number}", 4, 99, "flood"))
    for number, tokens in enumerate((20, 12, 33, 4)):
        scheduler.add(sequence(f"next{number}", tokens, 99, "light"))
    found = []
    for _ in range(4):
        scheduler._credit = 1.0
        express = scheduler.next_batch()
        assert express is not None
        assert "flood" not in {getattr(row, "client", "") for row in (*express.prefill, *express.decode)}
        alone = schedule.policy != "chunked" and len(express.prefill) == 1
        assert express.num_new_tokens <= 40 or alone
        found += names(express.prefill)
        finish(scheduler, express)
    assert found[:2] == ["next0", "next1"]
