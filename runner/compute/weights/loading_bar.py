"""LoadingBar: the progress of reading a model's weights, by one process or several."""

import sys
import time

from exeplan.core.models.layer_costs import model_parameters
from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.schedule import Placement
from exeplan.progress import OnProgress, Progress, no_progress
from exeplan.units import show_bytes


class LoadingBar:
    """Shows the bytes that all ranks together have read; a context manager, which clears the bar at the end."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, dtype: str, *, on_progress: OnProgress = no_progress
    ) -> None:
        # A decoder-only model is loaded twice where some stages prefill and others decode.
        copies = 2 if any(stage.phase for stage in placement) and not spec.is_encoder_decoder else 1
        self._total = copies * model_parameters(spec) * DTYPE_BYTES[dtype]
        self._read: dict[int, int] = {}
        self._began = time.monotonic()
        self._bar = Progress(f"loading {spec.name}", shown=sys.stderr.isatty(), on_progress=on_progress)

    def __enter__(self) -> "LoadingBar":
        self._read.clear()
        self._began = time.monotonic()
        self._bar.__enter__()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._bar.__exit__(None, None, None)

    def show(self, rank: int, num_bytes: int) -> None:
        """`num_bytes` is what a rank has read so far."""
        self._read[rank] = num_bytes
        done = sum(self._read.values())
        share = min(done / self._total, 1.0)
        left = (time.monotonic() - self._began) * (1 / share - 1) if share else 0.0
        self._bar.update(share, left, f"{show_bytes(done)} of {show_bytes(self._total)}")
