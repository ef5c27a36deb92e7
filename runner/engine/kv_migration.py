"""Carrying: keys and values of running requests from the executor of one plan to that of the next, by host memory.

Source: ExeGPT (ASPLOS 2024), section 5.3: layers move from device to device, and requests go on. All that is carried
lies in memory that the engine's process makes and the workers map, so that nothing of the old plan needs to be there
any more when the new one takes over: a GPU may have no room for two.

Not here: who may keep keys and values (`exeplan.scheduling.takeover`), what lies where in that memory (`parcels`), and
ways to other hosts or to caches of another dtype: such requests are computed again.
"""

import logging
import sys
from collections.abc import Sequence

from exeplan.runner.engine.executor import Executor, WorkerError
from exeplan.runner.engine.kv_regions import Parcel
from exeplan.runner.engine.requests import Row
from exeplan.runner.ipc.collectives import SharedBuffer
from exeplan.runner.ipc.host_memory import available_bytes

log = logging.getLogger(__name__)
_MOST_SHARE = 0.5
"""Of the host memory that is free."""


def packed(rows: Sequence[Row], *, token_bytes: int, limit: int) -> tuple[Parcel, ...]:
    """Regions for the first of these rows that `limit` bytes have room for, without gaps.

    What a running row has stored are its tokens but for the last one, which its next pass computes.
    """
    parcels, start = [], 0
    for row in rows:
        end = start + (row.num_tokens - 1) * token_bytes
        if end > limit:
            break
        parcels.append(Parcel(row, start, row.num_tokens - 1, row.num_tokens - 1))
        start = end
    return tuple(parcels)


class Carried:
    """Keys and values of some rows, in host memory from `save` to `close`; all that fails is that fewer are carried."""

    def __init__(self) -> None:
        self._parcels: dict[str, Parcel] = {}
        self._buffer: SharedBuffer | None = None

    def save(self, executor: Executor, rows: Sequence[Row], *, token_bytes: int) -> None:
        """Copies what an executor at rest holds of these rows, as far as half of the free host memory goes."""
        limit = int(_MOST_SHARE * available_bytes()) if sys.platform == "linux" else 0
        parcels = packed(rows, token_bytes=token_bytes, limit=limit)
        if len(parcels) < len(rows):
            log.warning("host memory has no room for the keys and values of %d requests", len(rows) - len(parcels))
        if not parcels:
            return
        try:
            self._buffer = SharedBuffer(parcels[-1].start + parcels[-1].num_tokens * token_bytes)
            stored = executor.save(self._buffer.path, parcels)
        except (WorkerError, OSError) as error:
            log.warning("running requests are computed again, their keys and values cannot be had: %s", error)
            return
        self._parcels = {
            parcel.row.request_id: parcel._replace(num_stored=count)
            for parcel, count in zip(parcels, stored, strict=True)
        }

    def restore(self, executor: Executor, rows: Sequence[Row]) -> list[Row]:
        """Hands another executor, which is new, those of the rows that were saved. Returns these.

        Raises WorkerError when workers died under that, and no others can be had.
        """
        found = [parcel for row in rows if (parcel := self._parcels.get(row.request_id))]
        if not (found and self._buffer):
            return []
        try:
            executor.restore(self._buffer.path, found)
        except WorkerError as error:
            log.warning("running requests are computed again: %s; starting all workers again", error)
            executor.restart()
            return []
        return [parcel.row for parcel in found]

    def close(self) -> None:
        """Lets the memory go."""
        self._parcels = {}
        if self._buffer:
            self._buffer.close()
            self._buffer = None
