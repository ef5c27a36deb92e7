"""Log-likelihoods of texts by a model's logits, one token after the other: what a server's scores must equal."""

from collections.abc import Sequence
from pathlib import Path

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.engine.tokenizer import Tokenizer

_NUM_BLOCKS = 64


def likelihoods(directory: Path, texts: Sequence[tuple[str, str]]) -> list[float]:
    """Of each second text after the first, by the model of a directory with the weights of `--weights dummy`."""
    spec = load_model_spec(str(directory))
    tokenizer, runner = Tokenizer.load(spec), ModelRunner(spec, num_blocks=_NUM_BLOCKS, dummy_weights=True)
    found = []
    for context, text in texts:
        first, last = (tokenizer.encode(part, special=False) for part in (context, text))
        found.append(sum(_logprob(runner, first + last[:number], token) for number, token in enumerate(last)))
    return found


def _logprob(runner: ModelRunner, before: list[int], token: int) -> float:
    blocks = num_blocks_for(len(before))
    row = SequenceState(request_id="a", num_prompt_tokens=len(before), max_output_tokens=1, num_blocks=blocks)
    logits_RV = runner.forward(Batch(prefill=(row,)), {"a": before})
    runner.free("a")
    return logits_RV[0].log_softmax(-1)[token].item()
