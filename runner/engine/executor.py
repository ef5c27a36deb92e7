"""Executor: what an engine asks of the devices that compute its batches, and the one that runs in this process.

`runner/distributed/multiprocess_executor.py` has the other kind: one process a device. An executor knows devices and
tensors; the engine decides which batch runs next and what a token means.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from exeplan.core.batch import Batch
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import ReferencePass
from exeplan.runner.compute.kv_budget import KVBudget
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.reference_passes import ReferencePasses, RepeatedPasses
from exeplan.runner.compute.tokens.sampling import SampledToken, sample
from exeplan.runner.compute.tokens.structures import Masks, Structures
from exeplan.runner.engine.kv_regions import KVRegion, restore_regions, save_regions
from exeplan.runner.engine.reported_prompts import keep_parts, reported, with_prompts
from exeplan.runner.engine.requests import RequestState, as_requests
from exeplan.runner.engine.timeline import TimelineFile
from exeplan.runner.engine.tokenizer import structure_tokenizer

log = logging.getLogger(__name__)
Sampler = Callable[[Tensor, Sequence[RequestState], Masks], list[SampledToken | None]]
"""From logits `[R, V]` to a token for each of R requests, by the masks of those that have a grammar; None where the
logits are not finite."""


class WorkerError(RuntimeError):
    """A worker died or hangs: the running batches are lost, and `restart` may help."""


class DeviceLostError(WorkerError):
    """No worker can be started on a device, time after time; `left` are the others of the placement."""

    def __init__(self, device: int, left: Sequence[int]) -> None:
        super().__init__(f"no worker can be started on device {device}")
        self.left = tuple(left)


class BatchDone(NamedTuple):
    """A batch has left its last stage."""

    batch: Batch
    tokens: Mapping[str, SampledToken | None]
    """By request id; None for a request that failed. A request without an entry had no token to sample."""


class KVArrived(NamedTuple):
    """The keys and values of a prefilled batch have reached the stages that decode."""

    batch: Batch


class Executor(Protocol):
    """Computes batches, several at once where there are several stages."""

    spec: ModelSpec
    phases: tuple[str, ...]
    """The kinds of stages there are, as in `Stage.phase`; those that decode come first."""
    num_prefill_stages: int
    num_decode_stages: int
    kv_budget: KVBudget | None
    """The smallest KV cache budget that a device measured; None where none was measured."""
    async_scheduling: bool
    """Whether it accepts the next batch before the tokens of the running one are known."""

    @property
    def pending(self) -> bool:
        """Whether `results` has, or will have, something to return."""

    def accepts(self, phase: str) -> bool:
        """Whether the first stage of that phase is free."""

    def start(self, batch: Batch) -> None:
        """Starts a batch of `RequestState`s. Its phase must be accepted."""

    def results(self) -> Sequence[BatchDone | KVArrived]:
        """Waits for the next event and returns what is finished; empty where only a stage became free.

        Raises WorkerError when a worker died or hangs.
        """

    def wake(self) -> None:
        """Makes a waiting `results` return; any thread may call it."""

    def reference_passes(self, passes: Sequence[ReferencePass]) -> RepeatedPasses | None:
        """Repeats these on its devices, between batches; None where that would say nothing of their speed.

        No batch is in flight.
        """

    def release(self, request_id: str) -> None:
        """Frees what is held for a request that has left; one that never ran is accepted."""

    def save(self, path: str, regions: Sequence[KVRegion]) -> Sequence[int]:
        """Copies keys and values into the memory at `path`. Nothing may be pending.

        Returns how many tokens each region holds. Raises WorkerError when a worker died or hangs.
        """

    def restore(self, path: str, regions: Sequence[KVRegion]) -> None:
        """Takes requests that another executor saved, to be decoded next. Raises WorkerError as `save` does."""

    def restart(self) -> None:
        """Starts over with nothing pending and nothing cached. Raises WorkerError when that is not possible."""

    def close(self) -> None:
        """Ends its processes and its timeline, and frees its weights and its cache. May be called again."""


class SingleDevice:
    """What the executors of one model on one device in this process have in common."""

    phases: tuple[str, ...] = ("",)
    num_prefill_stages = num_decode_stages = 1

    def __init__(
        self, runner: ModelRunner, timeline: TimelineFile | None = None, kv_budget: KVBudget | None = None
    ) -> None:
        self.kv_budget = kv_budget
        self.spec, self.runner, self._timeline = runner.spec, runner, timeline
        self.structures = Structures(partial(structure_tokenizer, runner.spec))

    def wake(self) -> None:
        """Nothing to do: `results` waits for the device only."""

    def release(self, request_id: str) -> None:
        self.runner.free(request_id)

    def save(self, path: str, regions: Sequence[KVRegion]) -> Sequence[int]:
        return save_regions(self.runner, path, regions)

    def restore(self, path: str, regions: Sequence[KVRegion]) -> None:
        restore_regions(self.runner, path, regions)

    def restart(self) -> None:
        raise WorkerError("the model runs in the engine's own process, which cannot be restarted")

    def close(self) -> None:
        if self._timeline:
            self._timeline.close()
        if hasattr(self, "runner"):
            del self.runner
            _give_back()

    def _record(self, batch: Batch, start: float, end: float) -> None:
        """Adds a finished batch to the timeline; seconds."""
        if self._timeline:
            self._timeline.add(batch, 0, start, end)


def free_half_built(error: BaseException) -> None:
    """Frees the weights and caches that the calls hold which ended with this error, or with one that it came from."""
    one: BaseException | None = error
    while one:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    _give_back()


def _give_back() -> None:
    """Returns memory of tensors that are gone to the GPU, for other processes and for measuring what is free."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()


class InProcessExecutor(SingleDevice):
    """Computes one batch at a time, when its results are asked for."""

    async_scheduling = False
    _batch: Batch | None = None

    @property
    def pending(self) -> bool:
        return self._batch is not None

    def accepts(self, phase: str) -> bool:
        return self._batch is None

    def start(self, batch: Batch) -> None:
        self._batch = batch

    def reference_passes(self, passes: Sequence[ReferencePass]) -> RepeatedPasses | None:
        return ReferencePasses(self.runner, passes) if self.runner.device.type == "cpu" else None

    def results(self) -> Sequence[BatchDone]:
        batch, self._batch = self._batch, None
        assert batch is not None
        start = time.perf_counter()
        tokens = compute(self.runner, batch, self.structures)
        self._record(batch, start, time.perf_counter())
        return (BatchDone(batch, tokens),)


def sampled_requests(batch: Batch, spec: ModelSpec) -> tuple[RequestState, ...]:
    """The requests that get a token from a batch, in the order of its logits."""
    return as_requests(batch.whole_prefills + batch.decode if spec.first_token_from_prefill else batch.decode)


def compute(runner: ModelRunner, batch: Batch, structures: Structures) -> dict[str, SampledToken | None]:
    """A token for each request that gets one. If the batch fails, each request runs alone, and None stands for those
    that fail again.

    Raises the runner's exception when every request fails alone: then no single request is the cause.
    """
    requests = as_requests(batch.prefill + batch.decode)
    token_ids = {request.request_id: request.token_ids for request in requests}
    try:
        return _tokens(runner, batch, token_ids, structures, sample)
    except Exception:
        log.exception("a batch failed: %s", ", ".join(request.request_id for request in requests))
        return compute_each(runner, batch, token_ids, structures)


def compute_each(
    runner: ModelRunner,
    batch: Batch,
    token_ids: Mapping[str, Sequence[int]],
    structures: Structures,
    sampler: Sampler = sample,
) -> dict[str, SampledToken | None]:
    """The tokens of a batch that has just failed, request by request; None for a request that fails alone too.

    Call it while that exception is handled: it is raised again where every request fails.
    """
    found: dict[str, SampledToken | None] = {}
    num_failed = 0
    for single in _singles(batch):
        (request,) = as_requests(single.prefill + single.decode)
        try:
            found |= _tokens(runner, single, token_ids, structures, sampler)
        except Exception:
            log.exception("request %s failed", request.request_id)
            found[request.request_id] = None
            num_failed += 1
    if num_failed == len(batch.prefill + batch.decode) > 1:
        raise
    return found


def _tokens(
    runner: ModelRunner,
    batch: Batch,
    token_ids: Mapping[str, Sequence[int]],
    structures: Structures,
    sampler: Sampler,
) -> dict[str, SampledToken | None]:
    sampled = sampled_requests(batch, runner.spec)
    masks = structures.begin(sampled)
    logits_RV = runner.forward(batch, token_ids, reported=reported(batch))
    tokens = sampler(logits_RV, sampled, masks())
    found = dict(zip((request.request_id for request in sampled), tokens, strict=True))
    return with_prompts(found, keep_parts(batch, runner.prompt_parts))


def _singles(batch: Batch) -> list[Batch]:
    chunks = batch.chunks or (None,) * len(batch.prefill)
    prefills = [
        Batch(prefill=(request,), pad_to=batch.pad_to, chunks=(chunk,) if chunk else ())
        for request, chunk in zip(batch.prefill, chunks, strict=True)
    ]
    return prefills + [Batch(decode=(request,)) for request in batch.decode]
