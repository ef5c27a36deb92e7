"""Sphinx: `python -m sphinx -W -n docs docs/_build` builds these pages and fails on any warning."""

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
# Types of libraries whose inventories would have to be fetched.
nitpick_ignore_regex = [
    ("py:.*", r"(numpy|np|pandas|pd|matplotlib|Axes|DataFrame|NDArray|Floats|Path|pathlib|os\.PathLike|collections).*"),
    # Parts of answers that are no part of the public API.
    (
        "py:class",
        r"exeplan\.(planner\.(problems|choice|reports|sizing|plan_request)|simulator\.(run|routed)|progress|search\.search)\..*",
    ),
    (
        "py:class",
        r"exeplan\.(core\.(cluster\.Link|schedule\.Figure|profile\.(Device|Measurement)"
        r"|models\.(sparse_layers|quantization)\..*)"
        r"|workload\..*\.(Deadlines|Trace))",
    ),
]
