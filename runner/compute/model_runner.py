"""ModelRunner: a model with its weights and KV cache on one device; turns a batch into logits.

It is the data plane only: what runs next is decided by `exeplan.scheduling.scheduler`, what a logit becomes by
`runner/compute/sampling.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.core.batch import Batch, Chunk, Packing, SequenceState, num_blocks_for
from exeplan.core.model import ModelSpec
from exeplan.kernels.linear import packs
from exeplan.kernels.select import Kernels, kernels_for
from exeplan.runner.compute.checkpoint import OnRead
from exeplan.runner.compute.decode_graphs import DecodeGraphs
from exeplan.runner.compute.encoder import EncoderDecoderModel, EncoderStep
from exeplan.runner.compute.families import load_model
from exeplan.runner.compute.kv_cache import KVCache
from exeplan.runner.compute.packed_step import PackedRows, PackedStep, one_a_row
from exeplan.runner.compute.paged_step import PagedStep, Singles, block_table, singles_of
from exeplan.runner.compute.precision import activation_dtype, cache_dtype
from exeplan.runner.compute.row_buckets import Rounding
from exeplan.runner.compute.shard import Shard, whole
from exeplan.runner.compute.step import Row, Step

_RECENT = 1024
"""So many rows of a pass may be gone on with before their tokens are known, unless more are recorded."""
_NO_SOURCES: Mapping[str, int] = MappingProxyType({})


class ModelRunner:
    """One model, or a shard of one, on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        shard: Shard | None = None,
        dtype: str = "float32",
        kv_dtype: str | None = None,
        device: str = "cpu",
        num_blocks: int,
        dummy_weights: bool = False,
        seed: int = 0,
        paged_with: Kernels | None = None,
        on_read: OnRead = lambda num_bytes: None,
    ) -> None:
        """Loads the weights of the shard, by default all, or draws random ones, which are those of the same model
        whatever the shard; `on_read` is told how many bytes that were so far. `paged_with` are the kernels that attend
        over blocks, by default the device's own on a GPU; without them, the CPU's fast path does. Keys and values are
        kept in `kv_dtype`, by default as `dtype` (see `precision.py`).

        Raises InputError naming what the model or its checkpoint lacks.
        """
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self.shard = shard or whole(spec)
        self.activation, self._cache_dtype = activation_dtype(dtype), cache_dtype(dtype, kv_dtype)
        if paged_with is None and self.device.type == "cuda":
            paged_with = kernels_for(self.device, self.activation)
        self.kernels = paged_with
        """None where attention is the CPU's own."""
        self._packed = packs(self.device, self.activation)
        with torch.inference_mode():
            self.model, self.weight_bytes = load_model(
                spec,
                shard=self.shard,
                dtype=dtype,
                device=device,
                dummy_weights=dummy_weights,
                seed=seed,
                kernels=paged_with,
                on_read=on_read,
            )
        self.chosen: tuple[Tensor, Tensor] | None = None
        """The most likely tokens of the last pass, and whether they are sound, where a recording chose them."""
        self._recent_B = torch.zeros(_RECENT, dtype=torch.int64, device=self.device)
        self.use_blocks(num_blocks)
        self.encoded_NE: Tensor | None = None
        """The encoder's outputs for the prompts of the last batch, on the last shard; None when it had none."""

    @torch.inference_mode()
    def use_blocks(self, num_blocks: int) -> None:
        """Gives the runner another KV cache, of so many blocks and empty; whatever it held before is lost."""
        self._residents: dict[str, SequenceState] = {}
        self._granted: dict[str, int] = {}
        """Blocks that each of them has here."""
        self._num_cached: dict[str, int] = {}
        """Tokens of an encoder-decoder model's row whose keys and values are stored, where some of its output is."""
        self.graphs: DecodeGraphs | None = None
        """Recorded decode iterations, once `record` has been called; without them every pass runs as it comes."""
        for blocks in (0, num_blocks):  # The old one is freed first.
            self.cache = KVCache(
                self.spec, blocks, self._cache_dtype, self.device, shard=self.shard, kernels=self.kernels
            )

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        token_ids: Mapping[str, Sequence[int]],
        hidden_NE: Tensor | None = None,
        *,
        sources: Mapping[str, int] = _NO_SOURCES,
    ) -> Tensor:
        """Logits `[R, V]` in float32, one row for each whole prefill and then for each decoded sequence of the batch.

        `token_ids[request_id]` are prompt and output so far. A prefilled row computes all of them, or its chunk, a
        decoded row the last. Keys and values find their place here, in as many blocks as the scheduler granted. A shard
        that is not the first goes on from `hidden_NE`, one that is not the last returns it, `[N, E]`. Of an
        encoder-decoder model's batch only decoded rows have logits. `sources` are the rows of the pass before from
        whose token, which `leave` kept, decoded rows go on: the last one of theirs is not in `token_ids`.
        """
        self._place(batch)
        sources = sources or {}
        self.chosen = self.encoded_NE = None
        if self.graphs and (rows := self._recorded_rows(batch, self.graphs)):
            return self._replay(self.graphs, rows, token_ids, hidden_NE, sources)
        if self.spec.is_encoder_decoder:
            return self._forward_both(batch, token_ids, hidden_NE, sources)
        step = self.step(batch, token_ids, sources)
        if hidden_NE is None:
            hidden_NE = self.model.embed(step.token_N, step.position_N)
        rounding = self._rounding(len(hidden_NE))
        angles = self.model.angles(rounding.add(step.position_N), rounding.add(step.length_N, 1))
        hidden_NE = rounding.through(self.model.layers, hidden_NE, angles, step.attend)
        return self.model.head(hidden_NE[step.logit_R]).float() if self.shard.last else hidden_NE

    def _rounding(self, num_rows: int) -> Rounding:
        return Rounding.of(num_rows) if self._packed else Rounding(num_rows, 0)

    def _recorded_rows(self, batch: Batch, graphs: DecodeGraphs) -> list[Row]:
        """The rows of a batch that was recorded: none where one computes more than a token."""
        if batch.prefill or not graphs.fit(len(batch.decode)):
            return []
        rows = self._decoded_rows(batch)
        return rows if all(row.is_single for row in rows) else []

    def _replay(
        self,
        graphs: DecodeGraphs,
        rows: Sequence[Row],
        token_ids: Mapping[str, Sequence[int]],
        hidden_NE: Tensor | None,
        sources: Mapping[str, int],
    ) -> Tensor:
        table_BT = block_table(self.cache, rows)
        out_BX, *chosen = graphs.replay(singles_of(rows, table_BT, token_ids, sources), table_BT, hidden_NE)
        for row in rows if self.spec.is_encoder_decoder else ():
            self._num_cached[row.request_id] = row.end
        if chosen:
            self.chosen = (chosen[0], chosen[1])
        return out_BX

    def decode_inputs(self, batch: Batch, token_ids: Mapping[str, Sequence[int]]) -> tuple[Singles, NDArray[np.int32]]:
        """What a recording takes for a batch of which every row decodes a single token, its blocks placed."""
        self._place(batch)
        rows = self._decoded_rows(batch)
        table_BT = block_table(self.cache, rows)
        return singles_of(rows, table_BT, token_ids, _NO_SOURCES), table_BT

    def leave(self, token_R: Tensor) -> bool:
        """Keeps the tokens of the last pass for the next one. False where there is no room for so many."""
        if len(token_R) > len(self._recent_B):
            return False
        if self.chosen is None or token_R is not self.chosen[0]:
            self._recent_B[: len(token_R)].copy_(token_R)
        return True

    @torch.inference_mode()
    def record(self, max_num_seqs: int, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Records the decode iteration of up to so many rows; `progress` is told how many sizes are done, and of all.

        Nothing may be resident. The cache must not be replaced afterwards.
        """
        self.graphs = None
        graphs = self.unrecorded(max_num_seqs)
        graphs.record(progress)
        self.graphs = graphs

    def unrecorded(self, max_num_seqs: int) -> DecodeGraphs:
        """The decode iteration of up to so many rows, ready to be recorded."""
        assert self.kernels is not None
        if max_num_seqs > len(self._recent_B):
            self._recent_B = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        longest = self.spec.max_context * (2 if self.spec.is_encoder_decoder else 1)
        return DecodeGraphs(
            self.model,
            self.cache,
            self.kernels,
            self.shard,
            hidden_size=self.spec.hidden_size,
            dtype=self.activation,
            max_num_seqs=max_num_seqs,
            max_num_blocks=min(num_blocks_for(longest), self.cache.num_blocks),
            encodes=self.spec.is_encoder_decoder,
            recent_B=self._recent_B,
        )

    def _forward_both(
        self,
        batch: Batch,
        token_ids: Mapping[str, Sequence[int]],
        hidden_NE: Tensor | None,
        sources: Mapping[str, int],
    ) -> Tensor:
        """The prompts through the encoder layers, the decoded rows through the decoder layers; prompts come first."""
        model = cast(EncoderDecoderModel, self.model)
        prompts, step = self.prompts(batch, token_ids), self.decoder_step(batch, token_ids, sources)
        if hidden_NE is None:
            hidden_NE = model.embed(*(torch.cat(pair) for pair in zip(_inputs(prompts), _inputs(step), strict=True)))
        encoder_NE, decoder_NE = torch.split_with_sizes(hidden_NE, [prompts.num_tokens, step.num_tokens])
        if batch.whole_prefills:
            rounding = self._rounding(len(encoder_NE))
            encoder_NE = rounding.through(model.encoder_layers, encoder_NE, None, prompts.attend)
        if batch.decode:
            rounding = self._rounding(len(decoder_NE))
            decoder_NE = rounding.through(model.layers, decoder_NE, None, step.attend)
        for sequence in batch.decode:
            self._num_cached[sequence.request_id] = sequence.num_tokens
        if not self.shard.last:
            return torch.cat([encoder_NE, decoder_NE])
        self.encoded_NE = model.encoded(prompts.without_padding(encoder_NE)) if batch.whole_prefills else None
        if self.shard.first and self.shard.num_layers and self.encoded_NE is not None:
            self.take_encoded(batch.whole_prefills, self.encoded_NE)
        if not batch.decode:
            return torch.empty(0, self.spec.vocab_size, device=self.device)
        return model.head(decoder_NE[step.logit_R]).float()

    @torch.inference_mode()
    def take_encoded(self, rows: Sequence[SequenceState], encoded_NE: Tensor) -> None:
        """Stores this shard's cross keys and values of prompts, whose encoder's outputs stand in the rows' order.

        Whoever has left or was preempted meanwhile, and so holds no blocks, is passed over.
        """
        splits = torch.split_with_sizes(encoded_NE, [self.num_encoder_tokens(row) for row in rows])
        kept = [(row, part_NE) for row, part_NE in zip(rows, splits, strict=True) if row.num_blocks]
        if not kept:
            return
        for row, _ in kept:
            self.free(row.request_id)
            self._hold(row)
        slots = np.concatenate([self.cache.slots(row.request_id, 0, self.num_encoder_tokens(row)) for row, _ in kept])
        stored_rows = self.cache.store_rows(slots)
        encoded_NE = torch.cat([part_NE for _, part_NE in kept])
        for number, kv_NMD in enumerate(cast(EncoderDecoderModel, self.model).cross_keys_values(encoded_NE)):
            self.cache.store(number, stored_rows, kv_NMD)

    def step(
        self, batch: Batch, token_ids: Mapping[str, Sequence[int]], sources: Mapping[str, int] = _NO_SOURCES
    ) -> Step | PagedStep | PackedStep:
        """The batch of a decoder-only model as tensors."""
        if batch.packing:
            return self._packed_step(batch, batch.packing, token_ids, sources)
        chunks = batch.chunks or [Chunk(0, sequence.num_tokens, last=True) for sequence in batch.prefill]
        spans = [_row(sequence, chunk.start, chunk.end) for sequence, chunk in zip(batch.prefill, chunks, strict=True)]
        singles = self._decoded_rows(batch)
        whole = [number for number, chunk in enumerate(chunks) if chunk.last]
        wanted = [*whole, *range(len(spans), len(spans) + len(singles))] if batch.chunks else None
        return self._step(spans, singles, token_ids=token_ids, sources=sources, wanted=wanted, pad_to=batch.pad_to)

    def _packed_step(
        self, batch: Batch, packing: Packing, token_ids: Mapping[str, Sequence[int]], sources: Mapping[str, int]
    ) -> PackedStep:
        """Prompts in packed rows, each whole, and rows that decode."""
        prompts = [_row(sequence, 0, sequence.num_tokens) for sequence in batch.prefill]
        texts = [token_ids[row.request_id][: row.end] for row in prompts]
        rows = PackedRows(texts, packing, device=self.device, kernels=self.kernels, causal=True)
        decoding = self.step(Batch(decode=batch.decode), token_ids, sources) if batch.decode else None
        return PackedStep(self.cache, prompts, rows, cast(Step | PagedStep | None, decoding))

    def prompts(self, batch: Batch, token_ids: Mapping[str, Sequence[int]]) -> EncoderStep | PackedRows:
        """The prompts of an encoder-decoder model's batch as tensors; the padded length counts the start token too.

        Every token sees all of its prompt, so that one that is cut is computed whole with its last chunk.
        """
        prompts = [
            token_ids[sequence.request_id][: self.num_encoder_tokens(sequence)] for sequence in batch.whole_prefills
        ]
        packing = batch.packing
        if batch.pad_to and prompts:
            packing = one_a_row(len(prompts), max(batch.pad_to - 1, *map(len, prompts)))
        if packing:
            return PackedRows(prompts, packing, device=self.device, kernels=self.kernels)
        return EncoderStep(prompts, device=self.device, kernels=self.kernels)

    def decoder_step(
        self, batch: Batch, token_ids: Mapping[str, Sequence[int]], sources: Mapping[str, int] = _NO_SOURCES
    ) -> Step | PagedStep:
        """The decoded rows of an encoder-decoder model's batch; each computes whatever of its output is not cached."""
        rows = self._decoded_rows(batch)
        # Logits come in the order of the batch, not in the step's, where the longer rows are first, and those whose
        # prompts are of one length side by side: their softmax is then one.
        order = sorted(range(len(rows)), key=lambda number: (rows[number].is_single, rows[number].num_encoded))
        ordered = [rows[number] for number in order]
        spans, singles = [row for row in ordered if not row.is_single], [row for row in ordered if row.is_single]
        return self._step(spans, singles, token_ids=token_ids, sources=sources, wanted=np.argsort(order).tolist())

    def _decoded_rows(self, batch: Batch) -> list[Row]:
        """Of an encoder-decoder model each computes whatever of its output is not cached."""
        if not self.spec.is_encoder_decoder:
            return [_row(sequence, sequence.num_tokens - 1, sequence.num_tokens) for sequence in batch.decode]
        return [
            _row(sequence, self._first_missing(sequence), sequence.num_tokens, self.num_encoder_tokens(sequence))
            for sequence in batch.decode
        ]

    def _step(
        self,
        spans: Sequence[Row],
        singles: Sequence[Row],
        *,
        token_ids: Mapping[str, Sequence[int]],
        sources: Mapping[str, int],
        wanted: Sequence[int] | None,
        pad_to: int = 0,
    ) -> Step | PagedStep:
        if self.kernels is None:
            return Step(self.cache, spans, singles, token_ids=token_ids, wanted=wanted, pad_to=pad_to)
        return PagedStep(
            self.cache,
            spans,
            singles,
            token_ids=token_ids,
            kernels=self.kernels,
            wanted=wanted,
            pad_to=pad_to,
            sources=sources,
            recent_B=self._recent_B,
        )

    def _first_missing(self, sequence: SequenceState) -> int:
        """The first token of a decoded row of an encoder-decoder model that has no keys and values yet."""
        cached = self._num_cached.get(sequence.request_id, self.num_encoder_tokens(sequence))
        return min(cached, sequence.num_tokens - 1)

    def assume_cached(self, rows: Sequence[SequenceState]) -> None:
        """Takes all but the last token of decoded rows for computed, whatever their slots hold: for measuring."""
        for sequence in rows:
            self._num_cached[sequence.request_id] = sequence.num_tokens - 1

    def num_tokens(self, batch: Batch) -> int:
        """N of the batch: rows of the hidden states that its stages pass on."""
        if not self.spec.is_encoder_decoder:
            return batch.num_new_tokens
        prompts = [self.num_encoder_tokens(sequence) for sequence in batch.whole_prefills]
        encoder = len(prompts) * max(batch.pad_to - 1, *prompts) if batch.pad_to and prompts else sum(prompts)
        encoder = batch.packing.num_tokens if batch.packing else encoder
        return encoder + sum(sequence.num_tokens - self._first_missing(sequence) for sequence in batch.decode)

    def num_encoder_tokens(self, sequence: SequenceState) -> int:
        """Those that go through the encoder: the prompt but for the decoder's start token."""
        return sequence.num_prompt_tokens - 1

    def free(self, request_id: str) -> None:
        """Frees the blocks of a request that left; one that never ran is fine."""
        self._residents.pop(request_id, None)
        self._granted.pop(request_id, None)
        self._num_cached.pop(request_id, None)
        self.cache.free(request_id)

    @torch.inference_mode()
    def save(self, sequence: SequenceState, part_L2KNB: Tensor) -> int:
        """Copies the bytes of a sequence's first N keys and values to `part_L2KNB`; fewer where it has fewer stored.

        Returns how many.
        """
        count = part_L2KNB.shape[3]
        if self.spec.is_encoder_decoder:
            count = min(count, self._num_cached.get(sequence.request_id, self.num_encoder_tokens(sequence)))
        self.cache.read(sequence.request_id, part_L2KNB[:, :, :, :count])
        return count

    @torch.inference_mode()
    def restore(self, sequence: SequenceState, part_L2KNB: Tensor) -> None:
        """Takes in a sequence that is new here, with the blocks that it was granted, as `save` left it elsewhere."""
        self._hold(sequence)
        self.cache.write(sequence.request_id, part_L2KNB)
        if self.spec.is_encoder_decoder:
            self._num_cached[sequence.request_id] = part_L2KNB.shape[3]

    def _place(self, batch: Batch) -> None:
        """Gives every row the blocks that it was granted, after taking back those of sequences that hold none."""
        chunks = batch.chunks or (None,) * len(batch.prefill)
        beginning = [row for row, chunk in zip(batch.prefill, chunks, strict=True) if not (chunk and chunk.start)]
        for sequence in [*beginning, *(s for s in self._residents.values() if s.num_blocks == 0)]:
            self.free(sequence.request_id)
        for sequence in (*batch.decode, *batch.prefill):
            if self._granted.get(sequence.request_id) != sequence.num_blocks:
                self._hold(sequence)

    def _hold(self, sequence: SequenceState) -> None:
        hint = num_blocks_for(sequence.num_prompt_tokens + sequence.max_output_tokens)
        self.cache.resize(sequence.request_id, sequence.num_blocks, hint)
        self._residents[sequence.request_id] = sequence
        self._granted[sequence.request_id] = sequence.num_blocks


def _row(sequence: SequenceState, start: int, end: int, num_encoded: int = 0) -> Row:
    return Row(sequence.request_id, start, end, sequence.num_prompt_tokens, num_encoded)


def _inputs(step: EncoderStep | PackedRows | Step | PagedStep) -> tuple[Tensor, Tensor]:
    return step.token_N, step.position_N
