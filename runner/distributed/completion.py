"""Completion: calls back when a pass over a stage has run.

On a CPU it has run when the calls that made it return. On a GPU those only put it into a stream: events record when it
began and ended, and a thread waits for them, so that the worker can take the next command meanwhile.
"""

import queue
import threading
import time
from collections.abc import Callable

import torch

OnDone = Callable[[float, float], None]
"""Called with when a pass began and ended, in seconds of this process's clock."""
clock = time.perf_counter


class Completion:
    """Passes of one device, in order."""

    def __init__(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called, in another thread, with an error of the device or of a callback."""
        self._device, self._failed = device, failed
        self._ended: queue.SimpleQueue[tuple[torch.cuda.Event, torch.cuda.Event, OnDone]] = queue.SimpleQueue()
        if device.type == "cuda":
            threading.Thread(target=self._wait, name="completion", daemon=True).start()

    def begin(self) -> "float | torch.cuda.Event":
        """Marks the beginning of a pass, after what it waits for."""
        return clock() if self._device.type != "cuda" else _event()

    def end(self, begun: "float | torch.cuda.Event", on_done: OnDone) -> None:
        """Has `on_done` called when all that has been started so far is complete."""
        if isinstance(begun, torch.cuda.Event):
            self._ended.put((begun, _event(), on_done))
        else:
            on_done(begun, clock())

    def _wait(self) -> None:
        try:
            torch.cuda.set_device(self._device)  # A new thread uses the first device.
            while True:
                begun, ended, on_done = self._ended.get()
                ended.synchronize()
                end = clock()
                on_done(end - begun.elapsed_time(ended) / 1000, end)
        except BaseException as error:  # Otherwise it would end the thread unnoticed.
            self._failed(error)


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has none
    event.record()
    return event
