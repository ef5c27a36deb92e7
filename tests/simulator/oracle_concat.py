"""A second, slow replay of pure ConcatBatching with deadlines, from TCB's text alone: a reference for `concat`.

It shares no line with `exeplan.core.queue_order`, `exeplan.policies` or `exeplan.simulator`. One device, memory
for all requests, no prompt longer than a row. A request that has not begun by its deadline when a batch begins is never
served. Times are seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

BatchSeconds = Callable[[int, int, int, list[int]], float]
"""(rows, tokens of a row, requests whose prompts lie in them, contexts of the rows that decode) -> seconds."""


@dataclass(eq=False)
class Request:
    number: int
    prompt: int
    output: int
    arrival: float
    deadline: float
    start: float | None = None
    times: list[float] = field(default_factory=list)


def concat(
    requests: list[Request],
    *,
    rows: int,
    row_tokens: int,
    order: str,
    eta: float,
    seconds: BatchSeconds,
    first_token_from_prefill: bool,
) -> None:
    """Fills in when each request began and got its tokens; neither for those that expired."""
    now, left = 0.0, sorted(requests, key=lambda r: r.arrival)
    while left:
        now = max(now, left[0].arrival)
        here = [r for r in left if r.arrival <= now and r.deadline >= now]
        left = [r for r in left if r.arrival > now or r.deadline >= now]
        if not here:
            continue
        packed = _das(here, rows, row_tokens, eta) if order == "das" else _plain(here, rows, row_tokens, order)
        batch = [request for row in packed for request in row]
        for request in batch:
            request.start = now
            left.remove(request)
        longest = min(max(map(_tokens, packed)), max(map(_tokens, _evened(batch, len(packed)))))
        now += seconds(len(packed), longest, len(batch), [])
        if first_token_from_prefill:
            for request in batch:
                request.times.append(now)
        while any(len(r.times) < r.output for r in batch):
            decoded = [len(r.times) - first_token_from_prefill for r in batch]
            now += seconds(0, 0, 0, [r.prompt + count for r, count in zip(batch, decoded, strict=True)])
            for request in batch:
                if len(request.times) < request.output:
                    request.times.append(now)


def _plain(here: list[Request], rows: int, row_tokens: int, order: str) -> list[list[Request]]:
    """In order, each into the row with most tokens that still has room, until one finds none."""
    keys = {"fcfs": lambda r: r.arrival, "sjf": lambda r: r.prompt, "edf": lambda r: r.deadline}
    packed: list[list[Request]] = [[] for _ in range(rows)]
    for request in sorted(here, key=keys[order]):
        room = [row for row in packed if _tokens(row) + request.prompt <= row_tokens]
        if not room:
            break
        max(room, key=_tokens).append(request)
    return [row for row in packed if row]


def _das(here: list[Request], rows: int, row_tokens: int, eta: float) -> list[list[Request]]:
    """Algorithm 1, line by line; q is 1 - eta."""
    waiting, packed = sorted(here, key=lambda r: r.prompt), []
    for _ in range(rows):
        if not waiting:
            break
        row: list[Request] = []
        if _tokens(waiting) <= row_tokens:
            row = list(waiting)
        else:
            s = max(n for n in range(len(waiting)) if _tokens(waiting[:n]) <= row_tokens)
            p = next(n for n in range(1, s + 1) if n >= eta * s - 1e-9)
            row = waiting[:p]
            mean = sum(1 / r.prompt for r in row) / p
            urgent = [r for r in waiting[p:] if 1 / r.prompt >= (1 - eta) * mean * (1 - 1e-12)]
            others = [r for r in waiting[p:] if r not in urgent]
            for request in [*sorted(urgent, key=lambda r: (r.deadline, r.arrival, r.number)), *others]:
                if _tokens(row) + request.prompt <= row_tokens:
                    row.append(request)
        packed.append(row)
        waiting = [r for r in waiting if r not in row]
    return packed


def _evened(batch: list[Request], rows: int) -> list[list[Request]]:
    """The longest first, each into the row with fewest tokens."""
    packed: list[list[Request]] = [[] for _ in range(rows)]
    for request in sorted(batch, key=lambda r: -r.prompt):
        min(packed, key=_tokens).append(request)
    return packed


def _tokens(row: list[Request]) -> int:
    return sum(request.prompt for request in row)
