"""User mistakes: every case ends in one line that names the thing, exit status 2, and nothing written.

Each table below is a family of mistakes.  Mistakes in calls of the library (ValueError, TypeError) are tested beside
what they call.
"""

from __future__ import annotations

import gzip
import json
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gsoftmax import cli, compare, data, recipes
from gsoftmax.config import Config
from gsoftmax.data import smoke
from tests.writers import write_cifar_archive

Snapshot = dict[str, bytes | None]


def snapshot(folder: Path) -> Snapshot:
    """Every folder (None) and file (its bytes) below, links not followed."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        if "torchinductor" in str(path):  # torch's own cache, made when some of its parts are imported
            continue
        is_file = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = path.read_bytes() if is_file else None
    return found


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch) -> Iterator[Callable[..., str]]:
    """Runs a command inside `tmp_path`, checks that it fails with one line that says `says`, and returns the line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    threads = torch.get_num_threads()
    earlier = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("no answer after 5 minutes"))

    def run(*argv: str, says: str = "") -> str:
        signal.alarm(300)  # nothing here takes long, but a busy machine may need a minute to import a library
        before = snapshot(tmp_path)
        capsys.readouterr()
        try:
            status = cli.main(argv)
        except SystemExit as end:  # from argparse
            status = end.code
        finally:
            signal.alarm(0)
        out, err = capsys.readouterr()
        assert status == 2, (status, out, err)
        assert "Traceback" not in out + err
        assert err.startswith("gsoftmax") and err.endswith("\n") and err.count("\n") == 1, err
        assert all(c.isprintable() for c in err[:-1]), err
        assert len(err) < 1000, err
        assert snapshot(tmp_path) == before
        assert says in err or re.search(says, err), err
        return err

    yield run
    signal.signal(signal.SIGALRM, earlier)
    torch.set_num_threads(threads)


def cases(families: dict[str, str]) -> list[tuple[str, str]]:
    """Commands and what their error says, from {beginning: "rest | says ; rest"}; without says it is the last word."""
    found = []
    for beginning, text in families.items():
        for case in re.split(r"\s;\s", text):
            words, bar, says = case.rpartition(" | ")
            words = (words if bar else says).strip()
            found.append((f"{beginning} {words}".strip(), says.strip() if bar else words.split()[-1]))
    return found


# ------------------------------------------------------------------------------------------------- keys of a recipe

# key: values it does not take, separated by blanks
VALUES = {
    "data": "5 true null {} [] '' nosuch digit npz folder:",
    "val_fraction": "-0.1 1 2 NaN x true null [] ''",
    "train_fraction": "0 -1 1.5 NaN x false null 1e-9",
    "imbalance": "0 0.5 -2 NaN Infinity x null",
    "label_noise": "-0.1 1.1 NaN x null",
    "split_seed": "-1 1.5 x true [] 99999999999999999999",
    "mixup": "-0.1 NaN Infinity 1e7 x true null",
    "image_size": "0 -8 1.5 100000 x true []",
    "augment": "nosuch 5 true [] crop,nosuch pad=-1 pad=1.5 pad=x flip=maybe area=2 area=nan jitter=1 lighting=-1",
    "evaluate_on": "train val 5 null []",
    "backbone": "nosuch 5 [] wrn-1-1 wrn-x-y densenet-0-0 timm: timm:nosuch torchvision:nosuch resnet101 wrn-7-1",
    "backbone_options": '5 x null [] {"nosuch":1} {"features":-1} {"features":"x"} {"features":1e99}',
    "pool": "mid 5 true []",
    "pretrained": "true x 5 null []",
    "weights": "nosuch.pt . 5 true []",
    "zero_bias": "x 5 null",
    "check": "x 5 null",
    "drop_last": "x 5 null",
    "gaussian_momentum": "-1 NaN x true []",
    "feature_scale": "-1 NaN Infinity x true null",
    "head": "nosuch gsoftmx 5 null [] : a: :b nosuch.module:Head os:nosuch os:sep gsoftmax.train:Config "
    "torch.nn:Linear .x:y",
    "head_options": '5 x null [] {"nosuch":1} {"bias":"x"} {"":1}',
    "init": "x 5 null",
    "logger": "x 5 true [] tensorboard",
    "label_smoothing": "-0.1 1.1 NaN x true null",
    "reduction": "x 5 []",
    "epochs": "-1 1.5 1e3 x true null []",
    "batch_size": "0 -64 2.0 x null 1298",
    "accumulate": "0 -1 1.5 x",
    "optimizer": "x 5 null [] Optimizer sdg",
    "optimizer_options": '5 x [] {"nosuch":1} {"dampening":-1,"momentum":"x"}',
    "lr": "-1 NaN Infinity x true null []",
    "momentum": "-1 NaN x null",
    "nesterov": "5 x null",
    "weight_decay": "-1 NaN x null",
    "bias_lr": "-1 NaN x null",
    "schedule": (
        '5 x null [] {} {"name":"x"} {"name":"linspace"} {"name":"linspace","a":"x","b":1} '
        '{"name":"linspace","a":[],"b":1} {"name":"linspace","a":1,"b":0,"c":2} {"name":"logspace","a":0,"b":1} '
        '{"name":"staircase"} '
        '{"name":"staircase","steps":5} {"name":"staircase","steps":{"x":1}} {"name":"staircase","steps":{"0":0.1}} '
        '{"name":"staircase","steps":{"5":-1}} {"name":"malleable"} {"name":"malleable","pieces":5} '
        '{"name":"malleable","pieces":[[1]]} {"name":"malleable","pieces":[[5,1,1],[2,1,1]]} '
        '{"name":"malleable","pieces":[["x",1,1]]} {"name":"malleable","pieces":[[5,0,1]],"base":-1} '
        '{"name":"malleable","pieces":[[5,0,1]],"literal":true} {"name":"linspace","a":NaN,"b":1}'
    ),
    "schedule_every": "x 5 null",
    "warmup": "-1 1.5 NaN x null",
    "clip": "-1 0 NaN x true []",
    "ema": "-1 1 1.5 NaN x null",
    "amp": "x fp8 5 true null",
    "channels_last": "x 5 null",
    "compile": "x 5 null",
    "cuda_graphs": "x 5 null",
    "ood": "nosuch 5 true mosaic() npz:nosuch.npz",
    "recipe": "vgg-cifar10-softmax 5 null",
    "seed": "-1 1.5 x null true 99999999999999999999",
    "deterministic": "x 5 null",
    "device": "nosuch cuda:99 5 null meta",
    "threads": "-1 1.5 x null 1000000",
    "workers": "-1 1.5 x true",
    "evaluate_every": "-1 1.5 x",
    "checkpoint_every": "-1 1.5 x null",
    "train_geometry": "x 5 null",
    "parallel": "x 5 null",
    "sync_batchnorm": "x 5 null",
    "checkpoint_minutes": "-1 NaN x null",
}
# what the error names, if not the key
NAMED = {
    "evaluate_on": "evaluate_on|validation",
    "data": "data|npz|folder",
    "backbone": "backbone|torchvision|timm|wrn|densenet|resnet101",
    "backbone_options": "backbone_options|cnn",
    "head_options": "head|bias",
    "optimizer_options": "optimizer",
}
CHANGES = [f"{key}={value.strip(chr(39))}" for key, values in VALUES.items() for value in values.split()]


# not a value but the whole change
CHANGES += [
    "epoch=3", "Epochs=3", "epochs.x=1", "lr.=1", "head_options.=1", "head_options.a.b=1", "head.lam=1",
    "schedule.name=x", "schedule.x=1", "head_options.lam=1", "optimizer_options.nosuch=1", "backbone_options.nosuch=1",
    "_private=1",
    "__class__=1", "identity=1", "override=x", "schedule.name.x=1",
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_recipe(change, refused):
    key = re.split("[=.]", change)[0]
    refused("train", "digits", "epochs=1", "batch_size=512", change, says=NAMED.get(key, key))


def test_every_key_has_its_mistakes():
    assert set(Config.__dataclass_fields__) <= set(VALUES)


# a head's options, as `head=NAME head_options.KEY=VALUE`
HEAD_OPTIONS = {
    "gsoftmax": "lam=-1 lam=x lam=NaN lam=Infinity lam=null mu=x mu=NaN mu=[1,2] sigma=0 sigma=-1 sigma=x sigma=NaN "
    "sigma=[1] gaussians=x gaussians=5 bias=x form=paired margin=2 in_features=3 num_classes=2 device=x dtype=x impl=x",
    "lsoftmax": "margin=0 margin=-1 margin=1.5 margin=x margin=99 anneal_steps=-1 anneal_steps=x lam=1 form=paired",
    "softmax": "lam=1 bias=5 nosuch=1 form=paired",
    "adjusted": "tau=-1 tau=x tau=NaN tau=null form=paired margin=1",
    "focal": "gamma=-1 gamma=x gamma=Infinity gamma=[2] bias=x form=msml",
    "cosface": "scale=0 scale=-1 scale=x scale=NaN margin=-1 margin=x margin=null bias=true",
    "arcface": "scale=0 scale=x margin=-1 margin=4 margin=x",
    "gce": "q=0 q=2 q=x q=-1",
    "lgm": "alpha=-1 alpha=x likelihood=-1 likelihood=x covariance=full covariance=5 bias=false",
    "etf": "bias=true impl=x form=paired scale=2",
}
HEAD_CASES = [(head, option) for head, options in HEAD_OPTIONS.items() for option in options.split()]


@pytest.mark.parametrize("head, option", HEAD_CASES)
def test_options_of_heads(head, option, refused):
    changes = [f"head={head}", f"head_options.{option}", "epochs=1", "batch_size=512"]
    refused("train", "digits", *changes, says=option.split("=")[0])


# ------------------------------------------------------------------------------------------------- the command line

# words of a command | what the error says.  In the folder: a file `file`, an empty folder `empty`.
COMMANDS = cases(
    {
        "": """
        nosuch ; comparee digits | comparee ; --nosuch | nosuch|COMMAND ; datasets nosuch | gsoftmax datasets --help ;
        recipes nosuch ;
        heads nosuch ; heads --nosuch | nosuch ; heads a=1""",
        "train": """
         | what ; nosuch ; digit | did you mean 'digits' ; Digits ; # | gsoftmax datasets ;
        /nosuch | nosuch ; empty ; file ; cifar10 ;
        cifar10 --data nosuch ; cifar10 --data file ; cifar10 --data empty ; cifar100 --data empty | cifar100 ;
        tiny-imagenet --data empty | tiny-imagenet ; coco --data empty | coco ; nuswide --data empty | nuswide ;
        wrn-cifar100-gsoftmax --data empty | cifar100 ; wrn-cifar100-gsoftmax-nosuch ; folder: ;
        folder:nosuch | nosuch ; folder:file | file ; folder:empty | empty ; folder:empty?test=2 | test ;
        folder:empty?test=x | test ; folder:empty?nosuch=1 | nosuch ; npz: ; npz:nosuch | nosuch ; npz:empty | empty ;
        npz:file | file ; npz:file?test=x | test ; arff: ; arff:nosuch | nosuch ; arff:empty | empty ;
        arff:file?test=0.5 | file ; arff:file,nosuch | file ; arff:file?labels=x | labels ; mosaic() | mosaic ;
        mosaic(nosuch) | nosuch ; mosaic(mosaic(digits)) | mosaic ; mosaic(digits)?grid=0x0 | grid ;
        mosaic(digits)?grid=99x99 | grid ; mosaic(digits)?grid=x | grid ; mosaic(digits)?train=0 | train ;
        mosaic(digits)?train=-1 | train ; mosaic(digits)?train=99999999999 | bytes ; mosaic(digits)?seed=x | seed ;
        mosaic(digits)?nosuch=1 | nosuch ; mosaic(npz:file) | file ; digits?nosuch=1 | nosuch ;
        digits-mosaic head=lsoftmax | multi-label ; digits-mosaic head_options.form=x | form ;
        digits-mosaic head=cosface | multi-label ; digits head=bce | single-label ;
        digits-mosaic head=asl head_options.clip=2 | clip ; digits-mosaic head=zlpr head_options.form=paired | form ;
        digits-mosaic reduction=x | reduction ; digits-mosaic label_smoothing=2 | label_smoothing""",
        "train digits": """
        digits | key=value ; --nosuch | nosuch ; --epochs 3 | did you mean epochs=3 ;
        --resme | did you mean '--resume' ;
        --out ; nonsense | key=value ; =3 | key ;
        epochs | key=value ; epochs:3 | key=value ; --out file ; --out file/run | file ;
        --out /proc/nosuch/run | /proc/nosuch ; --out /dev/null/run | /dev/null ; --resume --out file ;
        --smoke --nosuch | nosuch""",
        "compare": """
        nosuch ; cifar10 --data file ; digits-mosaic --heads lsoftmax | multi-label""",
        "compare digits": """
        nonsense | key=value ; --heads ; --heads , | heads ; --heads softmax, | heads ;
        --heads softmax,softmax | heads ; --heads softmax,nosuch | nosuch ; --heads gsoftmax( | head ;
        --heads gsoftmax) | head ; --heads gsoftmax(lam) | lam ; --heads gsoftmax(=1) | =1 ;
        --heads gsoftmax(lam=1)(mu=2) | gsoftmax ; --heads gsoftmax(lam=-1) | lam ; --heads gsoftmax(lam=x) | lam ;
        --heads gsoftmax(nosuch=1) | nosuch ; --heads gsoftmax(1=2) | 1=2 ; --heads soft;max ; --heads os:system ;
        --heads os:nosuch ; --heads nosuch.module:Head | nosuch.module ; --heads : | head ; --seeds 0 | seeds ;
        --seeds -1 | seeds ; --seeds 1.5 | seeds ; --seeds x | seeds ; --seeds | seeds ; --first-seed -1 | seed ;
        --first-seed x | first-seed ; --first-seed 99999999999999999999 | seed ; --jobs 0 | jobs ; --jobs -1 | jobs ;
        --jobs x | jobs ; --jobs 1.5 | jobs ; --out file ; --out file/x | file ; --out /dev/null/x | /dev/null ;
        seed=x | seed ; seed=7 | --first-seed ;
        batch_size=5000 | batch_size ; weights=nosuch.pt | nosuch.pt ; augment=nosuch | augment ;
        evaluate_on=val | validation ; reduction=x | reduction ; device=nosuch | device ; --data | data ;
        --resume | resume""",
        "evaluate": """
         | RUN ; nosuch ; file ; empty ; file file ; nosuch key=1 ; nosuch --split val | split ;
        nosuch --data digits | nosuch ; empty --ood digits | empty ; nosuch --data digits --split some | split""",
        "predict": """
         | RUN ; nosuch | IMAGE ; nosuch a.png | nosuch ; file a.png | file ; empty a.png | empty ;
        empty a.png --top 0 | top ; empty a.png --format xml | format ; empty a.png --head os:sep | empty ;
        nosuch a.png key=1""",
        "export": """
         | RUN ; nosuch | FILE ; nosuch a.onnx | nosuch ; file a.onnx | file ; empty a.onnx | empty""",
        "reproduce": """
         | table ; table9 ; fast""",
        "reproduce table1": """
        --row | row ; --row nosuch ; --row coco-softmax ; --row wrn-cifar100-gsoftmax --data empty | cifar100 ;
        --row wrn-cifar100-gsoftmax --data nosuch ; --row wrn-cifar100-gsoftmax nonsense=1 | nonsense ;
        --row wrn-cifar100-gsoftmax --out file --smoke | file""",
        "analyze": """
         | OUTPUTS ; nosuch.npz ; nosuch.npz --against file | nosuch.npz ; file ; empty ;
        empty/nosuch.csv | nosuch.csv ; file key=1""",
        "report": """
         | run ; nosuch ; file ; empty ; empty empty ; --paper nosuch ; --paper file ; --paper empty empty ;
        --paper empty --tables nosuch ; --paper empty --out file""",
    }
)


@pytest.fixture
def around(tmp_path):
    (tmp_path / "file").write_text("some text\n")
    (tmp_path / "empty").mkdir()


@pytest.mark.parametrize("words, says", COMMANDS)
def test_commands(words, says, around, refused):
    refused(*words.split(), says=says)


STRANGE = ["", " ", "\t", "\n", "\x1b[31m", "\u202e", "a\nb", "é", "💥", "-", "--", "%s%n", "../..", "$HOME", "~", "*"]
STRANGE += ["a" * 5000]


@pytest.mark.parametrize("command", ["train", "evaluate", "analyze", "report", "reproduce"])
@pytest.mark.parametrize("word", STRANGE, ids=lambda word: ascii(word)[:12])
def test_strange_names(command, word, refused):
    refused(command, word)


# ---------------------------------------------------------------------------------------------------------- datasets


@pytest.fixture(scope="session")
def room(tmp_path_factory) -> Path:
    """Small good files of every family, to be copied and spoiled."""
    root = tmp_path_factory.mktemp("room")
    for name in data.SMOKE_NAMES:
        data.write_smoke(name, root)
    write_cifar_archive(root / "tar")
    return root


Edit = Callable[[bytes], bytes]


def cut(share: float) -> Edit:
    return lambda raw: raw[: int(share * len(raw))]


def swap(old: str, new: str, count: int = -1) -> Edit:
    def edit(raw: bytes) -> bytes:
        assert old.encode() in raw
        return raw.replace(old.encode(), new.encode(), count)

    return edit


def put(text: str | bytes) -> Edit:
    return lambda raw: text if isinstance(text, bytes) else text.encode()


def entries(**changes: object) -> Edit:
    """A CIFAR batch with other entries."""

    def edit(raw: bytes) -> bytes:
        content = pickle.loads(raw, encoding="bytes") | {k.encode(): v for k, v in changes.items()}
        return smoke.python2_pickle({k: v for k, v in content.items() if v is not None})

    return edit


def spoil(path: Path, how: Edit | str) -> None:
    """Rewrites a file, or takes it away ("gone"), or puts a folder ("folder") or a link to itself ("loop") there."""
    if callable(how):
        path.write_bytes(how(path.read_bytes()))
        return
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path.name)


B, M = "cifar-10-batches-py/data_batch_2", "cifar-10-batches-py/batches.meta"
TAR = "tar/cifar-10-python.tar.gz"
W, V, P0 = "tiny-imagenet-200/wnids.txt", "tiny-imagenet-200/val/val_annotations.txt", "tiny-imagenet-200/train"
J, J2 = "coco/annotations/instances_train2014.json", "coco/annotations/instances_val2014.json"
N, L, K = (
    f"nuswide/{n}" for n in ("clean/nus_wide_test_imglist.txt", "clean/nus_wide_test_label.txt", "Concepts81.txt")
)
A, A2 = "arff/smoke-train.arff", "arff/smoke-test.arff"
DAMAGE: list[tuple[str, str, Edit | str, str]] = [
    # dataset, file, how it is damaged, what the error says
    *(("cifar10", B, cut(share), "data_batch_2") for share in (0, 0.001, 0.5, 0.999)),
    *(("cifar10", B, how, "data_batch_2") for how in ("gone", "folder", "loop")),
    ("cifar10", B, put("text"), "data_batch_2"),
    ("cifar10", B, put(gzip.compress(b"x")), "data_batch_2"),
    ("cifar10", B, put(pickle.dumps(None)), "data_batch_2"),
    ("cifar10", B, entries(labels=[10] * 40), "labels"),
    ("cifar10", B, entries(labels=[-1] * 40), "labels"),
    ("cifar10", B, entries(labels=[0] * 39), "39 labels"),
    ("cifar10", B, entries(labels=None), "labels"),
    ("cifar10", B, entries(data=np.zeros((40, 3071), np.uint8)), "3071"),
    ("cifar10", B, entries(data=b"x"), "data"),
    ("cifar10", M, entries(label_names=[]), "label_names"),
    ("cifar10", M, entries(label_names=[1, 2]), "label_names"),
    ("cifar10", M, entries(label_names=[b"one"]), "labels"),
    ("cifar10", M, "gone", "batches.meta"),
    ("cifar10", "cifar-10-batches-py/SMOKE", "gone", "MD5"),
    *(("cifar10 --data tar", TAR, cut(share), "cifar-10-python.tar.gz") for share in (0, 0.01, 0.7)),
    ("cifar10 --data tar", TAR, put("text"), "cifar-10-python.tar.gz"),
    ("cifar10 --data tar", TAR, put(gzip.compress(b"text")), "cifar-10-python.tar.gz"),
    ("cifar10 --data tar", TAR, "folder", "cifar-10-python.tar.gz"),
    ("cifar10 --data tar", "tar/SMOKE", "gone", "MD5"),
    ("cifar100", "cifar-100-python/train", cut(0.5), "train"),
    ("cifar100", "cifar-100-python/meta", entries(fine_label_names=None), "fine_label_names"),
    ("tiny-imagenet", W, put(""), "wnids.txt"),
    ("tiny-imagenet", W, put("one\n"), "wnids.txt"),
    ("tiny-imagenet", W, put("a\na\n"), "wnids.txt"),
    ("tiny-imagenet", W, put("../up\n..\n"), "wnids.txt"),
    ("tiny-imagenet", W, put("n9\nn8\n"), "n9"),
    ("tiny-imagenet", W, put(b"\xff\xfe\x00n\x00\n"), "wnids.txt"),
    ("tiny-imagenet", W, "folder", "wnids.txt"),
    ("tiny-imagenet", V, "gone", "val_annotations.txt"),
    ("tiny-imagenet", V, put("file\n"), "val_annotations.txt"),
    ("tiny-imagenet", V, put("val_0.JPEG nosuch 0 0 1 1\n"), "nosuch"),
    ("tiny-imagenet", V, put("nosuch.JPEG n00000000 0 0 1 1\n"), "nosuch.JPEG|n00000000"),
    ("tiny-imagenet", V, put(""), "val_annotations.txt"),
    ("tiny-imagenet", "tiny-imagenet-200/words.txt", "gone", "words.txt"),
    ("tiny-imagenet", P0, "gone", "images"),
    ("tiny-imagenet", "tiny-imagenet-200/SMOKE", "gone", "incomplete"),
    *(("coco", J, cut(share), "instances_train2014.json") for share in (0, 0.1, 0.9)),
    *(("coco", J2, how, "instances_val2014.json") for how in ("gone", "folder")),
    ("coco", J, put("[]"), "instances_train2014.json"),
    ("coco", J, put("{}"), "instances_train2014.json"),
    ("coco", J, put("null"), "instances_train2014.json"),
    ("coco", J, put(b"\xff\xfe{\x00}\x00"), "instances_train2014.json"),
    ("coco", J, put('{"images": [5]}'), "instances_train2014.json"),
    ("coco", J, put('{"images": [[]]}'), "instances_train2014.json"),
    ("coco", J, put('{"images": "x", "annotations": {}, "categories": 5}'), "instances_train2014.json"),
    ("coco", J, swap('"id": 1007', '"id": "1007"'), "1007"),
    ("coco", J, swap('"id": 1007', '"id": 1e999'), "instances_train2014.json"),
    ("coco", J, swap('"id": 1007', '"id": ' + "9" * 5000), "instances_train2014.json"),
    ("coco", J, swap(".jpg", ".jpg\\u0000"), "instances_train2014.json"),
    ("coco", J, swap("COCO_train2014", "nosuch"), "nosuch"),
    ("coco", J2, swap('"categories"', '"kinds"'), "instances_val2014.json"),
    ("coco", J2, swap('"name"', '"title"', 1), "instances_val2014.json"),
    ("coco", "coco/train2014", "gone", "train2014"),
    ("coco", "coco/SMOKE", "gone", "not the published"),
    *(("nuswide", K, put(text), "Concepts81.txt") for text in ("", "one\n", "a\na\n", "\n\n")),
    ("nuswide", K, "gone", "nuswide"),
    ("nuswide", K, "folder", "Concepts81.txt"),
    *(("nuswide", N, put(text), "imglist") for text in ("", "/etc/passwd 1\n", "../x 1\n" * 12)),
    ("nuswide", N, "gone", "imglist"),
    ("nuswide", N, swap(".jpg ", ".jpg x"), "imglist|lacks"),
    *(("nuswide", L, how, "label") for how in (put(""), cut(0.5), swap("1", "2", 1), swap("0 ", "", 1), put(b"\0"))),
    ("nuswide", "nuswide/images", "gone", "images"),
    *(("folder", "folder/train/red/0003.jpg", how, "0003.jpg") for how in (cut(0), cut(0.3), put("text"), "loop")),
    ("folder", "folder/train", "gone", "train"),
    ("folder", "folder/train/red", "gone", "red"),
    ("npz", "npz/smoke.npz", "folder", "smoke.npz"),
    *(("npz", "npz/smoke.npz", cut(share), "smoke.npz") for share in (0, 0.5, 0.99)),
    ("npz", "npz/smoke.npz", put("text"), "smoke.npz"),
    *(("arff", A, cut(share), "arff") for share in (0, 0.02, 0.1)),
    ("arff", A, "folder", "smoke-train.arff"),
    ("arff", A2, "gone", "test"),
    ("arff", A, swap("numeric", "string", 1), "string"),
    ("arff", A, swap("numeric", "date", 1), "date"),
    ("arff", A, swap("@data", "@date"), "smoke-train.arff"),
    ("arff", A, swap("{0,1}", "{a,b}"), "label|attribute"),
    ("arff", A, swap("0.", "nan", 1), "finite"),
    ("arff", A, swap("0.", "1e999", 1), "finite"),
    ("arff", A, swap("0.", "?,", 1), "smoke-train.arff"),
    ("arff", A2, swap("{0 ", "{99 ", 1), "99"),
    ("arff", A2, swap("{0 ", "{0", 1), "smoke-test.arff"),
    ("arff", A2, swap("Att1", "Other"), "attributes"),
    ("arff", A, put(b"\xff\xfe@\x00r\x00"), "smoke-train.arff"),
    ("arff", A, put("@relation r\n@attribute a numeric\n@attribute b {0,1}\n@data\n"), "attributes"),
]  # fmt: skip
DAMAGE_IDS = [f"{name.split()[0]}-{file.rpartition('/')[2]}-{i}" for i, (name, file, _, _) in enumerate(DAMAGE)]


@pytest.mark.parametrize("name, file, how, says", DAMAGE, ids=DAMAGE_IDS)
def test_damaged_datasets(name, file, how, says, room, tmp_path, refused):
    folder = file.split("/")[0]
    shutil.copytree(room / folder, tmp_path / folder)
    spoil(tmp_path / file, how)
    spec = {"folder": "folder:folder", "npz": "npz:npz/smoke.npz", "arff": "arff:arff/smoke-train.arff"}.get(name, name)
    argv = ["train", *spec.split(), *([] if "--data" in spec else ["--data", "."]), "epochs=0", "backbone_options={}"]
    refused(*argv, *(["image_size=32"] if name in ("coco", "nuswide") else []), says=says)


ARRAYS: list[tuple[dict[str, object], str]] = [
    # changes of the arrays of an .npz of a table with four columns, what the error says
    ({"x_train": None}, "x_train"),
    ({"y_train": None}, "y_train"),
    ({"x_test": None}, "x_test"),
    ({"x_train": np.zeros((6, 0))}, "column"),
    ({"x_train": np.float64(1)}, "x_train"),
    ({"x_train": np.zeros(6)}, "x_train"),
    ({"x_train": np.full((6, 4), np.inf)}, "finite"),
    ({"x_train": np.full((6, 4), 1e300)}, "finite"),
    ({"x_train": np.zeros((6, 4), complex)}, "complex"),
    ({"x_train": np.zeros((6, 4), "M8[s]")}, "datetime"),
    ({"x_train": np.zeros((6, 4), [("a", "f4")])}, "x_train"),
    ({"x_train": np.array([[object()] * 4] * 6)}, "objects"),
    ({"x_train": np.zeros((6, 2, 2, 5), np.uint8)}, "channels"),
    ({"x_train": np.zeros((6, 0, 3), np.uint8)}, "x_train"),
    ({"x_test": np.zeros((2, 4), np.uint8).reshape(2, 2, 2)}, "x_test"),
    ({"y_train": np.zeros(6, int)}, "2 classes"),
    ({"y_train": np.arange(6) % 2 + 0.5}, "y_train"),
    ({"y_train": np.zeros((6, 2, 2))}, "y_train"),
    ({"y_train": np.full((6, 2), np.nan), "y_test": np.zeros((2, 2))}, "0 and 1"),
    ({"y_train": np.zeros((6, 0)), "y_test": np.zeros((2, 0))}, "y_train"),
    ({"y_test": np.array([0, 2])}, "class 2"),
    ({"y_test": np.array([-1, 0])}, "class -1"),
    ({"y_test": np.zeros(3, int)}, "rows"),
    ({"names": np.array(["a"])}, "names|classes"),
    ({"names": np.zeros((2, 2))}, "names"),
    ({"names": np.array(["a", "b", "c"]), "y_train": np.eye(6, 2), "y_test": np.eye(2)}, "names"),
]


@pytest.mark.parametrize("change, says", ARRAYS, ids=map(str, range(len(ARRAYS))))
def test_arrays_of_a_table(change, says, tmp_path, refused):
    arrays = {
        "x_train": np.ones((6, 4)),
        "y_train": np.arange(6) % 2,
        "x_test": np.ones((2, 4)),
        "y_test": np.arange(2),
    }
    np.savez(tmp_path / "a.npz", **{k: v for k, v in (arrays | change).items() if v is not None})
    refused("train", "npz:a.npz", "epochs=1", "batch_size=2", says=says)


# ------------------------------------------------------------------------------------------------ files of outputs


def good_outputs() -> dict[str, np.ndarray]:
    y = np.arange(60) % 3
    return {"x": np.random.default_rng(0).normal(size=(60, 3)) + 2 * np.eye(3)[y], "y": y}


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path)
    else:
        rows = np.column_stack([arrays["y"], arrays["x"]])
        np.savetxt(path, rows, delimiter=",", header="y,a,b,c", comments="")


def header(**changes: object) -> Edit:
    """A .safetensors file whose header tells lies about x."""

    def edit(raw: bytes) -> bytes:
        size = struct.unpack("<Q", raw[:8])[0]
        told = json.loads(raw[8 : 8 + size])
        told["x"] |= changes
        text = json.dumps(told).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + size :]

    return edit


OUTPUTS: list[tuple[str, dict[str, object] | Edit | str, str]] = [
    # file, arrays that differ or what is done to the bytes, what the error says
    *((kind, cut(share), kind) for kind in ("a.npz", "a.safetensors") for share in (0, 0.05, 0.5, 0.98)),
    *((kind, put(b"\x00\xff nonsense"), kind) for kind in ("a.npz", "a.safetensors", "a.csv")),
    *((kind, "folder", kind) for kind in ("a.npz", "a.safetensors", "a.csv")),
    *((kind, "loop", kind) for kind in ("a.npz", "a.csv")),
    *((kind, {"y": np.arange(60) % 3 + 2}, "y must be") for kind in ("a.npz", "a.safetensors", "a.csv")),
    *((kind, {"y": np.full(60, -1)}, "y must be") for kind in ("a.npz", "a.safetensors", "a.csv")),
    *((kind, {"y": np.full(60, 0.5)}, "y must") for kind in ("a.npz", "a.safetensors", "a.csv")),
    *((kind, {"y": np.full(60, np.nan)}, "y must") for kind in ("a.npz", "a.safetensors", "a.csv")),
    *((kind, {"x": np.full((60, 3), np.inf)}, "nan") for kind in ("a.npz", "a.safetensors", "a.csv")),
    *((kind, {"y": np.full(60, -100)}, "-100") for kind in ("a.npz", "a.csv")),
    *((kind, {"x": np.zeros((60, 0))}, "x") for kind in ("a.npz", "a.safetensors")),
    *((kind, {"x": np.zeros((0, 3)), "y": np.zeros(0)}, "x|rows") for kind in ("a.npz", "a.safetensors", "a.csv")),
    ("a.npz", {"x": np.zeros((60, 1))}, "y|class"),
    ("a.npz", {"x": np.zeros(60)}, "x must"),
    ("a.npz", {"x": np.float64(0)}, "x must"),
    ("a.npz", {"x": np.zeros((60, 3), complex)}, "x must|complex"),
    ("a.npz", {"x": np.zeros((60, 3), "U4")}, "x must|U4"),
    ("a.npz", {"x": np.zeros((60, 3), "M8[s]")}, "x must|datetime"),
    ("a.npz", {"x": np.zeros((60, 3), [("a", "f4")])}, "x must|x in"),
    ("a.npz", {"x": np.array([[None] * 3] * 60)}, "objects"),
    ("a.npz", {"y": np.zeros(60, complex)}, "y must"),
    ("a.npz", {"y": np.zeros((60, 3, 1))}, "y must"),
    ("a.npz", {"y": np.zeros(())}, "y must"),
    ("a.npz", {"y": np.full((60, 3), 0.5)}, "y must be 0 or 1"),
    ("a.npz", {"y": np.array(["zebra"] * 60)}, "zebra"),
    ("a.npz", {"p": np.full((60, 3), 2.0)}, "p must"),
    ("a.npz", {"p": np.zeros((60, 3))}, "p must"),
    ("a.npz", {"p": np.zeros(60)}, "p must"),
    ("a.npz", {"p": np.array([["a"] * 3] * 60)}, "p must"),
    ("a.npz", {"p": np.full((60, 3), np.nan)}, "nan"),
    ("a.npz", {"names": np.array(["a", "b"])}, "names"),
    ("a.npz", {"names": np.zeros(3)}, "names"),
    ("a.npz", {"mu": np.zeros(3)}, "mu and sigma"),
    ("a.npz", {"sigma": np.ones(3)}, "mu and sigma"),
    ("a.npz", {"mu": np.zeros(3), "sigma": -np.ones(3)}, "sigma must"),
    ("a.npz", {"mu": np.full(3, np.nan), "sigma": np.ones(3)}, "mu must"),
    ("a.npz", {"mu": np.array(["a"] * 3), "sigma": np.ones(3)}, "mu must"),
    ("a.npz", {"mu": np.zeros(3), "sigma": np.ones(3), "lam": np.array(np.nan)}, "lam must"),
    ("a.npz", {"mu": np.zeros(3), "sigma": np.ones(3), "lam": np.array(-1.0)}, "lam must"),
    ("a.npz", {"mu": np.zeros(3), "sigma": np.ones(3), "lam": np.zeros(2)}, "lam must"),
    ("a.npz", {"mu": np.zeros(3), "sigma": np.ones(3), "lam": np.array("x")}, "lam must"),
    ("a.safetensors", put(struct.pack("<Q", 2**60) + b"{}"), "a.safetensors"),
    ("a.safetensors", put(struct.pack("<Q", 2) + b"{}"), "must have x and y"),
    ("a.safetensors", header(shape=[10**9, 10**9]), "a.safetensors"),
    ("a.safetensors", header(shape=[-60, 3]), "a.safetensors"),
    ("a.safetensors", header(data_offsets=[0, 10**12]), "a.safetensors"),
    ("a.safetensors", header(data_offsets=[-8, 1440]), "a.safetensors"),
    ("a.safetensors", header(data_offsets=[0, 1440]), "a.safetensors"),
    ("a.safetensors", header(dtype="nosuch"), "a.safetensors"),
    ("a.safetensors", header(dtype="F32"), "a.safetensors"),
    ("a.csv", put(""), "a.csv"),
    ("a.csv", put("\n\n\n"), "a.csv"),
    ("a.csv", put("y\n1\n"), "a.csv"),
    ("a.csv", put("a,b,c\n1,2,3\n"), "column y"),
    ("a.csv", put("1,2,3\n0,1,2\n"), "header"),
    ("a.csv", put("y,a,a\n0,1,2\n"), "'a' twice"),
    ("a.csv", put("y,a,b\n0,1\n"), "row 1|cells"),
    ("a.csv", put("y,a,b\n0,1,2,3\n"), "cells"),
    ("a.csv", put("y,a,b\n0,1,x\n"), "'b'"),
    ("a.csv", put("y,a,b\nc,1,2\n"), "'c'"),
    ("a.csv", put("y,a,b\n,1,2\n"), "'y'"),
    ("a.csv", put("y,a,b\n0,,2\n"), "'a'"),
    ("a.csv", put("y:a,a,b\n0,1,2\n"), "'b'"),
    ("a.csv", put("y,a,b,p:a\n0,1,2,1\n"), "'b'"),
    ("a.csv", put("y,a,b,p:a,p:b\n0,1,2,9,9\n"), "p must"),
    ("a.csv", put('y,a,b\n0,"1,2\n'), "a.csv"),
    ("a.csv", put("y,a,b\n0,1,2\n0,1e999,2\n\x00"), "a.csv"),
    ("a.csv", put(b"y,a,b\n0,1,\xff\n"), "a.csv"),
    ("a.csv", put(b"\xff\xfey\x00,\x00a\x00\n\x00"), "a.csv"),
    ("a.csv", put("y,a,b\n99999999999999999999,1,2\n"), "y must"),
    ("a.csv", put("y,a,b\n" + "9" * 5000 + ",1,2\n"), "y must|row"),
    ("a.csv", put("y," + ",".join(map(str, range(200000))) + "\n" + "0\n"), "cells"),
]  # fmt: skip


@pytest.mark.parametrize("file, how, says", OUTPUTS, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(OUTPUTS)])
def test_files_of_outputs(file, how, says, tmp_path, refused):
    changes = how if isinstance(how, dict) else {}
    save(tmp_path / file, good_outputs() | changes)
    if not isinstance(how, dict):
        spoil(tmp_path / file, how)
    refused("analyze", file, "--out", "out", says=says)


ANALYZE = cases(
    {
        "analyze a.npz": """
        --tables nosuch ; --tables md,nosuch | nosuch ; --tables ; --figures nosuch ; --figures svg,jpeg | jpeg ;
        --class nosuch ; --class 3 ; --class ; --out a.npz ; --out a.npz/x | a.npz ; --out /dev/null/x | /dev/null ;
        --against nosuch.npz ; --against other.npz | rows|images|y ; --against fewer.npz | classes|outputs ;
        --against a.npz --against ; --nosuch | nosuch ; b.npz"""
    }
)


@pytest.mark.parametrize("words, says", ANALYZE)
def test_options_of_analyze(words, says, tmp_path, refused):
    good = good_outputs()
    save(tmp_path / "a.npz", good)
    save(tmp_path / "other.npz", {"x": good["x"][:50], "y": good["y"][:50]})
    save(tmp_path / "fewer.npz", {"x": good["x"][:, :2], "y": good["y"] % 2})
    refused(*words.split(), says=says)


# ------------------------------------------------------------------------------------------------------ run folders


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """A comparison of two heads with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    config = Config(epochs=1, batch_size=512, train_fraction=0.5, threads=1)
    compare.compare(config, ["softmax", "gsoftmax"], 2, folder / "all", jobs=1)
    return folder


RUN = "all/softmax/seed-0"
C, Q, X, S = (f"{RUN}/{n}" for n in ("config.json", "metrics.jsonl", "outputs.safetensors", "nothing"))
AS = "epochs=1 batch_size=512 train_fraction=0.5 threads=1"
SUMMARY = "all/summary.json"
TEXTS = (b"", b"text", b"[]", b"5", b"null", b"{", b"\xff\xfe", b'{"x": 1}')
RUN_DAMAGE: list[tuple[str, str, Edit | str, str]] = [
    # command, file, how it is damaged, what the error says
    *((f"evaluate {RUN}", Q, put(text), "metrics.jsonl|finished run") for text in TEXTS),
    *((f"evaluate {RUN}", Q, how, "metrics.jsonl|finished run") for how in ("gone", "folder", cut(0.5))),
    *((f"evaluate {RUN}", X, how, "outputs.safetensors") for how in ("gone", cut(0), cut(0.9), put("x"), "folder")),
    *((f"report {RUN}", C, put(text), "config.json") for text in TEXTS),
    *((f"report {RUN}", C, how, "config.json|finished run") for how in ("gone", "folder", cut(0.5))),
    ("report " + RUN, C, swap('"epochs": 1', '"epochs": -1'), "config.json.*epochs"),
    ("report " + RUN, C, swap('"epochs"', '"epoch"'), "config.json.*epoch"),
    ("report " + RUN, C, swap('"head": "softmax"', '"head": 5'), "config.json.*head"),
    *((f"report {RUN}", Q, put(text), "metrics.jsonl|finished run") for text in TEXTS),
    ("report " + RUN, Q, swap('"error"', '"mistakes"'), "error|metrics.jsonl"),
    *((f"report {RUN}", X, how, "outputs.safetensors|finished run") for how in ("gone", cut(0), cut(0.5), "folder")),
    *(("report all", SUMMARY, put(text), "summary.json") for text in (*TEXTS[:7], b'{"heads": [], "seeds": []}')),
    *(("report all", SUMMARY, how, "summary.json") for how in ("folder", cut(0.5))),
    ("report all", SUMMARY, swap('"heads"', '"hats"'), "summary.json"),
    ("report all", SUMMARY, swap('"metrics"', '"numbers"'), "summary.json"),
    ("report all", SUMMARY, swap('"mean"', '"average"'), "summary.json"),
    ("report all", X, cut(0.5), "outputs.safetensors"),
    ("analyze " + RUN, X, cut(0.5), "outputs.safetensors"),
    *((f"train digits --resume {AS} --out {RUN}", C, put(text), "config.json")
      for text in TEXTS),
    (f"train digits --resume {AS} epochs=2 --out {RUN}", S, "", "epochs"),
    (f"train digits --resume {AS} head=gsoftmax --out {RUN}", S, "", "head"),
    (f"train digits {AS} --out {RUN}", S, "", "already"),
    (f"train digits epochs=1 --out {RUN}/config.json", S, "", "config.json"),
    (f"compare digits {AS} epochs=2 --out all --seeds 2", S, "", "epochs"),
    (f"compare digits {AS} batch_size=256 --out all --seeds 2", S, "", "batch_size"),
    *((f"compare digits {AS} --out all --seeds 2 --heads softmax,gsoftmax", C, put(text), "config.json")
      for text in TEXTS[1:]),
    (f"report {RUN} {RUN}", S, "", "same head and seed"),
    (f"report {RUN} all/gsoftmax/seed-1", S, "", "seed in common"),
    (f"report {RUN} all", S, "", "all"),
    (f"report {RUN} --class nosuch", S, "", "nosuch"),
    (f"report {RUN} --tables nosuch", S, "", "nosuch"),
    (f"report {RUN} --figures nosuch", S, "", "nosuch"),
    (f"report {RUN} --out {RUN}/config.json", S, "", "config.json"),
    (f"evaluate {RUN}/outputs.safetensors", S, "", "outputs.safetensors"),
]  # fmt: skip


@pytest.mark.parametrize(
    "words, file, how, says",
    RUN_DAMAGE,
    ids=[f"{w.split()[0]}-{f[-12:]}-{i}" for i, (w, f, _, _) in enumerate(RUN_DAMAGE)],
)
def test_damaged_runs(words, file, how, says, runs, tmp_path, refused):
    shutil.copytree(runs / "all", tmp_path / "all")
    if how:
        spoil(tmp_path / file, how)
    refused(*words.split(), says=says)


# ---------------------------------------------------------------------------------------------------------- recipes

RECIPES = [
    ("text", "must map"),
    ("5", "mapping|recipes"),
    ("[]", "mapping|recipes"),
    ("a: 5", "'a'"),
    ("a: [1]", "'a'"),
    ("5: {epochs: 1}", "5"),
    ("a: {base: nosuch}", "nosuch"),
    ("a: {base: a}", "'a'"),
    ("a: {base: b}\nb: {base: a}", "'a'|'b'"),
    ("a: {base: 5}", "5"),
    ("a: {smoke: 5}", "smoke"),
    ("a: {published: 5}", "published"),
    ("a: {published: {error: x}}", "published"),
    ("a: {epochs: 1", "line 1"),
    ("a: {x: !!python/object/apply:os.system ['true']}", "python"),
    ("a: &a [*a]", "'a'"),
    ("a: 2020-99-99", "month"),
    ("a: {published: {5: {}}}", "published"),
    ("\x00", "special characters"),
]


@pytest.mark.parametrize("text, says", RECIPES, ids=[str(i) for i in range(len(RECIPES))])
def test_files_of_recipes(text, says):
    with pytest.raises(ValueError, match="mine.yaml") as caught:
        for recipe in recipes.parse({"mine.yaml": text}).values():
            recipe.config()
    assert re.search(says, str(caught.value)) and "\n" not in str(caught.value), caught.value


# ---------------------------------------------------------------------------------------------- in a separate process


@pytest.mark.parametrize(
    "words",
    ["compare --seeds x", pytest.param("train digits threads=1000000", marks=pytest.mark.slow)],  # which loads torch
)
def test_as_a_program(words, around, tmp_path):
    before = snapshot(tmp_path)
    command = [sys.executable, "-m", "gsoftmax", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert snapshot(tmp_path) == before


def test_debug_shows_where(around, refused, capsys):
    with pytest.raises(ValueError, match="nosuch"):
        cli.main(["train", "nosuch", "--debug"])


def test_there_are_more_than_150_different_mistakes():
    counted = {
        "changes": CHANGES,
        "heads": HEAD_CASES,
        "commands": COMMANDS,
        "strange names": [(c, w) for c in range(5) for w in STRANGE],
        "datasets": DAMAGE_IDS,
        "arrays": range(len(ARRAYS)),
        "outputs": range(len(OUTPUTS)),
        "analyze": ANALYZE,
        "runs": range(len(RUN_DAMAGE)),
        "recipes": RECIPES,
    }
    for family, cases in counted.items():
        assert len(set(cases)) == len(cases), family
    assert sum(map(len, counted.values())) >= 600
    assert all(len(cases) >= 15 for cases in counted.values())
