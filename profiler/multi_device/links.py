"""Links: all-reduces of a tensor-parallel group and sends to a next stage, timed between real processes.

The processes start and join a group as workers do, and time what workers do: the all-reduces inside a shard's layers,
on GPUs those of a captured graph, as decode iterations run them, and hidden states that one rank awaits while another
computes. Of an all-reduce the time of the rank counts that came last and did not wait: how unevenly ranks compute is
in the bursts' factor (`worker_passes.py`), which grows with the compute. Means count: the median of gloo's
all-reduces is half of their mean.
Not here: the compute of a shard (`shards.py`), and the engine's part (`control.py`).
"""

import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined] # it is not in their __all__

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.layer_costs import activation_bytes
from exeplan.core.profile import Measurement
from exeplan.core.schedule import Stage
from exeplan.profiler.measuring.device import synchronize
from exeplan.profiler.multi_device.rank_job import RankJob
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.graph_capture import CapturedFunction, GraphCapturer
from exeplan.runner.compute.weights.precision import activation_dtype
from exeplan.runner.compute.weights.shard import Group, Shard
from exeplan.runner.distributed.links import seat_of, tensor_parallel_group
from exeplan.runner.distributed.shared_link import LINK_BYTES, SharedMemoryLink
from exeplan.runner.ipc.collectives import SharedBuffer, group_bytes, shared_memory_works
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.messages import RANK_REPORTS, RankFailed, RankTimes

_LAYERS = 2
"""Layers that the ranks of an all-reduce compute, so that real work lies between two all-reduces."""
_ROUNDS = 5
_LEAST_PASSES, _SENDS = 3, 20
"""Of one size in a round."""
_CAPTURED_SUMS = 32
"""Of one graph."""
_LEAST_OWN_SHARE = 0.95
"""Least share of its core that a rank must have had for a pass to count."""
_COMPUTE_SECONDS = 1e-3
"""Seconds that a rank computes before it sends, while the receiver waits as the next stage does."""
_TIMEOUT_SECONDS = 120.0

clock = time.perf_counter


def link_rows(job: RankJob) -> tuple[Measurement, ...]:
    """A row for each number of tokens. Raises ChildProcessError when a rank fails."""
    with _ranks(job) as channels:
        answers = _answers(channels, job)
    rows = []
    for number, tokens in enumerate(job.num_tokens):
        means = [_mean([answer[number][turn] for answer in answers], job.op) for turn in range(_ROUNDS)]
        # Other programs delay a send on a CPU, and nothing tells which; of all-reduces the undisturbed ones are known.
        seconds = min(means) if job.op == "send" and job.device == "cpu" else statistics.median(means)
        rows.append(
            Measurement(
                op=job.op,
                phase="intra",
                bytes=round(activation_bytes(job.spec, tokens, job.dtype)),
                tensor_parallel_size=job.size if job.op == "all_reduce" else 1,
                seconds=float(f"{seconds:.4g}"),
                spread=float(f"{(max(means) - min(means)) / 4 / seconds:.3g}"),
                repeats=sum(len(answer[number][turn]) for answer in answers for turn in range(_ROUNDS)),
            )
        )
    return tuple(rows)


def _mean(of_ranks: Sequence[Sequence[float]], op: str) -> float:
    """Mean seconds of an all-reduce on the last rank to come, or of a send from its start on one rank to its end on the
    other.

    The slowest tenth is left out: on a shared machine it is due to other processes.
    """
    if op == "send":
        each = [ended - began for began, ended in zip(*of_ranks, strict=True)]
    else:
        each = [min(sums) for sums in zip(*of_ranks, strict=True)]
    return statistics.fmean(sorted(each)[: len(each) - len(each) // 10])


@contextmanager
def _ranks(job: RankJob) -> Iterator[list[socket.socket]]:
    """A process per rank and the channel to it; all end with the context, and when this process is killed."""
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        buffer = None
        if job.device == "cpu" and shared_memory_works():
            shared = SharedBuffer(group_bytes(job.size) if job.op == "all_reduce" else LINK_BYTES)
            cleanup.callback(shared.close)
            buffer = shared.path
        context = get_context("forkserver")
        context.set_forkserver_preload(["exeplan.runner.distributed.worker"])
        channels = []
        for rank in range(job.size):
            ours, theirs = socket.socketpair()
            process = context.Process(target=_run, args=(theirs, rank, job, folder, buffer), daemon=True)
            process.start()
            theirs.close()
            cleanup.callback(_end, process, ours)
            channels.append(ours)
        yield channels


def _end(process: ForkServerProcess, channel: socket.socket) -> None:
    process.kill()
    process.join()
    channel.close()


def _answers(channels: Sequence[socket.socket], job: RankJob) -> list[list[list[list[float]]]]:
    """The answer of each rank: a list of times by number of tokens and round."""
    answers: dict[int, list[list[list[float]]]] = {}
    while len(answers) < len(channels):
        waiting = [channel for rank, channel in enumerate(channels) if rank not in answers]
        for ready in connection.wait(waiting):
            rank = channels.index(cast(socket.socket, ready))
            report = RANK_REPORTS.read(channels[rank].recv)
            if not isinstance(report, RankTimes):
                reason = report.message if isinstance(report, RankFailed) else "it died"
                raise ChildProcessError(f"rank {rank} of {job.size} failed to time {job.op}: {reason}")
            answers[rank] = report.times
    return [answers[rank] for rank in range(len(channels))]


def _run(channel: socket.socket, rank: int, job: RankJob, folder: str, buffer: str | None) -> None:
    """The process of a rank. At the end it waits to be killed: a rank that exits would end the group of the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the profiler.
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    try:
        torch.set_num_threads(job.num_threads)
        device = _join(job, rank, folder)
        with torch.inference_mode():
            times = _TIMERS[job.op](job, rank, device, buffer)
        channel.sendall(frame(RankTimes(times=times)))
    except Exception as error:
        channel.sendall(frame(RankFailed(message=f"{type(error).__name__}: {error}")))
    threading.Event().wait()


def _end_with(channel: socket.socket) -> None:
    """Ends this process when the profiler exits; the profiler never sends anything."""
    try:
        channel.recv(1)
    finally:
        os._exit(0)


def _join(job: RankJob, rank: int, folder: str) -> torch.device:
    """Creates the process group of all ranks and returns this rank's device."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # Otherwise gloo may listen on an interface that other hosts reach.
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=FileStore(str(Path(folder) / "store"), job.size),
        rank=rank,
        world_size=job.size,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
        device_id=device if device.type == "cuda" else None,
    )
    return device


class _Timed:
    """A group that times its all-reduces, and the rank's compute between them by wall and CPU clock."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.size, self.rank, self.device = group, group.size, group.rank, device
        self.begin()

    def begin(self) -> None:
        """Starts a pass."""
        self.seconds: list[float] = []
        self.wall = self.cpu = 0.0
        self._since = clock(), time.thread_time()

    def all_reduce(self, x: Tensor) -> Tensor:
        synchronize(self.device)
        start, cpu = clock(), time.thread_time()
        self.wall, self.cpu = self.wall + start - self._since[0], self.cpu + cpu - self._since[1]
        x = self.group.all_reduce(x)
        synchronize(self.device)
        self._since = clock(), time.thread_time()
        self.seconds.append(self._since[0] - start)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self.group.all_gather(x)

    def muted(self) -> AbstractContextManager[None]:
        return self.group.muted()

    @property
    def disturbed(self) -> bool:
        """Whether other processes used this rank's core in the pass; known only with one thread on a CPU."""
        return self.device.type == "cpu" and torch.get_num_threads() == 1 and self.cpu < _LEAST_OWN_SHARE * self.wall


def _agree(group: Group, device: torch.device, *mine: bool) -> list[bool]:
    """Element by element, whether it is true on any rank."""
    said = group.all_reduce(torch.tensor(mine, dtype=torch.float32, device=device))
    return [value > 0 for value in said.tolist()]


def captured_sums(job: RankJob, group: Group, device: torch.device) -> list[list[list[float]]]:
    """The mean all-reduce of each replay of a graph of many, by number of tokens and round.

    Decode iterations on a GPU run them in captured graphs: timed one by one between two synchronizations, each would
    contain the host's launch and its wait.
    """
    size, dtype, capturer = job.spec.hidden_size, activation_dtype(job.dtype), GraphCapturer(device)
    graphs = []
    for tokens in job.num_tokens:
        x_NE = torch.zeros((tokens, size), dtype=dtype, device=device)
        graphs.append(capturer.capture(partial(_sum_often, group, x_NE)))
    found: list[list[list[float]]] = [[] for _ in job.num_tokens]
    each = job.seconds / _ROUNDS / len(job.num_tokens)
    for _ in range(_ROUNDS):
        for times, graph in zip(found, graphs, strict=True):
            times.append(_replay_sums(group, graph, each, device))
    return found


def _sum_often(group: Group, x_NE: Tensor) -> tuple[Tensor, ...]:
    for _ in range(_CAPTURED_SUMS):
        group.all_reduce(x_NE)
    return (x_NE,)


def _replay_sums(group: Group, graph: CapturedFunction, seconds: float, device: torch.device) -> list[float]:
    """All ranks replay as often as the slowest wants; the first replay does not count."""
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # untyped
    start, kept, late = clock(), list[float](), False
    while not late or len(kept) < _LEAST_PASSES:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        kept.append(begin.elapsed_time(end) * 1e-3 / _CAPTURED_SUMS)
        (late,) = _agree(group, device, clock() - start > seconds)
    return kept


def _sums(job: RankJob, rank: int, device: torch.device, buffer: str | None) -> list[list[list[float]]]:
    spec = job.spec
    layers, encoder_layers = ((0, min(_LAYERS, count)) for count in (spec.num_layers, spec.num_encoder_layers))
    placement = (Stage(devices=tuple(range(job.size)), layers=layers, encoder_layers=encoder_layers),)
    seat = seat_of(placement, rank)
    joined = tensor_parallel_group(placement, seat, [buffer], timeout=_TIMEOUT_SECONDS)
    if device.type == "cuda":
        return captured_sums(job, joined, device)
    group = _Timed(joined, device)
    runner = ModelRunner(
        spec,
        shard=Shard(layers=layers, encoder_layers=encoder_layers, first=False, last=False, group=group),
        dtype=job.dtype,
        device=str(device),
        num_blocks=num_blocks_for(max(job.num_tokens) + 1),
        dummy_weights=True,
    )
    found: list[list[list[float]]] = [[] for _ in job.num_tokens]
    each = job.seconds / _ROUNDS / len(job.num_tokens)
    for _ in range(_ROUNDS):
        for times, tokens in zip(found, job.num_tokens, strict=True):
            times.append(_pass_sums(group, _prefill(runner, tokens), each))
    return found


def _pass_sums(group: _Timed, forward: Callable[[], object], seconds: float) -> list[float]:
    """The all-reduces of each pass, for as many passes as fit the time; undisturbed passes only, if there are any.

    The first pass finds cold caches and does not count.
    """
    forward()
    start = clock()
    kept: list[float] = []
    others: list[float] = []
    passes, late = 0, False
    while not late or passes < _LEAST_PASSES:
        group.begin()
        forward()
        late, disturbed = _agree(group.group, group.device, clock() - start > seconds, group.disturbed)
        (others if disturbed else kept).extend(group.seconds)
        passes += 1
    return kept or others


def _prefill(runner: ModelRunner, num_tokens: int) -> Callable[[], object]:
    """A pass over one prompt of `num_tokens` tokens."""
    length = num_tokens if runner.spec.first_token_from_prefill else num_tokens + 1
    row = SequenceState(
        request_id="0", num_prompt_tokens=length, max_output_tokens=1, num_blocks=num_blocks_for(length)
    )
    batch, dtype = Batch(prefill=(row,)), runner.activation
    hidden_NE = torch.ones(num_tokens, runner.spec.hidden_size, dtype=dtype, device=runner.device)
    return lambda: runner.forward(batch, {"0": [0] * length}, hidden_NE)


def _sends(job: RankJob, rank: int, device: torch.device, buffer: str | None) -> list[list[list[float]]]:
    """Sends as `HiddenLinks` does: through shared memory where it works, by torch.distributed elsewhere."""
    link = SharedMemoryLink(buffer, timeout=_TIMEOUT_SECONDS) if buffer else None
    found: list[list[list[float]]] = [[] for _ in job.num_tokens]
    for _ in range(_ROUNDS):
        for times, tokens in zip(found, job.num_tokens, strict=True):
            size, dtype = (tokens, job.spec.hidden_size), activation_dtype(job.dtype)
            times.append(_send_times(torch.ones(size, dtype=dtype, device=device), rank, link))
    return found


def _send_times(hidden_NE: Tensor, rank: int, link: SharedMemoryLink | None) -> list[float]:
    """When this rank began to send, or had received."""
    times, answer = [], torch.zeros(1, device=hidden_NE.device)
    for _ in range(_SENDS):
        if rank == 0:
            _compute(hidden_NE.device)
            times.append(clock())
            work = None
            if link:
                link.send(hidden_NE)
            else:
                work = dist.isend(hidden_NE, 1)
            dist.recv(answer, 1)
            if work is not None:
                work.wait()
        else:
            if link:
                link.receive(hidden_NE)
            else:
                dist.recv(hidden_NE, 0)
            synchronize(hidden_NE.device)
            times.append(clock())
            dist.send(answer, 0)
    return times


def _compute(device: torch.device) -> None:
    x, start = torch.ones(128, 128, device=device), clock()
    while clock() - start < _COMPUTE_SECONDS:
        torch.mm(x, x)
    synchronize(device)


_TIMERS = {"all_reduce": _sums, "send": _sends}
