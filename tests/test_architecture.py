"""The structure of the package, read from its source: imports, private names, cycles, long signatures, the map."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gsoftmax"
MOST_PARAMETERS = 7

# Imports inside functions are for what an installation may lack: third-party packages, and these.
MAY_BE_MISSING = ("fcntl", "torch.distributed", "torch.utils.tensorboard")

# Functions with a longer signature, and why.  Kernels are exempt: a GPU takes no records.
PUBLIC = "public: the options of torch's own loss or layer, and those of the Gaussians, each by its keyword"
TUNED = "public: the parameters of `compare`, and the options of tuning, each by its keyword"
LONG_SIGNATURES = {
    "gsoftmax.functional.gsoftmax_cross_entropy": PUBLIC,
    "gsoftmax.functional.linear_gsoftmax_cross_entropy": PUBLIC,
    "gsoftmax.functional.multilabel_cross_entropy": PUBLIC,
    "gsoftmax.functional.large_margin_cross_entropy": PUBLIC,
    "gsoftmax.gaussians.GaussianLogits.__init__": PUBLIC,
    "gsoftmax.heads.asl.ASLHead.__init__": PUBLIC,
    "gsoftmax.heads.gsoftmax.GSoftmaxHead.__init__": PUBLIC,
    "gsoftmax.heads.lsoftmax.LSoftmaxHead.__init__": PUBLIC,
    "gsoftmax.losses.GSoftmaxLoss.__init__": PUBLIC,
    "gsoftmax.losses.MultiLabelGSoftmaxLoss.__init__": PUBLIC,
    "gsoftmax.sharded.head.ShardedSoftmaxHead.__init__": PUBLIC,
    "gsoftmax.sharded.head.ShardedGSoftmaxHead.__init__": PUBLIC,
    "gsoftmax.sharded.loss.CrossEntropy.forward": "autograd sees tensors only where they are arguments of their own",
    "gsoftmax.tune.Tuning.__init__": TUNED,
    "gsoftmax.tune.tune": TUNED,
}
KERNELS = ("gsoftmax.kernels", "gsoftmax.backbones.fused")

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_package() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("gsoftmax", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text("utf-8"))
    return found


TREES = read_package()
FOLDERS = {name.rpartition(".")[0] for name in TREES}


def imports(module: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Line, module and name ('' for the module itself) of every import among `nodes`, with absolute modules."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = (module if module in FOLDERS else module.rpartition(".")[0]).split(".")
            start = start[: len(start) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, base, alias.name) for alias in node.names)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "gsoftmax"


def late_imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Imports inside functions, other than of what may be missing."""
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        for line, base, name in imports(module, ast.walk(function)):
            top = base.partition(".")[0]
            always_there = top in ("gsoftmax", "torch", "numpy") or top in sys.stdlib_module_names
            if always_there and not base.startswith(MAY_BE_MISSING):
                yield f"{module}:{line} imports {base} {name} inside {function.name}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_version"


def private_attributes(tree: ast.Module) -> set[str]:
    """Private methods and attributes of a module's classes."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {node.name for cls in classes for node in cls.body if isinstance(node, Function)}
    stored = [node for cls in classes for node in ast.walk(cls) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names |= {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in stored}
    return {name for name in names if is_private(name)}


PRIVATE = {name: private_attributes(tree) for name, tree in TREES.items()}


def private_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Private names of another of our modules: imported, taken from the module, or reached through an object."""
    modules = set()
    for line, base, name in imports(module, ast.walk(tree)):
        if is_ours(base) and any(map(is_private, [name, *base.split(".")])):
            yield f"{module}:{line} imports {name} of {base}"
        if f"{base}.{name}" in TREES:
            modules.add(name)
    theirs = set().union(*(names for other, names in PRIVATE.items() if other != module)) - private_attributes(tree)
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_private(n.attr)):
        owner = ast.unparse(node.value)
        if owner in modules or (node.attr in theirs and owner not in ("self", "cls")):
            yield f"{module}:{node.lineno} uses {ast.unparse(node)}"


def dependencies(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which of our modules each one imports, wherever the import stands, but for those that only type checkers see."""
    graph = {}
    for module, tree in trees.items():
        checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        skipped = {id(node) for block in checked for node in ast.walk(block)}
        found = imports(module, (node for node in ast.walk(tree) if id(node) not in skipped))
        targets = {f"{base}.{name}" if f"{base}.{name}" in trees else base for _, base, name in found if is_ours(base)}
        graph[module] = targets - {module, "gsoftmax", "gsoftmax._version"}
    return graph


def long_signatures(module: str, tree: ast.Module) -> Iterator[str]:
    if module.startswith(KERNELS):
        return
    owners = {id(f): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for f in node.body}
    for node in (n for n in ast.walk(tree) if isinstance(n, Function)):
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len(names) - (names[:1] in (["self"], ["cls"])) > MOST_PARAMETERS:
            yield ".".join(filter(None, (module, owners.get(id(node)), node.name)))


@pytest.mark.parametrize("module", TREES)
def test_imports_are_at_the_top(module):
    assert list(late_imports(module, TREES[module])) == []


@pytest.mark.parametrize("module", TREES)
def test_private_names_stay_in_their_module(module):
    assert list(private_names(module, TREES[module])) == []


def test_no_module_needs_itself():
    tuple(graphlib.TopologicalSorter(dependencies(TREES)).static_order())  # a CycleError names the circle


def test_signatures_are_short_or_listed():
    found = {name for module, tree in TREES.items() for name in long_signatures(module, tree)}
    assert found == set(LONG_SIGNATURES)


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (late_imports, "def f():\n    from . import compare"),
        (late_imports, "def f():\n    import json"),
        (late_imports, "class A:\n    async def f(self):\n        import torch.nn"),
        (private_names, "from .runs import _hidden"),
        (private_names, "from ._hidden import x"),
        (private_names, "from . import runs\nx = runs._hidden"),
        (private_names, "def f(stats):\n    return stats._of_another_module"),
        (long_signatures, "def f(a, b, c, d, *, e, f, g, h): ..."),
    ],
)
def test_a_breach_is_noticed(check, source, monkeypatch):
    monkeypatch.setitem(PRIVATE, "gsoftmax.other", {"_of_another_module"})
    assert len(list(check("gsoftmax.mine", ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (late_imports, "import json\ndef f():\n    import matplotlib, torch.distributed.tensor"),
        (private_names, "class A:\n    def f(self, other):\n        self._x = other._x\n        return np._core"),
        (long_signatures, "class A:\n    def f(self, a, b, c, d, e, f, g): ..."),
    ],
)
def test_what_is_allowed_is_not_a_breach(check, source):
    assert list(check("gsoftmax.mine", ast.parse(source))) == []


def test_a_cycle_is_noticed():
    trees = {"gsoftmax.a": ast.parse("def f():\n    from .b import g"), "gsoftmax.b": ast.parse("from . import a")}
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter(dependencies(trees)).static_order())


def test_the_map_has_every_module_once():
    rooms = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## Rooms")[1].split("\n## ")[0]
    columns = [line.split("|")[2] for line in rooms.splitlines() if line.startswith("| ")][1:]
    named = [name for column in columns for name in re.findall(r"`([\w.]+)`", column)]
    assert sorted(f"gsoftmax.{name}" for name in named) == sorted({*TREES} - {"gsoftmax", "gsoftmax._version"})
