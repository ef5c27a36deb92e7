"""Sphinx: `python -m sphinx -W docs docs/_build` builds these pages and fails on any warning."""

from exeplan.version import __version__

project = "exeplan"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "exeplan"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_type_aliases = {"Floats": "Floats"}
