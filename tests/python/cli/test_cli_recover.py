"""recover and its --dry-run, and what info and verify say after a crash."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import embermap as em
import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

# Commits 5 in 20 rows, each a page, writes 6 to them and others, and dies.
CRASH = """
import os, signal, sys, numpy as np, embermap as em
store = em.open(sys.argv[1], memory="128KiB", durability=sys.argv[2])
table = store.create("t", rows=100, dim=1024)
store.create("u", rows=10, dim=3)
table[:] = 1
store.commit()
store.checkpoint()
table[:20] = 5
store["u"][2] = 2
store.commit()
table[:60] = 6
os.kill(os.getpid(), signal.SIGKILL)
"""


def crash(path: Path, durability: str) -> None:
    command = [sys.executable, "-c", CRASH, str(path), durability]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_recover_applies_what_was_committed(cli: Embermap, tmp_path: Path) -> None:
    store = tmp_path / "s"
    crash(store, "commit")
    before = tree(store)
    assert (np.load(store / "t.npy") == 1).all()

    plan = cli.ok("recover", "--dry-run", store, "--json").json
    size = plan.pop("log_bytes")
    assert 21 * 4096 < size < 40 * 4096
    assert plan == {
        "path": str(store),
        "writer": False,
        "unclean": False,
        "log_gone": None,
        "mixed": None,
        "broken": {},
        "commit": 2,
        "pages": {"t": 20, "u": 1},
    }
    text = cli.ok("recover", "--dry-run", "s", cwd=tmp_path).out.splitlines()
    assert text[0].startswith("s: at commit 2; ")
    assert text[0].endswith(" of commits in the log would go to the tables")
    assert text[1:] == ["  t: 20 pages from the log", "  u: 1 pages from the log"]
    assert tree(store) == before  # nothing was changed

    # Readers see it as it will be.
    assert cli.info(store)["commit"] == 2
    assert cli.ok("verify", store, "--json").json["ok"]
    assert tree(store) == before

    done = cli.ok("recover", store, "--json").json
    assert done == {
        "path": str(store),
        "recovered": True,
        "reason": None,
        "damaged_log": None,
        "pages": 21,
        "commit": 2,
    }
    assert (np.load(store / "t.npy")[:20] == 5).all()
    assert (np.load(store / "t.npy")[20:] == 1).all()
    assert np.load(store / "u.npy")[2].tolist() == [2] * 3
    assert cli.ok("verify", store, "--json").json["ok"]

    again = cli.ok("recover", store, "--json").json
    assert (again["recovered"], again["pages"], again["commit"]) == (False, 0, 2)
    assert cli.ok("recover", "s", cwd=tmp_path).out == "s: nothing to recover\n"
    assert cli.ok("recover", "--dry-run", "s", cwd=tmp_path).out == (
        "s: at commit 2; nothing to recover\n"
    )


def test_recover_says_in_words_what_it_did(cli: Embermap, tmp_path: Path) -> None:
    crash(tmp_path / "s", "commit")
    out = cli.ok("recover", "s", cwd=tmp_path).out
    assert out == "s: at commit 2; 21 pages went from the log to the tables\n"


def test_recover_of_a_session_without_a_log(cli: Embermap, tmp_path: Path) -> None:
    store = tmp_path / "s"
    crash(store, "none")
    before = tree(store)
    plan = cli.ok("recover", "--dry-run", store, "--json").json
    assert plan == {
        "path": str(store),
        "writer": False,
        "unclean": True,
        "log_gone": None,
        "mixed": None,
        "broken": {},
        "commit": 2,
        "log_bytes": 0,
        "pages": {},
    }
    assert cli.ok("recover", "--dry-run", "s", cwd=tmp_path).out == (
        "s: at commit 2; a session without log ended without commit: tables would be taken as "
        "they are\n"
    )
    assert tree(store) == before
    assert cli.info(store)["unclean"] is True
    cli.fails("export", store / "t", tmp_path / "t.npy", says=["last commit"])
    done = cli.ok("recover", store, "--json").json
    assert (done["recovered"], done["pages"], done["commit"]) == (True, 0, 3)
    assert "after its last commit (2)" in done["reason"]
    assert cli.ok("verify", store, "--json").json["ok"]
    assert cli.info(store)["unclean"] is False


@pytest.mark.parametrize("cut", [None, 8192, 12288])
def test_recover_says_that_the_log_is_missing(
    cli: Embermap, tmp_path: Path, cut: int | None
) -> None:
    store = tmp_path / "s"
    crash(store, "commit")
    log = store / "redo.log"
    if cut is None:
        log.unlink()
        why = "it is not there"
    else:
        with log.open("r+b") as file:
            file.truncate(cut)
        end = r"\d+"
        why = (
            "it had commit 2, and has none of its commits any more: it was cut or damaged "
            rf"\(it has {cut} bytes, and that commit ended at byte {end}\)"
        )
    before = tree(store)
    plan = cli.ok("recover", "--dry-run", store, "--json").json
    assert (plan["unclean"], plan["commit"]) == (True, 1)
    assert re.fullmatch(why, plan["log_gone"])
    why = plan["log_gone"]
    assert cli.ok("recover", "--dry-run", "s", cwd=tmp_path).out == (
        f"s: at commit 1; the redo log is gone or damaged, which had later commits: {why}. "
        "Bring s/redo.log back from a copy to have them; 'embermap recover' without --dry-run "
        "takes the tables as "
        "they are, which may mix rows of several commits\n"
    )
    assert tree(store) == before
    out = cli.ok("recover", "s", cwd=tmp_path).out
    assert out.startswith(f"s: took the tables as they were: {log}: the redo log is gone")
    assert (np.load(store / "t.npy") == 1).all()
    assert cli.ok("recover", "s", cwd=tmp_path).out == "s: nothing to recover\n"
    assert cli.ok("verify", store, "--json").json["ok"]


def test_a_writer_at_work_is_nothing_to_recover(cli: Embermap, tmp_path: Path) -> None:
    with em.open(tmp_path / "s") as store:
        table = store.create("t", rows=100, dim=1024)
        table[:] = 1
        store.commit()
        store.checkpoint()
        table[:20] = 2
        store.commit()
        plan = cli.ok("recover", "--dry-run", tmp_path / "s", "--json").json
        assert plan["writer"] is True
        assert plan["unclean"] is False
        assert (plan["commit"], plan["pages"]) == (2, {"t": 20})
        out = cli.ok("recover", "--dry-run", "s", cwd=tmp_path).out
        assert out.startswith("s: at commit 2; a writer is at work; nothing to recover\n")
        cli.fails("recover", "s", cwd=tmp_path, says=["is open for writing"])


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_recover_of_what_is_no_store(cli: Embermap, tmp_path: Path, dry: list[str]) -> None:
    crash(tmp_path / "s", "commit")
    result = cli("recover", *dry, "s/t", cwd=tmp_path)
    assert result.code == 2
    assert "recovered as a whole" in result.error
    cli.fails("recover", *dry, "gone", cwd=tmp_path, says=["gone"])


def test_a_log_that_is_none_is_put_aside(cli: Embermap, tmp_path: Path) -> None:
    crash(tmp_path / "s", "commit")
    log = tmp_path / "s" / "redo.log"
    log.write_bytes(b"\0" * 10_000)
    cli.fails("verify", "s", cwd=tmp_path, says=["redo.log", "neither", "recover"])
    out = cli.ok("recover", "--dry-run", "s", cwd=tmp_path).out
    assert "gone or damaged" in out
    assert "keeps the file under another name" in out or "takes the tables as they are" in out
    assert log.read_bytes() == b"\0" * 10_000
    out = cli.ok("recover", "s", cwd=tmp_path).out
    assert "took the tables as they were" in out
    assert "kept as " in out
    assert "redo.log.damaged" in out
    assert log.with_name("redo.log.damaged").read_bytes() == b"\0" * 10_000
    cli.ok("verify", "s", cwd=tmp_path)
    # The next one does not take its name.
    log.write_bytes(b"\1" * 9_000)
    again = cli.ok("recover", "s", "--json", cwd=tmp_path).json
    assert again["damaged_log"] == str(log.with_name("redo.log.damaged.1"))
    assert log.with_name("redo.log.damaged").read_bytes() == b"\0" * 10_000
    assert log.with_name("redo.log.damaged.1").read_bytes() == b"\1" * 9_000
    assert cli.ok("recover", "s", "--json", cwd=tmp_path).json["damaged_log"] is None


def test_recover_of_a_store_from_elsewhere_asks_first(cli: Embermap, tmp_path: Path) -> None:
    """Its log has pages for a file outside of it."""
    file = tmp_path / "vectors.npy"
    np.save(file, np.ones((40, 1024), np.float32))
    code = """
import os, signal, sys, embermap as em
store = em.open(sys.argv[1])
table = store.adopt("vectors", sys.argv[2])
table[:20] = 5
store.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "origin"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    shutil.copytree(tmp_path / "origin", tmp_path / "s")
    before = tree(tmp_path / "s")
    cli.fails("recover", "--dry-run", "s", cwd=tmp_path, says=["vectors", "--allow-adopted"])
    plan = cli.ok("recover", "--dry-run", "s", "--allow-adopted", "--json", cwd=tmp_path).json
    assert plan["pages"] == {"vectors": 20}
    cli.fails("recover", "s", cwd=tmp_path, says=["vectors.npy", "--allow-adopted"])
    assert (np.load(file) == 1).all()
    after = tree(tmp_path / "s")
    before.pop("LOCK")
    after.pop("LOCK")
    assert after == before
    done_json = cli.ok("recover", "s", "--allow-adopted", "--json", cwd=tmp_path).json
    assert done_json["pages"] == 20
    assert (np.load(file)[:20] == 5).all()


def test_durability_and_the_log_of_a_command(cli: Embermap, tmp_path: Path) -> None:
    shape = ["--rows", "1000", "--dim", "16"]
    cli.ok("create", "s/t", *shape, "--durability", "none", cwd=tmp_path)
    assert not (tmp_path / "s" / "redo.log").exists()
    cli.ok("create", "s/u", *shape, "--log-limit", "1MiB", cwd=tmp_path)
    assert (tmp_path / "s" / "redo.log").exists()
    for options, text in (
        (["--durability", "always"], "--durability: there is no durability 'always'"),
        (["--log-limit", "much"], "--log-limit"),
    ):
        result = cli("create", "s/v", *shape, *options, cwd=tmp_path)
        assert result.code == 2
        assert text in result.error
    cli.fails("create", "s/v", *shape, "--log-limit", "4KiB", cwd=tmp_path, says=["4096 bytes"])
    help_text = " ".join(cli.ok("recover", "--help").out.split())
    for part in ("--dry-run", "--durability", "--log-limit", "the commits in its log"):
        assert part in help_text
