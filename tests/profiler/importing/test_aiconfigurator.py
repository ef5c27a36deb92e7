"""AIConfigurator's tables become a profile of any decoder-only model: products by size, attention by heads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exeplan.core.models.layer_costs import layer_parameters, model_parameters
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Measurement, Profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.profiler.datasheets.datasheet import load_datasheet
from exeplan.profiler.datasheets.roofline import gemm_seconds
from exeplan.profiler.importing import import_profile
from exeplan.profiler.importing.gemm import roofline_seconds
from exeplan.profiler.importing.pointwise import embed_seconds, layer_seconds, sampling_seconds

from .toy import table, toy_spec

SHEET = load_datasheet("h100-80gb")
TOKENS = (1, 16, 256, 4096)


@pytest.fixture
def spec() -> ModelSpec:
    return toy_spec("toy", intermediate_size=3072, vocab_size=8192)


def product_seconds(m: int, n: int, k: int) -> float:
    """Twice the roofline."""
    return 2 * float(roofline_seconds(np.array([float(m)]), n, k, SHEET.bfloat16_flops, SHEET.memory_bandwidth)[0])


def prefill_ms(heads: int, num_seqs: int, tokens: int) -> float:
    return 0.01 + 1e-9 * heads * num_seqs * tokens**2


def decode_ms(kv_heads: int, num_seqs: int, cached: int) -> float:
    return 0.01 + 1e-6 * kv_heads * num_seqs * cached


def tables(folder: Path, system: str = "h100_sxm") -> Path:
    """The four tidied tables of one system: heads of degrees 1, 2 and 4 of the toy model."""
    folder.mkdir(exist_ok=True)
    sizes = (256, 512, 1024, 2048, 4096, 8192)
    gemm = (
        {"kernel_source": "linear", "m": m, "n": n, "k": k, "latency_ms": product_seconds(m, n, k) * 1e3}
        for m in TOKENS
        for n in sizes
        for k in sizes
    )
    heads = {"kernel_source": "fa3", "head_dim": 128}
    shapes = ((8, 2), (4, 1), (2, 1))
    prefill = (
        heads
        | {"batch_size": n, "isl": x, "kv_len": x, "n_q_head": q, "n_kv_head": k, "latency_ms": prefill_ms(q, n, x)}
        for q, k in shapes
        for n in (1, 2)
        for x in (1, 64, 512, 4096)
    )
    decode = (
        heads
        | {"batch_size": n, "isl": 1, "kv_len": x, "n_q_head": q, "n_kv_head": k, "latency_ms": decode_ms(k, n, x - 1)}
        for q, k in shapes
        for n in (1, 16)
        for x in (2, 64, 512, 4096)
    )
    sums = (
        {"kernel_source": source, "num_gpus": n, "message_size": size, "latency_ms": ms + size * 1e-8}
        for source, ms in (("vLLM_custom_eager", 0.02), ("vLLM_custom_graph", 0.005), ("NCCL", 0.001))
        for n in (2, 4)
        for size in (1024, 4096)
    )
    table(folder / f"{system}.gemm.csv.gz", gemm)
    table(folder / f"{system}.prefill_attention.csv.gz", prefill)
    table(folder / f"{system}.decode_attention.csv.gz", decode)
    table(folder / f"{system}.all_reduce.csv.gz", sums)
    table(folder / "served.csv", [{"isl": 1024, "ttft": 3.0}])
    return folder


def row(profile: Profile, op: str, **axes: object) -> Measurement:
    (found,) = [
        m for m in profile.measurements if m.op == op and all(getattr(m, name) == value for name, value in axes.items())
    ]
    return found


@pytest.fixture
def imported(tmp_path: Path, spec: ModelSpec) -> tuple[Profile, tuple[str, ...]]:
    return import_profile([tables(tmp_path / "tables")], spec=spec, device="h100-80gb")


def test_a_layer_is_its_products_and_the_kernels_that_move_bytes(
    imported: tuple[Profile, tuple[str, ...]], spec: ModelSpec
) -> None:
    profile, _ = imported
    assert profile.source == "imported aiconfigurator"
    for degree in (1, 2):
        queries, keys, width = 1024 // degree, 256 // degree, 3072 // degree
        products = [(queries + 2 * keys, 1024), (1024, queries), (2 * width, 1024), (1024, width)]
        expected = sum(product_seconds(256, n, k) for n, k in products) + layer_seconds(SHEET, spec, 256, degree)
        assert row(profile, "rest", num_tokens=256, tensor_parallel_size=degree).seconds == pytest.approx(
            expected, rel=1e-5
        )


def test_products_that_were_not_measured_are_said_with_the_error(imported: tuple[Profile, tuple[str, ...]]) -> None:
    _, said = imported
    (line,) = [line for line in said if line.startswith("products of ")]
    assert line.startswith("products of n x k = 1536x1024, 6144x1024, 1024x3072, 768x1024, 3072x1024, 1024x1536, ")
    assert line.endswith("measured sizes left out are missed by 0.0% (median), 0.0% (90th percentile)")


def test_head_and_embedding(imported: tuple[Profile, tuple[str, ...]], spec: ModelSpec) -> None:
    profile, _ = imported
    head = row(profile, "head", num_seqs=16, tensor_parallel_size=2)
    assert head.seconds == pytest.approx(product_seconds(16, 4096, 1024) + sampling_seconds(SHEET, spec, 16), rel=1e-5)
    assert not [m for m in profile.measurements if m.op == "head" and m.num_seqs > 2048]
    embed = row(profile, "embed", num_tokens=16, tensor_parallel_size=1)
    assert embed.seconds == pytest.approx(embed_seconds(SHEET, spec, 16), rel=1e-5)


def test_attention_is_that_of_the_shard_s_heads(imported: tuple[Profile, tuple[str, ...]]) -> None:
    profile, said = imported
    prefill = row(profile, "attention", phase="prefill", num_seqs=2, num_tokens=1024, tensor_parallel_size=2)
    assert (prefill.seconds, prefill.repeats) == (pytest.approx(prefill_ms(4, 2, 512) * 1e-3, rel=1e-5), 1)
    # The table counts the new token too, a profile only those in the cache.
    decode = row(profile, "attention", phase="decode", num_seqs=16, context_tokens=16 * 511, tensor_parallel_size=4)
    assert (decode.seconds, decode.repeats) == (pytest.approx(decode_ms(1, 16, 511) * 1e-3, rel=1e-5), 1)
    eighth = row(profile, "attention", phase="prefill", num_seqs=2, num_tokens=1024, tensor_parallel_size=8)
    assert eighth.repeats == 0
    assert "prefill attention of 1/1/128 (query heads/key-value heads/dimension) is not in the tables: " in "\n".join(
        said
    )


def test_all_reduces_are_those_of_graphs_by_bytes(imported: tuple[Profile, tuple[str, ...]]) -> None:
    profile, said = imported
    found = {
        (m.phase, m.tensor_parallel_size, m.bytes): m.seconds for m in profile.measurements if m.op == "all_reduce"
    }
    assert found == pytest.approx(
        {("intra", n, 2 * size): (0.005 + size * 1e-8) * 1e-3 for n in (2, 4) for size in (1024, 4096)}
    )
    assert any(
        line.startswith("all_reduce: message sizes count elements of 2 bytes; kernels in CUDA graphs") for line in said
    )


def test_without_graphs_the_fastest_kernel_counts(tmp_path: Path, spec: ModelSpec) -> None:
    import pandas

    folder = tables(tmp_path / "tables")
    path = folder / "h100_sxm.all_reduce.csv.gz"
    frame = pandas.read_csv(path)
    frame[~frame["kernel_source"].str.contains("graph")].to_csv(path, index=False)
    profile, _ = import_profile([folder], spec=spec, device="h100-80gb")
    fastest = row(profile, "all_reduce", tensor_parallel_size=2, bytes=2048)
    assert fastest.seconds == pytest.approx((0.001 + 1024 * 1e-8) * 1e-3)


def test_the_overhead_is_the_datasheet_s_unless_given(
    tmp_path: Path, imported: tuple[Profile, tuple[str, ...]], spec: ModelSpec
) -> None:
    profile, said = imported
    assumed = row(profile, "overhead", phase="decode", num_seqs=4, tensor_parallel_size=1)
    assert assumed.seconds == pytest.approx(SHEET.host_seconds + 4 * SHEET.host_seconds_per_sequence, rel=1e-5)
    assert any(line.startswith("overhead: not in the tables") for line in said)
    profile, said = import_profile([tmp_path / "tables"], spec=spec, device="h100-80gb", overhead_seconds=2e-3)
    assert {m.seconds for m in profile.measurements if m.op == "overhead"} == {2e-3}
    assert not any(line.startswith("overhead:") for line in said)


def test_what_was_measured_is_counted(imported: tuple[Profile, tuple[str, ...]]) -> None:
    profile, said = imported
    measured = sum(m.repeats > 0 for m in profile.measurements)
    (line,) = [line for line in said if " rows measured, " in line]
    derived = "attention prefill, attention decode, rest, embed, head, overhead prefill, overhead decode"
    assert line.startswith(f"{measured} rows measured, {len(profile.measurements) - measured} derived (")
    assert set(line.split("(")[1].split(")")[0].split(", ")) == set(derived.split(", "))
    assert line.endswith("tensor parallel degrees 1, 2, 4, 8")


def test_heads_that_do_not_split_leave_a_degree_out(tmp_path: Path, spec: ModelSpec) -> None:
    profile, _ = import_profile(
        [tables(tmp_path / "tables")], spec=replace(spec, intermediate_size=3076), device="h100-80gb"
    )
    assert profile.tensor_parallel_sizes == (1, 2, 4)


def test_of_several_systems_the_device_s_is_taken(tmp_path: Path, spec: ModelSpec) -> None:
    folder = tables(tables(tmp_path / "tables", "a100_sxm"), "h100_sxm")
    _, said = import_profile([folder], spec=spec, device="H100-80GB")
    assert said[0] == "tables of h100 taken, those of a100 left aside"
    with pytest.raises(
        InputError, match="the tables are of a100, h100, none of them of device 'a40-48gb'; name one of these"
    ):
        import_profile([folder], spec=spec, device="a40-48gb")


def test_one_system_s_tables_may_stand_for_another_device(tmp_path: Path, spec: ModelSpec) -> None:
    _, said = import_profile([tables(tmp_path / "tables")], spec=spec, device="h200-141gb")
    assert said[0] == "the tables say h100, the device is 'h200-141gb': they count as its own"


def test_encoder_decoder_models_are_refused(tmp_path: Path, spec: ModelSpec) -> None:
    both = replace(spec, num_encoder_layers=2)
    with pytest.raises(
        InputError, match="aiconfigurator tables time decoder-only layers, and toy is an encoder-decoder"
    ):
        import_profile([tables(tmp_path / "tables")], spec=both, device="h100-80gb")


def test_a_damaged_table_is_named(tmp_path: Path, spec: ModelSpec) -> None:
    folder = tables(tmp_path / "tables")
    path = folder / "h100_sxm.gemm.csv.gz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"h100_sxm.gemm.csv.gz is not a whole CSV table: "):
        import_profile([folder], spec=spec, device="h100-80gb")


def test_decode_without_the_length_of_its_cache_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    import pandas

    folder = tables(tmp_path / "tables")
    path = folder / "h100_sxm.decode_attention.csv.gz"
    pandas.read_csv(path, index_col=0).drop(columns="kv_len").to_csv(path)
    with pytest.raises(InputError, match=r"h100_sxm.decode_attention.csv.gz has no column kv_len, without which"):
        import_profile([folder], spec=spec, device="h100-80gb")


def test_a_folder_without_tables_and_a_missing_file_are_refused(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(InputError, match=r"no table of a known format \(csv, vidur, aiconfigurator\) there"):
        import_profile([tmp_path], spec=spec, device="h100-80gb")
    with pytest.raises(InputError, match=r"no file .*nothing.csv"):
        import_profile([tmp_path / "nothing.csv"], spec=spec, device="h100-80gb")


def test_sizes_that_lack_a_product_are_left_out_and_said(tmp_path: Path, spec: ModelSpec) -> None:
    """The layer's products of 16 rows; of one row those as wide as the whole vocabulary."""
    import pandas

    folder = tables(tmp_path / "tables")
    path = folder / "h100_sxm.gemm.csv.gz"
    whole = pandas.read_csv(path, index_col=0)
    layer = (whole["m"] == 16) & (whole["n"] <= 4096) & (whole["k"] <= 2048)
    head = (whole["m"] == 1) & (whole["n"] == 8192)
    whole[~(layer | head)].to_csv(path)
    profile, said = import_profile([folder], spec=spec, device="h100-80gb")
    at_one = [m for m in profile.measurements if m.tensor_parallel_size == 1]
    assert [m.num_tokens for m in at_one if m.op == "rest"] == [1, 256, 4096]
    assert [m.num_seqs for m in at_one if m.op == "head"] == [16, 256]
    for op in ("rest", "head"):
        note = f"{op}: 4 sizes over all degrees are left out, as the table lacks a product of theirs"
        assert note in said, "at degree 1, 2, 4 and 8"
    whole[(whole["n"] != 1024) | (whole["k"] == 8192)].to_csv(path)
    with pytest.raises(InputError, match="at no number of tokens"):
        import_profile([folder], spec=spec, device="h100-80gb")


def test_upstream_s_own_tables_are_read_with_pyarrow(tmp_path: Path, spec: ModelSpec) -> None:
    """Their columns are named otherwise, hold other types and engines too, and the newest of vLLM counts."""
    pytest.importorskip("pyarrow", reason="upstream's parquet tables need pyarrow")
    import pandas

    tidy = tables(tmp_path / "tables")
    names = {"latency_ms": "latency", "n_q_head": "num_heads", "n_kv_head": "num_key_value_heads"}
    gemm, prefill, decode, sums = (
        pandas.read_csv(tidy / f"h100_sxm.{name}.csv.gz").rename(columns=names)
        for name in ("gemm", "prefill_attention", "decode_attention", "all_reduce")
    )
    gemm = pandas.concat([gemm.assign(gemm_dtype="bfloat16"), gemm.assign(gemm_dtype="fp8", latency=1e-9)])
    decode = decode.assign(step=decode["kv_len"] - 1, attn_dtype="bfloat16").drop(columns="kv_len")
    for name, frame in {
        "gemm/vllm/0.24.0/gemm_perf": gemm,
        "gemm/vllm/0.9.1/gemm_perf": gemm.assign(latency=9.0),
        "gemm/trtllm/1.3.0/gemm_perf": gemm.assign(latency=9.0),
        "attention/vllm/0.24.0/context_attention_perf": prefill.drop(columns="kv_len"),
        "attention/vllm/0.24.0/generation_attention_perf": decode,
        "comm/vllm/0.24.0/custom_allreduce_perf": sums,
    }.items():
        path = tmp_path / "h100_sxm" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path)
    expected, _ = import_profile([tidy], spec=spec, device="h100-80gb")
    found, said = import_profile([tmp_path / "h100_sxm"], spec=spec, device="h100-80gb")
    assert found.measurements == expected.measurements
    assert "gemm: tables of vllm/0.24.0" in said


def fp8_tables(folder: Path, *, block_ms: float) -> Path:
    """The same with dtypes: products in fp8 take half as long, those with scales for blocks `block_ms` more."""
    import pandas

    tables(folder)
    gemm = pandas.read_csv(folder / "h100_sxm.gemm.csv.gz").assign(gemm_dtype="bfloat16")
    whole = gemm.assign(gemm_dtype="fp8", latency_ms=gemm["latency_ms"] / 2)
    block = whole.assign(gemm_dtype="fp8_block", latency_ms=whole["latency_ms"] + block_ms)
    pandas.concat([gemm, whole, block]).to_csv(folder / "h100_sxm.gemm.csv.gz", index=False)
    for phase in ("prefill", "decode"):
        path = folder / f"h100_sxm.{phase}_attention.csv.gz"
        plain = pandas.read_csv(path).assign(attn_dtype="bfloat16", kv_cache_dtype="bfloat16")
        fp8 = plain.assign(kv_cache_dtype="fp8", latency_ms=plain["latency_ms"] / 2)
        both = fp8.assign(attn_dtype="fp8", latency_ms=plain["latency_ms"] / 4)
        pandas.concat([plain, fp8, *([both] if phase == "prefill" else [])]).to_csv(path, index=False)
    return folder


@pytest.mark.parametrize(("block_ms", "stands"), [(1e-5, "block"), (0.1, "tensor")])
def test_fp8_products_have_scales_for_blocks_unless_these_were_timed_with_their_launches(
    tmp_path: Path, spec: ModelSpec, block_ms: float, stands: str
) -> None:
    profile, _ = import_profile(
        [fp8_tables(tmp_path / "t", block_ms=block_ms)], spec=spec, device="h100-80gb", dtype="fp8"
    )
    products = [(1536, 1024), (1024, 1024), (6144, 1024), (1024, 3072)]
    expected = sum(product_seconds(256, n, k) / 2 for n, k in products) + layer_seconds(SHEET, spec, 256, 1)
    expected += len(products) * block_ms * 1e-3 * (stands == "block")
    assert row(profile, "rest", num_tokens=256, tensor_parallel_size=1).seconds == pytest.approx(expected, rel=1e-3)
    head = product_seconds(16, 8192, 1024) + sampling_seconds(SHEET, spec, 16)
    assert row(profile, "head", num_seqs=16, tensor_parallel_size=1).seconds == pytest.approx(head, rel=1e-5)


def test_fp8_keeps_its_keys_and_values_in_one_byte_and_takes_fp8_queries_where_there_are_such_kernels(
    tmp_path: Path, spec: ModelSpec
) -> None:
    profile, _ = import_profile([fp8_tables(tmp_path / "t", block_ms=1e-5)], spec=spec, device="h100-80gb", dtype="fp8")
    decode = row(profile, "attention", phase="decode", num_seqs=16, context_tokens=16 * 511, tensor_parallel_size=1)
    assert decode.seconds == pytest.approx(decode_ms(2, 16, 511) * 1e-3 / 2, rel=1e-5)
    prefill = row(profile, "attention", phase="prefill", num_seqs=2, num_tokens=1024, tensor_parallel_size=1)
    assert prefill.seconds == pytest.approx(prefill_ms(8, 2, 512) * 1e-3 / 4, rel=1e-5)
    assert profile.model.kv_bytes_per_token(profile.dtype) * 2 == profile.model.kv_bytes_per_token("bfloat16")
    layers = spec.num_layers * layer_parameters(spec)
    assert profile.weight_bytes == layers + 2 * (model_parameters(spec) - layers)


def test_tidied_tables_say_that_they_are_no_fp8(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(InputError, match="has no column gemm_dtype: its times are of 2-byte elements, not of fp8"):
        import_profile([tables(tmp_path / "tables")], spec=spec, device="h100-80gb", dtype="fp8")


def mixture_spec() -> ModelSpec:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
    }
    return model_spec(config, name="toy-moe")


def experts_table(path: Path, **changed: object) -> Path:
    """In AIConfigurator's columns; uneven routing takes 1.5 times as long."""
    sizes = {"hidden_size": 1024, "inter_size": 512, "topk": 2, "num_experts": 16, "moe_dtype": "bfloat16", **changed}
    rows = (
        {
            "framework": "VLLM",
            "kernel_source": "vllm_fused_moe",
            **sizes,
            "num_tokens": tokens,
            "moe_tp_size": degree,
            "moe_ep_size": ranks,
            "distribution": routing,
            "latency": slower * ranks * (0.1 + 0.001 * tokens) / degree,
        }
        for tokens in (1, 64, 1024)
        for degree, ranks in ((1, 1), (2, 1), (1, 2))
        for routing, slower in (("balanced", 1.0), ("power_law_1.2", 1.5))
    )
    return table(path, rows)


def seconds_of_experts(tokens: int) -> float:
    """Of even routing on one GPU, between 1 and 64 tokens."""
    return 1e-3 * float(np.exp(np.interp(np.log(tokens), np.log([1, 64]), np.log([0.101, 0.164]))))


def test_a_mixture_s_experts_come_from_their_table(tmp_path: Path) -> None:
    folder, spec = tables(tmp_path / "tables"), mixture_spec()
    experts_table(folder / "moe_perf.csv")
    found, notes = import_profile([folder], spec=spec, device="h100-80gb", dtype="bfloat16", overhead_seconds=1e-3)
    assert found.tensor_parallel_sizes == (1, 2)
    of_layers = [m for m in found.measurements if m.op == "rest"]
    rest = {(m.tensor_parallel_size, m.num_tokens): m.seconds for m in of_layers if m.expert_parallel_size == 1}
    for degree in (1, 2):
        products = product_seconds(16, 1536 // degree, 1024) + product_seconds(16, 1024, 1024 // degree)
        router = gemm_seconds(SHEET, "bfloat16", 16, 16, 1024)
        between = 1.5 * seconds_of_experts(16) / degree
        expected = products + router + between + layer_seconds(SHEET, spec, 16, degree)
        assert rest[degree, 16] == pytest.approx(expected, rel=0.02)
        assert rest[degree, 4096] > 1.5e-3 * (0.1 + 1.024) * 4 / degree, "proportional beyond the table"
    assert any("experts from the table (bfloat16, routing power_law_1.2)" in note for note in notes)
    # Whole experts on two GPUs, on the one to which most tokens go: in this table four times what half the width takes.
    whole = {m.num_tokens: m.seconds for m in of_layers if m.expert_parallel_size == 2}
    assert whole[16] - rest[2, 16] == pytest.approx(1.5 * seconds_of_experts(16) * (2 - 1 / 2), rel=1e-3)
    assert found.expert_shardings == (Sharding(2, expert_parallel_size=2),)


def test_a_mixture_s_routing_is_chosen_among_those_of_the_table(tmp_path: Path) -> None:
    folder, spec = tables(tmp_path / "tables"), mixture_spec()
    experts_table(folder / "moe_perf.csv")

    def imported(routing: str | None) -> dict[tuple[int, int, int], float]:
        profile, _ = import_profile(
            [folder], spec=spec, device="h100-80gb", dtype="bfloat16", overhead_seconds=1e-3, routing=routing
        )
        rows = (m for m in profile.measurements if m.op == "rest")
        return {(m.tensor_parallel_size, m.expert_parallel_size, m.num_tokens): m.seconds for m in rows}

    even, uneven = imported("even"), imported("power_law_1.2")
    assert uneven == imported(None)
    for degree in (1, 2):
        more = uneven[degree, degree, 16] - even[degree, degree, 16]
        assert more == pytest.approx(0.5 * degree * seconds_of_experts(16), rel=1e-3)
    with pytest.raises(InputError, match=r"timed with routing balanced, power_law_1[.]2, not power_law_1[.]01"):
        imported("power_law_1.01")
    with pytest.raises(InputError, match=r"routing is even or power_law_<exponent>, .*found 'zipf'"):
        imported("zipf")


def test_a_mixture_without_its_experts_or_with_others_is_refused(tmp_path: Path) -> None:
    folder, spec = tables(tmp_path / "tables"), mixture_spec()

    def refused(message: str) -> None:
        with pytest.raises(InputError, match=message):
            import_profile([folder], spec=spec, device="h100-80gb", dtype="bfloat16", overhead_seconds=1e-3)

    refused("toy-moe has 16 experts in a layer, and no table times them")
    experts_table(folder / "moe_perf.csv", num_experts=8)
    refused(r"no row of 1024/512/2/16 .*; there are 1024/512/2/8")
    experts_table(folder / "moe_perf.csv", moe_dtype="int4_wo")
    refused("are timed in int4_wo, not in bfloat16")
    experts_table(folder / "moe_perf.csv", topk="two")
    refused("topk must be a finite number above 0")


def latent_spec(**changed: object) -> ModelSpec:
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
    }
    return model_spec({**config, **changed}, name="toy-latent")


def latent_tables(folder: Path) -> Path:
    """Kernels of latent attention beside the other tables, in AIConfigurator's own columns; and a whole module."""
    tables(folder)
    kind = {"mla_dtype": "bfloat16", "tp_size": 1}
    for name, phase, more in (("context_mla", prefill_ms, {}), ("mla_context_module", prefill_ms, {"gemm_type": "x"})):
        rows = (
            {**kind, **more, "kv_cache_dtype": dtype, "num_heads": heads, "batch_size": n, "isl": tokens, "step": 0,
             "latency": slower * phase(heads, n, tokens)}
            for dtype, slower in (("bfloat16", 1.0), ("fp8", 0.8))
            for heads in (8, 4)
            for n in (1, 4)
            for tokens in (1, 64, 512, 4096, 8192)
        )  # fmt: skip
        table(folder / f"{name}_perf.csv", rows)
    rows = (
        {**kind, "kv_cache_dtype": "bfloat16", "num_heads": heads, "batch_size": n, "isl": 1, "step": step,
         "latency": decode_ms(heads, n, step)}
        for heads in (8, 4)
        for n in (1, 4)
        for step in (1, 63, 511, 4095)
    )  # fmt: skip
    table(folder / "generation_mla_perf.csv", rows)
    return folder


def test_latent_attention_comes_from_its_kernels_and_its_products(tmp_path: Path) -> None:
    folder, spec = latent_tables(tmp_path / "tables"), latent_spec()
    found, notes = import_profile([folder], spec=spec, device="h100-80gb", dtype="bfloat16", overhead_seconds=1e-3)
    for degree in (1, 2):
        prefill = row(found, "attention", phase="prefill", num_seqs=4, num_tokens=2048, tensor_parallel_size=degree)
        assert prefill.seconds == pytest.approx(1e-3 * prefill_ms(8 // degree, 4, 512), rel=1e-5)
        decode = row(found, "attention", phase="decode", num_seqs=4, context_tokens=2044, tensor_parallel_size=degree)
        assert decode.seconds == pytest.approx(1e-3 * decode_ms(8 // degree, 4, 511), rel=1e-5)
        shapes = ((256 + 576, 1024), (1536 // degree, 256), (2048 // degree, 512), (1024, 1024 // degree))
        products = sum(product_seconds(16, n, k) for n, k in (*shapes, (4096 // degree, 1024), (1024, 2048 // degree)))
        rest = row(found, "rest", num_tokens=16, tensor_parallel_size=degree)
        assert rest.seconds == pytest.approx(products + layer_seconds(SHEET, spec, 16, degree), rel=0.03)
    assert "attention: whole modules of latent attention are left aside (mla_context_module_perf.csv)" in notes


def test_latent_attention_of_other_widths_or_heads_is_refused(tmp_path: Path) -> None:
    folder = latent_tables(tmp_path / "tables")

    def refused(message: str, **changed: object) -> None:
        with pytest.raises(InputError, match=message):
            import_profile([folder], spec=latent_spec(**changed), device="h100-80gb", overhead_seconds=1e-3)

    refused("times latent attention of 512/128/64/128 .*, toy-latent has 256/128/64/128", kv_lora_rank=256)
    refused("no rows of attention prefill, attention decode; add them", num_attention_heads=40, num_key_value_heads=40)
