"""snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import embermap as em
import numpy as np

if TYPE_CHECKING:
    from .conftest import Embermap


def test_a_snapshot_of_a_store_that_is_open_elsewhere(cli: Embermap, tmp_path: Path) -> None:
    path, copy = tmp_path / "s", tmp_path / "copy"
    with em.open(path) as store:
        table = store.create("t", rows=1000, dim=16)
        table[:] = np.ones((1000, 16), "f4")
        store.commit(note={"step": 10})
        table[:] = np.zeros((1000, 16), "f4")
        [commit] = store.commits()
        assert cli.ok("snapshot", path, copy, "--json").json == {
            "kind": "snapshot",
            "path": str(copy),
            "commit": 1,
            "time": commit.time,
            "note": {"step": 10},
            "pages": 16,
            "copied_pages": 16,
            "copied_bytes": 64_000,
            "cloned_tables": 0,
            "rounds": 1,
        }
        text = cli.ok("snapshot", path, tmp_path / "other").out
        assert text == f"{tmp_path / 'other'}: commit 1 of {path}, 16 pages, 62.50 KiB copied\n"
        assert cli.ok("snapshot", path, tmp_path / "quiet", "-q").out == ""
    assert "bad" in cli.ok("verify", copy).out
    with em.open(copy, mode="r") as found:
        np.testing.assert_array_equal(found["t"][:], np.ones((1000, 16), "f4"))


def test_what_is_no_destination_or_no_store(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with em.open(path) as store:
        store.create("t", rows=1, dim=1)
    cli.fails("snapshot", path, path / "copy", says=["is inside of store"])
    cli.fails("snapshot", path, path, says=["is the store"])
    cli.fails("snapshot", path, tmp_path / "no" / "where", says=["mkdir", "No such file"])
    cli.fails("snapshot", tmp_path / "nothing", tmp_path / "copy", says=["nothing"])
    result = cli("snapshot", path / "t", tmp_path / "copy")
    assert result.code == 2
    assert "is a table: a snapshot is one of a whole store" in result.error
    assert not (tmp_path / "copy").exists()
