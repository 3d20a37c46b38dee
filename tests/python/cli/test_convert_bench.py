"""The benchmark tools/bench/convert.py: a small run. Times are not judged: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "bench" / "convert.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_small_run_measures_what_was_asked_for_and_leaves_nothing(
    tmp_path: Path, embermap_cli: Path
) -> None:
    folder, out = tmp_path / "files", tmp_path / "out.json"
    folder.mkdir()
    wanted = [
        "npy to safetensors",
        "npy to raw",
        "npy to word2vec binary",
        "hdf5, gzip, to npy",
        "word2vec text to npy",
        "fasttext to npy",
        "npy into a store",
    ]
    cases = ["--large", *(f"--cases={name}" for name in wanted)]
    done = run("--quick", "--folder", folder, "--json", out, "--embermap", embermap_cli, *cases)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    found = json.loads(out.read_text())
    large = ["0.05 GB of npy to safetensors", "sparse npy, 1e+06 rows to npy"]
    assert [case["case"] for case in found["cases"]] == wanted + large
    for case in found["cases"]:
        assert case["seconds"] > 0
        assert case["cpu_seconds"] > 0
        assert 1 << 20 < case["peak_resident"] < 256 << 20
        processor = case["case"] in ("hdf5, gzip, to npy", "word2vec text to npy")
        assert ("cp_ratio" in case) == (not processor and case["case"] not in large)
    gzip = found["cases"][3]
    assert gzip["beside"] == "h5py"
    assert gzip["other_ratio"] > 0
    assert gzip["other_cpu_ratio"] > 0
    assert gzip["source_bytes"] < gzip["bytes"]


def test_wrong_rows_are_found_before_anything_is_timed(tmp_path: Path, embermap_cli: Path) -> None:
    """A program that is not to be trusted: it changes one byte of what it makes."""
    liar = tmp_path / "liar"
    liar.write_text(
        f'#!/bin/sh\n"{embermap_cli}" "$@" || exit 1\n'
        'test "$1" = convert && printf x | dd of="$3" bs=1 seek=5000 conv=notrunc 2>/dev/null\n'
    )
    liar.chmod(0o755)
    done = run("--quick", "--folder", tmp_path, "--embermap", liar, "--cases", "hdf5 to npy")
    assert done.returncode == 1
    assert "hdf5 to npy: other rows came out: nothing was timed" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--size=much", "--rounds=0", "--cases=none"])
def test_wrong_usage_exits_with_2(option: str, embermap_cli: Path) -> None:
    done = run(option, "--embermap", embermap_cli)
    assert done.returncode == 2
    assert "error" in done.stderr
