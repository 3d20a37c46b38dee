"""A few seconds of tests/stress/gpu_stress.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "stress" / "gpu_stress.py"


def run(*arguments):
    done = subprocess.run(
        [sys.executable, PROGRAM, "--small", "--max-batch", "20000", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no row was wrong" in done.stdout
    return done.stdout


def test_on_the_host(tmp_path):
    out = run("--device", "none", "--minutes", 0.05, "--round", 1.5, "--threads", 3, "--seed", 1,
              "--directory", tmp_path)  # fmt: skip
    assert "round 0" in out
    assert not list(tmp_path.iterdir()), "something was left behind"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [2, 3])  # of either optimizer
def test_on_the_gpu(tmp_path, seed):
    pytest.importorskip("torch")
    run("--minutes", 0.1, "--round", 3, "--seed", seed, "--directory", tmp_path)
