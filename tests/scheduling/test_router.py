"""Queues of many replicas: the fewest, in turn, as a search of all of them finds it."""

from hypothesis import given
from hypothesis import strategies as st

from exeplan.scheduling.router import Queues, Router

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=200)


def searched(counts: list[int], capacities: list[float], first: int) -> int:
    """The oracle: all in the order from `first` on, the earliest of the shortest."""
    order = [*range(first, len(counts)), *range(first)]
    return min(order, key=lambda number: (counts[number] + 1) / capacities[number])


@given(counts=COUNTS, kinds=st.sampled_from([[1.0], [2.0, 1.0], [3.0, 1.0, 0.5]]), data=st.data())
def test_the_shortest_queue_is_that_of_a_search(counts: list[int], kinds: list[float], data: st.DataObject) -> None:
    capacities = [data.draw(st.sampled_from(kinds)) for _ in counts]
    queues = Queues(counts, capacities)
    for _ in range(20):
        number = data.draw(st.integers(0, len(counts) - 1))
        change = data.draw(st.integers(-counts[number], 4))
        counts[number] += change
        queues.add(number, change)
        first = data.draw(st.integers(0, len(counts) - 1))
        assert queues.shortest(first) == searched(counts, capacities, first)


def test_idle_replicas_are_used_in_turn() -> None:
    queues, router = Queues([0] * 3), Router("shortest-queue")
    assert [router.choose(queues) for _ in range(4)] == [0, 1, 2, 0]


def test_a_long_queue_is_passed_over() -> None:
    router = Router("shortest-queue")
    assert [router.choose(Queues([7, 1, 7])) for _ in range(3)] == [1, 1, 1]


def test_a_replica_that_serves_twice_as_much_takes_twice_as_many() -> None:
    queues, router = Queues([0, 0], [10.0, 5.0]), Router("shortest-queue")
    for _ in range(30):
        queues.add(router.choose(queues), 1)
    assert queues.num_open == [20, 10]


def test_capacities_that_are_not_all_known_do_not_count() -> None:
    queues, router = Queues([0, 0], [10.0, None]), Router("shortest-queue")
    assert [router.choose(queues) for _ in range(3)] == [0, 1, 0]
