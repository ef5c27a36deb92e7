"""Twenty published advisories of serving systems, the rule that each teaches, and the test that holds us to it.

   advisory                                       rule                        test
 1 SGLang CVE-2026-3059, -3060                    no pickle on any channel    no_channel_carries_objects
 2 SGLang CVE-2026-7301                           listeners on loopback       all_processes_listen_on_loopback_only
 3 SGLang CVE-2026-3989                           dumps are JSON              no_channel_carries_objects
 4 vLLM CVE-2025-47277                            and torch's stores          all_processes_listen_on_loopback_only
 5 vLLM CVE-2025-30202                            one client cannot stall    test_overload.py: a slow reader
 6 ShadowMQ: CVE-2024-50050, CVE-2025-32444       no library that unpickles   no_channel_carries_objects
 7 vLLM CVE-2025-62164                            no tensors from clients     fields_that_were_abused
 8 vLLM CVE-2026-22807                            no code of a checkpoint     a_booby_trapped_checkpoint
 9 PyTorch CVE-2025-32434, vLLM CVE-2025-24357    safetensors only            checkpoint.py: a pickle is refused
10 vLLM CVE-2026-34756                            `n` has a limit and counts  test_bad_input.py: too many choices
11 vLLM CVE-2025-48956                            headers are capped          test_bad_input.py: large headers
12 vLLM CVE-2025-62426                            no template is a user's     fields_that_were_abused
13 vLLM CVE-2025-48944, xgrammar                  no pattern is a user's      fields_that_were_abused
14 vLLM CVE-2025-59425                            constant-time comparison    the_key_is_compared_in_constant_time
15 vLLM's security guide                          all paths need the key      no_route_is_open_by_accident
16 llama.cpp CVE-2026-21869                       all numbers have limits     test_bad_input.py: no value of any field
17 Triton CVE-2025-23310, -23311                  chunks count as body        test_bad_input.py: chunked bodies
18 Triton CVE-2025-23319, -23320, -23334          errors name no insides      errors_tell_nothing_of_the_machine
19 Triton CVE-2025-33201, CVE-2026-24146, -24173  outputs are capped          fields_that_were_abused
20 a fallback to weights_only=False               no weaker mode              no_channel_carries_objects
"""

import hmac
import os
import re
from pathlib import Path

import pytest

import exeplan
from exeplan.runner.server.network import api_keys
from exeplan.runner.server.network.api_keys import ApiKeys
from exeplan.runner.server.network.connection import OPEN_PATHS, Gate

from ..processes import descendants
from .test_bad_input import BODIES

PACKAGE = Path(exeplan.__file__).parent
SOURCES = [
    Path(folder) / name
    for folder, _, names in os.walk(PACKAGE, followlinks=True)
    for name in names
    if name.endswith(".py")
]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\bpickle\b.*\bimport\b|\bimport\b.*\b(c?pickle|cloudpickle|dill|joblib|shelve|marshal)\b",
        r"\bzmq\b|\b(send|recv)_pyobj\b",
        r"_object_list\(",
        r"multiprocessing\b.*\b(Queue|Pipe|Manager)\b",
        r"weights_only|allow_pickle\s*=\s*True",
    ],
)
def test_no_channel_carries_objects(pattern):
    assert len(SOURCES) > 100
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").split("\n")
        if re.search(pattern, line)
    ]
    assert found == []


def listening(pids):
    """Addresses, in the kernel's hexadecimal, on which these processes listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if entry.is_symlink() and (found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))):
                inodes.add(found[1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_all_processes_listen_on_loopback_only(pipeline):
    found = listening([pipeline.process.pid, *descendants(pipeline.process.pid)])
    assert f"0100007F:{pipeline.port:04X}" in found
    loopback = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
    assert [address for address in found if address.partition(":")[0] not in loopback] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": "gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAl0b3VjaCAvdG1wlIWUUpQu"},
        {"prompt": {"embeds": [[0.1]]}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template": "{{ 7 * 7 }}"},
        {"guided_regex": r"(a+)\1"},
        {"guided_json": {"type": "number", "multipleOf": 123457}},
        {"structural_tag": "{}"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://a/b"}}}},
        {"logits_processors": ["os.system"]},
        {"n": 129},
        {"best_of": 2**31},
        {"logprobs": 21},
        {"stop": ["a"] * 17},
        {"stop_token_ids": [1] * 257},
        {"logit_bias": {str(n): 1 for n in range(301)}},
        {"prompt": ["a"] * 1025},
        {"max_tokens": 2**63},
        {"prompt": [1] * 2**16, "max_tokens": 2**31 - 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_were_abused(fields, server):
    reply = server.complete({"prompt": "a", **fields})
    assert reply.status == 400
    assert reply.error["message"]


def test_a_booby_trapped_checkpoint(server, checkpoint):
    assert (checkpoint / "evil.py").exists()
    assert server.complete({"prompt": "a", "max_tokens": 2}).status == 200
    assert not (checkpoint / "its code has run").exists()


def test_the_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(given, expected):
        compared.append((len(given), len(expected)))
        return hmac.compare_digest(given, expected)

    class Spied:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(api_keys, "hmac", Spied)
    gate = Gate(app=None, keys=ApiKeys(key="the key"))
    for given, allowed in ((b"", False), (b"the kez", False), (b"the key" * 9, False), (b"the key", True)):
        headers = [(b"authorization", b"Bearer " + given)]
        scope = {"raw_path": b"/x", "path": "/x", "query_string": b"", "headers": headers}
        assert (gate._refusal(scope) is None) == allowed
    assert compared == [(32, 32)] * 4  # Of digests: even the length of the key stays secret.


def test_no_route_is_open_by_accident(keyed):
    """Whatever the method and however the path is written."""
    paths = ["/v1/models", "/v1/models/tiny", "/metrics", "/plan", "/dashboard", "/openapi.json", "/docs", "/x"]
    paths += ["//health", "/health/", "/health/../plan", "/health%2f..%2fplan", "/HEALTH", "/health;/plan"]
    paths += ["/v1/../plan"]
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "QUERY"):
            status = keyed.call(path, b"{}" if method != "GET" else None, method=method, authorization="").status
            assert status == 401, (method, path)
    for path in OPEN_PATHS:
        assert keyed.call(path, authorization="").status == 200


def test_errors_tell_nothing_of_the_machine(server, checkpoint):
    replies = [server.complete(body) for body, _, _ in BODIES.values()]
    replies += [server.call("/v1/models/..%2f..%2fetc%2fpasswd"), server.call("/nothing")]
    for reply in replies:
        assert reply.headers["x-request-id"]
        for word in ("Traceback", ".py", 'File "', str(checkpoint), str(PACKAGE), "/tmp/", "0x7f"):
            assert word not in reply.text
