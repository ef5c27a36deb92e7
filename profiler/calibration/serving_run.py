"""ServingRun: one measured run of a serving engine under a fixed number of clients, and what is predicted for it.

`concurrency` clients send prompts; each sends its next when it has its answer. TTFT is measured from the sending, so
that waiting counts; TTFT and TPOT are means over all requests. Seconds and tokens.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRun:
    """`model` is a shipped name or what a profile calls it, `device` a datasheet's name."""

    engine: str
    version: str = ""
    model: str
    dtype: str
    device: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    tensor_parallel_size: int
    expert_parallel_size: int = 1
    """Parts of whole experts that these devices hold."""
    least_share: float = 1.0
    """Lengths are even between this share of those stated and all of them."""
    num_requests: int | None = None
    """Of all clients together; ten of each where it is not known."""
    ttft: float
    tpot: float
    where: str = field(default="", compare=False)
    """The file and its line that say it; '' of a run that is in none."""

    def __str__(self) -> str:
        return self.where or f"a run of {self.input_tokens} + {self.output_tokens} tokens, {self.concurrency} clients"

    @property
    def devices(self) -> str:
        """In words."""
        return f"{self.tensor_parallel_size} x {self.device}"

    @property
    def e2e(self) -> float:
        """Of an answer of the stated length."""
        return self.ttft + self.tpot * (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over all requests, in seconds."""

    ttft: float
    tpot: float

    def e2e(self, run: ServingRun) -> float:
        """Of an answer of the length that the run states."""
        return self.ttft + self.tpot * (run.output_tokens - 1)
