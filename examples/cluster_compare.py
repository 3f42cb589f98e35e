"""A comparison on a Dask or Ray cluster: each task trains a part of the runs into one folder that all machines share.

    python examples/cluster_compare.py dask tcp://scheduler:8786 8 folder:photos --seeds 20 --out /shared/photos
    python examples/cluster_compare.py ray auto 8 folder:photos --seeds 20 --out /shared/photos

The tasks run `gsoftmax compare ... --only K/N`, and at the end `gsoftmax report` writes the page here.  `threads` in
place of dask runs them on this machine, without a cluster.  The exit status is the largest of the tasks', 128 + N for
one that signal N ended, or else the report's.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any


def gsoftmax(*words: str) -> int:
    """Runs a command and returns its exit status as a shell does: 128 + N after signal N."""
    status = subprocess.run([sys.executable, "-m", "gsoftmax", *words]).returncode
    return 128 - status if status < 0 else status


def train_part(command: list[str], part: int, parts: int) -> int:
    """Trains every `parts`-th run of a comparison from the `part`-th on, and returns the exit status."""
    return gsoftmax("compare", *command, "--only", f"{part}/{parts}")


@contextlib.contextmanager
def cluster(kind: str, address: str, parts: int) -> Iterator[Callable[..., Callable[[], Any]]]:
    """A function that submits a call to the cluster and returns one that waits for its result."""
    if kind == "dask":
        from dask.distributed import Client

        with Client(address) as client:
            yield lambda *call: client.submit(*call, pure=False, retries=2).result
    elif kind == "ray":
        import ray

        ray.init(address=address)
        yield lambda function, *args: partial(ray.get, ray.remote(max_retries=2)(function).remote(*args))
        ray.shutdown()
    elif kind == "threads":
        with ThreadPoolExecutor(parts) as pool:
            yield lambda *call: pool.submit(*call).result
    else:
        raise SystemExit(f"the cluster must be dask, ray or threads, got {kind!r}")


def main(kind: str, address: str, parts: str, *command: str) -> int:
    count = int(parts)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", required=True, help="the folder that all machines share")
    parser.add_argument("--data")
    found, _ = parser.parse_known_args(command)
    with cluster(kind, address, count) as submit:
        waiting = [submit(train_part, list(command), part, count) for part in range(1, count + 1)]
        worst = max(wait() for wait in waiting)
    data = [] if found.data is None else ["--data", found.data]
    report = gsoftmax("report", *data, found.out)
    return worst or report


if __name__ == "__main__":
    if len(sys.argv) < 5:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
