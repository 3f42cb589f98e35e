"""Recipes: named configurations, each only what differs from its base.

The files beside this one hold them: `tableN.yaml` every row of the paper's tables, with the published numbers;
`fast.yaml` the small and the quick ones.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..config import Config


@dataclass(frozen=True)
class Recipe:
    """A configuration with a name; `published` holds the paper's numbers, in percent, where it is a row of a table."""

    name: str
    table: str
    changes: dict[str, Any]
    smoke: dict[str, Any]
    published: dict[str, float]

    def config(self, changes: Mapping[str, Any] | None = None, *, smoke: bool = False) -> Config:
        config = Config().override(self.changes)
        return (config.override(self.smoke) if smoke else config).override(changes or {})


@functools.cache
def recipes() -> dict[str, Recipe]:
    """All recipes by name.

    >>> recipes()["wrn-cifar100-gsoftmax"].published
    {'error': 17.41}
    """
    try:
        import yaml
    except ImportError:
        raise ValueError("recipes need PyYAML, which is not installed: pip install 'gsoftmax[train]'") from None

    written: dict[str, tuple[str, dict[str, Any]]] = {}
    for file in sorted(resources.files(__name__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            table = file.name.removesuffix(".yaml")
            written |= {name: (table, entry) for name, entry in yaml.safe_load(file.read_text("utf-8")).items()}

    def resolve(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        entry = dict(written[name][1])
        changes, smoke = resolve(entry.pop("base")) if "base" in entry else ({}, {})
        smoke = {**smoke, **entry.pop("smoke", {})}
        entry.pop("published", None)
        return {**changes, **entry}, smoke

    found = {}
    for name, (table, entry) in written.items():
        if not name.startswith("_"):
            changes, smoke = resolve(name)
            found[name] = Recipe(name, table, changes, smoke, entry.get("published", {}))
    return found


def find(name: str) -> Recipe:
    """The recipe called `name`, or an error that names the nearest."""
    if name in recipes():
        return recipes()[name]
    close = difflib.get_close_matches(name, recipes(), 3, 0.4)
    hint = f"; nearest: {', '.join(close)}" if close else ""
    raise ValueError(f"unknown recipe {name!r}{hint}; `gsoftmax recipes` lists them")
