"""From 400 photos of mixed sizes to a verdict: the README's own command, timed from its start to the page.

    python -m benchmarks.photos cifar10-jpeg.tar.xz OUT          -> results/photos.json, which docs/photos.md quotes

The archive has JPEG files as train/CLASS/NAME.jpg.  The photos are enlarged to sides from 120 to 640 pixels.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from .common import provenance, write

CLASSES = ("automobile", "bird", "frog", "horse", "ship")
EACH = 80  # photos of every class
SIDES = 120, 640  # pixels, the shortest and the longest


def write_photos(archive: Path, out: Path, classes: tuple[str, ...] = CLASSES, each: int = EACH) -> int:
    """Writes the first photos of every class, enlarged to mixed sizes, as out/CLASS/NUMBER.jpg; how many."""
    rng, counts = np.random.default_rng(0), dict.fromkeys(classes, 0)
    with tarfile.open(archive) as tar:
        for member in tar:
            part, _, name = member.name.partition("/")
            kind = name.partition("/")[0]
            if part == "train" and member.isfile() and counts.get(kind, each) < each:
                file = tar.extractfile(member)
                assert file is not None
                width, height = (int(side) for side in rng.integers(*SIDES, 2, endpoint=True))
                path = out / kind / f"{counts[kind]:03}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.open(io.BytesIO(file.read())).convert("RGB").resize((width, height)).save(path, quality=85)
                counts[kind] += 1
            if min(counts.values()) == each:
                break
    return sum(counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("out", type=Path, help="an empty folder")
    parser.add_argument("changes", nargs="*", help="key=value, for a shorter trial whose numbers are not saved")
    args = parser.parse_args()
    where, count = provenance(), write_photos(args.archive, args.out / "photos")
    words = ["gsoftmax", "compare", "folder:photos", *args.changes]
    # no weights of earlier downloads, so that every machine trains the same network
    environment = os.environ | dict.fromkeys(("TORCH_HOME", "HF_HOME", "HF_HUB_CACHE"), str(args.out / "none"))
    start = time.perf_counter()
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=args.out, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = {"photos": count, "seconds": round(time.perf_counter() - start, 1)}
    print(done.stdout, found)
    if not args.changes:
        write("photos", {"where": where, **found, "command": " ".join(words), "lines": done.stdout.splitlines()})


if __name__ == "__main__":
    main()
