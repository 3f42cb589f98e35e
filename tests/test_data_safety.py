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
import zlib
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
    with pytest.raises(data.DataError, match="declares .* bytes but holds fewer"):
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
    with pytest.raises(data.DataError, match=r"\(1 damaged\), first test.red.0000.jpg"):
        data.load(spec)


# pixels of more than 8 bits

RAMP = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16  # 0 to 65520


def read(tmp_path, image, name="x.png"):
    if isinstance(image, bytes):
        (tmp_path / name).write_bytes(image)
    else:
        image.save(tmp_path / name)
    return images.read_image(str(tmp_path / name)).numpy()


def png16(pixels: np.ndarray) -> bytes:
    """A PNG of 16 bits per channel, which Pillow does not write in color."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("kind", ["png", "tif", "big-endian tif", "pgm", "color png", "gray png with alpha"])
def test_16_bits_are_scaled_to_8(kind, tmp_path):
    """Pillow's own conversion clips instead: 99.6 % of the pixels would be 255."""
    image = pytest.importorskip("PIL.Image")
    if kind == "pgm":
        made = b"P5 64 64 65535\n" + RAMP.astype(">u2").tobytes()
    elif kind == "big-endian tif":
        made = tiff(RAMP.astype(">u2"), 16, 1)
    elif kind.endswith(("png", "tif")) and " " not in kind:
        made = image.fromarray(RAMP)
    else:
        made = png16(np.stack([RAMP] * (3 if "color" in kind else 2), axis=2))
    found = read(tmp_path, made, f"x.{kind[-3:] if kind[-3:] in ('tif', 'pgm') else 'png'}")
    assert found.shape == (3, 64, 64)
    assert np.abs(found - RAMP / 65535 * 255).max() < 1  # in color Pillow drops the lower byte


def tiff(pixels: np.ndarray, bits: int, form: int) -> bytes:
    """A big-endian gray TIFF; form: 1 whole numbers, 3 floating point."""
    size, raw = pixels.shape, pixels.tobytes()
    entries = {256: size[1], 257: size[0], 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: size[0], 279: len(raw)}
    entries[339] = form
    table = b"".join(struct.pack(">HHII", tag, 4, 1, value) for tag, value in sorted(entries.items()))
    return b"MM\0*" + struct.pack(">I", 8 + len(raw)) + raw + struct.pack(">H", len(entries)) + table + bytes(4)


@pytest.mark.parametrize(
    "pixels, words",
    [
        (RAMP.astype(np.float32), "has pixels from 0 to 65520: floating-point images must be from 0 to 1"),
        (np.full((4, 4), np.nan, np.float32), "has pixels from nan to nan: floating-point images must be from 0 to 1"),
        (RAMP.astype(np.float32) / 65520 - 0.1, "has pixels from -0.1 to 0.9"),
        (RAMP.astype(np.int32), "has 32 bits per pixel: save it with 8 or 16"),
    ],
)
def test_pixels_of_an_unknown_range_are_refused(pixels, words, tmp_path):
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(data.DataError, match=f"x.tif {words}"):
        read(tmp_path, image.fromarray(pixels), "x.tif")


def test_floating_point_pixels_from_0_to_1_are_scaled(tmp_path):
    image = pytest.importorskip("PIL.Image")
    found = read(tmp_path, image.fromarray((RAMP / 65520).astype(np.float32)), "x.tif")
    assert np.abs(found - RAMP / 65520 * 255).max() <= 0.5 + 1e-4 and (found[0] == found[2]).all()


# What shows the pixels upright, by orientation (Exif 2.3, tag 274).
UPRIGHT = {2: np.fliplr, 3: lambda v: np.rot90(v, 2), 4: np.flipud, 5: lambda v: v.swapaxes(0, 1)}
UPRIGHT |= {6: lambda v: np.rot90(v, -1), 7: lambda v: np.rot90(v, 2).swapaxes(0, 1), 8: np.rot90}


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("turn", range(10))  # 0 and 9 are no orientations
def test_photos_are_upright(kind, turn, tmp_path):
    """Phones store the pixels as the sensor was held, and how to turn them in EXIF."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    exif = image.Exif()
    exif[274] = turn
    image.fromarray(pixels).save(tmp_path / f"x.{kind}", exif=exif)
    if kind in ("jpg", "webp"):  # which lose digits
        with image.open(tmp_path / f"x.{kind}") as opened:
            pixels = np.asarray(opened)
    found = images.read_image(str(tmp_path / f"x.{kind}")).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(found, UPRIGHT.get(turn, np.asarray)(pixels))
    assert found.shape == ((24, 40, 3) if turn in (5, 6, 7, 8) else (40, 24, 3)) and found.flags.c_contiguous


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_damaged_orientation_does_not_cost_the_photo(tmp_path):
    image = pytest.importorskip("PIL.Image")
    made = image.fromarray(np.zeros((4, 6, 3), np.uint8))
    made.save(tmp_path / "x.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert images.read_image(str(tmp_path / "x.jpg")).shape == (3, 4, 6)


def test_small_images_of_one_size_may_be_turned(tmp_path):
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[274] = 6
    for name, options in (("a", {}), ("b", {"exif": exif})):
        image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / f"{name}.jpg", **options)
    assert images.read_small([str(tmp_path / f"{name}.jpg") for name in "aa"]).shape == (2, 3, 4, 6)
    assert images.read_small([str(tmp_path / f"{name}.jpg") for name in "ab"]) is None  # two sizes


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"])
def test_other_modes_are_read_as_before(mode, tmp_path):
    image = pytest.importorskip("PIL.Image")
    color = image.fromarray(np.stack([RAMP // 256, RAMP.T // 256, RAMP // 512], axis=2).astype(np.uint8))
    made, name = color.convert(mode), "x.tif" if mode in ("CMYK", "PA") else "x.png"
    if mode == "PA":
        made = color.convert("P")
    expected = np.asarray(made.convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(read(tmp_path, made, name), expected)


# what is no file, and what unpacks to far more


@pytest.mark.parametrize("spec", ["folder", "npz", "arff"])
def test_a_pipe_is_refused_and_not_waited_for(spec, tmp_path):
    if spec == "folder":
        spec = data.write_smoke("folder", tmp_path)
        victim = tmp_path / "folder" / "test" / "red" / "0000.jpg"
        victim.unlink()
    else:
        victim, spec = tmp_path / f"x.{spec}", f"{spec}:{tmp_path / f'x.{spec}'}"
        spec += "?test=0.5"
    os.mkfifo(victim)
    with pytest.raises(data.DataError, match="Not a regular file|1 unreadable") as caught:
        data.load(spec)
    assert victim.name in str(caught.value).splitlines()[0]
    assert images.find_defects([str(victim)]) == ["unreadable"]


def test_a_small_archive_must_not_fill_the_memory(tmp_path):
    path, body = tmp_path / "x.npz", bytes(2**20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, rows in (("x_train", 2**18), ("x_test", 1)):
            stream = io.BytesIO()
            header = {"descr": "|b1", "fortran_order": False, "shape": (rows, 1024)}
            np.lib.format.write_array_header_1_0(stream, header)
            with archive.open(f"{name}.npy", "w") as member:
                member.write(stream.getvalue())
                for _ in range(rows // 1024):
                    member.write(body)
    assert path.stat().st_size < 2**19  # it unpacks to 256 MiB, which become a gigabyte of float32
    tracemalloc.start()
    with pytest.raises(data.DataError, match="declares 1,073,741,824 bytes, more than the limit of 536,870,912"):
        data.load(f"npz:{path}")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_small_sparse_table_must_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(core, "SMALL", 2**20)
    path = tmp_path / "x.arff"
    path.write_text("".join(f"@attribute a{i} numeric\n" for i in range(2000)) + "@data\n" + "{}\n" * 1000)
    with pytest.raises(data.DataError, match="more than the limit of .* for a file of"):
        tables.read_arff(path)


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
