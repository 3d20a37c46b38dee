"""Ids of batches to come, from worker processes to the process that trains.

A worker that prepares a batch knows its ids before the training process does. It sends them over a
socket; a thread of the training process hands them to `Table.prefetch`. All of it is a hint:
nothing waits for it, and what cannot be delivered is dropped.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _arrays
from ._errors import RowIdError

__all__ = ["HintServer", "Prefetcher"]

# A message: length of the table's name, number of ids, the name, the ids as int64.
_HEAD = struct.Struct("<IQ")
_MOST_IDS = 1 << 22  # of one message; more is an error of who sends
_MOST_WAITING = 8  # batches of a worker that wait to be sent
_RECEIVE_BYTES = 1 << 18

_servers: dict[str, HintServer] = {}  # of this process, by address


class _Connection:
    """One worker's messages, put together from what arrives."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.received = bytearray()

    def messages(self) -> list[tuple[str, NDArray[np.int64]]]:
        """What has arrived as a whole. Raises ValueError for what no worker of ours sends."""
        whole = []
        while len(self.received) >= _HEAD.size:
            name_bytes, count = _HEAD.unpack_from(self.received)
            if name_bytes > 1024 or count > _MOST_IDS:
                raise ValueError("not a message of a prefetcher")
            end = _HEAD.size + name_bytes + 8 * count
            if len(self.received) < end:
                break
            name = bytes(self.received[_HEAD.size : _HEAD.size + name_bytes]).decode()
            ids = np.frombuffer(
                bytes(self.received[_HEAD.size + name_bytes : end]), dtype="<i8"
            ).astype(np.int64)
            del self.received[:end]
            whole.append((name, ids))
        return whole


class HintServer:
    """Takes ids from processes of the same user and calls prefetch(table, ids) on its own thread.

    Errors of prefetch are dropped: the table may be gone or smaller by now.
    """

    def __init__(self, prefetch: Callable[[str, NDArray[np.int64]], None]) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("prefetching from worker processes needs Linux")
        self._prefetch = prefetch
        self._process = os.getpid()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # In the abstract namespace: no file that could be left behind.
        self.address = f"embermap-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        self._connections: dict[int, _Connection] = {}
        self._thread = threading.Thread(target=self._serve, name="embermap-prefetch", daemon=True)
        self._thread.start()
        _servers[self.address] = self

    def hint(self, table: str, ids: NDArray[np.int64]) -> None:
        """From this process itself."""
        self._prefetch(table, ids)

    def close(self) -> None:
        """Stop; workers that go on sending find nobody, which they do not mind."""
        if self._closed:
            return
        self._closed = True
        _servers.pop(self.address, None)
        os.write(self._woken, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def forget_after_fork(self) -> None:
        """In a child: leave the sockets to the parent."""
        if self._closed:
            return  # its descriptors may be others' by now
        self._closed = True
        _servers.pop(self.address, None)
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.peer.close()
        os.close(self._wake)
        os.close(self._woken)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            ended = False
            while not ended:
                for key, _ in selector.select():
                    if self._closed or key.fd == self._wake:  # closed: by what it called itself
                        ended = True
                        break
                    if key.fd == self._listener.fileno():
                        self._accept(selector)
                    else:
                        self._receive(selector, self._connections[key.fd])
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.peer.close()
        self._connections.clear()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            peer.close()
            return
        peer.setblocking(False)
        self._connections[peer.fileno()] = _Connection(peer)
        selector.register(peer, selectors.EVENT_READ)

    def _receive(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        try:
            data = connection.peer.recv(_RECEIVE_BYTES)
            connection.received += data
            messages = connection.messages()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, messages = b"", []
        for table, ids in messages:
            try:
                self._prefetch(table, ids)
            except Exception:
                continue  # a hint: whoever needs the rows meets the error again
        if not data:
            selector.unregister(connection.peer)
            del self._connections[connection.peer.fileno()]
            connection.peer.close()


class _Sender:
    """A worker's way to the training process: a thread sends, some batches wait for it."""

    def __init__(self, address: str) -> None:
        self.process = os.getpid()
        self._address = address
        self._waiting: deque[bytes] = deque()
        self._ready = threading.Event()
        self._gone = False
        self._thread = threading.Thread(target=self._send, name="embermap-prefetch", daemon=True)
        self._thread.start()

    def add(self, message: bytes) -> None:
        # The oldest are needed first: where too many wait, the newest is dropped.
        if not self._gone and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(message)
            self._ready.set()

    def stop(self) -> None:
        self._gone = True
        self._ready.set()

    def _send(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.connect(f"\0{self._address}")
                while not self._gone:
                    self._ready.wait()
                    self._ready.clear()
                    while self._waiting and not self._gone:
                        peer.sendall(self._waiting.popleft())
        except OSError:  # the training process has closed the store, or ended
            self._gone = True
        self._waiting.clear()


class Prefetcher:
    """Called with the ids of a batch to come, in any process: `Table.prefetcher` has the use of it.

    Pickles to some hundred bytes. Thread safety: may be called from several threads.
    """

    __slots__ = ("_address", "_rows", "_sender", "_table")

    def __init__(self, address: str, table: str, rows: int) -> None:
        # Not for callers: from Table.prefetcher.
        self._address = address
        self._table = table
        self._rows = rows
        self._sender: _Sender | None = None

    def __call__(self, ids: Any) -> None:
        """Have the pages of these rows read in the training process; returns at once.

        Args:
            ids: as for `Table.prefetch`, on the host.

        Raises: RowIdError (names the first bad id), TypeError.
        """
        batch = _arrays.read_ids(ids)
        if batch.device is not None:
            raise TypeError(f"ids for a prefetcher must be on the host, not on {batch.place}")
        host = batch.host
        if host.size == 0:
            return
        bad = (host < 0) | (host >= self._rows)
        if bad.any():
            position = int(bad.argmax())
            error = RowIdError(
                f"row id {host[position]} at position {position} is out of range for table "
                f"{self._table!r} with {self._rows} rows"
            )
            error.id, error.position = int(host[position]), position
            raise error
        server = _servers.get(self._address)
        if server is not None:
            server.hint(self._table, host)
            return
        if self._sender is None or self._sender.process != os.getpid():
            self._sender = _Sender(self._address)
        name = self._table.encode()
        for first in range(0, host.size, _MOST_IDS):
            part = host[first : first + _MOST_IDS]
            self._sender.add(
                _HEAD.pack(len(name), part.size) + name + part.astype("<i8", copy=False).tobytes()
            )

    def __del__(self) -> None:
        sender = getattr(self, "_sender", None)
        if sender is not None:
            sender.stop()

    def __getstate__(self) -> tuple[str, str, int]:
        return (self._address, self._table, self._rows)

    def __setstate__(self, state: tuple[str, str, int]) -> None:
        self._address, self._table, self._rows = state
        self._sender = None

    def __repr__(self) -> str:
        return f"<embermap.Prefetcher of table {self._table!r}>"
