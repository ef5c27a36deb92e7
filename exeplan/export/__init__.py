"""Exporters: a plan as the processes of another serving engine. One file an engine, found by its name.

`export/<engine>.py` defines what `interface.Exporter` asks for; `forms.py` writes what it returns.
"""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, cast

from exeplan.errors import InputError

if TYPE_CHECKING:
    from exeplan.core.models.model import ModelSpec
    from exeplan.core.plan import Plan
    from exeplan.export.interface import Export, Exporter

FORM_NAMES = ("command", "compose", "kubernetes", "ray-serve", "kuberay", "dynamo")
"""Of `forms.FORMS`, which loads more than a help text needs."""

_OTHERS = ("dynamo", "forms", "interface", "kuberay", "shape")


def exporter_names() -> tuple[str, ...]:
    """The engines that a plan can be exported to, sorted."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name not in _OTHERS))


def load_exporter(name: str) -> "Exporter":
    """The exporter of an engine. Raises InputError naming those there are."""
    if name not in exporter_names():
        raise InputError(f"no exporter '{name}'; there are {', '.join(exporter_names())}")
    return cast("Exporter", import_module(f"{__name__}.{name}"))


def refused(plan: "Plan", spec: "ModelSpec", engine: str) -> str:
    """Why an exporter does not take a plan, by the exporter itself; '' where it does. What the engine loads, and the
    form, may still be refused."""
    try:
        load_exporter(engine).export(plan, spec, model=plan.model)
    except InputError as error:
        return str(error)
    return ""


def engine_model(model: str) -> str:
    """What another engine loads for a plan's model: its directory, its id of the Hub, or the one of a shipped model.

    Raises InputError for a shipped model that is on the Hub under several ids or none.
    """
    from exeplan.core.models.model import hub_ids
    from exeplan.files import shipped_names

    if model not in shipped_names("models"):
        return model
    ids = hub_ids(model)
    if len(ids) == 1:
        return ids[0]
    several = f" (on the Hub: {', '.join(ids)})" if ids else ""
    raise InputError(f"'{model}' is a shipped shape without weights{several}; say what the engine loads with --model")


def installed_remark(export: "Export") -> Iterator[str]:
    """A sentence where the engine is installed here in a version whose options may be others."""
    from importlib import metadata  # As slow to load as all exporters.

    try:
        found = metadata.version(export.package)
    except metadata.PackageNotFoundError:
        return
    first, last = (_numbers(version) for version in export.versions)
    if not first <= _numbers(found)[: len(first)] or not _numbers(found)[: len(last)] <= last:
        yield f"the options are those of {export.engine} {' to '.join(export.versions)}; installed here is {found}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
