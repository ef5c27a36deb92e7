"""The record of a benchmark: its figures with command, commit, versions and hardware, as JSON."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "records"


def write_record(name: str, figures: dict[str, Any], path: Path | None = None) -> Path:
    """Writes `records/<name>.json`, or to another path, and returns where."""
    path = path or RECORDS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "benchmark": name,
        "command": _command(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), **_gpu()},
        "versions": {package: _version(package) for package in ("exeplan", "torch", "triton", "numpy", "transformers")},
        "python": platform.python_version(),
        **figures,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path


def _command() -> str:
    """As it was typed from the repository's root, paths that lead out of it left out."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    return " ".join(["python", "-m", module, *("PATH" if _leads_out(word) else word for word in sys.argv[1:])])


def _leads_out(word: str) -> bool:
    return os.path.isabs(word) or word.startswith("..")


def commit() -> str:
    """Called dirty where files other than records have changes: a record may be written part by part."""
    head = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/records")
    return f"{head}{'-dirty' if changed else ''}" if head else "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu() -> dict[str, str]:
    """Where the benchmark has imported torch, and there is one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
