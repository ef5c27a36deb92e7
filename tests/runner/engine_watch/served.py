"""A server that shows vLLM's metrics of requests that the test says have ended."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, Histogram, start_http_server

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SECONDS = (0.1, 1.0, 10.0)
FAMILIES = {
    "vllm": ("request_prompt_tokens", "request_generation_tokens", "request_prefill_time_seconds"),
    "sglang": ("prompt_tokens_histogram", "generation_tokens_histogram", "queue_time_seconds"),
}
TIMES = {"vllm": 0.1, "sglang": 0.2}
"""Of the third family."""
GAUGES = {"vllm": "num_requests_{}", "sglang": "num_{}_reqs"}


class Engine:
    """Takes prefills of a tenth of a second and a hundredth between two tokens, after two tenths in the queue."""

    def __init__(self, engine: str = "vllm", *, without: str = "", tokens: Sequence[int] = TOKENS) -> None:
        self._engine = engine
        self.registry = CollectorRegistry()
        inputs, outputs, third = FAMILIES[engine]
        names = {inputs: tokens, outputs: tokens, third: SECONDS}
        names |= dict.fromkeys(("time_to_first_token_seconds", "inter_token_latency_seconds"), SECONDS)
        self._histograms = {
            name: Histogram(f"{engine}:{name}", "", ["engine"], registry=self.registry, buckets=(*edges, math.inf))
            for name, edges in names.items()
            if name != without
        }
        for name, value in (("running", 3), ("waiting" if engine == "vllm" else "queue", 2)):
            Gauge(f"{engine}:{GAUGES[engine].format(name)}", "", registry=self.registry).set(value)

    def end(self, requests: Sequence[tuple[int, int]]) -> None:
        inputs, outputs, third = FAMILIES[self._engine]
        for number, (prompt, output) in enumerate(requests):
            self._observe(number % 2, inputs, prompt)
            self._observe(number % 2, outputs, output)
            self._observe(number % 2, third, TIMES[self._engine])
            self._observe(number % 2, "time_to_first_token_seconds", 0.3)
            for _ in range(output - 1):
                self._observe(number % 2, "inter_token_latency_seconds", 0.01)

    def _observe(self, engine: int, name: str, value: float) -> None:
        if name in self._histograms:
            self._histograms[name].labels(str(engine)).observe(value)


@contextmanager
def shown(engine: Engine) -> Iterator[str]:
    """The URL of a server that shows the engine's metrics."""
    server: WSGIServer
    thread: threading.Thread
    server, thread = start_http_server(0, addr="127.0.0.1", registry=engine.registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
