"""Rows of a text's n-grams, as benchmarks use them (tools/bench/ngrams.py)."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "bench" / "ngrams.py"


@pytest.fixture(scope="module")
def ngrams() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ngrams", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_same_ngrams_have_the_same_row_and_others_do_not(ngrams, tmp_path):
    ids = ngrams.text_ids(write(tmp_path / "t", "One two, three! one TWO three two one"), n=2)
    assert ids.dtype == np.int64
    assert ids.shape == (7,)
    assert ids[0] == ids[3]  # one two
    assert ids[1] == ids[4]  # two three
    assert len({*ids.tolist()}) == 5
    assert ids[0] != ids[6]  # two one: order matters
    assert 0 <= ids.min() <= ids.max() < ngrams.ROWS


def test_rows_do_not_depend_on_the_text_before(ngrams, tmp_path):
    alone = ngrams.text_ids(write(tmp_path / "a", "b c d e f"))
    after = ngrams.text_ids(write(tmp_path / "b", "z a b c d e f"))
    assert alone.tolist() == after[-1:].tolist()


def test_known_rows(ngrams, tmp_path):
    """A table trained on them is of use later only if they never change."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    words = [int(w) for w in ngrams.hash_words(write(tmp_path / "t", "sea ship"))[0]]
    assert words == [0xF5DD82F7FC3B55F1, 0x8AEE75BC567619BE]
    expected = mix((mix(words[0]) * 0x9E3779B97F4A7C15 + words[1]) % 2**64) % 1000
    assert ngrams.text_ids(tmp_path / "t", n=2, rows=1000).tolist() == [expected]


@pytest.mark.parametrize("text", ["", "one", "one two three four"])
def test_fewer_words_than_n_have_no_ngram(ngrams, tmp_path, text):
    assert ngrams.text_ids(write(tmp_path / "t", text)).shape == (0,)
    assert list(ngrams.batches(tmp_path / "t")) == []


def test_packed_text_and_batches(ngrams, tmp_path):
    text = " ".join(f"w{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(104))
    plain = ngrams.text_ids(write(tmp_path / "t", text))
    (tmp_path / "t.gz").write_bytes(gzip.compress(text.encode()))
    parts = list(ngrams.batches(tmp_path / "t.gz", batch=30))
    assert [len(part) for part in parts] == [30, 30, 30, 10]
    assert np.array_equal(np.concatenate(parts), plain)


@pytest.mark.parametrize("indexed", [False, True])
def test_shuffled_articles_stay_whole(ngrams, tmp_path, indexed):
    articles = [f"a{chr(97 + i)} b c" for i in range(20)]
    path = write(tmp_path / "t.dict", ("\n" if indexed else "\n\n").join(articles))
    if indexed:  # six bytes and a newline each; offsets in base 64
        digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
        at = [7 * i for i in range(20)]
        lines = [f"w\t{digits[o // 64]}{digits[o % 64]}\tG\n" for o in at]
        write(tmp_path / "t.index", "".join(lines))
    plain = ngrams.text_ids(path, n=1)
    shuffled = ngrams.text_ids(path, n=1, shuffle=3)
    assert plain.shape == shuffled.shape == (60,)
    assert not np.array_equal(plain, shuffled)
    whole = {tuple(row) for row in plain.reshape(20, 3).tolist()}
    assert {tuple(row) for row in shuffled.reshape(20, 3).tolist()} == whole


def test_command_writes_a_file_or_says_why_not(ngrams, tmp_path, monkeypatch, capsys):
    write(tmp_path / "t", "a b c d e f")
    out = tmp_path / "ids.npy"
    monkeypatch.setattr(sys, "argv", ["ngrams", str(out), "--text", str(tmp_path / "t")])
    assert ngrams.main() == 0
    assert np.load(out, allow_pickle=False).shape == (2,)
    monkeypatch.setattr(sys, "argv", ["ngrams", str(out), "--text", str(tmp_path / "none")])
    assert ngrams.main() == 1
    assert "none" in capsys.readouterr().err
