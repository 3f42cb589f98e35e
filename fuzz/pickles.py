"""The reader of CIFAR's pickles, which must admit data and nothing else."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gsoftmax.data", "pickletools"]):
    import numpy as np

    from gsoftmax.data import cifar, smoke


def seeds() -> dict[str, bytes]:
    small = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]}
    plain = {"labels": [1, 2], "data": np.zeros((1, 2), np.uint8), "label_names": ["a", "b"]}
    return {"python2": smoke.python2_pickle(small), **{f"protocol{p}": pickle.dumps(plain, p) for p in range(5)}}


def one_input(raw: bytes) -> None:
    try:
        found = cifar.safe_unpickle(raw)
        cifar._names(found, "label_names", Path("meta"))
        cifar._rows(found, "labels", 10, Path("batch"))
    except (ValueError, OSError) as error:
        assert str(error) and "\n" not in str(error)


def _check_alive(_: object) -> None:
    raise AssertionError("a pickle reached the system")


if __name__ == "__main__":
    import os

    os.system = _check_alive  # type: ignore[assignment]
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        for name, content in seeds().items():
            (Path(sys.argv[1]) / name).write_bytes(content)
    atheris.Setup([*sys.argv, "-rss_limit_mb=2048", "-timeout=10"], one_input)
    atheris.Fuzz()
