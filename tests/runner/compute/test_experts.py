"""Sorting tokens by expert loses none, and one product a touched expert gives what each token alone would get."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exeplan.kernels.products.linear import Linear, row_bucket
from exeplan.runner.compute.blocks.experts import Experts, Router, Routing, grouped
from exeplan.runner.compute.weights.shard import ShardRange


@given(
    num_tokens=st.integers(1, 70),
    num_experts=st.integers(1, 12),
    per_token=st.integers(1, 4),
    padded=st.booleans(),
    seed=st.integers(0, 999),
)
def test_each_token_has_a_row_of_each_of_its_experts(num_tokens, num_experts, per_token, padded, seed):
    per_token = min(per_token, num_experts)
    scores_NX = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    expert_Nk = scores_NX.topk(per_token, -1).indices
    group = grouped(expert_Nk, ShardRange(num_experts, 0, num_experts), padded=padded)
    assert group.held is None
    assert group.experts == expert_Nk.unique().tolist()
    owner_P = torch.tensor(group.experts).repeat_interleave(torch.tensor(group.rows))
    assert torch.equal(owner_P[group.places], expert_Nk)
    assert torch.equal(group.tokens[group.places], torch.arange(num_tokens)[:, None].expand(-1, per_token))
    counts = [(expert_Nk == expert).sum().item() for expert in group.experts]
    assert group.rows == ([row_bucket(count) for count in counts] if padded else counts)
    assert len(group.tokens) == sum(group.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_both_ways_give_what_each_token_alone_gets(num_tokens, normalized, dtype):
    torch.manual_seed(num_tokens)
    block = mixture(num_experts=6, per_token=2, normalized=normalized, dtype=dtype)
    x_NE = torch.randn(num_tokens, 16, dtype=dtype)
    weight_Nk, expert_Nk = block.router(x_NE)
    alone = [
        sum(weight * block.experts[number](row[None])[0].float() for weight, number in zip(*routes, strict=True))
        for row, *routes in zip(x_NE, weight_Nk, expert_Nk.tolist(), strict=True)
    ]
    tolerance = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for way in (block.of_touched, block.of_all):
        out_NE = way(x_NE, weight_Nk, expert_Nk)
        assert out_NE.dtype == dtype
        torch.testing.assert_close(out_NE.float(), torch.stack(alone), **tolerance)


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_ranks_with_some_experts_each_add_up_to_all(num_tokens, parts):
    """Of one token some ranks have no expert at all."""
    torch.manual_seed(num_tokens)
    block = mixture(num_experts=6, per_token=2, normalized=True)
    x_NE = torch.randn(num_tokens, 16)
    weight_Nk, expert_Nk = block.router(x_NE)
    held = [ShardRange(6, 6 * rank // parts, 6 * (rank + 1) // parts) for rank in range(parts)]
    ranks = [
        Experts(block.router, block.experts[part.start : part.stop], padded=block.padded, held=part) for part in held
    ]
    for way in ("of_touched", "of_all"):
        expected = getattr(block, way)(x_NE, weight_Nk, expert_Nk)
        found = sum(getattr(rank, way)(x_NE, weight_Nk, expert_Nk) for rank in ranks)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    rows = [sum(grouped(expert_Nk, part, padded=False).rows) for part in held]
    assert sum(rows) == 2 * num_tokens


def test_weights_are_shares_of_all_experts_or_of_the_chosen():
    torch.manual_seed(0)
    x_NE = torch.randn(4, 16)
    shares, normalized = (mixture(num_experts=5, per_token=2, normalized=n).router for n in (False, True))
    assert shares(x_NE)[0].sum(-1).max() < 1
    torch.testing.assert_close(normalized(x_NE)[0].sum(-1), torch.ones(4))


def mixture(*, num_experts: int, per_token: int, normalized: bool, dtype: torch.dtype = torch.float32) -> Experts:
    """Experts that are one product each, always the same."""
    generator = torch.Generator().manual_seed(7)

    def product(outputs: int) -> Linear:
        return Linear(torch.randn(outputs, 16, generator=generator).to(dtype))

    router = Router(product(num_experts), Routing(per_token=per_token, normalized=normalized))
    return Experts(router, [product(16) for _ in range(num_experts)], padded=router.product.packed)
