"""Quantized weights on one CPU thread: output tokens per CPU-second, and how far logits are from those of bfloat16.

    benchmarks/engine/install_peers.sh FOLDER openvino ctranslate2
    python -m benchmarks.engine.quantized [--peers FOLDER] [--repeats 3] [--batches 1 16] [--only NAME ...]

Llama shape with 8 layers, hidden 1024, 16 heads of which 4 have keys and values, FFN 2816, vocabulary 8,192, random
weights in bfloat16; from them are rounded, by this file, an int8 checkpoint with a scale an output (W8A16, and W8A8
whose inputs are rounded a token) and one of 4 bits in groups of 128, in the layouts of compressed-tensors. Prompts of
64 tokens; a batch starts at once. OpenVINO (int8 and 4 bits in groups of 128, by NNCF) and CTranslate2 (int8) round the
same weights by their own rules, embedding and head included, where exeplan has these in the layer's dtype. Peers run in
environments of their own, which `install_peers.sh` makes; those that are missing are left out, which a sentence says.
Each engine runs in its own process, engines alternate within a repeat, medians are reported. Logits are those after the
prompts; their error is the norm of the difference from transformers' in bfloat16 over the norm of these, each about its
mean; random weights have no outliers, so errors of trained models are larger. Writes records/engine-quantized.json.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PROGRAMS = Path(__file__).parent / "quantized_peers"
OURS = {
    "exeplan float32": ("plain", "float32"),
    "exeplan bfloat16": ("plain", "bfloat16"),
    "exeplan w8a16": ("w8a16", "bfloat16"),
    "exeplan w8a8": ("w8a8", "bfloat16"),
    "exeplan w8a8 float32": ("w8a8", "float32"),
    "exeplan 4 bits": ("int4", "bfloat16"),
}
"""Checkpoint and dtype."""
PEERS = {
    "openvino int8": ("openvino_generate.py", "8"),
    "openvino 4 bits": ("openvino_generate.py", "4"),
    "ctranslate2 int8": ("ctranslate2_generate.py", "int8"),
}
"""Program and its setting."""
VOCABULARY, GROUP = 8192, 128
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}


def make_checkpoints(folder: Path) -> "Tensor":
    """Of `plain`, `w8a16`, `w8a8` and `int4`; the logits of transformers in bfloat16 after each prompt."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=2816,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).bfloat16().eval()
    model.save_pretrained(folder / "plain")
    words = models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, "t0")
    texts = {f"{kind}_token": "t0" for kind in ("unk", "bos", "eos")}  # CTranslate2 asks for them.
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **texts).save_pretrained(folder / "plain")
    for name, scheme, form, rows in (
        ("w8a16", INT8, "int-quantized", None),
        ("w8a8", INT8, "int-quantized", TOKENS),
        ("int4", INT4, "pack-quantized", None),
    ):
        _quantize(folder / "plain", folder / name, scheme, form, rows)
    work = json.loads((folder / "work.json").read_text())
    with torch.inference_mode():
        return model(torch.tensor(work["prompts"])).logits[:, -1].float()


def _quantize(plain: Path, to: Path, scheme: dict[str, Any], form: str, rows: dict[str, Any] | None) -> None:
    from safetensors.torch import load_file, save_file

    to.mkdir()
    config = json.loads((plain / "config.json").read_text())
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": rows}}
    how = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            below = name.removesuffix("weight")
            found = _int4(tensor.float()) if scheme["num_bits"] == 4 else _int8(tensor.float())
            tensors |= {f"{below}{part}": value for part, value in found.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def _int8(weight: "Tensor") -> dict[str, "Tensor"]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().char(), "weight_scale": scale}


def _int4(weight: "Tensor") -> dict[str, "Tensor"]:
    import torch

    grouped = weight.view(len(weight), -1, GROUP)
    scale = grouped.abs().amax(2) / 7.5
    value = (grouped / scale[..., None]).round().clamp(-8, 7).view(len(weight), -1, 8).int() + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    packed = (value << shifts).sum(-1, dtype=torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def run_exeplan(folder: Path, checkpoint: str, dtype: str, output: Path) -> dict[str, Any]:
    import numpy as np
    import torch

    from exeplan.core.batch import Batch, SequenceState
    from exeplan.core.models.model import load_model_spec
    from exeplan.core.schedule import Schedule
    from exeplan.runner.compute.model_runner import ModelRunner
    from exeplan.runner.compute.tokens.sampling import SamplingParams
    from exeplan.runner.engine.engine import Engine, Request
    from exeplan.runner.engine.executor import InProcessExecutor
    from exeplan.runner.engine_process.build import warm_up

    torch.set_num_threads(1)
    work = json.loads((folder / "work.json").read_text())
    prompts, count, rates = work["prompts"], work["outputs"], []
    blocks = 2 + (len(prompts[0]) + count) // 16
    runner = ModelRunner(load_model_spec(str(folder / checkpoint)), dtype=dtype, num_blocks=blocks * len(prompts))
    logits = []
    for prompt in prompts:
        sequence = SequenceState(request_id="a", num_prompt_tokens=len(prompt), max_output_tokens=1, num_blocks=blocks)
        logits.append(runner.forward(Batch(prefill=(sequence,)), {"a": prompt}))
        runner.free("a")
    np.save(output, torch.cat(logits).numpy())
    for size in work["batches"]:
        schedule = Schedule("rra", {"prefill_batch": size, "decode_steps": count})
        engine = Engine(InProcessExecutor(runner), schedule, tokenizer=None, num_blocks=blocks * len(prompts))
        warm_up(engine)
        began = time.process_time()
        for index, prompt in enumerate(prompts[:size]):
            sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        found = 0
        while engine.has_work:
            found += sum(len(out.token_ids) for out in engine.step())
        assert found == size * count
        rates.append(found / (time.process_time() - began))
    return {"rates": rates, "weight_bytes": runner.weight_bytes}


def child(folder: str, name: str) -> None:
    """One measurement of exeplan, printed as JSON."""
    found = run_exeplan(Path(folder), *OURS[name], Path(folder) / "work.json.logits.npy")
    print("RESULT " + json.dumps(found))


def pythons_of(names: list[str], peers: Path | None) -> dict[str, str]:
    """The interpreter of each engine; engines without one are left out, which a sentence says."""
    found = {}
    for name in names:
        python = Path(sys.executable) if name in OURS else (peers or Path()) / name.split()[0] / "bin" / "python"
        if name in PEERS and (peers is None or not python.exists()):
            print(f"{name} is left out: no environment; benchmarks/engine/install_peers.sh FOLDER makes one")
        else:
            found[name] = str(python)
    return found


def measured(name: str, folder: Path, python: str) -> dict[str, Any] | None:
    """The answer of one process, pinned to a core; None for a peer that failed, with a sentence."""
    if name in OURS:
        command = [sys.executable, "-m", "benchmarks.engine.quantized", "--child", str(folder), name]
    else:
        program, setting = PEERS[name]
        command = [python, str(PROGRAMS / program), str(folder / "plain"), str(folder / "work.json"), setting]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    core = max(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(core), *command],
        check=False,
        env={**os.environ, **threads, **({} if name in OURS else {"PYTHONPATH": ""})},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return json.loads(lines[-1][7:])
    said = done.stderr.strip().splitlines()
    print(f"{name} failed: {said[-1][:300] if said else f'status {done.returncode}'}", flush=True)
    if name in OURS:
        raise SystemExit(1)
    return None


def error(path: Path, expected: "Tensor") -> tuple[float, float]:
    """Relative to the expected logits, about the mean; and the share of prompts with the same most likely token."""
    import numpy as np
    import torch

    found = torch.from_numpy(np.load(path)).float()
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    found, expected = (part - part.mean(-1, keepdim=True) for part in (found, expected))
    return float((found - expected).norm() / expected.norm()), float(same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="environments that install_peers.sh made")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--outputs", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    pythons = pythons_of(args.only, args.peers)
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCABULARY) for _ in range(64)] for _ in range(max(args.batches))]
    rates: dict[str, list[list[float]]] = {name: [] for name in pythons}
    errors: dict[str, tuple[float, float]] = {}
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        work = {"prompts": prompts, "outputs": args.outputs, "batches": args.batches}
        (folder / "work.json").write_text(json.dumps(work))
        expected = make_checkpoints(folder)
        for repeat in range(args.repeats):
            for name in [name for name in pythons if name in rates]:
                answer = measured(name, folder, pythons[name])
                if answer is None:
                    del rates[name]
                    continue
                rates[name].append(answer.pop("rates"))
                details[name] = answer
                errors[name] = error(folder / "work.json.logits.npy", expected)
                told = ", ".join(f"{rate:.0f}" for rate in rates[name][-1])
                print(f"{repeat + 1}/{args.repeats} {name}: {told} tok/CPU-s", flush=True)
    report(rates, errors, details, args.batches)


def report(
    rates: dict[str, list[list[float]]],
    errors: dict[str, tuple[float, float]],
    details: dict[str, Any],
    batches: list[int],
) -> None:
    from benchmarks.lib.record import write_record
    from exeplan.planner.reports.tables import table

    rows = []
    for name, found in rates.items():
        columns = list(zip(*found, strict=True))
        wide = max(max(column) / min(column) - 1 for column in columns)
        wrong, same = errors[name]
        rows.append((name, *(f"{median(c):.0f}" for c in columns), f"{wide:.0%}", f"{wrong:.2%}", f"{same:.0%}"))
    heads = ("", *(f"tok/CPU-s, batch {size}" for size in batches), "spread", "error of logits", "same token")
    print()
    print(table(heads, rows))
    body = {"batches": batches, "rates": rates, "errors": errors, "details": details, "rows": rows}
    print(f"\nrecord: {write_record('engine-quantized', body)}")


if __name__ == "__main__":
    main()
