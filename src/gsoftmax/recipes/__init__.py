"""Recipes: named configurations, each lists only its differences from its base.

The files beside this one define them: `tableN.yaml` every row of the paper's tables, with the published numbers;
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

__all__ = ["Recipe", "find", "parse", "recipes"]


@dataclass(frozen=True)
class Recipe:
    """A named configuration."""

    name: str  # on the command line
    table: str  # the file without .yaml, such as table1
    changes: dict[str, Any]  # keys that differ from `Config`
    smoke: dict[str, Any]  # further changes for a smoke test
    published: dict[str, float]  # the paper's numbers in percent, for a row of its tables

    def config(self, changes: Mapping[str, Any] | None = None, *, smoke: bool = False) -> Config:
        """The configuration.

        changes: further keys, which win
        smoke: whether it is for a smoke test
        """
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


def find(name: str) -> Recipe:
    """The recipe called `name`, or an error that suggests others.

    name: as `gsoftmax recipes` lists it
    """
    if name not in recipes():
        hint = did_you_mean(name, recipes(), 3, 0.4)
        raise ValueError(f"unknown recipe {name!r}{hint}; `gsoftmax recipes` lists them")
    return recipes()[name]


def parse(files: Mapping[str, str]) -> dict[str, Recipe]:
    """The recipes in YAML texts.

    files: texts by file name; recipes whose names begin with _ are bases only

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
    found = {}
    for name, (table, entry) in written.items():
        chain = [entry for _, entry in _bases(written, name)]
        own = {k: v for one in chain for k, v in one.items() if k not in ("base", "smoke", "published")}
        smoke = {k: v for one in chain for k, v in one.get("smoke", {}).items()}
        if not name.startswith("_"):
            found[name] = Recipe(name, table, own, smoke, entry.get("published", {}))
    return found


def _bases(written: Mapping[str, tuple[str, dict[str, Any]]], name: str) -> list[tuple[str, dict[str, Any]]]:
    """A recipe after its base, the base of that, and so on; their names and entries."""
    chain = [(name, written[name][1])]
    while (base := chain[0][1].get("base")) is not None:
        if base not in written or base in dict(chain):
            what = "is built on itself" if base in written else f"has the base {base!r}, which is no recipe"
            raise ValueError(f"{written[chain[0][0]][0]}.yaml: recipe {chain[0][0]!r} {what}")
        chain.insert(0, (base, written[base][1]))
    return chain


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
