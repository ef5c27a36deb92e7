"""A captured function computes from the contents of its buffers, into static output tensors."""

import torch

from exeplan.runner.compute.passes.graph_capture import GraphCapturer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_replay_reads_the_buffers_and_writes_the_same_outputs():
    buffer, total = torch.zeros(4, device=DEVICE), torch.zeros((), device=DEVICE)

    def function():
        total.add_(buffer.sum())
        return (buffer * 2, buffer.max())

    captured = GraphCapturer(DEVICE).capture(function)
    places = [output.data_ptr() for output in captured.outputs]
    total.zero_()
    for values in ([1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 0.0, 1.0]):
        buffer.copy_(torch.tensor(values))
        doubled, largest = captured.replay()
        assert doubled.tolist() == [2 * value for value in values]
        assert largest.item() == max(values)
    assert total.item() == 16
    assert [output.data_ptr() for output in captured.outputs] == places


def test_graphs_of_one_capturer_share_memory_and_not_results():
    capturer, buffer = GraphCapturer(DEVICE), torch.ones(8, device=DEVICE)
    large, small = capturer.capture(lambda: (buffer + 1,)), capturer.capture(lambda: (buffer[:2] - 1,))
    assert large.replay()[0].tolist() == [2.0] * 8
    assert small.replay()[0].tolist() == [0.0] * 2
    assert large.replay()[0].tolist() == [2.0] * 8
