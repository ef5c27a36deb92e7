"""A cluster is read from its file or refused by the field that is wrong; the shipped ones use known devices."""

from pathlib import Path

import pytest

from exeplan.core.cluster import Cluster, Link, load_cluster
from exeplan.errors import InputError
from exeplan.files import shipped_names
from exeplan.profiler.datasheets.datasheet import load_datasheet

TWO_NODES = """
device: a40-48gb
nodes: 2
gpus_per_node: 4
memory: 48GB
intra: {bandwidth: 25GB, latency: 10us}
inter: {bandwidth: 12.5GB, latency: 15us}
"""


@pytest.fixture
def two_nodes(tmp_path: Path) -> Cluster:
    (tmp_path / "mine.yaml").write_text(TWO_NODES)
    return load_cluster(str(tmp_path / "mine.yaml"))


def test_a_file_is_read_in_bytes_and_seconds(two_nodes: Cluster) -> None:
    assert two_nodes == Cluster(
        name="mine",
        device="a40-48gb",
        num_nodes=2,
        gpus_per_node=4,
        memory_bytes=48 * 10**9,
        intra=Link(bytes_per_second=25e9, latency=10 * 1e-6),
        inter=Link(bytes_per_second=12.5e9, latency=15 * 1e-6),
    )


def test_gpus_are_numbered_node_by_node(two_nodes: Cluster) -> None:
    assert two_nodes.num_gpus == 8
    assert [two_nodes.node_of(gpu) for gpu in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert two_nodes.same_node((0, 3))
    assert not two_nodes.same_node((3, 4))


def test_a_link_takes_its_latency_and_its_share_of_the_bandwidth(two_nodes: Cluster) -> None:
    assert two_nodes.inter.seconds(125e6) == pytest.approx(0.01 + 15e-6)


def test_gpus_share_one_adapter_unless_the_file_says_how_many_there_are(tmp_path: Path, two_nodes: Cluster) -> None:
    assert two_nodes.adapters_per_node == 1
    path = tmp_path / "more.yaml"
    path.write_text(TWO_NODES.replace("node: 4", "node: 4\nadapters_per_node: 4"))
    assert (load_cluster(str(path)).adapters_per_node, load_cluster(str(path)).part(2).adapters_per_node) == (4, 2)
    shipped = {name: load_cluster(name).adapters_per_node for name in shipped_names("clusters")}
    assert shipped == {"a100": 8, "a40": 1, "cpu": 1, "h100": 8, "h200": 8}


@pytest.mark.parametrize(("num_gpus", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (1, 4)), (8, (2, 4))])
def test_a_part_is_some_of_a_node_or_whole_nodes(two_nodes: Cluster, num_gpus: int, shape: tuple[int, int]) -> None:
    part = two_nodes.part(num_gpus)
    assert (part.num_nodes, part.gpus_per_node) == shape


@pytest.mark.parametrize(
    ("num_gpus", "message"),
    [
        (0, "cluster mine has 8 GPUs, not 0"),
        (9, "cluster mine has 8 GPUs, not 9"),
        (6, "6 GPUs of cluster mine are neither part of a node nor whole nodes of 4"),
    ],
)
def test_another_part_is_refused(two_nodes: Cluster, num_gpus: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        two_nodes.part(num_gpus)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes: 2\ngpus", "gpus", r"must have exactly device, nodes, .*; look at nodes"),
        ("nodes: 2", "nodes: 2\n1: 2", r"must have exactly .*; look at 1"),
        ("a40-48gb", "[a40]", r"device must be a name, found \['a40'\]"),
        ("nodes: 2", "nodes: 0", r"nodes must be a whole number from 1 to 100000, found 0"),
        ("nodes: 2", "nodes: true", r"nodes must be a whole number from 1 to 100000, found True"),
        ("node: 4", "node: 4.5", r"gpus_per_node must be a whole number from 1 to 100000, found 4.5"),
        (
            "node: 4",
            "node: 4\nadapters_per_node: 0",
            r"adapters_per_node must be a whole number from 1 to 100000, found 0",
        ),
        ("node: 4", "node: 4\nadapters_per_node: 5", r"adapters_per_node may be at most gpus_per_node, 4, found 5"),
        ("48GB", "48 apples", r"memory must be a size such as 4GiB or 500MB, found '48 apples'"),
        ("25GB", ".nan", r"intra bandwidth must be above zero, found 'nan'"),
        ("15us", "0us", r"inter latency must be above zero, found '0us'"),
        ("15us", ".inf", r"inter latency must be finite, found 'inf'"),
        ("25GB, latency: 10us", "25GB", r"intra needs bandwidth \(bytes a second\) and latency, found"),
        ("{bandwidth: 25GB, latency: 10us}", "25GB", r"intra needs bandwidth .* found '25GB'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TWO_NODES.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        load_cluster(str(path))


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(
        InputError, match=r"no cluster file or shipped cluster 'b200'; shipped are a100, a40, cpu, h100"
    ):
        load_cluster("b200")


@pytest.mark.parametrize("name", shipped_names("clusters"))
def test_a_shipped_cluster_is_of_a_shipped_device(name: str) -> None:
    cluster = load_cluster(name)
    sheet = load_datasheet(cluster.device)
    assert cluster.memory_bytes == sheet.memory
    assert (cluster.intra, cluster.inter) == (sheet.link("intra"), sheet.link("inter"))
    assert cluster.intra.bytes_per_second > cluster.inter.bytes_per_second


@pytest.mark.parametrize(("name", "num_gpus"), [("a40", 48), ("a100", 16), ("h100", 8), ("h200", 8)])
def test_the_papers_clusters_and_the_nodes_have_their_sizes(name: str, num_gpus: int) -> None:
    assert load_cluster(name).num_gpus == num_gpus
    assert load_cluster(name).gpus_per_node == 8
