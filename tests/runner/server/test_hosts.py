"""A request to a name that is not the server's is refused before anything else of it is looked at."""

import pytest

from exeplan.errors import InputError
from exeplan.runner.server.network.hosts import Hosts, check_host_name

LOOPBACK = ["localhost", "localhost:8000", "LocalHost.:1", "app.localhost", "127.0.0.1:8000", "127.1.2.3", "[::1]:80"]
FOREIGN = [
    "evil.example:8000",
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "a:b:c",
    "[",
]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "0.0.0.0", "::", "10.1.2.3", "gpu-box"])
def test_loopback_names_are_always_taken_and_other_names_never(bound):
    hosts = Hosts(bound)
    assert all(hosts.has(header) for header in LOOPBACK)
    assert not any(hosts.has(header) for header in FOREIGN)


@pytest.mark.parametrize(
    ("bound", "taken", "refused"),
    [
        ("10.1.2.3", "10.1.2.3:8000", "10.1.2.4:8000"),
        ("gpu-box", "GPU-box:8000", "gpu-box.evil.example"),
        ("fd00::1", "[fd00:0::1]:8000", "[fd00::2]:8000"),
        ("0.0.0.0", "10.1.2.4:8000", "evil.example"),
        ("::", "[fd00::2]:8000", "evil.example"),
    ],
)
def test_the_bound_address_is_taken_and_every_one_where_all_are_bound(bound, taken, refused):
    hosts = Hosts(bound)
    assert (hosts.has(taken), hosts.has(refused)) == (True, False)


def test_allowed_names_are_added():
    hosts = Hosts("127.0.0.1", ["llm.example.org", "10.0.0.7"])
    assert [hosts.has(name) for name in ("LLM.example.org:443", "10.0.0.7", "example.org", "x.llm.example.org")] == [
        True,
        True,
        False,
        False,
    ]
    assert Hosts("127.0.0.1", ["*"]).has("evil.example")


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "a/b", "", "a b", "*.example.org", "-a"])
def test_what_is_no_name_is_refused_at_the_start(name):
    with pytest.raises(InputError, match="--allowed-host must be a name or an address"):
        check_host_name(name)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing"])
def test_a_rebound_name_gets_nothing(keyed, path):
    """Host and Origin agree, as they do for a page of that name; not even the key is looked at."""
    for more in ({}, {"origin": "http://evil.example:8000"}, {"authorization": "Bearer wrong"}, {"x": "y" * 15_000}):
        reply = keyed.call(path, host="evil.example:8000", **more)
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
        assert "'evil.example:8000'" in reply.error["message"]


def test_a_preflight_of_a_rebound_name_gets_nothing(launch):
    page = {"origin": "https://chat.example.org", "access_control_request_method": "POST"}
    options = {"cors_origins": ["https://chat.example.org"], "allowed_hosts": ["llm.example.org"], "replan": "off"}
    with launch(**options) as server:
        statuses = [
            server.call("/v1/completions", method="OPTIONS", host=host, **page).status
            for host in ("llm.example.org", "evil.example", "127.0.0.1")
        ]
    assert statuses == [200, 403, 200]
