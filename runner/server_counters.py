"""What a server's own Prometheus metrics say of a run: requests, tokens and mean times between two readings.

vLLM, SGLang and exeplan have these families, under prefixes of their own. Source: vLLM 0.32 `v1/metrics/loggers.py`,
SGLang 0.5 `srt/metrics/collector.py`, and `runner/server/observation/metrics.py`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from exeplan.runner.scrape import scrape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exeplan.core.runs.metrics import RequestRecord

PREFIXES = ("exeplan", "vllm", "sglang")
_TIMES = {"ttft": "time_to_first_token_seconds", "latency": "e2e_request_latency_seconds"}
_TOKENS = ("prompt_tokens_total", "generation_tokens_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """Of the requests that ended between two readings, by the server: numbers, and mean seconds from a request's
    arrival there."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    ttft: float
    latency: float
    num_reference_passes: int = 0
    """Of a server with `--watch-speed`."""
    slowness: float = 1.0
    """How many times as long passes took as while the plan's profile was measured, in the mean of these."""
    reference_seconds: float = 0.0
    """What they took."""

    @property
    def speed(self) -> str:
        """What the reference passes say of the machine."""
        return (
            f"by {self.num_reference_passes} reference passes the server took {self.slowness:.2f} times as long as "
            "while the profile was measured, other processes on its cores included"
        )

    def at_profile_speed(self, records: "Sequence[RequestRecord]", *, num_engines: int) -> "list[RequestRecord]":
        """The records of a backlog on engines of the speed that they had while they were profiled, reference passes
        left out: all times by one factor, as the server tells the mean alone."""
        began = min(record.arrival for record in records)
        seconds = max(record.token_times[-1] for record in records if record.token_times) - began
        factor = (1 - self.reference_seconds / (num_engines * seconds)) / self.slowness
        return [
            replace(
                record,
                arrival=began + factor * (record.arrival - began),
                start=began + factor * (record.start - began),
                token_times=tuple(began + factor * (time - began) for time in record.token_times),
            )
            for record in records
        ]

    def disagreements(self, records: "Sequence[RequestRecord]") -> list[str]:
        """Sentences on numbers that are not those of the requests that a client sent."""
        sent = {
            "requests": len(records),
            "prompt_tokens": sum(record.input_tokens for record in records),
            "output_tokens": sum(record.output_tokens for record in records),
        }
        named = {name: name.replace("_", " ") for name in sent}
        return [
            f"the server counted {getattr(self, name)} {named[name]} where {number} were asked for"
            for name, number in sent.items()
            if getattr(self, name) != number
        ]


def read_counters(url: str, headers: Mapping[str, str], tls_ca: Path | None = None) -> Mapping[str, float] | None:
    """The sums of all families that a run is told by, without prefix; None of a server that shows no such metrics.

    Those of `--watch-speed` only where the server has them.
    """
    try:
        families = scrape(f"{url.rstrip('/')}/metrics", headers, tls_ca)
    except (OSError, ValueError):
        return None
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in families:
        for sample in family.samples:
            prefix, _, name = sample.name.partition(":")
            if name in (*_NAMES, *_SPEED) and not math.isnan(sample.value):
                found[prefix][name] += sample.value
    whole = [found[prefix] for prefix in PREFIXES if set(found[prefix]) >= _NAMES]
    return whole[0] if whole else None


_NAMES = {*_TOKENS, *(f"{name}_{part}" for name in _TIMES.values() for part in ("sum", "count"))}
_SPEED = ("machine_slowness_count", "machine_slowness_sum", "reference_pass_seconds_total")


def between(before: Mapping[str, float], after: Mapping[str, float]) -> ServerRun | None:
    """The run between two readings; None where no request ended or the server began anew."""
    more = {name: after[name] - before[name] for name in _NAMES}
    count = f"{_TIMES['latency']}_count"
    if more[count] <= 0 or min(more.values()) < 0:
        return None
    means = {name: more[f"{family}_sum"] / (more[f"{family}_count"] or math.nan) for name, family in _TIMES.items()}
    prompt_tokens, output_tokens = (round(more[family]) for family in _TOKENS)
    passes, slowness, spent = (after.get(name, 0.0) - before.get(name, 0.0) for name in _SPEED)
    return ServerRun(
        requests=round(more[count]),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        **means,
        num_reference_passes=round(passes),
        slowness=slowness / passes if passes else 1.0,
        reference_seconds=spent,
    )
