"""All attentions equal an explicit softmax, for every grouping of heads, ragged contexts, windows, biases and sinks."""

import numpy as np
import pytest
import torch

from exeplan.kernels.attention.plain import (
    CachedRows,
    decode_attention,
    full_attention,
    prefill_attention,
    slot_attention,
)

HEADS = [(4, 4), (4, 2), (6, 1)]


def attention_reference(q_THD, k_CKD, v_CKD, *, scale, window=None):
    """The last T of C positions attend to the positions before them."""
    num_queries, context, group = len(q_THD), len(k_CKD), q_THD.shape[1] // k_CKD.shape[1]
    k_CHD, v_CHD = k_CKD.repeat_interleave(group, 1), v_CKD.repeat_interleave(group, 1)
    scores_HTC = torch.einsum("thd,chd->htc", q_THD, k_CHD) * scale
    distance_TC = torch.arange(context - num_queries, context)[:, None] - torch.arange(context)
    seen_TC = (distance_TC >= 0) & (distance_TC < (window or context))
    weights_HTC = scores_HTC.masked_fill(~seen_TC, float("-inf")).softmax(-1)
    return torch.einsum("htc,chd->thd", weights_HTC, v_CHD)


@pytest.mark.parametrize("window", [None, 1, 7, 300, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_prefill_equals_the_reference(heads, kv_heads, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 600, heads, 16), torch.randn(1, 600, kv_heads, 16), torch.randn(1, 600, kv_heads, 16)
    expected = attention_reference(q[0], k[0], v[0], scale=0.3, window=window)
    torch.testing.assert_close(prefill_attention(q, k, v, scale=0.3, window=window)[0], expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_equals_the_reference_for_ragged_contexts_in_any_rows(heads, kv_heads, dtype, tolerance):
    torch.manual_seed(0)
    num_rows, contexts = 400, [1, 17, 17, 40, 3]
    keys_RD, values_RD = torch.randn(2, num_rows, 8).to(dtype)
    q_BHD = torch.randn(len(contexts), heads, 8).to(dtype)
    generator = np.random.default_rng(0)
    num_slots = num_rows // kv_heads
    slots = [generator.permutation(num_slots)[:c] for c in contexts]
    rows = [np.arange(kv_heads)[:, None] * num_slots + slot_C for slot_C in slots]
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "num_slots": num_slots, "like": keys_RD}
    cached = CachedRows(np.concatenate(slots), contexts, **options)
    for _ in range(2):  # What is worked out once serves every layer.
        outputs = decode_attention(q_BHD, keys_RD, values_RD, cached, scale=0.25)
    for q_HD, rows_KC, out_HD in zip(q_BHD, rows, outputs, strict=True):
        k_CKD, v_CKD = (table[torch.from_numpy(rows_KC)].transpose(0, 1).float() for table in (keys_RD, values_RD))
        expected = attention_reference(q_HD[None].float(), k_CKD, v_CKD, scale=0.25)[0]
        torch.testing.assert_close(out_HD.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 7, 280, 1000])
@pytest.mark.parametrize("queries", [1, 40, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_last_tokens_of_a_context_attend_to_those_before(heads, kv_heads, queries, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, queries, heads, 16), torch.randn(1, 420, kv_heads, 16), torch.randn(1, 420, kv_heads, 16)
    expected = attention_reference(q[0], k[0], v[0], scale=0.3, window=window)
    torch.testing.assert_close(prefill_attention(q, k, v, scale=0.3, window=window)[0], expected)


@pytest.mark.parametrize(("queries", "context"), [(1, 1), (1, 9), (9, 1), (30, 17), (17, 30)])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_bias_is_added_by_the_distance_of_key_and_query(heads, kv_heads, queries, context):
    torch.manual_seed(0)
    q_THD, k_CKD, v_CKD = torch.randn(queries, heads, 8), *torch.randn(2, context, kv_heads, 8)
    bias_HX = torch.randn(heads, queries + context - 1)
    k_CHD, v_CHD = (x.repeat_interleave(heads // kv_heads, 1) for x in (k_CKD, v_CKD))
    place_TC = queries - 1 + torch.arange(context) - torch.arange(queries)[:, None]
    weights_HTC = (torch.einsum("thd,chd->htc", q_THD, k_CHD) * 0.5 + bias_HX[:, place_TC]).softmax(-1)
    expected = torch.einsum("htc,chd->thd", weights_HTC, v_CHD)
    found = full_attention(q_THD[None], k_CKD[None], v_CKD[None], scale=0.5, bias_HX=bias_HX)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_adds_the_bias_of_each_sequence(heads, kv_heads, dtype, tolerance):
    torch.manual_seed(0)
    num_rows, contexts = 200, [1, 9, 9, 20]
    keys_RD, values_RD = torch.randn(2, num_rows, 8).to(dtype)
    q_BHD = torch.randn(len(contexts), heads, 8).to(dtype)
    num_slots = num_rows // kv_heads
    rows = [np.arange(kv_heads)[:, None] * num_slots + np.arange(c) for c in contexts]
    biases = [torch.randn(heads, c).to(dtype) for c in contexts]
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "num_slots": num_slots, "like": keys_RD}
    cached = CachedRows(np.concatenate([*map(np.arange, contexts)]), contexts, **options, biases=biases)
    for _ in range(2):  # The biases outlast the first layer.
        outputs = decode_attention(q_BHD, keys_RD, values_RD, cached, scale=0.25)
    for q_HD, rows_KC, bias_HC, out_HD in zip(q_BHD, rows, biases, outputs, strict=True):
        k_HCD, v_HCD = (
            table[torch.from_numpy(rows_KC)].repeat_interleave(heads // kv_heads, 0).float()
            for table in (keys_RD, values_RD)
        )
        weights_HC = (torch.einsum("hd,hcd->hc", q_HD.float(), k_HCD) * 0.25 + bias_HC.float()).softmax(-1)
        expected = torch.einsum("hc,hcd->hd", weights_HC, v_HCD)
        torch.testing.assert_close(out_HD.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("queries", [5, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_sink_takes_its_share_of_every_softmax(heads, kv_heads, queries, window):
    """Equal to a key with its score, whose value is zero: prompts, later chunks, and decodes of either kind."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, queries, heads, 16), torch.randn(1, 300, kv_heads, 16), torch.randn(1, 300, kv_heads, 16)
    sink_H = torch.randn(heads)
    expected_THD = with_sinks(q[0], k[0], v[0], sink_H, window=window)
    out = prefill_attention(q, k, v, scale=0.3, window=window, sink_H=sink_H)
    torch.testing.assert_close(out[0], expected_THD)
    last = 300 if window is None else window
    keys_RD, values_RD = (x[0, -last:].transpose(0, 1).reshape(-1, 16) for x in (k, v))
    for dtype in (torch.float32, torch.float64):
        like = keys_RD.to(dtype)
        options = {"num_heads": heads, "num_kv_heads": kv_heads, "num_slots": last, "like": like}
        cached = CachedRows(np.arange(last), [last], **options)
        inputs = (q[0, -1:].to(like.dtype), like, values_RD.to(like.dtype), cached)
        out_BHD = decode_attention(*inputs, scale=0.3, sink_H=sink_H)
        torch.testing.assert_close(out_BHD[0].float(), expected_THD[-1])


def test_slots_have_sinks_too():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 4, 8) for _ in range(3))
    sink_H, mask_STT = torch.randn(4), torch.zeros(1, 9, 9).masked_fill_(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    out = slot_attention(q, k, v, mask_STT, scale=0.3, sink_H=sink_H)
    torch.testing.assert_close(out[0], with_sinks(q[0], k[0], v[0], sink_H))


def with_sinks(q_THD, k_CKD, v_CKD, sink_H, *, window=None):
    """Each head has one key more, which every query sees."""
    num_queries, context, group = len(q_THD), len(k_CKD), q_THD.shape[1] // k_CKD.shape[1]
    k_CHD, v_CHD = k_CKD.repeat_interleave(group, 1), v_CKD.repeat_interleave(group, 1)
    scores_HTC = torch.einsum("thd,chd->htc", q_THD, k_CHD) * 0.3
    distance_TC = torch.arange(context - num_queries, context)[:, None] - torch.arange(context)
    seen_TC = (distance_TC >= 0) & (distance_TC < (window or context))
    sinks_HT1 = sink_H[:, None, None].expand(-1, num_queries, 1)
    weights = torch.cat([scores_HTC.masked_fill(~seen_TC, float("-inf")), sinks_HT1], -1).softmax(-1)
    return torch.einsum("htc,chd->thd", weights[..., :-1], v_CHD)
