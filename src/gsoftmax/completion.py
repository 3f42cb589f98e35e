"""Shell completion with argcomplete: which words each argument of the command line accepts.

The shell runs `gsoftmax` whenever the user presses the tab key, so nothing here imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

from . import catalog, recipes, tables
from .config import CHOICES, SCHEDULES, Config

__all__ = ["SHELLS", "complete", "script"]

SHELLS = ("bash", "zsh", "fish")
# Defined in modules that import torch; a test compares them.
FIGURES = ("svg", "png", "pdf")
AUGMENT = ("none", "shift", "crop", "crop-flip", "photo", "photo-crop")


def script(shell: str) -> str:
    """The code that registers the completion in a shell.

    shell: bash, zsh or fish
    """
    return str(_argcomplete().shellcode(["gsoftmax"], shell=shell, complete_arguments=["-o", "nospace"]))


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions and exit if the shell is asking for them (it sets `_ARGCOMPLETE`), else do nothing.

    parser: of the command line
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    argcomplete = _argcomplete()
    action: Any
    for action in (a for command in commands(parser).values() for a in command._actions):
        if action.choices is None:
            action.completer = completer(action)
        if action.dest == "changes":
            action.nargs = "+"  # with "*" argparse considers it done at the first option
    argcomplete.autocomplete(parser, always_complete_options=False)


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of every command, by name."""
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def completer(action: argparse.Action) -> Callable[..., Iterable[str]]:
    """What lists the completions of a prefix: of names, settings, comma-separated lists, files or folders."""
    lists = {"heads": _heads(), "tables": tables.FORMATS, "figures": FIGURES}
    if action.dest in ("what", "changes"):
        return _settings
    if action.dest in lists:
        return lambda prefix, **_: [prefix[: prefix.rfind(",") + 1] + word for word in lists[action.dest]]
    if action.dest in ("outputs", "against", "inputs", "path"):
        return _argcomplete().completers.FilesCompleter()
    if action.dest == "out" or action.metavar in ("DIR", "RUN"):
        return _argcomplete().completers.DirectoriesCompleter()
    published = [recipe for recipe in _recipes().values() if recipe.published]
    tables_and_figures = [*dict.fromkeys(recipe.table for recipe in published), *(f"figure{k}" for k in range(3, 9))]
    rows = [*(recipe.name for recipe in published), *dict.fromkeys(recipe.family for recipe in published)]
    words = {"table": tables_and_figures, "row": rows}
    return lambda **_: words.get(action.dest, [])


def _settings(prefix: str, **_: Any) -> list[str]:
    """Recipes, datasets and `key=`, or the values of a key; paths after `folder:`, `npz:` and `arff:`."""
    key, equals, value = prefix.partition("=") if "=" in prefix else ("", "", prefix)
    family, colon, path = value.partition(":")
    if colon and family in ("folder", "npz", "arff"):
        words = [f"{family}:{found}" for found in _argcomplete().completers.FilesCompleter()(path)]
    else:
        words = list(values().get(key, ())) if equals else [*_recipes(), *_datasets(), *keys()]
    return [key + equals + word for word in words]


def keys() -> list[str]:
    """The keys of the configuration as they are typed: `epochs=`, `head_options.lam=`."""
    plain = [field.name for field in dataclasses.fields(Config) if not str(field.type).startswith("dict")]
    options = dict.fromkeys(name for head in catalog.heads() for name in head.options)
    return [f"{key}=" for key in (*plain, "schedule.name", *(f"head_options.{name}" for name in options))]


def values() -> dict[str, Iterable[str]]:
    """The values of the keys that have only a few."""
    return {
        **{field.name: ("true", "false") for field in dataclasses.fields(Config) if isinstance(field.default, bool)},
        **CHOICES,
        "augment": AUGMENT,
        "backbone": [name.split("{")[0].removesuffix("NAME") for name in catalog.BACKBONES],
        "data": _datasets(),
        "device": ("auto", "cpu", "cuda"),
        "head": _heads(),
        "pool": ("avg", "max"),
        "schedule.name": SCHEDULES,
    }


def _heads() -> list[str]:
    return [head.name for head in catalog.heads()]


def _datasets() -> list[str]:
    return [info.name.removesuffix("PATH").removesuffix("DATASET)") for info in catalog.DATASETS]


def _recipes() -> dict[str, recipes.Recipe]:
    try:
        return recipes.recipes()
    except ValueError:  # without PyYAML
        return {}


def _argcomplete() -> Any:
    try:
        import argcomplete
        import argcomplete.completers
    except ImportError:
        hint = "pip install 'gsoftmax[completion]'"
        raise ValueError(f"shell completion needs argcomplete, which is not installed: {hint}") from None
    return argcomplete
