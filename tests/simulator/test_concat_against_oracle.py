"""Under every order the replay of `concat` does what an independent one, written from TCB's text, does."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, PackedPrompt, Packing, SequenceState
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, single_stage
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay

from .oracle_concat import BatchSeconds, Request, concat

ROW = 40


def batch_seconds(cost: CostModel) -> BatchSeconds:
    newest = 1 if cost.first_token_from_prefill else 0

    def row(prompt: int, generated: int) -> SequenceState:
        return SequenceState(request_id="", num_prompt_tokens=prompt, max_output_tokens=1, num_output_tokens=generated)

    def seconds(rows: int, length: int, requests: int, contexts: list[int]) -> float:
        if contexts:
            return cost.batch_seconds(Batch(decode=tuple(row(context, newest) for context in contexts)))
        packing = Packing(length, length, tuple(PackedPrompt(number % rows, 0) for number in range(requests)))
        return cost.batch_seconds(Batch(prefill=(row(1, 0),) * requests, packing=packing))

    return seconds


@pytest.mark.parametrize("encoder_layers", [0, 4], ids=["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("order", ["fcfs", "sjf", "edf", "das"])
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_token_comes_when_the_oracle_says(
    order: str, encoder_layers: int, data: st.DataObject, profile: Profile
) -> None:
    count = data.draw(st.integers(1, 24))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows, eta = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([25, 50, 75]))
    model = replace(profile.model, num_encoder_layers=encoder_layers)
    cost = CostModel(replace(profile, model=model), single_stage(model))
    inputs, outputs = rng.integers(1, ROW + 1, count), rng.integers(1, 8, count)
    # From everybody in time to nearly nobody.
    hurry = data.draw(st.sampled_from([0.001, 0.01, 0.1]))
    arrivals, patience = np.cumsum(rng.exponential(hurry / 4, count)), rng.uniform(0, 4 * hurry, count)
    variables = {"rows": rows, "row_tokens": ROW} | ({"eta_percent": eta} if order == "das" else {})
    run = replay(
        Schedule("concat", variables, order),
        cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=10_000,
        arrivals=arrivals,
        deadlines=patience,
    )
    lengths = zip(inputs.tolist(), outputs.tolist(), arrivals.tolist(), (arrivals + patience).tolist(), strict=True)
    expected = [Request(number, *values) for number, values in enumerate(lengths)]
    concat(
        expected,
        rows=rows,
        row_tokens=ROW,
        order=order,
        eta=eta / 100,
        seconds=batch_seconds(cost),
        first_token_from_prefill=cost.first_token_from_prefill,
    )
    for request, other in zip(run.requests, expected, strict=True):
        assert request.expired == (other.start is None)
        assert list(request.token_times) == pytest.approx(other.times, rel=1e-9)
        if other.start is not None:
            assert request.start == pytest.approx(other.start, rel=1e-9)
