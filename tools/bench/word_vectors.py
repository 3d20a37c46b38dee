#!/usr/bin/env python3
"""Word vectors from files: `embermap convert` beside gensim.

    python tools/bench/word_vectors.py --rows 100000 --dim 300
    python tools/bench/word_vectors.py --rows 2000 --rounds 1 --json results.json

Makes a file of word2vec's text and one of its binary format with gensim, has both sides read them,
and compares rows and words bit by bit before anything is timed. Then they take turns: embermap
turns the file into a .npy and a vocabulary on disk, gensim loads it into memory. What is reported
is the median of each, and of the ratios of the rounds. The files are in the page cache.

Needs gensim (`pip install gensim`) and `embermap`: --embermap, or the one on the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = {"word2vec-text": False, "word2vec-binary": True}  # and whether gensim calls it binary


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def make_vectors(rows: int, dim: int) -> Any:
    """Vectors as they come out of training: normal values, words of different lengths."""
    from gensim.models import KeyedVectors

    random = np.random.default_rng(1)
    vectors = KeyedVectors(dim)
    words = [f"{'w' * (i % 9)}{i}" for i in range(rows)]
    vectors.add_vectors(words, random.normal(0, 0.3, (rows, dim)).astype(np.float32))
    return vectors


def compare(folder: Path, kind: str, vectors: Any, convert: Callable[[], None]) -> None:
    """Exits unless both sides read the rows and words that were written."""
    from gensim.models import KeyedVectors

    convert()
    loaded = KeyedVectors.load_word2vec_format(str(folder / kind), binary=FORMATS[kind])
    rows = np.load(folder / "out.npy")
    words = (folder / "out.npy.vocab.txt").read_text().splitlines()
    for name, got, got_words in (
        ("embermap", rows, words),
        ("gensim", loaded.vectors, loaded.index_to_key),
    ):
        if got.tobytes() != vectors.vectors.tobytes() or got_words != vectors.index_to_key:
            sys.exit(
                f"word_vectors: {name} reads other rows or words from {kind}: nothing was timed"
            )


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    from gensim.models import KeyedVectors

    results = []
    vectors = make_vectors(arguments.rows, arguments.dim)
    for kind, binary in FORMATS.items():
        file = folder / kind
        vectors.save_word2vec_format(str(file), binary=binary)
        command = [
            *(arguments.embermap, "convert", str(file), str(folder / "out.npy")),
            *("--from", kind, "--overwrite", "--quiet"),
        ]

        def convert(command: list[str] = command) -> None:
            subprocess.run(command, check=True)

        def load(file: Path = file, binary: bool = binary) -> None:
            KeyedVectors.load_word2vec_format(str(file), binary=binary)

        compare(folder, kind, vectors, convert)
        times = [(timed(convert), timed(load)) for _ in range(arguments.rounds)]
        ours, theirs = (statistics.median(side) for side in zip(*times, strict=True))
        results.append(
            {
                "format": kind,
                "rows": arguments.rows,
                "dim": arguments.dim,
                "bytes": file.stat().st_size,
                "embermap_seconds": ours,
                "gensim_seconds": theirs,
                "ratio": statistics.median(b / a for a, b in times),
            }
        )
        print(
            f"{kind}: {arguments.rows} x {arguments.dim}, {file.stat().st_size / 2**20:.0f} MiB: "
            f"embermap {ours:.3f} s ({file.stat().st_size / 2**20 / ours:.0f} MiB/s, to disk), "
            f"gensim {theirs:.3f} s, {results[-1]['ratio']:.1f} times as fast"
        )
        file.unlink()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are made (default: a new one)")
    parser.add_argument("--embermap", default=shutil.which("embermap"), help="the program")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    if arguments.embermap is None:
        sys.exit("word_vectors: there is no embermap on the PATH; --embermap names it")
    try:
        import gensim  # noqa: F401
    except ImportError:
        sys.exit("word_vectors: there is no gensim here: pip install gensim")
    with tempfile.TemporaryDirectory(prefix="word-vectors-", dir=arguments.folder) as folder:
        results = run(arguments, Path(folder))
    if arguments.json is not None:
        report = {"cores": len(os.sched_getaffinity(0)), "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
