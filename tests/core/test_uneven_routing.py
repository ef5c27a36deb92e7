"""Uneven routing: the busiest part has more rows than by even routing, and all rows are somewhere."""

import numpy as np
import pytest

from exeplan.core.models.sparse_layers import Experts
from exeplan.core.models.uneven_routing import busiest_part, routing_exponent
from exeplan.errors import InputError

EXPERTS = Experts(count=128, per_token=8, width=768, num_layers=1)
TOKENS = (1, 2, 8, 16, 17, 64, 500, 4096, 100_000)


def test_even_routing_is_as_the_experts_say() -> None:
    for parts in (1, 8):
        expected = EXPERTS.busiest_rows(64, parts), EXPERTS.busiest_touched(64, parts)
        assert busiest_part(EXPERTS, 64, parts, routing_exponent("even")) == expected


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.2, 2.0])
def test_one_part_has_all_rows_and_reads_no_more_experts_than_there_are(exponent: float) -> None:
    for tokens in TOKENS:
        rows, touched = busiest_part(EXPERTS, tokens, 1, exponent)
        assert rows == pytest.approx(8 * tokens)
        assert 0 < touched <= min(128, 8 * tokens) * (1 + 1e-9)


def test_the_busiest_part_has_more_than_its_share_and_than_by_even_routing() -> None:
    for tokens in (64, 500, 4096):
        found = {a: busiest_part(EXPERTS, tokens, 8, a)[0] for a in (0.0, 1.01, 1.2)}
        assert tokens < found[0.0] < found[1.01] < found[1.2] < 8 * tokens
        assert busiest_part(EXPERTS, tokens, 8, 1.2)[1] <= 16


def test_rows_of_the_busiest_part_rise_with_the_tokens() -> None:
    """A number of each power of 2 and what lies between: what is drawn is the same for all."""
    tokens = np.unique(np.geomspace(17, 100_000, 60).astype(int))
    rows = [busiest_part(EXPERTS, int(number), 8, 1.2)[0] for number in tokens]
    assert (np.diff(rows) > 0).all()


@pytest.mark.parametrize(
    "text", ["", "uneven", "power_law", "power_law_0", "power_law_-1", "power_law_9", "power_law_1e3"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="routing is even or power_law_<exponent>"):
        routing_exponent(text)
