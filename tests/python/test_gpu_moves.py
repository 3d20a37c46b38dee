"""Rows to and from the GPU by the ways that were measured, and what the store keeps of that."""

from __future__ import annotations

import json
import threading

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROWS, DIM = 50_000, 64
LARGE = 40_000  # ids of a batch that is worth measuring for: 10 MB
SMALL = "6MiB"  # of 13 MB: pages come and go
WHOLE = "256MiB"


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(0).integers(0, 50, (ROWS, DIM)).astype(np.float32)


@pytest.fixture
def make(tmp_path, values):
    """make(name, memory=, device=, optimizer=): an open store with the table "t" of these rows."""
    stores = []

    def opened(name="store", *, memory=WHOLE, device="cuda", mode="a", optimizer=None):
        store = em.open(tmp_path / name, memory=memory, device=device, mode=mode)
        stores.append(store)
        if "t" not in store:
            store.create("t", rows=ROWS, dim=DIM, optimizer=optimizer)[:] = values
            store.commit()
        return store

    yield opened
    for store in stores:
        store.abandon()


def distinct(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).permutation(ROWS)[:count])


def repeating(count, seed=0, most=ROWS):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, most, count))


def measured(table):
    """What is known of the ways to move rows, as whole numbers: as a file has them."""
    return [
        {**one, "bytes_per_second": round(one["bytes_per_second"])}
        for one in table.stats()["cuda"]["measured"]
    ]


def alike(ours, theirs):
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        a, b = dict(one), dict(other)
        if abs(a.pop("bytes_per_second") - b.pop("bytes_per_second")) > 1 or a != b:
            return False
    return True


def files(store):
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in store.path.iterdir()
        if path.is_file()
    }


@pytest.mark.parametrize("count", [1, 5000, LARGE])
def test_every_id_is_bad_in_an_empty_table(tmp_path, count):
    with em.open(tmp_path / "store", memory=WHOLE, device="cuda") as store:
        table = store.create("t", rows=0, dim=DIM, optimizer=em.optim.SGD(lr=0.1))
        ids = torch.zeros(count, dtype=torch.int64, device="cuda")
        rows = torch.ones(count, DIM, device="cuda")
        for call in (
            lambda: table.gather(ids),
            lambda: table.scatter(ids, rows),
            lambda: table.add(ids, rows),
            lambda: table.update(ids, rows),
        ):
            with pytest.raises(em.RowIdError, match="0 at position 0"):
                call()
        assert table.gather(ids[:0]).shape == (0, DIM)


@pytest.mark.parametrize("memory", [WHOLE, SMALL])
def test_gathers_equal_the_host(make, values, memory):
    table = make(memory=memory)["t"]
    table.gather(np.arange(ROWS))  # where there is room, all pages are in memory now
    assert table.stats()["whole"] == (memory == WHOLE)
    batches = [
        distinct(LARGE),
        distinct(LARGE, 1),  # threads may begin before the ids are sorted
        repeating(LARGE, 2, 500),
        repeating(LARGE, 3, 500),
        torch.full((LARGE,), ROWS - 1),
        distinct(LARGE, 4).sort().values,
        *(distinct(count, count) for count in (1, 31, 32, 33, 4096, 4097)),
        distinct(LARGE, 5),
        torch.arange(ROWS).flip(0),
    ]
    for ids in batches:
        got = table.gather(ids.cuda())
        assert np.array_equal(got.cpu().numpy(), values[ids.numpy()])
    out = torch.full((LARGE + 1, DIM), 7.0, device="cuda")
    ids = distinct(LARGE, 6)
    table.gather(ids.cuda(), out=out[:LARGE])
    assert np.array_equal(out[:LARGE].cpu().numpy(), values[ids.numpy()])
    assert (out[LARGE] == 7).all()


@pytest.mark.parametrize("memory", [WHOLE, SMALL])
def test_writes_equal_the_host(make, values, memory):
    table = make(memory=memory, optimizer=em.optim.SGD(1.0))["t"]
    wanted = values.copy()
    for seed in range(3):
        ids = repeating(LARGE, seed)
        rows = torch.from_numpy(np.random.default_rng(seed).integers(0, 9, (LARGE, DIM))).float()
        table.scatter(ids.cuda(), rows.cuda())
        wanted[ids.numpy()] = rows.numpy()
        table.add(ids.cuda(), rows.cuda())
        np.add.at(wanted, ids.numpy(), rows.numpy())
        table.update(ids.cuda(), rows.cuda())
        np.subtract.at(wanted, ids.numpy(), rows.numpy())
        assert np.array_equal(table.gather(torch.arange(ROWS).cuda()).cpu().numpy(), wanted)
    assert np.array_equal(table[:], wanted)


@pytest.mark.parametrize("memory", [WHOLE, SMALL])
def test_each_row_is_of_one_moment(make, memory):
    """Rows hold one number each, which others change all the time, on the host and on the GPU."""
    table = make(memory=memory, optimizer=em.optim.SGD(1.0))["t"]
    table[:] = 0.0
    errors = []
    ended = threading.Event()

    def write():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(12):
                    ids = distinct(LARGE, turn)
                    rows = torch.full((LARGE, DIM), float(turn))
                    table.scatter(ids.cuda(), rows.cuda())
                    table.add(ids[:9000].cuda(), torch.ones(9000, DIM, device="cuda"))
                    table.scatter(ids[5000:], rows[5000:])
                    table.update(ids[:9000].cuda(), torch.ones(9000, DIM, device="cuda"))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    def read(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                turn = 0
                while not ended.is_set() or turn < 2:
                    ids = distinct(LARGE if turn % 2 == 0 else 4096, 100 + seed + turn)
                    rows = table.gather(ids.cuda())
                    torn = (rows != rows[:, :1]).any(dim=1).nonzero()
                    assert not len(torn), f"row {ids[torn[0]].item()}: {rows[torn[0]].tolist()}"
                    turn += 1
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=write),
        *(threading.Thread(target=read, args=(n,)) for n in (1, 2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside-writers"])
def test_rows_in_memory_come_while_others_are_read(make, values, others):
    """Batches of which most pages are in memory; others change rows meanwhile, but not theirs."""
    table = make(memory=SMALL, optimizer=em.optim.SGD(1.0))["t"]
    wanted = values.copy()
    rng = np.random.default_rng(9)
    stop, errors = threading.Event(), []

    def write():
        ids = np.arange(10_000, 10_200)
        try:
            while not stop.is_set():
                table.scatter(ids, values[ids])
        except BaseException as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    if others:
        writer.start()
    try:
        for turn in range(30):
            known = rng.permutation(10_000)[:8_000]
            far = rng.integers(20_000, ROWS, 100)  # on pages that have gone most of the time
            ids = rng.permutation(np.concatenate([known, far]))
            there = torch.from_numpy(ids).cuda()
            before = table.stats()
            got = table.gather(there).cpu().numpy()
            assert np.array_equal(got, wanted[ids]), f"turn {turn}"
            missed = table.stats()["misses"] - before["misses"]
            assert turn == 0 or others or 0 < missed < 110
            rows = torch.from_numpy(rng.integers(0, 9, (len(ids), DIM))).float()
            table.update(there, rows.cuda())
            np.subtract.at(wanted, ids, rows.numpy())
    finally:
        stop.set()
        if others:
            writer.join()
    assert not errors, errors[0]
    assert np.array_equal(table[:], wanted)


def test_stats_add_up(make):
    table = make(optimizer=em.optim.SGD(1.0))["t"]
    table.gather(np.arange(ROWS))
    nothing = table.stats()["cuda"]
    assert nothing["device"] == ""
    assert nothing["measured"] == []
    counts = ("transfers", "kernel_rows", "thread_rows", "pageable_rows", "bytes", "seconds")
    assert all(nothing[name] == 0 for name in counts)
    assert "cuda" not in make("host", device=None)["t"].stats()

    def moved(call):
        before = table.stats()["cuda"]
        call()
        after = table.stats()["cuda"]
        assert after["seconds"] > before["seconds"]
        rows = sum(after[name] - before[name] for name in counts[1:4])
        if table.stats()["registered"]:
            assert after["bytes"] - before["bytes"] == rows * DIM * 4
            assert after["pageable_rows"] == 0
        return after["transfers"] - before["transfers"], rows

    few, many = distinct(1000).cuda(), repeating(LARGE, 1).cuda()
    unique = len(many.unique())
    ones = torch.ones(LARGE, DIM, device="cuda")
    calls = int(table.stats()["registered"])
    assert moved(lambda: table.gather(few)) == (calls, 1000)
    transfers, rows = moved(lambda: table.gather(many))
    assert transfers == calls
    assert unique <= rows <= LARGE
    assert moved(lambda: table.scatter(many, ones)) == (calls, unique)
    assert moved(lambda: table.add(many, ones)) == (2 * calls, 2 * unique)
    assert moved(lambda: table.update(many, ones)) == (2 * calls, 2 * unique)
    assert table.stats()["cuda"]["device"] == torch.cuda.get_device_name(0)
    empty = table.stats()["cuda"]
    table.gather(many[:0])
    assert table.stats()["cuda"] == empty


def test_pages_are_counted_and_marked_as_on_the_host(make):
    gpu = make("gpu")["t"]
    host = make("host", device=None)["t"]
    for table in (gpu, host):
        table.gather(np.arange(ROWS))
        table._store.commit()
        assert table.stats()["dirty_pages"] == 0
    for count in (1, 700, 4096, 4097):
        ids = repeating(count, count)
        before = [table.stats()["hits"] for table in (gpu, host)]
        gpu.gather(ids.cuda())
        pages = len((ids // (host.page_bytes // (DIM * 4))).unique())
        assert gpu.stats()["hits"] - before[0] == pages
        rows = torch.ones(count, DIM)
        gpu.scatter(ids.cuda(), rows.cuda())
        host.scatter(ids, rows)
        assert gpu.stats()["dirty_pages"] == host.stats()["dirty_pages"] >= pages
    assert gpu.stats()["misses"] == host.stats()["misses"]
    ids = distinct(LARGE)
    gpu.add(ids.cuda(), torch.ones(LARGE, DIM, device="cuda"))
    host.add(ids, torch.ones(LARGE, DIM))
    assert gpu.stats()["dirty_pages"] == host.stats()["dirty_pages"]
    assert np.array_equal(gpu[:], host[:])


@pytest.mark.parametrize("memory", [WHOLE, SMALL])
def test_what_the_gpu_wrote_is_in_the_commit(make, values, memory):
    store = make(memory=memory, optimizer=em.optim.SGD(1.0))
    table = store["t"]
    wanted = values.copy()
    for seed in range(2):
        ids = distinct(LARGE, seed)
        rows = torch.from_numpy(np.random.default_rng(seed).integers(0, 9, (LARGE, DIM))).float()
        table.scatter(ids.cuda(), rows.cuda())
        wanted[ids.numpy()] = rows.numpy()
        table.update(ids[:5000].cuda(), rows[:5000].cuda())
        wanted[ids[:5000].numpy()] -= rows[:5000].numpy()
        store.commit()
    table.scatter(ids.cuda(), torch.full((LARGE, DIM), -1.0, device="cuda"))  # in no commit
    step = table.step
    store.abandon()

    again = make(device=None)
    assert np.array_equal(again["t"][:], wanted)
    assert again["t"].step == step
    assert again["t"].verify()["ok"]
    again.close()
    assert np.array_equal(make(mode="r")["t"].gather(torch.arange(ROWS).cuda()).cpu(), wanted)


def need_registered(table):
    table.gather(torch.zeros(1, dtype=torch.int64, device="cuda"))
    if not table.stats()["registered"]:
        pytest.skip("the system refuses to register memory")


def test_measurements_are_kept_for_the_next_session(make, values):
    store = make()
    table = store["t"]
    need_registered(table)
    file = store.path / "cuda.json"
    table.gather(distinct(1000).cuda())
    assert measured(table) == []
    assert not file.exists(), "measured for a few rows"
    ids = distinct(LARGE)
    table.gather(ids.cuda())
    first = measured(table)
    assert {one["direction"] for one in first} == {"fetch", "write_back"}
    assert all(one["row_bytes"] == DIM * 4 and one["bytes_per_second"] > 0 for one in first)
    assert np.array_equal(table[:], values), "measuring changed rows"
    text = file.read_text()
    assert json.loads(text)["version"] == 1
    table.gather(distinct(LARGE, 1).cuda())
    table.scatter(ids.cuda(), table.gather(ids.cuda()))
    assert measured(table) == first
    assert file.read_text() == text
    store.close()

    store = make()
    table = store["t"]
    assert measured(table) == []  # nobody has asked for the device yet
    table.gather(ids[:1].cuda())
    assert alike(measured(table), first)
    assert np.array_equal(table.gather(ids.cuda()).cpu(), values[ids.numpy()])
    table.scatter(ids.cuda(), table.gather(ids.cuda()))
    assert alike(measured(table), first), "measured once more"
    assert file.read_text() == text


def test_recalibrate_measures_anew(make):
    store = make()
    table = store["t"]
    store.recalibrate()  # nothing to forget
    need_registered(table)
    ids = distinct(LARGE).cuda()
    table.gather(ids)
    assert measured(table)
    store.recalibrate()
    assert measured(table) == []
    devices = json.loads((store.path / "cuda.json").read_text())["devices"]
    assert devices == {torch.cuda.get_device_name(0): []}
    table.gather(ids[:100])
    assert measured(table) == []
    table.gather(ids)
    anew = measured(table)
    assert anew
    devices = json.loads((store.path / "cuda.json").read_text())["devices"]
    assert sum(len(one["ways"]) for one in devices[torch.cuda.get_device_name(0)]) == len(anew)
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.recalibrate()
    store = make()
    store.recalibrate()  # also what an earlier session measured, before the device's first use
    store["t"].gather(ids[:1])
    assert measured(store["t"]) == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00\xff" * 500,
        b'{"version": 2, "devices": {}}',
        b'{"version": 1, "devices": ' + b"[" * 300_000,
        b'{"version": 1, "devices": {"NAME": [{"direction": "fetch", "rows": 9, "row_bytes": 256, '
        b'"pool_bytes": 13000000, "threads": 16, "ways": [{"blocks": 1000000, "block_threads": 1, '
        b'"host_threads": 0, "bytes_per_second": 1e11, "thread_share": 0}]}]}}',
    ],
    ids=["empty", "bytes", "version", "nested", "ways"],
)
def test_a_damaged_file_is_measured_anew(make, values, text):
    store = make()
    need_registered(store["t"])
    store.close()
    file = store.path / "cuda.json"
    file.write_bytes(text.replace(b"NAME", torch.cuda.get_device_name(0).encode()))
    store = make()
    table = store["t"]
    ids = distinct(LARGE)
    assert np.array_equal(table.gather(ids.cuda()).cpu(), values[ids.numpy()])
    first = measured(table)
    assert all(one["kernel_blocks"] <= 64 for one in first)
    assert {one["direction"] for one in first} == {"fetch", "write_back"}
    assert json.loads(file.read_text())["version"] == 1
    store.close()
    table = make()["t"]
    table.gather(ids[:1].cuda())
    assert alike(measured(table), first)


def test_readers_write_nothing(make, values):
    store = make()
    need_registered(store["t"])
    store.close()
    (store.path / "cuda.json").unlink(missing_ok=True)
    before = files(store)
    ids = distinct(LARGE)
    reader = make(mode="r")
    assert np.array_equal(reader["t"].gather(ids.cuda()).cpu(), values[ids.numpy()])
    assert measured(reader["t"])
    assert np.array_equal(reader["t"].gather(ids.cuda()).cpu(), values[ids.numpy()])
    reader.recalibrate()
    assert measured(reader["t"]) == []
    reader.close()
    assert files(store) == before

    writer = make()
    writer["t"].gather(ids.cuda())
    first = measured(writer["t"])
    writer.close()
    before = files(store)
    reader = make(mode="r")
    reader["t"].gather(ids.cuda())
    assert alike(measured(reader["t"]), first), "a reader uses what a writer measured"
    reader.recalibrate()
    reader.close()
    assert files(store) == before


def test_tables_of_one_store_share_what_was_measured(make):
    store = make()
    table = store["t"]
    need_registered(table)
    ids = distinct(LARGE).cuda()
    table.gather(ids)
    first = measured(table)
    other = store.create("other", rows=ROWS, dim=DIM)
    other.gather(ids)
    assert measured(other) == measured(table) == first
    wide = store.create("wide", rows=ROWS, dim=4 * DIM)
    wide.gather(ids)
    assert {one["row_bytes"] for one in measured(table)} == {DIM * 4, DIM * 16}
    store.close()
    table = make()["t"]
    table.gather(ids[:1])
    assert {one["row_bytes"] for one in measured(table)} == {DIM * 4, DIM * 16}
