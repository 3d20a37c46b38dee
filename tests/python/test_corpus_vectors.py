"""Word vectors and bare vectors as they go wrong for people: docs/bug-corpus.md, section D."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap

import embermap as em
import numpy as np
import pytest


def words_of(path):
    return path.read_bytes().split(b"\n")[:-1]


@pytest.fixture
def text(tmp_path):
    """text(content, name): a file with it."""

    def make(content, name="v.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def converted(path, **options):
    """Rows and words of a file, by way of em.convert."""
    out = path.parent / "out.npy"
    em.convert(path, out, overwrite=True, **options)
    return np.load(out), words_of(path.parent / "out.npy.vocab.txt")


# --- text -----------------------------------------------------------------------------------------


def test_a_header_is_told_from_a_row(text):
    body = "the 1 2 3 4\nof 5 6 7 8\n2015 0.5 0.25 -1 4\n"
    wanted = [[1, 2, 3, 4], [5, 6, 7, 8], [0.5, 0.25, -1, 4]]
    for content in ("3 4\n" + body, body, "2015 0.1 0.2 0.3 0.4\n" + body):
        rows, words = converted(text(content))
        assert rows[-3:].tolist() == wanted
        assert words[-3:] == [b"the", b"of", b"2015"]
        assert len(words) == len(rows) == (4 if content.startswith("2015") else 3)


def test_a_first_line_that_could_be_either_has_to_be_told(text):
    body = "a 1\nb 2\n"
    rows, words = converted(text("2 1\n" + body))  # right for a header in every way
    assert (rows.tolist(), words) == ([[1], [2]], [b"a", b"b"])
    for first in ("7 9", "3 1", "2 2", "2 9"):
        path = text(f"{first}\n{body}")
        with pytest.raises((em.FormatError, ValueError), match=r"v\.txt.*glove"):
            converted(path)
        rows, words = converted(path, src_format="glove")
        assert rows.ravel().tolist() == [float(first.split()[1]), 1, 2]
        assert words == [first.split()[0].encode(), b"a", b"b"]


TOKENS = [
    "a b",
    ". . .",
    "\u00a0",
    "a\u00a0b",
    "\u2028",
    "\t",
    " ",
    "",
    "0.5",
    "\u3000",
    "\x85",
    "  ",
    " lead",
    "a\tb",
    "\u200b",
    "\x0b",
    "\x0c",
    "'",
    "#",
    "to name@host",
]


def test_tokens_of_blanks_and_with_blanks_are_one_row_each(text, tmp_path):
    lines = [f"{token} {i} 0.5 -1\n" for i, token in enumerate(TOKENS)]
    path = text("".join(lines))
    rows, words = converted(path)
    assert rows[:, 0].tolist() == list(range(len(TOKENS)))
    assert words == [token.encode() for token in TOKENS]
    # There and back: the same tokens, and the same bytes.
    em.convert(
        tmp_path / "out.npy",
        tmp_path / "g.txt",
        dst_format="glove",
        vocab=tmp_path / "out.npy.vocab.txt",
    )
    assert (tmp_path / "g.txt").read_bytes() == path.read_bytes()
    again, back = converted(tmp_path / "g.txt")
    assert back == words
    assert np.array_equal(again, rows)


@pytest.mark.parametrize("token", TOKENS)
def test_each_token_alone_among_plain_ones(text, token):
    path = text(f"the 1 2 3\n{token} 4 5 6\nof 7 8 9\n")
    rows, words = converted(path)
    assert rows.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert words == [b"the", token.encode(), b"of"]


def test_numbers_may_be_wider_apart(text):
    """As programs write that align columns: blanks then belong to no word."""
    rows, words = converted(text("the    1.5    -2\nof    10.25   3\n\tx  1  1\n", "v.glove"))
    assert rows.tolist() == [[1.5, -2], [10.25, 3], [1, 1]]
    assert words[:2] == [b"the", b"of"]


def test_what_is_no_utf_8_is_kept(text, tmp_path):
    tokens = [b"\xed\xa0\x80", b"\xff", b"\x80", b"\xff\xfe", b"\xc3", b"ok"]
    body = b"".join(token + b" %d 1\n" % i for i, token in enumerate(tokens))
    for content, name in ((body, "g.txt"), (b"6 2\n" + body, "w.vec")):
        path = text(content, name)
        rows, words = converted(path)
        assert words == tokens
        assert rows[:, 0].tolist() == list(range(6))
        em.convert(path, tmp_path / "x.w2v", overwrite=True)
        rows, words = converted(tmp_path / "x.w2v")
        assert words == tokens
        assert rows[:, 0].tolist() == list(range(6))


def test_a_table_keeps_words_in_order(store, text, tmp_path):
    tokens = [token for token in TOKENS if "\n" not in token] + ["same", "same"]
    path = text("".join(f"{token} {i} 1 2\n" for i, token in enumerate(tokens)))
    store.import_file("words", path)
    store["words"].export(tmp_path / "o.txt", format="glove")
    assert (tmp_path / "o.txt").read_bytes() == path.read_bytes()


# --- tables of text -------------------------------------------------------------------------------


def test_tabs_between_numbers(text):
    plain = [f"w{i}\t{i}\t0.5\t-1" for i in range(5)]
    for lines in (
        plain,
        [line + "\t" for line in plain],
        [line.replace("\t0.5", " 0.5") for line in plain],
        [line + " \t\r" for line in plain],
    ):
        for name, content in (
            ("v.txt", lines),
            ("v.vec", ["5 3", *lines]),
            ("v.txt", ["5\t3", *lines]),
        ):
            rows, words = converted(text("\n".join(content) + "\n", name))
            assert rows.tolist() == [[i, 0.5, -1] for i in range(5)]
            assert words == [f"w{i}".encode() for i in range(5)]
    path = text("\n".join(plain) + "\n", "v.tsv")
    assert converted(path)[0].shape == (5, 3)
    assert converted(text("5 3\n" + "\n".join(plain) + "\n", "w.tsv"))[0].shape == (5, 3)
    em.convert(path, path.parent / "again.tsv")
    assert (path.parent / "again.tsv").read_bytes() == path.read_bytes()
    path = text("\n".join(["word\tx\ty\tz", *plain]) + "\n", "v.txt")
    with pytest.raises(em.FormatError, match="line 1"):
        converted(path)


def test_three_million_short_rows(text, tmp_path):
    path = tmp_path / "v.vec"
    count = 3_000_000
    with path.open("wb") as file:
        file.write(b"%d 1\n" % count)
        for first in range(0, count, 100_000):
            file.write(b"".join(b"w%d %d\n" % (i, i % 7) for i in range(first, first + 100_000)))
    result = em.convert(path, tmp_path / "o.npy")
    assert (result["rows"], result["dim"]) == (count, 1)
    rows = np.load(tmp_path / "o.npy")
    assert np.array_equal(rows[:, 0], np.arange(count) % 7)
    with (tmp_path / "o.npy.vocab.txt").open("rb") as words:
        assert all(word == b"w%d\n" % i for i, word in enumerate(words))


# --- word2vec binary ------------------------------------------------------------------------------


def binary(rows, dim, *, header=None):
    values = np.random.default_rng(0).standard_normal((rows, dim)).astype(np.float32)
    body = [b"w%d " % i + row.tobytes() + b"\n" for i, row in enumerate(values)]
    return b"%d %d\n" % (header or (rows, dim)), body


def test_binary_vectors_with_a_hole(store, text, tmp_path):
    head, body = binary(1000, 300)
    good = head + b"".join(body)
    start = len(head) + sum(map(len, body[:500]))
    for first, last in (
        (start + 40, start + 180),
        (start + len(b"w500 "), start + 145),
        (start + 99, start + 100),
    ):
        path = text(good[:first] + good[last:], "v.bin")
        with pytest.raises(
            em.FormatError, match=r"v\.bin.*row (499|500|501)\b.*byte \d+"
        ) as caught:
            converted(path)
        assert "row" in str(caught.value)
        with pytest.raises(em.FormatError, match=r"v\.bin"):
            store.import_file("t", path)
        assert not (tmp_path / "out.npy").exists()
    assert store.tables() == []


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (lambda head, body: head, "says it has 10 rows.*can hold: at most 0"),
        (lambda head, body: head + b"".join(body[:5]) + b"w", "says it has 10 rows.*at most 5"),
        (lambda head, body: head + b"".join(body)[:-4], r"it ends \d+ bytes behind row 8"),
        (
            lambda head, body: head + b"".join(body[:9]) + b"w" * 33,
            r"it ends 33 bytes behind row 8",
        ),
        (lambda head, body: head + b"".join(body[:9]) + b"w" * 32 + b" ", "behind row 8"),
        (lambda head, body: head + b"".join(body) + body[0], "follow the last one"),
        (lambda head, body: head.replace(b"10", b"9 ") + b"".join(body), "follow the last one"),
        (lambda head, body: head.replace(b"10", b"11") + b"".join(body), "behind row 9"),
        (lambda head, body: head[:-1], "rows and columns"),
        (lambda head, body: b"10 0\n" + b"".join(body), "no columns"),
    ],
)
def test_binary_vectors_that_are_cut_or_counted_wrong(store, text, cut, says):
    path = text(cut(*binary(10, 8)), "v.bin")
    with pytest.raises(em.FormatError, match=says):
        store.import_file("t", path, format="word2vec-binary")
    assert store.tables() == []


LIMITED = """
    import resource, sys
    import embermap as em
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
    for kind in ("word2vec-text", "word2vec-binary", None):
        try:
            em.io.open(sys.argv[1], format=kind)
        except em.FormatError as error:
            print(error)
"""


@pytest.mark.parametrize("name", ["v.txt", "v.bin", "v.vec"])
def test_an_absurd_header_is_not_believed(text, run_python, name):
    line = "word " + " ".join(["0.5"] * 200) + "\n"
    path = text("635969 635970\n" + line * 1300, name)
    out = run_python(LIMITED, path).stdout.splitlines()
    assert len(out) == 3
    assert all("more than a file of" in one for one in out[:2]), out
    assert out[2].endswith("looks like text") if name == "v.bin" else "more than a file" in out[2]


# --- bare vectors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("x.fbin", "<f4"),
        ("x.u8bin", "u1"),
        ("x.i8bin", "i1"),
        ("x.ibin", "<i4"),
        ("x.f16bin", "<f2"),
    ],
)
def test_a_count_that_does_not_fit_names_the_one_that_would(store, tmp_path, name, dtype):
    rows = np.zeros((90, 32), dtype)
    path = tmp_path / name
    path.write_bytes(struct.pack("<II", 100, 32) + rows.tobytes())
    with pytest.raises(em.FormatError, match=r"says it has 100 rows of 32.*would be 90 rows"):
        store.import_file("t", path)
    path.write_bytes(struct.pack("<II", 80, 32) + rows.tobytes())
    with pytest.raises(em.FormatError, match=r"says it has 80 rows of 32.*would be 90 rows"):
        store.import_file("t", path)
    path.write_bytes(struct.pack("<II", 90, 32) + rows.tobytes()[:-1])
    with pytest.raises(em.FormatError, match="says it has 90 rows of 32"):
        store.import_file("t", path)
    path.write_bytes(struct.pack("<ff", 90, 32) + rows.tobytes())
    with pytest.raises(em.FormatError, match="says it has 1119092736 rows of 1107296256"):
        store.import_file("t", path)
    path.write_bytes(struct.pack("<II", 90, 32) + rows.tobytes())
    assert store.import_file("t", path).shape == (90, 32)


def test_bare_floats_called_npy(store, tmp_path):
    rows = np.random.default_rng(0).standard_normal((1000, 1024)).astype(np.float32)
    path = tmp_path / "x.npy"
    path.write_bytes(rows.tobytes())
    with pytest.raises(em.FormatError, match=r"no NPY magic at byte 0.*4096000 bytes.*format=.raw"):
        store.import_file("t", path)
    table = store.import_file("t", path, format="raw", dtype="float32", dim=1024)
    assert np.array_equal(table[:], rows)
    assert store.import_file("u", path, format="raw", dtype="float32", dim=1000).shape == (
        1024,
        1000,
    )
    with pytest.raises(em.FormatError, match="1025 rows of 3996 bytes .*and 100 bytes more"):
        store.import_file("v", path, format="raw", dtype="float32", dim=999)
    with pytest.raises(ValueError, match="dim"):
        store.import_file("v", path, format="raw", dtype="float32")
    result = em.convert(
        path,
        tmp_path / "half.npy",
        src_format="raw",
        source_dtype="float32",
        dim=1024,
        dtype="float16",
        memory="1MiB",
    )
    assert result["dtype"] == "float16"
    assert np.array_equal(np.load(tmp_path / "half.npy"), rows.astype(np.float16))


def test_halving_bare_floats_needs_little_memory(tmp_path, run_python):
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        file.truncate(512 << 20)
        file.write(np.arange(1024, dtype=np.float32).tobytes())
    code = """
        import resource, sys
        import embermap as em
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        raw = {"src_format": "raw", "source_dtype": "float32", "dim": 1024}
        print(em.convert(*sys.argv[1:], **raw, dtype="float16", memory="16MiB")["rows"])
    """
    assert run_python(code, path, tmp_path / "half.npy").stdout.split() == [str(1 << 17)]
    half = np.load(tmp_path / "half.npy", mmap_mode="r")
    assert half[0].tolist() == np.arange(1024, dtype=np.float16).tolist()
    assert not half[-1].any()


# --- several processes ----------------------------------------------------------------------------


CHILD = """
    import sys
    import embermap as em, numpy as np
    with em.open(sys.argv[1], mode="r", pin="mapping", memory="1MiB") as store:
        table = store["t"]
        out = np.empty((4096, table.dim), np.float32)
        table.gather(np.arange(4096), out=out)
        print("begun", flush=True)
        sys.stdin.readline()
        total = 0
        for first in range(0, table.rows, 4096):
            total += float(table.gather(np.arange(first, first + 4096), out=out)[:, 0].sum())
        (out * out).sum()
        with open("/proc/self/smaps_rollup") as file:
            lines = [line.split() for line in file.readlines()[1:]]
        sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
        print(total, sizes["Private_Dirty"], sizes["Pss"], sizes["Rss"], flush=True)
        sys.stdin.readline()
"""


def test_processes_share_what_they_read(path):
    rows, dim = 1 << 19, 64  # 128 MiB
    with em.open(path, memory="32MiB") as store:
        table = store.create("t", rows=rows, dim=dim)
        block = np.zeros((1 << 16, dim), np.float32)
        for first in range(0, rows, 1 << 16):
            block[:, 0] = np.arange(first, first + (1 << 16)) % 5
            table.write(first, block)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == "begun\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        reports = [list(map(float, child.stdout.readline().split())) for child in children]
    finally:
        for child in children:
            child.communicate("\n")
    wanted = float((np.arange(rows) % 5).sum())
    data = rows * dim * 4
    for total, private, pss, rss in reports:
        assert total == wanted
        assert rss > data  # all of it was mapped in
        assert private < 100 << 20  # interpreter and libraries
        assert pss < rss - data / 2
