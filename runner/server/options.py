"""ServeOptions: all options of `exeplan serve` apart from the plan, checked before anything is started."""

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from exeplan.drift.state import MODES
from exeplan.errors import InputError
from exeplan.runner.server.network.hosts import check_host_name
from exeplan.runner.server.observation.metrics import ALIASES

ADMISSIONS = ("queue", "refuse-late")
GENERATION_CONFIGS = ("auto", "none")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Times in seconds. Raises InputError naming the option that is wrong."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port."""
    api_key: str | None = None
    api_keys: Path | None = None
    """A file of keys with names and limits (see `api_keys`)."""
    max_queue: int | None = None
    """Sequences that may wait for their prefill; None derives it from the plan."""
    admission: str = "queue"
    """`refuse-late` also refuses requests that would exceed the plan's bounds, the wait included."""
    generation_config: str = "auto"
    """`auto` takes sampling defaults from the model's generation_config.json, `none` takes none from it."""
    request_seconds: float = 600.0
    """Timeout of a request."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server from a browser."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may be addressed to, besides loopback and `host`; "*" for any."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies, whose `X-Forwarded-For` says which client a request is from."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """PEM files of a certificate and its key; None to serve without TLS."""
    served_model_name: str | None = None
    dummy_weights: bool = False
    drain_seconds: float = 30.0
    timeline: Path | None = None
    deadline_seconds: float | None = None
    """A batch that takes longer on any stage means a hanging worker; None derives it from the plan."""
    ray: str | None = None
    """The address of a Ray cluster whose nodes have the plan's devices, or `auto`; None for this host."""
    front_ends: int = 1
    """HTTP servers that share the replicas: this one, and the others each on another node of the Ray cluster."""
    replicas: tuple[int, int] | None = None
    """The fewest and the most replicas, between which their number follows the load; None for those of the plan."""
    plan_file: Path | None = None
    """The plan's file, which SIGHUP reads again."""
    model_dir: str | None = None
    """Where the model of `plan_file` is, if not where it says."""
    replan: str = "advise"
    """`off`, `advise` (propose better plans) or `auto` (adopt them)."""
    replan_dwell_seconds: float = 60.0
    """Minimum time between two re-plans."""
    replan_file: Path | None = None
    """Where re-plans are written; None for the folder of the plan."""
    metrics_aliases: str | None = None
    """`vllm`: metrics that vLLM has too are shown under its names as well."""
    watch_speed: bool = False
    """Whether reference passes are repeated while the engine works."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's memory that may be used, in place of what the plan says, and each that is adopted later."""
    log_format: str = "text"
    log_level: str = "info"

    @property
    def written_to(self) -> Path | None:
        """Where re-plans are written: `replan_file`, or next to the plan; None for a plan that is in no file."""
        plan = self.plan_file
        return self.replan_file or (plan and plan.with_name(f"{plan.stem}-replanned.yaml"))

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port must lie between 0 and 65535, found {self.port}")
        if self.front_ends < 1:
            raise InputError(f"--front-ends must be at least 1, found {self.front_ends}")
        if self.front_ends > 1 and not self.ray:
            raise InputError(f"--front-ends {self.front_ends} takes as many nodes of a Ray cluster; name it with --ray")
        if self.max_queue is not None and self.max_queue < 1:
            raise InputError(f"--max-queue must be at least 1, found {self.max_queue}")
        if self.api_key == "":
            raise InputError("--api-key must not be empty; leave it out to serve without one")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise InputError("--api-key or $EXEPLAN_API_KEY begins or ends with white space, which no client can send")
        if not 0 < self.request_seconds < math.inf:
            raise InputError(f"--request-timeout must be a positive time, found {self.request_seconds:g} s")
        if self.metrics_aliases not in (None, *ALIASES):
            raise InputError(f"--metrics-aliases must be {', '.join(ALIASES)}, found '{self.metrics_aliases}'")
        for name, value, known in (
            ("--admission", self.admission, ADMISSIONS),
            ("--generation-config", self.generation_config, GENERATION_CONFIGS),
            ("--replan", self.replan, MODES),
            ("--log-format", self.log_format, LOG_FORMATS),
            ("--log-level", self.log_level, LOG_LEVELS),
        ):
            if value not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, found '{value}'")
        for origin in self.cors_origins:
            _check_origin(origin)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("--tls-cert and --tls-key belong together; give both, or none to serve without TLS")
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        for name in self.allowed_hosts:
            check_host_name(name)


def _check_network(proxy: str) -> None:
    try:
        ipaddress.ip_network(proxy)
    except ValueError:
        message = f"--trusted-proxy must be an address or a network such as 10.0.0.0/8, found '{proxy}'"
        raise InputError(message) from None


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin:
        raise InputError(f"--cors-origin must be an origin such as https://chat.example.org, found '{origin}'")
    plain = origin.lower().removesuffix({"http": ":80", "https": ":443"}[parts.scheme])
    if plain != origin:
        raise InputError(f"--cors-origin must be as browsers send it, {plain}, found '{origin}'")
