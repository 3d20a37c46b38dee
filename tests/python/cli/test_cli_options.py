"""How a store is opened, and what info tells of its use."""

from __future__ import annotations

import json

import embermap as em
import numpy as np
import pytest


@pytest.mark.parametrize("io", ["auto", "io_uring", "threads", "cached"])
@pytest.mark.parametrize("direct", [[], ["--direct"], ["--no-direct"]])
def test_every_way_of_reading_gives_the_same_file(cli, tmp_path, io, direct):
    rows = np.random.default_rng(0).random((3000, 33), np.float32)
    np.save(tmp_path / "in.npy", rows)
    options = ["--io", io, *direct, "--policy", "s3fifo", "--memory", "4MiB"]
    table = tmp_path / "s" / "t"
    cli.ok("import", tmp_path / "in.npy", table, *options, "--quiet")
    assert cli.ok("verify", table, *options, "--json").json["ok"]
    cli.ok("export", table, tmp_path / "out.npy", *options, "--quiet")
    assert np.array_equal(np.load(tmp_path / "out.npy"), rows)
    told = cli.ok("info", table, *options, "--json").json["io"]
    assert told["engine"] in ("io_uring", "threads", "cached")
    if io != "auto" and not told["note"]:
        assert told["engine"] == io
    if "--no-direct" in direct:
        assert not told["direct_reads"]


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("info", {"--durability", "--verify-reads", "--log-limit", "--policy"}),
        ("verify", {"--verify-reads", "--policy"}),
        ("export", {"--durability", "--log-limit", "--policy"}),
        ("snapshot", {"--durability", "--verify-reads", "--log-limit", "--policy"}),
        ("create", set()),
    ],
)
def test_help_lists_options_that_have_an_effect(cli, tmp_path, command, without):
    options = {"--io", "--durability", "--verify-reads", "--log-limit", "--allow-adopted"}
    options |= {"--direct", "--no-direct", "--policy"}
    told = cli.ok(command, "--help").out.replace(",", " ").split()
    assert options - set(told) == without


def test_options_without_an_effect_are_taken_all_the_same(cli, tmp_path):
    cli.ok("create", tmp_path / "s" / "t", "--rows", "5", "--dim", "2")
    options = ["--policy", "lru", "--durability", "none", "--verify-reads", "read"]
    for command in ("info", "verify"):
        cli.ok(command, tmp_path / "s", *options, "--log-limit", "4MiB")
        assert cli(command, tmp_path / "s", "--policy", "mru").code == 2


def test_wrong_options_are_wrong_usage(cli, tmp_path):
    for options, text in (
        (["--io", "fast"], "fast"),
        (["--policy", "mru"], "mru"),
        (["--direct", "--no-direct"], "--no-direct"),
        (["--table-memory", "much"], "--table-memory"),
        (["--table-memory", "0"], "--table-memory"),
    ):
        result = cli("create", tmp_path / "s" / "t", "--rows", "5", "--dim", "2", *options)
        assert result.code == 2
        assert text in result.error
        assert not (tmp_path / "s").exists()


def test_info_tells_counters_memory_and_io(cli, tmp_path):
    table = tmp_path / "s" / "t"
    cli.ok("create", table, "--rows", "1000", "--dim", "8", "--table-memory", "1MiB")
    cli.ok("materialize", table, "--quiet")
    told = cli.info(table)
    assert told["memory"] == 1 << 20
    assert told["byte_order"] == "little"
    counters = told["counters"]
    assert counters["write_backs"] == told["written_pages"] == 8
    assert counters["bytes_written"] == 32_000
    assert counters["commits"] >= 1
    entry = json.loads((tmp_path / "s" / "embermap.json").read_text())["tables"]["t"]
    assert entry["counters"] == counters
    text = cli.ok("info", table).out
    assert "8 write-backs" in text
    assert told["io"]["engine"] in text
    assert "1.00 MiB" in text
    np.save(tmp_path / "a.npy", np.ones((3, 2), ">f4"))
    cli.ok("import", tmp_path / "a.npy", tmp_path / "s" / "big", "--in-place")
    assert cli.info(tmp_path / "s" / "big")["byte_order"] == "big"
    assert "big-endian" in cli.ok("info", tmp_path / "s" / "big").out


def test_a_share_too_small_names_the_table_and_leaves_nothing(cli, tmp_path):
    cli.fails(
        "create", tmp_path / "s" / "t", "--rows", "1000", "--dim", "2000", "--table-memory", "4KiB",
        says=["'t'", "take", "bytes"],
    )  # fmt: skip
    assert not (tmp_path / "s").exists()


def test_a_few_of_many_pages_are_told_as_few(cli, tmp_path):
    table = tmp_path / "s" / "t"
    cli.ok("create", table, "--rows", "1e9", "--dim", "128")
    assert "(0 %)" in cli.ok("info", table).out
    with em.open(tmp_path / "s") as store:
        store["t"].scatter([5], np.ones((1, 128), np.float32))
    text = cli.ok("info", table).out
    assert "written       1 of 125,000,000 pages (< 0.01 %)" in text
    assert "; 1 commit\n" in text
