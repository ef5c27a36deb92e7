"""Reading a request may take any time, or end its process: other requests, probes and signals never wait for it."""

import asyncio
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exeplan.runner.ipc.messages import ModelSource, ReadDetokenize, ReaderSetup
from exeplan.runner.server.network.readers import MAX_WAITING_BYTES, Readers
from exeplan.runner.server.openai.errors import RequestError

from ..processes import PATIENCE, descendants, eventually, is_alive
from .conftest import CHAT_TEMPLATE, Running

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'for ever' %}" + LOOP + "{% endif %}" + CHAT_TEMPLATE
ENDLESS = {"messages": [{"role": "user", "content": "for ever"}], "max_tokens": 1}
SHORT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def directory(checkpoint, tmp_path_factory):
    """The checkpoint with a template that never ends for one conversation."""
    found = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(checkpoint, found)
    config = json.loads((found / "tokenizer_config.json").read_text())
    (found / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return found


@pytest.fixture(scope="module")
def server(launch, directory):
    with launch(directory=directory, replan="off") as running:
        yield running


def readers(server: Running) -> list[int]:
    return [pid for pid in descendants(server.process.pid) if is_alive(pid) and name(pid) == "exeplan-reader"]


def name(pid: int) -> str:
    """As the system shows it."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # Gone meanwhile.
        return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_bodies_that_wait_share_one_limit():
    """Nothing is started, so that all of them wait."""

    async def ask():
        readers = Readers(ReaderSetup(model=ModelSource(name="m", directory=None, config={}), served_name="m"))
        command = ReadDetokenize(body=bytes(MAX_WAITING_BYTES // 4))
        waiting = [asyncio.ensure_future(readers.read(command)) for _ in range(4)]
        await asyncio.sleep(0)
        assert readers.num_reading == 4
        with pytest.raises(RequestError, match="too many large requests at once") as error:
            await readers.read(command)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert readers.num_reading == 0
        return error.value.status

    assert asyncio.run(ask()) == 503


def chat(server: Running, body: dict[str, object]):
    return server.call("/v1/chat/completions", body)


def test_a_template_that_never_ends_holds_nothing_up_and_is_given_up(server):
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(chat, server, ENDLESS)
        eventually(lambda: any(state(pid) == b"R" for pid in readers(server)))
        assert server.complete({"prompt": "a", "max_tokens": 2}).status == 200
        assert server.call("/health").status == 200
        assert not endless.done()
        reply = endless.result(PATIENCE)
    assert reply.status == 400
    assert "template and tokenization included, takes longer than 5 s" in reply.error["message"]
    assert chat(server, SHORT).status == 200


def state(pid: int) -> bytes:
    """As Linux has it: R for a process that runs."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]


def test_a_reader_that_is_killed_is_replaced(server):
    before = readers(server)
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, before)))
    assert chat(server, SHORT).status == 200
    assert server.complete(b"{}").error["message"] == "'prompt' is missing"
    assert len(readers(server)) == 2
    assert server.call("/ready").status == 200


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_an_idle_reader_that_is_stopped_or_killed_is_replaced(server, number):
    before = readers(server)
    for pid in before:
        os.kill(pid, number)
    eventually(lambda: len(readers(server)) == 2 and not set(before) & set(readers(server)))
    assert server.complete({"prompt": "a", "max_tokens": 2}).status == 200


@pytest.mark.parametrize("stopped", [False, True])
def test_what_forks_readers_is_replaced_with_them_where_it_has_ended_or_is_stopped(server, stopped):
    before = readers(server)
    (forks,) = set(map(parent, before))
    assert name(forks) == "exeplan-rforks"
    os.kill(forks, signal.SIGSTOP if stopped else signal.SIGKILL)
    if stopped:
        os.kill(before[0], signal.SIGKILL)
    eventually(lambda: len(readers(server)) == 2 and not set(before) & set(readers(server)))
    assert not is_alive(forks)
    assert server.complete({"prompt": "a", "max_tokens": 2}).status == 200
    assert chat(server, SHORT).status == 200


def test_what_is_being_read_at_sigterm_is_still_answered_though_its_reader_is_stopped(launch):
    with launch(replan="off") as server, ThreadPoolExecutor(1) as pool:
        for pid in readers(server):
            os.kill(pid, signal.SIGSTOP)
        asked = pool.submit(server.complete, {"prompt": "a", "max_tokens": 2})
        eventually(lambda: asked.done() or server.metric("num_requests_waiting") == 1)
        server.process.terminate()
        assert asked.result(PATIENCE).status == 200
        assert server.process.wait(PATIENCE) == 0


def test_sigterm_waits_for_a_template_no_longer_than_for_any_other_request(launch, directory):
    with launch(directory=directory, replan="off") as server, ThreadPoolExecutor(1) as pool:
        family = descendants(server.process.pid)
        endless = pool.submit(chat, server, ENDLESS)
        eventually(lambda: server.metric("num_requests_waiting") == 1)  # A reader may run before, while it starts.
        eventually(lambda: any(state(pid) == b"R" for pid in readers(server)))
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
        assert endless.result(PATIENCE).status == 400
        eventually(lambda: not any(map(is_alive, family)))


def test_a_reader_ends_by_itself_when_the_server_is_gone(launch, directory):
    with launch(directory=directory, replan="off") as server, ThreadPoolExecutor(1) as pool:
        family = set(readers(server))
        endless = pool.submit(chat, server, ENDLESS)
        eventually(lambda: any(state(pid) == b"R" for pid in readers(server)))
        family |= set(readers(server))
        server.process.kill()
        assert endless.exception(PATIENCE) is not None
        eventually(lambda: not any(map(is_alive, family)))
