"""Sorted runs of counted pairs, in files, merged as they come together.

What is added is kept in memory until there is no more room; then it is sorted, summed and written
as a run, two .npy files of equal length with the numbers of pairs and their counts. Runs of about
one size are merged when there are eight of them, block by block. `counts.json`, replaced
atomically, says which runs there are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .._errors import FormatError, LockedError
from . import _files

Keys = NDArray[np.uint64]
Values = NDArray[Any]  # int64 or float64
Pairs = tuple[Keys, Values]

_MANIFEST = "counts.json"
_FAN_IN = 8  # runs of one level that are merged into one of the next
_NEAR = 2.0**62  # sums that may be beyond int64, and are looked at exactly
_PAIR_BYTES = 64  # of memory for a pair that is being sorted: 16, their order, and copies


@dataclass(frozen=True)
class Run:
    """Sorted pairs in two files."""

    name: str
    pairs: int
    level: int


class Runs:
    """The files of counts, and what is not in them yet."""

    def __init__(
        self,
        path: Path,
        classes: int,
        wide: np.dtype[Any],
        memory: int,
        *,
        scratch: bool,
        resume: bool,
    ) -> None:
        self.path = path
        self.classes = classes
        self.wide = wide
        self.memory = memory
        self.scratch = scratch
        self.process = os.getpid()
        self.closed = False
        self.buffer: list[Pairs] = []
        self.buffered = 0
        self.sorted = True  # whether the buffer is one sorted block without repeated pairs
        self.runs: list[Run] = []
        self.lock = (path / "lock").open("ab")
        try:
            self._begin(resume)
        except BaseException:
            self.lock.close()
            raise
        self.next = 1 + max((int(run.name[4:]) for run in self.runs), default=0)

    def _begin(self, resume: bool) -> None:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LockedError(error.errno, "counts are in use elsewhere", str(self.path)) from None
        if resume:
            self.read_manifest()
            self._sweep()
        elif (self.path / _MANIFEST).exists():
            raise FileExistsError(
                errno.EEXIST, "counts are there; resume() goes on with them", str(self.path)
            )
        else:
            self.write_manifest()

    def _sweep(self) -> None:
        """Remove what a process that was killed left: files of no run."""
        named = {run.name for run in self.runs}
        for file in self.path.glob("run-*.npy"):
            if file.name.partition(".")[0] not in named:
                file.unlink()
        for pattern in (".run-*.npy.*", f".{_MANIFEST}.*"):
            for file in self.path.glob(pattern):
                file.unlink()

    def close(self) -> None:
        """Write what is counted, or remove the files of temporary counts."""
        if self.closed or os.getpid() != self.process:
            return  # in a forked child the directory is its parent's
        if not self.scratch:
            self.spill()
        self.closed = True
        self.buffer.clear()
        self.lock.close()
        if self.scratch:
            shutil.rmtree(self.path, ignore_errors=True)

    def read_manifest(self) -> None:
        """Take the runs of an earlier process. Raises FileNotFoundError, FormatError."""
        manifest = self.path / _MANIFEST
        if not manifest.exists():
            raise FileNotFoundError(errno.ENOENT, "no counts", str(manifest.parent))
        try:
            found = json.loads(manifest.read_text())
            runs = [
                Run(str(run["name"]), int(run["pairs"]), int(run["level"])) for run in found["runs"]
            ]
            kind, classes = found["kind"], found["classes"]
            whole = found["format"] == "embermap counts" and found["version"] == 1
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{str(manifest)!r} is not that of counts: {error}") from None
        if not whole:
            raise FormatError(f"{str(manifest)!r} is not one of counts of version 1")
        if classes != self.classes or kind != self.wide.name:
            raise FormatError(
                f"{str(manifest.parent)!r} has counts of {classes} classes in {kind}, not of "
                f"{self.classes} in {self.wide.name}"
            )
        for run in runs:
            if not (run.name.startswith("run-") and run.name[4:].isdecimal()):
                raise FormatError(f"{str(manifest)!r} names a run {run.name!r}")
            keys, counts = self.files_of(run)
            if (keys.dtype, counts.dtype) != (np.dtype(np.uint64), self.wide) or not (
                keys.shape == counts.shape == (run.pairs,)
            ):
                raise FormatError(f"run {run.name!r} of {str(manifest.parent)!r} is damaged")
        self.runs = runs

    def write_manifest(self) -> None:
        """Say which runs there are. What is not named is not there."""
        text = json.dumps(
            {
                "format": "embermap counts",
                "version": 1,
                "classes": self.classes,
                "kind": self.wide.name,
                "runs": [vars(run) for run in self.runs],
            }
        )
        with _files.replacing(self.path / _MANIFEST) as file:
            file.write(text.encode())

    def clear(self) -> None:
        """Forget all counts."""
        old, self.runs = self.runs, []
        self.buffer.clear()
        self.buffered, self.sorted = 0, True
        self.write_manifest()
        self._remove(old)

    def room(self) -> int:
        """Pairs that may be in memory."""
        return self.memory // _PAIR_BYTES

    def append(self, keys: Keys, values: Values) -> None:
        """Count pairs in any order, repeated or not: at most half as many as there is room for."""
        self.buffer.append((keys, values))
        self.buffered += len(keys)
        self.sorted = False
        if self.buffered >= self.room():
            self.sort()
            # Where most pairs repeat they stay in memory.
            if self.buffered > self.room() // 2:
                self.spill()

    def sort(self) -> Pairs:
        """The buffer as one sorted block without repeated pairs."""
        if not self.sorted or not self.buffer:
            pairs = sum_pairs(self.buffer, self.wide)
            self.buffer[:] = [pairs]
            self.buffered = len(pairs[0])
            self.sorted = True
        return self.buffer[0]

    def spill(self) -> None:
        """Write the buffer as a run."""
        pairs = self.sort()
        if len(pairs[0]) == 0:
            return
        run = self._write_run(iter([pairs]), 0)
        self.runs.append(run)
        self.write_manifest()
        self.buffer.clear()
        self.buffered, self.sorted = 0, True
        self._tidy()

    def _tidy(self) -> None:
        level = 0
        while True:
            same = [run for run in self.runs if run.level == level]
            if len(same) >= _FAN_IN:
                self.merge_runs(same, level + 1)
            elif not any(run.level > level for run in self.runs):
                return
            level += 1

    def merge_runs(self, runs: list[Run], level: int) -> None:
        """Put one run in the place of several."""
        merged = self._write_run(self.merged_blocks([self.files_of(run) for run in runs]), level)
        kept = [run for run in self.runs if run not in runs]
        self.runs = [*kept, merged] if merged.pairs else kept
        self.write_manifest()
        self._remove(runs if merged.pairs else [*runs, merged])

    def _write_run(self, blocks: Iterator[Pairs], level: int) -> Run:
        name = f"run-{self.next:06}"
        self.next += 1
        path = self.path
        pairs = 0
        # Their headers are written last, when the number of pairs is known; they have room for it.
        with (
            _files.replacing(path / f"{name}.keys.npy") as keys_file,
            _files.replacing(path / f"{name}.counts.npy") as counts_file,
        ):
            outputs: list[tuple[IO[bytes], np.dtype[Any]]] = [
                (keys_file, np.dtype(np.uint64)),
                (counts_file, self.wide),
            ]
            for file, dtype in outputs:
                file.write(_files.header((0,), dtype))
            for keys, values in blocks:
                keys_file.write(np.ascontiguousarray(keys).data)
                counts_file.write(np.ascontiguousarray(values).data)
                pairs += len(keys)
            for file, dtype in outputs:
                file.seek(0)
                file.write(_files.header((pairs,), dtype))
        return Run(name, pairs, level)

    def files_of(self, run: Run) -> Pairs:
        """The pairs of a run, mapped; they stay readable when its files are removed."""
        path = self.path
        try:
            keys = np.load(path / f"{run.name}.keys.npy", mmap_mode="r" if run.pairs else None)
            counts = np.load(path / f"{run.name}.counts.npy", mmap_mode="r" if run.pairs else None)
        except (OSError, ValueError) as error:
            raise FormatError(
                f"run {run.name!r} of {str(path)!r} cannot be read: {error}"
            ) from None
        return keys, counts

    def _remove(self, runs: list[Run]) -> None:
        for run in runs:
            for part in ("keys", "counts"):
                with contextlib.suppress(FileNotFoundError):
                    (self.path / f"{run.name}.{part}.npy").unlink()

    def merged_blocks(self, sources: list[Pairs]) -> Iterator[Pairs]:
        """The pairs of several sorted sources, sorted and summed, block by block."""
        step = max(256, self.room() // max(1, len(sources)))
        places = [0] * len(sources)
        while True:
            left = [i for i, (keys, _) in enumerate(sources) if places[i] < len(keys)]
            if not left:
                return
            # Every source has been read up to here, or as far as it goes.
            bound = min(sources[i][0][min(places[i] + step, len(sources[i][0])) - 1] for i in left)
            parts: list[Pairs] = []
            for i in left:
                keys, values = sources[i]
                window = keys[places[i] : places[i] + step]
                count = int(np.searchsorted(window, bound, side="right"))
                parts.append(
                    (np.array(window[:count]), np.array(values[places[i] : places[i] + count]))
                )
                places[i] += count
            keys, values = sum_pairs(parts, self.wide)
            kept = values != 0
            yield keys[kept], values[kept]

    def sources(self) -> list[Pairs]:
        """All blocks of sorted pairs there are; a pair may be in several."""
        found = [self.files_of(run) for run in self.runs]
        if self.buffer:
            found.append(self.sort())
        return found


def sum_pairs(parts: list[Pairs], wide: np.dtype[Any]) -> Pairs:
    """Pairs of several blocks, sorted, each once with the sum of its counts."""
    if not parts:
        return np.empty(0, np.uint64), np.empty(0, wide)
    keys = np.concatenate([keys for keys, _ in parts])
    values = np.concatenate([values for _, values in parts])
    if len(keys) == 0:
        return keys, values
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    if wide.kind != "f":
        near = np.add.reduceat(np.abs(values.astype(np.float64)), starts) >= _NEAR
        for at in near.nonzero()[0]:
            stop = starts[at + 1] if at + 1 < len(starts) else len(values)
            _check_sum(values[starts[at] : stop].tolist())
    return keys[starts], np.add.reduceat(values, starts)


def add_checked(sums: Values, where: NDArray[np.bool_], values: Values) -> None:
    """Add to some sums. Raises OverflowError where 64 bits do not hold one."""
    if sums.dtype.kind != "f":
        both = np.abs(sums[where].astype(np.float64)) + np.abs(values.astype(np.float64))
        for at in (both >= _NEAR).nonzero()[0]:
            _check_sum([int(sums[where][at]), int(values[at])])
    sums[where] += values


def _check_sum(values: list[int]) -> None:
    if not -(2**63) <= sum(values) < 2**63:
        raise OverflowError(f"the count of a pair is {sum(values)}, which 64 bits do not hold")
