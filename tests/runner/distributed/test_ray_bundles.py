"""A stage lies on one node where one has room for it, and on as few as possible otherwise."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from exeplan.core.schedule import Stage
from exeplan.errors import InputError
from exeplan.runner.distributed.ray_bundles import bundles, devices_left, worker_resources

CPU, GPU = worker_resources("cpu", 2), worker_resources("cuda", 2)
PIPELINE = (Stage(devices=(0, 1, 2), layers=(0, 3)), Stage(devices=(3,), layers=(3, 6)))


def devices(placement, worker, nodes):
    return [bundle.devices for bundle in bundles(placement, worker, nodes)]


def pipeline(sizes):
    ends = accumulate(sizes, initial=0)
    return tuple(Stage(devices=tuple(range(*pair)), layers=(n, n + 1)) for n, pair in enumerate(pairwise(ends)))


def test_a_worker_takes_a_gpu_or_the_cores_of_its_threads():
    assert (CPU, GPU) == ({"CPU": 2.0}, {"GPU": 1.0})


def test_a_bundle_a_stage():
    found = bundles(PIPELINE, CPU, [{"CPU": 8.0}])
    assert [(one.devices, one.resources) for one in found] == [((0, 1, 2), {"CPU": 6.0}), ((3,), {"CPU": 2.0})]


def test_a_stage_that_no_node_has_room_for_is_divided_into_as_few_as_possible():
    assert devices(PIPELINE, GPU, [{"GPU": 2.0}, {"GPU": 2.0}]) == [(0, 1), (2,), (3,)]


@pytest.mark.parametrize(
    ("sizes", "room", "expected"),
    [
        ((2, 2, 2), (3, 3), [(0, 1), (2, 3), (4,), (5,)]),
        ((2, 2), (3, 1), [(0, 1), (2,), (3,)]),
        ((1, 1, 3), (3, 2), [(0,), (1,), (2, 3, 4)]),
        ((3, 2), (1, 2, 2), [(0, 1), (2,), (3, 4)]),
        ((5, 5), (4, 4, 2), [(0, 1, 2, 3), (4,), (5, 6, 7, 8), (9,)]),
    ],
)
def test_all_bundles_have_a_node_at_once(sizes, room, expected):
    assert devices(pipeline(sizes), GPU, [{"GPU": float(count)} for count in room]) == expected


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_whatever_room_is_enough_is_used(sizes, room):
    """Trying every node for every bundle finds one for all."""
    assume(sum(sizes) <= sum(room))
    found = devices(pipeline(sizes), GPU, [{"GPU": float(count)} for count in room])
    assert [device for part in found for device in part] == list(range(sum(sizes)))
    assert fits([len(part) for part in found], tuple(room))


def fits(sizes, room):
    if not sizes:
        return True
    size, *others = sizes
    places = [node for node, count in enumerate(room) if count >= size]
    return any(fits(others, (*room[:node], room[node] - size, *room[node + 1 :])) for node in places)


def test_a_cluster_that_is_too_small_is_named_with_what_it_has():
    with pytest.raises(InputError) as found:
        bundles(PIPELINE, GPU, [{"GPU": 2.0}, {"CPU": 64.0}])
    assert str(found.value) == (
        "the plan needs 4 x 1 GPU, the Ray cluster's nodes have room for 2 of its 4 workers: 2 GPU; 0 GPU"
    )


def test_a_cluster_without_nodes_has_no_room():
    with pytest.raises(InputError, match="room for 0 of its 4 workers"):
        bundles(PIPELINE, GPU, [])


@pytest.mark.parametrize(
    ("free", "left"),
    [
        ([], ()),
        ([{}, {"CPU": 1.9}], ()),
        ([{"CPU": 2.0}, {"CPU": 5.0}], ((0, 1), (2,))),
        ([{"CPU": 64.0}, {"CPU": 64.0}], ((0, 1, 2, 3),)),
        ([{"CPU": 2.0}] * 5, ((0,), (1,), (2,), (3,))),
    ],
)
def test_the_devices_left_are_as_many_as_each_node_has_room_for_and_no_more_than_there_were(free, left):
    assert devices_left(PIPELINE, CPU, free) == left
