"""What an exporter is: one function that turns a plan into the processes of another engine, and says what is lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan

PLAN_PATH = "/etc/exeplan/plan.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """How the processes of one server, one on each of its hosts, find each other."""

    options: tuple[str, ...]
    """With `{hosts}`, their number, `{rank}`, which one it is, and `{leader}`, the address of the first."""
    followers: tuple[str, ...] = ()
    """Of all but the first."""

    def words(self, *, hosts: str, rank: str, leader: str) -> tuple[str, ...]:
        """Of the process with this rank, `0` of the first."""
        joined = tuple(word.format(hosts=hosts, rank=rank, leader=leader) for word in self.options)
        return joined if rank == "0" else (*joined, *self.followers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Equal servers of the engine."""

    name: str
    program: tuple[str, ...]
    options: tuple[str, ...]
    """The words that follow; the port is among them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[int, ...]
    """Of each server its host, or the first of them."""
    gpus: tuple[tuple[int, ...], ...]
    """Of each server its GPUs, by the host's numbers; none on a CPU. Of several hosts those on each of them."""
    num_cpus: int = 0
    """Cores that the workers of one server take, where they run on CPUs."""
    num_hosts: int = 1
    """Hosts that the workers of one server are on, in a row."""
    join: Join | None = None
    """Where a server is started on each of its hosts; None where it is within one, or starts its workers itself."""
    phase: str = ""
    """`prefill` or `decode` for servers that do nothing else."""
    own_ports: Mapping[str, int] = field(default_factory=dict)
    """By option or environment variable a further port, of the first such server of a host: the next one has the
    next. An option that is not among the words has that port by default."""
    own_paths: Mapping[str, str] = field(default_factory=dict)
    """By option a file that servers of one host may not share, as the engine has it by default: the first one's."""
    address_variable: str = ""
    """The environment variable with the address at which the other servers reach this one; '' where there is none."""

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.program, *self.options)

    @property
    def count(self) -> int:
        return len(self.hosts)

    @property
    def num_gpus(self) -> int:
        """Of one server, on each of its hosts."""
        return len(self.gpus[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """What is in front of servers that only prefill or only decode: a request goes to one of each.

    Both engines' routers take `--prefill URL [PORT]` and `--decode URL` once for each server.
    """

    program: tuple[str, ...]
    options: tuple[str, ...]
    """Without the servers; the port is among them."""
    version: str
    image: str
    package: str
    """The Python distribution that it is in."""
    port: int
    health_path: str
    bootstrap: str = ""
    """The option of a prefill server whose port follows its URL; '' where none does."""
    remarks: tuple[str, ...] = ()
    """What has to be done for it, and how its limit is less than the plan's, in sentences."""

    def command(self, workers: Sequence[tuple[str, str, int | None]]) -> tuple[str, ...]:
        """With the phase, URL and bootstrap port of each server."""
        words = [*self.program, *self.options]
        for phase, url, port in workers:
            words += [f"--{phase}", url, *([] if port is None else [f"{port}"])]
        return tuple(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """How to start an engine with a plan."""

    engine: str
    versions: tuple[str, str]
    """The first and the last version whose options these are."""
    image: str
    """A container image of the last one."""
    package: str
    """The Python distribution whose installed version is compared."""
    port: int
    port_option: str = "--port"
    port_step: int = 1
    """From the port of one server of a host to that of the next: more where a server takes further ports by its own."""
    health_path: str
    cache_path: str = "/root/.cache/huggingface"
    """HF_HOME in the image."""
    instances: tuple[Instance, ...]
    router: Router | None = None
    """None where servers need none, or any will do."""
    remarks: tuple[str, ...] = ()
    """What the engine does otherwise than the plan says, and what that means, in sentences."""
    plan_text: str | None = None
    """A file that the servers read, at `PLAN_PATH`."""
    replicas: tuple[int, int] | None = None
    """The fewest and the most replicas, where their number is to follow the load."""
    as_run: Plan | None = None
    """The plan as the engine schedules it, to be replayed; None where that is the plan itself, or no policy here
    schedules so."""

    @property
    def num_hosts(self) -> int:
        return len({host + n for one in self.instances for host in one.hosts for n in range(one.num_hosts)})


class Exporter(Protocol):
    """A module of this package."""

    def export(self, plan: Plan, spec: ModelSpec, *, model: str) -> Export:
        """The plan of this model, which the engine loads by that name. Raises InputError for what it cannot run."""
        ...
