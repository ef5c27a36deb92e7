"""KV migration: keys and values of running requests move from one plan's executor to the next, through host memory.

Source: ExeGPT (ASPLOS 2024), section 5.3: layers move between devices, and requests continue. The memory belongs to
the engine's process, and workers map it. So the old executor can be gone when the new one starts: a GPU may be too
small for both.

Not here: which requests may keep their keys and values (`exeplan.scheduling.takeover`), the layout of the memory
(`kv_regions`), and migration to other hosts or to caches of another dtype: such requests are recomputed.
"""

import logging
import sys
from collections.abc import Sequence

import torch

from exeplan.runner.engine.executor import Executor, WorkerError
from exeplan.runner.engine.kv_regions import KVRegion
from exeplan.runner.engine.requests import RequestState
from exeplan.runner.ipc.collectives import SharedBuffer
from exeplan.runner.ipc.host_memory import available_bytes

log = logging.getLogger(__name__)
_MAX_SHARE = 0.5
"""Of the free host memory."""


def place_regions(requests: Sequence[RequestState], *, token_bytes: int, limit: int) -> tuple[KVRegion, ...]:
    """Adjacent regions for the first of these requests, as many as fit into `limit` bytes.

    A running request has all its tokens cached but the last, which its next pass computes.
    """
    regions, start = [], 0
    for request in requests:
        end = start + (request.num_tokens - 1) * token_bytes
        if end > limit:
            break
        regions.append(KVRegion(request, start, request.num_tokens - 1, request.num_tokens - 1))
        start = end
    return tuple(regions)


class KVMigration:
    """Keys and values of some requests, in host memory from `save` to `close`. A failure means fewer are migrated."""

    def __init__(self) -> None:
        self._regions: dict[str, KVRegion] = {}
        self._buffer: SharedBuffer | None = None

    def save(self, executor: Executor, requests: Sequence[RequestState], *, token_bytes: int) -> None:
        """Copies the requests' keys and values from an idle executor, up to half of the free host memory."""
        limit = int(_MAX_SHARE * available_bytes()) if sys.platform == "linux" else 0
        regions = place_regions(requests, token_bytes=token_bytes, limit=limit)
        if len(regions) < len(requests):
            log.warning("host memory is too small for the keys and values of %d requests", len(requests) - len(regions))
        if not regions:
            return
        try:
            self._buffer = SharedBuffer(regions[-1].start + regions[-1].num_tokens * token_bytes)
            stored = executor.save(self._buffer.path, regions)
        except (WorkerError, OSError, torch.OutOfMemoryError) as error:
            log.warning("running requests are recomputed, their keys and values cannot be read: %s", error)
            return
        self._regions = {
            region.request.request_id: region._replace(num_stored=count)
            for region, count in zip(regions, stored, strict=True)
        }

    def restore(self, executor: Executor, requests: Sequence[RequestState]) -> list[RequestState]:
        """Gives a new executor those of the requests that were saved, and returns them.

        Raises WorkerError when workers died meanwhile and cannot be restarted.
        """
        found = [region for request in requests if (region := self._regions.get(request.request_id))]
        if not (found and self._buffer):
            return []
        try:
            executor.restore(self._buffer.path, found)
        except WorkerError as error:
            log.warning("running requests are recomputed: %s; restarting all workers", error)
            executor.restart()
            return []
        return [region.request for region in found]

    def close(self) -> None:
        """Frees the memory."""
        self._regions = {}
        if self._buffer:
            self._buffer.close()
            self._buffer = None
