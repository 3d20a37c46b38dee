"""Stores on file systems of many kinds: in memory, stacked, small blocks, no holes, full ones.

Those that are not there already are made in a file and mounted, where that is permitted.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import time
from pathlib import Path

import embermap as em
import numpy as np
import pytest

IMAGE_BYTES = 48 << 20
MAKE = {
    "ext4 with blocks of 1 KiB": ["mkfs.ext4", "-q", "-b", "1024"],
    "ext2": ["mkfs.ext4", "-q", "-t", "ext2"],
    "xfs": ["mkfs.xfs", "-q"],
    "vfat": ["mkfs.vfat"],  # without holes: what is grown is written out
}
KINDS = ["tmpfs", "shared memory", "ramfs", "overlay", *MAKE]


def run_or_skip(*command: object) -> None:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def mount(kind: str, scratch: Path, point: Path) -> None:
    point.mkdir()
    if kind == "tmpfs":
        run_or_skip("mount", "-t", "tmpfs", "-o", f"size={IMAGE_BYTES}", "tmpfs", point)
    elif kind == "ramfs":
        run_or_skip("mount", "-t", "ramfs", "ramfs", point)
    elif kind == "overlay":
        folders = {name: scratch / name for name in ("lowerdir", "upperdir", "workdir")}
        for folder in folders.values():
            folder.mkdir()
        options = ",".join(f"{name}={folder}" for name, folder in folders.items())
        run_or_skip("mount", "-t", "overlay", "-o", options, "overlay", point)
    else:
        image = scratch / "image"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES if kind != "xfs" else 320 << 20)
        run_or_skip(*MAKE[kind], image)
        run_or_skip("mount", "-o", "loop", image, point)


def unmount(point: Path) -> None:
    """Whatever used files there has let go of them, be it a moment later."""
    for _ in range(100):
        done = subprocess.run(["umount", point], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    pytest.fail(f"still in use after 10 s: {done.stderr}")


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    """A folder on a file system of each kind."""
    if request.param == "shared memory":
        if not Path("/dev/shm").is_dir():
            pytest.skip("no /dev/shm")
        shared = Path("/dev/shm") / f"embermap-test-{tmp_path.name}"
        shared.mkdir()
        yield shared
        shutil.rmtree(shared)
        return
    point = tmp_path / "mounted"
    mount(request.param, tmp_path, point)
    yield point
    unmount(point)


def test_a_store_lives_there(folder, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.random((3000, 33), np.float32)
    np.save(folder / "plain.npy", rows)
    with em.open(folder / "s", memory="300KiB") as store:
        table = store.create("t", rows=3000, dim=33, optimizer=em.optim.Adagrad(lr=1))
        table[:] = rows
        table.update(range(0, 3000, 7), np.zeros((429, 33), np.float32))
        assert table.stats()["evictions"] > 0
        store.commit()
        table.resize(2000)
        table.resize(5000)
        adopted = store.adopt("a", folder / "plain.npy")
        ids = rng.integers(0, 3000, 1000)
        adopted.add(ids, np.ones((1000, 33), np.float32))
        table.export(folder / "out.npy")
        copy = store.import_file("i", folder / "out.npy")
        assert np.array_equal(copy[:], table[:])
        assert all(store[name].verify()["ok"] for name in store)
    wanted = np.concatenate([rows[:2000], np.zeros((3000, 33), np.float32)])
    added = rows + np.bincount(ids, minlength=3000).astype(np.float32)[:, None]
    with em.open(folder / "s", mode="r", memory="300KiB") as store:
        try:
            _ = store["a"]
            allow_adopted = None
        except em.FormatError as error:  # ramfs: a copy could not be told from the store itself
            if "does not tell when the store's directory was made" not in str(error):
                raise
            allow_adopted = True
    with em.open(folder / "s", mode="r", memory="300KiB", allow_adopted=allow_adopted) as store:
        assert np.array_equal(store["t"][:], wanted)
        assert np.allclose(store["a"][:], added)
        assert np.allclose(np.load(folder / "plain.npy"), added)
        assert all(store[name].verify()["ok"] for name in store)


def test_a_full_disk_is_an_error_and_the_last_commit_stays(folder, tmp_path):
    if shutil.disk_usage(folder).total not in range(1 << 20, 400 << 20):
        pytest.skip("the file system is too large to be filled")
    big = np.lib.format.open_memmap(tmp_path / "big.npy", "w+", np.float32, (200_000, 512))
    big[:1000] = 3
    with em.open(folder / "s", memory="4MiB") as store:
        table = store.create("t", rows=1000, dim=128)
        table[:] = 1
        store.commit()
        with pytest.raises(OSError, match=r"No space|too large") as caught:
            store.import_file("big", tmp_path / "big.npy")
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
        assert store.tables() == ["t"]
        assert not list((folder / "s").glob("*big*"))
        for _ in range(100):  # as above, so that the disk has its room again
            if shutil.disk_usage(folder).free > 1 << 20:
                break
            time.sleep(0.1)
        table[500:] = 2
    with em.open(folder / "s", mode="r") as store:
        assert store["t"][:][:, 0].tolist() == [1] * 500 + [2] * 500


def fill(file):
    """Take all that is left of the disk."""
    data = np.random.default_rng(0).bytes(1 << 20)  # not to be compressed
    with file.open("wb", buffering=0) as out:
        for block in (1 << 20, 4096, 512):
            with pytest.raises(OSError, match=r"No space|too large"):
                while True:
                    if out.write(data[:block]) < block:
                        raise OSError(errno.ENOSPC, "No space left")


def test_a_disk_that_is_full_at_a_commit_costs_nothing_once_there_is_room(folder):
    if shutil.disk_usage(folder).total not in range(1 << 20, 400 << 20):
        pytest.skip("the file system is too large to be filled")
    filler = folder / "filler"
    with em.open(folder / "s", memory="300KiB") as store:
        table = store.create("t", rows=8000, dim=128, optimizer=em.optim.Adagrad(lr=1))
        other = store.create("u", rows=10, dim=1)
        table[:100] = 1
        store.commit()

        # What is changed fits into memory: the commit meets the full disk.
        fill(filler)
        number = store.commit_number
        table[4000:4010] = 2
        other[3] = 7
        for _ in range(2):
            with pytest.raises(OSError, match="No space") as caught:
                store.commit()
            assert caught.value.errno == errno.ENOSPC
            assert str(caught.value.filename).startswith(str(folder / "s"))
            assert store.commit_number == number
        assert (table[4000:4010] == 2).all()
        assert (table[:100] == 1).all()
        filler.unlink()
        assert store.commit() == number + 1

        # It does not: pages that have to go to the disk before the commit meet it.
        table.write(7_900, np.ones((10, 128), np.float32))  # others went before there was no room
        fill(filler)
        done = 0
        with pytest.raises(OSError, match="No space"):
            for first in range(0, 7_000, 10):
                table.scatter(range(first, first + 10), np.full((10, 128), 3, np.float32))
                done = first + 10
            store.commit()
        assert other[3] == 7
        filler.unlink()
        assert (table[:done] == 3).all()  # whatever was accepted
        for first in range(0, 8_000, 10):
            table.scatter(range(first, first + 10), np.full((10, 128), 4, np.float32))
        assert store.commit() == number + 2
        store.abandon()
    with em.open(folder / "s", mode="r", memory="300KiB") as store:
        assert (store["t"][:] == 4).all()
        assert store["u"][:][:, 0].tolist() == [0] * 3 + [7] + [0] * 6
        assert store["t"].verify()["ok"]
