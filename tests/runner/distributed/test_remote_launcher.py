"""Workers on several hosts: each has a node agent, which obeys its engine, reports its clock, and ends with the engine.

The hosts are this machine by its loopback address; `two_hosts.sh` has them in network namespaces.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_model, read_plan
from exeplan.runner.__main__ import fingerprint
from exeplan.runner.distributed.remote_launcher import RemoteLauncher
from exeplan.runner.distributed.worker_group import Report
from exeplan.runner.engine.executor import WorkerError
from exeplan.runner.ipc.frames import HEADER, frame
from exeplan.runner.ipc.handshake import KEY_VARIABLE, dial
from exeplan.runner.ipc.messages import AgentHello, LauncherSetup, Ping, WorkerHello

from ..processes import PATIENCE, descendants, eventually, is_alive, listening
from .supervisor import PIPELINE, WIDE, begin

KEY = "a key that only tests use"
HELLO = AgentHello(device=1, host=1, address="127.0.0.1", local_device=0, model_directory=None, fingerprint="another")
_PORTS = itertools.count(20_000, 10)
LATER = ["unshare", "--time", "--monotonic", "1000", "--fork", "--kill-child"]


def has_clocks():
    if not shutil.which("unshare"):
        return False
    return subprocess.run([*LATER, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def plan(tmp_path):
    return plan_file(tmp_path / "plan.yaml", "{devices: [0], layers: [0, 2]}, {devices: [1], layers: [2, 6]}")


def plan_file(path, placement):
    schedule = "{policy: orca, max_num_seqs: 4, micro_batches: 2}"
    path.write_text(f"model: demo\nschedule: {schedule}\nplacement: [{placement}]\nkv_cache_tokens: 1024\n")
    return path


@pytest.fixture
def port():
    """A free one that stays free: it is no ephemeral port, and no other process of these tests takes it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in range(next(_PORTS) + 1000 * worker, 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


@pytest.fixture
def process(plan, port):
    """`process(rank)` is one that torchrun would start."""
    with contextlib.ExitStack() as stack:

        def start(rank, *, path=plan, before=(), **environment):
            launched = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "GROUP_RANK": rank}
            master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port - 1, KEY_VARIABLE: KEY, "OMP_NUM_THREADS": 1}
            values = {name: str(value) for name, value in {**launched, **master, **environment}.items()}
            found = subprocess.Popen(
                [*before, sys.executable, "-m", "exeplan.runner", str(path), "--weights", "dummy", "--port", "0"],
                env={name: value for name, value in {**os.environ, **values}.items() if value},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(found)
            stack.callback(found.kill)
            return found

        yield start


@pytest.fixture
def listen(port):
    """`listen(plan)` is the engine's side, in this process."""
    with contextlib.ExitStack() as stack:

        def start(path, num_devices=2):
            plan = read_plan(path)
            setup = LauncherSetup(
                host=0,
                local_device=0,
                fingerprint=fingerprint(plan, plan_model(plan)),
                address="127.0.0.1",
                port=port,
                num_devices=num_devices,
            )
            launcher = RemoteLauncher(setup, KEY.encode())
            stack.callback(launcher.close)
            return launcher

        yield start


@contextlib.contextmanager
def workers(placement, **options):
    group = begin(placement, **options)
    try:
        yield group
    finally:
        group.kill()


def test_generations_of_workers_on_two_hosts_whose_files_lie_elsewhere(plan, tmp_path, process, listen):
    moved = tmp_path / "elsewhere" / "plan.yaml"
    moved.parent.mkdir()
    moved.write_text(plan.read_text() + "profile: profiles/there.json\n")
    agent, launcher = process(1, path=moved), listen(plan)
    for generation, placement in enumerate((PIPELINE, WIDE), 1):
        with workers(placement, generation=generation, launcher=launcher) as group:
            family = descendants(agent.pid)
            assert len(group.pids) == 1  # The other worker is on the other host.
            assert listening([os.getpid(), *group.pids, agent.pid, *family]) == {"127.0.0.1"}
    launcher.close()
    assert agent.wait(PATIENCE) == 0
    eventually(lambda: not any(map(is_alive, family)))


def test_ranks_of_one_host_share_its_memory(tmp_path, process, listen):
    placement = "{devices: [0], layers: [0, 2]}, {devices: [1, 2], layers: [2, 6]}"
    plan = plan_file(tmp_path / "three.yaml", placement)
    hosts = {"path": plan, "WORLD_SIZE": 3, "GROUP_RANK": 1}
    agents = [process(rank, LOCAL_RANK=rank - 1, **hosts) for rank in (1, 2)]
    with workers(read_plan(plan).placement, launcher=listen(plan, num_devices=3)) as group:
        family = [pid for agent in agents for pid in descendants(agent.pid)]
        assert sum("exeplan-group" in Path(f"/proc/{pid}/maps").read_text() for pid in family) == 2
        assert not any("exeplan-group" in Path(f"/proc/{pid}/maps").read_text() for pid in group.pids)


def test_a_lost_node_agent_takes_its_worker_along_and_never_comes_back(plan, process, listen):
    agent, launcher = process(1), listen(plan)
    with workers(PIPELINE, launcher=launcher) as group:
        family = descendants(agent.pid)
        agent.kill()
        assert group.reports.get(timeout=PATIENCE) == Report(1, None)
        eventually(lambda: not any(map(is_alive, family)))
    with pytest.raises(WorkerError, match="device 1 on host 1 is gone, and torchrun starts no other"):
        begin(PIPELINE, generation=2, launcher=launcher)


def test_another_plan_is_refused_on_both_sides(tmp_path, plan, process, listen):
    other = plan_file(tmp_path / "other.yaml", "{devices: [0], layers: [0, 3]}, {devices: [1], layers: [3, 6]}")
    agent, launcher = process(1, path=other), listen(plan)
    sentence = "host 1 has another plan, model or exeplan than host 0; give all hosts the same"
    with pytest.raises(InputError, match=sentence):
        launcher.prepare(PIPELINE)
    assert agent.communicate(timeout=PATIENCE) == ("", f"exeplan.runner: {sentence}\n")
    assert agent.returncode == 2


def test_a_host_with_another_key_stays_out(plan, process, listen):
    listen(plan)
    agent = process(1, **{KEY_VARIABLE: "something else entirely"})
    assert "has another EXEPLAN_CLUSTER_KEY; give all hosts the same" in agent.communicate(timeout=PATIENCE)[1]
    assert agent.returncode == 2


def test_strangers_who_say_nothing_keep_no_host_out(plan, process, listen, port):
    launcher = listen(plan)
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        process(1)
        launcher.prepare(PIPELINE)
    assert launcher.locate(1).host == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xff" * 8,
        HEADER.pack(3) + b"abc",
        frame(Ping()),
        frame(WorkerHello(device=7, generation=1)),
        *(frame(replace(HELLO, device=device)) for device in (-1, 0, 2, 2**40)),
    ],
)
def test_a_host_with_the_key_that_sends_something_else_is_disconnected_and_leaves_no_thread(plan, listen, port, sent):
    listen(plan)
    before = set(threading.enumerate())  # Some of an earlier test's may still end.
    with dial("127.0.0.1", port, KEY.encode(), patience=PATIENCE) as peer:
        peer.sendall(sent)
        # It may have been disconnected before the rest.
        with contextlib.suppress(ConnectionResetError, OSError):
            peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.skipif(not has_clocks(), reason="`unshare --time` gives no process a clock of its own here")
def test_the_clock_of_another_host_is_read(plan, process, listen):
    process(1, before=LATER)
    launcher = listen(plan)
    launcher.prepare(PIPELINE)
    # As exactly as the fastest of a few pings tells it.
    assert launcher.locate(1).clock_offset == pytest.approx(-1000, abs=20)
    assert launcher.locate(0).clock_offset == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_agent_without_its_torchrun_ends(plan, process, listen, number):
    """A shell stands for torchrun, which passes signals on only while it lives."""
    torchrun, launcher = process(1, before=["sh", "-c", '"$@"; true', "torchrun"]), listen(plan)
    launcher.prepare(PIPELINE)
    family = descendants(torchrun.pid)
    os.kill(torchrun.pid, number)
    eventually(lambda: not any(map(is_alive, family)))


@pytest.fixture
def both(process):
    """The processes of two hosts that serve, and all their descendants."""
    first, second = process(0), process(1)
    assert first.stdout.readline().startswith("serving demo")
    return first, second, descendants(first.pid) + descendants(second.pid)


def test_all_hosts_end_with_status_0_after_a_signal_to_the_first(both):
    first, second, family = both
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE) == second.wait(PATIENCE) == 0
    eventually(lambda: not any(map(is_alive, family)))


def test_a_node_agent_that_loses_the_engine_ends(both):
    _, second, family = both
    (engine,) = (pid for pid in family if Path(f"/proc/{pid}/comm").read_text() == "exeplan-engine\n")
    os.kill(engine, signal.SIGKILL)
    assert second.wait(PATIENCE) == 1
    assert second.stderr.read() == "exeplan.runner: the engine is gone\n"
    eventually(lambda: not any(map(is_alive, family)))


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": ""}, "torchrun has to start this, as in `torchrun --nnodes 2 ... -m exeplan.runner plan.yaml`"),
        ({"WORLD_SIZE": 3}, "torchrun started 3 processes, the plan is for devices 0, 1; start one for each"),
        ({KEY_VARIABLE: ""}, "several hosts need one secret key in EXEPLAN_CLUSTER_KEY"),
        ({"MASTER_ADDR": "192.0.2.77", "RANK": 0}, "cannot listen on 192.0.2.77:"),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_sentence(process, environment, sentence):
    found = process(1, **environment)
    message = found.communicate(timeout=PATIENCE)[1]
    *logged, said = message.splitlines()
    assert sentence in said
    assert all(" info " in line for line in logged)
    assert found.returncode == 2
