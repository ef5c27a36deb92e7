"""A file of API keys says which client a request is from and what it may have; keys are shown nowhere."""

import hashlib
import json
import signal
from dataclasses import replace

import pytest

from exeplan.errors import InputError
from exeplan.runner.server.network.api_keys import ApiKeys, read_keys
from exeplan.runner.server.network.clients import Client

from ..processes import eventually
from .test_lifecycle import streaming

POLITE, FLOOD, BOSS = "polite-key", "flood-key", "boss-key"
SHA256 = hashlib.sha256(FLOOD.encode()).hexdigest()
KEYS = f"""
keys:
  - {{name: polite, key: {POLITE}, weight: 4}}
  - {{name: flood, sha256: {SHA256}, max_requests: 2, max_waiting: 3}}
  - {{name: boss, key: {BOSS}, admin: true, requests_per_minute: 2}}
"""


def written(folder, text, mode=0o600):
    path = folder / "keys.yaml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_clients_are_found_by_key(tmp_path):
    keys = ApiKeys(key="mine", file=written(tmp_path, KEYS))
    assert keys.find(POLITE.encode()) == Client(name="polite", weight=4.0)
    assert keys.find(FLOOD.encode()) == Client(name="flood", max_requests=2, max_waiting=3)
    assert keys.find(b"mine") == Client(admin=True)
    assert keys.find(SHA256.encode()) is None  # The digest is no key.
    assert keys.find(b"") is None


def test_clients_that_another_front_end_names_have_the_limits_of_here(tmp_path):
    keys = ApiKeys(key="own", file=written(tmp_path, "keys: [{name: chat, key: secret, max_requests: 3}]"))
    assert keys.with_identity("key chat") == Client(name="chat", max_requests=3.0)
    assert keys.with_identity("address 10.0.0.9") == Client(address="10.0.0.9", admin=True)
    assert keys.with_identity("key gone") is None
    alone = ApiKeys(file=written(tmp_path, "keys: [{name: chat, key: secret}]"))
    assert alone.with_identity("address 10.0.0.9") is None
    assert ApiKeys().with_identity("address 2001:db8::/64") == Client(address="2001:db8::/64")


def test_a_wrong_file_changes_nothing(tmp_path):
    keys = ApiKeys(file=(path := written(tmp_path, KEYS)))
    path.write_text("keys: []")
    with pytest.raises(InputError):
        keys.reload()
    assert keys.find(POLITE.encode())
    path.write_text("keys: [{name: other, key: x}]")
    assert keys.reload() == 1
    assert keys.find(POLITE.encode()) is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
def test_a_file_that_others_may_read_is_refused(mode, tmp_path):
    path = written(tmp_path, KEYS, mode)
    with pytest.raises(InputError, match=f"mode {mode:04o}.*chmod 600"):
        read_keys(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "list of 1 to 1000"),
        ("keys: 5", "list of 1 to 1000"),
        ("keys: [5]", "key 1 must be a mapping"),
        ("keys: [{key: a}]", "needs a name"),
        ("keys: [{name: 'a b', key: a}]", "needs a name"),
        ("keys: [{name: a}]", "needs a key"),
        ("keys: [{name: a, key: 5}]", "in quotes"),
        ("keys: [{name: a, key: x, sha256: y}]", "needs a key"),
        ("keys: [{name: a, sha256: abc}]", "64 digits"),
        ("keys: [{name: a, key: x}, {name: a, key: y}]", "same name twice"),
        ("keys: [{name: a, key: x}, {name: b, key: x}]", "same key twice"),
        ("keys: [{name: a, key: x, weight: 0}]", "weight must be a number"),
        ("keys: [{name: a, key: x, weight: .nan}]", "weight must be a number"),
        ("keys: [{name: a, key: x, max_requests: true}]", "max_requests must be a whole number"),
        ("keys: [{name: a, key: x, max_requests: 0.5}]", "max_requests must be a whole number"),
        ("keys: [{name: a, key: x, admin: 1}]", "admin must be true or false"),
        ("keys: [{name: a, key: x, wieght: 2}]", "unknown field 'wieght'"),
    ],
)
def test_what_is_wrong_is_named_without_the_key(text, message, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        read_keys(written(tmp_path, text))
    assert "'x'" not in str(error.value)


@pytest.fixture(scope="module")
def shared(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    path, log = written(folder, KEYS), folder / "log"
    with launch(
        "policy: orca, max_num_seqs: 4", api_keys=str(path), api_key=BOSS, log=log, log_format="json"
    ) as running:
        running.log, running.keys = log, path
        yield running


def ask(server, key, **fields):
    return server.call("/v1/completions", {"prompt": "a", "max_tokens": 1, **fields}, authorization=f"Bearer {key}")


def test_keys_are_needed_and_counted_by_name(shared):
    assert ask(shared, POLITE).status == 200
    refused = ask(shared, "guessed")
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    page = shared.call("/metrics", authorization=f"Bearer {POLITE}").text
    assert 'exeplan:client_requests_total{client="polite",model_name="tiny"} 1.0' in page
    assert 'exeplan:client_generation_tokens_total{client="polite",model_name="tiny"} 1.0' in page


def test_limits_of_a_key_are_429_with_a_time(shared):
    flood = replace(shared, api_key=FLOOD)
    with streaming(flood), streaming(flood):
        refused = ask(shared, FLOOD)
        assert (refused.status, refused.error["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(shared, POLITE).status == 200
    refused = ask(shared, FLOOD, n=4)
    assert refused.status == 429
    assert "may" in refused.error["message"]


def test_the_plan_is_for_keys_that_may_change_it(shared):
    refused = shared.call("/plan", {"accept": True}, authorization=f"Bearer {POLITE}")
    assert refused.status == 403
    assert "admin" in refused.error["message"]
    assert shared.call("/plan", {"accept": True}, authorization=f"Bearer {BOSS}").status != 403


def test_sighup_reads_the_keys_again(shared):
    text = shared.keys.read_text()
    try:
        shared.keys.write_text(text.replace(POLITE, "new-key"))
        shared.process.send_signal(signal.SIGHUP)
        eventually(lambda: ask(shared, "new-key").status == 200)
        assert ask(shared, POLITE).status == 401
        shared.keys.write_text("keys: nonsense")
        shared.process.send_signal(signal.SIGHUP)
        eventually(lambda: "stay as they were" in shared.log.read_text())
        assert ask(shared, "new-key").status == 200
    finally:
        shared.keys.write_text(text)
        shared.process.send_signal(signal.SIGHUP)
        eventually(lambda: ask(shared, POLITE).status == 200)


def test_logs_have_names_and_no_keys(shared):
    log = shared.log.read_text()
    assert not [key for key in (POLITE, FLOOD, BOSS, "new-key", SHA256) if key in log]
    assert "polite" in {json.loads(line).get("client") for line in log.splitlines()}
