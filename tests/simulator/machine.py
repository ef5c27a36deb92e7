"""Eight of the made-up devices in one node, for pipelines whose every pass an oracle can follow."""

from exeplan.core.cluster import Cluster, Link

CLUSTER = Cluster(
    name="made-up",
    device="affine",
    num_nodes=1,
    gpus_per_node=8,
    memory_bytes=8 << 30,
    intra=Link(bytes_per_second=2e8, latency=1e-4),
    inter=Link(bytes_per_second=1e8, latency=2e-4),
)
