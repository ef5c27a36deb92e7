"""Reported prompts: log-probabilities of a prompt's tokens, put together from the passes that computed its parts.

A request's state keeps the parts until the pass that ends its prefill, whose token takes all of them along. A prefill
that begins again, because its request was preempted or its workers died, begins with no parts. Once the first token is
out, so are they: a prefill of prompt and output reports nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from exeplan.core.batch import Batch
from exeplan.runner.compute.tokens.prompt_logprobs import PromptPart
from exeplan.runner.compute.tokens.sampling import SampledToken
from exeplan.runner.engine.requests import as_requests
from exeplan.runner.ipc.messages import PromptLogprobs

Whole = Mapping[str, Sequence[PromptPart]]
"""All parts of prompts, by request id."""


def reported(batch: Batch) -> dict[str, int]:
    """By request id: how many of the most likely tokens are reported with each token of a prompt, where any are."""
    return {
        row.request_id: count
        for row in as_requests(batch.prefill)
        if not row.plain and not row.num_output_tokens and (count := row.sampling.prompt_logprobs) is not None
    }


def keep_parts(batch: Batch, parts: Mapping[str, PromptPart]) -> Whole:
    """Keeps what a pass has reported, until the whole prompt is. Returns those that are."""
    if not parts:
        return {}
    whole: dict[str, Sequence[PromptPart]] = {}
    ends = set(batch.whole_prefills)
    for row in as_requests(batch.prefill):
        if part := parts.get(row.request_id):
            row.prompt_parts = [*row.prompt_parts, part] if part.start else [part]
            if row in ends:
                whole[row.request_id], row.prompt_parts = row.prompt_parts, []
    return whole


def with_prompts(tokens: dict[str, SampledToken | None], whole: Whole) -> dict[str, SampledToken | None]:
    """Adds the prompts that a pass has ended to its tokens; None is in place of one with a log-probability of NaN."""
    for request_id, parts in whole.items():
        if token := tokens[request_id]:
            prompt = _joined(parts)
            tokens[request_id] = token._replace(prompt=prompt) if prompt else None
    return tokens


def _joined(parts: Sequence[PromptPart]) -> PromptLogprobs | None:
    fields = [torch.cat(tensors).numpy() for tensors in zip(*(part[1:] for part in parts), strict=True)]
    logprobs, ranks, top_token_ids, top_logprobs = fields
    if np.isnan(logprobs).any() or np.isnan(top_logprobs).any():
        return None
    return PromptLogprobs(
        num_top=top_token_ids.shape[1],
        logprobs=logprobs.astype("<f4").tobytes(),
        ranks=ranks.astype("<i4").tobytes(),
        top_token_ids=top_token_ids.astype("<i4").tobytes(),
        top_logprobs=top_logprobs.astype("<f4").tobytes(),
    )
