"""Rows that are still on their way back to memory when somebody wants them."""

from __future__ import annotations

import threading

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("embermap.torch")
pytestmark = pytest.mark.gpu

ROWS = 40_000


@pytest.fixture(params=[16, 100], ids=["even rows", "rows across lines"])
def twins(request, tmp_path):
    """Two stores with the same table: all of it in memory and used by the GPU, and on the host."""
    dim = request.param
    values = np.random.default_rng(1).standard_normal((ROWS, dim)).astype(np.float32)
    stores, tables = [], []
    for name, device in (("gpu", "cuda"), ("host", None)):
        store = em.open(tmp_path / name, memory="128MiB", device=device)
        stores.append(store)
        table = store.create("t", rows=ROWS, dim=dim, optimizer=em.optim.Adagrad(lr=0.1))
        table[:] = values
        table.gather(np.arange(ROWS))  # from here on every page is in memory
        tables.append(table)
    assert tables[0].stats()["whole"]
    yield tables
    for store in stores:
        store.abandon()


def batches(rounds, seed, most=ROWS):
    """Ids that come again from batch to batch, few and many of them, and gradients."""
    rng = np.random.default_rng(seed)
    for round_ in range(rounds):
        count = (1, 7, 1_000, 5_000, 20_000)[round_ % 5]
        yield torch.from_numpy(rng.integers(0, most, count))


def grads_for(ids, dim, seed):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(-4, 5, (len(ids), dim)).astype(np.float32))


@pytest.mark.parametrize("most", [ROWS, 3_000])
def test_gathers_at_once_after_updates(twins, most):
    gpu, host = twins
    seen = []
    for number, ids in enumerate(batches(60, 2, most)):
        there = ids.cuda()
        grads = grads_for(ids, gpu.dim, number)
        gpu.update(there, grads.cuda())
        host.update(ids, grads)
        # Nothing waits in between: the first rows are read while others are written.
        again = torch.from_numpy(np.random.default_rng(number).integers(0, most, 9_000))
        for some in (again, again[:50], ids):
            seen.append((gpu.gather(some.cuda()), host.gather(some)))
        seen.append((gpu.gather(again.cuda(), field="sum"), host.gather(again, field="sum")))
    for ours, theirs in seen:
        assert torch.equal(ours.cpu(), theirs)
    assert np.array_equal(gpu[:], host[:])


def test_updates_at_once_after_updates(twins):
    gpu, host = twins
    for number, ids in enumerate(batches(60, 3)):
        grads = grads_for(ids, gpu.dim, number)
        if number % 4 == 3:
            gpu.add(ids.cuda(), grads.cuda())
            host.add(ids, grads)
        elif number % 7 == 6:
            gpu.scatter(ids.cuda(), grads.cuda())
            host.scatter(ids, grads)
        else:
            gpu.update(ids.cuda(), grads.cuda())
            host.update(ids, grads)
    everything = np.arange(ROWS)
    for field in ("weight", "sum"):
        assert np.array_equal(
            gpu.gather(everything, field=field), host.gather(everything, field=field)
        )


@pytest.mark.parametrize(
    "then", ["gather", "read", "commit", "resize", "scatter", "stats", "close"]
)
def test_the_host_waits_for_what_it_needs(twins, then):
    gpu, host = twins
    ids = torch.from_numpy(np.random.default_rng(4).integers(0, ROWS, 20_000))
    grads = grads_for(ids, gpu.dim, 5)
    host.update(ids, grads)
    there, on_gpu = ids.cuda(), grads.cuda()
    gpu.update(there, on_gpu)
    if then == "gather":
        assert np.array_equal(gpu.gather(ids.numpy()), host.gather(ids.numpy()))
    elif then == "read":
        assert np.array_equal(gpu[:], host[:])
    elif then == "commit":
        gpu._store.commit()
        gpu._store.checkpoint()
        assert np.array_equal(np.load(gpu.path, mmap_mode="r")["weight"], host[:])
    elif then == "resize":
        gpu.resize(ROWS + 5_000)
        assert np.array_equal(gpu[:ROWS], host[:])
    elif then == "scatter":
        rows = np.ones((ROWS // 2, gpu.dim), np.float32)
        gpu.scatter(np.arange(ROWS // 2), rows)
        host.scatter(np.arange(ROWS // 2), rows)
        assert np.array_equal(gpu[:], host[:])
    elif then == "stats":
        moved = gpu.stats()["cuda"]
        assert moved["kernel_rows"] + moved["thread_rows"] >= len(set(ids.tolist()))
    else:
        path = gpu._store.path
        gpu._store.close()
        with em.open(path, mode="r") as store:
            assert np.array_equal(store["t"][:], host[:])


def test_two_streams_in_turn(twins):
    gpu, host = twins
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for number, ids in enumerate(batches(60, 6, 5_000)):
        grads = grads_for(ids, gpu.dim, number)
        with torch.cuda.stream(streams[number % 3]):
            gpu.update(ids.cuda(), grads.cuda())
        host.update(ids, grads)
        with torch.cuda.stream(streams[(number + 1) % 3]):
            results.append((gpu.gather(ids.cuda()), host.gather(ids)))
    torch.cuda.synchronize()
    for ours, theirs in results:
        assert torch.equal(ours.cpu(), theirs)


def test_bad_ids_change_nothing(twins):
    gpu, _ = twins
    before = gpu[:]
    for count in (10, 30_000):
        ids = torch.arange(count)
        ids[count // 2] = ROWS
        there = ids.cuda()
        rows = torch.full((count, gpu.dim), 7.0, device="cuda")
        with pytest.raises(em.RowIdError):
            gpu.update(there, rows)
        with pytest.raises(em.RowIdError):
            gpu._gather_for_update(there)
        with pytest.raises(em.RowIdError):
            gpu.gather(there, out=rows)
        assert bool((rows == 7).all())
    assert np.array_equal(gpu[:], before)
    assert gpu.step == 0


@pytest.mark.parametrize("count", [10, 2_049, 30_000])
def test_bad_ids_of_a_module_are_told_at_the_call(twins, count):
    gpu, host = twins
    before = gpu[:]
    embedding = em.torch.Embedding(gpu)
    optimizer = em.torch.Optimizer([embedding])
    for bad in (-1, ROWS, 2**40):
        ids = torch.arange(count, device="cuda")
        ids[count // 2] = bad
        with pytest.raises(em.RowIdError, match=f"{bad} at position {count // 2}"):
            embedding(ids)
        with pytest.raises(IndexError):
            embedding(ids.view(-1, 1))
    good = torch.arange(count)
    hits = [table.stats()["hits"] for table in twins]
    embedding(good.cuda()).sum().backward()
    optimizer.step()
    host.gather(good)
    host.update(good, torch.ones(count, host.dim))
    more = [table.stats()["hits"] - old for table, old in zip(twins, hits, strict=True)]
    assert more[0] == more[1] > 0  # of the look-up and of the update
    assert np.array_equal(gpu[:], host[:])
    assert gpu.step == 1
    assert (gpu[:] != before).any(axis=1).nonzero()[0].tolist() == list(range(count))


def train(table, device, rounds, *, look_twice=False, meddle=None):
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    losses = []
    for number, ids in enumerate(batches(rounds, 8, 4_000)):
        ids = ids.to(device)
        optimizer.zero_grad()
        rows = embedding(ids)
        if look_twice:
            rows = rows + embedding(ids.flip(0))
        if meddle is not None:
            meddle(number)
        loss = (rows * (rows.detach() + 1)).sum()
        loss.backward()
        optimizer.step()
        losses.append(rows.detach().cpu())
    return losses


@pytest.mark.parametrize("look_twice", [False, True])
def test_a_loop_that_keeps_what_it_fetched_equals_the_host(twins, look_twice):
    gpu, host = twins
    ours = train(gpu, "cuda", 40, look_twice=look_twice)
    theirs = train(host, "cpu", 40, look_twice=look_twice)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    everything = np.arange(ROWS)
    for field in ("weight", "sum"):
        assert np.array_equal(
            gpu.gather(everything, field=field), host.gather(everything, field=field)
        )
    assert gpu.step == host.step == 40


def test_rows_that_change_between_look_up_and_step(twins):
    gpu, host = twins

    def meddling(table):
        def meddle(number):
            if number % 3 == 0:
                table.add(np.arange(100), np.ones((100, table.dim), np.float32))
            elif number % 3 == 1:
                table._store.commit()

        return meddle

    train(gpu, "cuda", 30, meddle=meddling(gpu))
    train(host, "cpu", 30, meddle=meddling(host))
    assert np.array_equal(gpu[:], host[:])


def test_the_update_takes_what_the_look_up_fetched(twins):
    gpu, _ = twins
    ids = torch.arange(5_000, device="cuda")
    rows, kept = gpu._gather_for_update(ids)
    assert kept is not None
    before = gpu.stats()["cuda"]
    grads = torch.ones_like(rows)

    def update_kept(count=5_000, stream=0):
        return gpu._live.update_kept(kept, count, grads.data_ptr(), "float32", stream)

    stream = torch.cuda.current_stream().cuda_stream
    assert not update_kept(count=4_999, stream=stream)
    assert not update_kept(stream=torch.cuda.Stream().cuda_stream)
    assert update_kept(stream=stream)
    after = gpu.stats()["cuda"]
    moved = sum(after[name] - before[name] for name in ("kernel_rows", "thread_rows"))
    assert moved == 5_000  # back, and not fetched again
    assert not update_kept(stream=stream)  # good for one
    assert gpu.step == 1


def test_what_was_kept_is_no_good_when_rows_have_changed(twins):
    gpu, _ = twins
    ids = torch.arange(5_000, device="cuda")
    rows, kept = gpu._gather_for_update(ids)
    gpu.scatter(np.array([17]), np.ones((1, gpu.dim), np.float32))
    stream = torch.cuda.current_stream().cuda_stream
    assert not gpu._live.update_kept(kept, 5_000, rows.data_ptr(), "float32", stream)
    assert gpu.step == 0


def test_threads_on_streams_of_their_own(twins):
    gpu, _ = twins
    gpu.scatter(np.arange(ROWS), np.zeros((ROWS, gpu.dim), np.float32))
    errors = []

    def work(number):
        try:
            rng = np.random.default_rng(number)
            mine = np.arange(number, ROWS, 4)
            added = np.zeros(ROWS, np.float32)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(60):
                    ids = rng.choice(mine, int(rng.integers(1, 6_000)))
                    there = torch.from_numpy(ids).cuda()
                    gpu.add(there, torch.ones((len(ids), gpu.dim), device="cuda"))
                    np.add.at(added, ids, 1)
                    look = torch.from_numpy(rng.choice(mine, 5_000)).cuda()
                    rows = gpu.gather(look).cpu().numpy()
                    wanted = added[look.cpu().numpy()]
                    if not (rows == wanted[:, None]).all():
                        errors.append(f"thread {number}: a row is not what it was made")
                        return
        except Exception as error:  # shown by the assertion
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
