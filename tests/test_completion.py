"""The completion scripts, typed into real shells: what the command is given after the tab key."""

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

from gsoftmax import data, recipes
from gsoftmax.cli import _parser
from gsoftmax.completion import SHELLS, _commands, places, script
from gsoftmax.config import Config, parse_value
from gsoftmax.heads import HEADS

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
# `gsoftmax` becomes a function that prints what it is given
SETUP = {
    "bash": "source ./script; gsoftmax() { printf '<%s>' \"$@\"; echo EN''D; }",
    "zsh": "autoload -U compinit; compinit -u -D; source ./script; gsoftmax() { printf '<%s>' \"$@\"; echo EN''D; }",
    "fish": "source ./script; function gsoftmax; printf '<%s>' $argv; echo EN''D; end",
}
TYPED = {
    "compa\t digits": "<compare><digits>",
    "analyze here/outp\t": "<analyze><here/outputs.npz>",
    "compare --hea\tsoftmax,gs\t": "<compare><--heads><softmax,gsoftmax>",
    "compare --heads=softmax,ls\t": "<compare><--heads=softmax,lsoftmax>",
    "compare --see\t3 ep\t5": "<compare><--seeds><3><epochs=5>",
    "compare epochs=3 cifar10-f\t": "<compare><epochs=3><cifar10-fast>",
    "compare dig\t-mo\t": "<compare><digits-mosaic>",
    "compare fold\there/pho\t": "<compare><folder:here/photos{slash}>",
    "train digits head=gs\t": "<train><digits><head=gsoftmax>",
    "train digits head_options.la\t2": "<train><digits><head_options.lam=2>",
    "train digits data=npz:here/outp\t": "<train><digits><data=npz:here/outputs.npz>",
    "train digits amp=b\t--res\t": "<train><digits><amp=bf16><--resume>",
    "train 'nuswide-gsoftmax(-\t": "<train><nuswide-gsoftmax(-0.05,1)>",
    "train nuswide-gsoftmax\\(-\t": "<train><nuswide-gsoftmax(-0.05,1)>",
    "train nuswide-g\t-\t": "<train><nuswide-gsoftmax(-0.05,1)>",
    "reproduce tab\t1 --row wrn1100-cifar100-g\t": "<reproduce><table1><--row><wrn1100-cifar100-gsoftmax>",
    "report here/pho\t": "<report><here/photos{slash}>",
    "report --tables md,te\t": "<report><--tables><md,tex>",
    "train digits --out=here/pho\t": "<train><digits><--out=here/photos{slash}>",
    "train digits --out here/outp\t": "<train><digits><--out><here/outp>",  # a file is no folder
    "compare --seeds d\t": "<compare><--seeds><d>",  # a number is asked for
}


class Terminal:
    """A shell that believes a person is typing."""

    def __init__(self, shell: str, folder: Path) -> None:
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        environment["INPUTRC"] = os.devnull  # not what the machine says of the tab key
        # a process of its own, because forking one that has threads is unsafe
        command = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *START[shell]]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.say(SETUP[shell] + "; echo REA''DY\n", "READY")
        self.say("gsoftmax first\n", "<first>END")

    def say(self, text: str, until: str, seconds: float = 300) -> str:
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
    (tmp_path / "here" / "photos").mkdir(parents=True)
    (tmp_path / "here" / "outputs.npz").touch()
    wrong = {}
    with Terminal(shell, tmp_path) as terminal:
        for typed, expected in TYPED.items():
            heard = terminal.say(f"gsoftmax {typed}\n", "END")
            got = re.findall(r"((?:<[^<>\r\n]*>)+)END", heard)
            if not got or got[-1] != expected.format(slash="" if shell == "zsh" else "/"):
                wrong[typed] = got or heard
    assert not wrong


@pytest.mark.parametrize("shell", [s for s in SHELLS if shutil.which(s)])
def test_script_is_sound_for_its_shell(shell, tmp_path):
    (tmp_path / "script").write_text(script(shell), "utf-8")
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}  # a shell warns of a locale that is not installed
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_table_follows_the_parser():
    parser = _parser()
    table = places(parser)
    assert set(table[""].words) == set(_commands(parser))
    for name, command in _commands(parser).items():
        flags = {flag for action in command._actions for flag in action.option_strings}
        assert set(table[f"{name} -"].words) == flags
        for action in command._actions:
            for flag in action.option_strings:
                assert (f"{name} {flag}" in table) == (action.nargs != 0), (
                    "exactly the options with a value have a place"
                )


def test_an_option_takes_a_value_everywhere_or_nowhere():
    """The scripts hold one list of them for all commands."""
    actions = [a for command in _commands(_parser()).values() for a in command._actions]
    takes = {flag for a in actions if a.nargs != 0 for flag in a.option_strings}
    assert takes and not takes & {flag for a in actions if a.nargs == 0 for flag in a.option_strings}


def test_names_are_those_of_the_package():
    table = places(_parser())
    assert set(recipes.recipes()) <= set(table["train 0"].words)
    assert {"cifar100", "folder:", "npz:", "arff:", "mosaic("} <= set(table["train 0"].words)
    assert len(data.describe()) == len(table["data="].words)
    assert list(table["compare --heads"].words) == list(HEADS)


def test_keys_and_values_are_accepted_by_the_configuration():
    table = places(_parser())
    keys = [word for word in table["train *"].words if word.endswith("=")]
    assert {"epochs=", "head_options.lam=", "schedule.name="} <= set(keys)
    offered = {key: [*table[key].words] for key in keys if key in table}
    assert {"amp=", "head=", "nesterov=", "init=", "schedule.name="} <= set(offered)
    for key, values in offered.items():
        for value in values:
            Config().override({key[:-1]: parse_value(value)})


def test_recipes_are_left_out_where_they_cannot_be_read(monkeypatch):
    def without_yaml():
        raise ValueError("recipes need PyYAML")

    monkeypatch.setattr(recipes, "recipes", without_yaml)
    words = places(_parser())["train 0"].words
    assert "digits" in words and "cifar10-fast" not in words


def test_unknown_shell():
    with pytest.raises(ValueError, match="shell must be one of bash, zsh, fish, got 'tcsh'"):
        script("tcsh")
