"""A recorded function computes anew from what its buffers hold, into tensors that stay the same ones."""

import torch

from exeplan.runner.compute.recording import Recorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_replay_reads_the_buffers_and_writes_the_same_outputs():
    buffer, total = torch.zeros(4, device=DEVICE), torch.zeros((), device=DEVICE)

    def function():
        total.add_(buffer.sum())
        return (buffer * 2, buffer.max())

    recorded = Recorder(DEVICE).record(function)
    places = [output.data_ptr() for output in recorded.outputs]
    total.zero_()
    for values in ([1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 0.0, 1.0]):
        buffer.copy_(torch.tensor(values))
        doubled, largest = recorded.replay()
        assert doubled.tolist() == [2 * value for value in values]
        assert largest.item() == max(values)
    assert total.item() == 16
    assert [output.data_ptr() for output in recorded.outputs] == places


def test_recordings_of_one_recorder_share_their_memory_and_not_their_results():
    recorder, buffer = Recorder(DEVICE), torch.ones(8, device=DEVICE)
    large, small = recorder.record(lambda: (buffer + 1,)), recorder.record(lambda: (buffer[:2] - 1,))
    assert large.replay()[0].tolist() == [2.0] * 8
    assert small.replay()[0].tolist() == [0.0] * 2
    assert large.replay()[0].tolist() == [2.0] * 8
