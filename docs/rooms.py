"""The rooms of the tree, their order, and the imports between them, lazy and TYPE_CHECKING imports included.

`tests/test_rooms.py` holds the order; `python -m docs.make_pictures rooms` draws it.
"""

import ast
import os
from collections import defaultdict
from pathlib import Path

import exeplan

PACKAGE = Path(exeplan.__file__).parent

ORDER = (
    # Leaves: they import nothing of ours but each other.
    (
        "arrays",
        "errors",
        "extras",
        "figures",
        "forked",
        "garbage",
        "units",
        "files",
        "outputs",
        "plain_yaml",
        "progress",
        "version",
    ),
    ("workload",),
    ("core.models",),
    ("core",),
    ("core.runs",),
    ("policies",),
    ("scheduling",),
    ("search",),
    ("simulator",),
    ("simulator.rates",),
    ("planner.problems",),
    ("planner.margins",),
    ("planner.choice",),
    ("planner.reports",),
    ("planner",),
    ("drift",),
    ("vllm_plugin",),
    ("export",),
    ("kernels",),
    ("runner.logs",),
    ("runner.ipc",),
    ("runner.compute.weights",),
    ("runner.compute.blocks",),
    ("runner.compute.passes",),
    ("runner.compute.tokens",),
    ("runner.compute",),
    ("runner.models",),
    ("runner.engine",),
    ("runner.distributed",),
    ("runner.engine_process",),
    ("runner.replan",),
    ("runner.load",),
    ("runner.scrape",),
    ("runner.server_counters",),
    ("runner.fidelity",),
    ("runner.server.openai",),
    ("runner.server.network",),
    ("runner.server.observation",),
    ("runner.server",),
    ("runner.engine_watch",),
    ("profiler",),
    ("api",),
    ("__init__",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""From the bottom to the top. A room imports from rooms above it in this list, and from itself."""

FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}


def module_name(path: Path) -> str:
    """`policies.rra` for exeplan/policies/rra.py, `policies` for its __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room_of(module: str) -> str:
    """The deepest folder or file of `ORDER` that holds this module, or else the first of its folders."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in FLOOR), parts[0])


def sources() -> dict[str, ast.Module]:
    """Every module by its name. os.walk, because rooms at the root are links, which Path.rglob does not follow."""
    found = [
        Path(folder) / name
        for folder, _, names in os.walk(PACKAGE, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in found}


def imported(node: ast.AST, modules: set[str]) -> list[str]:
    """The modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports inside the package are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name.removeprefix("exeplan.") in modules else str(node.module) for name in names]
    else:
        return []
    ours = [name for name in names if name.partition(".")[0] == "exeplan"]
    return [name.removeprefix("exeplan.") if name != "exeplan" else "__init__" for name in ours]


def arrows() -> dict[str, set[str]]:
    """The modules that each module imports."""
    trees = sources()
    modules = set(trees)
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            found[module].update(name for name in imported(node, modules) if name != module)
    return found
