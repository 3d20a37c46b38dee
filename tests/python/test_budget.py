"""Memory of a store and of its tables; options of opening; statistics."""

from __future__ import annotations

import json
import re

import embermap as em
import numpy as np
import pytest

MiB = 1 << 20


def test_a_table_has_memory_of_its_own(path):
    with em.open(path, memory="16MiB") as store:
        own = store.create("own", rows=1_000_000, dim=16, memory="2MiB")
        large = store.create("large", rows=1_000_000, dim=16)
        assert (own.memory, large.memory) == (2 * MiB, None)
        for table in (own, large):
            table.gather(np.arange(0, 1_000_000, 100))
        taken = {t.name: t.stats()["memory_bytes"] for t in (own, large)}
        assert 1.9 * MiB < taken["own"] <= 2 * MiB
        # An eighth of the store's memory is for the index of the redo log.
        assert 11 * MiB < taken["large"] <= 12 * MiB

        own[5] = 7
        own.memory = "8MiB"
        assert own[5].tolist() == [7] * 16
        for table in (own, large):
            table.gather(np.arange(0, 1_000_000, 100))
        assert 7.5 * MiB < own.stats()["memory_bytes"] <= 8 * MiB
        assert large.stats()["memory_bytes"] <= 6 * MiB
    with em.open(path, memory="16MiB") as store:
        assert store["own"].memory == 8 * MiB
        store["own"].memory = None
        assert store["own"].memory is None
        store.abandon()
    with em.open(path, mode="r", memory="16MiB") as store:
        assert store["own"].memory == 8 * MiB
        store["own"].memory = "1MiB"  # for this session
        assert store["own"].memory == MiB


def test_what_a_table_cannot_use_goes_to_the_others(path):
    with em.open(path, memory="16MiB") as store:
        small = store.create("small", rows=100, dim=16, memory="12MiB")
        large = store.create("large", rows=1_000_000, dim=16)
        small.gather([1])
        large.gather(np.arange(0, 1_000_000, 100))
        assert small.stats()["memory_bytes"] < 50_000
        assert large.stats()["memory_bytes"] > 13 * MiB
    with em.open(path, memory="16MiB", durability="none") as store:  # there is no log
        store["large"].gather(np.arange(0, 1_000_000, 100))
        assert store["large"].stats()["memory_bytes"] > 14 * MiB


def least(error):
    return int(re.search(r"take (\d+) bytes", str(error.value)).group(1))


def test_a_budget_that_cannot_work_names_tables_and_the_least(path):
    with em.open(path, memory="1MiB") as store:
        a = store.create("a", rows=10_000, dim=128)
        store.create("b", rows=10_000, dim=4096)
        with pytest.raises(em.BudgetError, match=r"table 'c'.*one page of it") as caught:
            store.create("c", rows=1000, dim=1000, memory=4000)
        assert least(caught) > 4000
        enough = store.create("c", rows=1000, dim=1000, memory=least(caught))
        enough.gather([999])
        with pytest.raises(em.BudgetError, match=r"'a' \d+ \(its own memory\)") as caught:
            a.memory = "2MiB"
        assert a.memory is None
        with pytest.raises(em.BudgetError, match="'a'"):
            a.memory = 100
        a.gather([1])
        assert store.tables() == ["a", "b", "c"]
    with pytest.raises(em.BudgetError, match=r"3 tables.*\('b' \d+, 'a' \d+, 'c' \d+") as caught:
        em.open(path, memory=10_000)
    with em.open(path, memory=least(caught)) as store:
        for name in store:
            assert store[name].gather([9, 999]).shape[0] == 2
    with pytest.raises(em.BudgetError):
        em.open(path, memory=least(caught) - 1)


@pytest.mark.parametrize("memory", [0, "0", -1, 1.5, "much", object()])
def test_memory_that_cannot_be(store, memory):
    with pytest.raises((ValueError, TypeError)):
        store.create("t", rows=1, dim=1, memory=memory)
    table = store.create("t", rows=1, dim=1)
    with pytest.raises((ValueError, TypeError)):
        table.memory = memory
    assert table.memory is None


def test_many_tables_share_and_keep_within(path):
    memory = 8 * MiB
    with em.open(path, memory=memory) as store:
        rng = np.random.default_rng(0)
        for k in range(12):
            own = {"memory": 300_000} if k % 4 == 0 else {}
            store.create(f"t{k}", rows=int(rng.integers(1, 200_000)), dim=32, **own)
        for name in store:
            table = store[name]
            table.gather(rng.integers(0, len(table), 20_000))
        stats = store.stats()
        assert stats["memory"] == memory
        frames = sum(t["memory_bytes"] for t in stats["tables"].values())
        assert 0.8 * memory < frames <= memory * (31 / 32 - 1 / 8)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["auto", "io_uring", "threads", "cached"])
@pytest.mark.parametrize("direct", [None, True, False])
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_every_way_of_reading_gives_the_same(path, io, direct, policy):
    rng = np.random.default_rng(1)
    rows = rng.random((2000, 33), np.float32)
    with em.open(path, memory="100KiB", io=io, direct=direct, policy=policy) as store:
        table = store.create("t", rows=2000, dim=33)
        ids = rng.permutation(2000)
        for part in np.array_split(ids, 20):
            table.scatter(part, rows[part])
        for part in np.array_split(rng.permutation(2000), 20):
            assert np.array_equal(table.gather(part), rows[part])
        stats = table.stats()
        assert stats["evictions"] > 0
        assert stats["io_engine"] in ("io_uring", "threads", "cached")
        if io != "auto" and not stats["io_note"]:
            assert stats["io_engine"] == io
        if direct is False:
            assert not stats["direct_reads"]
        assert stats["io_memory_bytes"] < 4 * MiB
    assert np.array_equal(np.load(path / "t.npy"), rows)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"io": "fast"}, ValueError, "fast.*io_uring"),
        ({"io": None}, TypeError, "io"),
        ({"direct": 1}, TypeError, "direct"),
        ({"direct": "yes"}, TypeError, "direct"),
        ({"policy": "mru"}, ValueError, "mru.*lru"),
        ({"policy": 3}, TypeError, "policy"),
    ],
)
def test_options_that_are_none(path, options, error, text):
    with pytest.raises(error, match=text):
        em.open(path, **options)
    assert not path.exists()


# --- statistics -----------------------------------------------------------------------------------


def test_stats_of_tables_and_of_the_store(path):
    with em.open(path, memory="1MiB") as store:
        a = store.create("total", rows=10_000, dim=128)
        b = store.create("b", rows=100, dim=8)
        a[:] = 1
        a.gather(range(0, 10_000, 8))
        b.gather([1, 2])
        one = a.stats()
        assert one["misses"] > 0
        assert one["bytes_read"] == 4096 * one["pages_read"] > 0
        assert one["bytes_written"] == 10_000 * 512
        # What is copied from the page cache takes no request.
        assert (one["read_requests"] > 0) == (one["io_engine"] != "cached")
        assert one["read_requests"] <= one["pages_read"]
        assert 0 < one["write_requests"] <= one["write_backs"]
        assert one["seconds_waiting"] > 0
        assert one["whole"] is False
        assert b.stats()["whole"] is True
        every = store.stats()
        assert set(every["tables"]) == {"total", "b"}
        assert every["tables"]["total"]["misses"] == one["misses"]
        assert every["total"]["misses"] == one["misses"] + b.stats()["misses"]
        taken = sum(t["memory_bytes"] for t in every["tables"].values())
        taken += every["log"]["memory_bytes"]
        assert every["memory_bytes"] == taken + every["total"]["io_memory_bytes"]
        assert taken <= every["memory"]  # what is for I/O is not in it


def test_counters_go_through_sessions(path):
    with em.open(path, memory="1MiB") as store:
        table = store.create("t", rows=10_000, dim=128)
        assert set(table.counters().values()) == {0}
        table.scatter([1], np.ones((1, 128), np.float32))
        table.gather([1])
        store.commit()
        first = table.counters()
        assert first == {
            "hits": 1,
            "misses": 1,
            "evictions": 0,
            "write_backs": 1,
            "bytes_read": 0,
            "bytes_written": 4096,
            "commits": 1,
        }
    with em.open(path, memory="1MiB") as store:
        table = store["t"]
        assert table.counters() == first
        table.gather(range(0, 10_000, 8))
        table[:] = 2
        store.commit()
        second = table.counters()
        assert second["misses"] >= 1250
        assert second["commits"] == 2
        table.gather([5])
        store.checkpoint()
        store.abandon()  # not committed, not recorded
    with em.open(path, mode="r", memory="1MiB") as store:
        assert store["t"].counters() == second
    entry = json.loads((path / "embermap.json").read_text())["tables"]["t"]
    assert entry["counters"] == second


def test_a_manifest_without_counters_is_read(path):
    with em.open(path, memory="1MiB") as store:
        store.create("t", rows=10, dim=2)[0] = 1
    manifest = path / "embermap.json"
    data = json.loads(manifest.read_text())
    del data["checksum"]  # as who edits it by hand does
    counters = data["tables"]["t"].pop("counters")
    manifest.write_text(json.dumps(data))
    with em.open(path, memory="1MiB") as store:
        assert set(store["t"].counters().values()) == {0}
    data["tables"]["t"]["counters"] = {"hits": 3}
    manifest.write_text(json.dumps(data))
    with em.open(path, memory="1MiB") as store:
        assert store["t"].counters() == dict.fromkeys(counters, 0) | {"hits": 3}
    for bad in ({"hits": -1}, {"hits": "x"}, 5):
        data["tables"]["t"]["counters"] = bad
        manifest.write_text(json.dumps(data))
        with pytest.raises(em.FormatError, match="hits|counters"):
            em.open(path)
