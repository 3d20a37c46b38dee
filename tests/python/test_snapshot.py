"""Snapshots of stores that are trained meanwhile, interrupted, short of disk, sparse."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import embermap as em
import numpy as np
import pytest

ROWS, DIM = 3_000, 64


def make(path, **options):
    store = em.open(path, memory="8MiB", threads=2, log_limit="2MiB", autocommit=False, **options)
    store.create("plain", rows=ROWS, dim=DIM, init=em.init.Constant(0.5))
    store.create("trained", rows=ROWS, dim=DIM, optimizer=em.optim.Adagrad(lr=1))
    return store


def change(store, rng, value):
    """Some rows of both tables become `value`, and so does the state of the second."""
    for name, field in (("plain", "weight"), ("trained", "weight"), ("trained", "sum")):
        ids = rng.choice(ROWS, 30, replace=False)
        store[name].scatter(ids, np.full((30, DIM), value, "f4"), field=field)


def rows_of(store):
    return {
        "plain": store["plain"].read(),
        "weight": store["trained"].read(),
        "sum": store["trained"].read(field="sum"),
    }


def expect_same(snapshot, commit, rows):
    with em.open(snapshot, mode="r") as store:
        assert store.commit_number == commit
        for name, found in rows_of(store).items():
            np.testing.assert_array_equal(found, rows[name], err_msg=name)
        for name in store:
            report = store[name].verify()
            assert report["bad_pages"] == 0
            assert report["verified"] == report["written"]


def in_another_process(path, copy, *, killed_at=None):
    """Takes a snapshot of a store there; what it reports. Killed when that share is done."""
    program = f"""
        import json, os, signal
        import embermap as em

        def progress(done, total):
            if done > {killed_at or 2} * total:
                os.kill(os.getpid(), signal.SIGKILL)

        store = em.open({str(path)!r}, mode="r", threads=2)
        print(json.dumps(store.snapshot({str(copy)!r}, progress=progress)))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    if killed_at is None:
        assert done.returncode == 0
        return json.loads(done.stdout)
    assert done.returncode == -signal.SIGKILL
    return None


class Trainer(threading.Thread):
    """Changes and commits a store until it is stopped; knows the rows of every commit."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.rows = {}
        self.ended = threading.Event()
        self.failure = None

    def run(self):
        rng = np.random.default_rng(1)
        try:
            number = self.store.commit_number
            while not self.ended.wait(0.02):
                number += 1
                change(self.store, rng, number)
                self.rows[number] = rows_of(self.store)
                assert self.store.commit(note={"number": number}) == number
                if number % 5 == 0:
                    self.store.checkpoint()
        except BaseException as failure:
            self.failure = failure

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()
        assert self.failure is None, self.failure


def first_commit(store):
    change(store, np.random.default_rng(0), 7)
    store.commit(note={"number": 1})
    return rows_of(store)


def test_each_snapshot_of_a_store_in_training_is_one_commit(path, tmp_path):
    with make(path) as store:
        first = first_commit(store)
        seen = set()
        with Trainer(store) as trainer:
            for i in range(8):
                copy = tmp_path / f"copy-{i}"
                if i % 2 == 0:
                    number = store.snapshot(copy)["commit"]
                else:
                    number = in_another_process(path, copy)["commit"]
                expect_same(copy, number, trainer.rows.get(number, first))
                with em.open(copy, mode="r") as reader:
                    assert reader.note == {"number": number}
                    assert [c.number for c in reader.commits()] == list(range(1, number + 1))
                seen.add(number)
        assert len(seen) > 1


def test_numpy_loads_the_files_of_a_snapshot(path, tmp_path):
    with make(path) as store:
        rng = np.random.default_rng(3)
        for name in store:
            store[name].materialize()
        change(store, rng, 3)
        store.commit()
        expected = rows_of(store)
        change(store, rng, 4)
        store.snapshot(tmp_path / "copy")
        np.testing.assert_array_equal(np.load(tmp_path / "copy" / "plain.npy"), expected["plain"])
        trained = np.load(tmp_path / "copy" / "trained.npy", mmap_mode="r")
        np.testing.assert_array_equal(trained["weight"], expected["weight"])
        np.testing.assert_array_equal(trained["sum"], expected["sum"])


def test_one_that_was_killed_is_gone_on_with(path, tmp_path):
    with make(path) as store:
        for name in store:
            store[name].materialize()
        expected = rows_of(store)
        number = store.commit_number
    in_another_process(path, tmp_path / "copy", killed_at=0.6)
    for mode in ("r", "r+", "a"):
        with pytest.raises(em.FormatError, match="half-done snapshot"):
            em.open(tmp_path / "copy", mode=mode)
    report = in_another_process(path, tmp_path / "copy")
    # The table that was whole by then was not copied again.
    assert report["copied_pages"] < report["pages"]
    assert report["commit"] == number
    expect_same(tmp_path / "copy", number, expected)


def test_a_sparse_table_takes_little_disk(path, tmp_path):
    with em.open(path, memory="64MiB") as store:
        table = store.create("t", rows=10**9, dim=128, init=em.init.Normal(), seed=3)
        ids = [0, 123_456_789, 10**9 - 1]
        table[ids] = np.ones((3, 128), "f4")
        store.commit()
        report = store.snapshot(tmp_path / "copy")
        assert report["pages"] == report["copied_pages"] == 3
        assert sum(p.stat().st_blocks for p in (tmp_path / "copy").iterdir()) * 512 < 1 << 20
        with em.open(tmp_path / "copy", mode="r", memory="64MiB") as copy:
            ids += [1, 5 * 10**8]
            np.testing.assert_array_equal(copy["t"].gather(ids), table.gather(ids))


def test_what_cannot_be_a_snapshot_is_refused(path, tmp_path):
    with make(path) as store:
        first_commit(store)
        with pytest.raises(ValueError, match="is inside of store"):
            store.snapshot(path / "copy")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "thesis.txt").write_text("all of it")
        with pytest.raises(FileExistsError, match=r"thesis\.txt"):
            store.snapshot(tmp_path / "full")
        with pytest.raises(FileNotFoundError):
            store.snapshot(tmp_path / "no" / "where")
        store.snapshot(tmp_path / "copy")
        with pytest.raises(FileExistsError, match="is a store already"):
            store.snapshot(tmp_path / "copy")
    with pytest.raises(ValueError, match="closed"):
        store.snapshot(tmp_path / "other")


def test_progress_counts_bytes_and_may_stop_it(path, tmp_path):
    with make(path) as store:
        expected = first_commit(store)
        calls = []

        def progress(done, total):
            calls.append((done, total))
            if len(calls) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.snapshot(tmp_path / "copy", progress=progress)
        calls = []
        report = store.snapshot(tmp_path / "copy", progress=lambda *call: calls.append(call))
        assert calls[0][0] == 0
        assert calls[-1][0] == calls[-1][1] >= report["copied_bytes"]
        expect_same(tmp_path / "copy", 1, expected)


def mounted(tmp_path, *command):
    point = tmp_path / "mounted"
    point.mkdir()
    done = subprocess.run([*command, point], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return point


def test_a_full_disk_is_named_and_gone_on_with(path, tmp_path):
    point = mounted(tmp_path, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs")
    try:
        with make(path) as store:
            for name in store:
                store[name].materialize()
            copy = point / "copy"
            with pytest.raises(OSError, match="No space left") as full:
                store.snapshot(copy)
            assert full.value.errno == errno.ENOSPC
            assert Path(full.value.filename).parent == copy
            assert not (copy / "embermap.json").exists()
            subprocess.run(["mount", "-o", "remount,size=32m", point], check=True)
            report = store.snapshot(copy)
            assert report["copied_pages"] < report["pages"]
            expect_same(copy, store.commit_number, rows_of(store))
    finally:
        subprocess.run(["umount", "-l", point], check=True)


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_blocks_are_shared_where_the_file_system_can(tmp_path, kind):
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True)
    point = mounted(tmp_path, "mount", "-o", "loop", image)
    try:
        with make(point / "store") as store:
            expected = first_commit(store)
            report = store.snapshot(point / "copy")
            assert report["cloned_tables"] == 2
            change(store, np.random.default_rng(5), 5)
            store.commit()
            store.checkpoint()
            expect_same(point / "copy", 1, expected)
    finally:
        subprocess.run(["umount", "-l", point], check=True)


def test_a_fork_has_no_part_in_it(path, tmp_path):
    with make(path) as store:
        first_commit(store)
        if (child := os.fork()) == 0:
            try:
                store.snapshot(tmp_path / "copy")
            except em.ForkError:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
