"""An engine that schedules ahead on a pipeline starts the batches that one starts which waits for the tokens of each.

The stages take equally long here: as long as a call of `results`.
"""

from collections import deque

import pytest
import torch

from exeplan.core.models.model import model_spec
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.tokens.sampling import SampledToken, SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import BatchDone, WorkerError, sampled_requests

NUM_BLOCKS = 64
SPEC = model_spec(
    {"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"intermediate_size": 24, "max_position_embeddings": 96, "eos_token_id": None},
    name="tiny",
)
SCHEDULES = {
    "static": {"batch_size": 6},
    "orca": {"max_num_seqs": 6},
    "rra": {"prefill_batch": 2, "decode_steps": 4},
    "chunked": {"max_num_seqs": 6, "max_num_batched_tokens": 12},
}


class Pipeline:
    """Stages that compute nothing: a token is its number, or what `token` says of a request and that."""

    phases, kv_budget = ("",), None
    spec = SPEC

    def __init__(self, num_stages: int, *, ahead: bool, token=lambda request_id, number: number) -> None:
        self.async_scheduling, self._token = ahead, token
        self.num_prefill_stages = self.num_decode_stages = num_stages
        self.passes: list[tuple[list[str], list[str]]] = []
        self.num_ahead, self.lost_after = 0, None
        self.restart()

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or any(self._stages)

    def accepts(self, phase: str) -> bool:
        if not self.async_scheduling:
            return self._stages[0] is None
        at_first = len(self._waiting) + (self._stages[0] is not None)
        return at_first < 2 and at_first + sum(map(bool, self._stages[1:])) <= len(self._stages)

    def start(self, batch) -> None:
        self.num_ahead += any(row.num_unknown for row in batch.decode)
        assert all(row.num_unknown <= 1 for row in batch.decode)
        self.passes.append(tuple([row.request_id for row in rows] for rows in (batch.prefill, batch.decode)))
        numbers = {row.request_id: row.num_output_tokens + 1 for row in sampled_requests(batch, SPEC)}
        self._waiting.append((batch, numbers))
        self._enter()

    def results(self) -> list[BatchDone]:
        if self.lost_after is not None and len(self.passes) >= self.lost_after:
            self.lost_after = None
            raise WorkerError("lost")
        left = self._stages.pop()
        self._stages.insert(0, None)
        self._enter()
        if not left:
            return []
        batch, numbers = left
        return [BatchDone(batch, {name: SampledToken(self._token(name, number)) for name, number in numbers.items()})]

    def _enter(self) -> None:
        """A batch waits for the tokens that it continues."""
        if self._waiting and self._stages[0] is None:
            rows = {id(row) for row in self._waiting[0][0].decode}
            running = (row for one in self._stages if one for row in (*one[0].prefill, *one[0].decode))
            if not rows & set(map(id, running)):
                self._stages[0] = self._waiting.popleft()

    def restart(self) -> None:
        self._waiting, self._stages = deque(), [None] * self.num_decode_stages

    def release(self, request_id: str) -> None:
        """It holds nothing."""


def served(policy: str, executor: Pipeline, micro_batches: int, **sampling) -> dict[str, list[int]]:
    schedule = Schedule(policy, {**SCHEDULES[policy], "micro_batches": micro_batches})
    engine, found = Engine(executor, schedule, num_blocks=NUM_BLOCKS), {}
    lengths = torch.randint(1, 20, (24, 2), generator=torch.Generator().manual_seed(1)).tolist()
    for number, (prompt, tokens) in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, **sampling)
        engine.add(Request(request_id=f"{number}", prompt_token_ids=[5] * prompt, sampling=params))
    while engine.has_work:
        try:
            outputs = engine.step()
        except WorkerError:
            outputs = engine.restart()
        for output in outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert (engine.free_blocks, engine.num_running) == (NUM_BLOCKS, 0)
    return found


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("policy", SCHEDULES)
def test_passes_are_those_of_an_engine_that_waits(policy, num_stages, micro_batches):
    waiting, ahead = (Pipeline(num_stages, ahead=value) for value in (False, True))
    assert served(policy, waiting, micro_batches) == served(policy, ahead, micro_batches)
    assert waiting.num_ahead == 0
    assert ahead.num_ahead > 0 or micro_batches > num_stages
    assert ahead.passes == waiting.passes


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("policy", SCHEDULES)
def test_a_request_that_ends_early_is_computed_once_more_and_gives_no_more_tokens(policy, num_stages):
    def token(request_id: str, number: int) -> int:
        return 7 if number == 3 + int(request_id) % 4 else 8 + number

    waiting, ahead = (Pipeline(num_stages, ahead=value, token=token) for value in (False, True))
    expected = served(policy, waiting, num_stages, stop_token_ids=(7,))
    assert served(policy, ahead, num_stages, stop_token_ids=(7,)) == expected
    rows = [sum(len(decode) for _, decode in executor.passes) for executor in (waiting, ahead)]
    assert rows[0] <= rows[1] <= rows[0] + 24 or policy == "static"


@pytest.mark.parametrize("lost_after", range(1, 40, 2))
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("policy", SCHEDULES)
def test_lost_workers_cost_no_token_that_was_launched(policy, num_stages, lost_after):
    waiting, ahead = (Pipeline(num_stages, ahead=value) for value in (False, True))
    ahead.lost_after = lost_after
    assert served(policy, ahead, num_stages) == served(policy, waiting, num_stages)
