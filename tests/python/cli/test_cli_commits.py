"""commits, and what info says of the last one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import embermap as em

if TYPE_CHECKING:
    from .conftest import Embermap


def test_commits_are_listed_with_time_and_note(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with em.open(path) as store:
        assert cli.ok("commits", path).out == "none yet\n"
        store.commit(note={"step": 10, "tag": "a\nb"})
        store.commit(note={})
        expected = [
            {"commit": commit.number, "time": commit.time, "note": commit.note}
            for commit in store.commits()
        ]
        found = cli.ok("commits", path, "--json").json
        assert found == {"kind": "commits", "path": str(path), "commits": expected}
        first, second = cli.ok("commits", path).out.splitlines()
        assert first == f'1  {expected[0]["time"]}  {{"step":10,"tag":"a\\nb"}}'
        assert second == f"2  {expected[1]['time']}  {{}}"


def test_info_tells_of_the_last_commit(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with em.open(path) as store:
        facts = cli.info(path)
        assert (facts["commit"], facts["time"], facts["note"]) == (0, None, None)
        store.commit(note={"step": 10})
        facts = cli.info(path)
        [commit] = store.commits()
        assert (facts["commit"], facts["time"], facts["note"]) == (1, commit.time, {"step": 10})
        text = cli.ok("info", path).out
        assert f"1, {commit.time}" in text
        assert '{"step":10}' in text


def test_commits_of_a_table_are_refused(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with em.open(path) as store:
        store.create("t", rows=1, dim=1)
    result = cli("commits", path / "t")
    assert result.code == 2
    assert "is a table: commits are those of its store" in result.error
