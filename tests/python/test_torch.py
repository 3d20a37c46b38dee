"""Tensors of PyTorch as ids and values, the module and the optimizer."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
import weakref

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROWS, DIM = 50, 6


@pytest.fixture
def table(store):
    made = store.create(
        "t", rows=ROWS, dim=DIM, optimizer=em.optim.Adagrad(0.1), init=em.init.Normal(), seed=4
    )
    made[:] = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 100
    return made


@pytest.fixture
def rows(table):
    return torch.from_numpy(table[:])


# --- tensors as ids and values --------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)])
def test_ids_of_every_width_and_shape(table, rows, kind, shape):
    ids = torch.randint(0, ROWS, shape).to(getattr(torch, kind))
    got = table.gather(ids)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float32
    assert got.device.type == "cpu"
    assert got.equal(rows[ids.to(torch.int64)])
    assert not got.requires_grad


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "bfloat16"),
        (torch.tensor([]), "empty array is of float32"),
        (torch.tensor([True]), "bool"),
        (torch.tensor([1 + 1j]), "complex64"),
        (torch.tensor([1], device="meta"), "meta"),
        (torch.tensor([[1, 0]]).to_sparse(), "sparse"),
    ],
    ids=str,
)
def test_ids_that_are_none(table, ids, text):
    with pytest.raises(TypeError, match=text):
        table.gather(ids)


def test_ids_out_of_range(table):
    for ids, bad in ((torch.tensor([3, -1]), -1), (torch.tensor([3, ROWS]), ROWS)):
        with pytest.raises(em.RowIdError, match=f"{bad} at position 1"):
            table.gather(ids)
    with pytest.raises(em.RowIdError, match=str(2**64 - 2)):
        table.gather(torch.tensor([-2]).view(torch.uint64))


def test_views_of_ids(table, rows):
    ids = torch.arange(24).reshape(4, 6)
    for view in (ids.T, ids[:, ::2], ids.expand(2, 4, 6), ids.flip(0), ids[1:, 3]):
        assert table.gather(view).equal(rows[view])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "int8", "uint8"])
def test_values_of_every_dtype(store, name):
    kind = getattr(torch, name)
    table = store.create("u", rows=40, dim=4, dtype=kind)
    assert table.dtype.name == name
    x = torch.arange(12 * 8).reshape(12, 8).to(kind)
    ids = torch.randperm(40)[:12]
    for view in (x[:, ::2], x[:, 4:], x[:, :4].flip(0), x[0, :4].expand(12, 4)):
        table.scatter(ids, view)
        assert table.gather(ids).equal(view)
        table[ids] = view
        assert table.gather(ids).equal(view)
        table[:12] = view
        assert table.gather(torch.arange(12)).equal(view)
    table[ids[0]] = 3
    assert (table.gather(ids[:1]) == 3).all()
    table.write(2, x[:, :4])
    assert table.gather(range(2, 14)).tobytes() == table.read(2, 14).tobytes()


def test_values_that_do_not_fit(table):
    ids = torch.tensor([1, 2])
    for values, error, text in (
        (torch.ones(2, DIM, dtype=torch.float64), TypeError, "float64.*float32"),
        (torch.ones(3, DIM), ValueError, "2 ids, 3 rows"),
        (torch.ones(2, DIM, device="meta"), TypeError, "meta"),
        (torch.ones(2, DIM).to_sparse(), TypeError, "sparse"),
    ):
        with pytest.raises(error, match=text):
            table.scatter(ids, values)


def test_numpy_and_torch_mix_on_the_host(table):
    table.scatter([1, 2], torch.ones(2, DIM))
    table.add(torch.tensor([1, 2]), np.ones((2, DIM), np.float32))
    table.update(torch.tensor([3]), [[0.0] * DIM])
    assert (table.gather(torch.tensor([1, 2])) == 2).all()


def test_values_that_require_grad_are_taken_as_they_are(table):
    x = torch.ones(1, DIM, requires_grad=True)
    table.scatter(torch.tensor([1]), x)
    assert (table[1] == 1).all()


def test_out_tensors(table, rows):
    ids = torch.tensor([3, 1])
    out = torch.empty(2, DIM)
    assert table.gather(ids, out=out) is out
    assert out.equal(rows[ids])
    whole = torch.zeros(4, DIM)
    table.gather([5], out=whole[2:3])
    assert whole[2].equal(rows[5])
    assert table.read(4, 6, out=out) is out
    assert out.equal(rows[4:6])
    for bad, error in (
        (torch.empty(3, DIM), ValueError),
        (torch.empty(2, DIM, dtype=torch.float64), TypeError),
        (torch.empty(DIM, 2).T, ValueError),
        (torch.empty(2, DIM, requires_grad=True), ValueError),
        (torch.empty(2, DIM, device="meta"), TypeError),
    ):
        with pytest.raises(error):
            table.gather(ids, out=bad)


def test_masks_and_keys(table, rows):
    mask = torch.arange(ROWS) % 3 == 0
    assert table[mask].equal(rows[mask])
    assert table[torch.tensor([1, 2])].equal(rows[1:3])
    with pytest.raises(IndexError, match="mask"):
        table[mask[:-1]]
    table[mask] = torch.ones(DIM)
    assert (table[mask] == 1).all()
    with pytest.raises(ValueError, match="broadcast"):
        table[mask] = torch.ones(DIM - 1)


def test_the_default_device_of_torch_does_not_matter(table, rows):
    with torch.device("meta"):
        assert table.gather(torch.tensor([1, 2], device="cpu")).equal(rows[1:3])


@pytest.mark.parametrize("count", [2, 5000])  # rows that come as few, and as many
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag", "Swap"])
def test_modules_are_on_the_host_whatever_the_default_device(table, rows, kind, count):
    ids = (torch.arange(count) % ROWS).reshape(2, -1)
    with torch.device("meta"):
        if kind == "Swap":
            module = optimizer = em.torch.Swap(
                table, lambda weights: torch.optim.SGD(weights, 0.5, momentum=0.9)
            )
        else:
            module = getattr(em.torch, kind)(table)
            optimizer = em.torch.Optimizer([module])
        module(ids).sum().backward()
        if kind != "Swap":
            assert module.weight.grad.is_cpu
            for key, at in (
                (slice(1, 3), [1, 2]),
                (slice(0, 4, 2), [0, 2]),
                (5, 5),
                ([1, 2], [1, 2]),
            ):
                assert module.weight[key].equal(rows[at])
        optimizer.step()
        optimizer.zero_grad()
    assert not np.array_equal(table[:], rows.numpy())


def test_looking_at_gradients_says_nothing(tmp_path):
    """torch warns of sparse tensors of which nobody has said whether they are to be checked."""
    code = f"""
import warnings
import embermap as em
import torch

warnings.simplefilter("error")
store = em.open({str(tmp_path / "s")!r}, memory="64MiB")
table = store.create("t", rows=9, dim=3, optimizer=em.optim.SGD(1.0))
embedding = em.torch.Embedding(table)
embedding(torch.arange(3)).sum().backward()
assert embedding.weight.grad.to_dense()[:3].eq(1).all()
swap = em.torch.Swap(table, lambda weights: torch.optim.SparseAdam(weights))
swap(torch.arange(3)).sum().backward()
swap.step()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- Embedding ------------------------------------------------------------------------------------


def test_it_is_an_ordinary_module(table, rows):
    embedding = em.torch.Embedding(table)
    ids = torch.tensor([[1, 2, 3], [3, 3, 0]])
    out = embedding(ids)
    assert out.shape == (2, 3, DIM)
    assert out.requires_grad
    assert out.detach().equal(rows[ids])
    assert (embedding.num_embeddings, embedding.embedding_dim) == (ROWS, DIM)
    (anchor,) = embedding.parameters()
    assert anchor.numel() == 1
    assert list(embedding.state_dict()) == ["anchor"]
    assert "t" in repr(embedding)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(DIM, 1))
    assert len(list(model.parameters())) == 3
    model.train()
    model.eval()
    assert model(ids).shape == (2, 3, 1)


def test_without_gradients_there_is_no_graph(table):
    embedding = em.torch.Embedding(table)
    ids = torch.tensor([1])
    with torch.no_grad():
        assert not embedding(ids).requires_grad
    with torch.inference_mode():
        assert not embedding(ids).requires_grad
    embedding.requires_grad_(False)
    assert not embedding(ids).requires_grad


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_shapes_of_no_and_one_id(table, shape):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    out = embedding(torch.zeros(shape, dtype=torch.int64))
    assert out.shape == (*shape, DIM)
    out.sum().backward()
    optimizer.step()
    assert table.step == (1 if shape == () else 0)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda store, table: em.torch.Embedding("t"), TypeError),
        (lambda store, table: em.torch.Embedding(torch.nn.Embedding(3, 2)), TypeError),
        (
            lambda store, table: em.torch.Embedding(store.create("i", rows=2, dim=1, dtype="int8")),
            TypeError,
        ),
        (lambda store, table: em.torch.Optimizer([]), ValueError),
        (lambda store, table: em.torch.Optimizer([torch.nn.Embedding(3, 2)]), TypeError),
        (
            lambda store, table: em.torch.Optimizer(
                [em.torch.Embedding(store.create("n", rows=2, dim=1))]
            ),
            ValueError,
        ),
        (
            lambda store, table: em.torch.Optimizer([em.torch.Embedding(table)] * 2),
            ValueError,
        ),
        (
            lambda store, table: em.torch.Optimizer([em.torch.Embedding(table)], lr=-1),
            ValueError,
        ),
        (
            lambda store, table: em.torch.Optimizer([em.torch.Embedding(table)]).add_param_group(
                {"params": [torch.nn.Parameter(torch.zeros(1))]}
            ),
            TypeError,
        ),
        (lambda store, table: em.torch.Embedding(table)([1, 2]), TypeError),
        (lambda store, table: em.torch.Embedding(table)(torch.tensor([1.0])), TypeError),
        (lambda store, table: em.torch.Embedding(table)(torch.tensor([ROWS])), em.RowIdError),
    ],
)
def test_what_cannot_be(store, table, make, error):
    with pytest.raises(error):
        make(store, table)


def pair(table, kind, **options):
    """Ours and torch's: two modules with the same rows and two optimizers."""
    ours = em.torch.Embedding(table)
    theirs = torch.nn.Embedding(ROWS, DIM, sparse=True)
    theirs.weight.data.copy_(torch.from_numpy(table[:]))
    return (
        ours,
        em.torch.Optimizer([ours]),
        theirs,
        getattr(torch.optim, kind)(theirs.parameters(), **options),
    )


def assert_same(table, theirs):
    torch.testing.assert_close(torch.from_numpy(table[:]), theirs.weight.data, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_training_loop_equals_that_of_nn_embedding(store, kind):
    ours = em.optim.SGD(0.2) if kind == "SGD" else em.optim.Adagrad(0.2)
    table = store.create("u", rows=ROWS, dim=DIM, optimizer=ours, init=em.init.Normal(), seed=1)
    embedding, optimizer, other, others = pair(table, kind, lr=0.2)
    heads = [torch.nn.Linear(DIM, 1), torch.nn.Linear(DIM, 1)]
    heads[1].load_state_dict(heads[0].state_dict())
    dense = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        ids = torch.randint(0, ROWS // 2, (8, 3), generator=generator)
        target = torch.randn(8, 3, 1, generator=generator)
        losses = []
        for module, head, *all_of_them in (
            (embedding, heads[0], optimizer, dense[0]),
            (other, heads[1], others, dense[1]),
        ):
            for each in all_of_them:
                each.zero_grad()
            loss = (head(torch.tanh(module(ids))) - target).square().mean()
            loss.backward()
            for each in all_of_them:
                each.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same(table, other)


def test_several_forwards_and_backwards_before_a_step(table):
    embedding, optimizer, other, others = pair(table, "Adagrad", lr=0.1)
    batches = [torch.tensor([1, 2, 2]), torch.tensor([2, 3]), torch.tensor([[4, 1], [1, 1]])]
    for module in (embedding, other):
        first, second = module(batches[0]), module(batches[1])
        (first.square().sum() + 3 * second.sum()).backward()  # twice in one graph
        module(batches[2]).square().sum().backward()  # and once more before the step
    optimizer.step()
    others.step()
    assert_same(table, other)
    assert table.step == 1


def test_gradients_stay_until_zero_grad_as_in_torch(table):
    embedding, optimizer, other, others = pair(table, "Adagrad", lr=0.1)
    optimizer.step()
    assert table.step == 0
    for module, steps in ((embedding, optimizer), (other, others)):
        module(torch.tensor([1, 2])).square().sum().backward()
        steps.step()
        steps.step()  # the same gradients again
        module(torch.tensor([2, 3])).square().sum().backward()
        steps.step()  # old and new ones
        steps.zero_grad()
        module(torch.tensor([4])).square().sum().backward()
        steps.step()  # new ones only
    assert table.step == 4
    assert_same(table, other)
    optimizer.zero_grad()
    after = table[:]
    optimizer.step()
    assert table.step == 4
    assert np.array_equal(table[:], after)


def test_loops_without_zero_grad_accumulate_as_in_torch(store):
    table = store.create("u", rows=ROWS, dim=DIM, optimizer=em.optim.SGD(0.1))
    table[:] = 1
    embedding, optimizer, other, others = pair(table, "SGD", lr=0.1)
    for step in range(4):
        for module, steps in ((embedding, optimizer), (other, others)):
            module(torch.tensor([step, step + 1])).square().sum().backward()
            steps.step()
    assert_same(table, other)


def test_zero_grad_drops_what_waits(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    before = table[:]
    model = torch.nn.Sequential(embedding)
    drops = (
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        embedding.zero_grad,
        lambda: embedding.zero_grad(set_to_none=False),
        model.zero_grad,
        lambda: torch.optim.SGD(model.parameters(), lr=1.0).zero_grad(),
    )
    for drop in drops:
        embedding(torch.tensor([1, 2])).sum().backward()
        drop()
        optimizer.step()
    assert np.array_equal(table[:], before)
    assert table.step == 0
    for drop in drops:  # no look at the gradients between the drop and the next backward
        embedding(torch.tensor([1, 2])).sum().backward()
        drop()
        (embedding(torch.tensor([3])).sum() + embedding(torch.tensor([3])).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (table[:] != before).any(axis=1).nonzero()[0].tolist() == [3]
    assert table.step == len(drops)


def test_a_backward_pass_that_fails_counts_for_nothing(table):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError

    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    before = table[:]
    first = embedding(torch.tensor([1])).sum()
    failing = Failing.apply(torch.zeros((), requires_grad=True))
    second = embedding(torch.tensor([2])).sum()  # its gradient is the first to arrive
    with pytest.raises(MemoryError):
        (first + failing + second).backward()
    embedding(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert (table[:] != before).any(axis=1).nonzero()[0].tolist() == [3]
    assert table.step == 1


def test_gradients_asked_for_by_hand_are_not_kept(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    before = table[:]
    scale = torch.ones(DIM, requires_grad=True)
    loss = (embedding(torch.tensor([1, 2])) * scale).sum()
    torch.autograd.grad(loss, [scale], retain_graph=True)
    optimizer.step()
    torch.autograd.grad(loss, [scale, embedding.anchor])
    embedding(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert (table[:] != before).any(axis=1).nonzero()[0].tolist() == [3]


def test_backward_passes_of_several_threads_all_count(store):
    table = store.create("u", rows=64, dim=2, optimizer=em.optim.SGD(1.0))
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])

    def work(first):
        for row in range(first, 64, 4):
            ids = torch.tensor([row])
            (embedding(ids).sum() + embedding(ids).sum()).backward()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    assert (table[:] == -2).all()


@pytest.mark.parametrize("kind", ["int8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_buffer_of_ids_may_be_refilled_after_forward(path, kind, device):
    """As in a loop that accumulates gradients over batches from one reused buffer."""
    with em.open(path, device=None if device == "cpu" else device) as store:
        table = store.create("t", rows=9, dim=2, optimizer=em.optim.SGD(1.0))
        embedding = em.torch.Embedding(table)
        optimizer = em.torch.Optimizer([embedding])
        buffer = torch.empty(2, dtype=getattr(torch, kind), device=device)
        for batch in ([1, 2], [2, 3]):
            buffer.copy_(torch.tensor(batch))
            rows = embedding(buffer)
            buffer.fill_(5)  # before backward
            rows.sum().backward()
        buffer.fill_(6)  # before the step
        optimizer.step()
        assert table[:][:, 0].tolist() == [0, -1, -2, -1, 0, 0, 0, 0, 0]


def test_changing_a_given_gradient_later_changes_nothing(store):
    table = store.create("u", rows=4, dim=2, optimizer=em.optim.SGD(1.0))
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    upstream = torch.ones(1, 2)
    embedding(torch.tensor([1])).backward(upstream)
    upstream.fill_(9)
    rows = embedding(torch.tensor([2]))
    rows.retain_grad()
    flat = rows.view(2)
    flat.retain_grad()
    (flat * torch.ones(2)).sum().backward()
    rows.grad.fill_(9)
    flat.grad.fill_(9)
    optimizer.step()
    assert table[:].tolist() == [[0, 0], [-1, -1], [-1, -1], [0, 0]]


def test_strided_and_sparse_gradients(table):
    embedding, optimizer, other, others = pair(table, "Adagrad", lr=0.1)
    strided = torch.arange(DIM * 3.0).reshape(DIM, 3).T
    for module in (embedding, other):
        module(torch.tensor([1, 2, 3])).backward(strided)
        rows = module(torch.tensor([4, 5, 6]))
        # nn.Embedding cannot take a sparse gradient itself.
        picked = torch.nn.functional.embedding(
            torch.tensor([2, 2]), rows, sparse=module is embedding
        )
        picked.sum().backward()
    optimizer.step()
    others.step()
    assert_same(table, other)


def test_a_dense_optimizer_over_all_parameters_does_no_harm(table):
    embedding = em.torch.Embedding(table)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(DIM, 1))
    dense = torch.optim.AdamW(model.parameters(), lr=1.0)
    optimizer = em.torch.Optimizer([embedding])
    for kind in (2.0, float("inf")):
        model(torch.tensor([1, 2])).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type=kind)
        dense.step()
        optimizer.step()
    assert embedding.anchor.item() == 0
    assert table.step == 2


def test_gradients_shared_with_others_stay_what_they_were(table):
    """The same gradient tensor goes to a parameter, whose owner changes it in place."""
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    free = torch.nn.Parameter(torch.zeros(2, DIM))
    weight = torch.ones(2, DIM)
    for order in (0, 1):
        optimizer.zero_grad()
        before = torch.from_numpy(table[:])
        free.grad = None
        rows = embedding(torch.tensor([1, 2]))
        both = free + rows if order else rows + free
        (both * weight).sum().backward()
        free.grad.mul_(100)
        table.optimizer = em.optim.Adagrad(0.1)
        table.scatter([1, 2], np.zeros((2, DIM), np.float32), field="sum")
        optimizer.step()
        moved = before - torch.from_numpy(table[:])
        torch.testing.assert_close(moved[1:3], torch.full((2, DIM), 0.1), rtol=1e-5, atol=1e-5)
        assert (table.gather([1, 2], field="sum") == 1).all()


def test_rows_in_use_do_not_change_with_the_table(table, rows):
    out = em.torch.Embedding(table)(torch.tensor([1, 2]))
    table[:] = 0
    assert out.detach().equal(rows[1:3])


def test_expanded_gradients(table):
    embedding, optimizer, other, others = pair(table, "Adagrad", lr=0.1)
    for module in (embedding, other):
        module(torch.tensor([[1, 2], [2, 3]])).sum().backward()  # a gradient of stride 0
    optimizer.step()
    others.step()
    assert_same(table, other)


def test_checkpointing_counts_gradients_once(table):
    from torch.utils.checkpoint import checkpoint

    embedding, optimizer, other, others = pair(table, "Adagrad", lr=0.1)
    ids = torch.tensor([1, 2, 2])
    for module in (embedding, other):
        checkpoint(lambda i, m=module: m(i).square().sum(), ids, use_reentrant=False).backward()
    optimizer.step()
    others.step()
    assert_same(table, other)


def _keep_nothing(rows):
    return rows.exp().sum().backward


def _keep_by_hook(rows):
    kept = []
    rows.register_hook(kept.append)
    return lambda: (rows.exp().sum().backward(), kept[0])[1]


def _keep_detached(rows):
    kept = []
    rows.register_hook(lambda grad: kept.append(grad.detach()))
    return lambda: (rows.exp().sum().backward(), kept[0])[1]


def _keep_as_array(rows):
    kept = []
    rows.register_hook(lambda grad: kept.append(grad.numpy()))
    return lambda: (rows.exp().sum().backward(), kept[0])[1]


def _keep_the_callers(rows):
    given = torch.ones_like(rows)
    return lambda: (rows.backward(given), given)[1]


def _keep_part_of_another(rows):
    given = torch.ones(2, *rows.shape)
    return lambda: (rows.backward(given[1]), given)[1]


def _keep_another_parameters(rows):
    other = torch.nn.Parameter(torch.zeros_like(rows))
    return lambda: ((rows + other).exp().sum().backward(), other.grad)[1]


def _keep_anothers_before_it(rows):
    other = torch.nn.Parameter(torch.zeros_like(rows))
    return lambda: ((other + rows).backward(torch.ones_like(rows)), other.grad)[1]


def _keep_retained(rows):
    rows.retain_grad()
    return lambda: (rows.exp().sum().backward(), rows.grad)[1]


def _keep_its_memory(rows):
    kept = []
    rows.register_hook(lambda grad: kept.append(grad.untyped_storage()))

    def run():
        rows.exp().sum().backward()
        return torch.tensor([], dtype=rows.dtype).set_(kept[0], 0, (kept[0].nbytes() // 4,))

    return run


def _keep_a_view(rows):
    kept = []
    rows.register_hook(kept.append)
    return lambda: (rows.unsqueeze(1).exp().sum().backward(), kept[0])[1]


def _keep_what_it_is_a_view_of(rows):
    kept = []
    seen = rows.unsqueeze(1)
    seen.register_hook(kept.append)
    return lambda: (seen.exp().sum().backward(), kept[0])[1]


def _keep_retained_of_a_view(rows):
    seen = rows.unsqueeze(1)
    seen.retain_grad()
    return lambda: (seen.exp().sum().backward(), seen.grad)[1]


def _keep_the_callers_of_a_view(rows):
    seen = rows.unsqueeze(1)
    given = torch.ones_like(seen)
    return lambda: (seen.backward(given), given)[1]


def _keep_another_view(rows):
    kept = []
    seen = rows.unsqueeze(1)
    seen.register_hook(lambda grad: kept.append(grad.flatten()))
    return lambda: (seen.exp().sum().backward(), kept[0])[1]


# How the loss is made and somebody keeps the gradient, and what each element of it is; None: exp.
KEPT = [
    (_keep_nothing, None),
    (_keep_by_hook, None),
    (_keep_detached, None),
    (_keep_as_array, None),
    (_keep_the_callers, 1),
    (_keep_part_of_another, 1),
    (_keep_another_parameters, None),
    (_keep_anothers_before_it, 1),
    (_keep_retained, None),
    (_keep_its_memory, None),
    (_keep_a_view, None),
    (_keep_what_it_is_a_view_of, None),
    (_keep_retained_of_a_view, None),
    (_keep_the_callers_of_a_view, 1),
    (_keep_another_view, None),
]


@pytest.mark.parametrize(("way", "each"), KEPT)
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_gradients_that_others_have_may_be_overwritten(store, way, each, kind):
    count, dim = 100, 64  # more than are copied in any case
    table = store.create("u", rows=count, dim=dim, optimizer=em.optim.SGD(1.0))
    module = getattr(em.torch, kind)(table, **({"mode": "sum"} if kind == "EmbeddingBag" else {}))
    optimizer = em.torch.Optimizer([module])
    ids = torch.arange(count)
    rows = module(ids if kind == "Embedding" else ids[:, None])
    before = table[:]
    shared = way(rows)()
    if shared is not None:
        shared[...] = 1e6
    optimizer.step()
    wanted = np.exp(before) if each is None else np.full_like(before, each)
    assert np.allclose(table[:], before - wanted, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_of_any_size_are_taken(store):
    for count in (10, 100):
        table = store.create(f"u{count}", rows=count, dim=64, optimizer=em.optim.SGD(1.0))
        embedding = em.torch.Embedding(table)
        optimizer = em.torch.Optimizer([embedding])
        before = table[:]
        rows = embedding(torch.arange(count))
        torch.nn.functional.embedding(torch.tensor([1, 2, 1]), rows, sparse=True).sum().backward()
        optimizer.step()
        before[1] -= 2
        before[2] -= 1
        assert np.array_equal(table[:], before)


@pytest.mark.parametrize("seen", [lambda rows: rows, lambda rows: rows.unsqueeze(1)])
def test_a_gradient_that_nobody_else_has_is_not_copied(store, seen):
    table = store.create("u", rows=100, dim=64, optimizer=em.optim.SGD(1.0))
    embedding = em.torch.Embedding(table)
    copies = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.clone.default:
                copies.append(args[0].shape)
            return function(*args, **(kwargs or {}))

    loss = seen(embedding(torch.arange(100))).exp().sum()
    with Watch():
        loss.backward()
    assert (100, 64) not in copies


def test_the_gradient_of_an_anchor_is_zero_whatever_was_done_to_the_last_one(table):
    embedding = em.torch.Embedding(table)
    for change in (
        lambda grad: grad.add_(1),
        lambda grad: grad.mul_(torch.inf),
        lambda grad: torch.nn.utils.clip_grad_norm_([embedding.anchor], 1.0),
    ):
        embedding.zero_grad()
        embedding(torch.tensor([1])).sum().backward()
        assert embedding.anchor.grad.tolist() == [0]
        change(embedding.anchor.grad)
    embedding(torch.tensor([1])).sum().backward()  # added to what is there
    embedding.zero_grad()
    embedding(torch.tensor([1])).sum().backward()
    first = embedding.anchor.grad
    embedding.zero_grad()
    embedding(torch.tensor([1])).sum().backward()
    assert first.tolist() == embedding.anchor.grad.tolist() == [0]


def test_no_edit_of_an_anchors_gradient_is_seen_by_the_next(table):
    """Not by that of a later pass, nor by one of an earlier pass that somebody kept."""
    embedding = em.torch.Embedding(table)
    kept = []
    for _ in range(300):
        embedding.anchor.grad = None
        embedding(torch.tensor([1])).sum().backward()
        assert embedding.anchor.grad.tolist() == [0]
        kept.append(embedding.anchor.grad)
        embedding.anchor.grad.data.fill_(7)  # no version tells of it
        embedding.anchor.grad.numpy()[0] += 1
    assert [grad.item() for grad in kept] == [8] * len(kept)
    embedding.anchor.grad = None
    embedding.to(torch.float64)
    embedding(torch.tensor([1])).sum().backward()
    assert embedding.anchor.grad.tolist() == [0]
    assert embedding.anchor.grad.dtype == torch.float64


@pytest.mark.parametrize("lookups", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.mul_(0.5),
        lambda grad: grad.div_(2),
        lambda grad: grad._values().mul_(0.5),
        lambda grad: grad._values().data.mul_(0.5),
    ],
)
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_a_change_of_the_gradient_that_waits_acts(table, rows, kind, change, lookups):
    module = getattr(em.torch, kind)(table)
    ids = torch.tensor([[3, 3, 7]])
    for _ in range(lookups):
        (module(ids) * torch.arange(DIM)).sum().backward()
    before = module.weight.grad.to_dense()
    change(module.weight.grad)
    assert torch.equal(module.weight.grad.to_dense(), before / 2)
    em.torch.Optimizer([module]).step()
    weight = torch.nn.Parameter(rows.clone())
    other = torch.optim.Adagrad([weight], lr=0.1)
    weight.grad = before / 2
    other.step()
    assert np.allclose(table[:], weight.detach().numpy(), rtol=1e-6, atol=1e-7)


def test_a_profiler_that_keeps_what_it_sees_does_not_mislead(tmp_path):
    """What is tried out once is tried out where it is not told of anything."""
    code = f"""
import sys
import threading
import embermap as em
import torch

store = em.open({str(tmp_path / "s")!r}, memory="64MiB")
table = store.create("t", rows=100, dim=64, optimizer=em.optim.SGD(1.0))
embedding = em.torch.Embedding(table)
optimizer = em.torch.Optimizer([embedding])
seen = []

def keep(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "backward":
        seen.append(dict(frame.f_locals))

sys.setprofile(keep)
threading.setprofile(keep)
embedding(torch.arange(100)).exp().sum().backward()
sys.setprofile(None)
optimizer.zero_grad()

# Others have the gradient now, as often as the profiler may have had the first.
assert seen
for times in range(1, 6):
    kept = []
    rows = embedding(torch.arange(100))
    rows.register_hook(lambda grad: kept.extend([grad] * times))
    before = table[:]
    (rows * torch.ones(100, 64)).sum().backward()
    kept[0].fill_(1e6)
    optimizer.step()
    assert (table[:] == before - 1).all(), times
    optimizer.zero_grad()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_graph_serves_once_unless_it_is_retained(table):
    embedding = em.torch.Embedding(table)
    rows = embedding(torch.arange(ROWS).repeat(2000))  # more than are fetched as few
    rows.sum().backward(retain_graph=True)
    rows.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        rows.sum().backward()


def test_double_backward_is_refused(table):
    embedding = em.torch.Embedding(table)
    loss = embedding(torch.tensor([1])).square().sum()
    (grad,) = torch.autograd.grad(loss, [embedding.anchor], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_other_floating_tables(store, name):
    table = store.create("u", rows=ROWS, dim=DIM, dtype=name, optimizer=em.optim.SGD(1.0))
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    out = embedding(torch.tensor([1, 1, 2]))
    assert out.dtype == getattr(torch, name)
    (2 * out).sum().backward()
    optimizer.step()
    got = table.gather(torch.tensor([1, 2])).float()
    assert got.equal(torch.tensor([[-4.0] * DIM, [-2.0] * DIM]))


def test_several_tables_and_schedulers(store):
    one = store.create("one", rows=9, dim=2, optimizer=em.optim.SGD(1.0))
    two = store.create("two", rows=9, dim=3, optimizer=em.optim.Adagrad(0.5))
    first, second = em.torch.Embedding(one), em.torch.Embedding(two)
    optimizer = em.torch.Optimizer([first, second])
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (first(torch.tensor([0])).sum() + second(torch.tensor([0])).sum()).backward()
        optimizer.step()
        scheduler.step()
    assert one[0].tolist() == [-1.75, -1.75]
    assert one.optimizer.lr == 0.25
    assert two.optimizer.lr == 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.0625]
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


def test_other_schedulers(store):
    table = store.create("u", rows=9, dim=2, optimizer=em.optim.SGD(1.0, momentum=0.9))
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding, lr=0.5)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ]
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([0])).sum().backward()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        assert table.optimizer.lr == lr
        for scheduler in schedulers:
            scheduler.step()


def test_a_learning_rate_for_all(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding, lr=0.75)
    assert table.optimizer.lr == 0.1
    embedding(torch.tensor([0])).sum().backward()
    optimizer.step()
    assert table.optimizer == em.optim.Adagrad(0.75)


def test_a_closure_is_called(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer(embedding)

    def closure():
        optimizer.zero_grad()
        loss = embedding(torch.tensor([1])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(sum(range(6, 12)) / 100)
    assert table.step == 1


def test_state_dicts_hold_hyperparameters_and_the_step_not_the_table(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    saved = io.BytesIO()
    torch.save({"model": embedding.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    assert len(saved.getvalue()) < 5_000
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    (group,) = state["optimizer"]["param_groups"]
    assert (group["lr"], group["step"], group["table"]) == (0.7, 1, "t")
    again = em.torch.Embedding(table)
    again.load_state_dict(state["model"])
    other = em.torch.Optimizer([again])
    other.load_state_dict(state["optimizer"])
    assert other.param_groups[0]["lr"] == 0.7
    again(torch.tensor([1])).sum().backward()
    other.step()
    assert table.optimizer.lr == 0.7
    third = em.torch.Optimizer([em.torch.Embedding(table)])
    with pytest.warns(UserWarning, match="step 1 .* step 2"):
        third.load_state_dict(state["optimizer"])


def test_states_of_other_tables_are_refused(store, table):
    other = store.create("o", rows=3, dim=1, optimizer=em.optim.SGD(0.5))
    optimizer = em.torch.Optimizer([em.torch.Embedding(table)])
    state = em.torch.Optimizer([em.torch.Embedding(other)]).state_dict()
    with pytest.raises(ValueError, match="'o', not 't'"):
        optimizer.load_state_dict(state)
    state["param_groups"][0]["table"] = "t"
    with pytest.raises(ValueError, match="kind"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_grad_scaler_is_noticed(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(embedding(torch.tensor([1])).sum()).backward()
    before = table[:]
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(optimizer)
    assert np.array_equal(table[:], before)


def test_a_failed_step_keeps_its_gradients(path):
    with em.open(path) as store:
        table = store.create("t", rows=9, dim=2, optimizer=em.optim.SGD(1.0))
        embedding = em.torch.Embedding(table)
        optimizer = em.torch.Optimizer([embedding])
        embedding(torch.tensor([8, 1])).sum().backward()
        table.resize(5)
        with pytest.raises(em.RowIdError):
            optimizer.step()
        table.resize(9)
        optimizer.step()
        assert table[8].tolist() == table[1].tolist() == [-1, -1]


def test_modules_are_copied_and_pickled(table):
    embedding = em.torch.Embedding(table)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(DIM, 1))
    model(torch.tensor([1])).sum().backward()  # gradients that wait are not copied
    copied = copy.deepcopy(model)
    assert copied[0].table is table
    assert copied[0].anchor is not embedding.anchor
    table._store.commit()
    again = pickle.loads(pickle.dumps(embedding))
    assert again(torch.tensor([3])).equal(embedding(torch.tensor([3])))
    again.table._store.close()
    before = table[:]
    copied(torch.tensor([2])).sum().backward()
    em.torch.Optimizer(copied[0]).step()
    assert (table[:] != before).any(axis=1).nonzero()[0].tolist() == [2]


def test_gradients_arrive_after_the_anchor_was_replaced(table):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    for step in range(2):
        embedding(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert table.step == step + 1
        embedding.load_state_dict({"anchor": torch.zeros(1)}, assign=True)


def test_nothing_holds_a_module_that_is_dropped(table):
    embedding = em.torch.Embedding(table)
    embedding(torch.tensor([1])).sum().backward()
    gone = weakref.ref(embedding)
    del embedding
    import gc

    gc.collect()
    assert gone() is None


def test_a_step_does_not_make_anything_of_the_size_of_the_table(path):
    code = """
        import resource, sys, torch, embermap as em
        torch.set_num_threads(1)
        store = em.open(sys.argv[1], memory="8MiB", threads=1)
        table = store.create("t", rows=400_000_000, dim=64, optimizer=em.optim.Adagrad(0.1))
        embedding = em.torch.Embedding(table)
        optimizer = em.torch.Optimizer([embedding])
        def step(ids):
            optimizer.zero_grad()
            embedding(ids).square().sum().backward()
            optimizer.step()
        step(torch.arange(100))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(5):
            step(torch.randint(0, 400_000_000, (1024,)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 << 10, f"{grown} KiB"
        assert table.step == 6
        store.abandon()
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "take" in done.stderr and "BudgetError" in done.stderr:
        pytest.fail(done.stderr)
    assert done.returncode == 0, done.stderr


def test_compiled_models_call_it(table):
    embedding = em.torch.Embedding(table)

    @torch.compile(backend="eager", fullgraph=True)
    def model(ids):
        return embedding(ids).sum()

    ids = torch.tensor([1, 2])
    assert model(ids).item() == pytest.approx(embedding(ids).sum().item())


def test_training_reaches_a_goal_through_a_small_budget(path):
    """Rows of pairs are pulled together; the budget holds a tenth of the table."""
    torch.manual_seed(0)
    with em.open(path, memory="256KiB", threads=2) as store:
        table = store.create(
            "t", rows=10_000, dim=32, optimizer=em.optim.Adagrad(0.2), init=em.init.Normal(0, 1)
        )
        embedding = em.torch.Embedding(table)
        optimizer = em.torch.Optimizer([embedding])
        losses = []
        for _ in range(150):
            left = torch.randint(0, 5_000, (256,))
            loss = (embedding(left) - embedding(left + 5_000)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert table.stats()["evictions"] > 0
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
