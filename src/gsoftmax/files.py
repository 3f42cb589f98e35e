"""How files are written: whole or not at all, and never through a link; checksums and locks.  Nothing imports torch.

A folder may come from a stranger, so it may contain links at names that can be guessed.  What is written goes into a
new folder with a random name beside its destination, and from there replaces whatever is at the destination: a link
there is replaced, not followed.  Folders below the one that a user named must not be links.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .messages import decoded, first_line

SUMS = "SHA256SUMS"  # checksums of the files beside it
_MOST_JSON = 2**28  # bytes that are read of a JSON file or a list of checksums
_IRREGULAR = "Not a regular file"  # a pipe, a device or a folder
_LEFTOVER = re.compile(r"\.gsoftmax-[0-9a-f]{16}\.partial")
_ABANDONED = 3600  # seconds after which a leftover belongs to no process, also where no lock says so
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would block otherwise


@contextmanager
def atomic_file(path: Path, checked: bool = False) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` on success; `checked` adds half of its SHA-256 to the name.

    The file has the permissions of any new file, whatever the library that writes it chooses.
    """
    remove_leftovers(path.parent, _ABANDONED)
    room = path.with_name(f".gsoftmax-{secrets.token_hex(8)}.partial")
    partial = room / path.name
    try:
        room.mkdir(0o700)
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        os.close(fd)
        yield partial
        partial.chmod(mode)
        sync(partial)
        os.replace(partial, path.with_name(f"{path.stem}-{sha256(partial)[:32]}{path.suffix}") if checked else path)
    except OSError as error:
        ours = error.filename is None or str(error.filename).startswith(str(room))
        if error.errno is None or not ours:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:  # torch and safetensors hide the system's error in messages of their own
        full = shutil.disk_usage(path.parent).free < 2**20
        reason = "no space left on the disk" if full else first_line(error)
        raise OSError(f"{path} cannot be written: {reason}") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def atomic_write(path: Path, text: str) -> None:
    with atomic_file(path) as partial:
        partial.write_text(decoded(text), encoding="utf-8")


def append_line(path: Path, text: str) -> None:
    """Adds a line to a file, which must not be a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NOFOLLOW | _NONBLOCK
    with os.fdopen(_opened(path, flags), "w", encoding="utf-8") as file:
        file.write(text + "\n")


def sync(path: Path) -> None:
    """Returns when the content of a file is on the disk."""
    fd = _opened(path, os.O_RDWR | _NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_read(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file, which must be a regular one: a pipe would wait for ever, and a device has no end."""
    return os.fdopen(_opened(path, os.O_RDONLY | _NONBLOCK), "rb")


def _opened(path: str | os.PathLike[str], flags: int) -> int:
    """The descriptor of a regular file; an OSError that says what is there instead."""
    try:
        fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and os.path.islink(path):
            raise OSError(error.errno, "A link, which is not followed", str(path)) from None
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, _IRREGULAR, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, _IRREGULAR, str(path))
    return fd


def make_folder(root: Path, *names: str) -> Path:
    """Makes root/name/... and returns it; below `root` nothing may be a link."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root
    for name in names:
        folder /= name
        refuse_link(folder)
        folder.mkdir(exist_ok=True)
    return folder


def refuse_link(*folders: Path) -> None:
    """Raises for a folder that is a link: what is written there would end up somewhere else."""
    for folder in folders:
        if folder.is_symlink():
            raise OSError(f"{folder} is a link to another folder, which is not written to")


def remove_leftovers(folder: Path, age: float = 0.0) -> None:
    """Removes what processes that were killed left half-written in a folder.

    folder, age: the folder, and how many seconds nothing has happened there; 0 if its lock says that nobody writes
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _LEFTOVER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                newest = max([entry, *os.scandir(entry.path)], key=lambda e: e.stat(follow_symlinks=False).st_mtime)
                if time.time() - newest.stat(follow_symlinks=False).st_mtime >= age:
                    shutil.rmtree(entry.path, ignore_errors=True)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_read(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file of ours; a ValueError that names the file for anything else."""
    try:
        with open_read(path) as file:
            found = json.loads(file.read(_MOST_JSON))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read: it must hold a JSON object, got {type(found).__name__}")
    return found


def sealed(held: Mapping[str, Any]) -> dict[str, Any]:
    """The same with its checksum under `sha256`: a damaged number would still be a number."""
    rest = {key: value for key, value in held.items() if key != "sha256"}
    return rest | {"sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Writes the checksums of some files of a folder, as `sha256sum --check SHA256SUMS` reads them.

    folder, names: those that are not there are left out
    """
    there = [folder / name for name in names if (folder / name).is_file()]
    atomic_write(folder / SUMS, "".join(f"{sha256(path)}  {path.name}\n" for path in there))


def verify(path: Path) -> None:
    """Raises if the file is not as the checksums beside it say; without checksums nothing is known."""
    try:
        with open_read(path.with_name(SUMS)) as file:
            lines = file.read(_MOST_JSON).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return
    known = next((line[:64] for line in lines if line[64:] == f"  {path.name}"), None)
    if known is not None and sha256(path) != known:
        raise ValueError(f"{path} is damaged: it does not match its checksum in {SUMS}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder and locks it; a second process gets a BlockingIOError.  The lock dies with its process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder)), locked(Path(folder)):
    ...     pass
    Traceback (most recent call last):
    BlockingIOError: ... is in use by process ...
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # exist_ok would fail if another process removed the folder just then
        folder.mkdir()
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    path = folder / ".lock"
    while True:
        file = os.fdopen(_opened(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW | _NONBLOCK), "r+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read(200).strip() or "another process"
            file.close()
            raise BlockingIOError(f"{folder} is in use by {owner}") from None
        except OSError:  # a file system without locks
            break
        # the previous owner may have deleted the file between open and lock
        held = os.fstat(file.fileno())
        with suppress(FileNotFoundError):
            if os.path.samestat(held, path.lstat()):
                break
        file.close()
    _locks.add(file)
    try:
        if os.fstat(file.fileno()).st_nlink > 1:
            raise OSError(f"{path} is another name of some file, which would be overwritten")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        _locks.discard(file)
        file.close()


_locks: set[Any] = set()
if hasattr(os, "register_at_fork"):  # a forked reader of images would keep the lock of a parent that was killed
    os.register_at_fork(after_in_child=lambda: [file.close() for file in _locks])
