"""Atomic writes, checksums, and folders that one process at a time may use.  Nothing here imports torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .messages import first_line


@contextmanager
def atomic_file(path: Path, checked: bool = False) -> Iterator[Path]:
    """Yields a temporary path that replaces `path` on success; `checked` adds half of its SHA-256 to the name."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path.with_name(f"{path.stem}-{sha256(partial)[:32]}{path.suffix}") if checked else path)
    except OSError:
        raise
    except Exception as error:  # torch and safetensors hide the system's error in messages of their own
        full = shutil.disk_usage(path.parent).free < 2**20
        reason = "no space left on the disk" if full else first_line(error)
        raise OSError(f"{path} cannot be written: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)


def atomic_write(path: Path, text: str) -> None:
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes a folder and locks it; a second process gets a BlockingIOError.  The lock dies with its process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder)), locked(Path(folder)):
    ...     pass
    Traceback (most recent call last):
    BlockingIOError: ... is in use by process ...
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    path = folder / ".lock"
    while True:
        file = open(path, "a+")  # noqa: SIM115 - open as long as the folder is locked
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise BlockingIOError(f"{folder} is in use by {owner}") from None
        except OSError:  # a file system without locks
            break
        # the previous owner may have deleted the file between open and lock
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                break
        file.close()
    _locks.add(file)
    try:
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
