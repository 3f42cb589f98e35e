"""The bill of materials of the environment that runs this: the package and all that it needs, as CycloneDX 1.6 JSON.

    .venv/bin/python .github/bill.py > bill.json          with the extras demo, train and report
    .venv/bin/python .github/bill.py --licences           name, version and licence, one line each

The extras for development are left out: nothing of them reaches users.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("", "demo", "train", "report")


def needed(of: Distribution, extras: tuple[str, ...] = ("",)) -> list[str]:
    """Names of what a distribution needs on this machine."""
    found = [Requirement(text) for text in of.requires or []]
    kept = [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    return sorted({str(canonicalize_name(r.name)) for r in kept})


def closure() -> dict[str, tuple[Distribution, list[str]]]:
    """The package first, then everything that it needs, each with its own needs."""
    found: dict[str, tuple[Distribution, list[str]]] = {}
    waiting = ["gsoftmax"]
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        try:
            held = distribution(name)
        except PackageNotFoundError:  # an extra that is not installed
            continue
        found[name] = held, needed(held, EXTRAS if name == "gsoftmax" else ("",))
        waiting += found[name][1]
    return {name: (held, [n for n in needs if n in found]) for name, (held, needs) in found.items()}


def licence(held: Distribution) -> str:
    """What the distribution says of its licence: the SPDX expression, or else older fields."""
    about = held.metadata
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
    older = (about.get("License") or "").strip().splitlines()
    return about.get("License-Expression") or " and ".join(classifiers) or (older[0] if older else "unknown")


def purl(name: str, held: Distribution) -> str:
    return f"pkg:pypi/{name}@{held.version}"


def bill() -> dict[str, Any]:
    everything = closure()
    components = [
        {
            "type": "library",
            "bom-ref": purl(name, held),
            "name": held.metadata["Name"],
            "version": held.version,
            "purl": purl(name, held),
            "licenses": [{"license": {"name": licence(held)}}],
        }
        for name, (held, _) in everything.items()
    ]
    depends = [
        {"ref": purl(name, held), "dependsOn": [purl(n, everything[n][0]) for n in needs]}
        for name, (held, needs) in everything.items()
    ]
    about = {"component": components[0]}
    kind = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return {**kind, "metadata": about, "components": components[1:], "dependencies": depends}


if __name__ == "__main__":
    if sys.argv[1:] == ["--licences"]:
        for held, _ in closure().values():
            print(f"{held.metadata['Name']:28}{held.version:18}{licence(held)}")
    else:
        print(json.dumps(bill(), indent=1))
