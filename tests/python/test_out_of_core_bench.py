"""The comparison tools/bench/out_of_core.py: its workload, its stores, and a small run.

Times are not judged here: machines differ.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("embermap")

FOLDER = Path(__file__).parents[2] / "tools" / "bench"


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Any:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def workload() -> Any:
    return importlib.import_module("rivals.workload")


@pytest.fixture(scope="module")
def stores() -> Any:
    return importlib.import_module("rivals.stores")


@pytest.fixture(scope="module")
def worker() -> Any:
    return importlib.import_module("rivals.worker")


@pytest.fixture(scope="module")
def confine() -> Any:
    return importlib.import_module("rivals.confine")


# --- workload -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000, 4096, 100_003])
def test_the_renumbering_is_a_bijection(workload: Any, n: int) -> None:
    numbers = workload.Bijection(n)(np.arange(n))
    assert sorted(numbers.tolist()) == list(range(n))
    if n > 1000:  # neighbours do not stay together
        assert np.median(np.abs(np.diff(numbers))) > n / 10


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.05, 1.5])
def test_zipf_ranks_have_the_right_chances(workload: Any, exponent: float) -> None:
    n, draws = 50, 400_000
    ranks = workload.zipf_ranks(n, exponent, draws, np.random.default_rng(1))
    weights = (np.arange(n) + 1.0) ** -exponent
    expected = weights / weights.sum()
    assert ranks.min() == 0
    assert ranks.max() == n - 1
    found = np.bincount(ranks, minlength=n) / draws
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected / draws))


def test_batches_are_the_same_everywhere_and_gradients_are_summed_exactly(workload: Any) -> None:
    stream = workload.Stream(1000, 6, "zipf:1.05", 500)
    batch = stream.batch_of(3, grads=True)
    again = workload.Stream(1000, 6, "zipf:1.05", 500).batch_of(3, grads=True)
    assert np.array_equal(batch.ids, again.ids)
    assert np.array_equal(batch.grads, again.grads)
    assert not np.array_equal(batch.ids, stream.ids_of(4))
    assert np.array_equal(batch.distinct[batch.place], batch.ids)
    assert len(batch.distinct) < 500
    sums = np.zeros((1000, 6))
    np.add.at(sums, batch.ids, batch.grads.astype(np.float64))
    assert np.array_equal(batch.summed, sums[batch.distinct])


def test_content_is_a_function_of_the_row(workload: Any) -> None:
    content = workload.Content(5)
    assert np.array_equal(content.block(10, 20)[3], content.rows(np.array([13]))[0])
    assert len(np.unique(content.block(0, 1000)[:, 0])) > 900


# --- stores ---------------------------------------------------------------------------------------


def every_store() -> list[tuple[str, str]]:
    return [
        ("embermap", "numpy"),
        ("np.memmap", "numpy"),
        ("np.memmap, 16 threads", "numpy"),
        ("torch.from_file", "torch"),
        ("h5py, contiguous", "h5py"),
        ("h5py, chunked", "h5py"),
        ("LMDB", "lmdb"),
        ("torch, in memory", "torch"),
    ]


@pytest.mark.parametrize(("name", "library"), every_store())
@pytest.mark.parametrize("adagrad", [False, True])
def test_every_store_reads_updates_and_writes_right_rows_in_all_its_ways(
    stores: Any,
    worker: Any,
    workload: Any,
    tmp_path: Path,
    name: str,
    library: str,
    adagrad: bool,
) -> None:
    pytest.importorskip(library)
    kind = stores.ALL[name]
    # An odd number of rows: the last value of LMDB is a short one.
    shape = stores.Shape(rows=4_003, dim=24, adagrad=adagrad, memory=32 << 20, threads=2)
    kind.build(tmp_path, shape)
    server = worker._Server(kind(tmp_path, shape, kind.ways[0]), trimmed=True)
    server.reopen()
    uniform = workload.Stream(shape.rows, shape.dim, "uniform", 512)
    for way in kind.ways:
        server.set_way(way)
        server.reopen()
        server.check(uniform)
    for way in kind.ways:
        server.set_way(way)
        server.reopen()
        server.check_update(workload.Stream(shape.rows, shape.dim, "zipf:1.05", 512))
        found = server.run("update", uniform, 0, 2, 60.0)
        assert len(found["times"]) == 2
    # What it wrote is there when it is opened again.
    content = workload.Content(shape.dim)
    server.bulk(60.0)
    if name != "torch, in memory":
        server.reopen()
    assert np.array_equal(np.asarray(server.store.read(0, shape.rows)), content.block(0, 4_003))
    server.end()


@pytest.mark.parametrize("name", ["np.memmap", "LMDB"])
def test_a_wrong_row_is_found(
    stores: Any, worker: Any, workload: Any, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("lmdb" if name == "LMDB" else "numpy")
    kind = stores.ALL[name]
    shape = stores.Shape(rows=50, dim=8, adagrad=False, memory=32 << 20, threads=1)
    kind.build(tmp_path, shape)
    server = worker._Server(kind(tmp_path, shape, "plain"), trimmed=False)
    server.reopen()
    stream = workload.Stream(shape.rows, shape.dim, "uniform", 64)
    server.check(stream)
    server.store.write(7, np.ones((1, 8), np.float32))
    with pytest.raises(AssertionError, match="wrong"):
        server.check(stream)
    server.end()


# --- memory ---------------------------------------------------------------------------------------


def test_a_file_leaves_the_page_cache(confine: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (8 << 20))
    assert confine.cached_bytes(path) > 0
    how = confine.forget_files([path])
    if how == "posix_fadvise":  # a file system that lives in memory keeps its pages
        assert confine.cached_bytes(path) <= 1 << 20


def test_trimming_cuts_the_page_cache_of_a_mapped_file_to_size(
    confine: Any, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (16 << 20))
    confine.forget_file(path)
    if confine.cached_bytes(path) > 0:
        pytest.skip("this file system keeps its pages in memory")
    array = np.memmap(path, np.uint8, "r+")
    array[::4096] = 7
    confine.trim(path, 4 << 20)
    assert confine.cached_bytes(path) <= 5 << 20
    assert np.count_nonzero(array[::4096] == 7) == 4096
    del array


def test_a_group_that_is_too_small_is_reported(confine: Any, stores: Any, tmp_path: Path) -> None:
    kind = confine.find_kind()
    if kind.parent is None:
        pytest.skip("no control group can be made here")
    code = (
        "import sys; from pathlib import Path; from rivals import confine, stores, worker\n"
        "from rivals.workload import Stream\n"
        "if __name__ == '__main__':\n"
        "    shape = stores.Shape(100, 8, False, 8 << 20, 1)\n"
        "    stores.Memmap.build(Path(sys.argv[1]), shape)\n"
        "    group = confine.Group(confine.find_kind(), 'test', 8 << 20)\n"
        "    w = worker.Worker('np.memmap', Path(sys.argv[1]), shape, 'plain', group)\n"
        "    w.call('reopen')\n"
        "    stream = Stream(100, 4096, 'uniform', 1 << 16)\n"  # a gigabyte of gradients
        "    try:\n"
        "        w.call('run', op='update', stream=stream, first=0, count=1, seconds=1)\n"
        "    except worker.StoreDied as error:\n"
        "        print(error)\n"
        "    w.end()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
        timeout=120,
        check=False,
    )
    assert "np.memmap: the process died in run (out of memory in its group)" in done.stdout, done


# --- the whole ------------------------------------------------------------------------------------


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "out_of_core.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=300,
        check=False,
    )


def test_a_small_run_writes_its_results_and_leaves_nothing(tmp_path: Path) -> None:
    folder, out = tmp_path / "tables", tmp_path / "results.json"
    folder.mkdir()
    done = run_script(
        *("--quick", "--folder", folder, "--json", out, "--rivals", "np.memmap"),
        *("--cases", "dim32/weights/gather/uniform/cold", "--cases", "dim32/weights/bulk/*"),
        *("--cases", "dim32/weights/update/zipf*/warm"),
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    found = json.loads(out.read_text())
    assert found["confinement"]["kind"] in ("cgroup v1", "cgroup v2", "trimmed")
    assert found["embermap_budget"] < found["confinement"]["memory"]
    by_case: dict[str, dict[str, Any]] = {}
    for entry in found["cases"]:
        assert "error" not in entry, entry
        assert entry["value"] > 0
        by_case.setdefault(entry["case"], {})[entry["store"]] = entry
    assert len(by_case) == 3
    for entries in by_case.values():
        assert set(entries) == {"embermap", "np.memmap"}
        assert entries["np.memmap"]["embermap_ratio"] > 0
    assert "hostname" not in found["machine"]


def test_wrong_usage_is_said_in_one_line(tmp_path: Path) -> None:
    done = run_script("--folder", tmp_path, "--cases", "nothing", "--quick")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
    assert "no case" in done.stderr
    assert run_script("--rivals", "nobody").returncode == 2
    assert run_script("--size", "x").returncode == 2
    assert "dim128/adagrad/update/zipf:1.05/warm" in run_script("--list").stdout
