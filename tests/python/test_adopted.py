"""Files from elsewhere used in place: foreign byte order, data that begins anywhere, odd widths."""

from __future__ import annotations

import os
import re
import shutil
import time

import embermap as em
import numpy as np
import pytest

BIG = (">f4", ">f8", ">f2", ">i4", ">i8")
NATIVE = ("<f4", "<f8", "<f2", "<i4", "<i8", "|i1", "|u1")


def write_npy(path, array, offset):
    """A .npy whose data begins at byte `offset`, which NumPy would not choose itself."""
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}"
    header = text.encode().ljust(offset - 11) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with path.open("ab") as file:
        file.write(array.tobytes())
    assert np.array_equal(np.load(path), array)
    return path


@pytest.mark.parametrize("kind", BIG + NATIVE)
@pytest.mark.parametrize("offset", [128, 87, 1001])
@pytest.mark.parametrize("dim", [1, 3, 33, 1000])
def test_rows_are_native_and_the_file_keeps_its_form(tmp_path, kind, offset, dim):
    rng = np.random.default_rng(dim + offset)
    rows = 24_000 // dim + 5
    array = rng.integers(0, 50, (rows, dim)).astype(kind)
    native = array.astype(array.dtype.newbyteorder("="))
    file = write_npy(tmp_path / "a.npy", array, offset)
    head = file.read_bytes()[:offset]
    page = max(4096, dim * array.itemsize)
    memory = 3 * page + 2000 + 5 * (rows * dim * array.itemsize // 4096)
    with em.open(tmp_path / "s", memory=memory) as store:
        table = store.adopt("t", file)
        assert table.dtype == native.dtype
        assert table.dtype.isnative
        assert np.array_equal(table[:], native)
        for _ in range(6):
            ids = rng.choice(rows, min(rows, 40), replace=False)
            values = rng.integers(0, 50, (len(ids), dim)).astype(native.dtype)
            assert np.array_equal(table.gather(ids), native[ids])
            table.scatter(ids, values)
            native[ids] = values
            table.add(ids[:9], values[:9])
            native[ids[:9]] += values[:9]
            start = int(rng.integers(0, rows - 2))
            table.write(start, values[:2])
            native[start : start + 2] = values[:2]
        assert np.array_equal(table[:], native)
        assert np.array_equal(table.gather(range(rows)), native)
        assert array.nbytes <= memory or table.stats()["evictions"] > 0
        assert table.verify()["ok"]
    shown = np.load(file, mmap_mode="r")
    assert shown.dtype.str == kind
    assert np.array_equal(shown, native)
    assert file.read_bytes()[:offset] == head
    with em.open(tmp_path / "s", mode="r", memory=memory) as store:
        assert np.array_equal(store["t"].gather(range(rows)), native)
        assert store["t"].verify()["verified"] > 0
        store["t"].export(tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").dtype.isnative
    assert np.array_equal(np.load(tmp_path / "out.npy"), native)


def test_a_protected_big_endian_file_is_never_written(tmp_path):
    file = write_npy(tmp_path / "a.npy", np.arange(6, dtype=">i4").reshape(3, 2), 128)
    before = file.read_bytes()
    with em.open(tmp_path / "s", memory="1MiB") as store:
        table = store.adopt("t", file, writable=False)
        assert table[:].tolist() == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(PermissionError):
            table[0] = 7
    assert file.read_bytes() == before


def test_damage_of_a_big_endian_file_is_noticed(tmp_path):
    file = write_npy(tmp_path / "a.npy", np.zeros((100, 2), ">f4"), 128)
    with em.open(tmp_path / "s", memory="1MiB") as store:
        store.adopt("t", file)[:] = 5
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    with em.open(tmp_path / "s", mode="r", memory="1MiB", accept_changed=True) as store:
        assert not store["t"].verify()["ok"]
        with pytest.raises(em.CorruptError):
            store["t"][:]


def test_a_copied_store_opens_adopted_files_only_when_told(tmp_path):
    file = write_npy(tmp_path / "a.npy", np.ones((3, 2), "<f4"), 128)
    with em.open(tmp_path / "s", memory="1MiB") as store:
        store.adopt("t", file)
    with em.open(tmp_path / "s", memory="1MiB") as store:
        assert store["t"][0].tolist() == [1, 1]
    with (
        em.open(tmp_path / "s", mode="r", allow_adopted=False) as store,
        pytest.raises(em.FormatError, match="allow_adopted is off"),
    ):
        store["t"]
    copy = shutil.copytree(tmp_path / "s", tmp_path / "copy")
    with em.open(copy, memory="1MiB") as store:
        assert store.tables() == ["t"]
        with pytest.raises(
            em.FormatError, match=r"a\.npy.*copied, unpacked or restored.*allow_adopted"
        ):
            store["t"]
    with em.open(copy, mode="r", allow_adopted=True) as store:
        assert store["t"][0].tolist() == [1, 1]
    with em.open(copy, mode="r") as store, pytest.raises(em.FormatError):
        store["t"]
    with em.open(copy, mode="r+", allow_adopted=True) as store:  # a writer records it
        store["t"][0] = 5
    with em.open(copy, mode="r") as store:
        assert store["t"][0].tolist() == [5, 5]
    with pytest.raises(TypeError, match="allow_adopted"):
        em.open(copy, allow_adopted="yes")


def test_the_manifest_tells_the_byte_order_and_is_not_trusted(tmp_path):
    file = write_npy(tmp_path / "a.npy", np.ones((3, 2), ">f4"), 128)
    with em.open(tmp_path / "s", memory="1MiB") as store:
        store.adopt("t", file)
        store.create("own", rows=3, dim=2)
    manifest = tmp_path / "s" / "embermap.json"
    good = manifest.read_text()
    assert '"byte_order": "big"' in good
    good = re.sub(r',\s*"checksum": "\w+"', "", good)  # as who edits it by hand does
    for old, new, text in [
        ('"byte_order": "big"', '"byte_order": "middle"', "middle"),
        ('"byte_order": "big"', '"byte_order": 3', "byte_order"),
        ('"adopted":', '"once":', "adopted"),
        ('"dtype": "float32"', '"dtype": "int8"', "int8|stride"),
    ]:
        manifest.write_text(good.replace(old, new))
        with pytest.raises(em.FormatError, match=text):
            em.open(tmp_path / "s", mode="r")
    # An order that is not the file's leaves the table unusable, not its values wrong.
    manifest.write_text(re.sub(r',\s*"byte_order": "big"', "", good))
    with em.open(tmp_path / "s", mode="r") as store:
        with pytest.raises(em.FormatError, match="dtype"):
            store["t"]
        assert store["own"][0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.asfortranarray(np.ones((3, 2), ">f4")), "Fortran"),
        (np.ones(2, [("a", ">f4", (2,))]), "structured"),
        (np.array(5, ">f4"), r"\(\)"),
        (np.ones(4, ">f4"), r"\(4,\)"),
        (np.ones((2, 2, 2), ">f4"), r"\(2, 2, 2\)"),
        (np.ones((2, 2), ">u4"), ">u4"),
        (np.ones((2, 2), ">c8"), ">c8"),
        (np.array([[None, "x"]], object), "object"),
        (np.ones((3, 0), ">f4"), "column"),
    ],
    ids=str,
)
def test_files_that_stay_refused(tmp_path, array, text):
    np.save(tmp_path / "a.npy", array)
    with em.open(tmp_path / "s", memory="1MiB") as store:
        with pytest.raises(em.FormatError, match=text):
            store.adopt("t", tmp_path / "a.npy")
        assert store.tables() == []


def wait_for_another_time():
    """The kernel's times of files move in steps of a few milliseconds."""
    time.sleep(0.02)


def edit_in_place(file):
    with file.open("r+b") as opened:  # not mapped: on tmpfs that changes no time
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\0\x10\x41")


def replace(file):
    np.save(file.with_suffix(".new.npy"), np.full((100, 2), 3, "<f4"))
    file.with_suffix(".new.npy").replace(file)


def touch(file):
    os.utime(file)


@pytest.mark.parametrize("change", [edit_in_place, replace, touch])
@pytest.mark.parametrize("durability", ["commit", "none"])
def test_a_file_that_others_changed_is_noticed_until_it_is_accepted(tmp_path, change, durability):
    file = tmp_path / "a.npy"
    np.save(file, np.ones((100, 2), "<f4"))
    with em.open(tmp_path / "s", memory="1MiB", durability=durability) as store:
        store.adopt("t", file)[:50] = 5
        store.create("own", rows=3, dim=2)
    wait_for_another_time()
    change(file)
    for mode in ("r", "r+"):
        with em.open(tmp_path / "s", mode=mode, memory="1MiB", durability=durability) as store:
            assert store["own"][0].tolist() == [0, 0]
            with pytest.raises(
                em.CorruptError,
                match=r"a\.npy.*something other than embermap: modified 2.*--accept",
            ):
                store["t"]
    rows = np.load(file)
    with em.open(tmp_path / "s", memory="1MiB", accept_changed=True) as store:
        if change is not touch:
            assert store["t"].verify()["bad_pages"] == 1
            with pytest.raises(em.CorruptError, match=r"does not match.*accept\(\) of the table"):
                store["t"].gather([0])
        store["t"].accept()
        assert np.array_equal(store["t"][:], rows)
    with em.open(tmp_path / "s", mode="r") as store:
        assert np.array_equal(store["t"][:], rows)
        assert store["t"].verify()["verified"] == 1


def test_a_killed_session_has_not_changed_the_file(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.zeros((5000, 2), "<f4"))
    with em.open(tmp_path / "s", memory="1MiB") as store:
        store.adopt("t", file)
    for value in range(1, 4):
        wait_for_another_time()
        store = em.open(tmp_path / "s", memory="1MiB")
        store["t"][:] = value
        store.commit()
        with em.open(tmp_path / "s", mode="r") as reader:
            assert np.all(reader["t"][:] == value)
        if value == 2:
            store.checkpoint()
        store.abandon()
    with em.open(tmp_path / "s", memory="1MiB") as store:
        assert np.all(store["t"][:] == 3)


def test_a_copied_store_can_be_used_and_its_files_touched(tmp_path):
    with em.open(tmp_path / "s", memory="1MiB") as store:
        store.create("own", rows=100, dim=2)[:] = 4
    wait_for_another_time()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "s", copy, copy_function=shutil.copyfile)
    touch(copy / "own.npy")
    for mode in ("r", "r+"):
        with em.open(copy, mode=mode, memory="1MiB") as store:
            assert np.all(store["own"][:] == 4)
            assert store["own"].verify()["ok"]
