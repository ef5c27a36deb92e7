"""The engine in a process of its own: `python -m exeplan.runner.engine_process.process FD`, FD being one end of a
socket pair.

A thread reads commands, so that none waits for an iteration to be received and time-stamped; the main thread applies
them between iterations and runs the engine. When the other end closes, for whatever reason, this process ends at once:
it cannot outlive the server. Signals are the server's business, which lets running requests finish.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from exeplan.errors import InputError
from exeplan.runner import logs
from exeplan.runner.ipc.frames import Event, Logprob, Stats, frame, read_frame

if TYPE_CHECKING:
    from exeplan.runner.engine.engine import Engine, Output, Request
    from exeplan.runner.engine_process.switch_plan import Adoption

Command = tuple[float, dict[str, Any]]
"""When it came, on the engine's clock, and what it says."""
clock = time.perf_counter
log = logging.getLogger(__name__)


def main(descriptor: int) -> int:
    """Runs until the server is gone, which ends the process at once, or the engine fails. Returns an exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logs.configure_child()
    connection = socket.socket(fileno=descriptor)
    inbox = _Inbox()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    try:
        from exeplan.runner.engine_process.build import build_engine, build_executor, hosts_from
        from exeplan.runner.engine_process.switch_plan import Adoption

        setup = inbox.commands.get()[1]
        if hosts := hosts_from(setup):
            inbox.leave = hosts.close

        def lost() -> None:
            inbox.put({"kind": "lost"})

        engine = build_engine(setup, hosts=hosts, on_loss=lost, on_progress=_Told(connection).tell)
        build = partial(build_executor, hosts=hosts, on_loss=lost)
        inbox.wake = engine.wake
        connection.sendall(frame({"kind": "ready", "num_blocks": engine.num_blocks}))
        _run(engine, connection, inbox.commands, Adoption(engine, setup, build=build, put=inbox.put))
    except InputError as error:
        connection.sendall(frame({"kind": "refused", "job": None, "message": str(error)}))
        return 2
    except Exception as error:
        # Clients get to see the message, so that details stay in the log.
        log.exception("the engine failed")
        message = f"the engine failed ({type(error).__name__}); the server's log says more"
        connection.sendall(frame({"kind": "broken", "message": message}))
        return 1


class _Inbox:
    """Commands as they come; `wake` interrupts an engine that waits for its workers, `leave` lets other hosts go."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self.leave: Callable[[], None] = lambda: None

    def put(self, message: dict[str, Any]) -> None:
        self.commands.put((clock(), message))
        self.wake()


class _Told:
    """Tells the server how far loading is, once a percent: some models have more tensors than anybody wants frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._last = connection, ("", 0)

    def tell(self, stage: str, share: float) -> None:
        now = (stage, int(100 * share))
        if now != self._last:
            self._last = now
            self._connection.sendall(frame({"kind": "loading", "stage": stage, "share": now[1] / 100}))


def _read(connection: socket.socket, inbox: _Inbox) -> None:
    try:
        while (message := read_frame(connection)) is not None:
            inbox.put(message)
    except OSError:
        pass
    try:
        inbox.leave()
    finally:
        os._exit(0)


@dataclass(slots=True)
class _Open:
    """A request that is under way, and the events of an answer that nobody streams."""

    arrival: float
    streamed: bool
    held: list[Event] = field(default_factory=list)


def _run(
    engine: "Engine", connection: socket.socket, commands: "queue.SimpleQueue[Command]", adoption: "Adoption"
) -> NoReturn:
    under_way: dict[str, _Open] = {}
    while True:
        outputs: list[Output] = []
        for arrival, message in _pending(commands, wait=not engine.has_work):
            if message["kind"] in ("census", "adopt", "built"):
                answer = adoption.take(message, outputs)
            else:
                answer = _apply(engine, message, arrival, under_way)
            if answer:
                connection.sendall(frame(answer))
        outputs += _step(engine, connection)
        # Who got something while a plan was adopted may have been dropped since.
        due = [output for output in outputs if output.request_id in under_way]
        events = [event for output in due if (event := _due(output, under_way))]
        connection.sendall(frame({"kind": "step", "events": events, "stats": _stats(engine, ran=bool(outputs))}))


def _step(engine: "Engine", connection: socket.socket) -> "list[Output]":
    """One step; where workers died, the engine begins again, and the server is told that it is down meanwhile."""
    from exeplan.runner.engine.executor import WorkerError

    try:
        return engine.step()
    except WorkerError as error:
        log.error("%s; starting all workers again", error)
        connection.sendall(frame({"kind": "down", "message": f"workers are being restarted ({error})"}))
        outputs = engine.restart()
        connection.sendall(frame({"kind": "up"}))
        return outputs


def _due(output: "Output", under_way: dict[str, _Open]) -> Event | None:
    """The event to send now. What is not streamed has two, its first token and all the others together at the end: an
    event a token would cost the server, and on a shared core the engine, more than the answer is worth."""
    request = under_way[output.request_id]
    event = _event(output, request.arrival)
    if event.finish_reason:
        del under_way[event.request_id]
    elif not (request.streamed or event.first):
        request.held.append(event)
        return None
    return _joined([*request.held, event]) if request.held else event


def _joined(events: Sequence[Event]) -> Event:
    return events[-1]._replace(
        token_ids=[token for event in events for token in event.token_ids],
        text="".join(event.text for event in events),
        logprobs=[logprob for event in events for logprob in event.logprobs],
    )


def _pending(commands: "queue.SimpleQueue[Command]", *, wait: bool) -> Iterator[Command]:
    """Everything that has come; with `wait`, at least one."""
    if wait:
        yield commands.get()
    while not commands.empty():
        yield commands.get()


def _apply(
    engine: "Engine", message: Mapping[str, Any], arrival: float, under_way: dict[str, _Open]
) -> dict[str, Any] | None:
    """Carries a command out. Returns the refusal of a job of which a request is wrong; none of it runs then."""
    if message["kind"] == "lost":
        return None  # The next step finds out.
    if message["kind"] == "abort":
        for request_id in message["request_ids"]:
            if under_way.pop(request_id, None) is not None:
                engine.abort(request_id)
        return None
    added: list[str] = []
    try:
        for request in [_request(row, arrival) for row in message["requests"]]:
            engine.add(request)
            added.append(request.request_id)
    except InputError as error:
        for request_id in added:
            engine.abort(request_id)
        return {"kind": "refused", "job": message["job"], "message": str(error)}
    under_way.update((name, _Open(arrival, message["stream"])) for name in added)
    return None


def _request(row: Mapping[str, Any], arrival: float) -> "Request":
    from exeplan.runner.distributed.batch_messages import sampling_from
    from exeplan.runner.engine.requests import Request

    return Request(
        request_id=row["request_id"],
        prompt_token_ids=row["prompt_token_ids"],
        sampling=sampling_from(row["sampling"]),
        arrival=arrival,
        deadline=None if (patience := row.get("deadline")) is None else arrival + patience,
        weight=row.get("weight", 1.0),
    )


def _event(output: "Output", arrival: float) -> Event:
    return Event(
        request_id=output.request_id,
        token_ids=output.token_ids,
        text=output.text,
        finish_reason=output.finish_reason,
        first=output.first,
        arrival=arrival,
        start=output.start,
        time=output.time,
        num_prompt_tokens=output.num_prompt_tokens,
        logprobs=_logprobs(output),
    )


def _logprobs(output: "Output") -> Sequence[Logprob]:
    return [Logprob(t.token_id, t.logprob, t.top_logprobs) for t in output.logprobs if t.logprob is not None]


def _stats(engine: "Engine", *, ran: bool) -> Stats:
    step = engine.last_step if ran else None
    return Stats(
        num_waiting=engine.num_waiting,
        num_running=engine.num_running,
        free_blocks=engine.free_blocks,
        num_blocks=engine.num_blocks,
        num_preemptions=engine.num_preemptions,
        iteration_tokens=step.num_new_tokens if step else 0,
        num_prefill=step.num_prefill if step else 0,
        num_decode=step.num_decode if step else 0,
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
