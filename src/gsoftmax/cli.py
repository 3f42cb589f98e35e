"""The command line: each command is a thin layer over one function of the package.

Modules are imported on first use, through the package's attributes: what needs no torch does not wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gsoftmax

from . import catalog, completion, config, messages, progress, recipes, stopping, tables
from ._version import __version__

__all__ = ["main"]

Display = progress.Live | progress.Lines | progress.Json

EXAMPLES = """\
examples:
  gsoftmax compare                                    three heads on the bundled digits, five seeds
  gsoftmax compare folder:photos --heads 'softmax,gsoftmax(lam=2)' --seeds 10 epochs=30
  gsoftmax compare cifar10-fast data=folder:cifar10 --seeds 20
  gsoftmax train wrn-cifar100-gsoftmax --data ~/data --out runs/wrn amp=bf16
  gsoftmax reproduce table1 --row wrn-cifar100-gsoftmax --data ~/data
  torchrun --nproc-per-node 4 -m gsoftmax train wrn-cifar100-gsoftmax --data ~/data     four processes, one run
"""
FLAGS = ("--debug", "--features", "--json", "--resume", "--smoke")  # options without a value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; a user's mistake is one line on standard error and status 2.

    argv: the words after `gsoftmax`; by default those of this process

    >>> main(["--version"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    _open_streams()
    before = warnings.showwarning
    args = argparse.Namespace(debug=False, hint="")
    try:
        with stopping.ending(lambda: _say(f"stopped{args.hint}")):
            _parse(argv, args)
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):  # class names may contain letters that the locale lacks
                    stream.reconfigure(errors="backslashreplace")
            warnings.showwarning = _show_warning
            config.world_size()
            args.run(args)
            sys.stdout.flush()
    except KeyboardInterrupt as stopped:
        _say(f"stopped {stopped}".rstrip() + args.hint)
        return 128 + getattr(stopped, "signal_number", signal.SIGINT)
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        progress.discard(sys.stdout)
    except _Incomplete as error:
        _say(str(error))
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        if args.debug or type(error) is RuntimeError:
            raise
        _say(_one_line(error))
        return 2
    finally:
        warnings.showwarning = before
        _displays.clear()
    return 0


def _parse(argv: Sequence[str] | None, args: argparse.Namespace) -> None:
    """Adds to `args` the options of a command, the function that runs it, and how to go on after a signal."""
    root = parser()
    root.set_defaults(run=lambda _: root.print_help())
    completion.complete(root)
    words, changes = split_changes(sys.argv[1:] if argv is None else argv)
    root.parse_args(words, args)
    args.started = time.perf_counter()
    if changes and not hasattr(args, "changes"):
        root.error(f"{args.command or 'gsoftmax'} takes no key=value, got {changes[0]}")
    args.changes = [*getattr(args, "changes", []), *changes]
    hints = {"train": "; run the same command with --resume to continue"}
    hints |= dict.fromkeys(("compare", "reproduce"), "; run the same command again to continue")
    args.hint = hints.get(args.command, "")


class _Incomplete(Exception):
    """Some runs failed, and what the others gave is shown."""


_displays: list[Display] = []  # of the progress of this command


def _open_streams() -> None:
    """Gives this process the standard streams that its parent closed, or a file that it opens would become one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def _tell(line: str) -> None:
    """One line on standard output, at once; work goes on where nobody reads it."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        progress.discard(sys.stdout)


def _say(text: str) -> None:
    """One line on standard error."""
    if _is_rank0():
        _clear()
        progress.show(f"gsoftmax: {text}\n", sys.stderr)


def _is_rank0() -> bool:
    try:
        alone = config.world_size() <= 1  # a scheduler may set RANK all the same
    except ValueError:  # which every process says
        alone = True
    return alone or os.environ.get("RANK", "0") == "0"


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    _say(f"warning: {' '.join(str(message).split())}")


def _one_line(error: Exception) -> str:
    more = "; `gsoftmax datasets` shows the layout" if "\n  layout:" in str(error) else ""
    line = "".join(c if c.isprintable() else "\ufffd" for c in messages.reason(error))  # no terminal escapes
    return (line if len(line) <= 600 else f"{line[:400]} ... {line[-150:]}") + more


def _ticker() -> Callable[[str], None] | None:
    """Shows progress on one line of a terminal; None where there is no terminal."""
    if not sys.stderr.isatty():
        return None
    return lambda text: progress.show(f"\r\x1b[K{text}", sys.stderr)


def _clear() -> None:
    for display in _displays:
        display.clear()
    if ticker := _ticker():
        ticker("")


def _display(args: argparse.Namespace) -> Display:
    """Shows the progress of this command as its options and the terminal suit."""
    if getattr(args, "json", False):
        _displays.append(progress.Json(_tell))
    else:
        _displays.append((progress.Live if sys.stderr.isatty() else progress.Lines)(sys.stderr))
    return _displays[-1]


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage above it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest:  # said here, so that a command names its own options
            key, known = (
                rest[0].removeprefix("--"),
                [name for action in self._actions for name in action.option_strings],
            )
            is_key = key in {field.name for field in dataclasses.fields(config.Config)}
            hint = f", did you mean {key}={rest[1] if len(rest) > 1 else ''}" if is_key else ""
            self.error(f"unrecognized {' '.join(rest)}{hint or messages.did_you_mean(rest[0], known)}")
        return found, rest

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {_one_line(ValueError(message))}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; a command's help is its function's docstring."""
    root = _Parser(
        prog="gsoftmax",
        description="Compare softmax, L-softmax and G-softmax, and measure class compactness and separability.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"gsoftmax {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")

    def argument(*names: str, **options: Any) -> _Parser:
        part = _Parser(add_help=False)
        part.add_argument(*names, **options)
        return part

    def add(run: Callable[[Any], None], *arguments: _Parser) -> None:
        summary, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\n\n")
        commands.add_parser(
            run.__name__.removeprefix("_"),
            help=summary[:1].lower() + summary[1:].removesuffix("."),
            description=summary,
            epilog=examples,
            parents=[*arguments, argument("--debug", action="store_true", help="print the full traceback of an error")],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        ).set_defaults(run=run)

    changes = argument("changes", nargs="*", metavar="key=value", help="configuration changes, as in epochs=30")
    data = argument("--data", metavar="DIR", help="folder of the published datasets")
    events = argument("--json", action="store_true", help="print progress and results as JSON, one object a line")
    smoke = argument("--smoke", action="store_true", help="two epochs on small generated files of the same format")
    shorten = argument(
        "--shorten", type=float, default=1.0, metavar="F", help="divide epochs and the epochs of the schedule by F"
    )
    heads = (
        "comma-separated, options in parentheses; the first is the reference "
        "(default: softmax,lsoftmax,gsoftmax, softmax,gsoftmax for multi-label data, the rows of a family)"
    )
    add(
        _compare,
        argument(
            "what",
            nargs="?",
            default="digits",
            help="a recipe, a family of the paper's rows such as wrn-cifar10, or a dataset (default: digits)",
        ),
        changes,
        argument("--heads", help=heads),
        argument("--seeds", type=int, default=5, metavar="N", help="seeds 0 ... N-1 (default: 5)"),
        argument("--first-seed", type=int, default=0, metavar="K", help="start at seed K"),
        argument("--jobs", type=int, metavar="J", help="number of parallel runs (default: one per core or GPU)"),
        shorten,
        argument("--tune", type=int, metavar="N", help="tune every head over N trials on a validation split first"),
        argument("--space", help="what --tune varies: 'lr=log(0.01,0.5) feature_scale=0.25|1' (default: both)"),
        argument("--minutes", type=float, metavar="M", help="fewer trials, if --tune would take longer than this"),
        argument("--only", metavar="K/N", help="train every Nth run from the Kth on; other processes train the rest"),
        argument("--out", help="folder of the runs (default: runs/NAME or runs/NAME-tuned); finished runs are kept"),
        data,
        events,
    )
    add(
        _train,
        argument("what", help="a recipe or a dataset"),
        changes,
        argument("--out", help="run folder (default: runs/NAME)"),
        data,
        argument("--resume", action="store_true", help="continue from the last checkpoint"),
        smoke,
        events,
    )
    run_folder = argument("run_folder", metavar="RUN", help="folder of a finished run")
    head = argument("--head", metavar="CODE", help="a head of your own, package.module:ClassName, in which RUN trained")
    device = argument("--device", default="auto", help="auto, cpu, cuda, mps (default: auto)")
    add(
        _evaluate,
        run_folder,
        argument("--data", metavar="DATASET", help="evaluate the model on this dataset, by the names of its classes"),
        argument("--split", choices=("train", "val", "test"), help="of --data (default: test)"),
        argument("--out", help="folder for the outputs and metrics of --data"),
        argument(
            "--features", action="store_true", help="write the features h and the weights W and b too, for analyze"
        ),
        argument("--ood", metavar="DATASETS", help="comma-separated: tell their images from those that RUN evaluated"),
        argument("--root", metavar="DIR", help="folder of the published datasets"),
        head,
        device,
    )
    add(
        _predict,
        run_folder,
        argument("inputs", nargs="+", metavar="IMAGE", help="image files, folders of images, or tables"),
        argument("--top", type=int, default=5, metavar="K", help="classes for each image (default: 5)"),
        argument("--format", choices=("text", "csv", "json"), default="text", help="(default: text)"),
        head,
        device,
    )
    add(_export, run_folder, argument("path", metavar="FILE", help="model.onnx or model.pt2"), head)
    add(
        _reproduce,
        argument("table", help="table1 ... table4, scaled, or figure3 ... figure8 from finished runs"),
        changes,
        argument("--row", help="one row, or a family such as vgg-cifar10 (see gsoftmax recipes)"),
        argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 ... N-1 (default: 1)"),
        argument("--jobs", type=int, default=1, metavar="J", help="number of parallel runs (default: 1)"),
        shorten,
        argument("--out", default="runs/reproduce", help="folder of the runs (default: runs/reproduce)"),
        argument("--figures", default="svg", help="of figures: svg, png, pdf, comma-separated (default: svg)"),
        data,
        smoke,
    )
    report = (
        argument("--out", help="folder to write to"),
        argument("--tables", default="md,tex,csv", help="md, tex, csv, txt, comma-separated (default: md,tex,csv)"),
        argument("--figures", default="svg", help="svg, png, pdf, comma-separated (default: svg)"),
        argument("--class", dest="class_name", metavar="NAME", help="class of the single-class figures"),
    )
    outputs = "x (N, C), y (N,) or (N, C), optionally p, names, mu, sigma, lam, features h (N, D), W (C, D), b"
    against = argument(
        "--against",
        metavar="OTHER",
        action="append",
        default=[],
        help="another model's outputs on the same images; repeatable",
    )
    add(_analyze, argument("outputs", metavar="OUTPUTS", help=outputs), against, *report)
    paper = argument("--paper", metavar="DIR", help="the paper's tables with the runs of `gsoftmax reproduce` in DIR")
    add(_report, argument("runs", nargs="*", metavar="RUN"), paper, data, *report)
    for run in (_datasets, _recipes, _heads):
        add(run)
    add(_completion, argument("shell", choices=completion.SHELLS))
    return root


def split_changes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for argparse, and the `key=value` among them, which may appear anywhere.

    >>> split_changes(["train", "lr=1", "digits", "--out", "a=b"])
    (['train', 'digits', '--out', 'a=b'], ['lr=1'])
    """
    words: list[str] = []
    changes: list[str] = []
    takes_value = False
    for word in argv:
        is_change = re.match(r"[A-Za-z_][\w.]*=", word) and not takes_value
        (changes if is_change else words).append(word)
        takes_value = word.startswith("--") and "=" not in word and word not in FLAGS
    return words, changes


def parse_changes(pairs: Sequence[str]) -> dict[str, Any]:
    """
    >>> parse_changes(["epochs=30", "head=gsoftmax"])
    {'epochs': 30, 'head': 'gsoftmax'}
    """
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"changes are written key=value, got {pair!r}")
    return {key: config.parse_value(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def split_words(text: str) -> list[str]:
    """
    >>> split_words("md, tex")
    ['md', 'tex']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def find_config(what: str, changes: Sequence[str], smoke: bool = False) -> config.Config:
    """The configuration of a recipe, or the default one for a dataset."""
    if what in recipes.recipes():
        return recipes.find(what).config(parse_changes(changes), smoke=smoke)
    if what.startswith("arff:"):
        return recipes.find("tables").config({"data": what} | parse_changes(changes))
    datasets = [info.name for info in catalog.DATASETS]
    if gsoftmax.data.parse(what)[0] not in {"folder", "csv", "npz", "mosaic", *datasets}:
        meant = gsoftmax.data.by_path(what)
        hint = f", did you mean {meant}" if meant else messages.did_you_mean(what, {*recipes.recipes(), *datasets}, 3)
        hint = hint or "; `gsoftmax recipes` and `gsoftmax datasets` list them"
        raise ValueError(f"{what!r} is neither a recipe nor a dataset{hint}")
    return config.Config(data=what).override(parse_changes(changes))


def open_config(what: str, changes: dict[str, Any], data_root: str | None, shorten: float = 1.0) -> config.Config:
    """The configuration of `find_config`, shortened, with what photos leave open chosen, and with the changes."""
    base = find_config(what, [])
    free = [key for key in gsoftmax.photos.FREE if key not in changes]
    chosen = gsoftmax.photos.choose(base.override(changes), data_root, free)
    return recipes.shortened(base.override(chosen), shorten).override(changes)


def _duration(seconds: float) -> str:
    """
    >>> _duration(8), _duration(130), _duration(9000)
    ('about 8 seconds', 'about 2 minutes', 'about 2.5 hours')
    """
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"about {seconds / length:.{1 if unit == 'hours' else 0}f} {unit}"
    return f"about {seconds:.0f} seconds" if seconds >= 1.5 else "about 1 second"


def _check_counts(args: argparse.Namespace, *options: str) -> None:
    for option in options:
        if (value := getattr(args, option)) is not None and value < 1:
            raise ValueError(f"--{option} must be 1 or more, got {value}")


def _folder(what: str, out: str | None) -> Path:
    family, argument, _ = gsoftmax.data.parse(what)
    name = what.removeprefix(f"{family}:") if argument else what  # runs/photos of folder:photos
    return Path(out) if out else Path("runs") / gsoftmax.runs.folder_name(Path(name).name or name)


def _compare(args: argparse.Namespace) -> None:
    """Train heads under identical conditions over several seeds, and report what changed.

    examples:
      gsoftmax compare folder:photos                      # photos/<class>/*.jpg; also csv:labels.csv, npz:table.npz
      gsoftmax compare digits --heads 'softmax,gsoftmax(lam=4,gaussians=tracked)' --seeds 10 --out runs/tracked
      gsoftmax compare digits --tune 12 --heads 'softmax,gsoftmax(lam=0.5|1|4|16)'      # every head tuned alike
    """
    if config.world_size() > 1:
        raise ValueError("compare starts its own processes, as many as --jobs says; torchrun is for gsoftmax train")
    _check_counts(args, "seeds", "jobs", "tune")
    for option in ("space", "minutes"):
        if getattr(args, option) is not None and args.tune is None:
            raise ValueError(f"--{option} belongs to --tune")
    if args.only is not None and args.tune is not None:
        raise ValueError("--only cannot be used with --tune, whose trials depend on one another")
    only = _part(args.only or "1/1")
    heads = gsoftmax.compare.split_heads(args.heads) if args.heads else None
    # One thread per run: --jobs decides how many cores are busy, and results do not depend on it.
    changes = {"threads": 1} | _changes_of_many(args)
    out = _out(args)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    plan: Any
    if args.tune is not None:
        if recipes.family(args.what):
            raise ValueError(f"--tune is for a recipe or a dataset, and {args.what} is a family of rows")
        base = open_config(args.what, changes, args.data, args.shorten)
        options = {"trials": args.tune, "minutes": args.minutes, "data_root": args.data}
        options["space"] = gsoftmax.tune.parse_space(args.space) if args.space is not None else None
        tuning = gsoftmax.tune.Tuning(base, heads, seeds, out, **options)
        plan, names = tuning, list(tuning.defaults)
        _plan(args, tuning.comparison, f"{messages.plural(args.tune, 'trial')} each", tuning.planned(args.tune))
    elif rows := recipes.family(args.what):
        configs = gsoftmax.compare.of_rows(rows, heads, changes, args.shorten)
    else:
        base = open_config(args.what, changes, args.data, args.shorten)
        configs = gsoftmax.compare.of_heads(base, heads, args.data)
    if args.tune is None:
        plan = gsoftmax.compare.Comparison(configs, seeds, out, args.data, only)
        names = plan.heads
        _plan(args, plan, messages.plural(args.seeds, "seed"), len(plan.mine))
    failed, broken = None, ""
    try:
        found = plan.run(args.jobs, _display(args))
    except KeyboardInterrupt:
        args.hint += _finished_hint(out, plan)
        raise
    except gsoftmax.workers.Failed as error:
        failed, found = error, gsoftmax.summary.so_far(out)
        if args.debug:
            print(*filter(None, error.traces), sep="\n", file=sys.stderr)
    _clear()
    if found is not None:
        args.hint = f" while the report was being made; all finished runs are kept{args.hint}"
        broken = _show_comparison(args, found, f"{args.what}: {', '.join(names)}")
    elif failed is None:
        missing = sum(not gsoftmax.workers.is_done(task) for task in plan.tasks)
        _tell(f"{messages.plural(missing, 'run')} of other processes missing; gsoftmax report {out} shows the others")
    if failed is not None or broken:
        again = "run the same command again to continue" if failed is not None else ""
        raise _Incomplete("; ".join(filter(None, [str(failed or ""), broken, again])))


def _finished_hint(out: Path, plan: Any) -> str:
    """What shows the finished runs of a comparison that was stopped; empty while there are none."""
    tasks = getattr(plan, "comparison", plan).tasks  # of a tuning
    with contextlib.suppress(ValueError, OSError):
        done = sum(gsoftmax.runs.read_result(task.out) is not None for task in tasks)
        if done and (out / gsoftmax.summary.PLAN).exists():
            runs = f"{done:,} finished runs" if done > 1 else "finished run"
            return f"; gsoftmax report {shlex.quote(str(out))} shows the {runs}"
    return ""


def _changes_of_many(args: argparse.Namespace) -> dict[str, Any]:
    """The changed keys of runs over several seeds."""
    changes = parse_changes(args.changes)
    if "seed" in changes:
        first = ", beginning with --first-seed" * hasattr(args, "first_seed")
        raise ValueError(f"{args.command} has as many seeds as --seeds says{first}; seed cannot be set")
    return changes


def _part(text: str) -> tuple[int, int]:
    """
    >>> _part("2/8")
    (2, 8)
    """
    if not (match := re.fullmatch(r"(\d+)/(\d+)", text)):
        raise ValueError(f"--only is written K/N, as in 2/8, got {text!r}")
    return int(match[1]), int(match[2])


def _plan(args: argparse.Namespace, plan: Any, size: str, runs: int) -> None:
    """Says what a comparison is going to do, in `runs` runs at most."""
    first = plan.tasks[0].config
    told = ((head, recipes.changed(task.config)) for head, task in zip(plan.heads, plan.tasks, strict=False))
    changed = {"not_recipe": {head: text for head, text in told if text}}
    if args.json:
        described = {"data": plan.dataset.summary(), "heads": plan.heads, "seeds": plan.seeds, "out": str(plan.out)}
        _tell(json.dumps({"event": "comparison", **described, **changed, "epochs": first.epochs, "tune": args.tune}))
        return
    _tell(f"{plan.dataset.summary()}; {', '.join(plan.heads)}; {size} -> {plan.out}")
    for note in filter(None, [gsoftmax.reproduce.not_recipe(changed), *plan.dataset.notes]):
        _tell(note)
    jobs = max(1, min(args.jobs or gsoftmax.workers.default_jobs(first), runs))
    left = runs
    if args.tune is None:
        mine, epochs = messages.plural(runs, "run"), messages.plural(first.epochs, "epoch")
        part = f" of the {len(plan.tasks)} of this comparison" * (runs < len(plan.tasks))
        finished = sum(map(gsoftmax.workers.is_done, plan.mine))
        left -= finished
        _tell(f"{mine}{part}, {epochs} each, {jobs} at a time; {finished} finished before")
    if first.image_size is not None and left:
        start = time.perf_counter() - args.started  # libraries and data, which every process loads as this one did
        each = gsoftmax.train.seconds_per_run(first, plan.dataset)
        times = f"{_duration(each)} per run, {_duration(start + -(-left // jobs) * each)} in all until the report"
        _tell(f"{gsoftmax.photos.describe(first)}; {times}, as measured by a few steps")


def _show_comparison(args: argparse.Namespace, found: Any, title: str) -> str:
    """Writes the page, then prints the tables: where nobody reads them the page is there; returns what is damaged."""
    made, out = gsoftmax.summary, _out(args)
    page, shown, broken = None, "", ""
    try:
        with gsoftmax.workers.locked_when_free(out):
            page = shown = str(gsoftmax.report.write_page(found, out, _titled(title, found), args.data))
    except ValueError as error:  # the runs and their numbers are there all the same
        broken = made.damaged(found, out)
        shown = f"no page was written: {broken or error}"
    if args.json:
        told = {"path": page, "verdicts": made.verdicts(found), "incomplete": found.get("incomplete")}
        _tell(json.dumps({"event": "report", **told}))
        return broken and f"{shown}; remove its folder and run the same command again"
    tests = [*made.differences(found), *made.over_images_tables(found)]
    for table in (*made.tuning_tables(found), made.means(found), *tests):
        print(f"\n{table.text()}")
    if broken and len(found["heads"]) > 1:
        print(f"\nno test over images: {broken}")
    print()
    for sentence in made.verdicts(found):
        print(textwrap.fill(tables.plain(sentence), 100, subsequent_indent="  "))
    if not broken:
        print(f"\n{shown}")
    return broken and f"{shown}; remove its folder and run the same command again"


def _out(args: argparse.Namespace) -> Path:
    """The folder of a comparison."""
    return _folder(args.what if args.tune is None else f"{args.what}-tuned", args.out)


def _train(args: argparse.Namespace) -> None:
    """Train one recipe or dataset and write a run folder.

    examples:
      gsoftmax train digits head=gsoftmax head_options.lam=2 --out runs/lam2
      gsoftmax train wrn-cifar100-gsoftmax --data ~/data amp=bf16 --resume     # starts or continues
      gsoftmax train coco-softmax --smoke                 # a quick trial: two epochs on generated files
    """
    out = _folder(args.what, args.out)
    result = _run_recipe(args, args.what, out, args.resume)
    if not _is_rank0():
        return
    if args.json:
        _tell(json.dumps({"event": "result", "run": str(out), "smoke": args.smoke, "metrics": result}))
        return
    keys = ("error", "mAP", "compactness", "separability", "ratio", "nll", "ece", "seconds")
    for note in gsoftmax.runs.notes([out]):
        _tell(note)
    _show_numbers({key: result[key] for key in keys if key in result}, ".4f", result)
    headline = gsoftmax.measures.headline("mAP" in result).key
    if best := gsoftmax.reproduce.best_epoch(out, headline):
        value = _number(headline, best[headline], ".4f")
        label = gsoftmax.measures.find(headline).label
        print(f"{label} of the best epoch, {best['epoch']}, chosen on the evaluated data: {value}")
    print(f"{out}" + (" (smoke: small generated data, not a result)" if args.smoke else ""))


def _show_numbers(shown: dict[str, Any], form: str, result: dict[str, Any]) -> None:
    """Prints some numbers of a result, without class geometry where the model is at chance level."""
    warning = gsoftmax.summary.at_chance([result])
    if warning:
        shown = {k: v for k, v in shown.items() if k.removeprefix("train_") not in gsoftmax.measures.GEOMETRY}
    labels = {key: gsoftmax.measures.find(key).label for key in shown}
    width = 2 + max(12, *map(len, labels.values()))
    for key, value in shown.items():
        print(f"{labels[key]:{width}}{_number(key, value, form)}")
    if warning:
        print(f"{warning}: no geometry is shown")


def _number(key: str, value: float, form: str) -> str:
    """A result for reading: fractions in percent, as in tables."""
    measure = gsoftmax.measures.find(key)
    return f"{measure.scale * value:{form}}" + " %" * measure.percent


def _run_recipe(args: argparse.Namespace, what: str, out: Path, resume: bool) -> dict[str, Any]:
    base = find_config(what, args.changes, args.smoke)
    try:
        with tempfile.TemporaryDirectory() if args.smoke else contextlib.nullcontext(args.data) as root:
            if args.smoke and base.data in gsoftmax.data.SMOKE_NAMES:
                base = base.override({"data": gsoftmax.data.write_smoke(base.data, root)})
            elif not args.smoke:
                base = open_config(what, parse_changes(args.changes), root)
            return gsoftmax.train.train(base, out, data_root=root, resume=resume, progress=_display(args))
    finally:
        _clear()


def _evaluate(args: argparse.Namespace) -> None:
    """Recompute the metrics of a run from its saved outputs, or evaluate its model on other data.

    examples:
      gsoftmax evaluate runs/lam2
      gsoftmax evaluate runs/lam2 --data folder:photos --out runs/lam2-photos     # then: gsoftmax analyze
      gsoftmax evaluate runs/lam2 --features --out runs/lam2-features             # h, W, b: gsoftmax analyze
      gsoftmax evaluate runs/lam2 --ood folder:textures                           # unknown images, detected by score
    """
    models, options = gsoftmax.models, {"root": args.root}
    if args.features and args.out is None:
        raise ValueError("--features needs --out, a folder for the features")
    again = args.data is not None or args.features
    if not again and (given := [name for name in ("split", "out") if getattr(args, name) is not None]):
        raise ValueError(f"--{given[0]} belongs to --data")
    if not again and not args.ood:
        outputs = models.saved_outputs(args.run_folder)
        result = gsoftmax.evaluation.score(*(outputs[k] for k in "xpy"))
    else:
        model, result = models.load(args.run_folder, head=args.head, device=args.device), {}
        if again:
            data, of = args.data or model.config.data, {"split": args.split or "test", "out": args.out}
            result, _ = models.evaluate(model, data, features=args.features, **of, **options)
        if args.ood:
            result = {**result, **models.detect(model, args.run_folder, split_words(args.ood), **options)}
    _show_numbers(result, ".6g", result)


def _predict(args: argparse.Namespace) -> None:
    """Classify images, or the rows of a table, with the model of a finished run.

    examples:
      gsoftmax predict runs/photos/softmax/seed-0 cat.jpg more-photos
      gsoftmax predict runs/photos/softmax/seed-0 more-photos --top 1 --format csv > classes.csv
      gsoftmax predict runs/table rows.csv                 # for a table .csv, or .npz with an array x
    """
    models, ticker = gsoftmax.models, _ticker()
    if args.top < 1:
        raise ValueError(f"--top must be 1 or more, got {args.top}")
    model, found = models.load(args.run_folder, head=args.head, device=args.device), []
    try:
        for one in models.predict(model, args.inputs):
            found.append(one)
            if ticker and len(found) % 64 == 0:
                ticker(f"{len(found):,} predicted")
    finally:
        _clear()
    print(models.predictions_text(model, found, args.top, args.format))
    if failed := [one.error for one in found if one.error]:
        raise ValueError(f"{len(failed)} of {len(found)} could not be read; the first: {failed[0]}")


def _export(args: argparse.Namespace) -> None:
    """Write the model of a finished run as one file, from pixels to probabilities, that runs without this package.

    examples:
      gsoftmax export runs/photos/softmax/seed-0 photos.onnx
      gsoftmax export runs/photos/softmax/seed-0 photos.pt2     # for torch.export.load
    """
    model = gsoftmax.models.load(args.run_folder, head=args.head)
    gsoftmax.models.export(model, args.path)
    print(args.path)


def _reproduce(args: argparse.Namespace) -> None:
    """Run a table of the paper and print the published numbers and ours, or draw a figure from finished runs.

    examples:
      gsoftmax reproduce table1 --smoke                   # every row, two epochs on generated files
      gsoftmax reproduce table3 --row 'coco-gsoftmax(0,1)' --data ~/data
      gsoftmax reproduce table1 --row vgg-cifar10 --seeds 3 --shorten 10 --data ~/data
      gsoftmax reproduce figure6                          # from the runs of table1 --row wrn-cifar10
    """
    _check_counts(args, "seeds", "jobs")
    reproduce = gsoftmax.reproduce
    if args.table.startswith("figure"):
        training = {"shorten": 1, "seeds": 1, "jobs": 1, "data": None}
        given = [*args.changes, *(f"--{key}" for key, default in training.items() if getattr(args, key) != default)]
        if given:
            raise ValueError(f"{args.table} is drawn from finished runs and takes no {given[0]}")
        rows = None if args.row is None else reproduce.rows_of_heads(args.row)
        folder = Path(args.out) / ("smoke" if args.smoke else "")
        made = gsoftmax.report.paper.figure(args.table, folder, folder, split_words(args.figures), rows)
        print("\n\n".join(table.text() for table in made[0]), *made[1], sep="\n")
        return
    rows = reproduce.find_rows(args.table, args.row)
    changes = _changes_of_many(args)
    if args.jobs > 1:
        changes = {"threads": 1} | changes
    plan = reproduce.Plan(changes, args.smoke, args.shorten)
    with tempfile.TemporaryDirectory() if args.smoke else contextlib.nullcontext(args.data) as root:
        for name in sorted({plan.config(row).data for row in rows}) if args.smoke else ():
            gsoftmax.data.write_smoke(name, root)
        todo = reproduce.tasks(rows, range(args.seeds), args.out, plan, root)
        try:
            gsoftmax.workers.run_tasks(todo, args.jobs, _display(args))
        finally:
            _clear()
    if _is_rank0():
        for note in gsoftmax.runs.notes(task.out for task in todo):
            _tell(note)
        found = []
        for row in rows:
            folder = reproduce.folder(args.out, row.name, args.smoke)
            found.append((row, reproduce.read_seeds(row, folder, range(args.seeds))))
        print(reproduce.table(args.table, found).text())


def _analyze(args: argparse.Namespace) -> None:
    """Metrics and class geometry of any model from a file of its outputs: .npz, .safetensors or .csv with x and y.

    measures:
      compactness      1/sigma of a class's own output; depends on the scale of x
      separability     mean symmetric KL divergence of the own Gaussian from the impostors'
      ratio            separability / sigma; depends on the scale of x
      relative sigma   sigma / distance to the nearest impostor's mean; smaller is tighter
      d'               mean distance to the impostors in units of the pooled deviation
      with features h (and W for NC3), 0 in full collapse:
      NC1              tr(Sigma_W Sigma_B^+) / C, variability within classes
      NC2              norms of the centred class means, their angles, distance from a simplex
      NC3              |W/|W| - M/|M||, W against the centred class means M
      NC4              disagreement of the nearest class mean and the model
      Fisher ratio     sum of squares between classes / within classes
      effective rank   exp of the entropy of the singular values of h
    p-values are corrected by Holm's method for all models and measures. docs/analyse.md has formulas and references.

    examples:
      gsoftmax analyze softmax.npz --against mine.npz --against other.npz      # models on the same images
      gsoftmax analyze runs/lam2-features                 # with neural collapse, after gsoftmax evaluate --features
    """
    files = ", ".join(map(str, (args.outputs, *args.against)))
    with progress.told_late(lambda: _say(f"still reading {files}; large files take minutes")):
        doc = gsoftmax.report.from_outputs(args.outputs, *args.against)
    _write_report(args, doc, f"{Path(args.outputs).stem}-report")


def _report(args: argparse.Namespace) -> None:
    """Write tables, figures and the page of run folders or of a comparison's folder.

    examples:
      gsoftmax report runs/digits --figures svg,pdf --class 7
      gsoftmax report runs/softmax runs/lam2 --out both
      gsoftmax report --paper runs/reproduce --tables tex
    """
    report = gsoftmax.report
    if args.paper and args.runs:
        raise ValueError(f"report takes run folders or --paper DIR, not both, got {args.runs[0]} and {args.paper}")
    if args.paper:
        made, paths = report.write_paper_tables(args.paper, args.out or "paper-tables", split_words(args.tables))
        print("\n\n".join(table.text() for table in made), *paths, sep="\n")
    else:
        _write_report(args, _document(args), args.runs[0] if len(args.runs) == 1 else "report")


def _document(args: argparse.Namespace) -> Any:
    """The document of runs, or of a comparison with as many runs as it has by now."""
    found = gsoftmax.summary.so_far(args.runs[0]) if len(args.runs) == 1 else None
    if found is None:
        return gsoftmax.report.from_runs(args.runs, data_root=args.data)
    title = _titled(Path(args.runs[0]).resolve().name, found)
    return gsoftmax.report.from_comparison(found, args.runs[0], title, args.data)


def _titled(title: str, found: Any) -> str:
    """The title of a comparison's report."""
    title += " (not the paper's recipe)" if found.get("not_recipe") else ""
    return f"{title} (incomplete: {found['incomplete']})" if "incomplete" in found else title


def _write_report(args: argparse.Namespace, doc: Any, out: str) -> None:
    print(gsoftmax.report.terminal(doc), end="\n\n")
    options = {"tables": split_words(args.tables), "figures": split_words(args.figures), "name": args.class_name}
    print(*gsoftmax.report.write(doc, args.out or out, **options), sep="\n")


def _datasets(args: argparse.Namespace) -> None:
    """List datasets: shapes, sources, the layout of the folder.

    example:
      gsoftmax datasets                                   # then: gsoftmax compare folder:photos
    """
    for info in catalog.DATASETS:
        print(info.name, *(textwrap.indent(part, "    ") for part in (info.size, info.source, info.layout)), sep="\n")


def _recipes(args: argparse.Namespace) -> None:
    """List recipes with the published numbers.

    example:
      gsoftmax recipes                                    # then: gsoftmax train NAME --smoke
    """
    for name, recipe in recipes.recipes().items():
        told = ", ".join(f"{k} {v:g}" for k, v in recipe.published.items())
        print(f"{recipe.table:8}{name:32}{told or f'scaled from {recipe.scaled}' * bool(recipe.scaled)}")


def _heads(args: argparse.Namespace) -> None:
    """List heads and their options.

    example:
      gsoftmax heads                                      # then: gsoftmax compare --heads 'softmax,gsoftmax(lam=2)'
    """
    for head in catalog.heads():
        options = ", ".join(f"{name}={default}" for name, default in head.options.items())
        print(f"{head.name}\n    {head.summary}\n    {options}")
    print("package.module:ClassName\n    your own: an nn.Module with features(h), loss(h, target) and predict_proba(h)")


def _completion(args: argparse.Namespace) -> None:
    """Print a script that completes commands, options and names in a shell.

    examples:
      gsoftmax completion bash > ~/.local/share/bash-completion/completions/gsoftmax
      gsoftmax completion zsh > ~/.zfunc/_gsoftmax         # a folder of $fpath, before compinit in ~/.zshrc
      gsoftmax completion fish > ~/.config/fish/completions/gsoftmax.fish
    """
    print(completion.script(args.shell), end="")
