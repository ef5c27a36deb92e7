"""What ExeGPT evaluated (section 7.1): the models, GPUs and tasks, and how systems are bounded.

Source: ExeGPT (ASPLOS 2024), Tables 1 to 3. GPT-3 101B runs on the A100 cluster (Table 2). The bars of the
paper's figures have no printed values; what its text says of them is in `figures.py`.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import load_profile
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.policies import policy_names
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

EXEGPT = ("rra", "waa-c", "waa-m")
"""ExeGPT's own policies; its throughput is that of the best of them."""
DTYPE = "float16"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on a part of a cluster."""

    model: str
    cluster: str
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.model}, {self.num_gpus} {self.cluster.upper()}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A deployment with a task of Table 3."""

    deployment: Deployment
    task: str

    def __str__(self) -> str:
        return f"{self.deployment}, {self.task}"


T5_11B = Deployment("t5-11b", "a40", 8)
OPT_13B = Deployment("opt-13b", "a40", 4)
GPT3_39B = Deployment("gpt3-39b", "a40", 16)
GPT3_101B = Deployment("gpt3-101b", "a100", 16)
GPT3_175B = Deployment("gpt3-175b", "a40", 32)
GPT3_175B_A100 = Deployment("gpt3-175b", "a100", 16)
GPT3_341B = Deployment("gpt3-341b", "a40", 48)


def _scenarios(deployments: tuple[Deployment, ...], tasks: tuple[str, ...]) -> tuple[Scenario, ...]:
    return tuple(Scenario(deployment, task) for deployment in deployments for task in tasks)


FIGURES = {
    "fig6": _scenarios((T5_11B, OPT_13B, GPT3_39B, GPT3_101B), ("S", "T", "C1")),
    "fig7": _scenarios((OPT_13B,), ("S", "T", "G", "C1", "C2")),
    "fig8": _scenarios((GPT3_101B, GPT3_175B, GPT3_175B_A100, GPT3_341B), ("G", "C1", "C2")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a run."""

    profiles: Path | None = None
    """A folder of profiles that replace the datasheets."""
    traces: Path | None = None
    """A folder of traces that replace the shipped length laws of figure 10."""
    policies: tuple[str, ...] = tuple(policy_names())
    quick: bool = False

    @property
    def exegpt(self) -> tuple[str, ...]:
        """ExeGPT's policies."""
        return tuple(name for name in EXEGPT if name in self.policies)


@cache
def problem_of(deployment: Deployment, task: str, profiles: Path | None = None) -> Problem:
    """The unbounded problem: from a datasheet, or from `<model>-<device>.json` in a folder of profiles."""
    cluster = load_cluster(deployment.cluster).part(deployment.num_gpus)
    spec = load_model_spec(deployment.model)
    measured = profiles / f"{deployment.model}-{cluster.device}.json" if profiles else None
    if measured and measured.exists():
        profile = load_profile(measured)
    else:
        sheet = with_links(load_datasheet(cluster.device), cluster)
        profile = profile_from_datasheet(spec, sheet, dtype=DTYPE)
    return replace(make_problem(profile, load_workload(task), Bound(seconds=inf), cluster=cluster), one_pipeline=True)


def bounded(problem: Problem, seconds: float, workload: Workload | None = None) -> Problem:
    """The problem under a bound on an output of the 99th-percentile length, with other lengths if they are given."""
    return replace(problem, bound=Bound(seconds=seconds), workload=workload or problem.workload)
