"""Worker: one device, one process, one shard of the model.

A thread takes the engine's commands as they come, so that none waits for a kernel, and keys and values are received
from the moment they are announced; the main thread runs the batches in that order: hidden states from the stage before,
the shard's layers, hidden states to the next stage, or sampling on the last one. When the engine's end of the
connection closes, for whatever reason, this process ends at once.
Any error ends it, too: a worker that went on after a failed send or receive would leave the others waiting. The engine
then restarts all of them.
"""

import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, assert_never, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from exeplan.core.batch import Batch, num_blocks_for
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import ReferencePass
from exeplan.errors import InputError
from exeplan.kernels import native
from exeplan.runner import logs
from exeplan.runner.compute.blocks.encoder import num_encoder_tokens
from exeplan.runner.compute.device import local_device
from exeplan.runner.compute.gpu_memory import measure_kv_budget
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.reference_passes import ReferencePasses, with_own_weights
from exeplan.runner.compute.tokens.device_sampling import DeviceSamples, sample_on_device
from exeplan.runner.compute.tokens.sampling import sample
from exeplan.runner.compute.tokens.structures import Masks, Structures
from exeplan.runner.compute.warm_up import warm_up_runner
from exeplan.runner.compute.weights.precision import activation_dtype, check_precision
from exeplan.runner.compute.weights.shard import Shard
from exeplan.runner.distributed.batch_messages import Mirror, token_messages
from exeplan.runner.distributed.completion import Completion
from exeplan.runner.distributed.fed_tokens import FedTokens
from exeplan.runner.distributed.kv_transfer import Expected, PassingCache, Receiver, Sender, Wire, transfer_pairs
from exeplan.runner.distributed.links import HiddenLinks, Seat, connect, neighbours, seat_of, tensor_parallel_group
from exeplan.runner.engine.executor import sampled_requests
from exeplan.runner.engine.kv_regions import restore_regions, save_regions
from exeplan.runner.engine.reported_prompts import Whole, keep_parts, reported, with_prompts
from exeplan.runner.engine.requests import RequestState, as_requests
from exeplan.runner.engine.tokenizer import structure_tokenizer
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    WORKER_COMMANDS,
    BatchRan,
    ExpectKV,
    KVCapacity,
    KVReceived,
    KVRestored,
    KVSaved,
    ReferenceRan,
    RepeatReference,
    RestoreKV,
    RunBatch,
    SampledTokenOf,
    SaveKV,
    WorkerCommand,
    WorkerEvent,
    WorkerFailed,
    WorkerLoading,
    WorkerReady,
    WorkerRefused,
    WorkerSetup,
)
from exeplan.scheduling.largest_passes import captured_rows, with_finite_context

clock = time.perf_counter
_LOADING_PAUSE = 0.2


def main(connection: socket.socket) -> NoReturn:
    """Runs until the engine is gone or something fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal's interrupt is handled by the engine.
    commands, reports = Commands(), Reports(connection)
    threading.Thread(target=_read, args=(connection, commands, reports), daemon=True).start()
    try:
        setup = commands.get()
        if not isinstance(setup, WorkerSetup):
            raise _out_of_order(setup)
        logs.configure_worker(setup.logs)
        worker = Worker(setup, reports)
        commands.on_expect = worker.expect
        reports.send(WorkerReady(capacity=worker.capacity))
        while True:
            worker.take(commands.get())
    except InputError as error:
        reports.refuse(error)
    except BaseException as error:
        reports.fail(error)


class Commands:
    """What an engine sends, in order; `on_expect` is called with what is to be received as soon as it has come."""

    def __init__(self) -> None:
        self.on_expect: Callable[[ExpectKV], None] = lambda command: None
        self._queue: queue.SimpleQueue[WorkerCommand] = queue.SimpleQueue()

    def put(self, command: WorkerCommand) -> None:
        if isinstance(command, ExpectKV):
            self.on_expect(command)
        self._queue.put(command)

    def get(self) -> WorkerCommand:
        """The next one, waiting for it."""
        return self._queue.get()


def _read(connection: socket.socket, commands: Commands, reports: "Reports") -> None:
    try:
        while (command := WORKER_COMMANDS.read(connection.recv)) is not None:
            commands.put(command)
    except MessageError as error:
        reports.fail(error)
    except OSError:
        pass
    os._exit(0)


def _out_of_order(command: WorkerCommand) -> MessageError:
    return MessageError(f"the first command, and no other, must be WorkerSetup; found {type(command).__name__}")


class Reports:
    """What a worker sends to its engine, from several of its threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, event: WorkerEvent) -> None:
        """Ends the process where the engine is gone, as `_read` does."""
        try:
            with self._lock:
                self._connection.sendall(frame(event))
        except OSError:
            os._exit(0)

    def refuse(self, error: InputError) -> NoReturn:
        """Reports what the user can change, if it still can, and ends the process."""
        self._end_with(WorkerRefused(message=str(error)))

    def fail(self, error: BaseException) -> NoReturn:
        """Prints and reports an error, if it still can, and ends the process."""
        try:
            traceback.print_exception(error)
        finally:
            self._end_with(WorkerFailed(message=f"{type(error).__name__}: {error}"))

    def _end_with(self, event: WorkerEvent) -> NoReturn:
        try:
            self.send(event)
        finally:
            os._exit(1)


class Worker:
    """A shard with its links to the others."""

    def __init__(self, command: WorkerSetup, reports: Reports) -> None:
        setup, options, placement = command.setup, command.setup.engine, command.setup.placement
        torch.set_num_threads(setup.num_threads)
        self._spec = _spec(command)
        seat = seat_of(placement, command.rank)
        self._stage = stage = placement[seat.stage]
        device = local_device(options.device, command.local_device)
        check_precision(options.dtype, options.kv_dtype, device)
        timeout = setup.deadline_seconds
        num_ranks = sum(other.tensor_parallel_size for other in placement)
        measures = device.type == "cpu" and activation_dtype(options.dtype) == torch.bfloat16
        said = connect(
            command.store,
            command.prefix,
            rank=seat.rank,
            size=num_ranks,
            timeout=timeout,
            device=device,
            address=command.address,
            says=native.said_of_halves() if measures else "",
        )
        if measures:
            native.agree_on_halves(said)
        group = tensor_parallel_group(placement, seat, command.buffers, timeout=timeout)
        before, after = neighbours(placement, seat.stage)
        self._first, self._last, self._leads = before is None, after is None, seat.rank_in_stage == 0
        self._runner = ModelRunner(
            self._spec,
            shard=Shard(
                layers=stage.layers,
                encoder_layers=stage.encoder_layers,
                first=self._first,
                last=self._last,
                group=group,
                whole_experts=stage.expert_parallel_size > 1,
            ),
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            device=str(device),
            num_blocks=1 if stage.phase == "prefill" or setup.gpu_memory_utilization else options.num_blocks,
            dummy_weights=options.dummy_weights,
            on_read=_LoadingReporter(reports).tell,
        )
        dtype = self._runner.activation
        self._links = HiddenLinks(
            placement,
            seat,
            hidden_size=self._spec.hidden_size,
            dtype=dtype,
            device=device,
            shared=command.links,
            timeout=timeout,
            encodes=self._spec.is_encoder_decoder,
        )
        # All groups are made before the memory is measured: NCCL takes some for each.
        self._fed: FedTokens | None = None
        """Where the next batch is launched before the tokens of this one are known."""
        if self._runner.kernels is not None:
            self._fed = FedTokens(placement, seat, setup.schedule, self._runner, group)
        wire = self._wire(command, seat) if stage.phase else None
        self.capacity: KVCapacity | None = None
        if stage.phase != "prefill" and (
            budget := measure_kv_budget(self._runner, setup.schedule, setup.gpu_memory_utilization)
        ):
            self.capacity = KVCapacity(budget.num_blocks, budget.pass_tokens)
        self._mirror, self._reports = Mirror(), reports
        self._structures = Structures(partial(structure_tokenizer, self._spec))
        if self._last and self._leads:
            self._structures.load()
        self._options = options
        self._reference: ReferencePasses | None = None
        """Made when they are first asked for."""
        self._completion = Completion(device, reports.fail)
        self._prefilled: dict[int, tuple[RequestState, ...]] = {}
        """Rows of encoder passes whose output has not been taken, by the number of the batch."""
        self._incoming: dict[str, _Part] = {}
        """By request: what is being received, or has been and waits for its first decode."""
        self._last_incoming = 0
        """The last batch of these; what was received of later ones waits for their turn."""
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        if wire:
            if stage.phase == "prefill":
                self._sender = Sender(self._spec, placement, seat, wire, device)
                # No rank expects keys and values of the warm-up.
                self._runner.use_cache(cast(KVCache, PassingCache(device, lambda layer, kv_NMD: None)))
            else:
                self._receiver = Receiver(self._spec, placement, seat, wire, self._runner)
                self._receiver.start(self._report_received, reports.fail)
        if self._runner.kernels is not None:
            warm_up_runner(self._runner, captured_rows(setup.schedule), phase=stage.phase)
        if self._sender:
            self._runner.use_cache(cast(KVCache, PassingCache(device, self._sender.put_layer)))
            self._sender.start(reports.fail)

    def _wire(self, command: WorkerSetup, seat: Seat) -> Wire:
        """Between stages that prefill and stages that decode."""
        setup, placement = command.setup, command.setup.placement
        gloo = dist.new_group(range(sum(stage.tensor_parallel_size for stage in placement)), backend="gloo")
        assert isinstance(gloo, dist.ProcessGroup)
        pairs = sorted(transfer_pairs(self._spec, placement)) if self._runner.device.type == "cuda" else ()
        devices = {pair: cast(dist.ProcessGroup, dist.new_group(pair)) for pair in pairs}
        return Wire(seat.rank, gloo, command.links, timeout=setup.deadline_seconds, devices=devices)

    @torch.inference_mode()
    def take(self, command: WorkerCommand) -> None:
        """Carries a command out."""
        if isinstance(command, WorkerSetup):
            raise _out_of_order(command)
        for request_id in command.freed:
            self._forget(request_id)
        match command:
            case RunBatch():
                self._run(command)
            case ExpectKV():
                self._expect(command)
            case SaveKV():
                self._save(command)
            case RestoreKV():
                self._restore(command)
            case RepeatReference():
                self._repeat(command.passes)
            case _:
                assert_never(command)

    def _run(self, command: RunBatch) -> None:
        batch = self._mirror.batch(command)
        self._take_outstanding(command.encoded, as_requests(batch.decode))
        rows = as_requests(batch.prefill + batch.decode)
        hidden_NE = self._links.receive(self._runner.num_tokens(batch))
        prev_rows = self._fed.prev_rows(rows) if self._fed else {}
        begun = self._completion.begin()
        chooses = self._last and self._leads
        sampled = sampled_requests(batch, self._spec)
        masks = self._structures.begin(sampled if chooses else ())
        token_ids = {row.request_id: row.token_ids for row in rows}
        out = self._runner.forward(batch, token_ids, hidden_NE, prev_rows=prev_rows, reported=reported(batch))
        tokens: Callable[[], list[SampledTokenOf]] = list
        token_R: Tensor | None = None
        if chooses:
            tokens, token_R = self._choose(out, sampled, masks(), keep_parts(batch, self._runner.prompt_parts))
        elif not self._last:
            self._links.send(out)
        elif self._runner.chosen is not None and all(row.plain for row in sampled):
            token_R = self._runner.chosen[0]
        if self._fed:
            self._fed.pass_on(sampled, token_R)
        self._pass_on(command.number, batch)
        if self._leads:
            self._completion.end(
                begun,
                lambda start, end: self._reports.send(
                    BatchRan(number=command.number, start=start, end=end, tokens=tokens())
                ),
            )

    def _choose(
        self, logits_RV: Tensor, rows: tuple[RequestState, ...], masks: Masks, prompts: Whole
    ) -> tuple[Callable[[], list[SampledTokenOf]], Tensor | None]:
        """A token for each row. Where kernels run, the device is waited for only when the tokens are asked for; there
        the tokens on the device, too."""
        names = [row.request_id for row in rows]
        if self._runner.kernels is None:
            sampled = sample(logits_RV, rows, masks)
            return lambda: token_messages(with_prompts(dict(zip(names, sampled, strict=True)), prompts)), None
        if self._runner.chosen is not None and all(row.plain for row in rows):  # A graph has chosen them.
            picked = DeviceSamples(*self._runner.chosen, None)
        else:
            positions = [row.num_output_tokens for row in rows]
            picked = sample_on_device(logits_RV, rows, self._runner.kernels, positions=positions, masks=masks)
        found = lambda: token_messages(with_prompts(dict(zip(names, picked.to_host(), strict=True)), prompts))  # noqa: E731
        return found, picked.token_R

    def _pass_on(self, number: int, batch: Batch) -> None:
        """What a prefill leaves for later: an encoder's output for all stages."""
        if not batch.prefill:
            return
        rows = as_requests(batch.prefill)
        if not self._spec.is_encoder_decoder:
            return
        if self._last:
            encoded_NE = self._runner.encoded_NE
            assert encoded_NE is not None
            if self._sender:
                self._sender.put_encoded(encoded_NE)
            elif not self._first:
                self._links.send_encoded(encoded_NE)
                self._runner.take_encoded(rows, encoded_NE)
        elif not self._sender:
            self._prefilled[number] = rows

    def _take_outstanding(self, encoded: Sequence[int], rows: Sequence[RequestState]) -> None:
        """What these rows, which are to be decoded, still need of what other stages sent."""
        for number in encoded:
            if prefilled := self._prefilled.pop(number, None):
                self._take_encoded(prefilled)
        if self._receiver:
            self._place_received(self._receiver, rows)

    def _save(self, command: SaveKV) -> None:
        regions = [self._mirror.region(region) for region in command.regions]
        self._take_outstanding(command.encoded, [region.request for region in regions])
        self._reports.send(KVSaved(stored=save_regions(self._runner, command.path, regions)))

    def _restore(self, command: RestoreKV) -> None:
        for new in command.new:
            self._mirror.add(new)
        regions = [self._mirror.region(region) for region in command.regions]
        restore_regions(self._runner, command.path, regions)
        self._reports.send(KVRestored())

    def _repeat(self, passes: Sequence[ReferencePass]) -> None:
        if self._reference is None:
            options = self._options
            self._reference = with_own_weights(self._spec, passes, dtype=options.dtype, kv_dtype=options.kv_dtype)
        sample = self._reference.repeat()
        self._reference.take()  # The engine keeps them.
        self._reports.send(
            ReferenceRan(number=sample.number, seconds=sample.seconds, cost=sample.cost, others=sample.others)
        )

    def _take_encoded(self, rows: tuple[RequestState, ...]) -> None:
        encoded_NE = self._links.receive_encoded(sum(num_encoder_tokens(row) for row in rows))
        self._runner.take_encoded(rows, encoded_NE)

    def expect(self, command: ExpectKV) -> None:
        """Other stages have begun to prefill a batch, whose keys and values will be sent here: receives them from now
        on, in any thread, before the command's turn."""
        assert self._receiver is not None
        rows = map(Mirror().add, command.new)
        self._receiver.expect(Expected(command.number, sum(map(self._num_received, rows))))

    def _expect(self, command: ExpectKV) -> None:
        """Gives the rows of such a batch their blocks."""
        assert self._receiver is not None
        self._last_incoming = command.number
        first, slots = 0, [np.zeros(0, dtype=np.int64)]
        for new in command.new:
            self._forget(new.request_id)  # One that is preempted and begins again at once has not been freed.
            row = self._mirror.add(new)
            last = first + self._num_received(row)
            self._incoming[row.request_id] = _Part(command.number, first, last)
            first = last
            if not self._spec.is_encoder_decoder:
                self._grant(row, num_blocks_for(row.num_tokens))
                slots.append(self._runner.cache.slots(row.request_id, 0, row.num_tokens))
        if not self._spec.is_encoder_decoder:
            self._receiver.grant(command.number, np.concatenate(slots))

    def _num_received(self, row: RequestState) -> int:
        """Tokens of a row that are received."""
        return num_encoder_tokens(row) if self._spec.is_encoder_decoder else row.num_tokens

    def _grant(self, row: RequestState, num_blocks: int) -> None:
        longest = num_blocks_for(row.num_prompt_tokens + row.max_output_tokens)
        self._runner.cache.resize(row.request_id, num_blocks, longest)

    def _report_received(self, number: int) -> None:
        self._reports.send(KVReceived(number=number))

    def _place_received(self, receiver: Receiver, rows: Sequence[RequestState]) -> None:
        """Takes encoders' outputs that were received of rows that now have blocks; drops what no row waits for."""
        for row in rows:
            part = self._incoming.pop(row.request_id, None)
            if part and self._spec.is_encoder_decoder:
                self._grant(row, row.num_blocks)
                encoded_NE = receiver.received[part.number][part.first : part.last]
                self._runner.take_encoded((row,), encoded_NE.to(self._runner.device, non_blocking=True))
        awaited = {part.number for part in self._incoming.values()}
        for number in list(receiver.received):
            if number <= self._last_incoming and number not in awaited:
                del receiver.received[number]

    def _forget(self, request_id: str) -> None:
        self._mirror.forget(request_id)
        if (part := self._incoming.pop(request_id, None)) and self._receiver:
            self._receiver.drop(part.number, part.first, part.last)
        self._runner.free(request_id)


def _spec(command: WorkerSetup) -> ModelSpec:
    model = command.setup.model
    directory = Path(command.model_directory) if command.model_directory else None
    spec = model_spec(model.config, name=model.name, directory=directory)
    return with_finite_context(spec) if command.setup.gpu_memory_utilization else spec


class _LoadingReporter:
    """Reports how far loading is, a few times a second."""

    def __init__(self, reports: Reports) -> None:
        self._reports, self._reported = reports, 0.0

    def tell(self, num_bytes: int) -> None:
        if clock() - self._reported > _LOADING_PAUSE:
            self._reported = clock()
            self._reports.send(WorkerLoading(num_bytes=num_bytes))


class _Part(NamedTuple):
    """Tokens `first` to `last` of what one batch sends."""

    number: int
    first: int
    last: int
