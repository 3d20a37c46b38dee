"""Commits, crashes and the redo log: what a writer, its readers, and copies of a store see."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import embermap as em
import numpy as np
import pytest

PAGE = 1024  # float32 columns of a table whose pages have one row each


def ended_by_a_signal(code, *arguments):
    """Runs the code, which ends with a SIGKILL to itself: nothing is committed or tidied up."""
    begin = "import os, signal, sys, numpy as np, embermap as em\n"
    end = "\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(code) + end, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def names(path):
    return sorted(p.name for p in path.iterdir())


# Commits 5 in the first 40 pages, then writes 6 there and in 20 more, and dies.
CRASH = f"""
    store = em.open(sys.argv[1], memory="256KiB", durability=sys.argv[2])
    table = store.create("t", rows=200, dim={PAGE})
    store.create("u", rows=10, dim=3)[:] = 1
    store.commit()
    table[:40] = 5
    store["u"][2] = 2
    store.commit()
    table[:60] = 6
    store["u"][2] = 3
    table[150:] = 6  # memory has room for fewer pages: those above are in a file
"""


@pytest.fixture
def crashed(path):
    ended_by_a_signal(CRASH, path, "commit")
    return path


def check_last_commit(store):
    assert store.commit_number == 2
    table = store["t"]
    assert (table[:40] == 5).all()
    assert not table[40:].any()
    assert store["u"][1:4].tolist() == [[1] * 3, [2] * 3, [1] * 3]
    for each in (table, store["u"]):
        assert each.verify()["ok"]


# --- durability -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["a", "r+", "r"])
def test_a_store_whose_process_was_killed_opens_at_its_last_commit(crashed, mode):
    assert "UNCOMMITTED" not in names(crashed)
    with em.open(crashed, mode=mode, memory="256KiB") as store:
        check_last_commit(store)
        if mode == "r":
            return
        store["t"][3] = 7  # it can be trained on
        assert store.commit() == 3
    with em.open(crashed, mode="r") as store:
        assert store["t"][2:5, 0].tolist() == [5, 7, 5]
    assert np.load(crashed / "t.npy")[2:5, 0].tolist() == [5, 7, 5]


def test_without_a_log_a_killed_process_leaves_a_store_that_is_refused(path):
    ended_by_a_signal(CRASH, path, "none")
    assert "redo.log" not in names(path)
    assert "UNCOMMITTED" in names(path)
    for mode in ("a", "r+", "r"):
        with pytest.raises(em.CorruptError, match=r"after its last commit \(2\)"):
            em.open(path, mode=mode)
    # What a log would be for is not known any more: it does not help to ask for one now.
    with pytest.raises(em.CorruptError, match="accept_unclean"):
        em.open(path, durability="commit")
    with em.open(path, accept_unclean=True, memory="256KiB") as store:
        assert (store["t"][:40] == 6).any()
        assert store["t"].verify()["ok"]
    with em.open(path, mode="r"):
        pass


def test_a_session_without_a_log_leaves_none(path):
    with em.open(path, durability="none") as store:
        store.create("t", rows=5, dim=2)[:] = 1
        store.commit()
        assert names(path) == ["LOCK", "commits.jsonl", "embermap.json", "t.npy", "t.pages"]
        assert np.load(path / "t.npy").all()  # no checkpoint(): there is one copy of a page
        assert not any(store.stats()["log"].values())
        store.checkpoint()
    with em.open(path) as store:
        assert "redo.log" in names(path)
        store["t"][3] = 4
        store.commit()
        store.abandon()
    with em.open(path, durability="none") as store:  # takes over what was committed
        assert "redo.log" not in names(path)
        assert store["t"][:, 0].tolist() == [1, 1, 1, 4, 1]
        assert np.load(path / "t.npy")[3].tolist() == [4, 4]


def test_what_a_log_has_after_a_crash_counts_in_a_session_without_one(crashed):
    with em.open(crashed, durability="none", memory="256KiB") as store:
        check_last_commit(store)
        assert "redo.log" not in names(crashed)
    with em.open(crashed, mode="r", memory="256KiB") as store:
        check_last_commit(store)


def test_readers_beside_a_writer_without_a_log(path):
    with em.open(path) as store:
        store.create("t", rows=100, dim=PAGE)[:] = 1
    with em.open(path, mode="r", memory="64KiB") as reader:
        table = reader["t"]
        with em.open(path, durability="none", memory="64KiB") as store:
            with pytest.raises(em.StaleError, match="without a log"):
                table[:]
            assert reader.refresh() == store.commit_number
            assert (table[:] == 1).all()
            store["t"][:] = 2  # more than fits into memory: the files are of two moments
            for look in (reader.refresh, lambda: em.open(path, mode="r")):
                with pytest.raises(em.CorruptError, match="a writer without a redo log is at work"):
                    look()
            store.commit()
            assert reader.refresh() == store.commit_number
            assert (table[:] == 2).all()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"durability": "always"}, ValueError, "'always'; there are commit and none"),
        ({"durability": "Commit"}, ValueError, "'Commit'"),
        ({"durability": ""}, ValueError, "''"),
        ({"durability": None}, TypeError, "durability must be a string, not None"),
        ({"durability": True}, TypeError, "durability must be a string, not True"),
        ({"log_limit": "much"}, ValueError, "much"),
        ({"log_limit": -1}, ValueError, "log_limit"),
        ({"log_limit": 1e6}, TypeError, "log_limit"),
        ({"log_limit": 2**20 - 1}, ValueError, r"log_limit of 1048575 bytes.*1\.00 MiB"),
        ({"log_limit": "4KiB"}, ValueError, "log_limit of 4096 bytes"),
        ({"log_limit": 0}, ValueError, "log_limit"),
    ],
)
def test_options_of_the_log_that_cannot_be(path, arguments, error, text):
    with pytest.raises(error, match=text):
        em.open(path, **arguments)
    assert not path.exists()


@pytest.mark.parametrize(
    ("given", "limit"),
    [(None, 1 << 30), ("1MiB", 1 << 20), (3_000_000, 3_000_000), ("2GiB", 2 << 30)],
)
def test_the_limit_of_the_log(path, given, limit):
    with em.open(path, memory="16MiB", log_limit=given) as store:
        assert store.stats()["log"]["limit"] == limit
    for memory in (50, 256):
        with em.open(path, memory=f"{memory}MiB") as store:
            assert store.stats()["log"]["limit"] == 64 * memory << 20
    for memory, gibibytes in ((2, 16), (8, 32), (64, 128)):
        with em.open(path, memory=f"{memory}GiB") as store:
            assert store.stats()["log"]["limit"] == gibibytes << 30


# --- the log's limit ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["scatter", "add", "update", "write"])
def test_a_call_that_would_change_too_much_is_refused_before_it_changes_anything(path, change):
    options = {"memory": "8MiB", "log_limit": "1MiB", "autocommit": False}
    with em.open(path, **options) as store:
        table = store.create("t", rows=1_000, dim=PAGE, optimizer=em.optim.SGD(lr=1))
        rows = np.full((1, PAGE), -1, np.float32)
        calls = {
            "scatter": lambda: table.scatter([500], rows),
            "add": lambda: table.add([500], rows),
            "update": lambda: table.update([500], rows),
            "write": lambda: table.write(500, rows),
        }
        table[:130] = 1  # a call may exceed it: more than half of 1 MiB
        with pytest.raises(em.LogFullError, match=r"1\.00 MiB.*commit\(\)") as caught:
            calls[change]()
        assert isinstance(caught.value, em.Error)
        assert str(path) in str(caught.value)
        assert not table[500].any()
        assert table.step == 0
        assert store.commit_number == 0
        assert (table.gather([129]) == 1).all()  # reading goes on
        number = store.commit()
        calls[change]()
        assert abs(table[500, 0]) == 1
        assert store.commit_number == number
    with em.open(path, mode="r") as store:
        assert abs(store["t"][500, 0]) == 1


def test_the_store_commits_by_itself_where_the_log_is_full(path):
    with em.open(path, memory="8MiB", log_limit="1MiB") as store:
        table = store.create("t", rows=1_000, dim=PAGE)
        table[:130] = 1
        assert store.commit_number == 0
        table[500] = 2
        assert store.commit_number == 1  # of what was there before the call
        store.abandon()
    with em.open(path, mode="r") as store:
        assert (store["t"][:130] == 1).all()
        assert not store["t"][500].any()


def test_one_call_may_change_more_than_the_log_is_long(path, values):
    with em.open(path, memory="512KiB", log_limit="1MiB") as store:
        table = store.create("t", rows=1_500, dim=PAGE)
        table[:] = 1
        store.commit()
        wanted = values((1_500, PAGE))
        table[:] = wanted  # 6 MB
        store.commit()
        assert np.array_equal(table[:], wanted)
    with em.open(path, mode="r") as store:
        assert np.array_equal(store["t"][:], wanted)


# --- checkpoint() and what is told ----------------------------------------------------------------


def test_checkpoint_makes_the_files_the_last_commit(path, values):
    with em.open(path, memory="16MiB") as store:
        table = store.create("t", rows=500, dim=33, optimizer=em.optim.Adagrad())
        plain = store.create("u", rows=70, dim=3)
        store.checkpoint()  # nothing to do
        for seed in (1, 2):  # pages that are new, and pages that a commit had before
            rows, more = values((500, 33), seed=seed), values((70, 3), seed=seed)
            table[:], plain[:] = rows, more
            store.commit()
            store.checkpoint()
            file = np.load(path / "t.npy")
            assert np.array_equal(file["weight"], rows)
            assert not file["sum"].any()
            assert np.array_equal(np.load(path / "u.npy"), more)
        table[:] = 0
        plain[5] = 0
        store.checkpoint()  # commits nothing
        assert store.commit_number == 2
        assert np.array_equal(np.load(path / "t.npy")["weight"], rows)
        assert np.array_equal(np.load(path / "u.npy"), more)
        store.commit()
        assert not np.array_equal(np.load(path / "u.npy")[5], np.zeros(3))  # not moved on yet
    assert not np.load(path / "u.npy")[5].any()  # close() does
    assert not np.load(path / "t.npy")["weight"].any()


def test_checkpoint_is_for_writers_of_open_stores(path):
    with em.open(path) as store:
        pass
    with pytest.raises(ValueError, match="closed"):
        store.checkpoint()
    with pytest.raises(ValueError, match="closed"):
        store.refresh()
    with em.open(path, mode="r") as store, pytest.raises(PermissionError, match="read-only"):
        store.checkpoint()


def test_statistics_of_the_log(path):
    with em.open(path, memory="16MiB", log_limit="64MiB") as store:
        table = store.create("t", rows=300, dim=PAGE)
        table[:200] = 1
        store.commit()
        store.checkpoint()
        before = store.stats()["log"]
        assert set(before) == {
            "limit",
            "bytes",
            "pages",
            "memory_bytes",
            "appended_bytes",
            "applied_pages",
        }
        assert (before["bytes"], before["pages"]) == (0, 0)
        table[:100] = 2
        store.commit()
        full = store.stats()["log"]
        assert full["pages"] == 100
        assert 100 * 4096 < full["bytes"] < 120 * 4096
        assert full["bytes"] <= full["appended_bytes"] - before["appended_bytes"] + 4096
        assert full["applied_pages"] == before["applied_pages"]
        assert 0 < full["memory_bytes"] < 8 << 20
        assert store.stats()["memory_bytes"] >= full["memory_bytes"]
        store.checkpoint()
        after = store.stats()["log"]
        assert (after["bytes"], after["pages"]) == (0, 0)
        assert after["applied_pages"] == full["applied_pages"] + 100
    with em.open(path, mode="r") as store:
        assert not any(store.stats()["log"].values())


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_stays_at_its_commit_until_it_refreshes(path):
    with em.open(path) as store:
        table = store.create("t", rows=100, dim=PAGE)
        store.create("gone", rows=3, dim=1)
        table[:] = 1
        store.commit()
        store.checkpoint()
        with em.open(path, mode="r", memory="64KiB") as reader:
            seen, gone = reader["t"], reader["gone"]
            table[:50] = 2  # pages of the writer's memory, of the log, committed: not the reader's
            assert (seen[:] == 1).all()
            store.commit()
            assert (seen[:] == 1).all()
            assert reader.commit_number == 1
            assert reader.refresh() == reader.commit_number == 2
            assert (seen[:50] == 2).all()
            assert (seen[50:] == 1).all()
            assert seen.verify()["ok"]
            assert reader.refresh() == 2

            table.resize(150)
            store.remove("gone")
            store.create("new", rows=2, dim=2)[:] = 5
            store.commit()
            assert reader.refresh() == store.commit_number
            assert len(seen) == 150
            assert (seen[40:60:19, 0] == [2, 1]).all()
            assert reader.tables() == ["new", "t"]
            assert reader["new"][1].tolist() == [5, 5]
            with pytest.raises(ValueError, match="gone|closed"):
                gone[0]
            assert store.refresh() == store.commit_number  # a writer is there already


def test_a_reader_whose_commit_is_overwritten_is_told_so(path):
    with em.open(path) as store:
        table = store.create("t", rows=100, dim=PAGE)
        table[:] = 1
        store.commit()
        store.checkpoint()
        with em.open(path, mode="r", memory="64KiB") as reader:
            seen = reader["t"]
            assert (seen.gather([7]) == 1).all()
            table[:] = 2
            store.commit()
            store.checkpoint()
            with pytest.raises(em.StaleError, match="refresh") as caught:
                seen.gather([50])
            assert isinstance(caught.value, OSError)
            with pytest.raises(em.StaleError):
                seen[:]
            assert (seen.gather([7]) == 1).all()  # in memory
            assert reader.refresh() == 2
            assert (seen[:] == 2).all()


def test_a_reader_of_what_another_process_writes(path, run_python):
    with em.open(path) as store:
        store.create("t", rows=100, dim=PAGE)[:] = 1
    write = """
        import sys, embermap as em
        store = em.open(sys.argv[1])
        store["t"][:] = float(sys.argv[2])
        store.commit()
        if sys.argv[3] == "close":
            store.close()
        else:
            store.abandon()
    """
    with em.open(path, mode="r", memory="64KiB") as reader:
        table = reader["t"]
        number = reader.commit_number
        run_python(write, path, 2, "abandon")
        assert (table[:] == 1).all()  # the commit is in the log alone
        assert reader.refresh() == number + 1
        assert (table[:] == 2).all()
        run_python(write, path, 3, "close")
        with pytest.raises(em.StaleError, match="refresh"):
            table[:]
        assert reader.refresh() == number + 2
        assert (table[:] == 3).all()


def test_a_stale_reader_in_another_process(path, run_python):
    read = """
        import sys, numpy as np, embermap as em
        reader = em.open(sys.argv[1], mode="r", memory="64KiB")
        table = reader["t"]
        print(table[5, 0], flush=True)
        sys.stdin.readline()
        try:
            table[:]
        except em.StaleError as error:
            assert "refresh" in str(error), error
            print("stale", flush=True)
        reader.refresh()
        print(np.unique(table[:]).tolist(), flush=True)
    """
    with em.open(path) as store:
        table = store.create("t", rows=100, dim=PAGE)
        table[:] = 1
        store.commit()
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(read), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout.readline() == "1.0\n"
            table[:] = 2
            store.commit()
            store.checkpoint()
            out, _ = child.communicate("\n", timeout=60)
        finally:
            child.kill()
        assert out == "stale\n[2.0]\n"
        assert child.returncode == 0


# --- copies of a store ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_copy_of_a_store_whose_log_is_not_empty(path, tmp_path, values, mode):
    with em.open(path, memory="256KiB") as store:
        table = store.create("t", rows=200, dim=PAGE)
        table[:] = 1
        store.commit()
        store.checkpoint()
        wanted = values((200, PAGE))
        table[:] = wanted
        store.commit()
        table[:] = 9  # evicted pages of no commit are in the log as well
        assert store.stats()["log"]["pages"] > 0
        copy = shutil.copytree(path, tmp_path / "copy")
        table[:] = 8
    for _ in range(2):
        with em.open(copy, mode=mode, memory="256KiB") as store:
            assert store.commit_number == 2
            assert np.array_equal(store["t"][:], wanted)
            assert store["t"].verify()["ok"]
    with em.open(path, mode="r") as store:  # the copy has nothing to do with it
        assert (store["t"][:] == 8).all()


@pytest.fixture
def foreign(tmp_path):
    """A store from elsewhere, whose log has pages for a file outside of it: (store, file)."""
    file = tmp_path / "vectors.npy"
    np.save(file, np.ones((40, PAGE), np.float32))
    code = """
        store = em.open(sys.argv[1])
        table = store.adopt("vectors", sys.argv[2])
        store.create("own", rows=10, dim=2)
        store.commit()
        table[:20] = 5
        store["own"][3] = 4
        store.commit()
    """
    ended_by_a_signal(code, tmp_path / "origin", file)
    assert (np.load(file) == 1).all()  # or there is nothing to apply
    shutil.copytree(tmp_path / "origin", tmp_path / "copy")
    return tmp_path / "copy", file


@pytest.mark.parametrize("durability", ["commit", "none"])
@pytest.mark.parametrize("allow", [None, False])
def test_the_log_of_a_store_from_elsewhere_does_not_write_files_outside(foreign, allow, durability):
    store, file = foreign
    before = file.read_bytes(), file.stat().st_mtime_ns
    log = (store / "redo.log").read_bytes()
    wanted = r"vectors\.npy.*allow_adopted"
    for mode in ("r+", "a"):
        with pytest.raises(em.FormatError, match=wanted):
            em.open(store, mode=mode, allow_adopted=allow, durability=durability)
    with em.open(store, mode="r", allow_adopted=allow) as reader:
        assert reader["own"][3].tolist() == [4, 4]
        with pytest.raises(em.FormatError, match=wanted):
            reader["vectors"]
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert (store / "redo.log").read_bytes() == log  # nothing is lost by having tried


def test_the_log_of_a_trusted_store_is_applied_to_files_outside(foreign):
    store, file = foreign
    with em.open(store, mode="r", allow_adopted=True) as reader:
        assert (reader["vectors"][:20] == 5).all()
    assert (np.load(file) == 1).all()
    with em.open(store, mode="r+", allow_adopted=True) as writer:
        assert (writer["vectors"][:20] == 5).all()
    assert (np.load(file)[:20] == 5).all()
    assert (np.load(file)[20:] == 1).all()
    with em.open(store) as writer:  # the writer has recorded that it belongs here
        assert writer["vectors"].verify()["ok"]


def test_the_store_in_which_a_file_was_adopted_applies_its_log(foreign, tmp_path):
    _, file = foreign
    with em.open(tmp_path / "origin") as store:
        assert (store["vectors"][:20] == 5).all()
    assert (np.load(file)[:20] == 5).all()


def test_a_damaged_log_is_named(crashed):
    log = crashed / "redo.log"
    whole = bytearray(log.read_bytes())
    for at in (0, 4096):
        whole[at + 60] ^= 1  # both headers
    log.write_bytes(whole)
    for mode in ("r", "r+"):
        with pytest.raises(em.CorruptError, match=re.escape(str(log))):
            em.open(crashed, mode=mode)
    assert log.read_bytes() == whole


def test_a_damaged_header_drops_no_commit_in_silence(path, tmp_path):
    with em.open(path, memory="8MiB") as store:  # the first life of the log
        store.create("t", rows=5_000, dim=PAGE)[:] = 0
    store = em.open(path, memory="8MiB")
    for number in range(3):
        store["t"].scatter([number], np.ones((1, PAGE), np.float32))
        store.commit()
    last = store.commit_number
    store.abandon()
    refused = set()
    for header in (0, 4096):
        for byte in (4, 20, 60):
            for mode in ("r", "r+"):
                copy = tmp_path / "copy"
                shutil.copytree(path, copy)
                with (copy / "redo.log").open("r+b") as log:
                    log.seek(header + byte)
                    value = log.read(1)[0] ^ 1
                    log.seek(header + byte)
                    log.write(bytes([value]))
                try:
                    with em.open(copy, mode=mode, memory="8MiB") as store:
                        assert store.commit_number == last
                        assert (store["t"][:3] == 1).all()
                except (em.CorruptError, em.FormatError):
                    refused.add(header)
                shutil.rmtree(copy)
    assert len(refused) == 1  # the older one is not needed


@pytest.mark.parametrize("size", [88, 512, 4096])
def test_readers_notice_a_log_without_its_headers(crashed, size):
    os.truncate(crashed / "redo.log", size)
    for mode in ("r", "r+"):
        with pytest.raises(em.CorruptError, match=r"redo\.log.*gone"):
            em.open(crashed, mode=mode)


def test_an_index_that_is_full_is_told_from_a_log_that_is(tmp_path):
    path = tmp_path / "store"
    rows = 8 * 50_000  # pages of 8 rows; an eighth of 16 MiB has room for some 40,000
    with em.open(path, memory="64MiB") as store:
        table = store.create("t", rows=rows, dim=128)
        table[:] = np.zeros((rows, 128), np.float32)
    with em.open(path, memory="16MiB", autocommit=False, log_limit="64GiB") as store:
        table = store["t"]
        one = np.ones((1_000, 128), np.float32)
        with pytest.raises(em.LogFullError, match=r"pages changed.*index.*more memory"):
            for first in range(0, rows, 8_000):
                table.scatter(np.arange(first, first + 8_000, 8), one)
        store.commit()
        table.scatter([1], one[:1])
        store.abandon()


@pytest.mark.parametrize("every", [1, 2, 5, 40, 300])
@pytest.mark.parametrize("crash", [False, True])
def test_pages_reach_the_files_from_wherever_the_log_has_them(path, every, crash):
    pages = 600  # those that are changed again leave gaps in the log
    with em.open(path, memory="8MiB", autocommit=False, log_limit="64MiB") as store:
        tables = [store.create(name, rows=pages, dim=PAGE) for name in ("a", "b")]
        for table in tables:
            table[:] = 0
        store.commit()
        store.checkpoint()
        wanted = np.zeros(pages, np.float32)
        order = np.random.default_rng(every).permutation(pages)
        for value in (1, 2, 3):
            ids = order if value == 1 else order[order % every != 0]
            wanted[ids] = value
            for part in np.array_split(ids, 7):
                for table in tables:
                    table.scatter(part, np.full((len(part), PAGE), value, np.float32))
            store.commit()
        store.abandon() if crash else store.checkpoint()
        if not crash:
            for name in ("a", "b"):
                assert np.array_equal(np.load(path / f"{name}.npy")[:, 0], wanted)
    with em.open(path, memory="8MiB") as store:
        for name in ("a", "b"):
            assert np.array_equal(np.load(path / f"{name}.npy")[:, -1], wanted)
            assert np.array_equal(store[name].gather(np.arange(pages))[:, 7], wanted)
            assert store[name].verify()["bad_pages"] == 0
