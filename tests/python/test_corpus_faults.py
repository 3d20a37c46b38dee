"""Faults people met with file systems that fail: docs/bug-corpus.md, B143, B145, B156.

A library that is loaded before the system's makes calls on files of tables fail, or do half.
"""

from __future__ import annotations

import errno
import subprocess

import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

static atomic_long calls;
static int ours(int fd) {
  char link[64], name[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, name, sizeof name - 1);
  if (n < 0) return 0;
  name[n] = 0;
  return strstr(name, ".npy") != NULL || strstr(name, "redo.log") != NULL;
}
static long number(const char* name) { const char* at = getenv(name); return at ? atol(at) : 0; }
/* 0: as it is; 1: half of it; -1: fails with errno, as all reads do while SHIM_SWITCH is a file */
static int verdict(int fd, size_t n, int reads) {
  if (!ours(fd)) return 0;
  long k = atomic_fetch_add(&calls, 1) + 1;
  const char* on = getenv("SHIM_SWITCH");
  if (reads && on && access(on, F_OK) == 0) { errno = (int)number("SHIM_ERROR"); return -1; }
  if (number("SHIM_SHORT") == 0) return 0;
  if (k % 11 == 0) { errno = EINTR; return -1; }
  return k % 7 == 0 && n > 1;
}
#define MAP(name)                                                             \
  void* name(void* at, size_t n, int prot, int flags, int fd, off_t from) {   \
    static void* (*real)(void*, size_t, int, int, int, off_t);                \
    if (!real) real = dlsym(RTLD_NEXT, #name);                                \
    if (fd >= 0 && number("SHIM_MMAP") && ours(fd)) {                         \
      atomic_fetch_add(&calls, 1);                                            \
      errno = (int)number("SHIM_MMAP");                                       \
      return MAP_FAILED;                                                      \
    }                                                                         \
    return real(at, n, prot, flags, fd, from);                                \
  }
MAP(mmap)
MAP(mmap64)
#define READV(name)                                                           \
  ssize_t name(int fd, const struct iovec* v, int n, off_t at) {              \
    static ssize_t (*real)(int, const struct iovec*, int, off_t);             \
    if (!real) real = dlsym(RTLD_NEXT, #name);                                \
    int w = verdict(fd, 2, 1);                                                \
    return w < 0 ? -1 : real(fd, v, w && n > 1 ? n / 2 : n, at);              \
  }
READV(preadv)
READV(preadv64)
#define READ(name)                                                            \
  ssize_t name(int fd, void* p, size_t n, off_t at) {                         \
    static ssize_t (*real)(int, void*, size_t, off_t);                        \
    if (!real) real = dlsym(RTLD_NEXT, #name);                                \
    int v = verdict(fd, n, 1);                                                \
    return v < 0 ? -1 : real(fd, p, v ? n / 2 : n, at);                       \
  }
READ(pread)
READ(pread64)
#define WRITE(name)                                                           \
  ssize_t name(int fd, const void* p, size_t n, off_t at) {                   \
    static ssize_t (*real)(int, const void*, size_t, off_t);                  \
    if (!real) real = dlsym(RTLD_NEXT, #name);                                \
    int v = verdict(fd, n, 0);                                                \
    return v < 0 ? -1 : real(fd, p, v ? n / 2 : n, at);                       \
  }
WRITE(pwrite)
WRITE(pwrite64)
__attribute__((destructor)) static void report(void) {
  const char* to = getenv("SHIM_REPORT");
  if (!to) return;
  int fd = open(to, O_WRONLY | O_CREAT | O_APPEND, 0600);
  char text[32];
  int n = snprintf(text, sizeof text, "%ld\n", atomic_load(&calls));
  if (fd >= 0 && write(fd, text, n) == n) close(fd);
}
"""


@pytest.fixture
def run_with_shim(tmp_path, run_python, monkeypatch):
    """run(code, *arguments, SHIM_...): what the code did, and how many calls the library saw."""
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    assert made.returncode == 0, made.stderr

    def run(code, *arguments, **settings):
        report = tmp_path / "calls"
        report.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(library))
            patch.setenv("SHIM_REPORT", str(report))
            for name, value in settings.items():
                patch.setenv(name, str(value))
            done = run_python(code, *arguments, check=False)
        counts = [int(line) for line in report.read_text().split()] if report.exists() else [0]
        return done, max(counts)

    return run


WORK = """
    import sys, embermap as em, numpy as np
    path, dim, io, direct = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    direct = {"1": True, "0": False}[direct]
    options = {"memory": "300KiB", "io": io, "direct": direct, "threads": 2}
    rng = np.random.default_rng(dim)
    rows = 1_003
    reference = rng.integers(0, 200, (rows, dim)).astype(np.uint8)
    with em.open(path, **options) as store:
        table = store.create("t", rows=rows, dim=dim, dtype="uint8")
        for k in range(0, rows, 100):
            table.scatter(range(k, min(k + 100, rows)), reference[k : k + 100])
        for _ in range(20):
            ids = rng.integers(0, rows, 256)
            assert np.array_equal(table.gather(ids), reference[ids])
            new = rng.integers(0, 200, (256, dim)).astype(np.uint8)
            table.scatter(ids, new)
            reference[ids] = new
            store.commit()
        assert np.array_equal(table.gather([rows - 1])[0], reference[rows - 1])
    with em.open(path, mode="r", **options) as store:
        table = store["t"]
        for k in range(rows):
            assert np.array_equal(table[k], reference[k])
        assert np.array_equal(table[:], reference)
        assert table.verify()["ok"]
    print("equal")
"""


@pytest.mark.parametrize("dim", [1, 12, 516, 1_028, 4_100])
@pytest.mark.parametrize("io", ["threads", "cached"])
@pytest.mark.parametrize("direct", ["0", "1"])
def test_short_and_interrupted_calls_lose_nothing(path, run_with_shim, dim, io, direct):
    if io == "cached" and direct == "1":
        pytest.skip("'cached' reads through the page cache")
    done, calls = run_with_shim(WORK, path, dim, io, direct, SHIM_SHORT=1)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
    assert calls > 22, f"the shim saw {calls} calls: nothing was tried"


# --- B143: files that cannot be mapped ------------------------------------------------------------

MAPPED = """
    import sys, embermap as em, numpy as np
    with em.open(sys.argv[1], memory="300KiB", threads=2) as store:
        table = store.create("t", rows=3000, dim=33, optimizer=em.optim.Adagrad())
        table[:] = np.arange(3000, dtype=np.float32)[:, None]
        table.update([5, 5], np.zeros((2, 33), np.float32))
        store.commit()
        table.resize(4000)
        table.append(np.ones((10, 33), np.float32))
        np.save(sys.argv[2], np.ones((100, 3), np.float32))
        adopted = store.adopt("a", sys.argv[2])
        adopted.add([3], np.ones((1, 3), np.float32))
        store.import_file("i", sys.argv[2])
        table.export(sys.argv[2] + ".h5:/v")
        em.convert(sys.argv[2] + ".h5:/v", sys.argv[2] + "2.npy")
    with em.open(sys.argv[1], mode="r") as store:
        table = store["t"]
        assert (table[:3000] == np.arange(3000)[:, None]).all()
        assert store["a"][3].tolist() == [2, 2, 2]
        assert all(store[name].verify()["ok"] for name in store)
    with em.open(sys.argv[1], mode="r", pin="mapping") as store:
        for _ in range(2):
            try:
                store["i"].gather([5])
            except OSError as error:
                assert error.errno == int(sys.argv[3]), error
                assert "mmap" in str(error) and "i.npy" in str(error), error
            else:
                raise AssertionError("what was to be mapped was not, and nobody was told")
        assert store["i"].read(0, 2).tolist() == [[1] * 3] * 2
    print("equal")
"""


@pytest.mark.parametrize("error", [errno.ENODEV, errno.EINVAL, errno.EACCES, errno.ENOMEM])
def test_a_file_system_that_maps_no_files(path, tmp_path, run_with_shim, error):
    """Tables are read and written by calls: pin="mapping" alone has to map, and says why not."""
    done, calls = run_with_shim(MAPPED, path, tmp_path / "a.npy", error, SHIM_MMAP=error)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "equal\n")
    assert calls > 0


# --- B145, B156: reads that fail ------------------------------------------------------------------

FAILING = """
    import errno, os, sys, embermap as em, numpy as np
    path, switch, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with em.open(path, memory="64KiB", io="threads", threads=2) as store:
        store.create("t", rows=20_000, dim=32)[:] = np.arange(20_000, dtype=np.float32)[:, None]
    for options in ({"mode": "r"}, {"mode": "r+"}):
        with em.open(path, memory="64KiB", io="threads", threads=2, **options) as store:
            table = store["t"]
            assert table[19_000][0] == 19_000
            open(switch, "w").close()
            out = np.full((3, 32), 7, np.float32)
            for ids in ([5, 9_000, 15_000], [1, 2, 3]):
                try:
                    table.gather(ids, out=out)
                except OSError as error:
                    assert error.errno == wanted, error
                    assert error.filename in (path + "/t.npy", path + "/redo.log"), error.filename
                    assert "read" in str(error), error
                else:
                    raise AssertionError("rows that could not be read")
            os.unlink(switch)
            # What failed is forgotten: the same handle reads, with no row of before.
            table.gather([5, 9_000, 15_000], out=out)
            assert out[:, 31].tolist() == [5, 9_000, 15_000]
            assert (table[:] == np.arange(20_000)[:, None]).all()
    print("equal")
"""


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_reads_that_fail_are_errors_with_their_file_and_leave_the_handle_good(
    path, tmp_path, run_with_shim, error
):
    settings = {"SHIM_SWITCH": tmp_path / "on", "SHIM_ERROR": error}
    done, calls = run_with_shim(FAILING, path, tmp_path / "on", error, **settings)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "equal\n")
    assert calls > 10


# --- B156: without io_uring -----------------------------------------------------------------------

WITHOUT_URING = """
    import ctypes, errno, platform, struct, sys
    if platform.machine() not in ("x86_64", "aarch64"):
        sys.exit(77)
    libc = ctypes.CDLL(None, use_errno=True)
    # As containers' filters do: io_uring_setup (425) is refused, all else is allowed.
    code = int(sys.argv[2])
    program = b"".join(struct.pack("HBBI", *line) for line in (
        (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50000 | code), (0x06, 0, 0, 0x7FFF0000)))
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
    one = Filter(4, program)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(one), 0, 0):
        sys.exit(77)
    assert libc.syscall(425, 4, 0) == -1 and ctypes.get_errno() == code
    import numpy as np, embermap as em
    for io in ("auto", "io_uring"):
        with em.open(sys.argv[1] + io, memory="300KiB", io=io, threads=2) as store:
            table = store.create("t", rows=5000, dim=33)
            table[:] = np.arange(5000, dtype=np.float32)[:, None]
            assert (table.gather(np.arange(0, 5000, 7))[:, 5] == np.arange(0, 5000, 7)).all()
            assert table.stats()["io_engine"] == "threads", table.stats()["io_engine"]
    print("equal")
"""


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_container_that_refuses_io_uring(path, run_python, code):
    done = run_python(WITHOUT_URING, path, code, check=False)
    if done.returncode == 77:
        pytest.skip("no filters of system calls here")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "equal\n")


def test_thousands_of_calls_take_no_more_memory(path, run_python):
    code = """
        import sys, numpy as np, embermap as em
        def resident():
            return next(int(x.split()[1]) << 10 for x in open("/proc/self/status") if "VmRSS" in x)
        with em.open(sys.argv[1], memory="256KiB", threads=1) as store:
            table = store.create("t", rows=2000, dim=129)
            table[:] = 1
            ids = np.arange(3)
            for number in range(20_000):
                table.gather(ids + number * 37 % 1997)
                if number == 4_000:
                    before = resident()
            assert resident() < before + (2 << 20), (before, resident())
    """
    run_python(code, path)
