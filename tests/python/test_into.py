"""Rows of files onto tables that are there, and what import and export choose of rows."""

from __future__ import annotations

import threading

import embermap as em
import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

ROWS, DIM = 300, 5


@pytest.fixture
def values():
    return np.random.default_rng(2).standard_normal((ROWS, DIM)).astype(np.float32)


@pytest.fixture
def store(tmp_path):
    with em.open(tmp_path / "s", memory="16MiB") as store:
        yield store


@pytest.fixture
def table(store, values):
    table = store.create("t", rows=ROWS, dim=DIM, optimizer=em.optim.Adagrad())
    table[:] = values
    return table


def test_rows_are_replaced_and_part_of_the_next_commit(store, table, values, tmp_path):
    store.commit()
    np.save(tmp_path / "n.npy", values[:40] + 1)
    before = store.commit_number
    found = table.import_file(tmp_path / "n.npy", at=20, rows=slice(-10, None), check=True)
    assert (found["rows"], found["source_dtype"]) == (10, "float32")
    assert store.commit_number == before
    want = values.copy()
    want[20:30] = values[30:40] + 1
    assert np.array_equal(table[:], want)
    path = store.path
    store.close()
    with em.open(path, mode="r") as there:
        assert np.array_equal(there["t"][:], want)


def test_rows_in_memory_are_changed_too(table, values, tmp_path):
    table.gather(range(ROWS))
    table.scatter([3], np.ones((1, DIM), np.float32))
    np.save(tmp_path / "n.npy", values[:1] + 5)
    table.import_file(tmp_path / "n.npy", at=7)
    assert np.array_equal(table.gather([7])[0], values[0] + 5)
    assert (table.gather([3]) == 1).all()


def test_fields_come_by_their_names(table, values, tmp_path):
    save_file({"sum": values**2, "w": values + 1}, tmp_path / "x.safetensors")
    found = table.import_file(tmp_path / "x.safetensors", fields={"sum": "sum", "weight": "w"})
    assert set(found["fields"]) == {"sum", "weight"}
    assert np.array_equal(table.read(field="sum"), values**2)
    assert np.array_equal(table[:], values + 1)
    table.import_file(f"{tmp_path}/x.safetensors:w", field="sum")
    assert np.array_equal(table.read(field="sum"), values + 1)


def test_added_rows_are_committed_or_not_there(store, table, values, tmp_path):
    np.save(tmp_path / "n.npy", values[:33])
    before = store.commit_number
    table.import_file(tmp_path / "n.npy", append=True, check=True)
    assert store.commit_number > before
    assert len(table) == ROWS + 33
    assert np.array_equal(table[ROWS:], values[:33])

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.import_file(tmp_path / "n.npy", append=True, progress=stop)
    assert len(table) == ROWS + 33
    assert np.array_equal(table[:ROWS], values)


def test_rows_that_another_thread_has_added_stay(table, values, tmp_path):
    np.save(tmp_path / "n.npy", np.ones((100_000, DIM), np.float32))
    checks, added = threading.Event(), []

    def add():
        checks.wait(60)
        added.append(table.append(values[:3]))

    def stop_in_the_check(done, total):
        if checks.is_set():
            other.join(60)
            raise KeyboardInterrupt
        if done == total:
            checks.set()

    other = threading.Thread(target=add)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        table.import_file(tmp_path / "n.npy", append=True, check=True, progress=stop_in_the_check)
    assert added == [ROWS + 100_000]
    assert np.array_equal(table[added[0] :], values[:3])


def test_what_is_wrong_is_found_before_a_row_changes(store, values, tmp_path):
    table = store.create("i", rows=20_000, dim=64, dtype="int32")
    wide = np.ones((20_000, 64), np.float32)  # less than 32 MiB
    many = np.ones((200_000, 64), np.float32)  # more
    for rows in (wide, many):
        rows[-1, 7] = 0.5
        np.save(tmp_path / "f.npy", rows)
        with pytest.raises(TypeError, match=r"row \d+, column 7"):
            table.import_file(
                tmp_path / "f.npy", at=0, rows=(len(rows) - 20_000, None), dtype="int32"
            )
        assert not table[:].any()
    large = store.create("l", rows=200_000, dim=64, dtype="int32")
    with pytest.raises(TypeError, match="column 7"):
        large.import_file(tmp_path / "f.npy", dtype="int32")
    assert not large.read(0, 100_000).any()


def test_bad_requests_are_named(store, table, values, tmp_path):
    np.save(tmp_path / "n.npy", values)
    np.save(tmp_path / "d.npy", values.astype(np.float64))
    path = tmp_path / "n.npy"
    with pytest.raises(ValueError, match="reach past the end"):
        table.import_file(path, at=1)
    with pytest.raises(ValueError, match="not both"):
        table.import_file(path, at=1, append=True)
    with pytest.raises(ValueError, match="say where they go"):
        table.import_file(path, rows=(0, 5))
    with pytest.raises(TypeError, match="float64"):
        table.import_file(tmp_path / "d.npy")
    with pytest.raises(em.NotFoundError):
        table.import_file(path, field="speed")
    with pytest.raises(TypeError, match="fields"):
        table.import_file(path, fields="sum")
    with pytest.raises(ValueError, match="'sum' is named twice"):
        table.import_file(path, fields=["sum", "sum"])
    with pytest.raises(ValueError, match="at"):
        table.import_file(path, at=-1)
    with pytest.raises(ValueError, match="table itself"):
        table.import_file(store.path / "t.npy")
    assert np.array_equal(table[:], values)
    table.import_file(tmp_path / "d.npy", dtype="float32")
    reader = em.open(store.path, mode="r")
    with pytest.raises(PermissionError):
        reader["t"].import_file(path)


def test_words_are_compared(store, tmp_path):
    (tmp_path / "w.vec").write_text("2 1\na 1\nb 2\n")
    (tmp_path / "n.vec").write_text("2 1\na 3\nx 4\n")
    table = store.import_file("w", tmp_path / "w.vec")
    with pytest.raises(ValueError, match="'x'; row 1 of table 'w' is 'b'"):
        table.import_file(tmp_path / "n.vec")
    assert table[:].tolist() == [[1], [2]]
    table.import_file(tmp_path / "n.vec", vocab="none")
    assert table[:].tolist() == [[3], [4]]


def test_added_words_are_there_with_their_rows(store, tmp_path):
    (tmp_path / "w.vec").write_text("2 1\na 1\nb 2\n")
    (tmp_path / "n.vec").write_text("3 1\nc 3\nd 4\ne 5\n")
    table = store.import_file("w", tmp_path / "w.vec")
    vocabulary, seen, calls = store.path / "w.vocab.txt", [], []

    def stop_in_the_check(done, total):
        if 3 in calls:  # all rows were added
            seen.append(vocabulary.read_text())
            raise KeyboardInterrupt
        calls.append(done)

    with pytest.raises(KeyboardInterrupt):
        table.import_file(tmp_path / "n.vec", append=True, check=True, progress=stop_in_the_check)
    assert seen == ["a\nb\nc\nd\ne\n"]
    assert (len(table), vocabulary.read_text()) == (2, "a\nb\n")
    table.import_file(tmp_path / "n.vec", append=True, check=True)
    assert (len(table), vocabulary.read_text()) == (5, "a\nb\nc\nd\ne\n")


# --- import_file and export as the command has them -----------------------------------------------


def test_a_table_is_made_of_fields_in_an_order(store, values, tmp_path):
    np.savez(tmp_path / "x.npz", weight=values, sum=values**2)
    order = np.random.default_rng(1).permutation(ROWS)
    np.save(tmp_path / "o.npy", order)
    table = store.import_file(
        "t",
        tmp_path / "x.npz",
        fields=["weight", "sum"],
        optimizer=em.optim.Adagrad(),
        order=tmp_path / "o.npy",
        jobs=2,
        check=True,
    )
    assert np.array_equal(table[:], values[order])
    assert np.array_equal(table.read(field="sum"), values[order] ** 2)
    back = np.load(store.path / "t.order.npy")
    assert np.array_equal(table[:][back], values)
    small = store.import_file("u", f"{tmp_path}/x.npz:sum", rows=(-7, None))
    assert np.array_equal(small[:], values[-7:] ** 2)
    with pytest.raises(ValueError, match="weight"):
        store.import_file("v", tmp_path / "x.npz", fields=["sum"])
    assert store.tables() == ["t", "u"]


def test_fields_and_rows_are_exported(store, table, values, tmp_path):
    found = table.export(tmp_path / "x.h5", fields=["weight", "sum"], rows=(5, 9), check=True)
    assert set(found["fields"]) == {"weight", "sum"}
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.array_equal(file["weight"], values[5:9])
        assert file["weight"].attrs["commit"] == store.commit_number
        assert file["sum"].shape == (4, DIM)
    np.save(tmp_path / "o.npy", np.array([9, 9, 0], np.int16))
    found = table.export(tmp_path / "y.npy", order=tmp_path / "o.npy", jobs=3)
    assert np.array_equal(np.load(tmp_path / "y.npy"), values[[9, 9, 0]])
    assert np.load(found["order"])[[0, 9, 1]].tolist() == [2, 0, -1]


def test_an_hdf5_file_of_many_arrays_is_written_once(store, tmp_path):
    rows = np.arange(40.0).reshape(20, 2)
    names = [f"group{i}/array" for i in range(40)]
    np.savez(tmp_path / "x.npz", **{f"a{i}": rows + i for i in range(40)})
    fields = {name: f"a{i}" for i, name in enumerate(names)}
    for gzip in (None, 1):
        em.convert(
            tmp_path / "x.npz", tmp_path / "y.h5", fields=fields, gzip=gzip, overwrite=True,
            check=True,
        )  # fmt: skip
        with h5py.File(tmp_path / "y.h5") as file:
            for i, name in enumerate(names):
                assert np.array_equal(file[name], rows + i)
    bad = dict(list(fields.items())[:2]) | {"group0/array/below": "a3"}
    with pytest.raises(ValueError, match="no group"):
        em.convert(tmp_path / "x.npz", tmp_path / "z.h5", fields=bad)
    assert not (tmp_path / "z.h5").exists()
    assert [p.name for p in tmp_path.iterdir() if "z.h5" in p.name] == []


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32", "uint64", "int64", "uint8"])
def test_an_order_of_any_integers_in_any_format(values, tmp_path, dtype):
    torch = pytest.importorskip("torch")
    rows = values[:200]
    np.save(tmp_path / "x.npy", rows)
    order = np.random.default_rng(1).permutation(200).astype(dtype)
    np.savez(tmp_path / "o.npz", o=order)
    save_file({"o": order}, tmp_path / "o.safetensors")
    torch.save({"o": torch.from_numpy(order)}, tmp_path / "o.pt")
    with h5py.File(tmp_path / "o.h5", "w") as file:
        file["o"] = order
        file["big"] = order.astype(np.dtype(dtype).newbyteorder(">"))
        file["records"] = np.rec.fromarrays([order, order.astype("f4")], names="o,f")
    for name in ("o.npz", "o.safetensors", "o.pt", "o.h5:o", "o.h5:big", "o.h5:records:o"):
        em.convert(
            tmp_path / "x.npy", tmp_path / "y.npy", order=f"{tmp_path}/{name}", overwrite=True
        )
        assert np.array_equal(np.load(tmp_path / "y.npy"), rows[order]), name
    if dtype == "uint64":
        order[3] = 2**63 + 5
        np.savez(tmp_path / "o.npz", o=order)
        with pytest.raises(em.FormatError, match=f"entry 3 .* {2**63 + 5}"):
            em.convert(
                tmp_path / "x.npy", tmp_path / "y.npy", order=tmp_path / "o.npz", overwrite=True
            )
    if dtype == "int16":
        order[4] = -3
        save_file({"o": order}, tmp_path / "o.safetensors")
        with pytest.raises(em.FormatError, match="entry 4 .* -3"):
            em.convert(
                tmp_path / "x.npy", tmp_path / "y.npy", order=tmp_path / "o.safetensors",
                overwrite=True,
            )  # fmt: skip
    # As rows of a table they stay what they are: none.
    if dtype in ("int16", "uint16", "uint32", "uint64"):
        with pytest.raises(TypeError, match="cannot"):
            em.io.open(f"{tmp_path}/o.h5:o")


def test_rows_counted_from_the_end_of_several_arrays(store, values, tmp_path):
    np.savez(tmp_path / "x.npz", weight=values, sum=values**2)
    save_file({"w": values, "s": values**2}, tmp_path / "x.safetensors")
    fields = ["weight", "sum"]
    optimizer = em.optim.Adagrad()
    table = store.import_file(
        "t", tmp_path / "x.npz", fields=fields, rows=(-7, -2), optimizer=optimizer
    )
    assert np.array_equal(table.read(field="sum"), values[-7:-2] ** 2)
    table.import_file(
        tmp_path / "x.safetensors", fields={"weight": "w", "sum": "s"}, rows=slice(-5, None)
    )
    assert np.array_equal(table[:], values[-5:])
    em.convert(tmp_path / "x.npz", tmp_path / "y.npz", fields=fields, rows=(-3, None))
    assert np.array_equal(np.load(tmp_path / "y.npz")["sum"], values[-3:] ** 2)


def test_a_mask_is_no_order(values, tmp_path):
    torch = pytest.importorskip("torch")
    np.save(tmp_path / "x.npy", values[:2])
    mask = np.array([True, False])
    np.save(tmp_path / "o.npy", mask)
    np.savez(tmp_path / "o.npz", o=mask)
    save_file({"o": mask}, tmp_path / "o.safetensors")
    torch.save({"o": torch.from_numpy(mask)}, tmp_path / "o.pt")
    with h5py.File(tmp_path / "o.h5", "w") as file:
        file["o"] = mask
    for name in ("o.npy", "o.npz", "o.safetensors", "o.pt", "o.h5"):
        with pytest.raises(TypeError, match="truth values"):
            em.convert(tmp_path / "x.npy", tmp_path / "y.npy", order=tmp_path / name)
    assert not (tmp_path / "y.npy").exists()


def test_a_check_can_be_stopped_from_its_progress(values, tmp_path):
    np.save(tmp_path / "x.npy", values)
    seen = []

    def progress(done, total):
        seen.append(done)
        if seen.count(ROWS) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        em.convert(tmp_path / "x.npy", tmp_path / "y.npy", check=True, progress=progress)
    assert np.array_equal(np.load(tmp_path / "y.npy"), values)


def test_a_tables_own_file_is_refused_where_its_rows_are_elsewhere(tmp_path):
    out = tmp_path / "o.npy"
    with em.open(tmp_path / "u", memory="16MiB") as other, em.open(tmp_path / "s") as store:
        taken = other.create("taken", rows=1000, dim=8)
        table = store.create("t", rows=1000, dim=8, init=em.init.Normal(0, 1))
        file = tmp_path / "s" / "t.npy"

        def refused(says):
            with pytest.raises(em.FormatError, match=says):
                em.io.open(file)
            with pytest.raises(em.FormatError, match=says):
                em.convert(file, out)
            with pytest.raises(em.FormatError, match=says):
                other.import_file("new", file)
            with pytest.raises(em.FormatError, match=says):
                taken.import_file(file)
            assert not out.exists()
            assert "new" not in other

        refused("pages were never written.*embermap export")
        table.materialize()
        store.commit()
        store.checkpoint()
        em.io.open(file)
        table[5] = np.full(8, 7, np.float32)
        store.commit()  # in the log alone
        refused("redo log.*embermap export")
        store.checkpoint()
        assert em.io.open(file)[5].tolist() == [7] * 8
        em.convert(file, out)
        assert np.array_equal(np.load(out), table[:])
