"""Readers of text: ARFF, COCO's annotations, MULAN's labels and NUS-WIDE's lists; the first byte chooses."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gsoftmax.data"]):
    from gsoftmax.data import coco, nuswide, tables

FOLDER = Path(tempfile.mkdtemp())
ARFF = b"@relation 'r: -C 1'\n@attribute 'a b' numeric\n@attribute b {p,'q r'}\n@data\n1,p\n{0 2, 1 'q r'}\n"
XML = b'<labels xmlns="x"><label name="a"><label name="b"/></label></labels>'
LISTS = b"images/a.jpg 2\nimages/b.jpg 1\n\x001 0\n0 1\n"
COCO = json.dumps(
    {
        "images": [{"id": 1, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 1, "category_id": 2, "bbox": [1.5, 2e3]}],
        "categories": [{"id": 2, "name": "é"}],
    }
).encode()


def seeds() -> dict[str, bytes]:
    return {str(i): bytes([i]) + raw for i, raw in enumerate((ARFF, COCO, XML, LISTS))}


def one_input(raw: bytes) -> None:
    if not raw:
        return
    which, raw = raw[0] % 4, raw[1:]
    try:
        if which == 0:
            table = tables.parse_arff(io.StringIO(raw.decode("utf-8", "replace")), "x.arff")
            tables.columns(table, tables.label_columns(table, FOLDER / "x.arff", None), FOLDER / "x.arff")
        elif which == 1:
            (FOLDER / "x.json").write_bytes(raw)
            coco._read_instances(FOLDER / "x.json")
        elif which == 2:
            (FOLDER / "x.xml").write_bytes(raw)
            tables.xml_labels(FOLDER / "x.xml")
        else:
            names, _, labels = raw.partition(b"\0")
            (FOLDER / "nus_wide_test_imglist.txt").write_bytes(names)
            (FOLDER / "nus_wide_test_label.txt").write_bytes(labels)
            found, _ = nuswide._read_lists(FOLDER, "test", 2)
            assert not any(name.startswith("/") or ".." in name.split("/") for name in found)
    except (ValueError, OSError) as error:
        assert str(error)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        for name, content in seeds().items():
            (Path(sys.argv[1]) / name).write_bytes(content)
    atheris.Setup([*sys.argv, "-rss_limit_mb=2048", "-timeout=10"], one_input)
    atheris.Fuzz()
