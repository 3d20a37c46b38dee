"""Modules over tables beside those of torch.nn: options, bags, collections, compiled graphs."""

from __future__ import annotations

import copy
import pickle

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROWS, DIM = 40, 5

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def make(path, device):
    """make(name, dtype=...): a table with rows of small numbers; on a GPU where that is asked."""
    opened = em.open(path, memory="16MiB", threads=2, device=None if device == "cpu" else device)

    def table(name="t", dtype="float32", rows=ROWS, **options):
        options.setdefault("optimizer", em.optim.SGD(0.5))
        made = opened.create(name, rows=rows, dim=DIM, dtype=dtype, **options)
        values = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(3))
        made.scatter(torch.arange(rows), values.to(getattr(torch, dtype)))
        return made

    yield table
    opened.abandon()


def whole(table):
    return table.gather(torch.arange(table.rows))


def like(table, device="cpu", **options):
    """nn.Embedding with the rows of a table."""
    theirs = torch.nn.Embedding(
        table.rows, DIM, dtype=getattr(torch, table.dtype.name), device=device, **options
    )
    theirs.weight.data.copy_(whole(table))
    return theirs


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


# --- Embedding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 3, -1, None])
@pytest.mark.parametrize("frequency", [False, True])
def test_options_of_an_embedding(make, device, padding, frequency):
    table = make()
    ours = em.torch.Embedding(table, padding_idx=padding, scale_grad_by_freq=frequency)
    theirs = like(table, device, padding_idx=padding, scale_grad_by_freq=frequency)
    assert ours.padding_idx == theirs.padding_idx
    ids = torch.tensor([[3, 0, ROWS - 1, 3], [3, 7, 0, 1]], device=device)
    factor = torch.randn(2, 4, DIM, device=device)
    results = []
    for module in (ours, theirs):
        rows = module(ids)
        (rows * factor).sum().backward()
        results.append(rows.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(ours.weight.grad.to_dense(), dense(theirs.weight.grad))


def test_a_row_of_padding_is_left_alone(make, device):
    table = make(optimizer=em.optim.SGD(0.5, momentum=0.9, weight_decay=0.1))
    embedding = em.torch.Embedding(table, padding_idx=2)
    optimizer = em.torch.Optimizer(embedding)
    before = whole(table)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([2, 3, 2], device=device)).sum().backward()
        optimizer.step()
    changed = (whole(table) != before).any(1).nonzero().reshape(-1).tolist()
    assert changed == [3]
    optimizer.zero_grad()
    embedding(torch.tensor([2, 2], device=device)).sum().backward()
    optimizer.step()  # of no row
    assert table.step == 3


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_max_norm(make, device, norm, kind):
    table = make(dtype=kind)
    ours = em.torch.Embedding(table, max_norm=1.5, norm_type=norm)
    # The largest element is not the norm that torch 2.11 takes for "inf" on a GPU.
    place = "cpu" if norm == float("inf") else device
    theirs = like(table, place, max_norm=1.5, norm_type=norm)
    before = whole(table)
    ids = torch.tensor([1, 2, 2, 30, 7], device=device)
    torch.testing.assert_close(ours(ids).detach().cpu(), theirs(ids.to(place)).detach().cpu())
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu())
    assert (whole(table) != before).any()
    others = [row for row in range(ROWS) if row not in ids.tolist()]
    assert whole(table)[others].equal(before[others])
    after = whole(table)
    with torch.no_grad():
        ours(torch.tensor([], dtype=torch.int64, device=device))
        ours(ids)
    torch.testing.assert_close(whole(table), after, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"padding_idx": ROWS}, ValueError),
        ({"padding_idx": -ROWS - 1}, ValueError),
        ({"padding_idx": 1.5}, TypeError),
        ({"padding_idx": True}, TypeError),
        ({"max_norm": 0}, ValueError),
        ({"max_norm": float("nan")}, ValueError),
        ({"max_norm": "1"}, TypeError),
        ({"norm_type": "2"}, TypeError),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_options_that_cannot_be(store, options, error, kind):
    table = store.create("t", rows=ROWS, dim=DIM)
    with pytest.raises(error):
        getattr(em.torch, kind)(table, **options)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "numpy"])
def test_from_pretrained(store, kind, name):
    rows = torch.arange(12.0).reshape(4, 3)
    rows = rows.numpy() if name == "numpy" else rows.to(getattr(torch, name)).requires_grad_()
    made = getattr(em.torch, kind).from_pretrained(rows, store=store, name="words")
    assert (made.num_embeddings, made.embedding_dim) == (4, 3)
    assert store["words"] is not None
    assert made.table.optimizer is None
    assert not made.weight.requires_grad
    ids = torch.tensor([[1, 1], [3, 3]])
    found = made(ids)
    assert not found.requires_grad
    assert found.reshape(-1)[0] == 3
    trained = getattr(em.torch, kind).from_pretrained(
        rows, False, store=store, name="trained", optimizer=em.optim.SGD(1.0)
    )
    assert trained.weight.requires_grad
    trained(ids).sum().backward()
    em.torch.Optimizer(trained).step()
    assert trained.weight[0].tolist() == [0, 1, 2]
    assert trained.weight[1][0] == (1 if kind == "Embedding" else 2)
    with pytest.raises(FileExistsError):
        getattr(em.torch, kind).from_pretrained(rows, store=store, name="words")
    with pytest.raises(TypeError, match="store"):
        getattr(em.torch, kind).from_pretrained(rows, store="store", name="x")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_weight_reads_rows(make, device, kind):
    table = make(dtype=kind)
    weight = em.torch.Embedding(table).weight
    rows = whole(table)
    assert weight.shape == weight.size() == (ROWS, DIM)
    assert weight.size(0) == len(weight) == ROWS
    assert (weight.ndim, weight.dim(), weight.numel()) == (2, 2, ROWS * DIM)
    assert weight.dtype == getattr(torch, kind)
    assert weight.device == torch.device("cpu")
    for key in (5, -1, slice(3, 7), slice(None), slice(None, None, -2), slice(5, 2), Ellipsis):
        expected = rows.flip(0)[::2] if key == slice(None, None, -2) else rows[key]
        assert weight[key].equal(expected), key
    assert weight[3:7, 1].equal(rows[3:7, 1])
    assert weight[5, 2:].equal(rows[5, 2:])
    for ids in ([3, 1], np.array([3, 1]), torch.tensor([3, 1])):
        assert weight[ids].equal(rows[[3, 1]])
    assert weight[torch.tensor([3, 1], device=device)].device.type == device
    mask = torch.arange(ROWS) % 3 == 0
    assert weight[mask].equal(rows[mask])
    assert torch.stack(list(weight)).equal(rows)
    assert weight.data[2].equal(weight.detach()[2])
    for key in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError, match=str(key)):
            weight[key]
    if kind == "float32":
        assert np.array_equal(np.asarray(weight), rows.numpy())
    x = torch.zeros(1, DIM, dtype=getattr(torch, kind))
    for use in (
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.nn.init.normal_(weight),
        lambda: torch.sum(weight),
    ):
        with pytest.raises(TypeError, match="whole|not a tensor"):
            use()
    with pytest.raises(RuntimeError, match="neither"):
        bool(weight)


def test_the_weight_shows_gradients_and_whether_it_is_frozen(make, device):
    table = make()
    embedding = em.torch.Embedding(table)
    assert embedding.weight.grad is None
    assert embedding.weight.requires_grad
    theirs = like(table, device, sparse=True)
    for module in (embedding, theirs):
        module(torch.tensor([1, 1, 3], device=device)).square().sum().backward()
        module(torch.tensor([3], device=device)).sum().backward()
    ours = embedding.weight.grad
    assert ours.is_sparse
    assert ours.shape == (ROWS, DIM)
    torch.testing.assert_close(ours.to_dense(), theirs.weight.grad.to_dense())
    embedding.zero_grad()
    assert embedding.weight.grad is None
    embedding.requires_grad_(False)
    assert not embedding.weight.requires_grad


class ViaTable(torch.autograd.Function):
    """Rows as a function of the whole weight, through a table: for checks of gradients."""

    @staticmethod
    def forward(ctx, weight, call, module):
        ctx.call, ctx.module = call, module
        ctx.save_for_backward(weight)
        module.table.scatter(torch.arange(module.table.rows), weight)
        return call().detach()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        module = ctx.module
        module.table.scatter(torch.arange(module.table.rows), weight)
        module.zero_grad()
        with torch.enable_grad():
            ctx.call().backward(grad)
        found = module.weight.grad
        return (torch.zeros_like(weight) if found is None else found.to_dense()), None, None


@pytest.mark.parametrize("mode", [None, "sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_gradcheck(store, mode, padding):
    table = store.create("t", rows=6, dim=3, dtype="float64")
    torch.manual_seed(5)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([1, 2, 2, 5, 1])
    offsets = torch.tensor([0, 2, 2])
    if mode is None:
        module = em.torch.Embedding(table, padding_idx=padding)
        if padding is not None:
            ids = ids[ids != padding]  # torch gives none for padding, where there is one
        assert torch.autograd.gradcheck(lambda a: module(ids), module.anchor)
        call = lambda: module(ids)  # noqa: E731
    else:
        module = em.torch.EmbeddingBag(table, mode=mode, padding_idx=padding)
        call = lambda: module(ids, offsets)  # noqa: E731
    assert torch.autograd.gradcheck(lambda w: ViaTable.apply(w, call, module), weight)
    if mode == "sum":
        weights = torch.randn(5, dtype=torch.float64, requires_grad=True)
        table.scatter(torch.arange(6), weight)
        assert torch.autograd.gradcheck(lambda w: module(ids, offsets, w), weights)


def test_autocast_leaves_rows_as_they_are(make, device):
    table = make()
    embedding, bag = em.torch.Embedding(table), em.torch.EmbeddingBag(table, mode="sum")
    head = torch.nn.Linear(DIM, 3, device=device)
    ids = torch.tensor([[1, 2]], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        rows = embedding(ids)
        assert rows.dtype == bag(ids).dtype == like(table, device)(ids).dtype == torch.float32
        loss = head(rows).float().square().sum() + head(bag(ids)).float().sum()
    loss.backward()
    optimizer = em.torch.Optimizer([embedding, bag])
    before = whole(table)
    optimizer.step()
    assert (whole(table) != before).any(1).nonzero().reshape(-1).tolist() == [1, 2]


def test_several_modules_over_one_table_make_one_step(make, device):
    table = make(optimizer=em.optim.Adagrad(0.5))
    first, second = em.torch.Embedding(table), em.torch.EmbeddingBag(table, mode="sum")
    theirs = like(table, device)
    optimizer = em.torch.Optimizer([first, second])
    others = torch.optim.Adagrad(theirs.parameters(), lr=0.5)
    ids = torch.tensor([[1, 2], [2, 3]], device=device)
    (first(ids).square().sum() + 3 * second(ids).sum()).backward()
    (theirs(ids).square().sum() + 3 * theirs(ids).sum()).backward()
    optimizer.step()
    others.step()
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu())
    assert table.step == 1
    assert len(optimizer.param_groups) == 1


# --- EmbeddingBag ---------------------------------------------------------------------------------

BAGS = [
    ([1, 2, 2, 5, 9, 0], [0, 2, 5], False),
    ([1, 2, 2, 5, 9, 0], [0, 0, 4, 6], False),  # empty ones, at the beginning and the end
    ([1, 2, 2, 5, 9, 0], [0, 2, 5, 6], True),
    ([], [0, 0], False),
    ([], [0], True),
    ([], [], False),
    ([2, 2, 2], [0, 1], False),
    ([[1, 2, 2], [5, 9, 0]], None, False),
    ([[2, 2, 2], [2, 9, 0]], None, False),
    ([[4]], None, False),
    ([[1, 2, 2], [5, 9, 0]], None, True),
]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize(("ids", "offsets", "last"), BAGS, ids=str)
def test_bags(make, device, mode, padding, ids, offsets, last):
    table = make()
    ours = em.torch.EmbeddingBag(table, mode=mode, padding_idx=padding, include_last_offset=last)
    theirs = torch.nn.EmbeddingBag(
        ROWS, DIM, mode=mode, padding_idx=padding, include_last_offset=last, device=device
    )
    theirs.weight.data.copy_(whole(table))
    ids = torch.tensor(ids, dtype=torch.int64, device=device)
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int64, device=device)
    found, expected = ours(ids, offsets), theirs(ids, offsets)
    assert found.requires_grad
    torch.testing.assert_close(found, expected)
    if found.numel() == 0:
        return
    factor = torch.randn(found.shape, device=device)
    (found * factor).sum().backward()
    (expected * factor).sum().backward()
    gradient = ours.weight.grad
    gradient = torch.zeros(ROWS, DIM) if gradient is None else gradient.to_dense().cpu()
    torch.testing.assert_close(gradient, theirs.weight.grad.cpu())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_ids_beyond_the_last_offset_are_in_no_bag(make, device, mode, padding):
    """In torch they are, or are not, by mode."""
    bag = em.torch.EmbeddingBag(make(), mode=mode, padding_idx=padding, include_last_offset=True)
    ids = torch.tensor([1, 2, 2, 5, 7, 0], device=device)
    offsets = torch.tensor([0, 2, 4], device=device)
    found = bag(ids, offsets)
    torch.testing.assert_close(found, bag(ids[:4], offsets))
    found.sum().backward()
    assert (bag.weight.grad.to_dense()[[7, 0]] == 0).all()


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_weights_of_samples_and_their_gradients(make, device, padding, kind):
    table = make(dtype=kind)
    ours = em.torch.EmbeddingBag(table, mode="sum", padding_idx=padding)
    half = kind == "bfloat16"
    # Not every torch weighs halves on a GPU; and what they should be is known in float64.
    place, exact = ("cpu", torch.float64) if half else (device, getattr(torch, kind))
    theirs = torch.nn.EmbeddingBag(
        ROWS, DIM, mode="sum", padding_idx=padding, device=place, dtype=exact
    )
    theirs.weight.data.copy_(whole(table))
    results = []
    for module, where, dtype in ((ours, device, getattr(torch, kind)), (theirs, place, exact)):
        ids = torch.tensor([1, 2, 2, 5], device=where)
        offsets = torch.tensor([0, 3], device=where)
        start = torch.tensor([0.5, 2.0, -1.0, 3.0], device=where, dtype=dtype)
        weights = start.clone().requires_grad_()
        output = module(ids, offsets, weights)
        output.square().sum().backward()
        grad = module.weight.grad
        square = module(ids.reshape(2, 2), None, start.reshape(2, 2))
        found = (output, weights.grad, grad.to_dense() if grad.is_sparse else grad, square)
        results.append([part.detach().cpu() for part in found])
    for one, other in zip(*results, strict=True):
        if half:  # sums of terms, each rounded to eight bits, that may cancel out
            assert (one.double() - other).abs().max() <= 0.03 * other.abs().max()
        else:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_frequencies_in_bags(make, device, mode):
    # Against nn.Embedding: nn.EmbeddingBag of torch 2.11 takes frequencies of other ids on a CPU.
    table = make()
    ours = em.torch.EmbeddingBag(table, mode=mode, scale_grad_by_freq=True)
    theirs = like(table, device, scale_grad_by_freq=True)
    ids = torch.tensor([[1, 2, 2], [2, 9, 1]], device=device)
    found, expected = ours(ids), getattr(theirs(ids), mode)(1)
    torch.testing.assert_close(found, expected)
    for bags in (found, expected):
        bags.square().sum().backward()
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad)


def test_max_norm_in_bags(make, device):
    table = make()
    ours = em.torch.EmbeddingBag(table, mode="sum", max_norm=1.0)
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", max_norm=1.0, device=device)
    theirs.weight.data.copy_(whole(table))
    ids = torch.tensor([[1, 2, 2], [2, 9, 1]], device=device)
    torch.testing.assert_close(ours(ids), theirs(ids))
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu())


@pytest.mark.parametrize("kind", ["int32", "uint8", "int64"])
def test_bags_of_other_integers(store, kind):
    table = store.create("t", rows=9, dim=2)
    table[:] = np.arange(18, dtype=np.float32).reshape(9, 2)
    bag = em.torch.EmbeddingBag(table, mode="sum")
    ids = torch.tensor([1, 2, 3], dtype=getattr(torch, kind))
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    assert bag(ids, offsets).tolist() == [[2, 3], [10, 12]]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda b: b(torch.tensor([1])), ValueError, "offsets"),
        (lambda b: b(torch.tensor([[1]]), torch.tensor([0])), ValueError, "None"),
        (lambda b: b(torch.tensor(1)), ValueError, "dimensions"),
        (lambda b: b(torch.zeros(1, 1, 1, dtype=torch.int64)), ValueError, "dimensions"),
        (lambda b: b(torch.tensor([1]), torch.tensor([[0]])), ValueError, "one dimension"),
        (lambda b: b(torch.tensor([1]), torch.tensor([0.0])), TypeError, "integers"),
        (lambda b: b(torch.tensor([1.0]), torch.tensor([0])), TypeError, "integers"),
        (lambda b: b([1], [0]), TypeError, "tensor"),
        (lambda b: b(torch.tensor([1]), torch.tensor([1])), RuntimeError, "offsets"),
        (lambda b: b(torch.tensor([1]), torch.tensor([0, 3])), RuntimeError, "offsets"),
        (lambda b: b(torch.tensor([[ROWS]])), IndexError, f"{ROWS} at position 0"),
        (
            lambda b: b(torch.tensor([1]), torch.tensor([0]), torch.ones(2)),
            ValueError,
            "per_sample_weights",
        ),
        (
            lambda b: b(torch.tensor([1]), torch.tensor([0]), torch.ones(1).double()),
            TypeError,
            "float64",
        ),
    ],
)
@pytest.mark.parametrize("padding", [None, 3])
def test_what_bags_refuse(store, call, error, text, padding):
    table = store.create("t", rows=ROWS, dim=DIM)
    bag = em.torch.EmbeddingBag(table, mode="sum", padding_idx=padding)
    with pytest.raises(error, match=text):
        call(bag)


def test_modes_that_cannot_be(store):
    table = store.create("t", rows=ROWS, dim=DIM)
    with pytest.raises(ValueError, match="'avg'"):
        em.torch.EmbeddingBag(table, mode="avg")
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        em.torch.EmbeddingBag(table, mode="max", scale_grad_by_freq=True)
    bag = em.torch.EmbeddingBag(table)
    with pytest.raises(NotImplementedError, match="'mean'"):
        bag(torch.tensor([[1]]), None, torch.ones(1, 1))
    assert "mode='mean'" in repr(bag)
    assert "padding_idx=3" in repr(em.torch.EmbeddingBag(table, padding_idx=3))


def test_a_training_loop_of_bags(make, device):
    table = make(optimizer=em.optim.Adagrad(0.3))
    ours = em.torch.EmbeddingBag(table, mode="mean", padding_idx=0)
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0, device=device)
    theirs.weight.data.copy_(whole(table))
    optimizer = em.torch.Optimizer(ours)
    others = torch.optim.Adagrad(theirs.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(2)
    for size in (8, 8, 8, 3, 0, 1):  # the last batches are partial ones
        ids = torch.randint(0, ROWS, (size, 4), generator=generator).to(device)
        for module, steps in ((ours, optimizer), (theirs, others)):
            steps.zero_grad()
            module(ids).square().sum().backward()
            steps.step()
    torch.testing.assert_close(whole(table), theirs.weight.data.cpu(), rtol=1e-5, atol=1e-6)


def test_copies_of_bags(make, device):
    table = make()
    bag = em.torch.EmbeddingBag(table, mode="max", padding_idx=1)
    ids = torch.tensor([[1, 2], [3, 4]], device=device)
    bag(ids).sum().backward()
    copied = copy.deepcopy(bag)
    assert copied.table is table
    assert copied.weight.grad is None
    assert copied(ids).equal(bag(ids))
    table._store.commit()
    again = pickle.loads(pickle.dumps(bag))
    assert again(ids.cpu()).equal(bag(ids).cpu())
    again.table._store.close()


# --- EmbeddingCollection --------------------------------------------------------------------------


def test_a_collection_looks_up_several_tables(make, device):
    items, users = make("items"), make("users", rows=20)
    item = em.torch.Embedding(items)
    bag = em.torch.EmbeddingBag(items, mode="sum")
    tables = em.torch.EmbeddingCollection({"item": item, "seen": bag, "user": users, "last": item})
    assert len(tables) == 4
    assert "user" in tables
    assert "nobody" not in tables
    assert tables["item"] is tables["last"]
    assert len(list(tables.parameters())) == 3
    ids = torch.tensor([1, 2], device=device)
    offsets = torch.tensor([0], device=device)
    weights = torch.tensor([1.0, 2.0], device=device)
    found = tables({"user": ids, "item": ids, "seen": (ids, offsets, weights), "last": ids[:1]})
    assert list(found) == ["user", "item", "seen", "last"]
    rows = whole(items).to(device)
    assert found["item"].equal(rows[ids])
    torch.testing.assert_close(found["seen"], rows[1:2] + 2 * rows[2:3])
    assert list(tables({"user": ids})) == ["user"]
    with pytest.raises(KeyError, match="nobody.*item, seen, user, last"):
        tables({"nobody": ids})
    optimizer = em.torch.Optimizer(tables)
    assert [group["table"] for group in optimizer.param_groups] == ["items", "users"]
    sum(rows.sum() for rows in found.values()).backward()
    optimizer.step()
    assert items.step == users.step == 1
    assert items[1].tolist() == pytest.approx((rows[1] - 0.5 * 3).tolist(), abs=1e-6)


def test_collections_of_other_things_are_refused(store):
    with pytest.raises(TypeError, match="'x'"):
        em.torch.EmbeddingCollection({"x": torch.nn.Embedding(2, 2)})
    with pytest.raises(TypeError, match="dict"):
        em.torch.EmbeddingCollection([store.create("t", rows=2, dim=2)])


def test_a_collection_reads_ahead_where_tables_do_not_fit(path):
    with em.open(path, memory="512KiB", threads=1) as store:
        tables = {
            name: store.create(name, rows=20_000, dim=16, init=em.init.Uniform()) for name in "ab"
        }
        collection = em.torch.EmbeddingCollection(tables)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            features = {n: torch.randint(20_000, (100,), generator=generator) for n in tables}
            found = collection(features)
            for name, ids in features.items():
                assert found[name].detach().equal(tables[name].gather(ids))
            collection.prefetch(features)
        for table in tables.values():
            assert table.stats()["evictions"] > 0


def test_workers_of_a_loader_prefetch(path):
    with em.open(path, memory="1MiB", threads=1) as store:
        table = store.create("t", rows=50_000, dim=16, init=em.init.Normal())
        embedding = em.torch.Embedding(table)
        prefetch = embedding.prefetcher()

        def collate(samples):
            ids = torch.tensor(samples)
            prefetch(ids)
            return ids

        loader = torch.utils.data.DataLoader(
            range(0, 50_000, 50),
            batch_size=64,
            num_workers=2,
            collate_fn=collate,
            multiprocessing_context="fork",
        )
        seen = 0
        for ids in loader:
            assert embedding(ids).shape == (len(ids), 16)
            seen += len(ids)
        assert seen == 1_000
        embedding.prefetch([1, 2, 3]).wait(10)


# --- torch.compile --------------------------------------------------------------------------------


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request):
    if request.param == "inductor":
        import shutil

        if not shutil.which("g++"):
            pytest.skip("inductor needs a compiler")
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def test_a_compiled_model_trains_as_one_that_is_not(make, device, backend):
    tables = [make("one"), make("two")]
    losses, optimizers = [], []
    for table in tables:
        embedding = em.torch.Embedding(table, padding_idx=4)
        bag = em.torch.EmbeddingBag(table, mode="sum", padding_idx=2)
        torch.manual_seed(1)
        head = torch.nn.Linear(DIM, 1, device=device)

        def loss(ids, offsets, weights, embedding=embedding, bag=bag, head=head):
            # Twice the same ids: both gradients count.
            rows = embedding(ids) + embedding(ids).tanh() + embedding(ids).tanh()
            return head(rows).square().sum() + head(bag(ids, offsets, weights)).sum()

        losses.append(loss)
        optimizers.append(em.torch.Optimizer([embedding, bag]))
    losses[1] = torch.compile(losses[1], backend=backend, fullgraph=True)
    for size in (6, 6, 9, 3):
        ids = torch.arange(size, device=device) % 5
        offsets = torch.tensor([0, 2], device=device)
        gradients = []
        for loss, optimizer in zip(losses, optimizers, strict=True):
            weights = torch.linspace(1, 2, size, device=device).requires_grad_()
            optimizer.zero_grad()
            loss(ids, offsets, weights).backward()
            optimizer.step()
            gradients.append(weights.grad)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole(tables[0]), whole(tables[1]), rtol=1e-4, atol=1e-5)
    assert tables[0].step == tables[1].step == 4


def test_compiled_models_without_gradients(make, device, backend):
    embedding = em.torch.Embedding(make())
    model = torch.compile(lambda ids: embedding(ids) * 2, backend=backend, fullgraph=True)
    ids = torch.tensor([[1, 2]], device=device)
    expected = embedding(ids).detach() * 2
    with torch.no_grad():
        assert model(ids).equal(expected)
    with torch.inference_mode():
        assert model(ids).equal(expected)
    embedding.requires_grad_(False)
    assert model(ids).equal(expected)
    assert not model(ids).requires_grad
    with pytest.raises(IndexError):
        model(torch.tensor([[1, ROWS]], device=device))


def test_ids_may_be_refilled_after_a_compiled_forward(make, device, backend):
    table = make()
    embedding = em.torch.Embedding(table)
    model = torch.compile(lambda ids: embedding(ids).sum(), backend=backend, fullgraph=True)
    ids = torch.tensor([1, 2], device=device)
    loss = model(ids)
    ids.fill_(5)
    loss.backward()
    assert embedding.weight.grad.coalesce().indices().tolist() == [[1, 2]]


def test_a_compiled_collection(make, device, backend):
    tables = em.torch.EmbeddingCollection({"a": make("a"), "b": make("b")})
    model = torch.compile(tables, backend=backend, fullgraph=True)
    ids = torch.tensor([1, 2], device=device)
    found = model({"a": ids, "b": ids})
    sum(rows.sum() for rows in found.values()).backward()
    assert tables["a"].weight.grad.to_dense()[:4, 0].tolist() == [0, 1, 1, 0]
    assert tables["b"].weight.grad.to_dense()[:4, 0].tolist() == [0, 1, 1, 0]


def test_a_compiled_graph_whose_module_is_gone(make):
    embedding = em.torch.Embedding(make())
    number = embedding._handle
    anchor = embedding.anchor
    del embedding
    with pytest.raises(RuntimeError, match="gone"):
        torch.ops.embermap.lookup(anchor, torch.tensor([1]), number, 1, DIM, torch.float32, 0)


def test_the_operators_are_what_torch_expects(make):
    embedding = em.torch.Embedding(make())
    arguments = (
        embedding.anchor, torch.tensor([[1, 2]]), embedding._handle, 1, DIM, torch.float32, 0,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.embermap.lookup.default, arguments)


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 3], [0, 2, 1]])
def test_offsets_that_are_none(make, offsets):
    bag = em.torch.EmbeddingBag(make(), mode="sum")
    with pytest.raises((ValueError, RuntimeError), match="offset"):
        bag(torch.tensor([1, 2]), torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize("padding", [None, 0])
def test_weights_of_no_ids_have_a_gradient(make, padding):
    """As torch gives it: of no elements, not None."""
    bag = em.torch.EmbeddingBag(make(), mode="sum", padding_idx=padding)
    weights = torch.ones(0, requires_grad=True)
    found = bag(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]), weights)
    assert found.tolist() == [[0] * bag.embedding_dim] * 2
    found.sum().backward()
    assert weights.grad is not None
    assert weights.grad.shape == (0,)
