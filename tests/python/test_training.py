"""Optimizer steps against NumPy, and against torch.optim on the same ids."""

from __future__ import annotations

import json
import threading
from fractions import Fraction

import embermap as em
import numpy as np
import pytest

ROWS, DIM = 60, 7


class Reference:
    """The formulas, in float64, on a dense table; only rows of the batch move."""

    def __init__(self, weight, optimizer):
        self.weight = weight.astype(np.float64)
        self.optimizer = optimizer
        start = getattr(optimizer, "initial_accumulator_value", 0.0)
        self.state = np.full_like(self.weight, start)
        self.step = 0

    def update(self, ids, grads):
        self.step += 1
        o = self.optimizer
        summed = np.zeros_like(self.weight)
        np.add.at(summed, ids.reshape(-1), grads.reshape(-1, DIM).astype(np.float64))
        rows = np.unique(ids)
        w = self.weight[rows]
        g = summed[rows] + o.weight_decay * w
        if isinstance(o, em.optim.SGD):
            if o.momentum:
                self.state[rows] = o.momentum * self.state[rows] + g
                m = self.state[rows]
                g = g + o.momentum * m if o.nesterov else m
            self.weight[rows] = w - o.lr * g
        else:
            self.state[rows] += g * g
            lr = o.lr / (1 + (self.step - 1) * o.lr_decay)
            self.weight[rows] = w - lr * g / (np.sqrt(self.state[rows]) + o.eps)


OPTIMIZERS = [
    em.optim.SGD(0.1),
    em.optim.SGD(0.1, weight_decay=0.01),
    em.optim.SGD(0.1, momentum=0.9),
    em.optim.SGD(0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    em.optim.Adagrad(0.1),
    em.optim.Adagrad(0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.3, eps=1e-6),
]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 4e-3, "bfloat16": 4e-2}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_steps_follow_the_formulas(store, float_dtype, optimizer):
    table = store.create("t", rows=ROWS, dim=DIM, dtype=float_dtype, optimizer=optimizer)
    rng = np.random.default_rng(1)
    table[:] = rng.normal(size=(ROWS, DIM)).astype(float_dtype)
    reference = Reference(table[:], optimizer)
    for step in range(6):
        ids = rng.integers(0, ROWS // 2, (4, 9))
        grads = rng.normal(size=(4, 9, DIM)).astype(float_dtype)
        table.update(ids, grads)
        reference.update(ids, grads)
        assert table.step == step + 1
    scale = TOLERANCE[float_dtype.name]
    np.testing.assert_allclose(
        table[:].astype(np.float64), reference.weight, rtol=scale, atol=3 * scale
    )


def test_gradients_of_half_precision_rows_may_be_float32(store):
    for dtype in ("float16", "bfloat16"):
        table = store.create(dtype, rows=4, dim=2, dtype=dtype, optimizer=em.optim.SGD(1.0))
        table.update([1, 1], np.array([[1, 2], [3, 4]], np.float32))
        assert table[1].astype(np.float32).tolist() == [-4, -6]
        with pytest.raises(TypeError, match=f"float64.*{dtype} or float32"):
            table.update([1], np.zeros((1, 2)))
    table = store.create("plain", rows=4, dim=2, optimizer=em.optim.SGD(1.0))
    with pytest.raises(TypeError, match="float16"):
        table.update([1], np.zeros((1, 2), np.float16))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_rows_outside_of_the_batch_keep_every_bit(store, optimizer):
    table = store.create(
        "t", rows=2_000, dim=16, optimizer=optimizer, init=em.init.Normal(), seed=9
    )
    fields = list(table.fields)
    before = {field: table.read(10, field=field) for field in fields}
    store.commit()
    rng = np.random.default_rng(0)
    for _ in range(5):
        table.update(range(10), rng.normal(size=(10, 16)).astype(np.float32))
    for field in fields:
        assert table.read(10, field=field).tobytes() == before[field].tobytes()
    assert table.stats()["dirty_pages"] == 1


def test_an_update_that_is_refused_changes_nothing(store):
    table = store.create("t", rows=10, dim=2, optimizer=em.optim.Adagrad())
    untrained = store.create("u", rows=10, dim=2)
    ones = np.ones((2, 2), np.float32)
    for call, error in (
        (lambda: table.update([1, 10], ones), em.RowIdError),
        (lambda: table.update([1, -1], ones), em.RowIdError),
        (lambda: table.update([1], ones), ValueError),
        (lambda: table.update([1.0, 2.0], ones), TypeError),
        (lambda: table.update([1, 2], ones.astype(np.float64)), TypeError),
        (lambda: table.update([1, 2], ones, lr=-1), ValueError),
        (lambda: table.update([1, 2], ones, lr=-1e-300), ValueError),
        (lambda: table.update([1, 2], ones, lr=np.float32("nan")), ValueError),
        (lambda: table.update([1, 2], ones, lr=float("inf")), ValueError),
        (lambda: table.update([1, 2], ones, lr=10**400), ValueError),
        (lambda: table.update([1, 2], ones, lr="fast"), TypeError),
        (lambda: table.update([1, 2], ones, lr=True), TypeError),
        (lambda: table.update([1, 2], ones, lr=np.bool_(True)), TypeError),
        (lambda: table.update([1, 2], ones, lr=1j), TypeError),
        (lambda: table.update([1, 2], ones, lr=np.complex64(1)), TypeError),
        (lambda: table.update([1, 2], ones, lr=[0.1]), TypeError),
        (lambda: table.update([1, 2], ones, lr=np.array([0.1, 0.2])), TypeError),
        (lambda: table.update([1, 10], ones, lr=0.5), em.RowIdError),
        (lambda: untrained.update([1, 2], ones), ValueError),
        (lambda: untrained.update([1, 2], ones, lr=0.1), ValueError),
    ):
        with pytest.raises(error):
            call()
    assert (table[:] == 0).all()
    assert (table.read(field="sum") == 0).all()
    assert table.step == 0
    assert table.optimizer == em.optim.Adagrad()


def test_an_empty_update_is_no_step(store):
    table = store.create("t", rows=10, dim=2, optimizer=em.optim.Adagrad())
    number = store.commit()
    table.update([], np.empty((0, 2), np.float32))
    table.update([], [], lr=0.5)
    assert table.step == 0
    assert store.commit() == number


def test_a_learning_rate_for_one_step(store):
    table = store.create("t", rows=4, dim=1, optimizer=em.optim.SGD(1.0, momentum=0.5))
    table.update([0], [[1.0]], lr=0.25)
    assert table.optimizer == em.optim.SGD(1.0, momentum=0.5)
    assert table[0].tolist() == [-0.25]
    table.update([0], [[1.0]])
    assert table[0].tolist() == [-0.25 - 1.5]
    table.update([0], [[1.0]], lr=0)  # moves the momentum alone
    assert table[0].tolist() == [-0.25 - 1.5]
    assert table.read(0, 1, field="momentum_buffer").tolist() == [[1.75]]
    assert table.step == 3
    assert table.optimizer == em.optim.SGD(1.0, momentum=0.5)


def test_a_learning_rate_for_one_step_decays_like_the_optimizers_own(store):
    make = {"rows": 3, "dim": 2, "init": em.init.Normal(), "seed": 1}
    one = store.create("one", optimizer=em.optim.Adagrad(0.5, lr_decay=0.3), **make)
    two = store.create("two", optimizer=em.optim.Adagrad(0.125, lr_decay=0.3), **make)
    for _ in range(3):
        one.update([0, 2], np.ones((2, 2), np.float32), lr=0.125)
        two.update([0, 2], np.ones((2, 2), np.float32))
    assert one[:].tobytes() == two[:].tobytes()
    assert one.optimizer.lr == 0.5


def test_kinds_of_learning_rates(store):
    torch = pytest.importorskip("torch")
    table = store.create("t", rows=4, dim=1, optimizer=em.optim.SGD(1.0))
    kinds = (
        0.5,
        np.float64(0.5),
        np.float16(0.5),
        np.array(0.5),
        np.array([[0.5]], np.float32),
        Fraction(1, 2),
        torch.tensor(0.5),
        torch.tensor([0.5], dtype=torch.float64, requires_grad=True),
    )
    for lr in kinds:
        table.update([0], [[1.0]], lr=lr)
    assert table[0].tolist() == [-0.5 * len(kinds)]
    table.update([1], [[1.0]], lr=np.int8(2))
    assert table[1].tolist() == [-2]
    with pytest.raises(TypeError, match="lr must be a number"):
        table.update([0], [[1.0]], lr=torch.ones(2))


def test_a_learning_rate_for_one_step_is_never_seen_by_others(path):
    """Commits and steps beside such steps know the optimizer's own only."""
    own, other = em.optim.SGD(1.0), em.optim.SGD(2.0)
    grads = np.ones((100, 1), np.float32)
    recorded = set()
    steps = [0, 0, 0]
    failed = []
    with em.open(path, threads=1) as store:
        table = store.create("t", rows=100, dim=1, optimizer=own)
        ended = threading.Event()

        def update(number):
            try:
                while not ended.is_set():
                    table.update(range(100), grads, lr=0.25)
                    steps[number] += 1
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=update, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                store.commit()
                manifest = json.loads((path / "embermap.json").read_text())
                recorded.add(manifest["tables"]["t"]["optimizer"]["lr"])
                recorded.add(table.optimizer.lr)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert not failed
        assert recorded == {own.lr}
        assert table.optimizer == own
        table.optimizer = other  # a change that is meant to stay
        table.update(range(100), grads, lr=0.25)
    with em.open(path, mode="r") as store:
        assert store["t"].optimizer == other
        assert store["t"].step == sum(steps) + 1
        assert (store["t"][:] == -0.25 * (sum(steps) + 1)).all()


def test_hyperparameters_can_be_changed_and_are_kept(path):
    with em.open(path) as store:
        table = store.create("t", rows=4, dim=1, optimizer=em.optim.SGD(1.0, momentum=0.5))
        table.optimizer = em.optim.SGD(0.25, momentum=0.75)
        table.update([0], [[1.0]])
        assert table[0].tolist() == [-0.25]
        for other in (None, em.optim.Adagrad(), em.optim.SGD(0.1)):
            with pytest.raises(ValueError):  # noqa: PT011
                table.optimizer = other
        with pytest.raises(TypeError, match="sgd"):
            table.optimizer = "sgd"
    with em.open(path) as store:
        table = store["t"]
        assert table.optimizer == em.optim.SGD(0.25, momentum=0.75)
        assert table.step == 1
        table.update([0], [[1.0]])
        assert table[0].tolist() == [-0.25 - 0.25 * 1.75]


@pytest.mark.parametrize("memory", ["48KiB", "16MiB"])
def test_training_goes_on_after_reopening_as_if_never_closed(path, memory):
    """The budget holds a fraction of the table; each session is of a few steps."""
    optimizer = em.optim.Adagrad(0.1, lr_decay=0.05)
    rng = np.random.default_rng(3)
    batches = [
        (rng.integers(0, 500, 300), rng.normal(size=(300, 33)).astype(np.float32)) for _ in range(6)
    ]
    make = {"rows": 500, "dim": 33, "optimizer": optimizer, "init": em.init.Normal(), "seed": 8}
    with em.open(path.with_name("whole"), memory="16MiB") as store:
        table = store.create("t", **make)
        for ids, grads in batches:
            table.update(ids, grads)
        whole, sums = table[:], table.read(field="sum")
    with em.open(path, memory=memory) as store:
        store.create("t", **make)
    for at in range(0, 6, 2):
        with em.open(path, memory=memory) as store:
            for ids, grads in batches[at : at + 2]:
                store["t"].update(ids, grads)
    with em.open(path, mode="r", memory=memory) as store:
        assert store["t"].step == 6
        assert np.array_equal(store["t"][:], whole)
        assert np.array_equal(store["t"].read(field="sum"), sums)
    stored = np.load(path / "t.npy", mmap_mode="r")
    assert np.array_equal(stored["weight"], whole)
    assert np.array_equal(stored["sum"], sums)


def test_a_step_costs_what_the_batch_costs(path):
    def pages_touched(rows):
        with em.open(path / str(rows), memory="8MiB") as store:
            table = store.create("t", rows=rows, dim=64, optimizer=em.optim.Adagrad())
            ids = np.random.default_rng(0).integers(0, 1_000_000, 1_024)
            table.update(ids, np.ones((1_024, 64), np.float32))
            stats = table.stats()
            return stats["misses"], stats["pages_generated"], stats["hits"]

    path.mkdir()
    assert pages_touched(1_000_000) == pages_touched(10_000_000)


@pytest.mark.parametrize(
    ("ours", "kind", "options"),
    [
        (em.optim.SGD(0.1), "SGD", {"lr": 0.1}),
        (em.optim.Adagrad(0.1), "Adagrad", {"lr": 0.1}),
        (
            em.optim.Adagrad(0.1, lr_decay=0.2, initial_accumulator_value=0.1, eps=1e-8),
            "Adagrad",
            {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.1, "eps": 1e-8},
        ),
    ],
    ids=str,
)
def test_equal_to_sparse_optimizers_of_torch(store, ours, kind, options):
    torch = pytest.importorskip("torch")
    table = store.create("t", rows=ROWS, dim=DIM, optimizer=ours, init=em.init.Normal(), seed=2)
    theirs = torch.nn.Embedding(ROWS, DIM, sparse=True)
    theirs.weight.data.copy_(torch.from_numpy(table[:]))
    optimizer = getattr(torch.optim, kind)(theirs.parameters(), **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        ids = torch.randint(0, ROWS // 3, (40,), generator=generator)
        grads = torch.randn(40, DIM, generator=generator)
        optimizer.zero_grad()
        theirs(ids).backward(grads)
        optimizer.step()
        table.update(ids, grads)
    torch.testing.assert_close(torch.from_numpy(table[:]), theirs.weight.data, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "kind", "options"),
    [
        (em.optim.SGD(0.1, momentum=0.9), "SGD", {"lr": 0.1, "momentum": 0.9}),
        (
            em.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            "SGD",
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ),
        (
            em.optim.Adagrad(0.1, weight_decay=0.1),
            "Adagrad",
            {"lr": 0.1, "weight_decay": 0.1},
        ),
    ],
    ids=str,
)
def test_equal_to_dense_optimizers_of_torch_on_rows_in_every_batch(store, ours, kind, options):
    torch = pytest.importorskip("torch")
    table = store.create("t", rows=ROWS, dim=DIM, optimizer=ours, init=em.init.Normal(), seed=2)
    theirs = torch.nn.Embedding(ROWS, DIM)
    theirs.weight.data.copy_(torch.from_numpy(table[:]))
    optimizer = getattr(torch.optim, kind)(theirs.parameters(), **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        more = torch.randint(0, ROWS, (40,), generator=generator)
        ids = torch.cat([torch.arange(ROWS), more])
        grads = torch.randn(len(ids), DIM, generator=generator)
        optimizer.zero_grad()
        theirs(ids).backward(grads)
        optimizer.step()
        table.update(ids, grads)
    torch.testing.assert_close(torch.from_numpy(table[:]), theirs.weight.data, rtol=1e-6, atol=2e-6)
