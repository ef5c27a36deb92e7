"""A server under test: its plan, the server in its own process, and the resources that it holds."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """A running server: `process` serves `url`."""

    process: "subprocess.Popen[str]"
    url: str
    key: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, 0 where there is none."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            page = reply.read().decode()
        rows = re.findall(rf"^exeplan:{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, rows))

    def idle(self) -> bool:
        """No request waits or runs, and every block of the KV cache is free."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def held(self) -> dict[str, int]:
        return held(self.process.pid)


@contextlib.contextmanager
def served(
    plan: Path,
    *options: str,
    key: str = "",
    environment: Mapping[str, str] | None = None,
    killed: bool = False,
    log: Path | None = None,
) -> Iterator[Server]:
    """`exeplan serve` of a plan on a free port, ended by SIGTERM; reports an exit status other than 0.

    `log` is where its log goes, instead of standard error. `environment` is added to this process's. One that is to be
    `killed` is ended with the context, if it lives.
    """
    command = [sys.executable, "-m", "exeplan", "serve", str(plan), "--port", "0", "--log-level", "warning", *options]
    command += ["--api-key", key] if key else []
    variables = {**os.environ, **(environment or {})}
    with (
        log.open("w") if log else contextlib.nullcontext() as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True, env=variables) as process,
    ):
        assert process.stdout
        found = re.search(r"http://\S+", process.stdout.readline())
        if not found:
            raise SystemExit(process.wait() or 1)
        try:
            yield Server(process, found.group().rstrip(",.;"), key)
        finally:
            process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
            if process.wait(60) and not killed:
                print(f"the server ended with status {process.returncode}", file=sys.stderr)


def demo_plan(folder: Path, *, budget: str = "40s", bound: str = "3s", policy: str = "rra") -> Path:
    """A plan of the demo model for this machine, made as a user would."""
    profile, plan = folder / "demo.profile.json", folder / f"{policy}.yaml"
    workload = ("--workload", "alpaca", "--fit-context", "--latency-bound", bound, "--policy", policy)
    for arguments in (
        ("profile", "demo", "-o", str(profile), "--budget", budget),
        ("optimize", "--profile", str(profile), *workload, "-o", str(plan)),
    ):
        if status := subprocess.run([sys.executable, "-m", "exeplan", *arguments], check=False).returncode:
            raise SystemExit(status)
    return plan


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def held(pid: int) -> dict[str, int]:
    """The resources of a process and its descendants."""
    family = [pid, *descendants(pid)]
    status = [Path(f"/proc/{member}/status").read_text() for member in family]
    inodes = {os.readlink(fd) for member in family for fd in Path(f"/proc/{member}/fd").iterdir() if fd.is_symlink()}
    listening = [line for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]
    return {
        "processes": len(family),
        "threads": sum(int(re.search(r"Threads:\s+(\d+)", text).group(1)) for text in status),
        "MiB": round(sum(int(re.search(r"VmRSS:\s+(\d+)", text).group(1)) for text in status) / 1024),
        "open files": sum(len(list(Path(f"/proc/{member}/fd").iterdir())) for member in family),
        "ports": len([line for line in listening if f"socket:[{line.split()[9]}]" in inodes]),
        "shared-memory files": len(list(Path("/dev/shm").iterdir())),
    }
