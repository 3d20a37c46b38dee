"""HDF5 files as they go wrong for people with other tools: docs/bug-corpus.md, section C."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import embermap as em
import numpy as np
import pytest

h5py = pytest.importorskip("h5py")

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
BIG = np.random.default_rng(0).standard_normal((1003, 300)).astype(np.float32)


@pytest.fixture
def make(tmp_path):
    """make(name=array or options, ...): x.h5 with these datasets."""

    def write(**datasets):
        with h5py.File(tmp_path / "x.h5", "w", libver=("earliest", "v110")) as file:
            for name, value in datasets.items():
                if isinstance(value, dict):
                    file.create_dataset(name, **value)
                else:
                    file[name] = value
        return tmp_path / "x.h5"

    return write


def run(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )


# --- filters and layouts --------------------------------------------------------------------------


def decodes_szip(path):
    """Not every build of the library does."""
    try:
        em.io.open(path)
    except em.FormatError:
        return False
    return True


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gzip", "shuffle": True},
        {"compression": "lzf"},
        {"compression": "lzf", "shuffle": True, "fletcher32": True},
        {"fletcher32": True},
        {"compression": "szip"},
    ],
    ids=str,
)
def test_filters_of_the_library_are_read(make, options):
    path = make(v={"data": BIG, "chunks": (64, 128), **options})
    layout = em.io.ls(path)[0].layout
    for word in {"compression": options.get("compression"), **options}:
        assert options.get("compression", "fletcher32") in layout, word
    if "szip" in layout and not decodes_szip(path):
        with pytest.raises(em.FormatError, match=r"needs filter 4 \(szip\)"):
            em.io.open(path)
        return
    assert np.array_equal(em.io.open(path)[:], BIG)
    assert np.array_equal(em.io.open(path)[[1002, 0, 64]], BIG[[1002, 0, 64]])


@pytest.mark.parametrize("number", [32001, 32004, 32008, 32015, 307, 12345])
def test_a_filter_that_is_missing_is_named_before_anything_is_read(store, tmp_path, number):
    names = {32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 307: "bzip2"}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name in ("used", "skipped"):
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_chunk((2, 4))
            creation.set_shuffle()
            creation.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (1,))
            space = h5py.h5s.create_simple((3, 4))
            dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, space, creation)
            if name == "used":  # as a writer with the filter leaves it
                dataset.write_direct_chunk((0, 0), b"whatever it is", 0)
            else:
                dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, ROWS)
    layouts = {entry.name: entry.layout for entry in em.io.ls(tmp_path / "x.h5")}
    assert all(names.get(number, "") in layout for layout in layouts.values())
    for call in (em.io.open, lambda path: store.import_file("t", path)):
        with pytest.raises(em.FormatError, match=rf"x\.h5.*/used needs filter {number}"):
            call(f"{tmp_path}/x.h5:used")
    assert store.tables() == []
    assert np.array_equal(em.io.open(f"{tmp_path}/x.h5:skipped")[:], ROWS)


@pytest.mark.parametrize("libver", [("earliest", "v108"), ("v108", "v110"), ("v110", "v110")])
@pytest.mark.parametrize("chunks", [(64, 128), (1, 300), (1003, 300), (1000, 7), (2, 2)])
@pytest.mark.parametrize("maxshape", [None, (None, 300), (None, None)])
def test_every_index_of_chunks_with_edges(tmp_path, libver, chunks, maxshape):
    rows = BIG if chunks != (2, 2) else BIG[:101, :33]
    if maxshape == (None, 300) and chunks == (2, 2):
        maxshape = (None, 33)
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        file.create_dataset("v", data=rows, chunks=chunks, maxshape=maxshape)
    found = em.io.open(tmp_path / "x.h5")
    assert np.array_equal(found[:], rows)
    assert np.array_equal(found[-3:], rows[-3:])
    assert found.remarks == []


@pytest.mark.parametrize("early", [True, False])
def test_chunks_larger_than_the_data_and_never_written(tmp_path, store, early):
    with h5py.File(tmp_path / "x.h5", "w", libver=("earliest", "v110")) as file:
        large = file.create_dataset("large", (3, 4), "f4", chunks=(64, 128), maxshape=(None, None))
        large[:] = ROWS
        holes = file.create_dataset("holes", (100, 4), "f4", chunks=(10, 4), fillvalue=-1)
        holes[20:30] = 5
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((2, 2))
        if early:
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # the index without an index
        space = h5py.h5s.create_simple((6, 4))
        dataset = h5py.h5d.create(file.id, b"implicit", h5py.h5t.IEEE_F32LE, space, creation)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.vstack([ROWS, ROWS]))
        file.create_dataset("none", (5, 2), "f4", fillvalue=3)
    at = f"{tmp_path}/x.h5:"
    assert np.array_equal(em.io.open(at + "large")[:], ROWS)
    assert np.array_equal(em.io.open(at + "implicit")[:], np.vstack([ROWS, ROWS]))
    with pytest.warns(UserWarning, match=r"x\.h5:/holes.*9 of 10 chunks never written"):
        table = store.import_file("holes", at + "holes")
    assert table[:, 0].tolist() == [-1] * 20 + [5] * 10 + [-1] * 70
    with pytest.warns(UserWarning, match=r"/none.*none of it was ever written"):
        assert store.import_file("none", at + "none")[0].tolist() == [3, 3]
    assert em.io.open(at + "large").remarks == []


def test_the_same_rows_in_every_layout(store, tmp_path):
    (tmp_path / "d").mkdir()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["contiguous"] = ROWS
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3, 4))
        compact = h5py.h5d.create(file.id, b"compact", h5py.h5t.IEEE_F32LE, space, creation)
        compact.write(h5py.h5s.ALL, h5py.h5s.ALL, ROWS)
        file.create_dataset("chunked", data=ROWS, chunks=(2, 3))
        file.create_dataset("gzip", data=ROWS, chunks=(2, 3), compression="gzip")
        file.create_dataset("big", data=ROWS.astype(">f4"))
        layout = h5py.VirtualLayout((3, 4), "f4")
        layout[:2] = h5py.VirtualSource(file["contiguous"])[:2]
        layout[2:] = h5py.VirtualSource(file["gzip"])[2:]
        file.create_virtual_dataset("virtual", layout)
        (tmp_path / "d" / "raw").write_bytes(ROWS.tobytes())
        file.create_dataset("external", (3, 4), "f4", external=[("d/raw", 0, 48)])
    for name in ("contiguous", "compact", "chunked", "gzip", "big"):
        assert np.array_equal(store.import_file(name, f"{tmp_path}/x.h5:{name}")[:], ROWS)
    for name, says in (("virtual", "virtual dataset"), ("external", "external files")):
        where = f"{tmp_path}/x.h5:{name}"
        with pytest.raises(em.FormatError, match=f"{says}.*allow_external"):
            store.import_file(name, where)
        assert np.array_equal(store.import_file(name, where, allow_external=True)[:], ROWS)
    # No dataset is used in place: what lies at its offset is not asked.
    with pytest.raises(em.FormatError, match="HDF5"):
        store.adopt("a", tmp_path / "x.h5")


# --- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_raw", "name", "says"),
    [
        (lambda folder: (folder / "raw").write_bytes(ROWS.tobytes()), "raw", None),
        (lambda folder: None, "raw", "No such file"),
        (lambda folder: (folder / "raw").write_bytes(ROWS.tobytes()[:10]), "raw", "10 of 48 bytes"),
        (lambda folder: (folder / "raw").write_bytes(b""), "raw", "0 of 48 bytes"),
        (lambda folder: (folder / "raw").symlink_to("/etc/hostname"), "raw", "own folder"),
        (lambda folder: None, "/etc/hostname", "own folder"),
        (lambda folder: (folder.parent / "up").write_bytes(ROWS.tobytes()), "../up", "own folder"),
        (lambda folder: None, "d/../../x", "own folder"),
    ],
)
def test_raw_files_are_read_when_allowed_below_the_folder_and_whole(
    store, tmp_path, make_raw, name, says
):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "d").mkdir()
    make_raw(folder)
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("v", (3, 4), "f4", external=[(name, 0, 48)])
    for call in (
        lambda: store.import_file("t", folder / "x.h5"),
        lambda: em.io.open(folder / "x.h5"),
        lambda: em.convert(folder / "x.h5", tmp_path / "o.npy"),
    ):
        with pytest.raises(em.FormatError, match="external files.*allow_external"):
            call()
    if says is None:
        table = store.import_file("t", folder / "x.h5", allow_external=True)
        assert np.array_equal(table[:], ROWS)
        return
    with pytest.raises((em.FormatError, OSError), match=says):
        store.import_file("t", folder / "x.h5", allow_external=True)
    assert store.tables() == []


def test_virtual_datasets_are_a_class_of_their_own(store, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for where in (folder / "other.h5", tmp_path / "outside.h5"):
        with h5py.File(where, "w") as file:
            file["v"] = ROWS
    with h5py.File(folder / "x.h5", "w") as file:
        file["own"] = ROWS
        sources = {
            "other": "other.h5",
            "outside": "../outside.h5",
            "absolute": str(tmp_path / "outside.h5"),
            "gone": "gone.h5",
        }
        for name, source in sources.items():
            layout = h5py.VirtualLayout((3, 4), "f4")
            layout[:] = h5py.VirtualSource(source, "v", (3, 4))
            file.create_virtual_dataset(name, layout)
        for name, source in {"dot": ".", "self": "./x.h5", "name": "x.h5"}.items():
            layout = h5py.VirtualLayout((3, 4), "f4")
            layout[:] = h5py.VirtualSource(source, "own", (3, 4))
            file.create_virtual_dataset(name, layout)
        file.create_virtual_dataset("unmapped", h5py.VirtualLayout((2, 4), "f4"), fillvalue=7)
        file.create_virtual_dataset("no rows", h5py.VirtualLayout((0, 4), "f4"))

    def at(name, **options):
        return store.import_file(name.replace(" ", "-"), f"{folder}/x.h5:{name}", **options)

    for name in [*sources, "dot", "self"]:
        with pytest.raises(em.FormatError, match="virtual dataset.*allow_external"):
            at(name)
    for name in ("other", "dot", "self", "name"):
        assert np.array_equal(at(name, allow_external=True)[:], ROWS), name
    for name in ("outside", "absolute"):
        with pytest.raises(em.FormatError, match="own folder"):
            at(name, allow_external=True)
    with pytest.raises((em.FormatError, OSError), match=r"gone\.h5"):
        at("gone", allow_external=True)
    # h5py makes an ordinary dataset where nothing is mapped, or a virtual one, by version.
    assert at("unmapped", allow_external=True)[:].tolist() == [[7] * 4] * 2
    assert at("no rows", allow_external=True).shape == (0, 4)


def test_links_into_other_files_are_not_followed_unless_that_is_allowed(store, tmp_path):
    (tmp_path / "d").mkdir()
    for folder in (tmp_path, tmp_path / "d"):
        with h5py.File(folder / "other.h5", "w") as file:
            file["v"] = ROWS
    with h5py.File(tmp_path / "d" / "x.h5", "w") as file:
        file["out"] = h5py.ExternalLink("other.h5", "/v")
        file["above"] = h5py.ExternalLink("../other.h5", "/v")
        file["soft"] = h5py.SoftLink("/out")
        file["own"] = ROWS
        file["good"] = h5py.SoftLink("/own")
    for name in ("out", "above"):
        with pytest.raises(em.FormatError, match="has to be allowed"):
            store.import_file("t", f"{tmp_path}/d/x.h5:{name}")
    with pytest.raises(em.FormatError, match="other.h5"):  # outside of the file's folder
        store.import_file("t", f"{tmp_path}/d/x.h5:above", allow_external=True)
    with pytest.raises(em.FormatError, match="has to be allowed"):  # met on the way of another one
        em.io.open(f"{tmp_path}/d/x.h5:soft")
    with em.io.open(f"{tmp_path}/d/x.h5:above", follow_links=True) as rows:
        assert np.array_equal(rows[:], ROWS)
    for name in ("out", "good", "soft"):
        with em.io.open(f"{tmp_path}/d/x.h5:{name}", allow_external=True) as rows:
            assert np.array_equal(rows[:], ROWS)


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [">i4", ">f4", ">f2", ">f8", ">i8"])
def test_big_endian_rows_by_every_way_of_reading(make, store, dtype):
    array = np.arange(66306, 66306 + 12).reshape(3, 4) if "i" in dtype else ROWS
    path = make(v=array.astype(dtype), c={"data": array.astype(dtype), "chunks": (2, 3)})
    for name in "vc":
        rows = em.io.open(f"{path}:{name}")
        assert rows.dtype.isnative
        assert rows[0, 0] == array[0, 0]
        assert np.array_equal(rows[1], array[1])
        assert np.array_equal(rows[:], array)
        assert np.array_equal(rows[::2], array[::2])
        assert np.array_equal(rows[[2, 0, 2]], array[[2, 0, 2]])
        table = store.import_file(name, f"{path}:{name}")
        assert np.array_equal(table[:], array)


def test_two_opaque_bytes_are_bfloat16_only_where_that_is_said(store, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    brain = ROWS.astype(ml_dtypes.bfloat16)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, size, tag in (("plain", 2, b""), ("tagged", 2, b"bfloat16"), ("three", 3, b"")):
            kind = h5py.h5t.create(h5py.h5t.OPAQUE, size)
            kind.set_tag(tag)
            space = h5py.h5s.create_simple((3, 4))
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space)
            data = np.zeros((3, 4), f"V{size}")
            if size == 2:
                data[:] = brain.view("V2")
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, data, mtype=kind)
    with pytest.raises(TypeError, match="opaque, 2 bytes, tag ''.*dtype bfloat16"):
        store.import_file("t", f"{tmp_path}/x.h5:plain")
    plain = store.import_file("plain", f"{tmp_path}/x.h5:plain", dtype="bfloat16")
    tagged = store.import_file("tagged", f"{tmp_path}/x.h5:tagged")
    for table in (plain, tagged):
        assert table[:].tobytes() == brain.tobytes()
    for options in ({}, {"dtype": "bfloat16"}):
        with pytest.raises(TypeError, match="opaque, 3 bytes"):
            store.import_file("t", f"{tmp_path}/x.h5:three", **options)


def test_narrowing_into_hdf5_rounds_as_numpy_does(store, tmp_path):
    values = np.array([[1 + 2**-11, 1 + 3 * 2**-11, 2049, 65519, 65520, 1e-8]])
    np.save(tmp_path / "a.npy", values)
    report = em.convert(tmp_path / "a.npy", tmp_path / "b.h5:/v", dtype="float16")
    assert (report["became_infinite"], report["became_zero"]) == (1, 1)
    wanted = [[1.0, 1.001953125, 2048, 65504, np.inf, 0]]
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["v"].dtype == np.float16
        assert file["v"][:].tolist() == wanted
    table = store.from_array("t", values)
    with pytest.warns(RuntimeWarning, match="1 value"):
        table.export(f"{tmp_path}/c.h5:/v", dtype="float16")
    assert em.io.open(tmp_path / "c.h5")[:].tolist() == wanted
    with pytest.warns(RuntimeWarning, match="1 values.*became infinite in float16, 1 became zero"):
        halves = store.import_file("h", tmp_path / "a.npy", dtype="float16")
    assert halves[:].tolist() == wanted


def test_words_beside_vectors(store, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["words"] = np.array(["caf\u00e9", ""], dtype=h5py.string_dtype())
        file["words_fixed"] = np.array([b"ab", b"c"], dtype="S2")
        space = h5py.h5t.C_S1.copy()
        space.set_size(2)
        space.set_strpad(h5py.h5t.STR_SPACEPAD)
        h5py.h5d.create(file.id, b"padded", space, h5py.h5s.create_simple((2,)))
        file["vectors"] = ROWS[:2]
    assert np.array_equal(store.import_file("t", tmp_path / "x.h5")[:], ROWS[:2])
    for name, kind in (
        ("words", "variable-length string"),
        ("words_fixed", "string"),
        ("padded", "string"),
    ):
        with pytest.raises(TypeError, match=f"{name} holds {kind}"):
            store.import_file("u", f"{tmp_path}/x.h5:{name}")
    shown = {entry.name.strip("/"): entry.dtype for entry in em.io.ls(tmp_path / "x.h5")}
    assert shown["words"] == "variable-length string"
    assert shown["vectors"] == "float32"


def test_a_lossy_filter_is_told(make, store, tmp_path):
    path = make(
        v={
            "data": np.linspace(-3, 3, 400, dtype="f4").reshape(100, 4),
            "chunks": (10, 4),
            "scaleoffset": 2,
        },
        i={"data": np.arange(40).reshape(10, 4), "chunks": (5, 4), "scaleoffset": 0},
    )
    with pytest.warns(UserWarning, match=r"x\.h5:/v.*lossy.*NaN"):
        table = store.import_file("t", f"{path}:v")
    assert np.abs(table[:].ravel() - np.linspace(-3, 3, 400)).max() < 0.01
    with pytest.warns(UserWarning, match="lossy"):
        em.convert(f"{path}:v", tmp_path / "o.npy")
    assert em.io.open(f"{path}:i").remarks == []  # whole numbers are kept
    assert np.array_equal(em.io.open(f"{path}:i")[:], np.arange(40).reshape(10, 4))
    table.export(f"{tmp_path}/y.h5:/v", gzip=4)
    with h5py.File(tmp_path / "y.h5") as file:
        assert file["v"].scaleoffset is None


def test_array_types_and_records(store, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        kind = h5py.h5t.array_create(h5py.h5t.IEEE_F32LE, (4,))
        arrays = h5py.h5d.create(file.id, b"arrays", kind, h5py.h5s.create_simple((3,)))
        arrays.write(h5py.h5s.ALL, h5py.h5s.ALL, ROWS, mtype=kind)
        records = np.zeros(3, [("id", "<i8"), ("v", "<f4", (4,))])
        records["v"] = ROWS
        records["id"] = [7, 8, 9]
        file["records"] = records
        ragged = file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.float32))
        ragged[0] = [1, 2]
    at = f"{tmp_path}/x.h5:"
    assert em.io.open(at + "arrays").remarks == []
    assert np.array_equal(store.import_file("arrays", at + "arrays")[:], ROWS)
    assert np.array_equal(store.import_file("v", at + "records:v")[:], ROWS)
    assert store.import_file("id", at + "records:id")[:].tolist() == [[7], [8], [9]]
    with pytest.raises(TypeError, match="id: int64, v: float32"):
        store.import_file("t", at + "records")
    with pytest.raises(em.NotFoundError, match="'w'.*id"):
        store.import_file("t", at + "records:w")
    with pytest.raises(TypeError, match="variable-length"):
        store.import_file("t", at + "ragged")


# --- sizes ----------------------------------------------------------------------------------------


def test_resizable_datasets(store, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset(
            "v", (3, 4), "f4", chunks=(2, 4), maxshape=(None, 4), fillvalue=np.nan
        )
        data[:] = ROWS
        data.resize((6, 4))
        data[5] = 9
        both = file.create_dataset("both", (4, 4), "f4", chunks=(2, 2), maxshape=(None, None))
        both[:] = 5
        both.resize((2, 3))
        both.resize((4, 4))
    rows = store.import_file("v", f"{tmp_path}/x.h5:v")[:]
    assert np.array_equal(rows[:3], ROWS)
    assert np.isnan(rows[3:5]).all()
    assert (rows[5] == 9).all()
    wanted = np.zeros((4, 4))
    wanted[:2, :3] = 5
    with pytest.warns(UserWarning, match="never written"):  # chunks that the shrinking took away
        assert np.array_equal(store.import_file("both", f"{tmp_path}/x.h5:both")[:], wanted)


def test_null_scalar_and_empty_datasets(store, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["null"] = h5py.Empty("f4")
        file["scalar"] = 5.0
        file.create_dataset("no rows", (0, 300), "f4")
        file.create_dataset(
            "no rows chunked", (0, 300), "f4", chunks=(10, 300), maxshape=(None, 300)
        )
        file.create_dataset("no columns", (24, 0), "f4", chunks=(4, 1), maxshape=(None, None))
        file["one"] = np.arange(3.0)
    at = f"{tmp_path}/x.h5:"
    assert len(em.io.ls(tmp_path / "x.h5")) == 6
    for name, says in (
        ("null", "null dataspace"),
        ("scalar", "one value"),
        ("no columns", r"\(24, 0\)"),
    ):
        with pytest.raises(em.FormatError, match=says):
            store.import_file("t", at + name)
    for name in ("no rows", "no rows chunked"):
        table = store.import_file(name.replace(" ", "-"), at + name)
        assert table.shape == (0, 300)
    with pytest.warns(UserWarning, match=r"\(3,\).*3 rows of one column"):
        assert store.import_file("one", at + "one").shape == (3, 1)
    for options in ({}, {"gzip": 4}):
        store["no-rows"].export(f"{tmp_path}/y{len(options)}.h5:/e", **options)
        assert em.io.open(f"{tmp_path}/y{len(options)}.h5:/e").shape == (0, 300)


def test_terabytes_that_are_not_there_are_not_believed(store, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("huge", (1 << 40, 4), "f4", chunks=(1 << 20, 4), compression="gzip")
        for number in range(100):
            file.create_dataset(
                f"d{number}", (1 << 20, 1000), "f4", chunks=(1000, 1000), compression=1
            )
    assert (tmp_path / "x.h5").stat().st_size < 1 << 20
    assert len(em.io.ls(tmp_path / "x.h5")) == 101
    for name in ("huge", *(f"d{number}" for number in range(0, 100, 9))):
        with pytest.raises(em.FormatError, match="not believed"):
            store.import_file("t", f"{tmp_path}/x.h5:{name}")
    assert store.tables() == []


def test_chunks_are_chosen_within_the_limits_of_the_format(store, tmp_path):
    for rows, dim, dtype in (
        (3, 4, "float32"),
        (2, 65_536, "float64"),
        (100_000, 1, "uint8"),
        (3, 1 << 20, "float32"),
    ):
        table = store.create(f"t{dim}", rows=rows, dim=dim, dtype=dtype)
        table[:] = 3
        table.export(f"{tmp_path}/x.h5:/t{dim}", gzip=1)
        with h5py.File(tmp_path / "x.h5") as file:
            data = file[f"t{dim}"]
            assert (data[:1] == 3).all()
            assert data.chunks[0] <= rows
            assert data.chunks[1] <= dim
            assert np.prod(data.chunks) * data.dtype.itemsize <= 64 << 20
            store.remove(f"t{dim}")


def test_large_attributes_are_no_obstacle(tmp_path):
    names = np.array([f"name{i:05}" for i in range(8000)], "S9")
    with h5py.File(tmp_path / "x.h5", "w", libver=("v110", "v110")) as file:
        file["v"] = ROWS
        file.attrs["names"] = names
        file["v"].attrs["names"] = names
        for i in range(50):
            file["v"].attrs[f"a{i}"] = i
    assert np.array_equal(em.io.open(tmp_path / "x.h5")[:], ROWS)
    np.save(tmp_path / "w.npy", ROWS)
    em.convert(tmp_path / "w.npy", f"{tmp_path}/x.h5:/w")
    with h5py.File(tmp_path / "x.h5") as file:
        assert (file.attrs["names"] == names).all()
        assert len(file["v"].attrs) == 51
        assert np.array_equal(file["w"][:], ROWS)


@pytest.mark.parametrize("chunked", [False, True])
def test_rows_by_any_list(make, store, chunked):
    array = np.arange(40, dtype=np.float32).reshape(10, 4)
    options = {"chunks": (3, 4), "compression": "gzip"} if chunked else {}
    path = make(v={"data": array, **options})
    rows = em.io.open(path)
    table = store.import_file("t", path)
    mask = np.arange(10) % 3 == 0
    for ids in ([1, 1, 2], [3, 1], [], np.array([9, 0], np.uint8), [0] * 50):
        wanted = array[np.asarray(ids, np.int64)]
        assert np.array_equal(rows[ids], wanted)
        assert np.array_equal(table.gather(ids), wanted)
    assert np.array_equal(rows[mask], array[mask])
    assert np.array_equal(table[mask], array[mask])
    assert np.array_equal(rows[[-1, 0]], array[[-1, 0]])
    with pytest.raises(em.RowIdError, match="-1"):  # ids of tables count from 0
        table.gather([-1, 0])
    for bad in ([10], [-11], [0, 10]):
        with pytest.raises(IndexError, match=str(bad[-1])):
            rows[bad]
        with pytest.raises(IndexError):
            table.gather(bad)
    for bad in ([1.5], ["a"], [[1], [2, 3]]):
        with pytest.raises((IndexError, TypeError, ValueError)):
            rows[bad]
        with pytest.raises((IndexError, TypeError, ValueError)):
            table.gather(bad)


def test_many_rows_by_a_list_read_each_chunk_once(make, monkeypatch):
    array = np.arange(80_000, dtype=np.float32).reshape(20_000, 4)
    path = make(v={"data": array, "chunks": (100, 4), "compression": "gzip"})
    ids = np.random.default_rng(0).integers(0, 20_000, 100_000)
    rows = em.io.open(path)
    calls = []
    read = rows._read
    monkeypatch.setattr(
        rows, "_read", lambda first, count: calls.append(count) or read(first, count)
    )
    assert np.array_equal(rows[ids], array[ids])
    assert sum(calls) <= 20_000
    assert len(calls) <= 20_000


# --- other processes, damage ----------------------------------------------------------------------


WRITER = """
    import sys, h5py, numpy as np
    with h5py.File(sys.argv[1], "w") as file:
        file["v"] = np.ones((100, 4), "f4")
        file.flush()
        print("written", flush=True)
        sys.stdin.readline()
"""


def test_a_file_that_another_process_has_open_for_writing(store, tmp_path):
    path = tmp_path / "x.h5"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout.readline() == "written\n"
        for call in (em.io.open, em.io.ls, lambda src: store.import_file("t", src)):
            with pytest.raises(
                em.LockedError, match=r"x\.h5 is open for writing in another process"
            ):
                call(path)
        writer.communicate("\n")
    assert store.import_file("t", path).shape == (100, 4)


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>
int flock(int fd, int operation) {
  if (getenv("SHIM_NO_LOCKS")) { errno = ENOLCK; return -1; }
  int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
  return real(fd, operation);
}
static int counter;
typedef ssize_t (*Read)(int, void*, size_t, off64_t);
static ssize_t odd(Read real, int fd, void* out, size_t n, off64_t at) {
  if (getenv("SHIM_SHORT") && n > 16) {
    int now = __sync_fetch_and_add(&counter, 1);
    if (now % 11 == 10) { errno = EINTR; return -1; }
    if (now % 3 == 2) n = n / 2;
  }
  return real(fd, out, n, at);
}
ssize_t pread(int fd, void* out, size_t n, off_t at) {
  return odd(dlsym(RTLD_NEXT, "pread"), fd, out, n, at);
}
ssize_t pread64(int fd, void* out, size_t n, off64_t at) {
  return odd(dlsym(RTLD_NEXT, "pread64"), fd, out, n, at);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """A library that makes the system's answers odd, for LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    command = [compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"]
    subprocess.run(command, check=True)
    return folder / "shim.so"


READ = """
    import sys, embermap as em, numpy as np
    rows = np.arange(400_000, dtype=np.float32).reshape(100_000, 4)
    for name in sys.argv[2:]:
        found = em.io.open(f"{sys.argv[1]}:{name}", allow_external=True)
        assert np.array_equal(found[:], rows), name
        assert np.array_equal(found[[5, 99_999, 7]], rows[[5, 99_999, 7]]), name
    with em.open(sys.argv[1] + ".store", memory="2MiB") as store:
        table = store.import_file("t", f"{sys.argv[1]}:{sys.argv[2]}")
        assert np.array_equal(table[:], rows)
    print("equal")
"""


@pytest.mark.parametrize("oddity", ["SHIM_NO_LOCKS", "SHIM_SHORT"])
def test_file_systems_without_locks_and_with_short_reads(make, shim, tmp_path, oddity):
    rows = np.arange(400_000, dtype=np.float32).reshape(100_000, 4)
    (tmp_path / "raw").write_bytes(rows.tobytes())
    path = make(
        contiguous=rows,
        chunked={"data": rows, "chunks": (999, 3), "compression": "gzip"},
        external={"shape": rows.shape, "dtype": "f4", "external": [("raw", 0, rows.nbytes)]},
    )
    environment = {**os.environ, "LD_PRELOAD": str(shim), oddity: "1"}
    done = run(READ, path, "contiguous", "chunked", "external", env=environment)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_a_writer_in_swmr_mode_is_told(store, tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="v110") as file:
        data = file.create_dataset("v", (0, 4), "f4", chunks=(16, 4), maxshape=(None, 4))
        file.swmr_mode = True
        for value in range(5):
            data.resize((16 * (value + 1), 4))
            data[16 * value :] = value
            data.flush()
            with pytest.raises((em.FormatError, em.LockedError), match=r"x\.h5.*open for writing"):
                store.import_file("t", path)
    table = store.import_file("t", path)
    assert np.array_equal(table[:][:, 0], np.repeat(np.arange(5), 16))


def test_files_of_writers_that_died_and_cut_files(store, tmp_path):
    code = """
        import os, sys, h5py
        file = h5py.File(sys.argv[1], "w", libver="v110")
        data = file.create_dataset("v", (0, 4), "f4", chunks=(16, 4), maxshape=(None, 4))
        for value in range(2000):
            data.resize((16 * (value + 1), 4))
            data[16 * value :] = value
        os._exit(1)
    """
    run(code, tmp_path / "died.h5")
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["v"] = BIG
    whole = (tmp_path / "good.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[:-100])
    (tmp_path / "junk.h5").write_bytes(whole + b"?" * 400)
    for name, says in (
        ("died.h5", "died"),
        ("cut.h5", f"incomplete.*{len(whole) - 100} of {len(whole)}"),
    ):
        with pytest.raises(em.FormatError, match=says):
            store.import_file("t", tmp_path / name)
        with pytest.raises(em.FormatError, match=name):
            em.convert(tmp_path / name, tmp_path / "o.npy")
    assert not (tmp_path / "o.npy").exists()
    assert store.tables() == []
    assert np.array_equal(store.import_file("t", tmp_path / "junk.h5")[:], BIG)
    # A mark of a writer that did not close it, on a file that is whole.
    with h5py.File(tmp_path / "marked.h5", "w", libver="v110") as file:
        file["v"] = ROWS
    marked = bytearray((tmp_path / "marked.h5").read_bytes())
    assert marked[8] == 3
    marked[11] = 1  # file consistency flags of the superblock
    (tmp_path / "marked.h5").write_bytes(marked)
    with pytest.raises(em.FormatError, match=r"marked\.h5"):
        store.import_file("m", tmp_path / "marked.h5")


def test_a_file_cut_at_2_31_bytes(store, tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        space = h5py.h5s.create_simple((3 << 18, 1024))
        h5py.h5d.create(file.id, b"v", h5py.h5t.IEEE_F32LE, space, creation)
        file["v"][0] = 1
    size = path.stat().st_size
    assert size > 3 << 30
    assert path.stat().st_blocks * 512 < 1 << 20
    os.truncate(path, (1 << 31) - 1)
    with pytest.raises(em.FormatError, match=f"incomplete.*2147483647 of {size}"):
        store.import_file("t", path)


@pytest.mark.parametrize(("low", "superblock"), [("earliest", 0), ("v108", 2), ("v110", 3)])
def test_superblocks(store, tmp_path, low, superblock):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver=(low, "v110")) as file:
        file.create_dataset("v", data=BIG, chunks=(64, 128), compression="gzip")
    assert path.read_bytes()[8] == superblock
    assert np.array_equal(store.import_file("t", path)[:], BIG)
    with h5py.File(tmp_path / "y.h5", "w", userblock_size=1024) as file:
        file["v"] = ROWS
    assert np.array_equal(em.io.open(tmp_path / "y.h5")[:], ROWS)
    for options in ({}, {"gzip": 3}):
        store["t"].export(f"{tmp_path}/o{len(options)}.h5", **options)
        assert (tmp_path / f"o{len(options)}.h5").read_bytes()[8] == 0
