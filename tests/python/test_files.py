"""Tables as files: what NumPy sees, adopting, importing, exporting."""

from __future__ import annotations

import errno
import os
import signal
import threading

import embermap as em
import numpy as np
import pytest


def test_numpy_maps_what_has_been_committed(store, dtype, values):
    table = store.create("t", rows=333, dim=5, dtype=dtype)
    table[:] = values((333, 5), dtype)
    store.commit()
    stored = np.load(table.path, mmap_mode="r")
    assert stored.shape == (333, 5)
    assert stored.view(dtype).tobytes() == table.gather(range(333)).tobytes()


def test_numpy_maps_records_of_trained_tables(store, float_dtype, values):
    table = store.create("t", rows=100, dim=3, dtype=float_dtype, optimizer=em.optim.Adagrad())
    table[:] = values((100, 3), float_dtype)
    table.update([3], np.ones((1, 3), float_dtype))
    store.commit()
    stored = np.load(table.path, mmap_mode="r")
    weight = np.ascontiguousarray(stored["weight"])
    assert weight.tobytes() == table[:].tobytes()
    assert np.array_equal(stored["sum"], table.read(field="sum"))


def test_materialize_puts_all_rows_into_the_file(store):
    table = store.create("t", rows=5_000, dim=4, init=em.init.Normal(), seed=1)
    wanted = table[:]
    seen = []
    table.materialize(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 20
    assert np.array_equal(np.load(table.path), wanted)
    report = table.verify()
    assert report == {
        "ok": True,
        "pages": 20,
        "written": 20,
        "verified": 20,
        "bad_pages": 0,
        "bad": [],
    }


# --- from_array, adopt ----------------------------------------------------------------------------


def test_from_array(store, dtype, values):
    array = values((70, 6), dtype)[::2, ::3]
    table = store.from_array("t", array)
    assert table.dtype == dtype
    assert table.shape == (35, 2)
    assert table[:].tobytes() == array.tobytes()


def test_from_array_of_torch(store):
    torch = pytest.importorskip("torch")
    for kind in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(12).reshape(4, 3).to(kind)
        table = store.from_array(str(kind), tensor)
        assert table.gather(torch.arange(4)).equal(tensor)


def test_from_array_leaves_nothing_on_failure(store):
    with pytest.raises(ValueError, match=r"\(3,\)"):
        store.from_array("t", np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="complex"):
        store.from_array("t", np.zeros((3, 2), complex))
    assert store.tables() == []


def test_an_adopted_file_is_used_in_place(path, tmp_path, values):
    file = tmp_path / "x.npy"
    array = values((100, 3))
    np.save(file, array)
    with em.open(path) as store:
        table = store.adopt("t", file)
        assert table.adopted
        assert table.writable
        assert table.path == file
        assert np.array_equal(table[:], array)
        table[5] = -1
    array[5] = -1
    assert np.array_equal(np.load(file), array)
    with em.open(path) as store:
        store.remove("t")
    assert np.array_equal(np.load(file), array)


def test_an_adopted_file_can_be_protected(store, tmp_path, values):
    file = tmp_path / "x.npy"
    np.save(file, values((100, 3)))
    before = file.read_bytes()
    table = store.adopt("t", file, writable=False)
    assert not table.writable
    with pytest.raises(PermissionError, match=r"x\.npy"):
        table.scatter([0], np.ones((1, 3), np.float32))
    store.commit()
    assert file.read_bytes() == before


def test_adopting_bfloat16_needs_the_word(store, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    file = tmp_path / "x.npy"
    array = np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16)
    np.save(file, array)
    with pytest.raises((TypeError, em.FormatError), match="bfloat16"):
        store.adopt("t", file)
    table = store.adopt("t", file, dtype=ml_dtypes.bfloat16)
    assert np.array_equal(table[:], array)


def test_files_that_cannot_be_adopted(store, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        store.adopt("t", tmp_path / "none.npy")
    assert caught.value.filename == str(tmp_path / "none.npy")
    for name, array in (
        ("fortran", np.asfortranarray(np.ones((3, 4)))),
        ("flat", np.ones(3)),
        ("cube", np.ones((2, 2, 2))),
        ("complex", np.ones((2, 2), complex)),
        ("text", np.array([["a"]])),
    ):
        file = tmp_path / f"{name}.npy"
        np.save(file, array)
        with pytest.raises((em.FormatError, TypeError), match=name):
            store.adopt("t", file)
    (tmp_path / "junk.npy").write_bytes(b"junk" * 100)
    with pytest.raises(em.FormatError, match="junk"):
        store.adopt("t", tmp_path / "junk.npy")
    assert store.tables() == []


# --- import and export ----------------------------------------------------------------------------


def test_import_of_npy(store, tmp_path, dtype, values):
    file = tmp_path / "x.npy"
    array = values((300, 7), dtype)
    np.save(file, array)
    word = {"dtype": dtype} if dtype.name == "bfloat16" else {}
    table = store.import_file("t", file, **word)
    assert table.dtype == dtype
    assert table[:].tobytes() == array.tobytes()
    assert not table.adopted


def test_import_with_conversion_and_optimizer(store, tmp_path, values):
    file = tmp_path / "x.npy"
    array = values((300, 7), "float64")
    np.save(file, array)
    optimizer = em.optim.Adagrad(initial_accumulator_value=0.25)
    seen = []
    table = store.import_file(
        "t",
        str(file),
        dtype="float16",
        optimizer=optimizer,
        page_bytes="8KiB",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert np.array_equal(table[:], array.astype(np.float16))
    assert (table.read(field="sum") == 0.25).all()
    assert table.optimizer == optimizer
    assert table.page_bytes == 8_192
    assert seen[-1] == (300, 300)


def test_import_and_export_of_hdf5(store, tmp_path, values):
    h5py = pytest.importorskip("h5py")
    array = values((500, 4))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("group/v", data=array, chunks=(64, 4), compression="gzip")
    table = store.import_file("t", f"{tmp_path}/x.h5:/group/v")
    assert np.array_equal(table[:], array)
    table.export(f"{tmp_path}/y.h5:/a/b", gzip=4)
    with h5py.File(tmp_path / "y.h5") as file:
        assert file["a/b"].compression == "gzip"
        assert np.array_equal(file["a/b"][:], array)
    with pytest.raises(KeyError, match="gone"):
        store.import_file("u", f"{tmp_path}/x.h5:/gone")
    assert store.tables() == ["t"]


def test_export_of_npy(store, tmp_path, dtype, values):
    table = store.create("t", rows=300, dim=7, dtype=dtype)
    table[:] = values((300, 7), dtype)
    file = tmp_path / "out.npy"
    assert table.export(file) == {"became_infinite": 0, "became_zero": 0}
    assert np.load(file).view(dtype).tobytes() == table[:].tobytes()


def test_export_does_not_overwrite_unless_told(store, tmp_path):
    table = store.create("t", rows=3, dim=2, optimizer=em.optim.Adagrad())
    table[:] = 2
    file = tmp_path / "out.npy"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match=r"out\.npy") as caught:
        table.export(file)
    assert caught.value.errno == errno.EEXIST
    assert file.read_text() == "mine"
    table.export(file, overwrite=True, field="weight")
    assert (np.load(file) == 2).all()
    table.export(file, overwrite=True, field="sum")
    assert (np.load(file) == 0).all()


def test_a_table_is_not_exported_onto_the_store_itself(store, tmp_path, values, monkeypatch):
    file = tmp_path / "x.npy"
    np.save(file, values((10, 4)))
    adopted = store.adopt("a", file)
    table = store.create("t", rows=3, dim=2)
    table[:] = 1
    store.commit()
    (tmp_path / "link.npy").symlink_to(table.path)
    monkeypatch.chdir(store.path)
    for source in (table, adopted):
        for dst in (table.path, file, tmp_path / "link.npy", store.path / "new.npy", "t.npy"):
            with pytest.raises(ValueError, match="store's own|file of table"):
                source.export(dst, overwrite=True)
    assert table.path.stat().st_nlink == 1
    assert sorted(p.name for p in store.path.iterdir() if p.suffix == ".npy") == ["t.npy"]


def test_export_with_conversion_counts_what_became_infinite(store, tmp_path):
    table = store.create("t", rows=3, dim=2)
    table[:] = [[1e30, 1], [1e-30, 2], [3, 4]]
    with pytest.warns(RuntimeWarning, match="1 value"):
        report = table.export(tmp_path / "half.npy", dtype="float16")
    assert report == {"became_infinite": 1, "became_zero": 1}
    half = np.load(tmp_path / "half.npy")
    assert half.dtype == np.float16
    assert half.tolist() == [[np.inf, 1], [0, 2], [3, 4]]


@pytest.mark.parametrize(
    ("dst", "options", "error"),
    [
        ("x.npy", {"gzip": 10}, ValueError),
        ("x.npy", {"gzip": "9"}, TypeError),
        ("x.npy", {"dtype": "complex64"}, TypeError),
        ("x.npy", {"field": "exp_avg"}, KeyError),
        ("x.unknown", {}, ValueError),
        ("none/x.npy", {}, FileNotFoundError),
    ],
)
def test_exports_that_cannot_be(store, tmp_path, dst, options, error):
    table = store.create("t", rows=3, dim=2)
    with pytest.raises(error):
        table.export(tmp_path / dst, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (None, FileNotFoundError),
        (lambda f: f.write_bytes(b"junk" * 100), em.FormatError),
        (lambda f: np.save(f, np.float32(1)), em.FormatError),
        (lambda f: np.save(f, np.ones((3, 2), complex)), TypeError),
    ],
)
def test_imports_that_cannot_be(store, tmp_path, make, error):
    file = tmp_path / "x.npy"
    if make is not None:
        make(file)
    before = sorted(p.name for p in store.path.iterdir())
    with pytest.raises(error, match=r"x\.npy"):
        store.import_file("t", file)
    assert store.tables() == []
    assert sorted(p.name for p in store.path.iterdir()) == before


def test_pickles_in_npy_are_never_executed(store, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    file = tmp_path / "x.npy"
    np.save(file, np.array([[Bomb()]], dtype=object), allow_pickle=True)
    for call in (store.import_file, store.adopt):
        with pytest.raises((em.FormatError, TypeError), match="object"):
            call("t", file)
    assert not (tmp_path / "exploded").exists()


def test_an_exception_in_progress_stops_and_leaves_nothing(store, tmp_path, values):
    file = tmp_path / "x.npy"
    np.save(file, values((2_000_000, 4)))

    class Enough(Exception):
        pass

    def stop(done, total):
        if done:
            raise Enough

    before = sorted(p.name for p in store.path.iterdir())
    with pytest.raises(Enough):
        store.import_file("t", file, progress=stop)
    assert store.tables() == []
    assert sorted(p.name for p in store.path.iterdir()) == before
    table = store.import_file("t", file)
    with pytest.raises(Enough):
        table.export(tmp_path / "y.npy", progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "x.npy"]
    assert table[1].shape == (4,)


def test_control_c_ends_a_long_call(store, tmp_path, values):
    file = tmp_path / "x.npy"
    np.save(file, values((2_000_000, 4)))
    main = threading.main_thread().ident

    def interrupt(done, total):
        if done < total:
            signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        store.import_file("t", file, progress=interrupt)
    assert store.tables() == []


def test_progress_must_be_callable(store, tmp_path, values):
    np.save(tmp_path / "x.npy", values((10, 4)))
    with pytest.raises(TypeError):
        store.import_file("t", tmp_path / "x.npy", progress=3)
    assert store.tables() == []


# --- going on -------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stop_at(rows):
    def progress(done, total):
        if rows <= done < total:
            raise Stop

    return progress


def test_an_import_is_gone_on_with(store, tmp_path, values):
    rows = values((40_000, 16), "float32")
    np.save(tmp_path / "x.npy", rows)
    beside = store.path.parent
    with pytest.raises(Stop):
        store.import_file("t", tmp_path / "x.npy", resume=True, progress=stop_at(20_000))
    assert "t" not in store
    kept = sorted(p.name for p in beside.glob(f".{store.path.name}.t.resume*"))
    assert kept == [f".{store.path.name}.t.resume", f".{store.path.name}.t.resume.json"]
    seen = []
    table = store.import_file(
        "t", tmp_path / "x.npy", resume=True, check=True, progress=lambda d, t: seen.append(d)
    )
    assert min(seen[:1]) >= 20_000
    assert table[:].tobytes() == rows.tobytes()
    assert not list(beside.glob(f".{store.path.name}.t.resume*"))
    with pytest.raises(FileExistsError, match="'t'"):
        store.import_file("t", tmp_path / "x.npy", resume=True)


def test_another_source_is_not_gone_on_with(store, tmp_path, values):
    np.save(tmp_path / "x.npy", values((40_000, 16), "float32"))
    with pytest.raises(Stop):
        store.import_file("t", tmp_path / "x.npy", resume=True, progress=stop_at(20_000))
    np.save(tmp_path / "x.npy", values((40_000, 16), "float32"))
    with pytest.raises(ValueError, match="another source"):
        store.import_file("t", tmp_path / "x.npy", resume=True)
    np.savez(tmp_path / "x.npz", weight=np.ones((3, 2), "f4"), sum=np.ones((3, 2), "f4"))
    fields = {"weight": "weight", "sum": "sum"}
    with pytest.raises(ValueError, match="several fields"):
        store.import_file(
            "u", tmp_path / "x.npz", fields=fields, resume=True, optimizer=em.optim.Adagrad()
        )


def test_an_export_is_gone_on_with(tmp_path, values):
    rows = values((400_000, 16), "float32")
    with em.open(tmp_path / "s", memory="64MiB") as store:
        store.from_array("t", rows)
        with pytest.raises(ValueError, match='mode="r"'):
            store["t"].export(tmp_path / "y.npy", resume=True)
    out = tmp_path / "y.npy"
    with em.open(tmp_path / "s", mode="r") as store:
        with pytest.raises(Stop):
            store["t"].export(out, resume=True, progress=stop_at(200_000))
        assert not out.exists()
        assert (tmp_path / ".y.npy.resume").exists()
        found = store["t"].export(out, resume=True, check=True)
        assert 200_000 <= found["resumed_rows"] < 400_000
    assert np.load(out).tobytes() == rows.tobytes()
    assert not list(tmp_path.glob(".y.npy.resume*"))


def test_an_export_of_another_commit_is_not_gone_on_with(tmp_path, values):
    with em.open(tmp_path / "s", memory="64MiB") as store:
        store.from_array("t", values((400_000, 16), "float32"))
    with em.open(tmp_path / "s", mode="r") as store, pytest.raises(Stop):
        store["t"].export(tmp_path / "y.npy", resume=True, progress=stop_at(200_000))
    with em.open(tmp_path / "s") as store:
        store["t"].scatter([0], np.ones((1, 16), np.float32))
    with em.open(tmp_path / "s", mode="r") as store:
        with pytest.raises(ValueError, match="another (store|file of the table)"):
            store["t"].export(tmp_path / "y.npy", resume=True)
        with pytest.raises(ValueError, match="several arrays"):
            store["t"].export(tmp_path / "y.npz", fields={"a": "weight"}, resume=True)
