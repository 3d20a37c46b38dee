#!/usr/bin/env python3
"""Files turned into one another: `embermap convert` beside `cp` and the formats' own readers.

    python tools/bench/convert.py --size 1GiB --large
    python tools/bench/convert.py --quick --json results.json
    python tools/bench/convert.py --cases '*hdf5*' --rounds 5

Makes one table in every format, converts each once, and compares the rows that come out bit by bit
before anything is timed. Then the sides take turns, round by round, each the first in turn:
embermap, `cp` of as many bytes, and a program that does the same with h5py, NumPy, safetensors,
torch or gensim. All write to the same disk and sync what they wrote; the page cache is dropped
before each. What is reported is the median of the rounds' ratios, of wall and of processor time
(which a busy machine changes less), the rate in bytes of rows, and the most memory that was
resident. embermap's time is that of its whole process; the others' begins after their imports.

--large adds one conversion of 20 GB and one of a sparse file of a billion rows, for the memory they
take: 40 GB of disk, for as long as it lasts.

Dropping the page cache needs root; without it the files' own pages are dropped. Needs NumPy and
h5py, and takes part with what else is there.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import json
import os
import re
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

QUICK_BYTES = 24 << 20
TEXT_SHARE = 16  # word vectors in text are made of so much fewer rows: they take a processor
TEXTS = ("few.npy", "x.vec", "x.glove.txt")  # sources that have so few
LARGE_BYTES = 20_000_000_000
SPARSE_ROWS, SPARSE_DIM = 1_000_000_000, 8


class Case(NamedTuple):
    name: str
    source: str  # a file that make_source() makes
    target: str
    options: tuple[str, ...] = ()
    rival: str = ""  # a function below; empty: cp alone
    module: str = ""  # that it needs
    copy: bool = True  # whether cp of the rows' bytes does the same
    back: tuple[str, ...] = ()  # options of the way back


FLAT = ("--source-dtype", "float32")  # and the columns, which convert() adds
WORDS = ("--vocab", "none")

CASES = (
    Case("npy to npy", "x.npy", "y.npy", (), "numpy", "numpy"),
    Case("npy to npy, float16", "x.npy", "y.npy", ("--dtype", "float16"), "numpy_half", "numpy"),
    Case("npy to npz", "x.npy", "y.npz", (), "to_npz", "numpy"),
    Case("npy to npz, deflated", "x.npy", "y.npz", ("--gzip", "6"), "to_deflated", "numpy", False),
    Case("npy to safetensors", "x.npy", "y.safetensors", (), "to_safetensors", "safetensors"),
    Case("npy to torch", "x.npy", "y.pt", (), "to_torch", "torch"),
    Case("npy to hdf5", "x.npy", "y.h5", (), "to_hdf5", "h5py"),
    Case("npy to hdf5, gzip", "x.npy", "y.h5", ("--gzip", "1"), "to_hdf5_gzip", "h5py", False),
    Case("npy to fvecs", "x.npy", "y.fvecs", (), "to_fvecs", "numpy"),
    Case("npy to fbin", "x.npy", "y.fbin", (), "to_fbin", "numpy"),
    Case("npy to raw", "x.npy", "y.raw", (), "to_raw", "numpy", True, FLAT),
    Case("npy to word2vec text", "few.npy", "y.vec", WORDS, "to_word2vec", "gensim", False, WORDS),
    Case(
        "npy to word2vec binary",
        "x.npy",
        "y.w2v.bin",
        (*WORDS, "--to", "word2vec-binary"),
        "to_word2vec_binary",
        "gensim",
        True,
        WORDS,
    ),
    Case("safetensors to npy", "x.safetensors", "y.npy", (), "from_safetensors", "safetensors"),
    Case("torch to npy", "x.pt", "y.npy", (), "from_torch", "torch"),
    Case("hdf5 to npy", "x.h5", "y.npy", (), "from_hdf5", "h5py"),
    Case("hdf5, chunked, to npy", "chunked.h5", "y.npy", (), "from_hdf5", "h5py"),
    Case("hdf5, gzip, to npy", "gzip.h5", "y.npy", (), "from_hdf5", "h5py", False),
    Case("hdf5, lzf, to npy", "lzf.h5", "y.npy", (), "from_hdf5", "h5py", False),
    Case("npz to npy", "x.npz", "y.npy", (), "from_npz", "numpy"),
    Case("npz, deflated, to npy", "deflated.npz", "y.npy", (), "from_npz", "numpy", False),
    Case("fvecs to npy", "x.fvecs", "y.npy", (), "from_fvecs", "numpy"),
    Case("fbin to npy", "x.fbin", "y.npy", (), "from_fbin", "numpy"),
    Case("raw to npy", "x.raw", "y.npy", FLAT, "from_raw", "numpy"),
    Case("word2vec text to npy", "x.vec", "y.npy", (), "from_word2vec", "gensim", False),
    Case("glove to npy", "x.glove.txt", "y.npy", (), "from_glove", "gensim", False),
    Case("word2vec binary to npy", "x.w2v.bin", "y.npy", (), "from_word2vec_binary", "gensim"),
    Case("fasttext to npy", "x.ft.bin", "y.npy"),
    Case("npy into a store", "x.npy", "store/y"),
)


def blocks(rows: int, dim: int) -> Any:
    """Ranges of rows of about 16 MiB."""
    step = max(1, (16 << 20) // (4 * dim))
    return ((first, min(rows, first + step)) for first in range(0, rows, step))


def chunk_of(rows: int, dim: int) -> tuple[int, int]:
    """About a MiB."""
    return min(rows, max(1, (1 << 20) // (4 * dim))), dim


# --- the others -----------------------------------------------------------------------------------
# Each as its documentation has it, with blocks where it can: nobody is made to hold it all.


def numpy(source: Path, target: Path, dtype: Any = None) -> None:
    rows = np.load(source, mmap_mode="r")
    out = np.lib.format.open_memmap(target, "w+", dtype or rows.dtype, rows.shape)
    for first, end in blocks(*rows.shape):
        out[first:end] = rows[first:end]
    out.flush()


def numpy_half(source: Path, target: Path) -> None:
    numpy(source, target, np.float16)


def to_safetensors(source: Path, target: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"weight": np.load(source)}, target)


def from_safetensors(source: Path, target: Path) -> None:
    from safetensors import safe_open

    with safe_open(source, framework="numpy") as file:
        np.save(target, file.get_tensor("weight"))


def to_torch(source: Path, target: Path) -> None:
    import torch

    torch.save({"weight": torch.from_numpy(np.load(source))}, target)


def from_torch(source: Path, target: Path) -> None:
    import torch

    np.save(target, torch.load(source, mmap=True, weights_only=True)["weight"].numpy())


def to_hdf5(source: Path, target: Path, **options: Any) -> None:
    import h5py

    rows = np.load(source, mmap_mode="r")
    with h5py.File(target, "w") as file:
        out = file.create_dataset("data", rows.shape, rows.dtype, **options)
        for first, end in blocks(*rows.shape):
            out[first:end] = rows[first:end]


def to_hdf5_gzip(source: Path, target: Path) -> None:
    rows, dim = np.load(source, mmap_mode="r").shape
    to_hdf5(
        source,
        target,
        chunks=chunk_of(rows, dim),
        shuffle=True,
        compression="gzip",
        compression_opts=1,
    )


def from_hdf5(source: Path, target: Path) -> None:
    import h5py

    with h5py.File(source) as file:
        rows = file["data"]
        out = np.lib.format.open_memmap(target, "w+", rows.dtype, rows.shape)
        for first, end in blocks(*rows.shape):
            out[first:end] = rows[first:end]
        out.flush()


def from_npz(source: Path, target: Path) -> None:
    np.save(target, np.load(source)["arr_0"])


def to_npz(source: Path, target: Path) -> None:
    np.savez(target, np.load(source, mmap_mode="r"))


def to_deflated(source: Path, target: Path) -> None:
    np.savez_compressed(target, np.load(source, mmap_mode="r"))


def to_fvecs(source: Path, target: Path) -> None:
    rows = np.load(source, mmap_mode="r")
    with target.open("wb") as file:
        for first, end in blocks(*rows.shape):
            part = np.empty((end - first, rows.shape[1] + 1), np.float32)
            part[:, 1:] = rows[first:end]
            part.view(np.int32)[:, 0] = rows.shape[1]
            part.tofile(file)


def from_fvecs(source: Path, target: Path) -> None:
    dim = int(np.fromfile(source, np.int32, 1)[0])
    np.save(target, np.memmap(source, np.float32, "r").reshape(-1, dim + 1)[:, 1:])


def to_fbin(source: Path, target: Path) -> None:
    rows = np.load(source, mmap_mode="r")
    with target.open("wb") as file:
        np.array(rows.shape, np.uint32).tofile(file)
        rows.tofile(file)


def from_fbin(source: Path, target: Path) -> None:
    rows, dim = np.fromfile(source, np.uint32, 2).tolist()
    np.save(target, np.memmap(source, np.float32, "r", offset=8, shape=(rows, dim)))


def to_raw(source: Path, target: Path) -> None:
    np.load(source, mmap_mode="r").tofile(target)


def from_raw(source: Path, target: Path) -> None:
    dim = np.load(source.with_name("x.npy"), mmap_mode="r").shape[1]
    np.save(target, np.memmap(source, np.float32, "r").reshape(-1, dim))


def to_word2vec(source: Path, target: Path, binary: bool = False) -> None:
    from gensim.models import KeyedVectors

    rows = np.load(source, mmap_mode="r")
    words = KeyedVectors(rows.shape[1])
    words.add_vectors([str(i) for i in range(rows.shape[0])], rows)
    words.save_word2vec_format(str(target), binary=binary)


def to_word2vec_binary(source: Path, target: Path) -> None:
    to_word2vec(source, target, binary=True)


def from_word2vec(source: Path, target: Path, **options: bool) -> None:
    from gensim.models import KeyedVectors

    np.save(target, KeyedVectors.load_word2vec_format(str(source), **options).vectors)


def from_word2vec_binary(source: Path, target: Path) -> None:
    from_word2vec(source, target, binary=True)


def from_glove(source: Path, target: Path) -> None:
    from_word2vec(source, target, no_header=True)


def rival(name: str, source: Path, target: Path) -> None:
    """Run one of them in this process and print what it took."""
    modules = {"safetensors": ["safetensors", "safetensors.numpy"], "gensim": ["gensim.models"]}
    needed = next(case.module for case in CASES if case.rival == name)
    for module in modules.get(needed, [needed]):
        __import__(module)
    begin, cpu = time.perf_counter(), time.process_time()
    globals()[name](source, target)
    sync(target)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = most_resident("self")
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_resident": peak}))


# --- files ----------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def make_rows(folder: Path, rows: int, dim: int) -> None:
    """x.npy: weights as they come out of training, with zeros, -0.0 and NaN among them."""
    out = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, dim))
    random = np.random.default_rng(1)
    for first, end in blocks(rows, dim):
        part = random.standard_normal((end - first, dim), dtype=np.float32) * np.float32(0.05)
        out[first:end] = part.astype(np.float16)  # half the bits are noise, as compressors meet it
    out[0, :3] = (0.0, -0.0, np.nan)
    out.flush()


def make_source(name: str, folder: Path) -> None:
    """One of the files that cases read, out of x.npy."""
    rows = np.load(folder / "x.npy", mmap_mode="r")
    path = folder / name
    chunk = chunk_of(*rows.shape)
    if name == "x.h5":
        to_hdf5(folder / "x.npy", path)
    elif name == "chunked.h5":
        to_hdf5(folder / "x.npy", path, chunks=chunk)
    elif name == "gzip.h5":
        to_hdf5_gzip(folder / "x.npy", path)
    elif name == "lzf.h5":
        to_hdf5(folder / "x.npy", path, chunks=chunk, shuffle=True, compression="lzf")
    elif name in ("x.vec", "x.glove.txt"):
        few = max(1, rows.shape[0] // TEXT_SHARE)
        line = " ".join(["%.9g"] * rows.shape[1])  # as many digits as float32 needs
        with path.open("w") as text:
            if name == "x.vec":
                text.write(f"{few} {rows.shape[1]}\n")
            for i in range(few):
                text.write(f"word{i} {line % tuple(rows[i].tolist())}\n")
    elif name == "few.npy":
        np.save(path, rows[: max(1, rows.shape[0] // TEXT_SHARE)])
    elif name == "x.w2v.bin":
        with path.open("wb") as file:
            file.write(b"%d %d\n" % rows.shape)
            write_words(file, rows, lambda i, row: b"word%d %b\n" % (i, row))
    elif name == "x.ft.bin":
        make_fasttext(path, rows)
    else:
        make: dict[str, Callable[[Path, Path], None]] = {
            "x.npz": to_npz,
            "deflated.npz": to_deflated,
            "x.fvecs": to_fvecs,
            "x.fbin": to_fbin,
            "x.raw": to_raw,
            "x.pt": to_torch,
            "x.safetensors": to_safetensors,
        }
        make[name](folder / "x.npy", path)


def write_words(file: BinaryIO, rows: Any, text: Callable[[int, bytes], bytes]) -> None:
    for first, end in blocks(*rows.shape):
        part = np.ascontiguousarray(rows[first:end])
        file.write(b"".join(text(first + i, row.tobytes()) for i, row in enumerate(part)))


def make_fasttext(path: Path, rows: Any) -> None:
    """A model of words without n-grams: dictionary, input matrix, an output matrix of zeros."""
    count, dim = rows.shape
    with path.open("wb") as file:
        file.write(struct.pack("<2i", 793712314, 12))
        file.write(struct.pack("<12id", dim, 5, 5, 5, 5, 1, 2, 2, 0, 0, 0, 100, 1e-4))
        file.write(struct.pack("<3iqq", count, count, 0, count, -1))
        entry = b"\0" + struct.pack("<qb", 1, 0)
        for first, end in blocks(count, dim):
            file.write(b"".join(b"word%d%b" % (i, entry) for i in range(first, end)))
        file.write(struct.pack("<?qq", False, count, dim))
        for first, end in blocks(count, dim):
            rows[first:end].tofile(file)
        file.write(struct.pack("<?qq", False, 1, dim) + bytes(4 * dim))


def drop_caches(folder: Path) -> str:
    """Returns how: of the whole machine, or of the files alone."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "of the files"
    return "of the machine"


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


# --- runs -----------------------------------------------------------------------------------------


def most_resident(process: int | str) -> int:
    """Bytes: what the kernel has seen of it; 0 of one that has ended."""
    status = Path(f"/proc/{process}/status").read_text()
    return max((int(n) << 10 for n in re.findall(r"VmHWM:\s*(\d+)", status)), default=0)


def watch(process: subprocess.Popen[str]) -> int:
    """Wait for its end; the most bytes that were resident, by samples of the kernel's own maximum.

    wait4() tells it too, but counts the memory of the process that it was forked from.
    """
    peak = 0
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # has just ended
            peak = max(peak, most_resident(process.pid))
        try:
            process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue
        return peak


class Run:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.bytes = QUICK_BYTES if arguments.quick else arguments.size
        self.rows = max(1, self.bytes // (4 * arguments.dim))

    def flat(self, options: tuple[str, ...]) -> list[str]:
        """Options, with the columns of files that do not tell them."""
        return [*options, *(["--dim", str(self.arguments.dim)] if options == FLAT else [])]

    def convert(self, case: Case) -> dict[str, Any]:
        """Run embermap. Its time, the most memory, and how it read and wrote."""
        target = self.folder / case.target
        action = "import" if case.target.startswith("store/") else "convert"
        command = [self.arguments.embermap, action, str(self.folder / case.source), str(target)]
        command += ["--json", "--memory", self.arguments.memory, *self.flat(case.options)]
        begin, cpu = time.perf_counter(), cpu_of_children()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            peak = watch(process)
            seconds = time.perf_counter() - begin
            assert process.stdout is not None
            text = process.stdout.read()
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        told = json.loads(text)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_of_children() - cpu,
            "peak_resident": peak,
            "reading": told.get("reading", ""),
            "writing": told.get("writing", ""),
        }

    def copy(self) -> dict[str, Any]:
        """`cp` of as many bytes as the rows have."""
        target = self.folder / "copied"
        begin, cpu = time.perf_counter(), cpu_of_children()
        subprocess.run(["cp", "--sparse=never", str(self.folder / "x.npy"), target], check=True)
        sync(target)
        seconds = time.perf_counter() - begin
        target.unlink()
        return {"seconds": seconds, "cpu_seconds": cpu_of_children() - cpu}

    def other(self, case: Case) -> dict[str, Any]:
        target = self.folder / ("other-" + case.target)
        command = [sys.executable, __file__, "--rival", case.rival]
        done = subprocess.run(
            [*command, str(self.folder / case.source), str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        remove(target)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def check(self, case: Case) -> None:
        """Convert, and back where it is not to .npy; exit unless rows are as they were."""
        self.convert(case)
        target = self.folder / case.target
        back = target
        if case.target != "y.npy":
            back = self.folder / "back.npy"
            action = "export" if case.target.startswith("store/") else "convert"
            command = [self.arguments.embermap, action, str(target), str(back), "--quiet"]
            subprocess.run([*command, *self.flat(case.back)], check=True)
        rows, got = np.load(self.folder / "x.npy", mmap_mode="r"), np.load(back, mmap_mode="r")
        few = got.shape[0] if case.source in TEXTS else rows.shape[0]
        same = got.shape == (few, rows.shape[1])
        for first, end in blocks(few, rows.shape[1]) if same else ():
            same = same and rows[first:end].astype(got.dtype).tobytes() == got[first:end].tobytes()
        if not same:
            sys.exit(f"convert.py: {case.name}: other rows came out: nothing was timed")
        remove(target if not case.target.startswith("store/") else target.parent)
        if back != target:
            remove(back)

    def case(self, case: Case) -> dict[str, Any]:
        source = self.folder / case.source
        if not source.exists():
            make_source(case.source, self.folder)
        self.check(case)
        there = importlib.util.find_spec(case.module) is not None if case.module else False
        ours, copied, theirs = [], [], []
        sides = ["ours", *(["copy"] if case.copy else []), *(["other"] if there else [])]
        how = ""
        for number in range(self.arguments.rounds):
            first = number % len(sides)
            for side in sides[first:] + sides[:first]:
                how = drop_caches(self.folder)
                if side == "ours":
                    ours.append(self.convert(case))
                    remove(self.folder / case.target.split("/")[0])
                elif side == "copy":
                    copied.append(self.copy())
                else:
                    theirs.append(self.other(case))
                    if "error" in theirs[-1]:
                        sides.remove("other")
        result = self.result(case, ours, how)
        if copied:
            result["cp_ratio"] = ratio(ours, copied)
            result["cp_cpu_ratio"] = ratio(ours, copied, "cpu_seconds")
        if theirs:
            result["beside"] = case.module
        if theirs and "error" in theirs[-1]:
            result["error"] = theirs[-1]["error"]
        elif theirs:
            result["other_ratio"] = ratio(ours, theirs)
            result["other_cpu_ratio"] = ratio(ours, theirs, "cpu_seconds")
            result["other_peak_resident"] = max(one["peak_resident"] for one in theirs)
        if case.source != "x.npy":
            remove(source)
        return result

    def result(
        self, case: Case, ours: list[dict[str, Any]], how: str, row_bytes: int = 0
    ) -> dict[str, Any]:
        """What is told of embermap's own runs."""
        if row_bytes == 0:
            share = TEXT_SHARE if case.source in TEXTS else 1
            row_bytes = max(1, self.rows // share) * self.arguments.dim * 4
        seconds = statistics.median(one["seconds"] for one in ours)
        cpu = statistics.median(one["cpu_seconds"] for one in ours)
        return {
            "case": case.name,
            "bytes": row_bytes,
            "source_bytes": (self.folder / case.source).stat().st_size,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "cpu_seconds_per_gb": cpu / row_bytes * 1e9,
            "peak_resident": max(one["peak_resident"] for one in ours),
            "reading": ours[-1]["reading"],
            "writing": ours[-1]["writing"],
            "cache_dropped": how,
            "beside": "",
            "bytes_per_second": row_bytes / seconds,
        }

    def large(self) -> Iterator[dict[str, Any]]:
        """What files larger than any memory take of it. One conversion each."""
        quick = self.arguments.quick
        dim = self.arguments.dim
        rows = max(1, (2 * QUICK_BYTES if quick else LARGE_BYTES) // (4 * dim))
        sparse_rows = SPARSE_ROWS // 1000 if quick else SPARSE_ROWS
        for name, shape, dense in (
            (f"{rows * dim * 4 / 1e9:.2g} GB of npy", (rows, dim), True),
            (f"sparse npy, {sparse_rows:.0e} rows", (sparse_rows, SPARSE_DIM), False),
        ):
            source = self.folder / "large.npy"
            out = np.lib.format.open_memmap(source, "w+", np.float32, shape)
            out[-1] = 1
            out.flush()
            offset = int(out.offset)
            del out
            if dense:  # written, not mapped: nothing of it stays in memory
                block = np.random.default_rng(1).standard_normal(4 << 20, dtype=np.float32)
                left = shape[0] * shape[1] * 4
                with source.open("r+b") as file:
                    file.seek(offset)
                    while left > 0:
                        left -= file.write(block.tobytes()[:left])
                    os.fsync(file.fileno())
            for target in ("large.safetensors",) if dense else ("other.npy",):
                how = drop_caches(self.folder)
                ending = target.partition(".")[2]
                case = Case(f"{name} to {ending}", source.name, target)
                found = self.convert(case)
                yield self.result(case, [found], how, shape[0] * shape[1] * 4)
                remove(self.folder / target)
            remove(source)


def cpu_of_children() -> float:
    """Seconds of processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], of: str = "seconds") -> float:
    """How many times as fast: the median of the rounds."""
    return statistics.median(b[of] / max(a[of], 1e-3) for a, b in zip(ours, theirs, strict=True))


def line_of(result: dict[str, Any]) -> str:
    text = f"{result['case']}: {result['bytes_per_second'] / 1e6:,.0f} MB/s"
    text += f", {result['cpu_seconds_per_gb']:.2f} CPU s/GB"
    if "cp_ratio" in result:
        text += f", {result['cp_ratio']:.2f} of cp (CPU {result['cp_cpu_ratio']:.2f})"
    if "other_ratio" in result:
        text += f", {result['other_ratio']:.2f} times {result['beside']}"
        text += f" (CPU {result['other_cpu_ratio']:.2f})"
    if "error" in result:
        text += f", {result['beside']}: {result['error']}"
    return text + f", {result['peak_resident'] / 2**20:.0f} MiB resident"


def parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"not a size such as 8GiB: {text!r}")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1: {text}")
    return value


def main() -> None:
    if sys.argv[1:2] == ["--rival"]:
        rival(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=parse_size, default=parse_size("4GiB"), help="bytes of rows (4GiB)")
    add("--dim", type=positive, default=256)
    add("--rounds", type=positive, default=3)
    add("--memory", default="256MiB", help="embermap's --memory")
    add(
        "--cases", action="append", metavar="PATTERN", help="these cases, as 'hdf5*' (default: all)"
    )
    add("--quick", action="store_true", help="few rows, one round: a try, not a result")
    add("--large", action="store_true", help="20 GB and a billion sparse rows, for their memory")
    add("--folder", type=Path, help="where the files are made (default: a new one)")
    add("--embermap", default=os.environ.get("EMBERMAP_CLI") or shutil.which("embermap"))
    add("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    if arguments.embermap is None:
        sys.exit("convert.py: there is no embermap on the PATH; --embermap names it")
    if arguments.quick:
        arguments.rounds = 1
    patterns = arguments.cases or ["*"]
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, p) for p in patterns)]
    if not cases and not (arguments.large and arguments.cases):
        parser.error(f"--cases: there are {', '.join(case.name for case in CASES)}")
    load = os.getloadavg()[0]
    results = []
    with tempfile.TemporaryDirectory(prefix="convert-", dir=arguments.folder) as name:
        run = Run(arguments, Path(name))
        make_rows(run.folder, run.rows, arguments.dim)
        for case in cases:
            if importlib.util.find_spec("torch" if case.source == "x.pt" else "numpy") is None:
                print(f"{case.name}: left out, there is no torch to make the file")
                continue
            results.append(run.case(case))
            print(line_of(results[-1]), flush=True)
        for found in run.large() if arguments.large else ():
            results.append(found)
            print(line_of(found), flush=True)
    if arguments.json is not None:
        settings = {
            "rows": run.rows,
            "dim": arguments.dim,
            "rounds": arguments.rounds,
            "quick": arguments.quick,
            "memory": arguments.memory,
        }
        cores = len(os.sched_getaffinity(0))
        report = {"cores": cores, "load": load, "settings": settings, "cases": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
