"""Completion: when a pass over a stage has really run, and who is told then.

On a CPU it has run when the calls that made it return. On a GPU those only put it into a stream: events tell when it
began and ended, and a thread waits for them, so that the worker goes on to the next message meanwhile.
"""

import queue
import threading
import time
from collections.abc import Callable

import torch

Tell = Callable[[float, float], None]
"""Is told when a pass began and ended, in seconds of this process's clock."""
clock = time.perf_counter


class Completion:
    """Passes of one device, in order."""

    def __init__(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called, in another thread, with what went wrong on the device or in telling."""
        self._device, self._failed = device, failed
        self._ended: queue.SimpleQueue[tuple[torch.cuda.Event, torch.cuda.Event, Tell]] = queue.SimpleQueue()
        if device.type == "cuda":
            threading.Thread(target=self._wait, name="completion", daemon=True).start()

    def begin(self) -> "float | torch.cuda.Event":
        """Marks the beginning of a pass, behind what it waits for."""
        return clock() if self._device.type != "cuda" else _event()

    def end(self, begun: "float | torch.cuda.Event", tell: Tell) -> None:
        """Has `tell` called when all that has been started so far is complete."""
        if isinstance(begun, torch.cuda.Event):
            self._ended.put((begun, _event(), tell))
        else:
            tell(begun, clock())

    def _wait(self) -> None:
        try:
            torch.cuda.set_device(self._device)  # A thread begins with the first one.
            while True:
                begun, ended, tell = self._ended.get()
                ended.synchronize()
                end = clock()
                tell(end - begun.elapsed_time(ended) / 1000, end)
        except BaseException as error:  # A thread's exception would otherwise end with the thread, unseen.
            self._failed(error)


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has none
    event.record()
    return event
