"""Batches as messages: what the engine tells its workers of a batch, and the sequences that a worker mirrors.

A sequence is sent whole when its prefill begins; after that a batch names it, with the tokens that have become known
and the number of its KV blocks. So a message is short, and every worker of a stage computes the same block tables.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import msgspec

from exeplan.core.batch import Batch
from exeplan.runner.compute.tokens.sampling import SampledToken, SamplingParams
from exeplan.runner.engine.kv_regions import KVRegion
from exeplan.runner.engine.requests import RequestState, as_requests
from exeplan.runner.ipc.messages import (
    DecodeSequence,
    KVRegionOf,
    NewSequence,
    PrefillSequence,
    RunBatch,
    SampledTokenOf,
    Sampling,
)


def batch_message(
    number: int,
    batch: Batch,
    *,
    freed: Sequence[str],
    encoded: Sequence[int] = (),
    news: Callable[[RequestState], Sequence[int]] = lambda row: (),
) -> RunBatch:
    """A batch of `RequestState`s as a message.

    `freed` are the requests that left or were preempted since the last message, `encoded` the batches whose encoder
    output has to be taken before this one, `news` the tokens of a row that its workers have not been told.
    """
    return RunBatch(
        number=number,
        freed=freed,
        new=[new_sequence(row) for row in beginning(batch)],
        prefill=[PrefillSequence(row.request_id, row.num_blocks) for row in batch.prefill],
        decode=[
            DecodeSequence(row.request_id, row.num_blocks, row.num_output_tokens, news(row))
            for row in as_requests(batch.decode)
        ],
        chunks=batch.chunks,
        pad_to=batch.pad_to,
        packing=batch.packing,
        phase=batch.phase,
        encoded=encoded,
    )


def beginning(batch: Batch) -> list[RequestState]:
    """Rows whose prefill begins with this batch."""
    chunks = batch.chunks or (None,) * len(batch.prefill)
    return [row for row, chunk in zip(as_requests(batch.prefill), chunks, strict=True) if not (chunk and chunk.start)]


def new_sequence(row: RequestState) -> NewSequence:
    """Everything that a worker must know of a row."""
    return NewSequence(
        request_id=row.request_id,
        num_prompt_tokens=row.num_prompt_tokens,
        max_output_tokens=row.max_output_tokens,
        num_output_tokens=row.num_output_tokens,
        sampling=None if row.plain else Sampling(**asdict(row.sampling)),
        seed=row.seed,
        prompt_token_ids=row.prompt_token_ids if row.num_begin_tokens else None,
        token_ids=row.token_ids,
        banned_token_ids=row.banned_token_ids,
    )


def region_message(region: KVRegion) -> KVRegionOf:
    """A region of a row that the workers know, with the KV blocks that it gets."""
    row = region.request
    return KVRegionOf(row.request_id, row.num_blocks, region.start, region.num_tokens, region.num_stored)


def token_messages(tokens: Mapping[str, SampledToken | None]) -> list[SampledTokenOf]:
    return [SampledTokenOf(request_id, *(token or (None,))) for request_id, token in tokens.items()]


def tokens_from(messages: Iterable[SampledTokenOf]) -> dict[str, SampledToken | None]:
    """The tokens of `token_messages`, as they were."""
    return {
        one.request_id: None
        if one.token_id is None
        else SampledToken(one.token_id, one.logprob, one.top_logprobs, one.prompt)
        for one in messages
    }


class Mirror:
    """The rows of an engine as one worker knows them."""

    def __init__(self) -> None:
        self.rows: dict[str, RequestState] = {}

    def add(self, new: NewSequence) -> RequestState:
        """A row that is sent whole: a new one, or one that is computed again."""
        self.forget(new.request_id)
        row = RequestState(
            request_id=new.request_id,
            num_prompt_tokens=new.num_prompt_tokens,
            max_output_tokens=new.max_output_tokens,
            num_output_tokens=new.num_output_tokens,
            sampling=_sampling(new.sampling) if new.sampling else SamplingParams(temperature=0.0),
            plain=new.sampling is None,
            seed=new.seed,
            prompt_token_ids=new.prompt_token_ids or new.token_ids[: new.num_prompt_tokens],
            token_ids=new.token_ids,
            banned_token_ids=new.banned_token_ids,
            end_token_ids=frozenset(),
            stream=None,
            arrival=0.0,
        )
        self.rows[row.request_id] = row
        return row

    def forget(self, request_id: str) -> None:
        """Drops a row; one that is not known is accepted. Where it is kept elsewhere, it holds no blocks any more."""
        if row := self.rows.pop(request_id, None):
            row.num_blocks = 0

    def region(self, message: KVRegionOf) -> KVRegion:
        """The region of a message."""
        row = self._granted(message.request_id, message.num_blocks)
        return KVRegion(row, message.start, message.num_tokens, message.num_stored)

    def batch(self, message: RunBatch) -> Batch:
        """The batch of a message, whose new rows are added first."""
        for new in message.new:
            self.add(new)
        return Batch(
            prefill=tuple(self._granted(row.request_id, row.num_blocks) for row in message.prefill),
            decode=tuple(self._decoding(row) for row in message.decode),
            pad_to=message.pad_to,
            chunks=message.chunks,
            packing=message.packing,
            phase=message.phase,
        )

    def _granted(self, request_id: str, num_blocks: int) -> RequestState:
        row = self.rows[request_id]
        row.num_blocks = num_blocks
        return row

    def _decoding(self, message: DecodeSequence) -> RequestState:
        row = self._granted(message.request_id, message.num_blocks)
        row.token_ids.extend(message.token_ids)
        row.num_output_tokens = message.num_output_tokens
        return row


def _sampling(message: Sampling) -> SamplingParams:
    return SamplingParams(**msgspec.structs.asdict(message))
