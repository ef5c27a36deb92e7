"""Serves one plan on several hosts, each of which runs

    EXEPLAN_CLUSTER_KEY=... torchrun --nnodes 2 --nproc-per-node K --node-rank R --master-addr A --master-port P \\
        -m exeplan.runner plan.yaml [options of exeplan serve]

Device d of the plan is torchrun's rank d, so a stage whose ranks share memory takes devices of one host. Rank 0 serves,
and has the engine; every other rank is a node agent with one worker. torchrun only starts these processes, and must not
restart them: the engine restarts workers that die. SIGTERM to the first host's torchrun ends all of them.

exeplan listens on A (rank 0: port P + 1 for node agents and workers, and a free port for the store where workers find
each other), on the interface with a host's own address (the workers' gloo or NCCL), and on --host (HTTP), and nowhere
else. torchrun's own store listens on port P of all interfaces while it runs. A peer that connects to P + 1 must prove
that it knows EXEPLAN_CLUSTER_KEY; tensors and the stores are not protected, so hosts need a private network.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from exeplan.core.model import ModelSpec
from exeplan.core.plan import Plan, as_json
from exeplan.errors import InputError
from exeplan.extras import SERVING, require
from exeplan.planner.load_problem import plan_model, read_plan
from exeplan.runner.distributed.node_agent import run_agent
from exeplan.runner.ipc.handshake import cluster_key
from exeplan.runner.ipc.messages import AgentHello, LauncherSetup
from exeplan.runner.server.arguments import add_arguments, run_server
from exeplan.version import __version__

_FILES = ("model", "workload", "profile", "cluster")
"""Fields of a plan that name files, whose paths may differ between hosts."""
_WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The environment that torchrun gives to a process that it starts."""

    rank: int
    local_rank: int
    world_size: int
    node: int
    address: str
    port: int

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> "Launched":
        """Raises InputError when torchrun did not start this process."""
        try:
            return cls(
                rank=int(environment["RANK"]),
                local_rank=int(environment["LOCAL_RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                node=int(environment["GROUP_RANK"]),
                address=environment["MASTER_ADDR"],
                port=int(environment["MASTER_PORT"]) + 1,
            )
        except (KeyError, ValueError) as error:
            raise InputError(
                f"torchrun has to start this, as in `torchrun --nnodes 2 ... -m exeplan.runner plan.yaml`; it sets no "
                f"usable {error.args[0]} here"
            ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Serves on rank 0, runs a node agent on the others. Returns an exit status as the command line does."""
    parser = argparse.ArgumentParser(
        prog="exeplan.runner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return _run(args, Launched.here(os.environ))
    except InputError as error:
        print(f"exeplan.runner: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace, launched: Launched) -> int:
    require("serving", *SERVING)
    plan = read_plan(args.plan, model=args.model_dir)
    spec = plan_model(plan)
    _check_devices(plan, launched.world_size)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if launched.world_size == 1:
        return run_server(args)
    key = cluster_key()
    if launched.rank == 0:
        return run_server(args, launcher=_launcher(launched, fingerprint(plan, spec)))
    hello = partial(
        AgentHello,
        device=launched.rank,
        host=launched.node,
        local_device=launched.local_rank,
        model_directory=str(spec.directory.resolve()) if spec.directory else None,
        fingerprint=fingerprint(plan, spec),
    )
    return run_agent(launched.address, launched.port, key, hello, on_engine_host=launched.node == 0)


def _launcher(launched: Launched, of_plan: str) -> LauncherSetup:
    return LauncherSetup(
        host=launched.node,
        local_device=launched.local_rank,
        fingerprint=of_plan,
        address=launched.address,
        port=launched.port,
        num_devices=launched.world_size,
    )


def _check_devices(plan: Plan, world_size: int) -> None:
    if plan.num_replicas > 1:
        raise InputError(
            f"the plan has {plan.num_replicas} replicas; torchrun starts one pipeline, so run `exeplan serve` on each "
            "host with a plan for its GPUs"
        )
    devices = sorted(device for stage in plan.placement for device in stage.devices)
    if devices != list(range(world_size)):
        raise InputError(
            f"torchrun started {world_size} processes, the plan is for devices {', '.join(map(str, devices))}; start "
            "one for each, and number them from 0"
        )


def fingerprint(plan: Plan, spec: ModelSpec) -> str:
    """Equal where hosts run the same plan of the same model with the same exeplan."""
    body = {name: value for name, value in as_json(plan).items() if name not in _FILES}
    text = json.dumps([__version__, spec.fingerprint, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _end_with(launcher: int) -> None:
    """Sends SIGTERM to this process when torchrun is gone, as it can no longer do so."""
    while os.getppid() == launcher:
        time.sleep(_WATCH_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
