"""Rows at the end of a table."""

from __future__ import annotations

import threading

import embermap as em
import numpy as np
import pytest


@pytest.fixture
def table(store):
    return store.create("t", rows=5, dim=3, optimizer=em.optim.Adagrad(initial_accumulator_value=2))


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3], [4, 5, 6]],
        [1.5, 2, 3],
        ((1, 2, 3),),
        np.ones((4, 3), np.float32),
        np.ones(3, np.float32),
        np.arange(24, dtype=np.float32).reshape(8, 3)[::-2],
        np.asfortranarray(np.arange(12, dtype=np.float32).reshape(4, 3)),
        np.arange(6, dtype=np.float32).reshape(3, 2).T,
        np.ones((0, 3), np.float32),
        [],
    ],
    ids=str,
)
def test_rows_of_every_kind(table, rows):
    wanted = np.atleast_2d(np.array(rows, np.float32).reshape(-1, 3))
    assert table.append(rows) == 5
    assert len(table) == 5 + len(wanted)
    assert np.array_equal(table[5:], wanted)
    assert np.array_equal(table[:5], np.zeros((5, 3)))
    assert (table.view("sum")[:] == 2).all()
    assert table.append([7, 7, 7]) == 5 + len(wanted)


def test_tensors(table):
    torch = pytest.importorskip("torch")
    assert table.append(torch.ones(2, 3)) == 5
    assert table.append(torch.arange(12.0).reshape(3, 4).T[:, :]) == 7
    assert table.append(torch.ones(3, requires_grad=True)) == 11
    assert np.array_equal(table[7:11], np.arange(12.0).reshape(3, 4).T)


def test_every_dtype(store, dtype):
    table = store.create("t", rows=0, dim=2, dtype=dtype)
    assert table.append(np.array([[1, 2], [3, 4]]).astype(dtype)) == 0
    assert table.append([5, 6]) == 2
    assert table[:].astype(int).tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (np.ones((2, 4), np.float32), ValueError, r"\(n, 3\)"),
        (np.ones((2, 2, 3), np.float32), ValueError, r"\(n, 3\)"),
        (np.float32(1), ValueError, r"\(n, 3\)"),
        (np.ones((2, 3)), TypeError, "float64"),
        ([["a", "b", "c"]], TypeError, "numbers"),
        ([[1, 2], [3]], ValueError, "regular"),
        (None, TypeError, "NoneType"),
        ("abc", TypeError, "str"),
    ],
    ids=str,
)
def test_rows_that_are_none(table, rows, error, text):
    with pytest.raises(error, match=text):
        table.append(rows)
    assert len(table) == 5


def test_a_table_that_cannot_grow(store, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 3), np.float32))
    adopted = store.adopt("a", tmp_path / "a.npy")
    with pytest.raises(ValueError, match="in place"):
        adopted.append([1, 2, 3])
    assert len(adopted) == 2
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.ones((2, 3)))


def test_appends_are_committed_and_survive_a_small_budget(path):
    with em.open(path, memory="20KiB") as store:
        table = store.create("t", rows=0, dim=33)
        blocks = [np.random.default_rng(i).random((1 + 37 * i, 33), np.float32) for i in range(12)]
        starts = [table.append(block) for block in blocks]
        number = store.commit_number
        store.abandon()
    with em.open(path, memory="20KiB") as store:
        assert store.commit_number == number
        table = store["t"]
        for start, block in zip(starts, blocks, strict=True):
            assert np.array_equal(table.gather(range(start, start + len(block))), block)
        assert np.array_equal(table[:], np.concatenate(blocks))
        assert table.verify()["ok"]


def test_threads_get_rows_of_their_own(table):
    got: dict[int, int] = {}

    def add(n: int) -> None:
        got[n] = table.append(np.full((4, 3), n, np.float32))

    threads = [threading.Thread(target=add, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got.values()) == list(range(5, 37, 4))
    for n, start in got.items():
        assert (table[start : start + 4] == n).all()


@pytest.mark.gpu
def test_a_tensor_on_the_gpu_is_copied(table):
    torch = pytest.importorskip("torch")
    assert table.append(torch.ones(2, 3, device="cuda")) == 5
    assert (table[5:] == 1).all()
