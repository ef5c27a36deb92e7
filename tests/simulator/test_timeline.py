"""A timeline shows every pass and every request of a run at its time, as a Chrome trace or as a picture."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.core.runs.metrics import RequestRecord, Requests
from exeplan.errors import InputError
from exeplan.simulator.run import Passes, PassRecord, Run, RunLog
from exeplan.simulator.timeline import phase, trace_events, write_timeline


def one(start: float, end: float, *, prefill: int, decode: int) -> PassRecord:
    return PassRecord(
        start=start,
        end=end,
        spans=((0, start, end),),
        num_prefill=prefill,
        num_decode=decode,
        num_new_tokens=10 * prefill + decode,
    )


def logged(*records: PassRecord) -> Passes:
    stages = tuple(stage for stage, _, _ in records[0].spans)
    log = RunLog((stages,), has_leads=True, record_passes=True)
    for record in records:
        times = [time for _, *span in record.spans for time in span]
        log.passed(0, times, (record.num_prefill, record.num_decode, record.num_new_tokens))
    passes = log.passes()
    assert tuple(passes) == records
    return passes


RUN = Run(
    requests=Requests.of(
        [
            RequestRecord(input_tokens=10, arrival=0.0, start=0.0, token_times=(1.0, 1.5, 3.0)),
            RequestRecord(input_tokens=10, arrival=0.0, start=1.5, token_times=(3.0,)),
        ]
    ),
    passes=logged(
        one(0.0, 1.0, prefill=1, decode=0),
        one(1.0, 1.5, prefill=0, decode=1),
        one(1.5, 3.0, prefill=1, decode=1),
    ),
    num_passes=3,
    peak_kv_tokens=32,
    num_preemptions=0,
)


def test_a_pass_is_named_by_the_rows_it_holds() -> None:
    assert [phase(p) for p in RUN.passes] == ["prefill", "decode", "mixed"]


def test_passes_are_complete_events_in_microseconds() -> None:
    passes = [e for e in trace_events(RUN) if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in passes] == [
        ("prefill", 0.0, 1e6),
        ("decode", 1e6, 0.5e6),
        ("mixed", 1.5e6, 1.5e6),
    ]
    assert passes[2]["args"] == {"pass": 2, "prefill": 1, "decode": 1, "new_tokens": 11}


PIPELINED = replace(
    RUN,
    passes=logged(
        PassRecord(0.0, 3.0, ((0, 0.0, 1.0), (1, 1.0, 3.0)), num_prefill=1, num_decode=0, num_new_tokens=10),
        PassRecord(1.0, 4.0, ((0, 1.0, 2.0), (1, 3.0, 4.0)), num_prefill=0, num_decode=1, num_new_tokens=1),
    ),
)


def test_every_stage_has_a_track_with_its_share_of_each_pass() -> None:
    events = trace_events(PIPELINED)
    assert [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"] == [
        (0, "stage 0"),
        (1, "stage 1"),
    ]
    assert [(e["tid"], e["name"], e["args"]["pass"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, "prefill", 0, 0.0, 1e6),
        (1, "prefill", 0, 1e6, 2e6),
        (0, "decode", 1, 1e6, 1e6),
        (1, "decode", 1, 3e6, 1e6),
    ]


def test_rows_are_a_counter() -> None:
    assert [e["args"] for e in trace_events(RUN) if e["ph"] == "C"] == [
        {"prefill": 1, "decode": 0},
        {"prefill": 0, "decode": 1},
        {"prefill": 1, "decode": 1},
    ]


def test_a_request_spans_from_its_start_to_its_last_token() -> None:
    spans = [(e["id"], e["ph"], e["ts"]) for e in trace_events(RUN) if e.get("cat") == "request"]
    assert spans == [(0, "b", 0.0), (0, "e", 3e6), (1, "b", 1.5e6), (1, "e", 3e6)]


def test_the_trace_is_strict_json_that_perfetto_knows(tmp_path: Path) -> None:
    write_timeline(RUN, tmp_path / "t.json", title="run")
    body = json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
    assert body["traceEvents"] == trace_events(RUN)
    assert body["displayTimeUnit"] == "ms"


@pytest.mark.parametrize("run", [RUN, PIPELINED], ids=["one stage", "two stages"])
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_decides_the_kind(tmp_path: Path, suffix: str, magic: bytes, run: Run) -> None:
    write_timeline(run, tmp_path / f"t{suffix}", title="run")
    assert (tmp_path / f"t{suffix}").read_bytes().startswith(magic)


def test_names_the_kinds_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^a timeline is a .json, .png, .svg or .pdf file, not 't.gif'$"):
        write_timeline(RUN, tmp_path / "t.gif", title="run")


@pytest.mark.parametrize("name", ["t.png", "t.json"])
def test_says_what_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^cannot write "):
        write_timeline(RUN, tmp_path / "file" / name, title="run")


def test_a_pass_may_run_on_any_of_hundreds_of_pipelines() -> None:
    log = RunLog(tuple((stage,) for stage in range(300)), has_leads=True, record_passes=True)
    log.passed(299, [0.0, 1.0], (1, 0, 10))
    assert next(iter(log.passes())).spans == ((299, 0.0, 1.0),)
