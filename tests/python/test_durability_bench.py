"""The benchmark tools/bench/durability.py: a small run. Times are not judged: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("embermap")

SCRIPT = Path(__file__).parents[2] / "tools" / "bench" / "durability.py"


def test_a_small_run_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    folder, out = tmp_path / "tables", tmp_path / "out.json"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--folder", folder, "--json", out],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    found = {case["case"]: case for case in json.loads(out.read_text())["cases"]}
    assert {name.partition("/")[0] for name in found} == {"train", "commit", "recovery", "verify"}
    assert len([name for name in found if name.startswith("train/")]) == 2
    # Everything that was changed went through the log: five batches of 256 ids, 4 KiB a page.
    assert found["train/uniform"]["logged_bytes"] > 1 << 20
    for name, case in found.items():
        if name.startswith("commit/"):
            assert case["dirty_bytes"] in (64 << 10, 1 << 20)
    assert found["recovery"]["log_bytes"] >= 1 << 20
    assert found["verify"]["bytes"] == (2 << 20) + 4096


@pytest.mark.parametrize("option", ["--memory=1", "--rounds=-1", "--log=much"])
def test_wrong_usage_exits_with_2(option: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, option], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "error" in done.stderr
