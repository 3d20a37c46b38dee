"""docs/speedtorch.md: its snippets run, in order, and its table has every name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
import embermap.speedtorch as SpeedTorch

GUIDE = (Path(__file__).parents[2] / "docs" / "speedtorch.md").read_text()


def test_the_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    snippets = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    assert len(snippets) >= 5
    for snippet in snippets:
        exec(compile(snippet, "docs/speedtorch.md", "exec"), names)
    assert names["vectors"].shape == (50_000, 32)
    assert (tmp_path / "vectors.npy").exists()
    assert (tmp_path / "counts.npz").exists()


@pytest.mark.parametrize("name", SpeedTorch.__all__)
def test_every_name_is_in_the_table(name):
    if name in ("CountTable", "Variable"):
        pytest.skip("not SpeedTorch's")
    table = GUIDE.partition("## Every name")[2].partition("## Weights")[0]
    assert f"`{name}`" in table
    # And what can be called of it, in the page.
    methods = vars(SpeedTorch)[name]
    for method in dir(methods) if inspect.isclass(methods) else ():
        if not method.startswith("_") and inspect.isfunction(getattr(methods, method)):
            assert method in GUIDE, method
