"""The files from which a peer simulator runs our trace on our times, and its runs (`replay_speed.py --peer`).

The peer is vidur (https://github.com/microsoft/vidur). Its profiles are CSV files of milliseconds a layer and
operation; here they are written from the cost model that our replay uses: what a pass costs without caches as one
operation, attention to caches as the two others. So both simulate the same requests at nearly the same times, and their
passes and simulated seconds can be compared. Sending between stages costs nothing there. Not here: what runs in the
peer's environment (`replay_vidur.py`).
"""

import csv
import json
import subprocess
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from exeplan.core.batch import Batch, Chunk, SequenceState
from exeplan.core.models.model import ModelSpec
from exeplan.simulator.cost import CostModel
from exeplan.workload.length_law import Ints

SCRIPT = Path(__file__).with_name("replay_vidur.py")
_OPERATIONS = (
    *("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "mlp_act"),
    *("input_layernorm", "post_attention_layernorm", "attn_rope", "add"),
)
_LONGEST = 16_384


def write_files(folder: Path, cost: CostModel, *, slots: int, budget: int, inputs: Ints, outputs: Ints) -> None:
    """Trace and profiles for the peer, of requests that are all there at time 0; `cost` has one stage."""
    pairs = zip(inputs.tolist(), outputs.tolist(), strict=True)
    requests = [{"arrived_at": 0, "num_prefill_tokens": i, "num_decode_tokens": o} for i, o in pairs]
    _write(folder / "trace.csv", requests)
    _write(folder / "mlp.csv", _without_caches(cost, slots, budget))
    _write(folder / "attention.csv", _attention(cost, slots, budget))
    spec = cost.spec
    sends = [{"collective": "send_recv", "devices_per_node": 2, "size": tokens * spec.hidden_size * 2,
              "time_stats.send_recv.median": 0.0} for tokens in _up_to(budget)]  # fmt: skip
    _write(folder / "send_recv.csv", sends)


def run(python: str, folder: Path, *, stages: int, slots: int, budget: int, blocks: int) -> dict[str, Any]:
    """One run of the peer: CPU seconds of its predictor and of its simulation, passes, simulated seconds."""
    options = {"stages": stages, "slots": slots, "budget": budget, "blocks": blocks}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    answer = subprocess.run([python, str(SCRIPT), str(folder), *words], capture_output=True, text=True, check=False)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"the peer failed: {(answer.stderr or answer.stdout)[-2000:]}")
    found: dict[str, float | str] = json.loads(lines[-1][7:])
    return found


def _without_caches(cost: CostModel, slots: int, budget: int) -> list[dict[str, object]]:
    """Milliseconds a layer of a pass of so many tokens, all in one of the operations; beyond the slots, of a prompt."""
    spec = cost.spec
    shape = {
        "n_head": spec.num_heads,
        "n_kv_head": spec.num_kv_heads,
        "n_embd": spec.hidden_size,
        "n_expanded_embd": spec.intermediate_size,
        "use_gated_mlp": True,
        "vocab_size": spec.vocab_size,
        "num_tensor_parallel_workers": 1,
    }
    none = {f"time_stats.{name}.median": 0.0 for name in _OPERATIONS}
    first = _prefill(cost, 0, slots)
    times = {
        tokens: _decode(cost, min(tokens, slots), 0) + (_prefill(cost, 0, tokens) - first if tokens > slots else 0.0)
        for tokens in _up_to(budget)
    }
    return [{**shape, **none, "num_tokens": n, "time_stats.mlp_up_proj.median": time} for n, time in times.items()]


def _attention(cost: CostModel, slots: int, budget: int) -> list[dict[str, object]]:
    """Milliseconds a layer of the attention of decode rows, and of one chunk of a prompt, to what is in the cache."""
    rows = [
        _attention_row(cost.spec, batch=n, kv=kv, decode=_decode(cost, n, kv) - _decode(cost, n, 0))
        for n, kv in product(_up_to(slots), range(0, _LONGEST + 1, 512))
    ]
    rows += [
        _attention_row(cost.spec, kv=kv, chunk=size, prefill=_prefill(cost, kv, size) - _prefill(cost, 0, size))
        for size, kv in product(_up_to(budget), range(0, _LONGEST + 1, 512))
    ]
    return rows


def _attention_row(
    spec: ModelSpec, *, kv: int, batch: int = 1, chunk: int = 0, decode: float = 0.0, prefill: float = 0.0
) -> dict[str, object]:
    return {
        "n_embd": spec.hidden_size,
        "n_q_head": spec.num_heads,
        "n_kv_head": spec.num_kv_heads,
        "block_size": 16,
        "num_tensor_parallel_workers": 1,
        "batch_size": batch,
        "prefill_chunk_size": chunk,
        "kv_cache_size": kv,
        "time_stats.attn_decode.median": max(decode, 0.0),
        "time_stats.attn_prefill.median": max(prefill, 0.0),
        "time_stats.attn_kv_cache_save.median": 0.0,
    }


def _decode(cost: CostModel, rows: int, context: int) -> float:
    """Milliseconds a layer of a pass of so many decode rows."""
    row = SequenceState(request_id="", num_prompt_tokens=context, max_output_tokens=2, num_output_tokens=1)
    return cost.batch_seconds(Batch(decode=(row,) * rows)) / cost.spec.num_layers * 1e3


def _prefill(cost: CostModel, start: int, tokens: int) -> float:
    """Milliseconds a layer of a pass of one chunk of a prompt."""
    row = SequenceState(request_id="", num_prompt_tokens=start + tokens, max_output_tokens=2)
    batch = Batch(prefill=(row,), chunks=(Chunk(start, start + tokens, False),))
    return cost.batch_seconds(batch) / cost.spec.num_layers * 1e3


def _up_to(most: int) -> Sequence[int]:
    """Every size up to 8, then every eighth part of a power of two."""
    sizes = [n for n in range(1, most + 1) if n <= 8 or n % max(2 ** (n.bit_length() - 4), 1) == 0]
    return sorted({*sizes, most})


def _write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    found = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
