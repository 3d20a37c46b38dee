"""`embermap bench`: small runs. What is measured is not judged here, for machines differ."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

SMALL = ("--size", "4MiB", "--memory", "2MiB", "--seconds", "0.02", "--batch", "500")


def check_rates(found: Any) -> None:
    for part in ("gather_cold", "gather_warm", "update"):
        assert found[part]["rows"] == 500 * found[part]["batches"] > 0
        assert found[part]["rows_per_second"] > 0
        assert 0 <= found[part]["hit_rate"] <= 1
    for part in ("bulk_write", "scan"):
        assert found[part]["bytes_per_second"] > 0
        assert found[part]["share_of_bare"] > 0
    for part in ("random_read", "sequential_read", "sequential_write"):
        assert found["bare"][part]["bytes_per_second"] > 0
    assert found["prefetch"]["share_of_compute"] > 0
    assert found["memory"]["peak_resident"] >= found["memory"]["resident_before"] > 0


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--optimizer", "adagrad", "--dim", "32"),
        ("--ids", "zipf:1.05", "--dtype", "float64", "--optimizer", "sgd", "--momentum", "0.9"),
        ("--dtype", "int8", "--dim", "7", "--page-size", "64KiB"),
        ("--dtype", "bfloat16", "--optimizer", "adagrad", "--threads", "1"),
        ("--dim", "3000"),
        ("--io", "threads", "--no-direct", "--policy", "s3fifo"),
    ],
)
def test_every_part_is_measured_and_nothing_is_left(
    cli: Embermap, tmp_path: Path, options: tuple[str, ...]
) -> None:
    found = cli.ok("bench", tmp_path, *SMALL, *options, "--json").json
    check_rates(found)
    table = found["table"]
    assert table["rows"] == table["written_rows"] > 100
    assert table["bytes"] == table["rows"] * table["record_bytes"] <= 4 << 20
    assert found["update"]["optimizer"] == ("--optimizer" in options)
    assert list(tmp_path.iterdir()) == []


def test_it_prints_a_table_for_people(cli: Embermap, tmp_path: Path) -> None:
    lines = cli.ok("bench", *SMALL, cwd=tmp_path).out.splitlines()
    names = [line[:14].strip() for line in lines]
    assert names == [
        "table",
        "ids",
        "bulk write",
        "bare random",
        "bare in order",
        "scan",
        "gather, cold",
        "gather, warm",
        "add",
        "prefetch",
        "page I/O",
        "memory",
    ]
    assert list(tmp_path.iterdir()) == []
    assert cli.ok("bench", *SMALL, "--quiet", cwd=tmp_path).out == ""


def test_the_way_of_page_io_can_be_chosen_and_is_reported(cli: Embermap, tmp_path: Path) -> None:
    chosen = cli.ok("bench", tmp_path, *SMALL, "--io", "threads", "--no-direct", "--json").json
    assert chosen["page_io"]["engine"] == "threads"
    assert not chosen["page_io"]["direct_reads"]
    found = cli.ok("bench", tmp_path, *SMALL, "--json").json["page_io"]
    assert found["engine"] in ("io_uring", "threads", "cached")
    assert found["depth"] > 0


def test_more_rows_than_are_written_take_no_disk(cli: Embermap, tmp_path: Path) -> None:
    # Their page bits are part of the budget: a bit for each of 125 million pages.
    options = ("--size", "4MiB", "--memory", "48MiB", "--seconds", "0.02", "--batch", "500")
    found = cli.ok("bench", tmp_path, *options, "--rows", "1e9", "--json").json
    assert found["table"]["rows"] == 10**9
    assert found["table"]["written_rows"] == (4 << 20) // 512
    check_rates(found)


def test_hot_rows_are_found_in_memory_more_often_than_uniform_ones(
    cli: Embermap, tmp_path: Path
) -> None:
    def rate(ids: str) -> float:
        options = ("--ids", ids, "--batch", "200", "--seconds", "0.2")
        found = cli.ok("bench", tmp_path, *SMALL[:4], *options, "--json").json
        return float(found["gather_warm"]["hit_rate"])

    assert rate("zipf:1.5") > rate("uniform") + 0.1


def test_a_file_is_only_read(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(1 << 18, dtype=np.float32))
    before = path.read_bytes(), path.stat().st_mtime_ns
    found = cli.ok("bench", path, "--seconds", "0.02", "--json").json
    assert set(found["bare"]) == {"random_read", "sequential_read"}
    assert found["bare"]["random_read"]["block"] == 4096
    assert found["bare"]["random_read"]["requests"] > 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert list(tmp_path.iterdir()) == [path]
    assert "bare random" in cli.ok("bench", path, "--seconds", "0.02").out


def test_what_cannot_be_measured_is_an_error(cli: Embermap, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    cli.fails("bench", tmp_path / "short", says=["short", "100 bytes"])
    (tmp_path / "empty").write_bytes(b"")
    cli.fails("bench", tmp_path / "empty", says=["empty"])
    cli.fails("bench", tmp_path / "absent", says=["absent", "no such file or directory"])
    os.mkfifo(tmp_path / "pipe")
    cli.fails("bench", tmp_path / "pipe", says=["pipe"])
    # A disk too small is found out before anything is made.
    cli.fails("bench", tmp_path, "--size", "1000000GiB", says=["are free", "No space left"])
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("embermap-bench")]


@pytest.mark.parametrize(
    "options",
    [
        ("--ids", "zupf"),
        ("--ids", "zipf:0"),
        ("--ids", "zipf:x"),
        ("--batch", "0"),
        ("--seconds", "0"),
        ("--seconds", "-1"),
        ("--depth", "0"),
        ("--dim", "0"),
        ("--rows", "0"),
        ("--page-size", "5000"),
        ("--dtype", "int8", "--optimizer", "adagrad"),
        ("--lr", "1"),
        ("--io", "magic"),
        ("--policy", "magic"),
        ("--direct", "--no-direct"),
    ],
)
def test_wrong_usage_exits_with_2(cli: Embermap, tmp_path: Path, options: tuple[str, ...]) -> None:
    result = cli("bench", tmp_path, *options)
    assert result.code == 2
    assert result.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_tidies_up_when_it_is_stopped(
    embermap_cli: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [embermap_cli, "bench", tmp_path, *SMALL[:4], "--seconds", "3600"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("embermap-bench-*/store/t.npy")):
        assert time.monotonic() < deadline
        if list(tmp_path.glob("embermap-bench-*")):
            break
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "-1", "1.5"])
def test_a_device_that_is_none_is_wrong_usage(cli: Embermap, tmp_path: Path, text: str) -> None:
    failed = cli("bench", tmp_path, f"--device={text}")
    assert failed.code == 2
    assert "--device" in failed.err


def test_without_a_gpu_the_device_is_named(cli: Embermap) -> None:
    cli.fails("bench", "--device", "cuda:99", says=["CUDA device 99"])


@pytest.mark.gpu
def test_what_moves_rows_to_a_gpu(cli: Embermap) -> None:
    options = ("--device", "cuda", "--size", "64MiB", "--dim", "64", "--batch", "5000")
    found = cli.ok("bench", *options, "--json").json
    assert found["row_bytes"] == 256
    assert min(found["link"].values()) > 1e9
    assert {one["direction"] for one in found["measured"]} == {"fetch", "write_back"}
    for one in found["measured"]:
        assert all(way["bytes_per_second"] > 0 for way in one["ways"])
    assert found["chosen"]["batch"] == 5000
    text = cli.ok("bench", *options).out
    assert "of the link" in text
    assert "chosen to fetch" in text
