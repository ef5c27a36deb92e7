"""ServeOptions: everything that `exeplan serve` can be told beside the plan, checked before anything is started."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exeplan.drift.state import MODES
from exeplan.errors import InputError

ADMISSIONS = ("queue", "refuse-late")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Times in seconds. Raises InputError naming the option that is wrong."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    api_key: str | None = None
    max_queue: int | None = None
    """Sequences that may wait for their prefill; None: from the plan."""
    admission: str = "queue"
    """`refuse-late` also turns away who cannot be served within the plan's bounds any more, the wait included."""
    request_seconds: float = 600.0
    """After so long a request is given up."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server from a browser."""
    served_model_name: str | None = None
    dummy_weights: bool = False
    drain_seconds: float = 30.0
    timeline: Path | None = None
    deadline_seconds: float | None = None
    """A batch that takes longer on any stage means a hanging worker; None: from the plan."""
    hosts: Mapping[str, Any] | None = None
    """What `python -m exeplan.runner` knows of the hosts of the plan; None where all devices are on this one."""
    plan_file: Path | None = None
    """Where the plan was read, to be read again on SIGHUP."""
    replan: str = "advise"
    """Whether better plans are looked for, and adopted: off, advise, auto."""
    replan_dwell_seconds: float = 60.0
    """Between two re-plans, at least."""
    replan_file: Path | None = None
    """Where re-plans are written; None: beside the plan."""
    log_format: str = "text"
    log_level: str = "info"

    @property
    def written_to(self) -> Path | None:
        """Where re-plans go: what was said, or beside the plan; None for a plan that is in no file."""
        plan = self.plan_file
        return self.replan_file or (plan and plan.with_name(f"{plan.stem}-replanned.yaml"))

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port must lie between 0 and 65535, found {self.port}")
        if self.max_queue is not None and self.max_queue < 1:
            raise InputError(f"--max-queue must be at least 1, found {self.max_queue}")
        if self.api_key == "":
            raise InputError("--api-key must not be empty; leave it out to serve without one")
        if not 0 < self.request_seconds < math.inf:
            raise InputError(f"--request-timeout must be a positive time, found {self.request_seconds:g} s")
        for name, value, known in (
            ("--admission", self.admission, ADMISSIONS),
            ("--replan", self.replan, MODES),
            ("--log-format", self.log_format, LOG_FORMATS),
            ("--log-level", self.log_level, LOG_LEVELS),
        ):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, found '{value}'")
        for origin in self.cors_origins:
            _check_origin(origin)


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin:
        raise InputError(f"--cors-origin must be an origin such as https://chat.example.org, found '{origin}'")
