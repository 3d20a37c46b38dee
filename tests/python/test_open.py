"""Opening, closing, committing and losing stores."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
from pathlib import Path

import embermap as em
import numpy as np
import pytest


def test_a_new_store_is_empty_and_a_store_at_once(path):
    with em.open(path) as store:
        assert store.tables() == [] == list(store) == store.keys()
        assert len(store) == 0
        assert store  # an empty store is not false
        assert store.commit_number == 0
        assert store.path == path
        assert store.mode == "a"
        assert store.writable
        assert store.device is None
        assert store.memory == 1 << 30
        assert "a" not in store
        assert 7 not in store
    with em.open(path, mode="r+") as store:
        assert store.tables() == []


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_store_that_must_exist_is_not_made(path, mode):
    with pytest.raises(em.StoreNotFoundError, match=re.escape(str(path))) as caught:
        em.open(path, mode=mode)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, em.Error)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(path)
    assert not path.exists()


def test_paths_may_be_strings_bytes_and_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with em.open("plain") as store:
        table = store.create("t", rows=3, dim=2)
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
        table[1] = 5
        store.commit()
    with em.open(os.fsencode(tmp_path / "plain"), mode="r") as store:
        assert store["t"][1].tolist() == [5, 5]
    assert not (tmp_path / "elsewhere" / "plain").exists()


def test_a_path_that_is_not_utf8(tmp_path):
    where = os.fsencode(tmp_path) + b"/caf\xe9"
    with em.open(where) as store:
        store.create("t", rows=3, dim=2)[:] = 7
    with em.open(os.fsdecode(where), mode="r") as store:
        assert store["t"][2].tolist() == [7, 7]


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [("64KiB", 65536), ("1.5MiB", 3 << 19), (1 << 20, 1 << 20), (np.int64(70000), 70000)],
)
def test_memory_is_bytes_or_a_text(path, memory, wanted):
    with em.open(path, memory=memory) as store:
        assert store.memory == wanted


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"memory": "lots"}, ValueError, "lots"),
        ({"memory": -1}, ValueError, "memory"),
        ({"memory": 1.5}, TypeError, "memory"),
        ({"memory": True}, TypeError, "memory"),
        ({"mode": "w"}, ValueError, "'w'"),
        ({"threads": -1}, ValueError, "threads"),
        ({"threads": 1.5}, TypeError, "threads"),
        ({"device": "gpu"}, ValueError, "gpu"),
        ({"device": "cuda:x"}, ValueError, "cuda:x"),
        ({"device": -1}, ValueError, "device"),
        ({"device": 1.0}, TypeError, "device"),
    ],
)
def test_arguments_that_cannot_be(path, arguments, error, text):
    with pytest.raises(error, match=text):
        em.open(path, **arguments)
    assert not path.exists()


def test_a_device_that_is_not_there(path):
    with pytest.raises(em.CudaError) as caught:
        em.open(path, device=f"cuda:{em.cuda_devices()}")
    assert isinstance(caught.value, RuntimeError)
    if em.cuda_devices() == 0:
        assert "device=None" in str(caught.value)
    assert not path.exists()


def test_cuda_is_counted_or_its_absence_explained():
    assert (em.cuda_devices() == 0) == bool(em.cuda_absence())


@pytest.mark.parametrize("device", [None, "cpu"])
def test_no_device(path, device):
    with em.open(path, device=device) as store:
        assert store.device is None


def test_leaving_the_block_commits(path):
    with em.open(path) as store:
        table = store.create("t", rows=100, dim=3)
        table[5] = 1
    assert store.closed
    with em.open(path, mode="r") as store:
        assert store["t"][5].tolist() == [1, 1, 1]
        assert store.commit_number == 1


def test_leaving_the_block_by_an_exception_does_not_commit(path):
    with em.open(path) as store:
        table = store.create("t", rows=100, dim=3)
        table[5] = 1
        assert store.commit() == 1

    def fail():
        with em.open(path) as opened:
            opened["t"][5] = 2
            opened["t"][6] = 2
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    with em.open(path, mode="r") as store:
        assert store["t"][5].tolist() == [1, 1, 1]
        assert store["t"][6].tolist() == [0, 0, 0]
        assert store.commit_number == 1


def test_commits_are_counted_and_a_commit_without_changes_is_none(store):
    table = store.create("t", rows=10, dim=1)
    table[0] = 1
    first = store.commit()
    assert store.commit() == first == store.commit_number
    table[0] = 2
    assert store.commit() == first + 1


def test_a_closed_store_says_so(path):
    store = em.open(path)
    table = store.create("t", rows=4, dim=2)
    view = table.view()
    kept = table.gather([1])
    store.close()
    store.close()  # a second call does nothing
    assert store.closed
    assert kept.tolist() == [[0, 0]]  # results are copies
    uses = [
        lambda: store.commit(),
        lambda: store.tables(),
        lambda: store["t"],
        lambda: "t" in store,
        lambda: store.create("u", rows=1, dim=1),
        lambda: store.remove("t"),
        lambda: store.__enter__(),
        lambda: table.gather([0]),
        lambda: table.scatter([0], [[1, 2]]),
        lambda: table.add([0], [[1, 2]]),
        lambda: table.prefetch([0]),
        lambda: table[0],
        lambda: table.rows,
        lambda: table.read(),
        lambda: table.stats(),
        lambda: view[0],
        lambda: len(view),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    assert repr(store) == f"<embermap.Store {str(path)!r} (closed)>"
    assert repr(table) == "<embermap.Table 't' (closed)>"
    assert table.name == "t"
    assert "closed" in repr(view)


def test_what_they_look_like(path):
    with em.open(path, memory="32MiB") as store:
        table = store.create("t", rows=4, dim=2, optimizer=em.optim.SGD(0.5))
        assert repr(store) == f"<embermap.Store {str(path)!r} mode='a' tables=1 memory=32.00 MiB>"
        assert repr(table) == (
            "<embermap.Table 't' 4 x 2 float32, "
            "SGD(lr=0.5, momentum=0.0, weight_decay=0.0, nesterov=False)>"
        )
        assert repr(table.view()) == f"<embermap.TableView 'weight' of {table!r}>"


# --- who else has it open -------------------------------------------------------------------------


def test_a_second_writer_is_refused_in_the_same_process(path):
    with em.open(path) as store:
        store.create("t", rows=4, dim=2)[1] = 3
        with pytest.raises(em.LockedError, match=str(os.getpid())) as caught:
            em.open(path)
        assert isinstance(caught.value, OSError)
        store["t"][2] = 4  # the first is none the worse
    with em.open(path) as store:
        assert store["t"][2].tolist() == [4, 4]


def test_a_second_writer_is_refused_in_another_process(path, run_python):
    code = """
        import sys, embermap as em
        try:
            em.open(sys.argv[1])
        except em.LockedError as error:
            print("locked", error)
    """
    with em.open(path):
        assert re.match(rf"locked .*{os.getpid()}", run_python(code, path).stdout)
    assert run_python(code, path).stdout == ""


def test_a_lock_does_not_outlive_its_process(path, run_python):
    run_python(
        "import os, sys, embermap as em\ns = em.open(sys.argv[1])\nos._exit(0)",
        path,
    )
    with em.open(path):
        pass


def test_readers_read_what_was_committed(path):
    with em.open(path) as writer:
        table = writer.create("t", rows=50, dim=2)
        table[3] = 1
        writer.commit()
        table[3] = 2
        with em.open(path, mode="r") as one, em.open(path, mode="r") as two:
            assert one["t"][3].tolist() == two["t"][3].tolist() == [1, 1]


def test_a_reader_cannot_write(path):
    with em.open(path) as store:
        store.create("t", rows=50, dim=2, optimizer=em.optim.SGD(0.1))[3] = 1
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    with em.open(path, mode="r") as store:
        table = store["t"]
        assert not store.writable
        for write in (
            lambda: store.create("u", rows=1, dim=1),
            lambda: store.remove("t"),
            lambda: store.commit(),
            lambda: table.scatter([3], [[1, 2]]),
            lambda: table.add([3], [[1, 2]]),
            lambda: table.update([3], [[1.0, 2.0]]),
            lambda: table.__setitem__(3, 1),
            lambda: table.write(0, [[1, 2]]),
            lambda: table.resize(10),
            lambda: table.materialize(),
            lambda: setattr(table, "optimizer", em.optim.SGD(0.2)),
        ):
            with pytest.raises(PermissionError, match="read-only") as caught:
                write()
            assert caught.value.errno == errno.EROFS
        rows = table.gather([3])
        rows += 1  # a copy, and writable
        assert table[3].tolist() == [1, 1]
        assert table.verify()["ok"]
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only files")
def test_files_that_may_not_be_written(path):
    with em.open(path) as store:
        store.create("t", rows=50, dim=2)[3] = 1
    for file in path.iterdir():
        file.chmod(0o444)
    with em.open(path, mode="r") as store:
        assert store["t"][3].tolist() == [1, 1]
    with pytest.raises(PermissionError):
        em.open(path)


# --- files that are no store ----------------------------------------------------------------------


def test_a_file_is_no_store(tmp_path):
    file = tmp_path / "x.npy"
    np.save(file, np.zeros(3))
    with pytest.raises(NotADirectoryError) as caught:
        em.open(file)
    assert caught.value.filename == str(file)


def test_a_directory_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match=r"thesis\.txt"):
        em.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "{",
        lambda text: "[]",
        lambda text: text[: len(text) // 2],
        lambda text: "null",
        lambda text: '{"hello": 1}',
        lambda text: text.replace('"rows"', '"ros"'),
    ],
)
@pytest.mark.parametrize("mode", ["a", "r+", "r"])
def test_a_broken_manifest_is_named(path, damage, mode):
    with em.open(path) as store:
        store.create("t", rows=4, dim=2)
    manifest = path / "embermap.json"
    broken = damage(manifest.read_text())
    manifest.write_text(broken)
    with pytest.raises(em.FormatError, match=r"embermap\.json") as caught:
        em.open(path, mode=mode)
    assert isinstance(caught.value, ValueError)
    assert manifest.read_text() == broken  # not repaired away


def test_a_newer_version_is_named(path):
    with em.open(path):
        pass
    manifest = path / "embermap.json"
    content = json.loads(manifest.read_text())
    (key,) = [k for k in content if "version" in k or "format" in k][:1]
    content[key] = 9_999
    manifest.write_text(json.dumps(content))
    with pytest.raises(em.FormatError, match="9999"):
        em.open(path)


def test_a_table_cut_short_is_found(path):
    with em.open(path) as store:
        store.create("t", rows=5_000, dim=2)[:] = 1
    file = path / "t.npy"
    os.truncate(file, 8_192)
    with (
        em.open(path, mode="r") as store,
        pytest.raises(em.FormatError, match=r"t\.npy.*4096 of 40000 bytes"),
    ):
        store["t"]


def test_a_missing_table_file_is_an_oserror_with_its_name(path):
    with em.open(path) as store:
        store.create("t", rows=5, dim=2)
    (path / "t.npy").unlink()
    with em.open(path, mode="r") as store, pytest.raises(FileNotFoundError) as caught:
        store["t"]
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(path / "t.npy")
    assert str(caught.value).count("t.npy") == 1


def test_flipped_bytes_are_found(path):
    with em.open(path) as store:
        store.create("t", rows=5_000, dim=2)[:] = 1
    with (path / "t.npy").open("r+b") as file:
        file.seek(9_000)
        file.write(b"\x55")
    with em.open(path, mode="r") as store:
        table = store["t"]
        with pytest.raises(em.CorruptError) as caught:
            table.gather(range(5_000))
        assert isinstance(caught.value, OSError)
        report = table.verify()
        assert not report["ok"]
        assert report["bad_pages"] == 1
        (bad,) = report["bad"]
        row = (9_000 - 4_096) // 8
        assert bad["first_row"] <= row <= bad["last_row"]
        assert table.gather([0]).tolist() == [[1, 1]]  # other pages stay readable


def test_too_little_memory_says_how_much_would_do(path):
    def least(caught):
        assert isinstance(caught.value, MemoryError)
        return int(re.search(r"takes? (\d+) bytes", str(caught.value))[1])

    with pytest.raises(em.BudgetError, match="one page of one table") as caught:
        em.open(path, memory=1_000)
    assert not path.exists()
    with em.open(path, memory=least(caught)) as store:
        store.create("t", rows=100, dim=4)
        with pytest.raises(em.BudgetError, match="2 tables") as caught:
            store.create("u", rows=100, dim=4)
        store.remove("t")
    with em.open(path, memory=least(caught)) as store:
        store.create("u", rows=100, dim=4)
        store.create("t", rows=100, dim=4)[:] = 2
        assert store["t"][99].tolist() == [2, 2, 2, 2]


# --- tables of a store ----------------------------------------------------------------------------


def test_a_table_is_what_it_was_made(path):
    with em.open(path) as store:
        table = store.create(
            "items",
            rows=10,
            dim=3,
            dtype="float16",
            optimizer=em.optim.Adagrad(0.5, eps=1e-7),
            init=em.init.Uniform(-1, 1),
            seed=2**64 - 1,
            page_bytes="64KiB",
        )
    with em.open(path, mode="r") as store:
        assert store.tables() == ["items"]
        assert "items" in store
        table = store["items"]
        assert (table.name, table.rows, table.dim, table.shape) == ("items", 10, 3, (10, 3))
        assert len(table) == 10
        assert table.ndim == 2
        assert table.dtype == np.float16
        assert table.optimizer == em.optim.Adagrad(0.5, eps=1e-7)
        assert table.init == em.init.Uniform(-1, 1)
        assert table.seed == 2**64 - 1
        assert table.page_bytes == 65536
        assert table.step == 0
        assert table.path == path / "items.npy"
        assert not table.adopted
        assert list(table.fields) == ["weight", "sum"]
        assert table.fields["sum"] == np.float32


@pytest.mark.parametrize(
    ("init", "check"),
    [
        (None, lambda x: (x == 0).all()),
        (em.init.Zeros(), lambda x: (x == 0).all()),
        (em.init.Constant(2.5), lambda x: (x == 2.5).all()),
        (em.init.Uniform(1, 2), lambda x: (x >= 1).all() and (x < 2).all() and x.std() > 0.2),
        (em.init.Normal(5, 0.1), lambda x: abs(x.mean() - 5) < 0.02 and 0.05 < x.std() < 0.2),
    ],
)
def test_initial_rows(store, init, check):
    table = store.create("t", rows=1_000, dim=4, init=init, seed=3)
    assert check(table.gather(range(1_000)))
    if init is not None:
        assert table.init == init


def test_initial_rows_depend_on_the_seed_alone(store):
    make = {"rows": 500, "dim": 7, "init": em.init.Normal()}
    one = store.create("one", seed=1, **make)
    same = store.create("same", seed=1, page_bytes=65536, **make)
    other = store.create("other", seed=2, **make)
    assert np.array_equal(one[:], same.gather(range(499, -1, -1))[::-1])
    assert not np.array_equal(one[:], other[:])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": ""}, ValueError, "name"),
        ({"name": "a/b"}, ValueError, "a/b"),
        ({"name": "../b"}, ValueError, "b"),
        ({"name": ".hidden"}, ValueError, "hidden"),
        ({"name": 3}, TypeError, "3"),
        ({"rows": -1}, ValueError, "rows"),
        ({"rows": 2.0}, TypeError, "rows"),
        ({"rows": True}, TypeError, "rows"),
        ({"rows": 2**63}, ValueError, "rows"),
        ({"rows": 2**62}, ValueError, "rows|bytes"),
        ({"dim": 0}, ValueError, "dim"),
        ({"dim": -3}, ValueError, "dim"),
        ({"dim": "3"}, TypeError, "dim"),
        ({"dtype": "complex64"}, TypeError, "complex64"),
        ({"dtype": ">f4"}, TypeError, ">f4"),
        ({"dtype": "bool"}, TypeError, "bool"),
        ({"dtype": "floaty"}, TypeError, "floaty"),
        ({"dtype": None}, TypeError, "None"),
        ({"optimizer": "adagrad"}, TypeError, "adagrad"),
        ({"optimizer": em.optim.SGD}, TypeError, "SGD"),
        ({"optimizer": em.optim.SGD(), "dtype": "int32"}, TypeError, "int32"),
        ({"init": "zeros"}, TypeError, "zeros"),
        ({"init": em.init.Normal(), "dtype": "int32"}, (ValueError, TypeError), "int32"),
        ({"init": em.init.Uniform(2, 1)}, ValueError, "low"),
        ({"init": em.init.Constant(float("nan"))}, ValueError, "nan"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"page_bytes": 1000}, ValueError, "1000"),
        ({"page_bytes": "4MiB"}, ValueError, "4194304"),
    ],
)
def test_tables_that_cannot_be(store, arguments, error, text):
    with pytest.raises(error, match=text):
        store.create(**{"name": "t", "rows": 4, "dim": 2, **arguments})
    assert store.tables() == []
    assert sorted(p.name for p in store.path.iterdir()) == ["LOCK", "embermap.json", "redo.log"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: em.optim.SGD(-1), ValueError),
        (lambda: em.optim.SGD(float("nan")), ValueError),
        (lambda: em.optim.SGD(0.1, nesterov=True), ValueError),
        (lambda: em.optim.SGD("0.1"), TypeError),
        (lambda: em.optim.SGD(True), TypeError),
        (lambda: em.optim.SGD(0.1, nesterov=1), TypeError),
        (lambda: em.optim.Adagrad(0.1, eps=-1), ValueError),
        (lambda: em.optim.Adagrad(lr=None), TypeError),
        (lambda: em.init.Constant("1"), TypeError),
        (lambda: em.init.Normal(0, None), TypeError),
    ],
)
def test_hyperparameters_that_cannot_be(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "käse", "名前", "x" * 200])
def test_names(path, name):
    with em.open(path) as store:
        store.create(name, rows=2, dim=1)[1] = 4
    with em.open(path, mode="r") as store:
        assert store.tables() == [name]
        assert store[name][1] == 4


def test_a_table_that_is_not_there_is_a_key_error_that_reads_well(store):
    store.create("here", rows=1, dim=1)
    with pytest.raises(KeyError) as caught:
        store["gone"]
    assert isinstance(caught.value, em.NotFoundError)
    assert str(caught.value).startswith("store ")
    assert "'gone'" in str(caught.value)
    assert "here" in str(caught.value)
    with pytest.raises(em.NotFoundError, match="gone"):
        store.remove("gone")
    with pytest.raises(TypeError, match="name"):
        store[0]


def test_a_table_is_not_made_twice(store):
    store.create("t", rows=1, dim=1)
    with pytest.raises(FileExistsError, match="'t'") as caught:
        store.create("t", rows=1, dim=1)
    assert caught.value.errno == errno.EEXIST


def test_removing_a_table(store):
    table = store.create("t", rows=1_000, dim=4)
    store.create("u", rows=10, dim=1)[0] = 3
    table[:] = 1
    store.remove("t")
    assert store.tables() == ["u"]
    assert not [p for p in store.path.iterdir() if p.name.startswith("t.")]
    with pytest.raises(ValueError, match="removed"):
        table.gather([0])
    assert store["u"][0] == 3
    assert store.create("t", rows=5, dim=2)[4].tolist() == [0, 0]


def test_a_billion_rows_cost_nothing(path):
    with em.open(path, memory="64MiB") as store:
        table = store.create("t", rows=1_000_000_000, dim=128, init=em.init.Normal(), seed=4)
        assert len(table) == 1_000_000_000
        last = table.gather([999_999_999, 0])
        table[999_999_999] = 1
        assert np.array_equal(table.gather([0]), last[1:])
    used = sum(p.stat().st_blocks * 512 for p in path.iterdir())
    assert used < 1 << 20
    with em.open(path, mode="r", memory="64MiB") as store:
        assert (store["t"][-1] == 1).all()
        assert np.array_equal(store["t"][0], last[1])


def test_resizing(path):
    with em.open(path) as store:
        table = store.create("t", rows=0, dim=3, init=em.init.Constant(7))
        assert table.gather([]).shape == (0, 3)
        assert table  # an empty table is not false
        with pytest.raises(em.RowIdError):
            table.gather([0])
        table.resize(2_000)
        assert (table[1_999] == 7).all()
        with pytest.raises(em.RowIdError):
            table.gather([2_000])
        table[:] = 1
        table.resize(500)
        table.resize(1_000)
        assert (table[499] == 1).all()
        assert (table[500] == 7).all()  # forgotten for good
        with pytest.raises(ValueError, match="rows"):
            table.resize(-1)
    assert np.load(Path(path, "t.npy"), mmap_mode="r").shape == (1_000, 3)


# --- broken tables --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r+", "r"])
@pytest.mark.parametrize(
    ("suffix", "damage", "error"),
    [
        (".npy", "delete", FileNotFoundError),
        (".npy", "truncate", em.FormatError),
        (".pages", "delete", FileNotFoundError),
        (".pages", "truncate", em.FormatError),
    ],
)
def test_a_broken_table_leaves_the_others_usable(path, tmp_path, suffix, damage, error, mode):
    with em.open(path) as store:
        for number, name in enumerate(("a", "bad", "c")):
            store.create(name, rows=1_000, dim=4, optimizer=em.optim.SGD(1.0))[:] = number
    file = path / f"bad{suffix}"
    if damage == "delete":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    with em.open(path, mode=mode) as store:
        for _ in range(2):
            with pytest.raises(error, match=f"bad{re.escape(suffix)}"):
                store["bad"]
        assert "bad" in store
        assert store.tables() == store.keys() == list(store) == ["a", "bad", "c"]
        assert len(store) == 3
        assert "tables=3" in repr(store)
        for number, name in ((0, "a"), (2, "c")):
            table = store[name]
            assert (table[:] == number).all()
            assert table.verify()["ok"]
            table.export(tmp_path / f"{name}.npy")
            assert (np.load(tmp_path / f"{name}.npy") == number).all()
        again = pickle.loads(pickle.dumps(store["c"]))
        assert (again[5] == 2).all()
        again._store.close()
        with pytest.raises(ValueError, match="store's own directory"):
            store["a"].export(path / "bad.npy", overwrite=True)
        if mode == "r":
            with pytest.raises(PermissionError):
                store.remove("bad")
            return
        store["a"].update([1], [[1.0] * 4])
        store.commit()
        with pytest.raises(FileExistsError):
            store.create("bad", rows=1, dim=1)
    with em.open(path) as store:  # a commit does not lose it
        assert (store["a"][1] == -1).all()
        with pytest.raises(error):
            store["bad"]
        store.remove("bad")
        assert "bad" not in store
        assert store.tables() == ["a", "c"]
        assert not list(path.glob("bad*"))
        with pytest.raises(em.NotFoundError):
            store["bad"]
        store.create("bad", rows=1, dim=1)[0] = 7
    with em.open(path, mode="r") as store:
        assert store["bad"][0].tolist() == [7]
        assert (store["c"][:] == 2).all()


def test_an_adopted_table_whose_file_is_gone(path, tmp_path):
    file = tmp_path / "x.npy"
    np.save(file, np.ones((10, 2), np.float32))
    with em.open(path) as store:
        store.adopt("bad", file)
        store.create("t", rows=3, dim=2)
    file.rename(tmp_path / "y.npy")
    with em.open(path) as store:
        with pytest.raises(FileNotFoundError) as caught:
            store["bad"]
        assert caught.value.filename == str(file)
        store["t"].export(tmp_path / "z.npy")
    (tmp_path / "y.npy").rename(file)
    with em.open(path) as store:  # it is as good as before
        assert (store["bad"][:] == 1).all()
    file.unlink()
    with em.open(path) as store:
        store.remove("bad")
        assert store.tables() == ["t"]


@pytest.mark.parametrize("durability", ["none", "commit"])
@pytest.mark.parametrize("pages", [2, 9, 10, 21, 100])
def test_tables_whose_last_pages_nobody_wrote_are_verified_and_recovered(path, pages, durability):
    with em.open(path, memory="64KiB", durability=durability) as store:
        table = store.create("t", rows=pages, dim=1024)
        table[pages - 2] = 4  # the last page stays as it is
        store.commit()
        table[pages - 2] = 5
        assert table.verify() == {
            "ok": True,
            "pages": pages,
            "written": 1,
            "verified": 1,
            "bad_pages": 0,
            "bad": [],
        }
        store.abandon()
    with em.open(path, memory="64KiB", accept_unclean=True) as store:
        assert store["t"].verify()["ok"]
        # verify() wrote the page where it belongs, which without a log is the table's file.
        assert store["t"][pages - 2, 0] == (5 if durability == "none" else 4)
    with em.open(path, mode="r") as store:
        assert store["t"].verify()["written"] == 1
