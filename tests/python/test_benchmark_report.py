"""The script tools/bench/report.py: results in, page and plots out."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "bench" / "report.py"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def entry(case: str, store: str, value: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "store": store, "unit": "rows/s", "value": value, "way": "plain", **more}


def machine(name: str, ratio: float) -> dict[str, Any]:
    cold, warm = "dim128/weights/gather/uniform/cold", "dim128/weights/gather/zipf:1.05/warm"
    return {
        "name": name,
        "out_of_core": {
            "machine": {
                "cores": 2,
                "cpu": "A processor",
                "memory": 8 << 30,
                "kernel": "6.1",
                "file_system": "ext4",
                "versions": {"numpy": "2.4.6"},
            },
            "confinement": {"kind": "cgroup v1", "text": "cgroup v1", "memory": 800 << 20},
            "embermap_budget": 600 << 20,
            "settings": {"size": 8 << 30, "threads": 2, "quick": False},
            "notes": ["something to know"],
            "cases": [
                entry(cold, "embermap", 70e3, bare_ratio=0.95, hit_rate=0.02),
                entry(cold, "np.memmap", 7e3, embermap_ratio=10.0),
                entry(cold, "embermap", 90e3, bare_ratio=0.97, hit_rate=0.02),
                entry(cold, "LMDB", 5e3, embermap_ratio=14.0),
                entry(warm, "embermap", 900e3, hit_rate=0.7),
                entry(warm, "np.memmap", 300e3, embermap_ratio=ratio),
                {"case": warm, "store": "h5py, chunked", "way": "plain", "error": "out of memory"},
            ],
        },
        "durability": {
            "settings": {"memory": 64 << 20, "batch": 4096, "every": 1000, "quick": False},
            "load": 1.25,
            "cases": [
                {
                    "case": "train/zipf:1.05",
                    "ratio": ratio / 4,
                    "before_checkpoint": 0.9,
                    "seconds": 12.5,
                },
                {
                    "case": "commit/512MiB/64KiB",
                    "table_bytes": 512 << 20,
                    "dirty_bytes": 64 << 10,
                    "seconds": 0.0031,
                    "bare_seconds": 0.002,
                },
                {"case": "recovery", "log_bytes": 1 << 30, "seconds": 4.5, "bare_seconds": 4.0},
                {"case": "verify", "bytes": 2 << 30, "bytes_per_second": 2e9, "ratio": 0.97},
            ],
        },
        "convert": {
            "load": 0.5,
            "settings": {"rows": 1000, "dim": 256, "rounds": 3, "quick": False, "memory": "256MiB"},
            "cases": [
                {
                    "case": "npy to safetensors",
                    "bytes": 2 << 30,
                    "seconds": 20.0,
                    "cpu_seconds_per_gb": 0.7,
                    "bytes_per_second": 107e6,
                    "peak_resident": 70 << 20,
                    "reading": "direct",
                    "writing": "direct",
                    "beside": "safetensors",
                    "cp_ratio": 0.97,
                    "other_ratio": ratio,
                    "other_cpu_ratio": 2.5,
                    "other_peak_resident": 4 << 30,
                },
                {
                    "case": "word2vec text to npy",
                    "bytes": 1 << 20,
                    "seconds": 1.0,
                    "cpu_seconds_per_gb": 30.0,
                    "bytes_per_second": 1e6,
                    "peak_resident": 70 << 20,
                    "reading": "",
                    "writing": "direct",
                    "beside": "gensim",
                    "error": "out of memory",
                },
            ],
        },
        "ngrams": {
            "rows": 10**9,
            "dim": 128,
            "batch": 65536,
            "apparent_bytes": 1.02e12,
            "disk_bytes": 9e9,
            "create_seconds": 0.1,
            "steps": 100,
            "passes": 1.5,
            "seconds": 60.0,
            "rows_per_second": 1e5,
            "loss_first": 4.0,
            "loss_last": 3.0,
            "hit_rate": 0.5,
            "bytes_read": 1e9,
            "bytes_written": 2e9,
            "budget": 256 << 20,
            "without_store": 100 << 20,
            "peak_resident": 380 << 20,
            "limit": 420 << 20,
            "page_cache_of_table": 1 << 20,
            "samples": {
                "seconds": [0.0, 30.0, 60.0],
                "resident": [100 << 20, 300 << 20, 380 << 20],
                "anonymous": [50 << 20, 250 << 20, 330 << 20],
            },
        },
    }


def test_names_become_files_and_results_are_kept_as_they_are(
    report: ModuleType, tmp_path: Path
) -> None:
    path = report.file_of(tmp_path, "2 cores, virtual disk")
    assert path == tmp_path / "benchmarks" / "2-cores-virtual-disk.json"
    with pytest.raises(report.ReportError):
        report.file_of(tmp_path, " / ")
    report.save(path, machine("x", 1 / 3))
    text = path.read_text()
    assert json.loads(text)["out_of_core"]["cases"][5]["embermap_ratio"] == 0.333333
    assert json.loads(text)["ngrams"] == machine("x", 3)["ngrams"]
    assert '"seconds": [ 0.0, 30.0, 60.0 ]' in text


def gpu_entry(op: str, way: str, **values: Any) -> dict[str, Any]:
    given = {
        "op": op,
        "ids": 131_072,
        "order": "uniform",
        "row_bytes": 512,
        "pool_bytes": 8 << 30,
        "threads": 16,
        "way": way,
        "seconds": 1.5e-3,
        "least": 1.4e-3,
        "bytes": 66e6,
        "bytes_per_second": 44e9,
        **values,
    }
    name = f"{op}/{given['ids']}/{given['order']}/{given['row_bytes']}B/{given['pool_bytes']}"
    if op == "training":
        name = f"training/{given['order']}"
    return {"case": f"{name}/{given['threads']}t", **given}


def gpu_machine(name: str, *, share: float = 0.85) -> dict[str, Any]:
    cases = []
    for op in ("to", "from"):
        for pool in (1, 8, 24, 48):
            size = {"pool_bytes": pool << 30}
            cases += [
                gpu_entry(op, "cudaMemcpy", bytes_per_second=55e9, **size),
                gpu_entry(op, "embermap", limit_ratio=share + pool / 1000, **size),
                gpu_entry(op, "SpeedTorch's way", seconds=4.2e-3, embermap_ratio=2.8, **size),
                gpu_entry(op, "torch, pinned", seconds=4e-3, embermap_ratio=2.6, **size),
            ]
        cases += [
            gpu_entry(op, "embermap", threads=1, limit_ratio=0.2),
            gpu_entry(op, "embermap", order="zipf:1.05", limit_ratio=0.3),
            gpu_entry(op, "embermap", ids=1_024, seconds=9e-5, limit_ratio=0.1),
            gpu_entry(op, "embermap", ids=1_048_576, limit_ratio=0.84),
            gpu_entry(op, "embermap", row_bytes=1_600, limit_ratio=0.9),
        ]
    entry_without = {"order": "lit2vec2", "ids": 0, "row_bytes": 0, "pool_bytes": 0}
    other = {**entry_without, "order": "research2vec2"}
    cases += [
        gpu_entry(
            "beside-to",
            "embermap",
            slowdown=0.061,
            calls_per_second=500.0,
            calls_per_second_alone=650.0,
        ),
        gpu_entry("overlap", "embermap", compute_ratio=0.97, transfer_seconds=4e-3),
        gpu_entry("training", "embermap", **entry_without),
        gpu_entry(
            "training",
            "SpeedTorch's way",
            **{**entry_without, "seconds": 2.5e-3, "embermap_ratio": 1.75},
        ),
        gpu_entry("training", "embermap, next batch prefetched", **other),
        gpu_entry(
            "training",
            "SpeedTorch's way",
            **{**other, "seconds": 4e-3, "embermap_ratio": 1.5},
        ),
        {**gpu_entry("to", "torch, as people write it"), "error": "out of patience"},
    ]
    return {
        "name": name,
        "gpu": {
            "machine": {
                "cores": 16,
                "cpu": "A processor",
                "memory": 126 << 30,
                "kernel": "6.18",
                "file_system": "ext4",
                "versions": {"torch": "2.11.0", "cupy": "14.2"},
                "gpu": {"name": "A GPU", "memory": 139 << 30, "cuda": "13.0", "driver": "580"},
            },
            "settings": {"threads": 16, "quick": False},
            "notes": ["a note of the GPU's"],
            "stats": [],
            "cases": cases,
        },
    }


def test_goals_of_a_gpu_are_taken_from_its_measurements(report: ModuleType) -> None:
    goals = {work: (text, reached) for work, _, _, text, reached in report.goals(gpu_machine("x"))}
    by_word = {
        word: goal
        for word in (
            "to the GPU, 1 to 48",
            "from the GPU, 1 to 48",
            "1 M ids",
            "1,600 B",
            "0.5 GiB",
            "8 GiB",
            "Lit2Vec2",
            "Research2Vec2",
            "computes longer",
            "1,024 ids",
            "matrix product",
        )
        for work, goal in goals.items()
        if word in work
    }
    assert by_word == {
        "to the GPU, 1 to 48": ("0.85", True),
        "from the GPU, 1 to 48": ("0.85", True),
        "1 M ids": ("0.84", False),
        "1,600 B": ("0.90", True),
        "0.5 GiB": ("not measured", None),
        "8 GiB": ("2.60", True),
        "Lit2Vec2": ("1.75", True),
        "Research2Vec2": ("1.50", False),
        "computes longer": ("0.97", True),
        "1,024 ids": ("90 us", True),
        "matrix product": ("6.1%", False),
    }
    assert not any("GPU" in work for work, *_ in report.goals(machine("no GPU", 3.0)))


def test_a_gpu_has_a_section_and_a_plot_of_its_own(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.save(report.file_of(tmp_path, "2 cores"), machine("2 cores", 3.2))
    assert report.main(["--out", str(tmp_path), "draw"]) == 0
    assert "Rows to and from the GPU" not in (tmp_path / "benchmarks.md").read_text()
    assert not (tmp_path / "benchmarks" / "gpu.png").exists()

    report.save(report.file_of(tmp_path, "GPU"), gpu_machine("16 cores, a GPU"))
    assert report.main(["--out", str(tmp_path), "draw"]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    for part in (
        "## Rows to and from the GPU",
        "benchmarks/gpu.png",
        "| GPU | A GPU, 139 GiB, driver 580, CUDA 13.0 |  |",
        "| 131,072 | uniform | 512 B | 24 GiB | 16 | 1.5 | 44.0 | 0.87 | 1.5 | 4.2 (**2.80**) |",
        "| 131,072 | Zipf 1.05 | 512 B | 8 GiB | 16 |",
        "| +6.1% longer | 500 calls/s, alone 650 |",
        "| 0.970 of computing alone |",
        "| training step of Lit2Vec2's shape: SpeedTorch's way | 2.50 ms | embermap: 1.75 x |",
        "| training step of Research2Vec2's shape: embermap, next batch prefetched | 1.50 ms |  |",
        "| training step of Research2Vec2's shape: SpeedTorch's way | 4.00 ms | embermap: 1.50 x |",
        "a note of the GPU's",
        "torch, as people write it, to/131072/uniform/512B/8589934592/16t: out of patience",
    ):
        assert part in page, part
    assert not any(brace in page for brace in "{}")
    assert 1000 < (tmp_path / "benchmarks" / "gpu.png").stat().st_size < 300 << 10


def test_conversions_have_a_section(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.save(report.file_of(tmp_path, "2 cores"), machine("2 cores", 3.2))
    assert report.main(["--out", str(tmp_path), "draw"]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    for part in (
        "## Files into files",
        "**2 cores**: 1,000 x 256 float32, 3 rounds (load 0.5 at the beginning)",
        "| npy to safetensors | 2,048 MiB | 107 MB/s | 0.70 | 0.97 | "
        "3.20 of safetensors (CPU 2.50, 4,096 MiB) |",
        "|  | gensim: out of memory | 70 MiB | buffered, direct |",
    ):
        assert part in page, part


def test_the_gpu_suite_is_left_out_where_there_is_no_device(
    report: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[str] = []

    def suite(name: str, *_: Any) -> Any:
        ran.append(name)
        raise report.ReportError("not now")

    monkeypatch.setattr(report, "run_suite", suite)
    monkeypatch.setattr(report, "no_gpu", lambda: "no driver")
    report.main(["--out", str(tmp_path), "run", "--name", "x"])
    assert ran == [name for name in report.SUITES if name != "gpu"]
    assert "note: gpu left out: no driver" in capsys.readouterr().out
    ran.clear()  # asked for by name, it says itself what it lacks
    report.main(["--out", str(tmp_path), "run", "--name", "x", "--only", "gpu"])
    monkeypatch.setattr(report, "no_gpu", lambda: "")
    report.main(["--out", str(tmp_path), "run", "--name", "x"])
    assert ran == ["gpu", *report.SUITES]


def test_options_for_the_gpu_reach_its_suite(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        (tmp_path / "gpu.json").write_text("{}")
        return report.subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(report.subprocess, "run", run)
    args = report.parse_arguments(
        [
            *("run", "--name", "x", "--quick", "--gpu-suite", "pools", "--gpu-cases", "to/*"),
            *("--gpu-pools", "1GiB", "--folder", str(tmp_path)),
        ]
    )
    assert report.run_suite("gpu", args, tmp_path) == ({}, True)
    text = " ".join(commands[0])
    assert "--suite pools --cases to/* --pools 1GiB" in text
    assert text.endswith("--quick")


def test_goals_are_taken_from_the_measurements(report: ModuleType) -> None:
    goals = {work: (text, reached) for work, _, _, text, reached in report.goals(machine("x", 2.9))}
    by_word = {
        word: goal
        for word in ("bare io_uring", "gather, np.memmap", "peak resident", "scan", "that commits")
        for work, goal in goals.items()
        if word in work
    }
    assert by_word["bare io_uring"] == ("0.96", True)
    assert by_word["gather, np.memmap"] == ("2.90", False)
    assert by_word["peak resident"] == ("24 MiB", True)
    assert by_word["scan"] == ("not measured", None)
    assert by_word["that commits"] == ("0.72", False)
    assert goals["npy, HDF5, safetensors, torch, read and written: cp (lowest)"] == (
        "0.97 (npy to safetensors)",
        True,
    )
    assert goals["word2vec text, read and written: gensim (lowest)"] == ("not measured", None)
    memory = ("70 MiB (word2vec text to npy)", True)
    assert goals["files into files: resident memory (highest)"] == memory


def test_page_and_plots_show_all_machines(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, ratio in (("2 cores, one disk", 3.2), ("16 cores", 2.5)):
        report.save(report.file_of(tmp_path, name), machine(name, ratio))
    assert report.main(["--out", str(tmp_path), "draw"]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    for part in (
        "2 cores, one disk",
        "2.50 (missed)",
        "3.20 |",
        "h5py, chunked, dim128/weights/gather/zipf:1.05/warm: out of memory",
        "something to know",
        "80 |",  # thousand rows/s: the median of embermap's two contests
        "benchmarks/ratios.png",
        "1,000,000,000 x 128",
        "Zipf(1.05): the same loop with durability none | at least 0.8 | 0.62 (missed) | 0.80 |",
        "| 3.1 ms | 2.0 ms: direct writes",
        "| 4.50 s | 4.00 s: the log",
        "| 2,000 MB/s | 0.97 of dd",
    ):
        assert part in page, part
    assert not any(brace in page for brace in "{}")
    for plot in ("ratios", "throughput", "memory"):
        size = (tmp_path / "benchmarks" / f"{plot}.png").stat().st_size
        assert 1000 < size < 300 << 10
    # The same results make the same page and plots.
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*.[mp]*")}
    assert report.main(["--out", str(tmp_path), "draw"]) == 0
    assert before == {path.name: path.read_bytes() for path in tmp_path.rglob("*.[mp]*")}


def test_without_results_there_is_no_page(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main(["--out", str(tmp_path), "draw"]) == 1
    assert "no results" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_suite_that_fails_leaves_what_was_there(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    path = report.file_of(tmp_path, "x")
    report.save(path, machine("x", 3.0))
    before = json.loads(path.read_text())

    def fail(suite: str, *_: Any) -> Any:
        raise report.ReportError(f"{suite} failed")

    monkeypatch.setattr(report, "run_suite", fail)
    assert report.main(["--out", str(tmp_path), "run", "--name", "x"]) == 1
    assert json.loads(path.read_text()) == before
