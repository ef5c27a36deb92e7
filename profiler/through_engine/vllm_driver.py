"""Runs passes of chosen batches on vLLM and reports their seconds: a program for the interpreter that has vLLM.

    python vllm_driver.py        setup, then batches, as JSON lines on standard input; replies on standard output

The engine core is a process of its own, as under `vllm serve`, and nothing but its outputs is timed: a pass is what
lies between two of them, its scheduling and sampling included. A first prompt keeps the engine busy until all prompts
of a prefill are queued, so that one pass has them all. It imports nothing of exeplan, which
need not be installed there.
"""

import json
import os
import sys
import time
from typing import Any

_SETTLE_SECONDS = 0.005
_BLOCKER_TOKENS, _DELAY_SECONDS, _ATTEMPTS = 64, 0.001, 12
_WAITED_SECONDS = 0.0003
"""From which on an output was waited for, and was not there already."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output.
    setup = json.loads(sys.stdin.readline())
    try:
        driver = _Driver(setup)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies)
        raise
    print(json.dumps({"version": driver.version}), file=replies)
    for line in sys.stdin:
        wanted = json.loads(line)
        seconds = driver.decode(**wanted["decode"]) if "decode" in wanted else driver.prefill(**wanted["prefill"])
        print(json.dumps({"seconds": seconds}), file=replies)


class _Driver:
    def __init__(self, setup: dict[str, Any]) -> None:
        import vllm
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.version = vllm.__version__
        family = setup.pop("model_type")
        overrides = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}
        self._vocab_size = setup.pop("vocab_size")
        self._longest_prompt = min(setup["max_num_batched_tokens"], setup["max_model_len"] - 1)
        args = EngineArgs(
            **setup,
            hf_overrides=overrides,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)
        self._made = 0

    def prefill(self, lengths: list[int]) -> float:
        """Of one pass that has prompts of these lengths alone."""
        blocker, delay = min(self._longest_prompt, _BLOCKER_TOKENS), _DELAY_SECONDS
        for _ in range(_ATTEMPTS):
            first = self._add(blocker, 1)
            time.sleep(delay)  # Until it runs: what is queued together runs together.
            names = {self._add(length, 1) for length in lengths}
            queued = time.perf_counter()
            times: dict[str, float] = {}
            while len(times) <= len(names):
                outputs = self._engine.step()
                now = time.perf_counter()
                times.update((output.request_id, now) for output in outputs if output.finished)
            started, ends = times[first], {times[name] for name in names}
            if started in ends:
                delay *= 2
            elif len(ends) > 1 or started - queued < _WAITED_SECONDS:  # It ended before all were queued.
                blocker = min(self._longest_prompt, 2 * blocker)
            else:
                return ends.pop() - started
        raise RuntimeError(f"{len(lengths)} prompts did not come into one pass")

    def decode(self, num_seqs: int, context: int, steps: int) -> list[float]:
        """Of `steps` successive passes in which so many sequences get a token; the mean context is that of the middle
        one."""
        names = {self._add(context, None) for _ in range(num_seqs)}
        intervals: list[float] = []
        before = None
        while len(intervals) < steps:
            outputs = self._engine.step()
            now = time.perf_counter()
            if len(outputs) == num_seqs:
                if before is not None:
                    intervals.append(now - before)
                before = now
        self._engine.abort_request(list(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        time.sleep(_SETTLE_SECONDS)  # Until the engine core has read that.
        return intervals

    def _add(self, length: int, max_tokens: int | None) -> str:
        from vllm import SamplingParams

        self._made += 1
        tokens = [(self._made * 7919 + 31 * place) % self._vocab_size for place in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        name = str(self._made)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name


if __name__ == "__main__":
    main()
