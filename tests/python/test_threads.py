"""Calls of several threads on one store: none waits for a lock with the GIL in its hands."""

from __future__ import annotations

import embermap as em
import numpy as np
import pytest

# Long calls hold locks of the store and the table, and take the GIL for progress callbacks. In each
# of the threads beside it another call asks for one of those locks.
CODE = """
import faulthandler, sys, threading, time
import numpy as np
import embermap as em

faulthandler.dump_traceback_later(60, exit=True)  # where a hang has to be told from work
path, file, call, with_callback = *sys.argv[1:4], sys.argv[4] == "True"
store = em.open(path, memory="8MiB", threads=2)
table = store["t"]
core = table._handle
beside = {
    "contains": lambda: "t" in store,
    "tables": lambda: store.tables(),
    "len": lambda: len(store),
    "getitem": lambda: store["t"],
    "repr of store": lambda: repr(store),
    "commit": lambda: store.commit(),
    "rows": lambda: table.rows,
    "repr of table": lambda: repr(table),
    "step": lambda: table.step,
    "optimizer": lambda: table.optimizer,
    "set_optimizer": lambda: setattr(table, "optimizer", em.optim.SGD(0.5)),
    "init": lambda: table.init,
    "seed": lambda: table.seed,
    "page_bytes": lambda: table.page_bytes,
    "adopted": lambda: table.adopted,
    "path": lambda: table.path,
    "writable": lambda: table.writable,
    "fields": lambda: table.fields,
    "stats": lambda: table.stats(),
    "stats of store": lambda: store.stats(),
    "commits": lambda: store.commits(),
    "written_pages": lambda: core.written_pages,
    "gather": lambda: table.gather([1, 2]),
    "scatter": lambda: table.scatter([1], np.ones((1, 16), np.float32)),
    "update": lambda: table.update([1], np.ones((1, 16), np.float32)),
    "prefetch": lambda: table.prefetch([1, 2]),
    "read": lambda: table.read(0, 2),
    "write": lambda: table.write(0, np.ones((1, 16), np.float32)),
}
began, ended = threading.Event(), threading.Event()
failed = []

def work(name, ask):
    try:
        began.wait()
        while True:
            ask()
            if ended.is_set():
                return
            time.sleep(0.001)
    except BaseException as error:
        failed.append((name, error))

def progress(done, total):
    if not began.is_set():
        began.set()
        time.sleep(0.3)  # by then each of the threads is in its call

threads = [threading.Thread(target=work, args=each, daemon=True) for each in beside.items()]
for thread in threads:
    thread.start()
callback = progress if with_callback else None
if callback is None:
    began.set()
for turn in range(1 if with_callback else 3):
    if call == "import_file":
        store.import_file(f"u{turn}", file, progress=callback)
    elif call == "materialize":
        table.resize(table.rows + 300_000)
        table.materialize(progress=callback)
    elif call == "verify":
        assert table.verify(progress=callback)["ok"]
    elif call == "export":
        table.export(f"{file}.{turn}.npy", progress=callback)
ended.set()
for thread in threads:
    thread.join()
assert not failed, failed
assert began.is_set()
store.abandon()
"""


@pytest.mark.parametrize("with_callback", [True, False])
@pytest.mark.parametrize("call", ["import_file", "materialize", "verify", "export"])
def test_long_calls_and_short_ones_side_by_side(path, tmp_path, run_python, call, with_callback):
    file = tmp_path / "x.npy"
    np.save(file, np.ones((300_000, 16), np.float32))
    with em.open(path) as store:
        store.create("t", rows=200_000, dim=16, optimizer=em.optim.SGD(0.1))[:] = 1
    run_python(CODE, path, file, call, with_callback)


def test_hdf5_files_are_written_and_read_by_several_threads_at_once(path, tmp_path, run_python):
    pytest.importorskip("h5py")
    code = """
        import faulthandler, sys, threading
        import embermap as em

        faulthandler.dump_traceback_later(60, exit=True)
        store = em.open(sys.argv[1], memory="8MiB", threads=2)
        folder = sys.argv[2]
        table = store.create("t", rows=2_000, dim=16, init=em.init.Normal(), seed=3)
        failed = []

        def work(number):
            try:
                for turn in range(20):
                    location = f"{folder}/{number}.h5:/v"
                    options = {"gzip": 1} if number % 2 else {"dtype": "float16"}
                    table.export(location, overwrite=True, **options)
                    store.import_file(f"u{number}.{turn}", location)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        rows = table[:]
        for number in range(4):
            same = rows if number % 2 else rows.astype("float16")
            for turn in range(20):
                assert (store[f"u{number}.{turn}"][:] == same).all()
        store.abandon()
    """
    run_python(code, path, tmp_path)
