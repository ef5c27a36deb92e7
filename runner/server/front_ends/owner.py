"""FrontEnds: the front ends on other hosts that answer requests with this server's replicas.

Each has a connection of its own, over which it submits what it has read, and gets tokens. A request from there is
admitted as one from here: one queue, one account a client, one router. When a front end is lost, its requests are
dropped and their KV blocks are free at the next iteration; another front end takes its place.
Not here: where front ends run (`placing.py`), and what they do (`process.py`).
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, assert_never

from msgspec import Struct
from msgspec.structs import replace
from starlette.types import ASGIApp, Message

from exeplan.core.plan import Plan, as_json
from exeplan.errors import InputError
from exeplan.runner.engine_process.job import EngineError, Job
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.front_end_messages import (
    FRONT_END_MESSAGES,
    AskOwner,
    FrontEndListens,
    FrontEndLost,
    FrontEndMessage,
    FrontEndPlaced,
    FrontEndRefused,
    FrontEndSetup,
    FrontEndState,
    JobEnded,
    JobEvents,
    LeaveJob,
    OwnerAnswer,
    PlaceFrontEnds,
    PlacingRefused,
    PlanRuns,
    ReadFilesAgain,
    ServiceState,
    SubmitJob,
)
from exeplan.runner.ipc.messages import Event
from exeplan.runner.ipc.tether import BEAT_SECONDS, LOST_SECONDS
from exeplan.runner.server.front_ends.placer_process import PlacerProcess
from exeplan.runner.server.generation import as_request_error
from exeplan.runner.server.network.api_keys import ApiKeys
from exeplan.runner.server.network.clients import Client
from exeplan.runner.server.network.connection import error_response
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.service import Service

AGAIN_SECONDS = 5.0
"""After the process that places front ends has ended, until another one is started."""
log = logging.getLogger(__name__)


class FrontEnds:
    """Made within the running event loop; `start` has them placed."""

    def __init__(
        self,
        service: Service,
        app: ASGIApp,
        keys: ApiKeys,
        *,
        placing: PlaceFrontEnds,
        setup: Callable[[FrontEndPlaced, Plan], FrontEndSetup],
    ) -> None:
        """`app` has the views of the service, without the gate, which a request has passed at its front end."""
        self._service, self._app, self._keys = service, app, keys
        self._placing, self._setup = placing, setup
        self._here: dict[int, _FrontEnd] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_refused = 0
        """By front ends that are gone."""

    def start(self) -> None:
        log.info("front ends are started on %d other nodes; the log says when each answers", self._placing.count)
        self._begin(self._place())

    async def close(self) -> None:
        """Ends all of them."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def read_files_again(self) -> None:
        for one in self._here.values():
            one.send(ReadFilesAgain())

    @property
    def num_pending(self) -> int:
        """While the service drains: front ends that may still have a request that was there before."""
        return sum(not one.drained for one in self._here.values())

    @property
    def num_refused(self) -> int:
        """Sequences of requests that they have refused by themselves."""
        return self._num_refused + sum(one.told.num_refused for one in self._here.values())

    def reading(self) -> Mapping[str, int]:
        """The requests of each that have not been answered, by its node's address and its port."""
        return {one.name: one.num_jobs for one in self._here.values() if one.name}

    async def _place(self) -> None:
        """Has front ends placed, until this is cancelled; the process that does it is replaced where it ends.

        What is refused from the start is not tried again; later the cluster may be away for a while.
        """
        any_placed = False
        while True:
            placer, refusal = await PlacerProcess.start(self._placing), ""
            try:
                while placed := await placer.next():
                    if isinstance(placed[0], PlacingRefused):
                        refusal = placed[0].message
                        break
                    any_placed = True
                    self._begin(self._serve(placer, *placed))
            finally:
                await placer.close()
            if refusal:
                log.error("no front ends on other hosts: %s", refusal)
                if not any_placed:
                    return
            else:
                log.error("the process that places front ends has ended; another one follows")
            await asyncio.sleep(AGAIN_SECONDS)

    async def _serve(self, placer: PlacerProcess, placed: FrontEndPlaced, connection: socket.socket) -> None:
        """One front end, from its setup until it is gone."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
        streams = await asyncio.open_connection(sock=connection)
        one = self._here[placed.number] = _FrontEnd(self._service, self._app, self._keys, placed, *streams)
        try:
            await one.serve(self._setup(placed, self._service.plan))
        finally:
            self._num_refused += one.told.num_refused
            if self._here.get(placed.number) is one:
                del self._here[placed.number]
            placer.send(FrontEndLost(number=placed.number))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _FrontEnd:
    """The owner's side of one front end."""

    def __init__(
        self,
        service: Service,
        app: ASGIApp,
        keys: ApiKeys,
        placed: FrontEndPlaced,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._service, self._app, self._keys = service, app, keys
        self._placed, self._reader, self._writer = placed, reader, writer
        self.name = ""
        """Its node's address and its port, once it answers requests."""
        self.told = FrontEndState(draining=False, num_pending=0, num_refused=0)
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._plan: Plan | None = None
        """That it knows of."""

    @property
    def num_jobs(self) -> int:
        return len(self._answering)

    @property
    def drained(self) -> bool:
        """Whether it has nothing left, and refuses what comes."""
        return not self.name or (self.told.draining and not self.told.num_pending)

    def send(self, message: Struct) -> None:
        """What cannot be sent any more is dropped: the end of the connection is seen by `serve`."""
        self._writer.write(frame(message))

    async def serve(self, setup: FrontEndSetup) -> None:
        """Until it is gone; nothing of its requests is left then."""
        self.send(setup)
        self._plan = self._service.plan
        telling = asyncio.create_task(self._tell())
        try:
            while True:
                self._take(await FRONT_END_MESSAGES.read_from(self._reader))
        except (MessageError, asyncio.IncompleteReadError, OSError) as error:
            if self.name:
                why = f": {error}" if isinstance(error, MessageError) else ""
                log.warning("the front end on %s is gone, and %d requests with it%s", self.name, self.num_jobs, why)
        finally:
            tasks = [telling, *self._answering.values(), *self._asked]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writer.close()

    def _take(self, message: FrontEndMessage) -> None:
        match message:
            case SubmitJob():
                answering = asyncio.create_task(self._answer(message))
                self._answering[message.job] = answering
                answering.add_done_callback(lambda task: self._answering.pop(message.job, None))
            case LeaveJob():
                if task := self._answering.get(message.job):
                    task.cancel()
            case AskOwner():
                asked = asyncio.create_task(self._ask(message))
                self._asked.add(asked)
                asked.add_done_callback(self._asked.discard)
            case FrontEndState():
                self.told = message
            case FrontEndListens():
                self.name = f"{self._placed.address}:{message.url.rpartition(':')[2]}"
                log.info("front end %d on %s answers at %s", self._placed.number, self._placed.address, message.url)
            case FrontEndRefused():
                log.error("front end %d on %s: %s", self._placed.number, self._placed.address, message.message)
            case _:
                assert_never(message)

    async def _tell(self) -> None:
        """Says how the replicas are, again and again; a host that is cut off is noticed by that."""
        while True:
            if self._plan is not self._service.plan:
                self._plan = self._service.plan
                self.send(PlanRuns(plan=as_json(self._plan)))
            self.send(_state_of(self._service))
            await asyncio.sleep(BEAT_SECONDS)

    async def _answer(self, asked: SubmitJob) -> None:
        """Admits a request, and sends its tokens as they come."""
        service = self._service
        try:
            client = self._client(asked.client)
            job = self._placed_in_queue(asked, client)
        except RequestError as error:
            return self.send(_ended(asked.job, error))
        try:
            service.engine.submit(job, asked.prompts, stream=asked.stream)
            while job.open or job.events:
                events = await job.next_events()
                self.send(JobEvents(job=asked.job, events=[_renamed(event, asked.job) for event in events]))
                await self._writer.drain()  # What a slow front end does not take waits in its jobs, and has a limit.
        except (InputError, EngineError) as error:
            self.send(_ended(asked.job, as_request_error(error)))
        except OSError:
            pass  # It is gone: `serve` sees it, too.
        finally:
            service.release(job)

    def _placed_in_queue(self, asked: SubmitJob, client: Client) -> Job:
        """Raises RequestError as for a request from here."""
        service, sampling = self._service, asked.prompts[0].sampling
        if refusal := service.clients.refusal(client):
            raise service.counted(refusal, client)
        with service.clients.reading(client):
            return service.place(
                sum(prompt.n for prompt in asked.prompts),
                client,
                max_tokens=sampling.max_tokens,
                deadline=asked.prompts[0].deadline,
            )

    def _client(self, identity: str) -> Client:
        """Raises RequestError 401 for one that has no key here."""
        if client := self._keys.with_identity(identity):
            return client
        raise RequestError("this API key is not known to the host of the replicas", status=401, code="invalid_api_key")

    async def _ask(self, asked: AskOwner) -> None:
        try:
            answer = await _response(self._app, asked, self._client(asked.client))
        except RequestError as error:
            refusal = error_response(error)
            answer = _answer_of(asked, refusal.status_code, refusal.raw_headers, bytes(refusal.body))
        self.send(answer)


def _renamed(event: Event, job: str) -> Event:
    """With the front end's name of the sequence."""
    return replace(event, request_id=f"{job}-{event.request_id.partition('-')[2]}")


def _ended(job: str, error: RequestError) -> JobEnded:
    return JobEnded(
        job=job,
        message=str(error),
        status=error.status,
        param=error.param,
        code=error.code,
        retry_after=error.retry_after,
    )


def _state_of(service: Service) -> ServiceState:
    engine = service.engine
    return ServiceState(
        failure=engine.failure,
        pause=engine.pause,
        long_pause=engine.long_pause,
        unready=engine.unready,
        stall=engine.stall,
        loading=engine.loading,
        draining=service.draining,
        num_waiting=engine.num_waiting,
        serving=service.admission.serving(),
        num_blocks=0 if engine.unready else engine.num_blocks,
        request_tokens=0 if engine.unready else engine.request_tokens,
        stats=engine.stats,
    )


async def _response(app: ASGIApp, asked: AskOwner, client: Client) -> OwnerAnswer:
    """What the views answer to a request that has passed the gate at a front end."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": b"",
        "headers": [(b"content-length", str(len(asked.body)).encode())],
        "client": None,
        "server": None,
        "state": {"client": client},
    }
    start: Message = {"status": 500, "headers": []}
    body = bytearray()
    given = [{"type": "http.request", "body": asked.body, "more_body": False}]

    async def receive() -> Message:
        return given.pop() if given else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
        else:
            body.extend(message.get("body", b""))

    with contextlib.suppress(Exception):  # A view's fault is logged and answered by the application.
        await app(scope, receive, send)
    return _answer_of(asked, start["status"], start["headers"], bytes(body))


def _answer_of(asked: AskOwner, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> OwnerAnswer:
    plain = [(bytes(name), bytes(value)) for name, value in headers]
    return OwnerAnswer(number=asked.number, status=status, headers=plain, body=body)
