"""The HTTP views of the server: one file each, found by listing this folder.

A view module offers what `View` lists. Adding a view is adding a file here: it is routed, described in `/openapi.json`
and, like every path outside `connection.OPEN_PATHS`, refused without the API key.
"""

import importlib
import pkgutil
from typing import cast

from exeplan.runner.server.views.interface import View


def load_views() -> tuple[View, ...]:
    """All views, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "interface")
    return tuple(cast(View, importlib.import_module(f"{__name__}.{name}")) for name in names)
