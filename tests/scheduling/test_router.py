"""Queues of many replicas: the fewest, in turn, as a search of all of them finds it."""

from hypothesis import given
from hypothesis import strategies as st

from exeplan.scheduling.router import Queues, Router

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=200)


def searched(counts: list[int], first: int) -> int:
    """The oracle: all in the order from `first` on, the earliest of the fewest."""
    order = [*range(first, len(counts)), *range(first)]
    return min(order, key=counts.__getitem__)


@given(counts=COUNTS, data=st.data())
def test_the_shortest_queue_is_that_of_a_search(counts: list[int], data: st.DataObject) -> None:
    queues = Queues(counts)
    for _ in range(20):
        number = data.draw(st.integers(0, len(counts) - 1))
        change = data.draw(st.integers(-counts[number], 4))
        counts[number] += change
        queues.add(number, change)
        first = data.draw(st.integers(0, len(counts) - 1))
        assert queues.shortest(first) == searched(counts, first)


def test_idle_replicas_are_used_in_turn() -> None:
    queues, router = Queues([0] * 3), Router("shortest-queue")
    assert [router.choose(queues) for _ in range(4)] == [0, 1, 2, 0]


def test_a_long_queue_is_passed_over() -> None:
    router = Router("shortest-queue")
    assert [router.choose(Queues([7, 1, 7])) for _ in range(3)] == [1, 1, 1]
