"""A datasheet's profile is the roofline it states: no row beats the device, all rise with work, every constant counts.

Against measured tables: `EXEPLAN_DATA=FOLDER python -m pytest tests/profiler/datasheets/test_datasheet.py`, where
FOLDER holds `aiconfigurator/tidy_bf16/`.
"""

import csv
import gzip
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from exeplan.cli import main
from exeplan.core.cluster import load_cluster
from exeplan.core.models.layer_costs import (
    embedding_parameters,
    layer_parameters_read,
    layer_parameters_used,
    model_parameters,
)
from exeplan.core.models.model import ModelSpec, load_model_spec, model_spec
from exeplan.core.models.sparse_layers import Experts
from exeplan.core.profile import Measurement, Profile, load_profile, save_profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.files import shipped, shipped_names
from exeplan.profiler.datasheets.datasheet import (
    load_datasheet,
    other_links,
    profile_from_datasheet,
    routed_seconds,
    with_links,
)
from exeplan.profiler.datasheets.roofline import (
    Datasheet,
    all_reduce_seconds,
    decode_attention_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    latent_decode_seconds,
    prefill_attention_seconds,
)

MODELS = ("opt-13b", "llama-3.1-8b", "t5-11b", "qwen3-30b-a3b", "deepseek-v2-lite")


@pytest.fixture(scope="module")
def sheet() -> Datasheet:
    return load_datasheet("a100-80gb")


@pytest.fixture
def plain(sheet: Datasheet) -> Datasheet:
    """A device to calculate in the head: 100 TFLOP/s, 1 TB/s, all of it attained, a microsecond a kernel."""
    return replace(
        sheet,
        float16_flops=100e12,
        memory_bandwidth=1e12,
        gemm_latency=1e-6,
        gemm_efficiency=1.0,
        gemm_bandwidth_efficiency=1.0,
        gemm_sharpness=1.0,
        prefill_attention_latency=1e-6,
        prefill_attention_efficiency=0.5,
        prefill_attention_bandwidth_efficiency=1.0,
        decode_attention_latency=1e-6,
        decode_attention_efficiency=0.5,
        decode_attention_seconds_per_head=1e-8,
        all_reduce_latency=10e-6,
        all_reduce_step_latency=1e-6,
        all_reduce_efficiency=0.5,
        all_reduce_ramp=100e-6,
        intra_bandwidth=100e9,
    )


def profile_of(model: str, sheet: Datasheet) -> Profile:
    return profile_from_datasheet(load_model_spec(model), sheet, dtype="float16")


def rows(profile: Profile, op: str, phase: str = "", size: int = 1) -> list[Measurement]:
    return [m for m in profile.measurements if (m.op, m.phase, m.tensor_parallel_size) == (op, phase, size)]


def test_kernels_by_hand(plain: Datasheet) -> None:
    # 2 * 1000^3 operations take 20 us, 6 MB take 6 us.
    assert gemm_seconds(plain, "float16", 1000, 1000, 1000) == pytest.approx(27e-6)
    # 2 prompts of 1000: 2 * 500,000 pairs * 4 * 800 elements at 50 TFLOP/s, and 2000 * 2 * (8 + 2) * 100 * 2 bytes.
    assert prefill_attention_seconds(
        plain, "float16", num_seqs=2, tokens=1000, heads=8, kv_heads=2, head_dim=100, causal=True
    ) == pytest.approx(1e-6 + 64e-6 + 8e-6)
    # 4 sequences with 10,000 tokens in all: 2 * 10,000 * 2 * 100 * 2 bytes at 0.5 TB/s, and 8 times 10 ns.
    assert decode_attention_seconds(
        plain, "float16", num_seqs=4, context_tokens=10_000, kv_heads=2, head_dim=100
    ) == pytest.approx(1e-6 + 16e-6 + 0.08e-6)
    # 100 rows to 10 of 1000 x 1000: 0.2 GFLOP take 2 us, 20 MB and 400 KB take 20.4 us.
    assert grouped_gemm_seconds(plain, "float16", 100, 1000, 1000, num_groups=10) == pytest.approx(
        1e-6 + 2e-6 + 20.4e-6
    )
    # 10,000 tokens of 500 values: 10 MB at 0.5 TB/s; 8 heads, 2 * 900 operations each at 50 TFLOP/s; 4 times 10 ns.
    assert latent_decode_seconds(
        plain, "float16", num_seqs=4, context_tokens=10_000, heads=8, rank=400, rope_dim=100
    ) == pytest.approx(1e-6 + 20e-6 + 2.88e-6 + 0.04e-6)
    # Of 1 MB 1.5 MB pass each wire at 50 GB/s: 30 us, and sqrt(100 us * 30 us) to fill the pipeline.
    assert all_reduce_seconds(plain, "intra", 4, 1e6) == pytest.approx(10e-6 + 3e-6 + 30e-6 + (100e-6 * 30e-6) ** 0.5)


def test_fp8_halves_what_products_read_and_leaves_the_rest(plain: Datasheet) -> None:
    sheet, spec = replace(plain, bfloat16_flops=100e12, fp8_flops=200e12), load_model_spec("llama-3.1-8b")
    # 2 * 1000^3 operations take 10 us; 2 MB are read, and 2 MB written.
    assert gemm_seconds(sheet, "fp8", 1000, 1000, 1000) == pytest.approx(1e-6 + 10e-6 + 4e-6)
    both = [
        profile_from_datasheet(spec, sheet, dtype=dtype, kv_dtype="bfloat16", tensor_parallel_sizes=(1,))
        for dtype in ("bfloat16", "fp8")
    ]
    around = 2 * embedding_parameters(spec)
    assert both[1].weight_bytes == model_parameters(spec) + around
    for wide, narrow in zip(both[0].measurements, both[1].measurements, strict=True):
        if wide.op == "rest":
            assert 0.4 < narrow.seconds / wide.seconds < 1
        else:
            assert narrow.seconds == wide.seconds
    narrow_cache = profile_from_datasheet(spec, sheet, dtype="fp8", tensor_parallel_sizes=(1,))
    assert narrow_cache.cache_dtype == "fp8"
    pairs = zip(rows(both[1], "attention", "decode"), rows(narrow_cache, "attention", "decode"), strict=True)
    assert all(narrow.seconds < wide.seconds for wide, narrow in pairs)


def test_a_sharper_norm_comes_closer_to_the_larger_limit(plain: Datasheet) -> None:
    times = [gemm_seconds(replace(plain, gemm_sharpness=p), "float16", 1000, 1000, 1000) for p in (1, 2, 100)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(21e-6)


@pytest.mark.parametrize("name", shipped_names("devices"))
@pytest.mark.parametrize("model", MODELS)
def test_a_profile_survives_its_file(name: str, model: str, tmp_path: Path) -> None:
    profile = profile_of(model, load_datasheet(name))
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert profile.source.split(",")[0] == f"datasheet {name}"
    assert profile.tensor_parallel_sizes == (1, 2, 4, 8)
    assert profile.weight_bytes == 2 * model_parameters(profile.model)


@pytest.mark.parametrize("model", MODELS)
def test_more_work_takes_longer(model: str, sheet: Datasheet) -> None:
    curves: dict[tuple[object, ...], list[tuple[int, float]]] = defaultdict(list)
    for m in profile_of(model, sheet).measurements:
        work = {"attention": m.num_tokens + m.context_tokens, "rest": m.num_tokens, "embed": m.num_tokens}
        key = (m.op, m.phase, m.tensor_parallel_size, m.num_seqs if m.op == "attention" else 0)
        curves[key].append((work.get(m.op, m.bytes or m.num_seqs), m.seconds))
    for curve, points in curves.items():
        times = [seconds for _, seconds in sorted(points)]
        assert times == sorted(times), curve
        assert len({x for x, _ in points}) == len(points) > 5, curve


def test_between_its_lengths_a_quadratic_is_interpolated_to_1_3_percent(sheet: Datasheet) -> None:
    prompts = rows(profile_of("llama-3.1-8b", sheet), "attention", "prefill")
    lengths = np.array(sorted({m.num_tokens for m in prompts if m.num_seqs == 1}), dtype=float)
    asked = np.arange(1.0, lengths[-1] + 1)
    assert 1.012 < (np.interp(asked, lengths, lengths**2) / asked**2).max() < 1.013


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [1, 8])
def test_no_layer_beats_the_device(model: str, size: int, sheet: Datasheet) -> None:
    """Its products alone compute and read this much."""
    profile = profile_of(model, sheet)
    for phase in ("prefill", "decode") if profile.model.is_encoder_decoder else ("",):
        for m in rows(profile, "rest", phase, size):
            used = layer_parameters_used(profile.model, encoder=phase == "prefill") / size
            read = layer_parameters_read(profile.model, m.num_tokens, encoder=phase == "prefill") / size
            assert m.seconds > 2 * used * m.num_tokens / sheet.float16_flops
            assert m.seconds > 2 * read / sheet.memory_bandwidth


def test_key_value_heads_are_replicated_where_there_are_fewer_than_devices(sheet: Datasheet) -> None:
    spec = load_model_spec("llama-3.1-8b")
    profile = profile_from_datasheet(spec, sheet, dtype="float16", tensor_parallel_sizes=(4, 8, 16))
    four, eight, sixteen = ([m.seconds for m in rows(profile, "attention", "decode", t)] for t in (4, 8, 16))
    assert eight == sixteen
    assert all(a > b for a, b in zip(four, eight, strict=True))


def test_sizes_that_do_not_share_the_heads_are_left_out_or_refused(sheet: Datasheet) -> None:
    spec = replace(load_model_spec("opt-13b"), num_heads=20, num_kv_heads=20)
    assert profile_from_datasheet(spec, sheet, dtype="float16").tensor_parallel_sizes == (1, 2, 4)
    with pytest.raises(InputError, match=r"size 8 does not divide the 20 heads of opt-13b; 1, 2, 4, 5, 10 do"):
        profile_from_datasheet(spec, sheet, dtype="float16", tensor_parallel_sizes=(1, 8))


def test_an_encoder_sees_both_ways_and_a_decoder_layer_attends_twice(plain: Datasheet) -> None:
    t5 = load_model_spec("t5-11b")
    alone = replace(t5, num_encoder_layers=0)
    both, causal = (
        next(m for m in rows(profile, "attention", "prefill") if (m.num_seqs, m.num_tokens) == (1, 1024)).seconds
        for profile in (profile_of_spec(t5, plain), profile_of_spec(alone, plain))
    )
    assert both - causal == pytest.approx(4 * 1024 * 512 * 128 * 128 / 50e12)
    twice, once = (
        next(m for m in rows(profile, "attention", "decode") if (m.num_seqs, m.context_tokens) == (4, 4096)).seconds
        for profile in (profile_of_spec(t5, plain), profile_of_spec(alone, plain))
    )
    assert twice - once == pytest.approx(1e-6 + 4 * 128 * 1e-8)


def profile_of_spec(spec: ModelSpec, sheet: Datasheet) -> Profile:
    return profile_from_datasheet(spec, sheet, dtype="float16", tensor_parallel_sizes=(1,))


def test_encoder_layers_answer_for_all_cross_keys_of_the_decoder(plain: Datasheet) -> None:
    """With twice the decoder layers each encoder layer computes one more product of [tokens, hidden] and its keys."""
    t5 = load_model_spec("t5-11b")
    one, two = (
        next(m for m in rows(profile_of_spec(spec, plain), "rest", "prefill") if m.num_tokens == 1024).seconds
        for spec in (t5, replace(t5, num_layers=48))
    )
    assert two - one == pytest.approx(gemm_seconds(plain, "float16", 1024, 2 * 128 * 128, 1024))


def test_an_override_counts_and_is_named(sheet: Datasheet) -> None:
    slow = load_datasheet("a100-80gb", {"gemm_efficiency": "0.4", "host_seconds": "3ms"})
    assert (slow.gemm_efficiency, slow.host_seconds) == (0.4, 0.003)
    profile = profile_of("opt-13b", slow)
    assert profile.source == "datasheet a100-80gb, gemm_efficiency=0.4, host_seconds=3ms"
    assert rows(profile, "rest")[-1].seconds > 2 * rows(profile_of("opt-13b", sheet), "rest")[-1].seconds


def test_a_clusters_links_replace_the_sheets(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(shipped("clusters", "a100").read_text().replace("22.5GB", "1GB"))
    profile = profile_of("opt-13b", with_links(load_datasheet("a100-80gb"), load_cluster(str(path))))
    assert profile.source == "datasheet a100-80gb, links of cluster slow"
    longest = max(rows(profile, "send", "inter"), key=lambda m: m.bytes)
    assert longest.seconds == pytest.approx(longest.bytes / 1e9 + 15e-6)


def test_links_that_a_profile_has_otherwise_than_its_cluster_are_said(tmp_path: Path, sheet: Datasheet) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text(shipped("clusters", "a100").read_text().replace("22.5GB", "1GB"))
    profile, slow = profile_of("opt-13b", sheet), load_cluster(str(path))
    (sentence,) = other_links(profile, slow)
    assert sentence == (
        "the times of links are the profile's (datasheet a100-80gb), not those of cluster slow; make the profile with "
        f"--cluster {path} to plan by these"
    )
    assert other_links(profile, slow.part(8)) == [], "the nodes' own links are alike"
    assert other_links(profile, load_cluster("a100")) == []
    assert other_links(profile_of("opt-13b", with_links(sheet, slow)), slow) == []
    assert other_links(replace(profile, source="measured"), slow) == []


def test_between_nodes_everything_takes_longer(sheet: Datasheet) -> None:
    profile = profile_of("opt-13b", sheet)
    for op, size in (("send", 1), ("all_reduce", 2), ("all_reduce", 8)):
        for near, far in zip(rows(profile, op, "intra", size), rows(profile, op, "inter", size), strict=True):
            assert near.bytes == far.bytes
            assert near.seconds < far.seconds


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gemm_efficiency: 0.85", "", "datasheet 'mine' lacks gemm_efficiency"),
        (
            "gemm_efficiency",
            "gemm_efficency",
            "datasheet 'mine': no constant 'gemm_efficency'; the nearest is gemm_eff",
        ),
        ("kind: cuda", "kind: tpu", "datasheet 'mine': kind must be cpu or cuda, found 'tpu'"),
        (
            "312e12",
            ".nan",
            "datasheet 'mine': bfloat16_flops must be a number from 0 to 1e\\+20, above zero, found 'nan'",
        ),
        (" 8us", " [8]", r"datasheet 'mine': intra_latency must be a duration such as 2s, 500ms or 1m, found '\[8\]'"),
    ],
)
def test_a_wrong_datasheet_is_refused_by_its_constant(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(shipped("devices", "a100-80gb").read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        load_datasheet(str(path))


def command(*options: str) -> list[str]:
    return ["profile", "opt-13b", "-o", "p.json", *options]


def test_the_command_writes_the_profile_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--datasheet", "a40-48gb", "--cluster", "a40", "--set", "gemm_efficiency=0.6")
    assert main(command(*options, "--tensor-parallel-sizes", "1,4", "--dtype", "float16")) == 0
    profile = load_profile(tmp_path / "p.json")
    assert profile.tensor_parallel_sizes == (1, 4)
    assert capsys.readouterr().out.splitlines() == [
        "opt-13b in float16 on a40-48gb: datasheet a40-48gb, gemm_efficiency=0.6, links of cluster a40",
        f"wrote p.json: {len(profile.measurements)} rows, tensor parallel sizes 1, 4",
    ]


MEASURING = (
    ("--budget", "60s"),
    ("--target-error", "0.03"),
    ("--weights", "auto"),
    ("--threads", "1"),
    ("--devices", "1"),
    ("--max-num-seqs", "8"),
    ("--max-context", "512"),
)
"""Options of measuring, with values that they have by default or may have."""
AXES = ("op", "phase", "tensor_parallel_size", "num_seqs", "num_tokens", "context_tokens", "bytes", "seconds")


def test_timings_of_others_are_imported(
    tmp_path: Path, sheet: Datasheet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with open("times.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(AXES)
        rows = (*profile_of("opt-13b", sheet).measurements, Measurement(op="control", num_seqs=1, seconds=1e-3))
        table.writerows([getattr(m, axis) for axis in AXES] for m in rows)
    argv = ["profile", "import", "times.csv", "--model", "opt-13b", "--device", "a100-80gb", "-o", "p.json"]
    assert main([*argv, "--tensor-parallel-sizes", "1,4"]) == 0
    profile = load_profile(tmp_path / "p.json")
    assert profile.tensor_parallel_sizes == (1, 4)
    assert {m.tensor_parallel_size for m in profile.measurements if m.op == "all_reduce"} == {4}
    assert {m.phase for m in profile.measurements if m.op == "send"} == {"intra", "inter"}
    assert main([*argv, "--tensor-parallel-sizes", "4"]) == 0
    assert {m.op for m in load_profile(tmp_path / "p.json").measurements} >= {"overhead", "control", "send"}
    assert main([*argv, "--tensor-parallel-sizes", "1,4"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "opt-13b in bfloat16 on a100-80gb: imported csv",
        f"wrote p.json: {len(profile.measurements)} rows, tensor parallel sizes 1, 4",
    ]
    assert main([*argv, "--tensor-parallel-sizes", "1,16"]) == 2
    refusal = "exeplan profile: no rows of tensor parallel size 16 were imported; there are sizes 1, 2, 4, 8\n"
    assert capsys.readouterr().err == refusal


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (command("--datasheet", "b300"), "no datasheet file or shipped datasheet 'b300'; shipped are a100-40gb, a100-"),
        (command("--datasheet", "no.yaml"), "no file no.yaml"),
        (command("--datasheet", "a100-80gb", "--set", "x"), "--set needs NAME=VALUE, such as gemm_efficiency=0.6, fou"),
        (command("--datasheet", "a100-80gb", "--set", "gemm=1"), "datasheet 'a100-80gb': no constant 'gemm'; the near"),
        (
            command("--datasheet", "a100-80gb", "--set", "gemm_efficiency=2"),
            "datasheet 'a100-80gb': gemm_efficiency must be a number from 0 to 1, above zero, found '2'",
        ),
        (
            command("--datasheet", "a100-80gb", "--set", "gemm_efficiency=nan"),
            "datasheet 'a100-80gb': gemm_efficiency must be a number from 0 to 1, above zero, found 'nan'",
        ),
        (
            command("--datasheet", "a100-80gb", "--set", "host_seconds=soon"),
            "datasheet 'a100-80gb': host_seconds must be a duration such as 2s, 500ms or 1m, found 'soon'",
        ),
        (
            command("--datasheet", "a100-80gb", "--set", "host_seconds=inf"),
            "datasheet 'a100-80gb': host_seconds must be finite, found 'inf'",
        ),
        (
            command("--datasheet", "a100-80gb", "--set", "memory=1GB", "--set", "memory=2GB"),
            "--set gives memory twice, 1GB and 2GB",
        ),
        (
            command("--datasheet", "a100-80gb", "--cluster", "a40"),
            "cluster a40 has a40-48gb devices, the datasheet is of a100-80gb; take --datasheet a40-48gb",
        ),
        (
            command("--datasheet", "a100-80gb", "--cluster", "b1"),
            "no cluster file or shipped cluster 'b1'; shipped are",
        ),
        (
            command("--datasheet", "a100-80gb", "--tensor-parallel-sizes", "1,two"),
            "--tensor-parallel-sizes must be whole numbers such as 1,2,4, found '1,two'",
        ),
        (
            command("--datasheet", "a100-80gb", "--tensor-parallel-sizes", "3"),
            "tensor parallel size 3 does not divide the 40 heads of opt-13b; 1, 2, 4, 5, 8, 10 do",
        ),
        (command("--set", "gemm_efficiency=0.5"), "--set goes with --datasheet NAME"),
        (command("--cluster", "a40"), "--cluster goes with --datasheet NAME"),
        (command("--overhead", "5ms"), "--overhead goes with `exeplan profile import FILE... --model MODEL`"),
        (
            ["profile", "a", "b", "-o", "p"],
            "a second argument goes with `exeplan profile import FILE... --model MODEL`",
        ),
        *(
            (
                command("--datasheet", "a100-80gb", *option),
                f"{option[0]} goes with measuring on this device, not with --datasheet",
            )
            for option in (*MEASURING, ("--device", "cpu"))
        ),
        *(
            (
                ["profile", "import", "t.csv", "-o", "p", "--model", "demo", "--device", "d", *option],
                f"{option[0]} goes with measuring on this device, not with `profile import`",
            )
            for option in MEASURING
        ),
        (["profile", "import", "-o", "p"], "profile import needs at least one FILE of timings"),
        (["profile", "import", "t.csv", "-o", "p"], "profile import needs --model MODEL and --device NAME"),
        (
            ["profile", "import", "t.csv", "-o", "p", "--datasheet", "a100-80gb"],
            "--datasheet goes with a model and its datasheet, not with `profile import`",
        ),
        (
            ["profile", "import", "t.csv", "-o", "p", "--model", "demo", "--device", "d", "--overhead", "inf"],
            "--overhead must be finite, found 'inf'",
        ),
        (
            ["profile", "import", "t.csv", "-o", "p", "--model", "nope", "--device", "d"],
            "no model directory or shipped model 'nope'",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"exeplan profile: {message}")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def tables(system: str, op: str) -> Iterator[dict[str, str]]:
    """Rows of one table of AIConfigurator, 128 elements a head where there are heads."""
    if "EXEPLAN_DATA" not in os.environ:
        pytest.skip("measured tables are compared when EXEPLAN_DATA names their folder")
    path = Path(os.environ["EXEPLAN_DATA"]) / "aiconfigurator" / "tidy_bf16" / f"{system}.{op}.csv.gz"
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row.get("head_dim", "128") == "128":
                yield row


def predicted(sheet: Datasheet, op: str, row: dict[str, str]) -> float | None:
    """Seconds of a table's row; None for shapes that no layer has."""
    if op == "gemm":
        m, n, k = (int(row[axis]) for axis in ("m", "n", "k"))
        return gemm_seconds(sheet, "bfloat16", m, n, k) if min(n, k) >= 512 else None
    if op == "all_reduce":
        size = 2 * int(row["message_size"])
        nccl = row["kernel_source"] == "NCCL"
        return all_reduce_seconds(sheet, "intra", int(row["num_gpus"]), size) if nccl else None
    num_seqs, tokens, heads, kv_heads = (int(row[a]) for a in ("batch_size", "kv_len", "n_q_head", "n_kv_head"))
    if heads < 4 or heads > 16 * kv_heads or (op == "prefill_attention" and tokens < 16):
        return None
    if op == "decode_attention":
        context = num_seqs * tokens
        return decode_attention_seconds(
            sheet, "bfloat16", num_seqs=num_seqs, context_tokens=context, kv_heads=kv_heads, head_dim=128
        )
    return prefill_attention_seconds(
        sheet, "bfloat16", num_seqs=num_seqs, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=128, causal=True
    )


@pytest.mark.parametrize("op", ["gemm", "prefill_attention", "decode_attention", "all_reduce"])
@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "h200_sxm"])
def test_the_median_error_against_measured_tables_is_under_ten_percent(system: str, op: str) -> None:
    sheet = load_datasheet({"a100_sxm": "a100-80gb", "h100_sxm": "h100-80gb", "h200_sxm": "h200-141gb"}[system])
    errors = [
        abs(1e3 * seconds / float(row["latency_ms"]) - 1)
        for row in tables(system, op)
        if (seconds := predicted(sheet, op, row)) is not None
    ]
    assert len(errors) > 60
    assert median(errors) < 0.10


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm"])
def test_experts_against_measured_tables(system: str) -> None:
    """vLLM's kernels, with the constants of dense products: half of the shapes within a fifth, none of it one-sided."""
    if "EXEPLAN_DATA" not in os.environ:
        pytest.skip("measured tables are compared when EXEPLAN_DATA names their folder")
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    sheet = load_datasheet({"h100_sxm": "h100-80gb", "h200_sxm": "h200-141gb"}[system])
    (path,) = Path(os.environ["EXEPLAN_DATA"]).glob(f"aiconfigurator/{system}/moe/vllm/*/moe_perf.parquet")
    table = pandas.read_parquet(path)
    alike = table[(table.moe_dtype == "bfloat16") & (table.moe_ep_size == 1) & (table.distribution == "balanced")]
    ratios = []
    for row in alike.itertuples():
        experts = Experts(count=row.num_experts, per_token=row.topk, width=row.inter_size, num_layers=1)
        seconds = routed_seconds(experts, row.hidden_size, sheet, "bfloat16", Sharding(row.moe_tp_size), row.num_tokens)
        ratios.append(1e3 * seconds / row.latency)
    assert len(ratios) > 2000
    assert 0.9 < median(ratios) < 1.1
    assert median(abs(ratio - 1) for ratio in ratios) < 0.2


def test_a_sliding_window_bounds_the_time_of_attention(sheet: Datasheet) -> None:
    full = load_model_spec("mistral-7b")
    windows = {"all": 4096, "half": 4096, "none": None}
    specs = {name: model_spec({**full.config, "sliding_window": window}, name=name) for name, window in windows.items()}
    kinds = ["sliding_attention", "full_attention"] * (full.num_layers // 2)
    specs["half"] = model_spec({**specs["half"].config, "layer_types": kinds}, name="half")
    rows = {name: profile_from_datasheet(spec, sheet, dtype="bfloat16").measurements for name, spec in specs.items()}
    for every, some, no in zip(rows["all"], rows["half"], rows["none"], strict=True):
        within = (no.num_tokens or no.context_tokens) <= 4096 * no.num_seqs
        assert every.seconds == no.seconds if within or no.op != "attention" else every.seconds < no.seconds
        assert some.seconds == pytest.approx((every.seconds + no.seconds) / 2)


def test_a_layer_s_products_in_fp8_take_their_own_constants_and_experts_do_not() -> None:
    sheet = load_datasheet("h100-80gb")
    names = ("latency", "efficiency", "bandwidth_efficiency", "sharpness")
    alike = replace(sheet, **{f"fp8_gemm_{name}": None for name in names})
    shape = (4096, 8192, 8192)
    assert gemm_seconds(sheet, "fp8", *shape) > 1.3 * gemm_seconds(alike, "fp8", *shape)
    assert gemm_seconds(sheet, "fp8", *shape) < gemm_seconds(sheet, "bfloat16", *shape)
    assert gemm_seconds(sheet, "bfloat16", *shape) == gemm_seconds(alike, "bfloat16", *shape)
    experts = (grouped_gemm_seconds(one, "fp8", *shape, num_groups=8.0) for one in (sheet, alike))
    assert len(set(experts)) == 1


def test_uneven_routing_reads_fewer_experts_and_waits_for_a_busier_device(sheet: Datasheet) -> None:
    spec, whole = load_model_spec("qwen3-30b-a3b"), Sharding(8, expert_parallel_size=8)

    def profiled(routing: str) -> Profile:
        given = {"dtype": "bfloat16", "tensor_parallel_sizes": (1, 8), "shardings": (whole,), "routing": routing}
        return profile_from_datasheet(spec, sheet, **given)

    even, uneven = profiled("even"), profiled("power_law_1.2")
    assert uneven.source == "datasheet a100-80gb, routing power_law_1.2"
    seconds = [
        {m.num_tokens: m.seconds for m in one.measurements if m.op == "rest" and m.sharding == sharding}
        for sharding in (Sharding(1), whole)
        for one in (even, uneven)
    ]
    alone, alone_uneven, divided, divided_uneven = seconds
    assert alone_uneven[32] < alone[32]
    assert divided_uneven[4096] > 1.2 * divided[4096]
    for curve in seconds:
        assert [curve[tokens] for tokens in sorted(curve)] == sorted(curve.values())
    with pytest.raises(InputError, match=r"routing 'power_law_1\.2' is of mixtures of experts, and opt-13b is none"):
        profile_from_datasheet(load_model_spec("opt-13b"), sheet, dtype="bfloat16", routing="power_law_1.2")
