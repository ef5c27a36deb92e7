"""Output tokens a second on a fixed set of requests, against transformers and vLLM on the same GPU in the same run.

All requests at once, greedy, to their full length, random weights of one shape. `generate` pads on the left and runs
until the longest output; only requested tokens count. Each engine runs the set twice, and the second run
counts: the first one compiles, tunes and warms caches. Peers run in processes of their own, which leave no memory
behind; vLLM by the interpreter that `EXEPLAN_VLLM_PYTHON` names where it is not installed beside exeplan, and one that
is installed in neither is named in the report.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import Clock, Section, Setting, give_back, setting_for
from exeplan.core.batch import num_blocks_for
from exeplan.core.schedule import Schedule
from exeplan.profiler.measuring.device import synchronize
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.warm_up import warm_up_runner
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Request

_LEAST_SECONDS = 60.0
"""For a peer to load and run, whatever is left of the section's time."""
_VLLM_PYTHON, _VLLM_CLASS = "EXEPLAN_VLLM_PYTHON", "LlamaForCausalLM"
_NOT_IN_SMOKE = {
    "continuous": "continuous batching of transformers takes minutes on a CPU",
    "vllm": "vLLM's CUDA build does not run on a CPU",
}
Work = list[tuple[list[int], int]]
"""Prompt token ids and output tokens of every request."""


def run(setting: Setting, clock: Clock) -> Section:
    work = _requests(setting)
    total = sum(output for _, output in work)
    shown = f"{len(work)} requests, {sum(len(prompt) for prompt, _ in work)} tokens in, {total} out"
    section = Section(
        title=f"end to end: {shown}", header=("engine", "seconds", "output tokens/s", "exeplan is x times")
    )
    found: dict[str, float] = {}
    for name in ("exeplan", *PEERS, "vllm"):
        if clock.left < 0:
            section.notes.append(f"out of time before {name}")
            break
        if setting.smoke and name in _NOT_IN_SMOKE:
            section.notes.append(f"{_NOT_IN_SMOKE[name]}: left out of a smoke run")
            continue
        try:
            found[name] = _exeplan(setting, work) if name == "exeplan" else _in_child(name, setting, clock)
        except ModuleNotFoundError as error:
            section.notes.append(f"{name}: {error}")
        except Exception as error:
            section.failures.append(f"{name}: {type(error).__name__}: {error}")
        give_back(setting)
    for name, seconds in found.items():
        ratio = seconds / found["exeplan"] if "exeplan" in found else None
        cells = (name, f"{seconds:.2f}", f"{total / seconds:.0f}", f"{ratio:.2f}" if ratio else "-")
        section.add(cells, engine=name, seconds=seconds, tokens_per_second=total / seconds, ratio=ratio)
    return section


def _in_child(name: str, setting: Setting, clock: Clock) -> float:
    """Seconds of a peer. Raises ModuleNotFoundError where it is not installed."""
    package, python = ("vllm", os.environ.get(_VLLM_PYTHON)) if name == "vllm" else ("transformers", None)
    if python is None and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is not there")
    if setting.smoke:  # On a CPU nothing stays behind, and a process takes longer to start than to run.
        return PEERS[name](setting, _requests(setting))
    if name == "vllm":  # Its environment need not have exeplan.
        return _vllm(setting, python or sys.executable, max(clock.left, _LEAST_SECONDS))
    command = [sys.executable, "-m", "benchmarks.gpu.peers", name]
    return _result(command, max(clock.left, _LEAST_SECONDS))


def _vllm(setting: Setting, python: str, seconds: float) -> float:
    """Seconds of vLLM on the same requests and the same shape."""
    config = {**setting.spec.config, "architectures": [_VLLM_CLASS], "eos_token_id": None, "bos_token_id": None}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "work.json").write_text(json.dumps(_requests(setting)))
        script = Path(__file__).with_name("with_vllm.py")
        return _result([python, str(script), folder, setting.dtype], seconds)


def _result(command: list[str], seconds: float) -> float:
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    lines = [line for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"its process ended with status {answer.returncode}: {answer.stderr[-500:]}")
    return float(lines[-1].split()[1])


def _requests(setting: Setting) -> Work:
    draw, low, high = random.Random(0), setting.size(64, 4), setting.size(512, 12)
    sizes = [(draw.randint(low, high), draw.randint(low, high // 2)) for _ in range(setting.size(128, 4))]
    vocab = setting.spec.vocab_size
    return [([draw.randrange(vocab // 2, vocab) for _ in range(prompt)], output) for prompt, output in sizes]


def _second(play: Callable[[], object], setting: Setting) -> float:
    """Seconds of the second of two runs."""
    for _ in range(2):
        synchronize(setting.place)
        start = time.perf_counter()
        play()
        synchronize(setting.place)
    return time.perf_counter() - start


def _exeplan(setting: Setting, work: Work) -> float:
    paged_with = setting.kernels if setting.smoke else None
    blocks = sum(num_blocks_for(len(prompt) + output + 1) for prompt, output in work)
    options: dict[str, Any] = {
        "dtype": setting.dtype,
        "device": str(setting.place),
        "dummy_weights": True,
        "paged_with": paged_with,
    }
    runner = ModelRunner(setting.spec, num_blocks=blocks, **options)
    warm_up_runner(runner, len(work))

    def play() -> None:
        schedule = Schedule("orca", {"max_num_seqs": len(work)})
        engine = Engine(AsyncExecutor(runner), schedule, num_blocks=blocks)
        for index, (prompt, output) in enumerate(work):
            sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            engine.add(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        given = 0
        while engine.has_work:
            given += sum(len(out.token_ids) for out in engine.step())
        assert given == sum(output for _, output in work), "every token that was asked for must be given"

    return _second(play, setting)


def _model(setting: Setting) -> Any:
    """The shape in transformers, with its own random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**setting.spec.config, "eos_token_id": None, "bos_token_id": None})
    with torch.device(setting.place):
        model = AutoModelForCausalLM.from_config(config, dtype=setting.torch_dtype, attn_implementation="sdpa")
    return model.eval()


def _generate(setting: Setting, work: Work) -> float:
    model = _model(setting)
    width, steps = max(len(prompt) for prompt, _ in work), max(output for _, output in work)
    ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in work], device=setting.place)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in work], device=setting.place)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def play() -> None:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, **options)
        assert out.shape[1] == width + steps

    return _second(play, setting)


def _continuous(setting: Setting, work: Work) -> float:
    from transformers import GenerationConfig

    model, longest = _model(setting), max(output for _, output in work)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        return _second(lambda: _play_continuous(manager, work), setting)
    finally:
        manager.stop(block=True)


def _play_continuous(manager: Any, work: Work) -> None:
    names = [manager.add_request(prompt, max_new_tokens=output) for prompt, output in work]
    left = set(names)
    while left:
        result = manager.get_result(timeout=5)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching stopped")
        if result is not None and result.is_finished():
            left.discard(result.request_id)


PEERS = {"generate": _generate, "continuous": _continuous}


if __name__ == "__main__":
    here = setting_for(smoke=False)
    print(f"RESULT {PEERS[sys.argv[1]](here, _requests(here))}")
