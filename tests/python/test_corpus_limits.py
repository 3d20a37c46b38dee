"""Faults people met with limits, file systems and growth: docs/bug-corpus.md, sections I and K."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import embermap as em
import numpy as np
import pytest


@pytest.fixture
def command():
    """command(*arguments, **options): the program; what it did."""
    given = os.environ.get("EMBERMAP_CLI")
    beside = Path(sys.executable).parent / "embermap"
    program = given or (str(beside) if beside.exists() else shutil.which("embermap"))
    if program is None:
        pytest.fail("the embermap program is neither in EMBERMAP_CLI nor installed")

    def run(*arguments, **options):
        return subprocess.run(
            [program, *arguments], capture_output=True, timeout=120, check=False, **options
        )

    run.program = program
    return run


def numbered(rows: int, dim: int) -> np.ndarray:
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], dim, 1)


# --- B148: addresses and memory of a conversion ---------------------------------------------------

ROWS, DIM = 65_536, 256  # 64 MiB
ADDRESSES = 200 << 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """64 MiB of rows in every format that holds any number of float32."""
    folder = tmp_path_factory.mktemp("sources")
    rows = np.lib.format.open_memmap(folder / "a.npy", "w+", np.float32, (ROWS, DIM))
    rows[:] = np.random.default_rng(0).random((ROWS, DIM), np.float32)
    np.save(folder / "f.npy", np.asfortranarray(rows))
    for target, options in TARGETS.items():
        if target != "a.npy":
            em.convert(folder / "a.npy", f"{folder}/{target}", **options)
    return folder


TARGETS = {
    "a.npy": {},
    "a.raw": {"dst_format": "raw"},
    "a.h5:/v": {},
    "g.h5:/v": {"gzip": 1},
    "a.safetensors:v": {},
    "a.pt:v": {},
    "a.npz:v": {},
    "a.fvecs": {},
}
READ = {"a.raw": ["--source-dtype", "float32", "--dim", str(DIM)]}
WRITE = {"a.raw": ["--to", "raw"], "g.h5:/v": ["--gzip", "1"]}


def limited(addresses):
    return {
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses)),
    }


def peak_of(command, *arguments, **options):
    """The most memory that was resident at once in a run that succeeds, bytes."""
    code = """
        import resource, subprocess, sys
        done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        sys.stderr.buffer.write(done.stderr)
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
        sys.exit(done.returncode)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), command.program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
    assert (done.returncode, done.stderr) == (0, ""), arguments
    return int(done.stdout)


@pytest.mark.parametrize("source", ["f.npy", *TARGETS])
def test_every_format_is_read_with_little_memory(sources, tmp_path, command, source):
    arguments = ["convert", f"{sources}/{source}", tmp_path / "b.npy", *READ.get(source, [])]
    peak = peak_of(command, *arguments, "--memory", "16MiB", "--quiet", **limited(ADDRESSES))
    assert peak < 48 << 20
    wanted = np.load(sources / "a.npy", mmap_mode="r")
    assert np.array_equal(np.load(tmp_path / "b.npy", mmap_mode="r"), wanted)
    (tmp_path / "b.npy").unlink()


@pytest.mark.parametrize("target", TARGETS)
def test_every_format_is_written_with_little_memory(sources, tmp_path, command, target):
    arguments = ["convert", sources / "f.npy", f"{tmp_path}/{target}", *WRITE.get(target, [])]
    peak = peak_of(command, *arguments, "--memory", "16MiB", "--quiet", **limited(ADDRESSES))
    assert peak < 48 << 20
    name = target.split(":")[0]
    assert (tmp_path / name).stat().st_size == pytest.approx(
        (sources / name).stat().st_size, rel=0.01
    )
    options = {"dtype": "float32", "dim": DIM, "format": "raw"} if target == "a.raw" else {}
    wanted = np.load(sources / "a.npy", mmap_mode="r")
    with em.io.open(f"{tmp_path}/{target}", **options) as rows:
        for first, block in rows.blocks():
            assert np.array_equal(block, wanted[first : first + len(block)])
    (tmp_path / name).unlink()


@pytest.mark.parametrize("io", ["threads", "io_uring"])
def test_stores_work_within_few_addresses(sources, tmp_path, command, io):
    """In 200 MiB of addresses: threads and what they allocate leave room for what is read."""
    store, options = tmp_path / "s", ["--memory", "32MiB", "--quiet"]
    disk = ["--io", io]
    for arguments in (
        ["import", sources / "a.npy", f"{store}/t", *disk],
        ["import", f"{sources}/g.h5:/v", f"{store}/g", *disk],
        ["export", f"{store}/t", tmp_path / "b.npy", *disk],
        ["export", f"{store}/g", f"{tmp_path}/c.h5:/v", *disk],
        ["verify", store, *disk],
        ["snapshot", store, tmp_path / "copy", *disk],
        ["resize", f"{store}/g", "--rows", "70000", *disk],
        ["diff", f"{store}/t", tmp_path / "b.npy"],
        ["info", store],
    ):
        done = command(*arguments, *options, **limited(ADDRESSES))
        assert (done.returncode, done.stderr) == (0, b""), arguments
    wanted = np.load(sources / "a.npy", mmap_mode="r")
    assert np.array_equal(np.load(tmp_path / "b.npy", mmap_mode="r"), wanted)


# --- B165: growth ---------------------------------------------------------------------------------


def test_a_table_grows_without_a_size_that_was_named_before(path):
    """Addresses stay near the data, and the file is no longer than what is in it."""
    code = """
        import os, resource, sys
        import numpy as np, embermap as em
        rows, dim, step = 500_000, 64, 50_000
        table_bytes = rows * dim * 4
        os.environ["OMP_NUM_THREADS"] = "1"
        now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status")
                   if line.startswith("VmSize"))
        limit = now + table_bytes + (512 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with em.open(sys.argv[1], memory="32MiB", threads=1) as store:
            table = store.create("t", rows=0, dim=dim)
            block = np.empty((step, dim), np.float32)
            for first in range(0, rows, step):
                block[:] = np.arange(first, first + step, dtype=np.float32)[:, None]
                assert table.append(block) == first
                store.commit()
                store.checkpoint()
                status = os.stat(table.path)
                data = (first + step) * dim * 4
                assert data < status.st_size < data + (1 << 20), (data, status.st_size)
                assert status.st_blocks * 512 < status.st_size + (1 << 20)
                assert status.st_blocks * 512 > 0.9 * data
            assert len(table) == rows
            ids = np.arange(0, rows, 977)
            assert (table.gather(ids)[:, 63] == ids).all()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_growth_that_meets_a_limit_keeps_the_rows_before_it(path):
    """A limit on the size of files, as of a quota: the error names the file, nothing is half."""
    code = """
        import errno, resource, sys
        import numpy as np, embermap as em
        limit = 24 << 20
        store = em.open(sys.argv[1], memory="4MiB", threads=1, log_limit="1MiB")
        table = store.create("t", rows=0, dim=64)
        table.append(np.zeros((10, 64), np.float32))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        done = 10
        try:
            while done < 300_000:
                block = np.repeat(np.arange(done, done + 5000, dtype=np.float32)[:, None], 64, 1)
                table.append(block)
                done += 5000
                store.commit()
        except OSError as error:
            assert error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT), error
            assert str(error.filename).startswith(sys.argv[1]), error
            print(done)
        assert len(table) == done
        assert table[done - 1][0] == (done - 1 if done > 10 else 0)
        store.abandon()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = int(done.stdout)
    assert 50_000 < rows < 100_000
    with em.open(path) as store:
        table = store["t"]
        assert len(table) == rows
        assert np.array_equal(table[10:, 5], np.arange(10, rows, dtype=np.float32))
        assert table.verify()["ok"]
        assert table.append(np.ones((1, 64), np.float32)) == rows


# --- B146, B152: what a killed process leaves -----------------------------------------------------


@pytest.mark.parametrize("target", ["b.npy", "b.h5:/v", "b.safetensors:v", "b.npz:v", "b.fvecs"])
def test_a_killed_conversion_leaves_nothing_once_the_next_one_ran(tmp_path, command, target):
    """Beside the file that it was to be: found by its name, and told from one that is at work."""
    rows = np.lib.format.open_memmap(tmp_path / "f.npy", "w+", np.float32, (16_384, 512))
    rows[:] = 1
    rows.flush()

    def leftovers():
        return sorted(p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp"))

    code = """
        import os, signal, sys, embermap as em
        calls = []
        def progress(done, total):
            calls.append(done)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGSTOP if sys.argv[3] == "stop" else signal.SIGKILL)
        em.convert(sys.argv[1], sys.argv[2], overwrite=True, memory="4MiB", progress=progress)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), tmp_path / "f.npy"]
    killed = subprocess.run([*arguments, f"{tmp_path}/{target}", "kill"], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(leftovers()) == 1
    # Files of other names, of the same kind of name, and of a process that is still at work stay.
    name = target.split(":")[0]
    others = [f".{name}.tmp", f".{name}.12345678.tmp.npy", f".x{name}.12345678.tmp", "b.tmp"]
    for other in others:
        (tmp_path / other).write_text("not ours")
    stopped = subprocess.Popen([*arguments, f"{tmp_path}/{target}", "stop"])
    try:
        for _ in range(600):
            if stopped.poll() is not None or process_state(stopped.pid) == "T":
                break
            time.sleep(0.05)
        assert process_state(stopped.pid) == "T"
        mine = [x for x in leftovers() if x not in others]
        assert len(mine) == 1  # the killed one's is gone, with the start of this one
        em.convert(tmp_path / "f.npy", f"{tmp_path}/{target}")
        assert [x for x in leftovers() if x not in others] == mine
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) == 0
    finally:
        stopped.kill()
        stopped.wait()
    assert sorted(leftovers()) == sorted(x for x in others if x.endswith(".tmp"))
    assert all((tmp_path / other).read_text() == "not ours" for other in others)
    with em.io.open(f"{tmp_path}/{target}") as found:
        assert found.shape == (16_384, 512)
        assert (found[-1] == 1).all()


def process_state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]


def test_a_killed_import_leaves_nothing_once_the_store_was_opened(path, tmp_path):
    np.save(tmp_path / "a.npy", numbered(100_000, 32))
    code = """
        import os, signal, sys, embermap as em
        def progress(done, total):
            if done:
                os.kill(os.getpid(), signal.SIGKILL)
        em.open(sys.argv[1], memory="1MiB").import_file("t", sys.argv[2], progress=progress)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), path, tmp_path / "a.npy"],
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert [p for p in path.iterdir() if p.name.endswith(".tmp")]
    with em.open(path) as store:
        assert store.tables() == []
        assert not [p for p in path.iterdir() if p.name.endswith(".tmp") or p.suffix == ".npy"]
        assert store.import_file("t", tmp_path / "a.npy").rows == 100_000


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_no_file_is_made_but_where_it_was_asked_for(tmp_path):
    """Nothing goes to TMPDIR or /tmp on its way: they may be memory, or small."""
    code = """
        import os, sys, numpy as np, embermap as em
        np.save("a.npy", np.ones((5000, 16), np.float32))
        with em.open("s", memory="1MiB") as store:
            table = store.import_file("t", "a.npy", optimizer=em.optim.Adagrad())
            table.update(np.arange(4000), np.ones((4000, 16), np.float32))
            store.commit()
            for target in ("b.npy", "b.h5:/v", "b.npz:v", "b.safetensors:v", "b.pt", "b.fvecs"):
                table.export(target)
            store.snapshot("copy")
        em.convert("b.h5:/v", "c.npz:v", gzip=1)
        em.io.open("c.npz:v")[5]
    """
    (tmp_path / "here").mkdir()
    (tmp_path / "closed").mkdir(mode=0o500)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "not-there"), "HOME": "/not-there"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "not-there").exists()


# --- B149: paths ----------------------------------------------------------------------------------

NAMES = {
    "spaces and accents": "päth with spåce".encode(),
    "cyrillic": "тест".encode(),
    "not UTF-8": b"caf\xe9-\xff",
    "a line break": b"new\nline",
    "a tab and a quote": b"ta\tb'\"",
    "a tilde": b"~",
    "like an option": b"-rf",
    "a percent sign": b"100%s{0}",
    "a backslash": b"back\\slash",
    "decomposed": b"a\xcc\x88",
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("given", ["bytes", "Path", "str"])
def test_any_name_a_system_allows(tmp_path, monkeypatch, kind, given):
    """Of folders, stores and files, in every format, from Python."""
    monkeypatch.chdir(tmp_path)
    name = NAMES[kind]
    base = Path(os.fsdecode(name)) if not name.startswith(b"~") else Path(os.fsdecode(b"./~"))
    base = tmp_path / base
    base.mkdir()

    def form(path):
        text = str(path)
        return {"bytes": os.fsencode(text), "Path": Path(text), "str": text}[given]

    rows = numbered(30, 4)
    source = base / (os.fsdecode(name) + ".npy")
    np.save(str(source), rows)
    store_path = base / os.fsdecode(name)
    with em.open(form(store_path), memory="1MiB") as store:
        table = store.import_file("t", form(source))
        adopted = store.adopt("a", form(source))
        assert np.array_equal(table[:], rows)
        for ending in (".npy", ".npz:v", ".h5:/v", ".safetensors:v", ".pt", ".fvecs", ".vec"):
            target = f"{base}/{os.fsdecode(name)}-out{ending}"
            table.export(form(target), vocab="none" if ending == ".vec" else None)
            with em.io.open(form(target)) as back:
                assert np.array_equal(back[:], rows), ending
            em.convert(form(target), form(f"{base}/again.npy"), overwrite=True)
            assert np.array_equal(np.load(f"{base}/again.npy"), rows)
            with pytest.raises(FileExistsError):
                table.export(form(target), vocab="none" if ending == ".vec" else None)
        adopted.add([1], np.ones((1, 4), np.float32))
        store.commit()
        store.snapshot(form(base / "copy"))
    with em.open(form(store_path), mode="r") as store:
        assert store["a"][1].tolist() == [2] * 4
        repr(store)
    for bad in (base / "not there.npy", base / "not there.h5"):
        with pytest.raises(FileNotFoundError) as caught:
            em.io.open(form(bad))
        str(caught.value).encode("utf-8", "surrogateescape")
        repr(caught.value)
    (base / "broken.npy").write_bytes(b"nothing")
    with pytest.raises(em.FormatError, match="broken.npy"):
        em.io.open(form(base / "broken.npy"))


def test_a_tilde_is_a_name_and_slashes_at_the_end_do_not_matter(tmp_path, monkeypatch):
    """Shells expand "~"; no library that is given a path does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with em.open("~/") as store:
        store.create("t", rows=3, dim=2)[:] = 1
    assert (tmp_path / "~" / "t.npy").is_file()
    assert not (tmp_path / "home").exists()
    for path in ("~//", "./~", Path("~"), b"~/."):
        with em.open(path, mode="r") as store:
            assert store["t"][1].tolist() == [1, 1]
            assert store.path == tmp_path / "~"


def test_names_that_are_too_long_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", numbered(3, 2))
    longest = "x" * 251 + ".npy"
    em.convert("a.npy", longest)
    assert np.load(longest).shape == (3, 2)
    deep = "y/" * 2_100
    for call in (
        lambda: em.convert("a.npy", "x" + longest),
        lambda: em.io.open("x" + longest),
        lambda: em.open("z" * 256),
        lambda: em.open(deep + "s"),
        lambda: em.io.open(deep + "a.npy"),
        lambda: em.convert("a.npy", deep + "b.npy"),
    ):
        with pytest.raises(OSError, match="File name too long") as caught:
            call()
        assert caught.value.errno == errno.ENAMETOOLONG
    for bad in ("with\0zero", b"with\0zero"):
        for call in (em.open, em.io.open, lambda p: em.convert("a.npy", p)):
            with pytest.raises((ValueError, OSError)):
                call(bad)
    assert sorted(os.listdir()) == sorted(["a.npy", longest])


# --- B151: what is no file ------------------------------------------------------------------------


def test_what_is_no_file_is_named_as_what_it_is(tmp_path, command):
    """A folder, a FIFO, a socket, a device, a loop of links: no wait, no other error."""
    np.save(tmp_path / "a.npy", numbered(3, 2))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    server = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        server.bind("socket")
    finally:
        os.chdir(here)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    things = {
        "folder": r"directory|Is a directory",
        "fifo": r"FIFO|pipe",
        "socket": "socket",
        "loop": "Too many levels of symbolic links",
        "dangling": "No such file",
        "/dev/null": "device",
        "/dev/zero": "device",
        "a.npy/b.npy": "Not a directory",
    }
    for thing, text in things.items():
        where = tmp_path / thing  # an absolute one stays
        for call in (
            lambda where=where: em.io.open(f"{where}", format="npy"),
            lambda where=where: em.convert(where, tmp_path / "out.npy", src_format="npy"),
        ):
            with pytest.raises((OSError, ValueError), match=text) as caught:
                call()
            assert Path(thing).name in str(caught.value)
        done = command("convert", where, tmp_path / "out.npy", "--from", "npy")
        assert done.returncode == 1
        assert done.stderr.count(b"\n") == 1
        assert Path(thing).name.encode() in done.stderr
        if thing not in ("dangling", "/dev/null", "/dev/zero"):
            with pytest.raises((OSError, ValueError)):
                em.open(where / "store" if thing == "a.npy/b.npy" else where, mode="r")
        if thing != "dangling":
            with pytest.raises((OSError, ValueError)) as caught:
                em.convert(tmp_path / "a.npy", where, dst_format="npy", overwrite=True)
    server.close()
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert not (tmp_path / "out.npy").exists()


def test_a_file_that_must_not_change(tmp_path):
    """chattr +i: even root is refused, with the system's reason, and nothing is left behind."""
    np.save(tmp_path / "a.npy", numbered(30, 2))
    done = subprocess.run(["chattr", "+i", tmp_path / "a.npy"], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(done.stderr.decode().strip())
    try:
        with pytest.raises(PermissionError) as caught:
            em.convert(tmp_path / "a.npy", tmp_path / "b.npy")
            em.convert(tmp_path / "b.npy", tmp_path / "a.npy", overwrite=True)
        assert caught.value.errno == errno.EPERM
        assert "a.npy" in str(caught.value)
        with em.open(tmp_path / "s") as store:
            table = store.adopt("t", tmp_path / "a.npy")
            assert not table.writable
            with pytest.raises(PermissionError, match="t"):
                table[5] = 1
            assert table[5].tolist() == [5, 5]
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "a.npy"], check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "b.npy", "s"]


# --- B168: tables in pieces -----------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "pieces"), [(8, 3), (462_356, 50), (2, 5)])
def test_a_table_in_pieces_has_every_row_once(path, tmp_path, rows, pieces):
    """By ranges of rows: the last piece is shorter, those beyond the last row are empty."""
    whole = np.arange(rows, dtype=np.float32)[:, None]
    np.save(tmp_path / "a.npy", whole)
    step = -(-rows // pieces)
    for piece in range(pieces):
        part = slice(piece * step, (piece + 1) * step)
        em.convert(tmp_path / "a.npy", tmp_path / f"{piece:03}.npy", rows=part)
    sizes = [np.load(tmp_path / f"{piece:03}.npy").shape for piece in range(pieces)]
    assert sum(n for n, _ in sizes) == rows
    assert all(n >= 0 and dim == 1 for n, dim in sizes)
    with em.open(path) as store:
        table = store.create("t", rows=0, dim=1)
        for piece in range(pieces):
            with em.io.open(tmp_path / f"{piece:03}.npy") as source:
                for _, block in source.blocks():
                    table.append(block)
        assert np.array_equal(table[:], whole)
