"""Traces of other programs are read as they are, told by their content, and what was done to them is said."""

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exeplan.cli import main
from exeplan.errors import InputError
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319600,396,109
2023-11-16 18:17:09,20,0
2023-11-16 18:17:13.9799600,91,16
"""
AZURE_WITH_ZONE = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,0,2162,5
2024-05-10 02:00:00.509930+02:00,0,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30500, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2354]}
"""
QWEN = """{"chat_id": 8, "parent_chat_id": -1, "timestamp": 61, "input_length": 521, "output_length": 132, "turn": 1}
{"chat_id": 9, "parent_chat_id": 8, "timestamp": 64.114, "input_length": 40, "output_length": 7, "turn": 2}
"""
SHARE_GPT = [
    {
        "id": "a",
        "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "yes"}, {"from": "human"}],
    },
    {"conversations": [{"from": "human", "value": "a question without an answer"}]},
    {"conversations": []},
    {"conversations": [{"from": "human", "value": "ä" * 10}, {"from": "gpt", "value": "z" * 400}]},
]
ASKED = {"role": "user", "content": [{"type": "text", "text": "eight ch"}]}
MESSAGES = [{"messages": [ASKED, {"role": "assistant", "content": "four"}]}]
ESTIMATED = "ShareGPT; tokens estimated as bytes of text / 4, no tokenizer was given"
VLLM = {
    "backend": "vllm",
    "completed": 2,
    "total_input_tokens": 30,
    "input_lens": [10, 15, 20],
    "output_lens": [5, 0, 7],
    "start_times": [100.5, 100.6, 99.5],
    "ttfts": [0.1, 0, 0.2],
    "errors": ["", "refused", ""],
}
GUIDELLM = {
    "metadata": {"version": 2},
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {"prompt_tokens": 64, "output_tokens": 8, "request_start_time": 1700000001.5},
                    {"prompt_tokens": 32, "output_tokens": 9, "request_start_time": 1700000000.5},
                ],
                "errored": [{"prompt_tokens": 1, "output_tokens": None}],
            }
        }
    ],
}
Read = Callable[..., Workload]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(content: Any, name: str = "trace.txt") -> Workload:
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return load_workload(str(tmp_path / name))

    return read


def requests(workload: Workload) -> list[tuple[float, ...]]:
    trace = workload.trace
    assert trace is not None
    columns = [trace.inputs.tolist(), trace.outputs.tolist()]
    if trace.arrival_s is not None:
        columns.append([round(time, 6) for time in trace.arrival_s.tolist()])
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize(
    ("content", "found", "said"),
    [
        (AZURE, [(374, 44, 0), (396, 109, 0.052), (91, 16, 10)], "Azure; 1 without input or output left out"),
        (AZURE_WITH_ZONE, [(2162, 5, 0), (2399, 6, 0.5)], "Azure"),
        (BURST_GPT, [(472, 18, 0), (417, 276, 113)], "BurstGPT; 1 without input or output left out"),
        (MOONCAKE, [(6955, 52, 0), (6472, 26, 3.5)], "Mooncake"),
        (QWEN, [(521, 132, 0), (40, 7, 3.114)], "Qwen-Bailian"),
        (VLLM, [(20, 7, 0), (10, 5, 1)], "vllm bench serve; 1 without input or output left out"),
        (json.dumps(VLLM), [(20, 7, 0), (10, 5, 1)], "vllm bench serve; 1 without input or output left out"),
        (GUIDELLM, [(32, 9, 0), (64, 8, 1)], "guidellm"),
        (
            {"benchmarks": GUIDELLM["benchmarks"] * 2},
            [(64, 8), (32, 9)] * 2,
            "guidellm; 2 benchmarks together, without their times",
        ),
        (
            SHARE_GPT,
            [(10, 1), (5, 100)],
            f"{ESTIMATED}; 2 without input or output left out",
        ),
        (
            "\n".join(map(json.dumps, SHARE_GPT)),
            [(10, 1), (5, 100)],
            f"{ESTIMATED}; 2 without input or output left out",
        ),
        (MESSAGES, [(2, 1)], ESTIMATED),
        (
            "\n".join([json.dumps({"input_lens": [3], "output_lens": [4], "ttfts": [0.1]})] * 2),
            [(3, 4), (3, 4)],
            "vllm bench serve; 2 runs together",
        ),
        (
            "\n".join(
                [
                    json.dumps({"input_lens": [3], "output_lens": [4], "ttfts": [0.1], "start_times": [seconds]})
                    for seconds in (1.0, 9.0)
                ]
            ),
            [(3, 4), (3, 4)],
            "vllm bench serve; 2 runs together, without their times",
        ),
    ],
)
@pytest.mark.parametrize("name", ["trace.txt", "trace.gz"])
def test_a_trace_of_another_program_is_read(read: Read, content: Any, found: Any, said: str, name: str) -> None:
    workload = read(content, name)
    assert requests(workload) == found
    assert workload.source == f"{name}, {len(found)} requests; a trace of {said}"


def test_times_are_left_out_where_some_are_missing(read: Read) -> None:
    workload = read({**VLLM, "output_lens": [5, 6, 7], "start_times": [1.0, None, 2.0]})
    assert requests(workload) == [(10, 5), (15, 6), (20, 7)]
    assert workload.source.endswith("times left out, as 1 of 3 requests have none")


@pytest.mark.parametrize(("said_by", "said"), [("from", "value"), ("role", "content")])
def test_a_system_turn_belongs_to_the_prompt(read: Read, said_by: str, said: str) -> None:
    turns = [{said_by: by, said: "x" * size} for by, size in (("system", 40), ("user", 8), ("assistant", 400))]
    workload = read([{"conversations" if said == "value" else "messages": turns}])
    assert workload.trace is not None
    assert (workload.trace.inputs.tolist(), workload.trace.outputs.tolist()) == ([12], [100])


def test_lines_of_blank_fields_are_no_requests(read: Read) -> None:
    workload = read("input_tokens,output_tokens\n , \n3,4,\n,\n")
    assert workload.trace is not None
    assert workload.trace.inputs.tolist() == [3]


def test_our_own_rows_may_stand_in_an_array(read: Read) -> None:
    assert requests(read([{"input_tokens": 3, "output_tokens": 4}])) == [(3, 4)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (AZURE.replace("2023-11-16 18:17:09,20,0", "yesterday,20,1"), "request 3 (line 4): TIMESTAMP must be a date"),
        (AZURE.replace("396", "-3"), "Azure, request 2 (line 3): the input must be a whole number from 1 to"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "Azure, holds no request with an input and an output"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "output_tokens; found TIMESTAMP, ContextTokens; traces of Azure"),
        (MOONCAKE + '{"timestamp": 1}', "line 3 must be an object with input_length and output_length; traces"),
        (MOONCAKE.replace("30500", '"soon"'), "request 2 (line 2): its time must be a number, found soon"),
        (MOONCAKE.replace("30500", "30.5"), "(line 2): its time must be whole milliseconds, found 30.5; write"),
        ({**VLLM, "output_lens": [1]}, "has 3 input_lens and 1 output_lens"),
        ({"completed": 3, "total_input_tokens": 9}, "lengths of single requests; run `vllm bench serve` with --save-d"),
        ({"benchmarks": [{"requests": None}]}, "benchmarks without requests.successful; write guidellm's report"),
        ({"benchmarks": []}, "guidellm, holds no request with an input and an output"),
        ([{"conversations": "hello"}], "line 2 must be an object with a list of conversations or messages"),
        ('[{"conversations": []},\n{]', "line 2 is not valid JSON"),
        (f"[{json.dumps(SHARE_GPT[0])},", "must end with the ] of its array; it was cut off"),
        (f"{json.dumps(SHARE_GPT[:1])} rest", "must end with the ] of its array; it was cut off"),
        ("input_tokens;output_tokens\n1;2\n", "has columns between semicolons; write commas between them"),
        ("input_tokens\toutput_tokens\n1\t2\n", "has columns between tabs; write commas between them"),
        ("input_tokens,output_tokens\n1,2,5\n", "line 2: 3 fields, the header has 2"),
        ("[]", "holds no request; a trace needs at least one row below the header"),
        ([{"prompt": "hello"}], "must be an object with input_tokens and output_tokens; traces of Azure"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_was_expected(read: Read, content: Any, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        read(content)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


KEYS = st.sampled_from(
    [
        "input_tokens", "output_tokens", "arrival_s", "timestamp", "input_length", "output_length", "conversations",
        "messages", "value", "content", "text", "input_lens", "output_lens", "start_times", "benchmarks", "requests",
        "successful", "prompt_tokens", "request_start_time", "chat_id", "turn",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 99) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(values=st.lists(st.dictionaries(KEYS, JSON, max_size=4) | JSON, min_size=1, max_size=3), lines=st.booleans())
def test_any_json_is_read_or_refused(read: Read, values: list[Any], lines: bool) -> None:
    with contextlib.suppress(InputError):
        workload = read("\n".join(map(json.dumps, values)) if lines else values)
        assert workload.weights.sum() == pytest.approx(1)


def test_convert_writes_a_plain_trace(read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = read(AZURE)
    assert main(["convert", str(tmp_path / "trace.txt"), "-o", str(tmp_path / "plain.csv")]) == 0
    assert "1 without input or output left out" in capsys.readouterr().out
    again = load_workload(str(tmp_path / "plain.csv"))
    assert (again.fingerprint, requests(again)) == (workload.fingerprint, requests(workload))
    assert main(["convert", "fixed:in=8;out=4", "-o", str(tmp_path / "law.csv")]) == 2
    assert "is a law, which has no requests to write" in capsys.readouterr().err


def test_convert_counts_texts_with_a_tokenizer(read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    by_letter = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate("xyesz")}, []))
    model = tmp_path / "model"
    model.mkdir()
    by_letter.save(str(model / "tokenizer.json"))
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 5, **sizes}))
    read(SHARE_GPT[:1])
    argv = ["convert", str(tmp_path / "trace.txt"), "-o", str(tmp_path / "plain.csv"), "--tokenizer"]
    assert main([*argv, str(model)]) == 0
    assert requests(load_workload(str(tmp_path / "plain.csv"))) == [(40, 3)]
    assert "estimated" not in capsys.readouterr().out
    assert main([*argv, "demo"]) == 2
    assert "'demo' has no tokenizer; name the directory or the Hub id" in capsys.readouterr().err
