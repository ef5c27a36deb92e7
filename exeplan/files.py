"""Reading and writing the files a user names: capped, safe, and with errors that say which file and where."""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.progress import note

MAX_BYTES = 256 * 1024 * 1024
MAX_YAML_BYTES = 1024 * 1024
_PLANS = Path(__file__).parent / "plans"


def shipped(kind: str, name: str) -> Path:
    """The path of a shipped file, such as `shipped("models", "demo")`."""
    return _PLANS / kind / f"{name}.yaml"


def shipped_names(kind: str) -> list[str]:
    """Names of the files under `plans/<kind>`, sorted."""
    return sorted(path.stem for path in (_PLANS / kind).glob("*.yaml"))


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The whole file as UTF-8. Raises InputError when it is missing, a directory, too large, or not text."""
    try:
        if path.stat().st_size > max_bytes:
            raise InputError(f"{path} is larger than {max_bytes >> 20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"no file {path}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a directory, not a file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError with the line of a syntax error."""
    return _mapping(read_json_value(path), path)


def read_json_value(path: Path) -> Any:
    """Any JSON value. Raises InputError with the line of a syntax error."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise InputError(f"{path} is not valid JSON: nested too deeply") from None
    except ValueError:
        raise InputError(f"{path} is not valid JSON: it holds an integer of thousands of digits") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping, as `plain_yaml` reads it. Raises InputError with the line of what it does not take."""
    from exeplan import plain_yaml

    text = read_text(path, MAX_YAML_BYTES)
    try:
        value = plain_yaml.load(text)
    except plain_yaml.YamlError as error:
        raise InputError(f"{path} is not valid YAML: {error}") from None
    return _mapping(value, path)


def _mapping(value: object, path: Path) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{path} must hold a mapping of names to values, found {type(value).__name__}")
    return dict(value)


def write_text(path: Path, text: str) -> None:
    """Replaces the file in one step, so that a reader never sees half of it. Raises InputError when it cannot.

    A file that is there keeps its mode, and a link to it stays a link. What is no file, such as a device or a named
    pipe, is written to instead.
    """
    if (stream := {"/dev/stdout": sys.stdout, "/dev/stderr": sys.stderr}.get(str(path))) is not None:
        print(text, end="", file=stream, flush=True)
        return
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text` does, but not to this process's own streams."""
    try:
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a directory")
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)) if path.is_symlink() else path, content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _replace(path: Path, content: bytes) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        note([f"made the directory {path.parent} for {path.name}"])
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
