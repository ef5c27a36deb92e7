"""A plain CSV becomes a profile row by row, or is refused by the line and cell that is wrong."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import OPS, Measurement, load_profile, save_profile
from exeplan.errors import InputError
from exeplan.profiler.importing import import_profile
from exeplan.profiler.importing.csv import COLUMNS, read_csv

HEADER = ",".join(COLUMNS)
ROWS = """
attention,prefill,1,1,128,,,1e-4
attention,prefill,1,1,512,,,8e-4
attention,decode,1,1,,128,,5e-5
attention,decode,1,8,,1024,,9e-5
attention,decode,1,8,,4096,,3e-4
attention,prefill,2,1,128,,,9e-5
attention,prefill,2,1,512,,,5e-4
attention,decode,2,8,,1024,,6e-5
attention,decode,2,8,,4096,,2e-4
rest,,1,,64,,,1e-3
rest,,1,,256,,,3e-3
rest,,2,,64,,,6e-4
rest,,2,,256,,,2e-3
embed,,1,,64,,,1e-5
head,,1,8,,,,2e-4
overhead,prefill,1,1,,,,1e-3
overhead,decode,1,1,,,,1e-3
all_reduce,intra,2,,,,65536,2e-5
send,inter,,,,,65536,4e-5
"""


@pytest.fixture
def spec() -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "intermediate_size": 1024,
    }
    return model_spec(config, name="toy")


def written(tmp_path: Path, rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n{rows.strip()}\n")
    return path


def test_rows_become_measurements_one_to_one(tmp_path: Path, spec: ModelSpec) -> None:
    profile, said = import_profile([written(tmp_path, ROWS)], spec=spec, device="a100-80gb")
    assert profile.source == "imported csv"
    assert profile.device.name == "a100-80gb"
    assert profile.tensor_parallel_sizes == (1, 2)
    timed = [row for row in profile.measurements if row.repeats]
    assert len(timed) == len(ROWS.strip().splitlines())
    assert timed[3] == Measurement(op="attention", phase="decode", num_seqs=8, context_tokens=1024, seconds=9e-5)
    assert timed[-2] == Measurement(op="all_reduce", phase="intra", tensor_parallel_size=2, bytes=65536, seconds=2e-5)
    assert "19 rows measured, 4 derived (embed, head, overhead prefill, overhead decode)" in "\n".join(said)


def test_an_imported_profile_is_a_profile(tmp_path: Path, spec: ModelSpec) -> None:
    profile, _ = import_profile([written(tmp_path, ROWS)], spec=spec, device="a100-80gb")
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").fingerprint == profile.fingerprint


def test_packed_files_columns_in_any_order_and_whole_floats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(f"{','.join(reversed(COLUMNS))}\r\n1e-3,,,64.0,,2.0,,rest\r\n\r\n")
    (row,), said = read_csv(path)
    assert row == Measurement(op="rest", num_tokens=64, tensor_parallel_size=2, seconds=1e-3)
    assert said == ()


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    st.lists(
        st.builds(
            Measurement,
            op=st.just("attention"),
            phase=st.just("decode"),
            num_seqs=st.integers(1, 4096),
            context_tokens=st.integers(1, 2**40),
            tensor_parallel_size=st.sampled_from([1, 2, 4, 8]),
            seconds=st.floats(1e-9, 1e3),
        ),
        min_size=1,
        unique_by=lambda row: (row.num_seqs, row.context_tokens, row.tensor_parallel_size),
    )
)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Measurement]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [",".join(str(getattr(row, column)) for column in COLUMNS) for row in rows]
    path.write_text("\n".join([HEADER, *lines, ""]))
    assert read_csv(path) == (tuple(rows), ())


def test_points_timed_again_count_with_their_median(tmp_path: Path) -> None:
    path = written(tmp_path, "rest,,1,,64,,,1e-3\nrest,,1,,64,,,2e-3\nrest,,1,,64,,,9e-3\nhead,,1,1,,,,1e-4")
    rows, said = read_csv(path)
    assert [(row.seconds, row.repeats) for row in rows] == [(2e-3, 3), (1e-4, 1)]
    assert said == (f"{path} lines 2 and 3 time the same point; the median counts",)


def test_points_of_several_files_count_with_their_median(tmp_path: Path, spec: ModelSpec) -> None:
    """Also where the second file has half the time, which no single file may have of more work."""
    first, second = written(tmp_path, ROWS), tmp_path / "again.csv"
    second.write_text(f"{HEADER}\nattention,decode,1,8,,4096,,1e-4\nrest,,1,,256,,,1.4e-3\n")
    profile, said = import_profile([first, second], spec=spec, device="a100-80gb")
    found = {(m.op, m.context_tokens or m.num_tokens): m for m in profile.measurements if m.repeats == 2}
    assert {point: m.seconds for point, m in found.items()} == pytest.approx(
        {("attention", 4096): 2e-4, ("rest", 256): 2.2e-3}
    )
    assert f"{first} line 6 and {second} line 2 time the same point, and 1 other points so; the median counts" in said


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("rest,,1,,64,,,nan", "line 3: seconds must be a finite number above 0, found 'nan'"),
        ("rest,,1,,64,,,-1e-3", "line 3: seconds must be a finite number above 0, found '-1e-3'"),
        ("rest,,1,,64,,,0", "line 3: seconds must be a finite number above 0, found '0'"),
        ("rest,,1,,64,,,inf", "line 3: seconds must be a finite number above 0, found 'inf'"),
        ("rest,,1,,64,,,fast", "line 3: seconds must be a finite number above 0, found 'fast'"),
        ("rest,,1,,64,,,", "line 3: seconds must be a finite number above 0, found ''"),
        ("rest,,1,,6.5,,,1", "line 3: num_tokens must be a whole number of at least 0, found '6.5'"),
        ("rest,,1,,many,,,1", "line 3: num_tokens must be a whole number of at least 0, found 'many'"),
        ("rest,,1,,nan,,,1", "line 3: num_tokens must be a whole number of at least 0, found 'nan'"),
        ("rest,,1,,-64,,,1", "line 3: num_tokens must be a whole number of at least 0, found '-64'"),
        ("rest,,1,,,,,1", "line 3: rest needs num_tokens of at least 1"),
        ("all_reduce,intra,1,,,,8,1", "line 3: all_reduce needs tensor_parallel_size of at least 2"),
        ("mlp,,1,,64,,,1", f"line 3: no op 'mlp'; there are {', '.join(OPS)}"),
        ("control,,1,,,,,1", "line 3: control needs num_seqs of at least 1"),
        ("control,decode,1,8,,,,1", "line 3: control has no phase 'decode'; it has an empty one"),
        ("send,near,1,,,,8,1", "line 3: send has no phase 'near'; it has inter or intra"),
        ("head,decode,1,8,,,,1", "line 3: head has no phase 'decode'; it has an empty one"),
        ("rest,,1,,64", "line 3: 5 cells where the header has 8"),
    ],
)
def test_a_wrong_cell_is_named_by_its_line(tmp_path: Path, row: str, fault: str) -> None:
    path = written(tmp_path, f"rest,,1,,64,,,1e-3\n{row}\nhead,,1,1,,,,1e-4")
    with pytest.raises(InputError) as refusal:
        read_csv(path)
    assert str(refusal.value) == f"{path} {fault}"


def test_many_wrong_cells_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(["rest,,1,,64,,,0"] * 5))
    with pytest.raises(InputError, match=r"line 2: .*; line 3: .*; line 4: .*; and 2 more lines$"):
        read_csv(path)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (HEADER.replace(",bytes", ""), "the header lacks bytes;"),
        (HEADER.replace("seconds", "ms"), "the header lacks seconds and has unknown 'ms';"),
        (f"{HEADER},op", "the header names a column twice;"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, header: str, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        read_csv(written(tmp_path, "rest,,1,,64,,,1e-3", header))


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    whole = path.read_text()
    for length in range(len(HEADER) + 2, len(whole)):
        path.write_text(whole[:length])
        if not whole[:length].endswith("\n"):
            with pytest.raises(InputError, match=r"ends within line \d+, without a line end"):
                read_csv(path)
    path.write_text("")
    with pytest.raises(InputError, match=r"is empty$"):
        read_csv(path)
    path.write_text(f"{HEADER}\n")
    with pytest.raises(InputError, match="holds a header and no rows"):
        read_csv(path)


def test_a_packed_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n{ROWS.strip()}\n".encode())[:-20])
    with pytest.raises(InputError, match="is cut short: its gzip stream does not end"):
        read_csv(path)


def test_what_is_missing_is_named_with_a_way_to_add_it(tmp_path: Path, spec: ModelSpec) -> None:
    path = written(tmp_path, "\n".join(line for line in ROWS.splitlines() if not line.startswith(("overhead", "head"))))
    with pytest.raises(InputError) as refusal:
        import_profile([path], spec=spec, device="a100-80gb")
    assert str(refusal.value) == (
        f"{path}: no rows of head, overhead prefill, overhead decode; add them as a plain CSV or another table, and "
        "give --overhead TIME for the host's time of an iteration"
    )


def test_the_overhead_can_be_given(tmp_path: Path, spec: ModelSpec) -> None:
    path = written(tmp_path, "\n".join(line for line in ROWS.splitlines() if not line.startswith("overhead")))
    profile, _ = import_profile([path], spec=spec, device="a100-80gb", overhead_seconds=2e-3)
    assert {row.seconds for row in profile.measurements if row.op == "overhead"} == {2e-3}


def test_an_encoder_decoder_model_needs_both_of_its_layers(tmp_path: Path, spec: ModelSpec) -> None:
    both = replace(spec, num_encoder_layers=2)
    with pytest.raises(InputError, match=r"no rows of rest prefill, rest decode; add them as a plain CSV"):
        import_profile([written(tmp_path, ROWS)], spec=both, device="a100-80gb")
    rows = ROWS.replace("rest,,", "rest,prefill,") + ROWS.replace("rest,,", "rest,decode,")[ROWS.index("rest") :]
    profile, _ = import_profile([written(tmp_path, rows)], spec=both, device="a100-80gb")
    assert {row.phase for row in profile.measurements if row.op == "rest"} == {"prefill", "decode"}


def test_a_degree_without_attention_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    path = written(tmp_path, ROWS + "rest,,4,,64,,,3e-4\n")
    with pytest.raises(
        InputError, match="rest is timed at tensor_parallel_size=4, prefill attention and decode attention not"
    ):
        import_profile([path], spec=spec, device="a100-80gb")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("rest,,2,,256,,,2e-3", "rest is timed at 64 tokens only, so that any number of them would take as long; "),
        ("attention,prefill,2,1,512,,,5e-4", "prefill attention is timed at one length only, so that any other would "),
        ("attention,decode,1,8,,4096,,3e-4", "decode attention is timed at one length only, so that any other would "),
    ],
)
def test_a_single_size_is_refused(tmp_path: Path, spec: ModelSpec, row: str, fault: str) -> None:
    path = written(tmp_path, ROWS.replace(f"{row}\n", ""))
    with pytest.raises(InputError, match=f"tensor_parallel_size={row.split(',')[2]}: {fault}"):
        import_profile([path], spec=spec, device="a100-80gb")


@pytest.mark.parametrize(("there", "lacking"), [("decode", "prefill"), ("prefill", "decode")])
def test_rest_of_one_phase_alone_is_refused(tmp_path: Path, spec: ModelSpec, there: str, lacking: str) -> None:
    path = written(tmp_path, ROWS.replace("rest,,2", f"rest,{there},2"))
    with pytest.raises(InputError, match=f"tensor_parallel_size=2: rest has no rows of {lacking}; add them, or leave"):
        import_profile([path], spec=spec, device="a100-80gb")


def test_times_that_fall_as_work_grows_are_refused(tmp_path: Path, spec: ModelSpec) -> None:
    path = written(tmp_path, ROWS.replace("rest,,1,,256,,,3e-3", "rest,,1,,256,,,3e-4"))
    with pytest.raises(InputError, match=r"^rest num_tokens=256: 0.3 ms is less than the 1 ms of rest num_tokens=64;"):
        import_profile([path], spec=spec, device="a100-80gb")


def test_what_beats_the_device_is_said(tmp_path: Path, spec: ModelSpec) -> None:
    path = written(tmp_path, ROWS.replace("rest,,1,,64,,,1e-3", "rest,,1,,64,,,1e-7"))
    _, said = import_profile([path], spec=spec, device="A100-80GB")
    assert any(
        line.startswith("rest num_tokens=64: ") and "beyond the device's memory bandwidth" in line for line in said
    )


def test_a_device_without_a_datasheet_is_said(tmp_path: Path, spec: ModelSpec) -> None:
    profile, said = import_profile([written(tmp_path, ROWS)], spec=spec, device="mine")
    assert profile.device.name == "mine"
    assert said[0].startswith("no datasheet of a device 'mine' (there are ")


def test_the_format_must_be_known(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(
        InputError, match="no format 'excel' of measurements; there are auto, csv, vidur, aiconfigurator"
    ):
        import_profile([written(tmp_path, ROWS)], spec=spec, device="a100-80gb", format="excel")
    with pytest.raises(InputError, match=r"is no table of format vidur: its columns are "):
        import_profile([written(tmp_path, ROWS)], spec=spec, device="a100-80gb", format="vidur")
