"""From a directory of weights to an answer over HTTP by the three commands, for a family of every file of them."""

import json
import os
import pkgutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from exeplan.cli import main
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import load_profile
from exeplan.core.schedule import Sharding, Stage
from exeplan.planner.load_problem import load_plan
from exeplan.runner import models
from exeplan.runner.compute.weights.shard import Shard
from exeplan.simulator.memory import weight_bytes

from ..runner.preloaded import Preloaded, Program

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.usefixtures("rates_measured_once")
VOCAB = 64
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DECODER = {
    **NO_END, "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
ROTARY = {**DECODER, "num_key_value_heads": 2, "intermediate_size": 48}
HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "mistral": {**ROTARY, "sliding_window": 16},
    "opt": {**DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {**NO_END, "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "t5": {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "eos_token_id": None,
    },
    "marian": {
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in HALF.items()},
        "vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 64, "pad_token_id": 0,
        "decoder_start_token_id": 0, "eos_token_id": None, "forced_eos_token_id": None,
    },
    "qwen3_moe": {**ROTARY, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **ROTARY, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v2": {
        **ROTARY, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
PROMPT, COUNT = [3, 1, 4, 1, 5], 4


def save_checkpoint(family: str, directory: Path) -> str:
    """A random checkpoint with a token a word, and what transformers generates with it."""
    torch.manual_seed(0)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family](**CONFIGS[family])
    several = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = several.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    model.save_pretrained(directory)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{number}": number for number in range(VOCAB)}, "t0"))
    words.save(str(directory / "tokenizer.json"))
    inputs = torch.tensor([PROMPT])
    found = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
    )[0].tolist()
    return words.decode(found[1:] if config.is_encoder_decoder else found[len(PROMPT) :])


@contextmanager
def serving(plan: Path, *options: str, preloaded: Preloaded | None = None) -> Iterator[str]:
    """The address of `exeplan serve`, started in another working directory, or forked where `preloaded` is given."""
    command = ["serve", str(plan), "--port", "0", "--replan", "off", *options]
    paths = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    server: subprocess.Popen[str] | Program
    if preloaded:
        with chdir("/"):
            server = preloaded.start("import sys; from exeplan.cli import main; sys.exit(main(sys.argv[1:]))", *command)
    else:
        server = subprocess.Popen(
            [sys.executable, "-m", "exeplan", *command],
            cwd="/",
            text=True,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
    with server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert line.startswith("serving "), line
            yield line.split(" at ")[-1].strip()
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


def answered(url: str, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["text"].strip()


def planned(model: str, capsys: pytest.CaptureFixture[str]) -> Path:
    """The plan that the first two commands make of a model."""
    assert main(["profile", model, "-o", "p.json", "--budget", "200ms", "--max-num-seqs", "2"]) == 0
    law, bound = "fixed:in=5;out=4", ["--latency-bound", "inf", "--policy", "orca", "--max-num-seqs", "2"]
    assert main(["optimize", "--profile", "p.json", "--workload", law, *bound, "-o", "plans/plan.yaml"]) == 0
    assert "note: made the directory plans for plan.yaml" in capsys.readouterr().err
    return Path.cwd() / "plans" / "plan.yaml"


def test_every_file_of_families_is_walked() -> None:
    assert {found.name for found in pkgutil.iter_modules(models.__path__)} <= set(CONFIGS)


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"llama"}))  # Which is walked below.
def test_from_a_directory_to_an_answer(
    family: str,
    preloaded: Preloaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = save_checkpoint(family, tmp_path / "models" / family)
    with serving(planned(f"models/{family}", capsys), preloaded=preloaded) as url:
        assert answered(url, family) == expected


@pytest.mark.parametrize(
    ("layout", "dtype", "held"), [("awq-32", "bfloat16", "4 bits"), ("w8a16", "float32", "8 bits")]
)
def test_from_a_quantized_directory_to_an_answer(
    layout: str,
    dtype: str,
    held: str,
    preloaded: Preloaded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # Not above: the folder of the kernels' tests imports them first, and triton, as transformers' models do.
    from exeplan.kernels.products.int4_linear import multiplies_int4
    from exeplan.kernels.products.int8_linear import multiplies_int8
    from exeplan.runner.compute.model_runner import ModelRunner

    from ..runner.models import quantized_checkpoints

    directory, model = quantized_checkpoints.save(tmp_path, "qwen3", quantized_checkpoints.LAYOUTS[layout])
    words = tokenizers.models.WordLevel({f"t{number}": number for number in range(quantized_checkpoints.VOCAB)}, "t0")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))
    assert main(["profile", "quantized", "-o", "p.json", "--budget", "200ms", "--max-num-seqs", "2"]) == 0
    told = capfd.readouterr().err
    assert "the weights of 'quantized' (" in told
    if multiplies_int8(torch.device("cpu")) and multiplies_int4(torch.device("cpu")):
        assert f"are kept in {held}" in told
    profile = load_profile(Path("p.json"))
    engine = ModelRunner(load_model_spec("quantized"), dtype=dtype, num_blocks=1)
    assert (profile.dtype, profile.weight_bytes) == (dtype, engine.weight_bytes)
    whole = (Stage(layers=(0, 2)),)
    assert weight_bytes(profile, whole, 0) == pytest.approx(engine.weight_bytes)
    for number, layers in enumerate(((0, 1), (1, 2))):
        halves = (Stage(layers=(0, 1)), Stage(layers=(1, 2)))
        shard = Shard(layers=layers, first=number == 0, last=number == 1)
        part = ModelRunner(load_model_spec("quantized"), shard=shard, dtype=dtype, num_blocks=1)
        assert weight_bytes(profile, halves, number) == pytest.approx(part.weight_bytes, rel=0.01)
    law, bound = "fixed:in=5;out=4", ["--latency-bound", "inf", "--policy", "orca", "--max-num-seqs", "2"]
    assert main(["optimize", "--profile", "p.json", "--workload", law, *bound, "-o", "plan.yaml"]) == 0
    capfd.readouterr()
    others = quantized_checkpoints.save(tmp_path / "others", "qwen3", quantized_checkpoints.LAYOUTS["gptq-8"])[0]
    assert main(["serve", "plan.yaml", "--model-dir", str(others)]) == 2
    assert "the plan was made for other weights (quantization: " in capfd.readouterr().err
    with serving(tmp_path / "plan.yaml", preloaded=preloaded) as url:
        text = answered(url, "quantized")
    inputs = torch.tensor([PROMPT])
    expected = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
    )[0, len(PROMPT) :]
    assert text == " ".join(f"t{token}" for token in expected.tolist())


def test_experts_divided_among_two_workers_from_a_directory_to_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With latent attention, a shared expert, and a layer without experts."""
    monkeypatch.chdir(tmp_path)
    expected = save_checkpoint("deepseek_v2", tmp_path / "mixture")
    measured = ["mixture", "--devices", "2", "-o", "p.json", "--budget", "200ms", "--max-num-seqs", "2"]
    assert main(["profile", *measured]) == 0
    assert Sharding(2, expert_parallel_size=2) in load_profile(Path("p.json")).expert_shardings
    planned = ["--profile", "p.json", "--workload", "fixed:in=5;out=4", "--gpus", "2", "--one-pipeline"]
    bound = ["--latency-bound", "inf", "--policy", "orca", "--max-num-seqs", "4"]
    assert main(["optimize", *planned, *bound, "--explain", "-o", "plan.yaml"]) == 0
    body = yaml.safe_load(Path("plan.yaml").read_text())
    # Which of the layouts is fastest is up to the machine.
    whole = {"devices": [0, 1], "tensor_parallel_size": 2, "expert_parallel_size": 2, "layers": [0, 2]}
    Path("plan.yaml").write_text(yaml.safe_dump({**body, "placement": [whole]}))
    assert main(["simulate", "plan.yaml"]) == 0
    capsys.readouterr()
    assert main(["bench", "plan.yaml", "--requests", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"]["first_other"] is None
    with serving(tmp_path / "plan.yaml") as url:
        assert answered(url, "mixture") == expected


def test_a_model_of_the_hub_and_one_that_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--tiny--llama-1.1"
    expected = save_checkpoint("llama", cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    plan = planned("tiny/llama-1.1", capsys)
    assert load_plan(plan).model == "tiny/llama-1.1"
    moved = (cached / "snapshots" / "abc").rename(tmp_path / "elsewhere")
    assert main(["simulate", str(plan)]) == 0  # The profile has the sizes.
    assert main(["diff", str(plan), str(plan)]) == 0
    assert main(["serve", str(plan)]) == 2
    assert "download it with `hf download tiny/llama-1.1`" in capsys.readouterr().err
    with serving(plan, "--model-dir", str(moved)) as url:
        assert answered(url, "elsewhere") == expected
    (moved / "model.safetensors").unlink()
    assert main(["serve", str(plan), "--model-dir", str(moved)]) == 2
    assert "elsewhere holds no *.safetensors" in capsys.readouterr().err
