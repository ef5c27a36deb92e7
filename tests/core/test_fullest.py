"""The fullest of several has what counting every way of dealing out says."""

from itertools import product

import numpy as np
import pytest

from exeplan.core.models.fullest import fullest, normal_maximum
from exeplan.core.models.sparse_layers import Experts


@pytest.mark.parametrize(("count", "ranks"), [(1, 3), (2, 2), (5, 3), (7, 2), (4, 4)])
def test_few_things_are_counted(count: int, ranks: int) -> None:
    ways = [np.bincount(way, minlength=ranks).max() for way in product(range(ranks), repeat=count)]
    assert float(fullest(count, ranks)) == pytest.approx(np.mean(ways), rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_many_things_are_close_to_drawn_ones(ranks: int) -> None:
    draws = np.random.default_rng(0)
    for count in (20, 64, 100, 1000):
        drawn = draws.multinomial(count, [1 / ranks] * ranks, size=20_000).max(axis=1).mean()
        assert float(fullest(count, ranks)) == pytest.approx(drawn, rel=0.01)


def test_more_things_never_leave_the_fullest_with_less() -> None:
    for ranks in (1, 2, 8, 32):
        found = fullest(np.linspace(0, 300, 3001), ranks)
        assert (np.diff(found) >= -1e-12).all()
        assert (found >= np.linspace(0, 300, 3001) / ranks - 1e-12).all()


def test_the_largest_of_two_normal_numbers_is_known() -> None:
    assert normal_maximum(1) == 0.0
    assert normal_maximum(2) == pytest.approx(1 / np.sqrt(np.pi), rel=1e-5)
    assert normal_maximum(3) == pytest.approx(1.5 / np.sqrt(np.pi), rel=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 4, 32, 512])
@pytest.mark.parametrize("parts", [2, 8, 16])
def test_the_busiest_part_has_the_rows_and_experts_of_drawn_routing(num_tokens: int, parts: int) -> None:
    experts = Experts(count=64, per_token=6, width=8, num_layers=1)
    draws, rows, touched = np.random.default_rng(1), list[int](), list[int]()
    for _ in range(300):
        chosen = np.argsort(draws.random((num_tokens, 64)), axis=1)[:, :6]
        part = chosen // (64 // parts)
        rows.append(np.bincount(part.ravel(), minlength=parts).max())
        touched.append(max(len(np.unique(chosen[part == number])) for number in range(parts)))
    assert experts.busiest_rows(num_tokens, parts) == pytest.approx(np.mean(rows), rel=0.12)
    assert experts.busiest_touched(num_tokens, parts) == pytest.approx(np.mean(touched), rel=0.12)


def test_one_part_is_all_experts() -> None:
    experts = Experts(count=64, per_token=6, width=8, num_layers=1)
    assert experts.busiest_rows(10, 1) == 60
    assert experts.busiest_touched(10, 1) == experts.touched(10)


def test_a_token_goes_to_each_device_that_has_an_expert_of_it_once() -> None:
    experts = Experts(count=8, per_token=1, width=8, num_layers=1)
    assert experts.copies_sent(8, 8) == pytest.approx(7 / 8)
    assert experts.copies_sent(8, 1) == 7
