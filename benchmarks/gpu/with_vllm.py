"""vLLM on a fixed set of requests, in an environment that has vLLM and need not have exeplan.

    python benchmarks/gpu/with_vllm.py FOLDER DTYPE

The folder holds the model's `config.json`, and `work.json`: prompts as token ids, and output tokens. Weights are
random. Run by `benchmarks.gpu.peers`, which reads the line with the seconds of the second of two runs.
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, dtype = sys.argv[1:]
    work = json.loads((Path(folder) / "work.json").read_text())
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        max_num_seqs=len(work),
        max_model_len=max(len(prompt) + output for prompt, output in work) + 1,
        enable_prefix_caching=False,  # Otherwise the second run would find the prompts of the first.
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    wanted = [
        SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False) for _, output in work
    ]
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        answers = llm.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - start
        given = sum(len(answer.outputs[0].token_ids) for answer in answers)
        assert given == sum(output for _, output in work), "every token that was asked for must be given"
    print(f"RESULT {seconds}")


if __name__ == "__main__":
    main()
