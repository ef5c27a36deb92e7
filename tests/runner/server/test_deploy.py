"""The examples for operators fit the program: every flag exists, every metric of the dashboard is there."""

import json
import re
import shlex
from importlib import resources

import pytest

from exeplan.cli import main
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.drift.state import DriftState, Replanned, ReplanState, summary

PLAN = Plan(model="m", schedule=Schedule("orca", {"max_num_seqs": 1}), placement=(Stage(layers=(0, 1)),))
DEPLOY = resources.files("exeplan.runner") / "deploy"


@pytest.fixture(scope="module")
def flags():
    """Of `exeplan serve`."""
    import argparse

    from exeplan.commands.serve import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


def unit():
    """The unit's settings by section."""
    found, section = {}, {}
    for line in (DEPLOY / "exeplan.service").read_text().splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert name not in section
            section[name] = value
    return found


def seconds(text):
    return int(text.removesuffix("s"))


def test_the_unit_starts_drains_and_reloads(flags):
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[1] == "serve"
    args = flags.parse_args(command[2:])
    assert int(service["TimeoutStopSec"]) > seconds(args.drain)
    assert "-HUP" in service["ExecReload"]
    assert service["Type"] == "notify"
    assert service["Restart"] == "on-failure"  # The server ends with 1 when only a new start helps.
    assert service["RestartPreventExitStatus"] == "2"
    assert "AF_NETLINK" in service["RestrictAddressFamilies"].split()
    assert args.host == "127.0.0.1"


def test_the_container_starts_and_is_probed(flags):
    text = (DEPLOY / "Containerfile").read_text()
    lines = dict(re.findall(r"^(ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE))
    assert json.loads(lines["ENTRYPOINT"]) == ["exeplan", "serve"]
    args = flags.parse_args(json.loads(lines["CMD"]))
    assert f"EXPOSE {args.port}" in text
    assert f"http://127.0.0.1:{args.port}/health" in text
    assert seconds(args.drain) < int(re.search(r"--stop-timeout (\d+)", text)[1])


def test_every_metric_of_the_dashboard_is_on_the_page(server):
    server.complete({"prompt": "a b c", "max_tokens": 5, "ignore_eos": True})
    server.complete({"prompt": "a", "n": 100})
    page = server.call("/metrics").text
    known = set(re.findall(r"^# TYPE (exeplan:\w+) ", page, re.MULTILINE))
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    board = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {
        name for text in (*expressions, json.dumps(board["templating"])) for name in re.findall(r"exeplan:\w+", text)
    }
    assert len(named) > 25
    # What is there once drift was looked at, a plan adopted, and the planned lengths are known.
    last = Replanned(number=1, seconds=1.0, source="drift", reason="", plan=PLAN, old=None, new=None, diff="")
    state = ReplanState(mode="auto", plan=PLAN, drift=DriftState(bound_share=0.9, best_gain=0.1), last=last)
    known |= {f"exeplan:{name}" for name in summary(state)} | {"exeplan:observed_latency_seconds"}
    assert named - known == set()


def test_the_dashboard_fills_its_grid_without_overlap():
    board = json.loads((DEPLOY / "grafana.json").read_text())
    cells = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells
        assert place["x"] + place["w"] <= 24
        cells |= taken
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_wrong_options_end_with_status_2_and_one_sentence(tmp_path, capsys):
    for wrong in (
        ["--port", "99999"],
        ["--max-queue", "0"],
        ["--admission", "maybe"],
        ["--request-timeout", "0s"],
        ["--request-timeout", "soon"],
        ["--cors-origin", "chat.example.org"],
        ["--cors-origin", "*"],
        ["--cors-origin", "https://Chat.example.org"],
        ["--cors-origin", "https://chat.example.org:443"],
        ["--cors-origin", "http://chat.example.org:80"],
        ["--allowed-host", "https://llm.example.org"],
        ["--allowed-host", "llm.example.org:443"],
        ["--metrics-aliases", "tgi"],
        ["--log-format", "xml"],
        ["--log-level", "loud"],
        ["--replan", "perhaps"],
        ["--api-key", ""],
        ["--api-key", "secret\n"],
        ["--api-key", " secret"],
    ):
        assert main(["serve", str(tmp_path / "none.yaml"), *wrong]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert wrong[0] in error
