#!/usr/bin/env python3
"""Rows of real text: its word n-grams, hashed to a table's rows.

Hashed n-gram memories have a row for each n-gram, at its hash modulo the number of rows. Most
n-grams occur once and few often, and neighbours in the text lie far apart in the table. Only NumPy
is needed:

    for ids in batches(DICTIONARY, batch=65536):  # int64 arrays, in reading order
        table.gather(ids)

    python ngrams.py grams.npy --shuffle 1   # a file for `embermap_policies --ids grams.npy`

The text is a dictionary of English (GNU Collaborative International Dictionary of English, Debian
package `dict-gcide`) unless another is named; gzip and dictzip are unpacked.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DICTIONARY = Path("/usr/share/dictd/gcide.dict.dz")
ROWS = 10**9
N = 5

_WORD = re.compile(r"[^\W\d_]+")  # a run of letters
_BASE64 = {
    digit: value
    for value, digit in enumerate(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    )
}


def read_text(path: Path) -> bytes:
    """The text of a file, unpacked if its first bytes say gzip (also dictzip's `.dz`)."""
    data = path.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def article_starts(path: Path, text: bytes) -> list[int]:
    """Where articles begin, in bytes, ascending, the first at 0.

    Taken from the index of a dictd dictionary (`NAME.index` beside `NAME.dict.dz`: headword, offset
    and length with tabs between, numbers in base 64); without one, paragraphs are articles.
    """
    index = path.with_name(path.name.split(".")[0] + ".index")
    starts = {0}
    if index.exists():
        for line in index.read_text("utf-8", "replace").splitlines():
            offset = 0
            for digit in line.split("\t")[1]:
                offset = offset * 64 + _BASE64[digit]
            if offset < len(text):
                starts.add(offset)
    else:
        starts.update(match.end() for match in re.finditer(rb"\n\s*\n", text))
    return sorted(starts)


def hash_words(path: Path) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the running text's words, and where each article begins among them.

    Words are lower-cased runs of letters. Returns (words,) uint64, the first eight bytes of each
    word's BLAKE2b, and (articles,) int64, ascending.
    """
    text = read_text(path)
    starts = article_starts(path, text)
    numbers: dict[str, int] = {}  # a distinct word is hashed once
    parts: list[NDArray[np.int32]] = []
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
        found = _WORD.findall(text[begin:end].decode("utf-8", "replace").lower())
        parts.append(
            np.fromiter((numbers.setdefault(w, len(numbers)) for w in found), np.int32, len(found))
        )
    digests = b"".join(hashlib.blake2b(word.encode(), digest_size=8).digest() for word in numbers)
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return np.frombuffer(digests, "<u8")[np.concatenate(parts)], np.cumsum(lengths) - lengths


def ngram_ids(words: NDArray[np.uint64], *, n: int = N, rows: int = ROWS) -> NDArray[np.int64]:
    """Rows of the n-grams of a text: (words - n + 1,) int64 in [0, rows), in the text's order.

    `words` are hashes of words. Words of an n-gram are mixed one after the other (SplitMix64's
    finalizer), so that their order matters. Fewer than n words have no n-gram.
    """
    count = max(0, len(words) - n + 1)
    mixed = np.zeros(count, np.uint64)
    for i in range(n):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed += words[i : i + count]
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    ids: NDArray[np.int64] = (mixed % np.uint64(rows)).astype(np.int64)
    return ids


def text_ids(
    path: Path = DICTIONARY, *, n: int = N, rows: int = ROWS, shuffle: int | None = None
) -> NDArray[np.int64]:
    """Rows of a text's n-grams, in reading order or with its articles shuffled by a seed.

    An n-gram belongs to the article of its first word.
    """
    words, articles = hash_words(path)
    ids = ngram_ids(words, n=n, rows=rows)
    if shuffle is None:
        return ids
    pieces = np.split(ids, articles[(articles > 0) & (articles < len(ids))])
    order = np.random.default_rng(shuffle).permutation(len(pieces))
    return np.concatenate([pieces[i] for i in order])


def batches(
    path: Path = DICTIONARY,
    *,
    n: int = N,
    rows: int = ROWS,
    batch: int = 65_536,
    shuffle: int | None = None,
) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of a text's n-grams, `batch` at a time (the last may be shorter)."""
    ids = text_ids(path, n=n, rows=rows, shuffle=shuffle)
    for begin in range(0, len(ids), batch):
        yield ids[begin : begin + batch]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the rows of a text's word n-grams as .npy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, default=DICTIONARY)
    parser.add_argument(
        "--n", type=int, default=N, help="words of an n-gram (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="default: %(default)s")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle the articles")
    arguments = parser.parse_args()
    if arguments.n < 1 or arguments.rows < 1:
        parser.error("--n and --rows are at least 1")
    try:
        ids = text_ids(
            arguments.text, n=arguments.n, rows=arguments.rows, shuffle=arguments.shuffle
        )
        np.save(arguments.out, ids)
    except (OSError, EOFError, zlib.error) as error:
        advice = "" if arguments.text.exists() else "; Debian package dict-gcide, or name a --text"
        print(f"ngrams: {error}{advice}", file=sys.stderr)
        return 1
    distinct, times = np.unique(ids, return_counts=True)
    print(
        f"{len(ids)} n-grams on {len(distinct)} rows, {np.mean(times == 1):.1%} of those used once"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
