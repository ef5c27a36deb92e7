"""A Ray cluster whose nodes are all on this machine, until standard input closes; a program.

python ray_cluster.py CPUS...

It has a node with so many CPUs for each argument, the first of which is the head, and prints its address. Then it obeys
lines: `lose N` kills the processes of node N, `add CPUS` adds a node, `behead 0` kills the control store (GCS), all
of a head that others need; it prints what it has done.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

OPTIONS = {"object_store_memory": 80 << 20, "include_dashboard": False}


def main(sizes: list[int]) -> None:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Sockets lie in it, whose paths must be short.
    os.environ["RAY_TMPDIR"] = folder  # Where Ray writes its latest cluster's address, in a folder that must be there.
    Path(folder, "ray").mkdir()
    cluster = Cluster()
    try:
        nodes = [cluster.add_node(num_cpus=size, temp_dir=folder, **OPTIONS) for size in sizes]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            command, number = line.split()
            if command == "lose":
                cluster.remove_node(nodes[int(number)], allow_graceful=False)
            elif command == "behead":
                nodes[int(number)].kill_gcs_server(check_alive=False)
            else:
                nodes.append(cluster.add_node(num_cpus=int(number), **OPTIONS))
            print(line.strip(), flush=True)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
