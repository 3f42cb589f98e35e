"""Recipes: named configurations, each lists only its differences from its base.

The files beside this one define them: `tableN.yaml` every row of the paper's tables, with the published numbers;
`scaled.yaml` rows scaled to smaller data, which have no published number; `fast.yaml` the small and the quick ones.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..config import Config
from ..messages import did_you_mean

__all__ = ["Recipe", "changed", "families", "family", "find", "parse", "recipes", "shortened"]


@dataclass(frozen=True)
class Recipe:
    """A named configuration."""

    name: str  # on the command line
    table: str  # the file without .yaml, such as table1
    changes: dict[str, Any]  # keys that differ from `Config`
    smoke: dict[str, Any]  # further changes for a smoke test
    published: dict[str, float]  # the paper's numbers in percent, for a row of its tables
    scaled: str = ""  # the row of the paper's tables that this one scales to smaller data

    @property
    def is_row(self) -> bool:
        """Whether it is a row of the paper's tables, or one scaled to smaller data."""
        return bool(self.published or self.scaled)

    @property
    def family(self) -> str:
        """The name without the head: what the rows of one comparison share; empty for other recipes."""
        return self._split()[0]

    @property
    def label(self) -> str:
        """The rest of the name: the head, and its initial Gaussians."""
        return self._split()[1]

    def _split(self) -> tuple[str, str]:
        match = re.fullmatch(r"(.+?)-([lg]?softmax.*)", self.name) if self.is_row else None
        return (match[1], match[2]) if match else ("", self.name)

    def config(self, changes: Mapping[str, Any] | None = None, *, smoke: bool = False) -> Config:
        """The configuration.

        changes: further keys, which win
        smoke: whether it is for a smoke test
        """
        config = Config(recipe=self.name if self.is_row else None).override(self.changes)
        return (config.override(self.smoke) if smoke else config).override(changes or {})


@functools.cache
def recipes() -> dict[str, Recipe]:
    """All recipes by name.

    >>> recipes()["wrn-cifar100-gsoftmax"].published
    {'error': 17.41}
    """
    files = sorted((f for f in resources.files(__name__).iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return parse({file.name: file.read_text("utf-8") for file in files})


def families() -> dict[str, list[Recipe]]:
    """The rows of the paper that differ only in the head, by what their names share.

    >>> [row.label for row in families()["wrn-cifar10"]]
    ['softmax', 'lsoftmax', 'gsoftmax']
    """
    found: dict[str, list[Recipe]] = {}
    for recipe in recipes().values():
        if recipe.family:
            found.setdefault(recipe.family, []).append(recipe)
    return found


def family(what: str) -> list[Recipe]:
    """The rows of a family.

    what: its name, or the name of one of its rows; empty for anything else

    >>> family("wrn-cifar10-gsoftmax") == family("wrn-cifar10") == families()["wrn-cifar10"]
    True
    """
    name = recipes()[what].family if what in recipes() else what
    return families().get(name, [])


def shortened(config: Config, factor: float) -> Config:
    """The same training with the epochs, and the epochs of its schedule, divided by a factor.

    config, factor: the training, and the factor, 1 or more

    >>> short = shortened(recipes()["vgg-cifar10-softmax"].config(), 20)
    >>> short.epochs, short.schedule["steps"]
    (15, {4: 0.2, 7: 0.2, 9: 0.2, 12: 0.2, 14: 0.2})
    """
    if not 1 <= factor <= max(config.epochs, 1):
        raise ValueError(f"shorten must be from 1 to the {config.epochs} epochs of the training, got {factor:g}")
    if factor == 1:
        return config

    def scaled(epochs: int) -> int:
        return math.floor(epochs / factor + 0.5)

    schedule = dict(config.schedule)
    if "steps" in schedule:  # a step takes effect at the beginning of its epoch
        steps: dict[int, float] = {}
        for epoch, value in schedule["steps"].items():
            at = scaled(int(epoch) - 1) + 1
            steps[at] = steps.get(at, 1.0) * value  # two may fall together
        schedule["steps"] = steps
    if "pieces" in schedule:
        schedule["pieces"] = [[max(1, scaled(end)), *ends] for end, *ends in schedule["pieces"]]
    return config.override({"epochs": max(1, scaled(config.epochs)), "schedule": schedule})


def changed(config: Config, recipe: Recipe | None = None) -> str:
    """How a configuration differs from a row of the paper; empty if it does not, or comes from none.

    config, recipe: the configuration, and the row, by default the one it comes from

    >>> changed(find("vgg-cifar10-softmax").config({"lr": 0.2, "seed": 3}))
    'changed: lr=0.2'
    """
    recipe = recipe or recipes().get(config.recipe or "")
    if recipe is None:
        return ""
    wanted, texts = recipe.config(), []
    for factor in _factors(wanted.epochs, config.epochs):
        short = shortened(wanted, factor)
        if (short.epochs, short.identity()["schedule"]) == (config.epochs, config.identity()["schedule"]):
            wanted, texts = short, [f"training shortened {factor:g} times"]
            break
    mine, theirs = config.identity(), wanted.identity()
    texts += [f"{k}={mine[k]}" for k in sorted(theirs) if k != "seed" and mine[k] != theirs[k]]
    parts = [f"scaled from {recipe.scaled}" * bool(recipe.scaled), f"changed: {', '.join(texts)}" * bool(texts)]
    return "; ".join(filter(None, parts))


def _factors(epochs: int, left: int) -> list[float]:
    """The factors that may have shortened a training to the epochs that are left: whole numbers, the nearest first."""
    if not 0 < left < epochs:
        return []
    low, high, exact = epochs / (left + 0.5), epochs / (left - 0.5), epochs / left
    whole = range(max(2, math.ceil(low)), min(epochs, math.floor(high)) + 1)
    return [*sorted(whole, key=lambda factor: abs(factor - exact)), exact]


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
        own = {k: v for one in chain for k, v in one.items() if k not in ("base", "smoke", "published", "scaled")}
        smoke = {k: v for one in chain for k, v in one.get("smoke", {}).items()}
        if not name.startswith("_"):
            found[name] = Recipe(name, table, own, smoke, entry.get("published", {}), entry.get("scaled", ""))
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
    for key in ("base", "scaled"):
        if not isinstance(entry.get(key, ""), str):
            raise ValueError(f"{file}: {key} of recipe {name!r} must be a recipe's name, got {entry[key]!r:.80}")
    for key in ("smoke", "published"):
        if not isinstance(entry.get(key, {}), dict):
            raise ValueError(f"{file}: {key} of recipe {name!r} must be a mapping, got {entry[key]!r:.80}")
    if not all(isinstance(v, (int, float)) for v in entry.get("published", {}).values()):
        raise ValueError(f"{file}: published of recipe {name!r} must be numbers, got {entry['published']!r:.80}")
