"""ModelRunner: a model with its weights and KV cache on one device; turns a batch into logits.

Not here: which batch runs next (`exeplan.scheduling.scheduler`), and how a token is sampled from logits
(`runner/compute/tokens/sampling.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.core.batch import Batch, Chunk, Packing, SequenceState, num_blocks_for
from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.kernels import native
from exeplan.kernels.products.linear import compiles_by_rows
from exeplan.kernels.select import Kernels, kernels_are_fused, kernels_for
from exeplan.runner.compute.blocks.encoder import EncoderDecoderModel, EncoderStep, num_encoder_tokens
from exeplan.runner.compute.blocks.layers import LastLayer
from exeplan.runner.compute.families import CPU_ONLY, load_model
from exeplan.runner.compute.passes.decode_graphs import DecodeGraphs
from exeplan.runner.compute.passes.host_allocator import give_back, keep_freed_memory
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.passes.packed_step import PackedRows, PackedStep, one_a_row
from exeplan.runner.compute.passes.paged_step import PagedStep, Singles, block_table, singles_of
from exeplan.runner.compute.passes.residents import Residents
from exeplan.runner.compute.passes.row_buckets import RowBucket
from exeplan.runner.compute.passes.step import Step, StepSequence
from exeplan.runner.compute.tokens.prompt_logprobs import PromptPart, ReportedSpan, report_prompts
from exeplan.runner.compute.weights.checkpoint import OnRead
from exeplan.runner.compute.weights.precision import activation_dtype, cache_dtype, held_bits
from exeplan.runner.compute.weights.shard import Shard, whole

PREV_TOKENS = 1024
"""Tokens of a pass that are kept on the device for the next one, unless graphs of larger batches are captured."""
_NO_PREV_ROWS: Mapping[str, int] = MappingProxyType({})
_NO_PARTS: Mapping[str, PromptPart] = MappingProxyType({})


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
        """Loads the weights of the shard, by default the whole model, or draws random ones, which do not depend on the
        sharding; calls `on_read` with the bytes read so far. `paged_with` are the kernels for attention over blocks, by
        default the device's own on a GPU; None on a CPU selects its fast path. Keys and values are stored in
        `kv_dtype`, by default `dtype` (see `weights/precision.py`).

        On a CPU the process keeps freed memory from now on (`host_allocator.py`).

        Raises InputError naming what the model, its checkpoint or the device lacks.
        """
        if device == "cpu":
            keep_freed_memory()
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self.shard = shard or whole(spec)
        self.activation, self._cache_dtype = activation_dtype(dtype), cache_dtype(dtype, kv_dtype)
        if paged_with is None and self.device.type == "cuda":
            paged_with = kernels_for(self.device, self.activation)
        if paged_with is not None and (kind := CPU_ONLY.get(spec.family)):
            raise InputError(f"'{spec.name}' has {kind}, which runs on a CPU only, not over blocks")
        self.kernels = paged_with
        """None where attention takes the CPU's fast path."""
        how = spec.quantization
        by_rows = how and not native.multiplies_integers() and held_bits(how, dtype, self.device) == 8
        self._compiles_by_rows = compiles_by_rows(self.device, self.activation) or bool(by_rows)
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
        """Of a pass that replayed a graph: the most likely tokens, and whether their logits were finite."""
        self.prev_token_B = torch.zeros(PREV_TOKENS, dtype=torch.int64, device=self.device)
        """Where tokens are kept on the device for later passes."""
        self.use_blocks(num_blocks)
        self.encoded_NE: Tensor | None = None
        """The encoder's output for the prompts of the last batch, on the last shard; None where it had no prompts."""
        self.prompt_parts: Mapping[str, PromptPart] = _NO_PARTS
        """By request id: log-probabilities of prompts that the last batch computed, of those that were wanted."""

    @torch.inference_mode()
    def use_blocks(self, num_blocks: int) -> None:
        """Replaces the KV cache by an empty one of `num_blocks` blocks; its contents are lost."""
        self.graphs: DecodeGraphs | None = None
        """Captured decode iterations, set by `capture`; None where every pass runs eagerly."""
        for blocks in (0, num_blocks):  # The old one is freed first.
            if self.device.type == "cpu":
                give_back()
            cache = KVCache(self.spec, blocks, self._cache_dtype, self.device, shard=self.shard, kernels=self.kernels)
            self.use_cache(cache)

    def use_cache(self, cache: KVCache) -> None:
        """Takes another cache, in which no sequence holds blocks."""
        self.cache, self.residents = cache, Residents(cache, encodes=self.spec.is_encoder_decoder)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        token_ids: Mapping[str, Sequence[int]],
        hidden_NE: Tensor | None = None,
        *,
        prev_rows: Mapping[str, int] = _NO_PREV_ROWS,
        reported: Mapping[str, int] | None = None,
    ) -> Tensor:
        """Logits `[R, V]` in float32: a row for each finished prefill, then one for each decoded sequence.

        `token_ids[request_id]` are prompt and output so far. A prefill computes all of them, or its chunk, a decode the
        last one. Keys and values are stored in as many blocks as the scheduler granted. A shard that is not the first
        continues from `hidden_NE`, one that is not the last returns it, `[N, E]`. Of an encoder-decoder model only
        decoded sequences have logits. `prev_rows` names the decoded sequences whose last token is not in `token_ids`
        yet: by request id, its index in `prev_token_B`; `keep_tokens` puts those of the last pass at its beginning.
        `reported` names the prefilled sequences whose prompts' log-probabilities are wanted, and how many of the most
        likely tokens with each: `prompt_parts` has those of this pass, on the first rank of the last shard.
        """
        self.residents.place(batch)
        prev_rows = prev_rows or {}
        self.chosen, self.encoded_NE, self.prompt_parts = None, None, _NO_PARTS
        if self.graphs and (sequences := self._captured_decodes(batch, self.graphs)):
            return self._replay(self.graphs, sequences, token_ids, hidden_NE, prev_rows)
        if self.spec.is_encoder_decoder:
            return self._forward_both(batch, token_ids, hidden_NE, prev_rows)
        step = self.step(batch, token_ids, prev_rows)
        if hidden_NE is None:
            hidden_NE = self.model.embed(step.token_N, step.position_N)
        bucket = self._bucket(len(hidden_NE))
        angles = self.model.angles(bucket.pad(step.position_N), bucket.pad(step.length_N, 1))
        if self.shard.last and not reported and len(step.logit_R) < len(hidden_NE):
            # Of a chunk that does not end its prompt no row is wanted, and one is computed.
            wanted_R = step.logit_R if len(step.logit_R) else step.position_N.new_zeros(1)
            layers, rows = cast(list[LastLayer], self.model.layers), self._bucket(len(wanted_R))
            wanted_RE = bucket.to_wanted(layers, hidden_NE, angles, step.attend, wanted_R, rows)
            return self.model.head(wanted_RE[: len(step.logit_R)]).float()
        hidden_NE = bucket.through(self.model.layers, hidden_NE, angles, step.attend)
        if not self.shard.last:
            return hidden_NE
        if reported:
            self._report(hidden_NE, _reported_spans(batch, reported, token_ids, step.first_rows))
        return self.model.head(hidden_NE[step.logit_R]).float()

    def _report(self, hidden_NE: Tensor, spans: Sequence[ReportedSpan]) -> None:
        def head(hidden_TE: Tensor) -> Tensor:
            padded_TE = self._bucket(len(hidden_TE)).pad(hidden_TE)
            return self.model.head(padded_TE)[: len(hidden_TE)].float()

        parts = report_prompts(hidden_NE, spans, head, vocab_size=self.spec.vocab_size)
        if self.shard.group.rank == 0:
            self.prompt_parts = parts

    def _bucket(self, num_rows: int) -> RowBucket:
        return RowBucket.of(num_rows) if self._compiles_by_rows else RowBucket(num_rows, 0)

    def _captured_decodes(self, batch: Batch, graphs: DecodeGraphs) -> list[StepSequence]:
        """The sequences of a batch that a graph can compute; empty where one computes more than a token."""
        if batch.prefill or not graphs.fit(len(batch.decode)):
            return []
        sequences = self._decoded(batch)
        return sequences if all(sequence.is_single for sequence in sequences) else []

    def _replay(
        self,
        graphs: DecodeGraphs,
        sequences: Sequence[StepSequence],
        token_ids: Mapping[str, Sequence[int]],
        hidden_NE: Tensor | None,
        prev_rows: Mapping[str, int],
    ) -> Tensor:
        table_BT = block_table(self.cache, sequences)
        out_BX, *chosen = graphs.replay(singles_of(sequences, table_BT, token_ids, prev_rows), table_BT, hidden_NE)
        for sequence in sequences if self.spec.is_encoder_decoder else ():
            self.residents.set_cached(sequence.request_id, sequence.end)
        if chosen:
            self.chosen = (chosen[0], chosen[1])
        return out_BX

    def decode_inputs(self, batch: Batch, token_ids: Mapping[str, Sequence[int]]) -> tuple[Singles, NDArray[np.int32]]:
        """What a graph takes for a batch in which every sequence decodes a single token; places its blocks."""
        self.residents.place(batch)
        sequences = self._decoded(batch)
        table_BT = block_table(self.cache, sequences)
        return singles_of(sequences, table_BT, token_ids, _NO_PREV_ROWS), table_BT

    def keep_room_for_tokens(self, count: int) -> None:
        """Has room for as many kept tokens; call it before `capture`."""
        if count > len(self.prev_token_B):
            self.prev_token_B = torch.zeros(count, dtype=torch.int64, device=self.device)

    def keep_tokens(self, token_R: Tensor) -> bool:
        """Keeps the tokens of the last pass on the device for the next one. False where there are too many."""
        if len(token_R) > len(self.prev_token_B):
            return False
        if self.chosen is None or token_R is not self.chosen[0]:
            self.prev_token_B[: len(token_R)].copy_(token_R)
        return True

    @property
    def can_capture(self) -> bool:
        """Whether its decode iteration can be captured: the kernels' references, which a GPU without Triton has, read
        lengths on the host. On a CPU nothing but a test captures."""
        return self.kernels is not None and (self.device.type != "cuda" or kernels_are_fused(self.kernels))

    @torch.inference_mode()
    def capture(self, max_num_seqs: int, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Captures the decode iteration for batches of up to `max_num_seqs` sequences.

        Calls `progress` with the number of sizes captured and the number of sizes. Nothing may be resident. The cache
        must not be replaced afterwards.
        """
        self.graphs = None
        graphs = self.decode_graphs(max_num_seqs)
        graphs.capture(progress)
        self.graphs = graphs

    def decode_graphs(self, max_num_seqs: int) -> DecodeGraphs:
        """The decode iteration for up to `max_num_seqs` sequences, not captured yet."""
        assert self.kernels is not None
        self.keep_room_for_tokens(max_num_seqs)
        longest = self.spec.max_context * (2 if self.spec.is_encoder_decoder else 1)
        return DecodeGraphs(
            self.model,
            self.cache,
            self.kernels,
            self.shard,
            hidden_size=self.spec.hidden_size,
            vocab_size=self.spec.vocab_size,
            dtype=self.activation,
            max_num_seqs=max_num_seqs,
            max_num_blocks=min(num_blocks_for(longest), self.cache.num_blocks),
            encodes=self.spec.is_encoder_decoder,
            prev_token_B=self.prev_token_B,
        )

    def _forward_both(
        self,
        batch: Batch,
        token_ids: Mapping[str, Sequence[int]],
        hidden_NE: Tensor | None,
        prev_rows: Mapping[str, int],
    ) -> Tensor:
        """Prompts through the encoder layers, decoded sequences through the decoder layers; prompts come first."""
        model = cast(EncoderDecoderModel, self.model)
        prompts, step = self.prompts(batch, token_ids), self.decoder_step(batch, token_ids, prev_rows)
        if hidden_NE is None:
            hidden_NE = model.embed(*(torch.cat(pair) for pair in zip(_inputs(prompts), _inputs(step), strict=True)))
        encoder_NE, decoder_NE = torch.split_with_sizes(hidden_NE, [prompts.num_tokens, step.num_tokens])
        if batch.whole_prefills:
            bucket = self._bucket(len(encoder_NE))
            encoder_NE = bucket.through(model.encoder_layers, encoder_NE, None, prompts.attend)
        if batch.decode:
            bucket = self._bucket(len(decoder_NE))
            decoder_NE = bucket.through(model.layers, decoder_NE, None, step.attend)
        for sequence in batch.decode:
            self.residents.set_cached(sequence.request_id, sequence.num_tokens)
        if not self.shard.last:
            return torch.cat([encoder_NE, decoder_NE])
        self.encoded_NE = model.encoded(prompts.without_padding(encoder_NE)) if batch.whole_prefills else None
        if self.shard.first and self.shard.num_layers and self.encoded_NE is not None:
            self.take_encoded(batch.whole_prefills, self.encoded_NE)
        if not batch.decode:
            return torch.empty(0, self.spec.vocab_size, device=self.device)
        return model.head(decoder_NE[step.logit_R]).float()

    @torch.inference_mode()
    def take_encoded(self, sequences: Sequence[SequenceState], encoded_NE: Tensor) -> None:
        """Stores this shard's cross-attention keys and values of prompts; their encoder outputs have the same order.

        Skips sequences that have left or were preempted meanwhile, which hold no blocks.
        """
        splits = torch.split_with_sizes(encoded_NE, [num_encoder_tokens(sequence) for sequence in sequences])
        kept = [(sequence, part_NE) for sequence, part_NE in zip(sequences, splits, strict=True) if sequence.num_blocks]
        if not kept:
            return
        self.residents.replace([sequence for sequence, _ in kept])
        slots = np.concatenate([self.cache.slots(s.request_id, 0, num_encoder_tokens(s)) for s, _ in kept])
        stored_rows = self.cache.store_rows(slots)
        encoded_NE = torch.cat([part_NE for _, part_NE in kept])
        for number, kv_NMD in enumerate(cast(EncoderDecoderModel, self.model).cross_keys_values(encoded_NE)):
            self.cache.store(number, stored_rows, kv_NMD)

    def step(
        self, batch: Batch, token_ids: Mapping[str, Sequence[int]], prev_rows: Mapping[str, int] = _NO_PREV_ROWS
    ) -> Step | PagedStep | PackedStep:
        """The batch of a decoder-only model as tensors."""
        if batch.packing:
            return self._packed_step(batch, batch.packing, token_ids, prev_rows)
        chunks = _chunks(batch)
        spans = [
            _step_sequence(sequence, chunk.start, chunk.end)
            for sequence, chunk in zip(batch.prefill, chunks, strict=True)
        ]
        singles = self._decoded(batch)
        whole = [number for number, chunk in enumerate(chunks) if chunk.last]
        wanted = [*whole, *range(len(spans), len(spans) + len(singles))] if batch.chunks else None
        return self._step(spans, singles, token_ids=token_ids, prev_rows=prev_rows, wanted=wanted, pad_to=batch.pad_to)

    def _packed_step(
        self, batch: Batch, packing: Packing, token_ids: Mapping[str, Sequence[int]], prev_rows: Mapping[str, int]
    ) -> PackedStep:
        """Whole prompts in packed rows, and sequences that decode."""
        prompts = [_step_sequence(sequence, 0, sequence.num_tokens) for sequence in batch.prefill]
        texts = [token_ids[sequence.request_id][: sequence.end] for sequence in prompts]
        packed_rows = PackedRows(texts, packing, device=self.device, kernels=self.kernels, causal=True)
        decoding = self.step(Batch(decode=batch.decode), token_ids, prev_rows) if batch.decode else None
        return PackedStep(self.cache, prompts, packed_rows, cast(Step | PagedStep | None, decoding))

    def prompts(self, batch: Batch, token_ids: Mapping[str, Sequence[int]]) -> EncoderStep | PackedRows:
        """The prompts of an encoder-decoder model's batch as tensors; the padded length includes the start token.

        Every token attends to its whole prompt, so a prompt cut into chunks is computed whole with its last chunk.
        """
        prompts = [token_ids[sequence.request_id][: num_encoder_tokens(sequence)] for sequence in batch.whole_prefills]
        packing = batch.packing
        if batch.pad_to and prompts:
            packing = one_a_row(len(prompts), max(batch.pad_to - 1, *map(len, prompts)))
        if packing:
            return PackedRows(prompts, packing, device=self.device, kernels=self.kernels)
        return EncoderStep(prompts, device=self.device, kernels=self.kernels)

    def decoder_step(
        self, batch: Batch, token_ids: Mapping[str, Sequence[int]], prev_rows: Mapping[str, int] = _NO_PREV_ROWS
    ) -> Step | PagedStep:
        """The decoded sequences of an encoder-decoder model's batch; each computes its uncached output."""
        sequences = self._decoded(batch)
        # Logits have the order of the batch, the step another one: sequences with several tokens first, then those with
        # prompts of equal length adjacent, so that they share a softmax.
        order = sorted(range(len(sequences)), key=lambda n: (sequences[n].is_single, sequences[n].num_encoded))
        ordered = [sequences[n] for n in order]
        spans, singles = [s for s in ordered if not s.is_single], [s for s in ordered if s.is_single]
        return self._step(spans, singles, token_ids=token_ids, prev_rows=prev_rows, wanted=np.argsort(order).tolist())

    def _decoded(self, batch: Batch) -> list[StepSequence]:
        """The decoded sequences of a batch; those of an encoder-decoder model compute all their uncached output."""
        encodes, first_missing = self.spec.is_encoder_decoder, self.residents.first_missing
        return [
            _step_sequence(s, first_missing(s), s.num_tokens, num_encoder_tokens(s) if encodes else 0)
            for s in batch.decode
        ]

    def _step(
        self,
        spans: Sequence[StepSequence],
        singles: Sequence[StepSequence],
        *,
        token_ids: Mapping[str, Sequence[int]],
        prev_rows: Mapping[str, int],
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
            prev_rows=prev_rows,
            prev_token_B=self.prev_token_B,
        )

    def assume_cached(self, sequences: Sequence[SequenceState]) -> None:
        """Treats all but the last token of decoded sequences as cached, whatever their slots hold: for measuring."""
        for sequence in sequences:
            self.residents.set_cached(sequence.request_id, sequence.num_tokens - 1)

    def num_tokens(self, batch: Batch) -> int:
        """N of the batch: rows of the hidden states that its stages send on."""
        if not self.spec.is_encoder_decoder:
            return batch.num_new_tokens
        prompts = [num_encoder_tokens(sequence) for sequence in batch.whole_prefills]
        encoder = len(prompts) * max(batch.pad_to - 1, *prompts) if batch.pad_to and prompts else sum(prompts)
        encoder = batch.packing.num_tokens if batch.packing else encoder
        return encoder + sum(s.num_tokens - self.residents.first_missing(s) for s in batch.decode)

    def free(self, request_id: str) -> None:
        """Frees the blocks of a request that left; one that never ran is accepted."""
        self.residents.free(request_id)


def _step_sequence(sequence: SequenceState, start: int, end: int, num_encoded: int = 0) -> StepSequence:
    return StepSequence(sequence.request_id, start, end, sequence.num_prompt_tokens, num_encoded)


def _chunks(batch: Batch) -> Sequence[Chunk]:
    """What the batch computes of each prefilled sequence."""
    return batch.chunks or [Chunk(0, sequence.num_tokens, last=True) for sequence in batch.prefill]


def _reported_spans(
    batch: Batch, reported: Mapping[str, int], token_ids: Mapping[str, Sequence[int]], first_rows: Iterable[int]
) -> list[ReportedSpan]:
    """The positions whose next tokens are of a prompt that is reported."""
    spans = []
    for sequence, chunk, first_row in zip(batch.prefill, _chunks(batch), first_rows, strict=True):
        if (count := reported.get(sequence.request_id)) is not None:
            end = min(chunk.end + 1, sequence.num_prompt_tokens)
            following = token_ids[sequence.request_id][chunk.start + 1 : end]
            spans.append(ReportedSpan(sequence.request_id, chunk.start, int(first_row), following, count))
    return spans


def _inputs(step: EncoderStep | PackedRows | Step | PagedStep) -> tuple[Tensor, Tensor]:
    return step.token_N, step.position_N
