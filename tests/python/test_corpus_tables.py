"""Faults people met with row lookups of other tools: docs/bug-corpus.md, sections F and J (B158).

Where there is a GPU the same is asked of tensors on it.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import embermap as em
import numpy as np
import pytest

PLACES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def place(request):
    """A way to hand arrays in and take them out: as NumPy arrays, or as tensors on the GPU."""
    if request.param == "host":
        return Place(None, lambda array: array, lambda array: array)
    torch = pytest.importorskip("torch")
    return Place(
        "cuda", lambda array: torch.from_numpy(np.array(array)).cuda(), lambda t: t.cpu().numpy()
    )


class Place:
    def __init__(self, device, put, take):
        self.device, self.put, self.take = device, put, take


def rewrite_header(file: Path, offset: int) -> None:
    """The data of a .npy of format 1.0, moved to begin at `offset`."""
    values = np.load(file)
    raw = file.read_bytes()
    text = re.match(rb"\{.*\}", raw[10:128], re.DOTALL).group()
    header = raw[:8] + (offset - 10).to_bytes(2, "little") + text.ljust(offset - 11) + b"\n"
    file.write_bytes(header + values.tobytes())


def npy_file(file: Path, rows: int, dim: int, dtype: str = "<f4") -> None:
    """A .npy of zeros that takes no disk."""
    with file.open("wb") as out:
        header = {"descr": dtype, "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(out, header)
        out.truncate(out.tell() + rows * dim * np.dtype(dtype).itemsize)


# --- B97: products of 32 bits ---------------------------------------------------------------------

# Rows 239,673 to 239,675: below element 2^31, across it, above it.
ELEMENTS = (262_144, 8_960, [239_673, 239_674, 239_675, 262_143])
# The same about byte 2^32, of single bytes.
BYTES = (600_000, 8_192, [524_287, 524_288, 524_289, 599_999])


@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
def test_rows_about_element_two_to_the_31(path, place, ids_dtype):
    rows, dim, near = ELEMENTS
    ids = place.put(np.array(near, ids_dtype))
    wanted = np.arange(4 * dim, dtype=np.float32).reshape(4, dim) % 997
    with em.open(path, memory="32MiB", device=place.device) as store:
        table = store.create("t", rows=rows, dim=dim, optimizer=em.optim.SGD(lr=1))
        table.scatter(ids, place.put(wanted))
        assert np.array_equal(place.take(table.gather(ids)), wanted)
        table.add(ids, place.put(wanted))
        table.update(ids, place.put(np.ones((4, dim), np.float32)))
        assert np.array_equal(place.take(table.gather(ids)), 2 * wanted - 1)
        # What wrapped about 2^31 or 2^32 would have met these.
        wrapped = [n * dim % 2**bits // dim for n in near for bits in (29, 30, 31, 32)]
        others = [n for n in wrapped if n not in near]
        assert not table.gather(np.array(others)).any()
        store.abandon()


def test_bytes_past_two_to_the_32(path, place):
    rows, dim, near = BYTES
    ids = place.put(np.array(near))
    wanted = (np.arange(4 * dim).reshape(4, dim) % 251).astype(np.uint8)
    with em.open(path, memory="32MiB", device=place.device) as store:
        table = store.create("t", rows=rows, dim=dim, dtype="uint8")
        table.scatter(ids, place.put(wanted))
        table.add(ids, place.put(np.ones((4, dim), np.uint8)))
        assert np.array_equal(place.take(table.gather(ids)), wanted + 1)
        assert not table.gather([0, 1, 2, 524_286]).any()
        store.abandon()


@pytest.mark.parametrize("shape", [ELEMENTS, BYTES], ids=["float32", "uint8"])
def test_a_mapped_file_past_two_to_the_31(path, tmp_path, place, shape):
    rows, dim, near = shape
    dtype = "<f4" if shape is ELEMENTS else "|u1"
    npy_file(tmp_path / "a.npy", rows, dim, dtype)
    shown = np.lib.format.open_memmap(tmp_path / "a.npy", "r+")
    wanted = (np.arange(4 * dim).reshape(4, dim) % 251).astype(dtype)
    shown[near] = wanted
    shown.flush()
    with em.open(path) as store:
        store.adopt("t", tmp_path / "a.npy", writable=False)
    for pin in ("mapping", "frames"):
        options = {"mode": "r", "pin": pin, "memory": "32MiB", "device": place.device}
        with em.open(path, **options) as store:
            for ids in (np.array(near, np.int32), np.array(near)):
                got = place.take(store["t"].gather(place.put(ids)))
                assert np.array_equal(got, wanted)


# --- B101: the row behind the last ----------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 511, 512, 513, 1_024])
def test_the_row_behind_the_last_is_none(path, place, rows):
    """512 rows of two floats are a page: the last row ends one, or begins one, or lies within."""
    with em.open(path, device=place.device) as store:
        store.create("before", rows=rows, dim=2, init=em.init.Constant(5))
        table = store.create("t", rows=rows, dim=2, optimizer=em.optim.SGD(1))
        store.create("behind", rows=10, dim=2, init=em.init.Constant(7))[:] = 7
        bad, ones = place.put(np.array([rows])), place.put(np.ones((1, 2), np.float32))
        many = place.put(np.array([*range(rows), rows]))
        for call in (
            lambda: table.gather(bad),
            lambda: table.gather(many),
            lambda: table.scatter(bad, ones),
            lambda: table.add(bad, ones),
            lambda: table.update(bad, ones),
            lambda: table[rows],
            lambda: table[-rows - 1],
            lambda: table.__setitem__(rows, 1),
            lambda: table.read(0, rows + 1),
            lambda: table.write(rows, np.ones((1, 2), np.float32)),
        ):
            with pytest.raises(IndexError, match=rf"\b{rows + 1}\b|\b{rows}\b"):
                call()
        if place.device is None:
            with pytest.raises(IndexError):
                table.prefetch(bad)
        else:  # nobody waits for ids on a GPU to be looked at: they are a hint there
            table.prefetch(bad).wait()
        assert not table[:].any()
        assert table.step == 0
        # A row that comes into being is legal from then on, and the one behind it is not.
        assert table.append(np.full((1, 2), 3, np.float32)) == rows
        assert place.take(table.gather(bad)).tolist() == [[3, 3]]
        with pytest.raises(em.RowIdError):
            table.gather(place.put(np.array([rows + 1])))
        table.resize(rows)
        with pytest.raises(em.RowIdError):
            table.gather(bad)


def test_the_row_behind_the_last_of_a_file_and_of_a_reader(path, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((8, 2), np.float32))
    rows = em.io.open(tmp_path / "a.npy")
    for key in (8, -9, [0, 8], np.array([8], np.uint8)):
        with pytest.raises(IndexError):
            rows[key]
    with em.open(path) as store:
        store.import_file("t", tmp_path / "a.npy")
    for pin in ("frames", "mapping"):
        with em.open(path, mode="r", pin=pin) as store, pytest.raises(em.RowIdError, match="id 8"):
            store["t"].gather([7, 8])


# --- B102, B158: ids given several times ----------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("memory", ["64KiB", "16MiB"])
def test_repeated_ids_are_the_same_with_any_number_of_threads(path, place, threads, memory):
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 10, 200_000) * 37
    with em.open(path, memory=memory, threads=threads, device=place.device) as store:
        table = store.create("t", rows=400, dim=3)
        table.add(place.put(ids), place.put(np.ones((len(ids), 3), np.float32)))
        wanted = np.bincount(ids, minlength=400).astype(np.float32)
        assert np.array_equal(table[:], np.repeat(wanted[:, None], 3, 1))
        values = np.arange(3 * len(ids), dtype=np.float32).reshape(-1, 3)
        table.scatter(place.put(ids), place.put(values))
        for number in set(ids.tolist()):
            assert np.array_equal(table[number], values[np.flatnonzero(ids == number)[-1]])


def test_the_last_value_wins_in_a_thousand_repetitions(path, place):
    with em.open(path, device=place.device) as store:
        table = store.create("t", rows=10, dim=2)
        ids = place.put(np.array([5, 5, 7]))
        for repetition in range(1_000):
            rows = np.arange(6, dtype=np.float32).reshape(3, 2) + repetition
            table.scatter(ids, place.put(rows))
            assert np.array_equal(place.take(table.gather(ids)), rows[[1, 1, 2]])


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("float32", 100_000), ("float64", 100_000), ("float16", np.inf), ("int32", 100_000),
     ("uint8", 100_000 % 256), ("int8", -96)],
)  # fmt: skip
def test_a_hundred_thousand_ones_for_one_row(path, place, dtype, wanted):
    """Summed in float32 (float64, modulo 2^n), then added and rounded once."""
    ids = place.put(np.full(100_000, 5))
    with em.open(path, device=place.device) as store:
        table = store.create("t", rows=10, dim=2, dtype=dtype)
        table.add(ids, place.put(np.ones((100_000, 2), dtype)))
        assert table[5].tolist() == [wanted] * 2
        half = store.create("h", rows=10, dim=1, dtype="float16")
        small = np.full((20_000, 1), 0.125, np.float16)
        half.add(place.put(np.full(20_000, 3)), place.put(small))
        assert half[3].tolist() == [2_500]  # where float16 sums stop at 256


def test_two_threads_that_add_at_once_lose_nothing(path, place):
    """Nothing is lost, and the interpreter is free while each call works."""
    rng = np.random.default_rng(3)
    batches = [rng.integers(0, 10, 100_000) for _ in range(10)]
    ones = place.put(np.ones((100_000, 2), np.float32))
    with em.open(path, threads=2, device=place.device) as store:
        table = store.create("t", rows=10, dim=2)
        failed = []

        def work(some):
            try:
                for ids in some:
                    table.add(place.put(ids), ones)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(batches[k::2],)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        wanted = np.bincount(np.concatenate(batches), minlength=10).astype(np.float32)
        assert np.array_equal(table[:], np.stack([wanted, wanted], 1))


# --- B104: a batch without ids --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_a_batch_without_ids(path, place, shape):
    ids = place.put(np.empty(shape, np.int64))
    none = place.put(np.empty((*shape, 4), np.float32))
    with em.open(path, device=place.device) as store:
        table = store.create("t", rows=10, dim=4, optimizer=em.optim.Adagrad())
        number = store.commit()
        for _ in range(2):  # of a table that no batch has had, and then again
            assert place.take(table.gather(ids)).shape == (*shape, 4)
            table.scatter(ids, none)
            table.add(ids, none)
            table.update(ids, none)
            table.prefetch(ids)
        assert table.step == 0
        assert store.commit() == number
        empty = store.create("empty", rows=0, dim=4)
        assert place.take(empty.gather(ids)).shape == (*shape, 4)
        empty.scatter(ids, none)


@pytest.mark.parametrize("place_name", PLACES)
def test_modules_of_torch_take_a_batch_without_ids(path, place_name):
    torch = pytest.importorskip("torch")
    device = torch.device("cpu" if place_name == "host" else "cuda")
    with em.open(path, device=None if device.type == "cpu" else device) as store:
        table = store.create("t", rows=10, dim=4, optimizer=em.optim.Adagrad())
        embedding = em.torch.Embedding(table, device=device)
        bags = em.torch.EmbeddingBag(table, mode="sum", device=device)
        optimizer = em.torch.Optimizer([embedding, bags])
        none = torch.empty((0,), dtype=torch.int64, device=device)
        out = embedding(none)
        assert out.shape == (0, 4)
        out.sum().backward()
        of_bags = bags(none, torch.tensor([0, 0], device=device))
        assert of_bags.tolist() == [[0] * 4] * 2
        of_bags.sum().backward()
        optimizer.step()
        optimizer.step()
        assert not table[:].any()
        embedding(torch.tensor([3], device=device)).sum().backward()
        embedding(none).sum().backward()
        optimizer.step()
        assert table[3].any()


# --- B107: ids of other types ---------------------------------------------------------------------


def test_ids_beyond_32_bits_of_every_kind_that_holds_them(path, place):
    with em.open(path, memory="16MiB", device=place.device) as store:
        table = store.create("t", rows=2**33, dim=1)
        table[3_000_000_000] = 7
        table[3_000_000_000 - 2**32 + 2**32] += 1  # the same row
        for ids in (
            np.array([3_000_000_000], np.uint32),
            np.array([3_000_000_000], np.uint64),
            np.array([3_000_000_000]),
        ):
            if place.device is None or ids.dtype == np.int64:
                assert place.take(table.gather(place.put(ids))).tolist() == [[8]]
        for one in (3_000_000_000, np.int64(3_000_000_000), np.uint32(3_000_000_000)):
            assert table.gather(one).tolist() == [8]
            assert table.gather([one]).tolist() == [[8]]
            assert table[one].tolist() == [8]
        store.abandon()


def test_whole_floats_are_no_ids_of_tensors_either(path):
    torch = pytest.importorskip("torch")
    with em.open(path) as store:
        table = store.create("t", rows=10, dim=2)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
                      torch.complex64):  # fmt: skip
            ids = torch.ones(2).to(dtype)
            for call in (table.gather, table.prefetch, em.torch.Embedding(table)):
                with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
                    call(ids)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
                      torch.uint16, torch.uint32, torch.uint64):  # fmt: skip
            ids = torch.tensor([1, 9]).to(dtype)
            assert table.gather(ids).shape == (2, 2)
            assert table.gather(ids[0]).shape == (2,)


# --- B108: ids and values elsewhere ---------------------------------------------------------------


def test_tensors_that_hold_no_rows_are_refused(path):
    torch = pytest.importorskip("torch")
    with em.open(path) as store:
        table = store.create("t", rows=10, dim=2)
        ids = torch.tensor([1, 2])
        sparse = torch.tensor([[0, 3]]).to_sparse()
        rows = torch.ones(2, 2)
        for call in (
            lambda: table.gather(ids.to("meta")),
            lambda: table.gather(sparse),
            lambda: table.scatter(ids.to("meta"), rows),
            lambda: table.scatter(ids, rows.to("meta")),
            lambda: table.add(ids, rows.to_sparse()),
            lambda: table.gather(ids, out=rows.to("meta")),
            lambda: em.torch.Embedding(table)(ids.to("meta")),
        ):
            with pytest.raises((TypeError, ValueError), match=r"meta|sparse"):
                call()
        assert not table[:].any()


@pytest.mark.gpu
def test_pinned_ids_and_rows_are_of_the_host(path):
    torch = pytest.importorskip("torch")
    with em.open(path, device="cuda") as store:
        table = store.create("t", rows=10, dim=2)
        ids, rows = torch.tensor([1, 2]).pin_memory(), torch.ones(2, 2).pin_memory()
        table.scatter(ids, rows)
        got = table.gather(ids)
        assert got.device.type == "cpu"
        assert got.tolist() == [[1, 1], [1, 1]]
        out = torch.empty(2, 2).pin_memory()
        assert table.gather(ids, out=out) is out
        assert out.tolist() == [[1, 1], [1, 1]]


# --- B110, B112, B113: widths and numbers ---------------------------------------------------------

WIDTHS = [1, 2, 3, 5, 7, 17, 100, 257, 300, 301]


@pytest.mark.parametrize("offset", [97, 98, 100, 104, 129, 4_097])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_files_whose_rows_begin_at_odd_places(path, tmp_path, place, offset, dtype):
    """Adopted where they are: read, written and mapped at addresses that are not aligned."""
    rng = np.random.default_rng(offset)
    with em.open(path, memory="32MiB", device=place.device) as store:
        for dim in WIDTHS:
            rows = rng.integers(0, 30, (64, dim)).astype(dtype)
            np.save(tmp_path / f"{dim}.npy", rows)
            rewrite_header(tmp_path / f"{dim}.npy", offset)
            table = store.adopt(f"t{dim}", tmp_path / f"{dim}.npy")
            ids = rng.permutation(64)[:40]
            assert np.array_equal(place.take(table.gather(place.put(ids))), rows[ids])
            new = rng.integers(0, 30, (40, dim)).astype(dtype)
            table.scatter(place.put(ids), place.put(new))
            table.add(place.put(ids), place.put(new))
            rows[ids] = new + new
            assert np.array_equal(table[:], rows)
            np.save(tmp_path / f"wanted{dim}.npy", rows)
    options = {"mode": "r", "pin": "mapping", "memory": "1MiB", "device": place.device}
    with em.open(path, **options) as store:
        for dim in WIDTHS:
            rows = np.load(tmp_path / f"wanted{dim}.npy")
            assert np.array_equal(np.load(tmp_path / f"{dim}.npy"), rows)
            ids = rng.integers(0, 64, 200)
            assert np.array_equal(place.take(store[f"t{dim}"].gather(place.put(ids))), rows[ids])


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_results_at_odd_places(store, dtype):
    """`out`, values and ids may lie at any byte."""
    item = np.dtype(dtype).itemsize
    rng = np.random.default_rng(1)
    for dim in WIDTHS:
        table = store.create(f"t{dim}", rows=64, dim=dim, dtype=dtype)
        rows = rng.integers(0, 30, (64, dim)).astype(dtype)
        memory = np.zeros(64 * dim * item + 16, np.uint8)
        for shift in (0, 1, 2, 4, 8):
            view = memory[shift : shift + rows.nbytes].view(dtype).reshape(rows.shape)
            view[:] = rows
            where = np.zeros(64 * 8 + 8, np.uint8)[shift % 8 :][: 64 * 8].view(np.int64)
            where[:] = np.arange(64)
            table.scatter(where, view)
            out = memory[shift : shift + rows.nbytes].view(dtype).reshape(rows.shape)
            out[:] = 0
            table.gather(where, out=out)
            assert np.array_equal(out, rows)
            assert np.array_equal(table[:], rows)


@pytest.mark.parametrize("dim", [1_919, 1_920, 1_921, 4_096, 65_535, 65_536, 65_537, 1_000_000])
def test_rows_wider_than_any_tile(path, place, dim):
    with em.open(path, memory="64MiB", threads=2, device=place.device) as store:
        table = store.create("t", rows=3, dim=dim, optimizer=em.optim.SGD(1))
        wanted = np.arange(3 * dim, dtype=np.float32).reshape(3, dim)
        table.scatter(place.put(np.array([2, 0, 1])), place.put(wanted))
        table.add(place.put(np.array([1, 1])), place.put(np.ones((2, dim), np.float32)))
        table.update(place.put(np.array([1])), place.put(np.ones((1, dim), np.float32)))
        wanted[2] += 1
        got = place.take(table.gather(place.put(np.array([0, 1, 2, 1]))))
        assert np.array_equal(got, wanted[[1, 2, 0, 2]])
        store.abandon()


@pytest.mark.parametrize("count", [65_535, 65_536, 70_000])
def test_many_ids_of_wide_rows(path, place, count):
    with em.open(path, memory="32MiB", device=place.device) as store:
        table = store.create("t", rows=100, dim=1_921, dtype="uint8")
        rows = (np.arange(100 * 1_921).reshape(100, 1_921) % 251).astype(np.uint8)
        table[:] = rows
        ids = np.arange(count) * 7 % 100
        got = place.take(table.gather(place.put(ids)))
        assert all(np.array_equal(got[k::100], rows[[k * 7 % 100] * len(got[k::100])])
                   for k in range(100))  # fmt: skip
        store.abandon()


def test_two_to_the_31_elements_in_one_call(path, place):
    """131,072 rows of 16,384 bytes, of which one is repeated."""
    with em.open(path, memory="32MiB", device=place.device) as store:
        table = store.create("t", rows=3, dim=16_384, dtype="uint8")
        rows = (np.arange(3 * 16_384).reshape(3, 16_384) % 251).astype(np.uint8)
        table[:] = rows
        ids = np.ones(131_072, np.int64)
        ids[-1] = 2
        got = table.gather(place.put(ids))
        for n in (0, 1, 65_535, 65_536, 131_070):
            assert np.array_equal(place.take(got[n]), rows[1])
        assert np.array_equal(place.take(got[131_071]), rows[2])
        assert int(got[:, 5].sum()) == 131_071 * int(rows[1, 5]) + int(rows[2, 5])
        store.abandon()


@pytest.mark.parametrize("spread", [1, 1_000])
def test_more_than_two_to_the_24_ids_in_one_call(path, place, spread):
    """Of one row again and again, or of a thousand."""
    count = 2**24 + 1
    with em.open(path, memory="32MiB", device=place.device) as store:
        table = store.create("t", rows=1_000, dim=1)
        table[:] = np.arange(1, 1_001, dtype=np.float32)[:, None]
        ids = np.arange(count) % spread
        got = place.take(table.gather(place.put(ids)))[:, 0]
        assert np.array_equal(got, (ids + 1).astype(np.float32))
        with pytest.raises(em.RowIdError, match=f"position {count - 1}"):
            ids[-1] = 1_000
            table.gather(place.put(ids))
        store.abandon()


# --- B116: what is gathered is a copy -------------------------------------------------------------


@pytest.mark.parametrize("key", [[1, 2], slice(1, 3), np.array([0, 1, 1, 0], bool), 1, ...])
def test_writing_into_what_was_read_writes_nothing_and_assignment_does(store, key):
    torch = pytest.importorskip("torch")
    table = store.create("t", rows=4, dim=2)
    got = table[key]
    got += 1
    got[...] = 9
    if isinstance(key, list):
        table[torch.tensor(key)].copy_(torch.ones(2, 2))
        table.gather(torch.tensor(key)).fill_(4)
        table.view()[key][:] = 3
        em.torch.Embedding(table).weight[torch.tensor(key)].detach().fill_(4)
    assert not table[:].any()
    assert "Results\n    are copies" in em.Table.__doc__
    table[key] = 5
    reference = np.zeros((4, 2), np.float32)
    reference[key] = 5
    table[key] += 2
    reference[key] += 2
    assert np.array_equal(table[:], reference)


# --- B117, B118: what a step costs, and whom it changes -------------------------------------------


def test_a_step_costs_the_same_in_a_table_of_any_size(path):
    """Bytes of the process and of the files, dirty pages: those of the batch."""

    def cost(rows):
        where = path / str(rows)
        with em.open(where, memory="32MiB") as store:
            table = store.create("t", rows=rows, dim=64, optimizer=em.optim.Adam())
            ids = np.random.default_rng(0).choice(1_000_000, 1_024, replace=False)
            for _ in range(3):
                table.update(ids, np.ones((1_024, 64), np.float32))
            stats = table.stats()
            store.commit()
            store.checkpoint()
            written = store.stats()["log"]["appended_bytes"]
        blocks = 512 * sum(f.stat().st_blocks for f in where.iterdir() if f.suffix != ".log")
        return stats["dirty_pages"], stats["pages_generated"], written, blocks

    path.mkdir()
    small, large = cost(1_000_000), cost(10_000_000)
    assert small[:2] == large[:2] == (1_024, 1_024)
    assert large[2] <= 1.1 * small[2]
    assert large[3] <= small[3] + (4 << 20)  # the sparse file of pages grows a bit a page


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SparseAdam", "SGD", "RMSprop", "Adagrad"])
def test_rows_of_no_batch_do_not_move(path, place, name):
    """Neither weight nor state, nor a byte of their pages; torch's dense Adam moves them all."""
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(em.optim, name)(0.1, **options)
    with em.open(path, device=place.device) as store:
        table = store.create("t", rows=1_000, dim=16, optimizer=optimizer, init=em.init.Normal())
        table.materialize()
        store.commit()
        store.checkpoint()
        before = table.path.read_bytes()
        fields = {field: table.read(field=field) for field in table.fields}
        ids, rng = place.put(np.arange(10)), np.random.default_rng(0)
        for _ in range(5):
            table.update(ids, place.put(rng.normal(size=(10, 16)).astype(np.float32)))
            table.update(ids[:0], place.put(np.empty((0, 16), np.float32)))
        for field, rows in fields.items():
            got = table.read(field=field)
            assert got[10:].tobytes() == rows[10:].tobytes(), field
            assert field == "step" or not np.array_equal(got[:10], rows[:10])
        stats = table.stats()
        touched = stats["dirty_pages"]
        assert 0 < touched <= 10
        store.commit()
        store.checkpoint()
        after = table.path.read_bytes()
        changed = {n // 4_096 for n in np.flatnonzero(
            np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))}  # fmt: skip
        assert 0 < len(changed) <= touched + 1
        assert max(changed) <= touched + 1  # the header's page, then those of rows 0 to 9
