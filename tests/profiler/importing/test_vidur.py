"""Vidur's tables become a profile of their model: operations summed, links by bytes, host times."""

from pathlib import Path

import pytest

from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Measurement, Profile
from exeplan.errors import InputError
from exeplan.profiler.datasheets.datasheet import load_datasheet
from exeplan.profiler.datasheets.roofline import elementwise_seconds
from exeplan.profiler.importing import import_profile
from exeplan.profiler.importing.pointwise import sampling_seconds

from .toy import table, toy_spec

OPERATIONS = {
    "emb": 0.001,
    "input_layernorm": 0.01,
    "attn_pre_proj": 0.1,
    "attn_rope": 0.02,
    "attn_post_proj": 0.1,
    "post_attention_layernorm": 0.01,
    "mlp_up_proj": 0.4,
    "mlp_act": 0.03,
    "mlp_down_proj": 0.2,
    "add": 0.005,
}
COLUMNS = "op,phase,tensor_parallel_size,num_seqs,num_tokens,context_tokens,bytes,seconds\n"
REST_MS = sum(OPERATIONS.values()) - 0.001 + 0.005
"""Everything but the embedding, and the sum that Vidur leaves out."""
SHAPE = {
    "n_head": 8,
    "n_kv_head": 2,
    "n_embd": 1024,
    "n_expanded_embd": 4096,
    "vocab_size": 1000,
    "use_gated_mlp": True,
}


@pytest.fixture
def spec() -> ModelSpec:
    return toy_spec("Toy-1b", intermediate_size=4096, vocab_size=1000)


def layer(tmp_path: Path, **changes: object) -> Path:
    """A layer whose operations take fixed milliseconds at 64 tokens, in proportion to tokens and degree."""
    return table(
        tmp_path / "first.csv.gz",
        (
            {f"time_stats.{op}.median": ms * tokens / 64 / degree for op, ms in OPERATIONS.items()}
            | {"time_stats.emb.std": 0.1, "num_tokens": tokens, "num_tensor_parallel_workers": degree}
            | SHAPE
            | changes
            for tokens in (16, 64, 128)
            for degree in (1, 2)
        ),
    )


def attention(tmp_path: Path) -> Path:
    """Decode: 0.01 ms and 0.01 ms a thousand cached tokens; prefill: 0.02 ms a hundred tokens; 0.002 ms to store."""
    decode = [(n, 0, cached, 0.01 + n * cached * 1e-5) for n in (1, 8) for cached in (32, 256, 1024, 2048)]
    prefill = [(1, new, 0, new * 2e-4) for new in (64, 256, 512, 1024)] + [(1, 64, 512, 0.5)]
    return table(
        tmp_path / "second.csv",
        (
            {
                "time_stats.attn_prefill.median": ms if new else None,
                "time_stats.attn_decode.median": None if new else ms,
                "time_stats.attn_kv_cache_save.median": 0.002,
                "n_embd": 1024,
                "n_q_head": 8,
                "n_kv_head": 2,
                "num_tensor_parallel_workers": degree,
                "batch_size": n,
                "prefill_chunk_size": new,
                "kv_cache_size": cached,
            }
            for degree in (1, 2)
            for n, new, cached, ms in decode + prefill
        ),
    )


def test_a_store_slower_than_memory_counts_as_memory_s(tmp_path: Path, spec: ModelSpec) -> None:
    import pandas

    path = attention(tmp_path)
    frame = pandas.read_csv(path)
    frame.loc[frame["prefill_chunk_size"] > 0, "time_stats.attn_kv_cache_save.median"] = 5.0
    frame.to_csv(path, index=False)
    profile, said = import_profile([layer(tmp_path), path], spec=spec, device="a40-48gb")
    prefill = row(profile, "attention", phase="prefill", num_tokens=512, tensor_parallel_size=1)
    store = elementwise_seconds(
        load_datasheet("a40-48gb"), 2 * 512 * 2 * 2 * 128 * 2
    )  # Read and written, 2 heads of 128.
    assert prefill.seconds == pytest.approx(0.1024e-3 + store, rel=1e-5)
    assert any(line.startswith("attention: storing keys and values of a prefill took up to ") for line in said)


def links(tmp_path: Path) -> list[Path]:
    sums = [(2, 8, 2048, 0.02), (2, 8, 2048, 0.04), (2, 8, 65536, 0.05), (2, 1, 65536, 0.2), (4, 4, 65536, 0.07)]
    sends = [(2, 2, 4096, 0.03), (2, 1, 4096, 0.06)]
    return [
        table(
            tmp_path / f"{op}.csv",
            (
                {f"time_stats.{op}.median": ms, "num_workers": n, "devices_per_node": per_node, "size": size}
                for n, per_node, size, ms in rows
            ),
        )
        for op, rows in (("all_reduce", sums), ("send_recv", sends))
    ]


def row(profile: Profile, op: str, **axes: object) -> Measurement:
    (found,) = [
        m for m in profile.measurements if m.op == op and all(getattr(m, name) == value for name, value in axes.items())
    ]
    return found


def test_a_layer_is_the_sum_of_its_operations(tmp_path: Path, spec: ModelSpec) -> None:
    profile, said = import_profile([layer(tmp_path), attention(tmp_path)], spec=spec, device="a40-48gb")
    assert profile.source == "imported vidur"
    assert profile.tensor_parallel_sizes == (1, 2)
    assert row(profile, "rest", num_tokens=64, tensor_parallel_size=1).seconds == pytest.approx(REST_MS * 1e-3)
    assert row(profile, "rest", num_tokens=64, tensor_parallel_size=2).seconds == pytest.approx(REST_MS / 2 * 1e-3)
    assert row(profile, "embed", num_tokens=128, tensor_parallel_size=1).seconds == pytest.approx(2e-6)
    assert any(line.startswith("overhead: not in the tables") for line in said)
    assert any(line.startswith("send: not in the tables") for line in said)


def test_without_a_second_norm_the_sum_counts_once(tmp_path: Path, spec: ModelSpec) -> None:
    import pandas

    path = layer(tmp_path)
    pandas.read_csv(path).drop(columns="time_stats.post_attention_layernorm.median").to_csv(path)
    profile, _ = import_profile([path, attention(tmp_path)], spec=spec, device="a40-48gb")
    expected = (REST_MS - 0.01 - 0.005) * 1e-3
    assert row(profile, "rest", num_tokens=64, tensor_parallel_size=1).seconds == pytest.approx(expected)


def test_the_head_follows_from_the_mlp_s_products(tmp_path: Path, spec: ModelSpec) -> None:
    profile, said = import_profile([layer(tmp_path), attention(tmp_path)], spec=spec, device="a40-48gb")
    found = row(profile, "head", num_seqs=64, tensor_parallel_size=1)
    sampling = sampling_seconds(load_datasheet("a40-48gb"), spec, 64)
    assert found.seconds == pytest.approx(0.6e-3 * 1000 / (3 * 4096) + sampling, rel=1e-5)
    assert found.repeats == 0
    assert any(line.startswith("head: not measured by Vidur") for line in said)


def test_attention_is_its_kernel_and_the_store_of_keys_and_values(tmp_path: Path, spec: ModelSpec) -> None:
    profile, _ = import_profile([layer(tmp_path), attention(tmp_path)], spec=spec, device="a40-48gb")
    decode = row(profile, "attention", phase="decode", num_seqs=8, context_tokens=8 * 1024, tensor_parallel_size=2)
    assert decode.seconds == pytest.approx((0.01 + 8 * 1024 * 1e-5 + 0.002) * 1e-3)
    prefill = row(profile, "attention", phase="prefill", num_tokens=512, tensor_parallel_size=1)
    assert (prefill.num_seqs, prefill.seconds, prefill.repeats) == (1, pytest.approx(0.1044e-3), 1)


def test_attention_is_within_the_model_s_windows(tmp_path: Path, spec: ModelSpec) -> None:
    config = {**spec.config, "model_type": "mistral", "sliding_window": 1024}
    windowed = model_spec(config, name="toy")
    profile, said = import_profile([layer(tmp_path), attention(tmp_path)], spec=windowed, device="a40-48gb")
    for context in (1024, 2048):
        decode = row(
            profile, "attention", phase="decode", num_seqs=8, context_tokens=8 * context, tensor_parallel_size=1
        )
        assert decode.seconds == pytest.approx((0.01 + 8 * 1024 * 1e-5 + 0.002) * 1e-3)
    assert any(line.startswith("attention: 2 of 2 layers attend to the last 1024 tokens; ") for line in said)


def test_links_are_inside_a_node_or_between_nodes(tmp_path: Path, spec: ModelSpec) -> None:
    paths = [layer(tmp_path), attention(tmp_path), *links(tmp_path)]
    profile, _ = import_profile(paths, spec=spec, device="a40-48gb")
    found = {(m.op, m.phase, m.tensor_parallel_size, m.bytes): m.seconds for m in profile.measurements if m.bytes}
    assert found == pytest.approx(
        {
            ("all_reduce", "intra", 2, 2048): 3e-5,  # The median of two.
            ("all_reduce", "intra", 2, 65536): 5e-5,
            ("all_reduce", "inter", 2, 65536): 2e-4,
            ("all_reduce", "intra", 4, 65536): 7e-5,
            ("send", "intra", 1, 4096): 3e-5,
            ("send", "inter", 1, 4096): 6e-5,
        }
    )


def test_links_of_several_machines_are_refused(tmp_path: Path, spec: ModelSpec) -> None:
    other = tmp_path / "other"
    other.mkdir()
    paths = [layer(tmp_path), attention(tmp_path), *links(tmp_path), *links(other)]
    with pytest.raises(InputError, match=r"^all_reduce tables of several machines: .*; give those of one$"):
        import_profile(paths, spec=spec, device="a40-48gb")


def test_older_sends_count_a_shard_s_bytes_and_name_their_link(tmp_path: Path, spec: ModelSpec) -> None:
    columns = {"n_embd": 1024, "num_tokens": 64, "num_tensor_parallel_workers": 2}
    rows = [
        columns | {"time_stats.send_recv.median": 0.05},
        columns | {"time_stats.send_recv.median": 0.03, "num_tokens": 0},
    ]
    paths = [layer(tmp_path), attention(tmp_path)]
    profile, _ = import_profile([*paths, table(tmp_path / "p2p_inter_node.csv", rows)], spec=spec, device="a40-48gb")
    (sent,) = [m for m in profile.measurements if m.op == "send"]
    assert (sent.phase, sent.bytes, sent.seconds) == ("inter", 64 * 1024, 5e-5)
    with pytest.raises(
        InputError, match=r"p2p.csv does not say which link it timed; have 'intra' or 'inter' in its name"
    ):
        import_profile([*paths, table(tmp_path / "p2p.csv", rows)], spec=spec, device="a40-48gb")


def host_times(tmp_path: Path, model: str) -> Path:
    return table(
        tmp_path / "host.csv",
        (
            {
                "schedule_median": 0.1 * degree,
                "sampler_e2e_median": 0.8,
                "prepare_inputs_e2e_median": 0.3,
                "process_model_outputs_median": 0.2,
                "ray_comm_time_mean": 0.4,
                "model_name": model,
                "batch_size": 8,
                "tensor_parallel_degree": degree,
            }
            for degree in (2, 4)
        ),
    )


def test_host_times_of_the_model_hold_its_head(tmp_path: Path, spec: ModelSpec) -> None:
    paths = [layer(tmp_path), attention(tmp_path), host_times(tmp_path, "makers/toy-1B-hf")]
    profile, _ = import_profile(paths, spec=spec, device="a40-48gb")
    near = row(profile, "overhead", phase="decode", tensor_parallel_size=1)
    assert (near.num_seqs, near.seconds, near.repeats) == (8, pytest.approx(1.1e-3), 0)
    assert row(profile, "overhead", phase="prefill", tensor_parallel_size=2).repeats == 1
    assert row(profile, "head", tensor_parallel_size=2).seconds == pytest.approx(0.8e-3)


def test_host_times_of_other_models_stand_for_the_overhead_only(tmp_path: Path, spec: ModelSpec) -> None:
    paths = [layer(tmp_path), attention(tmp_path), host_times(tmp_path, "makers/other")]
    profile, said = import_profile(paths, spec=spec, device="a40-48gb")
    assert row(profile, "overhead", phase="decode", tensor_parallel_size=2).seconds == pytest.approx(1.1e-3)
    assert len([m for m in profile.measurements if m.op == "head"]) == 2 * 3
    assert "overhead: Toy-1b is not among other; the median over them counts" in said


def test_a_given_overhead_stands_in_front(tmp_path: Path, spec: ModelSpec) -> None:
    paths = [layer(tmp_path), attention(tmp_path), host_times(tmp_path, "makers/toy-1b")]
    profile, _ = import_profile(paths, spec=spec, device="a40-48gb", overhead_seconds=5e-3)
    assert {m.seconds for m in profile.measurements if m.op == "overhead"} == {5e-3}
    assert row(profile, "head", tensor_parallel_size=2).seconds == pytest.approx(0.8e-3)


def test_a_plain_csv_completes_the_tables(tmp_path: Path, spec: ModelSpec) -> None:
    extra = tmp_path / "extra.csv"
    extra.write_text(f"{COLUMNS}send,inter,,,,,65536,4e-5\nembed,,1,,64,,,7e-6\n")
    profile, said = import_profile([layer(tmp_path), attention(tmp_path), extra], spec=spec, device="a40-48gb")
    assert profile.source == "imported vidur and csv"
    assert row(profile, "send").seconds == 4e-5
    assert row(profile, "embed", tensor_parallel_size=1).seconds == 7e-6
    assert not any(line.startswith("send:") for line in said)


def test_own_rows_of_one_phase_leave_the_table_the_other(tmp_path: Path, spec: ModelSpec) -> None:
    """At the degree that they are of."""
    extra = tmp_path / "extra.csv"
    extra.write_text(f"{COLUMNS}rest,decode,1,,1,,,4e-4\nrest,decode,1,,64,,,5e-4\n")
    profile, _ = import_profile([layer(tmp_path), attention(tmp_path), extra], spec=spec, device="a40-48gb")
    sizes = {
        (phase, degree): [m.num_tokens for m in profile.measurements if (m.op, m.phase, m.tensor_parallel_size) == key]
        for degree in (1, 2)
        for phase in ("prefill", "decode", "")
        for key in [("rest", phase, degree)]
    }
    assert sizes == {
        ("prefill", 1): [16, 64, 128],
        ("decode", 1): [1, 64],
        ("", 1): [],
        ("prefill", 2): [],
        ("decode", 2): [],
        ("", 2): [16, 64, 128],
    }


def test_host_times_complete_a_plain_csv(tmp_path: Path, spec: ModelSpec) -> None:
    lines = [
        f"{op},{degree},{cells},{seconds}"
        for degree in (2, 4)
        for op, cells, seconds in (
            ("rest,", ",64,,", "1e-3"),
            ("rest,", ",256,,", "3e-3"),
            ("embed,", ",64,,", "1e-5"),
            ("head,", "8,,,", "2e-4"),
            ("attention,prefill", "1,128,,", "1e-4"),
            ("attention,prefill", "1,512,,", "8e-4"),
            ("attention,decode", "1,,128,", "5e-5"),
            ("attention,decode", "1,,512,", "9e-5"),
        )
    ]
    own = tmp_path / "own.csv"
    own.write_text(COLUMNS + "\n".join([*lines, ""]))
    profile, _ = import_profile([own, host_times(tmp_path, "makers/other")], spec=spec, device="a40-48gb")
    for degree, seconds in ((2, 1.1e-3), (4, 1.3e-3)):
        assert row(profile, "overhead", phase="decode", tensor_parallel_size=degree).seconds == pytest.approx(seconds)
        assert len([m for m in profile.measurements if (m.op, m.tensor_parallel_size) == ("head", degree)]) == 1


def test_another_model_s_table_is_refused_with_both_shapes(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(InputError) as refusal:
        import_profile([layer(tmp_path, n_expanded_embd=8192), attention(tmp_path)], spec=spec, device="a40-48gb")
    assert str(refusal.value) == (
        f"{tmp_path / 'first.csv.gz'} is about a model of hidden size 1024, 8 heads, 2 key/value heads and a gated MLP "
        "of 8192, while Toy-1b has hidden size 1024, 8 heads, 2 key/value heads and a gated MLP of 4096"
    )


def test_missing_attention_is_named(tmp_path: Path, spec: ModelSpec) -> None:
    with pytest.raises(InputError, match=r"no rows of attention prefill, attention decode; add them as a plain CSV or"):
        import_profile([layer(tmp_path)], spec=spec, device="a40-48gb")


def test_a_bad_cell_is_named_by_its_line(tmp_path: Path, spec: ModelSpec) -> None:
    import pandas

    path = layer(tmp_path)
    frame = pandas.read_csv(path, index_col=0)
    frame.loc[3, "time_stats.mlp_act.median"] = -0.1
    frame.to_csv(path)
    with pytest.raises(
        InputError, match=r"line 5: time_stats.mlp_act.median must be a finite number of at least 0, found .*-0.1"
    ):
        import_profile([path, attention(tmp_path)], spec=spec, device="a40-48gb")


@pytest.mark.parametrize(
    ("file", "column"),
    [
        *(("first.csv.gz", column) for column in ("time_stats.mlp_down_proj.median", "n_head", "n_kv_head")),
        *(("second.csv", column) for column in ("prefill_chunk_size", "num_tensor_parallel_workers", "n_embd")),
        ("host.csv", "model_name"),
    ],
)
def test_a_column_that_is_not_there_is_named(tmp_path: Path, spec: ModelSpec, file: str, column: str) -> None:
    import pandas

    paths = [layer(tmp_path), attention(tmp_path), host_times(tmp_path, "makers/toy-1b")]
    pandas.read_csv(tmp_path / file, index_col=0).drop(columns=column).to_csv(tmp_path / file)
    with pytest.raises(InputError) as refusal:
        import_profile(paths, spec=spec, device="a40-48gb")
    assert str(refusal.value) == f"{tmp_path / file} has no column {column}, without which it cannot be read"


def test_other_element_sizes_and_unknown_devices_are_refused(tmp_path: Path, spec: ModelSpec) -> None:
    paths = [layer(tmp_path), attention(tmp_path)]
    with pytest.raises(InputError, match="vidur tables time 2-byte elements, not float32; take bfloat16 or float16"):
        import_profile(paths, spec=spec, device="a40-48gb", dtype="float32")
    with pytest.raises(
        InputError, match=r"no datasheet of a device 'mine' .*; what vidur tables do not time follows from it"
    ):
        import_profile(paths, spec=spec, device="mine")
