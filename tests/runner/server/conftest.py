"""Real servers of a tiny model, each a process of its own, and the means to talk to them."""

import contextlib
import http.client
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..preloaded import Preloaded, Program
from ..processes import PATIENCE, descendants, eventually, is_alive

CONTEXT = 4096
ONE_DEVICE = "[{devices: [0], layers: [0, 2]}]"
TWO_STAGES = "[{devices: [0], layers: [0, 1]}, {devices: [1], layers: [1, 2]}]"
ORCA = "policy: orca, max_num_seqs: 6, micro_batches: 2"
KV_TOKENS = 16384
KEY = "the key"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)
LINES = ["the quick brown fox jumps over the lazy dog", "a schedule that keeps its promise", "<|user|> <|assistant|>"]
SERVE = """
import gc, json, os, sys
from pathlib import Path
from exeplan.errors import InputError
from exeplan.core.models.model import load_model_spec
from exeplan.planner.load_problem import read_plan
from exeplan.runner.server.options import ServeOptions
from exeplan.runner.server.server import serve

if folder := os.environ.get("VIEWS_FOR_TESTS"):
    from exeplan.runner.server import views
    views.__path__.append(folder)
if folder := os.environ.get("PLACER_FOR_TESTS"):  # Front ends without Ray, on this host, where the engines stay, too.
    from exeplan.runner.server import server
    from exeplan.runner.server.front_ends import placer_process
    sys.path.append(folder)
    placer_process.PLACER, server.RaySetup = "local_placer", lambda **_: None
plan = read_plan(Path(sys.argv[1]))
loaded = lambda: " ".join(f"{name}={name in sys.modules}" for name in ("torch", "scipy"))
announce = lambda url: print(f"ready {url} {loaded()} frozen={gc.get_freeze_count() > 0}", flush=True)
try:
    given = json.loads(sys.argv[2])
    given |= {name: Path(given[name]) for name in ("api_keys", "tls_cert", "tls_key") if name in given}
    options = ServeOptions(plan_file=Path(sys.argv[1]), **given)
    sys.exit(serve(plan, load_model_spec(plan.model), options, on_ready=announce))
except InputError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


class Reply(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = json.loads(self.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@dataclass
class Running:
    """A server that answers at `url`; `lines` is what it printed until then."""

    process: "subprocess.Popen[str] | Program"
    url: str
    lines: list[str]
    plan_file: Path
    api_key: str = "none"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        (found,) = self.engine_pids
        return found

    @property
    def engine_pids(self) -> list[int]:
        """The engine processes of all replicas, in the order in which they were started."""
        return [pid for pid in descendants(self.process.pid) if _name(pid) == "exeplan-engine"]

    @property
    def fork_server_pid(self) -> int:
        """The process that forks the engine, waiting for it; it imports torch before that."""
        named: list[int] = []

        def started() -> bool:
            named[:] = (pid for pid in descendants(self.process.pid) if _name(pid) == "exeplan-forks")
            return bool(named)

        eventually(started)
        return named[0]

    @property
    def worker_pids(self) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if _name(pid) == "exeplan-worker"]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=PATIENCE)

    def call(
        self, path: str, body: bytes | dict[str, Any] | None = None, method: str | None = None, **headers: str
    ) -> Reply:
        """One request with the server's key: a POST where there is a body, else a GET; `x_a` is the header `x-a`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.api_key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
        with contextlib.closing(connection):
            connection.request(method or ("GET" if content is None else "POST"), path, body=content, headers=headers)
            response = connection.getresponse()
            return Reply(response.status, response.read().decode(), dict(response.getheaders()))

    def complete(self, body: bytes | dict[str, Any]) -> Reply:
        return self.call("/v1/completions", body)

    def metric(self, name: str) -> float:
        """The sum of a metric's values over its labels."""
        rows = re.findall(rf"^exeplan:{name}(?:{{.*}})? (\S+)$", self.call("/metrics").text, re.MULTILINE)
        assert rows, f"no metric {name}"
        return sum(float(value) for value in rows)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() if is_alive(pid) else ""
    except OSError:  # Gone meanwhile.
        return ""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the shape of a two-layer Llama, a BPE tokenizer and a chat template; no weights.

    It brings code along, which must never run: that would leave the file `its code has run`.
    """
    directory = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", **sizes, "vocab_size": tokenizer.get_vocab_size(), "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": CONTEXT, "eos_token_id": 0, "hidden_act": "silu", "rope_theta": 10000.0}
    (directory / "evil.py").write_text(
        f"open({str(directory / 'its code has run')!r}, 'w').close()\nclass Evil: pass\n"
    )
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    code = {"auto_map": auto_map, "trust_remote_code": True}
    (directory / "config.json").write_text(json.dumps(config | code))
    chat = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(chat | code))
    return directory


@pytest.fixture(scope="session")
def launch(checkpoint: Path, preloaded: Preloaded) -> Callable[..., Any]:
    """`launch(schedule, placement, **options)` starts a server; leaving the context ends it.

    `directory` has another checkpoint, `replicas` lists the first device of each and `more_replicas` other groups, in
    YAML; `log` is a file for its standard error; a server that is `loading` is not waited for longer than until it
    listens, which its log says. Such a server and one that `imports` are programs as users start them, the others are
    forked with their modules imported.
    """

    numbers = itertools.count()

    def plan_file(directory: Path, schedule: str, placement: str, replicas: list[int], more_replicas: str) -> Path:
        path = directory / f"{next(numbers)}.yaml"
        lines = [
            f"model: {directory}",
            f"schedule: {{{schedule}}}",
            f"placement: {placement}",
            f"replicas: {replicas}",
            f"more_replicas: {more_replicas}",
            f"kv_cache_tokens: {KV_TOKENS}",
            "bound: {seconds: 2.0}",
            "estimate: {throughput: 0.5, token_throughput: 64, ttft: 0.1, tpot: 0.02, latency: 1.5, latency_p50: 1.0,",
            "  latency_p99: 1.9, kv_tokens: 4000, memory_bytes_per_gpu: 1000000}",
        ]
        path.write_text("\n".join(lines))
        return path

    @contextlib.contextmanager
    def run(
        schedule: str = "policy: rra, prefill_batch: 4, decode_steps: 4",
        placement: str = ONE_DEVICE,
        *,
        directory: Path = checkpoint,
        replicas: Sequence[int] = (0,),
        more_replicas: str = "[]",
        log: Path | None = None,
        loading: bool = False,
        imports: bool = False,
        **options: Any,
    ) -> Iterator[Running]:
        given = {
            "port": 0,
            "dummy_weights": True,
            "served_model_name": "tiny",
            "log_level": "info" if log else "warning",
            **options,
        }
        plan = plan_file(directory, schedule, placement, list(replicas), more_replicas)
        arguments = (SERVE, str(plan), json.dumps(given))
        errors = contextlib.nullcontext() if log is None else log.open("w")
        with contextlib.ExitStack() as stack:
            stderr = stack.enter_context(errors)
            process: subprocess.Popen[str] | Program
            if loading or imports:
                command = [sys.executable, "-c", *arguments]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
            else:
                process = preloaded.start(*arguments, stderr=stderr)
            stack.enter_context(process)
            assert process.stdout
            try:
                if loading:
                    yield Running(process, _listening(log), [], plan, given.get("api_key", "none"))
                    return
                # A server with JSON logs prints no summary: it is in the log.
                lines = [process.stdout.readline() for _ in range(1 if given.get("log_format") == "json" else 2)]
                assert lines[-1].startswith("ready http"), lines
                yield Running(process, lines[-1].split()[1], lines, plan, given.get("api_key", "none"))
            finally:
                process.kill()

    return run


def _listening(log: Path | None) -> str:
    """The address that a server's log names."""
    assert log
    said = re.compile(r"listening at (\S+) while")
    eventually(lambda: said.search(log.read_text()) is not None)
    return said.findall(log.read_text())[0]


@pytest.fixture(scope="session")
def server(launch: Callable[..., Any]) -> Iterator[Running]:
    """The server that most tests share."""
    with launch() as running:
        yield running


@pytest.fixture(scope="session")
def keyed(launch: Callable[..., Any]) -> Iterator[Running]:
    """One that asks for `KEY`, lets many wait, and keeps its plan."""
    with launch(api_key=KEY, replan="off", max_queue=2000) as running:
        yield running


@pytest.fixture(scope="session")
def pipeline(launch: Callable[..., Any]) -> Iterator[Running]:
    """One of two stages, whose workers may be killed: it has others soon."""
    with launch(ORCA, TWO_STAGES) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@contextlib.contextmanager
def dropped(server: Running, tokens: int) -> Iterator[None]:
    """Of the requests that are left meanwhile not all the tokens are generated, and nothing of them stays."""
    before = server.metric("generation_tokens_total")
    yield
    eventually(lambda: is_idle(server))
    assert server.metric("generation_tokens_total") - before < tokens


def is_idle(server: Running) -> bool:
    running, used = server.metric("num_requests_running"), server.metric("kv_cache_usage_perc")
    return running == used == server.metric("num_requests_waiting") == 0
