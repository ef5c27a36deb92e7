"""The parts of a pass add up to it, and each kind of work takes its measured time."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.cluster import Cluster, Link
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Measurement, Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.simulator.breakdown import KINDS, break_down
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run

WIRE = Link(bytes_per_second=1e9, latency=1e-5)
CLUSTER = Cluster(
    name="two", device="affine", num_nodes=1, gpus_per_node=2, memory_bytes=8 << 30, intra=WIRE, inter=WIRE
)
ONE = (Stage(layers=(0, 6)),)
TWO = (Stage(devices=(0,), layers=(0, 3)), Stage(devices=(1,), layers=(3, 6)))
APART = (Stage(devices=(0,), layers=(0, 6), phase="prefill"), Stage(devices=(1,), layers=(0, 6), phase="decode"))
RRA = Schedule("rra", {"prefill_batch": 4, "decode_steps": 6, "micro_batches": 2})
ORCA = Schedule("orca", {"max_num_seqs": 8, "micro_batches": 2})
WAA = Schedule("waa-c", {"prefill_batch": 2, "decode_batch": 8, "micro_batches": 2})


def broken_down(profile, schedule, placement, *, num_requests=60):
    """The breakdown, and the run on the cost model that it measured with."""
    runs = []

    def run(cost):
        lengths = np.full(num_requests, 32), np.full(num_requests, 8)
        runs.append(replay(schedule, cost, input_tokens=lengths[0], output_tokens=lengths[1], num_blocks=4000))
        return runs[-1]

    return break_down(CostModel(profile, placement, CLUSTER), run), runs[-1]


@pytest.mark.parametrize(
    ("schedule", "placement"), [(RRA, ONE), (RRA, TWO), (ORCA, TWO), (WAA, APART)], ids=["one", "two", "orca", "waa"]
)
@pytest.mark.parametrize("saving", [0.0, 0.8])
def test_the_parts_of_a_stage_are_the_time_it_is_busy(profile: Profile, schedule, placement, saving: float) -> None:
    profile = replace(profile, last_layer_saving=saving)
    cost = CostModel(profile, placement, CLUSTER)
    found, run = broken_down(profile, schedule, placement)
    plain = replay(schedule, cost, input_tokens=np.full(60, 32), output_tokens=np.full(60, 8), num_blocks=4000)
    assert run == plain
    for shares in found.stages:
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(share >= 0 for share in shares.values())
    busy = sum(end - start for record in run.passes for _, start, end in record.spans)
    whole = run.passes[-1].end - run.passes[0].start
    assert 1 - found.mean["idle"] == pytest.approx(busy / whole / len(placement), rel=0.1)


def test_one_stage_sends_nothing_and_two_do(profile: Profile) -> None:
    one, two = (broken_down(profile, ORCA, placement)[0] for placement in (ONE, TWO))
    assert one.mean["send"] == one.mean["all_reduce"] == two.mean["all_reduce"] == 0
    assert two.stages[0]["send"] > 0
    assert two.stages[1]["send"] == 0


def test_workers_that_slow_each_other_down_do_so_in_every_kind_of_work(profile: Profile) -> None:
    bursts = tuple(
        Measurement(op="pass", phase=phase, num_seqs=8, context_tokens=320, seconds=seconds)
        for phase, seconds in (("alone", 1e-3), ("together", 2e-3))
    )
    slowed = replace(profile, measurements=(*profile.measurements, *bursts))
    (plain, run), (found, longer) = (broken_down(one, RRA, TWO) for one in (profile, slowed))
    stages = zip(plain.stages, found.stages, strict=True)
    seconds = [
        (before["products"] * run.passes[-1].end, after["products"] * longer.passes[-1].end) for before, after in stages
    ]
    assert all(after == pytest.approx(2 * before, rel=0.1) for before, after in seconds)


def test_every_kind_of_work_takes_what_it_takes_alone(profile: Profile) -> None:
    """One request of 16 tokens and 1 output: a single prefill pass, whose times can be added up by hand."""
    run_of = {}

    def run(cost):
        run_of["run"] = replay(
            Schedule("static", {"batch_size": 1}),
            cost,
            input_tokens=np.array([16]),
            output_tokens=np.array([1]),
            num_blocks=40,
        )
        return run_of["run"]

    found = break_down(CostModel(profile, ONE, CLUSTER), run)
    seconds = run_of["run"].passes[0].end
    assert found.mean["attention"] * seconds == pytest.approx(6 * (2e-5 + 16**2 * 2e-9))
    assert found.mean["products"] * seconds == pytest.approx(
        6 * (40e-6 + 16 * 20e-6) + (5e-6 + 16 * 0.1e-6) + (50e-6 + 15e-6)
    )
    assert found.mean["overhead"] * seconds == pytest.approx(120e-6 + 8e-6)
    assert found.mean["idle"] == pytest.approx(0, abs=1e-9)
    assert set(found.mean) == {*KINDS, "idle"}


def test_the_roofline_says_prefill_computes_and_decode_reads(profile: Profile) -> None:
    found, _ = broken_down(profile, RRA, ONE)
    assert set(found.phases) == {"prefill", "decode"}
    prefill, decode = found.phases["prefill"], found.phases["decode"]
    # Per weight read, a prefill of 4 prompts of 32 tokens does 128 tokens' work, a decode iteration that of 4 rows.
    assert prefill.flops_share / prefill.bandwidth_share > 10 * decode.flops_share / decode.bandwidth_share
    assert prefill.share + decode.share == pytest.approx(1 - found.mean["idle"], abs=0.02)


def test_latent_attention_is_counted_as_it_is_computed_and_its_copies_are_read() -> None:
    """Long contexts, so that the attention is most of the work, of few requests."""
    spec, sheet = load_model_spec("deepseek-v2-lite"), load_datasheet("h100-80gb")
    profile = profile_from_datasheet(spec, sheet, dtype="bfloat16")
    inputs, outputs = np.full(64, 16_000), np.full(64, 100)
    orca = Schedule("orca", {"max_num_seqs": 64})

    def run(cost: CostModel) -> Run:
        return replay(orca, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=80_000)

    shares = {}
    for size in (1, 2):
        cost = CostModel(profile, (Stage(devices=tuple(range(size)), layers=(0, spec.num_layers)),))
        shares[size] = break_down(cost, run).phases["decode"]
    assert 0.5 < shares[1].bandwidth_share < 1
    # Of one token, 16 heads multiply 576 and 512 values; 1,152 bytes are read.
    intensity = 2 * 16 * (576 + 512) / (2 * 576)
    ratio = shares[1].flops_share * sheet.bfloat16_flops / (shares[1].bandwidth_share * sheet.memory_bandwidth)
    assert 0.5 * intensity < ratio < intensity  # Products, which read more for what they compute, are a part.
    assert shares[2].bandwidth_share > 0.8 * shares[1].bandwidth_share  # Two devices read the same vectors.
