"""The engine in a process of its own: `python -m exeplan.runner.engine_process.process FD`, FD being one end of a
socket pair.

A thread reads and time-stamps commands, so that none waits for an iteration; the main thread carries them out between
iterations and runs the engine. When the other end closes, for whatever reason, this process ends at once: it cannot
outlive the server. It ignores signals: the server handles them, and lets running requests finish.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from exeplan.errors import InputError
from exeplan.runner import logs
from exeplan.runner.engine_process.switch_plan import ExecutorBuilt, PlanSwitcher
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    ENGINE_COMMANDS,
    Abort,
    EngineBroken,
    EngineCommand,
    EngineDown,
    EngineEvent,
    EngineReady,
    EngineSetup,
    EngineUp,
    Event,
    GetLengthStats,
    IterationDone,
    JobRefused,
    LengthStatsReport,
    Loading,
    Logprob,
    SetupRefused,
    Stats,
    Submit,
    SwitchPlan,
)

if TYPE_CHECKING:
    from exeplan.runner.engine.engine import Engine, Output, Request


class WorkersLost:
    """Wakes an engine that waits for commands: a worker has died, and the next step finds out."""


Command: TypeAlias = EngineCommand | ExecutorBuilt | WorkersLost | MessageError
"""What the main thread carries out; it raises a MessageError, which stands for something that was no command."""
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

    def send(event: EngineEvent) -> None:
        connection.sendall(frame(event))

    try:
        _serve(inbox, send)
    except InputError as error:
        send(SetupRefused(message=str(error)))
        return 2
    except Exception as error:
        # Clients see the message, so the details stay in the log.
        log.exception("the engine failed")
        send(EngineBroken(message=f"the engine failed ({type(error).__name__}); the server's log says more"))
        return 1


class _Inbox:
    """Commands as they come; `wake` interrupts an engine that waits for workers, `leave` releases the other hosts."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[tuple[float, Command]] = queue.SimpleQueue()
        """With the time at which each came, on the engine's clock."""
        self.wake: Callable[[], None] = lambda: None
        self.leave: Callable[[], None] = lambda: None

    def put(self, command: Command) -> None:
        self.commands.put((clock(), command))
        self.wake()

    def take_setup(self) -> EngineSetup:
        """The first command, waiting for it."""
        setup = self.commands.get()[1]
        if isinstance(setup, EngineSetup):
            return setup
        raise setup if isinstance(setup, MessageError) else _out_of_order(setup)

    def take_all(self, *, wait: bool) -> Iterator[tuple[float, Command]]:
        """Everything that has come; with `wait`, at least one."""
        if wait:
            yield self.commands.get()
        while not self.commands.empty():
            yield self.commands.get()


def _read(connection: socket.socket, inbox: _Inbox) -> None:
    with contextlib.suppress(OSError):
        try:
            while (message := ENGINE_COMMANDS.read(connection.recv)) is not None:
                inbox.put(message)
        except MessageError as error:
            inbox.put(error)
            while connection.recv(1 << 16):  # Until the server is gone.
                pass
    try:
        inbox.leave()
    finally:
        os._exit(0)


def _serve(inbox: _Inbox, send: Callable[[EngineEvent], None]) -> NoReturn:
    from exeplan.runner.engine_process.build import build_engine, build_executor, open_launcher

    setup = inbox.take_setup()
    if launcher := open_launcher(setup):
        inbox.leave = launcher.close

    def on_loss() -> None:
        inbox.put(WorkersLost())

    engine = build_engine(setup, launcher=launcher, on_loss=on_loss, on_progress=_LoadingReporter(send).tell)
    build = partial(build_executor, launcher=launcher, on_loss=on_loss)
    inbox.wake = engine.wake
    send(EngineReady(num_blocks=engine.num_blocks))
    _EngineLoop(engine, PlanSwitcher(engine, setup, build=build, put=inbox.put), send).run(inbox)


class _LoadingReporter:
    """Reports to the server how far loading is, once a percent: some models have thousands of tensors."""

    def __init__(self, send: Callable[[EngineEvent], None]) -> None:
        self._send, self._last = send, ("", 0)

    def tell(self, stage: str, share: float) -> None:
        now = (stage, int(100 * share))
        if now != self._last:
            self._last = now
            self._send(Loading(stage=stage, share=now[1] / 100))


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not finished, and the events of an answer that is not streamed."""

    arrival: float
    streamed: bool
    held: list[Event] = field(default_factory=list)


class _EngineLoop:
    """Carries out commands, and runs an iteration, in turn."""

    def __init__(self, engine: "Engine", switcher: PlanSwitcher, send: Callable[[EngineEvent], None]) -> None:
        self._engine, self._switcher, self._send = engine, switcher, send
        self._requests: dict[str, _OpenRequest] = {}

    def run(self, inbox: _Inbox) -> NoReturn:
        while True:
            outputs: list[Output] = []
            for arrival, command in inbox.take_all(wait=not self._engine.has_work):
                if answer := self._take(command, arrival, outputs):
                    self._send(answer)
            outputs += self._step()
            # A request that got tokens during a switch of plans may have been aborted since.
            due = [output for output in outputs if output.request_id in self._requests]
            events = [event for output in due if (event := self._due(output))]
            self._send(IterationDone(events=events, stats=_stats(self._engine)))

    def _take(self, command: Command, arrival: float, outputs: "list[Output]") -> EngineEvent | None:
        """Carries a command out. Returns the answer, if there is one now."""
        match command:
            case Submit():
                return self._submit(command, arrival)
            case Abort():
                for request_id in command.request_ids:
                    if self._requests.pop(request_id, None) is not None:
                        self._engine.abort(request_id)
            case GetLengthStats():
                stats = self._engine.length_stats()
                return LengthStatsReport(number=command.number, now=stats.now, left=stats.left, running=stats.running)
            case SwitchPlan() | ExecutorBuilt():
                return self._switcher.take(command, outputs)
            case WorkersLost():
                pass
            case EngineSetup():
                raise _out_of_order(command)
            case MessageError():
                raise command
            case _:
                assert_never(command)
        return None

    def _submit(self, job: Submit, arrival: float) -> JobRefused | None:
        """Adds a job's requests. Returns the refusal where one of them is invalid; none of them runs then."""
        added: list[str] = []
        try:
            for request in _requests(job, arrival):
                self._engine.add(request)
                added.append(request.request_id)
        except InputError as error:
            for request_id in added:
                self._engine.abort(request_id)
            return JobRefused(job=job.job, message=str(error))
        self._requests.update((name, _OpenRequest(arrival, job.stream)) for name in added)
        return None

    def _step(self) -> "list[Output]":
        """One step. If workers died, the engine restarts them and reports to the server that it is down meanwhile."""
        from exeplan.runner.engine.executor import WorkerError

        try:
            return self._engine.step()
        except WorkerError as error:
            log.error("%s; starting all workers again", error)
            self._send(EngineDown(message=f"workers are being restarted ({error})"))
            outputs = self._engine.restart()
            self._send(EngineUp())
            return outputs

    def _due(self, output: "Output") -> Event | None:
        """The event to send now. An answer that is not streamed has two, its first token and all the others at the
        end: an event for each token would take more of the server's time than the answer is worth."""
        request = self._requests[output.request_id]
        event = _event(output, request.arrival)
        if event.finish_reason:
            del self._requests[event.request_id]
        elif not (request.streamed or event.first):
            request.held.append(event)
            return None
        return _joined([*request.held, event]) if request.held else event


def _out_of_order(command: Any) -> MessageError:
    return MessageError(f"the first command, and no other, must be EngineSetup; found {type(command).__name__}")


def _joined(events: Sequence[Event]) -> Event:
    return replace(
        events[-1],
        token_ids=[token for event in events for token in event.token_ids],
        text="".join(event.text for event in events),
        logprobs=[logprob for event in events for logprob in event.logprobs],
    )


def _requests(job: Submit, arrival: float) -> "Iterator[Request]":
    """The sequences of a job. Raises InputError for sampling parameters out of their limits."""
    from exeplan.runner.compute.sampling import SamplingParams
    from exeplan.runner.engine.requests import Request

    request_ids = iter(job.request_ids)
    for prompt in job.prompts:
        sampling = SamplingParams(**msgspec.structs.asdict(prompt.sampling))
        for choice in range(prompt.n):
            yield Request(
                request_id=next(request_ids),
                prompt_token_ids=prompt.prompt_token_ids,
                sampling=sampling.with_choice(choice),
                arrival=arrival,
                deadline=None if prompt.deadline is None else arrival + prompt.deadline,
                weight=prompt.weight,
                client=job.client,
                client_weight=job.client_weight,
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
        logprobs=[Logprob(t.token_id, t.logprob, t.top_logprobs) for t in output.logprobs if t.logprob is not None],
    )


def _stats(engine: "Engine") -> Stats:
    """After a step: several batches of a pipeline may have ended in it, or none."""
    return Stats(
        num_waiting=engine.num_waiting,
        num_running=engine.num_running,
        free_blocks=engine.free_blocks,
        num_blocks=engine.num_blocks,
        num_preemptions=engine.num_preemptions,
        iteration_tokens=sum(step.num_new_tokens for step in engine.last_steps),
        num_prefill=sum(step.num_prefill for step in engine.last_steps),
        num_decode=sum(step.num_decode for step in engine.last_steps),
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
