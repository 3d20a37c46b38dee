"""The progress line: only on a terminal, erased at the end."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap


def run_on_terminal(cli: Embermap, *arguments: str, cwd: Path, term: str = "xterm") -> str:
    """What a terminal on standard error received."""
    main, sub = pty.openpty()
    environment = {**os.environ, "TERM": term}
    with subprocess.Popen(
        [cli.path, *arguments], cwd=cwd, stdout=subprocess.DEVNULL, stderr=sub, env=environment
    ) as process:
        os.close(sub)
        seen = b""
        while True:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            seen += piece
    os.close(main)
    assert process.returncode == 0, seen
    return seen.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.zeros((200_000, 64), np.float32))  # 51 MB: several blocks
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        (["convert", "a.npy", "b.npy"], "convert"),
        (["import", "a.npy", "t/x"], "import x"),
    ],
)
def test_progress_is_drawn_and_erased(
    cli: Embermap, folder: Path, arguments: list[str], label: str
) -> None:
    seen = run_on_terminal(cli, *arguments, cwd=folder)
    assert f"\r{label} " in seen
    assert " %" in seen
    assert "\n" not in seen
    assert seen.endswith("\r\x1b[K")
    # Nothing wraps on a terminal of 80 columns.
    lines = seen.replace("\x1b[K", "").split("\r")
    assert max(map(len, lines)) < 80


def test_no_progress_where_it_is_not_wanted(cli: Embermap, folder: Path) -> None:
    assert run_on_terminal(cli, "convert", "a.npy", "b.npy", "--quiet", cwd=folder) == ""
    assert run_on_terminal(cli, "convert", "a.npy", "c.npy", cwd=folder, term="dumb") == ""
    assert cli.ok("convert", "a.npy", "d.npy", cwd=folder).err == ""
