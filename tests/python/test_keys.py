"""`table[key]` and `view[key]` against NumPy's arrays, with random keys."""

from __future__ import annotations

import numpy as np
import pytest

ROWS, DIM = 57, 7


@pytest.fixture
def array():
    return np.random.default_rng(3).random((ROWS, DIM), np.float32)


@pytest.fixture
def table(store, array):
    made = store.create("t", rows=ROWS, dim=DIM)
    made[:] = array
    return made


def maybe(rng, low, high):
    return None if rng.random() < 0.3 else int(rng.integers(low, high))


def random_slice(rng, size):
    step = maybe(rng, -size, size) or None
    return slice(maybe(rng, -2 * size, 2 * size), maybe(rng, -2 * size, 2 * size), step)


def random_rows(rng):
    kind = rng.integers(0, 9)
    shape = tuple(rng.integers(0, 4, rng.integers(1, 4)))
    if kind == 0:
        return int(rng.integers(-ROWS, ROWS))
    if kind in (1, 2, 3):
        return random_slice(rng, ROWS)
    if kind == 4:
        return rng.integers(0, ROWS, shape)
    if kind == 5:
        return rng.integers(0, ROWS, rng.integers(0, 9)).tolist()
    if kind == 6:
        return rng.random(ROWS) < rng.random()
    if kind == 7:
        return (rng.random(ROWS) < 0.5).tolist()
    return Ellipsis


def random_key(rng):
    rows = random_rows(rng)
    kind = rng.integers(0, 8)
    if kind < 3:
        return rows
    if kind == 3:
        return (rows,)
    if kind == 4:
        return (rows, Ellipsis) if rows is not Ellipsis else ()
    if kind == 5:
        return (rows, random_slice(rng, DIM))
    if kind == 6:
        return (rows, int(rng.integers(-DIM, DIM)))
    if isinstance(rows, np.ndarray | list) and np.asarray(rows).dtype != bool:
        shape = np.shape(rows)
        return (rows, rng.integers(-DIM, DIM, shape if rng.random() < 0.5 else ()))
    return (rows, rng.integers(-DIM, DIM, rng.integers(0, 5)))


def outcome(array, key):
    try:
        return array[key]
    except IndexError:
        return IndexError


@pytest.mark.parametrize("seed", range(40))
def test_random_keys_give_what_numpy_gives(table, array, seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        key = random_key(rng)
        wanted = outcome(array, key)
        for place in (table, table.view()):
            got = outcome(place, key)
            if wanted is IndexError:
                assert got is IndexError, key
                continue
            assert got is not IndexError, key
            assert np.shape(got) == wanted.shape, key
            assert got.dtype == wanted.dtype, key
            assert np.array_equal(got, wanted), key


@pytest.mark.parametrize("seed", range(20))
def test_random_writes_do_what_numpy_does(table, array, seed):
    rng = np.random.default_rng(seed)
    for _ in range(30):
        key = random_rows(rng)
        shape = array[key].shape
        drop = rng.integers(0, len(shape) + 1)  # leading dimensions that are broadcast
        value = rng.random(shape[drop:], np.float32)
        if value.ndim and rng.random() < 0.3 and value.shape[0]:
            value = value[:1]
        array[key] = value
        table[key] = value
        assert np.array_equal(table[:], array), key
    table[3, ...] = 5
    table[..., :] = 6
    assert table[2, 0] == 6


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        ((1, 2, 3), IndexError, "too many"),
        ((..., ...), IndexError, "ellipsis"),
        ((None, 1), TypeError, "None"),
        (None, TypeError, "NoneType"),
        ((1, True), TypeError, "True"),
        ((slice(0, 5), 7), IndexError, "7"),
        (([0, 1], [0, 7]), IndexError, "column"),
        (([0, 1], [0.5, 1.5]), IndexError, "float64"),
        (([0, 1], [0, 1, 2]), IndexError, "broadcast"),
        ("weight", TypeError, "str"),
        (1.5, TypeError, "float"),
    ],
)
def test_keys_that_are_none(table, key, error, text):
    for place in (table, table.view()):
        with pytest.raises(error, match=text):
            place[key]


def test_columns_are_not_written(table):
    for key in ((3, 1), (slice(0, 5), slice(1, 3)), (..., 0)):
        with pytest.raises(TypeError, match="whole rows"):
            table[key] = 1


def test_tensors_as_keys(table, array):
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[5, 2], [2, 56]])
    assert torch.equal(table[ids, 1:3], torch.from_numpy(array)[ids][..., 1:3])
    assert torch.equal(table[ids, -1], torch.from_numpy(array)[ids][..., -1])
    with pytest.raises(TypeError, match="index the result"):
        table[ids, [0, 1]]
