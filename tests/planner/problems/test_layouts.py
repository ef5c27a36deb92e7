"""Layouts keep tensor-parallel groups inside nodes, and layers are shared out so that the slowest stage is fastest."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exeplan.core.cluster import Cluster, Link
from exeplan.core.models.model import load_model_spec
from exeplan.planner.problems.layouts import Layout, StageLoad, groups, layouts, placed, share_out, split_groups

LINK = Link(bytes_per_second=1e10, latency=1e-5)


def cluster(num_nodes: int, gpus_per_node: int) -> Cluster:
    return Cluster(
        name="c",
        device="d",
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        memory_bytes=1 << 30,
        intra=LINK,
        inter=LINK,
    )


def test_partial_tensor_parallelism_gives_fewer_stages() -> None:
    assert groups(cluster(1, 4), Layout()) == [(0,), (1,), (2,), (3,)]
    assert groups(cluster(1, 4), Layout(size=2, num_parallel=2)) == [(0, 1), (2,), (3,)]
    assert groups(cluster(1, 4), Layout(size=2, num_parallel=4)) == [(0, 1), (2, 3)]


def test_a_tensor_parallel_group_stays_in_its_node() -> None:
    assert groups(cluster(2, 3), Layout(size=2, num_parallel=4)) == [(0, 1), (2,), (3, 4), (5,)]
    across = groups(cluster(2, 3), Layout(size=2, num_parallel=4, across_nodes=True))
    assert across == [(0, 1), (2, 3), (4,), (5,)]
    assert all(layout.size <= 2 for layout in layouts(cluster(4, 2), load_model_spec("opt-13b"), (1, 2, 4, 8)))
    wide = layouts(cluster(4, 2), load_model_spec("opt-13b"), (1, 2, 4, 8), across_nodes=True)
    assert max(layout.size for layout in wide) == 8


def test_a_degree_that_does_not_divide_the_heads_is_left_out() -> None:
    spec = load_model_spec("opt-13b")  # 40 heads
    assert {layout.size for layout in layouts(cluster(1, 16), spec, (1, 2, 16))} == {1, 2}


def test_even_layouts_have_as_many_gpus_to_each_stage() -> None:
    spec = load_model_spec("llama-3.1-70b")
    found = layouts(cluster(1, 6), spec, (1, 2, 4), even=True)
    assert [{len(group) for group in groups(cluster(1, 6), layout)} for layout in found] == [{1}, {2}]
    assert layouts(cluster(1, 3), spec, (1, 2), even=True) == [Layout()]


def test_decoding_stages_are_tensor_parallel_first() -> None:
    prefill, decode = split_groups(cluster(1, 8), Layout(size=2, num_parallel=6, num_prefill=3))
    assert (prefill, decode) == ([(0, 1), (2,)], [(3, 4), (5, 6), (7,)])


@given(
    layers=st.integers(1, 9),
    stages=st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 2.0), st.integers(0, 6)), min_size=1, max_size=4),
)
@example(layers=3, stages=[(3.0, 0.0, 6), (0.5, 3.5, 6)])  # The faster stage would be the slower one with another.
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_other_sharing_makes_the_slowest_stage_faster(layers: int, stages: list[tuple[float, float, int]]) -> None:
    loads = [StageLoad(layer_seconds=t, fixed_seconds=f, most_layers=most) for t, f, most in stages]

    def slowest(counts: tuple[int, ...]) -> float:
        return max(load.fixed_seconds + n * load.layer_seconds for n, load in zip(counts, loads, strict=True))

    fitting = [
        counts
        for counts in itertools.product(*(range(1, load.most_layers + 1) for load in loads))
        if sum(counts) == layers
    ]
    found = share_out(layers, loads)
    if not fitting:
        assert found is None
    else:
        assert found is not None
        assert sum(found) == layers
        assert slowest(tuple(found)) == pytest.approx(min(map(slowest, fitting)))


def test_encoder_layers_follow_the_decoder_layers() -> None:
    stages = placed(load_model_spec("t5-11b"), [(0,), (1, 2)], [8, 16])
    assert [(s.devices, s.layers, s.encoder_layers) for s in stages] == [
        ((0,), (0, 8), (0, 8)),
        ((1, 2), (8, 24), (8, 24)),
    ]
