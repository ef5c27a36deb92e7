"""Batches as messages: what the engine tells its workers of a batch, and the rows that a worker keeps in return.

A worker mirrors the rows of its engine. A row is told whole when it is prefilled; after that a batch names it and says
its last token and how many KV blocks it has. So a message is short, and every worker of a stage computes the same
placement of blocks from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from exeplan.core.batch import Batch, Chunk, PackedPrompt, Packing
from exeplan.runner.compute.sampling import SampledToken, SamplingParams
from exeplan.runner.engine.kv_regions import Parcel
from exeplan.runner.engine.requests import Row, as_rows


def batch_message(number: int, batch: Batch, *, freed: Iterable[str]) -> dict[str, Any]:
    """A batch whose rows are `Row`s; `freed` are those that have left, or were preempted, since the last message."""
    return {
        "kind": "run",
        "number": number,
        "freed": list(freed),
        "new": [row_message(row) for row in beginning(batch)],
        "prefill": [(row.request_id, row.num_blocks) for row in batch.prefill],
        "decode": [_progress(row) for row in as_rows(batch.decode)],
        "chunks": batch.chunks,
        "pad_to": batch.pad_to,
        "packing": batch.packing and astuple(batch.packing),
        "phase": batch.phase,
    }


def beginning(batch: Batch) -> list[Row]:
    """Rows whose prefill begins with this batch."""
    chunks = batch.chunks or (None,) * len(batch.prefill)
    return [row for row, chunk in zip(as_rows(batch.prefill), chunks, strict=True) if not (chunk and chunk.start)]


def row_message(row: Row) -> dict[str, Any]:
    """Everything that a worker must know of a row."""
    return {
        "request_id": row.request_id,
        "num_prompt_tokens": row.num_prompt_tokens,
        "max_output_tokens": row.max_output_tokens,
        "num_output_tokens": row.num_output_tokens,
        "sampling": None if row.plain else asdict(row.sampling),
        "seed": row.seed,
        "prompt_token_ids": row.prompt_token_ids if row.num_begin_tokens else None,
        "token_ids": row.token_ids,
        "banned_token_ids": row.banned_token_ids,
    }


def parcel_message(parcel: Parcel) -> list[Any]:
    """A parcel of a row that the workers know, and which gets so many blocks."""
    row, *place = parcel
    return [row.request_id, row.num_blocks, *place]


def _progress(row: Row) -> tuple[str, int, int, int]:
    return row.request_id, row.num_blocks, row.num_output_tokens, row.token_ids[-1]


def token_messages(tokens: Mapping[str, SampledToken | None]) -> list[list[Any]]:
    return [[request_id, *(token or (None,))] for request_id, token in tokens.items()]


def tokens_from(messages: Iterable[list[Any]]) -> dict[str, SampledToken | None]:
    """The tokens of `token_messages`, as they were."""
    found: dict[str, SampledToken | None] = {}
    for request_id, token_id, *rest in messages:
        logprob, top = rest or (None, ())
        top_logprobs = tuple((token, value) for token, value in top)
        found[request_id] = None if token_id is None else SampledToken(token_id, logprob, top_logprobs)
    return found


class Mirror:
    """The rows of an engine as one worker knows them."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(self, message: Mapping[str, Any]) -> Row:
        """A row that is told whole: a new one, or one that is computed again."""
        token_ids, sampling = list(message["token_ids"]), message["sampling"]
        row = Row(
            request_id=message["request_id"],
            num_prompt_tokens=message["num_prompt_tokens"],
            max_output_tokens=message["max_output_tokens"],
            num_output_tokens=message["num_output_tokens"],
            sampling=sampling_from(sampling) if sampling else SamplingParams(temperature=0.0),
            plain=sampling is None,
            seed=message["seed"],
            prompt_token_ids=message["prompt_token_ids"] or token_ids[: message["num_prompt_tokens"]],
            token_ids=token_ids,
            banned_token_ids=tuple(message["banned_token_ids"]),
            end_token_ids=frozenset(),
            stream=None,
            arrival=0.0,
        )
        self.rows[row.request_id] = row
        return row

    def parcel(self, message: Sequence[Any]) -> Parcel:
        """The parcel of a message."""
        request_id, num_blocks, *place = message
        return Parcel(self._granted(request_id, num_blocks), *place)

    def batch(self, message: Mapping[str, Any]) -> Batch:
        """The batch of a message, whose new rows are added first."""
        for row in message["new"]:
            self.add(row)
        return Batch(
            prefill=tuple(self._granted(*entry) for entry in message["prefill"]),
            decode=tuple(self._decoding(*entry) for entry in message["decode"]),
            pad_to=message["pad_to"],
            chunks=tuple(Chunk(*chunk) for chunk in message["chunks"]),
            packing=_packing(message["packing"]),
            phase=message["phase"],
        )

    def _granted(self, request_id: str, num_blocks: int) -> Row:
        row = self.rows[request_id]
        row.num_blocks = num_blocks
        return row

    def _decoding(self, request_id: str, num_blocks: int, num_output_tokens: int, last_token: int) -> Row:
        row = self._granted(request_id, num_blocks)
        if num_output_tokens > row.num_output_tokens:
            row.token_ids.append(last_token)
            row.num_output_tokens = num_output_tokens
        return row


def _packing(fields: Sequence[Any] | None) -> Packing | None:
    if fields is None:
        return None
    row_tokens, slot_tokens, places = fields
    return Packing(row_tokens, slot_tokens, tuple(PackedPrompt(*place) for place in places))


def sampling_from(fields: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters as they come out of JSON, whose keys are text."""
    bias = {int(token): value for token, value in fields["logit_bias"].items()}
    return SamplingParams(**{**fields, "logit_bias": bias})
