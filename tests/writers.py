"""Writers of dataset files that several tests need, beyond those of `gsoftmax.data.smoke`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gsoftmax import data
from gsoftmax.data.tables import Attribute


def write_cifar_archive(root: Path, name: str = "cifar10") -> Path:
    """The smoke files as the published archive instead of its extracted folder."""
    data.write_smoke(name, root)
    (folder,) = root.glob("cifar-*")
    shutil.move(folder / "SMOKE", root / "SMOKE")
    stem = {"cifar10": "cifar-10-python", "cifar100": "cifar-100-python"}[name]
    packed = root.parent / f"{root.name}-{stem}"  # not in the folder that is packed
    path = Path(shutil.make_archive(str(packed), "gztar", root, folder.name)).rename(root / f"{stem}.tar.gz")
    shutil.rmtree(folder)
    return path


def _quoted(text: str) -> str:
    if text and not set(text) & set(" \t\r\n,{}%'\"\\?") and text.isprintable():
        return text
    for raw, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(raw, escaped)
    return f"'{text}'"


def write_arff(path: Path, relation: str, attributes: Sequence[Attribute], table: np.ndarray, sparse: bool) -> None:
    """table: (rows, attributes), where a nominal entry is its position in the attribute's values."""

    def cell(attribute: Attribute, value: float) -> str:
        return repr(value) if attribute.values is None else _quoted(attribute.values[int(value)])

    lines = [f"@relation {_quoted(relation)}"]
    for a in attributes:
        kind = "numeric" if a.values is None else "{" + ",".join(map(_quoted, a.values)) + "}"
        lines.append(f"@attribute {_quoted(a.name)} {kind}")
    lines.append("@data")
    for row in table.tolist():
        cells = [(i, v, cell(a, v)) for i, (a, v) in enumerate(zip(attributes, row, strict=True))]
        pairs = ", ".join(f"{i} {text}" for i, v, text in cells if v != 0)
        lines.append("{" + pairs + "}" if sparse else ",".join(text for _, _, text in cells))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
