"""pin="mapping" on a device: kernels read the tables' files from the page cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROWS = 20_000
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64"]


@pytest.fixture(scope="module", autouse=True)
def device():
    if em.cuda_devices() > 0:
        assert torch.cuda.is_available(), "embermap sees a CUDA device that torch does not see"
    return torch.device("cuda:0")


def mapped(path, **options):
    return em.open(path, mode="r", pin="mapping", memory="1MiB", device="cuda", **options)


def fill(path, dim=32, dtype="float32", optimizer=None, seed=0):
    with em.open(path, memory="64MiB") as store:
        table = store.create("t", rows=ROWS, dim=dim, dtype=dtype, optimizer=optimizer)
        values = np.random.default_rng(seed).integers(0, 50, (ROWS, dim))
        table[:] = values.astype(table.dtype)
        if optimizer is not None:
            table.update(np.arange(0, ROWS, 3), np.ones((len(range(0, ROWS, 3)), dim), table.dtype))


def some_ids(count=30_000, rows=ROWS):
    return torch.randint(0, rows, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 17, 128, 257])
def test_rows_are_those_of_the_file(path, device, name, dim):
    fill(path, dim, name)
    ids = some_ids()
    with mapped(path) as store, em.open(path, mode="r", memory="64MiB") as plain:
        table = store["t"]
        for some in (ids, ids[:1], ids[:0], ids[:257], torch.arange(ROWS)):
            got = table.gather(some.to(device))
            assert got.device == device
            assert got.cpu().equal(plain["t"].gather(some))
        assert table.gather(ids).equal(plain["t"].gather(ids))  # on the host, beside
        stats = table.stats()
        assert stats["frames"] == 0
        assert stats["rows_mapped"] == stats["rows_gathered"]


def test_the_mapping_is_registered(path, device, capfd):
    fill(path)
    with mapped(path) as store:
        table = store["t"]
        table.gather([0])
        assert table.stats()["pinned"] is None
        table.gather(torch.tensor([0], device=device))
        stats = table.stats()
        assert stats["pinned"] == "mapping", capfd.readouterr().err
        assert stats["registered"] is True
        assert stats["mapped_bytes"] == (path / "t.npy").stat().st_size
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_fields(path, device, name):
    fill(path, 33, name, em.optim.Adagrad(0.1))
    ids = some_ids(5_000)
    with mapped(path) as store, em.open(path, mode="r", memory="64MiB") as plain:
        for field in plain["t"].fields:
            got = store["t"].gather(ids.to(device), field=field)
            assert got.cpu().equal(plain["t"].gather(ids, field=field))


@pytest.mark.parametrize("offset", [128, 81, 1_000, 4_096, 5_001])
@pytest.mark.parametrize("dim", [5, 64])
def test_adopted_files_at_any_offset(path, tmp_path, device, offset, dim):
    values = np.random.default_rng(1).random((ROWS, dim), np.float32)
    np.save(tmp_path / "a.npy", values)
    raw = (tmp_path / "a.npy").read_bytes()
    text = re.match(rb"\{.*\}", raw[10:128], re.DOTALL).group()
    header = raw[:8] + (offset - 10).to_bytes(2, "little") + text.ljust(offset - 11) + b"\n"
    (tmp_path / "a.npy").write_bytes(header + values.tobytes())
    with em.open(path) as store:
        store.adopt("t", tmp_path / "a.npy")
    ids = some_ids()
    with mapped(path) as store:
        assert np.array_equal(store["t"].gather(ids.to(device)).cpu().numpy(), values[ids.numpy()])
        assert store["t"].stats()["pinned"] == "mapping"


def test_bad_ids(path, device):
    fill(path)
    with mapped(path) as store:
        with pytest.raises(em.RowIdError, match=f"{ROWS} at position 1"):
            store["t"].gather(torch.tensor([0, ROWS], device=device))
        assert store["t"].gather(torch.tensor([1], device=device)).shape == (1, 32)


def test_what_is_not_in_the_file_is_refused(path, device):
    with em.open(path) as store:
        store.create("t", rows=ROWS, dim=32)[:1] = 1
    with mapped(path) as store, pytest.raises(ValueError, match="embermap materialize"):
        store["t"].gather(torch.tensor([0], device=device))


def test_commits_of_a_writer(path, device):
    """A device keeps the pages it was given: those that changed must not be taken for new ones."""
    fill(path)
    ids = torch.arange(ROWS)
    with em.open(path, memory="64MiB") as writer, mapped(path) as store:
        table = store["t"]
        before = table.gather(ids.to(device)).cpu()
        for number in range(1, 5):
            writer["t"][100:300] = float(-number)
            writer.commit()
            assert table.gather(ids.to(device)).cpu().equal(before)  # the log has it
            # A reader of this commit, whose pages are applied while it looks.
            with mapped(path) as late:
                for _ in range(2):
                    got = late["t"].gather(ids.to(device)).cpu()
                    assert (got[100:300] == -number).all()
                    assert got[300:].equal(before[300:])
                    writer.checkpoint()
            out = torch.full((ROWS, 32), 7.0, device=device)
            with pytest.raises(em.StaleError):
                table.gather(ids.to(device), out=out)
            assert (out == 7).all()
            store.refresh()
            before = table.gather(ids.to(device)).cpu()
            assert (before[100:300] == -number).all()
            assert table.stats()["pinned"] == "mapping"
        assert np.array_equal(before.numpy(), writer["t"][:])


def test_a_refresh_that_finds_nothing_new_keeps_the_registration(path, device):
    fill(path)
    with mapped(path) as store:
        table = store["t"]
        table.gather(torch.tensor([0], device=device))
        store.refresh()
        assert table.stats()["pinned"] == "mapping"
        assert table.gather(torch.tensor([5], device=device)).shape == (1, 32)


def test_a_file_that_is_cut_short(path, device):
    fill(path)
    content = (path / "t.npy").read_bytes()
    with mapped(path) as store:
        table = store["t"]
        before = table.gather(torch.arange(ROWS, device=device)).cpu()
        os.truncate(path / "t.npy", 100_000)
        with pytest.raises(em.FormatError, match="truncated"):
            table.gather(torch.arange(ROWS, device=device))
        with pytest.raises(em.FormatError, match="truncated"):
            table.gather(np.arange(ROWS))
        torch.cuda.synchronize()
        (path / "t.npy").write_bytes(content)
        store.refresh()
        assert table.gather(torch.arange(ROWS, device=device)).cpu().equal(before)


def test_a_file_larger_than_memory_is_not_registered(path, tmp_path, device, capfd):
    """Its rows go from the mapping through staging."""
    rows = 2**27 + 5
    shape = (rows, 16_384)  # 8 TiB, all holes
    file = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, shape)
    file[-1] = 7
    del file
    with em.open(path, memory="64MiB") as store:
        store.adopt("t", tmp_path / "a.npy")
    with em.open(path, mode="r", pin="mapping", memory="64MiB", device="cuda") as store:
        for _ in range(2):
            got = store["t"].gather(torch.tensor([rows - 1, 0, rows - 1], device=device))
            assert got[:, 5].tolist() == [7, 0, 7]
        stats = store["t"].stats()
        assert stats["pinned"] is None
        assert stats["frames"] == 0
        assert stats["rows_mapped"] == 6
        # Shorter than it was, and the last row is read by the host.
        os.truncate(tmp_path / "a.npy", 2**43)
        with pytest.raises(em.FormatError, match="truncated"):
            store["t"].gather(torch.tensor([rows - 1], device=device))
    warning = capfd.readouterr().err
    assert warning.count("warning") == 1
    assert "the machine has" in warning


CHILD = """
    import sys
    import embermap as em, numpy as np, torch
    with em.open(sys.argv[1], mode="r", pin="mapping", memory="1MiB", device="cuda") as store:
        table = store["t"]
        ids = torch.arange(len(table), device="cuda")
        first = table.gather(ids)
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(50):
            assert table.gather(ids).equal(first)
        assert table.stats()["pinned"] == "mapping"
        np.save(sys.argv[2], first.cpu().numpy())
"""


def test_processes_at_once(path, tmp_path, device):
    """All of them read the same pages of the page cache."""
    fill(path, 128)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), path, tmp_path / f"{k}.npy"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(3)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        with mapped(path) as store:
            ids = torch.arange(ROWS, device=device)
            first = store["t"].gather(ids)
            for child in children:
                child.stdin.write("\n")
                child.stdin.flush()
            for _ in range(20):
                assert store["t"].gather(ids).equal(first)
            for child in children:
                assert child.wait(timeout=120) == 0
            for k in range(3):
                assert np.array_equal(np.load(tmp_path / f"{k}.npy"), first.cpu().numpy())
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_module_of_torch(path, device):
    fill(path)
    ids = some_ids(1_000)
    with mapped(path) as store, em.open(path, mode="r", memory="64MiB") as plain:
        embedding = em.torch.Embedding(store["t"], device=device)
        with torch.no_grad():
            assert embedding(ids.to(device)).cpu().equal(plain["t"].gather(ids))
