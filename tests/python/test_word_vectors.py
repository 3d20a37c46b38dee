"""Word vectors from and to files, by the package."""

from __future__ import annotations

import struct
from pathlib import Path

import embermap as em
import numpy as np
import pytest

TEXT = b"3 2\nthe 0.5 -1\ncaf\xc3\xa9 1e-05 2\n\xff 3 4\n"
ROWS = np.array([[0.5, -1], [1e-5, 2], [3, 4]], np.float32)


def test_words_stay_beside_the_table(tmp_path: Path) -> None:
    (tmp_path / "v.vec").write_bytes(TEXT)
    with em.open(tmp_path / "s", memory="8MiB") as store:
        table = store.import_file("words", tmp_path / "v.vec")
        np.testing.assert_array_equal(table[:], ROWS)
        assert (tmp_path / "s/words.vocab.txt").read_bytes() == b"the\ncaf\xc3\xa9\n\xff\n"
        table.export(tmp_path / "out.vec")
        assert (tmp_path / "out.vec").read_bytes() == TEXT
        table.export(tmp_path / "g", format="glove", vocab="none")
        assert (tmp_path / "g").read_bytes() == b"0 0.5 -1\n1 1e-05 2\n2 3 4\n"
        (tmp_path / "w").write_bytes(b"a\nb\n")
        with pytest.raises(em.FormatError, match="2 words for 3 rows"):
            table.export(tmp_path / "x.vec", vocab=tmp_path / "w")
        assert not (tmp_path / "x.vec").exists()


def test_words_go_where_they_are_told(tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(TEXT.split(b"\n", 1)[1])
    with em.open(tmp_path / "s", memory="8MiB") as store:
        store.import_file("a", tmp_path / "g", format="glove", vocab=tmp_path / "w")
        assert (tmp_path / "w").read_bytes() == b"the\ncaf\xc3\xa9\n\xff\n"
        store.import_file("b", tmp_path / "g", format="glove", vocab="none")
        assert not (tmp_path / "s/b.vocab.txt").exists()
        with pytest.raises(em.NotFoundError, match="b.vocab.txt"):
            store["b"].export(tmp_path / "x.vec")
        with pytest.raises(FileExistsError):
            store.import_file("c", tmp_path / "g", format="glove", vocab=tmp_path / "w")
        assert "c" not in store
        with pytest.raises(ValueError, match="no format 'word'"):
            store.import_file("c", tmp_path / "g", format="word")
        with pytest.raises(em.FormatError, match="line 1"):
            store.import_file("c", tmp_path / "g", format="word2vec-text")
        assert sorted(store) == ["a", "b"]


def test_raw_and_flat_files(tmp_path: Path) -> None:
    (tmp_path / "x.raw").write_bytes(b"head" + ROWS.tobytes())
    (tmp_path / "x.fvecs").write_bytes(
        b"".join(struct.pack("<i", 2) + row.tobytes() for row in ROWS)
    )
    with em.open(tmp_path / "s", memory="8MiB") as store:
        raw = store.import_file("a", tmp_path / "x.raw", dtype="float32", dim=2, offset=4)
        np.testing.assert_array_equal(raw[:], ROWS)
        flat = store.import_file("b", tmp_path / "x.fvecs")
        np.testing.assert_array_equal(flat[:], ROWS)
        raw.export(tmp_path / "y.fbin")
        content = (tmp_path / "y.fbin").read_bytes()
        assert content == struct.pack("<II", 3, 2) + ROWS.tobytes()
        for wrong in {"dim": 0}, {"dim": -1}, {"offset": -1}:
            with pytest.raises(ValueError, match="dim|offset"):
                store.import_file("c", tmp_path / "x.raw", dtype="float32", **wrong)
        with pytest.raises(ValueError, match="dim"):
            store.import_file("c", tmp_path / "x.raw", dtype="float32")
