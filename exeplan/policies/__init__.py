"""Policies: the rules that choose the next batch. One file each, found by its name; no other code compares names.

A policy module offers what `interface.Policy` lists: the search's knobs, its steady state for the closed form, and the
next batch for replay and engine. Adding a policy is adding a file here (and its test); `exeplan.policies.<name>`
becomes `--policy <name>`, with hyphens for underscores. The folder `shared` has no policies: it holds code that several
of them share.

A policy may also come from outside the package: from a file, `--policy ./mine.py`, or from an installed package that
names its module in the entry point group `exeplan.policies`. `auto` never tries these. A schedule holds the absolute
path of a file, a plan on disk the path from its own folder; on several hosts the file has the same path on each.

Security: a policy file is code, and loading it runs it. It is loaded only where the user names it on the command line
or in Python, or in a plan file that the user simulates, serves or measures. A plan from the network cannot name one
(`runner/server/plan_control.py`), and no folder is searched for policies.
"""

import importlib
import pkgutil
import sys
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from exeplan.core.schedule import POLICY_FILE, Schedule
from exeplan.errors import InputError
from exeplan.policies.interface import PassLimits, Policy, PrefillBetween, missing_members, named

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "exeplan.policies"
"""The entry point group of policies from other packages: a name, and the module that is the policy."""


@cache
def load_policy(name: str) -> Policy:
    """The policy of that name, or in the file at that absolute path. Raises InputError listing what there is."""
    if name.endswith(POLICY_FILE):
        return _from_file(Path(name))
    if name in policy_names():
        return cast(Policy, importlib.import_module(f"{__name__}.{name.replace('-', '_')}"))
    installed = _installed()
    if name not in installed:
        raise InputError(f"no policy '{name}'; there are {', '.join([*policy_names(), *sorted(installed)])}")
    module = installed[name].load()
    return _checked(module, name, f"policy '{name}' of package {installed[name].value}")


@cache
def policy_names() -> tuple[str, ...]:
    """The policies of this package, sorted."""
    names = (file.name for file in pkgutil.iter_modules(__path__) if not file.ispkg and file.name != "interface")
    return tuple(sorted(name.replace("_", "-") for name in names))


def engine_of(name: str) -> str:
    """The engine whose own order of work a policy is; '' of any other."""
    return str(getattr(load_policy(name), "ENGINE", ""))


def sampled_evenly(schedule: Schedule) -> bool:
    """Whether a few requests that cover the lengths evenly are served as many random ones are, as its policy says."""
    return not getattr(load_policy(schedule.policy), "ALIKE_TOGETHER", False)


def reserves(schedule: Schedule) -> bool:
    """Whether a request takes KV blocks for its whole output when it begins, as its policy says."""
    return bool(getattr(load_policy(schedule.policy), "RESERVES", False))


def policy_reference(text: str) -> str:
    """How a schedule names the policy that a user names: a file by its absolute path, others as they are.

    Raises InputError where there is no such policy.
    """
    name = str(Path(text).expanduser().resolve()) if text.endswith(POLICY_FILE) else text
    load_policy(name)
    return name


def pass_limits(schedule: Schedule) -> PassLimits:
    """The largest pass that the schedule allows, as its policy says."""
    return load_policy(schedule.policy).pass_limits(schedule)


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """The most that is prefilled between two tokens of a request, as its policy says, or else all that a pass may."""
    policy = load_policy(schedule.policy)
    if hasattr(policy, "prefill_between_tokens"):
        return policy.prefill_between_tokens(schedule)
    limits, groups = policy.pass_limits(schedule), schedule.num_micro_batches
    return PrefillBetween(prompts=groups * (limits.prompts or 1), tokens=limits.tokens, passes=groups)


def check_schedule(schedule: Schedule) -> None:
    """Raises InputError unless the policy exists and takes exactly these control variables, in range."""
    load_policy(schedule.policy).check(schedule)


def _installed() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points  # Slow to load, and seldom asked.

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _from_file(path: Path) -> Policy:
    if not path.is_absolute():
        raise InputError(f"policy file {path} must be given by its absolute path")
    if not path.is_file():
        raise InputError(f"no policy file {path}")
    module_name = f"exeplan_policy_{sha256(str(path).encode()).hexdigest()[:16]}"
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # Dataclasses look their module up there.
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise InputError(f"policy file {path} cannot be loaded: {type(error).__name__}: {error}") from error
    return _checked(module, str(path), f"policy file {path}")


def _checked(module: ModuleType, name: str, what: str) -> Policy:
    """The module as a policy whose schedules carry this name."""
    if missing := missing_members(module):
        raise InputError(f"{what} lacks {', '.join(missing)}; exeplan/policies/interface.py says what a policy defines")
    return named(module, name)
