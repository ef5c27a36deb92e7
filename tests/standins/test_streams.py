"""The CUDA path of one device orders its streams, its copies and its graphs; seeded faults in it are found.

The product runs unchanged on the stand-in's devices, with the reference kernels, each as one launch. A fault replaces a
function of the product by one that lacks a wait, or uses memory too early.
"""

import gc
import weakref
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import model_spec
from exeplan.core.schedule import Schedule
from exeplan.profiler.measuring.captured_decode import captured_executor, decode_parts, overheads
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes import decode_graphs, graph_capture
from exeplan.runner.compute.passes.decode_graphs import DecodeGraphs
from exeplan.runner.compute.passes.graph_capture import GraphCapturer
from exeplan.runner.compute.tokens.device_sampling import DeviceSamples
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.warm_up import warm_up_runner
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor

from .streams import OrderError, stand_in

NUM_BLOCKS, MOST_ROWS = 14, 3
SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {
    **SIZES,
    "intermediate_size": 24,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "eos_token_id": None,
}
T5 = {"is_encoder_decoder": True, "vocab_size": 60, "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 24}
SPECS = {
    "llama": model_spec({"model_type": "llama", **LLAMA}, name="tiny"),
    "t5": model_spec(
        {"model_type": "t5", **T5, "num_layers": 1, "decoder_start_token_id": 0, "n_positions": 64}, name="tiny"
    ),
}
LLAMA_SPEC = SPECS["llama"]
SCHEDULES = {
    "orca": Schedule("orca", {"max_num_seqs": MOST_ROWS}),
    "chunked": Schedule("chunked", {"max_num_seqs": MOST_ROWS, "max_num_batched_tokens": 6}),
    "concat": Schedule("concat", {"rows": 3, "row_tokens": 48, "slot_tokens": 48}, "fcfs"),
    "static": Schedule("static", {"batch_size": MOST_ROWS}),
}


def runner_of(spec=LLAMA_SPEC, device="cuda:0") -> ModelRunner:
    made = ModelRunner(spec, num_blocks=NUM_BLOCKS, dummy_weights=True, device=device)
    if device != "cpu":
        made.capture(MOST_ROWS)
    return made


def tokens_of(executor, schedule) -> dict[str, list[int]]:
    """Four requests, greedy and drawn, each another length."""
    engine, found = Engine(executor, schedule, num_blocks=NUM_BLOCKS), {}
    for number in range(4):
        sampling = SamplingParams(temperature=0.8 * (number == 1), seed=3, max_tokens=3 + number % 2)
        engine.add(Request(request_id=str(number), prompt_token_ids=[5] * (4 + 5 * number), sampling=sampling))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize(("family", "policy"), [*product(["llama"], SCHEDULES), ("t5", "orca"), ("t5", "static")])
def test_scheduling_one_step_ahead_over_captured_graphs_orders_all_its_accesses(family, policy):
    expected = tokens_of(InProcessExecutor(runner_of(SPECS[family], "cpu")), SCHEDULES[policy])
    with stand_in() as machine:
        found = tokens_of(AsyncExecutor(runner_of(SPECS[family])), SCHEDULES[policy])
    assert found == expected
    assert Counter(machine.launches)["graph"] > 0 or policy == "concat"  # It decodes more rows than are captured.
    assert set(machine.copies) == {"to device", "to host"}  # None by pageable memory, which waits.


@pytest.mark.parametrize(("temperature", "copies", "launches"), [(0.0, 1, 6), (0.8, 2, 9)], ids=["greedy", "drawn"])
def test_a_decode_step_is_one_graph_and_few_copies(temperature, copies, launches):
    """As many for any batch: the host's copies and launches are what a step costs beside the graph.

    Greedy: one copy to the device, two into the graph's inputs, the graph, tokens and soundness to the host. Drawn: the
    parameters, the draw, and the tokens kept for the next step. The graph: ten kernels a layer, and 22 around them.
    """
    with stand_in() as machine:
        runner = runner_of()
        engine = Engine(AsyncExecutor(runner), SCHEDULES["orca"], num_blocks=NUM_BLOCKS)
        for number in range(MOST_ROWS):
            sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=9)
            engine.add(Request(request_id=str(number), prompt_token_ids=[5] * 4, sampling=sampling))
        for _ in range(3):
            engine.step()
        machine.launches.clear()
        machine.copies.clear()
        engine.step()
        kernels = [name for name, *_ in runner.graphs.captured[MOST_ROWS]._graph.nodes]
        assert Counter(machine.launches)["graph"] == 1
        assert len(machine.launches) <= launches
        assert Counter(machine.copies)["to device"] <= copies
        assert Counter(machine.copies)["to host"] <= 2
        assert len(kernels) <= 10 * LLAMA_SPEC.num_layers + 22
        while engine.has_work:
            engine.step()


def test_without_triton_a_gpu_captures_nothing_and_says_so(capsys):
    expected = tokens_of(InProcessExecutor(runner_of(device="cpu")), SCHEDULES["orca"])
    with stand_in(with_triton=False) as machine:
        runner = ModelRunner(LLAMA_SPEC, num_blocks=NUM_BLOCKS, dummy_weights=True, device="cuda:0")
        warm_up_runner(runner, MOST_ROWS)
        found = tokens_of(AsyncExecutor(runner), SCHEDULES["orca"])
    assert found == expected
    assert "graph" not in machine.launches
    assert "decode iterations are not captured as CUDA graphs" in capsys.readouterr().err


def test_graphs_and_their_memory_go_with_their_owner_at_once(monkeypatch):
    """Python's collector, which would find a circle of them, counts objects, not their gigabytes."""
    graphs, original = [], DecodeGraphs.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        graphs.append(weakref.ref(self))

    monkeypatch.setattr(DecodeGraphs, "__init__", init)
    row = SequenceState(request_id="a", num_prompt_tokens=9, max_output_tokens=1, num_blocks=1)
    gc.disable()
    try:
        with stand_in():
            runner = runner_of()
            decode_parts(runner, runner.model, Batch(decode=(row,)), {"a": [1] * 9}, num_layers=2)
            with captured_executor(runner, runner.model, (1, MOST_ROWS)) as executor:
                engine = Engine(executor, SCHEDULES["orca"], num_blocks=NUM_BLOCKS)
                engine.add(Request(request_id="b", prompt_token_ids=[5] * 4, sampling=SamplingParams(max_tokens=4)))
                overheads(engine, runner, num_steps=2)
            assert len(graphs) == 5
            assert [ref for ref in graphs if ref() is not None] == []
            cache, runner = weakref.ref(runner.cache), None
            del engine, executor
            assert cache() is None
    finally:
        gc.enable()


def reading_tokens_before_they_are_copied(patch):
    original = DeviceSamples.to_host

    def to_host(self):
        self._copied = None
        return original(self)

    patch.setattr(DeviceSamples, "to_host", to_host)


def filling_a_graph_on_another_stream(patch):
    """Fast, and never waited for."""
    original, streams = DecodeGraphs._fill, []

    def fill(self, *args):
        streams.append(streams[0] if streams else torch.cuda.Stream())
        with torch.cuda.stream(streams[0]):
            original(self, *args)

    patch.setattr(DecodeGraphs, "_fill", fill)


def overwriting_a_graph_in_flight(patch):
    """The graph waits for its inputs, the next inputs do not wait for the graph."""
    original, streams = DecodeGraphs._fill, []

    def fill(self, *args):
        streams.append(streams[0] if streams else torch.cuda.Stream())
        if len(streams) == 1:
            streams[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            original(self, *args)
        torch.cuda.current_stream().wait_stream(streams[0])

    patch.setattr(DecodeGraphs, "_fill", fill)


def one_pinned_buffer_for_all_steps(patch):
    kept = {}

    def to_device(values, device):
        if device.type != "cuda":
            return torch.from_numpy(values)
        size = values.nbytes
        if "host" not in kept:
            kept["host"] = torch.empty(1 << 12, dtype=torch.uint8, pin_memory=True)
            kept["bytes"] = np.frombuffer(kept["host"].detach().numpy(), dtype=np.uint8)
        kept["bytes"].setflags(write=True)
        kept["bytes"][:size] = np.ascontiguousarray(values).view(np.uint8).ravel()
        host = kept["host"][:size].view(torch.from_numpy(values).dtype).view(values.shape)
        return host.to(device, non_blocking=True)

    patch.setattr(decode_graphs, "to_device", to_device)


def reading_logits_of_another_graph(patch):
    """Each graph keeps what it computes; the largest was captured first, so that others compute in its memory."""
    original, first = DecodeGraphs.replay, []

    def replay(self, singles, table_BT, hidden_BE):
        outputs = original(self, singles, table_BT, hidden_BE)
        first.append(self.captured[self.sizes[0]].outputs[1])
        self.captured[self.sizes[-1]].replay()
        return (outputs[0], first[-1][:1], outputs[2])

    patch.setattr(DecodeGraphs, "replay", replay)


def freeing_what_another_stream_reads(patch):
    """A tensor of the stream of compute goes out of scope while a copy on a side stream may still read it."""
    original = DeviceSamples.__init__

    def init(self, token_R, sound_R, reported):
        side, twice_R = torch.cuda.Stream(), token_R * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            twice_R.to("cpu", non_blocking=True)
        original(self, token_R, sound_R, reported)

    patch.setattr(DeviceSamples, "__init__", init)


def capturing_before_the_weights_are_there(patch):
    """The stream that captures does not wait for the one that loaded."""

    def capture(self, function):
        with torch.cuda.stream(self._stream):
            function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = function()
        return graph_capture.CapturedFunction(outputs, graph=graph)

    patch.setattr(GraphCapturer, "capture", torch.inference_mode()(capture))


FAULTS = {
    reading_logits_of_another_graph: "which another graph of its pool overwrote",
    freeing_what_another_stream_reads: "is freed while it may still be read on stream",
    reading_tokens_before_they_are_copied: "the host reads",
    filling_a_graph_on_another_stream: "may still be written on stream",
    overwriting_a_graph_in_flight: "writes memory of .* which may still be read on the default stream",
    one_pinned_buffer_for_all_steps: "the host overwrote",
    capturing_before_the_weights_are_there: "may still be written on the default stream",
}


def decode_three() -> None:
    """A prefill and three decodes by graphs, none of which the host waits for, and the last tokens."""
    runner = runner_of()
    rows = (SequenceState(request_id="a", num_prompt_tokens=5, max_output_tokens=9, num_blocks=1),)
    runner.forward(Batch(prefill=rows), {"a": [1] * 5})
    for count in range(1, 4):
        rows[0].num_output_tokens = count
        runner.forward(Batch(decode=rows), {"a": [1] * (5 + count)})
    DeviceSamples(*runner.chosen, None).to_host()


@pytest.mark.parametrize(("fault", "found"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_seeded_fault_is_found(fault, found, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(OrderError, match=found), stand_in():
        decode_three()


def test_without_a_fault_nothing_is_found():
    with stand_in():
        decode_three()
