"""Communication takes the sum of its messages: each is counted here, device by device, and timed by hand.

The oracle shares no line with the cost model but the time of a layer's products. A ring all-reduce runs chunk by chunk
until every device holds every sum; a pipeline sends one hidden state a token; each device that prefills sends the keys
and values of its own layers and heads, piece by piece. A link takes its latency and then its bandwidth; a profile's
rows are read off with straight lines between them. What is left of the cost model's seconds when the same placement has
links that cost nothing is compared with that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch
from exeplan.core.batch import SequenceState as Request
from exeplan.core.cluster import Cluster, Link
from exeplan.core.handover import pieces
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Measurement, Profile
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Placement, Schedule, Stage
from exeplan.policies import waa_c
from exeplan.policies.interface import Cycle
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Workload

from .machine import with_tensor_parallel

BYTES = {"float32": 4, "float16": 2, "fp8": 1}
LINKS = {"intra": Link(bytes_per_second=2e7, latency=3e-4), "inter": Link(bytes_per_second=3e6, latency=2e-3)}
FREE = Link(bytes_per_second=float("inf"), latency=0.0)
GPUS = 8

Seconds = Callable[[float, int, str], float]
"""(bytes, devices, link) -> seconds of a sum over the devices of a stage, or of a message to the next one."""


def cluster(gpus_per_node: int, links: dict[str, Link]) -> Cluster:
    return Cluster(
        name="made-up",
        device="affine",
        num_nodes=GPUS // gpus_per_node,
        gpus_per_node=gpus_per_node,
        memory_bytes=8 << 30,
        **links,
    )


def machine(
    profile: Profile, *, dtype: str = "float32", encoder_layers: int = 0, more: Sequence[Measurement] = ()
) -> Profile:
    """The profile with tensor-parallel sizes 2 and 4, of another dtype or kind of model, and with more rows."""
    timed, spec = with_tensor_parallel(profile, 2, 4), replace(profile.model, num_encoder_layers=encoder_layers)
    return replace(timed, model=spec, dtype=dtype, measurements=(*timed.measurements, *more))


# The oracle


def link_between(devices: Sequence[int], gpus_per_node: int) -> str:
    return "intra" if len({device // gpus_per_node for device in devices}) == 1 else "inter"


def message(size: float, link: str) -> float:
    return LINKS[link].latency + size / LINKS[link].bytes_per_second


def ring(size: float, devices: int, link: str) -> float:
    """Seconds of a sum of `size` bytes: at each step every device sends one of `devices` chunks to its neighbour."""
    everyone = frozenset(range(devices))
    held = [[frozenset({device})] * devices for device in range(devices)]  # [device][chunk]: whose values are in it
    seconds, step = 0.0, 0
    while any(chunk != everyone for chunks in held for chunk in chunks):
        sent = [(device, (device - step) % devices) for device in range(devices)]
        arriving = [held[device][chunk] for device, chunk in sent]
        for (device, chunk), values in zip(sent, arriving, strict=True):
            neighbour = held[(device + 1) % devices]
            assert values == everyone or not values & neighbour[chunk], "a value would be added twice"
            neighbour[chunk] |= values
        seconds += message(size / devices, link)
        step += 1
    return seconds


@dataclass(frozen=True)
class Work:
    """What a pass computes."""

    prompt_tokens: int
    rows: int


def communication(
    spec: ModelSpec,
    dtype: str,
    placement: Placement,
    gpus_per_node: int,
    work: Work,
    *,
    summed: Seconds,
    sent: Seconds,
) -> list[float]:
    """Seconds that each stage spends on sums and on its message to the next one."""
    activation = spec.hidden_size * max(BYTES[dtype], 2)  # With fp8 the activations are bfloat16.
    seconds = []
    for number, stage in enumerate(placement):
        layers, encoders = stage.layers[1] - stage.layers[0], stage.encoder_layers[1] - stage.encoder_layers[0]
        if spec.is_encoder_decoder:  # Attention and MLP; in a decoder layer the cross attention too.
            sums = encoders * [work.prompt_tokens] * 2 + layers * [work.rows] * 3
        else:
            sums = layers * [work.prompt_tokens + work.rows] * 2
        devices = stage.devices
        link = link_between(devices, gpus_per_node)
        total = sum(summed(tokens * activation, len(devices), link) for tokens in sums if tokens and len(devices) > 1)
        if number + 1 < len(placement):
            link = link_between((devices[-1], placement[number + 1].devices[0]), gpus_per_node)
            total += sent((work.prompt_tokens + work.rows) * activation, 1, link)
        seconds.append(total)
    return seconds


def on_links(size: float, devices: int, link: str) -> float:
    return ring(size, devices, link) if devices > 1 else message(size, link)


# What is compared


def requests(lengths: Sequence[int], generated: int) -> tuple[Request, ...]:
    return tuple(
        Request(request_id=str(i), num_prompt_tokens=n, max_output_tokens=99, num_output_tokens=generated)
        for i, n in enumerate(lengths)
    )


def batch_of(prompts: Sequence[int], contexts: Sequence[int]) -> Batch:
    return Batch(prefill=requests(prompts, 0), decode=requests(contexts, 1))


def expected_pass(num_prompts: int, prompt: int, contexts: Sequence[int]) -> Cycle:
    """A cycle of one certain pass, as the closed form asks for it."""
    return Cycle(
        num_prefill=np.array([float(num_prompts)]),
        num_decode=np.array([float(len(contexts))]),
        context_tokens=np.array([float(sum(contexts))]),
        prompt_law=LengthLaw(np.array([prompt]), np.ones(1)),
        kv_tokens=1.0,
        kv_tokens_std=0.0,
        num_seqs=1.0,
    )


def stages(widths: Sequence[int], cuts: Sequence[int], *, encoder: bool, phase: str = "") -> Placement:
    """Stages of these widths, one after the other, with the layers between the cuts."""
    ends = list(accumulate(widths, initial=0))
    return tuple(
        Stage(devices=tuple(range(*devices)), layers=layers, encoder_layers=layers if encoder else (0, 0), phase=phase)
        for devices, layers in zip(pairwise(ends), pairwise(cuts), strict=True)
    )


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, bool]:
    """Up to four stages of one, two or four devices with any cut of six layers; and whether encoders are cut alike."""
    widths = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4).filter(lambda w: sum(w) <= GPUS))
    inner = draw(
        st.lists(st.integers(1, 5), min_size=len(widths) - 1, max_size=len(widths) - 1, unique=True).map(sorted)
    )
    encoder = draw(st.booleans())
    return stages(widths, [0, *inner, 6], encoder=encoder), encoder


@pytest.mark.parametrize("dtype", BYTES)
@given(
    placed=placements(),
    gpus_per_node=st.sampled_from([2, 4, 8]),
    num_prompts=st.integers(0, 3),
    prompt=st.sampled_from([1, 16, 60]),
    contexts=st.lists(st.integers(1, 90), max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_a_pass_pays_for_each_of_its_messages(
    placed: tuple[Placement, bool],
    gpus_per_node: int,
    num_prompts: int,
    prompt: int,
    contexts: list[int],
    dtype: str,
    profile: Profile,
) -> None:
    placement, encoder = placed
    contexts = contexts if num_prompts else [*contexts, 7]
    timed = machine(profile, dtype=dtype, encoder_layers=6 if encoder else 0)
    slow, free = (
        CostModel(timed, placement, cluster(gpus_per_node, links)) for links in (LINKS, {"intra": FREE, "inter": FREE})
    )
    work = Work(num_prompts * prompt, len(contexts))
    expected = communication(timed.model, dtype, placement, gpus_per_node, work, summed=on_links, sent=on_links)
    batch, cycle = batch_of([prompt] * num_prompts, contexts), expected_pass(num_prompts, prompt, contexts)
    real = np.subtract(slow.stage_seconds(batch), free.stage_seconds(batch))
    mean = np.subtract(slow.seconds(cycle), free.seconds(cycle))[:, 0]
    assert real == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert mean == pytest.approx(expected, rel=1e-9, abs=1e-12)


MEASURED = {
    ("all_reduce", "intra", 2): {1 << 10: 1e-4, 1 << 14: 3e-4, 1 << 18: 9e-3},
    ("all_reduce", "inter", 2): {1 << 10: 5e-4, 1 << 14: 8e-4, 1 << 18: 2e-2},
    ("all_reduce", "intra", 4): {1 << 10: 2e-4, 1 << 14: 7e-4, 1 << 18: 3e-2},
    ("all_reduce", "inter", 4): {1 << 10: 6e-4, 1 << 14: 2e-3, 1 << 18: 5e-2},
    ("send", "intra", 1): {1 << 10: 5e-5, 1 << 14: 2e-4, 1 << 18: 4e-3},
    ("send", "inter", 1): {1 << 10: 3e-4, 1 << 14: 4e-4, 1 << 18: 8e-3},
}
"""Seconds by bytes."""


def measured(size: float, devices: int, link: str) -> float:
    """On the straight line between the two measured sizes around it, or on the last one; the least below the first."""
    points = sorted(MEASURED["all_reduce" if devices > 1 else "send", link, devices].items())
    if size <= points[0][0]:
        return points[0][1]
    below, above = next((pair for pair in pairwise(points) if pair[1][0] >= size), (points[-2], points[-1]))
    return below[1] + (above[1] - below[1]) * (size - below[0]) / (above[0] - below[0])


@pytest.mark.parametrize("gpus_per_node", [2, 4, 8])
@pytest.mark.parametrize(
    ("widths", "cuts"), [([2, 4], [0, 2, 6]), ([4, 2, 1], [0, 1, 4, 6]), ([1, 2, 2], [0, 2, 4, 6]), ([4], [0, 6])]
)
@pytest.mark.parametrize(("prompts", "rows"), [([40], 0), ([40, 40, 40], 5), ([], 3), ([500], 9)])
def test_what_a_profile_has_timed_is_taken_from_its_rows(
    prompts: list[int], rows: int, widths: list[int], cuts: list[int], gpus_per_node: int, profile: Profile
) -> None:
    placement = stages(widths, cuts, encoder=False)
    timed = [
        Measurement(op=op, phase=link, tensor_parallel_size=size, bytes=at, seconds=seconds)
        for (op, link, size), points in MEASURED.items()
        for at, seconds in points.items()
    ]
    silent = [replace(row, seconds=0.0) for row in timed]
    batch, cycle = (
        batch_of(prompts, [30] * rows),
        expected_pass(len(prompts), prompts[0] if prompts else 1, [30] * rows),
    )
    nodes = cluster(gpus_per_node, LINKS)
    with_links, without = (CostModel(machine(profile, more=more), placement, nodes) for more in (timed, silent))
    expected = communication(
        profile.model, "float32", placement, gpus_per_node, Work(sum(prompts), rows), summed=measured, sent=measured
    )
    real = np.subtract(with_links.stage_seconds(batch), without.stage_seconds(batch))
    mean = np.subtract(with_links.seconds(cycle), without.seconds(cycle))[:, 0]
    assert real == pytest.approx(expected, rel=1e-9)
    assert mean == pytest.approx(expected, rel=1e-9)


# The KV transfer

APART = {
    "one to one": ([1], [1]),
    "two of a group": ([2], [1]),
    "two stages": ([1, 1], [1]),
    "two groups": ([2, 2], [1, 1]),
    "three stages": ([1, 1, 1], [2]),
    "four of a group": ([4], [4]),
}
"""Devices of the stages that prefill and of those that decode; every device that prefills has the same share."""


def split(prefill: Sequence[int], decode: Sequence[int]) -> Placement:
    def part(widths: Sequence[int], phase: str, first: int) -> Placement:
        cuts = np.linspace(0, 6, len(widths) + 1).astype(int).tolist()
        placed = stages(widths, cuts, encoder=False, phase=phase)
        return tuple(replace(stage, devices=tuple(first + gpu for gpu in stage.devices)) for stage in placed)

    return part(prefill, "prefill", 0) + part(decode, "decode", sum(prefill))


def kv_transfer(cost: CostModel, dtype: str, placement: Placement, gpus_per_node: int, tokens: int) -> float:
    """After the prefill, until the last device has sent the keys and values of its layers and heads.

    Event by event: a device sends a piece when its layers are computed and the piece before is sent; a stage computes
    its layers behind those of the stage before, a layer in the time of its products.
    """
    spec, link = cost.spec, link_between([gpu for stage in placement for gpu in stage.devices], gpus_per_node)
    now, sent = 0.0, []
    for stage in placement:
        if stage.phase != "prefill":
            continue
        size = 2 * tokens * spec.num_kv_heads / len(stage.devices) * spec.head_dim * max(BYTES[dtype], 2)
        kind = cost.kinds[placement.index(stage)]
        layer = cost._layer_seconds(kind.sums, tokens, 0.0)[0]
        free = now
        for first, last in pieces(stage.layers, size):
            computed = now + (last - stage.layers[0]) * layer
            free = max(free, computed) + message((last - first) * size, link)
        sent.append(free)
        now += (stage.layers[1] - stage.layers[0]) * layer
    return max(sent) - now


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("gpus_per_node", [2, 8])
@pytest.mark.parametrize("apart", APART.values(), ids=APART)
def test_each_device_transfers_its_own_share(
    apart: tuple[list[int], list[int]], gpus_per_node: int, dtype: str, profile: Profile
) -> None:
    placement, timed = split(*apart), machine(profile, dtype=dtype)
    cost = CostModel(timed, placement, cluster(gpus_per_node, LINKS))
    for tokens in (1, 100, 5000, 50_000):
        expected = kv_transfer(cost, dtype, placement, gpus_per_node, tokens)
        assert cost.kv_transfer_seconds(tokens) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("prefill", "decode", "sends"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 4, 2), (4, 4, 1)])
def test_a_head_that_several_devices_have_goes_to_each_that_decodes(
    prefill: int, decode: int, sends: int, profile: Profile
) -> None:
    timed = machine(profile)
    timed = replace(timed, model=replace(timed.model, num_kv_heads=1))
    cost = CostModel(timed, split([prefill], [decode]), cluster(8, LINKS))
    size = 6 * 10 * 2 * timed.model.head_dim * 4
    assert cost.kv_transfer_seconds(10) == pytest.approx(sends * message(size, "intra"), rel=1e-9)


@pytest.mark.parametrize("apart", APART.values(), ids=APART)
def test_an_encoders_output_goes_to_every_device_that_decodes(
    apart: tuple[list[int], list[int]], profile: Profile
) -> None:
    """From the last stage that prefills, whose devices share the receivers of each stage."""
    placement, timed = split(*apart), machine(profile, encoder_layers=6)
    cost, (prefill, decode) = CostModel(timed, placement, cluster(8, LINKS)), apart
    sends = [0] * prefill[-1]
    for width in decode:
        for receiver in range(width):
            sends[receiver % prefill[-1]] += 1
    one = message(300 * timed.model.hidden_size * 4, "intra")
    assert cost.kv_transfer_seconds(300) == pytest.approx(max(sends) * one, rel=1e-9)


def played(schedule: Schedule, cost: CostModel, lengths: Sequence[tuple[int, int]]):
    inputs, outputs = np.array(lengths).T
    return replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=1000)


def through(cost: CostModel, batch: Batch) -> float:
    return sum(cost.stage_seconds(batch))


@pytest.mark.parametrize("apart", APART.values(), ids=APART)
def test_the_replay_decodes_when_the_kv_transfer_of_all_prompts_has_ended(
    apart: tuple[list[int], list[int]], profile: Profile
) -> None:
    """Both requests of a batch are transferred together; one that ends with its prefill is not."""
    placement = split(*apart)
    cost = CostModel(machine(profile), placement, cluster(8, LINKS))
    run = played(Schedule("waa-c", {"decode_batch": 4, "prefill_batch": 3}), cost, [(30, 2), (50, 2), (70, 1)])
    prefill = through(cost, Batch(prefill=requests((30, 50, 70), 0), phase="prefill"))
    decode = through(cost, Batch(decode=requests((30, 50), 1), phase="decode"))
    arrived = prefill + kv_transfer(cost, "float32", placement, 8, 30 + 50)
    assert [list(request.token_times) for request in run.requests] == [
        pytest.approx([prefill, arrived + decode]),
        pytest.approx([prefill, arrived + decode]),
        pytest.approx([prefill]),
    ]


def varied() -> Workload:
    """Outputs of 20 tokens, half of them more than a third longer or shorter."""
    rng = np.random.default_rng(0)
    outputs, inputs = rng.lognormal(np.log(20), 0.5, 2000), rng.lognormal(3.2, 0.4, 2000)
    lengths = [np.clip(np.rint(drawn), 1, most).astype(int) for drawn, most in ((inputs, 200), (outputs, 60))]
    return Workload.of("varied", inputs=lengths[0], outputs=lengths[1], weights=np.ones(2000))


@pytest.mark.parametrize("decode_batch", [24, 48])
def test_the_closed_form_waits_for_a_slow_kv_transfer(decode_batch: int, profile: Profile) -> None:
    slow = Link(bytes_per_second=5e6, latency=1e-4)
    cost = CostModel(profile, split([1], [1]), cluster(8, {"intra": slow, "inter": slow}))
    workload = varied()
    schedule = waa_c.schedule({"decode_batch": decode_batch}, workload)
    steady = steady_state(schedule, workload, cost)
    inputs, outputs = workload.sample(1500, seed=1)
    run = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6)
    replayed = summarize(run.requests, p99_output=workload.output_quantile(0.99))
    assert replayed.latency is not None
    assert cost.kv_transfer_seconds(schedule["prefill_batch"] * workload.mean_input) > 0.4 * replayed.latency
    assert steady.bound_latency("p99-length") == pytest.approx(replayed.latency, rel=0.06)
    assert steady.throughput == pytest.approx(replayed.throughput, rel=0.06)


# A whole schedule

PIPELINE = stages([2, 4, 1], [0, 2, 4, 6], encoder=False)
ALIKE = Workload.of("alike", inputs=[64], outputs=[5], weights=[1.0])
"""All requests are of one length, so that all is certain: four decode iterations behind every prefill."""
CYCLE = Schedule("rra", {"prefill_batch": 3, "decode_steps": 4})


def of_cycle(profile: Profile, gpus_per_node: int) -> tuple[float, float]:
    """What messages add to a cycle, and to the time of a request.

    The next prefill enters when the last iteration has left the first stage: nothing else of that is waited for.
    """

    def each(work: Work) -> list[float]:
        return communication(profile.model, "float32", PIPELINE, gpus_per_node, work, summed=on_links, sent=on_links)

    prefill, decode = each(Work(3 * 64, 0)), each(Work(0, 3))
    return sum(prefill) + 3 * sum(decode) + decode[0], sum(prefill) + 4 * sum(decode)


@pytest.mark.parametrize("gpus_per_node", [2, 8])
def test_closed_form_and_replay_of_a_certain_schedule_differ_by_its_messages(
    gpus_per_node: int, profile: Profile
) -> None:
    timed = machine(profile)
    slow, free = (
        CostModel(timed, PIPELINE, cluster(gpus_per_node, links)) for links in (LINKS, {"intra": FREE, "inter": FREE})
    )
    cycle, request = of_cycle(profile, gpus_per_node)
    steady = [steady_state(CYCLE, ALIKE, cost) for cost in (slow, free)]
    assert 3 / steady[0].throughput - 3 / steady[1].throughput == pytest.approx(cycle, rel=1e-9)
    last = [float(one.latency(np.array([5.0]))[0]) for one in steady]
    assert last[0] - last[1] == pytest.approx(request, rel=1e-9)
    runs = [played(CYCLE, cost, [(64, 5)] * 9) for cost in (slow, free)]
    starts = [[one.requests[number].start for number in (0, 3, 6)] for one in runs]
    assert np.diff(starts[0]) - np.diff(starts[1]) == pytest.approx([cycle, cycle], rel=1e-9)
    last = [one.requests[3].token_times[-1] - one.requests[3].start for one in runs]
    assert last[0] - last[1] == pytest.approx(request, rel=1e-9)
