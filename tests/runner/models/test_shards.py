"""A model split over ranks and stages is the same model: its logits are those of the whole, and no rank holds more than
its share.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.models.sparse_layers import RUN_SPARSE
from exeplan.errors import InputError
from exeplan.profiler.multi_device.shards import mixtures_of
from exeplan.runner.compute.families import load_model
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.weights.shard import Shard, expert_range, head_ranges, whole
from exeplan.runner.ipc.collectives import SharedBuffer, SharedMemoryGroup, group_bytes

from .. import ranks
from .test_models import CASES

LAYERS = 3
WHOLE, UNEVEN = [[0, LAYERS]], [[0, 2], [2, LAYERS]]
DECODERS = [case for case in CASES if not CONFIG_MAPPING[case.split("-")[0]]().is_encoder_decoder]
SPARSE = [case for case in DECODERS if case in RUN_SPARSE]
every_decoder = pytest.mark.parametrize("case", DECODERS)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Directories of random checkpoints of three layers; weights are large enough that no two logits are close."""
    folder = tmp_path_factory.mktemp("models")
    for case in DECODERS:
        layers = "n_layer" if case.startswith("gpt2") else "num_hidden_layers"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[case.split("-")[0]](**{**CASES[case], layers: LAYERS})
        ).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
        model.save_pretrained(folder / case)
    return {case: str(folder / case) for case in DECODERS}


@pytest.fixture(scope="module")
def found(models, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """The results of two ranks: the logits by job."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = {f"{case} whole": {"model": models[case], "cuts": WHOLE} for case in DECODERS}
    jobs |= {f"{case} uneven": {"model": models[case], "cuts": UNEVEN} for case in DECODERS}
    jobs |= {f"{case} dummy": {"model": models[case], "cuts": WHOLE, "dummy": True} for case in ("llama", "gpt2")}
    jobs |= {
        f"{case} experts{' dummy' * dummy}": {
            "model": models[case], "cuts": UNEVEN, "whole_experts": True, "dummy": dummy
        }
        for case in SPARSE
        for dummy in (False, True)
    }  # fmt: skip
    jobs["llama bfloat16"] = {"model": models["llama"], "cuts": UNEVEN, "dtype": "bfloat16"}
    return ranks.outputs_of_two(folder, jobs)


@pytest.fixture
def group():
    """Attaches to a group as one of its ranks, without the others."""

    def join(rank: int, size: int) -> SharedMemoryGroup:
        buffer = SharedBuffer(group_bytes(size))
        try:
            return SharedMemoryGroup(buffer.path, rank, size, timeout=1.0)
        finally:
            buffer.close()

    return join


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@every_decoder
def test_a_pipeline_of_uneven_stages_gives_the_logits_of_the_whole(case, models):
    assert_same(ranks.logits(ranks.stages(models[case], UNEVEN)), ranks.logits(ranks.stages(models[case], WHOLE)))


@every_decoder
@pytest.mark.parametrize("cuts", ["whole", "uneven"])
def test_two_ranks_give_the_logits_of_the_whole(case, cuts, models, found):
    """Over an odd vocabulary, with fewer key/value heads than ranks in some cases, as one stage and as two."""
    expected = ranks.logits(ranks.stages(models[case], WHOLE))
    first, second = (logits[f"{case} {cuts}"] for logits in found)
    assert torch.equal(first, second)
    assert_same(first, expected)


@pytest.mark.parametrize("case", SPARSE)
@pytest.mark.parametrize("dummy", [False, True])
def test_experts_divided_among_two_ranks_are_the_same_model(case, dummy, models, found):
    expected = ranks.logits(ranks.stages(models[case], WHOLE, dummy=dummy))
    first, second = (logits[f"{case} experts{' dummy' * dummy}"] for logits in found)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", SPARSE)
def test_a_rank_holds_its_experts_whole_and_no_others(case, models, group):
    spec = load_model_spec(models[case])
    halves = [
        ModelRunner(spec, shard=replace(whole(spec), group=group(rank, 2), whole_experts=True), num_blocks=1)
        for rank in range(2)
    ]
    mixtures = [one for runner in halves for one in mixtures_of(runner.model)]
    assert {len(one.experts) for one in mixtures} == {spec.experts.count // 2}
    assert {one.held.start for one in mixtures} == {0, spec.experts.count // 2}
    total = ModelRunner(spec, num_blocks=1).weight_bytes
    assert max(runner.weight_bytes for runner in halves) < 0.65 * total


def test_experts_that_cannot_be_divided_evenly_are_refused(models, group):
    spec = load_model_spec(models["mixtral"])
    odd = replace(spec, experts=replace(spec.experts, count=3))
    with pytest.raises(
        InputError, match="the 3 experts of 'mixtral' cannot be split evenly over 2 devices, but over 1"
    ):
        expert_range(odd, replace(whole(odd), group=group(0, 2), whole_experts=True))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_random_weights_are_one_model_whatever_the_split(case, models, found):
    expected = ranks.logits(ranks.stages(models[case], WHOLE, dummy=True))
    torch.testing.assert_close(found[0][f"{case} dummy"], expected, rtol=1e-4, atol=1e-5)
    pipeline = ranks.logits(ranks.stages(models[case], UNEVEN, dummy=True))
    torch.testing.assert_close(pipeline, expected, rtol=1e-4, atol=1e-5)


def test_short_dtypes_stay_close_to_float32(models, found):
    expected = ranks.logits(ranks.stages(models["llama"], WHOLE))
    assert torch.nn.functional.cosine_similarity(found[1]["llama bfloat16"], expected).min() > 0.99


@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "opt-post-norm-projected"])
def test_ranks_and_stages_hold_each_weight_once_except_norms_positions_and_padding(case, models, group):
    """In float16, which has no second, packed copy."""
    spec = load_model_spec(models[case])

    def num_bytes(shard: Shard) -> int:
        return load_model(spec, shard=shard, dtype="float16", device="cpu", dummy_weights=False)[1]

    total = num_bytes(whole(spec))
    halves = [num_bytes(Shard(layers=(0, LAYERS), group=group(rank, 2))) for rank in range(2)]
    assert total <= sum(halves) <= 1.2 * total
    assert max(halves) < 0.6 * total
    cut = [num_bytes(Shard(layers=(0, 2), last=False)), num_bytes(Shard(layers=(2, LAYERS), first=False))]
    tied = spec.tied_head * 2 * spec.vocab_size * spec.config.get("word_embed_proj_dim", spec.hidden_size)
    assert sum(cut) == total + tied


def test_a_shard_caches_its_own_layers_and_heads(models, group):
    """Two key/value heads of 16 dimensions, blocks of 16 tokens, keys and values, float32."""
    runner = ModelRunner(
        load_model_spec(models["llama"]), shard=Shard(layers=(1, LAYERS), first=False, group=group(1, 2)), num_blocks=5
    )
    assert runner.cache.num_bytes == 2 * 2 * 1 * (5 * 16) * 16 * 4
    assert [layer.attention.shape.layer for layer in runner.model.layers] == [0, 1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "queries", "keys"),
    [
        (8, 4, 2, [(0, 4), (4, 8)], [(0, 2), (2, 4)]),
        (8, 2, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (3, 1, 3, [(0, 1), (1, 2), (2, 3)], [(0, 1), (0, 1), (0, 1)]),
        (6, 6, 3, [(0, 2), (2, 4), (4, 6)], [(0, 2), (2, 4), (4, 6)]),
    ],
)
def test_every_rank_has_the_keys_that_its_queries_read(heads, kv_heads, size, queries, keys, group):
    spec = shape(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=24)
    parts = [head_ranges(spec, group(rank, size)) for rank in range(size)]
    assert [(part.start, part.stop) for part, _ in parts] == queries
    assert [(part.start, part.stop) for _, part in parts] == keys


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, "the 4 attention and 2 key/value heads of 'tiny' cannot be split evenly over 3 devices, but over 1, 2"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
            6,
            "the 12 attention and 4 key/value heads of 'tiny' cannot be split evenly over 6 devices, but over 1, 2, 4",
        ),
        (
            {"intermediate_size": 90},
            4,
            "the feed-forward width 90 of 'tiny' cannot be split evenly over 4 devices, but over 1, 2, 3",
        ),
    ],
)
def test_an_uneven_split_is_refused_with_the_sizes_that_fit(change, size, message, group):
    spec, shard = shape(**change), Shard(layers=(0, 1), group=group(0, size))
    with pytest.raises(InputError) as raised:
        load_model(spec, shard=shard, dtype="float32", device="cpu", dummy_weights=True)
    assert str(raised.value) == message


def shape(**change: int):
    return model_spec({"model_type": "llama", **CASES["llama"], **change}, name="tiny")
