"""Workers' collectives, sends and receives keep NCCL's rules on every kind of placement; seeded faults are found."""

import contextlib
import dataclasses
import threading
from collections import Counter
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace

from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.kernels.select import REFERENCE
from exeplan.profiler.multi_device.links import captured_sums
from exeplan.profiler.multi_device.rank_job import RankJob
from exeplan.runner.compute.gpu_memory import fit_cache
from exeplan.runner.compute.kv_budget import GPUMemory
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.weights.shard import whole
from exeplan.runner.distributed import completion, kv_transfer, links, worker
from exeplan.runner.distributed.kv_transfer import Sender
from exeplan.runner.distributed.links import HiddenLinks
from exeplan.runner.distributed.multiprocess_executor import MultiprocessExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.ipc.collectives import DistributedGroup

from .nccl import HangError, ThreadLauncher, stand_in_for_nccl
from .streams import known_to_thread, stand_in
from .test_streams import SPECS

NUM_BLOCKS = 14
SHARED = Schedule("orca", {"max_num_seqs": 4, "micro_batches": 2})
APART = Schedule("waa-c", {"decode_batch": 3, "prefill_batch": 2, "micro_batches": 1})


def placement(spec, widths, phase="", first=0):
    cuts = [round(spec.num_layers * n / len(widths)) for n in range(len(widths) + 1)]
    encoder = [round(spec.num_encoder_layers * n / len(widths)) for n in range(len(widths) + 1)]
    if phase and spec.is_encoder_decoder:
        cuts = [0] * len(cuts) if phase == "prefill" else cuts
        encoder = [0] * len(encoder) if phase == "decode" else encoder
    stages = []
    for width, layers, encoder_layers in zip(widths, pairwise(cuts), pairwise(encoder), strict=True):
        devices = tuple(range(first, first := first + width))
        stages.append(Stage(devices=devices, layers=layers, encoder_layers=encoder_layers, phase=phase))
    return tuple(stages)


def placements(spec):
    return {
        "tp2": placement(spec, [2]),
        "pp2": placement(spec, [1, 1]),
        "tp2-pp2": placement(spec, [2, 2]),
        "waa": (*placement(spec, [1], "prefill"), *placement(spec, [2], "decode", 1)),
        "waa-hosts": (*placement(spec, [1], "prefill", 2), *placement(spec, [2], "decode")),
    }


def tokens_of(executor, schedule) -> dict[str, list[int]]:
    engine, found = Engine(executor, schedule, num_blocks=NUM_BLOCKS), {}
    for number in range(3):
        sampling = SamplingParams(temperature=0.0, max_tokens=2 + number % 2)
        engine.add(Request(request_id=str(number), prompt_token_ids=[5] * (4 + 5 * number), sampling=sampling))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def served(family, kind, patch, *, patience=20.0):
    """The tokens of workers on stand-ins for GPUs, and the fabric between them."""
    spec, schedule = SPECS[family], APART if kind.startswith("waa") else SHARED
    plan = Plan(model=spec.name, schedule=schedule, placement=placements(spec)[kind], kv_cache_tokens=16 * NUM_BLOCKS)
    setup = engine_setup(plan, spec, dummy_weights=True)
    setup = replace(setup, engine=replace(setup.engine, device="cuda", dtype="float32"), deadline_seconds=30.0)
    with (
        stand_in(threaded=(kv_transfer, completion, worker)) as machine,
        stand_in_for_nccl(patch, patience=patience) as fabric,
    ):
        launcher = ThreadLauncher(fabric, machine, apart=kind == "waa-hosts")
        with contextlib.closing(MultiprocessExecutor(spec, setup, launcher=launcher)) as executor:
            found = tokens_of(executor, schedule)
    return found, fabric


CASES = [("llama", kind) for kind in ("tp2", "tp2-pp2", "waa", "waa-hosts")] + [("t5", "pp2"), ("t5", "waa")]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_workers_keep_the_rules_and_give_the_tokens_of_one_device(family, kind, monkeypatch):
    spec = SPECS[family]
    alone = InProcessExecutor(ModelRunner(spec, num_blocks=NUM_BLOCKS, dummy_weights=True))
    found, fabric = served(family, kind, monkeypatch)
    ranks = sum(stage.tensor_parallel_size for stage in placements(spec)[kind])
    assert set(fabric.device_ids) == {torch.device("cuda", rank) for rank in range(ranks)}
    pairs = [communicator for communicator in fabric.communicators if communicator[0] == "pair"]
    # One a direction; sampled tokens, and keys and values, have their own.
    assert len(pairs) == {"tp2": 0, "tp2-pp2": 2 + 2, "pp2": 2 + 1, "waa": 2, "waa-hosts": 2}[kind]
    assert found == tokens_of(alone, Schedule("orca", {"max_num_seqs": 4}))


def test_sums_are_profiled_in_graphs_and_as_often_on_each_rank(monkeypatch):
    """A rank that is late sooner does not leave the others waiting."""
    found: dict[int, list] = {}

    def run(rank: int) -> None:
        fabric.init_process_group("nccl", rank=rank, world_size=2)
        sizes = {"size": 2, "num_threads": 1, "num_tokens": (1, 8), "seconds": 0.05 * (rank + 1)}
        job = RankJob(op="all_reduce", spec=SPECS["llama"], dtype="float32", device="cuda", **sizes)
        device = torch.device("cuda", rank)
        try:
            with known_to_thread(machine), torch.inference_mode():
                torch.cuda.set_device(device)
                found[rank] = captured_sums(job, DistributedGroup(fabric.new_group([0, 1])), device)
        except BaseException as error:
            fabric.fail(error)

    with stand_in() as machine, stand_in_for_nccl(monkeypatch) as fabric:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shapes = [[[len(times) for times in of_size] for of_size in found[rank]] for rank in range(2)]
    assert shapes[0] == shapes[1]
    assert [len(of_size) for of_size in shapes[0]] == [5, 5]
    assert Counter(machine.launches)["graph"] == 2 * sum(map(sum, shapes[0])) + 2 * 2 * 5


class Gpu:
    """Has memory for passes of so many tokens, beside any cache; more of them fail in the last layer."""

    def __init__(self, runner: ModelRunner, most: int) -> None:
        self._runner, self._most, self.tried = runner, most, []
        *_, last = runner.model.layers

        def layer(hidden_NE, *others):
            self.tried.append(len(hidden_NE))
            if len(hidden_NE) > self._most:
                raise torch.cuda.OutOfMemoryError
            return last(hidden_NE, *others)

        runner.model.layers[-1] = layer

    def memory(self) -> GPUMemory:
        block_bytes = self._runner.cache.num_bytes // max(self._runner.cache.num_blocks, 1)
        return GPUMemory(total := 1 << 30, total - block_bytes * self._runner.cache.num_blocks)

    def workspace(self, work):
        try:
            work()
        except torch.cuda.OutOfMemoryError:
            return None
        return self._runner.cache.num_bytes


def test_ranks_try_smaller_passes_together_where_one_alone_runs_out_of_memory(monkeypatch):
    """It leaves the pass amid its layers, and its next sum is that of the ranks' agreement."""
    spec, found = dataclasses.replace(SPECS["llama"], max_context=512), {}

    def run(rank: int) -> None:
        fabric.init_process_group("nccl", rank=rank, world_size=2)
        try:
            shard = dataclasses.replace(whole(spec), group=DistributedGroup(fabric.new_group([0, 1])))
            runner = ModelRunner(spec, shard=shard, num_blocks=1, dummy_weights=True, paged_with=REFERENCE)
            gpu = Gpu(runner, (512, 1 << 20)[rank])
            found[rank] = fit_cache(runner, SHARED, gpu, utilization=0.5), max(gpu.tried)
        except BaseException as error:
            fabric.fail(error)

    with stand_in_for_nccl(monkeypatch, patience=20.0) as fabric:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    budgets, tried = zip(*(found[rank] for rank in range(2)), strict=True)
    assert budgets[0] == budgets[1]
    assert budgets[0].pass_tokens == 512 < tried[0] == tried[1]


def summing_out_of_order(patch):
    """One rank gathers before it sums, once."""
    original, seen = DistributedGroup.all_reduce, []

    def all_reduce(self, x):
        if self.rank == 1 and not seen:
            seen.append(True)
            self.all_gather(x)
        return original(self, x)

    patch.setattr(DistributedGroup, "all_reduce", all_reduce)


def leaving_a_sum_out(patch):
    original, seen = DistributedGroup.all_reduce, []

    def all_reduce(self, x):
        if self.rank == 1 and not seen:
            seen.append(True)
            return x
        return original(self, x)

    patch.setattr(DistributedGroup, "all_reduce", all_reduce)


def sending_both_ways_on_one_communicator(patch):
    """As before each direction had its own."""
    original = HiddenLinks.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._groups = {}

    patch.setattr(HiddenLinks, "__init__", init)


def sending_what_the_warm_up_computed(patch):
    """As workers that prefill did: nobody expects these keys and values."""
    original = Sender.__init__

    def init(self, *args):
        original(self, *args)
        patch.setattr(worker, "PassingCache", lambda device, store: kv_transfer.PassingCache(device, self.put_layer))

    patch.setattr(Sender, "__init__", init)


def making_a_group_on_one_rank_only(patch):
    original = HiddenLinks.__init__

    def init(self, placement, seat, **kwargs):
        if seat.rank == 1:
            links.dist.new_group([1, 2])
        original(self, placement, seat, **kwargs)

    patch.setattr(HiddenLinks, "__init__", init)


FAULTS = {
    summing_out_of_order: ("llama", "tp2", "all_gather of .* meets all_reduce|all_reduce of .* meets all_gather"),
    leaving_a_sum_out: ("llama", "tp2", "meets|waits for the other ranks"),
    sending_both_ways_on_one_communicator: ("t5", "pp2", "head to head on one communicator"),
    sending_what_the_warm_up_computed: ("llama", "waa-hosts", "meets receive|waits for the other ranks"),
    making_a_group_on_one_rank_only: ("llama", "tp2-pp2", "on another"),
}


@pytest.mark.parametrize(("fault", "case"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_seeded_fault_is_found(fault, case, monkeypatch):
    family, kind, found = case
    fault(monkeypatch)
    with pytest.raises(HangError, match=found):
        served(family, kind, monkeypatch, patience=3.0)
