"""Rows, elements and bytes past 2^31 and 2^32, on sparse files."""

from __future__ import annotations

import os

import embermap as em
import numpy as np
import pytest

SHAPES = {
    "billion": {"rows": 1_000_000_000, "dim": 128, "optimizer": em.optim.Adagrad()},
    "rows past 32 bits": {"rows": 2**33, "dim": 1},
    "odd bytes": {"rows": 2**32 + 12_345, "dim": 3, "dtype": "int8"},
    "long rows": {"rows": 300_000, "dim": 16_384},
}


@pytest.fixture(params=SHAPES)
def large(request, path):
    with em.open(path, memory="96MiB") as store:
        yield store.create("t", init=em.init.Constant(3), **SHAPES[request.param])


def edges(table):
    rows = table.rows
    near = [2**31, 2**32, 2**31 // table.dim, 2**32 // table.dim, 2**31 // table.dim // 4, rows - 3]
    return sorted({n + k for n in near for k in (-1, 0, 1) if 2 <= n + k < rows - 4})


def row(table, n):
    return ((np.arange(table.dim) + n) % 50).astype(table.dtype)


def test_keys_past_32_bits(large):
    rows, view = large.rows, large.view()
    assert len(large) == rows
    assert view.shape == (rows, large.dim)
    for n in edges(large):
        large[n] = row(large, n)
        assert np.array_equal(large[n], row(large, n))
        assert np.array_equal(large[n - rows], row(large, n))
        assert np.array_equal(view[n : n + 1], [row(large, n)])
        large[n : n + 4 : 2] = [row(large, n + 1), row(large, n + 2)]
        assert np.array_equal(large[n : n + 3 : 2], [row(large, n + 1), row(large, n + 2)])
        assert np.array_equal(large[n + 2 : n - 1 : -2], [row(large, n + 2), row(large, n + 1)])
        assert np.array_equal(large.read(n, n + 1)[0], row(large, n + 1))
    large[-2:] = 7
    assert np.array_equal(large[rows - 2 :], np.full((2, large.dim), 7))
    assert np.array_equal(large[:: rows - 1], [large[0], large[rows - 1]])
    large.prefetch([0, rows - 1])
    for bad in (rows, -rows - 1):
        with pytest.raises(IndexError, match=str(bad)):
            large[bad]
    with pytest.raises(em.RowIdError, match=str(rows)):
        large.gather([0, rows])


def test_resize_past_32_bits(large):
    n = edges(large)[-1]
    large[n] = row(large, n)
    before = large.rows
    large.resize(n + 1)
    assert np.array_equal(large[-1], row(large, n))
    large.resize(before)
    assert np.array_equal(large[n], row(large, n))
    assert np.array_equal(large[-1], np.full(large.dim, 3))
    assert large.verify()["ok"]


@pytest.mark.skipif(
    not os.environ.get("EMBERMAP_TEST_LARGE"),
    reason="writes 13 GB for some minutes: set EMBERMAP_TEST_LARGE=1",
)
def test_whole_files_past_32_bits(tmp_path):
    """Import, export and conversion, which write every row there is."""
    rows = 2**32 + 321
    source = tmp_path / "source.npy"
    array = np.lib.format.open_memmap(source, mode="w+", dtype=np.int8, shape=(rows, 1))
    marks = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, rows - 1]
    for value, n in enumerate(marks):
        array[n] = value + 1
    del array
    with em.open(tmp_path / "store", memory="64MiB") as store:
        table = store.import_file("t", source)
        source.unlink()
        assert table.shape == (rows, 1)
        assert table.gather(marks).ravel().tolist() == [1, 2, 3, 4, 5, 6]
        assert table.verify()["ok"]
        table.export(tmp_path / "out.npy")
        table.export(f"{tmp_path}/out.h5:/x")
        store.remove("t")
        shown = np.load(tmp_path / "out.npy", mmap_mode="r")
        assert shown.shape == (rows, 1)
        assert shown[marks].ravel().tolist() == [1, 2, 3, 4, 5, 6]
        again = store.import_file("again", f"{tmp_path}/out.h5:/x")
        assert again.gather(marks).ravel().tolist() == [1, 2, 3, 4, 5, 6]
