"""Co-occurrence counts: sparse, in files, through little memory."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import embermap.speedtorch as SpeedTorch  # noqa: E402

V = 300


@pytest.fixture
def counts():
    made = SpeedTorch.COM(V, memory="1MiB")
    made.comInit()
    yield made
    made.close()


def draw(count, seed=0, classes=V):
    rng = np.random.default_rng(seed)
    return rng.integers(0, classes, (2, count)) ** 2 // classes


def count_dense(classes, pairs, values=1):
    dense = np.zeros((classes, classes), np.int64)
    np.add.at(dense, tuple(pairs), values)
    return dense


def check(counts, dense):
    assert (counts.getNumpyVersion() == dense).all()
    assert (np.asarray(counts) == dense).all()
    assert counts.shape == dense.shape
    assert counts.nnz == (dense != 0).sum()
    assert counts.sum() == dense.sum()
    rows, columns, values = counts.toTriples()
    assert (np.diff(rows * dense.shape[0] + columns) > 0).all()  # sorted, each once
    assert values.dtype == counts._out
    assert (np.transpose(dense.nonzero()) == np.stack([rows, columns], 1)).all()
    assert (values == dense[rows, columns]).all()
    for row in (0, 7, dense.shape[0] - 1):
        assert (counts[row] == dense[row]).all()
        columns, values = counts.row(row)
        assert columns.tolist() == dense[row].nonzero()[0].tolist()
        assert (values == dense[row][columns]).all()
    pairs = draw(1000, seed=9, classes=dense.shape[0])
    assert (counts.get(*pairs) == dense[tuple(pairs)]).all()


def test_counts_are_those_of_a_dense_matrix(counts):
    """Many more pairs than memory holds, with runs written and merged."""
    dense = np.zeros((V, V), np.int64)
    written = set()
    for step in range(60):
        pairs = draw(20_000, seed=step)
        counts.add(*pairs)
        dense += count_dense(V, pairs)
        written |= {run.name for run in counts._runs.runs}
    assert len(written) >= 8
    assert any(run.level > 0 for run in counts._runs.runs)
    check(counts, dense)
    counts.compact()
    assert len(counts._runs.runs) == 1
    check(counts, dense)


def test_memory_stays_where_it_is(run_python):
    """Three million different pairs, 48 MB, through 2 MiB."""
    run_python(
        """
        import resource
        import numpy as np
        import embermap.speedtorch as SpeedTorch

        def resident():
            for line in open("/proc/self/status"):
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) / 1024

        counts = SpeedTorch.COM(1_000_000, memory="2MiB")
        counts.comInit()
        rng = np.random.default_rng(0)
        counts.add(*rng.integers(0, 1_000_000, (2, 100_000)))
        before = resident()
        for _ in range(30):
            counts.add(*rng.integers(0, 1_000_000, (2, 100_000)))
        total = sum(len(rows) for rows, _, _ in counts.triples())
        assert 3_090_000 < total <= 3_100_000, total
        assert resident() - before < 16, resident() - before
        """
    )


def test_pairs_are_broadcast_and_repeat(counts):
    counts.add(3, [1, 2, 1])
    counts.add([[4], [5]], [0, 1], 10)
    counts.add(torch.tensor([7]), np.array([8], np.uint16), np.array([2]))
    counts.add([], [])
    assert counts[3, 1] == 2
    assert counts[[4, 5], [[0], [1]]].tolist() == [[10, 10], [10, 10]]
    assert counts[7, 8] == 2
    assert counts[8, 7] == 0
    assert counts.nnz == 7
    assert counts.CUPYCom is counts.getCupyVar() is counts


def test_counts_can_be_set(counts):
    counts.add([1, 2, 3], [1, 2, 3], 5)
    counts[1, 1] = 7
    counts[[2, 3], [2, 3]] = 0
    counts[[4, 4, 5], [4, 4, 5]] = [1, 2, 3]
    counts[9, 9] += 4
    assert counts.toTriples()[2].tolist() == [7, 2, 3, 4]
    assert counts.nnz == 4


@pytest.mark.parametrize(("rows", "columns", "bad"), [([1, V], [0, 0], V), ([0], [-1], -1)])
def test_an_id_that_is_no_class(counts, rows, columns, bad):
    with pytest.raises(em.RowIdError, match=f"id {bad} at position {len(rows) - 1}") as caught:
        counts.add(rows, columns)
    assert caught.value.id == bad
    with pytest.raises(IndexError):
        counts.get(rows, columns)
    with pytest.raises(IndexError):
        counts.row(bad)
    assert counts.nnz == 0


def test_what_cannot_be_counted(counts):
    with pytest.raises(TypeError, match="indexes"):
        counts.add([1.0], [1])
    with pytest.raises(TypeError, match="float64"):
        counts.add([1], [1], 0.5)
    with pytest.raises(ValueError, match="broadcast"):
        counts.add([1, 2], [1, 2, 3])
    with pytest.raises(OverflowError, match="63 bits"):
        counts.add([1], [1], np.array([2**64 - 1], np.uint64))
    assert counts.nnz == 0
    with pytest.raises(TypeError, match="indexed by"):
        counts["x"]
    with pytest.raises(TypeError, match="set by"):
        counts[3] = 1
    for dtype in ("S4", object, "complex64", bool):
        with pytest.raises(TypeError, match="datatype"):
            SpeedTorch.COM(V, dtype)
    with pytest.raises(ValueError, match="total_classes"):
        SpeedTorch.COM(2**32)
    with pytest.raises(ValueError, match="memory"):
        SpeedTorch.COM(V, memory=1000)


@pytest.mark.parametrize(
    ("dtype", "most"), [("uint8", 255), ("int16", 2**15 - 1), ("uint32", 2**32 - 1)]
)
def test_a_count_that_its_datatype_does_not_hold_is_an_error(dtype, most):
    with SpeedTorch.COM(V, dtype) as counts:
        counts.comInit()
        counts.add([5], [6], most)
        assert counts[5, 6] == most
        assert counts[5, 6].dtype == dtype
        counts.add([5], [6])
        for ask in (lambda: counts[5, 6], lambda: counts.toTriples(), lambda: counts.row(5)):
            with pytest.raises(OverflowError, match=rf"\(5, 6\) was counted {most + 1} times"):
                ask()
        counts.add([5], [6], -1)
        assert counts[5, 6] == most


def test_sums_beyond_64_bits_are_an_error():
    with SpeedTorch.COM(V, "int64") as counts:
        counts.comInit()
        counts.add([1, 1], [1, 1], 2**62 - 1)
        assert counts[1, 1] == 2**63 - 2
        counts.add([1], [1], 2**62)
        with pytest.raises(OverflowError, match=f"{2**63 + 2**62 - 2}, which 64 bits"):
            counts.get(1, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_instead_of_counts(dtype):
    with SpeedTorch.COM(V, dtype, memory="1MiB") as counts:
        counts.comInit()
        dense = np.zeros((V, V))
        for step in range(5):
            pairs = draw(20_000, seed=step)
            weights = np.random.default_rng(step).random(20_000)
            counts.add(*pairs, weights)
            np.add.at(dense, tuple(pairs), weights)
        found = counts.getNumpyVersion()
        assert found.dtype == dtype
        np.testing.assert_allclose(found, dense, rtol=1e-6)


def test_the_largest_number_of_classes():
    classes = 3_037_000_499
    with SpeedTorch.COM(classes) as counts:
        counts.comInit()
        ends = [0, classes - 1]
        counts.add([[e] for e in ends], ends, [[1, 2], [3, 4]])
        assert [part.tolist() for part in counts.toTriples()] == [
            [0, 0, classes - 1, classes - 1],
            [*ends, *ends],
            [1, 2, 3, 4],
        ]


def test_counts_of_others_are_added(counts, tmp_path):
    mine, theirs = draw(30_000, seed=1), draw(50_000, seed=2)
    counts.add(*mine)
    with SpeedTorch.COM(V, "int64", directory=tmp_path / "other", memory="1MiB") as other:
        other.comInit()
        other.add(*theirs)
        counts.merge(other)
        check(counts, count_dense(V, mine) + count_dense(V, theirs))
        check(other, count_dense(V, theirs))
    counts.merge(counts)
    check(counts, 2 * (count_dense(V, mine) + count_dense(V, theirs)))
    with SpeedTorch.COM(V + 1) as other, pytest.raises(ValueError, match="301 classes"):
        counts.merge(other)
    with SpeedTorch.COM(V, "float32") as other, pytest.raises(TypeError, match="float32"):
        counts.merge(other)
    with pytest.raises(TypeError, match="other"):
        counts.merge(np.zeros((V, V)))


def test_files_of_scipy(counts, tmp_path):
    sparse = pytest.importorskip("scipy.sparse")
    pairs = draw(100_000)
    dense = count_dense(V, pairs)
    counts.add(*pairs)
    assert (counts.toScipy().toarray() == dense).all()
    assert counts.toScipy("csr").format == "csr"
    counts.saveCupy(tmp_path / "counts")
    assert (sparse.load_npz(tmp_path / "counts.npz").toarray() == dense).all()
    sparse.save_npz(tmp_path / "theirs.npz", sparse.coo_matrix(dense))
    counts.loadCupy(tmp_path / "theirs.npz")
    check(counts, dense)
    sparse.save_npz(tmp_path / "theirs.npz", sparse.csr_matrix(dense))
    with pytest.raises(ValueError, match="not a COO matrix"):
        counts.loadCupy(tmp_path / "theirs.npz")
    sparse.save_npz(tmp_path / "theirs.npz", sparse.coo_matrix(dense[:5, :5]))
    with pytest.raises(ValueError, match=r"shape \(5, 5\)"):
        counts.loadCupy(tmp_path / "theirs.npz")
    check(counts, dense)


def test_counts_are_saved_and_loaded(counts, tmp_path):
    pairs = draw(100_000)
    counts.add(*pairs)
    counts.saveCupy(tmp_path / "counts.npz")
    with SpeedTorch.COM(V, "int64", memory="1MiB") as other:
        other.loadCupy(tmp_path / "counts.npz")
        check(other, count_dense(V, pairs))
    counts.comInit()  # begins anew
    check(counts, np.zeros((V, V), int))
    counts.saveCupy(tmp_path / "none.npz")
    counts.add([1], [1])
    counts.loadCupy(tmp_path / "none.npz")
    check(counts, np.zeros((V, V), int))


@pytest.mark.parametrize("name", ["PytorchCOM", "CPUPytorchCOM", "GPUPytorchCOM"])
def test_the_families_of_torch(name, tmp_path):
    pairs = draw(10_000)
    with getattr(SpeedTorch, name)(V) as counts:
        counts.comInit()
        counts.add(*pairs)
        dense = count_dense(V, pairs)
        check(counts, dense)
        assert counts.datatype == torch.int32
        found = counts.toTorch()
        assert found.is_coalesced()
        assert found.dtype == torch.int32
        assert (found.to_dense().numpy() == dense).all()
        counts.saveTorch(tmp_path / "c.pt")
        assert counts.getTorchVar()[3, 3] == dense[3, 3]
        counts.comInit()
        counts.loadTorch(tmp_path / "c.pt")
        check(counts, dense)
        torch.save(torch.from_numpy(dense), tmp_path / "dense.pt")
        counts.loadTorch(tmp_path / "dense.pt")
        check(counts, dense)
        torch.save(torch.zeros(3, 3), tmp_path / "dense.pt")
        with pytest.raises(ValueError, match=r"shape \(3, 3\)"):
            counts.loadTorch(tmp_path / "dense.pt")


def test_counts_in_a_directory_go_on(tmp_path):
    pairs = draw(50_000)
    options = {"directory": tmp_path / "counts", "memory": "1MiB"}
    counts = SpeedTorch.COM(V, **options)
    counts.comInit()
    counts.add(*pairs)
    with pytest.raises(em.LockedError, match="in use elsewhere"):
        SpeedTorch.COM(V, **options).resume()
    del counts  # without close(): what is in memory goes to the files
    gc.collect()
    with SpeedTorch.COM(V, **options) as again:
        again.resume()
        check(again, count_dense(V, pairs))
        again.add(*pairs)
    with SpeedTorch.COM(V, **options) as again:
        again.resume()
        check(again, 2 * count_dense(V, pairs))
    with pytest.raises(FileExistsError, match="resume"):
        SpeedTorch.COM(V, **options).comInit()
    with pytest.raises(em.FormatError, match="300 classes in int64, not of 301"):
        SpeedTorch.COM(V + 1, **options).resume()
    with pytest.raises(em.FormatError, match="not of 300 in float64"):
        SpeedTorch.COM(V, "float32", **options).resume()
    with pytest.raises(FileNotFoundError):
        SpeedTorch.COM(V, directory=tmp_path / "none").resume()
    with pytest.raises(ValueError, match="directory="):
        SpeedTorch.COM(V).resume()


def test_the_memmap_family_has_files_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        with SpeedTorch.COMMM(V, diskname="pairs") as counts:
            counts.comInit(CPUPinn=True)
            counts.add([number], [1])
            assert counts.fileName == f"pairs{number}.memmap"
            assert counts.CUPYmemmap[number, 1] == 1
    with SpeedTorch.COMMM(V, directory="pairs1.memmap") as counts:
        counts.resume()
        assert counts[1, 1] == 1
        assert counts[0, 1] == 0


@pytest.mark.parametrize("damage", ["manifest", "version", "name", "missing", "short", "swapped"])
def test_damaged_files_are_noticed(tmp_path, damage):
    folder = tmp_path / "counts"
    with SpeedTorch.COM(V, directory=folder) as counts:
        counts.comInit()
        counts.add(*draw(1000))
    manifest = folder / "counts.json"
    found = json.loads(manifest.read_text())
    (run,) = found["runs"]
    keys = folder / f"{run['name']}.keys.npy"
    if damage == "manifest":
        manifest.write_text("{")
    elif damage == "version":
        manifest.write_text(json.dumps({**found, "version": 9}))
    elif damage == "name":
        manifest.write_text(json.dumps({**found, "runs": [{**run, "name": "../x"}]}))
    elif damage == "missing":
        keys.unlink()
    elif damage == "short":
        keys.write_bytes(keys.read_bytes()[:-8])
    else:
        np.save(keys, np.zeros(run["pairs"], np.int32))
    with pytest.raises(em.FormatError):
        SpeedTorch.COM(V, directory=folder).resume()


def test_a_process_that_is_killed_leaves_whole_counts(tmp_path):
    """Counts up to some moment, never a part of a run; what it left behind is removed."""
    code = """
import sys
import numpy as np
import embermap.speedtorch as SpeedTorch
counts = SpeedTorch.COM(1_000_000, directory=sys.argv[1], memory="1MiB")
counts.comInit()
print("ready", flush=True)
while True:
    rows = np.random.default_rng().integers(0, 1_000_000, 5000)
    counts.add(rows, rows)
    counts.flush()
    print(counts.sum(), flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "counts"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    sums = [child.stdout.readline() for _ in range(12)]
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().split("\n")
    child.wait()
    child.stdout.close()
    # What a run that was being written would have left.
    for name in ("run-000999.keys.npy", ".run-000999.counts.npy.x1", ".counts.json.x2"):
        (tmp_path / "counts" / name).write_bytes(b"torn")
    last = int(next(line for line in [*reversed(rest), *reversed(sums)] if line.strip().isdigit()))
    with SpeedTorch.COM(1_000_000, directory=tmp_path / "counts") as counts:
        counts.resume()
        assert counts.sum() in (last, last + 5000)
        rows, columns, _ = counts.toTriples()
        assert (rows == columns).all()
        named = {run.name for run in counts._runs.runs}
        found = {file.name.partition(".")[0] for file in (tmp_path / "counts").glob("run-*")}
        assert found == named
        assert not list((tmp_path / "counts").glob(".*"))


def test_a_full_disk_loses_nothing(counts, monkeypatch):
    from embermap.speedtorch import _files

    pairs = draw(30_000)
    counts.add(*pairs[:, :5000])
    replacing = _files.replacing

    def full(path):
        raise OSError(28, "no space left on device", str(path))

    monkeypatch.setattr(_files, "replacing", full)
    with pytest.raises(OSError, match="no space"):
        counts.compact()
    monkeypatch.setattr(_files, "replacing", replacing)
    counts.add(*pairs[:, 5000:])
    check(counts, count_dense(V, pairs))


def test_use_before_and_after(counts):
    with pytest.raises(RuntimeError, match="call comInit"):
        SpeedTorch.COM(V).add([1], [1])
    folder = counts.directory
    assert folder.is_dir()
    counts.close()
    counts.close()
    assert not folder.exists()
    for use in (lambda: counts.add([1], [1]), lambda: counts.nnz, counts.flush):
        with pytest.raises(ValueError, match="closed"):
            use()
