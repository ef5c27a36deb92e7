"""A placement from a file has every layer once, in order, on existing devices, or is refused in one sentence."""

import pytest

from exeplan.core.cluster import Cluster, Link
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.planner.problems.check_placement import check_devices, check_placement

RRA = Schedule("rra", {"prefill_batch": 4, "decode_steps": 6})
WAA = Schedule("waa-c", {"prefill_batch": 4, "decode_batch": 8})
DEMO, T5 = load_model_spec("demo"), load_model_spec("t5-11b")
WIRE = Link(bytes_per_second=1e9, latency=1e-5)
TWO = Cluster(name="two", device="affine", num_nodes=1, gpus_per_node=2, memory_bytes=1 << 30, intra=WIRE, inter=WIRE)


def stage(first, last, *devices, encoder=(0, 0), phase=""):
    return Stage(layers=(first, last), devices=devices or (0,), encoder_layers=encoder, phase=phase)


@pytest.mark.parametrize(
    ("schedule", "spec", "placement"),
    [
        (RRA, DEMO, (stage(0, 6),)),
        (RRA, DEMO, (stage(0, 1, 0), stage(1, 6, 1, 2))),
        (WAA, DEMO, (stage(0, 6, 0, phase="prefill"), stage(0, 2, 1, phase="decode"), stage(2, 6, 2, phase="decode"))),
        (RRA, T5, (stage(0, 12, 0, encoder=(0, 12)), stage(12, 24, 1, encoder=(12, 24)))),
        (RRA, T5, (stage(0, 0, 0, encoder=(0, 24)), stage(0, 24, 1))),
        (WAA, T5, (stage(0, 0, 0, encoder=(0, 24), phase="prefill"), stage(0, 24, 1, phase="decode"))),
    ],
)
def test_takes_what_covers_the_model(schedule, spec, placement):
    check_placement(placement, spec, schedule)
    check_devices(placement)


@pytest.mark.parametrize(
    ("schedule", "spec", "placement", "message"),
    [
        (RRA, DEMO, (stage(0, 3), stage(2, 6)), "the plan places layers [0, 3], [2, 6]; demo needs 0 to 6 in order"),
        (RRA, DEMO, (stage(3, 6), stage(0, 3)), "the plan places layers [3, 6], [0, 3]; demo needs 0 to 6 in order"),
        (RRA, DEMO, (stage(0, 7),), "the plan places layers [0, 7]; demo needs 0 to 6 in order"),
        (RRA, DEMO, (stage(0, 6, encoder=(0, 6)),), "the plan places encoder layers [0, 6]; demo needs none there"),
        (RRA, T5, (stage(0, 24),), "the plan places encoder layers nowhere; t5-11b needs 0 to 24 in order"),
        (
            WAA,
            DEMO,
            (stage(0, 6, 0, phase="prefill"), stage(0, 5, 1, phase="decode")),
            "the plan places layers on stages that decode [0, 5]; demo needs 0 to 6 in order",
        ),
        (
            WAA,
            T5,
            (stage(0, 1, 0, encoder=(0, 24), phase="prefill"), stage(0, 24, 1, phase="decode")),
            "the plan places decoder layers on stages that prefill [0, 1]; t5-11b needs none there",
        ),
        (
            WAA,
            DEMO,
            (stage(0, 6),),
            "waa-c prefills on some stages and decodes on others; give each the phase prefill or decode",
        ),
        (
            RRA,
            DEMO,
            (stage(0, 6, 0, phase="prefill"), stage(0, 6, 1, phase="decode")),
            "rra prefills and decodes on every stage; leave the stages' phases out",
        ),
    ],
)
def test_says_which_layers_are_wrong(schedule, spec, placement, message):
    with pytest.raises(InputError) as error:
        check_placement(placement, spec, schedule)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((stage(0, 3, 0), stage(3, 6, 0)), "device 0 is in stage 0 and again in stage 1"),
        ((stage(0, 6, 1, 1),), "device 1 is in stage 0 and again in stage 0"),
        ((stage(0, 3, 0), stage(3, 6, 2)), "stage 1 is on device 2, cluster two has 2 GPUs, 0 to 1"),
    ],
)
def test_says_which_device_is_wrong(placement, message):
    with pytest.raises(InputError) as error:
        check_devices(placement, TWO)
    assert str(error.value) == message
