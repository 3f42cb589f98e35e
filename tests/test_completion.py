"""Shell completion: what the command receives after the tab key is pressed in real shells, and what is offered."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gsoftmax import completion, data, recipes
from gsoftmax.cli import FLAGS, parser
from gsoftmax.completion import SHELLS, commands, completer, keys, script, values
from gsoftmax.config import Config, parse_value
from gsoftmax.heads import HEADS
from gsoftmax.report import figures

ACTIONS = {(name, a.dest): a for name, command in commands(parser()).items() for a in command._actions}
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SETUP = {"bash": "", "zsh": "autoload -U compinit; compinit -u -D; ", "fish": ""}
# A command that completes like gsoftmax, and otherwise prints its arguments.
PROGRAM = f"""#!/bin/sh
if [ -n "$_ARGCOMPLETE" ]; then exec {sys.executable} -m gsoftmax; fi
printf '<%s>' "$@"; echo END
"""
TYPED = {
    "compa\t digits": "<compare><digits>",
    "analyze here/outp\t": "<analyze><here/outputs.npz>",
    "compare --hea\tsoftmax,gs\t": "<compare><--heads><softmax,gsoftmax>",
    "compare --heads=softmax,ls\t": "<compare><--heads=softmax,lsoftmax>",
    "compare --see\t3 ep\t5": "<compare><--seeds><3><epochs=5>",
    "compare epochs=3 cifar10-f\t": "<compare><epochs=3><cifar10-fast>",
    "compare dig\t-mo\t": "<compare><digits-mosaic>",
    "compare fold\there/pho\t": "<compare><folder:here/photos/>",
    "train digits head=gs\t": "<train><digits><head=gsoftmax>",
    "train digits head_options.la\t2": "<train><digits><head_options.lam=2>",
    "train digits --out here amp=b\t": "<train><digits><--out><here><amp=bf16>",
    "train digits data=npz:here/outp\t": "<train><digits><data=npz:here/outputs.npz>",
    "train digits amp=b\t--res\t": "<train><digits><amp=bf16><--resume>",
    "train 'nuswide-gsoftmax(-\t": "<train><nuswide-gsoftmax(-0.05,1)>",
    "train nuswide-gsoftmax\\(-\t": "<train><nuswide-gsoftmax(-0.05,1)>",
    "train nuswide-g\t-\t": "<train><nuswide-gsoftmax(-0.05,1)>",
    "reproduce tab\t1 --row wrn1100-cifar100-g\t": "<reproduce><table1><--row><wrn1100-cifar100-gsoftmax>",
    "reproduce fig\t8": "<reproduce><figure8>",
    "predict here/pho\t here/outp\t": "<predict><here/photos/><here/outputs.npz>",
    "report here/pho\t": "<report><here/photos/>",
    "report --tables md,te\t": "<report><--tables><md,tex>",
    "train digits --out=here/pho\t": "<train><digits><--out=here/photos/>",
    "train digits --out here/outp\t": "<train><digits><--out><here/outp>",  # a file is no folder
    "compare --seeds d\t": "<compare><--seeds><d>",  # a number is asked for
}


class Terminal:
    """A shell that believes a person is typing."""

    def __init__(self, shell: str, folder: Path) -> None:
        environment = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TERM": "dumb",
            "LC_ALL": "C.UTF-8",
        }
        environment["INPUTRC"] = os.devnull  # the machine's settings for the tab key do not matter
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # a separate process, because forking one with threads is unsafe
        command = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *START[shell]]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.say(f"{SETUP[shell]}source ./script; echo REA''DY\n", "READY")
        self.say("gsoftmax first\n", "<first>END")

    def say(self, text: str, until: str, seconds: float = 100) -> str:
        self.process.stdin.write(text.encode())
        heard, end = "", time.monotonic() + seconds
        while until not in heard:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {until!r} after {text!r}: {heard[-500:]!r}"
            new = os.read(self.process.stdout.fileno(), 65536).decode(errors="replace")
            assert new, f"the shell ended after {text!r}: {heard[-500:]!r}"
            heard += new
        return heard

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # the shell sees its terminal go away
        self.process.communicate()


@pytest.mark.parametrize(
    "shell",
    [pytest.param(s, marks=pytest.mark.skipif(not shutil.which(s), reason=f"{s} is not installed")) for s in SHELLS],
)
def test_what_the_tab_key_writes(shell, tmp_path):
    (tmp_path / "script").write_text(script(shell), "utf-8")
    (tmp_path / "gsoftmax").write_text(PROGRAM, "utf-8")
    (tmp_path / "gsoftmax").chmod(0o755)
    (tmp_path / "here" / "photos").mkdir(parents=True)
    (tmp_path / "here" / "outputs.npz").touch()
    wrong = {}
    with Terminal(shell, tmp_path) as terminal:
        for typed, expected in TYPED.items():
            heard = terminal.say(f"gsoftmax {typed}\n", "END")
            got = re.findall(r"((?:<[^<>\r\n]*>)+)END", heard)
            if not got or got[-1] != expected:
                wrong[typed] = got or heard
    assert not wrong


def test_a_tab_does_not_import_torch(tmp_path):
    line = "gsoftmax train digits head=gs"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"), "COMP_LINE": line}
    asked["COMP_POINT"] = str(len(line))
    code = "import sys; sys.modules['torch'] = None; from gsoftmax.cli import main; main()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | asked)
    assert (tmp_path / "out").read_text("utf-8") == "head=gsoftmax "


def test_flags_are_the_options_without_a_value():
    """They must be the same for all commands, because `split_changes` does not know the command."""
    options = {flag: a.nargs == 0 for a in ACTIONS.values() for flag in a.option_strings}
    assert all(options[flag] == (a.nargs == 0) for a in ACTIONS.values() for flag in a.option_strings)
    assert {flag for flag, alone in options.items() if alone} - {"-h", "--help"} == set(FLAGS)


def test_names_are_those_of_the_package():
    names = completer(ACTIONS["train", "what"])("")
    assert set(recipes.recipes()) <= set(names)
    assert {"cifar100", "folder:", "npz:", "arff:", "mosaic("} <= set(names)
    assert len(data.describe()) == len(values()["data"])
    assert list(completer(ACTIONS["compare", "heads"])("")) == list(HEADS)
    assert set(completion.AUGMENT) == set(data.PRESETS)
    assert set(completion.FIGURES) == set(figures.FORMATS)


def test_keys_and_values_are_accepted_by_the_configuration():
    assert {"epochs=", "head_options.lam=", "schedule.name="} <= set(keys())
    assert {"amp", "head", "nesterov", "init", "schedule.name"} <= set(values())
    assert {f"{key}=" for key in values()} <= set(keys())
    for key, words in values().items():
        for value in words:
            Config().override({key: parse_value(value)})


def test_recipes_are_left_out_where_they_cannot_be_read(monkeypatch):
    def without_yaml():
        raise ValueError("recipes need PyYAML")

    monkeypatch.setattr(recipes, "recipes", without_yaml)
    names = completer(ACTIONS["train", "what"])("")
    assert "digits" in names and "cifar10-fast" not in names
