"""HDF5 files of other programs through the command line, and files larger than memory."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

Array = np.ndarray[Any, Any]


def random_rows(rows: int, dim: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(rows + dim).normal(0, 30, (rows, dim)).astype(dtype)


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "gzip, shuffle, fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "lzf, shuffle, fletcher32": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "szip": {"compression": "szip"},
    "fletcher32": {"fletcher32": True},
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", ">f8", "<i8", "|i1"])
def test_chunks_that_h5py_wrote(cli: Embermap, tmp_path: Path, filters: str, dtype: str) -> None:
    if filters == "szip" and not h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP):
        pytest.skip("this h5py has no szip")
    rows = random_rows(1003, 24, dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, chunks in (("whole", (100, 24)), ("parts", (64, 10)), ("one", (1003, 24))):
            if filters == "szip" and chunks[1] == 10:
                chunks = (64, 12)
            file.create_dataset(name, data=rows, chunks=chunks, **FILTERS[filters])
    for name in ("whole", "parts", "one"):
        result = cli("convert", f"{tmp_path}/x.h5:{name}", tmp_path / "y.npy", "--overwrite")
        if filters == "szip" and result.code != 0:
            assert "needs filter 4 (szip), which is not available" in result.error
            continue
        assert (result.code, result.err) == (0, "")
        got = np.load(tmp_path / "y.npy")
        assert got.dtype == np.dtype(dtype).newbyteorder("=")
        assert got.tobytes() == rows.astype(got.dtype).tobytes()


@pytest.mark.parametrize("gzip", [[], ["--gzip", "0"], ["--gzip", "9"]])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (4096, 64), (4097, 64), (5, 300_000)])
def test_h5py_reads_what_is_written(
    cli: Embermap, tmp_path: Path, gzip: list[str], shape: tuple[int, int]
) -> None:
    rows = random_rows(*shape)
    np.save(tmp_path / "x.npy", rows)
    cli.ok("convert", tmp_path / "x.npy", f"{tmp_path}/y.h5:/a/b", *gzip)
    with h5py.File(tmp_path / "y.h5") as file:
        assert file["/a/b"][:].tobytes() == rows.tobytes()
        attributes = dict(file["/a/b"].attrs)
    assert attributes == {"source": str(tmp_path / "x.npy").encode(), "source_dtype": b"float32"}


def test_attributes_say_where_rows_are_from(cli: Embermap, tmp_path: Path) -> None:
    cli.ok("create", tmp_path / "s/t", "--rows", "10", "--dim", "3")
    cli.ok("export", tmp_path / "s/t", tmp_path / "t.h5")
    with h5py.File(tmp_path / "t.h5") as file:
        attributes = dict(file["data"].attrs)
        assert attributes["source"] == str(tmp_path / "s/t").encode()
        assert attributes["source_dtype"] == b"float32"
        assert attributes["commit"].dtype == np.int64
    listed = cli.ok("ls", tmp_path / "t.h5").out
    assert f"    commit = {attributes['commit']}\n" in listed
    assert f"    source = {tmp_path / 's/t'}\n" in listed
    (entry,) = cli.ok("ls", tmp_path / "t.h5", "--json").json["entries"]
    assert entry["attributes"]["source_dtype"] == "float32"


def test_attributes_of_other_programs_are_listed(cli: Embermap, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("v", data=np.zeros((2, 2)))
        data.attrs["epoch"] = 3
        data.attrs["rate"] = 0.5
        data.attrs["fixed"] = np.bytes_(b"text")
        data.attrs["text"] = "of any length"
        data.attrs["shape"] = [1.0, 2.0]
    (entry,) = cli.ok("ls", tmp_path / "x.h5", "--json").json["entries"]
    assert entry["attributes"] == {
        "epoch": "3",
        "rate": "0.5",
        "fixed": "text",
        "text": "variable-length string",
        "shape": "float64, several values",
    }


def test_weights_of_keras(cli: Embermap, tmp_path: Path) -> None:
    """model.save_weights("x.h5") of Keras 2: groups by layer, names with ':'."""
    rows, kernel = random_rows(50, 8), random_rows(8, 4)
    with h5py.File(tmp_path / "x.weights.h5", "w") as file:
        file.attrs["layer_names"] = [b"embedding", b"dense"]
        file.attrs["backend"] = "tensorflow"
        group = file.create_group("embedding")
        group.attrs["weight_names"] = [b"embedding/embeddings:0"]
        group.create_dataset("embedding/embeddings:0", data=rows)
        dense = file.create_group("dense")
        dense.create_dataset("dense/kernel:0", data=kernel)
        dense.create_dataset("dense/bias:0", data=np.zeros(4, np.float32))
    name = f"{tmp_path}/x.weights.h5:/embedding/embedding/embeddings:0"
    cli.ok("convert", name, tmp_path / "y.npy")
    assert np.load(tmp_path / "y.npy").tobytes() == rows.tobytes()
    cli.fails(
        *("convert", tmp_path / "x.weights.h5", tmp_path / "z.npy"),
        says=["2 datasets could be meant", "/dense/dense/kernel:0"],
    )
    names = [e["name"] for e in cli.ok("ls", tmp_path / "x.weights.h5", "--json").json["entries"]]
    assert "/embedding/embedding/embeddings:0" in names


def test_embeddings_of_pytorch_biggraph(cli: Embermap, tmp_path: Path) -> None:
    """embeddings_link_0.v10.h5 of PyTorch-BigGraph: rows, and a state that is opaque bytes."""
    rows = random_rows(200, 16)
    with h5py.File(tmp_path / "embeddings_link_0.v10.h5", "w") as file:
        file.attrs["format_version"] = 1
        file.create_dataset("embeddings", data=rows)
        state = np.frombuffer(b"not read" * 10, np.uint8)
        file.create_dataset("optimizer/state_dict", data=state.view("V1"))
    cli.ok("import", tmp_path / "embeddings_link_0.v10.h5", tmp_path / "s/link")
    cli.ok("export", tmp_path / "s/link", tmp_path / "y.npy")
    assert np.load(tmp_path / "y.npy").tobytes() == rows.tobytes()


def test_other_files_only_as_allowed(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(10, 4)
    (tmp_path / "in").mkdir()
    for target in ("in/below.h5", "outside.h5"):
        with h5py.File(tmp_path / target, "w") as file:
            file["v"] = rows
    rows.tofile(tmp_path / "outside.raw")
    with h5py.File(tmp_path / "in/x.h5", "w") as file:
        file["below"] = h5py.ExternalLink("below.h5", "/v")
        file["outside"] = h5py.ExternalLink("../outside.h5", "/v")
        file["soft"] = h5py.SoftLink("/below")
        external = [("../outside.raw", 0, rows.nbytes)]
        file.create_dataset("raw", rows.shape, rows.dtype, external=external)
        layout = h5py.VirtualLayout(rows.shape, rows.dtype)
        layout[:] = h5py.VirtualSource("../outside.h5", "v", rows.shape, rows.dtype)
        file.create_virtual_dataset("virtual", layout)
    below, outside, raw, virtual = (
        f"{tmp_path}/in/x.h5:{name}" for name in ("below", "outside", "raw", "virtual")
    )
    out, none = tmp_path / "y.npy", tmp_path / "none.npy"
    cli.fails("convert", below, none, says=["external link to below.h5", "follow_links"])
    for name in (outside, raw, virtual):
        cli.fails("convert", name, none, says=["allow_external"])
        says = ["not below the file's own folder"]
        cli.fails("convert", name, none, "--allow-external", says=says)
        cli.ok("convert", name, out, "--follow-links", "--overwrite")
        assert np.load(out).tobytes() == rows.tobytes()
    cli.ok("convert", below, out, "--allow-external", "--overwrite")
    assert np.load(out).tobytes() == rows.tobytes()
    cli.ok("import", below, tmp_path / "s/t", "--follow-links")
    # Soft links too that lead to such a link, by whole names and by parts of them.
    with h5py.File(tmp_path / "in/x.h5", "a") as file:
        file["group/soft"] = h5py.SoftLink("out")
        file["group/out"] = h5py.ExternalLink("below.h5", "/")
        file["round"] = h5py.SoftLink("/round")
    for name in ("soft", "group/soft/v"):
        soft = f"{tmp_path}/in/x.h5:{name}"
        cli.fails("convert", soft, none, says=["external link to below.h5", "allow_external"])
        cli.ok("convert", soft, out, "--allow-external", "--overwrite")
        assert np.load(out).tobytes() == rows.tobytes()
    cli.fails("convert", f"{tmp_path}/in/x.h5:round", none, "--follow-links", says=["soft link"])


def test_the_only_dataset_may_have_any_shape(cli: Embermap, tmp_path: Path) -> None:
    for shape, columns in (((6,), 1), ((6, 2, 3), 6)):
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["v"] = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        cli.ok("convert", tmp_path / "x.h5", tmp_path / "y.npy", "--overwrite")
        assert np.load(tmp_path / "y.npy").shape == (6, columns)


def test_damaged_chunks_leave_nothing(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(1000, 16)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("v", data=rows, chunks=(100, 16), compression="gzip")
        place = data.id.get_chunk_info(7).byte_offset
    with (tmp_path / "x.h5").open("r+b") as file:
        file.seek(place + 20)
        file.write(b"\xff" * 40)
    says = ["x.h5", "/v: the chunk at (700, 0) is damaged", "deflated"]
    cli.fails("convert", tmp_path / "x.h5", tmp_path / "y.npy", says=says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.h5"]


# --- larger than memory ---------------------------------------------------------------------------


def peak_of(command: list[Any]) -> int:
    """Run a command that must succeed; the most bytes that were resident.

    Not what wait4() tells: that counts the memory of the process which it was forked from.
    """
    peak = 0
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                break
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.005)
    assert process.returncode == 0
    assert peak > 1 << 20
    return peak


def test_a_billion_rows_of_a_sparse_file_take_neither_memory_nor_disk(
    cli: Embermap, tmp_path: Path
) -> None:
    rows = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.int8, (10**9, 1))
    rows[123_456_789] = 7
    rows[-1] = -7
    del rows
    if (tmp_path / "x.npy").stat().st_blocks > 1 << 20:
        pytest.skip("this file system has no sparse files")
    for target in ("y.npy", "y.safetensors", "y.h5"):
        out = tmp_path / target
        assert peak_of([cli.path, "convert", tmp_path / "x.npy", out]) < 256 << 20
        assert out.stat().st_size > 10**9
        assert out.stat().st_blocks * 512 < 10 << 20
        if target != "y.npy":
            assert peak_of([cli.path, "convert", out, tmp_path / "back.npy"]) < 256 << 20
            out = tmp_path / "back.npy"
        got = np.load(out, mmap_mode="r")
        assert got.shape == (10**9, 1)
        assert (got[123_456_789, 0], got[-1, 0], got[5, 0]) == (7, -7, 0)
        out.unlink()


@pytest.mark.parametrize("target", ["y.npy", "y.safetensors", "y.pt", "y.npz", "y.h5", "y.fvecs"])
def test_large_files_pass_past_the_page_cache_with_little_memory(
    cli: Embermap, tmp_path: Path, target: str
) -> None:
    """Larger than what is copied by the caller alone, with ends that no block fits."""
    rows = random_rows(150_001, 63)
    np.save(tmp_path / "x.npy", rows)
    result = cli.ok("convert", tmp_path / "x.npy", tmp_path / target, "--json").json
    back = cli.ok("convert", tmp_path / target, tmp_path / "back.npy", "--json").json
    assert np.load(tmp_path / "back.npy").tobytes() == rows.tobytes()
    for told in (result, back):
        assert told["reading"] in ("direct", "") or told["reading"].startswith("buffered (")
    peak = peak_of(
        [cli.path, "convert", tmp_path / target, tmp_path / "z.npy", "--memory", "64MiB"]
    )
    assert peak < 110 << 20
