"""The errors that `--risk` takes for exeplan's own engine are those of the records."""

from benchmarks.fidelity.own_errors import FILE, own_errors


def test_the_shipped_errors_of_the_own_engine_are_those_of_the_records() -> None:
    assert FILE.read_text() == own_errors(), "run python -m benchmarks.fidelity.own_errors"
