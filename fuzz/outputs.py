"""Files of outputs: the archive of arrays and the CSV; the first byte chooses."""

from __future__ import annotations

import io
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gsoftmax.outputs", "zipfile"]):
    import numpy as np

    from gsoftmax.outputs import open_outputs

warnings.simplefilter("ignore")
FOLDER = Path(tempfile.mkdtemp())
CSV = b'y,cat,"dog, red",p:cat,"p:dog, red"\ncat,1.5,-2,0.9,0.1\n1,0,1e3,0.2,0.8\n'


def seeds() -> dict[str, bytes]:
    arrays = {"x": np.arange(6.0).reshape(3, 2), "y": np.array([0, 1, 0]), "names": np.array(["a", "b"])}
    plain, packed = io.BytesIO(), io.BytesIO()
    np.savez(plain, **arrays)
    np.savez_compressed(packed, **arrays)
    return {"csv": b"\0" + CSV, "npz": b"\1" + plain.getvalue(), "packed": b"\1" + packed.getvalue()}


def one_input(raw: bytes) -> None:
    if not raw:
        return
    path = FOLDER / ("a.csv" if raw[0] % 2 == 0 else "a.npz")
    path.write_bytes(raw[1:])
    try:
        file = open_outputs(path)
        for block in file.blocks(2):
            block = block.take(block.finite() & (block.y != -100 if block.y.ndim == 1 else True))
            block.probabilities(file)
    except (ValueError, OSError) as error:
        assert str(error)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        for name, content in seeds().items():
            (Path(sys.argv[1]) / name).write_bytes(content)
    atheris.Setup([*sys.argv, "-rss_limit_mb=2048", "-timeout=10"], one_input)
    atheris.Fuzz()
