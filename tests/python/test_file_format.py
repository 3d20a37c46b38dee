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


class Reader:
    """One table of a store."""

    def __init__(self, store: Path, name: str) -> None:
        manifest = json.loads((store / "embermap.json").read_text("utf-8"))
        assert (manifest["format"], manifest["version"]) == ("embermap", 2)
        self.entry = entry = manifest["tables"][name]
        self.data = (store / f"{name}.npy").read_bytes()
        self.pages = pages = (store / f"{name}.pages").read_bytes()
        magic, version, flags, self.count, self.sums, self.header_sum = struct.unpack(
            "<8sIIQQQ", pages[:40]
        )
        assert (magic, version, flags) == (b"EMBPAGES", 2, 0)
        assert len(pages) == self.sums + -(-self.count // 127) * 512
        assert self.count == -(-entry["rows"] // entry["rows_per_page"])
        assert len(self.data) == entry["data_offset"] + entry["rows"] * entry["stride"]
        self.dtype = np.dtype(entry["dtype"])

    def sector(self, at: int) -> bytes:
        """The content of the sector at this offset, which must match its checksum."""
        content, (recorded,) = (
            self.pages[at : at + 508],
            struct.unpack_from("<I", self.pages, at + 508),
        )
        assert recorded == (xxh3(content, at // 512) & 0xFFFFFFFF if any(content) else 0)
        return content

    def written(self, page: int) -> bool:
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


# --- XXH3, 64 bits: lengths 17 to 32 with seed 0, and above 240 -----------------------------------

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
    if len(data) <= 32:
        assert len(data) > 16
        for at, key in ((0, 0), (len(data) - 16, 16)):
            (a, b), (c, d) = words(data, 2, at), words(SECRET, 2, key)
            total += fold(a ^ c, b ^ d)
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
    total &= MASK
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
