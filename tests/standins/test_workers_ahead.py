"""Workers run batches whose input tokens the engine does not know: the same tokens; faults are found."""

import contextlib
from collections import Counter

import pytest
from msgspec.structs import replace

from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.distributed import completion, fed_tokens, kv_transfer, worker
from exeplan.runner.distributed.fed_tokens import FedTokens
from exeplan.runner.distributed.multiprocess_executor import MultiprocessExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine_process.build import engine_setup

from .nccl import HangError, ThreadLauncher, stand_in_for_nccl
from .streams import OrderError, stand_in
from .test_nccl import placement
from .test_streams import SPECS

NUM_BLOCKS = 20
SCHEDULES = {
    "static": {"batch_size": 4},
    "orca": {"max_num_seqs": 4},
    "rra": {"prefill_batch": 2, "decode_steps": 3},
    "chunked": {"max_num_seqs": 4, "max_num_batched_tokens": 12},
    "waa-c": {"decode_batch": 3, "prefill_batch": 2},
}
WIDTHS = {"tp2": [2], "pp2": [1, 1], "tp2-pp2": [2, 2]}
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "stop_token_ids": tuple(range(0, 60, 4))},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "logprobs": 2},
]


def schedule_of(policy: str, kind: str) -> Schedule:
    """A micro-batch a stage; of waa one, so that each of its passes waits for the tokens of the one before."""
    count = 1 if policy == "waa-c" else len(WIDTHS[kind])
    return Schedule(policy, {**SCHEDULES[policy], "micro_batches": count})


def requests(count: int, kinds) -> list[Request]:
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=[5 + number] * (2 + 7 * number % 13),
            sampling=SamplingParams(max_tokens=3 + 5 * number % 7, **kinds[number % len(kinds)]),
        )
        for number in range(count)
    ]


def tokens_of(executor, schedule, coming) -> dict[str, list[int]]:
    engine, found = Engine(executor, schedule, num_blocks=NUM_BLOCKS), {}
    for request in coming:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert engine.free_blocks == NUM_BLOCKS
    return found


def tokens_alone(family: str, coming: list[Request]) -> dict[str, list[int]]:
    """Without workers."""
    alone = InProcessExecutor(ModelRunner(SPECS[family], num_blocks=NUM_BLOCKS, dummy_weights=True))
    return tokens_of(alone, Schedule("orca", {"max_num_seqs": 4}), coming)


class Served:
    """What workers on stand-ins made of a load."""

    def __init__(self, patch, family, widths, schedule, coming, *, patience=20.0) -> None:
        self.passes: list[tuple[str, list[str], list[str]]] = []
        self.num_ahead = 0
        spec, phases = SPECS[family], ("",) if schedule.policy[:3] != "waa" else ("prefill", "decode")
        stages = [stage for n, phase in enumerate(phases) for stage in placement(spec, widths, phase, n * sum(widths))]
        plan = Plan(model=spec.name, schedule=schedule, placement=tuple(stages), kv_cache_tokens=16 * NUM_BLOCKS)
        setup = engine_setup(plan, spec, dummy_weights=True)
        setup = replace(setup, engine=replace(setup.engine, device="cuda", dtype="float32"), deadline_seconds=30.0)
        threaded = (kv_transfer, completion, worker)
        with stand_in(threaded=threaded) as self.machine, stand_in_for_nccl(patch, patience=patience) as fabric:
            launcher = ThreadLauncher(fabric, self.machine)
            with contextlib.closing(MultiprocessExecutor(spec, setup, launcher=launcher)) as executor:
                self._watch(executor, patch)
                self.tokens = tokens_of(executor, schedule, coming)

    def _watch(self, executor, patch) -> None:
        original = executor.start

        def start(batch) -> None:
            self.num_ahead += any(row.num_unknown for row in batch.decode)
            ids = [[row.request_id for row in rows] for rows in (batch.prefill, batch.decode)]
            self.passes.append((batch.phase, *ids))
            original(batch)

        patch.setattr(executor, "start", start)


CASES = [("llama", kind, "orca") for kind in WIDTHS] + [("llama", "pp2", policy) for policy in ("rra", "chunked")]
CASES += [("llama", "tp2", "waa-c"), ("t5", "pp2", "static")]


@pytest.mark.parametrize(("family", "kind", "policy"), CASES)
def test_tokens_are_those_of_an_engine_that_waits_for_each(family, kind, policy, monkeypatch):
    """Drawn, penalised, and ended by a token that is found when the next pass is running already."""
    coming = requests(7, KINDS)
    found = Served(monkeypatch, family, WIDTHS[kind], schedule_of(policy, kind), coming)
    assert found.tokens == tokens_alone(family, coming)
    assert found.num_ahead > 0
    assert not {"to device, pageable", "to host, pageable"} & set(found.machine.copies)


LAUNCHES = {"tp2": 2 * 4 + 2, "pp2": 2 * 4 + 2 + 7}


@pytest.mark.parametrize(("kind", "launches"), LAUNCHES.items())
def test_a_decode_pass_of_workers_is_a_graph_on_each_rank_and_few_copies(kind, launches, monkeypatch):
    """On each rank a copy to the device, two into the graph's inputs, and the graph; on one rank tokens and soundness
    to the host. A pipeline copies hidden states out of a graph, sends and receives them and copies them into the next
    one, and copies, sends and receives the tokens. As many for any batch, and none that waits."""

    def served(num_tokens: int) -> Served:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        coming = [Request(request_id=f"{n}", prompt_token_ids=[5] * 4, sampling=sampling) for n in range(4)]
        with monkeypatch.context() as patch:
            return Served(patch, "llama", WIDTHS[kind], schedule_of("orca", kind), coming)

    short, long = served(6), served(10)
    passes = len(long.passes) - len(short.passes)
    more, copies = (
        Counter(getattr(long.machine, name)) - Counter(getattr(short.machine, name)) for name in ("launches", "copies")
    )
    assert passes == 4 * len(WIDTHS[kind])
    assert more["graph"] == 2 * passes
    assert more.total() <= launches * passes
    assert copies == {"to device": 2 * passes, "to host": 2 * passes}


def without_waiting_for_tokens(patch):
    """The first stage embeds what may not have arrived."""
    patch.setattr(FedTokens, "_await", lambda self, place: None)


def keeping_the_tokens_of_one_batch(patch):
    """Those of the next are received in their place, before they were embedded."""

    def receive(self, names):
        sender, group = self._source
        self._arriving[0] = fed_tokens.dist.irecv(self._runner.prev_token_B[1 : 1 + len(names)], sender, group=group)
        self._rows[0] |= {name: 1 + row for row, name in enumerate(names)}

    patch.setattr(FedTokens, "_receive", receive)


def sending_tokens_from_where_the_next_graph_puts_its_own(patch):
    def send(self, token_R):
        patch.setattr(token_R, "clone", lambda: token_R, raising=False)
        for target, group in self._targets:
            self._kept.append((fed_tokens.dist.isend(token_R, target, group=group), token_R))

    patch.setattr(FedTokens, "_send", send)


def sampling_on_one_rank_only(patch):
    """The others go on with what they had."""

    def share(self, names, token_R):
        if token_R is not None:
            self._runner.keep_tokens(token_R)
        self._rows[0] = {name: row for row, name in enumerate(names)}

    patch.setattr(FedTokens, "_share", share)


def summing_tokens_on_one_rank_only(patch):
    original = FedTokens._share

    def share(self, names, token_R):
        if self._rank == 0:
            original(self, names, token_R)
        self._rows[0] = {name: row for row, name in enumerate(names)}

    patch.setattr(FedTokens, "_share", share)


FAULTS = {
    without_waiting_for_tokens: ("pp2", OrderError, "reads memory of .* may still be written on stream"),
    keeping_the_tokens_of_one_batch: ("pp2", AssertionError, "tokens differ"),
    sending_tokens_from_where_the_next_graph_puts_its_own: ("pp2", OrderError, "may still be read on stream"),
    sampling_on_one_rank_only: ("tp2", AssertionError, "tokens differ"),
    summing_tokens_on_one_rank_only: ("tp2", HangError, "meets|waits for the other ranks"),
}


@pytest.mark.parametrize(("fault", "case"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_seeded_fault_is_found(fault, case, monkeypatch):
    kind, error, text = case
    coming = requests(7, KINDS[:2])
    expected = tokens_alone("llama", coming)
    fault(monkeypatch)
    with pytest.raises(error, match=text):
        _compare(Served(monkeypatch, "llama", WIDTHS[kind], schedule_of("orca", kind), coming, patience=3.0), expected)


def _compare(found: Served, expected: dict[str, list[int]]) -> None:
    assert found.tokens == expected, "tokens differ"
