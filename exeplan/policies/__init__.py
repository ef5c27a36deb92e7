"""Policies: how work is ordered. One file each, found by its name; nobody else compares policy names.

A policy module offers what `Policy` lists: what the search may turn, its steady state for the closed form, and what
runs next for the replay and the runner. Adding a policy is adding a file here (and its test); `exeplan.policies.<name>`
becomes `--policy <name>`, underscores read as hyphens. A file whose name starts with an underscore is no policy: it
holds what two policies share.
"""

import importlib
import pkgutil
from functools import cache
from typing import cast

from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies.interface import PassLimits, Policy


@cache
def load_policy(name: str) -> Policy:
    """The policy of that name. Raises InputError listing what there is."""
    if name not in policy_names():
        raise InputError(f"no policy '{name}'; there are {', '.join(policy_names())}")
    return cast(Policy, importlib.import_module(f"exeplan.policies.{name.replace('-', '_')}"))


@cache
def policy_names() -> tuple[str, ...]:
    """All policies, sorted."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in names if not name.startswith("_") and name != "interface"))


def pass_limits(schedule: Schedule) -> PassLimits:
    """The largest pass that the schedule allows, as its policy says."""
    return load_policy(schedule.policy).pass_limits(schedule)


def check_schedule(schedule: Schedule) -> None:
    """Raises InputError unless the policy exists and takes exactly these control variables, in range."""
    load_policy(schedule.policy).check(schedule)
