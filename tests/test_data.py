"""Loaders: every dataset from small files in its real format, and the seeded choices made on the training rows.

The published layouts of files, with missing and damaged images, are in test_layouts.py.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gsoftmax import data
from gsoftmax.cli import main
from gsoftmax.data import bundled, coco, images, mosaic, smoke, tables
from gsoftmax.data.core import statistics
from gsoftmax.data.seeded import long_tail, mix, noisy, shuffled, take, uniform
from tests.writers import write_arff, write_cifar_archive

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with the smoke files of every dataset, and the specs that load them."""
    root = tmp_path_factory.mktemp("room")
    return root, {name: data.write_smoke(name, root) for name in data.SMOKE_NAMES}


@pytest.fixture
def spoiled(room, tmp_path):
    """A copy of one dataset's smoke files, to be changed."""

    def copy(folder: str) -> Path:
        return Path(shutil.copytree(room[0] / folder, tmp_path / folder))

    return copy


def error(spec: str, root: Path | None = None, **options) -> str:
    """The one line of the error that loading raises; only the layout of the files may follow it."""
    with pytest.raises(ValueError if options else data.DataError) as caught:
        data.load(spec, root, **options)
    first, *rest = str(caught.value).splitlines()
    assert not rest or "\n  layout: " in str(caught.value)
    return first


def rows_of(split: data.Split) -> list[bytes]:
    return [row.numpy().tobytes() for row in split.x]


# seeded choices


def test_hashes_never_change():
    # written down once: results must be repeatable with any later version of NumPy or PyTorch
    assert mix(0) == 0xE220A8397B1DCDAF >> 1  # splitmix64's published first output for the seed 0
    assert mix(1, 2, 3) == 7510213797696614745
    assert shuffled(10, 0).tolist() == [5, 9, 7, 6, 8, 0, 4, 1, 2, 3]
    assert uniform(2, 1).tolist() == [0.6040409783634627, 0.8848007990983615]


def test_hashes_are_uniform():
    from scipy import stats

    u = uniform(20000, seed=5)
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    first = [int(shuffled(8, s)[0]) for s in range(4000)]
    assert stats.chisquare(np.bincount(first, minlength=8)).pvalue > 1e-3


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25, 0.5, 0.9])
def test_take_is_stratified_and_a_partition(fraction):
    y = torch.tensor([0] * 50 + [1] * 31 + [2] * 7)[torch.from_numpy(shuffled(88, 1))]
    taken, left = take(y, fraction, seed=3)
    assert sorted([*taken, *left]) == list(range(88))
    assert len(taken) == round(fraction * 88)
    for c in range(3):
        share = fraction * int((y == c).sum())
        assert abs(int((y[taken] == c).sum()) - share) < 1
    again, _ = take(y, fraction, seed=3)
    other, _ = take(y, fraction, seed=4)
    assert (again == taken).all()
    assert len(other) == len(taken) and not np.array_equal(other, taken)


def test_take_leaves_a_row_of_every_class():
    y = torch.tensor([0, 0, 1, 2, 2, 2])
    _, left = take(y, 0.99, seed=0, keep=1)
    assert set(y[left].tolist()) == {0, 1, 2}


def test_noise_is_exact_and_spares_the_right_label():
    y = torch.arange(10).repeat(100)
    out = noisy(y, 0.3, 10, seed=2)
    wrong = out != y
    assert int(wrong.sum()) == 300
    assert out.min() >= 0 and out.max() <= 9
    step = (out - y)[wrong] % 10
    counts = torch.bincount(step, minlength=10)
    assert counts[0] == 0 and counts[1:].min() > 10  # every other class occurs
    assert torch.equal(noisy(y, 0.3, 10, seed=2), out)


def test_long_tail_follows_the_profile():
    y = torch.arange(5).repeat_interleave(200)
    counts = [torch.bincount(y[long_tail(y, 16.0, seed=seed)]) for seed in range(200)]
    assert all(sorted(c.tolist()) == [12, 25, 50, 100, 200] for c in counts)
    largest = torch.bincount(torch.stack(counts).argmax(1), minlength=5)  # every class about as often
    assert largest.min() > 20 and largest.max() < 60


def test_statistics_against_numpy():
    x = torch.from_numpy((uniform(500 * 3 * 4 * 4, 1) * 256).astype(np.uint8)).view(500, 3, 4, 4)
    mean, std = statistics(x)
    np.testing.assert_allclose(mean, x.numpy().mean((0, 2, 3)) / 255, rtol=1e-6)
    np.testing.assert_allclose(std, x.numpy().std((0, 2, 3)) / 255, rtol=1e-6)
    table = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    assert [s.tolist() for s in statistics(table)] == [[2.0, 5.0], [1.0, 1.0]]


# digits


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    raw = load_digits()
    digits = data.load("digits")
    assert (len(digits.train), len(digits.test), digits.num_classes, digits.input_shape) == (1297, 500, 10, (1, 8, 8))
    rows = {tuple(r): int(y) for r, y in zip(raw.data.astype(int).tolist(), raw.target, strict=True)}
    seen = []
    for split in (digits.train, digits.test):
        levels = torch.round(split.x.float() * 16 / 255).int().view(-1, 64).tolist()
        assert all(rows[tuple(r)] == y for r, y in zip(levels, split.y.tolist(), strict=True))
        seen += [tuple(r) for r in levels]
    assert sorted(seen) == sorted(tuple(r) for r in raw.data.astype(int).tolist())  # each once, nothing lost
    counts = torch.bincount(digits.test.y)
    assert counts.min() >= 48 and counts.max() <= 51


def test_digits_without_the_table(monkeypatch):
    expected = data.load("digits").fingerprint()
    monkeypatch.setattr(bundled.Path, "is_file", lambda self: False)
    assert data.load("digits").fingerprint() == expected


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None)
    assert error("digits").startswith("digits comes with scikit-learn, which is not installed")


# load and its options


def test_validation_split_is_disjoint_stratified_and_leaves_the_test_alone():
    plain = data.load("digits")
    split = data.load("digits", val_fraction=0.2, split_seed=1)
    assert (len(split.train), len(split.val)) == (1038, 259)
    assert torch.equal(split.test.x, plain.test.x)
    assert sorted(rows_of(split.train) + rows_of(split.val)) == sorted(rows_of(plain.train))
    share = torch.bincount(split.val.y) / torch.bincount(plain.train.y)
    assert share.min() > 0.18 and share.max() < 0.22
    other = data.load("digits", val_fraction=0.2, split_seed=2)
    assert other.fingerprint() != split.fingerprint()
    assert data.load("digits", val_fraction=0.2, split_seed=1).fingerprint() == split.fingerprint()


def test_subset_imbalance_and_noise_touch_training_rows_only():
    clean = data.load("digits", val_fraction=0.1)
    rough = data.load("digits", val_fraction=0.1, train_fraction=0.5, imbalance=4.0, label_noise=0.25)
    assert torch.equal(rough.val.x, clean.val.x) and torch.equal(rough.val.y, clean.val.y)
    assert torch.equal(rough.test.y, clean.test.y)
    assert len(rough.train) < 0.5 * len(clean.train)
    assert len(rough.notes) == 3
    truth = dict(zip(rows_of(clean.train), clean.train.y.tolist(), strict=True))
    labels = torch.tensor([truth[row] for row in rows_of(rough.train)])
    assert int((labels != rough.train.y).sum()) == round(0.25 * len(rough.train))
    counts = torch.bincount(labels)
    assert 3.5 * counts.min() < counts.max() < 4.5 * counts.min()


DRAWS = {
    "train_fraction": (0.5, lambda d: set(rows_of(d.train))),
    "imbalance": (20.0, lambda d: torch.bincount(d.train.y).argsort().tolist()),
    "label_noise": (0.25, lambda d: d.train.y.tolist()),
    "val_fraction": (0.2, lambda d: set(rows_of(d.val))),
}


@pytest.mark.parametrize("option", DRAWS)
def test_the_split_seed_decides_the_draw_but_not_the_test_set(option):
    value, drawn = DRAWS[option]
    plain = data.load("digits")
    first, again, other = (data.load("digits", split_seed=seed, **{option: value}) for seed in (1, 1, 2))
    assert first.fingerprint() == again.fingerprint() and drawn(first) != drawn(other)
    for found in (first, other):
        assert torch.equal(found.test.x, plain.test.x) and torch.equal(found.test.y, plain.test.y)
    assert len(first.train) == len(other.train) or option == "imbalance"  # classes differ a little in size


def test_the_split_seed_does_not_decide_a_test_set_that_is_taken_from_the_training_rows(tmp_path):
    digits = data.load("digits").train
    np.savez(tmp_path / "a.npz", x_train=digits.x.numpy(), y_train=digits.y.numpy())
    for spec in (f"npz:{tmp_path}/a.npz?test=0.3", "digits-mosaic"):
        first, other = (data.load(spec, val_fraction=0.2, split_seed=seed) for seed in (1, 2))
        assert torch.equal(first.test.x, other.test.x) and torch.equal(first.test.y, other.test.y)
        assert set(rows_of(first.val)) != set(rows_of(other.val))


def test_statistics_are_of_the_final_training_split():
    part = data.load("digits", train_fraction=0.3)
    np.testing.assert_allclose(part.mean, part.train.x.double().mean() / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        ({"val_fraction": -0.1}, "val_fraction must be at least 0 and below 1, got -0.1"),
        ({"val_fraction": 1e-6}, "val_fraction=1e-06 would leave 1297 training and 0 validation rows of digits"),
        ({"train_fraction": 0.0}, "train_fraction must be above 0 and at most 1, got 0.0"),
        ({"train_fraction": float("nan")}, "train_fraction must be above 0 and at most 1, got nan"),
        ({"train_fraction": 0.001}, "train_fraction=0.001 keeps 1 rows of digits, none of class"),
        ({"label_noise": 2}, "label_noise must be at least 0 and at most 1, got 2"),
        ({"imbalance": 0.5}, "imbalance must be at least 1, got 0.5"),
        ({"image_size": 0}, "image_size must be a whole number from 1 to 4096, got 0"),
        ({"image_size": 8.0}, "image_size must be a whole number from 1 to 4096, got 8.0"),
    ],
)
def test_bad_options(options, message):
    assert error("digits", **options).startswith(message)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar", "unknown dataset 'cifar', did you mean 'cifar10'; accepted are digits, cifar10,"),
        ("", "unknown dataset ''"),
        ("digits?grid=2", "digits?grid=2: unknown option 'grid', accepted here: none"),
        ("folder:", "folder:: a path must follow, as in folder:PATH"),
        ("npz:", "npz:: a path must follow"),
        ("digits-mosaic?grid=1x1", "mosaic grid must be rows x columns, up to 16 each and more than one cell, got 1x1"),
        ("digits-mosaic?grid=a", "digits-mosaic?grid=a: option grid must be ROWSxCOLUMNS, got 'a'"),
        ("digits-mosaic?test=0", "mosaic test must be at least 1 mosaic, got 0"),
        ("mosaic(mosaic(digits))", "mosaic(mosaic(digits)): a mosaic of mosaics is not supported"),
        ("mosaic(nothing)", "unknown dataset 'nothing'"),
        ("mosaic()", "mosaic(): the parentheses must contain a dataset"),
    ],
)
def test_bad_specs(spec, message):
    assert error(spec).startswith(message)


def test_a_bare_folder_gets_a_hint(tmp_path):
    assert f"did you mean 'folder:{tmp_path}'" in error(str(tmp_path))


@pytest.mark.parametrize("option", ["label_noise", "imbalance"])
def test_single_label_options_on_multilabel_data(room, option):
    value = {"label_noise": 0.1, "imbalance": 2.0}[option]
    line = error(room[1]["arff"], **{option: value})
    assert line == f"{option} is for single-label data, and arff:smoke (smoke) is multi-label"


def test_image_size_shrinks_once_and_grows_in_batches(room):
    small = data.load("digits", image_size=4)
    assert small.train.x.shape[1:] == (1, 4, 4) and small.input_shape == (1, 4, 4)
    large = data.load("digits", image_size=16)
    assert large.train.x.shape[1:] == (1, 8, 8) and large.input_shape == (1, 16, 16)
    x, _ = next(data.eval_batches(large, "test", 2))
    assert x.shape == (2, 1, 16, 16)
    assert error(room[1]["arff"], image_size=8).startswith("image_size is for images")


def test_fingerprint_sees_every_part():
    digits = data.load("digits")
    x = digits.test.x.clone()
    x[7, 0, 3, 3] ^= 1
    assert replace(digits, test=data.Split(x, digits.test.y)).fingerprint() != digits.fingerprint()
    assert replace(digits, classes=tuple("abcdefghij")).fingerprint() != digits.fingerprint()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tiny-imagenet", "coco", "coco2017", "nuswide"])
def test_a_missing_dataset_says_what_to_put_where(name, tmp_path):
    with pytest.raises(data.DataError) as caught:
        data.load(name, tmp_path / "nowhere")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"{name} not found under {tmp_path / 'nowhere'}: expected")
    assert "get it from: http" in rest[0] or "get it from: images: http" in rest[0]
    assert "layout:" in rest[1]


def test_root_comes_from_the_environment(room, monkeypatch):
    monkeypatch.setenv("GSOFTMAX_DATA", str(room[0]))
    assert data.load("cifar10").name == "cifar10 (smoke)"


# CIFAR


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
@pytest.mark.parametrize("archive", [False, True])
def test_cifar_agrees_with_torchvision(name, classes, archive, tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision")
    write_cifar_archive(tmp_path, name) if archive else data.write_smoke(name, tmp_path)
    ours = data.load(name, tmp_path)
    assert ours.name == f"{name} (smoke)" and ours.num_classes == classes and ours.input_shape == (3, 32, 32)
    if archive:
        shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path, filter="data")
    reader = torchvision.datasets.CIFAR10 if name == "cifar10" else torchvision.datasets.CIFAR100
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5: True)
    for train, split in ((True, ours.train), (False, ours.test)):
        theirs = reader(str(tmp_path), train=train)
        assert np.array_equal(split.x.permute(0, 2, 3, 1).numpy(), theirs.data)
        assert split.y.tolist() == list(theirs.targets)
    assert list(ours.classes) == theirs.classes


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar_written_by_python_3_is_read_too(protocol, spoiled, tmp_path):
    folder = spoiled("cifar-10-batches-py")
    expected = data.load("cifar10", tmp_path).fingerprint()
    for file in set(folder.iterdir()) - {folder / "SMOKE"}:
        content = pickle.loads(file.read_bytes(), encoding="bytes")
        file.write_bytes(pickle.dumps({k.decode(): v for k, v in content.items()}, protocol=protocol))
    if protocol == 5:  # it stores arrays in another way
        assert "is rejected" in error("cifar10", tmp_path)
    else:
        assert data.load("cifar10", tmp_path).fingerprint() == expected


# folders


def test_folder_in_memory_matches_pillow(room):
    root, specs = room
    tree = data.load(specs["folder"])
    assert tree.kind == "images" and tree.classes == ("blue", "green", "red") and tree.name.endswith("(smoke)")
    for part, split in (("train", tree.train), ("test", tree.test)):
        files = sorted((root / "folder" / part).glob("*/*.jpg"))
        assert len(files) == len(split)
        for file, x, y in zip(files, split.x, split.y, strict=True):
            assert np.array_equal(np.asarray(PIL.open(file)), x.permute(1, 2, 0).numpy())
            assert tree.classes[y] == file.parent.name


@pytest.fixture
def tree(tmp_path):
    """Writes images, 20 x 20 unless said otherwise, in class folders; the spec that loads them."""

    def write(classes="ab", parts=("train", "test"), size=(20, 20), count=3, mode="RGB") -> str:
        files = smoke.folder_files(tuple(classes), dict.fromkeys(parts, count), size, "png")
        gray = {name: np.asarray(PIL.fromarray(pixels).convert(mode)) for name, pixels in files.items()}
        smoke.write_files(tmp_path, gray)
        return f"folder:{tmp_path}"

    return write


def test_large_or_mixed_images_stay_files(tree):
    tree("a")
    mixed = data.load(tree("b", size=(20, 24)))
    assert mixed.kind == "files" and mixed.input_shape == (3, 224, 224) and mixed.mean.shape == (3,)
    brought = data.load(tree("b", size=(20, 24)), image_size=16)
    assert brought.kind == "images" and brought.train.x.shape == (6, 3, 16, 16)
    large = data.load(tree(size=(70, 80)), image_size=96)
    assert large.kind == "files" and large.input_shape == (3, 96, 96)
    assert data.load(tree(size=(70, 80)), image_size=32).kind == "images"


def test_too_many_small_images_stay_files(tree, monkeypatch):
    monkeypatch.setattr(images, "SMALL_BYTES", 1000)
    assert data.load(tree()).kind == "files"


@pytest.mark.parametrize("lost", [False, True])
def test_many_files_are_read_by_several_processes(room, monkeypatch, lost):
    expected = data.load(room[1]["folder"]).fingerprint()
    monkeypatch.setattr(images, "_CHUNK", 2)
    monkeypatch.setattr(images, "cores", lambda: 3)
    calls, parent = [], os.getpid()
    read, decode = images.read_files, images.decode
    monkeypatch.setattr(images, "read_files", lambda *a: calls.append(a[2]) or read(*a))
    if lost:  # worker processes that die: the parent does the work
        monkeypatch.setattr(images, "decode", lambda *a, **k: decode(*a, **k) if os.getpid() == parent else os._exit(1))
    assert data.load(room[1]["folder"]).fingerprint() == expected
    assert calls == ([3] + [0] * lost if sys.platform == "linux" else [0])


def test_problems_in_several_processes(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_CHUNK", 1)
    monkeypatch.setattr(images, "cores", lambda: 2)
    spec, other = tree(count=6), tmp_path / "test" / "b" / "0005.png"
    PIL.new("RGB", (20, 24)).save(other)
    assert data.load(spec).kind == "files"
    other.write_bytes(b"nothing" + images._ENDS[1])  # it ends as a PNG does
    assert error(spec) == f"{other} is not a readable image: not a known image format"


def test_gray_images_have_one_channel(tree, tmp_path):
    gray = data.load(tree(mode="L"))
    assert gray.input_shape == (1, 20, 20) and not gray.augment.flip
    smoke.write_files(tmp_path, {"test/a/0000.png": smoke.image([1], 3, size=(20, 20))})  # one image in color
    assert data.load(f"folder:{tmp_path}").input_shape == (3, 20, 20)


def test_folder_val_and_missing_test(tree):
    assert data.load(tree(parts=("train", "val"))).val is None  # val is the test set where there is no other
    assert len(data.load(tree(parts=("test",))).val) == 6


def test_folder_without_parts_is_split(tree):
    spec = tree(parts=(".",), count=10)
    assert data.load(spec).fingerprint() == data.load(f"{spec}?test=0.2").fingerprint()
    split = data.load(f"{spec}?test=0.3")
    assert torch.bincount(split.train.y).tolist() == [7, 7] and torch.bincount(split.test.y).tolist() == [3, 3]
    for bad in ("0", "1", "1.5", "x"):
        assert f"option test must be a fraction between 0 and 1, got '{bad}'" in error(f"{spec}?test={bad}")


def test_folder_mistakes(tree, tmp_path):
    assert "not found: expected a folder there" in error(f"folder:{tmp_path / 'nowhere'}")
    assert "must have at least 2 classes, got 1: a" in error(tree("a"))
    tree("ab")
    assert "test/ has folders that are not among the 2 classes of train/ ('a', 'b'): 's'" in error(
        tree("s", parts=("test",))
    )


def test_folder_with_train_alone_sets_the_same_test_images_aside_for_every_seed(tree, tmp_path):
    spec = tree(parts=("train",), count=10)
    one, other = (data.load(spec, train_fraction=0.5, split_seed=seed) for seed in (0, 1))
    assert torch.equal(one.test.x, other.test.x) and torch.bincount(one.test.y).tolist() == [2, 2]
    assert "4 of 20 images are set aside as the test set, the same for every seed" in one.notes
    assert not {x.numpy().tobytes() for x in one.train.x} & {x.numpy().tobytes() for x in one.test.x}


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_folder_with_train_and_validation(tree, name):
    tested = data.load(tree(parts=("train", name)))
    assert len(tested.test) == 6 and tested.val is None
    assert tested.notes == ("val is the test set, because there is no other",)


def test_folder_with_other_classes_in_the_test_split(tree, tmp_path):
    spec = tree("abc", parts=("train",))
    assert data.load(tree("ab", parts=("test",))).notes == ("test/ has no images of 'c'",)
    tree("wxyz", parts=("test",))
    expected = "test/ has folders that are not among the 3 classes of train/ ('a', 'b', 'c'): 'w', 'x', 'y' and 1 more"
    assert error(spec) == f"{spec}: {expected}"


def test_folder_with_an_empty_class(tree, tmp_path):
    spec = tree()
    (tmp_path / "train" / "c").mkdir()
    what = "1 of 3 class folders have no images: 'c'"
    assert error(spec) == f"{spec}: {what}; fill or remove them, or check=false leaves them out"
    assert data.load(spec, check=False).notes == (what,)


def test_folder_with_images_but_no_classes(tree, tmp_path):
    spec = f"folder:{tmp_path}"
    assert "has no images in <class>/" in error(spec)
    PIL.new("RGB", (9, 9)).save(tmp_path / "one.png")
    assert "has no images in <class>/, and 1 outside of class folders (csv:FILE reads labels from a file)" in error(
        spec
    )
    (tmp_path / "train").mkdir()
    (tmp_path / "one.png").rename(tmp_path / "train" / "one.png")
    assert "has no images in train/<class>/, and 1 outside of class folders" in error(spec)


@pytest.mark.parametrize("size", [None, 16])
def test_unreadable_images_are_counted_and_left_out(tree, tmp_path, size):
    spec = tree(size=(70, 80))
    (tmp_path / "train" / "a" / "0000.png").write_bytes(b"")
    (tmp_path / "train" / "b" / "page.jpg").write_text("<html>not found</html>")
    what = "2 of 7 train images cannot be used (1 empty, 1 damaged), first train/a/0000.png: replace them"
    with pytest.raises(data.DataError) as found:
        data.load(spec, image_size=size)
    assert str(found.value) == f"{tmp_path}: {what}; check=false leaves them out"
    rest = data.load(spec, image_size=size, check=False)
    assert len(rest.train) == 5 and rest.notes == ("2 of 7 train images left out (1 empty, 1 damaged)",)


# csv


@pytest.fixture
def listed(tree, tmp_path):
    """Writes a table beside ten images of each of two classes; the spec that loads it."""
    tree(parts=(".",), count=10)

    def write(text: str) -> str:
        (tmp_path / "labels.csv").write_text(text, "utf-8")
        return f"csv:{tmp_path / 'labels.csv'}"

    return write


def test_csv_agrees_with_the_folders(listed, tmp_path):
    rows = [f"{name}/{i:04}.png,{name}" for name in "ab" for i in range(10)]
    one, other = data.load(listed("\ufeffpath,label\r\n" + "\r\n".join(rows))), data.load(f"folder:{tmp_path}")
    assert one.fingerprint() == other.fingerprint() and one.notes == other.notes and one.classes == ("a", "b")
    assert one.name == "csv:labels.csv"


def test_csv_with_splits_and_several_labels(listed):
    text = "split, file ,note,labels\ntrain,a/0000.png,x,oak; elm\ntrain,a/0001.png,,\ntrain,b/0002.png,,elm|ash|elm\n"
    found = data.load(listed(f"{text}\nvalid,a/0003.png,,ash\nTest,b/0004.png,,oak\n"))
    assert found.multilabel and found.classes == ("ash", "elm", "oak") and not found.notes
    assert found.train.y.tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 0]]
    assert found.val.y.tolist() == [[1, 0, 0]] and found.test.y.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with a line of column names, path and label or labels, got 'nothing'"),
        ("a/0000.png,a\n", "must begin with a line of column names, path and label or labels, got 'a/0000.png, a'"),
        ("path,label,labels\n", "must begin with a line of column names"),
        ("path,label\n\n", "lists no image"),
        ("path,label\na/0000.png\n", "line 2 must have 2 columns, got 1"),
        (
            "path,label\na/0000.png,a\na/0001.png,\n",
            "label must be one class, got ''; a column called labels holds any",
        ),
        ("path,label\na/0000.png,a;b\n", "label must be one class, got 'a;b'; a column called labels holds any number"),
        ("path,label\na/0000.png,a\na/./0000.png,b\n", "a/0000.png more than once: one line per image"),
        ("path,label\na/0000.png,a\n", "must have at least 2 classes in its training rows, got 'a'"),
        ("path,labels\na/0000.png,\n", "must have at least 2 classes in its training rows, got none"),
        ("path,label,split\na/0000.png,a,rest\n", "split must be train, val or test, got 'rest'"),
        ("path,label,split\na/0000.png,a,test\n", "has no row whose split is train"),
        (
            "path,label,split\na/0000.png,a,train\na/0001.png,b,train\na/0002.png,c,test\n",
            "has labels that are in no training row: 'c'",
        ),
        (
            "path,label\na/0000.png,a\nb/none.png,b\n",
            "1 of 2 train images cannot be used (1 missing), first b/none.png",
        ),
        ('path,label\n"a/0000.png,a\n', "is damaged: unexpected end of data"),
    ],
)
def test_csv_mistakes(text, message, listed):
    assert message in error(listed(text))


def test_csv_that_is_no_text(tmp_path):
    assert "not found: expected a file there" in error(f"csv:{tmp_path / 'labels.csv'}")
    (tmp_path / "labels.csv").write_bytes(b"\xff\xfe\0")
    assert "labels.csv is damaged: 'utf-8' codec can't decode" in error(f"csv:{tmp_path / 'labels.csv'}")


def test_a_path_is_told_its_spec(tmp_path, capsys):
    for name, spec in (("x.csv", "csv:"), ("x.npz", "npz:"), ("x.arff", "arff:"), ("photos", "folder:")):
        path = tmp_path / name
        path.mkdir() if name == "photos" else path.write_bytes(b"")
        assert f"did you mean '{spec}{path}'" in error(str(path))
        assert main(["compare", str(path)]) == 2
        assert f"did you mean {spec}{path}\n" in capsys.readouterr().err
    assert "did you mean" not in error(str(tmp_path / "nothing.csv"))


def test_tiny_imagenet(room):
    root, _ = room
    tiny = data.load("tiny-imagenet", root)
    assert tiny.summary() == "tiny-imagenet (smoke): 40 train, 15 test, 5 classes, 3x64x64 images"
    assert tiny.classes[2] == "color 2"
    folder = root / "tiny-imagenet-200"
    lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
    wnids = (folder / "wnids.txt").read_text().split()
    for line, x, y in zip(lines, tiny.test.x, tiny.test.y, strict=True):
        name, wnid = line.split()[:2]
        assert wnids[y] == wnid
        assert np.array_equal(np.asarray(PIL.open(folder / "val" / "images" / name)), x.permute(1, 2, 0).numpy())


# COCO


def test_coco_labels(room):
    root, _ = room
    loaded = data.load("coco", root, image_size=64)
    assert loaded.num_classes == 80 and loaded.multilabel and loaded.kind == "files"
    assert loaded.classes[11] == "pattern 13"  # ids have gaps: 12 is not used
    for part, split in (("train2014", loaded.train), ("val2014", loaded.test)):
        content = json.loads((root / "coco" / "annotations" / f"instances_{part}.json").read_text())
        names = {c["id"]: c["name"] for c in content["categories"]}
        files = {i["id"]: i["file_name"] for i in content["images"]}
        truth: dict[str, set[str]] = {}
        for a in content["annotations"]:
            truth.setdefault(files[a["image_id"]], set()).add(names[a["category_id"]])
        assert len(truth) == len(split)
        for path, y in zip(split.x, split.y, strict=True):
            assert {loaded.classes[i] for i in y.nonzero()[:, 0]} == truth[Path(path).name]
            assert Path(path).parent.name == part


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 10**6])
def test_coco_reader_does_not_depend_on_the_chunk(chunk, monkeypatch, tmp_path):
    lists = {"licenses": [], "a": [1, {"b": [1, "}]"]}, 'é\\"'], "z": [[], 2.5e3]}
    content = {"info": 12, "x": None, **lists, "n": {"m": [1]}}
    expected = [(k, i) for k, v in content.items() if isinstance(v, list) for i in v]
    monkeypatch.setattr(coco, "_CHUNK", chunk)
    for text in (json.dumps(content), json.dumps(content, indent=2, ensure_ascii=False), "{}"):
        file = tmp_path / "x.json"
        file.write_text(text, encoding="utf-8")
        with open(file, encoding="utf-8") as stream:
            assert list(coco._items(stream)) == (expected if len(text) > 2 else [])


LABELS, LIST = (f"nuswide/clean/nus_wide_train_{what}.txt" for what in ("label", "imglist"))
INSTANCES = "coco/annotations/instances_train2014.json"


@pytest.mark.parametrize(  # many more damaged files, read through the command line, are in test_bad_inputs.py
    ("file", "edit", "message"),
    [
        (INSTANCES, lambda s: s[: len(s) // 2], "is damaged: the file ends too early or is not JSON"),
        (INSTANCES, lambda s: "[1, 2]", "is damaged: expected {, got '['"),
        (INSTANCES, lambda s: '{"a": [' + "[" * 100000, "is damaged"),
        (INSTANCES, lambda s: s.replace('"image_id"', '"image"', 1), "is damaged: an item without 'image_id'"),
        (INSTANCES, lambda s: s.replace('"category_id": ', '"category_id": 1000'), "and one is not listed"),
        (INSTANCES, lambda s: s.replace('"image_id": ', '"image_id": 1.5, "z": '), "expected an integer id, got '1.5'"),
        (INSTANCES, lambda s: s.replace('"COCO_train2014', '"../COCO_train2014'), "which is not a plain file name"),
        (INSTANCES, lambda s: s.replace('"images"', '"pictures"'), "lists 0 images and 80 categories"),
        (INSTANCES, lambda s: s.replace('"annotations"', '"others"'), "labels no image"),
        (LABELS, lambda s: s.replace("0", "2", 1), "line 1 must be 81 times 0 or 1"),
        (LIST, lambda s: s.split("\n", 1)[1], "has 23 lines but nus_wide_train_label.txt has 24"),
        (LIST, lambda s: s.replace("images/", "../../", 1), "leads out of the images folder"),
        (LIST, lambda s: s.replace(".jpg ", ".jpg x", 1), "must have a path and a number in each line"),
    ],
)
def test_damaged_annotations(file, edit, message, spoiled, tmp_path):
    name, _, rest = file.partition("/")
    path = spoiled(name) / rest
    path.write_text(edit(path.read_text()))
    line = error(name, tmp_path)
    assert line.startswith(str(path)) and message in line


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("cifar10", "cifar-10-batches-py", "data_batch_1 is damaged or not the published file: MD5"),
        ("tiny-imagenet", "tiny-imagenet-200", "is incomplete: expected 200 classes, 100,000 training and 10,000"),
        ("coco", "coco", "expected 82,783 images, 82,081 with a label, got 24 and 21"),
    ],
)
def test_published_files_are_required_without_the_marker(name, folder, message, spoiled, tmp_path):
    expected = data.load(name, spoiled(folder).parent).fingerprint()
    (tmp_path / folder / "SMOKE").unlink()
    assert message in error(name, tmp_path)
    unchecked = data.load(name, tmp_path, check=False)
    assert unchecked.name == name and unchecked.fingerprint() == expected


# NUS-WIDE


def test_nuswide(room):
    root, _ = room
    loaded = data.load("nuswide", root)
    assert loaded.summary() == "nuswide (smoke): 21 train, 11 test, 81 labels, 3x224x224 image files"
    clean = root / "nuswide" / "clean"
    lines = (clean / "nus_wide_train_imglist.txt").read_text().splitlines()
    rows = np.loadtxt(clean / "nus_wide_train_label.txt", dtype=int)
    kept = [i for i, line in enumerate(lines) if line.split()[1] != "0"]
    assert np.array_equal(loaded.train.y.numpy(), rows[kept])
    for i, path in zip(kept, loaded.train.x, strict=True):
        assert path.endswith(lines[i].split()[0]) and Path(path).is_file()
    assert loaded.classes[3] == "concept03"


# npz


X, Y = np.arange(24.0).reshape(6, 4), np.arange(6) % 2
PIXELS = (uniform(6 * 5 * 7 * 3, 0) * 256).astype(np.uint8)


@pytest.fixture
def npz(tmp_path):
    """Writes a table of two classes, with changes (None leaves an array out); the spec that loads it."""

    def write(**changes) -> str:
        arrays = {"x_train": X, "y_train": Y, "x_test": X[:2], "y_test": Y[:2]} | changes
        np.savez(tmp_path / "x.npz", **{k: v for k, v in arrays.items() if v is not None})
        return f"npz:{tmp_path / 'x.npz'}"

    return write


def test_npz_tables_and_names(npz):
    table = data.load(npz())
    assert table.kind == "table" and table.input_shape == (4,) and table.classes == ("0", "1")
    assert torch.equal(table.train.x, torch.from_numpy(X).float())
    assert data.load(npz(names=np.array(["no", "yes", "maybe"]))).classes == ("no", "yes", "maybe")
    words = data.load(npz(y_train=np.array(list("babbab")), y_test=np.array(list("ba"))))
    assert words.classes == ("a", "b") and words.train.y.tolist() == [1, 0, 1, 1, 0, 1]
    gaps = data.load(npz(y_train=Y * 5 - 1, y_test=Y[:2] * 5 - 1))
    assert gaps.classes == ("-1", "4") and gaps.test.y.tolist() == [0, 1]
    many = data.load(npz(y_train=np.eye(6, 3), y_test=np.eye(2, 3)))
    assert many.multilabel and many.train.y.dtype == torch.uint8 and many.num_classes == 3


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (PIXELS.reshape(6, 5, 7, 3), PIXELS.reshape(6, 5, 7, 3).transpose(0, 3, 1, 2)),
        (PIXELS.reshape(6, 3, 5, 7), PIXELS.reshape(6, 3, 5, 7)),
        (PIXELS.reshape(6, 15, 7), PIXELS.reshape(6, 1, 15, 7)),
    ],
    ids=["nhwc", "nchw", "nhw"],
)
def test_npz_images(x, expected, npz):
    held = data.load(npz(x_train=x, x_test=x[:2]))
    assert held.kind == "images" and np.array_equal(held.train.x.numpy(), expected)


def test_npz_splits(npz):
    split = data.load(npz(x_test=None, y_test=None) + "?test=0.34")
    assert (len(split.train), len(split.test)) == (4, 2)
    held = data.load(npz(x_val=X[2:4], y_val=Y[2:4]), val_fraction=0.5)
    assert len(held.val) == 2 and len(held.train) == 6  # a validation split that came with the data stays


@pytest.mark.parametrize(  # more in test_bad_inputs.py
    ("change", "message"),
    [
        ({"x_test": None}, "has no array x_test, only x_train, y_test, y_train"),
        ({"x_train": np.zeros((6, 4), "<U3")}, "x_train must be numbers"),
        ({"x_test": np.zeros((2, 5))}, "x_test must have rows shaped (4,), got (5,)"),
        ({"y_train": np.arange(5)}, "inputs and labels must have the same number of rows, got 6 and 5"),
        ({"y_test": np.array(["a", "b"])}, "y_test must be of the same kind as y_train"),
        ({"x_test": np.zeros((0, 4)), "y_test": np.zeros(0, int)}, "has no rows in the test split"),
    ],
)
def test_npz_mistakes(change, message, npz):
    assert message in error(npz(**change))


# ARFF


DENSE = """% a comment
@RELATION 'with spaces: -C 2'

@Attribute "first one" REAL
@attribute second\tinteger
@attribute 'it\\'s' {red, 'dark blue', "a,b"}
@attribute kind {no,yes}
@attribute l1 {0,1}
@attribute l2 {1,0}
@data
% another
1.5, -2, 'dark blue', yes, 0, 1

2e3,\t7 , "a,b",no,1,0
-0.25,3,red,no,1,1
"""


def test_arff_dense_with_quotes(tmp_path):
    file = tmp_path / "x.arff"
    file.write_text(DENSE)
    table = tables.read_arff(file)
    assert table.relation == "with spaces: -C 2"
    assert [a.name for a in table.attributes] == ["first one", "second", "it's", "kind", "l1", "l2"]
    assert table.attributes[2].values == ("red", "dark blue", "a,b")
    assert table.data.tolist() == [[1.5, -2, 1, 1, 0, 0], [2000, 7, 2, 0, 1, 1], [-0.25, 3, 0, 0, 1, 0]]
    split = tables.columns(table, [4, 5], file)
    assert split.x.tolist() == [[1.5, -2, 0, 1, 0, 1], [2000, 7, 0, 0, 1, 0], [-0.25, 3, 1, 0, 0, 0]]
    assert split.y.tolist() == [[0, 1], [1, 0], [1, 1]]  # the value 1, wherever it is in the list


def test_arff_sparse(tmp_path):
    file = tmp_path / "x.arff"
    header = "@relation r\n@attribute a numeric\n@attribute b {p,'q r'}\n@attribute c {0,1}\n@data\n"
    file.write_text(header + "{0 2.5, 2 1}\n{}\n{1 'q r',2 0}\n{ 0 -1 }\n")
    assert tables.read_arff(file).data.tolist() == [[2.5, 0, 1], [0, 0, 0], [0, 1, 0], [-1, 0, 0]]


def test_arff_against_scipy(room):
    from scipy.io import arff

    root, _ = room
    file = root / "arff" / "smoke-train.arff"
    theirs, _ = arff.loadarff(file)
    ours = tables.read_arff(file)
    columns = [theirs[name].astype(float) for name in theirs.dtype.names]
    assert np.array_equal(ours.data, np.stack(columns, 1))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_arff_round_trip(tmp_path_factory, draw):
    text = st.text(st.characters(blacklist_categories=("Cs", "Cc"), whitelist_characters="\t\n'\"\\,{}%?"), max_size=8)
    names = draw.draw(st.lists(text.filter(lambda s: s.strip() == s and s), min_size=1, max_size=5, unique=True))
    attributes = []
    for name in names:
        values = draw.draw(st.none() | st.lists(text, min_size=1, max_size=4, unique=True))
        attributes.append(tables.Attribute(name, None if values is None else tuple(values)))
    rows = draw.draw(st.integers(0, 4))
    number = st.floats(allow_nan=False, allow_infinity=False)
    cells = [
        [draw.draw(number if a.values is None else st.integers(0, len(a.values) - 1)) for a in attributes]
        for _ in range(rows)
    ]
    array = np.array(cells, dtype=np.float64).reshape(rows, len(attributes))
    file = tmp_path_factory.mktemp("arff") / "x.arff"
    write_arff(file, names[0], attributes, array, sparse=draw.draw(st.booleans()))
    back = tables.read_arff(file)
    assert back.relation == names[0]
    assert back.attributes == tuple(attributes)
    assert np.array_equal(back.data, array)


def _pair(folder: Path, xml: str | None = None, relation: str = "r", last: str = "{0,1}") -> str:
    columns = ("l0 {0,1}", "f numeric", "l1 {0,1}", f"l2 {last}")
    header = f"@relation '{relation}'\n" + "".join(f"@attribute {c}\n" for c in columns) + "@data\n"
    (folder / "x-train.arff").write_text(header + "0,1,0,1\n1,2,1,0\n0,3,1,1\n1,4,0,0\n")
    (folder / "x-test.arff").write_text(header + "1,9,1,1\n")
    if xml is not None:
        (folder / "x.xml").write_text(xml)
    return f"arff:{folder / 'x-train.arff'}"


def test_arff_files_with_a_suffix_behind_train(tmp_path):
    _pair(tmp_path, '<labels><label name="l0"/></labels>')
    for part in ("train", "test"):
        (tmp_path / f"x-{part}.arff").rename(tmp_path / f"trainx-{part}-sparse.arff")
    (tmp_path / "x.xml").rename(tmp_path / "trainx.xml")
    loaded = data.load(f"arff:{tmp_path / 'trainx-train-sparse.arff'}")
    assert loaded.classes == ("l0",) and len(loaded.test.y) == 1 and loaded.name == "arff:trainx-sparse"


def test_arff_label_columns(tmp_path):
    spec = _pair(tmp_path)
    assert data.load(spec).classes == ("l1", "l2")
    assert data.load(spec + "?labels=1").classes == ("l2",)
    assert data.load(f"arff:{tmp_path / 'x'}").classes == ("l1", "l2")
    assert data.load(f"arff:{tmp_path / 'x-train.arff'},{tmp_path / 'x-test.arff'}").classes == ("l1", "l2")
    assert data.load(_pair(tmp_path, relation="r: -C 1")).classes == ("l0",)
    assert data.load(_pair(tmp_path, relation="r: -C -1")).classes == ("l2",)
    xml = '<labels xmlns="http://mulan.sourceforge.net/labels"><label name="l2"><label name="l0"/></label></labels>'
    mulan = data.load(_pair(tmp_path, xml))
    assert mulan.classes == ("l0", "l2") and mulan.train.y.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0]]
    assert mulan.train.x.tolist() == [[1, 0], [2, 1], [3, 1], [4, 0]]
    alone = data.load(spec + "?test=0.25&labels=2")
    assert (len(alone.train), len(alone.test)) == (3, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2", "line 6: expected 3 values, got 2"),
        ("x,p,0", "line 6: attribute 'a' must be a finite number, got 'x'"),
        ("nan,p,0", "line 6: attribute 'a' must be a finite number, got 'nan'"),
        ("1_0,p,0", "line 6: attribute 'a' must be a finite number, got '1_0'"),
        ("?,p,0", "line 6: attribute 'a' has a missing value, which is not supported"),
        ("1,zz,0", "line 6: attribute 'b' must be one of {p,q}, got 'zz'"),
        ("{3 1}", "line 6: index 3 is repeated or not below 3"),
        ("{0 1, 0 2}", "line 6: index 0 is repeated or not below 3"),
        ("{0 1", "line 6: a sparse row has no closing brace"),
        ("{a 1}", "line 6: expected `index value` pairs"),
        ("1,'p,0", "line 6: unbalanced quotes"),
    ],
)
def test_arff_bad_rows(line, message, tmp_path):
    file = tmp_path / "x.arff"
    file.write_text("@relation r\n@attribute a numeric\n@attribute b {p,q}\n@attribute c {0,1}\n@data\n" + line + "\n")
    with pytest.raises(data.DataError) as caught:
        tables.read_arff(file)
    assert str(caught.value).startswith(f"{file} {message}")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "there is no @data line"),
        ("@relation r\n@data\n", "there are no attributes"),
        ("@attribute a string\n@data\n", "attribute 'a' has the type 'string', only numeric and nominal"),
        ("@attribute a {x,x}\n@data\n", "the values of 'a' repeat"),
        ("@attribute a {x\n@data\n", "the values of 'a' have no closing brace"),
        ("@attribute a numeric\n@attribute a numeric\n@data\n", "attribute names repeat"),
        ("@attribute\n@data\n", "an attribute without a name"),
        ("@attribute 'a numeric\n@data\n", "unbalanced quotes"),
        ("hello\n", "expected @relation, @attribute or @data, got 'hello'"),
    ],
)
def test_arff_bad_headers(header, message, tmp_path):
    file = tmp_path / "x.arff"
    file.write_text(header)
    with pytest.raises(data.DataError, match=message):
        tables.read_arff(file)


@pytest.mark.parametrize(
    ("pair", "options", "message"),
    [
        ({}, "?labels=0", "labels must be from 1 to 3, got 0"),
        ({}, "?labels=4", "labels must be from 1 to 3, got 4"),
        ({}, "?labels=-1", "labels must be from 1 to 3, got -1"),
        ({}, "?labels=3", "label 'f' must be 0 or 1 in every row"),
        ({"last": "{1,2,0}"}, "", "does not say which columns are labels"),
        ({"last": "{1,2,0}"}, "?labels=1", "label 'l2' must have the values {0,1}, got {1,2,0}"),
        ({"xml": '<labels><label name="zz"/></labels>'}, "", "names the label 'zz', which x-train.arff does not have"),
        ({"xml": "<labels/>"}, "", "names the label '(none)', which x-train.arff does not have"),
        ({"xml": "<labels>"}, "", "is damaged"),
        ({"xml": '<!DOCTYPE x [<!ENTITY a "b">]><labels/>'}, "", "has a document type, which is not allowed"),
    ],
)
def test_arff_mistakes(pair, options, message, tmp_path):
    assert message in error(_pair(tmp_path, **pair) + options)


def test_arff_test_file(tmp_path):
    assert "nowhere.arff not found" in error(f"arff:{tmp_path / 'nowhere.arff'}")
    spec, test = _pair(tmp_path), tmp_path / "x-test.arff"
    test.write_text(test.read_text().replace("attribute f", "attribute g"))
    assert error(spec) == f"{test} must have the same attributes as x-train.arff"
    test.unlink()
    assert "has no test file beside it" in error(spec)


# mosaics


def test_mosaic_against_a_recomputation():
    digits = data.load("digits")
    made = data.load("digits-mosaic?grid=2x3&train=40&test=20&seed=7")
    assert made.name == "digits-mosaic" and made.input_shape == (1, 16, 24) and made.multilabel
    assert (len(made.train), len(made.test)) == (40, 20)
    for part in ("train", "test"):
        owner = dict(zip(rows_of(digits.split(part)), digits.split(part).y.tolist(), strict=True))
        for x, y in zip(made.split(part).x, made.split(part).y, strict=True):
            tiles = [x[:, r : r + 8, c : c + 8].contiguous().numpy().tobytes() for r in (0, 8) for c in (0, 8, 16)]
            assert y.nonzero()[:, 0].tolist() == sorted({owner[t] for t in tiles})  # KeyError: a tile of another split


def test_mosaics_of_validation_share_no_image_with_training():
    made = data.load("digits-mosaic", val_fraction=0.2)
    tiles = {}
    for part in ("train", "val"):
        x = made.split(part).x
        tiles[part] = {
            x[i, 0, r : r + 8, c : c + 8].numpy().tobytes() for i in range(len(x)) for r in (0, 8) for c in (0, 8)
        }
    source = data.load("digits", val_fraction=0.2)
    twins = {*rows_of(source.train)} & {*rows_of(source.val)}
    assert not (tiles["train"] & tiles["val"]) - twins


def test_mosaics_are_seeded_and_use_every_image_alike():
    assert data.load("digits-mosaic").fingerprint() == data.load("mosaic(digits)?seed=0").fingerprint()
    assert data.load("digits-mosaic?seed=1").fingerprint() != data.load("digits-mosaic").fingerprint()
    assert data.load("digits-mosaic", val_fraction=0.2).fingerprint().startswith("3982e9d13cfa72dc")  # never changes
    counts = np.bincount(mosaic.tiles(37, 50, 4, seed=3).ravel(), minlength=37)
    assert counts.max() - counts.min() <= 1


def test_mosaic_of_other_sets(room):
    root, specs = room
    made = data.load(f"mosaic({specs['folder']})?grid=2", root)
    assert made.name == "mosaic(folder:folder) (smoke)" and made.input_shape == (3, 64, 64)
    assert data.load("mosaic(cifar10)", root, image_size=32).input_shape == (3, 32, 32)
    for spec, what in (("coco", "multi-label"), (specs["arff"], "multi-label")):
        assert f"needs a single-label set of small images, and this is {what}" in error(f"mosaic({spec})", root)


# smoke files


def test_smoke_files_are_the_same_every_time(tmp_path):
    for name in data.SMOKE_NAMES:
        specs = [data.write_smoke(name, tmp_path / str(i)) for i in range(2)]
        a, b = (data.load(spec, tmp_path / str(i)) for i, spec in enumerate(specs))
        assert a.name.endswith("(smoke)") and a.fingerprint() == b.fingerprint()
    with pytest.raises(ValueError, match="smoke dataset must be one of cifar10, .*, got 'mnist'"):
        data.write_smoke("mnist", tmp_path)


def test_smoke_images_can_be_learned(room):
    from sklearn.neighbors import KNeighborsClassifier

    root, _ = room
    cifar = data.load("cifar10", root)
    colour = [s.x.float().mean((2, 3)).numpy() for s in (cifar.train, cifar.test)]
    model = KNeighborsClassifier(3).fit(colour[0], cifar.train.y)
    assert model.score(colour[1], cifar.test.y) > 0.9
