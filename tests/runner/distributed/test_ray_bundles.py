"""A stage lies on one node where one has room for it, and on as few as possible otherwise."""

import pytest

from exeplan.core.schedule import Stage
from exeplan.errors import InputError
from exeplan.runner.distributed.ray_bundles import bundles, devices_left, worker_resources

CPU, GPU = worker_resources("cpu", 2), worker_resources("cuda", 2)
PIPELINE = (Stage(devices=(0, 1, 2), layers=(0, 3)), Stage(devices=(3,), layers=(3, 6)))


def devices(placement, worker, nodes):
    return [bundle.devices for bundle in bundles(placement, worker, nodes)]


def test_a_worker_takes_a_gpu_or_the_cores_of_its_threads():
    assert (CPU, GPU) == ({"CPU": 2.0}, {"GPU": 1.0})


def test_a_bundle_a_stage():
    found = bundles(PIPELINE, CPU, [{"CPU": 8.0}])
    assert [(one.devices, one.resources) for one in found] == [((0, 1, 2), {"CPU": 6.0}), ((3,), {"CPU": 2.0})]


def test_a_stage_that_no_node_has_room_for_is_divided_into_as_few_as_possible():
    assert devices(PIPELINE, GPU, [{"GPU": 2.0}, {"GPU": 2.0}]) == [(0, 1), (2,), (3,)]


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
