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
