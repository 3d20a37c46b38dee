"""Every width of row, page size, dtype and optimizer against a NumPy model, in few pages."""

from __future__ import annotations

import itertools
import re

import embermap as em
import numpy as np
import pytest

FLOATS = ("float32", "float16", "bfloat16", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")
DIMS = (1, 2, 3, 7, 31, 64, 100, 127, 128, 129, 513, 1000, 1024, 4095, 4096, 8191, 16_384)
PAGES = tuple(4096 << k for k in range(10))
OPTIMIZERS = {
    "none": None,
    "sgd": em.optim.SGD(lr=0.5),
    "momentum": em.optim.SGD(lr=0.5, momentum=0.5),
    "adagrad": em.optim.Adagrad(lr=0.5, initial_accumulator_value=0.25),
}
KINDS = [(d, o) for d in FLOATS for o in OPTIMIZERS] + [(d, "none") for d in INTEGERS]
# Every width with every page size, dtypes and optimizers in turn.
CASES = [
    (dim, page, *KINDS[(7 * i + 3 * j) % len(KINDS)])
    for (i, dim), (j, page) in itertools.product(enumerate(DIMS), enumerate(PAGES))
]


def numpy_dtype(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def open_with_frames(path, frames, **options):
    """A store and its table "t", with memory for about `frames` pages and not for two more."""
    store = em.open(path, memory="1GiB")
    geometry = store.create("t", **options).stats()["page_bytes"]
    store.close()
    with pytest.raises(em.BudgetError) as caught:
        em.open(path, memory=1)
    least = int(re.search(r"take (\d+) bytes", str(caught.value)).group(1))
    memory = least + (frames - 1) * (geometry + 512)
    memory += memory // 5  # an eighth is for the redo log, a thirty-second for pages in flight
    store = em.open(path, memory=memory)
    return store, store["t"], memory


class Model:
    """What the rows that were touched must hold; initial rows come from a table of other pages."""

    def __init__(self, plain: em.Table, optimizer: em.optim.Optimizer | None) -> None:
        self.plain = plain
        self.optimizer = optimizer
        self.rows: dict[int, dict[str, np.ndarray]] = {}

    def row(self, i: int) -> dict[str, np.ndarray]:
        if i not in self.rows:
            fields = self.plain.fields
            self.rows[i] = {f: self.plain.gather(i, field=f) for f in fields}
        return self.rows[i]

    def take(self, ids, field="weight"):
        return np.stack([self.row(int(i))[field] for i in ids])

    def put(self, ids, rows, field="weight"):
        for i, row in zip(ids, rows, strict=True):
            self.row(int(i))[field] = row.copy()

    def summed(self, ids, rows):
        wide = rows.dtype if rows.dtype.kind in "iu" or rows.dtype.itemsize == 8 else np.float32
        sums: dict[int, np.ndarray] = {}
        for i, row in zip(ids, rows.astype(wide), strict=True):
            sums[int(i)] = sums[int(i)] + row if int(i) in sums else row
        return sums

    def add(self, ids, rows):
        for i, total in self.summed(ids, rows).items():
            weight = self.row(i)["weight"]
            self.row(i)["weight"] = (weight.astype(total.dtype) + total).astype(weight.dtype)

    def update(self, ids, grads):
        for i, grad in self.summed(ids, grads).items():
            row = self.row(i)
            weight, lr = row["weight"], grad.dtype.type(self.optimizer.lr)
            step = grad
            if isinstance(self.optimizer, em.optim.Adagrad):
                row["sum"] = row["sum"] + grad * grad
                step = grad / (np.sqrt(row["sum"]) + grad.dtype.type(1e-10))
            elif self.optimizer.momentum:
                step = row["momentum_buffer"] * grad.dtype.type(0.5) + grad
                row["momentum_buffer"] = step
            row["weight"] = (weight.astype(grad.dtype) - lr * step).astype(weight.dtype)


@pytest.mark.parametrize(("dim", "page", "dtype_name", "kind"), CASES)
def test_every_geometry_equals_a_model(tmp_path, dim, page, dtype_name, kind):
    dtype, optimizer = numpy_dtype(dtype_name), OPTIMIZERS[kind]
    rng = np.random.default_rng(dim * 31 + page)
    floating = dtype_name in FLOATS
    init = (
        em.init.Uniform(-2, 2) if floating else em.init.Uniform(-9 if dtype.kind == "i" else 0, 9)
    )
    options = {"dim": dim, "dtype": dtype_name, "optimizer": optimizer, "init": init, "seed": 5}
    # Nine pages and a bit, and memory for about three of them.
    fields = 1 + (kind in ("momentum", "adagrad"))
    rows = max(9, 9 * page // (dim * dtype.itemsize * fields)) + 3
    store, table, memory = open_with_frames(
        tmp_path / "s", 3, rows=rows, page_bytes=page, **options
    )
    plain = em.open(tmp_path / "plain").create("t", rows=rows, **options)
    model = Model(plain, optimizer)
    # Rows around pages' borders, and any.
    per_page = max(1, page // (dim * dtype.itemsize * fields))
    borders = np.array(
        [
            0,
            1,
            rows - 1,
            rows - 2,
            *(k * per_page for k in range(1, 9)),
            *(k * per_page - 1 for k in range(1, 9)),
        ]
    )
    pool = np.unique(np.concatenate([borders, rng.integers(0, rows, 12)]).clip(0, rows - 1))

    for turn in range(6):
        ids = rng.choice(pool, 12)
        values = rng.integers(0, 4, (12, dim)).astype(dtype)
        if turn == 0:
            assert np.array_equal(table.gather(ids), model.take(ids))
        elif turn == 1:
            table.scatter(ids, values)
            model.put(ids, values)
        elif turn == 2:
            table.add(ids, values)
            model.add(ids, values)
        elif turn == 3 and optimizer is not None:
            table.update(ids, values)
            model.update(ids, values)
        elif turn == 4:
            start = int(rng.integers(0, rows - 5))
            table.write(start, values[:5])
            model.put(range(start, start + 5), values[:5])
        else:
            store.commit()
        rtol = {2: 1e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize] if floating else 0
        got, wanted = table.gather(ids).astype("f8"), model.take(ids).astype("f8")
        assert np.allclose(got, wanted, rtol=rtol, atol=rtol)
    assert table.stats()["evictions"] > 0
    assert table.verify()["ok"]

    touched = np.array(sorted(model.rows))
    before = {field: table.gather(touched, field=field) for field in table.fields}
    for field, held in before.items():
        assert np.allclose(
            held.astype("f8"), model.take(touched, field).astype("f8"), rtol=2e-2, atol=2e-2
        )
        starts = touched[:: max(1, len(touched) // 5)]
        for i, start in zip(starts, range(0, len(touched), max(1, len(touched) // 5)), strict=True):
            assert np.array_equal(table.read(i, i + 1, field=field)[0], held[start])
    table.materialize() if rows * dim < 300_000 else None
    store.close()
    with em.open(tmp_path / "s", mode="r", memory=memory) as again:
        for field, held in before.items():
            assert np.array_equal(again["t"].gather(touched, field=field), held)
        assert again["t"].verify()["ok"]
        if rows * dim < 300_000:  # the file alone holds them
            file = np.load(again["t"].path, mmap_mode="r")
            for field, held in before.items():
                shown = file[field] if file.dtype.names else file
                assert np.array_equal(shown[touched].view(held.dtype).reshape(held.shape), held)


GEOMETRIES = ((1, 4096), (3, 8192), (129, 4096), (2000, 4096), (100, 65_536))


@pytest.mark.parametrize(
    ("dtype_name", "kind", "dim", "page"),
    [
        (FLOATS[(i + j) % 4], kind, *geometry)
        for i, kind in enumerate(("none", "adagrad", "momentum"))
        for j, geometry in enumerate(GEOMETRIES)
    ],
)
def test_resize_up_and_down_keeps_rows_and_state(tmp_path, dtype_name, kind, dim, page):
    rng = np.random.default_rng(dim)
    dtype = numpy_dtype(dtype_name)
    most = 12 * max(1, page // (dim * dtype.itemsize)) + 7
    options = {
        "dim": dim,
        "dtype": dtype_name,
        "optimizer": OPTIMIZERS[kind],
        "init": em.init.Normal(),
        "seed": 3,
    }
    store, table, _ = open_with_frames(tmp_path / "s", 3, rows=most, page_bytes=page, **options)
    plain = em.open(tmp_path / "plain").create("t", rows=2 * most, **options)
    wanted = {field: plain.read(field=field) for field in plain.fields}
    rows = most
    for _ in range(8):
        ids = np.unique(rng.integers(0, max(rows, 1), 20)) if rows else np.empty(0, np.int64)
        for field in wanted:
            values = rng.integers(1, 9, (len(ids), dim)).astype(wanted[field].dtype)
            table.scatter(ids, values, field=field)
            wanted[field][ids] = values
        new = int(
            rng.choice([rows, rows - 1, rows // 2, rows + 1, most, 0, int(rng.integers(0, most))])
        )
        new = min(max(new, 0), most)
        table.resize(new)
        for field in wanted:
            if new < rows:
                wanted[field][new:] = plain.read(new, field=field)  # forgotten for good
            assert np.array_equal(table.read(field=field), wanted[field][:new])
            some = rng.integers(0, new, 15) if new else np.empty(0, np.int64)
            assert np.array_equal(table.gather(some, field=field), wanted[field][some])
        rows = new
        assert table.verify()["ok"]
        assert table.path.stat().st_size == np.load(table.path, mmap_mode="r").nbytes + 4096
    store.close()
    with em.open(tmp_path / "s", mode="r") as again:
        for field in wanted:
            assert np.array_equal(again["t"].read(field=field), wanted[field][:rows])
