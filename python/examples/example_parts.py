"""What the examples share: reading texts, folders of their own, memory of the process, sizes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

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
