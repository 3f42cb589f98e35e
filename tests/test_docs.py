"""The README and docs/: their code runs, their commands parse, their links lead somewhere, and the site builds.

A page is read from top to bottom as a reader would work through it, in an empty folder and one namespace:

* ```python blocks are executed, and compared with the output they show where they are written with >>>;
* ```console blocks are executed where a line begins with $, and the lines below it are its output, in which ... stands
  for anything;
* every other line that begins with gsoftmax or make, and `gsoftmax ...` in the text, is parsed by the command's own
  parser, and its recipes, datasets, tables, heads and settings must be known.
"""

from __future__ import annotations

import argparse
import contextlib
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
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gsoftmax import cli, compare, config, data, heads, recipes
from gsoftmax.report import figures

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.relative_to(ROOT).parts]
FOUND = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in PAGES}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
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


# ----------------------------------------------------------------------------------------------------- what is executed


def check_output(expected: str, got: str, what: str) -> None:
    ok = doctest.OutputChecker().check_output(expected, got, FLAGS)
    assert ok, f"{what}\nshown on the page:\n{expected}\nprinted:\n{got}"


def run_python(page: str, block: Block, names: dict[str, object]) -> None:
    place = f"{page}:{block.line}"
    if ">>>" not in block.text:
        exec(compile("\n" * block.line + block.text, page, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.text, names, place, page, block.line)
    said = io.StringIO()
    test.globs = names  # not a copy: later blocks see what this one made
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.write, clear_globs=False)
    assert result.attempted and not result.failed, said.getvalue()


def run_console(page: str, block: Block, names: dict[str, object]) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        words = shlex.split(command, comments=True)
        local = words[:3] == ["python", "-m", "gsoftmax"]  # looks for modules in the current folder
        words = words[2:] if local else words
        assert words[0] == "gsoftmax", f"{page}:{block.line}: only gsoftmax is executed, got {command}"
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if local:
                patch.syspath_prepend(os.getcwd())
            status = cli.main(words[1:])
        assert status == 0, f"{page}:{block.line}: {command}\n{said.getvalue()}"
        if expected.strip():
            check_output(expected, said.getvalue(), f"{page}:{block.line}: {command}")


def runnable(text: str) -> list[Block]:
    return [b for b in blocks(text) if b.language == "python" or (b.language == "console" and "$ " in b.text)]


@pytest.mark.parametrize("page", [page for page, text in FOUND.items() if runnable(text)])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # runs of a comparison in this process, one after the other
    # The graph is captured whole as for any back end; generating code for it takes minutes and is PyTorch's own affair.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    # One figure stands for all of them, which tests/test_report.py draws.
    drawn = figures.figures
    monkeypatch.setattr(figures, "figures", lambda doc, c=0: {"gaussians": drawn(doc, c=c)["gaussians"]})
    threads, names = torch.get_num_threads(), {"__name__": "page"}
    try:
        torch.set_num_threads(1)  # a second one waits where the machine is busy
        for block in runnable(FOUND[page]):
            (run_python if block.language == "python" else run_console)(page, block, names)
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("mine", None)


def test_pages_with_code_are_found():
    with_code = {page for page, text in FOUND.items() if runnable(text)}
    expected = {"start-here", "your-loop", "compare", "analyse", "reproduce", "mathematics"}
    assert {"README.md", *(f"docs/{name}.md" for name in expected)} <= with_code


# ------------------------------------------------------------------------------------------------------- what is parsed


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command on a page, comments gone."""
    lines: list[str] = []
    for block in blocks(text):
        if block.language in ("", "sh", "bash", "console"):
            lines += re.sub(r"\\\n\s*", "", block.text).splitlines()
    lines += [m[1] for m in re.finditer(r"`(gsoftmax [^`]*)`", prose(text).replace("\n", " "))]
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
                continue  # a verdict; a command that is only hinted at
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
    if args.command in ("train", "compare"):
        made = cli.find_config(args.what, changes, getattr(args, "smoke", False))
        family = data.parse(made.data)[0]
        assert family in {"folder", "npz", "arff", "mosaic"} | {info.name for info in data.describe()}, made.data
    if args.command == "compare" and args.heads:
        for head in compare.split_heads(args.heads):
            name, options = config.parse_head(head)
            if ":" not in name:
                heads.find(name)(4, 3, **options)
    if args.command == "reproduce":
        rows = {name: recipe for name, recipe in recipes.recipes().items() if recipe.table == args.table}
        assert any(recipe.published for recipe in rows.values()), f"unknown table {args.table}"
        for recipe in [rows[args.row]] if args.row else rows.values():
            recipe.config(cli.parse_changes(changes), smoke=args.smoke)
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
    every = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert {"compare", "train", "evaluate", "reproduce", "analyze", "report", "recipes"} <= seen <= set(every)


@pytest.mark.parametrize(
    "wrong",
    [
        "gsoftmax compere digits",
        "gsoftmax compare digits --sedes 3",
        "gsoftmax compare digitz",
        "gsoftmax compare digits epoch=3",
        "gsoftmax compare digits --heads 'softmax,gsoftmax(lamda=2)'",
        "gsoftmax train wrn-cifar100-gsoftmx",
        "gsoftmax reproduce table7",
        "gsoftmax reproduce table1 --row nothing",
        "gsoftmax analyze a.npz epochs=3",
        "make everything",
    ],
)
def test_a_stale_command_is_noticed(wrong):
    (words,) = commands(f"```sh\n{wrong}\n```\n")
    with pytest.raises((AssertionError, ValueError, TypeError, KeyError)):
        check_command(words)


# ------------------------------------------------------------------------------------------------ links, names, numbers


def slugs(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    text = re.sub(r"`[^`]*`", "", prose(text))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"""(?:href|src)="([^"]+)\"""", text)
    out = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        there = file.is_relative_to(ROOT) and file.exists()
        if not there or (anchor and anchor not in slugs(file.read_text("utf-8"))):
            out.append(target)
    return out


@pytest.mark.parametrize("page", FOUND)
def test_links_lead_somewhere(page):
    assert broken_links(ROOT / page, FOUND[page]) == []


def test_a_broken_link_is_noticed():
    text = "[a](nowhere.md) [b](README.md#no-such-heading) [c](README.md#what-it-costs) ![d](docs/images/no.svg)"
    assert broken_links(ROOT / "x.md", text) == ["nowhere.md", "README.md#no-such-heading", "docs/images/no.svg"]


def test_tests_that_are_named_exist():
    written = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("*.py"))
    named = {name for text in FOUND.values() for name in re.findall(r"`(test_\w+)`", text)}
    assert named
    assert sorted(name for name in named if f"def {name}(" not in written) == []


def test_files_of_the_package_that_are_named_exist():
    for page, text in FOUND.items():
        for name in re.findall(r"`((?:src/gsoftmax|results|benchmarks|docs|examples|tests)/[\w./-]+)`", text):
            assert (ROOT / name).exists() or name.startswith("docs/_build/"), f"{page} names {name}"


def test_the_equation_map_names_the_right_files():
    table = FOUND["docs/mathematics.md"].split("## From equation to code")[1]
    rows = [row.split(" | ") for row in table.splitlines() if "{py:" in row]
    assert len(rows) > 20
    for _, names, file in rows:
        for name in re.findall(r"`~([\w.]+)`", names):
            module, _, attribute = name.rpartition(".")
            source = inspect.getsourcefile(getattr(importlib.import_module(module), attribute))
            assert source.replace(os.sep, "/").endswith("gsoftmax/" + file.strip(" |`")), name


def test_verdicts_on_the_pages_are_the_measured_ones():
    measured = json.loads((ROOT / "results" / "digits.json").read_text("utf-8"))["verdicts"]
    shown = []
    for text in FOUND.values():
        for block in blocks(text):
            if block.language in ("", "text"):
                flat = " ".join(block.text.split())
                shown += re.findall(r"\w+ against \w+, \d+ seeds:.*?\.(?=\s|$)", flat)
    assert len(shown) >= 2
    assert [sentence for sentence in shown if sentence not in measured] == []


# ------------------------------------------------------------------------------------------------------------- the site


def test_every_page_has_its_place():
    pages = {p.relative_to(DOCS).with_suffix("").as_posix() for kind in ("md", "rst") for p in DOCS.rglob(f"*.{kind}")}
    listed = {"index"}
    for page in ("index", "api/index"):
        for block in blocks(FOUND[f"docs/{page}.md"]):
            if block.language == "{toctree}":
                names = [line for line in block.text.splitlines() if line and not line.startswith(":")]
                listed |= {(Path(page).parent / re.sub(r".*<(.*)>", r"\1", name)).as_posix() for name in names}
    assert {page for page in pages if "_build" not in page} == listed


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):  # one test: building takes longer than looking
    site = tmp_path / "html"
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*build, str(DOCS), str(site)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    for page in FOUND:
        if page.startswith("docs/"):
            assert (site / page.removeprefix("docs/")).with_suffix(".html").exists(), page
    assert (site / "playground.html").exists()
    check_that_it_asks_nobody(site)
    check_that_it_shows_what_the_code_says(site)


def check_that_it_asks_nobody(site: Path) -> None:
    """No script, style, font or picture of a page comes from another machine."""
    loads = re.compile(r"<(?:script|img|iframe|link|source)\b[^>]*?(?:src|href)=\"([^\"]+)\"")
    for page in site.rglob("*.html"):
        if page.name != "playground.html":  # which tests/test_browser.py opens
            urls = loads.findall(page.read_text("utf-8"))
            assert urls and [url for url in urls if re.match(r"(https?:)?//", url)] == [], page.name


def check_that_it_shows_what_the_code_says(site: Path) -> None:
    text = {page.stem: page.read_text("utf-8") for page in [*site.glob("*.html"), *site.glob("api/*.html")]}
    assert all(option in text["command-line"] for option in ("--first-seed", "--against", "--smoke", "--resume"))
    assert "<math" in text["mathematics"]
    assert all(f">{name}</span>" in text["config"] for name in ("val_fraction", "head_options", "train_geometry"))
    assert all(name in text["reproduce"] for name in ("wrn-cifar100-gsoftmax", "tiny-imagenet", "17.41"))
    assert 'id="gsoftmax.functional.gsoftmax_cross_entropy"' in text["functional"]
    assert "GSoftmaxLoss" in text["examples"]


def test_the_map_has_every_module_once():
    rooms = (DOCS / "architecture.md").read_text("utf-8").split("## Rooms")[1].split("\n## ")[0]
    columns = [line.split("|")[2] for line in rooms.splitlines() if line.startswith("| ")][1:]
    named = [name for column in columns for name in re.findall(r"`([\w.]+)`", column)]
    package = ROOT / "src" / "gsoftmax"
    paths = [path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")]
    modules = [".".join(parts).removesuffix(".__init__") for parts in paths]
    assert sorted(named) == sorted({*modules} - {"__init__", "_version"})
