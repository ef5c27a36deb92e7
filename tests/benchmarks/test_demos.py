"""The demo's table is read as printed: errors at profiling speed, and whether an interval holds the measurement."""

import pytest

from benchmarks.fidelity.demos import _rows

TABLE = """
== 4. predicted against measured: demo on AMD EPYC, alpaca, bound 2 s

                        predicted    measured    error  at profiling speed   error     90 % interval
----------------------  ----------  ----------  -------  ------------------  ------  ----------------
static(batch_size=18)   51.2 req/s  44.1 req/s  +16.1 %          50.1 req/s  +2.2 %   -6.0 to +10.4 %
                            1.52 s       1.8 s  -15.6 %              1.54 s  -1.3 %    -8.5 to +5.9 %
orca(max_num_seqs=40)   98.3 req/s  80.4 req/s  +22.3 %            88 req/s  +11.7 %  +3.2 to +20.2 %
                            940 ms      1.21 s  -22.3 %              1.06 s  -11.3 %  -19.5 to -3.1 %

- orca and static: no latency - of 3 %
all this took 87.3 s
"""


def test_a_schedule_s_throughput_stands_above_its_latency() -> None:
    rows = list(_rows(TABLE))
    assert [(row["schedule"].partition("(")[0], row["figure"]) for row in rows] == [
        ("static", "throughput"),
        ("static", "latency"),
        ("orca", "throughput"),
        ("orca", "latency"),
    ]
    assert [row["error"] for row in rows] == [2.2, -1.3, 11.7, -11.3]
    assert [row["held"] for row in rows] == [True, True, False, False]
    assert [row["as asked"] for row in rows] == [True, True, False, False]
    assert rows[0]["half"] == pytest.approx(8.2)


@pytest.mark.parametrize(
    ("error", "interval", "asked"),
    [
        ("+12.0", "-1.0 to +18.0", True),
        ("+12.0", "-9.0 to +33.0", False),
        ("+12.0", "-200.0 to +200.0", False),
        ("+4.9", "-200.0 to +200.0", True),
        ("+4.9", "+3.0 to +6.0", True),
    ],
)
def test_a_wide_interval_that_holds_the_measurement_excuses_no_error(error: str, interval: str, asked: bool) -> None:
    (row,) = _rows(f"orca(max_num_seqs=40)   98.3 req/s  80.4 req/s  +22.3 %   88 req/s  {error} %  {interval} %")
    assert row["as asked"] is asked
