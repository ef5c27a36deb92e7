"""CUDA graph capture: a function over static tensors, captured once and replayed with one launch.

On a GPU Python runs once, during capture, and a replay launches all kernels of the graph together. On a CPU a replay
runs the function again over the same tensors, so that tests there find wrong buffers and wrong padding.

A captured function reads its inputs from tensors that its owner keeps, and fills before a replay. It must not
synchronize: it reads no value on the host, and no shape depends on one. Not here: which functions are captured, for
which batch sizes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_WARM_UPS = 2
"""The first run compiles and tunes kernels, the second runs them as they will be captured."""


class CapturedFunction:
    """One captured function; `outputs` are static tensors."""

    def __init__(
        self,
        outputs: tuple[Tensor, ...],
        *,
        graph: "torch.cuda.CUDAGraph | None" = None,
        function: Callable[[], tuple[Tensor, ...]] | None = None,
    ) -> None:
        """A graph, or on a CPU the function. With a graph the function is let go of: it may hold the owner of this, and
        Python's collector, which counts objects, would leave such a circle with its gigabytes for long."""
        self.outputs = outputs
        self._graph, self._function = graph, function

    @torch.inference_mode()
    def replay(self) -> tuple[Tensor, ...]:
        """Runs it on the current stream. The next replay of the same capturer overwrites `outputs`."""
        if self._graph is not None:
            self._graph.replay()
            return self.outputs
        assert self._function is not None
        for kept, fresh in zip(self.outputs, self._function(), strict=True):
            kept.copy_(fresh)
        return self.outputs


class GraphCapturer:
    """Captures functions of one device. Their graphs share a memory pool, so they must not run at the same time.

    Capture the one that needs most memory first: the others then fit into its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_bytes = 0
        """Device memory of the graphs captured so far."""
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has none

    @torch.inference_mode()
    def capture(self, function: Callable[[], tuple[Tensor, ...]]) -> CapturedFunction:
        """Warms up and captures a function, which must launch the same kernels whatever its tensors hold."""
        if self._device.type != "cuda":
            return CapturedFunction(tuple(output.clone() for output in function()), function=function)
        free = self._free_bytes()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads that transfer keys and values may call CUDA meanwhile: only calls of this thread are captured.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.num_bytes += max(0, free - self._free_bytes())
        return CapturedFunction(outputs, graph=graph)

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]
