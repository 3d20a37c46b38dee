"""Rows that come to the GPU before their batch is looked up."""

from __future__ import annotations

import copy
import gc

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
em_torch = pytest.importorskip("embermap.torch")
pytestmark = pytest.mark.gpu

ROWS = 30_000


def make_table(place, dim=40, device="cuda", **options):
    store = em.open(place, memory="128MiB", device=device, durability="none")
    table = store.create("t", rows=ROWS, dim=dim, optimizer=em.optim.Adagrad(lr=0.1), **options)
    table[:] = np.random.default_rng(1).standard_normal((ROWS, dim)).astype(np.float32)
    table.gather(np.arange(ROWS))
    return store, table


@pytest.fixture(params=[16, 100], ids=["even rows", "rows across lines"])
def twins(request, tmp_path):
    """The same table in memory for the GPU, as a module, and on the host."""
    stores, modules = [], []
    for name, device in (("gpu", "cuda"), ("host", None)):
        store, table = make_table(tmp_path / name, request.param, device)
        stores.append(store)
        modules.append(em_torch.Embedding(table, device=device))
    assert modules[0].table.stats()["whole"]
    yield modules
    for store in stores:
        store.abandon()


def batches(rounds, seed, most=ROWS):
    rng = np.random.default_rng(seed)
    sizes = (1, 7, 1_000, 5_000, 20_000)
    return [torch.from_numpy(rng.integers(0, most, sizes[n % 5])) for n in range(rounds)]


def fetched_batches(table):
    return table.stats()["cuda"]["transfers"]


def train(module, ids, weights):
    rows = module(ids)
    (rows * weights).sum().backward()
    return rows.detach()


@pytest.mark.parametrize("most", [ROWS, 3_000], ids=["few repeat", "many repeat"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_loop_that_prefetches_equals_one_on_the_host(twins, most, depth):
    gpu, host = twins
    optimizers = [em_torch.Optimizer(module) for module in twins]
    all_ids = batches(40, 2, most)
    there = [ids.cuda() for ids in all_ids]
    for ids in there[:depth]:
        gpu.prefetch(ids)
    for number, ids in enumerate(all_ids):
        weights = torch.from_numpy(
            np.random.default_rng(number).integers(-4, 5, (len(ids), gpu.embedding_dim))
        ).float()
        ours = train(gpu, there[number], weights.cuda())
        theirs = train(host, ids, weights)
        assert torch.equal(ours.cpu(), theirs), number
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if number + depth < len(there):
            gpu.prefetch(there[number + depth])
    everything = np.arange(ROWS)
    for field in ("weight", "sum"):
        assert np.array_equal(
            gpu.table.gather(everything, field=field), host.table.gather(everything, field=field)
        )


def test_the_look_up_moves_nothing_again(twins):
    gpu, _ = twins
    ids = torch.arange(0, 5_000, device="cuda")
    gpu.prefetch(ids)
    torch.cuda.synchronize()
    before = gpu.table.stats()["cuda"]
    rows = gpu(ids)
    rows.sum().backward()
    after = gpu.table.stats()["cuda"]
    assert after["kernel_rows"] + after["thread_rows"] == (
        before["kernel_rows"] + before["thread_rows"]
    )
    assert before["kernel_rows"] >= 5_000


def test_rows_changed_in_another_way_are_looked_up_again(twins):
    gpu, _ = twins
    ids = torch.arange(100, 900, device="cuda")
    new = np.full((1, gpu.embedding_dim), 7, np.float32)
    for change in (
        lambda: gpu.table.scatter(np.array([100]), new),
        lambda: gpu.table.scatter(torch.tensor([100]).cuda(), torch.from_numpy(new * 2).cuda()),
        lambda: gpu.table.write(100, new * 3),
        lambda: gpu.table.add(np.array([100]), new),
        lambda: gpu.table.update(np.array([100]), new),
    ):
        gpu.prefetch(ids)
        change()
        with torch.no_grad():
            assert np.array_equal(gpu(ids).cpu().numpy(), gpu.table.gather(ids.cpu().numpy()))


def test_ids_written_to_after_the_call_are_looked_up_anew(twins):
    gpu, host = twins
    ids = torch.arange(0, 500, device="cuda")
    gpu.prefetch(ids)
    ids += 1
    with torch.no_grad():
        assert torch.equal(gpu(ids).cpu(), host(ids.cpu()))
        other = torch.arange(0, 500, device="cuda")
        assert torch.equal(gpu(other).cpu(), host(other.cpu()))


def test_views_of_the_ids_find_their_rows(twins):
    gpu, host = twins
    ids = torch.arange(0, 600, device="cuda")
    with torch.no_grad():
        gpu.prefetch(ids)
        assert torch.equal(gpu(ids.view(20, 30)).cpu(), host(ids.view(20, 30).cpu()))
        gpu.prefetch(ids)
        assert torch.equal(gpu(ids[:300]).cpu(), host(ids[:300].cpu()))


def test_a_bad_id_is_named_by_the_look_up(twins):
    gpu, _ = twins
    for bad in (ROWS, -1):
        ids = torch.arange(0, 3_000, device="cuda")
        ids[77] = bad
        before = gpu.table[:]
        gpu.prefetch(ids)
        with pytest.raises(em.RowIdError, match=f"{bad}.*77"):
            gpu(ids)
        assert np.array_equal(gpu.table[:], before)


def test_what_is_never_used_does_no_harm(twins):
    gpu, host = twins
    for number in range(12):
        gpu.prefetch(torch.randint(0, ROWS, (20_000,), device="cuda"))
        ids = torch.arange(number, number + 50)
        grads = torch.ones(50, gpu.embedding_dim)
        gpu.table.update(ids.cuda(), grads.cuda())
        host.table.update(ids, grads)
    assert np.array_equal(gpu.table[:], host.table[:])
    gpu.prefetch(torch.randint(0, ROWS, (20_000,), device="cuda"))
    gpu.table._store.commit()
    gpu.table.resize(ROWS + 100)
    with torch.no_grad():
        ids = torch.arange(ROWS - 10, ROWS + 100, device="cuda")
        assert gpu(ids).shape == (110, gpu.embedding_dim)


def test_other_streams_and_no_gradients(twins):
    gpu, host = twins
    ids = torch.randint(0, ROWS, (9_000,), device="cuda")
    gpu.prefetch(ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        ours = gpu(ids)
    side.synchronize()
    assert torch.equal(ours.cpu(), host(ids.cpu()).detach())
    gpu.prefetch(ids)
    with torch.inference_mode():
        assert torch.equal(gpu(ids).cpu(), host(ids.cpu()).detach())
    with torch.inference_mode():
        inferred = torch.arange(10, device="cuda")
        gpu.prefetch(inferred)
        assert torch.equal(gpu(inferred).cpu(), host(inferred.cpu()).detach())


def test_two_modules_over_a_table_and_copies(twins):
    gpu, host = twins
    other = copy.deepcopy(gpu)
    ids = torch.randint(0, ROWS, (2_000,), device="cuda")
    gpu.prefetch(ids)
    optimizer = em_torch.Optimizer([gpu, other])
    theirs = em_torch.Optimizer(host)
    for module in (other, gpu):
        module(ids).sum().backward()
    host(ids.cpu()).sum().backward()
    host(ids.cpu()).sum().backward()
    optimizer.step()
    theirs.step()
    assert np.array_equal(gpu.table[:], host.table[:])


def test_a_table_read_from_disk_reads_its_pages(tmp_path):
    with em.open(tmp_path / "s", memory="2MiB", device="cuda", durability="none") as store:
        table = store.create("t", rows=100_000, dim=64, optimizer=em.optim.SGD(lr=1.0))
        table[:] = np.arange(6_400_000, dtype=np.float32).reshape(100_000, 64)
        module = em_torch.Embedding(table)
        ids = torch.randint(0, 100_000, (500,), device="cuda")
        assert module.prefetch(ids).wait(30)
        with torch.no_grad():
            assert torch.equal(module(ids)[:, 0], (ids * 64).float())


def test_a_captured_stream_is_refused(twins):
    gpu, _ = twins
    ids = torch.arange(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(em.CudaError, match="captur"), torch.cuda.graph(graph):
        gpu.prefetch(ids)


def test_device_memory_is_given_back(twins):
    gpu, _ = twins
    for _ in range(30):
        for _ in range(4):
            gpu.prefetch(torch.randint(0, ROWS, (20_000,), device="cuda"))
        gpu._ahead = type(gpu._ahead)()
    gc.collect()
    gpu.table.stats()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    assert free > total // 4


def test_closing_with_rows_on_their_way(tmp_path):
    store, table = make_table(tmp_path / "s")
    module = em_torch.Embedding(table)
    ids = torch.randint(0, ROWS, (20_000,), device="cuda")
    module.prefetch(ids)
    store.abandon()
    with pytest.raises(ValueError, match="closed"):
        module(ids)
    torch.cuda.synchronize()


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_pages_of_ids_on_the_gpu_are_read_when_the_stream_has_come_there(tmp_path, library):
    cupy = pytest.importorskip("cupy") if library == "cupy" else None
    with em.open(tmp_path / "s", memory="4MiB", device="cuda", durability="none") as store:
        table = store.create("t", rows=100_000, dim=64)
        table[:] = np.arange(6_400_000, dtype=np.float32).reshape(100_000, 64)
        ids = torch.randperm(100_000, device="cuda")[:300]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)
            if cupy is None:
                ahead = table.prefetch(ids)
            else:
                with cupy.cuda.ExternalStream(stream.cuda_stream):
                    ahead = table.prefetch(cupy.asarray(ids))
        assert not stream.query()
        assert not ahead.done()
        assert ahead.wait(60)
        before = table.stats()["misses"]
        assert torch.equal(table.gather(ids)[:, 0], (ids * 64).float())
        assert table.stats()["misses"] == before


def test_bad_ids_on_the_gpu_read_nothing(tmp_path):
    with em.open(tmp_path / "s", memory="4MiB", device="cuda", durability="none") as store:
        table = store.create("t", rows=100_000, dim=64)
        table[:] = np.zeros((100_000, 64), np.float32)
        before = table.stats()["misses"]
        assert table.prefetch(torch.tensor([1, 100_000], device="cuda")).wait(60)
        assert table.stats()["misses"] == before
        with pytest.raises(em.RowIdError):
            table.gather(torch.tensor([1, 100_000], device="cuda"))


# --- ids that what was fetched knows --------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["looked up", "fetched ahead"])
def look(request):
    def call(module, ids):
        if request.param and ids.is_cuda:
            module.prefetch(ids)
        return module(ids)

    return call


SIZES = (1, 100, 3_000, 20_000)  # grouped by one kernel, and by several


@pytest.mark.parametrize("size", SIZES)
def test_the_buffer_of_ids_may_be_filled_again_at_once(twins, look, size):
    """Before the pass back, before the step, before the same gradients are applied once more."""
    gpu, host = twins
    ours, theirs = (em_torch.Optimizer(module) for module in twins)
    ids = torch.randint(0, ROWS, (size,))
    weights = torch.randint(-4, 5, (size, gpu.embedding_dim)).float()
    there = ids.cuda()
    rows = look(gpu, there)
    there.random_(0, ROWS)
    (rows * weights.cuda()).sum().backward()
    (host(ids) * weights).sum().backward()
    assert torch.equal(gpu.weight.grad.coalesce().cpu().to_dense(), host.weight.grad.to_dense())
    for _ in range(3):
        ours.step()
        theirs.step()
        assert np.array_equal(gpu.table[:], host.table[:])
        there.random_(0, ROWS)
    assert torch.equal(gpu.weight.grad.coalesce().cpu().to_dense(), host.weight.grad.to_dense())


@pytest.mark.parametrize("size", SIZES)
def test_a_graph_that_is_kept_knows_its_ids(twins, look, size):
    optimizers = [em_torch.Optimizer(module) for module in twins]
    ids = torch.randint(0, ROWS, (size,))
    both = []
    for module, given in zip(twins, (ids.cuda(), ids.clone()), strict=True):
        rows = look(module, given)
        both.append((rows * rows.detach().round()).sum())
        given.fill_(0)
    for _ in range(2):
        for loss, module, optimizer in zip(both, twins, optimizers, strict=True):
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            module.weight.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert np.allclose(twins[0].table[:], twins[1].table[:], rtol=1e-6, atol=1e-6)
    for loss in both:
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_several_passes_are_of_their_ids(twins, look, size):
    gpu, host = twins
    ours, theirs = (em_torch.Optimizer(module) for module in twins)
    buffer = torch.empty(size, dtype=torch.int64, device="cuda")
    for _ in range(4):
        ids = torch.randint(0, ROWS, (size,))
        look(gpu, buffer.copy_(ids)).sum().backward()
        host(ids).sum().backward()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.step()
    theirs.step()
    side.synchronize()
    assert np.allclose(gpu.table[:], host.table[:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_a_step_on_another_stream_and_after_other_changes_has_the_ids(twins, look, size):
    gpu, host = twins
    ours, theirs = (em_torch.Optimizer(module) for module in twins)
    ids = torch.randint(0, ROWS, (size,))
    there = ids.cuda()
    look(gpu, there).sum().backward()
    host(ids).sum().backward()
    there.zero_()
    for module in twins:  # so that what was fetched is no longer what the table has
        module.table.add(np.array([5]), np.ones((1, gpu.embedding_dim), np.float32))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.step()
    theirs.step()
    side.synchronize()
    assert np.array_equal(gpu.table[:], host.table[:])
