"""What embermap writes, read by a reader made from docs/file-format.md alone, with NumPy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import embermap as em
import numpy as np
import pytest
from numpy.typing import NDArray

# --- the reader -----------------------------------------------------------------------------------


def philox(seed: int, row: int, block: int) -> list[int]:
    word = [row & 0xFFFFFFFF, row >> 32, block & 0xFFFFFFFF, block >> 32]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * word[0], 0xCD9E8D57 * word[2]
        word = [
            (b >> 32) ^ word[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ word[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return word


def uniform_element(seed: int, row: int, column: int, low: float, high: float, dtype: Any) -> Any:
    if dtype.kind in "iu":
        w = philox(seed, row, column)
        first = int(np.ceil(low))
        count = int(np.ceil(high)) - first
        return first + ((w[0] << 64) + (w[1] << 96) + w[2] + (w[3] << 32)) * count // 2**128
    if dtype == np.float64:
        w = philox(seed, row, column // 2)[column % 2 * 2 :]
        u = w[0] * 2.0**-32 + (w[1] >> 11) * 2.0**-53
    else:
        u = (philox(seed, row, column // 4)[column % 4] >> 8) * 2.0**-24
    value = np.float64(low) + u * (high - low)
    if value >= high or dtype.type(np.float32(value) if dtype.itemsize < 8 else value) >= high:
        return np.nextafter(dtype.type(high), dtype.type(-np.inf))
    return dtype.type(np.float32(value)) if dtype.itemsize < 8 else value


class Log:
    """What the commits in a store's redo.log have."""

    def __init__(self, file: Path) -> None:
        self.manifest: dict[str, Any] | None = None
        self.pages: dict[tuple[int, int], tuple[bytes | None, int]] = {}  # bytes; None: in place
        self.kinds: list[int] = []
        self.forgotten = 0  # records of no commit
        log = file.read_bytes()
        headers = [log[at : at + 88] for at in (0, 4096)]
        valid = [
            struct.unpack("<8sII9Q", slot)
            for slot in headers
            if slot[:8] == b"EMBREDO1"
            and xxh3(slot[:56]) == struct.unpack_from("<Q", slot, 56)[0]
            and xxh3(slot[:80]) == struct.unpack_from("<Q", slot, 80)[0]
        ]
        _, version, zero, life, _, at, _, _, _, *store, _ = max(valid, key=lambda slot: slot[4])
        assert (version, zero) == (1, 0)
        self.store_id = "".join(f"{half:016x}" for half in store)
        uncommitted: dict[tuple[int, int], tuple[bytes | None, int]] = {}
        while at + 4096 <= len(log):
            fields = struct.unpack_from("<4sI8Q", log, at)
            magic, kind, own_life, place, length, _, table, page_bytes, n, recorded = fields
            if (magic, own_life, place) != (b"EMRC", life, at):
                break
            end = at + 72 + n * (1 if kind == 3 else 16)
            if xxh3(log[at : at + 64] + bytes(8) + log[at + 72 : end]) != recorded:
                break
            self.kinds.append(kind)
            if kind == 3:
                self.manifest = json.loads(log[at + 72 : end])
                self.pages |= uncommitted
                uncommitted = {}
            for i in range(n if kind != 3 else 0):
                page, checksum, zero = struct.unpack_from("<QII", log, at + 72 + 16 * i)
                assert zero == 0
                begin = -(-end // 4096) * 4096 + i * page_bytes
                found = log[begin : begin + page_bytes] if kind == 1 else None
                uncommitted[table, page] = (found, checksum)
            at += length
        self.forgotten = len(uncommitted)


class Reader:
    """One table of a store."""

    def __init__(self, store: Path, name: str) -> None:
        manifest = json.loads((store / "embermap.json").read_text("utf-8"))
        self.log = Log(store / "redo.log")
        if self.log.manifest and self.log.manifest["revision"] > manifest["revision"]:
            manifest = self.log.manifest
        assert (manifest["format"], manifest["version"]) == ("embermap", 2)
        assert manifest["store_id"] == self.log.store_id
        assert manifest["next_id"] > manifest["tables"][name]["id"] > 0
        self.commit = manifest["commit"]
        self.entry = entry = manifest["tables"][name]
        self.data = self.committed((store / f"{name}.npy").read_bytes())
        self.pages = pages = (store / f"{name}.pages").read_bytes()
        magic, version, flags, self.count, self.sums, self.header_sum = struct.unpack(
            "<8sIIQQQ", pages[:40]
        )
        assert (magic, version, flags) == (b"EMBPAGES", 2, 0)
        assert len(pages) == self.sums + -(-self.count // 127) * 512
        assert self.count == -(-entry["rows"] // entry["rows_per_page"])
        assert len(self.data) == entry["data_offset"] + entry["rows"] * entry["stride"]
        self.dtype = np.dtype(entry["dtype"])

    def committed(self, data: bytes) -> bytes:
        """The .npy file with the pages that the log has, which must match their checksums."""
        entry, out = self.entry, bytearray(data)
        end = entry["data_offset"] + entry["rows"] * entry["stride"]
        size = entry["rows_per_page"] * entry["stride"]
        self.logged = {}
        for (table, page), (content, checksum) in self.log.pages.items():
            if table != entry["id"]:
                continue
            begin = entry["data_offset"] + page * size
            if page == 2**64 - 1:
                assert content is not None
                begin, size_here = 0, 4096
            else:
                size_here = min(size, end - begin)
                self.logged[page] = checksum
            if content is not None:
                assert not any(content[size_here:])
                out[begin : begin + size_here] = content[:size_here]
            assert (xxh3(bytes(out[begin : begin + size_here])) & 0xFFFFFFFF or 1) == checksum
        return bytes(out[:end])

    def sector(self, at: int) -> bytes:
        """The content of the sector at this offset, which must match its checksum."""
        content, (recorded,) = (
            self.pages[at : at + 508],
            struct.unpack_from("<I", self.pages, at + 508),
        )
        assert recorded == (xxh3(content, at // 512) & 0xFFFFFFFF if any(content) else 0)
        return content

    def written(self, page: int) -> bool:
        if page in self.logged:
            return True
        sector, place = divmod(page, 4064)
        return bool(self.sector(4096 + 512 * sector)[place // 8] >> place % 8 & 1)

    def page(self, page: int) -> bytes:
        size = self.entry["rows_per_page"] * self.entry["stride"]
        begin = self.entry["data_offset"] + page * size
        return self.data[begin : begin + size]

    def checksum(self, page: int) -> int:
        sector, place = divmod(page, 127)
        return int(struct.unpack_from("<I", self.sector(self.sums + 512 * sector), 4 * place)[0])

    def weight(self, row: int) -> NDArray[Any]:
        entry, dim = self.entry, self.entry["dim"]
        if self.written(row // entry["rows_per_page"]):
            return np.frombuffer(
                self.data, self.dtype, dim, entry["data_offset"] + row * entry["stride"]
            )
        init = entry["init"]
        if init["name"] == "zeros":
            return np.zeros(dim, self.dtype)
        if init["name"] == "constant":
            return np.full(dim, init["value"], self.dtype)
        assert init["name"] == "uniform"
        columns = [
            uniform_element(entry["seed"], row, c, init["low"], init["high"], self.dtype)
            for c in range(dim)
        ]
        return np.array(columns, self.dtype)


# --- XXH3, 64 bits: lengths 17 to 240 with seed 0, and above 240 ----------------------------------

P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
MASK = 2**64 - 1
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def words(data: bytes, count: int, at: int = 0) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", data, at)


def fold(a: int, b: int) -> int:
    return (a * b & MASK) ^ (a * b >> 64)


def xxh3(data: bytes, seed: int = 0) -> int:
    secret = b"".join(
        struct.pack(
            "<2Q",
            (words(SECRET, 1, at)[0] + seed) & MASK,
            (words(SECRET, 1, at + 8)[0] - seed) & MASK,
        )
        for at in range(0, 192, 16)
    )
    total = len(data) * P64[0] & MASK

    def mixed(at: int, key: int) -> int:
        (a, b), (c, d) = words(data, 2, at), words(SECRET, 2, key)
        return fold(a ^ c, b ^ d)

    if len(data) <= 128:
        assert len(data) > 16
        for i in range((len(data) - 1) // 32 + 1):
            total += mixed(16 * i, 32 * i) + mixed(len(data) - 16 * (i + 1), 32 * i + 16)
    elif len(data) <= 240:
        total += sum(mixed(16 * i, 16 * i) for i in range(8))
        total = avalanche(total & MASK)
        total += sum(mixed(16 * i, 16 * (i - 8) + 3) for i in range(8, len(data) // 16))
        total += mixed(len(data) - 16, 136 - 17)
    else:
        assert len(data) > 240
        acc = [P32[2], *P64[:4], P32[1], P64[4], P32[0]]

        def stripe(at: int, key: int) -> None:
            for i, (value, mask) in enumerate(
                zip(words(data, 8, at), words(secret, 8, key), strict=True)
            ):
                mixed = value ^ mask
                acc[i ^ 1] = acc[i ^ 1] + value & MASK
                acc[i] = acc[i] + (mixed & 0xFFFFFFFF) * (mixed >> 32) & MASK

        for n, at in enumerate(range(0, (len(data) - 1) // 64 * 64, 64)):
            if n and n % 16 == 0:
                acc[:] = [
                    (a ^ a >> 47 ^ k) * P32[0] & MASK
                    for a, k in zip(acc, words(secret, 8, 128), strict=True)
                ]
            stripe(at, n % 16 * 8)
        if ((len(data) - 1) // 64) % 16 == 0:
            acc[:] = [
                (a ^ a >> 47 ^ k) * P32[0] & MASK
                for a, k in zip(acc, words(secret, 8, 128), strict=True)
            ]
        stripe(len(data) - 64, 192 - 64 - 7)
        keys = words(secret, 8, 11)
        for i in range(0, 8, 2):
            total += fold(acc[i] ^ keys[i], acc[i + 1] ^ keys[i + 1])
    return avalanche(total & MASK)


def avalanche(total: int) -> int:
    total = (total ^ total >> 37) * 0x165667919E3779F9 & MASK
    return total ^ total >> 32


# --- stores that embermap wrote -------------------------------------------------------------------


def make(store: Path, *, rows: int, dim: int, written: list[int], **options: Any) -> NDArray[Any]:
    """A table "t" with some rows scattered; its weights as embermap returns them."""
    with em.open(store, memory="8MiB") as tables:
        table = tables.create("t", rows=rows, dim=dim, **options)
        if written:
            values = np.arange(len(written) * dim).reshape(len(written), dim) % 100
            table.scatter(written, values.astype(table.dtype))
        tables.commit()
        return np.array(table.gather(np.arange(rows)))


@pytest.mark.parametrize(
    ("dtype", "init", "optimizer"),
    [
        ("float32", em.init.Uniform(-0.25, 0.25), None),
        ("float32", em.init.Uniform(-0.25, 0.25), em.optim.Adagrad(lr=0.1)),
        ("float64", em.init.Uniform(0.0, 1.0), em.optim.SGD(lr=0.1, momentum=0.9)),
        ("float16", em.init.Uniform(-1.0, 1.0), em.optim.Adagrad(lr=0.1)),
        ("int32", em.init.Uniform(-1000, 1000), None),
        ("uint8", em.init.Constant(7), None),
        ("float32", em.init.Zeros(), None),
    ],
)
@pytest.mark.parametrize("dim", [1, 6, 130])
def test_every_row_written_or_not_reads_as_documented(
    tmp_path: Path, dim: int, dtype: str, init: Any, optimizer: Any
) -> None:
    rows, written = 500, [0, 17, 18, 250, 499]
    expected = make(
        tmp_path / "s",
        rows=rows,
        dim=dim,
        dtype=dtype,
        init=init,
        optimizer=optimizer,
        seed=(7 << 32) + 5,
        written=written,
    )
    reader = Reader(tmp_path / "s", "t")
    pages = {row // reader.entry["rows_per_page"] for row in written}
    assert [p for p in range(reader.count) if reader.written(p)] == sorted(pages)
    got = np.array([reader.weight(row) for row in range(rows)])
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
    assert (got[17] == (np.arange(dim, 2 * dim) % 100).astype(dtype)).all()


def test_checksums_are_xxh3_of_the_pages_written_and_0_elsewhere(tmp_path: Path) -> None:
    make(
        tmp_path / "s",
        rows=1003,
        dim=20,
        written=[0, 400, 1002],
        optimizer=em.optim.Adagrad(lr=0.1),
    )
    reader = Reader(tmp_path / "s", "t")
    assert reader.header_sum == xxh3(reader.pages[:32])
    checked = 0
    for page in range(reader.count):
        if reader.written(page):
            assert reader.checksum(page) == (xxh3(reader.page(page)) & 0xFFFFFFFF or 1)
            checked += 1
        else:
            assert reader.checksum(page) == 0
    assert checked == 3


def test_every_sector_of_many_pages_matches_its_checksum_and_has_its_pages(tmp_path: Path) -> None:
    written = [0, 126, 127, 4063, 4064, 8999]  # first and last pages of sectors, 1 row each
    make(tmp_path / "s", rows=9000, dim=1024, written=written)
    reader = Reader(tmp_path / "s", "t")
    assert reader.count == 9000
    for at in range(4096, len(reader.pages), 512):
        reader.sector(at)
    assert [p for p in range(reader.count) if reader.written(p)] == written
    assert [p for p in range(reader.count) if reader.checksum(p)] == written
    for page in written:
        assert reader.checksum(page) == xxh3(reader.page(page)) & 0xFFFFFFFF


def test_numpy_maps_a_table_with_state_as_records_named_as_documented(tmp_path: Path) -> None:
    expected = make(
        tmp_path / "s", rows=40, dim=5, written=list(range(40)), optimizer=em.optim.Adagrad(lr=0.1)
    )
    records = np.load(tmp_path / "s" / "t.npy", mmap_mode="r")
    assert records.dtype.names[:2] == ("weight", "sum")
    assert records.dtype.itemsize == Reader(tmp_path / "s", "t").entry["stride"]
    np.testing.assert_array_equal(records["weight"], expected)
    assert (records["sum"] == 0).all()


def test_the_reader_notices_a_changed_byte(tmp_path: Path) -> None:
    make(tmp_path / "s", rows=100, dim=64, written=[3])
    file = tmp_path / "s" / "t.npy"
    data = bytearray(file.read_bytes())
    data[4096 + 3 * 256] ^= 1
    file.write_bytes(data)
    reader = Reader(tmp_path / "s", "t")
    assert reader.checksum(0) != xxh3(reader.page(0)) & 0xFFFFFFFF


# --- the log --------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [1, 4, 8, 60])  # of a record: other lengths to be summed
def test_a_log_that_is_not_empty_reads_as_documented(tmp_path: Path, entries: int) -> None:
    adagrad = em.optim.Adagrad(lr=0.1)
    first = np.arange(entries) * 70 + 3
    with em.open(tmp_path / "s", memory="8MiB") as store:
        store.create("other", rows=10, dim=4)
        table = store.create("t", rows=5000, dim=6, init=em.init.Uniform(-1.0, 1.0), seed=3,
                             optimizer=adagrad)  # fmt: skip
        table.scatter(first, np.full((entries, 6), 1, np.float32))
    store = em.open(tmp_path / "s", memory="8MiB")
    table = store["t"]
    table.scatter(first, np.full((entries, 6), 2, np.float32))  # pages in the log
    table.scatter([4999], np.full((1, 6), 3, np.float32))  # a page in place
    store.commit()
    table.update(first[:1], np.ones((1, 6), np.float32))
    number = store.commit()
    expected = np.array(table.gather(np.arange(5000)))
    store["other"].scatter([1], np.ones((1, 4), np.float32))
    store.abandon()
    before = Reader(tmp_path / "s", "t")
    assert {1, 2, 3} == set(before.log.kinds)
    assert before.commit == number
    assert before.entry["step"] == 1
    rows = [0, *first.tolist(), *(first + 1).tolist(), 2500, 4998, 4999]
    np.testing.assert_array_equal([before.weight(row) for row in rows], expected[rows])
    with em.open(tmp_path / "s", memory="8MiB"):  # applies the log
        pass
    after = Reader(tmp_path / "s", "t")
    assert (after.log.kinds, after.log.pages, after.commit) == ([], {}, number)
    assert after.data == before.data


def test_records_of_no_commit_count_for_nothing_and_a_resize_is_in_the_log(tmp_path: Path) -> None:
    store = em.open(tmp_path / "s", memory="1MiB")
    table = store.create("t", rows=1000, dim=100)
    table[:] = np.ones((1000, 100), np.float32)
    table.append(np.full((7, 100), 4, np.float32))
    big = store.create("big", rows=40_000, dim=100)
    store.commit()
    expected = np.array(table.gather(np.arange(1007)))
    table[:] = np.zeros((1007, 100), np.float32)
    big[:] = np.ones((40_000, 100), np.float32)  # more than memory: the table's pages leave it
    store.abandon()
    reader = Reader(tmp_path / "s", "t")
    assert reader.log.forgotten > 0
    assert len(reader.data) == 4096 + 1007 * 400
    assert b"(1007, 100)" in reader.data[:128]
    np.testing.assert_array_equal([reader.weight(row) for row in range(1007)], expected)
