"""AsyncExecutor: async scheduling on one device: the next batch is launched before the running one's tokens are known.

A GPU that waits for Python between two passes is idle as long as scheduling takes. So two batches may be launched: the
second takes its input tokens on the device, where the first writes them, and the host reads them while the second runs
(as vLLM's async scheduling does). On a CPU a batch is computed when it is started and reported when the next one has
been computed: the same order of events, so that tests see what a GPU sees.

Not here: which requests may be scheduled while their tokens are unknown, which the engine decides.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exeplan.core.batch import Batch
from exeplan.core.profile import ReferencePass
from exeplan.runner.compute.kv_budget import KVBudget
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.reference_passes import RepeatedPasses
from exeplan.runner.compute.tokens.device_sampling import DeviceSamples, sample_on_device
from exeplan.runner.compute.tokens.sampling import SampledToken
from exeplan.runner.compute.tokens.structures import Masks
from exeplan.runner.engine.executor import (
    BatchDone,
    SingleDevice,
    compute_each,
    sampled_requests,
)
from exeplan.runner.engine.reported_prompts import keep_parts, reported, with_prompts
from exeplan.runner.engine.requests import RequestState, as_requests
from exeplan.runner.engine.timeline import TimelineFile

log = logging.getLogger(__name__)
_DEPTH = 2
"""Batches that may be launched: one runs, one is queued behind it."""

Tokens = Mapping[str, SampledToken | None]


class _Launched(NamedTuple):
    batch: Batch
    start: float
    rows: Mapping[str, int]
    """By request id, the index of its token among those that the pass keeps on the device."""
    may_be_followed: bool
    """Whether it keeps them there, so that another batch can be launched behind it."""
    read: Callable[[], Tokens]
    """Waits for its tokens; repeated calls return the same."""


class AsyncExecutor(SingleDevice):
    """Its runner must attend over blocks (`ModelRunner.kernels`)."""

    async_scheduling = True

    def __init__(
        self, runner: ModelRunner, timeline: TimelineFile | None = None, kv_budget: KVBudget | None = None
    ) -> None:
        assert runner.kernels is not None
        super().__init__(runner, timeline, kv_budget)
        self._kernels = runner.kernels
        self._launched: deque[_Launched] = deque()
        self._last_end = 0.0

    @property
    def pending(self) -> bool:
        return bool(self._launched)

    def reference_passes(self, passes: Sequence[ReferencePass]) -> RepeatedPasses | None:
        """None: they would wait for the batches that are queued."""
        return None

    def accepts(self, phase: str) -> bool:
        return len(self._launched) < _DEPTH and all(launched.may_be_followed for launched in self._launched)

    @torch.inference_mode()
    def start(self, batch: Batch) -> None:
        try:
            self._launched.append(self._launch(batch))
        except Exception:
            log.exception("a batch failed: %s", ", ".join(row.request_id for row in batch.prefill + batch.decode))
            self._launched.append(self._compute_each(batch))

    def results(self) -> Sequence[BatchDone]:
        launched = self._launched.popleft()
        tokens = launched.read()
        start, self._last_end = max(launched.start, self._last_end), time.perf_counter()
        self._record(launched.batch, start, self._last_end)
        return (BatchDone(launched.batch, tokens),)

    def close(self) -> None:
        self._launched.clear()
        super().close()

    def _launch(self, batch: Batch) -> _Launched:
        start = time.perf_counter()
        requests, sampled = as_requests(batch.prefill + batch.decode), sampled_requests(batch, self.spec)
        rows = self._launched[-1].rows if self._launched else {}
        prev_rows = {request.request_id: rows[request.request_id] for request in requests if not _is_known(request)}
        token_ids = {request.request_id: request.token_ids for request in requests}
        masks = self.structures.begin(sampled)
        logits_RV = self.runner.forward(batch, token_ids, prev_rows=prev_rows, reported=reported(batch))
        samples = self._sample(logits_RV, sampled, masks())  # Copied to the host after what the pass has reported.
        prompts = keep_parts(batch, self.runner.prompt_parts)
        names = [request.request_id for request in sampled]
        return _Launched(
            batch,
            start,
            rows={name: row for row, name in enumerate(names)},
            may_be_followed=self.runner.keep_tokens(samples.token_R),
            read=lambda: with_prompts(dict(zip(names, samples.to_host(), strict=True)), prompts),
        )

    def _sample(self, logits_RV: Tensor, requests: Sequence[RequestState], masks: Masks) -> DeviceSamples:
        if self.runner.chosen is not None and all(request.plain for request in requests):
            return DeviceSamples(*self.runner.chosen, None)
        positions = [request.num_output_tokens for request in requests]
        return sample_on_device(logits_RV, requests, self._kernels, positions=positions, masks=masks)

    def _compute_each(self, batch: Batch) -> _Launched:
        """Request by request, after all earlier tokens have arrived, so that only the request at fault fails."""
        start = time.perf_counter()
        unread = {name: token for launched in self._launched for name, token in launched.read().items()}
        token_ids = {}
        for request in as_requests(batch.prefill + batch.decode):
            last = None if _is_known(request) else unread[request.request_id]
            token_ids[request.request_id] = [*request.token_ids, last.token_id] if last else request.token_ids

        def sampler(logits_RV: Tensor, requests: Sequence[RequestState], masks: Masks) -> list[SampledToken | None]:
            return self._sample(logits_RV, requests, masks).to_host()

        tokens = compute_each(self.runner, batch, token_ids, self.structures, sampler)
        return _Launched(batch, start, rows={}, may_be_followed=False, read=lambda: tokens)


def _is_known(request: RequestState) -> bool:
    """Whether the host has all tokens of a request that is about to be launched."""
    return len(request.token_ids) >= request.num_tokens
