"""The README and docs/: code runs, commands parse, links resolve, parameters are described, and the site builds.

Each page runs from top to bottom, in an empty folder and one namespace:

* ```python blocks are executed; with >>> their output is compared;
* ```console blocks: lines that start with $ are executed, the lines below are the expected output (... for anything);
* every other line that starts with gsoftmax or make, and `gsoftmax ...` in the text, is parsed with the command's own
  parser; its recipes, datasets, tables, heads and settings must exist.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import doctest
import functools
import importlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from gsoftmax import cli, compare, config, data, heads, recipes, reproduce
from gsoftmax.report import figures, paper

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts)]
FOUND = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in PAGES}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = re.finditer(r"^```(\S*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(m[1], text[: m.start()].count("\n") + 1, m[2]) for m in found]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def run_python(page: str, block: Block, names: dict[str, object]) -> None:
    if ">>>" not in block.text:
        exec(compile("\n" * block.line + block.text, page, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.text, names, f"{page}:{block.line}", page, block.line)
    said = io.StringIO()
    test.globs = names  # not a copy: later blocks use these names
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.write, clear_globs=False)
    assert result.attempted and not result.failed, said.getvalue()


def run_console(page: str, block: Block, names: dict[str, object]) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        words = shlex.split(command, comments=True)
        local = words[:3] == ["python", "-m", "gsoftmax"]  # finds modules in the current folder
        words = words[2:] if local else words
        assert words[0] == "gsoftmax", f"{page}:{block.line}: only gsoftmax is executed, got {command}"
        said, progress = io.StringIO(), io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(progress))
            if local:
                stack.enter_context(pytest.MonkeyPatch.context()).syspath_prepend(os.getcwd())
            status = cli.main(words[1:])
        ok = not expected.strip() or doctest.OutputChecker().check_output(expected, said.getvalue(), FLAGS)
        assert status == 0 and ok, (
            f"{page}:{block.line}: {command}\nexpected:\n{expected}\nprinted:\n{said.getvalue()}{progress.getvalue()}"
        )


def runnable(text: str) -> list[Block]:
    return [b for b in blocks(text) if b.language == "python" or (b.language == "console" and "$ " in b.text)]


@pytest.mark.parametrize("page", [page for page, text in FOUND.items() if runnable(text)])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # the runs of a comparison in this process
    # Eager: the whole graph is still captured, without minutes of code generation.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    drawn = figures.figures  # one figure is enough; tests/test_report.py draws all
    monkeypatch.setattr(figures, "figures", lambda doc, c=0: {"gaussians": drawn(doc, c=c)["gaussians"]})
    threads, names = torch.get_num_threads(), {"__name__": "page"}
    try:
        torch.set_num_threads(1)
        for block in runnable(FOUND[page]):
            (run_python if block.language == "python" else run_console)(page, block, names)
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("mine", None)


def test_pages_with_code_are_found():
    expected = {
        "start-here",
        "photos",
        "from-cross-entropy",
        "your-loop",
        "compare",
        "analyse",
        "reproduce",
        "mathematics",
    }
    assert all(runnable(FOUND[page]) for page in ("README.md", *(f"docs/{name}.md" for name in expected)))


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command on a page, without comments."""
    lines = [m[1] for m in re.finditer(r"`(gsoftmax [^`]*)`", prose(text).replace("\n", " "))]
    for block in blocks(text):
        if block.language in ("", "sh", "bash", "console"):
            lines += re.sub(r"\\\n\s*", "", block.text).splitlines()
    for line in lines:
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            words = list(lexer)
        except ValueError:
            continue  # output of a program
        while words:
            end = next((i for i, word in enumerate(words) if set(word) <= set(";&|")), len(words))
            command, words = words[:end], words[end + 1 :]
            if "-m" in command and command[command.index("-m") + 1 :][:1] == ["gsoftmax"]:
                command = command[command.index("-m") + 1 :]  # python -m gsoftmax, torchrun ... -m gsoftmax
            if command[1:2] == ["against"] or any("..." in word for word in command):
                continue  # a verdict, or an abbreviated command
            if command and command[0] in ("gsoftmax", "make"):
                yield command


def check_command(words: list[str]) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"no such target: {shlex.join(words)}"
        return
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            arguments, changes = cli.split_changes(words[1:])
            args = cli.parser().parse_args(arguments)
    except SystemExit as end:
        assert end.code == 0, f"{shlex.join(words)}: {said.getvalue()}"  # --version and --help are fine
        return
    changes = [*getattr(args, "changes", []), *changes]
    assert not changes or hasattr(args, "changes"), f"{shlex.join(words)}: {args.command} takes no {changes[0]}"
    check_names(args, changes)


def check_names(args: argparse.Namespace, changes: list[str]) -> None:
    if args.command in ("train", "compare") and not (args.command == "compare" and recipes.family(args.what)):
        made = cli.find_config(args.what, changes, getattr(args, "smoke", False))
        family = data.parse(made.data)[0]
        assert family in {"folder", "csv", "npz", "arff", "mosaic"} | {info.name for info in data.describe()}, made.data
    if args.command == "compare" and args.heads:
        for name, options in map(config.parse_head, compare.split_heads(args.heads)):
            if ":" not in name:
                heads.find(name)(4, 3, **options)
    if args.command == "reproduce":
        if args.table.startswith("figure"):
            assert args.table in paper.FIGURES and (not args.row or recipes.family(args.row)), args
            return
        for row in reproduce.find_rows(args.table, args.row):
            reproduce.Plan(cli.parse_changes(changes), args.smoke, args.shorten).config(row)
    if args.command in ("analyze", "report"):
        assert set(cli.split_words(args.tables)) <= {"md", "tex", "csv", "txt"}, args.tables
        assert set(cli.split_words(args.figures)) <= {"svg", "png", "pdf"}, args.figures


@pytest.mark.parametrize("page", [page for page, text in FOUND.items() if any(commands(text))])
def test_the_commands_of_a_page_parse(page):
    for words in commands(FOUND[page]):
        check_command(words)


def test_commands_are_found():
    assert ["gsoftmax", "heads"] in list(commands(FOUND["README.md"]))
    seen = {words[1] for text in FOUND.values() for words in commands(text) if words[0] == "gsoftmax" and words[1:]}
    assert {"compare", "train", "evaluate", "reproduce", "analyze", "report", "recipes"} <= seen


STALE_COMMANDS = """gsoftmax compere digits
gsoftmax compare digits --sedes 3
gsoftmax compare digitz
gsoftmax compare digits epoch=3
gsoftmax compare digits --heads 'softmax,gsoftmax(lamda=2)'
gsoftmax train wrn-cifar100-gsoftmx
gsoftmax reproduce table7
gsoftmax reproduce table1 --row nothing
gsoftmax analyze a.npz epochs=3
make everything"""


@pytest.mark.parametrize("wrong", STALE_COMMANDS.splitlines())
def test_a_stale_command_is_detected(wrong):
    (words,) = commands(f"```sh\n{wrong}\n```\n")
    with pytest.raises((AssertionError, ValueError, TypeError, KeyError)):
        check_command(words)


def slugs(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    text = re.sub(r"`[^`]*`", "", prose(text))
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"""(?:href|src)="([^"]+)\"""", text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        there = file.is_relative_to(ROOT) and file.exists()
        if not re.match(r"[a-z]+:", target) and (
            not there or (anchor and anchor not in slugs(file.read_text("utf-8")))
        ):
            yield target


@pytest.mark.parametrize("page", FOUND)
def test_links_resolve(page):
    assert list(broken_links(ROOT / page, FOUND[page])) == []


def test_a_broken_link_is_detected():
    text = "[a](nowhere.md) [b](README.md#no-such-heading) [c](README.md#what-it-costs) ![d](docs/images/no.svg)"
    assert [*broken_links(ROOT / "x.md", text)] == ["nowhere.md", "README.md#no-such-heading", "docs/images/no.svg"]


def test_tests_and_files_that_are_named_exist():
    written = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("*.py"))
    tests = {name for text in FOUND.values() for name in re.findall(r"`(test_\w+)`", text)}
    assert tests and sorted(name for name in tests if f"def {name}(" not in written) == []
    for page, text in FOUND.items():
        for name in re.findall(r"`((?:src/gsoftmax|results|benchmarks|docs|examples|tests)/[\w./-]+)`", text):
            assert (ROOT / name).exists() or name.startswith("docs/_build/"), f"{page} names {name}"


def test_the_equation_map_names_the_right_files():
    table = FOUND["docs/mathematics.md"].split("## From equation to code")[1]
    rows = [row.split(" | ") for row in table.splitlines() if "{py:" in row]
    assert len(rows) > 20
    for _, names, file in rows:
        for module, _, attribute in (name.rpartition(".") for name in re.findall(r"`~([\w.]+)`", names)):
            source = inspect.getsourcefile(getattr(importlib.import_module(module), attribute))
            assert source.replace(os.sep, "/").endswith("gsoftmax/" + file.strip(" |`")), attribute


VERDICT = r"\w+ against \w+, \d+ seeds:"


def test_verdicts_on_the_pages_are_the_measured_ones():
    measured = json.loads((ROOT / "results" / "digits.json").read_text("utf-8"))["verdicts"]
    shown = [" ".join(b.text.split()) for text in FOUND.values() for b in blocks(text) if b.language in ("", "text")]
    sentences = [found.strip() for text in shown for found in re.findall(f"{VERDICT}.*?(?={VERDICT}|$)", text)]
    assert len(sentences) >= 3 and [sentence for sentence in sentences if sentence not in measured] == []


@functools.cache
def extension() -> Any:
    sys.path.append(str(DOCS / "_extensions"))
    return importlib.import_module("docstrings")


def described(obj: Any, public: dict[str, Any]) -> set[str]:
    """The parameters that a docstring describes, itself or through "as in `NAME`"."""
    text = inspect.getdoc(obj) or ""
    found = {name for line in text.splitlines() for names, _ in extension().parameters(line) for name in names}
    scope = {**public, **vars(sys.modules[obj.__module__])}
    for first, *rest in (name.split(".") for name in re.findall(r"as in `(?:gsoftmax\.)?([\w.]+)`", text)):
        if first in scope:
            other = functools.reduce(getattr, rest, scope[first])
            found |= {p.name for p in inspect.signature(obj).parameters.values() if p.kind is p.VAR_KEYWORD}
            ours = other.__module__.startswith("gsoftmax")
            found |= described(other, public) if ours else {*inspect.signature(other).parameters}
    return found


def undescribed(obj: Any, public: dict[str, Any]) -> Iterator[str]:
    """The parameters of a function, or of a class and its public methods, that have no description."""
    known = described(obj, public) | {"", "self", "args", "kwargs", "device", "dtype"}
    fields = extension().field_comments(obj) if extension().is_record(obj) else []
    yield from (name for name, _, _, text in fields if not text and name not in known)
    for name in vars(obj) if inspect.isclass(obj) else [""]:
        function = getattr(obj, name) if name else obj
        if inspect.isroutine(function) and (not name.startswith("_") or (name == "__init__" and not fields)):
            inherited = [getattr(base, name) for base in obj.__mro__[1:] if name in vars(base)] if name else []
            known_here = known.union(described(function, public), *(inspect.signature(f).parameters for f in inherited))
            yield from (f"{name}({p})" for p in inspect.signature(function).parameters if p not in known_here)


def test_every_parameter_is_described():
    pages = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").iterdir())
    modules = [importlib.import_module(name) for name in re.findall(r"automodule:: (\S+)", pages)]
    documented = {f"{m.__name__}.{name}": getattr(m, name) for m in modules for name in m.__all__}
    documented = {name: obj for name, obj in documented.items() if inspect.isroutine(obj) or inspect.isclass(obj)}
    public = {"torch": torch} | {m.__name__.rpartition(".")[2]: m for m in modules}
    public |= {name.rpartition(".")[2]: obj for name, obj in documented.items()}
    found = {name: list(undescribed(obj, public)) for name, obj in documented.items()}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_every_page_is_in_a_toctree():
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for kind in ("md", "rst") for p in DOCS.rglob(f"*.{kind}")}
    listed = {"index"}
    for page in ("index", "api/index", "evidence"):
        for block in blocks(FOUND[f"docs/{page}.md"]):
            if block.language == "{toctree}":
                names = [line for line in block.text.splitlines() if line and not line.startswith(":")]
                listed |= {(Path(page).parent / re.sub(r".*<(.*)>", r"\1", name)).as_posix() for name in names}
    assert {page for page in pages if "_build" not in page} == listed


def test_every_key_of_the_configuration_is_in_the_tables_of_settings():
    extension()
    tables = importlib.import_module("generated").configuration()
    rows = {row.split(" | ")[0].strip("|` "): row for row in tables.splitlines() if row.startswith("| `")}
    assert [*rows] == [field.name for field in dataclasses.fields(config.Config)]
    assert all(row.rstrip(" |").rpartition(" | ")[2].strip() for row in rows.values())  # a meaning
    assert "| `mean`, `sum`, `batchmean` |" in rows["reduction"] and "| 0 to 1 |" in rows["momentum"]
    assert "<!-- configuration -->" in FOUND["docs/settings.md"]


def test_every_extra_is_described():
    text = (ROOT / "pyproject.toml").read_text("utf-8").split("[project.optional-dependencies]")[1].split("\n[")[0]
    table = FOUND["docs/start-here.md"].split("| extra |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(re.findall(r"^(\w+) = \[", text, re.MULTILINE))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    site = tmp_path / "html"
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*build, str(DOCS), str(site)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    names = {page.relative_to(site).with_suffix("").as_posix(): page for page in site.rglob("*.html")}
    text = {name: page.read_text("utf-8") for name, page in names.items()}
    assert {page[5:].removesuffix(".md") for page in FOUND if page.startswith("docs/")} | {"playground"} <= {*text}
    for page, html in text.items():  # nothing is loaded from other hosts; tests/test_browser.py checks the playground
        urls = re.findall(r"<(?:script|img|iframe|link|source)\b[^>]*?(?:src|href)=\"([^\"]+)\"", html)
        assert page == "playground" or (urls and not any(re.match(r"(https?:)?//", url) for url in urls)), page
    assert all(option in text["command-line"] for option in ("--first-seed", "--against", "--smoke", "--resume"))
    assert "<math" in text["mathematics"] and "GSoftmaxLoss" in text["examples"]
    assert all(f">{name}</span>" in text["settings"] for name in ("val_fraction", "head_options", "train_geometry"))
    assert all(name in text["reproduce"] for name in ("wrn-cifar100-gsoftmax", "tiny-imagenet", "3.36"))
    assert 'id="gsoftmax.functional.gsoftmax_cross_entropy"' in text["api/functional"]
