"""The README's Python blocks run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(block):
    exec(compile(block, str(README), "exec"), {})


def test_there_are_blocks():
    assert len(BLOCKS) == 3
