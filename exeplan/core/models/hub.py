"""Models by their ids on the Hugging Face Hub: where its cache on this machine holds them.

Not here: downloading.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from exeplan.errors import InputError
from exeplan.extras import missing

_ID = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?(?:/[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?)?", re.ASCII)
"""`organisation/name`; some of the oldest are a name alone."""


def is_hub_id(text: str) -> bool:
    """Whether it may be an id of the Hub: of one or two parts, and no path."""
    return _ID.fullmatch(text) is not None and len(text) <= 96 and "--" not in text and ".." not in text


def cached_snapshot(model: str) -> Path | None:
    """The directory of the Hub's cache with this model's files; None for a name alone that is not there.

    Raises InputError with the command that downloads it where `organisation/name` is not there.
    """
    alone = "/" not in model
    if find_spec("huggingface_hub") is None:
        if alone:
            return None
        raise InputError(missing(f"finding '{model}' in the cache of the Hugging Face Hub", "huggingface_hub"))
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    if alone:
        return None
    raise InputError(
        f"no directory '{model}' here, and the cache of the Hugging Face Hub does not hold it; download it with "
        f"`hf download {model}`"
    )


def download_command(directory: Path) -> str | None:
    """The command that downloads what a directory of the Hub's cache lacks; None for any other directory."""
    if directory.parent.name != "snapshots" or not directory.parent.parent.name.startswith("models--"):
        return None
    return f"hf download {directory.parent.parent.name.removeprefix('models--').replace('--', '/')}"
