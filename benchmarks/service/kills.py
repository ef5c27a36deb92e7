"""Workers killed repeatedly under load: what happens to the requests, and the time to detection and recovery.

    python -m benchmarks.service.kills [--kills 100] [--clients 6]

Serves the demo model on two workers, a pipeline, and requests the same greedy answers repeatedly. At random times
a random worker gets SIGKILL. Every answer must equal the undisturbed one, or be a clear error after the second crash of
its request. Prints the shares, the seconds from a kill to its detection and to full recovery, and the resources of the
server before and after: memory, processes, open files, listening ports, files in shared memory.
Writes records/kills.json.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks.lib.record import write_record
from benchmarks.service.serving import descendants, held, served
from exeplan.planner.tables import table

PLAN = """model: demo
schedule: {policy: orca, max_num_seqs: 8, micro_batches: 2}
placement: [{devices: [0], layers: [0, 3]}, {devices: [1], layers: [3, 6]}]
kv_cache_tokens: 8192
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        plan.write_text(PLAN)
        with served(plan, "--weights", "dummy") as server:
            figures = _storm(server.process.pid, server.url, args)
    figures["exit_status"] = server.process.returncode
    rows = [[name, str(value)] for name, value in figures.items()]
    print(table(("", ""), rows))
    print(f"\nrecord: {write_record('kills', figures)}")


def _storm(pid: int, url: str, args: argparse.Namespace) -> dict:
    draw = random.Random(args.seed)
    bodies = [
        {"prompt": [draw.randrange(200) for _ in range(draw.randint(1, 60))], "max_tokens": draw.randint(5, 60)}
        for _ in range(3 * args.clients)
    ]
    wanted = [_ask(url, body)[1] for body in bodies]
    before, outcomes, stop = held(pid), Counter(), threading.Event()

    def client(number: int) -> None:
        turn = number
        while not stop.is_set():
            index = turn % len(bodies)
            outcomes[_judge(_ask(url, bodies[index]), wanted[index])] += 1
            turn += args.clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(args.clients)]
    for thread in threads:
        thread.start()
    noticed, recovered = [], []
    for _ in range(args.kills):
        time.sleep(draw.uniform(0.2, 2.5))
        victim = draw.choice(_workers(pid))
        began = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        noticed.append(_until(url, 503) - began)
        recovered.append(_until(url, 200) - began)
    stop.set()
    for thread in threads:
        thread.join()
    time.sleep(0.5)
    return {
        "kills": args.kills,
        **{f"answers: {name}": count for name, count in sorted(outcomes.items())},
        "noticed after, median s": round(median(noticed), 4),
        "noticed after, most s": round(max(noticed), 4),
        "all well after, median s": round(median(recovered), 3),
        "all well after, most s": round(max(recovered), 3),
        "held before": before,
        "held after": held(pid),
    }


def _judge(answer: tuple[int, str], wanted: str) -> str:
    status, text = answer
    if status == 200:
        return "as undisturbed" if text == wanted else "other tokens"
    if status == 500 and "workers died more than once" in text:
        return "clear error after a second crash"
    return "not let in (503)" if status == 503 else f"unexpected {status}: {text[:80]}"


def _ask(url: str, body: dict) -> tuple[int, str]:
    """Status, and the tokens of the answer or the text of the error."""
    fields = {**body, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    data = json.dumps(fields).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.dumps(json.loads(reply.read())["choices"][0]["logprobs"]["tokens"])
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _until(url: str, status: int, seconds: float = 30.0) -> float:
    """When /ready first has that status."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10) as reply:
                found = reply.status
        except urllib.error.HTTPError as error:
            found = error.code
        if found == status:
            return time.perf_counter()
    raise SystemExit(f"/ready did not say {status} within {seconds:g} s")


def _workers(pid: int) -> list[int]:
    """Processes that a fork server has forked: they share its command line, as does their parent."""
    family = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in descendants(pid)}
    forked = [child for child, line in family.items() if b"forkserver" in line]
    return [child for child in forked if _parent(child) in forked]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    main()
