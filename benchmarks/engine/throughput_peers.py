"""Peers of `throughput.py`, each run by the interpreter of its own environment; nothing of exeplan is imported.

A request is its prompt's token ids and the number of its output tokens. Every function returns the CPU seconds of all
requests, on one thread, and their tokens. Not here: environments (`install_peers.sh`).
"""

import time
from pathlib import Path
from typing import Any

Work = list[tuple[list[int], int]]
Found = tuple[float, list[list[int]]]
_TOGETHER = 32
"""Requests of a batch where an engine has no continuous batching: those of similar outputs."""


def run_continuous(folder: str, work: Work) -> Found:
    """Transformers' continuous batching, which may need psutil to know how much memory there is."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
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


def _collect(manager: Any, names: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=5)
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching stopped")
        if result is not None and result.error:  # Failed ones count as finished.
            raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = list(result.generated_tokens)
    return found


def run_openvino(folder: str, work: Work) -> Found:
    """OpenVINO GenAI's continuous batching; weights, activations and cache in float32."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai
    from optimum.exporters.openvino import main_export

    exported = Path(folder) / "openvino"
    if not exported.exists():
        main_export(folder, exported, task="text-generation-with-past", ov_config=_plain_weights())
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = len(work)
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    pipe = genai.ContinuousBatchingPipeline(exported, genai.Tokenizer(str(exported)), scheduler, "CPU", **options)

    def run(some: Work) -> list[list[int]]:
        handles = []
        for number, (prompt, outputs) in enumerate(some):
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = outputs
            config.set_eos_token_id(0)
            config.ignore_eos, config.do_sample = True, False
            handles.append(pipe.add_request(number, ov.Tensor(np.array([prompt], dtype=np.int64)), config))
        while pipe.has_non_finished_requests():
            pipe.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    run([(work[0][0][:16], 4), (work[1][0][:16], 4)])
    return _timed(lambda: run(work))


def _plain_weights() -> Any:
    from optimum.intel import OVConfig

    return OVConfig(dtype="fp32")


def run_ctranslate2(folder: str, work: Work) -> Found:
    """CTranslate2 in batches of requests with similar outputs, each as long as its longest."""
    import json

    import ctranslate2

    converted = Path(folder) / "ctranslate2"
    if not converted.exists():
        _tokenizer(folder)
        ctranslate2.converters.TransformersConverter(folder).convert(str(converted), quantization="float32")
    encodes = json.loads((Path(folder) / "config.json").read_text())["model_type"] == "t5"
    kind = ctranslate2.Translator if encodes else ctranslate2.Generator
    model = kind(str(converted), device="cpu", compute_type="float32", inter_threads=1, intra_threads=1)

    def run(some: Work) -> list[list[int]]:
        prompts, longest = [[f"t{token}" for token in prompt] for prompt, _ in some], max(o for _, o in some)
        if encodes:
            # The start token counts as one of those that are decoded.
            lengths = {"max_decoding_length": longest, "min_decoding_length": longest}
            found = model.translate_batch(prompts, beam_size=1, end_token=[], **lengths)
            tokens = [[int(name[1:]) for name in one.hypotheses[0]] for one in found]
        else:
            lengths = {"max_length": longest, "min_length": longest}
            options = {"include_prompt_in_result": False, "end_token": []}
            found = model.generate_batch(prompts, beam_size=1, sampling_topk=1, **lengths, **options)
            tokens = [one.sequences_ids[0] for one in found]
        return [row[:outputs] for row, (_, outputs) in zip(tokens, some, strict=True)]

    def all_of_them() -> list[list[int]]:
        order = sorted(range(len(work)), key=lambda index: work[index][1])
        found: dict[int, list[int]] = {}
        for first in range(0, len(order), _TOGETHER):
            part = order[first : first + _TOGETHER]
            found |= dict(zip(part, run([work[index] for index in part]), strict=True))
        return [found[index] for index in range(len(work))]

    run([(work[0][0][:16], 4), (work[1][0][:16], 4)])
    return _timed(all_of_them)


def _tokenizer(folder: str) -> None:
    """One whose token of a number is `t` and the number: CTranslate2 takes texts of tokens."""
    import json

    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    words = models.WordLevel({f"t{number}": number for number in range(size)}, "t0")
    texts = {f"{kind}_token": "t0" for kind in ("unk", "bos", "eos", "pad")}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **texts).save_pretrained(folder)


def run_vllm(folder: str, work: Work) -> Found:
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


def _timed(run: Any) -> Found:
    began = time.process_time()
    tokens = run()
    return time.process_time() - began, tokens
