"""A sum over nodes goes by parts where GPUs have adapters of their own; its seconds are counted here by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Sharding, Stage
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.profiler.datasheets.roofline import all_reduce_seconds
from exeplan.simulator.placement_timings import PlacementTimings

US, MB = 1e-6, 1 << 20
DGX = replace(load_cluster("h100"), num_nodes=4)
SHEET = replace(
    with_links(load_datasheet("h100-80gb"), DGX),
    all_reduce_latency=4 * US,
    all_reduce_step_latency=1 * US,
    all_reduce_efficiency=1.0,
    all_reduce_inter_efficiency=0.5,
    all_reduce_ramp=0.0,
    intra_bandwidth=400e9,
    inter_bandwidth=50e9,
    inter_latency=10 * US,
)
"""Round figures: 400 GB/s within a node, and 25 GB/s of a sum through each of eight adapters."""
sizes = st.integers(1, 1 << 32)


def test_two_nodes_sum_an_eighth_through_each_adapter():
    """8 MB: 2 * 7 / 8 of it within at 400 GB/s, 1 MB across at 25 GB/s; seven steps within and one across and back."""
    within, across = 2 * 7 / 8 * 8e6 / 400e9, 2 * 1 / 2 * 1e6 / 25e9
    latency = (4 + 7 + 1 + 2 * 10) * US
    assert all_reduce_seconds(SHEET, "inter", 16, 8e6) == pytest.approx(latency + within + across)
    assert latency + within + across == pytest.approx(107 * US)


def test_four_nodes_are_a_tree_of_two_levels():
    within, across = 2 * 7 / 8 * 8e6 / 400e9, 2 * 3 / 4 * 1e6 / 25e9
    assert all_reduce_seconds(SHEET, "inter", 32, 8e6) == pytest.approx((4 + 7 + 2 + 4 * 10) * US + within + across)


def test_nodes_that_share_one_adapter_are_one_ring():
    shared = replace(SHEET, adapters_per_node=1)
    ring = (4 + 15 + 2 * 10) * US + 2 * 15 / 16 * 8e6 / 25e9
    assert all_reduce_seconds(shared, "inter", 16, 8e6) == pytest.approx(ring)
    a40 = load_cluster("a40")
    assert (a40.adapters_per_node, DGX.adapters_per_node) == (1, 8)


def test_parts_of_nodes_are_one_ring():
    """Of four devices nothing says on how many nodes they are."""
    ring = (4 + 3 + 2 * 10) * US + 2 * 3 / 4 * 8e6 / 25e9
    assert all_reduce_seconds(SHEET, "inter", 4, 8e6) == pytest.approx(ring)


@given(size=sizes, nodes=st.sampled_from([2, 4, 8]), adapters=st.integers(1, 7), ramp=st.sampled_from([0.0, 10 * US]))
def test_more_adapters_and_fewer_bytes_never_take_longer(size, nodes, adapters, ramp):
    def seconds(adapters: int, size: int) -> float:
        return all_reduce_seconds(
            replace(SHEET, adapters_per_node=adapters, all_reduce_ramp=ramp), "inter", 8 * nodes, size
        )

    assert seconds(adapters + 1, size) <= seconds(adapters, size)
    assert seconds(adapters, size) <= seconds(adapters, size + 1)
    assert seconds(8, size) > all_reduce_seconds(replace(SHEET, all_reduce_ramp=ramp), "intra", 8, size)


def without_sums_over_nodes(profile: Profile) -> Profile:
    rows = [m for m in profile.measurements if (m.op, m.phase, m.tensor_parallel_size) != ("all_reduce", "inter", 16)]
    return replace(profile, measurements=tuple(rows))


def test_a_profile_without_such_rows_has_them_put_together_from_those_of_nodes():
    spec = load_model_spec("deepseek-v3")
    whole = profile_from_datasheet(spec, SHEET, dtype="fp8", tensor_parallel_sizes=(2, 8, 16))
    stage = (Stage(devices=tuple(range(16)), layers=(0, 61)),)
    of = {
        adapters: PlacementTimings(without_sums_over_nodes(whole), stage, replace(DGX, adapters_per_node=adapters))
        for adapters in (1, 4, 8)
    }
    sums = {adapters: one.all_reduces[Sharding(16), "inter", 2] for adapters, one in of.items()}
    within, across = (of[8].timings.all_reduce(*one) for one in ((8, "intra"), (2, "inter")))
    size = 64 * MB
    assert float(sums[8](size)) == pytest.approx(float(within(size)) + float(across(size / 8)))
    assert float(sums[4](size)) == pytest.approx(float(within(size)) + float(across(size / 4)))
    ring = 2 * 15 * (DGX.inter.latency + size / 16 / DGX.inter.bytes_per_second)
    assert float(sums[1](size)) == pytest.approx(ring)
    by_rows = PlacementTimings(whole, stage, DGX).all_reduces[Sharding(16), "inter", 2]
    assert float(by_rows(size)) == pytest.approx(all_reduce_seconds(SHEET, "inter", 16, size))
    assert float(by_rows(size)) == pytest.approx(float(sums[8](size)), rel=0.1)
