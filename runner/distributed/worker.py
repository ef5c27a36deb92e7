"""Worker: one device, one process, one shard of the model.

A thread takes the engine's messages as they come, so that none waits for a kernel; the main thread runs the batches in
that order: hidden states from the stage before, the shard's layers, hidden states to the stage behind, or sampling on
the last stage. When the engine's end of the connection closes, for whatever reason, this process ends at once.
Anything that goes wrong ends it, too: a worker that went on after a failed send or receive would leave the others
waiting. The engine then starts all of them again.
"""

import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from exeplan.core.batch import Batch, num_blocks_for
from exeplan.core.model import model_spec
from exeplan.core.plan import placement_from
from exeplan.errors import InputError
from exeplan.runner.compute.device import local_device
from exeplan.runner.compute.device_sampling import pick
from exeplan.runner.compute.gpu_memory import room_for
from exeplan.runner.compute.kv_budget import most_rows, schedule_of, with_finite_context
from exeplan.runner.compute.kv_cache import KVCache
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.precision import check_precision
from exeplan.runner.compute.sampling import sample
from exeplan.runner.compute.shard import Shard
from exeplan.runner.compute.warm_up import make_ready
from exeplan.runner.distributed.batch_messages import Mirror, token_messages
from exeplan.runner.distributed.completion import Completion
from exeplan.runner.distributed.kv_transfer import Expected, PassingCache, Receiver, Sender
from exeplan.runner.distributed.links import HiddenLinks, connect, neighbours, seat_of, tensor_parallel_group
from exeplan.runner.engine.executor import producing_rows
from exeplan.runner.engine.kv_regions import restore_parcels, save_parcels
from exeplan.runner.engine.requests import Row, as_rows
from exeplan.runner.ipc.frames import frame, read_frame

clock = time.perf_counter
_LOADING_PAUSE = 0.2


def main(connection: socket.socket) -> NoReturn:
    """Runs until the engine is gone or something fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Of a terminal, it is for the engine.
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    reports = Reports(connection)
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    try:
        worker = Worker(messages.get(), reports)
        reports.send({"kind": "ready", "clock": clock(), "room": worker.room})
        while True:
            worker.take(messages.get())
    except InputError as error:
        reports.fail(error, kind="refused")
    except BaseException as error:
        reports.fail(error)


def _read(connection: socket.socket, messages: "queue.SimpleQueue[dict[str, Any]]") -> None:
    try:
        while (message := read_frame(connection)) is not None:
            messages.put(message)
    except OSError:
        pass
    os._exit(0)


class Reports:
    """What a worker tells its engine; several of its threads do."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._connection.sendall(frame(message))

    def fail(self, error: BaseException, kind: str = "failed") -> NoReturn:
        """Says what went wrong, as far as it still can, and ends the process."""
        try:
            if kind == "refused":
                self.send({"kind": kind, "message": str(error)})
            else:
                traceback.print_exception(error)
                self.send({"kind": kind, "message": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(1)


class Worker:
    """A shard with its links to the others."""

    def __init__(self, setup: Mapping[str, Any], reports: Reports) -> None:
        torch.set_num_threads(setup["num_threads"])
        model, options = setup["model"], setup["engine"]
        directory = model["directory"] and Path(model["directory"])
        self._spec = model_spec(model["config"], name=model["name"], directory=directory)
        if setup.get("gpu_memory_utilization"):
            self._spec = with_finite_context(self._spec)
        placement = placement_from(setup["placement"])
        seat = seat_of(placement, setup["rank"])
        self._stage = stage = placement[seat.stage]
        device = local_device(options["device"], setup["local_device"])
        check_precision(options["dtype"], options.get("kv_dtype"), device)
        timeout = float(setup["timeout"])
        ranks = sum(other.tensor_parallel_size for other in placement)
        connect(
            tuple(setup["store"]),
            setup["prefix"],
            rank=seat.rank,
            size=ranks,
            timeout=timeout,
            device=device,
            address=setup["address"],
        )
        group = tensor_parallel_group(placement, seat, setup["buffers"], timeout=timeout)
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
            ),
            dtype=options["dtype"],
            kv_dtype=options.get("kv_dtype"),
            device=str(device),
            num_blocks=1 if stage.phase == "prefill" or setup.get("gpu_memory_utilization") else options["num_blocks"],
            dummy_weights=options["dummy_weights"],
            on_read=_Loading(reports).tell,
        )
        dtype = self._runner.activation
        self._links = HiddenLinks(
            placement,
            seat,
            hidden_size=self._spec.hidden_size,
            dtype=dtype,
            device=device,
            shared=setup["links"],
            timeout=timeout,
        )
        self.room = None if stage.phase == "prefill" else room_for(self._runner, setup)
        self._mirror, self._reports = Mirror(), reports
        self._completion = Completion(device, reports.fail)
        self._prefilled: dict[int, tuple[Row, ...]] = {}
        """Rows of encoder passes whose output has not been taken, by the number of the batch."""
        self._incoming: dict[str, _Part] = {}
        """By request: what is on its way here, or waits in host memory for blocks."""
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        if stage.phase:
            beside = dist.new_group(range(ranks), backend="gloo")
            assert isinstance(beside, dist.ProcessGroup)
            if stage.phase == "prefill":
                self._passing = PassingCache(stage.layers[1] - stage.layers[0], device)
                self._runner.cache = cast(KVCache, self._passing)
                self._sender = Sender(self._spec, placement, seat, beside, device)
                self._sender.start(reports.fail)
            else:
                self._receiver = Receiver(self._spec, placement, seat, beside, dtype, pinned=device.type == "cuda")
                self._receiver.start(self._arrived, reports.fail)
        if self._runner.kernels is not None:
            schedule = schedule_of(setup)
            rows = -(-most_rows(schedule) // schedule.num_micro_batches)
            make_ready(self._runner, rows, phase=stage.phase)

    @torch.inference_mode()
    def take(self, message: Mapping[str, Any]) -> None:
        """Does what a message says."""
        for request_id in message["freed"]:
            self._forget(request_id)
        if message["kind"] == "expect":
            self._expect(message)
        elif message["kind"] == "save":
            self._save(message)
        elif message["kind"] == "restore":
            self._restore(message)
        else:
            self._run(message)

    def _run(self, message: Mapping[str, Any]) -> None:
        batch = self._mirror.batch(message)
        self._take_outstanding(message["encoded"], as_rows(batch.decode))
        everyone = as_rows(batch.prefill + batch.decode)
        hidden_NE = self._links.receive(self._runner.num_tokens(batch))
        begun = self._completion.begin()
        out = self._runner.forward(batch, {row.request_id: row.token_ids for row in everyone}, hidden_NE)
        tokens: Callable[[], dict[str, Any]] = dict
        if self._last and self._leads:
            tokens = self._choose(out, producing_rows(batch, self._spec))
        elif not self._last:
            self._links.send(out)
        self._pass_on(message["number"], batch)
        if self._leads:
            report = {"kind": "ran", "number": message["number"]}
            self._completion.end(
                begun, lambda start, end: self._reports.send({**report, **tokens(), "start": start, "end": end})
            )

    def _choose(self, logits_RV: Tensor, rows: tuple[Row, ...]) -> Callable[[], dict[str, Any]]:
        """A token for each row: where kernels run, without waiting for the device before they are asked for."""
        names = [row.request_id for row in rows]
        if self._runner.kernels is None:
            sampled = sample(logits_RV, rows)
            return lambda: {"tokens": token_messages(dict(zip(names, sampled, strict=True)))}
        picked = pick(logits_RV, rows, self._runner.kernels)
        return lambda: {"tokens": token_messages(dict(zip(names, picked.sampled(), strict=True)))}

    def _pass_on(self, number: int, batch: Batch) -> None:
        """What a prefill leaves for later: keys and values for other stages, an encoder's output for all of them."""
        if not batch.prefill:
            return
        rows = as_rows(batch.prefill)
        if not self._spec.is_encoder_decoder:
            if self._sender:
                self._sender.put_layers(self._passing.kv_LNMD)
        elif self._last:
            encoded_NE = self._runner.encoded_NE
            assert encoded_NE is not None
            if self._sender:
                self._sender.put_encoded(encoded_NE)
            elif not self._first:
                self._links.send_encoded(encoded_NE)
                self._runner.take_encoded(rows, encoded_NE)
        elif not self._sender:
            self._prefilled[number] = rows

    def _take_outstanding(self, encoded: Sequence[int], rows: Sequence[Row]) -> None:
        """What these rows, which are to be decoded, still need of what other stages sent."""
        for number in encoded:
            if prefilled := self._prefilled.pop(number, None):
                self._take_encoded(prefilled)
        if self._receiver:
            self._place_received(self._receiver, rows)

    def _save(self, message: Mapping[str, Any]) -> None:
        parcels = [self._mirror.parcel(parcel) for parcel in message["parcels"]]
        self._take_outstanding(message["encoded"], [parcel.row for parcel in parcels])
        self._reports.send({"kind": "saved", "stored": save_parcels(self._runner, message["path"], parcels)})

    def _restore(self, message: Mapping[str, Any]) -> None:
        for row in message["new"]:
            self._mirror.add(row)
        parcels = [self._mirror.parcel(parcel) for parcel in message["parcels"]]
        restore_parcels(self._runner, message["path"], parcels)
        self._reports.send({"kind": "restored"})

    def _take_encoded(self, rows: tuple[Row, ...]) -> None:
        encoded_NE = self._links.receive_encoded(sum(self._runner.num_encoder_tokens(row) for row in rows))
        self._runner.take_encoded(rows, encoded_NE)

    def _expect(self, message: Mapping[str, Any]) -> None:
        """A batch has begun to be prefilled elsewhere, and will come here."""
        assert self._receiver is not None
        first = 0
        for row in map(self._mirror.add, message["new"]):
            encoder = self._spec.is_encoder_decoder
            last = first + (self._runner.num_encoder_tokens(row) if encoder else row.num_tokens)
            self._incoming[row.request_id] = _Part(message["number"], first, last)
            first = last
        self._receiver.expect(Expected(message["number"], first))

    def _arrived(self, number: int) -> None:
        self._reports.send({"kind": "arrived", "number": number})

    def _place_received(self, receiver: Receiver, rows: Sequence[Row]) -> None:
        """Puts what was handed over of rows that now have blocks where it belongs; drops what nobody waits for."""
        for row in rows:
            if part := self._incoming.pop(row.request_id, None):
                self._place(row, receiver.received[part.number], part)
        awaited = {part.number for part in self._incoming.values()}
        for number in [number for number in receiver.received if number not in awaited]:
            del receiver.received[number]

    def _place(self, row: Row, received: Tensor, part: "_Part") -> None:
        cache = self._runner.cache
        cache.resize(row.request_id, row.num_blocks, num_blocks_for(row.num_prompt_tokens + row.max_output_tokens))
        if self._spec.is_encoder_decoder:
            encoded_NE = received[part.first : part.last].to(cache.device, non_blocking=True)
            self._runner.take_encoded((row,), encoded_NE)
            return
        stored = cache.store_rows(cache.slots(row.request_id, 0, part.last - part.first))
        for layer, kv_NMD in enumerate(received[:, part.first : part.last]):  # Adjacent, so that the copy is direct.
            cache.store(layer, stored, kv_NMD.to(cache.device, non_blocking=True))

    def _forget(self, request_id: str) -> None:
        self._mirror.rows.pop(request_id, None)
        self._incoming.pop(request_id, None)
        self._runner.free(request_id)


class _Loading:
    """Tells how far loading is, a few times a second."""

    def __init__(self, reports: Reports) -> None:
        self._reports, self._told = reports, 0.0

    def tell(self, num_bytes: int) -> None:
        if clock() - self._told > _LOADING_PAUSE:
            self._told = clock()
            self._reports.send({"kind": "loading", "bytes": num_bytes})


class _Part(NamedTuple):
    """Tokens `first` to `last` of what one batch hands over."""

    number: int
    first: int
    last: int
