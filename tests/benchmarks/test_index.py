"""benchmarks/README.md agrees with the modules and the records, and every record belongs to a benchmark."""

from benchmarks.lib.index import BENCHMARKS, entries, page, records
from benchmarks.lib.record import RECORDS


def test_the_page_is_up_to_date() -> None:
    assert (BENCHMARKS / "README.md").read_text(encoding="utf-8") == page(), "run python -m benchmarks.lib.index"


def test_every_record_belongs_to_a_benchmark() -> None:
    found = list(entries())
    owned = [path for entry in found for path in records(entry, found)]
    assert sorted(owned) == sorted(RECORDS.glob("*.json"))
