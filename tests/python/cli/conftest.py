"""The `embermap` command line, run as a program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Argument = str | bytes | Path


@dataclass(frozen=True)
class Result:
    """What a run left: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of the error; fails if there are more or other lines."""
        lines = self.err.splitlines()
        assert len(lines) == 1, f"not one line on standard error: {self.err!r}"
        prefix = "embermap: error: "
        assert lines[0].startswith(prefix), lines[0]
        return lines[0][len(prefix) :]


class Embermap:
    """Runs the program; calls return a Result whatever the exit code is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(
        self, *arguments: Argument, cwd: Path | None = None, timeout: float = 120, **options: Any
    ) -> Result:
        done = subprocess.run(
            [self.path, *arguments],
            cwd=cwd,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            **options,
        )
        return Result(
            done.returncode,
            done.stdout.decode("utf-8", "surrogateescape"),
            done.stderr.decode("utf-8", "surrogateescape"),
        )

    def ok(self, *arguments: Argument, **options: Any) -> Result:
        """A run that must succeed and say nothing on standard error."""
        result = self(*arguments, **options)
        assert (result.code, result.err) == (0, ""), result
        return result

    def info(self, path: Argument, cwd: Path | None = None) -> Any:
        return self.ok("info", path, "--json", cwd=cwd).json

    def fails(self, *arguments: Argument, says: Sequence[str] = (), **options: Any) -> Result:
        """A run that must fail with exit code 1 and one line that has the given parts."""
        result = self(*arguments, **options)
        assert result.code == 1, result
        for part in says:
            assert part in result.error, result.error
        assert result.error
        return result


@pytest.fixture(scope="session")
def embermap_cli() -> Path:
    """The program: from EMBERMAP_CLI, beside the Python that runs the tests, or on the PATH."""
    given = os.environ.get("EMBERMAP_CLI")
    if given:
        assert os.access(given, os.X_OK), f"EMBERMAP_CLI={given} is no program"
        return Path(given).resolve()
    beside = Path(sys.executable).parent / "embermap"
    if beside.exists():
        return beside
    found = shutil.which("embermap")
    if found is None:
        pytest.fail("the embermap program is neither in EMBERMAP_CLI nor installed")
    return Path(found)


@pytest.fixture(scope="session")
def cli(embermap_cli: Path) -> Embermap:
    return Embermap(embermap_cli)
