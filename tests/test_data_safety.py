"""Malicious files are rejected with an error that names them, and have no effect.  test_fuzz.py mutates good ones."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shlex
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gsoftmax import data
from gsoftmax.data import cifar, core, images, smoke, tables
from tests.writers import write_cifar_archive

FOLDER = "cifar-10-batches-py"


class _Runs:
    """Pickles to a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def _cifar(root: Path, content: bytes) -> None:
    """Smoke files with one batch replaced."""
    data.write_smoke("cifar10", root)
    (root / FOLDER / "data_batch_1").write_bytes(content)


# pickles


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_a_command(protocol, tmp_path):
    proof = tmp_path / "proof"
    evil = pickle.dumps({"data": _Runs(os.system, f"touch {shlex.quote(str(proof))}")}, protocol=protocol)
    pickle.loads(evil)
    assert proof.exists()  # an unrestricted unpickler runs the payload
    proof.unlink()
    _cifar(tmp_path, evil)
    with pytest.raises(data.DataError) as caught:
        data.load("cifar10", tmp_path)
    assert "data_batch_1 is rejected: only arrays, strings, numbers and lists are allowed" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not proof.exists()


CALLS = [(eval, "1"), (exec, "1"), (getattr, (), "count"), (print, "x"), (open, "x"), (bytearray, 5), (np.zeros, 3)]


@pytest.mark.parametrize("call", [*CALLS, (__import__, "os")], ids=lambda call: call[0].__name__)
def test_every_other_callable_is_rejected(call):
    with pytest.raises(data.DataError, match="is rejected"):
        cifar.safe_unpickle(pickle.dumps(_Runs(*call), protocol=2))


@pytest.mark.parametrize(
    "evil",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL
        b"(S'true'\nios\nsystem\n.",  # INST
        b"\x80\x02cbuiltins\neval\n\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",  # a dotted name
        b"Psomething\n.",  # PERSID
        b"\x80\x02K\x01Q.",  # BINPERSID
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x05\x96\x03\x00\x00\x00\x00\x00\x00\x00abc.",  # BYTEARRAY8
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.",  # a codec other than latin1
    ],
)
def test_hand_written_opcodes_are_rejected(evil):
    with pytest.raises(data.DataError, match="is rejected|is damaged"):
        cifar.safe_unpickle(evil)


def test_a_pickle_cannot_change_the_stand_ins():
    # BUILD with slots would set attributes of whatever object is on the stack
    evil = b"\x80\x02cnumpy\ndtype\n(N}X\x04\x00\x00\x00makeK\x01stb."
    before = cifar._GLOBALS["numpy", "dtype"].make
    with pytest.raises(data.DataError, match="state for a function"):
        cifar.safe_unpickle(evil)
    assert cifar._GLOBALS["numpy", "dtype"].make is before


@pytest.mark.parametrize(
    "evil",
    [
        b"\x80\x02K\x01r\xff\xff\xff\x7f.",  # a memo index that would allocate 32 GB
        b"\x80\x02K\x01r\x00\x00\x00\x01.",  # one that would quietly take 256 MB
        b"K\x01p2147483647\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",  # BINBYTES8 of a terabyte
        b"\x80\x02T\xff\xff\xff\x7fx.",  # BINSTRING of 2 GB
        b"\x80\x03B\xff\xff\xff\xffx.",  # BINBYTES of 4 GB
        b"\x80\x02\x8b\xff\xff\xff\x7fx.",  # LONG4
    ],
)
def test_declared_lengths_are_checked(evil):
    tracemalloc.start()
    with pytest.raises(data.DataError):
        cifar.safe_unpickle(evil)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("dtype", ["O", "<i8", "V8", "M8[ns]"])
def test_arrays_of_other_types_are_rejected(dtype, tmp_path):
    array = np.zeros((2, 3072), dtype=dtype)
    _cifar(tmp_path, pickle.dumps({"data": array, "labels": [0, 1]}, protocol=2))
    with pytest.raises(data.DataError, match="data_batch_1 is (damaged|rejected)"):
        data.load("cifar10", tmp_path)


def test_an_array_larger_than_its_bytes(tmp_path):
    good = smoke.python2_pickle({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0] * 4})
    lying = good.replace(b"K\x04M\x00\x0c\x86", b"J\x00\x00\x00\x40M\x00\x0c\x86")  # 2**30 rows
    assert lying != good
    _cifar(tmp_path, lying)
    with pytest.raises(data.DataError, match="data_batch_1 is damaged: cannot reshape"):
        data.load("cifar10", tmp_path)


# tar archives


def _tar(root: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    """An archive, marked as generated so that only its content is checked."""
    root.mkdir(exist_ok=True)
    (root / "SMOKE").touch()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for member, content in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    path = root / "cifar-10-python.tar.gz"
    path.write_bytes(gzip.compress(packed.getvalue()))
    return path


def _good_members(tmp_path: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    data.write_smoke("cifar10", tmp_path / "good")
    names = [n for n in os.listdir(tmp_path / "good" / FOLDER) if n != "SMOKE"]
    return [(tarfile.TarInfo(f"{FOLDER}/{n}"), (tmp_path / "good" / FOLDER / n).read_bytes()) for n in names]


def test_a_tar_that_points_outside_writes_nothing(tmp_path):
    root = tmp_path / "root"
    outside = [tarfile.TarInfo("../escaped"), tarfile.TarInfo(str(tmp_path / "absolute"))]
    outside += [tarfile.TarInfo(f"{FOLDER}/../../escaped2")]
    _tar(root, [*((m, b"x") for m in outside), *_good_members(tmp_path)])
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    assert len(data.load("cifar10", root).train) == 200  # read in memory, members outside are not looked at
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_and_devices_in_a_tar_are_no_files(kind, tmp_path):
    root = tmp_path / "root"
    members = [(m, c) for m, c in _good_members(tmp_path) if not m.name.endswith("data_batch_2")]
    link = tarfile.TarInfo(f"{FOLDER}/data_batch_2")
    link.type, link.linkname = kind, "/etc/passwd"
    _tar(root, [(link, b""), *members])
    with pytest.raises(data.DataError, match="has no regular file cifar-10-batches-py/data_batch_2"):
        data.load("cifar10", root)


def test_a_tar_is_checked_before_it_is_opened(tmp_path, monkeypatch):
    write_cifar_archive(tmp_path)
    (tmp_path / "SMOKE").unlink()
    monkeypatch.setattr(tarfile, "open", lambda *a, **k: pytest.fail("opened"))
    with pytest.raises(data.DataError, match="cifar-10-python.tar.gz is damaged or not the published file: MD5"):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("limit", "value", "member", "size", "message"),
    [
        ("_MAX_ARCHIVE", 2**20, "zeros", 2**21, "unpacks to more than 1,048,576 bytes"),
        ("_MAX_MEMBER", 1000, f"{FOLDER}/test_batch", 2000, "member .*/test_batch declares 2,000 bytes, limit 1,000"),
    ],
)
def test_an_archive_that_is_too_large(limit, value, member, size, message, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, limit, value)
    _tar(tmp_path, [(tarfile.TarInfo(member), bytes(size))])
    with pytest.raises(data.DataError, match=message):
        data.load("cifar10", tmp_path)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    data.write_smoke("cifar10", tmp_path)
    monkeypatch.setattr(cifar, "_MAX_MEMBER", 1000)
    with pytest.raises(data.DataError, match="more than the limit of 1,000 for such a file"):
        data.load("cifar10", tmp_path)


# npz


def test_npz_with_objects_is_rejected_and_runs_nothing(tmp_path):
    proof = tmp_path / "proof"
    array = np.array([_Runs(os.system, f"touch {shlex.quote(str(proof))}")], dtype=object)
    np.savez(tmp_path / "x.npz", x_train=array, y_train=np.arange(1))
    with pytest.raises(data.DataError, match="array x_train contains Python objects"):
        data.load(f"npz:{tmp_path / 'x.npz'}")
    assert not proof.exists()


def _forged_npz(path: Path, header: dict, body: bytes = b"", name: str = "x_train.npy") -> None:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, header)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, stream.getvalue() + body)


def test_npz_that_declares_more_than_it_holds(tmp_path):
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**29, 2)}
    _forged_npz(tmp_path / "x.npz", header)
    with pytest.raises(data.DataError, match="array x_train declares 8,589,934,592 bytes but holds fewer"):
        data.load(f"npz:{tmp_path / 'x.npz'}")
    _forged_npz(tmp_path / "y.npz", {**header, "shape": (2**60, 2)})
    with pytest.raises(data.DataError, match="more than the limit of"):
        data.load(f"npz:{tmp_path / 'y.npz'}")


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04", b"not a zip", b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'"],
    ids=["empty", "head", "text", "npy"],
)
def test_npz_that_is_none(content, tmp_path):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(data.DataError, match="is damaged or not an .npz file") as caught:
        data.load(f"npz:{tmp_path / 'x.npz'}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("../x.txt", b"hello", "holds '../x.txt', which is not an array"),
        ("x_train.npy", b"\x93NUMPY\x01\x00\x10\x00__import__('os')", "is damaged"),
    ],
)
def test_npz_with_strange_members(name, content, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr(name, content)
    with pytest.raises(data.DataError, match=message):
        data.load(f"npz:{tmp_path / 'x.npz'}")


# ARFF


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=60))
def test_arff_fuzz_rows(tmp_path_factory, noise):
    file = tmp_path_factory.mktemp("arff") / "x.arff"
    header = "@relation r\n@attribute a numeric\n@attribute b {p,q}\n@data\n"
    file.write_text(header + noise, encoding="utf-8", errors="replace")
    try:
        table = tables.read_arff(file)
        assert table.data.shape[1] == 2 and np.isfinite(table.data).all()
    except data.DataError as error:
        assert str(error).startswith(f"{file} line ")


def test_arff_limits(tmp_path, monkeypatch):
    file = tmp_path / "x.arff"
    file.write_text("@relation r\n@attribute a numeric\n@data\n" + "1\n" * 100)
    monkeypatch.setattr(core, "MAX_BYTES", 500)
    with pytest.raises(data.DataError, match="declares 504 bytes, more than the limit of 500"):
        tables.read_arff(file)
    monkeypatch.setattr(tables, "_MAX_LINE", 50)
    file.write_text("@relation " + "r" * 60)
    with pytest.raises(data.DataError, match="line 1: more than 50 characters"):
        tables.read_arff(file)
    monkeypatch.setattr(tables, "_MAX_LINE", 2**20)
    monkeypatch.setattr(tables, "_MAX_ATTRIBUTES", 3)
    file.write_text("".join(f"@attribute a{i} numeric\n" for i in range(5)))
    with pytest.raises(data.DataError, match="line 4: more than 3 attributes"):
        tables.read_arff(file)


# images


def test_an_image_that_declares_too_many_pixels(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    spec = data.write_smoke("folder", tmp_path)
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    with pytest.raises(data.DataError, match="declares 32 x 32 pixels, more than the limit of 1,000"):
        data.load(spec)


def test_image_formats_that_call_other_programs_are_rejected(tmp_path):
    pytest.importorskip("PIL")
    spec = data.write_smoke("folder", tmp_path)
    victim = tmp_path / "folder" / "test" / "red" / "0000.jpg"
    victim.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n")
    with pytest.raises(data.DataError, match="0000.jpg is not a readable image: not a known image format"):
        data.load(spec)


def test_names_in_lists_cannot_leave_the_folder(tmp_path):
    data.write_smoke("tiny-imagenet", tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    annotations = folder / "val" / "val_annotations.txt"
    original = annotations.read_text()
    annotations.write_text(original.replace("val_3.JPEG", "../../../secret.JPEG"))
    with pytest.raises(data.DataError, match="which is not a plain file name"):
        data.load("tiny-imagenet", tmp_path)
    annotations.write_text(original)
    (folder / "wnids.txt").write_text("..\nn00000001\n")
    with pytest.raises(data.DataError, match="which is not a plain file name"):
        data.load("tiny-imagenet", tmp_path)
