"""Does the same configuration and seed give the same result on a GPU that others use too?  `python -m evidence.repeat`

Several processes train the same run at the same time, with `deterministic` off and on; then one process alone trains
both in turn, which shows what it costs.  results/evidence/repeat.json has the numbers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from gsoftmax import recipes
from gsoftmax.train import train

from .run import ROWS, where

PROCESSES, ALONE = 4, 3


def one(data: str, recipe: str, deterministic: bool) -> tuple[float, float, float]:
    """Error in percent, NLL and seconds of one run."""
    result = train(recipes.find(recipe).config({"data": data, "deterministic": deterministic, "checkpoint_every": 0}))
    return 100 * result["error"], result["nll"], result["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", metavar="SPEC")
    parser.add_argument("--recipe", default="cifar10-fast")
    args = parser.parse_args()
    found: dict[str, Any] = {"recipe": args.recipe, "processes": PROCESSES, **where()}
    context = multiprocessing.get_context("spawn")
    for deterministic in (False, True):
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            given = ([v] * PROCESSES for v in (args.data, args.recipe, deterministic))
            errors, nll, _ = zip(*pool.map(one, *given), strict=True)
        found["deterministic" if deterministic else "default"] = {
            "errors": errors,
            "largest difference": float(np.ptp(errors)),
            "largest difference in NLL": float(np.ptp(nll)),
        }
    one(args.data, args.recipe, False), one(args.data, args.recipe, True)  # warm up
    seconds = [[one(args.data, args.recipe, d)[2] for d in (False, True)] for _ in range(ALONE)]
    found["seconds"] = dict(zip(("default", "deterministic"), np.median(seconds, axis=0).tolist(), strict=True))
    (ROWS / "repeat.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
