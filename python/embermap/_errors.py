"""The exceptions embermap raises beyond Python's own.

Each is also the built-in class one would expect, so that `except KeyError` or `except OSError` work
without naming embermap. Plain built-in classes are raised where they say it all: ValueError (an
argument that cannot be, a closed store), TypeError (a dtype or kind of object that does not fit),
FileExistsError, PermissionError (a write to something read-only), OSError with errno and filename.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CorruptError",
    "CudaError",
    "Error",
    "ForkError",
    "FormatError",
    "LockedError",
    "LogFullError",
    "NotFoundError",
    "RowIdError",
    "StaleError",
    "StoreNotFoundError",
]


class Error(Exception):
    """What all exception classes of embermap have in common."""


class RowIdError(Error, IndexError):
    """A row id outside [0, rows). Nothing has been read or written.

    Attributes:
        id: the first bad id.
        position: its place in the batch, counted in C order.
    """

    id: int
    position: int


class NotFoundError(Error, KeyError):
    """A table, dataset or field that is not there."""

    def __str__(self) -> str:
        # KeyError would print the repr of the text.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class StoreNotFoundError(FileNotFoundError, NotFoundError):
    """There is no store at the path (opened with mode "r+" or "r")."""


class FormatError(Error, ValueError):
    """A file whose content is not what its format demands: bad magic, truncated, too new."""


class CorruptError(Error, OSError):
    """Bytes that do not match their checksum, or a session whose end left a table in doubt."""


class LockedError(Error, OSError):
    """The store is open for writing elsewhere."""


class StaleError(Error, OSError):
    """A reader asked for rows of a commit that the writer has replaced in the files: refresh()."""


class LogFullError(Error, OSError):
    """More was changed since the last commit than `log_limit` allows, without `autocommit`.

    Nothing of the call that raised it has been done: commit() and call again.
    """


class BudgetError(Error, MemoryError):
    """`memory=` is too small for the tables. The text names the least that would do."""


class CudaError(Error, RuntimeError):
    """A CUDA call that failed, or a device asked for where there is none."""


class ForkError(Error, ValueError):
    """Use of a handle in a child process that inherited it by fork()."""


for _name in __all__:  # where they are to be caught, and what tracebacks show
    globals()[_name].__module__ = "embermap"
