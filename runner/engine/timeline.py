"""TimelineFile: what ran, when, on which stage and for which requests; Perfetto can open the trace while it grows.

Standard: Chrome's trace event format, JSON array form, whose closing bracket is optional. One track a stage, and one
event for each pass over a stage, with the requests that it prefilled and decoded and the group that decoded.
"""

import json
from pathlib import Path
from typing import Any

from exeplan.core.batch import Batch
from exeplan.errors import InputError


class TimelineFile:
    """Written event by event: a process that is killed leaves all events up to then."""

    def __init__(self, path: Path, *, num_stages: int) -> None:
        """Raises InputError when the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        self._file.write("[\n")
        self._number = 0
        self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "engine"}})
        for stage in range(num_stages):
            self._write({"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}})

    def add(self, batch: Batch, stage: int, start: float, end: float) -> None:
        """A batch's pass over a stage, in seconds of one clock."""
        name = "mixed" if batch.prefill and batch.decode else "prefill" if batch.prefill else "decode"
        args = {
            "prefill": [row.request_id for row in batch.prefill],
            "decode": [row.request_id for row in batch.decode],
            "group": batch.group,
            "new_tokens": batch.num_new_tokens,
        }
        times = {"ts": round(start * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
        self._write({"name": name, "ph": "X", "pid": 0, "tid": stage, **times, "args": args})

    def close(self) -> None:
        """Call it after the last event."""
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(f"{json.dumps(event, separators=(',', ':'))},\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file, which may still be growing or may have been cut off."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [json.loads(line.removesuffix(",")) for line in lines if line.endswith("},")]
