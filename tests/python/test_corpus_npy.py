"""NPY files as they go wrong for people with other tools: docs/bug-corpus.md, section A."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile

import embermap as em
import numpy as np
import pytest

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
DATA = ROWS.tobytes()
PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"


def npy(text=PLAIN, data=DATA, *, version=(1, 0), pad=True, newline=True, data_at=None):
    """A .npy file by hand: any version, padding and header text."""
    prefix = 10 if version[0] == 1 else 12
    header = text.encode("latin-1" if version[0] < 3 else "utf-8")
    if data_at is not None:
        header = header.ljust(data_at - prefix - 1)
    elif pad:
        header = header.ljust(-(prefix + len(header) + 1) % 64 + len(header))
    if newline:
        header += b"\n"
    length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + data


@pytest.fixture
def file(tmp_path):
    """file(content): a.npy with it."""

    def make(content):
        path = tmp_path / "a.npy"
        path.write_bytes(content)
        return path

    return make


def refused(store, path, match, error=em.FormatError):
    """Import, adopt, open and ls refuse the file in the same words; it stays as it is."""
    before = path.read_bytes(), path.stat().st_mtime_ns
    calls = [
        lambda: store.import_file("t", path),
        lambda: store.adopt("t", path),
        lambda: store.adopt("t", path, writable=False),
        lambda: em.io.open(path),
        lambda: em.io.ls(path),
    ]
    for call in calls:
        with pytest.raises(error, match=match) as caught:
            call()
        assert path.name in str(caught.value)
    assert store.tables() == []
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


# --- the header -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_1_2_and_3_are_read(store, file, version):
    path = file(npy(version=version))
    assert np.array_equal(store.import_file("t", path)[:], ROWS)
    assert np.array_equal(store.adopt("a", path)[:], ROWS)


@pytest.mark.parametrize("version", [(4, 0), (1, 1), (0, 0), (2, 1), (3, 255), (255, 0)])
def test_other_versions_are_refused_by_number(store, file, version):
    refused(store, file(npy(version=version)), rf"version {version[0]}\.{version[1]}")


@pytest.mark.parametrize(
    "content",
    [
        npy(data_at=80),
        npy(pad=False),
        npy(pad=False, newline=False),
        npy(PLAIN + " " * 1000),
        npy(data_at=4096),
        npy(version=(2, 0), pad=False),
        npy(PLAIN + " " * 20_000),
        npy(PLAIN + " " * 70_000, version=(2, 0)),
        npy(PLAIN.replace(" ", "\n\t  ")),
    ],
    ids=["80", "odd", "no newline", "wide", "page", "odd v2", "20000", "70000", "blanks"],
)
def test_data_may_begin_anywhere(store, file, content):
    path = file(content)
    for table in (store.import_file("t", path), store.adopt("a", path)):
        assert np.array_equal(table.gather([2]), ROWS[2:])
        assert np.array_equal(table[:], ROWS)
    store["a"][1] = 7
    store.commit()
    store.checkpoint()
    assert path.read_bytes()[: -ROWS.nbytes] == content[: -ROWS.nbytes]
    assert path.read_bytes()[-32:-16] == np.full(4, 7, np.float32).tobytes()


LIMITED = """
    import resource, sys
    import embermap as em
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for call in (em.io.open, em.io.ls):
        try:
            call(sys.argv[1])
        except em.FormatError as error:
            print(error)
"""


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_not_as_long_as_it_says(file, run_python, version):
    path = file(b"\x93NUMPY" + bytes([version, 0]) + b"\xf0\xff\xff\xff")
    out = run_python(LIMITED, path).stdout.splitlines()
    assert len(out) == 2
    assert all("truncated header: 12 bytes, the header needs 4294967292" in line for line in out)
    with path.open("r+b") as sparse:  # even if the file is that long
        sparse.truncate(5 << 30)
    out = run_python(LIMITED, path).stdout.splitlines()
    assert len(out) == 2
    assert all("longer than the 16777216 accepted" in line for line in out)


def test_four_thousand_fields(store, tmp_path):
    path = tmp_path / "wide.npy"
    array = np.zeros(3, [(f"field{i}", "<f4") for i in range(4000)])
    array["field3999"] = [1, 2, 3]
    with pytest.warns(UserWarning, match="format 2.0"):
        np.save(path, array)
    table = store.import_file("t", f"{path}:field3999")
    assert table[:].ravel().tolist() == [1, 2, 3]
    assert len(em.io.ls(path)) == 4000


def test_a_file_cut_anywhere_in_its_header(store, file, tmp_path):
    whole = npy()
    for size in range(129):
        path = file(whole[:size])
        with pytest.raises(em.FormatError, match=r"a\.npy.*truncated header") as caught:
            store.import_file("t", path)
        assert size < 128, caught.value
        if size == 127:
            break
    for size in range(128, len(whole)):
        with pytest.raises(em.FormatError, match=rf"truncated data: {size - 128} of 48 bytes"):
            store.import_file("t", file(whole[:size]))
    for size in range(132):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("m.npy", whole[:size])
        with pytest.raises(em.FormatError, match=r"a\.npz:m.*truncated"):
            store.import_file("t", f"{tmp_path}/a.npz:m")
    assert store.tables() == []


# --- shapes and order -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(3, 4), (2, 3, 2), (1, 9), (9, 1), (9,), (1, 1), (5, 1, 7), (5, 7, 1)]
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.filterwarnings("ignore:.*has shape")
def test_fortran_order_is_honoured(store, tmp_path, shape, version):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    text = f"{{'descr': '<f4', 'fortran_order': True, 'shape': {shape}, }}"
    path = tmp_path / "a.npy"
    path.write_bytes(npy(text, array.tobytes(order="F"), version=version))
    assert np.array_equal(np.load(path), array)
    table = store.import_file("t", path)
    assert np.array_equal(table[:], array.reshape(shape[0], -1))
    rows = em.io.open(path)
    assert np.array_equal(rows[-1], array[-1].ravel())
    em.convert(path, tmp_path / "b.npy")
    assert np.load(tmp_path / "b.npy").flags.c_contiguous


def test_a_large_file_in_fortran_order_needs_little_memory(tmp_path, run_python):
    rows, dim = 1 << 20, 128  # 512 MiB, of which a column is on disk
    text = f"{{'descr': '<f4', 'fortran_order': True, 'shape': ({rows}, {dim}), }}"
    path = tmp_path / "a.npy"
    path.write_bytes(npy(text, b""))
    with path.open("r+b") as file:
        file.truncate(128 + rows * dim * 4)
        file.seek(128 + 7 * rows * 4)
        file.write(np.arange(rows, dtype=np.float32).tobytes())
    code = """
        import resource, sys
        import embermap as em, numpy as np
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
        total = 0
        for first, block in em.io.open(sys.argv[1]).blocks():
            assert np.array_equal(block[:, 7], np.arange(first, first + len(block)))
            assert not block[:, :7].any() and not block[:, 8:].any()
            total += len(block)
        print(total)
    """
    assert run_python(code, path).stdout.split() == [str(rows)]


@pytest.mark.parametrize(
    ("shape", "shown"), [("(12)", "12"), ("[3, 4]", r"\[3, 4\]"), ("12", "12"), ("'3'", "'3'")]
)
def test_a_shape_has_to_be_a_tuple(store, file, shape, shown):
    text = PLAIN.replace("(3, 4)", shape)
    refused(store, file(npy(text)), f"shape is not a tuple: .*{shown}")


@pytest.mark.parametrize("word", ["np.int64(3)", "numpy.int32(3)", "np.uint8(3)"])
def test_a_foreign_numpy_scalar_in_a_shape_is_explained(store, file, word):
    path = file(npy(PLAIN.replace("(3, 4)", f"({word}, 4)")))
    refused(store, path, "convert each dimension to int before writing")


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array, int])
def test_our_own_headers_have_plain_numbers(store, tmp_path, number):
    table = store.create(f"t{number.__name__}", rows=number(3), dim=number(1))
    table.export(tmp_path / "a.npy")
    for path in (table.path, tmp_path / "a.npy"):
        head = path.read_bytes()[:120]
        assert b"'shape': (3, 1)" in head, head


def test_dimensions_of_torch_and_trained_tables(store):
    torch = pytest.importorskip("torch")
    shape = torch.zeros(3, 4).shape
    plain = store.create("plain", rows=shape[0], dim=shape[1])
    trained = store.create("trained", rows=torch.tensor(5), dim=2, optimizer=em.optim.Adagrad())
    assert b"'shape': (3, 4)" in plain.path.read_bytes()[:128]
    assert b"'shape': (5,)" in trained.path.read_bytes()[:256]
    for bad in (2.5, "3", None, (3, 4), np.array([3, 4]), True):
        with pytest.raises((TypeError, ValueError)):
            store.create("bad", rows=bad, dim=4)
    assert "bad" not in store


def test_the_suffix_of_python_2(store, file):
    text = PLAIN.replace("(3, 4)", "(3L, 4L)")
    for version in ((1, 0), (2, 0)):
        assert np.array_equal(em.io.open(file(npy(text, version=version)))[:], ROWS)
    refused(store, file(npy(text, version=(3, 0))), "suffix L of Python 2")


@pytest.mark.parametrize("shape", [(768,), (3,), (1,)])
def test_one_dimension_becomes_one_column_and_that_is_said(store, tmp_path, shape):
    path = tmp_path / "one.npy"
    array = np.arange(shape[0]).astype(np.float16)
    np.save(path, array)
    with pytest.warns(UserWarning, match=rf"one\.npy.*\({shape[0]},\).*{shape[0]} rows of one col"):
        table = store.import_file("t", path)
    assert np.array_equal(table[:], array[:, None])
    with pytest.raises(em.FormatError, match=rf"one\.npy.*\({shape[0]},\)"):
        store.adopt("a", path)
    if shape[0] > 1:  # else it is one row
        with pytest.raises(ValueError, match=rf"\(n, 1\) or \(1,\), not \(1, {shape[0]}\)"):
            table.append(array)


@pytest.mark.parametrize("shape", [(10, 10, 10, 10), (5, 1, 7), (5, 7, 1), (2, 3, 4)])
@pytest.mark.parametrize("name", ["x.npy", "x.npz:m", "x.h5:m"])
def test_more_dimensions_become_columns_and_that_is_said(store, tmp_path, shape, name):
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    if name == "x.npy":
        np.save(tmp_path / name, array)
    elif name == "x.npz:m":
        np.savez(tmp_path / "x.npz", m=array)
    else:
        with pytest.importorskip("h5py").File(tmp_path / "x.h5", "w") as file:
            file["m"] = array
    text = ", ".join(map(str, shape))
    dim = int(np.prod(shape[1:]))
    with pytest.warns(UserWarning, match=rf"x\.\w+.*\({text}\).*{shape[0]} rows of {dim} columns"):
        table = store.import_file("t", f"{tmp_path}/{name}")
    assert table.shape == (shape[0], dim)
    assert np.array_equal(table.gather([3 % shape[0]]).reshape(shape[1:]), array[3 % shape[0]])
    with pytest.raises(ValueError, match=rf"\({text}\)"):
        store.from_array("f", array)
    if name == "x.npy":
        with pytest.raises(em.FormatError, match=rf"\({text}\)"):
            store.adopt("a", tmp_path / name)


@pytest.mark.filterwarnings("error")
def test_two_dimensions_need_no_word(store, file):
    store.import_file("t", file(npy()))


@pytest.mark.parametrize("data_at", [128, 4096])
def test_no_rows(store, file, tmp_path, data_at):
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 300), }"
    path = file(npy(text, b"", data_at=data_at))
    assert np.load(path).shape == (0, 300)
    assert path.stat().st_size == data_at
    table = store.import_file("t", path)
    adopted = store.adopt("a", path)
    for one in (table, adopted):
        assert one.shape == (0, 300)
        assert one.gather([]).shape == (0, 300)
        assert one[:].shape == (0, 300)
        one.scatter([], np.zeros((0, 300), np.float32))
        one.prefetch([])
        with pytest.raises(em.RowIdError):
            one.gather([0])
    assert table.append(np.ones((1, 300), np.float32)) == 0
    assert np.array_equal(table[:], np.ones((1, 300)))
    table.resize(0)
    for name in ("e.npy", "e.npz", "e.h5:/e", "e.safetensors", "e.pt", "e.fbin", "e.raw"):
        table.export(tmp_path / name)
        if name != "e.raw":
            assert em.io.open(tmp_path / name).shape == (0, 300)
    assert em.io.open(tmp_path / "e.raw", dtype="float32", dim=300).shape == (0, 300)


@pytest.mark.parametrize("shape", ["(300, 0)", "(0, 0)", "(3, 0, 4)", "(3, 4, 0)"])
def test_no_columns_are_refused(store, file, shape):
    path = file(npy(PLAIN.replace("(3, 4)", shape), b""))
    for call in (store.import_file, store.adopt):
        with pytest.raises(em.FormatError, match=r"a\.npy"):
            call("t", path)
    with pytest.raises((ValueError, em.FormatError), match="at least one column"):
        store.import_file("t", path)
    assert store.tables() == []


@pytest.mark.parametrize(
    "shape",
    ["(-1, 4)", "(3.0, 4)", "(True, 4)", "(3, None)", "('3', 4)", "(18446744073709551615, 4)"],
)
def test_lengths_that_are_none(store, file, shape):
    refused(store, file(npy(PLAIN.replace("(3, 4)", shape))), "shape holds|whole decimal number")


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "descr", [">f4", ">f2", ">i8", ">f8", ">i4", "=f4", "f4", "|u1", "|i1", ">u1", "<i1"]
)
def test_byte_orders(store, tmp_path, descr):
    dtype = np.dtype(descr)
    array = np.arange(12).reshape(3, 4).astype(dtype)
    path = tmp_path / "a.npy"
    path.write_bytes(npy(PLAIN.replace("<f4", descr), array.tobytes()))
    native = array.astype(dtype.newbyteorder("="))
    table = store.import_file("t", path)
    assert table.dtype == native.dtype
    assert np.array_equal(table[:], native)
    assert np.array_equal(table.gather([2, 0]), native[[2, 0]])
    table.export(tmp_path / "b.npy")
    exported = np.load(tmp_path / "b.npy")
    assert exported.dtype.isnative
    assert np.array_equal(exported, native)
    adopted = store.adopt("a", path)
    assert np.array_equal(adopted.gather([1]), native[1:2])


@pytest.mark.parametrize(
    "name", ["float16", "half", "float32", "single", "float64", "double", "int8", "uint8", "int64"]
)
def test_dtypes_by_name(store, tmp_path, name):
    array = np.arange(12).reshape(3, 4).astype(name)
    path = tmp_path / "a.npy"
    path.write_bytes(npy(PLAIN.replace("<f4", name), array.tobytes()))
    assert np.array_equal(np.load(path), array)  # as NumPy reads it
    for table in (store.import_file("t", path), store.adopt("a", path)):
        assert table.dtype == array.dtype
        assert np.array_equal(table[:], array)
    store.commit()
    with em.open(store.path, mode="r") as reader:
        assert np.array_equal(reader["a"][:], array)
    fields = PLAIN.replace("'<f4'", f"[('v', '{name}', (4,))]").replace("(3, 4)", "(3,)")
    path.with_name("r.npy").write_bytes(npy(fields, array.tobytes()))
    assert np.array_equal(em.io.open(f"{tmp_path}/r.npy:v")[:], array)


def test_records_need_the_name_of_a_field(store, tmp_path):
    path = tmp_path / "a.npy"
    records = np.zeros(2, [("id", "<i8"), ("v", "<f4", (4,))])
    records["v"] = np.arange(8).reshape(2, 4)
    np.save(path, records)
    with pytest.raises(TypeError, match=r"id: <i8, v: <f4 \(4,\)"):
        store.import_file("t", path)
    table = store.import_file("t", f"{path}:v")
    assert np.array_equal(table[:], records["v"])
    assert store.import_file("i", f"{path}:id")[:].tolist() == [[0], [0]]
    hollow = np.zeros(2, [("e", "<f4", (4, 0, 4)), ("v", ">f8", (3,))])
    hollow["v"] = [[1, 2, 3], [4, 5, 6]]
    np.save(path, hollow)
    with pytest.raises(TypeError, match=r"e: <f4 \(4, 0, 4\)"):
        store.import_file("u", path)
    with pytest.raises(em.FormatError, match=r"\(2, 4, 0, 4\)"):
        store.import_file("u", f"{path}:e")
    assert store.import_file("u", f"{path}:v")[:].tolist() == [[1, 2, 3], [4, 5, 6]]
    nested = np.zeros(2, [("in", [("x", "<f4"), ("y", "<i2")]), ("v", "<f4")])
    np.save(path, nested)
    with pytest.raises((TypeError, em.FormatError), match="in"):
        store.import_file("w", f"{path}:in")


@pytest.mark.parametrize(
    "dtype", ["<u2", "<u4", "<u8", "<c8", "<M8[s]", "<m8[ns]", "<U5", "|S3", "<f16", "<i2", "|V3"]
)
def test_dtypes_no_table_holds_are_refused_by_name(store, tmp_path, dtype):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((3, 4), dtype))
    wanted = np.lib.format.dtype_to_descr(np.dtype(dtype)).replace("[", r"\[").replace("|", r"\|")
    for call in (
        lambda: store.import_file("t", path),
        lambda: store.adopt("t", path),
        lambda: em.io.open(path),
    ):
        with pytest.raises((TypeError, em.FormatError), match=wanted):
            call()
    with pytest.raises(TypeError, match="int8, uint8, int32"):
        store.import_file("t", path)
    assert em.io.ls(path)[0].shape == (3, 4)  # listed all the same
    with pytest.raises(TypeError):
        store.from_array("t", np.load(path))
    assert store.tables() == []


def test_bool_has_two_values(store, file):
    path = file(npy(PLAIN.replace("<f4", "|b1"), bytes([0, 1, 2, 255] * 3)))
    table = store.import_file("t", path)
    assert table.dtype == np.uint8
    assert table[:].tolist() == [[0, 1, 1, 1]] * 3
    with pytest.raises((TypeError, em.FormatError), match="b1"):
        store.adopt("a", path)


class Evil:
    """Makes a folder when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def evil_files(folder, mark):
    trap = np.array([[Evil(mark)]], dtype=object)
    np.save(folder / "objects.npy", trap, allow_pickle=True)
    np.savez(folder / "objects.npz", m=trap)
    (folder / "bare.npy").write_bytes(pickle.dumps(Evil(mark)))
    (folder / "bare.pt").write_bytes(pickle.dumps({"w": Evil(mark)}))
    (folder / "bare.pkl").write_bytes(pickle.dumps(Evil(mark)))
    with zipfile.ZipFile(folder / "evil.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": Evil(mark)}, protocol=2))
        archive.writestr("archive/version", "3\n")
    with zipfile.ZipFile(folder / "bare.npz", "w") as archive:
        archive.writestr("m.npy", pickle.dumps(Evil(mark)))
    stream = io.BytesIO()
    records = np.array([(1, Evil(mark))], dtype=[("v", "<f4"), ("o", object)])
    np.lib.format.write_array(stream, records, allow_pickle=True)
    (folder / "records.npy").write_bytes(stream.getvalue())
    return sorted(path.name for path in folder.iterdir())


def test_nothing_that_a_file_says_is_executed(store, tmp_path):
    mark = tmp_path / "ran"
    folder = tmp_path / "evil"
    folder.mkdir()
    found = evil_files(folder, mark)
    assert len(found) == 8
    for name in found:
        path = folder / name
        calls = [
            lambda path=path: store.import_file("t", path),
            lambda path=path: store.adopt("t", path),
            lambda path=path: em.io.open(path),
            lambda path=path: em.convert(path, tmp_path / "out.npy"),
        ]
        if name == "records.npy":
            calls.append(lambda path=path: store.import_file("t", f"{path}:v"))
        for call in calls:
            with pytest.raises((em.Error, TypeError, ValueError)) as caught:
                call()
            assert "allow" not in str(caught.value), name
            assert not mark.exists(), name
    assert store.tables() == []
    assert not (tmp_path / "out.npy").exists()


def test_files_that_are_none_are_called_what_they_are(store, file):
    good = npy()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    for content, says in [
        (b"", "empty"),
        (ROWS.tobytes(), r"no NPY magic at byte 0.*48 bytes.*format=.raw., dtype= and dim="),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"\n  <html><head></head></html>", "HTML page"),
        (pointer, "git-lfs pointer"),
        (gzip.compress(good), "gzip file"),
        (b'{"error": "not found"}      ', "JSON"),
        (pickle.dumps([1, 2, 3]), "pickle"),
    ]:
        refused(store, file(content), says)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 128 + 32_000 - 5, 128 + 32 * 500, 128, 32_127])
def test_a_cut_file_is_refused_in_every_mode_and_never_grows(store, tmp_path, size):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((1000, 8), np.float32))
    os.truncate(path, size)
    before = path.stat().st_mtime_ns
    refused(store, path, f"truncated data: {size - 128} of 32000 bytes")
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, before)


def test_what_follows_the_data_is_not_rows(store, file):
    path = file(npy(data=ROWS.tobytes() + b"more than there should be"))
    assert np.array_equal(np.load(path), ROWS)
    assert np.array_equal(store.import_file("t", path)[:], ROWS)


def test_more_than_2_31_elements(tmp_path):
    rows, dim = 33_554_433, 64
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {dim}), }}"
    path = tmp_path / "a.npy"
    path.write_bytes(npy(text, b""))
    marks = [0, 16_777_216, 33_554_431, 33_554_432]
    with path.open("r+b") as sparse:
        sparse.truncate(128 + rows * dim * 4)
        for value, row in enumerate(marks):
            sparse.seek(128 + row * dim * 4)
            sparse.write(np.full(dim, value + 1, np.float32).tobytes())
    wanted = np.repeat([[1], [2], [3], [4]], dim, axis=1)
    with em.open(tmp_path / "s", memory="64MiB") as store:
        table = store.adopt("t", path)
        assert table.shape == (rows, dim)
        assert np.array_equal(table.gather(marks), wanted)
        table.scatter([rows - 1], np.full((1, dim), 9, np.float32))
        assert np.array_equal(table[rows - 1], np.full(dim, 9))
        assert np.array_equal(table[rows - 2], np.full(dim, 3))
    em.convert(path, tmp_path / "last.npy", rows=(rows - 10, rows))
    last = np.load(tmp_path / "last.npy")
    assert last[:, 0].tolist() == [0] * 8 + [3, 9]
    found = em.io.open(path)
    assert np.array_equal(found[marks], [*wanted[:3], np.full(dim, 9)])
    assert path.stat().st_blocks * 512 < 8 << 20


def views():
    x = np.arange(10 * 12, dtype=np.float32).reshape(10, 12)
    yield "columns", x[:, ::2]
    yield "reversed", x[::-1]
    yield "turned", x[:, ::-1]
    yield "transposed", x.T
    yield "slice", x[:, 3:7]
    yield "broadcast", np.broadcast_to(x[0], (10, 12))
    yield "broadcast columns", np.broadcast_to(x[:, :1], (10, 5))
    frozen = x.copy()
    frozen.flags.writeable = False
    yield "read-only", frozen
    yield "overlapping", np.lib.stride_tricks.as_strided(x, (10, 6), (16, 4))
    yield (
        "odd start",
        np.frombuffer(b"?" + x.tobytes(), np.float32, offset=1, count=120).reshape(10, 12),
    )
    yield "length one", np.zeros((1, 10, 20), np.float32)[::-1][0]
    yield "one row", x[3:4, ::-3]
    yield "Fortran", np.asfortranarray(x)
    yield (
        "field",
        np.rec.fromarrays([x[:, 0]] * 2, names="a,b").view(np.float32).reshape(10, 2)[:, 1:],
    )


@pytest.mark.parametrize("view", [pytest.param(v, id=name) for name, v in views()])
def test_a_view_is_what_a_copy_of_it_is(store, view):
    before = view.copy()
    copy = np.array(view, np.float32, order="C")
    rows, dim = view.shape
    tables = [
        store.create(name, rows=rows, dim=dim) for name in ("scatter", "slice", "write", "add")
    ]
    tables[0].scatter(np.arange(rows), view)
    tables[1][:] = view
    tables[2].write(0, view)
    tables[3].add(list(range(rows)), view)
    tables.append(store.from_array("array", view))
    for table in tables:
        assert np.array_equal(table[:], copy), table.name
    assert tables[0].append(view) == rows
    assert np.array_equal(tables[0][rows:], copy)
    assert np.array_equal(view, before)


def test_arrays_of_the_other_byte_order_are_refused_by_name(store):
    table = store.create("t", rows=3, dim=4)
    for write in (
        lambda rows: table.scatter([0, 1, 2], rows),
        lambda rows: table.add([0, 1, 2], rows),
        lambda rows: table.__setitem__(slice(None), rows),
        lambda rows: table.append(rows),
        lambda rows: store.from_array("n", rows),
    ):
        with pytest.raises(TypeError, match=">f4"):
            write(ROWS.astype(">f4"))
    assert table.rows == 3
    assert not table[:].any()
    assert "n" not in store


def test_views_of_ids_and_of_places_for_rows(store):
    wanted = np.arange(150, dtype=np.float32).reshape(50, 3)
    table = store.from_array("t", wanted)
    ids = np.arange(50, dtype=np.int64)
    for some in (ids[::-1], ids[::7], np.broadcast_to(ids[5], 9), ids.reshape(5, 10).T):
        assert np.array_equal(table.gather(some), wanted[some])
    frozen = np.empty((2, 3), np.float32)
    frozen.flags.writeable = False
    for out in (np.empty((2, 6), np.float32)[:, ::2], np.empty((4, 3), np.float32)[::2], frozen):
        with pytest.raises((ValueError, TypeError), match="out"):
            table.gather([4, 2], out=out)


def test_a_small_archive_that_declares_terabytes(tmp_path, run_python):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({1 << 40}, 4), }}"
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.npy", npy(text, b""))
    assert path.stat().st_size < 400
    out = run_python(LIMITED, path).stdout
    assert "truncated data: 0 of 17592186044416 bytes" in out


def test_a_gibibyte_of_zeros_is_streamed(tmp_path, run_python):
    rows = 1 << 22
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 64), }}"
    path = tmp_path / "a.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("m.npy", "w", force_zip64=True) as member,
    ):
        member.write(npy(text, b""))
        for _ in range(64):
            member.write(bytes(16 << 20))
    assert path.stat().st_size < 8 << 20
    code = """
        import resource, sys
        import embermap as em
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
        print(sum(len(block) for _, block in em.io.open(sys.argv[1]).blocks() if not block.any()))
    """
    assert run_python(code, path).stdout.split() == [str(rows)]


SPECIAL = [65504, 65520, 1e5, 6e-8, 1e-8, 5.96e-8, -0.0, np.nan]


@pytest.mark.parametrize("source", ["float32", "float64"])
def test_narrowing_rounds_to_nearest_even_and_counts(store, tmp_path, source):
    array = np.array([SPECIAL], source)
    np.save(tmp_path / "a.npy", array)
    report = em.convert(tmp_path / "a.npy", tmp_path / "b.npy", dtype="float16")
    assert (report["became_infinite"], report["became_zero"]) == (2, 1)
    got = np.load(tmp_path / "b.npy")[0]
    wanted = np.array([65504, np.inf, np.inf, 5.96e-8, 0, 5.96e-8, -0.0, np.nan], np.float16)
    assert got.tobytes()[:-2] == wanted.tobytes()[:-2]
    assert np.isnan(got[-1])
    ml_dtypes = pytest.importorskip("ml_dtypes")
    report = em.convert(tmp_path / "a.npy", tmp_path / "c.npy", dtype="bfloat16")
    assert (report["became_infinite"], report["became_zero"]) == (0, 0)
    brain = np.load(tmp_path / "c.npy").view(ml_dtypes.bfloat16)[0]
    assert brain.tobytes()[:-2] == array[0].astype(ml_dtypes.bfloat16).tobytes()[:-2]


@pytest.mark.parametrize("value", [-1, 256, 300.7, np.nan, np.inf, 0.5])
def test_what_an_integer_cannot_hold_is_never_wrapped(store, tmp_path, value):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, value]], np.float32))
    with pytest.raises(TypeError, match=r"a\.npy.*row 1, column 1"):
        em.convert(tmp_path / "a.npy", tmp_path / "b.npy", dtype="uint8")
    with pytest.raises(TypeError, match="row 1, column 1"):
        store.import_file("t", tmp_path / "a.npy", dtype="uint8")
    assert store.tables() == []
    assert not (tmp_path / "b.npy").exists()
