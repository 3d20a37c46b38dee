#!/usr/bin/env python3
"""Files turned into one another: `embermap convert` beside `cp` and the formats' own readers.

    python tools/bench/convert.py --size 20GiB
    python tools/bench/convert.py --quick --json results.json
    python tools/bench/convert.py --cases 'hdf5*' --rounds 5

Makes one table in every format, converts each once, and compares the rows that come out bit by bit
before anything is timed. Then the sides take turns, round by round: embermap, `cp` of as many
bytes, and a program that does the same with h5py, NumPy, safetensors, torch or gensim. All write
to the same disk and sync what they wrote; the page cache is dropped before each. What is reported
is the median of the rounds' ratios, the rate in bytes of rows, and the most memory that was
resident. embermap's time is that of its whole process; the others' begins after their imports.

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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

QUICK_BYTES = 24 << 20
TEXT_SHARE = 16  # word vectors in text are made of so much fewer rows: they take a processor


class Case(NamedTuple):
    name: str
    source: str  # a file that SOURCES makes
    target: str
    options: tuple[str, ...] = ()
    rival: str = ""  # a function of RIVALS; empty: cp alone
    module: str = ""  # that it needs
    copy: bool = True  # whether cp of the rows' bytes does the same


CASES = (
    Case("npy to npy", "x.npy", "y.npy", (), "numpy", "numpy"),
    Case("npy to npy, float16", "x.npy", "y.npy", ("--dtype", "float16"), "numpy_half", "numpy"),
    Case("npy to safetensors", "x.npy", "y.safetensors", (), "to_safetensors", "safetensors"),
    Case("npy to torch", "x.npy", "y.pt", (), "to_torch", "torch"),
    Case("npy to hdf5", "x.npy", "y.h5", (), "to_hdf5", "h5py"),
    Case("npy to hdf5, gzip", "x.npy", "y.h5", ("--gzip", "1"), "to_hdf5_gzip", "h5py", False),
    Case("safetensors to npy", "x.safetensors", "y.npy", (), "from_safetensors", "safetensors"),
    Case("torch to npy", "x.pt", "y.npy", (), "from_torch", "torch"),
    Case("hdf5 to npy", "x.h5", "y.npy", (), "from_hdf5", "h5py"),
    Case("hdf5, chunked, to npy", "chunked.h5", "y.npy", (), "from_hdf5", "h5py"),
    Case("hdf5, gzip, to npy", "gzip.h5", "y.npy", (), "from_hdf5", "h5py", False),
    Case("hdf5, lzf, to npy", "lzf.h5", "y.npy", (), "from_hdf5", "h5py", False),
    Case("npz to npy", "x.npz", "y.npy", (), "from_npz", "numpy"),
    Case("fvecs to npy", "x.fvecs", "y.npy", (), "from_fvecs", "numpy"),
    Case("word2vec text to npy", "x.vec", "y.npy", (), "from_word2vec", "gensim", False),
    Case("npy into a store", "x.npy", "store/y"),
)


def blocks(rows: int, dim: int) -> Any:
    """Ranges of rows of about 16 MiB."""
    step = max(1, (16 << 20) // (4 * dim))
    return ((first, min(rows, first + step)) for first in range(0, rows, step))


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
    dim = np.load(source, mmap_mode="r").shape[1]
    chunk = (max(1, (1 << 20) // (4 * dim)), dim)
    to_hdf5(source, target, chunks=chunk, shuffle=True, compression="gzip", compression_opts=1)


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


def from_fvecs(source: Path, target: Path) -> None:
    dim = int(np.fromfile(source, np.int32, 1)[0])
    np.save(target, np.memmap(source, np.float32, "r").reshape(-1, dim + 1)[:, 1:])


def from_word2vec(source: Path, target: Path) -> None:
    from gensim.models import KeyedVectors

    np.save(target, KeyedVectors.load_word2vec_format(str(source)).vectors)


def rival(name: str, source: Path, target: Path) -> None:
    """Run one of them in this process and print what it took."""
    modules = {"safetensors": ["safetensors", "safetensors.numpy"], "gensim": ["gensim.models"]}
    needed = next(case.module for case in CASES if case.rival == name)
    for module in modules.get(needed, [needed]):
        __import__(module)
    begin = time.perf_counter()
    globals()[name](source, target)
    sync(target)
    seconds = time.perf_counter() - begin
    peak = most_resident("self")
    print(json.dumps({"seconds": seconds, "peak_resident": peak}))


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
    chunk = (max(1, (1 << 20) // (4 * rows.shape[1])), rows.shape[1])
    if name == "x.h5":
        to_hdf5(folder / "x.npy", path)
    elif name == "chunked.h5":
        to_hdf5(folder / "x.npy", path, chunks=chunk)
    elif name == "gzip.h5":
        to_hdf5_gzip(folder / "x.npy", path)
    elif name == "lzf.h5":
        to_hdf5(folder / "x.npy", path, chunks=chunk, shuffle=True, compression="lzf")
    elif name == "x.npz":
        np.savez(path, rows)
    elif name == "x.fvecs":
        with path.open("wb") as file:
            for first, end in blocks(*rows.shape):
                part = np.empty((end - first, rows.shape[1] + 1), np.float32)
                part[:, 1:] = rows[first:end]
                part.view(np.int32)[:, 0] = rows.shape[1]
                file.write(part.tobytes())
    elif name == "x.vec":
        few = max(1, rows.shape[0] // TEXT_SHARE)
        with path.open("w") as text:
            text.write(f"{few} {rows.shape[1]}\n")
            for i in range(few):
                numbers = np.nan_to_num(rows[i])
                text.write(f"word{i} " + " ".join(map(repr, numbers.tolist())) + "\n")
    elif name in ("x.safetensors", "x.pt"):
        {"x.pt": to_torch, "x.safetensors": to_safetensors}[name](folder / "x.npy", path)


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

    def convert(self, case: Case) -> dict[str, Any]:
        """Run embermap. Its time, the most memory, and how it read and wrote."""
        target = self.folder / case.target
        action = "import" if case.target.startswith("store/") else "convert"
        command = [self.arguments.embermap, action, str(self.folder / case.source), str(target)]
        command += ["--json", "--memory", self.arguments.memory, *case.options]
        begin = time.perf_counter()
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
            "peak_resident": peak,
            "reading": told.get("reading", ""),
            "writing": told.get("writing", ""),
        }

    def copy(self, case: Case) -> dict[str, Any]:
        """`cp` of as many bytes as the rows have."""
        target = self.folder / "copied"
        begin = time.perf_counter()
        subprocess.run(["cp", "--sparse=never", str(self.folder / "x.npy"), target], check=True)
        sync(target)
        seconds = time.perf_counter() - begin
        target.unlink()
        return {"seconds": seconds}

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
            subprocess.run(
                [self.arguments.embermap, action, str(target), str(back), "--quiet"], check=True
            )
        rows, got = np.load(self.folder / "x.npy", mmap_mode="r"), np.load(back, mmap_mode="r")
        few = got.shape[0] if case.source == "x.vec" else rows.shape[0]
        same = got.shape == (few, rows.shape[1])
        for first, end in blocks(few, rows.shape[1]) if same else ():
            wanted = rows[first:end].astype(got.dtype)
            if case.source == "x.vec":
                wanted = np.nan_to_num(wanted)
            same = same and wanted.tobytes() == got[first:end].tobytes()
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
        for _ in range(self.arguments.rounds):
            how = drop_caches(self.folder)
            ours.append(self.convert(case))
            remove(self.folder / case.target.split("/")[0])
            if case.copy:
                drop_caches(self.folder)
                copied.append(self.copy(case))
            if case.rival and there and (not theirs or "error" not in theirs[-1]):
                drop_caches(self.folder)
                theirs.append(self.other(case))
        share = TEXT_SHARE if case.source == "x.vec" else 1
        row_bytes = self.rows // share * self.arguments.dim * 4
        result: dict[str, Any] = {
            "case": case.name,
            "bytes": row_bytes,
            "source_bytes": source.stat().st_size,
            "seconds": statistics.median(one["seconds"] for one in ours),
            "peak_resident": max(one["peak_resident"] for one in ours),
            "reading": ours[-1]["reading"],
            "writing": ours[-1]["writing"],
            "cache_dropped": how,
            "beside": case.module if theirs else "",
        }
        result["bytes_per_second"] = row_bytes / result["seconds"]
        if copied:
            result["cp_ratio"] = ratio(ours, copied)
        if theirs and "error" in theirs[-1]:
            result["error"] = theirs[-1]["error"]
        elif theirs:
            result["other_ratio"] = ratio(ours, theirs)
            result["other_peak_resident"] = max(one["peak_resident"] for one in theirs)
        if case.source != "x.npy":
            remove(source)
        return result


def ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """How many times as fast: the median of the rounds."""
    return statistics.median(b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True))


def line_of(result: dict[str, Any]) -> str:
    text = f"{result['case']}: {result['bytes_per_second'] / 1e6:,.0f} MB/s"
    if "cp_ratio" in result:
        text += f", {result['cp_ratio']:.2f} of cp"
    if "other_ratio" in result:
        text += f", {result['other_ratio']:.2f} times {result['beside']}"
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
    if not cases:
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
