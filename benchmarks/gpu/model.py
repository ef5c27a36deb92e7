"""A decode step against the bandwidth roofline, and the rate of a prefill against the measured matrix ceiling.

The model has random weights and random keys and values. A decode step must read all weights but the embedding table,
and the keys and values of its rows; that over the copy rate is its floor. It is timed twice: the replay of its graph
alone, on the device; and end to end by the clock, as an engine runs it one step ahead, with scheduling, block tables,
copies both ways and the tokens on the host. The second is what a server does. The operations of a prefill are two for
each weight of the layers and token, and those of causal attention.
"""

import time
from typing import Any

import torch

from benchmarks.gpu.setting import Clock, Section, Setting, seconds_as_it_comes
from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.layer_costs import layer_parameters
from exeplan.core.schedule import Schedule
from exeplan.profiler.measuring.captured_decode import captured_executor, recorded, replay_seconds
from exeplan.profiler.measuring.device import synchronize
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.warm_up import tune_kernels
from exeplan.runner.engine.engine import Engine, Request

_ROOM = 0.75
"""Of the memory that is free, at most, for keys and values."""
_STEPS = 32
"""Decode steps that are timed by the clock."""


@torch.inference_mode()
def run(setting: Setting, clock: Clock) -> Section:
    header = ("model", "time ms", "tokens/s", "floor ms", "of ceiling")
    section = Section(title=f"{setting.spec.name}, {setting.dtype}, random weights", header=header)
    batches, contexts = ((1, 2), (32,)) if setting.smoke else ((1, 8, 32, 128, 256), (512, 2048))
    runner = _runner(setting, batches[-1], contexts[-1])
    for batch in batches:
        _decodes(runner, setting, section, batch, contexts)
        if clock.left < 0:
            section.notes.append(f"out of time after batch {batch}")
            break
    runner.use_blocks(num_blocks_for(setting.size(8192, 64)) + 64)
    for number in (1, 8):
        _prefill(runner, setting, section, number, setting.size(8192, 64) // number)
    return section


def _runner(setting: Setting, batch: int, context: int) -> ModelRunner:
    paged_with = setting.kernels if setting.smoke else None
    options: dict[str, Any] = {
        "dtype": setting.dtype,
        "device": str(setting.place),
        "dummy_weights": True,
        "paged_with": paged_with,
    }
    runner = ModelRunner(setting.spec, num_blocks=1, **options)
    wanted = batch * num_blocks_for(_longest(setting, batch, context))
    if setting.place.type == "cuda":
        wanted = min(wanted, int(_ROOM * torch.cuda.mem_get_info()[0]) // runner.cache.num_bytes)
    runner.use_blocks(wanted)
    tune_kernels(runner)
    for layer in range(setting.spec.num_layers):
        runner.cache.both_tables(layer).normal_()
    return runner


def _decodes(runner: ModelRunner, setting: Setting, section: Section, batch: int, contexts: tuple[int, ...]) -> None:
    graphs = recorded(runner, runner.model, (batch,))
    spec = setting.spec
    table = spec.vocab_size * spec.hidden_size * setting.torch_dtype.itemsize
    for context in contexts:
        if batch * num_blocks_for(context) > runner.cache.num_blocks:
            section.notes.append(f"no room for {batch} x {context} tokens")
            continue
        rows, token_ids = _rows(batch, context)
        graphs.replay(*runner.decode_inputs(Batch(decode=rows), token_ids), None)
        seconds = replay_seconds(graphs.captured[batch].replay, setting.place)
        for row in rows:
            runner.free(row.request_id)
        found = {"decode graph": seconds}
        if batch * num_blocks_for(_longest(setting, batch, context)) <= runner.cache.num_blocks:
            found["decode step"] = _step_seconds(runner, setting, batch, context)
        else:
            section.notes.append(f"no room for {batch} x {context} tokens and those of {_STEPS} steps")
        kept = batch * context * spec.kv_bytes_per_token(setting.dtype)
        num_bytes = runner.weight_bytes - (0 if spec.tied_head else table) + kept
        for kind, seconds in found.items():
            share, _ = setting.share(seconds, num_bytes=num_bytes)
            name = f"{kind}, batch {batch}, context {context}"
            cells = (name, f"{1e3 * seconds:.3f}", f"{batch / seconds:.0f}", f"{1e3 * share * seconds:.3f}")
            section.add((*cells, f"{100 * share:.0f} %"), case=name, seconds=seconds, bytes=num_bytes, share=share)


def _step_seconds(runner: ModelRunner, setting: Setting, batch: int, context: int) -> float:
    """By the clock, of one of many decode steps of an engine; prompts are prefilled before in chunks."""
    schedule = Schedule("chunked", {"max_num_seqs": batch, "max_num_batched_tokens": _chunk(setting, batch)})
    with captured_executor(runner, runner.model, (batch,)) as executor:
        engine = Engine(executor, schedule, num_blocks=runner.cache.num_blocks)
        output = _longest(setting, batch, context) - context
        for number in range(batch):
            sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            engine.add(Request(request_id=str(number), prompt_token_ids=[7] * context, sampling=sampling))
        while not all_decode(engine, batch):
            engine.step()
        synchronize(setting.place)
        start = time.perf_counter()
        for _ in range(_STEPS):
            engine.step()
            assert all_decode(engine, batch), "each timed step must decode every sequence"
        synchronize(setting.place)
        seconds = (time.perf_counter() - start) / _STEPS
        while engine.has_work:
            engine.step()
    return seconds


def all_decode(engine: Engine, batch: int) -> bool:
    """Whether the last step was one pass, of one token of each sequence."""
    return [(step.num_decode, step.num_new_tokens) for step in engine.last_steps] == [(batch, batch)]


def _chunk(setting: Setting, batch: int) -> int:
    return setting.size(8192, 64) + batch


def _longest(setting: Setting, batch: int, context: int) -> int:
    """Tokens of a sequence at the end: the first decodes a token with each chunk of the others."""
    chunks = batch * context // (_chunk(setting, batch) - batch)
    return context + chunks + _STEPS + 8


def _rows(batch: int, context: int) -> tuple[tuple[SequenceState, ...], dict[str, list[int]]]:
    rows = tuple(
        SequenceState(
            request_id=str(n), num_prompt_tokens=context, max_output_tokens=1, num_blocks=num_blocks_for(context)
        )
        for n in range(batch)
    )
    return rows, {row.request_id: [7] * context for row in rows}


def _prefill(runner: ModelRunner, setting: Setting, section: Section, number: int, length: int) -> None:
    rows, token_ids = _rows(number, length)
    seconds = seconds_as_it_comes(lambda: runner.forward(Batch(prefill=rows), token_ids), setting)
    for row in rows:
        runner.free(row.request_id)
    spec, tokens = setting.spec, number * length
    attention = 2 * tokens * length * spec.num_heads * spec.head_dim
    flops = spec.num_layers * (2 * layer_parameters(spec) * tokens + attention)
    share, _ = setting.share(seconds, flops=flops)
    name = f"prefill, {number} x {length}"
    cells = (name, f"{1e3 * seconds:.2f}", f"{tokens / seconds:.0f}", f"{1e3 * share * seconds:.2f}")
    section.add((*cells, f"{100 * share:.0f} %"), case=name, seconds=seconds, flops=flops, share=share)
