"""Every way to state a workload is read as intended, and an invalid one is refused in one sentence."""

import contextlib
import gzip
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from exeplan.errors import InputError
from exeplan.files import shipped, shipped_names
from exeplan.workload.files import load_workload
from exeplan.workload.laws import joint, normal, quantiles, uniform
from exeplan.workload.workload import Workload

CSV = "arrival_s,input_tokens,output_tokens\n0,374,44\n4.5,396,109\n4.5,374,44\n"


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        load_workload(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- shipped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_names("workloads"))
def test_every_shipped_workload_loads_and_names_its_source(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert len(workload.source) > 20
    assert workload.weights.sum() == pytest.approx(1)
    assert load_workload(str(shipped("workloads", name))).fingerprint == workload.fingerprint


@pytest.mark.parametrize(
    ("name", "mean_output", "p99", "longest"),
    [("S", 32, 63, 80), ("T", 128, 292, 320), ("G", 192, 417, 480), ("C1", 64, 137, 160), ("C2", 256, 579, 640)],
)
def test_tasks_have_the_moments_and_tails_of_table_3(name: str, mean_output: float, p99: int, longest: int) -> None:
    workload = load_workload(name)
    assert workload.mean_output == pytest.approx(mean_output)
    assert abs(workload.output_quantile(0.99) - p99) <= 1
    assert workload.max_output == longest


def test_a_std_out_of_reach_is_said() -> None:
    assert load_workload("S").source.endswith("input std 252 is out of reach, 148 used")
    assert load_workload("G").source.endswith("code generation")


@pytest.mark.parametrize(
    ("name", "means", "rank_correlation"),
    [
        ("alpaca", (18.0, 58.6), -0.28),
        ("azure-2023-code", (2048, 27.9), -0.02),
        ("azure-2023-conv", (1243, 217), 0.03),
        ("mooncake-conv", (12870, 346), 0.07),
        ("wmt17-ende", (23.6, 45.7), 0.92),
    ],
)
def test_tables_of_traces_keep_the_means_and_the_correlation(
    name: str, means: tuple[float, float], rank_correlation: float
) -> None:
    workload = load_workload(name)
    assert (workload.mean_input, workload.mean_output) == pytest.approx(means, rel=0.02)
    assert spearmanr(*workload.sample(4000, seed=0)).statistic == pytest.approx(rank_correlation, abs=0.02)


# --- traces -----------------------------------------------------------------------------------------------------------

JSON_LINES = (
    '{"input_tokens": 374, "output_tokens": 44, "arrival_s": 0}\n\n'
    '{"output_tokens": 109, "input_tokens": 396.0, "arrival_s": 4.5, "model": "x"}\n'
    '{"input_tokens": 374, "output_tokens": 44, "arrival_s": 4.5}'
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", CSV),
        ("t.txt", CSV.replace("\n", "\r\n")),
        ("t.csv.gz", gzip.compress(CSV.encode(), mtime=0)),
        ("t.csv", "\ufeff" + CSV + "\n\n"),
        ("t.csv", "user, output_tokens ,input_tokens,arrival_s\na,44,374,0\nb,109.0,396,4.5\nc,44,374,4.5\n"),
        ("t.jsonl", JSON_LINES),
        ("t.jsonl.gz", gzip.compress(JSON_LINES.encode(), mtime=0)),
    ],
)
def test_a_trace_is_its_histogram_and_its_requests(tmp_path: Path, name: str, content: str | bytes) -> None:
    workload = load_workload(written(tmp_path, name, content))
    assert workload.inputs.tolist() == [374, 396]
    assert workload.outputs.tolist() == [44, 109]
    assert workload.weights == pytest.approx([2 / 3, 1 / 3])
    assert workload.source == f"{name}, 3 requests"
    assert workload.trace is not None
    assert workload.trace.inputs.tolist() == [374, 396, 374]
    assert workload.trace.arrival_s is not None
    assert workload.trace.arrival_s.tolist() == [0, 4.5, 4.5]


@pytest.mark.parametrize(
    "content", [",input_tokens,output_tokens\n,1,2\n", "arrival_s,input_tokens,output_tokens\n,1,2\n"]
)
def test_a_trace_may_have_no_times(tmp_path: Path, content: str) -> None:
    trace = load_workload(written(tmp_path, "t.csv", content)).trace
    assert trace is not None
    assert trace.arrival_s is None


HEADER = "arrival_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "t.csv needs the columns input_tokens and output_tokens; found nothing"),
        (HEADER, "t.csv holds no request; a trace needs at least one row below the header"),
        (
            "input_tokens,tokens\n1,2\n",
            "t.csv needs the columns input_tokens and output_tokens; found input_tokens, tokens",
        ),
        (HEADER + ",1,2\n,1,x\n", "t.csv row 2 (line 3): output_tokens must be a number, found x"),
        (HEADER + ",1,2\n,1,\n", "t.csv row 2 (line 3): output_tokens must be a number, found nothing"),
        (HEADER + ",0,2\n", "row 1 (line 2): input_tokens must be a whole number from 1 to 10,000,000, found 0"),
        (HEADER + ",-3,2\n", "row 1 (line 2): input_tokens must be a whole number from 1 to 10,000,000, found -3"),
        (HEADER + ",1.5,2\n", "row 1 (line 2): input_tokens must be a whole number from 1 to 10,000,000, found 1.5"),
        (HEADER + ",10000001,2\n", "input_tokens must be a whole number from 1 to 10,000,000, found 10000001"),
        (HEADER + ",nan,2\n", "row 1 (line 2): input_tokens must be a number, found nan"),
        (HEADER + ",1e999,2\n", "row 1 (line 2): input_tokens must be a number, found 1e999"),
        (HEADER + f",{'9' * 5000},2\n", f"input_tokens must be a number, found {'9' * 57}..."),
        (HEADER + "\n0,1,2\n5,1,2\n4,1,2\n", "row 3 (line 5): arrival_s must not fall, found 4 after 5"),
        (HEADER + "-1,1,2\n", "row 1 (line 2): arrival_s must not be negative, found -1"),
        (HEADER + "soon,1,2\n", "row 1 (line 2): arrival_s must be a number, found soon"),
        (HEADER + "0,1,2\n,1,2\n", "row 2 (line 3): arrival_s must be given for every request or for none"),
        (HEADER + ",1,2\n1,1,2\n", "row 2 (line 3): arrival_s must be given for every request or for none"),
        (HEADER + ",1,2\n1,2\n", "t.csv line 3: 2 fields, the header has 3"),
        (HEADER + f',1,"{"x" * 140_000}"\n', "t.csv line 2: field larger than field limit (131072)"),
        (b"\xff\xfe\x00", "t.csv is not UTF-8 text (byte 0)"),
        ('{"input_tokens": 1}', "t.csv line 1 must be an object with input_tokens and output_tokens"),
        ('{"input_tokens": 1, "output_tokens": 2}\n[]', "t.csv line 2 must be an object with input_tokens and"),
        ('{"input_tokens": 1, "output_tokens": 2}\n{', "t.csv line 2 is not valid JSON"),
        ('{"input_tokens": true, "output_tokens": 2}', "row 1 (line 1): input_tokens must be a number, found True"),
        ('{"input_tokens": NaN, "output_tokens": 2}', "row 1 (line 1): input_tokens must be a number, found nan"),
        ('{"input_tokens": [1], "output_tokens": 2}', "row 1 (line 1): input_tokens must be a number, found [1]"),
        (
            f'{{"input_tokens": {"9" * 400}, "output_tokens": 2}}',
            "row 1 (line 1): input_tokens must be a number, found 99",
        ),
        ("[" * 100_000, "t.csv needs the columns input_tokens"),
        ('{"a":' * 100_000, "t.csv line 1 is not valid JSON"),
    ],
)
def test_a_bad_trace_is_refused_with_file_and_row(tmp_path: Path, content: str | bytes, message: str) -> None:
    found = refusal(written(tmp_path, "t.csv", content))
    assert message in found
    assert len(found) < len(str(tmp_path)) + 250


def test_a_broken_gzip_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(CSV.encode(), mtime=0)
    for content in (whole[:-9], b"not gzip", whole[:12] + b"\0\0" + whole[14:]):
        assert "t.csv.gz is not a whole gzip file" in refusal(written(tmp_path, "t.csv.gz", content))
    assert "is not UTF-8 text" in refusal(written(tmp_path, "t.csv.gz", gzip.compress(b"\xff")))
    assert "Is a directory" in refusal(str(_made(tmp_path / "d.gz")))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_what_is_nowhere_is_refused_with_what_there_is(tmp_path: Path) -> None:
    found = refusal("no-such-trace.csv")
    assert found.startswith(
        "no workload 'no-such-trace.csv': no such file, no law (normal, lognormal, uniform, fixed, "
    )
    assert "C1, C2, G, S, T, alpaca" in found
    assert refusal("x" * 5000).startswith("no workload 'xxx")
    assert refusal("a\0b").startswith("no workload")
    assert refusal(str(tmp_path)).endswith("is a directory, not a file")


# --- laws -------------------------------------------------------------------------------------------------------------


def test_laws_on_the_command_line() -> None:
    fixed = load_workload("fixed:in=128;out=64")
    assert (fixed.inputs.tolist(), fixed.outputs.tolist(), fixed.weights.tolist()) == ([128], [64], [1.0])
    even = load_workload("uniform:in=16-240; out=1-3")
    assert (even.mean_input, even.mean_output, len(even.weights)) == pytest.approx((128, 2, 225 * 3))
    assert load_workload("normal:in=128,81,256;out=128,68,320").fingerprint == load_workload("T").fingerprint
    skewed = load_workload("lognormal:in=100,50,1000;out=100,200,4000").output_law
    assert (skewed.mean, skewed.std, skewed.max) == pytest.approx((100, 200, 4000), rel=1e-3)


def test_quantiles_a_user_knows() -> None:
    workload = load_workload("quantiles:in=p50:100,p90:300,p99:900;out=p50:40,p90:200,p99:600;rank_correlation=0.3")
    assert [workload.output_quantile(q) for q in (0.5, 0.9, 0.99)] == pytest.approx([40, 200, 600], rel=0.01)
    assert [workload.input_quantile(q) for q in (0.5, 0.9, 0.99)] == pytest.approx([100, 300, 900], rel=0.03)
    assert spearmanr(*workload.sample(4000, seed=0)).statistic == pytest.approx(0.3, abs=0.02)


def test_two_quantiles_make_a_lognormal() -> None:
    law = quantiles({50: 100, 90: 300})
    sigma = math.log(3) / 1.2815515655
    assert law.quantile(0.99) == pytest.approx(100 * math.exp(2.3263479 * sigma), rel=0.01)
    assert law.quantile(0.1) == pytest.approx(100 / 3, abs=1)


def test_a_law_file_says_the_same(tmp_path: Path) -> None:
    text = (
        "source: 'ours'\nrank_correlation: 0.3\n"
        "input: {uniform: {min: 16, max: 240}}\noutput: {quantiles: {p50: 40, p99: 600, p100: 700}}\n"
    )
    workload = load_workload(written(tmp_path, "ours.yaml", text))
    assert (workload.name, workload.source) == ("ours", "ours")
    assert (workload.max_input, workload.max_output) == (240, 700)
    assert workload.mean_input == pytest.approx(128)
    fixed = load_workload(written(tmp_path, "fixed.yaml", "input: {fixed: 128}\noutput: {fixed: {tokens: 64}}\n"))
    assert fixed.fingerprint == load_workload("fixed:in=128;out=64").fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixed:", "input must be one law (normal, lognormal, uniform, fixed, quantiles) with its parameters"),
        ("fixed:in=128", "output must be one law (normal, lognormal, uniform, fixed, quantiles) with its parameters"),
        ("fixed:in=128;out=0", "output: tokens must be a whole number from 1 to 10,000,000, found 0"),
        ("fixed:in=128;out=64;in=2", "'in=2' is not one of in=, out= and rank_correlation=, each once"),
        ("fixed:in=128;out=64;speed=2", "'speed=2' is not one of in=, out= and rank_correlation=, each once"),
        ("fixed:in=1,2;out=64", "fixed takes tokens; found '1,2'"),
        ("uniform:in=16;out=64-65", "uniform takes min, max; found '16'"),
        ("uniform:in=16-8;out=64-65", "input: a uniform law from 16 to 8 is empty"),
        ("uniform:in=1-9000000;out=1-2", "input: a uniform law may span 1,000,000 lengths, 1 to 9000000 is more"),
        ("normal:in=128,81;out=128,68,320", "normal takes mean, std, max; found '128,81'"),
        ("normal:in=300,81,256;out=128,68,320", "input: mean 300 must lie between 1 and the maximum 256"),
        ("normal:in=128,0,256;out=128,68,320", "input: std must be above 0, found 0; a single length is a fixed law"),
        ("normal:in=128,nan,256;out=128,68,320", "input: std must be a number, found nan"),
        (
            "lognormal:in=128,9,2000000;out=1,1,2",
            "input: a maximum of 2,000,000 is above 1,000,000 tokens, the largest",
        ),
        (
            "quantiles:in=p50:100;out=p50:1,p90:2",
            "input: a law of quantiles needs at least two, such as p50:100,p99:900",
        ),
        ("quantiles:in=p50:100,p90:50;out=p50:1,p90:2", "input: quantiles must not fall, but p50 is 100 and p90 is 50"),
        ("quantiles:in=p50:1,p50:2;out=p50:1,p90:2", "quantiles take points such as p50:100, each once; found 'p50:2'"),
        ("quantiles:in=p50:1,50:2;out=p50:1,p90:2", "input: quantile '50' must be one of p0 to p100, each once"),
        ("quantiles:in=p50:1,p900:2;out=p50:1,p90:2", "input: quantile 'p900' must be one of p0 to p100, each once"),
        ("quantiles:in=50;out=p50:1,p90:2", "quantiles take points such as p50:100, each once; found '50'"),
        ("quantiles:in=px:1,p9:2;out=p50:1,p90:2", "input: quantile 'px' must be a number, found x"),
        ("fixed:in=8;out=4;rank_correlation=1.5", "rank_correlation must lie between -1 and 1, found 1.5"),
        ("fixed:in=8;out=4;rank_correlation=much", "rank_correlation must be a number, found much"),
    ],
)
def test_a_bad_law_is_refused(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "input: {fixed: 1}\noutput: {fixed: 1}\nspeed: 3\n",
            "law.yaml: unknown field 'speed'; a law has source, licence,",
        ),
        ("input: {fixed: 1}\n", "law.yaml: output must be one law"),
        ("input: {fixed: 1}\noutput: 3\n", "law.yaml: output must be one law"),
        ("input: {fixed: 1}\noutput: {cauchy: 3}\n", "law.yaml: output must be one law"),
        ("input: {fixed: 1}\noutput: {[1]: 3}\n", "law.yaml is not valid YAML"),
        (
            "input: {fixed: 1}\noutput: {normal: {mean: 3}}\n",
            "law.yaml: output: normal takes mean, std, max; found {'mean': 3}",
        ),
        ("input: {fixed: 1}\noutput: {quantiles: 3}\n", "output: quantiles take points such as p50: 100, found 3"),
        ("input: {fixed: 1}\noutput: {quantiles: {p50: x, p90: 1}}\n", "output: p50 must be a number, found x"),
        ("- 1\n", "law.yaml must hold a mapping of names to values, found list"),
        (": :\n", "law.yaml is not valid YAML"),
    ],
)
def test_a_bad_law_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    assert message in refusal(written(tmp_path, "law.yaml", content))


law_words = st.sampled_from(
    ["in=", "out=", ";", ",", "-", "p50:", "p99:", "1", "7", "300", "0", "-2", "1e3", "nan", "é", " "]
)


@settings(deadline=None)
@given(st.sampled_from(["normal:", "uniform:", "fixed:", "quantiles:"]), st.lists(law_words, max_size=16).map("".join))
def test_a_law_is_read_or_refused(law: str, rest: str) -> None:
    with contextlib.suppress(InputError):
        assert load_workload(law + rest).weights.sum() == pytest.approx(1)


cells = st.sampled_from(
    [",", "\n", '"', "1", "20", "-1", "3.5", "input_tokens", "{", "}", ":", "\0", "\ufeff", "arrival_s"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["t.csv", "t.yaml", "t.csv.gz"]),
    st.lists(cells, max_size=20).map("".join),
    st.sampled_from(["", "input_tokens,output_tokens\n", '{"input_tokens": 1, "output_tokens": 2}\n']),
)
def test_a_file_is_read_or_refused(tmp_path: Path, name: str, content: str, start: str) -> None:
    data = (start + content).encode()
    path = written(tmp_path, name, gzip.compress(data) if name.endswith("gz") else data)
    with contextlib.suppress(InputError):
        assert load_workload(path).weights.sum() == pytest.approx(1)


# --- the mathematics of laws ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(2, 400), st.floats(0.6, 60), st.booleans())
def test_a_cut_normal_has_the_moments_asked_for(mean: float, std: float, logarithmic: bool) -> None:
    law = normal(mean, std, 500, logarithmic=logarithmic)
    assert law.mean == pytest.approx(mean, rel=1e-6)
    assert law.std <= std * (1 + 1e-4)
    if mean - 3 * std > 1 and mean + 3 * std < 500:
        assert law.std == pytest.approx(std, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.floats(-1, 1), st.integers(1, 60), st.integers(1, 400))
def test_joined_laws_stay_what_they_are(rank_correlation: float, shortest: int, spread: int) -> None:
    sides = uniform(shortest, shortest + spread), normal(40, 20, 200)
    inputs, outputs, weights = joint(*sides, rank_correlation)
    workload = Workload.of("any", inputs=inputs, outputs=outputs, weights=weights)
    for law, side in ((workload.input_law, sides[0]), (workload.output_law, sides[1])):
        assert law.mean == pytest.approx(side.mean, rel=1e-4)
        assert law.std == pytest.approx(side.std, rel=1e-4)


@pytest.mark.parametrize("rank_correlation", [-1, -0.9, -0.3, 0, 0.5, 0.99, 1])
def test_rank_correlation_is_the_one_asked_for(rank_correlation: float) -> None:
    inputs, outputs, weights = joint(normal(128, 60, 256), normal(60, 30, 160), rank_correlation)
    workload = Workload.of("any", inputs=inputs, outputs=outputs, weights=weights)
    assert spearmanr(*workload.sample(20_000, seed=0)).statistic == pytest.approx(rank_correlation, abs=0.01)


@pytest.mark.parametrize("rank_correlation", [0, 0.5])
def test_long_supports_are_coarsened_without_moving_the_mean(rank_correlation: float) -> None:
    sides = uniform(1, 100_000), normal(3000, 900, 9000)
    inputs, outputs, weights = joint(*sides, rank_correlation)
    assert len(weights) <= 1 << 18
    assert (inputs @ weights, outputs @ weights) == pytest.approx((sides[0].mean, sides[1].mean), rel=1e-3)
    assert (inputs.max(), outputs.max()) == (sides[0].max, sides[1].max)


percents = st.lists(st.sampled_from([0, 0.1, 1, 5, 25, 50, 75, 90, 99, 99.9, 100]), min_size=2, max_size=8, unique=True)


@settings(deadline=None)
@given(percents, st.lists(st.integers(1, 10_000), min_size=8, max_size=8))
def test_a_law_of_quantiles_goes_through_them(percent: list[float], tokens: list[int]) -> None:
    points = dict(zip(sorted(percent), sorted(tokens), strict=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        law = quantiles(points)
    for p, length in points.items():
        if 0.1 <= p <= 99.9:  # A whole length below or above: lengths are rounded, and 20,000 points make the curve.
            assert law.quantile(p / 100 - 2e-4) <= length + 1
            assert law.quantile(p / 100 + 2e-4) >= length - 1
    if 100 in points:
        assert law.max == points[100]
    assert np.isfinite(law.weights).all()
    assert law.weights.sum() == pytest.approx(1)
