"""Parquet and Arrow files: em.io.open, em.io.ls, em.convert, against pyarrow."""

from __future__ import annotations

import os
import sys

import embermap as em
import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.feather  # noqa: E402
import pyarrow.parquet  # noqa: E402, F401

ROWS, DIM = 1000, 7
DTYPES = ["float32", "float16", "float64", "int8", "uint8", "int32", "int64"]


def values(dtype="float32"):
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        out = rng.standard_normal((ROWS, DIM)).astype(dtype)
        out[3, 1], out[4, 2] = np.nan, -0.0
        return out
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, (ROWS, DIM), dtype=dtype, endpoint=True)


def lists(array, kind):
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(flat, DIM)
    offsets = np.arange(len(array) + 1) * DIM
    if kind == "large":
        return pa.LargeListArray.from_arrays(pa.array(offsets), flat)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat)


def write(path, column, name="embedding"):
    table = pa.table({"id": pa.array([str(i) for i in range(len(column))]), name: column})
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=130)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path, chunksize=90, compression="lz4")
    elif path.suffix == ".arrows":
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table, max_chunksize=111)
    else:
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table)
    return path


SUFFIXES = [".parquet", ".feather", ".arrow", ".arrows"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["fixed", "large", "list"])
def test_rows_are_those_of_the_lists(tmp_path, suffix, kind):
    want = values()
    path = write(tmp_path / f"x{suffix}", lists(want, kind))
    with em.io.open(path) as rows:
        assert (rows.shape, rows.dtype) == ((ROWS, DIM), np.float32)
        assert np.array_equal(rows[:].view(np.uint32), want.view(np.uint32))
        for key in (5, -1, slice(120, 140), slice(999, 3, -100), [7, 3, 998, 3]):
            assert np.array_equal(rows[key], want[key], equal_nan=True)
        together = np.concatenate([block for _, block in rows.blocks(33)])
        assert np.array_equal(together, want, equal_nan=True)
    assert np.array_equal(em.io.open(f"{path}:embedding")[2], want[2])
    entries = {entry.name: entry for entry in em.io.ls(path)}
    assert entries["embedding"].shape == (ROWS, DIM)
    assert entries["embedding"].dtype == "float32"
    with pytest.raises(ValueError, match="closed"):
        rows[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["y.parquet", "y.arrow", "y.parquet:vectors"])
def test_every_dtype_goes_there_and_back(tmp_path, dtype, name):
    want = values(dtype)
    np.save(tmp_path / "x.npy", want)
    found = em.convert(tmp_path / "x.npy", tmp_path / name, memory="64KiB", check=True)
    assert (found["rows"], found["dim"], found["dtype"]) == (ROWS, DIM, dtype)
    file = tmp_path / name.split(":")[0]
    if file.suffix == ".parquet":
        column = pa.parquet.read_table(file).column(name.partition(":")[2] or "weight")
    else:
        column = pa.ipc.open_file(pa.memory_map(str(file))).read_all().column("weight")
    assert np.array_equal(np.stack(column.to_numpy()), want, equal_nan=True)
    em.convert(file, tmp_path / "back.npy")
    assert (tmp_path / "back.npy").read_bytes()[-want.nbytes :] == want.tobytes()
    assert not list(tmp_path.glob(".*"))


def test_a_column_of_numbers_is_rows_of_one(tmp_path):
    pa.parquet.write_table(
        pa.table({"x": pa.array([1.5, 2, 3]), "s": ["a", "b", "c"]}), tmp_path / "x.parquet"
    )
    assert np.array_equal(em.io.open(tmp_path / "x.parquet")[:], [[1.5], [2], [3]])
    with pytest.raises(TypeError, match="string"):
        em.io.open(f"{tmp_path}/x.parquet:s")
    with pytest.raises(em.NotFoundError, match="no column 'y'"):
        em.io.open(f"{tmp_path}/x.parquet:y")


def test_dtype_rows_gzip_and_formats_by_name(tmp_path):
    want = values()
    want[3, 1] = 1e30
    np.save(tmp_path / "x.npy", want)
    found = em.convert(
        tmp_path / "x.npy",
        tmp_path / "y",
        dst_format="parquet",
        dtype="float16",
        rows=(-10, None),
        gzip=5,
    )
    assert found["rows"] == 10
    assert em.io.open(tmp_path / "y").dtype == np.float16
    assert (
        pa.parquet.ParquetFile(tmp_path / "y").metadata.row_group(0).column(0).compression == "GZIP"
    )
    found = em.convert(tmp_path / "x.npy", tmp_path / "z.parquet", dtype="float16")
    assert found["became_infinite"] == 1
    with pytest.raises(TypeError, match="no whole number"):
        em.convert(tmp_path / "x.npy", tmp_path / "w.parquet", dtype="int8")
    with pytest.raises(TypeError, match="bfloat16"):
        em.convert(tmp_path / "x.npy", tmp_path / "w.parquet", dtype="bfloat16")
    em.convert(tmp_path / "z.parquet", tmp_path / "w.h5:/a/b", gzip=1)
    assert em.io.open(f"{tmp_path}/w.h5:/a/b").shape == (ROWS, DIM)
    em.convert(tmp_path / "z.parquet", tmp_path / "w.vec", vocab="none")
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "w.parquet").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nulls_and_other_lengths_are_refused_by_row(tmp_path, suffix):
    def refuse(column, match):
        path = write(tmp_path / f"x{suffix}", column)
        with pytest.raises(em.FormatError, match=match):
            em.convert(path, tmp_path / "y.npy")
        assert not (tmp_path / "y.npy").exists()

    good = [[1.0, 2.0]] * 500
    refuse(pa.array([*good, [1.0], *good]), "row 500 has 1 columns, row 0 has 2")
    refuse(pa.array([*good, None, *good], pa.list_(pa.float32(), 2)), "row 500 is null")
    refuse(pa.array([*good, None, *good], pa.list_(pa.float32())), "row 500 is null")
    refuse(pa.array([*good, [1.0, None]]), "row 500, column 1 is null")
    refuse(pa.array([None, [1.0]]), "row 0 is null")
    refuse(pa.array([[], [1.0]], pa.list_(pa.float32())), "row 0 is an empty list")


def test_empty_files(tmp_path):
    empty = write(tmp_path / "x.parquet", pa.array([], pa.list_(pa.float32())))
    with pytest.raises(em.FormatError, match="give dim"):
        em.io.open(empty)
    assert em.io.open(empty, dim=4).shape == (0, 4)
    np.save(tmp_path / "x.npy", np.zeros((0, 3), np.float32))
    em.convert(tmp_path / "x.npy", tmp_path / "y.parquet")
    assert em.io.open(tmp_path / "y.parquet").shape == (0, 3)


def test_what_is_there_stays(tmp_path):
    np.save(tmp_path / "x.npy", values())
    (tmp_path / "y.parquet").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        em.convert(tmp_path / "x.npy", tmp_path / "y.parquet")
    assert (tmp_path / "y.parquet").read_bytes() == b"mine"

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        em.convert(tmp_path / "x.npy", tmp_path / "y.parquet", overwrite=True, progress=stop)
    assert (tmp_path / "y.parquet").read_bytes() == b"mine"
    em.convert(tmp_path / "x.npy", tmp_path / "y.parquet", overwrite=True)
    os.link(tmp_path / "y.parquet", tmp_path / "z.parquet")
    with pytest.raises(ValueError, match="both source and destination"):
        em.convert(tmp_path / "y.parquet", tmp_path / "z.parquet", overwrite=True)
    with em.open(tmp_path / "tables") as store:
        store.create("t", rows=3, dim=2)
    with pytest.raises(ValueError, match="own directory of the store"):
        em.convert(tmp_path / "x.npy", tmp_path / "tables" / "y.parquet")
    for options in ({"order": "o.npy"}, {"resume": True}, {"jobs": 2}, {"fields": ["a"]}):
        with pytest.raises(ValueError, match="not for Parquet"):
            em.convert(tmp_path / "y.parquet", tmp_path / "w.npy", **options)
    assert not list(tmp_path.glob(".*"))


def test_damaged_files(tmp_path):
    path = write(tmp_path / "x.parquet", lists(values(), "fixed"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(em.FormatError, match="x.parquet"):
        em.io.open(path)
    path.write_bytes(b"")
    with pytest.raises(em.FormatError, match="x.parquet"):
        em.io.open(path)
    with pytest.raises(FileNotFoundError):
        em.io.open(tmp_path / "none.parquet")


def test_without_pyarrow_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        em.io.open(tmp_path / "x.parquet")
    np.save(tmp_path / "x.npy", values())
    with pytest.raises(ImportError, match="pip install pyarrow"):
        em.convert(tmp_path / "x.npy", tmp_path / "y.parquet")
