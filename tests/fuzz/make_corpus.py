"""Makes the seeds of the fuzz targets: python tests/fuzz/make_corpus.py.

What fuzzing found lies beside them and stays.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent / "corpus"


def save(target: str, name: str, content: bytes) -> None:
    (HERE / target).mkdir(parents=True, exist_ok=True)
    (HERE / target / name).write_bytes(content)


def npy(text: str, version: int = 1, encoding: str = "latin-1") -> bytes:
    """A whole file without data."""
    body = text.encode(encoding)
    length = struct.pack("<H" if version == 1 else "<I", len(body))
    return b"\x93NUMPY" + bytes([version, 0]) + length + body


def sized(text: str, size: int, shift: int, version: int = 1) -> bytes:
    """What npy_fuzz makes a file of: `size << shift` bytes of data behind a header."""
    return bytes([size, shift, version - 1]) + text.encode()


def make_npy() -> None:
    plain = "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4), }\n"
    record = "[('weight', '<f4', (4,)), ('sum', '<f4', (4,)), ('', '|V32')]"
    save("npy", "empty_rows", npy(plain))
    save("npy", "version2", npy(plain, 2))
    save(
        "npy",
        "version3",
        npy("{'descr': [('é', '<f4')], 'fortran_order': False, 'shape': (0,), }", 3, "utf-8"),
    )
    save("npy", "python2", npy("{'descr': u'>f8', 'fortran_order': True, 'shape': (0L, 3L), }"))
    save("npy", "not_npy", b"\x89HDF\r\n\x1a\n")
    save("npy", "rows", sized("{'descr': '<f4', 'fortran_order': False, 'shape': (8, 4), }", 1, 7))
    save(
        "npy",
        "records",
        sized(f"{{'descr': {record}, 'fortran_order': False, 'shape': (4,), }}", 1, 8),
    )
    save(
        "npy",
        "nested",
        sized(
            "{'descr': [('a', [('b', ('<i2', (2, 3)))]), ('t', '<M8[ns]')], "
            "'fortran_order': False, 'shape': (3,)}",
            1,
            8,
            3,
        ),
    )
    save(
        "npy",
        "huge",
        sized(
            "{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 255, 31
        ),
    )
    save(
        "npy",
        "escapes",
        sized(
            r"{'descr': [('\x41\u00e9\U0001F600\'', '|S5')], "
            "'fortran_order': False, 'shape': (), }",
            5,
            0,
        ),
    )


def npz(
    members: dict[str, bytes], method: int = zipfile.ZIP_STORED, *, zip64: bool = False
) -> bytes:
    """An archive; times are those of no clock, so that it is the same each time."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with archive.open(info, "w", force_zip64=zip64) as member:
                member.write(content)
    return out.getvalue()


def make_npz() -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 3), }\n"
    rows = npy(header) + struct.pack("<24f", *range(24))
    turned = npy(header.replace("False", "True")) + struct.pack("<24f", *range(24))
    record = npy(
        "{'descr': [('a', '<i4'), ('v', '<f2', (2,))], 'fortran_order': False, 'shape': (4,), }"
    )
    fields = record + bytes(range(32))
    save("npz", "empty", npz({}))
    save("npz", "stored", npz({"a.npy": rows, "b.npy": turned}))
    save("npz", "deflated", npz({"a.npy": rows, "r.npy": fields}, zipfile.ZIP_DEFLATED))
    save("npz", "zip64", npz({"a.npy": rows}, zip64=True))
    save("npz", "other", npz({"readme.txt": b"words", "a.npy": rows[:90]}))
    save("npz", "bzip2", npz({"a.npy": rows}, zipfile.ZIP_BZIP2))
    save("npz", "behind", b"#!/bin/sh\n" + npz({"a.npy": rows}))


def make_safetensors() -> None:
    def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    def sized_header(size: int, header: object) -> bytes:
        return struct.pack("<H", size) + json.dumps(header, separators=(",", ":")).encode()

    save("safetensors", "none", sized_header(0, {}))
    save("safetensors", "one", sized_header(24, {"a": entry("F32", [3, 2], 0, 24)}))
    several = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 3, 2], 24, 48),
        "a": entry("F32", [3, 2], 0, 24),
        "flag": entry("BOOL", [5], 48, 53),
        "four": entry("F4", [2], 53, 54),
        "none": entry("I64", [0, 4], 54, 54),
        "one": entry("U8", [], 54, 55),
        "new": entry("F128", [1], 55, 71),
    }
    save("safetensors", "several", sized_header(71, several))
    save("safetensors", "hole", sized_header(32, {"a": entry("F32", [2], 8, 16)}))
    save("safetensors", "other_keys", sized_header(4, {"a": entry("I32", [1], 0, 4) | {"x": [{}]}}))
    save("safetensors", "huge", sized_header(4, {"a": entry("F32", [2**62, 4], 0, 4)}))
    save("safetensors", "no_json", sized_header(4, {"a": 1})[:-2])


def make_torch() -> None:
    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def storage(kind: str, key: str, elements: int) -> bytes:
        name = b"ctorch\n" + kind.encode() + b"\n"
        size = b"J" + struct.pack("<i", elements)
        return b"(" + text("storage") + name + text(key) + text("cpu") + size + b"tQ"

    ordered = b"ccollections\nOrderedDict\n)R"

    def tensor(of: bytes, sizes: bytes, strides: bytes) -> bytes:
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            + of
            + b"K\0"
            + sizes
            + strides
            + b"\x89"
            + ordered
            + b"tR"
        )

    plain = tensor(storage("FloatStorage", "0", 12), b"K\x04K\x03\x86", b"K\x03K\x01\x86")
    turned = tensor(storage("HalfStorage", "1", 12), b"K\x03K\x04\x86", b"K\x01K\x03\x86")
    save("torch", "alone", b"\x80\x02" + plain + b".")
    save(
        "torch",
        "state",
        b"\x80\x02"
        + ordered
        + b"("
        + text("a.weight")
        + plain
        + text("b")
        + turned
        + b"u}"
        + text("_metadata")
        + ordered
        + b"sb.",
    )
    nested = (
        b"\x80\x02}("
        + text("model")
        + b"}"
        + text("w")
        + plain
        + b"sK\x07]("
        + turned
        + b"NK\x01\x88G"
        + bytes(8)
        + b"eu."
    )
    save("torch", "nested", nested)
    parameter = b"\x80\x02ctorch._utils\n_rebuild_parameter\n(" + plain + b"\x88" + ordered + b"tR."
    save("torch", "parameter", parameter)
    v3 = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n("
        + storage("UntypedStorage", "0", 12).replace(b"ctorch\n", b"ctorch.storage\n")
        + b"K\0K\x06\x85K\x01\x85\x89"
        + ordered
        + b"ctorch\nuint16\ntR."
    )
    save("torch", "version3", v3)
    memo = (
        b"\x80\x04\x95"
        + bytes(8)
        + b"]\x94(h\0h\0\x8c\x01a\x94\x8e"
        + struct.pack("<Q", 2)
        + b"xyK\x05e."
    )
    save("torch", "itself", memo)
    magic = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
    system = b"\x80\x02}" + text("little_endian") + b"\x88s."
    body = plain.replace(b"K\x0ctQ", b"K\x0cNtQ")
    keys = b"\x80\x02]" + text("0") + b"a."
    legacy = magic + b"\x80\x02M\xe9\x03." + system + b"\x80\x02" + body + b"." + keys
    save("torch", "legacy", legacy)
    save("torch", "system", b"\x80\x02cos\nsystem\n" + text("true") + b"\x85R.")
    save(
        "torch",
        "long",
        b"\x80\x02(\x8a\x09" + b"\xff" * 8 + b"\0\x8b" + struct.pack("<I", 3) + b"abct.",
    )


def table(**changes: object) -> dict[str, object]:
    entry: dict[str, object] = {
        "rows": 100, "dim": 8, "dtype": "float32", "optimizer": None, "init": {"name": "zeros"},
        "seed": 1, "step": 0,
        "page_bytes": 4096, "stride": 32, "rows_per_page": 128, "data_offset": 4096,
    }  # fmt: skip
    return entry | changes


def manifest(tables: dict[str, object], **changes: object) -> bytes:
    return json.dumps(
        {"format": "embermap", "version": 1, "commit": 3, "tables": tables} | changes
    ).encode()


def make_manifest() -> None:
    adagrad = {
        "name": "adagrad",
        "lr": 0.05,
        "lr_decay": 0,
        "weight_decay": 0,
        "initial_accumulator_value": 0,
        "eps": 1e-10,
    }
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": True}
    trained = {
        "optimizer": adagrad,
        "stride": 64,
        "rows_per_page": 64,
        "init": {"name": "normal", "mean": 0, "std": 0.1},
    }
    save("manifest", "no_tables", manifest({}))
    numbers = {"version": 2, "revision": 5, "next_id": 1}
    store_id = "0123456789abcdeffedcba9876543210"
    save("manifest", "store_id", manifest({}, **numbers, store_id=store_id))
    save("manifest", "plain", manifest({"items": table()}))
    save(
        "manifest",
        "trained",
        manifest({"a": table(**trained), "b": table(**trained | {"optimizer": sgd})}),
    )
    save(
        "manifest",
        "integers",
        manifest(
            {
                "é": table(
                    dtype="int64",
                    stride=64,
                    rows_per_page=64,
                    init={"name": "uniform", "low": -3, "high": 9},
                )
            }
        ),
    )
    adopted = {
        "adopted": "/data/w.npy",
        "adopted_writable": True,
        "data_offset": 128,
        "byte_order": "big",
    }
    save("manifest", "adopted", manifest({"w": table(**adopted)}))
    save(
        "manifest",
        "adopted_bytes",
        manifest({"w": table(**adopted | {"adopted": {"hex": "2fff2e6e7079"}})}),
    )
    relative = adopted | {"adopted": "../w.npy", "adopted_in": {"inode": 1, "born_ns": 2}}
    save("manifest", "adopted_relative", manifest({"w": table(**relative)}))
    counters = {
        "hits": 1,
        "misses": 2,
        "evictions": 0,
        "write_backs": 0,
        "bytes_read": 3,
        "bytes_written": 4,
        "commits": 5,
    }
    save(
        "manifest",
        "counters",
        manifest(
            {"items": table(memory=65536, counters=counters, init={"name": "constant", "value": 2})}
        ),
    )
    save(
        "manifest",
        "outside",
        manifest({"../../etc/x": table(), "a/b": table(), "": table(), "a\0b": table()}),
    )
    save("manifest", "newer", manifest({}, version=99))
    save("manifest", "deep", b'{"format": ' + b"[" * 300 + b"]" * 300 + b"}")
    save(
        "manifest",
        "twice",
        b'{"format": "embermap", "version": 1, "commit": 0, "commit": 1, "tables": {}}',
    )
    save("manifest", "numbers", manifest({"x": table(rows=2**63, seed=2**64 - 1, step=2**64 - 1)}))


def ledger(
    pages: int,
    pieces: list[tuple[int, int, bytes]],
    units: int,
    *,
    flags: int = 0,
    version: int = 1,
    room: int = 4096,
) -> bytes:
    header = struct.pack(
        "<8sIIQQQ", b"EMBPAGES", version, flags, pages, 4096 + room, 0
    )  # the target mends the checksum
    parts = [
        struct.pack("<HBB", sector, place // 2, len(piece)) + piece
        for sector, place, piece in pieces
    ]
    return header + struct.pack("<HB", units, 0) + b"".join(parts)


def make_page_ledger() -> None:
    sums = struct.pack("<4I", 5, 6, 7, 8)
    save("page_ledger", "fresh", ledger(1000, [], 24))
    save("page_ledger", "written", ledger(1000, [(8, 0, b"\x0f"), (16, 0, sums)], 24))
    save("page_ledger", "adopted", ledger(10, [(16, 4, sums)], 17, flags=1))
    save(
        "page_ledger",
        "larger_before",
        ledger(100, [(8, 2, b"\xff"), (24, 32, sums)], 40, room=8192),
    )
    save("page_ledger", "bits_behind_the_end", ledger(3, [(8, 0, b"\xff\xff"), (16, 0, sums)], 17))
    save("page_ledger", "none", ledger(0, [], 16))
    save("page_ledger", "truncated", ledger(1000, [], 16))
    pieces = [(8, 0, b"\x0f"), (9, 0, b"\x80"), (16, 0, sums)]
    save("page_ledger", "fresh2", ledger(9000, [], 90, version=2))
    save("page_ledger", "written2", ledger(9000, pieces, 90, version=2))
    save("page_ledger", "adopted2", ledger(10, [(16, 4, sums)], 17, flags=1, version=2))
    save(
        "page_ledger",
        "large2",
        ledger(200_000, [(8, 0, b"\xff"), (72, 0, b"\1")], 1700, version=2, room=32768),
    )
    save("page_ledger", "huge", ledger(2**61, [], 65535))


def log_header(
    serial: int, *, life: int = 1, tail: int = 8192, applied: int = 0, version: int = 1
) -> bytes:
    return struct.pack("<8sII5Q", b"EMBREDO1", version, 0, life, serial, tail, applied, applied)


def log(slots: list[bytes | None], blocks: int, pieces: list[tuple[int, int, bytes]]) -> bytes:
    """What log_fuzz makes a file of; it mends the checksums."""
    given = sum(1 << i for i, slot in enumerate(slots) if slot)
    head = bytes([given]) + b"".join(slot for slot in slots if slot)
    body = [struct.pack("<HHB", block, at, len(piece)) + piece for block, at, piece in pieces]
    return head + struct.pack("<H", blocks) + b"".join(body)


class Records:
    """Pieces of a log: records one behind the other from its third block on."""

    def __init__(self, life: int = 1, block: int = 2) -> None:
        self.life, self.block = life, block
        self.pieces: list[tuple[int, int, bytes]] = []

    def add(
        self, kind: int, blocks: int, commit: int, count: int, body: bytes, **other: int
    ) -> None:
        table, page_bytes = other.get("table", 1), other.get("page_bytes", 4096 if kind == 1 else 0)
        header = struct.pack(
            "<4sI8Q", b"EMRC", kind, self.life, self.block * 4096, blocks * 4096, commit, table,
            page_bytes, count, 0,
        )  # fmt: skip
        self.pieces.append((self.block, 0, header + body))
        self.block += blocks

    def pages(self, commit: int, pages: dict[int, int], **other: int) -> None:
        """Pages that consist of a few equal bytes."""
        for i, value in enumerate(pages.values()):
            self.pieces.append((self.block + 1 + i, 64, bytes([value] * 8)))
        self.add(1, 1 + len(pages), commit, len(pages), self.entries(pages), **other)

    def in_place(self, commit: int, pages: list[int]) -> None:
        self.add(2, 1, commit, len(pages), self.entries(pages))

    def commit(self, commit: int, text: bytes = b"{}") -> None:
        self.add(3, 1, commit, len(text), text, table=0)

    @staticmethod
    def entries(pages: Iterable[int]) -> bytes:
        return b"".join(struct.pack("<QII", page, 0, 0) for page in pages)


def make_log() -> None:
    save("log", "fresh", log([None, log_header(1)], 2, []))
    save("log", "no_header", log([None, None], 2, []))
    save("log", "newer", log([log_header(2, version=9), log_header(1)], 2, []))
    one = Records()
    one.pages(1, {0: 5, 3: 6})
    one.in_place(1, [2])
    one.commit(1)
    save("log", "commit", log([None, log_header(1)], one.block, one.pieces))
    two = Records(life=7, block=9)
    two.pages(4, {0: 1})
    two.commit(4)
    two.pages(5, {0: 2, 1: 3})
    two.commit(5)
    two.pages(6, {1: 4})
    headers: list[bytes | None] = [
        log_header(8, life=7, tail=9 * 4096, applied=3),
        log_header(7, life=6),
    ]
    save("log", "commits", log(headers, 64, two.pieces))
    resized = Records()
    resized.pages(1, {2**64 - 1: 0})
    resized.pages(1, {1: 9})
    resized.commit(1)
    save("log", "npy_header", log([None, log_header(1)], resized.block, resized.pieces))
    foreign = Records()
    foreign.pages(1, {0: 1}, table=2)
    foreign.pages(1, {0: 1}, page_bytes=2048)
    foreign.commit(1)
    save("log", "other_table", log([None, log_header(1)], foreign.block, foreign.pieces))
    outside = Records()
    outside.pages(1, {4: 1, 2**63: 2})
    outside.commit(1)
    save("log", "outside", log([None, log_header(1)], outside.block, outside.pieces))
    end = log_header(2**64 - 1, life=2**64 - 1, tail=2**61, applied=2**64 - 1)
    save("log", "ends_of_ranges", log([None, end], 4000, []))


def make_text_vectors() -> None:
    header, plain = b"\0", b"\1"  # and with 2 more: as float64
    save("text_vectors", "word2vec", header + b"3 2\nthe 0.5 -1\nof 1e-3 +2\n</s> nan inf\n")
    save("text_vectors", "crlf", header + b"2 2\r\na 1 2 \r\nb\t3  4\r\n\r\n")
    save("text_vectors", "no_rows", header + b"0 3\n")
    save("text_vectors", "more", header + b"1 1\na 1\nb 2\n")
    save("text_vectors", "huge", header + b"1000000000000 18446744073709551615\na 1\n")
    save("text_vectors", "range", b"\2" + b"1 4\nw 1e308 1e-400 -0 1e9223372036854775807\n")
    save("text_vectors", "glove", plain + b"the 1 2\n. . . 3 4\nat a@b 5 6\n 7 8\n1 9 10")
    save("text_vectors", "glove64", b"\3" + b"\xff\xc3 0.1 2.5\nsame 1 1\nsame 2 2\n")
    save("text_vectors", "columns", plain + b"a 1 2\nb 1\nc 1 2 3\n")


def make_word2vec_binary() -> None:
    rows = [(b"the", (1, 2)), (b"", (0.5, -3)), (b"\xff\xe9", (1e30, 0))]
    for name, end in ("plain", b""), ("newlines", b"\n"):
        body = b"".join(word + b" " + struct.pack("<2f", *row) + end for word, row in rows)
        save("word2vec_binary", name, b"3 2\n" + body)
        save("word2vec_binary", name + "_cut", b"4 2\n" + body)
        save("word2vec_binary", name + "_more", b"2 2\n" + body)
    save("word2vec_binary", "no_rows", b"0 5\n")
    save("word2vec_binary", "huge", b"1152921504606846976 4\nw 0123456789abcdef")


def fasttext(labels: int = 0, loss: int = 2, version: int = 12, quantized: bool = False) -> bytes:
    words = [b"</s>", b"caf\xc3\xa9", b"\xff"]
    kind = 3 if labels else 2
    entries = [(word, 0) for word in words] + [(b"__label__%d" % i, 1) for i in range(labels)]
    out = struct.pack("<2i", 793712314, version)
    out += struct.pack("<12id", 2, 5, 5, 5, 5, 1, loss, kind, 3, 3, 6, 100, 1e-4)
    out += struct.pack("<3iqq", len(entries), len(words), labels, 99, -1)
    for word, entry in entries:
        out += word + b"\0" + struct.pack("<qb", 5, entry)
    for rows in 6, labels or 3:
        out += struct.pack("<?qq", quantized, rows, 2) + struct.pack(
            f"<{2 * rows}f", *range(2 * rows)
        )
    return out


def make_fasttext() -> None:
    for selector in 0, 1, 2:
        start = bytes([selector])
        save("fasttext", f"vectors{selector}", start + fasttext())
        save("fasttext", f"classifier{selector}", start + fasttext(labels=2, version=11))
        save("fasttext", f"tree{selector}", start + fasttext(loss=1))
    save("fasttext", "quantized", b"\0" + fasttext(quantized=True))
    save("fasttext", "cut", b"\0" + fasttext()[:150])


def make_flat_rows() -> None:
    floats = struct.pack("<4f", 1, 2, 3, 4)
    number = struct.pack("<i", 2)
    save("flat_rows", "fvecs", b"\0" + number + floats[:8] + number + floats[8:])
    save(
        "flat_rows", "fvecs_other", b"\0" + number + floats[:8] + struct.pack("<i", 3) + floats[8:]
    )
    save("flat_rows", "fvecs_huge", b"\0" + struct.pack("<i", 2**31 - 1) + floats)
    save("flat_rows", "bvecs", b"\1" + number + b"ab" + number + b"cd")
    save("flat_rows", "u8bin", b"\2" + struct.pack("<II", 2, 3) + b"abcdef")
    save("flat_rows", "fbin", b"\3" + struct.pack("<II", 2, 2) + floats)
    save("flat_rows", "fbin_huge", b"\3" + struct.pack("<II", 2**32 - 1, 2**32 - 1) + floats)
    save("flat_rows", "raw", b"\4\0" + struct.pack("<QB", 2, 0) + floats)
    save("flat_rows", "raw_offset", b"\4\5" + struct.pack("<QB", 3, 4) + floats)


def make_location() -> None:
    for name, text in {
        "plain": b"\0x.npy",
        "dataset": b"\0x.h5:/path/to/dataset",
        "colon": b"\0x.h5:y:/z",
        "member": b"\0a:b.npz:v",
        "nothing_behind": b"\0x.npy:",
        "write": b"\1new.safetensors:encoder.weight",
        "given": b"\2plain:field",
        "given_raw": b"\x0eplain",
        "bytes": b"\0caf\xe9\xff\n.h5:\xff",
        "zero": b"\0x.npy\0:v",
    }.items():
        save("location", name, text)


def make_safetensors_index() -> None:
    one, two = "one.safetensors", "two.safetensors"
    for name, index in {
        "both": {"metadata": {"total_size": 32}, "weight_map": {"a": one, "b": two}},
        "missing": {"weight_map": {"a": "three.safetensors"}},
        "other_file": {"weight_map": {"a": two}},
        "outside": {"weight_map": {"a": "../one.safetensors", "b": "/etc/passwd"}},
        "itself": {"weight_map": {"a": "x.safetensors.index.json"}},
        "no_names": {"weight_map": {"a": 1, "b": None, "c": [one]}},
        "no_map": {"weight_map": [one]},
        "none": {"weight_map": {}},
    }.items():
        save("safetensors_index", name, json.dumps(index).encode())


def hdf5(
    shape: list[tuple[int, int]],
    *,
    selector: int = 1,
    kind: int = 0,
    layout: int = 2,
    filters: tuple[int, ...] = (),
    fill: int = 0,
    place: int = 0,
    attributes: int = 0,
    chunks: bytes = b"",
) -> bytes:
    """A file as hdf5_fuzz makes it: `shape` has extent and chunk of each dimension."""
    dims = b"".join(bytes([extent, chunk - 1]) for extent, chunk in shape)
    pipeline = sum(f * 8**i for i, f in enumerate(filters))
    return (
        bytes([selector, kind, len(shape) - 1])
        + dims
        + struct.pack("<BHBBB", layout, pipeline, fill, place, attributes)
        + chunks
    )


def make_hdf5() -> None:
    gzip, shuffle, fletcher, lzf, szip, nbit, scaleoffset = 1, 2, 3, 4, 5, 6, 7
    matrix = [(17, 5), (6, 4)]
    junk = b"\x04\0" + struct.pack("<H", 40) + bytes(range(41))
    for name, content in {
        "contiguous": hdf5(matrix, layout=0, attributes=63),
        "compact": hdf5(matrix, layout=1, kind=1),
        "chunked": hdf5(matrix, kind=3, place=5),
        "gzip": hdf5(matrix, filters=(shuffle, gzip, fletcher), selector=65),
        "packed": hdf5(matrix, filters=(gzip, shuffle), chunks=b"\3\3\0\3"),
        "lzf": hdf5(matrix, filters=(shuffle, lzf), chunks=b"\3" * 8),
        "lzf_some": hdf5(matrix, filters=(lzf, fletcher), fill=1, chunks=b"\3\0\3\0"),
        "damaged": hdf5(matrix, filters=(gzip,), chunks=junk * 3),
        "damaged_lzf": hdf5(matrix, filters=(lzf,), chunks=junk),
        "damaged_sum": hdf5(matrix, filters=(fletcher,), chunks=b"\4\0\2\0abc"),
        "gzip_twice": hdf5(matrix, filters=(gzip, shuffle, gzip)),
        "szip": hdf5(matrix, kind=4, filters=(szip,)),
        "szip_sum": hdf5(matrix, kind=2, filters=(szip, fletcher)),
        "szip_behind": hdf5(matrix, kind=2, filters=(nbit, lzf, szip, fletcher)),
        "nbit": hdf5(matrix, kind=4, filters=(nbit, shuffle)),
        "scaleoffset": hdf5(matrix, kind=4, filters=(scaleoffset, gzip)),
        "never": hdf5(matrix, fill=3),
        "fill": hdf5([(203, 7), (4, 4)], fill=7 + 1, filters=(gzip,)),
        "records": hdf5([(9, 4)], kind=7, place=3),
        "records_be": hdf5([(9, 4)], kind=8, layout=0),
        "bools": hdf5(matrix, kind=9),
        "halves": hdf5(matrix, kind=5, selector=0, attributes=255),
        "brains": hdf5(matrix, kind=6, place=130),
        "opaque": hdf5(matrix, kind=10, selector=33),
        "tagged": hdf5(matrix, kind=130, selector=1),
        "arrays": hdf5([(9, 4)], kind=11),
        "cube": hdf5([(7, 3), (5, 2), (3, 2)], filters=(shuffle, gzip), selector=3, attributes=64),
        "external": hdf5(matrix, layout=3),
        "external_short": hdf5(matrix, layout=3, fill=7),
        "virtual": hdf5(matrix, layout=4, kind=2),
        "virtual_gone": hdf5(matrix, layout=4, fill=7),
        "no_rows": hdf5([(0, 1), (4, 4)], layout=0),
    }.items():
        save("hdf5", name, content)


def make_hdf5_chunks() -> None:
    """A chunk: bytes of an element, elements, filters skipped, filters, and what is stored."""

    def chunk(item: int, count: int, skipped: int, filters: list[int], stored: bytes) -> bytes:
        head = struct.pack("<BHBB", item - 1, count - 1, skipped, len(filters))
        return head + bytes(filters) + stored

    gzip, fletcher, lzf = 0, 2, 3
    shuffle = 1 + 4 * 3  # of four bytes
    rows = bytes(range(64))
    literal = b"\x1f" + rows[:32] + b"\x1f" + rows[32:]
    save("hdf5_chunks", "plain", chunk(4, 16, 0, [], rows))
    save("hdf5_chunks", "gzip", chunk(4, 16, 0, [shuffle, gzip], zlib.compress(rows)))
    save("hdf5_chunks", "gzip_bomb", chunk(1, 16, 0, [gzip], zlib.compress(bytes(100_000), 9)))
    save("hdf5_chunks", "gzip_cut", chunk(4, 16, 0, [gzip], zlib.compress(rows)[:-5]))
    save("hdf5_chunks", "lzf", chunk(4, 16, 0, [lzf], literal))
    save("hdf5_chunks", "lzf_copies", chunk(1, 300, 0, [lzf], b"\0a\xe0\xff\0\x20\0"))
    save("hdf5_chunks", "lzf_before", chunk(1, 16, 0, [lzf], b"\0a\x20\x05"))
    save("hdf5_chunks", "sum", chunk(4, 16, 0, [fletcher], rows + bytes(4)))
    save("hdf5_chunks", "skipped", chunk(4, 16, 2, [shuffle, gzip], rows))


def make_torch_file() -> None:
    """Archives in pieces, from the pickles of torch's corpus; files without an archive."""
    floats = struct.pack("<12f", *range(12))
    for name in ("alone", "state", "nested", "version3", "parameter"):
        pickle = (HERE / "torch" / name).read_bytes()
        parts = b"".join(struct.pack("<H", len(part)) + part for part in (pickle, floats, floats))
        for kind in (0, 3, 4 + 8):  # as it is; deflated; big-endian, storages deflated
            save("torch_file", f"{name}{kind}", bytes([1, kind]) + parts)
    legacy = (HERE / "torch" / "legacy").read_bytes()
    save("torch_file", "legacy", b"\3" + struct.pack("<H", len(legacy)) + legacy + b"\1")
    save("torch_file", "legacy_more", b"\3" + struct.pack("<H", len(legacy)) + legacy + b"\xff")


def make_any_file() -> None:
    """Files of all kinds: 1 byte for the name, 1 for options."""
    names = ["npy", "npz", "safetensors", "pt", "bin", "vec", "txt", "glove.txt", "fvecs", "bvecs"]
    names += ["fbin", "u8bin", "", "index"]

    def one(kind: str, name: str, content: bytes, options: int = 0) -> None:
        save("any_file", name, bytes([names.index(kind), options]) + content)

    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 3), }\n"
    rows = struct.pack("<24f", *range(24))
    one("npy", "npy", npy(header) + rows)
    one("npy", "npy_fortran", npy(header.replace("False", "True").replace("<", ">"), 2) + rows)
    one("npy", "npy_bfloat16", npy(header.replace("<f4", "|V2")) + rows[:48], 1 + 2 * 2)
    one("", "npy_unnamed", npy(header) + rows)
    record = header.replace("'<f4'", "[('a', '<i4'), ('v', '<f2', (2, 2)), ('t', '|S3')]")
    one("npy", "npy_records", npy(record.replace("(8, 3)", "(6,)")) + bytes(range(90)))
    one("npz", "npz", npz({"a.npy": npy(header) + rows}, zipfile.ZIP_DEFLATED))
    for kind, target, name in (
        ("vec", "text_vectors", "word2vec"),
        ("txt", "text_vectors", "glove"),
        ("glove.txt", "text_vectors", "columns"),
        ("bin", "word2vec_binary", "newlines"),
        ("bin", "fasttext", "vectors0"),
        ("fvecs", "flat_rows", "fvecs"),
        ("bvecs", "flat_rows", "bvecs"),
        ("fbin", "flat_rows", "fbin"),
        ("u8bin", "flat_rows", "u8bin"),
    ):
        skipped = 0 if target == "word2vec_binary" else 1
        one(kind, f"{target}_{name}", (HERE / target / name).read_bytes()[skipped:])
    one("", "raw", rows, 1 + 16 + 2 * 32)


def make_vocabulary() -> None:
    save("vocabulary", "words", b"the\nof\n\ncaf\xc3\xa9\nthe\n")
    save("vocabulary", "crlf", b"a\r\nb\r\n\r\nc\r")
    save("vocabulary", "no_end", b"a\nb")
    save("vocabulary", "empty", b"")
    save("vocabulary", "returns", b"\r\n\rx\r\r\n")


def make_row_order() -> None:
    """1 byte for the name, 1 for the rows, 1 for the memory."""
    head = "{'descr': '<i8', 'fortran_order': False, 'shape': (5,), }\n"
    numbers = struct.pack("<5q", 3, 0, 4, 1, 2)
    save("row_order", "text", b"\0\5\0" + b"3 0\n4\t1 2\n")
    save("row_order", "text_twice", b"\0\5\xff" + b"3 0 3 1 2")
    save(
        "row_order",
        "text_large",
        b"\0\5\0" + b"9223372036854775808 00000000000000000000000000000000",
    )
    save("row_order", "npy", b"\1\5\x20" + npy(head) + numbers)
    big = npy(head.replace("<i8", ">u2").replace("(5,)", "(1, 5)"))
    save("row_order", "npy_big", b"\1\5\x20" + big + struct.pack(">5H", 3, 0, 4, 1, 2))
    save("row_order", "npy_negative", b"\1\5\x20" + npy(head) + struct.pack("<5q", 3, 0, -1, 1, 2))
    save("row_order", "bin", b"\2\3\1" + struct.pack("<II", 3, 1) + b"\2\0\1")
    save("row_order", "bin_across", b"\2\3\1" + struct.pack("<II", 1, 3) + b"\2\0\1")
    tensor = json.dumps({"a": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    data = struct.pack("<Q", len(tensor)) + tensor + struct.pack("<3i", 2, 0, 1)
    save("row_order", "safetensors", b"\3\3\1" + data)


def make_partial_rows() -> None:
    def partial(kind: int, record: object, rows: bytes = b"") -> bytes:
        text = record if isinstance(record, bytes) else json.dumps(record).encode()
        return bytes([kind]) + struct.pack("<H", len(text)) + text + rows

    of = {"source": "a", "order": "none"}
    good = {"format": "embermap resume", "of": of, "rows": 10, "done": 4}
    good |= {"became_infinite": 0, "became_zero": 1}
    save("partial_rows", "four", partial(0, good, bytes(range(48))))
    save("partial_rows", "four_longer", partial(0, good, bytes(60)))
    save("partial_rows", "four_header", partial(32, good, b"header" + bytes(48)))
    save("partial_rows", "four_wide", partial(16 + 64, good, bytes(48)))
    save("partial_rows", "too_few", partial(0, good, bytes(47)))
    save("partial_rows", "too_many", partial(0, good | {"done": 11}, bytes(200)))
    save("partial_rows", "huge", partial(0, good | {"done": 2**64 - 1}, bytes(48)))
    save("partial_rows", "other", partial(0, good | {"of": of | {"source": "b"}}, bytes(48)))
    save("partial_rows", "no_rows", partial(2, good))
    save("partial_rows", "no_record", partial(1, b"", bytes(48)))
    save("partial_rows", "target", partial(12, good, bytes(48)))
    save("partial_rows", "deep", partial(0, b'{"of":' + b"[" * 500))
    save("partial_rows", "list", partial(0, [good]))


def make_commit_history() -> None:
    def line(number: int, note: object = None, time: str = "2031-05-06T07:08:09.123Z") -> bytes:
        text: dict[str, object] = {"commit": number, "time": time}
        text |= {} if note is None else {"note": note}
        return (json.dumps(text | {"checksum": "0123456789abcdef"}) + "\n").encode()

    deep: object = 1
    for _ in range(40):
        deep = [deep]
    save("commit_history", "three", b"\x05" + line(1) + line(3, {"step": 1000}) + line(5))
    save("commit_history", "later", b"\x02" + line(1) + line(3) + line(2))
    save("commit_history", "junk", b"\x09" + line(1) + b"{}\n\n" + line(2)[:-5] + line(3))
    save(
        "commit_history",
        "notes",
        b"\x09" + line(1, [1]) + line(2, 3.5) + line(4, {"b": 1, "a": {}}),
    )
    save("commit_history", "deep", b"\x09" + line(1, {"a": deep}))
    save("commit_history", "time", b"\x05" + line(1, time='a \\ and a "') + b"{}\n" + line(2))


def make_settings() -> None:
    settings: dict[str, object] = {
        "format": "embermap table", "version": 1, "rows": 5, "dim": 3, "dtype": "float32",
        "optimizer": None, "init": {"name": "zeros"}, "seed": 1, "step": 2, "page_bytes": 4096,
        "memory": 0,
    }  # fmt: skip
    adam = {"name": "adam", "lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0}
    save("settings", "plain", b"\0" + json.dumps(settings).encode())
    save("settings", "adam", b"\0" + json.dumps(settings | {"optimizer": adam}).encode())
    save("settings", "note", b"\1" + json.dumps({"b": [1.5, {"x": None}], "a": "é"}).encode())
    save("settings", "note_large", b"\1" + b'{"a": 18446744073709551616}')
    way = {"blocks": 4, "block_threads": 1024, "host_threads": 0}
    way |= {"bytes_per_second": 1e9, "thread_share": 0.25}
    case = {"direction": "fetch", "rows": 9, "row_bytes": 64, "pool_bytes": 999, "threads": 2}
    movers = {"version": 1, "devices": {"a device": [case | {"ways": [way]}]}}
    save("settings", "movers", b"\2" + json.dumps(movers).encode())
    save("settings", "movers_deep", b"\2" + b'{"version": 1, "devices": {"x": ' + b"[" * 300)


def make_snapshot() -> None:
    text = '{"format": "embermap snapshot", "version": 1, "inode": INODE, "born_ns": BORN, '
    text += '"tables": %s}'
    for name, kind, tables in (
        ("fresh", 0, "{}"),
        ("begun", 3, '{"t": 1}'),
        ("other_table", 4, '{"t": 9, "other": 2}'),
        ("outside", 0, '{"../x": 1}'),
        ("deep", 0, "[" * 400),
    ):
        save("snapshot", name, bytes([kind]) + (text % tables).encode())
    deep = b'{"format": ' + b"[" * 400 + b"]" * 400 + b"}"
    save("snapshot", "deep_format", b"\0" + deep)


def make_real() -> None:
    """Files of the libraries themselves, where they are there."""
    try:
        import numpy as np
        import safetensors.torch
        import torch
    except ImportError as missing:
        print(f"left out, without {missing.name}: files that libraries wrote")
        return
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2).half())
    state = model.state_dict()
    optimizer = torch.optim.Adam(model[:1].parameters())
    model[0](torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    for name, saved in ("state", state), ("optimizer", optimizer.state_dict()):
        for zipped in (True, False):
            if (HERE / "torch_file" / f"torch_{name}{int(zipped)}").exists():
                continue  # without an archive storages have other names each time
            out = io.BytesIO()
            torch.save(saved, out, _use_new_zipfile_serialization=zipped)
            save("torch_file", f"torch_{name}{int(zipped)}", b"\0" + out.getvalue())
    save("any_file", "torch", b"\x03\0" + (HERE / "torch_file" / "torch_state1").read_bytes()[1:])
    save("any_file", "safetensors", b"\x02\0" + safetensors.torch.save(state))
    rows = np.arange(15, dtype=">f8").reshape(5, 3)
    for name, write in ("npy", np.save), ("npz", np.savez), ("deflated", np.savez_compressed):
        out = io.BytesIO()
        write(out, rows)
        save("any_file", f"numpy_{name}", bytes([name != "npy", 0]) + out.getvalue())


if __name__ == "__main__":
    make_commit_history()
    make_fasttext()
    make_flat_rows()
    make_hdf5()
    make_hdf5_chunks()
    make_location()
    make_log()
    make_npy()
    make_npz()
    make_safetensors()
    make_safetensors_index()
    make_torch()
    make_manifest()
    make_page_ledger()
    make_partial_rows()
    make_row_order()
    make_settings()
    make_snapshot()
    make_text_vectors()
    make_vocabulary()
    make_word2vec_binary()
    make_any_file()
    make_torch_file()
    make_real()
