"""The engine in a process of its own, which a fork server has forked for the front end.

A thread reads commands, so that the connection never waits for an iteration; the main thread carries them out between
iterations and runs the engine. It alone reports, at least every `HEARTBEAT_SECONDS` while there is nothing to do: an
engine whose iteration hangs is silent. When the other end closes, for whatever reason, this process ends at once: it
cannot outlive the server. It ignores signals: the server handles them, and lets running requests finish.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from exeplan.errors import InputError
from exeplan.runner import logs
from exeplan.runner.distributed.launcher import use_fork_server
from exeplan.runner.engine_process.speed_watch import SpeedWatch
from exeplan.runner.engine_process.switch_plan import ExecutorBuilt, PlanSwitcher
from exeplan.runner.ipc.fork_server import ForkChannel
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    ENGINE_COMMANDS,
    Abort,
    Alive,
    Begun,
    DevicesBack,
    DevicesLeft,
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
    JobAdding,
    JobRefused,
    LengthStatsReport,
    Loading,
    Logprob,
    Resumed,
    SetupRefused,
    Stats,
    Submit,
    SwitchPlan,
)

if TYPE_CHECKING:
    from exeplan.runner.engine.engine import Engine, Output, Request


class WorkersLost:
    """Wakes an engine that waits for commands: a worker has died, and the next step finds out."""


Command: TypeAlias = EngineCommand | ExecutorBuilt | WorkersLost | DevicesBack | MessageError
"""What the main thread carries out: it raises a MessageError, which stands for something that was no command, and
reports DevicesBack."""
HEARTBEAT_SECONDS = 1.0
MAX_HELD_TOKENS = 32
"""Tokens of an answer that is not streamed before they are sent: so many are computed again at most after a crash. Each
log-probability counts as one, as those of many sequences, sent at once, would take the server longer to read than it
may be away."""
_NOTHING = Resumed(token_ids=(), start=None, crashes=0)
log = logging.getLogger(__name__)


def main(connection: socket.socket, forks: socket.socket) -> int:
    """Runs until the server is gone, which ends the process at once, or the engine fails. Returns an exit status.

    Workers are forked over the channel `forks`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logs.configure_child()
    use_fork_server(ForkChannel(forks))
    inbox = _Inbox()
    reader = threading.Thread(target=_read, args=(connection, inbox), daemon=True)
    reader.start()

    def send(event: EngineEvent) -> None:
        try:
            connection.sendall(frame(event))
        except OSError:
            # The server is gone. The reader finds out as well, releases the other hosts and ends the process.
            reader.join()

    try:
        _serve(inbox, send)
    except InputError as error:
        send(SetupRefused(message=str(error)))
        return 2
    except Exception as error:
        # Clients see the message, so the details stay in the log.
        log.exception("the engine failed")
        message = f"the engine failed ({type(error).__name__}); the server's log says more"
        send(EngineBroken(message=message, final=_is_worker_error(error), left=_devices_left(error)))
        return 1


def _is_worker_error(error: Exception) -> bool:
    """Whether workers could not be started, after several attempts."""
    from exeplan.runner.engine.executor import WorkerError

    return isinstance(error, WorkerError)


def _devices_left(error: Exception) -> DevicesLeft | None:
    """Where a device of this host is lost: the others."""
    from exeplan.runner.engine.executor import DeviceLostError

    return DevicesLeft(by_node=(error.left,)) if isinstance(error, DeviceLostError) else None


class _Inbox:
    """Commands as they come; `wake` interrupts an engine that waits for workers, `leave` releases the other hosts."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None
        self.leave: Callable[[], None] = lambda: None
        self.server_gone = threading.Event()

    def put(self, command: Command) -> None:
        self.commands.put(command)
        self.wake()

    def take_setup(self) -> EngineSetup:
        """The first command, waiting for it."""
        setup = self.commands.get()
        if isinstance(setup, EngineSetup):
            return setup
        raise setup if isinstance(setup, MessageError) else _out_of_order(setup)

    def take_all(self, *, wait: float) -> Iterator[Command]:
        """Everything that has come, waiting that many seconds for the first."""
        with contextlib.suppress(queue.Empty):
            if wait:
                yield self.commands.get(timeout=wait)
            while True:
                yield self.commands.get_nowait()


def _read(connection: socket.socket, inbox: _Inbox) -> None:
    with contextlib.suppress(OSError):
        try:
            while (message := ENGINE_COMMANDS.read(connection.recv)) is not None:
                inbox.put(message)
        except MessageError as error:
            inbox.put(error)
            while connection.recv(1 << 16):  # Until the server is gone.
                pass
    inbox.server_gone.set()
    try:
        inbox.leave()
    finally:
        os._exit(0)


def _serve(inbox: _Inbox, send: Callable[[EngineEvent], None]) -> NoReturn:
    from exeplan.runner.engine_process.build import build_engine, build_executor, open_launcher

    setup = inbox.take_setup()
    tell = _LoadingReporter(send).tell
    launcher = open_launcher(
        setup,
        on_progress=tell,
        on_left=lambda by_node, silent: send(DevicesLeft(by_node=by_node, silent=silent)),
        on_back=lambda there: inbox.put(DevicesBack(there=there)),
    )
    if launcher:
        inbox.leave = launcher.close

    def on_loss() -> None:
        if not inbox.server_gone.is_set():  # Otherwise they have been let go.
            inbox.put(WorkersLost())

    engine = build_engine(setup, launcher=launcher, on_loss=on_loss, on_progress=tell)
    build = partial(build_executor, launcher=launcher, on_loss=on_loss)
    inbox.wake = engine.wake
    send(EngineReady(num_blocks=engine.num_blocks, request_tokens=engine.request_tokens))
    heartbeat = min(HEARTBEAT_SECONDS, setup.deadline_seconds / 4)
    switcher = PlanSwitcher(engine, setup, build=build, put=inbox.put)
    _EngineLoop(engine, switcher, send, SpeedWatch(engine, setup)).run(inbox, heartbeat)


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
    expire_together: list[str] = field(default_factory=list)
    """All sequences of a job with a deadline, until one of them begins; then the deadline is of the past for all."""


class _EngineLoop:
    """Carries out commands, and runs an iteration, in turn."""

    def __init__(
        self, engine: "Engine", switcher: PlanSwitcher, send: Callable[[EngineEvent], None], speed: SpeedWatch
    ) -> None:
        self._engine, self._switcher, self._send, self._speed = engine, switcher, send, speed
        self._requests: dict[str, _OpenRequest] = {}
        self._preemptions_told = engine.num_preemptions
        engine.on_begin = self._begin

    def run(self, inbox: _Inbox, heartbeat: float) -> NoReturn:
        while True:
            outputs: list[Output] = []
            commands = list(inbox.take_all(wait=0.0 if self._engine.has_work else heartbeat))
            for command in commands:
                if answer := self._take(command, outputs):
                    self._send(answer)
            if not (commands or self._engine.has_work):
                self._send(Alive())
                continue
            outputs += self._speed.timed(self._step)
            # A request that got tokens during a switch of plans may have been aborted since.
            due = [output for output in outputs if output.request_id in self._requests]
            events = [event for output in due if (event := self._due(output))]
            stats = _stats(self._engine, self._preemptions_told, **self._speed.look())
            self._preemptions_told += stats.num_preemptions
            self._send(IterationDone(events=events, stats=stats))

    def _take(self, command: Command, outputs: "list[Output]") -> EngineEvent | None:
        """Carries a command out. Returns the answer, if there is one now."""
        match command:
            case Submit():
                return self._submit(command)
            case Abort():
                for request_id in command.request_ids:
                    if self._requests.pop(request_id, None) is not None:
                        self._engine.abort(request_id)
            case GetLengthStats():
                stats = self._engine.length_stats()
                return LengthStatsReport(number=command.number, now=stats.now, left=stats.left, running=stats.running)
            case SwitchPlan() | ExecutorBuilt():
                answer = self._switcher.take(command, outputs)
                self._speed.renew(self._switcher.setup)
                return answer
            case WorkersLost():
                pass
            case DevicesBack():
                return command
            case EngineSetup():
                raise _out_of_order(command)
            case MessageError():
                raise command
            case _:
                assert_never(command)
        return None

    def _submit(self, job: Submit) -> JobRefused | None:
        """Adds a job's requests. Returns the refusal where one of them cannot be added; none of them runs then."""
        from exeplan.runner.engine.admit_request import AdmissionError

        self._send(JobAdding(job=job.job))
        added: list[str] = []
        try:
            for request in _requests(job):
                self._engine.add(request)
                added.append(request.request_id)
        except (InputError, AdmissionError) as error:
            for request_id in added:
                self._engine.abort(request_id)
            if internal := isinstance(error, AdmissionError):
                log.exception("a request could not be admitted")
            return JobRefused(job=job.job, message=str(error), internal=internal)
        together = [] if all(prompt.deadline is None for prompt in job.prompts) else added
        self._requests.update((name, _OpenRequest(job.arrival, job.stream, [], together)) for name in added)
        return None

    def _begin(self, request_ids: Sequence[str], start: float) -> None:
        self._send(Begun(request_ids=request_ids, start=start))
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) and request.expire_together:
                self._engine.keep(request.expire_together)
                request.expire_together.clear()

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
        """The event to send now. An answer that is not streamed has one for its first token and then one for many: an
        event for each token would take more of the server's time than the answer is worth."""
        request = self._requests[output.request_id]
        event = _event(output, request.arrival)
        if event.finish_reason:
            del self._requests[event.request_id]
        elif not (request.streamed or event.first) and (len(request.held) + 1) * _num_values(event) < MAX_HELD_TOKENS:
            request.held.append(event)
            return None
        held, request.held = request.held, []
        return _joined([*held, event]) if held else event


def _num_values(event: Event) -> int:
    """Of a token: itself, and the most likely ones that are reported with it."""
    return 1 + len(event.logprobs[0].top) if event.logprobs else 1


def _out_of_order(command: Any) -> MessageError:
    return MessageError(f"the first command, and no other, must be EngineSetup; found {type(command).__name__}")


def _joined(events: Sequence[Event]) -> Event:
    return replace(
        events[-1],
        token_ids=[token for event in events for token in event.token_ids],
        text="".join(event.text for event in events),
        logprobs=[logprob for event in events for logprob in event.logprobs],
    )


def _requests(job: Submit) -> "Iterator[Request]":
    """The sequences of a job that are to run. Raises InputError for sampling parameters out of their limits."""
    from exeplan.runner.compute.tokens.sampling import SamplingParams
    from exeplan.runner.engine.requests import Request

    request_ids = iter(job.request_ids)
    for prompt in job.prompts:
        sampling = SamplingParams(**msgspec.structs.asdict(prompt.sampling))
        for choice in range(prompt.n):
            request_id = next(request_ids)
            so_far = _NOTHING if job.resumed is None else job.resumed.get(request_id)
            if so_far is None:  # It has ended.
                continue
            yield Request(
                request_id=request_id,
                prompt_token_ids=prompt.prompt_token_ids,
                sampling=sampling.with_choice(choice),
                arrival=job.arrival,
                deadline=None if prompt.deadline is None else job.arrival + prompt.deadline,
                may_begin_late=job.begun,
                weight=prompt.weight,
                client=job.client,
                client_weight=job.client_weight,
                output_token_ids=so_far.token_ids,
                start=so_far.start,
                crashes=so_far.crashes,
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
        prompt=output.prompt_logprobs,
    )


def _stats(engine: "Engine", preemptions_told: int, **speed: float) -> Stats:
    """After a step: several batches of a pipeline may have ended in it, or none. `speed` is of `SpeedWatch.look`."""
    return Stats(
        num_waiting=engine.num_waiting,
        num_running=engine.num_running,
        free_blocks=engine.free_blocks,
        num_blocks=engine.num_blocks,
        num_preemptions=engine.num_preemptions - preemptions_told,
        iteration_tokens=sum(step.num_new_tokens for step in engine.last_steps),
        num_prefill=sum(step.num_prefill for step in engine.last_steps),
        num_decode=sum(step.num_decode for step in engine.last_steps),
        **speed,
    )
