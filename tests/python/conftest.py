"""What the tests of the package share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import embermap as em
import numpy as np
import pytest

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    # A shell has what it starts in the background ignore SIGINT, and children would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def handlers_of_signals_stay() -> Iterator[None]:
    """Processes that later tests start would inherit what one sets, and could not be ended."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) == handler, number.name


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or em.cuda_devices() > 0:
        return
    if os.environ.get("EMBERMAP_REQUIRE_GPU"):
        pytest.fail(f"EMBERMAP_REQUIRE_GPU is set, but: {em.cuda_absence()}", pytrace=False)
    pytest.skip(f"no CUDA device: {em.cuda_absence()}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store can be made."""
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[em.Store]:
    """An open, empty store."""
    opened = em.open(path, memory="16MiB", threads=2)
    yield opened
    opened.abandon()


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


@pytest.fixture(params=FLOATS + INTEGERS)
def dtype(request: pytest.FixtureRequest) -> np.dtype[Any]:
    """Each dtype a table can hold, as NumPy has it."""
    return numpy_dtype(request.param)


@pytest.fixture(params=FLOATS)
def float_dtype(request: pytest.FixtureRequest) -> np.dtype[Any]:
    return numpy_dtype(request.param)


@pytest.fixture
def values() -> Callable[..., np.ndarray[Any, Any]]:
    """values(shape, dtype, seed=0): small whole numbers, exact in every dtype, also when added."""

    def make(shape: Any, dtype: Any = "float32", seed: int = 0) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng(seed)
        return rng.integers(0, 30, shape).astype(dtype)

    return make


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_python(code, *arguments): the code in an interpreter of its own, which must succeed."""

    def run(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run
