"""Packages that only some features need: which extra of `pip install 'exeplan[...]'` brings them.

Planning and replaying need none of these. Lists of packages are in `pyproject.toml`.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from exeplan.errors import MissingPackage

EXTRA_OF = {
    **dict.fromkeys(("matplotlib", "optuna", "pandas"), "analysis"),
    "huggingface_hub": "hub",
    "pyarrow": "parquet",
    "ray": "ray",
    **dict.fromkeys(
        (
            "aiohttp",
            "fastapi",
            "h11",
            "jinja2",
            "llguidance",
            "msgspec",
            "prometheus_client",
            "pydantic",
            "safetensors",
            "starlette",
            "tokenizers",
            "torch",
            "typing_extensions",
            "uvicorn",
        ),
        "serve",
    ),
}
"""The extra of each top-level module."""
SERVING = ("torch", "safetensors", "tokenizers", "jinja2", "llguidance", "fastapi", "uvicorn")
"""What a server cannot start without."""


def require(purpose: str, *modules: str) -> None:
    """Raises MissingPackage unless all of the modules are installed; `purpose` begins the sentence."""
    if gone := [module for module in modules if find_spec(module) is None]:
        raise MissingPackage(missing(purpose, *gone))


def missing(purpose: str, module: str, *others: str) -> str:
    """`serving needs torch, which is not installed: pip install 'exeplan[serve]'`, and the extras of the others."""
    extras = dict.fromkeys(EXTRA_OF[name] for name in (module, *others))
    packages = " ".join(f"'exeplan[{extra}]'" for extra in extras)
    return f"{purpose} needs {module}, which is not installed: pip install {packages}"


def frame(rows: Sequence[dict[str, Any]], *, index: str | None = None) -> Any:
    """The rows as a pandas DataFrame, one of their columns as its index."""
    require("to_frame()", "pandas")
    found = import_module("pandas").DataFrame(list(rows))
    return found if index is None else found.set_index(index)
