"""Pictures: files drawn without a display, and axes for notebooks. The callers say what is drawn.

Not here: numbers; each picture has a function of its own that makes its rows.
"""

import io
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from exeplan.errors import InputError
from exeplan.extras import require
from exeplan.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Raises InputError for a name without a picture's suffix, MissingPackage where nothing can be drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot draw {path}: the name must end in {', '.join(SUFFIXES)}")
    require("drawing", "matplotlib")


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches that needs no display."""
    require("drawing", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Replaces the file in one step, as PNG, SVG or PDF by its suffix, and makes its folder where there is none.

    Raises InputError for a path that cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=150)
    write_bytes(path, drawn.getvalue())


def axes_or_new(axes: "Axes | None") -> "Axes":
    """The given axes, or those of a new figure that a notebook shows."""
    if axes is not None:
        return axes
    require("drawing", "matplotlib")
    return import_module("matplotlib.pyplot").subplots(layout="constrained")[1]
