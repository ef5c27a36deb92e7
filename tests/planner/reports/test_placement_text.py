"""A placement reads as its stages, GPUs, tensor-parallel degrees and layers, in one line of any length."""

import pytest

from exeplan.core.schedule import Stage
from exeplan.planner.reports.placement_text import show_gpus, show_placement


def stages(*counts, phase="", first_gpu=0):
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return tuple(
        Stage(devices=(first_gpu + i,), layers=(ends[i], ends[i + 1]), phase=phase) for i in range(len(counts))
    )


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (stages(6), "all layers on GPU 0"),
        (stages(10, 10, 10, 10), "4 stages: GPUs 0-3, layers 10/10/10/10"),
        ((Stage(devices=(0, 1), layers=(0, 6)),), "1 stage: GPUs 0-1 (tensor parallel 2), layers 6"),
        (
            (Stage(devices=(0, 1), layers=(0, 4)), Stage(devices=(2,), layers=(4, 6))),
            "2 stages: GPUs 0-1 (tensor parallel 2), GPU 2, layers 4/2",
        ),
        (
            stages(20, 20, phase="prefill") + stages(40, phase="decode", first_gpu=2),
            "2 prefill + 1 decode stages: prefill on GPUs 0-1, layers 20/20; decode on GPU 2, layers 40",
        ),
        (
            (
                Stage(devices=(0,), layers=(0, 0), encoder_layers=(0, 12), phase="prefill"),
                Stage(devices=(1,), layers=(0, 12), phase="decode"),
            ),
            "1 prefill + 1 decode stages: prefill on GPU 0, encoder layers 12; decode on GPU 1, layers 12",
        ),
        (stages(*[3] * 12, *[2] * 3, 1), "16 stages: GPUs 0-15, layers 12x3/3x2/1"),
    ],
)
def test_a_placement_in_one_line(placement, text):
    assert show_placement(placement) == text


def test_gpus_in_a_row_are_a_range():
    assert [show_gpus(g) for g in ([3], [0, 1, 2], [0, 1, 4])] == ["GPU 3", "GPUs 0-2", "GPUs 0-1+4"]
