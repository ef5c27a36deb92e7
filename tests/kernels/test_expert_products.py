"""All experts at once give what each gives alone, of the experts that a rank holds, whatever the routes."""

import pytest
import torch

from exeplan.kernels.products.expert_products import expert_mlp, expert_mlp_reference, rows_by_expert

from .paged_cache import TOLERANCES

HIDDEN, INNER, EXPERTS = 40, 24, 6


def routes(tokens: int, per_token: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each token, uneven: half of the tokens go to the first ones."""
    scores_NX = torch.rand(tokens, EXPERTS, device=device)
    scores_NX[: tokens // 2, :per_token] += 1.0
    return scores_NX.topk(per_token, -1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "per_token"), [(0, 2), (1, 1), (5, 2), (70, 3)])
@pytest.mark.parametrize(("first", "held"), [(0, EXPERTS), (2, 3)])
def test_equals_the_reference(tokens, per_token, first, held, dtype, device):
    x_NE = torch.randn(tokens, HIDDEN, device=device).to(dtype)
    weight_Nk, expert_Nk = routes(tokens, per_token, device)
    up_XFE = (torch.randn(held, 2 * INNER, HIDDEN, device=device) / HIDDEN**0.5).to(dtype)
    down_XEI = (torch.randn(held, HIDDEN, INNER, device=device) / INNER**0.5).to(dtype)
    found = expert_mlp(x_NE, weight_Nk, expert_Nk, up_XFE, down_XEI, "silu", first=first)
    expected = expert_mlp_reference(x_NE, weight_Nk, expert_Nk, up_XFE, down_XEI, "silu", first=first)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("tokens", [1, 7, 100])
@pytest.mark.parametrize(("first", "held"), [(0, EXPERTS), (4, 2)])
@pytest.mark.parametrize("block", [4, 16])
def test_each_pair_is_in_a_block_of_its_expert_and_nothing_else_is(tokens, first, held, block, device):
    _, expert_Nk = routes(tokens, 2, device)
    rows = rows_by_expert(expert_Nk, first=first, num_experts=held, block=block)
    pairs, chosen = 2 * tokens, expert_Nk.flatten().tolist()
    assert sorted(number for number in rows.pairs.tolist() if number < pairs) == [
        number for number, expert in enumerate(chosen) if first <= expert < first + held
    ]
    for number, expert in enumerate(rows.experts.tolist()):
        own = [pair for pair in rows.pairs[number * block : (number + 1) * block].tolist() if pair < pairs]
        assert expert == held if not own else all(chosen[pair] == first + expert for pair in own)


def test_more_tokens_than_are_computed_at_a_time(device, monkeypatch):
    monkeypatch.setattr("exeplan.kernels.products.expert_products._TOKENS", 8)
    x_NE, (weight_Nk, expert_Nk) = torch.randn(19, HIDDEN, device=device), routes(19, 2, device)
    up_XFE = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device=device) / 6
    down_XEI = torch.randn(EXPERTS, HIDDEN, INNER, device=device) / 5
    found = expert_mlp(x_NE, weight_Nk, expert_Nk, up_XFE, down_XEI, "gelu")
    torch.testing.assert_close(
        found, expert_mlp_reference(x_NE, weight_Nk, expert_Nk, up_XFE, down_XEI, "gelu"), rtol=1e-5, atol=1e-5
    )
