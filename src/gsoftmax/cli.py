"""The command line: thin, every command is a function of the package."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import catalog
from ._version import __version__

EXAMPLES = """\
examples:
  gsoftmax compare                                    three heads on the bundled digits, five seeds
  gsoftmax compare folder:photos --heads 'softmax,gsoftmax(lam=2)' --seeds 10 epochs=30
  gsoftmax compare cifar10-fast data=folder:cifar10 --seeds 20
  gsoftmax train wrn-cifar100-gsoftmax --data ~/data --out runs/wrn amp=bf16
  gsoftmax reproduce table1 --row wrn-cifar100-gsoftmax --data ~/data
  torchrun --nproc-per-node 4 -m gsoftmax train wrn-cifar100-gsoftmax --data ~/data     four processes, one run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; a user's mistake is one line on standard error and status 2."""
    parser = _parser()
    words, changes = _set_apart(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    if changes and not hasattr(args, "changes"):
        parser.error(f"{args.command or 'gsoftmax'} takes no key=value, got {changes[0]}")
    args.changes = [*getattr(args, "changes", []), *changes]
    if args.command is None:
        parser.print_help()
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of classes may have letters that the locale has not
            stream.reconfigure(errors="backslashreplace")
    before = warnings.showwarning, signal.getsignal(signal.SIGTERM)
    warnings.showwarning = _show_warning
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminated)
        args.run(args)
    except KeyboardInterrupt as stopped:
        where = f" {stopped}" if str(stopped) else ""
        hint = {"train": "; the same command with --resume goes on from there"}
        hint |= dict.fromkeys(("compare", "reproduce"), "; the same command goes on where this one stopped")
        _say(f"stopped{where}{hint.get(args.command, '')}")
        return 128 + getattr(stopped, "signal_number", signal.SIGINT)
    except (ValueError, OSError, RuntimeError) as error:
        if args.debug or type(error) is RuntimeError:
            raise
        _say(_one_line(error))
        return 2
    finally:
        warnings.showwarning = before[0]
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before[1])
    return 0


def _say(text: str) -> None:
    """One line on standard error."""
    if _speaks():
        _clear()
        print(f"gsoftmax: {text}", file=sys.stderr)


def _speaks() -> bool:
    """Of several processes the first one."""
    return os.environ.get("RANK", "0") == "0"


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    _say(f"warning: {' '.join(str(message).split())}")


def _terminated(number: int, frame: Any) -> None:
    from .distributed import Stopped

    raise Stopped("", number)


def _set_apart(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words argparse sees, and the `key=value` among them, which may stand anywhere."""
    words: list[str] = []
    changes: list[str] = []
    takes_value = False
    for word in argv:
        is_change = re.match(r"[A-Za-z_][\w.]*=", word) and not takes_value
        (changes if is_change else words).append(word)
        takes_value = word.startswith("--") and "=" not in word and word not in ("--debug", "--resume", "--smoke")
    return words, changes


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        error = ValueError(error.strerror.lower() + (f": {error.filename}" if error.filename else ""))
    first, *rest = str(error).splitlines() or [type(error).__name__]
    more = "; `gsoftmax datasets` shows the layout" if any(line.startswith("  layout:") for line in rest) else ""
    line = "".join(c if c.isprintable() else "\ufffd" for c in first)  # names must not steer a terminal
    return (line if len(line) <= 600 else f"{line[:400]} ... {line[-150:]}") + more


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage above it."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {_one_line(ValueError(message))}; {self.prog} --help says more\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gsoftmax",
        description="Compare softmax, L-softmax and G-softmax, and measure how compact and how far apart classes are.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gsoftmax {__version__}")
    shared = _Parser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="full traceback for an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Any, text: str, epilog: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            parents=[shared],
            epilog=textwrap.dedent(epilog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    c = add(
        "compare",
        _compare,
        "train heads under identical conditions over several seeds, and say what changed",
        """\
        example:
          gsoftmax compare digits --heads 'softmax,gsoftmax(lam=4,gaussians=tracked)' --seeds 10 --out runs/tracked
        """,
    )
    c.add_argument("what", nargs="?", default="digits", help="a recipe or a dataset (default: digits)")
    c.add_argument("changes", nargs="*", metavar="key=value", help="changes to the configuration, as epochs=30")
    c.add_argument(
        "--heads",
        help="separated by commas, options in parentheses; the first is the reference "
        "(default: softmax,lsoftmax,gsoftmax, or softmax,gsoftmax for multi-label data)",
    )
    c.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 0 ... N-1 (default: 5)")
    c.add_argument("--first-seed", type=int, default=0, metavar="K", help="begin at seed K")
    c.add_argument("--jobs", type=int, metavar="J", help="runs at the same time (default: one a core or GPU)")
    c.add_argument("--out", help="folder of the runs (default: runs/NAME); finished runs in it are kept")
    c.add_argument("--data", metavar="DIR", help="folder of the published datasets")

    c = add(
        "train",
        _train,
        "train one recipe or dataset and write a run folder",
        """\
        examples:
          gsoftmax train digits head=gsoftmax head_options.lam=2 --out runs/lam2
          gsoftmax train wrn-cifar100-gsoftmax --data ~/data amp=bf16 --resume     # starts, or goes on
          gsoftmax train coco-softmax --smoke                 # does it run at all: two epochs on generated files
        """,
    )
    c.add_argument("what", help="a recipe or a dataset")
    c.add_argument("changes", nargs="*", metavar="key=value", help="changes, as head=gsoftmax head_options.lam=0.5")
    c.add_argument("--out", help="run folder (default: runs/NAME)")
    c.add_argument("--data", metavar="DIR", help="folder of the published datasets")
    c.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    c.add_argument("--smoke", action="store_true", help="small generated files in the dataset's format, two epochs")

    c = add(
        "evaluate",
        _evaluate,
        "compute the metrics of a run again from its saved outputs",
        """\
        example:
          gsoftmax evaluate runs/lam2
        """,
    )
    c.add_argument("run_folder", metavar="RUN")

    c = add(
        "reproduce",
        _reproduce,
        "run a table of the paper and print its numbers beside ours",
        """\
        examples:
          gsoftmax reproduce table1 --smoke                   # every row, two epochs on generated files
          gsoftmax reproduce table3 --row 'coco-gsoftmax(0,1)' --data ~/data
        """,
    )
    c.add_argument("table", help="table1, table2, table3 or table4")
    c.add_argument("--row", help="one row only (see gsoftmax recipes)")
    c.add_argument("changes", nargs="*", metavar="key=value")
    c.add_argument("--out", default="runs/reproduce")
    c.add_argument("--data", metavar="DIR", help="folder of the published datasets")
    c.add_argument("--smoke", action="store_true", help="small generated files in the dataset's format, two epochs")

    c = add(
        "analyze",
        _analyze,
        "measure the classes of any model from a file of its outputs: .npz, .safetensors or .csv with x and y",
        """\
        example:
          gsoftmax analyze softmax.npz --against mine.npz      # two models on the same images
        """,
    )
    c.add_argument(
        "outputs", metavar="OUTPUTS", help="x (N, C), y (N,) or (N, C), if there are p, names, mu, sigma, lam"
    )
    c.add_argument("--against", metavar="OTHER", help="another model's outputs on the same images")
    _report_options(c)

    c = add(
        "report",
        _report,
        "tables, figures and the page from run folders or the folder of a comparison",
        """\
        examples:
          gsoftmax report runs/digits --figures svg,pdf --class 7
          gsoftmax report runs/softmax runs/lam2 --out both
          gsoftmax report --paper runs/reproduce --tables tex
        """,
    )
    c.add_argument("runs", nargs="*", metavar="RUN")
    c.add_argument("--paper", metavar="DIR", help="the paper's tables beside the runs of `gsoftmax reproduce` in DIR")
    _report_options(c)

    add(
        "datasets",
        _datasets,
        "list datasets: shapes, sources, what the folder must look like",
        """\
        example:
          gsoftmax datasets                                   # then: gsoftmax compare folder:photos
        """,
    )
    add(
        "recipes",
        _recipes,
        "list recipes with the published numbers",
        """\
        example:
          gsoftmax recipes                                    # then: gsoftmax train NAME --smoke
        """,
    )
    add(
        "heads",
        _heads,
        "list heads and their options",
        """\
        example:
          gsoftmax heads                                      # then: gsoftmax compare --heads 'softmax,gsoftmax(lam=2)'
        """,
    )
    c = add(
        "completion",
        _completion,
        "print a script that completes commands, options and names in a shell",
        """\
        examples:
          gsoftmax completion bash > ~/.local/share/bash-completion/completions/gsoftmax
          gsoftmax completion zsh > ~/.zfunc/_gsoftmax         # a folder of $fpath, before compinit in ~/.zshrc
          gsoftmax completion fish > ~/.config/fish/completions/gsoftmax.fish
        """,
    )
    c.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def _report_options(c: argparse.ArgumentParser) -> None:
    c.add_argument("--out", help="folder to write to")
    c.add_argument(
        "--tables", default="md,tex,csv", help="md, tex, csv, txt, separated by commas (default: md,tex,csv)"
    )
    c.add_argument("--figures", default="svg", help="svg, png, pdf (default: svg)")
    c.add_argument("--class", dest="class_name", metavar="NAME", help="the class of the figures of one class")


def _changes(pairs: Sequence[str]) -> dict[str, Any]:
    from .config import parse_value

    changes = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"changes are written key=value, got {pair!r}")
        changes[key] = parse_value(value)
    return changes


def _config(what: str, changes: Sequence[str], smoke: bool = False) -> Any:
    """The configuration of a recipe, or the default one for a dataset."""
    from . import recipes
    from .config import Config

    if what in recipes.recipes():
        return recipes.find(what).config(_changes(changes), smoke=smoke)
    if what.startswith("arff:"):
        return recipes.find("tables").config({"data": what} | _changes(changes))
    from . import data

    family = data.parse(what)[0]
    if family not in {"folder", "npz", "mosaic"} and family not in {info.name for info in data.describe()}:
        import difflib

        close = difflib.get_close_matches(what, [*recipes.recipes(), *(i.name for i in data.describe())], 3)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise ValueError(f"{what!r} is neither a recipe nor a dataset{hint}")
    return Config(data=what).override(_changes(changes))


def _folder(what: str, out: str | None) -> Path:
    from .runs import folder_name

    return Path(out) if out else Path("runs") / folder_name(Path(what).name or what)


def _ticker() -> Any:
    """Progress on one line of a terminal, and silence elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    return show


def _clear() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _compare(args: argparse.Namespace) -> None:
    from . import compare, report, summary, tables

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare starts its own processes, as many as --jobs says; torchrun is for gsoftmax train")
    if args.seeds < 1:
        raise ValueError(f"--seeds must be 1 or more, got {args.seeds}")
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs must be 1 or more, got {args.jobs}")
    config = _config(args.what, args.changes)
    if config.threads == 0:
        # one thread a run: --jobs decides how many cores are busy, and results do not depend on it
        config = config.override({"threads": 1})
    heads = compare.split_heads(args.heads) if args.heads else None
    out = _folder(args.what, args.out)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    plan = compare.plan(config, heads, seeds, out, data_root=args.data)
    print(f"{plan.dataset.summary()}; {', '.join(plan.heads)}; {args.seeds} seeds -> {out}")
    found = plan.run(args.jobs, _ticker())
    _clear()
    for table in (summary.means(found), *summary.differences(found)):
        print(f"\n{table.text()}")
    print()
    for sentence in summary.verdicts(found):
        print(textwrap.fill(tables.plain(sentence), 100, subsequent_indent="  "))
    try:
        print(f"\n{report.write_page(found, out, f'{args.what}: {chr(44).join(plan.heads)}')}")
    except ValueError as error:  # the runs and their numbers are there all the same
        print(f"\nno page was written: {error}")


def _train(args: argparse.Namespace) -> None:
    out = _folder(args.what, args.out)
    result = _run_recipe(args.what, args.changes, out, args.data, args.resume, args.smoke)
    if not _speaks():
        return
    for key in ("error", "mAP", "compactness", "separability", "ratio", "nll", "ece", "seconds"):
        if key in result:
            print(f"{key:14}{result[key]:.4f}")
    print(f"{out}" + (" (smoke: small generated data, not a result)" if args.smoke else ""))


def _run_recipe(
    what: str, changes: Sequence[str], out: Path, data_root: str | None, resume: bool, smoke: bool
) -> dict[str, Any]:
    from . import data, train

    config = _config(what, changes, smoke)
    ticker = _ticker()
    try:
        if not smoke:
            return train.train(config, out, data_root=data_root, resume=resume, progress=ticker)
        with tempfile.TemporaryDirectory() as folder:
            spec = data.write_smoke(config.data, folder) if config.data in data.SMOKE_NAMES else config.data
            config = config.override({"data": spec})
            return train.train(config, out, data_root=folder, resume=resume, progress=ticker)
    finally:
        _clear()


def _evaluate(args: argparse.Namespace) -> None:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError(
            "runs are read with safetensors, which is not installed: pip install 'gsoftmax[train]'"
        ) from None

    from . import evaluation, runs
    from .outputs import open_outputs

    run = Path(args.run_folder)
    if runs.read_result(run) is None:
        raise ValueError(f"{run} holds no finished run: config.json, metrics.jsonl and outputs.safetensors are needed")
    open_outputs(run)  # refuses what is damaged
    outputs = load_file(run / "outputs.safetensors")
    if "p" not in outputs:
        raise ValueError(f"{run / 'outputs.safetensors'} must hold x, p and y, got {', '.join(sorted(outputs))}")
    x, p, y = (outputs[k] for k in "xpy")
    for key, value in evaluation.score(x, p, y).items():
        print(f"{key:20}{value:.6g}")


def _reproduce(args: argparse.Namespace) -> None:
    from . import recipes, runs

    rows = [r for r in recipes.recipes().values() if r.table == args.table and r.published]
    if not rows:
        known = sorted({r.table for r in recipes.recipes().values() if r.published})
        raise ValueError(f"unknown table {args.table!r}; tables are {', '.join(known)}")
    if args.row:
        rows = [r for r in rows if r.name == args.row]
        if not rows:
            raise ValueError(f"{args.table} has no row {args.row!r}; `gsoftmax recipes` lists them")
    say = print if _speaks() else lambda *_: None
    say(f"{'row':32}{'metric':12}{'published':>10}{'ours':>10}{'difference':>12}")
    for recipe in rows:
        out = Path(args.out) / ("smoke" if args.smoke else "") / recipe.name
        result = runs.read_result(out)
        if result is None:
            resume = (out / "config.json").exists()
            result = _run_recipe(recipe.name, args.changes, out, args.data, resume, args.smoke)
        for metric, published in recipe.published.items():
            if args.smoke:
                say(f"{recipe.name:32}{metric:12}{published:10.2f}{'smoke ok':>10}{'no result':>12}")
            else:
                ours = 100 * result[metric]
                say(f"{recipe.name:32}{metric:12}{published:10.2f}{ours:10.2f}{ours - published:+12.2f}")


def _analyze(args: argparse.Namespace) -> None:
    from . import report

    doc = report.from_outputs(args.outputs, args.against)
    _write_report(args, doc, f"{Path(args.outputs).stem}-report")


def _report(args: argparse.Namespace) -> None:
    from . import report

    if args.paper and args.runs:
        raise ValueError(f"report takes run folders or --paper DIR, not both, got {args.runs[0]} and {args.paper}")
    if args.paper:
        tables, paths = report.write_paper_tables(args.paper, args.out or "paper-tables", _words(args.tables))
        print("\n\n".join(table.text() for table in tables), *paths, sep="\n")
    else:
        _write_report(args, report.from_runs(args.runs), args.runs[0] if len(args.runs) == 1 else "report")


def _write_report(args: argparse.Namespace, doc: Any, out: str) -> None:
    from . import report

    print(report.terminal(doc), end="\n\n")
    options = {"tables": _words(args.tables), "figures": _words(args.figures), "name": args.class_name}
    print(*report.write(doc, args.out or out, **options), sep="\n")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _datasets(args: argparse.Namespace) -> None:
    for info in catalog.DATASETS:
        print(info.name)
        for part in (info.size, info.source, info.layout):
            print(textwrap.indent(part, "    "))


def _recipes(args: argparse.Namespace) -> None:
    from . import recipes

    for name, recipe in recipes.recipes().items():
        numbers = ", ".join(f"{k} {v:g}" for k, v in recipe.published.items())
        print(f"{recipe.table:8}{name:32}{numbers}")


def _completion(args: argparse.Namespace) -> None:
    from .completion import script

    print(script(args.shell), end="")


def _heads(args: argparse.Namespace) -> None:
    for head in catalog.heads():
        options = ", ".join(f"{name}={default}" for name, default in head.options.items())
        print(f"{head.name}\n    {head.summary}\n    {options}")
    print("package.module:ClassName\n    your own: an nn.Module with features(h), loss(h, target) and predict_proba(h)")
