"""CUDA tensors: every call gives what it gives on the host, bit for bit."""

from __future__ import annotations

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROWS, DIM = 3_000, 33
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64"]


@pytest.fixture(scope="module", autouse=True)
def device():
    if em.cuda_devices() > 0:
        assert torch.cuda.is_available(), "embermap sees a CUDA device that torch does not see"
    return torch.device("cuda:0")


@pytest.fixture(params=["32MiB", "256KiB"])
def pair(tmp_path, request):
    """Two tables of the same rows: one used by the GPU, one by the host."""
    stores = []

    def make(name="float32", optimizer=None, rows=ROWS, dim=DIM):
        tables = []
        for where in ("cuda", None):
            store = em.open(tmp_path / str(where), memory=request.param, device=where)
            stores.append(store)
            table = store.create("t", rows=rows, dim=dim, dtype=name, optimizer=optimizer, seed=5)
            values = np.random.default_rng(0).integers(0, 50, (rows, dim))
            table[:] = values.astype(table.dtype)
            tables.append(table)
        return tables

    yield make
    for store in stores:
        store.abandon()


def same(ours, theirs):
    for field in ours.fields:
        assert ours.read(field=field).tobytes() == theirs.read(field=field).tobytes()


def test_the_store_says_its_device(pair):
    gpu, host = pair()
    assert gpu._store.device == 0
    assert host._store.device is None
    assert "device=cuda:0" in repr(gpu._store)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 17, 257])
def test_rows_go_and_come(pair, device, name, dim):
    gpu, host = pair(name, dim=dim)
    rng = torch.Generator().manual_seed(dim)
    for _ in range(3):
        ids = torch.randint(0, ROWS, (700,), generator=rng)
        rows = torch.randint(0, 20, (700, dim), generator=rng).to(getattr(torch, name))
        gpu.scatter(ids.to(device), rows.to(device))
        host.scatter(ids, rows)
        gpu.add(ids.to(device), rows.to(device))
        host.add(ids, rows)
        got = gpu.gather(ids.to(device))
        assert got.device == device
        assert got.dtype == getattr(torch, name)
        assert got.cpu().equal(host.gather(ids))
    same(gpu, host)


@pytest.mark.parametrize("shape", [(), (1,), (31,), (32,), (33,), (4, 5), (0,), (3, 0)])
@pytest.mark.parametrize("kind", ["int64", "int32", "uint8"])
def test_shapes_and_widths_of_ids(pair, device, shape, kind):
    gpu, host = pair()
    ids = torch.randint(0, 200, shape).to(getattr(torch, kind))
    assert gpu.gather(ids.to(device)).cpu().equal(host.gather(ids))
    gpu.prefetch(ids.to(device))


@pytest.mark.parametrize(
    "optimizer",
    [
        em.optim.SGD(0.1),
        em.optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        em.optim.Adagrad(0.1, lr_decay=0.1, weight_decay=0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
def test_updates(pair, device, optimizer, name):
    gpu, host = pair(name, optimizer)
    for step in range(4):
        rng = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 300, (900,), generator=rng)
        grads = torch.randn(900, DIM, generator=rng).to(getattr(torch, name))
        gpu.update(ids.to(device), grads.to(device), lr=0.2 if step == 2 else None)
        host.update(ids, grads, lr=0.2 if step == 2 else None)
    assert gpu.step == host.step == 4
    same(gpu, host)


def test_host_ids_work_beside(pair, device):
    gpu, host = pair("float32", em.optim.SGD(0.1))
    ids = torch.arange(10)
    ones = torch.ones(10, DIM)
    for table in (gpu, host):
        table.update(ids, ones)
    gpu.add(ids.to(device), ones.to(device))
    host.add(ids, ones)
    assert gpu.gather(ids).device.type == "cpu"
    same(gpu, host)


def test_views_and_lists_as_values(pair, device):
    gpu, host = pair()
    x = torch.arange(10 * 2 * DIM, dtype=torch.float32).reshape(10, 2 * DIM)
    ids = torch.arange(10)
    for view in (x[:, ::2], x[:, DIM:], x[:, :DIM].flip(0), x[0, :DIM].expand(10, DIM)):
        gpu.scatter(ids.to(device), view.to(device))
        host.scatter(ids, view)
        same(gpu, host)
    gpu.scatter(ids[:1].to(device), [[1.5] * DIM])
    host.scatter(ids[:1], [[1.5] * DIM])
    gpu[5:9] = x[0, :DIM].to(device)
    host[5:9] = x[0, :DIM]
    gpu[7] = x[1, :DIM].to(device)
    host[7] = x[1, :DIM]
    gpu[ids.to(device)] = x[:, :DIM].to(device)
    host[ids] = x[:, :DIM]
    gpu[ids.to(device) + 50] = 3
    host[ids + 50] = 3
    mask = torch.arange(ROWS) % 5 == 0
    assert gpu[mask.to(device)].cpu().equal(host[mask])
    same(gpu, host)


def test_duplicates(pair, device):
    gpu, host = pair()
    ids = torch.full((100_000,), 5)
    rows = torch.arange(100_000.0).unsqueeze(1).expand(-1, DIM)
    for table, place in ((gpu, device), (host, "cpu")):
        table.scatter(ids.to(place), rows.to(place))
        table.add((ids - 2).to(place), torch.ones(100_000, DIM, device=place))
    assert (gpu[5] == 99_999).all()
    same(gpu, host)


def test_bad_ids_are_named_and_the_gpu_goes_on_working(pair, device):
    gpu, host = pair()
    for ids, bad, position in (
        ([0, ROWS], ROWS, 1),
        ([5, 2**40, -1], 2**40, 1),
        ([-ROWS - 1], -ROWS - 1, 0),
    ):
        tensor = torch.tensor(ids, device=device)
        ones = torch.ones(len(ids), DIM, device=device)
        for call in (
            lambda t=tensor: gpu.gather(t),
            lambda t=tensor, o=ones: gpu.scatter(t, o),
            lambda t=tensor, o=ones: gpu.add(t, o),
        ):
            with pytest.raises(em.RowIdError, match=f"{bad} at position {position}"):
                call()
        torch.cuda.synchronize()
    with pytest.raises(em.RowIdError, match=str(2**64 - 1)):
        gpu.gather(torch.tensor([-1], device=device).view(torch.uint64))
    assert (
        gpu.gather(torch.tensor([ROWS - 1], device=device))
        .cpu()
        .equal(host.gather(torch.tensor([ROWS - 1])))
    )
    same(gpu, host)


def test_out(pair, device):
    gpu, host = pair()
    ids = torch.tensor([3, 1], device=device)
    out = torch.empty(2, DIM, device=device)
    assert gpu.gather(ids, out=out) is out
    assert out.cpu().equal(host.gather(ids.cpu()))
    for bad, error in (
        (torch.empty(2, DIM), ValueError),
        (torch.empty(3, DIM, device=device), ValueError),
        (torch.empty(2, DIM, device=device, dtype=torch.float64), TypeError),
        (torch.empty(DIM, 2, device=device).T, ValueError),
        (np.empty((2, DIM), np.float32), ValueError),
    ):
        with pytest.raises(error):
            gpu.gather(ids, out=bad)
    with pytest.raises(ValueError, match="out on cuda:0"):
        gpu.gather([1, 2], out=out)


def test_wrong_places_are_errors_never_no_effect(pair, device):
    gpu, host = pair("float32", em.optim.SGD(0.1))
    before = gpu[:]
    ids = torch.tensor([1, 2])
    ones = torch.ones(2, DIM)
    for call, text in (
        (lambda: gpu.scatter(ids.to(device), ones), "cuda:0.*host"),
        (lambda: gpu.scatter(ids, ones.to(device)), "host.*cuda:0"),
        (lambda: gpu.update(ids, ones.to(device)), "host.*cuda:0"),
        (lambda: gpu.add([1, 2], ones.to(device)), "host.*cuda:0"),
        (lambda: gpu.scatter(ids.to(device), ones.numpy()), "cuda:0.*host"),
        (lambda: host.gather(ids.to(device)), 'device="cuda"'),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match=r"cuda:1.*cuda:0"):
            gpu.gather(ids.to("cuda:1"))
    assert np.array_equal(gpu[:], before)


def test_work_is_ordered_on_the_current_stream(pair, device):
    gpu, host = pair()
    side = torch.cuda.Stream()
    big = torch.randn(4_000, 4_000, device=device)
    for step in range(5):
        with torch.cuda.stream(side):
            busy = big
            for _ in range(5):
                busy = busy @ big  # the stream is far behind
            ids = (torch.arange(500, device=device) + step).clone()
            rows = torch.full((500, DIM), float(step), device=device)
            gpu.scatter(ids, rows)
            ids.zero_()  # after the scatter, in stream order
            rows.zero_()
            got = gpu.gather(torch.arange(500, device=device) + step) + 1
        side.synchronize()
        assert (got == step + 1).all()
        host.scatter(torch.arange(500) + step, torch.full((500, DIM), float(step)))
    same(gpu, host)


def test_cupy_arrays(pair):
    cupy = pytest.importorskip("cupy")
    gpu, host = pair("float32", em.optim.Adagrad(0.1))
    ids = np.array([[3, 1], [1, 7]])
    got = gpu.gather(cupy.asarray(ids))
    assert isinstance(got, cupy.ndarray)
    assert np.array_equal(got.get(), host.gather(ids))
    rows = np.arange(4 * DIM, dtype=np.float32).reshape(2, 2, DIM)
    for method in ("scatter", "add", "update"):
        getattr(gpu, method)(cupy.asarray(ids), cupy.asarray(rows))
        getattr(host, method)(ids, rows)
    gpu.add(torch.tensor(ids, device="cuda"), cupy.asarray(rows))
    host.add(ids, rows)
    out = cupy.empty((2, 2, DIM), np.float32)
    assert gpu.gather(cupy.asarray(ids), out=out) is out
    same(gpu, host)


def test_other_cuda_arrays_by_dlpack(pair, device):
    class Foreign:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    gpu, host = pair()
    ids = torch.tensor([4, 2])
    got = gpu.gather(Foreign(ids.to(device)))
    assert torch.from_dlpack(got).cpu().equal(host.gather(ids))
    gpu.scatter(Foreign(ids.to(device)), Foreign(torch.ones(2, DIM, device=device)))
    host.scatter(ids, torch.ones(2, DIM))
    same(gpu, host)


@pytest.mark.parametrize("optimizer", [em.optim.SGD(0.1, momentum=0.9), em.optim.Adagrad(0.1)])
def test_a_training_loop_equals_that_on_the_host(pair, device, optimizer):
    gpu, host = pair("float32", optimizer)
    losses = []
    for table, place in ((gpu, device), (host, "cpu")):
        embedding = em.torch.Embedding(table, device=place)
        steps = em.torch.Optimizer([embedding])
        rng = torch.Generator().manual_seed(0)
        for _ in range(10):
            ids = torch.randint(0, 300, (8, 25), generator=rng)
            out = embedding(ids.to(place))
            assert out.device.type == torch.device(place).type
            loss = (out * 0.01).square().sum()
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(loss.item())
    assert losses[:10] == pytest.approx(losses[10:], rel=1e-5)
    np.testing.assert_allclose(gpu[:], host[:], rtol=1e-5, atol=1e-5)


def test_equal_to_nn_embedding_on_the_gpu(pair, device):
    gpu, _ = pair("float32", em.optim.Adagrad(0.1))
    embedding = em.torch.Embedding(gpu)
    steps = em.torch.Optimizer([embedding])
    theirs = torch.nn.Embedding(ROWS, DIM, sparse=True, device=device)
    theirs.weight.data.copy_(torch.from_numpy(gpu[:]))
    other = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for _ in range(5):
        ids = torch.randint(0, 200, (400,), device=device)
        for module, optimizer in ((embedding, steps), (theirs, other)):
            optimizer.zero_grad()
            (module(ids) * 0.01).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(
        torch.from_numpy(gpu[:]), theirs.weight.data.cpu(), rtol=1e-6, atol=1e-6
    )


def test_children_do_not_touch_the_gpu(pair, device):
    import os

    gpu, _ = pair()
    gpu.gather(torch.tensor([1], device=device))
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(em.ForkError):
                gpu.gather([1])
            gpu._store.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gpu.gather(torch.tensor([1], device=device)).shape == (1, DIM)
