"""embermap.io and embermap.convert: rows of files as arrays, and from file to file."""

from __future__ import annotations

import json
import zipfile

import embermap as em
import numpy as np
import pytest


@pytest.fixture
def values():
    return np.random.default_rng(0).standard_normal((1000, 7)).astype(np.float32)


@pytest.fixture
def file(tmp_path, values):
    path = tmp_path / "x.npy"
    np.save(path, values)
    return path


KEYS = [
    5,
    -1,
    np.int64(3),
    slice(None),
    slice(3, 9),
    slice(None, None, -1),
    slice(900, 2000),
    slice(5, 5),
    slice(2, 900, 7),
    slice(900, 2, -7),
    [4, 1, 1, -2],
    [],
    np.arange(12).reshape(3, 4),
    (slice(3, 7), 0),
    (slice(3, 7), slice(1, 3)),
    ([1, 2], 1),
    (5, 2),
    Ellipsis,
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_keys_are_those_of_numpy(file, values, key):
    with em.io.open(file) as rows:
        assert (rows.shape, rows.ndim, len(rows)) == ((1000, 7), 2, 1000)
        assert rows.dtype == np.float32
        found = rows[key]
        assert found.shape == values[key].shape
        assert np.array_equal(found, values[key])


def test_masks(file, values):
    mask = np.arange(1000) % 3 == 0
    rows = em.io.open(file)
    assert np.array_equal(rows[mask], values[mask])
    with pytest.raises(IndexError, match="mask"):
        rows[mask[:10]]


@pytest.mark.parametrize("key", [1000, -1001, [0, 1000], [-1001], 1.5, "a", (1, 2, 3)])
def test_rows_that_are_not_there(file, key):
    with pytest.raises(IndexError):
        em.io.open(file)[key]


@pytest.mark.parametrize("size", [None, 1, 333, 1000, 5000])
def test_blocks_are_all_rows_in_order(file, values, size):
    rows = em.io.open(file)
    blocks = list(rows.blocks(size))
    assert [first for first, _ in blocks] == list(np.cumsum([0] + [len(b) for _, b in blocks])[:-1])
    assert np.array_equal(np.concatenate([block for _, block in blocks]), values)
    assert np.array_equal(np.array(list(rows)), values)
    assert np.array_equal(np.asarray(rows), values)
    with pytest.raises(ValueError, match="at least 1"):
        next(rows.blocks(0))


def test_a_closed_file_is_an_error(file):
    rows = em.io.open(file)
    rows.close()
    rows.close()
    with pytest.raises(ValueError, match="closed"):
        rows[0]


def test_errors_name_what_is_wrong(tmp_path, file):
    with pytest.raises(FileNotFoundError):
        em.io.open(tmp_path / "none.npy")
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY\x01")
    with pytest.raises(em.FormatError, match="bad.npy"):
        em.io.open(tmp_path / "bad.npy")
    with pytest.raises(ValueError, match="format"):
        em.io.open(file, format="parquetry")
    with pytest.raises(ValueError, match="dim"):
        em.io.open(file, dim=0)


def test_ls(tmp_path, values):
    path = tmp_path / "x.npz"
    np.savez(path, a=values, b=np.arange(5))
    found = {entry.name: entry for entry in em.io.ls(path)}
    assert found["a"].shape == (1000, 7)
    assert found["a"].dtype == "float32"
    assert found["a"].bytes == values.nbytes
    assert found["b"].shape == (5,)
    assert np.array_equal(em.io.open(f"{path}:a")[:], values)


@pytest.mark.parametrize(
    "name", ["y.npy", "y.npz", "y.h5", "y.safetensors", "y.pt", "y.vec", "y.fvecs", "y.fbin"]
)
def test_convert_and_back(tmp_path, file, values, name):
    there = tmp_path / name
    result = em.convert(file, there, vocab="none" if name.endswith("vec") else None)
    assert result == {
        "rows": 1000,
        "dim": 7,
        "source_dtype": "float32",
        "dtype": "float32",
        "became_infinite": 0,
        "became_zero": 0,
    }
    assert np.array_equal(em.io.open(there)[:], values)
    em.convert(there, tmp_path / "back.npy", vocab="none" if name.endswith("vec") else None)
    assert np.array_equal(np.load(tmp_path / "back.npy"), values)


@pytest.mark.parametrize("rows", [slice(10, 20), (10, 20), (None, 3), (990, None), (-5, None)])
def test_convert_some_rows(tmp_path, file, values, rows):
    em.convert(file, tmp_path / "some.npy", rows=rows)
    wanted = values[rows if isinstance(rows, slice) else slice(*rows)]
    assert np.array_equal(np.load(tmp_path / "some.npy"), wanted)


def test_convert_some_rows_of_a_raw_file(tmp_path, values):
    values.tofile(tmp_path / "x.raw")
    em.convert(tmp_path / "x.raw", tmp_path / "y.npy", dtype="float32", dim=7, rows=(5, 2000))
    assert np.array_equal(np.load(tmp_path / "y.npy"), values[5:])


def test_convert_rows_with_words(tmp_path, values):
    text = tmp_path / "w.vec"
    lines = [f"{len(values)} 7"]
    lines += [f"word{i} " + " ".join(map(repr, row.tolist())) for i, row in enumerate(values)]
    text.write_text("\n".join(lines) + "\n")
    em.convert(text, tmp_path / "w.npy", rows=(5, 9))
    assert np.array_equal(np.load(tmp_path / "w.npy"), values[5:9])
    words = (tmp_path / "w.npy.vocab.txt").read_text().split()
    assert words == ["word5", "word6", "word7", "word8"]


def test_convert_changes_the_dtype(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1e6, 1.5], [1e-9, -2]], np.float32))
    result = em.convert(tmp_path / "x.npy", tmp_path / "y.npy", dtype="float16")
    assert (result["became_infinite"], result["became_zero"]) == (1, 1)
    assert np.load(tmp_path / "y.npy").dtype == np.float16


def test_convert_keeps_what_is_there(tmp_path, file, values):
    there = tmp_path / "y.npy"
    there.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        em.convert(file, there)
    assert there.read_bytes() == b"mine"
    em.convert(file, there, overwrite=True)
    assert np.array_equal(np.load(there), values)
    with pytest.raises(ValueError, match="both source and destination"):
        em.convert(file, file, overwrite=True)
    assert np.array_equal(np.load(file), values)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        em.convert(file, tmp_path / "z.npy", progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "y.npy"]


def test_negated_tensors_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    whole = torch.complex(torch.ones(2, 2), torch.full((2, 2), 5.0))
    torch.save({"w": whole.conj().imag}, tmp_path / "x.pt")  # -5, which is not what its bytes say
    with pytest.raises(em.FormatError, match="resolve_neg"):
        em.io.open(tmp_path / "x.pt")


@pytest.mark.parametrize("value", [2**53 + 1, 2**63 - 1, -(2**63), 2**62 + 3])
def test_whole_numbers_of_text_are_exact_beyond_doubles(tmp_path, value):
    np.save(tmp_path / "x.npy", np.array([[value, 1]], np.int64))
    em.convert(tmp_path / "x.npy", tmp_path / "x.vec", vocab="none", check=True)
    em.convert(tmp_path / "x.vec", tmp_path / "y.npy", dtype="int64", vocab="none")
    assert np.load(tmp_path / "y.npy").tolist() == [[value, 1]]


@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "9223372036854775808", "1e19"])
def test_numbers_of_text_that_are_not_whole_are_refused(tmp_path, text):
    (tmp_path / "x.vec").write_text(f"2 2\na 1 2.0\nb 1e2 {text}\n")
    with pytest.raises(em.FormatError, match="column 1.*no whole number that int64 can hold"):
        em.convert(tmp_path / "x.vec", tmp_path / "y.npy", dtype="int64", vocab="none")
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize("value", [2**24 + 1, -(2**31) + 1])
def test_whole_numbers_of_text_are_exact(tmp_path, value):
    np.save(tmp_path / "x.npy", np.array([[value, 1]], np.int32))
    em.convert(tmp_path / "x.npy", tmp_path / "x.vec", vocab="none")
    em.convert(tmp_path / "x.vec", tmp_path / "y.npy", dtype="int32", vocab="none")
    assert np.load(tmp_path / "y.npy").tolist() == [[value, 1]]


def test_what_is_replaced_keeps_its_permissions(tmp_path, file):
    there = tmp_path / "y.npz"
    em.convert(file, there)
    there.chmod(0o640)
    em.convert(file, f"{there}:more")
    assert there.stat().st_mode & 0o777 == 0o640
    em.convert(file, there, overwrite=True)
    assert there.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["x.npz", "x.pt", "x.safetensors"])
def test_names_that_nobody_could_read_are_refused(tmp_path, file, name):
    with pytest.raises(ValueError, match="UTF-8"):
        em.convert(file, bytes(tmp_path / name) + b":\xff")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize("rows", [3, (1, 2, 3), "5:6", slice(0, 9, 2)])
def test_rows_that_are_no_range(tmp_path, file, rows):
    with pytest.raises((TypeError, ValueError), match="rows must be"):
        em.convert(file, tmp_path / "y.npy", rows=rows)


def test_large_ids_are_out_of_range(file):
    with pytest.raises(IndexError, match=str(2**64 - 1)):
        em.io.open(file)[np.array([2**64 - 1], np.uint64)]


def test_order_fields_and_check_in_python(tmp_path, values):
    order = np.random.default_rng(1).permutation(1000)
    np.save(tmp_path / "o.npy", order)
    np.savez(tmp_path / "x.npz", a=values, b=values[:, :2])
    found = em.convert(f"{tmp_path}/x.npz:a", tmp_path / "y.npy", order=tmp_path / "o.npy", jobs=3)
    assert found["order"] == str(tmp_path / "y.npy.order.npy")
    assert np.array_equal(np.load(tmp_path / "y.npy"), values[order])
    found = em.convert(
        tmp_path / "x.npz", tmp_path / "z.safetensors", fields={"c": "a", "b": "b"}, check=True
    )
    assert set(found["fields"]) == {"c", "b"}
    assert np.array_equal(em.io.open(f"{tmp_path}/z.safetensors:c")[:], values)
    with pytest.raises(ValueError, match="twice"):
        np.save(tmp_path / "o.npy", np.where(order == 5, 6, order))
        em.convert(f"{tmp_path}/x.npz:a", tmp_path / "w.npy", order=tmp_path / "o.npy")
    assert not list(tmp_path.glob("w*"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("way", ["all", "optimizer state"])
@pytest.mark.parametrize(
    "kind", [lambda lr: em.optim.NAdam(lr, betas=(1 - lr, 0.99)), lambda lr: em.optim.ASGD(lr)]
)
def test_what_steps_carry_on_goes_along(tmp_path, kind, way):
    ids, grads = np.arange(20), np.ones((20, 3), np.float32)
    with em.open(tmp_path / "s") as store:
        table = store.create("t", rows=20, dim=3, optimizer=kind(0.1))
        for lr in (0.1, 0.3, 0.2):  # as a scheduler has it
            table.optimizer = kind(lr)
            table.update(ids, grads)
        if way == "all":
            table.export_all(tmp_path / "t.npz")
            again = store.import_all("u", tmp_path / "t.npz")
        else:
            table.export_all(tmp_path / "t.pt", optimizer_state=True)
            again = store.create("u", rows=20, dim=3, optimizer=kind(0.2))
            again.import_optimizer_state(tmp_path / "t.pt")
            again[:] = table[:]
        for one in (table, again):
            one.update(ids, grads)
        assert np.allclose(table[:], again[:], rtol=1e-6, atol=0)


def test_all_of_a_table_in_python(tmp_path):
    with em.open(tmp_path / "s") as store:
        table = store.create("t", rows=50, dim=3, optimizer=em.optim.Adam(0.1))
        table.update(np.arange(20), np.ones((20, 3), np.float32))
        table.export_all(tmp_path / "t.npz", check=True)
        again = store.import_all("u", tmp_path / "t.npz")
        assert (again.optimizer, again.step) == (table.optimizer, 1)
        for field in table.fields:
            one, two = table.read(0, 50, field=field), again.read(0, 50, field=field)
            assert np.array_equal(one, two)
        table.export_all(tmp_path / "o.pt", optimizer_state=True)
        third = store.create("v", rows=50, dim=3, optimizer=em.optim.Adam(0.5))
        found = third.import_optimizer_state(tmp_path / "o.pt")
        assert found == {"parameter": "state.0", "fields": ["exp_avg", "exp_avg_sq"], "step": 1}
        assert third.optimizer.lr == 0.1
        with pytest.raises(ValueError, match="own directory"):
            table.export_all(tmp_path / "s" / "x.npz")


def test_a_removed_table_takes_its_words_along(tmp_path):
    (tmp_path / "x.vec").write_text("2 2\na 1 2\nb 3 4\n")
    with em.open(tmp_path / "s") as store:
        store.import_file("t", tmp_path / "x.vec")
        assert (tmp_path / "s" / "t.vocab.txt").exists()
        store.remove("t")
        assert not list((tmp_path / "s").glob("t.*"))


def test_hdf5_of_other_dimensions_needs_no_name(tmp_path):
    h5py = pytest.importorskip("h5py")
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    with h5py.File(tmp_path / "x.h5", "w") as f:
        f["cube"] = rows
        f["line"] = np.arange(5)
    assert np.array_equal(em.io.open(tmp_path / "x.h5")[:], rows.reshape(2, 12))
    with h5py.File(tmp_path / "y.h5", "w") as f:
        f["line"] = np.arange(5)
    assert em.io.open(tmp_path / "y.h5").shape == (5, 1)


def test_the_comment_of_an_archive_stays(tmp_path, file, values):
    np.savez(tmp_path / "x.npz", a=values)
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.comment = b"made by hand"
    em.convert(file, f"{tmp_path}/x.npz:b")
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        assert archive.comment == b"made by hand"
        assert archive.testzip() is None


def test_an_index_that_names_a_missing_tensor(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"a": np.zeros((2, 2), np.float32)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"b": "one.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(em.FormatError, match="says that 'b' is in"):
        em.io.ls(tmp_path / "x.safetensors.index.json")


def test_source_dtype_of_an_import(tmp_path):
    raw = np.arange(6, dtype=np.float16)
    raw.tofile(tmp_path / "x.raw")
    with em.open(tmp_path / "s") as store:
        table = store.import_file(
            "t", tmp_path / "x.raw", dtype="float32", source_dtype="float16", dim=2
        )
        assert table.dtype == np.float32
        assert np.array_equal(table[:], raw.reshape(3, 2))


def test_destinations_in_a_store_are_refused(tmp_path, file):
    with em.open(tmp_path / "s") as store:
        store.create("t", rows=2, dim=2)
    for name in ("y.npy", "t.npy", "t.pages"):
        with pytest.raises(ValueError, match="own directory of the store"):
            em.convert(file, tmp_path / "s" / name, dst_format="npy", overwrite=True)
