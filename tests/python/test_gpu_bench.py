"""The comparison tools/bench/gpu.py, with the processor in the place of a GPU.

Times are not judged here: they are of copies in host memory.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

em = pytest.importorskip("embermap")
torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "tools" / "bench"
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Any:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def gpu() -> Any:
    return importlib.import_module("gpu")


@pytest.fixture(scope="module")
def movers() -> Any:
    return importlib.import_module("rivals.movers")


@pytest.fixture(scope="module")
def devices() -> Any:
    return importlib.import_module("rivals.device")


@pytest.fixture(scope="module")
def training() -> Any:
    return importlib.import_module("rivals.training")


@pytest.fixture
def host(devices: Any) -> Any:
    return devices.Host()


@pytest.fixture
def settings(gpu: Any, movers: Any, host: Any, tmp_path: Path) -> Any:
    return gpu.Settings(
        device=host,
        folder=tmp_path,
        ways=list(movers.WAYS.values()),
        seconds=0.001,
        rounds=2,
        quick=True,
        until=math.inf,
    )


def small(gpu: Any, op: str = "to", **values: Any) -> Any:
    given = {
        "ids": 500,
        "order": "uniform",
        "row_bytes": 96,
        "pool": 96 * 4_003,
        "threads": 2,
        **values,
    }
    return gpu.Case(op, **given)


# --- cases ----------------------------------------------------------------------------------------


def test_suites_have_what_the_goals_need(gpu: Any) -> None:
    names = {case.name for case in gpu.choose(gpu.Axes(), None, None)}
    for pool in ("0.5GiB", "1GiB", "8GiB", "24GiB", "48GiB"):
        for op in ("to", "from"):
            assert f"{op}/131072/uniform/512B/{pool}/16t" in names
            assert f"{op}/1048576/uniform/512B/{pool}/16t" in names
    for name in (
        "to/131072/zipf:1.05/512B/8GiB/16t",
        "from/131072/sorted/512B/8GiB/16t",
        "from/1024/uniform/512B/1GiB/16t",
        "to/131072/uniform/1600B/8GiB/16t",
        "to/131072/uniform/512B/8GiB/1t",
        "beside-to/131072/uniform/512B/8GiB/16t",
        "overlap/131072/uniform/512B/8GiB/16t",
        "training/lit2vec2/16t",
        "training/research2vec2/16t",
    ):
        assert name in names


def test_cases_of_one_table_come_together_the_smallest_table_first(gpu: Any) -> None:
    cases = gpu.choose(gpu.Axes(), None, None)
    tables = [(case.pool, case.row_bytes, case.threads) for case in cases]
    seen = list(dict.fromkeys(tables))
    assert sorted(tables, key=seen.index) == tables
    assert [pool for pool, _, _ in seen[:-1]] == sorted(pool for pool, _, _ in seen[:-1])
    assert cases[-1].op == "training"
    assert len(set(cases)) == len(cases)


def test_patterns_choose_from_every_combination(gpu: Any) -> None:
    axes = gpu.Axes()
    [case] = gpu.choose(axes, None, ["from/16384/sorted/64B/24GiB/4t"])
    assert (case.op, case.ids, case.order, case.dim) == ("from", 16_384, "sorted", 16)
    assert case.rows * case.row_bytes == 24 * GIB
    assert len(gpu.choose(axes, None, ["to/*/*/*/*/*"])) == 4 * 3 * 5 * 5 * 5
    both = gpu.choose(axes, ["training"], ["to/1024/uniform/512B/1GiB/16t"])
    assert [case.op for case in both] == ["to", "training", "training"]
    with pytest.raises(gpu.BenchError, match="no suite 'x'.*pools"):
        gpu.choose(axes, ["x"], None)
    with pytest.raises(gpu.BenchError, match="no case is called 'to/7'"):
        gpu.choose(axes, None, ["to/7"])


def test_suites_follow_the_axes_that_are_asked_for(gpu: Any) -> None:
    axes = gpu.Axes((MIB, 4 * MIB), (100, 3_000), (64,), (1, 3))
    assert (axes.pool, axes.ids, axes.row, axes.most_threads) == (4 * MIB, 3_000, 64, 3)
    assert {case.pool for case in gpu.suites(axes)["pools"]} == {MIB, 4 * MIB}
    assert {case.threads for case in gpu.suites(axes)["threads"]} == {1, 3}
    assert {case.ids for case in gpu.suites(axes)["fixed"]} == {100}


def test_options_are_read(gpu: Any) -> None:
    assert gpu.parse_sizes("8GiB, 512MiB,8GiB") == (GIB // 2, 8 * GIB)
    assert gpu.parse_numbers("1,16") == (1, 16)
    for text in ("", "0", "1,x"):
        with pytest.raises(argparse.ArgumentTypeError):
            gpu.parse_numbers(text)
    assert [gpu.size_text(n) for n in (GIB // 2, 24 * GIB, 64 * MIB)] == [
        "0.5GiB",
        "24GiB",
        "64MiB",
    ]
    for wrong in (["--rows", "6"], ["--ways", "nobody"], ["--rounds", "0"], ["--pools", "x"]):
        with pytest.raises(SystemExit) as error:
            gpu.parse_arguments(wrong)
        assert error.value.code == 2
    args = gpu.parse_arguments(["--pools", "2GiB", "--threads", "2"])
    assert gpu.axes_of(args).pools == (2 * GIB,)
    assert gpu.axes_of(args).threads == (2,)


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_a_function_of_row_and_column(movers: Any) -> None:
    ids = torch.tensor([0, 1, 2**23 + 1, 2**32 + 1, 10**12])
    rows = movers.rows_of(ids, 40)
    assert rows.shape == (5, 40)
    assert rows.dtype == torch.float32
    assert torch.equal(movers.rows_of(ids[2:3], 40)[0], rows[2])
    assert len(torch.unique(rows[:, 0])) == 5  # neighbours and rows 2^23 apart differ
    assert len(torch.unique(rows)) > 190
    assert float(rows.min()) >= -0.5
    assert float(rows.max()) < 0.5
    assert torch.equal(rows * 2**23, (rows * 2**23).round())
    assert not torch.equal(movers.rows_of(ids, 40, 1), rows)
    many = movers.rows_of(torch.arange(100_000), 1)
    assert len(torch.unique(many)) > 98_000  # 23 bits: some meet
    out = torch.empty(5, 40)
    assert movers.rows_of(ids, 40, out=out) is out


def test_host_memory_is_registered_in_pieces_and_no_copy_crosses_them(
    movers: Any, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "PIECE", 4096)
    monkeypatch.setattr(movers, "PIECE", 4096)
    calls: list[tuple[str, int, int]] = []

    class Recording(devices.Host):
        def register(self, address: int, size: int) -> None:
            calls.append(("register", address, size))

        def unregister(self, address: int) -> None:
            calls.append(("unregister", address, 0))

    rows, dim = 301, 13  # neither rows nor blocks end at a border
    monkeypatch.setattr(movers, "_FILL_BYTES", 7_000)
    memory = devices.HostMemory(Recording(), rows * dim * 4)
    assert [size for _, _, size in calls] == [4096, 4096, 4096, rows * dim * 4 - 3 * 4096]
    assert calls[1][1] - calls[0][1] == 4096
    copies: list[int] = []
    copy_ = torch.Tensor.copy_

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        first = self.data_ptr() - memory.address
        if 0 <= first < memory.size:
            copies.append(first)
            assert first // 4096 == (first + self.numel() * 4 - 1) // 4096
        return copy_(self, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    movers.fill_host(Recording(), memory, 0, rows, dim, 2)
    assert len(copies) > 4
    assert torch.equal(memory.table(0, rows, dim), movers.rows_of(torch.arange(rows), dim, 2))
    memory.close()
    assert [kind for kind, _, _ in calls].count("unregister") == 4
    assert memory._map.closed  # no tensor keeps it


def test_memory_that_cannot_be_registered_leaves_none_registered(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "PIECE", 4096)
    held: set[int] = set()

    class Refusing(devices.Host):
        def register(self, address: int, size: int) -> None:
            if len(held) == 2:
                raise RuntimeError("no more")
            held.add(address)

        def unregister(self, address: int) -> None:
            held.remove(address)

    with pytest.raises(RuntimeError, match="no more"):
        devices.HostMemory(Refusing(), 5 * 4096)
    assert held == set()


# --- ways -----------------------------------------------------------------------------------------


def field_of(movers: Any, host: Any, folder: Path, case: Any) -> Any:
    return movers.Field(host, folder, case.rows, case.dim, case.threads, case.ids)


WAYS = [
    "cudaMemcpy",
    "embermap",
    "SpeedTorch's way",
    "torch, pinned",
    "torch, as people write it",
    "table in GPU memory",
]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("order", ["uniform", "sorted", "zipf:1.05"])
def test_every_way_gives_and_leaves_the_right_rows(
    gpu: Any, movers: Any, host: Any, tmp_path: Path, name: str, order: str
) -> None:
    assert list(movers.WAYS) == WAYS
    for op in ("to", "from"):
        case = small(gpu, op, order=order)
        field = field_of(movers, host, tmp_path, case)
        field.build_pool()
        way = movers.WAYS[name](field)
        batches = gpu.make_batches(field, case, arrays=True)
        assert len(batches) >= 12
        assert len({tuple(batch.host.tolist()) for batch in batches}) == len(batches)
        for batch in batches[:3]:
            assert batch.distinct == len(np.unique(batch.host.numpy()))
            assert batch.ids.data_ptr() != batch.host.data_ptr()
            if order == "sorted":
                assert batch.host.tolist() == sorted(batch.host.tolist())
        if order == "zipf:1.05":
            assert batches[0].distinct < 400
        gpu.check(way, case, batches)
        times, rates = gpu.timed(way, case, batches, 60.0)
        assert len(times) == len(rates) == len(batches)
        gpu.check(way, small(gpu, "to", order=order), batches)  # and all is as it was
        way.close()
        field.close()


def test_wrong_rows_are_found(gpu: Any, movers: Any, host: Any, tmp_path: Path) -> None:
    class OffByOne(movers.DeviceTable):
        def gather(self, batch: Any) -> Any:
            found = super().gather(batch)
            found[-1, -1] += 2.0**-23
            return found

    class Forgets(movers.DeviceTable):
        def scatter(self, batch: Any, rows: Any) -> None:
            kept = batch.ids != batch.ids[0]
            self._rows.index_copy_(0, batch.ids[kept], rows[kept])

    class WritesBeside(movers.DeviceTable):
        def scatter(self, batch: Any, rows: Any) -> None:
            super().scatter(batch, rows)
            self._rows[(batch.ids + 1) % len(self._rows), 0] = 9
            super().scatter(batch, rows)

    class WrongShape(movers.DeviceTable):
        def gather(self, batch: Any) -> Any:
            return super().gather(batch)[:-1]

    for kind, op, text in (
        (OffByOne, "to", "to the device: 1 of 12,000 numbers are wrong"),
        (WrongShape, "to", "shape"),
        (Forgets, "from", "from the device: 24 of"),
        (WritesBeside, "from", "rows of no batch"),
    ):
        case = small(gpu, op)
        field = field_of(movers, host, tmp_path, case)
        batches = gpu.make_batches(field, case, arrays=False)
        with pytest.raises(gpu.WrongRows, match=text):
            gpu.check(kind(field), case, batches)


def test_a_round_ends_with_its_time_but_not_before_three_calls(
    gpu: Any, movers: Any, host: Any, tmp_path: Path
) -> None:
    case = small(gpu)
    field = field_of(movers, host, tmp_path, case)
    way = movers.DeviceTable(field)
    batches = gpu.make_batches(field, case, arrays=False)
    assert len(gpu.timed(way, case, batches, 1e-9)[0]) == 3


def test_ratios_are_medians_of_rounds(gpu: Any) -> None:
    found = {name: gpu.Rounds() for name in ("cudaMemcpy", "embermap", "torch, pinned")}
    for limit, own, other in ((1.0, 2.0, 6.0), (1.0, 1.25, 5.0), (4.0, 5.0, 15.0)):
        for name, seconds in zip(found, (limit, own, other), strict=True):
            found[name].add([seconds] * 3, [1 / seconds] * 3)
    limit, own, other = gpu.entries_of(small(gpu), found, 1.0)
    assert own["limit_ratio"] == pytest.approx(0.8)
    assert other["embermap_ratio"] == pytest.approx(3.0)
    assert "limit_ratio" not in limit
    assert "embermap_ratio" not in limit
    assert "embermap_ratio" not in own
    assert own["seconds"] == 2.0
    assert own["least"] == 1.25


# --- running --------------------------------------------------------------------------------------


def test_a_way_that_fails_is_reported_and_the_others_go_on(
    gpu: Any, movers: Any, settings: Any
) -> None:
    class Breaks(movers.TorchPinned):
        name = "torch, pinned"

        def gather(self, batch: Any) -> Any:
            raise RuntimeError("broken\nin two lines")

    class NoStart(movers.TorchPlain):
        def __init__(self, field: Any) -> None:
            raise MemoryError("too much")

    results = gpu.Results()
    settings.ways = [movers.Limit, movers.Embermap, Breaks, NoStart]
    gpu.run_all(settings, results, [small(gpu)], lambda: None)
    assert not results.failed
    errors = {e["way"]: e["error"] for e in results.cases if "error" in e}
    assert errors == {
        "torch, pinned": "RuntimeError: broken",
        "torch, as people write it": "MemoryError: too much",
    }
    assert {e["way"] for e in results.cases if "error" not in e} == {"cudaMemcpy", "embermap"}
    assert list(settings.folder.iterdir()) == []


def test_embermap_that_fails_makes_the_run_fail(gpu: Any, movers: Any, settings: Any) -> None:
    class Wrong(movers.Embermap):
        def gather(self, batch: Any) -> Any:
            return super().gather(batch) + 1

    results = gpu.Results()
    settings.ways = [movers.Limit, Wrong, movers.DeviceTable]
    gpu.run_all(settings, results, [small(gpu), small(gpu, "overlap")], lambda: None)
    assert results.failed
    assert any("numbers are wrong" in note for note in results.notes)
    assert [e["way"] for e in results.cases if "error" not in e] == [
        "cudaMemcpy",
        "table in GPU memory",
    ]


def test_what_does_not_fit_twice_runs_in_turn(
    gpu: Any, movers: Any, devices: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [small(gpu, op) for op in ("to", "from")]
    one = gpu.memory_needed([movers.Embermap], cases[0], 500)
    alive: list[set[str]] = []
    monkeypatch.setattr(devices, "available_memory", lambda: one + 10_000)
    run = gpu.Ways.run

    def noted(self: Any, *arguments: Any) -> Any:
        alive.append(set(self.alive))
        return run(self, *arguments)

    monkeypatch.setattr(gpu.Ways, "run", noted)
    results = gpu.Results()
    gpu.run_all(settings, results, cases, lambda: None)
    assert any("ran in turn" in note for note in results.notes)
    assert [names >= {"embermap", "SpeedTorch's way"} for names in alive] == [False] * 4
    assert {(e["case"], e["way"]) for e in results.cases} == {
        (case.name, way) for case in cases for way in movers.WAYS
    }
    assert all("embermap_ratio" in e for e in results.cases if e["way"] == "SpeedTorch's way")


def test_what_does_not_fit_at_all_is_left_out(
    gpu: Any, devices: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 1_000)
    results = gpu.Results()
    gpu.run_all(settings, results, [small(gpu)], lambda: None)
    assert any("embermap" in n and "left out" in n and "MiB" in n for n in results.notes)
    assert results.cases == []


def test_no_case_begins_after_the_time(gpu: Any, settings: Any) -> None:
    settings.until = 0.0
    results = gpu.Results()
    gpu.run_all(settings, results, [small(gpu)], lambda: None)
    assert results.notes == ["the time was over: cases are missing"]
    assert results.cases == []


def test_counters_of_the_device_are_kept(gpu: Any, movers: Any, settings: Any) -> None:
    class Counting(movers.Embermap):
        def stats(self) -> Any:
            return {"device_batches": 7}

    results = gpu.Results()
    settings.ways = [movers.Limit, Counting]
    gpu.run_all(settings, results, [small(gpu)], lambda: None)
    assert results.stats == [
        {
            "pool_bytes": 96 * 4_003,
            "row_bytes": 96,
            "threads": 2,
            "cuda": {"device_batches": 7},
        }
    ]


@pytest.mark.parametrize("op", ["beside-to", "beside-from", "overlap"])
def test_cases_beside_computing_leave_the_table_as_it_was(
    gpu: Any, movers: Any, host: Any, settings: Any, tmp_path: Path, op: str
) -> None:
    case = small(gpu, op)
    field = field_of(movers, host, tmp_path, case)
    way = movers.Embermap(field)
    batches = gpu.make_batches(field, case, arrays=False)[:6]
    results = gpu.Results()
    if op == "overlap":
        entry = gpu.overlap(way, case, batches, settings, results)
        assert entry["compute_ratio"] > 0
        assert entry["prefetch"] is True
        assert way.table.step > 0
    else:
        entry = gpu.beside(way, case, batches, settings)
        assert entry["calls_per_second"] > 0
    gpu.line_of(entry)
    gpu.check(way, small(gpu), batches)
    way.close()


def test_an_update_that_is_lost_is_found(gpu: Any, movers: Any, host: Any, tmp_path: Path) -> None:
    case = small(gpu, "overlap")
    field = field_of(movers, host, tmp_path, case)
    way = movers.Embermap(field)
    batches = gpu.make_batches(field, case, arrays=False)[:3]
    ones = torch.ones(case.ids, case.dim)
    for batch in batches:
        way.table.update(batch.ids, ones)
    gpu.check_updates(way, batches, [1, 1, 1])
    with pytest.raises(gpu.WrongRows, match="updates"):
        gpu.check_updates(way, batches, [1, 1, 2])
    way.close()


# --- the training step ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lit2vec2", "research2vec2"])
def test_all_ways_take_the_same_training_step(
    training: Any, host: Any, tmp_path: Path, name: str
) -> None:
    shape = training.QUICK[name]
    assert shape.adagrad == training.SHAPES[name].adagrad
    assert [step.name for step in training.STEPS] == [
        "embermap",
        "SpeedTorch's way",
        "table in GPU memory",
    ]
    for kind in training.STEPS:
        step = kind(host, tmp_path, shape, 2)
        step.check()
        for loop in kind.loops:
            times = step.run([training.batch_of(shape, host, n) for n in range(2)], loop)
            assert len(times) == 2
        step.close()


def test_a_loop_that_prefetches_takes_the_same_steps(
    training: Any, host: Any, tmp_path: Path
) -> None:
    shape = training.QUICK["lit2vec2"]
    batches = [training.batch_of(shape, host, n) for n in range(4)]
    ids = torch.unique(torch.cat([batch.contexts.reshape(-1) for batch in batches]))
    found = []
    for loop in training.LOOPS:
        step = training.EmbermapStep(host, tmp_path, shape, 2)
        asked: list[Any] = []
        prefetch = step.prefetch
        step.prefetch = lambda batch, to=prefetch, asked=asked: (asked.append(batch), to(batch))
        step.run(batches, loop)
        assert asked == (batches[1:] if loop else [])
        found.append(step.look(1, ids))
        step.close()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_wrong_training_step_is_found(
    training: Any, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training.SpeedTorchStep(host, tmp_path, training.QUICK["lit2vec2"], 2)
    right = training.adagrad
    calls = []

    def late(weights: Any, sums: Any, grads: Any) -> None:
        calls.append(1)
        right(weights, sums, grads if len(calls) > 2 else grads * -1)

    monkeypatch.setattr(training, "adagrad", late)
    with pytest.raises(AssertionError, match="weights of table 0"):
        step.check()
    step.close()


def test_the_ids_of_a_training_step(training: Any, host: Any) -> None:
    shape = training.SHAPES["lit2vec2"]
    batch = training.batch_of(shape, host, 0)
    assert batch.targets.shape == (128,)
    assert batch.contexts.shape == (128, 132)
    assert int(batch.contexts.min()) >= 0
    assert int(batch.contexts.max()) < shape.rows
    assert 9_000 < len(torch.unique(batch.contexts)) < 10_500  # log-uniform: many come twice
    again = training.batch_of(shape, host, 0)
    assert torch.equal(again.contexts, batch.contexts)
    even = training.batch_of(training.SHAPES["research2vec2"], host, 0)
    assert even.contexts.shape == (512, 136)
    assert 69_000 < len(torch.unique(even.contexts)) < 69_632
    distinct = training.distinct_batch(training.QUICK["lit2vec2"], host)
    assert len(torch.unique(distinct.contexts)) == distinct.contexts.numel()


# --- the whole ------------------------------------------------------------------------------------


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "gpu.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=300,
        check=False,
    )


def test_a_small_run_writes_its_results_and_leaves_nothing(tmp_path: Path) -> None:
    folder, out, lines = tmp_path / "stores", tmp_path / "r.json", tmp_path / "r.csv"
    folder.mkdir()
    done = run_script(
        *("--quick", "--device", "cpu", "--folder", folder, "--json", out, "--csv", lines),
        *("--pools", "4MiB", "--ids", "1000", "--threads", "2", "--suite", "pools"),
        *("--suite", "training", "--suite", "overlap"),
    )
    assert done.returncode == 0, done
    assert list(folder.iterdir()) == []
    found = json.loads(out.read_text())
    assert found["settings"]["quick"] is True
    assert found["settings"]["threads"] == 2
    assert found["notes"] == []
    by_case: dict[str, set[str]] = {}
    for entry in found["cases"]:
        assert "error" not in entry, entry
        by_case.setdefault(entry["case"], set()).add(entry["way"])
    assert by_case["to/1000/uniform/512B/4MiB/2t"] == set(WAYS)
    assert by_case["from/1000/uniform/512B/4MiB/2t"] == set(WAYS)
    assert by_case["overlap/1000/uniform/512B/4MiB/2t"] == {"embermap"}
    for shape in ("lit2vec2", "research2vec2"):
        assert by_case[f"training/{shape}/2t"] == {
            "embermap",
            "embermap, next batch prefetched",
            "SpeedTorch's way",
            "table in GPU memory",
        }
    with lines.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["cases"])
    assert {row["way"] for row in rows} == {*WAYS, "embermap, next batch prefetched"}
    own = next(row for row in rows if row["way"] == "embermap" and row["op"] == "from")
    assert float(own["limit_ratio"]) > 0
    assert own["error"] == ""
    assert "hostname" not in found["machine"]


@pytest.mark.skipif(em.cuda_devices() > 0, reason="there is a CUDA device")
def test_without_a_device_it_says_so_in_one_line(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--quick", "--folder", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "CUDA" in text


def test_wrong_usage_is_said_in_one_line(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--folder", str(tmp_path), "--cases", "nothing", "--device", "cpu"]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "no case" in text


def test_suites_cases_and_ways_are_listed(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert "ways: cudaMemcpy, embermap" in text
    assert "  training/lit2vec2/" in text
