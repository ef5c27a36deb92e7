"""Plays a load on an engine in this process or on a server, and records the time of every token.

Three kinds of load: all requests at once (a backlog, for which a plan predicts throughput), a closed loop at a given
concurrency, and an open loop at a Poisson rate or at a trace's own arrival times. Prompts are random token ids of the
sampled lengths, and outputs are forced to theirs, so that the work is the workload's whatever the model generates.
"""

import asyncio
import contextlib
import json
import math
import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exeplan.arrays import Floats
from exeplan.core.runs.machine_speed import MachineSpeed
from exeplan.core.runs.metrics import RequestRecord
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import load_policy
from exeplan.progress import SILENT, Told, note
from exeplan.workload.workload import Workload

if TYPE_CHECKING:
    import aiohttp

    from exeplan.runner.compute.reference_passes import RepeatedPasses
    from exeplan.runner.engine.engine import Engine, StepRecord

Ints = NDArray[np.int64]
_CYCLES = 12
_ATTEMPTS = 20
AT_ONCE = 2048
"""Connections to a server: each takes one of its files and one here, and servers take so many from one address."""
_SPARE_FILES = 64
AFTER_CUT = 1.0
"""Seconds after the end of a run that was cut at which its records have the tokens that were not seen."""
_BAD, _EXPIRED, _FULL, _UNKNOWN = 400, 408, 429, 422
"""The status of a request that asks for what cannot be, of one that had not begun by its deadline, of one for which
there is no room, and of one with a field that some servers do not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of one run, in order of arrival."""

    input_tokens: Ints
    output_tokens: Ints
    arrivals: Floats | None = None
    """Seconds from the start; None: all at once, or as `concurrency` admits them."""
    concurrency: int | None = None
    deadlines: Floats | None = None
    """Seconds from a request's arrival by which it has to begin; None for no deadlines."""
    seed: int = 0

    def deadline(self, index: int) -> float | None:
        return None if self.deadlines is None else float(self.deadlines[index])

    @property
    def backlog(self) -> bool:
        """Whether the queue never runs empty before the end of the load."""
        return self.arrivals is None

    def prompt(self, index: int, vocab_size: int) -> list[int]:
        """Random token ids. The first ids are often special, so a large vocabulary goes without them."""
        low = min(100, vocab_size // 2)
        rng = np.random.default_rng([self.seed, index])
        return rng.integers(low, vocab_size, int(self.input_tokens[index])).tolist()


def draw_load(
    workload: Workload,
    num_requests: int,
    *,
    seed: int = 0,
    concurrency: int | None = None,
    rate: float | None = None,
    trace_arrivals: bool = False,
    stratified: bool = True,
) -> Load:
    """A sample of the workload; with `trace_arrivals`, the first requests of its trace at their own times.

    `stratified` lengths cover the law evenly, others are drawn at random. The workload's deadlines apply unless all
    requests arrive at once. Raises InputError when the workload has no arrival times.
    """
    if trace_arrivals:
        trace = workload.trace
        if trace is None or trace.arrival_s is None:
            raise InputError(f"workload '{workload.name}' has no arrival times; give a rate or a concurrency instead")
        n = min(num_requests, len(trace.inputs))
        times = trace.arrival_s[:n] - trace.arrival_s[0]
        due = workload.deadlines.draw(n, seed=seed) if workload.deadlines else None
        return Load(
            input_tokens=trace.inputs[:n], output_tokens=trace.outputs[:n], arrivals=times, deadlines=due, seed=seed
        )
    inputs, outputs = _sample_with_tail(workload, num_requests, seed=seed, stratified=stratified)
    arrivals = None
    if rate is not None:
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, num_requests))
    timely = workload.deadlines if rate is not None or concurrency is not None else None
    return Load(
        input_tokens=inputs,
        output_tokens=outputs,
        arrivals=arrivals,
        concurrency=concurrency,
        deadlines=timely.draw(num_requests, seed=seed) if timely else None,
        seed=seed,
    )


def _sample_with_tail(workload: Workload, num_requests: int, *, seed: int, stratified: bool) -> tuple[Ints, Ints]:
    """A sample with an output of at least the 99th-percentile length: the bound is on these, and a small sample may
    have none by chance. More of them than chance gives would make batches that run to their ends longer."""
    p99 = workload.output_quantile(0.99)
    for attempt in range(_ATTEMPTS):
        inputs, outputs = workload.sample(num_requests, seed=seed + attempt * 7919, stratified=stratified)
        if outputs.max() >= p99:
            break
    return inputs, outputs


def enough_requests(schedule: Schedule, *, throughput: float, seconds: float) -> int:
    """Requests for a backlog of about `seconds`, and of at least a dozen cycles: fewer give no stable mean."""
    return max(50, round(throughput * seconds), _CYCLES * load_policy(schedule.policy).starts_together(schedule))


@dataclass(slots=True)
class _InFlight:
    """A request in flight; times in seconds."""

    arrival: float
    start: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_tokens: int | None = None
    """Of the output, as the server says; None for as many as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """A load played in this process, as records by several clocks: on a shared machine they tell the engine from the
    other processes, and from the machine's speed.

    The run is cut into intervals, each of which ends with a step, with a reference pass, or with waiting.
    """

    raw: list[RequestRecord]
    """By the wall clock, reference passes included, in order of arrival."""
    wall: Floats
    cpu: Floats
    """[intervals + 1] The wall clock and this thread's CPU clock at the borders, seconds from the start."""
    steps: "tuple[StepRecord | None, ...]"
    """[intervals] The engine's step that ended with each; None in those without."""
    reference_share: Floats
    """[intervals] Of its time that reference passes took, which no record counts."""
    speed: MachineSpeed | None = None
    """Of the reference passes, times on `wall`; None without any."""
    cut: bool = False
    """Whether it was ended before its last request was; see `cut_at`."""

    @property
    def records(self) -> list[RequestRecord]:
        """By the wall clock."""
        return self.on_clock(np.diff(self.wall))

    def on_cpu_clock(self) -> list[RequestRecord]:
        """On a core without other processes. Only for a backlog, in which the engine never sleeps."""
        return self.on_clock(np.diff(self.cpu))

    def at_profile_speed(self, *, one_thread: bool) -> list[RequestRecord]:
        """On the machine as it was while it was profiled; with `one_thread` on a core without other processes."""
        return self.on_clock(self.profile_seconds(one_thread=one_thread))

    def profile_seconds(self, *, one_thread: bool) -> Floats:
        """[intervals] What each would have taken at the speed of the profile."""
        if self.speed is None:
            return np.diff(self.cpu if one_thread else self.wall)
        seconds = np.diff(self.cpu) if one_thread else np.diff(self.wall) / self.speed.others
        return seconds / self.speed.slowness((self.wall[1:] + self.wall[:-1]) / 2)

    def on_clock(self, seconds: Floats) -> list[RequestRecord]:
        """The records where each interval takes these seconds, and reference passes take none."""
        return [
            replace(
                r,
                arrival=float(self.moved(r.arrival, seconds)),
                start=float(self.moved(r.start, seconds)),
                token_times=tuple(self.moved(r.token_times, seconds).tolist()),
            )
            for r in self.raw
        ]

    def moved(self, times: ArrayLike, seconds: Floats | None = None) -> Floats:
        """These times of the wall clock where each interval takes these seconds, as measured unless given, and
        reference passes take none."""
        clock = np.append(0.0, np.cumsum(self.apart(np.diff(self.wall) if seconds is None else seconds)))
        wall, clock = (np.append(border, border[-1] + AFTER_CUT) for border in (self.wall, clock))
        return np.asarray(np.interp(np.asarray(times, dtype=float), wall, clock))

    def end(self, seconds: Floats) -> float:
        """When the run ends where each interval takes these seconds, and reference passes take none."""
        return float(self.apart(seconds).sum())

    @property
    def reference_cost(self) -> float:
        """Seconds of reference passes over those of the engine's steps."""
        seconds = np.diff(self.wall)
        ran = np.array([step is not None for step in self.steps])
        spent = float((seconds - self.apart(seconds)).sum())
        return spent / busy if (busy := float(self.apart(seconds)[ran].sum())) else 0.0

    def apart(self, seconds: Floats) -> Floats:
        """[intervals] These seconds without what reference passes took of them."""
        return (1 - self.reference_share) * seconds


def play_engine(
    engine: "Engine",
    load: Load,
    *,
    vocab_size: int,
    reference: "RepeatedPasses | None" = None,
    seconds: float = math.inf,
    told: Told = SILENT,
) -> EngineRun:
    """Runs the load on an engine in this process, with reference passes between its steps.

    After these seconds it is cut: requests that began have their missing tokens `AFTER_CUT`, others no record.
    A backlog is added before the run begins; what that takes is in no figure.
    """
    from exeplan.runner.compute.tokens.sampling import SamplingParams
    from exeplan.runner.engine.engine import Request

    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=load.prompt(index, vocab_size),
            sampling=SamplingParams(temperature=0.0, max_tokens=int(output), ignore_eos=True),
        )
        for index, output in enumerate(load.output_tokens)
    ]
    in_flight: dict[str, _InFlight] = {}
    done: dict[int, RequestRecord] = {}
    arrived = 0
    if load.arrivals is None and load.concurrency is None:  # They are there when the run begins: in no pass's time.
        for number, one in enumerate(requests):
            engine.add(one)
            in_flight[str(number)] = _InFlight(arrival=0.0)
        arrived = len(requests)
    began, cpu_began = time.perf_counter(), time.thread_time()
    clocks, steps, referring = [(0.0, 0.0)], list["StepRecord | None"](), list[float]()

    def ends(step: "StepRecord | None" = None, *, refers: bool = False) -> None:
        clocks.append((time.perf_counter() - began, time.thread_time() - cpu_began))
        steps.append(step)
        referring.append(float(refers))

    while len(done) < len(requests) and (now := time.perf_counter() - began) < seconds:
        while arrived < len(requests) and _may_arrive(load, arrived, now, len(in_flight)):
            due = now if load.arrivals is None else float(load.arrivals[arrived])
            in_flight[str(arrived)] = _InFlight(arrival=due)
            patience = load.deadline(arrived)
            deadline = None if patience is None else began + due + patience
            engine.add(replace(requests[arrived], deadline=deadline))
            arrived += 1
        if not engine.has_work and load.arrivals is not None:
            time.sleep(max(0.0, float(load.arrivals[arrived]) - (time.perf_counter() - began)))
            ends()
            continue
        for output in engine.step():
            request = in_flight[output.request_id]
            request.start = output.start - began
            request.token_times += [output.time - began] * len(output.token_ids)
            if output.finish_reason is not None:
                index, expired = int(output.request_id), output.finish_reason == "expired"
                done[index] = _record(load, index, in_flight.pop(output.request_id), expired=expired)
                told(f"{len(done)} of {len(requests)} requests", len(done) / len(requests))
        for step in engine.last_steps or (None,):
            ends(step)
        if reference and reference.repeat_if_due() and reference.at_once:
            ends(refers=True)
    wall, cpu = np.array(clocks).T
    speed = reference.speed_from(began) if reference else None
    cut = len(done) < len(requests)
    for request_id in list(in_flight):
        engine.abort(request_id)
        if (request := in_flight[request_id]).token_times:
            missing = int(load.output_tokens[int(request_id)]) - len(request.token_times)
            request.token_times += [float(wall[-1]) + AFTER_CUT] * missing
            done[int(request_id)] = _record(load, int(request_id), request)
    return EngineRun(
        raw=[done[index] for index in sorted(done)],
        wall=wall,
        cpu=cpu,
        steps=tuple(steps),
        reference_share=np.array(referring) if reference is None or reference.at_once else _share_of(speed, wall),
        speed=speed,
        cut=cut,
    )


def _share_of(speed: MachineSpeed | None, wall: Floats) -> Floats:
    """[intervals] The share of reference passes that ran while the engine went on."""
    samples = speed.samples if speed else ()
    begins = np.array([sample.time for sample in samples])
    costs = np.array([sample.cost for sample in samples])
    spent = np.array([np.clip(border - begins, 0.0, costs).sum() for border in wall])
    return np.diff(spent) / np.maximum(np.diff(wall), 1e-9)


def cut_at(records: Sequence[RequestRecord], seconds: float) -> list[RequestRecord]:
    """The records of a run that was cut then: requests that had a token, their later ones `AFTER_CUT`."""
    return [
        replace(r, token_times=tuple(time if time <= seconds else seconds + AFTER_CUT for time in r.token_times))
        for r in records
        if r.token_times and r.token_times[0] <= seconds
    ]


async def play_url(
    url: str,
    load: Load,
    *,
    model: str,
    vocab_size: int,
    api_key: str | None = None,
    tls_ca: Path | None = None,
    stream: bool = True,
    at_once: int = AT_ONCE,
    told: Told = SILENT,
) -> list[RequestRecord]:
    """Runs the load on an OpenAI-compatible server; raises InputError when it does not answer as one.

    At most `at_once` requests of a backlog are there at a time, fewer where no more files may be open or the server
    refuses more (429), which is noted: the others wait here until there is room. A concurrency is kept, or refused.

    Without streaming, tokens are spread evenly between the first and the last one of the server's `timing`. A prefill
    starts at the first token minus the prefill time in the `timing` of exeplan's server; for other servers it starts at
    the arrival, so that the wait is included. Answers with fewer tokens than asked for, by the server's `usage`, count
    with those, which is noted.
    """
    import aiohttp

    number, waits_here = len(load.input_tokens), load.backlog and not load.concurrency
    at_once = min(at_once, number) if waits_here else load.concurrency or number
    if waits_here and (few := _connections(at_once)) < at_once:
        note([f"{few} of these requests are sent at a time, as no more files may be open here (ulimit -n)"])
        at_once = few
    gate, began, usage = _Gate(at_once), time.perf_counter(), _UsageOfStreams()
    asked = f"{server_root(url)}/v1/completions"
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=trusting(tls_ca))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=authorization(api_key)) as client:

        async def one(index: int) -> RequestRecord:
            if load.arrivals is not None:
                await asyncio.sleep(max(0.0, float(load.arrivals[index]) - (time.perf_counter() - began)))
            body = {**_completion(load, index, model=model, vocab_size=vocab_size), "stream": stream}
            while True:
                try:
                    async with gate:
                        if stream:
                            return await usage.play(client, asked, body, load, index, began)
                        return await _whole(client, asked, body, load, index, began)
                except _RefusedError as refusal:
                    if not (waits_here and gate.inside):  # Nothing of this load would make room.
                        raise InputError(str(refusal)) from None
                    gate.limit = gate.inside

        done = 0

        async def counted(index: int) -> RequestRecord:
            nonlocal done
            record = await one(index)
            done += 1
            told(f"{done} of {number} requests", done / number)
            return record

        try:
            records = list(await asyncio.gather(*(counted(index) for index in range(number))))
        except (aiohttp.ClientError, OSError) as error:
            raise InputError(f"{asked} does not answer: {error or type(error).__name__}") from None
    if gate.limit < at_once:
        note([f"the server took {gate.limit} of these requests at a time and refused more; the others waited here"])
    note(_shorter(records, load))
    return records


def _shorter(records: Sequence[RequestRecord], load: Load) -> list[str]:
    """A sentence on answers that ended before they had the tokens that were asked for; none where all have them."""
    pairs = zip(records, load.output_tokens.tolist(), strict=True)
    found = [(len(r.token_times), asked) for r, asked in pairs if 0 < len(r.token_times) < asked]
    if not found:
        return []
    tokens, asked = map(sum, zip(*found, strict=True))
    return [
        f"{len(found)} of {len(records)} answers were shorter than asked, {tokens:,} of {asked:,} tokens in all: the "
        "server ends them in spite of ignore_eos, and figures count the tokens that came"
    ]


class BadRequestError(InputError):
    """A server refused a request for what it asks (400, 422)."""


class _RefusedError(Exception):
    """The server has no room for a request now."""


class _Gate:
    """Lets in as many as `limit`, which may fall meanwhile."""

    def __init__(self, limit: int) -> None:
        self.limit, self.inside = limit, 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.inside < self.limit)
            self.inside += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self.inside -= 1
            self._changed.notify()


def _connections(wanted: int) -> int:
    """As many as wanted, or as files may be open, after raising that limit as far as this process may."""
    try:
        import resource
    except ModuleNotFoundError:  # Not on Windows, which has no such limit.
        return wanted
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # Some systems allow no more than a limit of their own.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(min(wanted, soft - len(os.listdir("/dev/fd")) - _SPARE_FILES), 1)


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _may_arrive(load: Load, index: int, now: float, in_flight: int) -> bool:
    if load.concurrency is not None and in_flight >= load.concurrency:
        return False
    return load.arrivals is None or float(load.arrivals[index]) <= now


def _completion(load: Load, index: int, *, model: str, vocab_size: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": load.prompt(index, vocab_size),
        "max_tokens": int(load.output_tokens[index]),
        "temperature": 0,
        "ignore_eos": True,
        **({} if load.deadlines is None else {"deadline": load.deadline(index)}),
    }


async def _whole(
    client: "aiohttp.ClientSession", url: str, body: dict[str, Any], load: Load, index: int, began: float
) -> RequestRecord:
    request = _InFlight(arrival=time.perf_counter() - began)
    async with client.post(url, json=body) as response:
        text = await response.text(errors="replace")
        if response.status == _EXPIRED and load.deadlines is not None:
            return _record(load, index, request, expired=True)
        _check(response.status, text, index)
    answer = _parsed(text, index)
    if not answer.get("choices"):
        raise _senseless(text, index)
    now = time.perf_counter() - began
    request.start, first, request.num_tokens = request.arrival, now, _num_tokens(answer)
    if timing := _timing(answer):
        request.start = now - (timing["e2e_s"] - timing["queue_s"])
        first = now - (timing["e2e_s"] - timing["ttft_s"])
    request.token_times = [first, now] if load.output_tokens[index] > 1 else [first]
    return _record(load, index, request)


class _UsageOfStreams:
    """Streams with the number of tokens in their last chunk, as far as the server knows `stream_options`."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = {"stream_options": {"include_usage": True}}

    async def play(
        self, client: "aiohttp.ClientSession", url: str, body: dict[str, Any], load: Load, index: int, began: float
    ) -> RequestRecord:
        if self._options:
            try:
                return await _stream(client, url, {**body, **self._options}, load, index, began)
            except BadRequestError:
                pass
        record = await _stream(client, url, body, load, index, began)
        self._options = {}
        return record


async def _stream(
    client: "aiohttp.ClientSession", url: str, body: dict[str, Any], load: Load, index: int, began: float
) -> RequestRecord:
    request = _InFlight(arrival=time.perf_counter() - began)
    prefill_seconds: float | None = None
    async with client.post(url, json=body) as response:
        if response.status == _EXPIRED and load.deadlines is not None:
            return _record(load, index, request, expired=True)
        if response.status != 200:
            _check(response.status, await response.text(errors="replace"), index)
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = _parsed(line[6:].decode(errors="replace"), index)
            if error := event.get("error"):
                message = error.get("message", error) if isinstance(error, dict) else error
                raise InputError(f"request {index} failed: {str(message)[:200]}")
            if event.get("choices"):
                request.token_times.append(time.perf_counter() - began)
            request.num_tokens = _num_tokens(event) or request.num_tokens
            if timing := _timing(event):
                prefill_seconds = timing["ttft_s"] - timing["queue_s"]
    request.start = request.arrival
    if prefill_seconds is not None and request.token_times:
        request.start = request.token_times[0] - prefill_seconds
    return _record(load, index, request)


def _parsed(text: str, index: int) -> dict[str, Any]:
    """An answer, or a chunk of one."""
    try:
        answer = json.loads(text)
    except ValueError:
        raise _senseless(text, index) from None
    if not isinstance(answer, dict):
        raise _senseless(text, index)
    return answer


def _senseless(text: str, index: int) -> InputError:
    return InputError(f"request {index} was answered with something else than a completion: {text.strip()[:200]!r}")


def _num_tokens(answer: dict[str, Any]) -> int | None:
    """Of the output; None where the server does not say."""
    usage = answer.get("usage")
    found = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return found if isinstance(found, int) else None


def _timing(answer: dict[str, Any]) -> dict[str, float] | None:
    """Of exeplan's server; None of others."""
    timing = answer.get("timing")
    return timing if isinstance(timing, dict) and {"queue_s", "ttft_s", "e2e_s"} <= set(timing) else None


def _check(status: int, answer: str, index: int) -> None:
    if status == 200:
        return
    sentence = f"request {index} was answered {status}: {answer[:200]}"
    kinds: dict[int, type[Exception]] = {_BAD: BadRequestError, _UNKNOWN: BadRequestError, _FULL: _RefusedError}
    raise kinds.get(status, InputError)(sentence)


def _record(load: Load, index: int, request: _InFlight, *, expired: bool = False) -> RequestRecord:
    patience = load.deadline(index)
    asked = int(load.output_tokens[index])
    num_tokens = asked if request.num_tokens is None else min(max(request.num_tokens, 1), asked)
    spread = () if expired else _spread(request.token_times, num_tokens)
    return RequestRecord(
        input_tokens=int(load.input_tokens[index]),
        arrival=request.arrival,
        start=request.start,
        token_times=tuple(spread),
        deadline=None if patience is None else request.arrival + patience,
    )


def _spread(times: Sequence[float], num_tokens: int) -> Sequence[float]:
    """One time per token; the tokens of a server that sends several per chunk are spread evenly between its chunks."""
    if len(times) == num_tokens:
        return times
    if not times:
        raise InputError("a request was answered without any token")
    return np.interp(np.linspace(0, 1, num_tokens), np.linspace(0, 1, len(times)), times).tolist()


def trusting(tls_ca: Path | None) -> ssl.SSLContext:
    """A client's side of TLS, which trusts the certificates in this file, or those of the system.

    Raises InputError for a file without certificates.
    """
    try:
        return ssl.create_default_context(cafile=tls_ca)
    except (ssl.SSLError, OSError) as error:
        reason = "it has no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise InputError(f"--tls-ca: cannot use {tls_ca}: {reason}") from None


class ServedModel(NamedTuple):
    """What a server lists; None for what it does not say."""

    name: str
    max_context: int | None
    """Tokens of a request, with its answer."""
    vocab_size: int | None
    """As exeplan's server states it; those of others do not."""


def server_root(url: str) -> str:
    """A server's URL without the `/v1` of the base URL that OpenAI's clients take."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def served_model(url: str, api_key: str | None = None, tls_ca: Path | None = None) -> ServedModel:
    """The model that a server serves. Raises InputError when the server does not list it."""
    import http.client
    import urllib.error
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise InputError(f"the server's URL must begin with http:// or https://, found '{url}'")
    asked = f"{server_root(url)}/v1/models"
    try:
        request = urllib.request.Request(asked, headers=authorization(api_key))
        tls = urllib.request.HTTPSHandler(context=trusting(tls_ca))
        with urllib.request.build_opener(urllib.request.ProxyHandler({}), tls).open(request, timeout=10) as answer:
            model = json.load(answer)["data"][0]
            sizes = (model.get(name) for name in ("max_model_len", "vocab_size"))
            return ServedModel(str(model["id"]), *(size if isinstance(size, int) else None for size in sizes))
    except urllib.error.HTTPError as error:
        raise InputError(f"{asked} does not list the models: {error}") from None
    except urllib.error.URLError as error:
        raise InputError(f"{asked} does not answer: {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{asked} does not list the models: {error or type(error).__name__}") from None
