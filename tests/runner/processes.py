"""Processes as seen from outside: their descendants, whether they live, and where they listen."""

import contextlib
import ipaddress
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PATIENCE = 120.0
"""Seconds that a test waits at most: a machine may be busy, and only a failure takes as long."""
_LISTENING = "0A"


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files(pid: int) -> dict[str, str]:
    """The open files of a process by descriptor."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # Closed meanwhile.
            found[path.name] = os.readlink(path)
    return found


def listening(pids: Iterable[int]) -> set[str]:
    """The numeric addresses on which any of these processes accepts connections."""
    inodes = {target for pid in pids for target in open_files(pid).values()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in inodes:
                found.add(str(_address(fields[1].partition(":")[0])))
    return found


def eventually(claim: Callable[[], bool]) -> None:
    """Waits until a claim holds; fails when it never does."""
    deadline = time.monotonic() + PATIENCE
    while not claim():
        assert time.monotonic() < deadline, f"it did not become true within {PATIENCE:g} s"
        time.sleep(0.02)


def _address(words: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """From the kernel's hexadecimal words of four bytes, each in the machine's order."""
    data = bytes.fromhex(words)
    return ipaddress.ip_address(b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4)))
