"""Recorded: a function over tensors that stay where they are, recorded once and replayed at the price of one launch.

On a GPU it is a CUDA graph: Python runs once, while it is captured, and a replay launches all of its kernels together.
On a CPU the function simply runs again, over the same tensors, so that whatever a recording gets wrong about buffers
and padding is wrong there, too, and tests see it.

A recorded function takes its inputs from tensors that its owner fills before a replay, and waits for nothing: it reads
no value on the host, and no shape depends on one. Not here: which functions are recorded, and for how many rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_WARM_UPS = 2
"""The first run compiles and tunes kernels, the second finds all of them ready."""


class Recorded:
    """One function as it was recorded; `outputs` are its tensors, always the same ones."""

    def __init__(
        self,
        function: Callable[[], tuple[Tensor, ...]],
        outputs: tuple[Tensor, ...],
        graph: "torch.cuda.CUDAGraph | None",
    ) -> None:
        self.outputs = outputs
        self._function, self._graph = function, graph

    @torch.inference_mode()
    def replay(self) -> tuple[Tensor, ...]:
        """Runs it on the current stream. What `outputs` hold is gone with the next replay of its recorder."""
        if self._graph is not None:
            self._graph.replay()
            return self.outputs
        for kept, fresh in zip(self.outputs, self._function(), strict=True):
            kept.copy_(fresh)
        return self.outputs


class Recorder:
    """Records functions of one device. They share the memory of what they compute, and so never run at once.

    Record the one that needs most memory first: the others then find room in what it took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_bytes = 0
        """Memory of the device that the recordings so far have taken."""
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has none

    @torch.inference_mode()
    def record(self, function: Callable[[], tuple[Tensor, ...]]) -> Recorded:
        """Runs the function a few times, and keeps how. It must do the same each time, whatever its tensors hold."""
        if self._device.type != "cuda":
            return Recorded(function, tuple(output.clone() for output in function()), None)
        free = self._free_bytes()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads that hand keys and values over may call CUDA meanwhile: only this one's calls are recorded.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.num_bytes += max(0, free - self._free_bytes())
        return Recorded(function, outputs, graph)

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]
