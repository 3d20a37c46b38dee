"""The snippets of docs/python.md, run one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


def test_every_snippet_of_the_guide_runs(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 8
    names: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        # Padded so that an error tells the line of the guide.
        exec(compile("\n" * line + block[1], str(GUIDE), "exec"), names)
