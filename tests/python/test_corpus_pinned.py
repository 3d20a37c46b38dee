"""Faults people met with pinned memory and absent GPUs: docs/bug-corpus.md, H, I (B153), K (B163).

Those that need a GPU are marked so; the others run wherever there is none, or whatever there is.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import embermap as em
import numpy as np
import pytest


def numbered(rows: int, dim: int) -> np.ndarray:
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], dim, 1)


def python(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


# --- B141: nothing of the process is changed ------------------------------------------------------

STATE = """
    import gc, locale, os, random, signal, sys, threading, warnings
    from pathlib import Path
    import numpy as np

    def of_torch():
        if "torch" not in sys.modules:
            return ()
        import torch
        state = [torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
                 torch.get_rng_state().numpy().tobytes(),
                 torch.are_deterministic_algorithms_enabled(),
                 str(torch.get_default_device()), torch.is_inference_mode_enabled()]
        if torch.cuda.is_initialized():
            state += [torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream,
                      torch.cuda.get_rng_state().numpy().tobytes(),
                      torch.cuda.memory.get_allocator_backend(),
                      torch.cuda.memory_allocated()]
        return tuple(state)

    def of_process():
        mask = os.umask(0o22)
        os.umask(mask)
        handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
        text = Path("/proc/self/status").read_text()
        status = {line.split(":")[0]: line for line in text.splitlines()}
        return {
            "handlers": {n: h for n, h in handlers.items()},
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            # SIGBUS (7) has a handler of ours with the first mapping, which hands on: documented.
            "caught": int(status["SigCgt"].split()[1], 16) & ~(1 << 6),
            "ignored": status["SigIgn"],
            "floats": (np.geterr(), float(np.float32(1e-40)) != 0, 1e-310 + 1e-311 > 1e-310),
            "random": (random.getstate(), str(np.random.get_state())),
            "umask": mask, "cwd": os.getcwd(), "locale": locale.setlocale(locale.LC_ALL),
            # Of which torch sets one with its first optimizer.
            "environment": {k: v for k, v in os.environ.items() if not k.startswith("TORCHIN")},
            "recursion": sys.getrecursionlimit(),
            "switch": sys.getswitchinterval(), "gc": gc.get_threshold(),
            "excepthook": sys.excepthook, "threads": threading.active_count(),
            "nice": os.nice(0), "affinity": os.sched_getaffinity(0),
            "limits": Path("/proc/self/limits").read_text(),
            "torch": of_torch(),
        }
"""


@pytest.mark.parametrize("place", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_of_the_process_is_changed(path, place):
    pytest.importorskip("torch")
    code = (
        STATE
        + """
    import embermap as em, torch
    device = None if sys.argv[2] == "host" else "cuda"
    where = device or "cpu"
    if device:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    warnings.simplefilter("error")
    before = of_process()

    def use(mode, pin):
        with em.open(sys.argv[1], mode=mode, memory="8MiB", device=device, pin=pin) as store:
            if mode == "a":
                table = store.create("t", rows=3000, dim=16, optimizer=em.optim.Adagrad(0.1),
                                     init=em.init.Normal())
                table.materialize()
                ids = torch.arange(1000, device=where)
                embedding = em.torch.Embedding(table, device=where)
                optimizer = em.torch.Optimizer([embedding])
                loss = embedding(ids).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
            table = store["t"]
            table.prefetch([5]).wait()
            rows = table.gather(torch.arange(100, device=where))
            try:
                table.gather([3000])
            except em.RowIdError:
                pass
            del rows

    for mode, pin in (("a", "frames"), ("r", "frames"), ("r", "mapping")):
        use(mode, pin)
        gc.collect()
        after = of_process()
        changed = {key for key in before if before[key] != after[key]}
        assert not changed, (mode, pin, {k: (before[k], after[k]) for k in changed})
    """
    )
    done = python(code, path, place)
    assert (done.returncode, done.stderr) == (0, "")


# --- B136: limits on locked memory ----------------------------------------------------------------


@pytest.fixture
def as_nobody(tmp_path):
    """run(limit, *arguments): the program as a user whose locked memory is limited, in a folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    given = os.environ.get("EMBERMAP_CLI") or shutil.which("embermap")
    beside = Path(sys.executable).parent / "embermap"
    program = Path(given) if given else beside
    if not program.exists():
        pytest.fail("the embermap program is neither in EMBERMAP_CLI nor installed")
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="embermap-memlock-"))
    folder.chmod(0o777)
    shutil.copy(program, folder / "program")
    (folder / "program").chmod(0o755)

    def run(limit, *arguments):
        return subprocess.run(
            [folder / "program", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            user=65534,
            group=65534,
            extra_groups=[],
            timeout=120,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit)),
        )

    yield folder, run
    shutil.rmtree(folder)


@pytest.mark.parametrize("limit", [0, 64 << 10, 8 << 20])
@pytest.mark.parametrize("io", ["auto", "io_uring", "threads"])
def test_a_limit_on_locked_memory_costs_nothing_but_speed(as_nobody, limit, io):
    folder, run = as_nobody
    rows = numbered(20_000, 64)
    np.save(folder / "a.npy", rows)
    (folder / "a.npy").chmod(0o644)
    for arguments in (
        ["import", "a.npy", "s/t", "--memory", "4MiB"],
        ["verify", "s", "--memory", "4MiB"],
        ["export", "s/t", "b.npy", "--memory", "4MiB"],
    ):
        done = run(limit, *arguments, "--io", io, "--quiet")
        assert (done.returncode, done.stderr) == (0, ""), arguments
    assert np.array_equal(np.load(folder / "b.npy"), rows)


# --- B142, B153: without a GPU, without its driver, with a wrong one ------------------------------

CPU_WORK = """
    import sys, numpy as np, embermap as em
    with em.open(sys.argv[1], memory="4MiB") as store:
        table = store.create("t", rows=1000, dim=8, optimizer=em.optim.Adagrad())
        table[:] = 1
        table.update([3, 3], np.ones((2, 8), np.float32))
        table.export(sys.argv[1] + ".npy")
    for pin in ("frames", "mapping"):
        with em.open(sys.argv[1], mode="r", pin=pin) as store:
            assert store["t"].gather([5]).tolist() == [[1] * 8]
            stats = store["t"].stats()
            assert not stats["registered"] and stats["pinned"] is None, stats
    assert em.cuda_devices() == 0
    reason = em.cuda_absence()
    assert reason and "\\n" not in reason and len(reason) < 300, reason
    for device in ("cuda", "cuda:0", 0):
        try:
            em.open(sys.argv[1], mode="r", device=device)
        except em.CudaError as error:
            assert reason in str(error), error
        else:
            raise AssertionError("a store on a GPU that is not there")
    with em.open(sys.argv[1], mode="r") as store:  # and it goes on working
        assert store["t"].gather([5]).tolist() == [[1] * 8]
    print(reason)
"""


def test_all_of_the_cpu_works_where_no_device_is_visible(path):
    done = python(CPU_WORK, path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode, done.stderr) == (0, "")


STUBS = {
    # A driver's library without anything in it, as a stub for linking has it.
    "empty": "int embermap_test_nothing;",
    # One that says there is no device, or that it is too old, whatever it is asked.
    "refusing": """
        int cuInit(unsigned flags) { return 100; }
        int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
        int cuDeviceGetCount(int* count) { *count = 0; return 100; }
        int cuGetProcAddress(const char* n, void** f, int v, unsigned long x) {
          *f = 0; return 500; }
        int cuGetProcAddress_v2(const char* n, void** f, int v, unsigned long x, void* s) {
          *f = 0; return 500; }
    """,
    "old": """
        int cuInit(unsigned flags) { return 0; }
        int cuDriverGetVersion(int* version) { *version = 9000; return 0; }
    """,
}


@pytest.mark.parametrize("kind", STUBS)
def test_all_of_the_cpu_works_beside_a_driver_that_is_none(path, tmp_path, kind):
    """A login node, a container: libcuda.so.1 is a stub, or older than any that would do."""
    source, folder = tmp_path / "stub.c", tmp_path / "lib"
    folder.mkdir()
    source.write_text(STUBS[kind])
    library = folder / "libcuda.so.1"
    try:
        made = subprocess.run(
            ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no C compiler")
    assert made.returncode == 0, made.stderr
    before = os.environ.get("LD_LIBRARY_PATH")
    where = f"{folder}:{before}" if before else str(folder)
    done = python(CPU_WORK, path, env={**os.environ, "LD_LIBRARY_PATH": where})
    assert (done.returncode, done.stderr) == (0, "")


def test_the_import_does_not_touch_the_driver(tmp_path):
    """Nor does a store without a device: the library is loaded when it is first asked for."""
    code = """
        import sys, embermap as em
        def loaded():
            return [line for line in open("/proc/self/maps") if "libcuda.so" in line]
        assert not loaded()
        with em.open(sys.argv[1]) as store:
            store.create("t", rows=10, dim=2)[:] = 1
        assert not loaded()
    """
    done = python(code, tmp_path / "s")
    assert (done.returncode, done.stderr) == (0, "")


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if em.cuda_devices() > 0:
        assert module.cuda.is_available(), "embermap sees a CUDA device that torch does not see"
    return module


@pytest.mark.gpu
def test_a_file_that_others_have_registered(path, torch):
    """B132: the same pages pinned by another part of the program, and by a second handle."""
    with em.open(path) as store:
        table = store.create("t", rows=50_000, dim=32)
        table[:] = numbered(50_000, 32)
        file = table.path
    foreign = np.load(file, mmap_mode="r")
    cudart = torch.cuda.cudart()
    ids = torch.arange(0, 50_000, 7, device="cuda")
    start, bytes_, read_only = foreign.ctypes.data & ~4095, 1 << 20, 8
    status = int(cudart.cudaHostRegister(start, bytes_, read_only))
    if status != 0:  # not everywhere; torch's next call reports it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    wanted = ids.cpu().to(torch.float32)
    options = {"mode": "r", "pin": "mapping", "memory": "1MiB", "device": "cuda"}
    try:
        with em.open(path, **options) as one, em.open(path, **options) as two:
            for _ in range(2):
                for store in (one, two):
                    assert store["t"].gather(ids)[:, 3].cpu().equal(wanted)
            one.close()
            assert two["t"].gather(ids)[:, 3].cpu().equal(wanted)
        assert torch.ones(10, device="cuda").sum().item() == 10  # no error is left behind
    finally:
        if status == 0:
            assert int(cudart.cudaHostUnregister(start)) == 0


@pytest.mark.gpu
def test_an_open_that_fails_leaves_no_error_for_others(path, torch):
    """B130: what fails is told once, where it fails."""
    with em.open(path) as store:
        store.create("t", rows=100, dim=4)[:] = 1
    for _ in range(3):
        with pytest.raises(em.CudaError):
            em.open(path, device=em.cuda_devices())
        with pytest.raises(em.BudgetError):
            em.open(path, device="cuda", memory=100)
        assert torch.ones(1000, device="cuda").sum().item() == 1000
        torch.cuda.synchronize()
    with em.open(path, device="cuda") as store:
        assert store["t"].gather(torch.tensor([5], device="cuda")).tolist() == [[1] * 4]


@pytest.mark.gpu
def test_pinned_and_device_memory_stay_bounded(path, torch):
    """B139: 1,000 batches of changing size take no more than the largest one."""
    rng = np.random.default_rng(0)
    with em.open(path, memory="64MiB", device="cuda") as store:
        table = store.create("t", rows=200_000, dim=32, optimizer=em.optim.Adagrad())
        largest = torch.arange(100_000, device="cuda")
        for _ in range(3):
            table.update(largest, table.gather(largest))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

        def taken():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, whole = torch.cuda.mem_get_info()
            status = Path("/proc/self/status").read_text()
            resident = next(int(x.split()[1]) << 10 for x in status.splitlines() if "VmRSS" in x)
            return whole - free, resident, table.stats()["io_memory_bytes"]

        before = taken()
        for size in rng.integers(1, 100_000, 1_000).tolist():
            rows = table.gather(largest[:size])
            if size % 5 == 0:
                table.update(largest[:size], rows)
            del rows
        after = taken()
        for kind, first, last in zip(("device", "resident", "io"), before, after, strict=True):
            assert last <= first + (64 << 20), (kind, first, last)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["1MiB", "64MiB"])
def test_tables_larger_than_what_may_be_pinned_work(path, torch, memory):
    """B135: frames are what the budget says, and rows of a larger table go through them."""
    with em.open(path, memory=memory, device="cuda") as store:
        table = store.create("t", rows=1_000_000, dim=64)
        for first in range(0, 1_000_000, 37_000):
            ids = torch.arange(first, min(first + 20_000, 1_000_000), device="cuda")
            table.scatter(ids, ids[:, None].expand(-1, 64).float())
            assert table.gather(ids)[:, 63].equal(ids.float())
        assert table.stats()["memory_bytes"] <= store.memory
        store.abandon()


@pytest.mark.gpu
def test_a_gpu_whose_memory_is_taken(path, torch):
    """B142: one clear error or the work done, and nothing left behind; all goes on on the host."""
    with em.open(path) as store:
        store.create("t", rows=100_000, dim=64)[:] = 1
    ids, told = torch.arange(50_000), []
    few = ids[:100].cuda()
    kept = []
    size = 1 << 34
    while size >= 1 << 20:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            size //= 2
    try:
        with em.open(path, mode="r", device="cuda") as store:
            assert (store["t"].gather(ids) == 1).all()
            try:
                got = store["t"].gather(few)
            except (em.CudaError, torch.cuda.OutOfMemoryError) as error:
                told.append(str(error))
            else:
                assert bool((got.cpu() == 1).all())
            assert (store["t"].gather(ids) == 1).all()
    except em.CudaError as error:
        told.append(str(error))
    finally:  # other tests need some of it
        kept.clear()
        torch.cuda.empty_cache()
    assert all("memory" in text for text in told), told
    with em.open(path, mode="r") as store:
        assert (store["t"].gather(ids) == 1).all()
    with em.open(path, mode="r", device="cuda") as store:
        assert (store["t"].gather(ids.cuda()) == 1).all()


# --- B163: tables in different places -------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("subset", range(1, 8))
@pytest.mark.parametrize("hot", ["none", "part", "all"])
def test_every_mix_of_tables_in_different_places(path, where, subset, hot):
    """Kept whole in memory, a few pages of it, mapped: looked up in one call, with any hit rate."""
    torch = pytest.importorskip("torch")
    device = None if where == "host" else "cuda"
    rows, dim = 4_000, 32  # 125 pages
    reference = numbered(rows, dim)
    stores, modules = [], {}
    path.mkdir()
    for name in ("whole", "few", "map"):
        with em.open(path / name) as store:
            store.create("t", rows=rows, dim=dim, optimizer=em.optim.SGD(1.0))[:] = reference
    for number, (name, memory) in enumerate([("whole", "16MiB"), ("few", "64KiB"), ("map", None)]):
        if not subset >> number & 1:
            continue
        options = {"memory": memory} if memory else {"mode": "r", "pin": "mapping"}
        store = em.open(path / name, device=device, **options)
        stores.append(store)
        table = store["t"]
        if hot != "none":
            table.gather(np.arange(rows if hot == "all" else rows // 2))
        module = em.torch.Embedding(table, device=device or "cpu")
        if name == "map":
            module.requires_grad_(False)
        modules[name] = module
    try:
        collection = em.torch.EmbeddingCollection(modules)
        generator = torch.Generator().manual_seed(subset)
        for _ in range(3):
            ids = {name: torch.randint(0, rows, (500,), generator=generator) for name in modules}
            got = collection({name: some.to(device or "cpu") for name, some in ids.items()})
            for name, some in ids.items():
                assert np.array_equal(got[name].detach().cpu().numpy(), reference[some.numpy()])
        trained = [name for name in modules if name != "map"]
        if trained:
            optimizer = em.torch.Optimizer(modules[name] for name in trained)
            sum(value.sum() for value in got.values()).backward()
            optimizer.step()
            for name in trained:
                counts = np.bincount(ids[name].numpy(), minlength=rows).astype(np.float32)
                assert np.array_equal(modules[name].table[:], reference - counts[:, None])
    finally:
        for store in stores:
            store.abandon()
