"""Recipes: named configurations, each only what differs from its base.

The files beside this one hold them: `tableN.yaml` every row of the paper's tables, with the published numbers;
`fast.yaml` the small and the quick ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..config import Config
from ..messages import did_you_mean


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
    files = sorted((f for f in resources.files(__name__).iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return parse({file.name: file.read_text("utf-8") for file in files})


def parse(files: Mapping[str, str]) -> dict[str, Recipe]:
    """The recipes in the texts of YAML files, {file name: text}; names that begin with _ are bases only.

    >>> parse({"mine.yaml": "_all: {epochs: 3}\\nquick: {base: _all, lr: 0.5}"})["quick"].changes
    {'epochs': 3, 'lr': 0.5}
    """
    try:
        import yaml
    except ImportError:
        raise ValueError("recipes need PyYAML, which is not installed: pip install 'gsoftmax[train]'") from None

    written: dict[str, tuple[str, dict[str, Any]]] = {}
    for file, text in files.items():
        try:
            entries = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as error:  # a ValueError is a date such as 2020-99-99
            raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(entries, dict):
            raise ValueError(f"{file} must map names to recipes, got {type(entries).__name__}")
        for name, entry in entries.items():
            _check(file, name, entry)
            written[name] = (file.removesuffix(".yaml"), entry)

    def resolve(name: str, above: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
        file, entry = written[name][0], dict(written[name][1])
        base = entry.pop("base", None)
        if base is not None and (base not in written or base in (*above, name)):
            what = "is built on itself" if base in written else f"has the base {base!r}, which is no recipe"
            raise ValueError(f"{file}.yaml: recipe {name!r} {what}")
        changes, smoke = ({}, {}) if base is None else resolve(base, (*above, name))
        smoke = {**smoke, **entry.pop("smoke", {})}
        entry.pop("published", None)
        return {**changes, **entry}, smoke

    found = {}
    for name, (table, entry) in written.items():
        changes, smoke = resolve(name)
        if not name.startswith("_"):
            found[name] = Recipe(name, table, changes, smoke, entry.get("published", {}))
    return found


def _check(file: str, name: Any, entry: Any) -> None:
    if not isinstance(name, str) or not isinstance(entry, dict) or not all(isinstance(k, str) for k in entry):
        raise ValueError(f"{file}: recipe {name!r} must map keys to values, got {type(entry).__name__}")
    if not isinstance(entry.get("base", ""), str):
        raise ValueError(f"{file}: base of recipe {name!r} must be a recipe's name, got {entry['base']!r:.80}")
    for key in ("smoke", "published"):
        if not isinstance(entry.get(key, {}), dict):
            raise ValueError(f"{file}: {key} of recipe {name!r} must be a mapping, got {entry[key]!r:.80}")
    if not all(isinstance(v, (int, float)) for v in entry.get("published", {}).values()):
        raise ValueError(f"{file}: published of recipe {name!r} must be numbers, got {entry['published']!r:.80}")


def find(name: str) -> Recipe:
    """The recipe called `name`, or an error that names the nearest."""
    if name in recipes():
        return recipes()[name]
    raise ValueError(f"unknown recipe {name!r}{did_you_mean(name, recipes(), 3, 0.4)}; `gsoftmax recipes` lists them")
