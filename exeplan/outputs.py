"""Files that are written when long work is done: looked at before it, and written without losing what was found.

Not here: how a file is written (`files.py`, `figures.py`).
"""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from exeplan.errors import InputError


def check_output(path: Path) -> None:
    """Raises InputError for a file that could not be written; folders that are not there will be made with it.

    What is no file, such as a device, is written to, so that its folder does not matter.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory")
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        if not os.access(target, os.W_OK):
            raise InputError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
        return
    there = next(folder for folder in target.parents if os.path.exists(folder))
    if not there.is_dir():
        raise InputError(f"cannot write {path}: {there} is not a directory")
    if not os.access(there, os.W_OK):
        raise InputError(f"cannot write {path}: {os.strerror(errno.EACCES)}")


def unwritten(writes: Mapping[Path, Callable[[], object]]) -> dict[Path, InputError]:
    """Does what writes each file. Returns why some could not be written."""
    failed = {}
    for path, write in writes.items():
        try:
            write()
        except InputError as error:
            failed[path] = error
    return failed


def refuse(failed: Mapping[Path, InputError]) -> None:
    """Raises InputError where files could not be written: after what they would have held was printed."""
    if failed:
        raise InputError("; ".join(map(str, failed.values())))
