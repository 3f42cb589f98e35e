"""Sphinx configuration: `make docs` writes docs/_build/html, without network access."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "_extensions")]

from gsoftmax import __version__  # noqa: E402 - needs the path above

# Stubs of base classes whose import takes longer than building the site.  (autodoc_mock_imports does not work here:
# autodoc imports the module of a base class to read its source.)
for name, parts in {
    "lightning": {},
    "lightning.pytorch": {"Callback": type("Callback", (), {})},
    "torchmetrics": {"Metric": type("Metric", (), {})},
    "torchmetrics.utilities": {"dim_zero_cat": None},
}.items():
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(parts)

project = "gsoftmax"
release = version = __version__
author = "the authors of gsoftmax"
project_copyright = "the authors of gsoftmax, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "mathml", "docstrings", "generated"]
exclude_patterns = ["_build", "_extensions"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# Methods of our own base classes are shown with every class, those of other libraries are not.
autodoc_default_options = {"members": True, "inherited-members": "BaseException,Callback,Metric,Module,object,tuple"}
autodoc_inherit_docstrings = False  # torch's docstring of forward() does not describe ours
autodoc_typehints_format = "short"
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 100

nitpicky = True
# Types of other libraries are not linked: their inventories would have to be downloaded.
OTHERS = "collections|concurrent|contextlib|nn|numpy|os|pathlib|torch|torchmetrics|typing"
nitpick_ignore_regex = [("py:.*", rf"({OTHERS})\..*|DeviceMesh|Tensor")]

html_theme = "furo"
html_title = f"gsoftmax {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["playground.html"]
html_show_sphinx = False
html_math_renderer = "mathml"
