"""Reading and writing rows: ids and values of every kind."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings

import embermap as em
import numpy as np
import pytest

WIDTHS = [1, 2, 3, 5, 7, 17, 100, 257, 300, 301]


@pytest.fixture
def table(store, values):
    """1,000 rows of 5 float32, every row another."""
    made = store.create("t", rows=1_000, dim=5)
    made[:] = np.arange(5_000, dtype=np.float32).reshape(1_000, 5)
    return made


@pytest.fixture
def rows():
    return np.arange(5_000, dtype=np.float32).reshape(1_000, 5)


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 4, 1, 5],
        (9, 2, 6),
        range(10),
        range(20, 2, -3),
        range(0),
        [],
        (),
        [[]],
        7,
        [7],
        [[1, 2, 3], [4, 5, 6]],
        [[[999]]],
        np.int64(5),
        np.uint8(5),
        np.array(5),
        np.arange(12).reshape(3, 4),
        np.arange(12).reshape(3, 4).T,
        np.arange(100)[::-7],
        np.broadcast_to(np.int32(3), (4, 2)),
        np.empty((0, 5), np.int32),
        [np.int64(3), np.int16(4)],
        [np.array([1, 2]), np.array([3, 4])],
        np.arange(10).astype(">i4"),
        np.ma.array([1, 2]),
        np.array([1, 2], dtype=object).astype(np.int64),
    ],
    ids=str,
)
def test_ids_of_every_kind(table, rows, ids):
    wanted = rows[np.asarray(ids, dtype=np.int64)]
    got = table.gather(ids)
    assert type(got) is np.ndarray
    assert got.dtype == np.float32
    assert got.shape == (*np.shape(ids), 5)
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize(
    "kind", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "intp", "longlong"]
)
def test_ids_of_every_width(table, rows, kind):
    ids = np.array([0, 99, 1], dtype=kind)
    assert np.array_equal(table.gather(ids), rows[[0, 99, 1]])


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1.0, 2.0], "float"),
        ([1.9], "1.9"),
        ([1, 2.5], "2.5"),
        (1.0, "float"),
        (np.array([1.0]), "float64"),
        (np.float32(3), "float32"),
        (np.array([]), r"empty array is of float64.*np\.int64"),
        (np.zeros((0, 5)), "float64"),
        (np.array([True]), "flatnonzero"),
        ([True, False], "bool"),
        (True, "bool"),
        (np.array(["a"]), "<U1"),
        (np.array([1 + 2j]), "complex128"),
        (np.array([1], dtype="M8[s]"), "datetime64"),
        (np.array([1, None], dtype=object), "object"),
        (np.array([(1,)], dtype=[("a", "i4")]), "ids must be integers"),
        (np.ma.array([1, 2], mask=[0, 1]), "masked"),
        (None, "NoneType"),
        ("1", "str"),
        (b"1", "bytes"),
        ([None], "NoneType"),
        (["1"], "U1"),
        ([[1], [2, 3]], "regular"),
        ({1, 2}, "set"),
        ({1: 2}, "dict"),
        (object(), "object"),
        (1j, "complex"),
        (slice(3), "slice"),
    ],
    ids=repr,
)
def test_ids_that_are_none(table, ids, text):
    for call in (
        lambda: table.gather(ids),
        lambda: table.scatter(ids, np.zeros((1, 5), np.float32)),
        lambda: table.add(ids, np.zeros((1, 5), np.float32)),
        lambda: table.prefetch(ids),
    ):
        with pytest.raises(TypeError, match=text):
            call()


@pytest.mark.parametrize(
    ("ids", "bad", "position"),
    [
        ([1_000], 1_000, 0),
        ([3, 4, -1], -1, 2),
        ([0, 2**40, -5], 2**40, 1),
        ([-1_001], -1_001, 0),
        ([[1, 2], [3, 1_001]], 1_001, 3),
        (np.array([0, 2**63], np.uint64), 2**63, 1),
        (np.array([2**64 - 1], np.uint64), 2**64 - 1, 0),
        ([5, 2**63], 2**63, 1),
        ([5, 2**64], 2**64, 1),
        ([-1, 2**63], 2**63, 1),
        ([-(2**70)], -(2**70), 0),
        (2**63, 2**63, 0),
        (range(998, 1_002), 1_000, 2),
        (range(-3, 2), -3, 0),
        (range(2**64, 2**64 + 2), 2**64, 0),
        (np.array([1, -(2**63)]), -(2**63), 1),
        (np.array(3_000_000_000, np.uint32), 3_000_000_000, 0),
    ],
    ids=str,
)
def test_ids_out_of_range_are_named_and_nothing_is_touched(table, rows, ids, bad, position):
    shape = (*np.shape(ids), 5)
    out = np.full(shape, 9, np.float32)
    ones = np.ones(shape, np.float32)
    for call in (
        lambda: table.gather(ids, out=out),
        lambda: table.scatter(ids, ones),
        lambda: table.add(ids, ones),
        lambda: table.prefetch(ids),
    ):
        with pytest.raises(IndexError, match=rf"row id {bad} at position {position}\b") as caught:
            call()
        assert isinstance(caught.value, em.RowIdError)
        assert (caught.value.id, caught.value.position) == (bad, position)
    assert (out == 9).all()
    assert np.array_equal(table[:], rows)


def test_one_bad_id_among_many_writes_nothing(table, rows):
    ids = np.arange(1_000)
    ids[777] = 1_000
    for call in (table.scatter, table.add):
        with pytest.raises(em.RowIdError, match="position 777"):
            call(ids, np.ones((1_000, 5), np.float32))
    assert np.array_equal(table[:], rows)


def test_an_object_with_index(table, rows):
    class Three:
        def __index__(self) -> int:
            return 3

    assert np.array_equal(table.gather(Three()), rows[3])


class Foreign:
    """An array that speaks nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_ids_and_values_by_dlpack(table, rows):
    ids = Foreign(np.array([[4, 2], [0, 4]]))
    got = table.gather(ids)
    assert isinstance(got, np.ndarray)  # its module has no from_dlpack
    assert np.array_equal(got, rows[[[4, 2], [0, 4]]])
    table.scatter(Foreign(np.array([1, 2])), Foreign(np.ones((2, 5), np.float32)))
    assert (table[1:3] == 1).all()
    with pytest.raises(TypeError, match="float64"):
        table.gather(Foreign(np.array([1.0])))


def test_a_library_with_from_dlpack_gets_its_own(table, rows):
    class Library:
        @staticmethod
        def from_dlpack(array):
            return Own(np.from_dlpack(array))

    class Own(Foreign):
        def __array_namespace__(self):
            return Library

    got = table.gather(Own(np.array([3, 5])))
    assert type(got) is Own
    assert np.array_equal(got.array, rows[[3, 5]])


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (0,)])
def test_out_is_filled_and_returned(table, rows, shape):
    ids = np.random.default_rng(0).integers(0, 1_000, shape)
    out = np.empty((*shape, 5), np.float32)
    assert table.gather(ids, out=out) is out
    assert np.array_equal(out, rows[ids])


def test_out_may_be_a_view_at_any_place(table, rows):
    memory = bytearray(4 * 5 * 5 + 8)
    for offset in (1, 2, 3, 4):
        out = np.frombuffer(memory, np.float32, 25, offset).reshape(5, 5)
        table.gather(range(5, 10), out=out)
        assert np.array_equal(out, rows[5:10])
    whole = np.zeros((9, 5), np.float32)
    table.gather([1, 2], out=whole[3:5])
    assert np.array_equal(whole[3:5], rows[1:3])
    assert not whole[:3].any()
    assert not whole[5:].any()


def _read_only(shape):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (np.zeros((3, 5), np.float32), ValueError, r"\(3, 5\).*\(2, 5\)"),
        (np.zeros((2, 6), np.float32), ValueError, "shape"),
        (np.zeros(10, np.float32), ValueError, "shape"),
        (np.zeros((2, 5), np.float64), TypeError, "float64.*float32"),
        (np.zeros((2, 5), ">f4"), TypeError, ">f4"),
        (np.zeros((2, 5), np.float32, order="F"), ValueError, "C order"),
        (np.zeros((2, 10), np.float32)[:, ::2], ValueError, "C order"),
        (np.zeros((2, 5), np.float32)[::-1], ValueError, "C order"),
        (np.broadcast_to(np.float32(0), (2, 5)), ValueError, "C order"),
        (_read_only((2, 5)), ValueError, "read-only"),
        ([[0] * 5] * 2, TypeError, "list"),
        (bytearray(40), TypeError, "bytearray"),
    ],
    ids=str,
)
def test_out_that_does_not_fit(table, out, error, text):
    with pytest.raises(error, match=text):
        table.gather([1, 2], out=out)


def test_out_over_the_ids_is_refused(store):
    table = store.create("t", rows=10, dim=1, dtype="int64")
    memory = np.zeros((4, 1), np.int64)
    with pytest.raises(ValueError, match="overlaps"):
        table.gather(memory[:, 0], out=memory)


def test_results_are_copies(table, rows):
    got = table.gather([3, 4])
    got[:] = -1
    table[3:5][:] = -1
    table[3][:] = -1
    assert np.array_equal(table[:], rows)


# --- values ---------------------------------------------------------------------------------------


def _views():
    base = np.arange(4 * 10 * 3, dtype=np.float32)
    frozen = base[:20].reshape(4, 5).copy()
    frozen.flags.writeable = False
    return {
        "every second column": base[:40].reshape(4, 10)[:, ::2],
        "reversed rows": base[:20].reshape(4, 5)[::-1],
        "reversed both": base[:20].reshape(4, 5)[::-1, ::-1],
        "transposed": base[:20].reshape(5, 4).T,
        "columns 3 to 8": base[:40].reshape(4, 10)[:, 3:8],
        "one row for all": np.broadcast_to(base[:5], (4, 5)),
        "one number for all": np.broadcast_to(base[3], (4, 5)),
        "read-only": frozen,
        "overlapping": np.lib.stride_tricks.as_strided(base, (4, 5), (4, 4)),
        "Fortran order": np.asfortranarray(base[:20].reshape(4, 5)),
        "unaligned": np.frombuffer(b"x" + base[:20].tobytes(), np.float32, 20, 1).reshape(4, 5),
        "masked without masks": np.ma.array(base[:20].reshape(4, 5)),
    }


@pytest.mark.parametrize("name", list(_views()))
def test_values_of_any_layout(table, name):
    view = _views()[name]
    wanted = np.array(view, order="C")
    ids = [7, 900, 3, 0]
    table.scatter(ids, view)
    assert np.array_equal(table.gather(ids), wanted)
    table.add(ids, view)
    assert np.array_equal(table.gather(ids), 2 * wanted)
    table[ids] = view
    assert np.array_equal(table.gather(ids), wanted)
    table[100:104] = view
    assert np.array_equal(table[100:104], wanted)
    table.write(200, view)
    assert np.array_equal(table[200:204], wanted)


def test_a_reversed_view_of_one_row_of_planes(store):
    table = store.create("t", rows=50, dim=20)
    x = np.arange(200, dtype=np.float32).reshape(1, 10, 20)[::-1]
    table.scatter(np.arange(10).reshape(1, 10), x)
    assert np.array_equal(table[:10], x[0])


def test_lists_are_converted(store):
    floats = store.create("floats", rows=4, dim=2)
    floats.scatter([0, 1], [[1, 2], [3.5, 4]])
    assert floats[:2].tolist() == [[1, 2], [3.5, 4]]
    floats.scatter([], [])
    floats.scatter(3, [7, 8])
    assert floats[3].tolist() == [7, 8]
    bytes_ = store.create("bytes", rows=4, dim=2, dtype="uint8")
    bytes_.scatter([0], [[0, 255]])
    assert bytes_[0].tolist() == [0, 255]
    for bad, error in (
        ([[1.0, 2.0]], TypeError),
        ([[0, 256]], ValueError),
        ([[-1, 0]], ValueError),
        ([["1", "2"]], TypeError),
        ([[1], [2, 3]], ValueError),
        ([[1 + 1j, 2]], TypeError),
    ):
        with pytest.raises(error):
            bytes_.scatter([0], bad)
    assert bytes_[0].tolist() == [0, 255]


@pytest.mark.parametrize(
    ("ids", "values", "error", "text"),
    [
        (range(10), np.ones((20, 5), np.float32), ValueError, "10 ids, 20 rows of values"),
        (range(10), np.ones((9, 5), np.float32), ValueError, "10 ids, 9 rows of values"),
        ([1], np.ones((0, 5), np.float32), ValueError, "1 id, 0 rows of values"),
        (range(10), np.ones((1, 5), np.float32), ValueError, "10 ids, 1 row of values"),
        (range(10), np.ones(5, np.float32), ValueError, "10 ids, 1 row of values"),
        (range(10), np.ones((10, 6), np.float32), ValueError, r"\(10, 6\).*\(10, 5\)"),
        (range(10), np.ones(50, np.float32), ValueError, r"\(10, 5\)"),
        (range(10), np.ones((2, 5, 5), np.float32), ValueError, r"\(10, 5\)"),
        ([[1, 2], [3, 4]], np.ones((4, 5), np.float32), ValueError, r"\(2, 2, 5\)"),
        (3, np.ones((1, 5), np.float32), ValueError, r"\(5,\)"),
        (range(10), np.float32(1), ValueError, r"\(10, 5\)"),
        (range(10), 1.0, ValueError, r"\(10, 5\)"),
        (range(10), [], ValueError, "shape"),
        (range(2), np.ones((2, 5), np.float64), TypeError, "float64.*float32"),
        (range(2), np.ones((2, 5), np.float16), TypeError, "float16"),
        (range(2), np.ones((2, 5), np.int32), TypeError, "int32"),
        (range(2), np.ones((2, 5), ">f4"), TypeError, ">f4"),
        (range(2), np.ones((2, 5), bool), TypeError, "bool"),
        (range(2), np.ma.array(np.ones((2, 5), np.float32), mask=True), TypeError, "masked"),
        (range(2), None, TypeError, "NoneType"),
        (range(2), "rows", TypeError, "str"),
        (range(2), object(), TypeError, "object"),
        (range(2), {1: 2}, TypeError, "dict"),
    ],
)
def test_values_that_do_not_fit(table, rows, ids, values, error, text):
    for call in (table.scatter, table.add):
        with pytest.raises(error, match=text):
            call(ids, values)
    assert np.array_equal(table[:], rows)


def test_the_numbers_of_both_are_in_the_message(store):
    table = store.create("t", rows=10, dim=2)
    ids = np.zeros(131_072, np.int64)
    with pytest.raises(ValueError, match="131072 ids, 1000000 rows of values"):
        table.scatter(ids, np.broadcast_to(np.float32(1), (1_000_000, 2)))


# --- duplicates -----------------------------------------------------------------------------------


def test_the_last_of_an_id_wins_and_all_are_added(store):
    table = store.create("t", rows=10, dim=2)
    for repetition in range(50):
        a, b, c = (np.full(2, repetition + x, np.float32) for x in (0.1, 0.2, 0.3))
        table.scatter([5, 5, 7], [a, b, c])
        assert np.array_equal(table.gather([5, 7]), [b, c])
    many = np.arange(100_000, dtype=np.float32)
    table.scatter(np.full(100_000, 3), np.stack([many, many], 1))
    assert table[3].tolist() == [99_999, 99_999]
    table.add(np.full(100_000, 1), np.ones((100_000, 2), np.float32))
    assert table[1].tolist() == [100_000, 100_000]
    assert table[5].tolist() == b.tolist()


def test_an_empty_batch_changes_nothing(table, rows):
    for empty in ([], np.array([], np.int32), range(0), np.empty((0, 3), np.uint8)):
        shape = (*np.shape(empty), 5)
        assert table.gather(empty).shape == shape
        table.scatter(empty, np.empty(shape, np.float32))
        table.add(empty, np.empty(shape, np.float32))
        table.prefetch(empty)
        table[empty] = 3
    assert np.array_equal(table[:], rows)


# --- widths, dtypes, budgets ----------------------------------------------------------------------


@pytest.mark.parametrize("dim", WIDTHS)
def test_every_dtype_and_width(store, values, dtype, dim):
    count = 200
    table = store.create("t", rows=count, dim=dim, dtype=dtype)
    reference = np.zeros((count, dim), dtype)
    rng = np.random.default_rng(dim)
    for seed in range(3):
        ids = rng.integers(0, count, 150)
        new = values((150, dim), dtype, seed)
        table.scatter(ids, new)
        reference[ids] = new  # NumPy: the last wins
        more = values((90, dim), dtype, seed + 10)
        once = rng.permutation(count)[:90]
        table.add(once, more)
        reference[once] = (reference[once] + more).astype(dtype)
    ids = rng.integers(0, count, (7, 11))
    got = table.gather(ids)
    assert got.dtype == dtype
    assert got.tobytes() == reference[ids].tobytes()
    assert table.read().tobytes() == reference.tobytes()


def test_dtypes_by_any_name(store):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for number, (given, wanted) in enumerate(
        [
            ("float32", "float32"),
            ("f4", "float32"),
            (float, "float64"),
            (np.int8, "int8"),
            (np.dtype("<i4"), "int32"),
            (ml_dtypes.bfloat16, "bfloat16"),
            (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
            ("bfloat16", "bfloat16"),
        ]
    ):
        table = store.create(f"t{number}", rows=1, dim=1, dtype=given)
        assert table.dtype.name == wanted
        assert table.gather([0]).dtype == table.dtype


@pytest.mark.parametrize("memory", ["64KiB", "20KiB"])
@pytest.mark.parametrize("dim", [3, 100, 1_030])
def test_batches_larger_than_the_budget(path, values, memory, dim):
    count = 400
    with em.open(path, memory=memory, threads=2) as store:
        table = store.create("t", rows=count, dim=dim, init=em.init.Normal(), seed=1)
        reference = table.read()
        rng = np.random.default_rng(5)
        for seed in range(3):
            ids = rng.integers(0, count, 1_000)
            new = values((1_000, dim), "float32", seed)
            table.scatter(ids, new)
            reference[ids] = new
            table.add(range(count), new[:count])
            reference += new[:count]
            assert np.array_equal(table.gather(ids), reference[ids])
        stats = table.stats()
        assert stats["memory_bytes"] <= store.memory
        if dim > 3:
            assert stats["evictions"] > 0
    with em.open(path, mode="r", memory=memory) as store:
        assert np.array_equal(store["t"].gather(range(count)), reference)


@pytest.mark.parametrize("edge", [0, 1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 4_097])
def test_batches_at_the_edges(store, edge):
    table = store.create("t", rows=max(edge, 1), dim=4)
    wanted = np.arange(4 * edge, dtype=np.float32).reshape(edge, 4)
    table.scatter(range(edge), wanted)
    assert np.array_equal(table.gather(range(edge)), wanted)
    if edge:
        with pytest.raises(em.RowIdError):
            table.gather([edge])


def test_page_borders(store):
    table = store.create("t", rows=3 * 1_024, dim=1)  # a page is 1,024 rows
    ids = [0, 1_023, 1_024, 2_047, 2_048, 3_071]
    table.scatter(ids, np.arange(1, 7, dtype=np.float32).reshape(6, 1))
    assert table.gather(ids).ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert table.gather(range(3_072)).sum() == 21
    with pytest.raises(em.RowIdError):
        table.gather([3_072])


@pytest.mark.parametrize("dim", [1_919, 1_921, 4_096, 65_537, 1_000_000])
def test_very_wide_rows(path, dim):
    with em.open(path, memory="64MiB", threads=2) as store:
        table = store.create("t", rows=3, dim=dim)
        wanted = np.arange(3 * dim, dtype=np.float32).reshape(3, dim)
        table.scatter([2, 0, 1], wanted)
        assert np.array_equal(table.gather([0, 1, 2]), wanted[[1, 2, 0]])


@pytest.mark.parametrize("count", [65_535, 65_536, 70_000, (1 << 20) + 1])
def test_very_many_ids(store, count):
    table = store.create("t", rows=100, dim=1)
    table[:] = np.arange(100, dtype=np.float32).reshape(100, 1)
    ids = np.arange(count) % 100
    assert np.array_equal(table.gather(ids).ravel(), ids)


# --- keys -----------------------------------------------------------------------------------------

KEYS = [
    5,
    -1,
    -1_000,
    np.int16(-2),
    slice(3, 7),
    slice(None),
    slice(-3, None),
    slice(None, None, -1),
    slice(900, 100, -7),
    slice(5, 5),
    slice(10, 2_000, 300),
    [1, 2],
    [],
    np.array([[3, 4], [5, 6]]),
    np.arange(1_000) % 7 == 0,
    (np.arange(1_000) % 7 == 0).tolist(),
    np.zeros(1_000, bool),
    range(4),
    ...,
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_reading_by_key(table, rows, key):
    plain = np.asarray(key, np.int64) if isinstance(key, range | list) and not len(key) else key
    wanted = rows[list(plain) if isinstance(plain, range) else plain]
    for source in (table, table.view()):
        got = source[key]
        assert isinstance(got, np.ndarray)
        assert got.flags.c_contiguous
        assert got.shape == wanted.shape
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("value", ["full", "row", "scalar", "list"])
def test_writing_by_key(table, rows, key, value):
    plain = np.asarray(key, np.int64) if isinstance(key, range | list) and not len(key) else key
    plain = list(plain) if isinstance(plain, range) else plain
    shape = rows[plain].shape
    new = {
        "full": -np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
        "row": np.full((1, 5), 3.5, np.float32)[0],
        "scalar": 7,
        "list": [1, 2.5, 3, 4, 5],
    }[value]
    table[key] = new
    rows[plain] = new
    assert np.array_equal(table[:], rows)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (1_000, IndexError),
        (-1_001, IndexError),
        ([1_000], IndexError),
        ([-1], IndexError),
        (np.zeros(999, bool), IndexError),
        (np.zeros((1_000, 5), bool), IndexError),
        ([True], IndexError),
        ([True, 3], TypeError),
        (True, TypeError),
        (1.0, TypeError),
        (None, TypeError),
        ("a", TypeError),
        (slice(1.0, 2.0), TypeError),
        (np.array([1.0]), TypeError),
    ],
    ids=str,
)
def test_keys_that_are_none(table, rows, key, error):
    with pytest.raises(error):
        table[key]
    with pytest.raises(error):
        table.view()[key]
    with pytest.raises(error):
        table[key] = 0
    assert np.array_equal(table[:], rows)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (slice(0, 4), np.ones((3, 5), np.float32), ValueError),
        (slice(0, 4), np.ones(4, np.float32), ValueError),
        (3, np.ones((2, 5), np.float32), ValueError),
        ([1, 2], np.ones((2, 5), np.float64), TypeError),
        ([1, 2], np.ones((2, 4), np.float32), ValueError),
        (slice(0, 4), None, TypeError),
        (slice(0, 4), "x", TypeError),
        (slice(0, 4), ["x"], TypeError),
    ],
)
def test_values_that_do_not_fit_a_key(table, rows, key, value, error):
    with pytest.raises(error):
        table[key] = value
    assert np.array_equal(table[:], rows)


def test_large_slices_are_written_and_read_in_blocks(path):
    count = 300_000  # 4.8 MB: beyond what goes through the hot pages
    with em.open(path, memory="256KiB", threads=2) as store:
        table = store.create("t", rows=count, dim=4, optimizer=em.optim.Adagrad())
        table[5] = -1  # a hot page beside the blocks
        wanted = np.arange(4 * count, dtype=np.float32).reshape(count, 4)
        table[:] = wanted
        assert np.array_equal(table[:], wanted)
        assert np.array_equal(table[::-1], wanted[::-1])
        table[1:] = 3
        assert table.gather([0, 1, count - 1]).tolist() == [[0, 1, 2, 3], [3] * 4, [3] * 4]
        store.commit()
        assert table.verify()["ok"]


# --- views, read, write ---------------------------------------------------------------------------


def test_a_view_is_lazy_and_current(table, rows):
    view = table.view()
    assert view.shape == (1_000, 5)
    assert len(view) == 1_000
    assert view.ndim == 2
    assert view.size == 5_000
    assert view.dtype == np.float32
    table[3] = -5
    rows[3] = -5
    assert view[3].tolist() == [-5] * 5
    assert np.array_equal(np.asarray(view), rows)
    assert np.asarray(view, dtype=np.float64).dtype == np.float64
    assert np.array_equal(list(view), rows)
    assert np.array_equal(list(itertools.islice(table, 3)), rows[:3])
    assert np.array_equal(np.array(table), rows)
    with pytest.raises(TypeError):
        view[3] = 1
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match="copy"):
            np.asarray(view, copy=False)


def test_a_view_reads_no_more_than_it_is_asked(store):
    table = store.create("t", rows=100_000_000, dim=128, init=em.init.Normal())
    view = table.view()
    assert view[99_999_990:].shape == (10, 128)
    assert view[12_345].shape == (128,)
    assert table.stats()["pages_generated"] < 10


def test_views_of_state(store):
    table = store.create(
        "t", rows=10, dim=2, optimizer=em.optim.Adagrad(initial_accumulator_value=0.5)
    )
    view = table.view("sum")
    assert (np.asarray(view) == 0.5).all()
    with pytest.raises(em.NotFoundError, match="momentum"):
        table.view("momentum")
    with pytest.raises(KeyError):
        table.gather([0], field="exp_avg")
    with pytest.raises(TypeError, match="field"):
        table.gather([0], field=3)
    table.scatter([3], [[1, 2]], field="sum")
    assert view[3].tolist() == [1, 2]
    assert table[3].tolist() == [0, 0]


def test_state_of_half_precision_rows_is_float32(store):
    table = store.create("t", rows=10, dim=2, dtype="float16", optimizer=em.optim.Adagrad())
    assert table.gather([1], field="sum").dtype == np.float32
    assert table.view("sum").dtype == np.float32
    table.scatter([1], np.ones((1, 2), np.float32), field="sum")
    with pytest.raises(TypeError, match="float16"):
        table.scatter([1], np.ones((1, 2), np.float16), field="sum")
    assert table.read(1, 2, field="sum").tolist() == [[1, 1]]


def test_read_and_write_of_ranges(table, rows):
    assert np.array_equal(table.read(), rows)
    assert np.array_equal(table.read(10, 20), rows[10:20])
    assert table.read(1_000).shape == (0, 5)
    out = np.empty((3, 5), np.float32)
    assert table.read(5, 8, out=out) is out
    assert np.array_equal(out, rows[5:8])
    table.write(998, np.ones((2, 5), np.float32))
    table.write(0, [[2] * 5])
    assert table[-1].tolist() == [1] * 5
    assert table[0].tolist() == [2] * 5
    for call in (
        lambda: table.read(0, 1_001),
        lambda: table.read(7, 6),
        lambda: table.write(999, np.ones((2, 5), np.float32)),
    ):
        with pytest.raises(IndexError, match="1000 rows"):
            call()
    for call in (
        lambda: table.read(-1, 3),
        lambda: table.write(-1, np.ones((1, 5), np.float32)),
        lambda: table.write(0, np.ones((1, 4), np.float32)),
        lambda: table.write(0, np.ones(5, np.float32)),
        lambda: table.read(0, 3, out=np.empty((2, 5), np.float32)),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            call()
    with pytest.raises(TypeError, match="float64"):
        table.write(0, np.ones((1, 5)))


def test_statistics_count(store):
    table = store.create("t", rows=10_000, dim=32)
    assert table.stats()["frames"] == 0
    table.gather([1, 2, 3, 9_999])
    table.add([1], np.ones((1, 32), np.float32))
    stats = table.stats()
    assert stats["misses"] == 2
    assert stats["hits"] == 1
    assert stats["rows_gathered"] == 4
    assert stats["rows_written"] == 1
    assert stats["resident_pages"] == 2
    assert stats["dirty_pages"] == 1
    assert stats["pages_generated"] == 2
    assert stats["page_bytes"] == 4_096
    assert isinstance(stats["huge_pages"], bool)
    assert stats["registered"] is False


def test_prefetch_brings_pages_in(store):
    table = store.create("t", rows=10_000, dim=32)
    table.prefetch([0, 5_000, 9_999])
    for _ in range(1_000):
        if table.stats()["resident_pages"] == 3:
            break
        threading.Event().wait(0.01)
    misses = table.stats()["misses"]
    table.gather([0, 5_000, 9_999])
    assert table.stats()["misses"] == misses


# --- threads, warnings ----------------------------------------------------------------------------


def test_adds_of_two_threads_are_all_counted(store):
    table = store.create("t", rows=10, dim=3)
    ids = np.arange(1_000) % 10
    ones = np.ones((1_000, 3), np.float32)
    errors = []

    def work():
        try:
            for _ in range(500):
                table.add(ids, ones)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (table[:] == 100_000).all()  # 1,000,000 adds, 100,000 a row


def test_readers_beside_a_writer_see_whole_rows(path):
    with em.open(path, memory="64KiB", threads=2) as store:
        table = store.create("t", rows=2_000, dim=64)
        stop = threading.Event()
        torn = []

        def read():
            rng = np.random.default_rng(1)
            while not stop.is_set():
                got = table.gather(rng.integers(0, 2_000, 500))
                if not (got == got[:, :1]).all():
                    torn.append(got)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        rng = np.random.default_rng(2)
        for step in range(60):
            ids = rng.integers(0, 2_000, 300)
            table.scatter(ids, np.full((300, 64), step, np.float32))
        stop.set()
        for reader in readers:
            reader.join()
        assert not torn


def test_the_gil_is_free_while_rows_are_copied(store):
    table = store.create("t", rows=200_000, dim=16)
    ids = np.random.default_rng(0).integers(0, 200_000, 1_000_000)
    table.gather(ids[:10])
    old = sys.getswitchinterval()
    sys.setswitchinterval(1_000)  # nobody gets the GIL who is not given it
    try:
        ticks = []
        ready, go, stop = threading.Event(), threading.Event(), threading.Event()

        def tick():
            ready.set()
            go.wait()
            while not stop.is_set():
                ticks.append(1)
                stop.wait(1e-4)

        thread = threading.Thread(target=tick)
        thread.start()
        ready.wait()
        go.set()
        before = len(ticks)
        table.gather(ids)
        after = len(ticks)
        stop.set()
        thread.join()
    finally:
        sys.setswitchinterval(old)
    assert after > before


def test_nothing_warns(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with em.open(path) as store:
            store.create("t", rows=100, dim=3, dtype="float16")[:] = 1
        with em.open(path, mode="r") as store:
            table = store["t"]
            assert (table.gather([1, 2]) == 1).all()
            torch = pytest.importorskip("torch")
            rows = table.gather(torch.tensor([1, 2]))
            rows += 1
            torch.from_numpy(table.gather([1, 2])).add_(1)
            assert (table[:] == 1).all()
