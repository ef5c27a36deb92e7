"""Eight of the synthetic devices in one node, for pipelines whose every pass an oracle can follow."""

from dataclasses import replace

from exeplan.core.cluster import Cluster, Link
from exeplan.core.profile import Profile

CLUSTER = Cluster(
    name="made-up",
    device="affine",
    num_nodes=1,
    gpus_per_node=8,
    memory_bytes=8 << 30,
    intra=Link(bytes_per_second=2e8, latency=1e-4),
    inter=Link(bytes_per_second=1e8, latency=2e-4),
)


def with_tensor_parallel(profile: Profile, *sizes: int) -> Profile:
    """The profile at these tensor-parallel sizes too: each device computes as long as one alone, and sums on top."""
    shards = [row for row in profile.measurements if row.op in ("rest", "attention")]
    more = [replace(row, tensor_parallel_size=size) for size in sizes for row in shards]
    return replace(profile, measurements=(*profile.measurements, *more))
