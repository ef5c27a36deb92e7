"""Output tokens per CPU-second of the engine and its peers: one pinned thread, float32, greedy, all requests at once.

    benchmarks/engine/install_peers.sh FOLDER
    python -m benchmarks.engine.throughput --peers FOLDER [--shape llama-50m] [--repeats 3] [--engines NAME ...]

Shapes, with a vocabulary of 32,000 and random weights from one checkpoint: a Llama of 50 million parameters (8 layers,
hidden 512, 8 heads), one of 200 million with grouped heads (12 layers, hidden 1024, 16 and 4 heads), an OPT and a T5.
W1: 32 requests of 128 in / 128 out. W2: 64 requests of 16-240 in / 16-240 out, uniform. Each engine runs in its
own process, and the engines alternate within a repeat; the median is reported. `generate` pads on the left and runs
until the longest output, CTranslate2 takes requests of similar outputs together; only requested tokens count.
Transformers' continuous batching, OpenVINO GenAI, CTranslate2 and vLLM run in environments of their own; those that the
folder lacks are left out. A run that fails has no figure. A sentence on each says so, with the reason, when it happens,
below the table and in the record. Writes records/engine-throughput.json, for other shapes than the first with the shape
in its name.
"""

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.throughput_peers import run_continuous, run_ctranslate2, run_openvino, run_vllm

VOCABULARY = 32_000
WORKLOADS = ("W1", "W2")
PEERS = {"continuous": run_continuous, "openvino": run_openvino, "ctranslate2": run_ctranslate2, "vllm": run_vllm}
"""In environments of their own."""
DECODERS = ("exeplan", "generate", *PEERS)
SHAPES = {
    "llama-50m": DECODERS,
    "llama-200m": DECODERS,
    "opt-50m": DECODERS,
    "t5-60m": ("exeplan", "generate", "ctranslate2"),
}
"""The engines that run a shape."""


def requests(workload: str) -> list[tuple[list[int], int]]:
    """(prompt token ids, output tokens) of every request."""
    rng = random.Random(0)
    uniform = [(rng.randint(16, 240), rng.randint(16, 240)) for _ in range(64)]
    sizes = [(128, 128)] * 32 if workload == "W1" else uniform
    return [([rng.randrange(100, VOCABULARY) for _ in range(prompt)], output) for prompt, output in sizes]


def make_checkpoint(folder: str, shape: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    ids: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "vocab_size": VOCABULARY}
    heads: dict[str, Any]
    config: Any
    if shape == "t5-60m":
        heads = {"num_layers": 6, "d_model": 512, "num_heads": 8, "d_kv": 64, "d_ff": 2048}
        config = transformers.T5Config(**heads, **ids, decoder_start_token_id=0, tie_word_embeddings=True)
        model: Any = transformers.T5ForConditionalGeneration(config)
    elif shape == "opt-50m":
        heads = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "word_embed_proj_dim": 512}
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**heads, **ids, ffn_dim=2048))
    else:
        layers, hidden, heads_of, kv_heads, inner = {
            "llama-50m": (8, 512, 8, 8, 2048),
            "llama-200m": (12, 1024, 16, 4, 2816),
        }[shape]
        config = transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads_of,
            num_key_value_heads=kv_heads,
            intermediate_size=inner,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            **ids,
        )
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)


def run_exeplan(folder: str, work: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    from exeplan.core.models.model import load_model_spec
    from exeplan.core.schedule import Schedule
    from exeplan.runner.compute.model_runner import ModelRunner
    from exeplan.runner.compute.tokens.sampling import SamplingParams
    from exeplan.runner.engine.engine import Engine, Request
    from exeplan.runner.engine.executor import InProcessExecutor
    from exeplan.runner.engine_process.build import warm_up

    num_blocks = sum((len(prompt) + output) // 16 + 2 for prompt, output in work)
    runner = ModelRunner(load_model_spec(folder), dtype="float32", device="cpu", num_blocks=num_blocks)
    schedule = Schedule("rra", {"prefill_batch": 16, "decode_steps": 1})
    engine = Engine(InProcessExecutor(runner), schedule, tokenizer=None, num_blocks=num_blocks)
    warm_up(engine)
    tokens: list[list[int]] = [[] for _ in work]
    began = time.process_time()
    for index, (prompt, output) in enumerate(work):
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        for out in engine.step():
            tokens[int(out.request_id)] += out.token_ids
    return time.process_time() - began, tokens


def run_generate(folder: str, work: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    encodes = AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    width, steps = max(len(p) for p, _ in work), max(o for _, o in work)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in work])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in work])
    if encodes:  # Positions count from the left.
        ids = torch.tensor([p + [0] * (width - len(p)) for p, _ in work])
        mask = mask.flip(1)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids[:2, :16], attention_mask=mask[:2, :16] | 1, max_new_tokens=4, **options)
    began = time.process_time()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, **options)
    seconds, first = time.process_time() - began, 1 if encodes else width
    return seconds, [row[first : first + o].tolist() for row, (_, o) in zip(out, work, strict=True)]


OURS = {"exeplan": run_exeplan, "generate": run_generate}


def child(engine: str, folder: str, workload: str) -> None:
    """One measurement, printed as JSON."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if engine in OURS:
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
    work = requests(workload)
    seconds, tokens = {**OURS, **PEERS}[engine](folder, work)
    assert [len(t) for t in tokens] == [o for _, o in work], "an engine must give every token that was asked for"
    tokens = [list(map(int, row)) for row in tokens]
    print("RESULT " + json.dumps({"rate": sum(o for _, o in work) / seconds, "tokens": tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="environments that install_peers.sh made")
    parser.add_argument("--shape", choices=SHAPES, default="llama-50m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--engines", nargs="+", choices=DECODERS, help="by default all that run the shape")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    pythons, missing = _pythons([e for e in args.engines or SHAPES[args.shape] if e in SHAPES[args.shape]], args.peers)
    print(*missing, sep="\n", end="\n" if missing else "", flush=True)
    rates: dict[str, dict[str, list[float]]] = {w: {e: [] for e in pythons} for w in args.workloads}
    tokens: dict[tuple[str, str], list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, args.shape)
        with contextlib.suppress(KeyboardInterrupt):  # What there is by then is reported.
            _alternate(args, pythons, folder, rates, tokens, missing)
    _report(args.shape, rates, tokens, missing)


def _alternate(
    args: argparse.Namespace,
    pythons: dict[str, str],
    folder: str,
    rates: dict[str, dict[str, list[float]]],
    tokens: dict[tuple[str, str], list[list[int]]],
    missing: list[str],
) -> None:
    """Adds what every engine reaches, in turn, to `rates` and `tokens`."""
    for repeat in range(args.repeats):
        for workload in args.workloads:
            for engine, python in pythons.items():
                try:
                    answer = _measure(engine, python, folder, workload)
                except PeerError as error:
                    missing.append(f"{engine} failed in run {repeat + 1} of {args.repeats} of {workload}: {error}")
                    print(missing[-1], flush=True)
                    continue
                rates[workload][engine].append(answer["rate"])
                tokens[workload, engine] = answer["tokens"]
                print(f"{repeat + 1}/{args.repeats} {workload} {engine}: {answer['rate']:.0f} tok/CPU-s", flush=True)


def _pythons(engines: list[str], peers: Path | None) -> tuple[dict[str, str], list[str]]:
    """The interpreter of each engine, and a sentence on each that is left out as it has none."""
    found, missing = {}, []
    for engine in engines:
        python = Path(sys.executable) if engine in OURS else (peers or Path()) / engine / "bin" / "python"
        if engine in PEERS and (peers is None or not python.exists()):
            makes = f"benchmarks/engine/install_peers.sh FOLDER {engine} makes one"
            missing.append(f"{engine} is left out: no environment; {makes}")
        else:
            found[engine] = str(python)
    return found, missing


class PeerError(Exception):
    """An engine gave no figure: the others go on."""


def _last_error(text: str) -> str:
    """The first line of what the last traceback ended with, or the last lines."""
    lines = text.strip().splitlines()
    errors = [line for line in lines if re.match(r"(.*\)?\s*)?[\w.]*(Error|Exception|Exit)\b", line)]
    return errors[-1].strip() if errors else "\n".join(lines[-5:])


def _measure(engine: str, python: str, folder: str, workload: str) -> dict[str, Any]:
    # By itself vLLM keeps one of the cores it may use free, of which there is one here.
    vllm = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENVINO_LOG_LEVEL": "0", **vllm}
    command = [python, "-m", "benchmarks.engine.throughput", "--child", engine, folder, workload]
    answer = subprocess.run(command, check=False, env={**os.environ, **own}, capture_output=True, text=True)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise PeerError(_last_error(answer.stderr) or f"it ended with status {answer.returncode} and no result")
    return json.loads(lines[-1][7:])


def _report(
    shape: str,
    rates: dict[str, dict[str, list[float]]],
    tokens: dict[tuple[str, str], list[list[int]]],
    missing: list[str],
) -> None:
    from benchmarks.lib.record import write_record
    from exeplan.planner.reports.tables import table

    rows = []
    for workload, by_engine in rates.items():
        medians = {engine: median(found) for engine, found in by_engine.items() if found}
        ours = medians.get("exeplan")
        for engine, found in by_engine.items():
            if not found:
                rows.append((f"{workload} {engine}", "failed", "-", "-", "-"))
                continue
            same = _same(tokens.get((workload, "exeplan")), tokens[workload, engine])
            spread = max(found) / min(found) - 1
            ratio = f"{ours / medians[engine]:.2f}" if ours else "-"
            rows.append((f"{workload} {engine}", f"{medians[engine]:.0f}", f"{100 * spread:.0f} %", ratio, same))
    print()
    print(table(("", "tok/CPU-s", "spread", "exeplan is x times", "same tokens"), rows))
    suffix = "" if shape == "llama-50m" else f"-{shape}"
    print(*missing, sep="\n", end="\n" if missing else "")
    body = {"shape": shape, "rates": rates, "rows": rows, "missing": missing}
    print(f"\nrecord: {write_record(f'engine-throughput{suffix}', body)}")


def _same(ours: list[list[int]] | None, theirs: list[list[int]]) -> str:
    if ours is None:
        return "-"
    pairs = [(a, b) for o, t in zip(ours, theirs, strict=True) for a, b in zip(o, t, strict=True)]
    return f"{100 * sum(a == b for a, b in pairs) / len(pairs):.1f} %"


if __name__ == "__main__":
    main()
