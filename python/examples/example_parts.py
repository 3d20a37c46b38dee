"""What the examples share: reading texts, folders of their own, runs that go on, memory, sizes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import math
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import embermap as em
import numpy as np
from numpy.typing import NDArray

DICTIONARY = Path("/usr/share/dictd/gcide.dict.dz")
_WORD = re.compile(r"[^\W\d_]+")  # a run of letters


class DemoError(Exception):
    """A cause the user can act on; shown as one line."""


# --- text -----------------------------------------------------------------------------------------


def open_text(path: Path) -> IO[bytes]:
    """Open a text for reading, through gzip if its first bytes say so (also dictzip's `.dz`)."""
    file = path.open("rb")
    try:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return gzip.open(file) if packed else file  # type: ignore[return-value]


def text_pieces(path: Path, piece_bytes: int = 1 << 20) -> Iterator[bytes]:
    """Yield the text in pieces of about `piece_bytes`, each ending between two words."""
    rest = b""
    with open_text(path) as file:
        while block := file.read(piece_bytes):
            block = rest + block
            end = max(block.rfind(b"\n\n"), block.rfind(b" ")) + 1
            yield block[:end]
            rest = block[end:]
    yield rest


def read_words(paths: Sequence[Path]) -> tuple[list[str], NDArray[np.int32], int]:
    """Read texts into lower-cased runs of letters, numbered in order of first occurrence.

    Returns the words, the running text as their numbers, shape (N,), and its size in bytes,
    unpacked. It is read in pieces: what stays in memory is four bytes a word and the vocabulary.
    """
    seen: defaultdict[str, int] = defaultdict()
    seen.default_factory = seen.__len__  # an unseen word gets the next free number
    parts: list[NDArray[np.int32]] = []
    text_bytes = 0
    for path in paths:
        try:
            for piece in text_pieces(path):
                text_bytes += len(piece)
                found = _WORD.findall(piece.decode("utf-8", "replace").lower())
                parts.append(np.fromiter(map(seen.__getitem__, found), np.int32, len(found)))
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            advice = ""
            if path == DICTIONARY:
                advice = "; install it with `apt-get install dict-gcide`, or name a --text"
            raise DemoError(f"{path}: {reason}{advice}") from error
    text = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return list(seen), text, text_bytes


def hash_ngrams(words: NDArray[Any], n: int, rows: int) -> NDArray[np.int64]:
    """Rows of the n-grams of words, or bytes, by number: (len(words) - n + 1,) in [0, rows).

    Words are mixed in one after the other (SplitMix64's finalizer), so that their order matters;
    n-grams of different n begin differently.
    """
    count = max(0, len(words) - n + 1)
    mixed = np.full(count, n, np.uint64)
    for i in range(n):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed += words[i : i + count].astype(np.uint64) + np.uint64(1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed ^= mixed >> np.uint64(shift)
            mixed *= np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(rows)).astype(np.int64)


# --- a folder of its own --------------------------------------------------------------------------


def prepare_folder(folder: Path, own: Sequence[str], overwrite: bool) -> None:
    """Make the folder; empty it only if asked to, and only if all in it is of the names `own`."""
    try:
        if folder.exists():
            names = sorted(entry.name for entry in folder.iterdir())
            strange = [name for name in names if name not in own]
            if strange:
                raise DemoError(
                    f"{folder} holds {strange[0]!r}, which this example did not make; "
                    "choose another folder with --store"
                )
            if names and not overwrite:
                raise DemoError(
                    f"{folder} holds an earlier run; replace it with --overwrite "
                    "or choose another folder with --store"
                )
            remove_files(folder, own)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"{folder}: {error.strerror}") from error


def remove_files(folder: Path, own: Sequence[str]) -> None:
    """Remove what has the names `own`, and the folder if nothing else is in it."""
    for name in own:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


class Run:
    """A folder with a training that can be killed at any moment and goes on with the same command.

    It has the store `tables/`, the file of `embermap.torch.save` `model.pt`, and `run.json`: the
    options, and how far it is. Options that decide the result must be those of before.
    """

    OWN = ("run.json", "run.json.tmp", "tables", "model.pt", "model.pt.next", "model.pt.part")

    def __init__(self, folder: Path, options: Mapping[str, Any], overwrite: bool) -> None:
        """Make the folder, or find what an earlier run has left there.

        Raises DemoError: it has files of somebody else, a run that is complete, or one with other
        options, and overwrite is false.
        """
        self.folder = folder
        self._options = dict(options)
        self._file = folder / "run.json"
        earlier = None
        if not overwrite and self._file.is_file():
            earlier = json.loads(self._file.read_text(encoding="utf-8"))
        if earlier is None or earlier["stage"] == "complete":
            prepare_folder(folder, self.OWN, overwrite)
        else:
            for name, value in self._options.items():
                if earlier["options"].get(name) != value:
                    raise DemoError(
                        f"{folder} holds an interrupted run with another "
                        f"--{name.replace('_', '-')}; go on with the same options, replace it with "
                        "--overwrite, or choose another folder with --store"
                    )
            if earlier["stage"] != "begun":  # killed before it had saved anything
                remove_files(folder, self.OWN)
                folder.mkdir(parents=True, exist_ok=True)
        self.begun = earlier is not None and earlier["stage"] == "begun"
        if self.begun:
            print(f"{folder} has a run that did not end: going on from what it saved last")
        else:
            self._note("new")

    @property
    def tables(self) -> Path:
        """Where the store is."""
        return self.folder / "tables"

    @property
    def checkpoint(self) -> Path:
        """The file of `embermap.torch.save`."""
        return self.folder / "model.pt"

    def begin(self) -> None:
        """Something is saved: from here on a run goes on."""
        self._note("begun")

    def end(self, keep: bool) -> None:
        """All is done: remove the folder, or keep it and say what it has."""
        if keep:
            self._note("complete")
            print(f"Kept in {self.folder}: the store tables/, model.pt")
        else:
            remove_files(self.folder, self.OWN)
            print(f"Removed {self.folder} (--keep keeps it)")

    def _note(self, stage: str) -> None:
        """Write the file, whole or not at all."""
        partial = self._file.with_name("run.json.tmp")
        text = json.dumps({"options": self._options, "stage": stage}) + "\n"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._file)


def step_or_save(step: Callable[[], Any], save: Callable[[], Any]) -> None:
    """A step of one table; where the redo log has no room for it, after a checkpoint.

    The step that is refused has changed nothing, so that the checkpoint is of the step before.
    """
    try:
        step()
    except em.LogFullError:
        save()
        step()


# --- command line ---------------------------------------------------------------------------------


def at_least(smallest: float, kind: type = int) -> Callable[[str], Any]:
    """An argument type: a number of this kind, not below `smallest`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not smallest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"not a number of at least {smallest:g}: {text!r}")
        return value

    return parse


def add_run_options(parser: argparse.ArgumentParser, store: str, memory: str) -> None:
    """The options of every example that trains: where, through how much memory, on what."""
    add = parser.add_argument
    add(
        "--store",
        type=Path,
        default=Path(store),
        metavar="DIR",
        help="folder for the store and the checkpoint",
    )
    add("--keep", action="store_true", help="keep that folder when done")
    add("--overwrite", action="store_true", help="replace an earlier run in that folder")
    add("--memory", type=parse_size, default=memory, metavar="SIZE", help="budget of the store")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto: on a GPU if there is one",
    )
    add("--seed", type=at_least(0), default=1, help="of the data, the rows and their order")


def pick_device(choice: str) -> Any:
    """The torch.device for "auto", "cpu" or "cuda"."""
    import torch  # not all examples need it

    if choice == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: PyTorch finds no GPU here")
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(choice)


def summary(rows: Mapping[str, str]) -> None:
    """Print what a run has found, a line each."""
    width = max(map(len, rows))
    print("Summary")
    for name, value in rows.items():
        print(f"  {name:{width}}  {value}")


def pages_line(*tables: Any) -> str:
    """What tables did with their pages, from `Table.stats()`, in words."""
    total = {
        field: sum(table.stats()[field] for table in tables)
        for field in ("hits", "misses", "bytes_read", "bytes_written")
    }
    share = total["hits"] / max(total["hits"] + total["misses"], 1)
    return (
        f"{share:.1%} found in memory; {mib(total['bytes_read'])} read, "
        f"{mib(total['bytes_written'])} written"
    )


# --- memory ---------------------------------------------------------------------------------------


def give_memory_back() -> None:
    """Have the C library return freed memory to the system at once.

    It keeps it by the tens of MiB once it has seen large blocks, and hands it back at odd times:
    what is measured would be its, not the store's and the training's.
    """
    with contextlib.suppress(OSError, AttributeError):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 256 << 10)


def memory_of_process(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS (resident), VmHWM (the most so far), RssAnon."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise DemoError(f"/proc/self/status has no {field}")


def forget_peak_memory() -> bool:
    """Let VmHWM start again from what is resident now. False where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


# --- sizes ----------------------------------------------------------------------------------------


def mib(n: float) -> str:
    """Bytes in the binary unit that memory is given in."""
    return f"{n / 2**20:.1f} MiB"


def parse_size(text: str) -> int:
    """Bytes of "64MiB", "1.5GB", "1000000"."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(?:([kmgt])(i?)b?|b)?", text.strip().lower())
    number, unit, binary = match.groups() if match else ("0", None, None)
    power = " kmgt".index(unit) if unit else 0
    size = int(float(number) * (1024 if binary else 1000) ** power)
    if size == 0:
        raise argparse.ArgumentTypeError(f"not a size such as 64MiB: {text!r}")
    return size
