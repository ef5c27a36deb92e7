"""Durations and sizes are read as users write them, shown with three digits, and refused by their option's name."""

import math

import pytest

from exeplan.errors import InputError
from exeplan.units import num_bytes, seconds, seconds_of_run, show_apart, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("2s", 2), ("500ms", 0.5), ("250us", 250e-6), ("1.5m", 90), ("2 min", 120), ("1h", 3600), ("3", 3), (" 2S ", 2)],
)
def test_reads_durations(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


def test_an_infinite_duration_is_no_limit() -> None:
    assert math.isinf(seconds("inf"))


@pytest.mark.parametrize("text", ["inf", "1e400", "1e308", "721h"])
def test_a_run_is_to_end(text: str) -> None:
    assert seconds_of_run("720h", "--duration") == 30 * 86_400
    with pytest.raises(InputError, match=rf"^--duration must be at most 30 days \(720h\), found '{text}'$"):
        seconds_of_run(text, "--duration")


@pytest.mark.parametrize("text", ["0", "-1s", "nan", "-inf", "0ms"])
def test_a_duration_must_be_above_zero(text: str) -> None:
    with pytest.raises(InputError, match=f"^--latency-bound must be above zero, found '{text}'$"):
        seconds(text, "--latency-bound")


@pytest.mark.parametrize("text", ["", "fast", "2x", "2 s 3", "1,5s", "0x10", "s"])
def test_what_is_no_duration_is_answered_with_examples(text: str) -> None:
    with pytest.raises(InputError, match=f"^--budget must be a duration such as 2s, 500ms or 1m, found '{text}'$"):
        seconds(text, "--budget")


@pytest.mark.parametrize(
    ("text", "value"), [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5kib", 1536), ("1024", 1024)]
)
def test_reads_sizes(text: str, value: int) -> None:
    assert num_bytes(text) == value


@pytest.mark.parametrize("text", ["0", "-1GiB", "inf", "0.5", "4 apples"])
def test_a_size_is_finite_and_at_least_a_byte(text: str) -> None:
    with pytest.raises(InputError, match=f"^--memory must be .*found '{text}'$"):
        num_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.2123, "4.21 s"), (0.0382, "38.2 ms"), (920e-6, "920 us"), (math.inf, "no limit"), (None, "-")],
)
def test_shows_durations_with_three_digits(value: float | None, text: str) -> None:
    assert show_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (999.6e-6, "1 ms"),
        (999.6, "1000 s"),
        (1204.9, "1205 s"),
        (7.2e6, "7200000 s"),
    ],
)
def test_the_unit_is_that_of_the_rounded_time_and_none_has_an_exponent(value: float, text: str) -> None:
    assert show_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "bound", "texts"),
    [
        (2.512, 2.0, ("2.51 s", "2 s")),
        (2.004, 2.0, ("2.004 s", "2 s")),
        (1.000004, 1.0, ("1.000004 s", "1 s")),
        (0.99996, 0.99994, ("1 s", "999.9 ms")),
        (1205.4, 1205.0, ("1205.4 s", "1205 s")),
        (2.0, math.inf, ("2 s", "no limit")),
    ],
)
def test_a_time_and_the_bound_that_it_breaks_look_unequal(value: float, bound: float, texts: tuple[str, str]) -> None:
    assert show_apart(value, bound) == texts


@pytest.mark.parametrize(("value", "text"), [(3 << 29, "1.50 GiB"), (1 << 19, "0.5 MiB")])
def test_shows_sizes_in_binary_units(value: float, text: str) -> None:
    assert show_bytes(value) == text
