"""Shell completion: scripts for bash, zsh and fish, made from the parser of the command line.

A script is one table, from the place on the line to what may stand there, and one function that finds the place and
looks it up.  Nothing of Python runs when the user presses the key.  The table's places are

    ""                  the commands
    "train -"           the options of a command
    "train --out"       the value of an option
    "train 0"           the first argument that is neither an option nor key=value; "report *" any of them
    "head="             the value of a key
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterable
from typing import NamedTuple

from . import catalog
from ._version import __version__
from .config import CHOICES, SCHEDULES, Config

__all__ = ["SHELLS", "places", "script"]

SHELLS = ("bash", "zsh", "fish")


class Offer(NamedTuple):
    """What may stand in a place: words and their help; a `list` takes several of them, separated by commas."""

    kind: str  # words, list, files or folders
    words: dict[str, str]


def script(shell: str) -> str:
    """The completion script of a shell, as text.

    shell: bash, zsh or fish

    >>> script("fish").splitlines()[-1]
    "complete -c gsoftmax -f -a '(__gsoftmax)'"
    """
    if shell not in SHELLS:
        raise ValueError(f"shell must be one of {', '.join(SHELLS)}, got {shell!r}")
    from .cli import _parser

    parser = _parser()
    table = "\n".join(_entry(shell, place, offer) for place, offer in places(parser).items())
    template = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[shell]
    values = sorted({flag for command in _commands(parser).values() for flag, _ in _flags(command, with_value=True)})
    return template.replace("@VERSION@", __version__).replace("@VALUES@", " ".join(values)).replace("@TABLE@", table)


def places(parser: argparse.ArgumentParser) -> dict[str, Offer]:
    """What may stand where, for the commands of `parser`.

    >>> from gsoftmax.cli import _parser
    >>> places(_parser())["compare --heads"].kind
    'list'
    """
    commands = _commands(parser)
    found = {"": Offer("words", {name: command.description or "" for name, command in commands.items()})}
    found[" -"] = Offer("words", _options(parser))
    keys, values = _keys()
    for name, command in commands.items():
        found[f"{name} -"] = Offer("words", _options(command))
        found |= {f"{name} {flag}": _values(action) for flag, action in _flags(command, True)}
        arguments = [a for a in command._actions if not a.option_strings]
        extra = keys if any(a.dest == "changes" for a in arguments) else {}
        for position, argument in enumerate(a for a in arguments if a.dest != "changes"):
            kind, words = _values(argument)
            found[f"{name} {'*' if argument.nargs in ('*', '+') else position}"] = Offer(kind, words | extra)
        if extra:
            found[f"{name} *"] = Offer("words", extra)
    return found | values


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _flags(parser: argparse.ArgumentParser, with_value: bool) -> list[tuple[str, argparse.Action]]:
    return [(f, a) for a in parser._actions for f in a.option_strings if a.nargs != 0 or not with_value]


def _options(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {f: (a.help or "").replace("%%", "%") for f, a in _flags(parser, False) if a.help != argparse.SUPPRESS}


def _values(action: argparse.Action) -> Offer:
    """What an argument or option takes: its choices, the names we know for it, or what its placeholder says."""
    from .report import figures
    from .tables import FORMATS

    if action.choices is not None:
        return Offer("words", dict.fromkeys(map(str, action.choices), ""))
    recipes = _recipes()
    known = {
        "what": ("words", [*recipes, *_datasets()]),
        "heads": ("list", [head.name for head in catalog.heads()]),
        "tables": ("list", FORMATS),
        "figures": ("list", figures.FORMATS),
        "table": ("words", dict.fromkeys(table for table, published in recipes.values() if published)),
        "row": ("words", [name for name, (_, published) in recipes.items() if published]),
        "out": ("folders", ()),
        "outputs": ("files", ()),
        "against": ("files", ()),
    }
    if action.dest in known:
        kind, words = known[action.dest]
        return Offer(kind, dict.fromkeys(words, ""))
    kinds = {"DIR": "folders", "RUN": "folders", "FILE": "files"}
    return Offer(kinds.get(str(action.metavar), "words"), {})


def _keys() -> tuple[dict[str, str], dict[str, Offer]]:
    """The keys of the configuration, as `epochs=`, and the values of those that have a few."""
    from .data import PRESETS

    options = {name: None for head in catalog.heads() for name in head.options}
    inside = {"head_options": options, "schedule": {"name": None}}
    keys: dict[str, str] = {}
    values: dict[str, Iterable[str]] = {
        **CHOICES,
        "augment": PRESETS,
        "backbone": [name.split("{")[0].removesuffix("NAME") for name in catalog.BACKBONES],
        "data": _datasets(),
        "device": ("auto", "cpu", "cuda"),
        "head": [head.name for head in catalog.heads()],
        "pool": ("avg", "max"),
        "schedule.name": SCHEDULES,
    }
    for field in dataclasses.fields(Config):
        if field.name in inside:
            keys |= {f"{field.name}.{name}=": "" for name in inside[field.name]}
        elif field.name.endswith("_options"):
            keys[f"{field.name}."] = ""
        else:
            keys[f"{field.name}="] = ""
        if isinstance(field.default, bool):
            values[field.name] = ("true", "false")
    return keys, {f"{key}=": Offer("words", dict.fromkeys(words, "")) for key, words in values.items()}


def _datasets() -> list[str]:
    return [info.name.removesuffix("PATH").removesuffix("DATASET)") for info in catalog.DATASETS]


def _recipes() -> dict[str, tuple[str, bool]]:
    """The table of every recipe, and whether the paper has a number for it; empty where recipes cannot be read."""
    from . import recipes

    try:
        return {name: (recipe.table, bool(recipe.published)) for name, recipe in recipes.recipes().items()}
    except ValueError:  # without PyYAML
        return {}


def _entry(shell: str, place: str, offer: Offer) -> str:
    """A line of the table, in the shell's own words."""
    both = [(word, " ".join(text.split())) for word, text in offer.words.items()]
    if place.endswith(" *"):
        pattern = shlex.quote(place[:-1]) + ("*" if shell != "fish" else "'*'")
    else:
        pattern = shlex.quote(place)
    if shell == "bash":
        return f"        {pattern}) kind={offer.kind} words={shlex.quote(' '.join(offer.words))} ;;"
    if shell == "zsh":  # name:help, with the colons of the name marked
        pairs = [w.replace("\\", "\\\\").replace(":", "\\:") + (f":{h}" if h else "") for w, h in both]
        return f"        {pattern}) kind={offer.kind} offers=({' '.join(map(shlex.quote, pairs))}) ;;"
    pairs = [f"{w}\t{h}" if h else w for w, h in both]
    return f"        case {pattern}\n            set kind {offer.kind}\n            set offers {_fish(pairs)}"


def _fish(words: Iterable[str]) -> str:
    return " ".join("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in words)


# The three functions below take the same steps: go over the words before the cursor, name the place, look it up, and
# offer what begins like the word.  `before` is the part of the word that stays: --heads=, head=, "softmax," or folder:

_BASH = r"""# bash completion for gsoftmax @VERSION@.  Keep it with
#   gsoftmax completion bash > ~/.local/share/bash-completion/completions/gsoftmax
# or in any file that ~/.bashrc reads.

_gsoftmax_place() {
    case "$1" in
@TABLE@
        *) return 1 ;;
    esac
}

_gsoftmax() {
    local command="" option="" before="" place="" kind="" words="" position=0 typed word offer quote
    local -a line
    COMPREPLY=()
    # The line itself, because bash takes words apart at = and :, and the x for a last word that is empty.
    read -r -a line <<< "${COMP_LINE:0:COMP_POINT}x"
    typed=${line[${#line[@]} - 1]%x}
    for word in "${line[@]:1:${#line[@]}-2}"; do
        if [[ $option ]]; then
            option=""
        elif [[ $word == -* ]]; then
            [[ " @VALUES@ " == *" $word "* ]] && option=$word
        elif [[ ! $word =~ ^[A-Za-z_][A-Za-z0-9_.]*= ]]; then
            if [[ $command ]]; then position=$((position + 1)); else command=$word; fi
        fi
    done
    quote=${typed%"${typed#[\'\"]}"}
    word=${typed#"$quote"}
    [[ $quote ]] || word=${word//\\/}
    if [[ $option ]]; then
        place="$command $option"
    elif [[ $word == -*=* ]]; then
        place="$command ${word%%=*}" before="${word%%=*}="
    elif [[ $word == -* ]]; then
        place="$command -"
    elif [[ $word =~ ^[A-Za-z_][A-Za-z0-9_.]*= ]]; then
        place="${word%%=*}=" before="${word%%=*}="
    else
        place=${command:+"$command $position"}
    fi
    _gsoftmax_place "$place" || return 0
    word=${word#"$before"}
    case "$word" in folder:* | npz:* | arff:*) kind=files ;; esac
    # An empty reply with these options is readline's own completion of file names.
    case "$kind" in
        files) compopt -o default 2> /dev/null; return 0 ;;
        folders) compopt -o dirnames 2> /dev/null; return 0 ;;
        list) if [[ $word == *,* ]]; then before+="${word%,*},"; word=${word##*,}; fi ;;
    esac
    # bash replaces only what comes after the last = or :, which is its second argument
    typed=${typed#"$quote"}
    local kept=${typed%"$2"}
    for offer in $words; do
        [[ $offer == "$word"* ]] || continue
        offer=$before$offer
        if [[ ! $quote && $offer == *[\(\)]* ]]; then printf -v offer %q "$offer"; fi
        COMPREPLY+=("${offer:${#kept}}")
    done
    if [[ $kind == list || (${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=:.\(-]) ]]; then
        compopt -o nospace 2> /dev/null
    fi
    return 0
}

complete -F _gsoftmax gsoftmax
"""

_ZSH = r"""#compdef gsoftmax
# zsh completion for gsoftmax @VERSION@.  Keep it as a file _gsoftmax in a folder of $fpath:
#   gsoftmax completion zsh > ~/.zfunc/_gsoftmax

_gsoftmax_place() {
    case "$1" in
@TABLE@
        *) return 1 ;;
    esac
}

_gsoftmax() {
    emulate -L zsh
    setopt extended_glob
    local command="" option="" place="" kind="" word="" offer
    local -a offers whole open
    local -i position=0
    for word in "${(@Q)words[2,CURRENT-1]}"; do
        if [[ -n $option ]]; then
            option=""
        elif [[ $word == -* ]]; then
            [[ " @VALUES@ " == *" $word "* ]] && option=$word
        elif [[ $word != [A-Za-z_][A-Za-z0-9_.]#=* ]]; then
            if [[ -n $command ]]; then position+=1; else command=$word; fi
        fi
    done
    word=${(Q)PREFIX}
    if [[ -n $option ]]; then
        place="$command $option"
    elif [[ $word == -*=* ]]; then
        place="$command ${word%%=*}"
        compset -P 1 '*='
    elif [[ $word == -* ]]; then
        place="$command -"
    elif [[ $word == [A-Za-z_][A-Za-z0-9_.]#=* ]]; then
        place="${word%%=*}="
        compset -P 1 '*='
    else
        place=${command:+"$command $position"}
    fi
    _gsoftmax_place "$place" || return 1
    if compset -P 1 '(folder|npz|arff):'; then kind=files; fi
    case "$kind" in
        files) _files; return ;;
        folders) _files -/; return ;;
        list) compset -P '*,' ;;
    esac
    for offer in "${offers[@]}"; do
        if [[ $kind == list || ${offer%%[^\\]:*} == *[=.\(-] || $offer == *\\: ]]; then
            open+=("$offer")
        else
            whole+=("$offer")
        fi
    done
    local -i status_=1
    (( $#whole )) && _describe -t words word whole && status_=0
    (( $#open )) && _describe -t open 'word, to be continued' open -S '' && status_=0
    return status_
}

if [[ ${funcstack[1]} == _gsoftmax ]]; then _gsoftmax "$@"; else compdef _gsoftmax gsoftmax; fi
"""

_FISH = r"""# fish completion for gsoftmax @VERSION@.  Keep it with
#   gsoftmax completion fish > ~/.config/fish/completions/gsoftmax.fish

function __gsoftmax_place --no-scope-shadowing
    switch $place
@TABLE@
        case '*'
            return 1
    end
end

function __gsoftmax
    set -l words (commandline -opc)
    set -e words[1]
    set -l word (commandline -ct | string unescape | string join '')
    set -l command ''
    set -l option ''
    set -l before ''
    set -l position 0
    for past in $words
        if test -n "$option"
            set option ''
        else if string match -q -- '-*' $past
            contains -- $past @VALUES@; and set option $past
        else if not string match -qr -- '^[A-Za-z_][A-Za-z0-9_.]*=' $past
            if test -n "$command"
                set position (math $position + 1)
            else
                set command $past
            end
        end
    end
    set -l place ''
    if test -n "$option"
        set place "$command $option"
    else if string match -q -- '-*=*' $word
        set before (string replace -r -- '=.*' '=' $word)
        set place "$command "(string replace -r -- '=.*' '' $word)
    else if string match -q -- '-*' $word
        set place "$command -"
    else if string match -qr -- '^[A-Za-z_][A-Za-z0-9_.]*=' $word
        set before (string replace -r -- '=.*' '=' $word)
        set place $before
    else if test -n "$command"
        set place "$command $position"
    end
    set -l kind words
    set -l offers
    __gsoftmax_place; or return
    set word (string sub -s (math (string length -- "$before") + 1) -- "$word")
    if string match -qr -- '^(folder|npz|arff):' $word
        set kind files
        set before $before(string replace -r -- ':.*' ':' $word)
        set word (string replace -r -- '^[a-z]*:' '' $word)
    end
    switch $kind
        case files
            set offers (__fish_complete_path "$word")
        case folders
            set offers (__fish_complete_directories "$word" '')
        case list
            set before $before(string match -r -- '.*,' $word)
    end
    for offer in $offers
        printf '%s\n' "$before$offer"
    end
end

complete -c gsoftmax -e
complete -c gsoftmax -f -a '(__gsoftmax)'
"""
