"""SGLang is started as the plan says: its prefill batches and its interval are what `rra` turns."""

from dataclasses import replace
from itertools import pairwise

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export
from exeplan.export.sglang import export

from .test_vllm import ESTIMATE

RRA = Schedule("rra", {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120, "max_num_batched_tokens": 16384})
WHOLE = (Stage(devices=tuple(range(8)), layers=(0, 80)),)


def plan(**changes: object) -> Plan:
    """Llama-3.1-70B on all GPUs of one H100 host."""
    base = Plan(
        model="llama-3.1-70b",
        schedule=RRA,
        placement=WHOLE,
        cluster="h100",
        dtype="bfloat16",
        device="cuda",
        kv_cache_tokens=400_000,
    )
    return replace(base, **changes)


def exported(found: Plan, model: str = "llama-3.1-70b") -> Export:
    return export(found, load_model_spec(model), model="organisation/name")


def options(found: Plan, model: str = "llama-3.1-70b") -> dict[str, str]:
    """By name, '' where an option has no value."""
    [instance] = exported(found, model).instances
    assert instance.program == ("python3", "-m", "sglang.launch_server")
    words, taken = instance.options, {}
    for word, following in zip(words, (*words[1:], "--"), strict=True):
        if word.startswith("--"):
            assert word not in taken
            taken[word] = "" if following.startswith("--") else following
    return taken


def test_round_robin_allocation_is_sglangs_own() -> None:
    assert options(plan()) == {
        "--model-path": "organisation/name",
        "--dtype": "bfloat16",
        "--tp-size": "8",
        "--max-running-requests": "124",
        "--chunked-prefill-size": "-1",
        "--prefill-max-requests": "8",
        "--prefill-decode-interval": "24",
        "--max-prefill-tokens": "16384",
        "--host": "0.0.0.0",
        "--mem-fraction-static": "0.9",
        "--max-total-tokens": "400000",
        "--disable-radix-cache": "",
        "--port": "30000",
    }
    found = exported(plan())
    assert (len(found.remarks), found.as_run) == (1, None)


def test_chunks_beside_decodes() -> None:
    chunked = Schedule("chunked", {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_num_prefills": 2})
    found = options(plan(schedule=chunked, bound=Bound(seconds=10.0), replay=ESTIMATE))
    assert (found["--chunked-prefill-size"], found["--enable-mixed-chunk"]) == ("512", "")
    assert (found["--max-running-requests"], found["--max-queued-requests"]) == ("64", "236")
    as_run = exported(plan(schedule=chunked)).as_run
    assert as_run is not None
    assert as_run.schedule == Schedule("chunked", {"max_num_seqs": 64, "max_num_batched_tokens": 512})
    # With mixed chunks it takes rows that decode from the chunk, as the plan counts them.
    assert "decoding rows" not in " ".join(exported(plan(schedule=chunked)).remarks)


@pytest.mark.parametrize(("cuts", "partition"), [((27, 53), "27,53"), ((40, 40), None)])
def test_stages(cuts: tuple[int, int], partition: str | None) -> None:
    stages = (Stage(devices=(0,), layers=(0, cuts[0])), Stage(devices=(1,), layers=(cuts[0], 80)))
    found = exported(plan(placement=stages))
    assert options(plan(placement=stages))["--pp-size"] == "2"
    assert found.instances[0].environment.get("SGLANG_PP_LAYER_PARTITION") == partition


@pytest.mark.parametrize(
    ("steps", "num_stages", "written"),
    [(24, 2, 24), (23, 2, 24), (1, 2, 2), (8, 3, 9), (7, 4, 8), (5, 6, 6), (29, 6, 30), (23, 1, 23)],
)
def test_prefills_fall_on_every_micro_batch_of_a_pipeline(steps: int, num_stages: int, written: int) -> None:
    """One count for all of them: prefills are `steps` passes apart, and passes go round the micro-batches."""
    cuts = [80 * n // num_stages for n in range(num_stages + 1)]
    stages = tuple(Stage(devices=(n,), layers=layers) for n, layers in enumerate(pairwise(cuts)))
    schedule = Schedule("rra", {**RRA.variables, "decode_steps": steps, "micro_batches": num_stages})
    found = plan(schedule=schedule, placement=stages)
    assert options(found)["--prefill-decode-interval"] == f"{written}"
    assert {prefill * (written + 1) % num_stages for prefill in range(num_stages)} == set(range(num_stages))
    export, changed = exported(found), written != steps
    assert (f"SGLang {written}: its interval counts" in " ".join(export.remarks)) == changed
    if changed:
        assert export.as_run is not None
        assert export.as_run.schedule["decode_steps"] == written


def test_what_is_left_over_goes_to_the_last_stages() -> None:
    stages = tuple(Stage(devices=(n,), layers=layers) for n, layers in enumerate(((0, 26), (26, 53), (53, 80))))
    assert exported(plan(placement=stages)).instances[0].environment == {}


def test_ranks_share_a_group_of_all_devices() -> None:
    stage = Stage(devices=tuple(range(8)), layers=(0, 94), data_parallel_size=4, expert_parallel_size=8)
    found = options(plan(placement=(stage,)), "qwen3-235b-a22b")
    assert [found[name] for name in ("--tp-size", "--attn-dp-size", "--ep-size")] == ["8", "4", "8"]
    assert (found["--prefill-max-requests"], found["--max-total-tokens"]) == ("2", "100000")


RANKS = (Stage(devices=tuple(range(8)), layers=(0, 94), data_parallel_size=4, expert_parallel_size=8),)


@pytest.mark.parametrize(
    ("percent", "placement", "written"),
    [(None, WHOLE, None), (80, WHOLE, "0.8"), (None, RANKS, "3.33333"), (60, RANKS, "2")],
)
def test_ranks_keep_the_conservativeness_that_sglang_multiplies_by_three_tenths(
    percent: int | None, placement: tuple[Stage, ...], written: str | None
) -> None:
    own = {"conservativeness_percent": percent} if percent else {}
    schedule = Schedule("sglang", {"max_num_seqs": 64, "max_num_batched_tokens": 512, **own})
    found = options(plan(schedule=schedule, placement=placement), "qwen3-235b-a22b")
    assert found.get("--schedule-conservativeness") == written


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (1, 4)])
def test_servers_of_one_host_take_different_ports(ranks: int, count: int) -> None:
    """With ranks each takes its port, the one 13 further, and those 233 to 239 further."""
    stage = Stage(devices=(0, 1), layers=(0, 94), data_parallel_size=ranks, expert_parallel_size=ranks)
    replicas = tuple(range(0, 2 * count, 2))
    found = exported(plan(placement=(stage,), replicas=replicas), "qwen3-235b-a22b")
    words = FORMS["command"](found).split()
    ports = [int(words[n + 1]) for n, word in enumerate(words) if word == "--port"]
    further = [0, 13, *range(233, 240)] if ranks > 1 else [0]
    assert len({port + more for port in ports for more in further}) == count * len(further)
    assert ports[1] == 30001 or ranks > 1


def test_the_queue_of_each_rank_is_its_part_of_the_plans() -> None:
    chunked = Schedule("chunked", {"max_num_seqs": 64, "max_num_batched_tokens": 512})
    bounded = plan(schedule=chunked, placement=RANKS, bound=Bound(seconds=10.0), replay=ESTIMATE)
    assert options(bounded, "qwen3-235b-a22b")["--max-queued-requests"] == "59"  # Of 300 in flight 236 wait.


def test_whole_prompts_beside_decodes_are_refused() -> None:
    with pytest.raises(InputError, match="SGLang cannot schedule as 'orca' does; plan again with --policy rra or chun"):
        exported(plan(schedule=Schedule("orca", {"max_num_seqs": 4})))
