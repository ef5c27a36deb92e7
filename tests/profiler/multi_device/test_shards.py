"""A shard is timed at every degree that the model's heads and widths allow, alone and with all its own parts."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Device
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.points import Point, Range, Work
from exeplan.profiler.multi_device.shards import (
    BusiestFirst,
    Silent,
    expert_degrees,
    mixtures_of,
    shard_rows,
    shard_work,
    shared_degrees,
    time_the_busiest,
)

CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def tiny(**changes: object) -> ModelSpec:
    return model_spec({**CONFIG, **changes}, name="tiny")


@pytest.fixture
def work() -> Work:
    device = Device(name="any", kind="cpu", memory_bytes=1 << 30, copy_bytes_per_second=1e10, flops_per_second=1e10)
    return Work(spec=tiny(), dtype="float32", device=device, layer_bytes=80_000)


def test_degrees_are_those_that_share_heads_and_widths_evenly() -> None:
    # 12 heads and 4 key/value heads: 3 would need a key/value head and a third, 8 half a head.
    assert shared_degrees(tiny(), 12) == (2, 4, 12)
    assert shared_degrees(tiny(), 3) == (2,)
    assert shared_degrees(tiny(intermediate_size=90), 12) == (2,)
    assert shared_degrees(tiny(), 1) == ()


def test_a_silent_group_adds_nothing_and_gathers_its_own_part_for_all() -> None:
    x = torch.tensor([[1.0, 2.0]])
    assert torch.equal(Silent(3).all_reduce(x), x)
    assert Silent(3).all_gather(x).tolist() == [[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]]


def test_a_ranks_work_is_its_share(work: Work) -> None:
    own = shard_work(work, 12)
    assert (own.spec.num_heads, own.spec.num_kv_heads) == (1, 1)
    assert own.layer_bytes == 80_000 // 12
    assert own.kv_bytes(10) == work.kv_bytes(10) // 4


def test_rows_are_of_that_degree_and_reach_as_far_as_the_models(work: Work) -> None:
    reach = Range(max_seqs=4, max_context=31, max_prompt=32, max_prefill_seqs=1, kv_tokens=256)
    rig = Rig(
        work.spec,
        dtype="float32",
        device="cpu",
        copies=2,
        num_blocks=reach.num_blocks,
        dummy_weights=True,
        group=Silent(2),
    )
    rows = shard_rows(rig, shard_work(work, 2), reach, more=(), size=2, seconds=0.0, reference=None)
    assert {(row.op, row.tensor_parallel_size) for row in rows} == {
        (op, 2) for op in ("attention", "rest", "embed", "head")
    }
    decodes = [row for row in rows if (row.op, row.phase) == ("attention", "decode")]
    assert max(row.num_seqs for row in decodes) == 4
    assert max(row.context_tokens // row.num_seqs for row in decodes) == 31
    assert max(row.num_tokens for row in rows if row.op == "rest") == 31
    more = shard_rows(
        rig, shard_work(work, 2), reach, more=[Point("prefill", 1, 21)], size=2, seconds=5.0, reference=None
    )
    assert len(more) > len(rows)
    assert 21 in {row.num_tokens for row in more if row.op == "rest"}


MIXTURE = {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}


def test_experts_are_divided_by_degrees_that_divide_their_number() -> None:
    assert expert_degrees(tiny(**MIXTURE), (2, 3, 4, 6)) == (2, 3, 6)
    assert expert_degrees(tiny(), (2, 4)) == ()


def test_the_rank_that_is_timed_has_the_busiest_part_of_every_batch() -> None:
    rig = Rig(
        tiny(**MIXTURE),
        dtype="float32",
        device="cpu",
        copies=2,
        num_blocks=8,
        dummy_weights=True,
        group=Silent(2),
        whole_experts=True,
    )
    time_the_busiest(rig.probe.model, 2)
    blocks = list(mixtures_of(rig.probe.model))
    assert len(blocks) == 2
    for block in blocks:
        assert isinstance(block.router, BusiestFirst)
        for number in range(20):
            torch.manual_seed(number)
            x_NE = torch.randn(1 + number, 48)
            parts = torch.bincount(block.router(x_NE)[1].flatten() // 3, minlength=2)
            assert parts[0] == parts.max()


def test_the_busiest_part_is_found_without_the_host() -> None:
    """As a captured graph must: fake tensors have no values that the host could read."""
    with FakeTensorMode():
        expert_Nk = torch.zeros(5, 2, dtype=torch.int64)
        router = BusiestFirst(lambda x_NE: (torch.ones(5, 2), expert_Nk), 6, 2)
        assert router(torch.zeros(5, 48))[1].shape == (5, 2)
