"""Counting rows by group gives the run that the engine's Scheduler gives row by row: passes, tokens, preemptions."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.policies import policy_names
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay

from .machine import CLUSTER
from .stepwise import stepwise

LAYERS = 8
ORDERS = ("fcfs", "sjf", "edf", "das")


def machine(profile: Profile, draw: Any, *, separate: bool, encoder: bool) -> CostModel:
    """One to four stages, and where they are separate one or two more that prefill."""
    encoder_layers = LAYERS if encoder else 0
    spec = replace(profile.model, num_layers=LAYERS, num_encoder_layers=encoder_layers)

    def stages(most: int, first: int, phase: str, *, layers: bool, encodes: bool) -> list[Stage]:
        cuts = draw(st.lists(st.integers(1, LAYERS - 1), unique=True, max_size=most - 1).map(sorted))
        return [
            Stage(
                devices=(first + i,),
                layers=span if layers else (0, 0),
                encoder_layers=span if encodes else (0, 0),
                phase=phase,
            )
            for i, span in enumerate(pairwise([0, *cuts, LAYERS]))
        ]

    if not separate:
        return CostModel(replace(profile, model=spec), tuple(stages(4, 0, "", layers=True, encodes=encoder)), CLUSTER)
    prefill = stages(2, 0, "prefill", layers=not encoder, encodes=encoder)
    decode = stages(4, len(prefill), "decode", layers=True, encodes=False)
    return CostModel(replace(profile, model=spec), (*prefill, *decode), CLUSTER)


def control_variables(policy: str, draw: Any) -> dict[str, int]:
    size = draw(st.integers(1, 12))
    adjusted = {"adjust_percent": 30, "prefill_tokens": 150, "decode_batch": 8}
    if policy == "orca":
        return {"max_num_seqs": size}
    if policy in ("chunked", "sglang"):
        return {"max_num_seqs": size, "max_num_batched_tokens": size + draw(st.integers(1, 60))}
    if policy == "rra":
        more = draw(st.sampled_from([{}, {"max_num_batched_tokens": 100}, adjusted]))
        return {"prefill_batch": size, "decode_steps": draw(st.integers(1, 12)), **more}
    if policy == "concat":
        return {"rows": draw(st.integers(1, 4)), "row_tokens": 64, "slot_tokens": draw(st.sampled_from([16, 64]))}
    if policy.startswith("waa"):
        more = draw(st.sampled_from([{}, adjusted]))
        return {"prefill_batch": draw(st.integers(1, 4)), **more, "decode_batch": size}
    return {"batch_size": size}


@pytest.mark.parametrize("policy", policy_names())
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_pass_and_token_is_that_of_single_rows(policy: str, data: st.DataObject, profile: Profile) -> None:
    cost = machine(profile, data.draw, separate=policy.startswith("waa"), encoder=data.draw(st.booleans()))
    together = len(cost.placement) == 1 or policy in ("concat", "turbo")
    micro_batches = 1 if together else data.draw(st.integers(1, 6))
    variables = control_variables(policy, data.draw)
    order = "fcfs" if policy == "static" else data.draw(st.sampled_from(ORDERS))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=30))
    inputs, outputs = (list(side) for side in zip(*lengths, strict=True))
    least = max(-(-(given + output) // 16) for given, output in lengths)
    arguments: dict[str, Any] = {"num_blocks": least + data.draw(st.integers(0, 12) | st.just(1000))}
    load = data.draw(st.sampled_from(["backlog", "arrivals", "clients", "deadlines"]))
    if load == "clients":
        arguments["concurrency"] = data.draw(st.integers(1, 12))
    gaps = st.lists(st.sampled_from([0.0, 0.001, 0.02]), min_size=len(lengths), max_size=len(lengths))
    if load in ("arrivals", "deadlines"):
        arguments["arrivals"] = np.cumsum(data.draw(gaps)).tolist()
    if load == "deadlines":
        patience = st.lists(st.sampled_from([0.01, 0.1, 1.0]), min_size=len(lengths), max_size=len(lengths))
        arguments["deadlines"] = data.draw(patience)
    schedule = Schedule(policy, {**variables, **({} if together else {"micro_batches": micro_batches})}, order)
    expected = stepwise(schedule, cost, input_tokens=inputs, output_tokens=outputs, **arguments)
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in arguments.items()}
    run = replay(schedule, cost, input_tokens=np.array(inputs), output_tokens=np.array(outputs), **arrays)
    assert [(p.num_prefill, p.num_decode, p.num_new_tokens) for p in run.passes] == [p[1:] for p in expected.passes]
    for record, (times, *_) in zip(run.passes, expected.passes, strict=True):
        assert [time for _, *span in record.spans for time in span] == pytest.approx(times, rel=1e-12)
    for request, other in zip(run.requests, expected.requests, strict=True):
        assert request.arrival == pytest.approx(other.arrival, rel=1e-12)
        assert request.start == pytest.approx(other.start, rel=1e-12)
        assert list(request.token_times) == pytest.approx(other.token_times, rel=1e-12)
    assert (run.peak_kv_tokens, run.num_preemptions) == (expected.peak_kv_tokens, expected.num_preemptions)
