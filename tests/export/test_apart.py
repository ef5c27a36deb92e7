"""Plans with servers that only prefill or only decode: a server each, and one router that is told of all of them."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml

from benchmarks.quality.exported import plans
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import ReplicaGroup, Schedule, Stage
from exeplan.errors import InputError
from exeplan.export import load_exporter
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export

PLANS = dict(plans())
XPYD = PLANS["2P3D"]
engines = pytest.mark.parametrize("engine", ["vllm", "sglang"])


def exported(engine: str, plan: Plan = XPYD) -> Export:
    return load_exporter(engine).export(plan, load_model_spec(plan.model), model="organisation/name")


def commands(export: Export) -> list[list[str]]:
    """The words of each command of the script, without assignments."""
    text = FORMS["command"](export).replace("\\\n", " ")
    lines = [line.removesuffix(" &") for line in text.splitlines() if line and not line.startswith("#")]
    return [[word for word in shlex.split(line) if "=" not in word.split(" ")[0]] for line in lines if line != "wait"]


def values(words: list[str], option: str) -> list[str]:
    return [words[n + 1] for n, word in enumerate(words) if word == option]


@engines
def test_the_router_is_told_of_every_server_where_it_listens(engine: str) -> None:
    *servers, router = commands(exported(engine))
    assert len(servers) == 5
    ports = [values(words, "--port")[0] for words in servers]
    assert len(set(ports)) == 5
    told = values(router, "--prefill") + values(router, "--decode")
    assert told == [f"http://127.0.0.1:{port}" for port in ports]


def test_sglangs_router_knows_the_bootstrap_port_of_each_prefill_server() -> None:
    *servers, router = commands(exported("sglang"))
    own = [port for words in servers for port in values(words, "--disaggregation-bootstrap-port")]
    assert own == ["8998", "8999"]
    assert [router[n + 2] for n, word in enumerate(router) if word == "--prefill"] == own


def test_vllms_servers_have_a_side_channel_each_and_a_role() -> None:
    export = exported("vllm")
    text = FORMS["command"](export)
    assert [f"VLLM_NIXL_SIDE_CHANNEL_PORT={5600 + n}" in text for n in range(6)] == [True] * 5 + [False]
    roles = [json.loads(values(words, "--kv-transfer-config")[0])["kv_role"] for words in commands(export)[:-1]]
    assert roles == ["kv_producer"] * 2 + ["kv_consumer"] * 3


@engines
def test_batches_are_those_of_each_server(engine: str) -> None:
    """600 rows decode on three servers, 12 requests are prefilled in a pass."""
    prefill, decode = exported(engine).instances
    option = {"vllm": ("--max-num-seqs",) * 2, "sglang": ("--prefill-max-requests", "--max-running-requests")}[engine]
    assert values(list(prefill.options), option[0]) == ["12"]
    assert values(list(decode.options), option[1]) == ["200"]
    assert (prefill.count, decode.count) == (2, 3)


def test_the_cache_of_the_plan_is_divided_among_those_that_decode() -> None:
    _, decode = exported("sglang").instances
    assert values(list(decode.options), "--max-total-tokens") == ["33334"]


@engines
def test_the_bound_limits_what_the_router_lets_in(engine: str) -> None:
    router = exported(engine).router
    assert router
    assert values(list(router.options), "--max-concurrent-requests") == ["200"]
    # A bucket, which by default has as many tokens again a second later.
    assert values(list(router.options), "--rate-limit-tokens-per-second") == ["1"]
    said = " ".join(router.remarks)
    assert f"{engine}-router lets in one a second more than are answered" in said
    assert ("streams are not limited" in said) == (engine == "vllm")
    unbounded = exported(engine, replace(XPYD, bound=None)).router
    assert unbounded
    assert {"--max-concurrent-requests", "--rate-limit-tokens-per-second"}.isdisjoint(unbounded.options)
    assert "lets in" not in " ".join(unbounded.remarks)


@engines
def test_on_several_hosts_addresses_are_the_hosts(engine: str) -> None:
    export = exported(engine, PLANS["1P1D on two hosts"])
    text = FORMS["command"](export)
    assert "# on host 1" in text
    assert "--prefill http://host-0:" in text
    assert "--decode http://host-1:" in text
    assert any("host-N stands for" in remark for remark in export.remarks)
    if engine == "vllm":
        assert "VLLM_NIXL_SIDE_CHANNEL_HOST=host-1" in text
    with pytest.raises(InputError, match="a compose file is of one host"):
        FORMS["compose"](export)


@engines
def test_the_router_finds_every_pod_by_its_name(engine: str) -> None:
    objects = [*yaml.safe_load_all(FORMS["kubernetes"](exported(engine)))]
    sets = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "StatefulSet"}
    assert {name: one["replicas"] for name, one in sets.items()} == {f"{engine}-prefill": 2, f"{engine}-decode": 3}
    headless = [
        o["metadata"]["name"] for o in objects if o["kind"] == "Service" and o["spec"].get("clusterIP") == "None"
    ]
    assert headless == [one["serviceName"] for one in sets.values()]
    [router] = [one for one in objects if one["kind"] == "Deployment"]
    [container] = router["spec"]["template"]["spec"]["containers"]
    hosts = [word.split("/")[2].split(":")[0] for word in container["args"] if word.startswith("http://")]
    assert hosts == [f"{name}-{n}.{name}" for name, one in sets.items() for n in range(one["replicas"])]


@engines
def test_replicas_of_xpyd_are_behind_one_router(engine: str) -> None:
    pair = (Stage(devices=(0,), layers=(0, 32), phase="prefill"), Stage(devices=(1,), layers=(0, 32), phase="decode"))
    schedule = Schedule("waa-c", {"decode_batch": 100, "prefill_batch": 4})
    export = exported(engine, replace(XPYD, placement=pair, schedule=schedule, replicas=(0, 2, 4)))
    assert [one.count for one in export.instances] == [3, 3]
    assert [one.gpus for one in export.instances] == [((0,), (2,), (4,)), ((1,), (3,), (5,))]
    assert not any("need a router" in remark for remark in export.remarks)


@engines
def test_what_the_engine_cannot_honour_is_said_and_not_in_what_is_replayed(engine: str) -> None:
    export = exported(engine, PLANS["1P1D on two hosts"])
    assert any("adjusts the number of prefills" in remark for remark in export.remarks)
    assert any("holds prefills back" in remark for remark in export.remarks)
    assert export.as_run
    assert export.as_run.schedule.variables == {"decode_batch": 100, "prefill_batch": 4}
    assert exported(engine).as_run is None


@engines
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "placement": (
                    Stage(devices=(0,), layers=(0, 16), phase="prefill"),
                    Stage(devices=(1,), layers=(16, 32), phase="prefill"),
                    Stage(devices=(2,), layers=(0, 32), phase="decode"),
                )
            },
            "the plan has 2 stages in a row that prefill; exported are servers with all layers on each",
        ),
        (
            {
                "placement": (
                    Stage(devices=(0, 1), layers=(0, 32), phase="prefill"),
                    Stage(devices=(2, 3, 4, 5, 6), layers=(0, 32), phase="decode"),
                )
            },
            "one divides the other, and the plan has 2 and 5",
        ),
        ({"device": "cpu"}, "hands keys and values over between GPUs, the plan is for a CPU"),
        (
            {
                "more_replicas": (
                    ReplicaGroup(
                        schedule=Schedule("waa-c", {"decode_batch": 4, "prefill_batch": 1}),
                        placement=(Stage(layers=(0, 32)),),
                        first_devices=(7,),
                    ),
                )
            },
            "some of the plan's replicas have servers for each phase and others do not",
        ),
    ],
)
def test_what_cannot_run_is_refused(engine: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        exported(engine, replace(XPYD, **changes))
