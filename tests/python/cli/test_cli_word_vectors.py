"""Word vectors and rows of other programs: word2vec, GloVe, fastText, .fvecs, .fbin, raw."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

Array = np.ndarray[Any, Any]

WORDS = ["the", "of", "</s>", "caf\u00e9", "of", "na\u00efve", "x" * 300, "\u65e5\u672c"]


def rows_of(count: int, dim: int, seed: int = 0) -> Array:
    """Numbers of all sizes, zeros and infinities among them; no NaN, whose payload text loses."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count * dim, np.uint32)
    rows = bits.view(np.float32).copy()
    rows[np.isnan(rows)] = -0.0
    rows[:3] = [np.inf, -np.inf, 0.1]
    return rows.reshape(count, dim)


def write_text(path: Path, words: list[str], rows: Array, *, header: bool) -> None:
    lines = [f"{len(rows)} {rows.shape[1]}"] if header else []
    lines += [
        f"{w} {' '.join(repr(float(x)) for x in row)}" for w, row in zip(words, rows, strict=True)
    ]
    path.write_bytes("".join(line + "\n" for line in lines).encode())


def write_binary(path: Path, words: list[str], rows: Array, end: bytes = b"\n") -> None:
    body = b"".join(w.encode() + b" " + r.tobytes() + end for w, r in zip(words, rows, strict=True))
    path.write_bytes(b"%d %d\n" % rows.shape + body)


def read_words(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1]


def equal_bits(got: Array, wanted: Array) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert got.tobytes() == wanted.tobytes()


def make(folder: Path, kind: str, rows: Array) -> str:
    """A file of this kind, made by hand."""
    if kind == "word2vec-text":
        write_text(folder / "in.txt", WORDS, rows, header=True)
        return "in.txt"
    if kind == "glove":
        write_text(folder / "in.txt", WORDS, rows, header=False)
        return "in.txt"
    write_binary(folder / "in.bin", WORDS, rows)
    return "in.bin"


KINDS = ["word2vec-text", "glove", "word2vec-binary"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_words_of_each_format(cli: Embermap, tmp_path: Path, kind: str) -> None:
    rows = rows_of(len(WORDS), 5)
    source = make(tmp_path, kind, rows)
    assert cli.ok("ls", source, "--json", cwd=tmp_path).json["format"] == kind
    report = cli.ok("convert", source, "out.npy", "--json", cwd=tmp_path).json
    equal_bits(np.load(tmp_path / "out.npy"), rows)
    assert (report["rows"], report["dim"], report["dtype"]) == (len(WORDS), 5, "float32")
    assert report["vocabulary"] == "out.npy.vocab.txt"
    assert read_words(tmp_path / "out.npy.vocab.txt") == WORDS


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_every_pair_keeps_rows_and_words(
    cli: Embermap, tmp_path: Path, source: str, target: str
) -> None:
    rows = rows_of(len(WORDS), 3, seed=1)
    name = make(tmp_path, source, rows)
    before = sorted(p.name for p in tmp_path.iterdir())
    cli.ok("convert", name, "between", "--to", target, cwd=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*before, "between"])
    cli.ok("convert", "between", "out.npy", "--from", target, cwd=tmp_path)
    equal_bits(np.load(tmp_path / "out.npy"), rows)
    assert read_words(tmp_path / "out.npy.vocab.txt") == WORDS


def test_many_rows_pass_from_format_to_format(cli: Embermap, tmp_path: Path) -> None:
    rows = rows_of(60_000, 20, seed=2)
    words = [f"w{i // 2}" for i in range(len(rows))]
    write_binary(tmp_path / "in.bin", words, rows)
    cli.ok("convert", "in.bin", "mid.vec", "--memory", "16MiB", cwd=tmp_path)
    assert (tmp_path / "mid.vec").read_bytes().startswith(b"60000 20\nw0 inf -inf 0.1 ")
    cli.ok("convert", "mid.vec", "glove.txt", "--to", "glove", cwd=tmp_path)
    cli.ok("convert", "glove.txt", "out.w2v", "--vocab", "words.txt", cwd=tmp_path)
    assert (tmp_path / "out.w2v").read_bytes() == (tmp_path / "in.bin").read_bytes()
    assert read_words(tmp_path / "words.txt") == words


def test_a_table_keeps_its_words(cli: Embermap, tmp_path: Path) -> None:
    rows = rows_of(len(WORDS), 4)
    name = make(tmp_path, "glove", rows)
    options = ["--optimizer", "adagrad", "--lr", "0.1"]
    report = cli.ok("import", name, "s/words", "--json", *options, cwd=tmp_path).json
    assert report["vocabulary"] == "s/words.vocab.txt"
    assert read_words(tmp_path / "s/words.vocab.txt") == WORDS
    cli.ok("export", "s/words", "out.txt", cwd=tmp_path)
    cli.ok("convert", "out.txt", "out.npy", cwd=tmp_path)
    equal_bits(np.load(tmp_path / "out.npy"), rows)
    assert read_words(tmp_path / "out.npy.vocab.txt") == WORDS
    cli.ok("export", "s/words", "numbers.vec", "--vocab", "none", cwd=tmp_path)
    lines = (tmp_path / "numbers.vec").read_text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(i) for i in range(len(WORDS))]
    cli.ok("resize", "s/words", "--rows", "9", cwd=tmp_path)
    cli.fails("export", "s/words", "x.vec", says=["8 words for 9 rows"], cwd=tmp_path)
    assert not (tmp_path / "x.vec").exists()
    cli.ok("remove", "s/words", cwd=tmp_path)
    assert not (tmp_path / "s/words.vocab.txt").exists()


def test_vocabularies_that_do_not_fit(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 2), np.float32))
    cli.fails("convert", "a.npy", "a.vec", says=["a.npy.vocab.txt is not there"], cwd=tmp_path)
    (tmp_path / "w").write_bytes(b"one\ntwo\nthree\n")
    many = ["convert", "a.npy", "a.vec", "--vocab", "w"]
    cli.fails(*many, says=["3 words for 2 rows"], cwd=tmp_path)
    (tmp_path / "w").write_bytes(b"one two\nthree\n")
    cli.fails(*many, says=["'one two' of row 0", "space"], cwd=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "w"]
    cli.ok("convert", "a.npy", "a.glove", "--vocab", "w", cwd=tmp_path)
    assert (tmp_path / "a.glove").read_bytes() == b"one two 1 1\nthree 1 1\n"
    (tmp_path / "w").write_bytes(b"one\r\ntwo")
    cli.ok(*many, cwd=tmp_path)
    assert (tmp_path / "a.vec").read_bytes() == b"2 2\none 1 1\ntwo 1 1\n"
    result = cli("convert", "a.npy", "b.npy", "--vocab", "w", cwd=tmp_path)
    assert result.code == 2
    # A vocabulary that is there is not replaced without being told so.
    cli.fails("convert", "a.vec", "c.npy", "--vocab", "w", says=["w"], cwd=tmp_path)
    assert not (tmp_path / "c.npy").exists()
    cli.ok("convert", "a.vec", "c.npy", "--vocab", "w", "--overwrite", cwd=tmp_path)
    assert (tmp_path / "w").read_bytes() == b"one\ntwo\n"
    cli.ok("convert", "a.vec", "d.npy", "--vocab", "none", cwd=tmp_path)
    assert not (tmp_path / "d.npy.vocab.txt").exists()


def test_broken_text_leaves_nothing(cli: Embermap, tmp_path: Path) -> None:
    (tmp_path / "a.vec").write_bytes(b"3 2\na 1 2\nb 1\nc 1 2\n")
    wrong = ["line 3 has 1 numbers, 2 are expected"]
    cli.fails("convert", "a.vec", "a.npy", says=wrong, cwd=tmp_path)
    cli.fails("import", "a.vec", "s/a", says=wrong, cwd=tmp_path)
    (tmp_path / "a.vec").write_bytes(b"2 2\na 1 2\n")
    cli.fails("convert", "a.vec", "a.npy", says=["has 1 rows", "says 2"], cwd=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.vec"]


def test_float64_text_is_read_as_such_where_it_is_asked_for(cli: Embermap, tmp_path: Path) -> None:
    (tmp_path / "a.vec").write_bytes(b"1 2\na 0.1 1e300\n")
    cli.fails("convert", "a.vec", "a.npy", says=["line 2", "float32"], cwd=tmp_path)
    cli.ok("convert", "a.vec", "a.npy", "--dtype", "float64", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), [[0.1, 1e300]])


def write_fasttext(path: Path, words: list[str], rows: Array, buckets: int) -> None:
    out = struct.pack(
        "<2i12id", 793712314, 12, rows.shape[1], *[5] * 5, 2, 2, buckets, 3, 6, 100, 0.1
    )
    out += struct.pack("<3iqq", len(words), len(words), 0, 1000, -1)
    out += b"".join(w.encode() + b"\0" + struct.pack("<qb", 7, 0) for w in words)
    matrices = rows, rows[: len(words)] * 2
    out += b"".join(struct.pack("<?qq", False, *m.shape) + m.tobytes() for m in matrices)
    path.write_bytes(out)


def test_fasttext_models(cli: Embermap, tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.float32).reshape(12, 5)
    write_fasttext(tmp_path / "m.bin", WORDS, rows, 4)
    entries = cli.ok("ls", "m.bin", "--json", cwd=tmp_path).json["entries"]
    parts = [("input", [12, 5]), ("words", [8, 5]), ("output", [8, 5])]
    assert [(e["name"], e["shape"]) for e in entries] == parts
    cli.ok("convert", "m.bin", "a.npy", cwd=tmp_path)
    equal_bits(np.load(tmp_path / "a.npy"), rows)
    buckets = [f"__bucket_{i}__" for i in range(4)]
    assert read_words(tmp_path / "a.npy.vocab.txt") == WORDS + buckets
    cli.ok("convert", "m.bin:output", "b.npy", cwd=tmp_path)
    equal_bits(np.load(tmp_path / "b.npy"), rows[:8] * 2)
    assert read_words(tmp_path / "b.npy.vocab.txt") == WORDS
    cli.ok("import", "m.bin", "s/t", cwd=tmp_path)
    says = ["only read here"]
    cli.fails("convert", "a.npy", "c.bin", "--to", "fasttext", says=says, cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("x.fvecs", "float32"),
        ("x.bvecs", "uint8"),
        ("x.ivecs", "int32"),
        ("x.fbin", "float32"),
        ("x.u8bin", "uint8"),
        ("x.i8bin", "int8"),
        ("x.ibin", "int32"),
    ],
)
def test_vectors_of_search_benchmarks(cli: Embermap, tmp_path: Path, name: str, dtype: str) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (1001, 24), np.uint8).view(dtype)
    np.save(tmp_path / "in.npy", rows)
    cli.ok("convert", "in.npy", name, cwd=tmp_path)
    content = (tmp_path / name).read_bytes()
    if name.endswith("vecs"):
        records = np.frombuffer(content, [("dim", "<i4"), ("row", dtype, rows.shape[1:])])
        assert (records["dim"] == rows.shape[1]).all()
        equal_bits(records["row"].copy(), rows)
    else:
        assert struct.unpack("<II", content[:8]) == rows.shape
        equal_bits(np.frombuffer(content, dtype, offset=8).reshape(rows.shape), rows)
    cli.ok("convert", name, "out.npy", cwd=tmp_path)
    equal_bits(np.load(tmp_path / "out.npy"), rows)
    (tmp_path / name).write_bytes(content + b"?")
    cli.fails("convert", name, "y.npy", says=["1 bytes"], cwd=tmp_path)
    (tmp_path / name).write_bytes(content[:-1])
    cli.fails("convert", name, "y.npy", says=["bytes"], cwd=tmp_path)
    other = "float64" if dtype != "float64" else "int8"
    np.save(tmp_path / "other.npy", np.zeros(rows.shape, other))
    cli.fails("convert", "other.npy", "z" + name, says=[other, dtype], cwd=tmp_path)
    assert not (tmp_path / "y.npy").exists()


def test_raw_files(cli: Embermap, tmp_path: Path) -> None:
    rows = rows_of(10, 6)
    (tmp_path / "x.raw").write_bytes(b"header" + rows.tobytes())
    shape = ["--dim", "6", "--offset", "6"]
    cli.ok("convert", "x.raw", "a.npy", "--source-dtype", "float32", *shape, cwd=tmp_path)
    equal_bits(np.load(tmp_path / "a.npy"), rows)
    cli.ok("import", "x.raw", "s/a", "--dtype", "float32", *shape, cwd=tmp_path)
    cli.ok("export", "s/a", "y.raw", cwd=tmp_path)
    assert (tmp_path / "y.raw").read_bytes() == rows.tobytes()
    cli.fails("convert", "x.raw", "b.npy", says=["dtype", "dim"], cwd=tmp_path)
    narrow = ["--source-dtype", "float32", "--dim", "7", "--offset", "6"]
    cli.fails("convert", "x.raw", "b.npy", *narrow, says=["16 bytes more"], cwd=tmp_path)
    for option in (["--offset", "3"], ["--dim", "3"], ["--dim", "0"]):
        assert cli("convert", "a.npy", "c.npy", *option, cwd=tmp_path).code == 2
    assert not (tmp_path / "b.npy").exists()


def test_gensim_reads_what_is_written_and_the_other_way(cli: Embermap, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models")
    words = [w for i, w in enumerate(WORDS) if w not in WORDS[:i]]
    rows = rows_of(len(words), 7, seed=5)
    vectors = models.KeyedVectors(7)
    vectors.add_vectors(words, rows)
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "words").write_text("".join(w + "\n" for w in words))
    for binary, name in (False, "v.txt"), (True, "v.bin"):
        vectors.save_word2vec_format(str(tmp_path / name), binary=binary)
        cli.ok("convert", name, "out.npy", "--overwrite", cwd=tmp_path)
        equal_bits(np.load(tmp_path / "out.npy"), rows)
        assert read_words(tmp_path / "out.npy.vocab.txt") == words
        kind = "word2vec-binary" if binary else "word2vec-text"
        options = ["--to", kind, "--vocab", "words", "--overwrite"]
        cli.ok("convert", "rows.npy", name, *options, cwd=tmp_path)
        loaded = models.KeyedVectors.load_word2vec_format(str(tmp_path / name), binary=binary)
        assert loaded.index_to_key == words
        equal_bits(loaded.vectors, rows)
    cli.ok("convert", "rows.npy", "g.txt", "--to", "glove", "--vocab", "words", cwd=tmp_path)
    loaded = models.KeyedVectors.load_word2vec_format(str(tmp_path / "g.txt"), no_header=True)
    equal_bits(loaded.vectors, rows)


def test_models_of_gensims_fasttext(cli: Embermap, tmp_path: Path) -> None:
    fasttext = pytest.importorskip("gensim.models.fasttext")
    text = [["cat", "sat", "mat"], ["dog", "sat", "log"]] * 5
    model = fasttext.FastText(text, vector_size=6, min_count=1, bucket=50, epochs=1, workers=1)
    fasttext.save_facebook_model(model, str(tmp_path / "m.bin"))
    cli.ok("convert", "m.bin", "out.npy", cwd=tmp_path)
    wanted = np.vstack([model.wv.vectors_vocab, model.wv.vectors_ngrams])
    equal_bits(np.load(tmp_path / "out.npy"), wanted)
    words = read_words(tmp_path / "out.npy.vocab.txt")
    assert words[: len(model.wv)] == model.wv.index_to_key
    cli.ok("convert", "m.bin:words", "words.npy", cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "words.npy"), model.wv.vectors, rtol=1e-5)
