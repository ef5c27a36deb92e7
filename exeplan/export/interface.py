"""What an exporter is: one function that turns a plan into an engine's options, and says what is lost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from exeplan.core.model import ModelSpec
from exeplan.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """How to start an engine with a plan."""

    command: tuple[str, ...]
    """The command line, a word an entry."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files that the command names, by their names."""
    remarks: tuple[str, ...] = ()
    """What the engine does otherwise than the plan says, in sentences."""


class Exporter(Protocol):
    """A module of this package."""

    def export(self, plan: Plan, spec: ModelSpec) -> Export:
        """The plan of this model for the engine. Raises InputError naming what the engine cannot run at all."""
        ...
