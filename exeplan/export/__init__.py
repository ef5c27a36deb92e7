"""Exporters: a plan as the options of another serving engine. One file an engine, found by its name.

`export/<engine>.py` defines what `interface.Exporter` asks for. No engine has one yet, so no command offers any.
"""

import pkgutil
from importlib import import_module
from typing import cast

from exeplan.errors import InputError
from exeplan.export.interface import Exporter

_INTERFACE = "interface"


def exporter_names() -> tuple[str, ...]:
    """The engines that a plan can be exported to, sorted."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != _INTERFACE))


def load_exporter(name: str) -> Exporter:
    """The exporter of an engine. Raises InputError naming those there are."""
    if name not in exporter_names():
        there = ", ".join(exporter_names()) or "none"
        raise InputError(f"no exporter '{name}'; there are {there}")
    return cast(Exporter, import_module(f"{__name__}.{name}"))
