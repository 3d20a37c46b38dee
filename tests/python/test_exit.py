"""The interpreter ends while threads that nobody waits for are in calls."""

from __future__ import annotations

import subprocess
import sys

import embermap as em
import numpy as np
import pytest

# Threads in the same call again and again, and the interpreter's end at any moment of it. Where
# Python ends such a thread, in the middle of C++ frames, the process is aborted.
CODE = """
import faulthandler, itertools, os, sys, threading, time
import numpy as np
import embermap as em

faulthandler.dump_traceback_later(60, exit=True)
folder, call, seconds = sys.argv[1], compile(sys.argv[2], "call", "eval"), float(sys.argv[3])
store = em.open(folder + "/store", memory="2MiB", threads=2)
table = store["t"]
reader = em.open(folder + "/other", mode="r", memory="2MiB", threads=1)
file = folder + "/x.npy"
ones = np.ones((4096, 16), np.float32)
numbers = itertools.count()

def ids():
    return np.random.randint(0, table.rows, 4096)

def name():
    return f"n{os.getpid()}_{next(numbers)}"

def new():
    return f"{folder}/{name()}"

def progress(done, total):
    for _ in range(1000):  # the GIL may be lost here as well
        pass

def refused(bad):
    try:
        table.gather([bad])
    except IndexError:
        pass

def work():
    while True:
        eval(call)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(seconds)
"""
CALLS = {
    "gather": "table.gather(ids())",
    "scatter": "table.scatter(ids(), ones)",
    "update": "table.update(ids(), ones)",
    "read": "table.read(0, table.rows)",
    "write": "table.write(0, ones)",
    "prefetch": "table.prefetch(ids()).wait()",
    "commit": "(table.add([1], ones[:1]), store.commit())",
    "checkpoint": "(table.add([1], ones[:1]), store.checkpoint())",
    "verify": "table.verify()",
    "verify_told": "table.verify(progress=progress)",
    "export": "table.export(new() + '.npy', progress=progress)",
    "import_file": "store.import_file(name(), file, progress=progress)",
    "convert": "em.convert(file, new() + '.npy', progress=progress)",
    "snapshot": "store.snapshot(new(), progress=progress)",
    "append": "table.append(ones)",
    "create": "store.create(name(), rows=9, dim=3)",
    "open": "em.open(folder + '/other', mode='r', memory='1MiB', threads=1).close()",
    "refresh": "reader.refresh()",
    "rows_of_a_file": "em.io.open(file)[:5000]",
    "refused": "refused(table.rows)",
    "stats": "(store.stats(), table.stats())",
}


@pytest.mark.parametrize("call", CALLS)
def test_daemon_threads_in_a_call_do_not_abort_the_process(tmp_path, call):
    np.save(tmp_path / "x.npy", np.ones((20_000, 16), np.float32))
    with em.open(tmp_path / "store") as store:
        store.create("t", rows=50_000, dim=16, optimizer=em.optim.SGD(0.1))[:] = 1
    with em.open(tmp_path / "other") as store:
        store.create("t", rows=10, dim=3)
    for seconds in (0.02, 0.05, 0.1):
        command = [sys.executable, "-c", CODE, str(tmp_path), CALLS[call], str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    with em.open(tmp_path / "store") as store:
        assert store["t"].verify()["ok"]
