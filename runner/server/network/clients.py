"""Clients: which one a request is from, and what each has in the queue.

A client is a key of the file of API keys, otherwise an address (of IPv6 a network of 64 bits, which one host has). A
full queue takes a request of a client that has less in it, for its weight, than another: the newest requests of those
that have the most leave with 429. With one client a full queue refuses what comes, as ever.
Not here: the order in which the engine serves clients (`exeplan/scheduling/fair_queue.py`), and where keys are from
(`api_keys.py`).
"""

import contextlib
import heapq
import ipaddress
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from starlette.requests import HTTPConnection
from starlette.types import Scope

from exeplan.runner.engine_process.job import Job
from exeplan.runner.ipc.messages import Event
from exeplan.runner.server.openai.errors import RequestError

BY_ADDRESS = "address"
"""The name under which clients without a name are counted together in metrics, whose labels must be few."""
REFUSALS_PER_SECOND = 20
"""A client has as many at once after a second without; more wait for their turn, as long as another client is here."""
MOST_PAUSE_SECONDS = 10.0
_MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client and its limits; None for no limit. Rates may be used up at once, after a minute of rest."""

    name: str = ""
    """Of its key; empty for one that is known by its address."""
    address: str = ""
    weight: float = 1.0
    max_requests: float | None = None
    max_waiting: float | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    admin: bool = False
    """Whether it may change the plan."""

    @property
    def identity(self) -> str:
        """What shares are counted by."""
        return f"key {self.name}" if self.name else f"address {self.address}"

    def at(self, address: str) -> "Client":
        """This client at an address, which says who it is where no name does."""
        return self if self.name else replace(self, address=network_of(address))


def network_of(address: str) -> str:
    """The address, or the network of 64 bits of an IPv6 one; an address within it is one of the same client."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)


def set_client(scope: Scope, client: Client) -> None:
    """Notes the client of a request for `client_of`."""
    scope.setdefault("state", {})["client"] = client.at(scope["client"][0] if scope.get("client") else "")


def client_of(request: HTTPConnection) -> Client:
    """The client that the gate has found."""
    return client_in(request.scope)


def check_admin(request: HTTPConnection, doing: str, *, or_else: str = "") -> None:
    """Raises RequestError 403 without an administrator's key; `or_else` is another way to do it."""
    if not request.app.state.has_key:
        raise RequestError(f"{doing} needs a server with an API key (--api-key){or_else}", status=403)
    if not client_of(request).admin:
        raise RequestError(f"{doing} is not for this API key; in the file of keys `admin: true` allows it", status=403)


def client_in(scope: Scope) -> Client:
    """As `client_of`."""
    client: Client = scope["state"]["client"]
    return client


@dataclass(slots=True)
class _Bucket:
    """A rate: at most `per_minute` in a minute, as much at once; None for no limit. What is taken may exceed it."""

    per_minute: float | None
    left: float = 0.0
    since: float = -math.inf

    def wait(self, now: float) -> float:
        """Seconds until there is something to take, 0 where there is."""
        if self.per_minute is None:
            return 0.0
        self.left = min(self.left + (now - self.since) * self.per_minute / 60, max(self.per_minute, 1.0))
        self.since = now
        return max(0.0, (1.0 - self.left) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self.left -= amount if self.per_minute is not None else 0.0


@dataclass(slots=True)
class _Refusals:
    """When the answers to a client's refused requests go: evenly, so that what is repeated at each comes evenly too.

    It is the generic cell rate algorithm (ITU-T I.371): `due` is when the next one would go at the rate.
    """

    due: float = -math.inf

    def wait(self, now: float) -> float:
        """Seconds that one more waits. Those whose turn is too late to wait for it go at any time of the later half."""
        self.due = max(self.due, now - 1.0)
        wait = self.due - now
        if wait > MOST_PAUSE_SECONDS:
            return random.uniform(MOST_PAUSE_SECONDS / 2, MOST_PAUSE_SECONDS)
        self.due += 1 / REFUSALS_PER_SECOND
        return max(wait, 0.0)


@dataclass(slots=True)
class Account:
    """What one client has here: `num_reading` of its requests are being read, `jobs` have places in the queue."""

    client: Client
    requests: _Bucket
    tokens: _Bucket
    refusals: _Refusals = field(default_factory=_Refusals)
    num_reading: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)

    @classmethod
    def of(cls, client: Client) -> "Account":
        return cls(client, _Bucket(client.requests_per_minute), _Bucket(client.tokens_per_minute))

    @property
    def num_waiting(self) -> int:
        return sum(len(job.waiting) for job in self.jobs.values())

    @property
    def num_open(self) -> int:
        return sum(len(job.open) for job in self.jobs.values())

    def load(self, more: int = 0) -> float:
        """Waiting sequences over the weight."""
        return (self.num_waiting + more) / self.client.weight

    def unbegun(self) -> Iterator[Job]:
        """The jobs of which nothing has begun, the last one first."""
        return (job for job in reversed(self.jobs.values()) if len(job.waiting) == len(job.request_ids))


@dataclass(slots=True)
class Totals:
    """Of the clients of one name, since the start."""

    requests: int = 0
    rejections: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    waiting: int = 0
    """Sequences now, and those that run."""
    running: int = 0


class Clients:
    """The accounts of all clients that have something here, and of all named ones."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._by_job: dict[str, Account] = {}
        self.totals: dict[str, Totals] = {}

    def account(self, client: Client) -> Account:
        """The client's account; a key that was read again has its new limits."""
        found = self._accounts.get(client.identity)
        if found is None:
            found = self._accounts[client.identity] = Account.of(client)
        elif found.client != client:
            limits = (client.requests_per_minute, client.tokens_per_minute)
            if limits != (found.requests.per_minute, found.tokens.per_minute):
                found.requests, found.tokens = _Bucket(limits[0]), _Bucket(limits[1])
            found.client = client
        return found

    def refusal(self, client: Client) -> RequestError | None:
        """Why the client's own limits leave no room for another request; None where they do."""
        account, now = self.account(client), self._clock()
        if (wait := max(account.requests.wait(now), account.tokens.wait(now))) > 0:
            return _refusal("the rate limit of this API key is reached", "rate_limit_exceeded", wait)
        most = client.max_requests
        if most is not None and account.num_reading + len(account.jobs) >= most:
            return _refusal(f"this API key has {most:g} requests, as many as it may at a time", "too_many_requests", 1)
        return self.refusal_to_wait(client, account.num_reading + 1)

    def refusal_to_wait(self, client: Client, count: int) -> RequestError | None:
        """Why no `count` more sequences of the client may wait; None where they may."""
        most = client.max_waiting
        if most is None or (waiting := self.account(client).num_waiting) + count <= most:
            return None
        message = f"{waiting} sequences of this API key are waiting, {most:g} may; try again later"
        return _refusal(message, "too_many_requests", 1)

    @contextlib.contextmanager
    def reading(self, client: Client) -> Iterator[None]:
        """A request of the client is being read."""
        account = self.account(client)
        account.num_reading += 1
        account.requests.take(1.0)
        self.total(client).requests += 1
        try:
            yield
        finally:
            account.num_reading -= 1
            self._forget(account)

    def pause(self, client: Client) -> float:
        """Seconds that the answer to a refused request waits, so that repeating it at once costs others little."""
        account = self.account(client)
        seconds = account.refusals.wait(self._clock()) if len(self._accounts) > 1 else 0.0
        self._forget(account)
        return seconds

    def is_below_share(self, client: Client, size: int) -> bool:
        """Whether one more request of the client is within its share of a queue of this size, those being read
        included; one alone always is."""
        own = self.account(client)
        busy = sum(one.client.weight for one in self._accounts.values() if one is own or one.jobs or one.num_reading)
        return own.num_waiting + own.num_reading + 1 <= max(1.0, size * client.weight / busy)

    @property
    def num_reading(self) -> int:
        """Requests that are being read."""
        return sum(one.num_reading for one in self._accounts.values())

    def making_room(self, client: Client, count: int, num_missing: int) -> list[tuple[Job, Client]]:
        """The jobs that leave the queue for a request of `count` sequences, which lacks `num_missing` places.

        They are, one after the other, the newest job of the client with the most in the queue for its weight, as long
        as this is more than `client` has with the request. Where these are not enough, none leaves.
        """
        own, found = self.account(client), list[tuple[Job, Client]]()
        others = [(one, one.unbegun()) for one in self._accounts.values() if one is not own]
        heap = [(-one.load(), place) for place, (one, _) in enumerate(others)]
        heapq.heapify(heap)
        while num_missing > 0:
            if not heap or -heap[0][0] <= own.load(count):
                return []
            load, place = heapq.heappop(heap)
            account, jobs = others[place]
            if job := next(jobs, None):
                found.append((job, account.client))
                num_missing -= len(job.waiting)
                heapq.heappush(heap, (load + len(job.waiting) / account.client.weight, place))
        return found

    def num_ahead(self, client: Client, num_waiting: int, count: int) -> int:
        """Of the sequences that wait, at most how many start before the client's next ones, by its share."""
        own = self.account(client)
        busy = sum(one.client.weight for one in self._accounts.values() if one is own or one.num_waiting)
        return min(num_waiting, math.ceil((own.num_waiting + count) * busy / client.weight))

    def begin(self, client: Client, job: Job) -> None:
        """The client's job has places in the queue from now on."""
        account = self.account(client)
        job.client, job.client_weight = client.identity, client.weight
        account.jobs[job.job_id] = job
        self._by_job[job.job_id] = account

    def end(self, job: Job) -> None:
        """The job has none any more; one that has ended is accepted."""
        if account := self._by_job.pop(job.job_id, None):
            account.jobs.pop(job.job_id)
            self._forget(account)

    def count(self, events: Iterable[Event]) -> None:
        """Tokens that were computed for clients, those of a prompt once for each of its answers."""
        for event in events:
            if account := self._by_job.get(event.request_id.partition("-")[0]):
                prompt, output = event.num_prompt_tokens if event.first else 0, len(event.token_ids)
                account.tokens.take(prompt + output)
                total = self.total(account.client)
                total.prompt_tokens += prompt
                total.generation_tokens += output

    def count_from_now(self, clients: Iterable[Client]) -> None:
        """Shows the totals of these clients, at 0 if there is nothing yet."""
        for client in clients:
            self.total(client)

    def total(self, client: Client) -> Totals:
        """What is counted under the client's name, or of all without one."""
        return self.totals.setdefault(client.name or BY_ADDRESS, Totals())

    def reading_of_all(self) -> dict[str, Totals]:
        """The totals by name, with what waits and runs now."""
        found = {name: replace(total) for name, total in self.totals.items()}
        for account in self._accounts.values():
            total = found.setdefault(account.client.name or BY_ADDRESS, Totals())
            total.waiting += account.num_waiting
            total.running += account.num_open - account.num_waiting
        return found

    def _forget(self, account: Account) -> None:
        """Of a client with a name the rates are still of interest."""
        if not (account.client.name or account.jobs or account.num_reading):
            self._accounts.pop(account.client.identity, None)


def _refusal(message: str, code: str, seconds: float) -> RequestError:
    retry_after = min(max(math.ceil(seconds), 1), _MAX_RETRY_SECONDS)
    return RequestError(message, status=429, code=code, retry_after=retry_after)
