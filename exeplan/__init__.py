"""exeplan: which execution schedule serves a language model best under a latency bound, and the engine that runs it.

    solution = exeplan.optimize("demo.json", "alpaca", latency_bound="3s", fit_context=True)
    solution.plan, solution.to_frame(), solution.plot(), solution.save("plan.yaml")
    exeplan.simulate("plan.yaml").plot()

Everything below is loaded when it is first used, so that `import exeplan` stays instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from exeplan.errors import Infeasible, InputError
from exeplan.version import __version__

if TYPE_CHECKING:
    from exeplan.api import (
        compare,
        datasheet_profile,
        load_cluster,
        load_model,
        load_plan,
        load_profile,
        load_workload,
        optimize,
        save_plan,
        save_profile,
        simulate,
    )
    from exeplan.core.bounds import Bound
    from exeplan.core.cluster import Cluster
    from exeplan.core.models.model import ModelSpec
    from exeplan.core.plan import Plan
    from exeplan.core.profile import Profile
    from exeplan.core.schedule import Estimate, Schedule, Stage
    from exeplan.planner.comparison import Comparison
    from exeplan.planner.plan_request import PlanRequest
    from exeplan.planner.simulation import Simulation
    from exeplan.planner.solution import Solution, solve
    from exeplan.workload.workload import Workload

_HOMES = {
    "api": (
        "compare",
        "datasheet_profile",
        "load_cluster",
        "load_model",
        "load_plan",
        "load_profile",
        "load_workload",
        "optimize",
        "save_plan",
        "save_profile",
        "simulate",
    ),
    "core.bounds": ("Bound",),
    "core.cluster": ("Cluster",),
    "core.models.model": ("ModelSpec",),
    "core.plan": ("Plan",),
    "core.profile": ("Profile",),
    "core.schedule": ("Estimate", "Schedule", "Stage"),
    "planner.comparison": ("Comparison",),
    "planner.plan_request": ("PlanRequest",),
    "planner.simulation": ("Simulation",),
    "planner.solution": ("Solution", "solve"),
    "workload.workload": ("Workload",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Bound",
    "Cluster",
    "Comparison",
    "Estimate",
    "Infeasible",
    "InputError",
    "ModelSpec",
    "Plan",
    "PlanRequest",
    "Profile",
    "Schedule",
    "Simulation",
    "Solution",
    "Stage",
    "Workload",
    "__version__",
    "compare",
    "datasheet_profile",
    "load_cluster",
    "load_model",
    "load_plan",
    "load_profile",
    "load_workload",
    "optimize",
    "save_plan",
    "save_profile",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'exeplan' has no attribute '{name}'")
    found = globals()[name] = getattr(import_module(f"exeplan.{_HOME_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
