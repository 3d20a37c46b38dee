"""`embermap convert`: every pair of formats, dtypes, what is refused, what is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import ml_dtypes
import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

Array = np.ndarray[Any, Any]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def random_rows(rows: int, dim: int, dtype: Any = np.float32) -> Array:
    values = np.random.default_rng(rows * 1000 + dim).normal(0, 30, (rows, dim))
    return values.astype(dtype)


def write_npy(path: Path, rows: Array) -> str:
    np.save(path.with_suffix(".npy"), rows)
    return str(path.with_suffix(".npy"))


def write_npy_fortran(path: Path, rows: Array) -> str:
    return write_npy(path, np.asfortranarray(rows))


def write_npy_field(path: Path, rows: Array) -> str:
    records = np.zeros(len(rows), [("id", "<i8"), ("v", rows.dtype, rows.shape[1:])])
    records["v"] = rows
    return write_npy(path, records) + ":v"


def write_h5(path: Path, rows: Array, **options: Any) -> str:
    with h5py.File(path.with_suffix(".h5"), "w") as f:
        f.create_dataset("g/rows", data=rows, **options)
    return f"{path.with_suffix('.h5')}:/g/rows"


def write_h5_gzip(path: Path, rows: Array) -> str:
    chunk = (max(1, min(64, rows.shape[0])), max(1, rows.shape[1] // 2))
    return write_h5(path, rows, chunks=chunk, compression="gzip", shuffle=True)


def read(location: str) -> Array:
    file, _, name = location.partition(":")
    if file.endswith(".npy"):
        assert not name
        return np.load(file)
    with h5py.File(file) as f:
        rows: Array = f[name][:]
    return rows


SOURCES: list[Callable[[Path, Array], str]] = [
    write_npy,
    write_npy_fortran,
    write_npy_field,
    write_h5,
    write_h5_gzip,
]
TARGETS = [("out.npy", []), ("out.h5:/a/b", []), ("out.h5:/a/b", ["--gzip", "4"])]


@pytest.mark.parametrize("write", SOURCES)
@pytest.mark.parametrize(("target", "options"), TARGETS)
@pytest.mark.parametrize("shape", [(1, 1), (1003, 37), (0, 5)])
def test_every_pair_of_formats(
    cli: Embermap,
    tmp_path: Path,
    write: Callable[[Path, Array], str],
    target: str,
    options: list[str],
    shape: tuple[int, int],
) -> None:
    rows = random_rows(*shape)
    if write is write_h5_gzip and shape[0] == 0:
        pytest.skip("h5py does not compress nothing")
    source = write(tmp_path / "in", rows)
    report = cli.ok("convert", source, target, "--json", *options, cwd=tmp_path).json
    result = read(str(tmp_path / target))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, rows)
    assert (report["rows"], report["dim"], report["dtype"]) == (*shape, "float32")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "int8", "uint8", "int32", "int64"]
)
@pytest.mark.parametrize("target", ["out.npy", "out.h5:/v"])
def test_every_dtype_keeps_its_bits(cli: Embermap, tmp_path: Path, dtype: str, target: str) -> None:
    bits = np.random.default_rng(1).integers(0, 256, (50, 24), np.uint8)
    rows = bits.view(dtype)
    cli.ok("convert", write_npy(tmp_path / "in", rows), target, cwd=tmp_path)
    result = read(str(tmp_path / target))
    assert result.dtype == np.dtype(dtype)
    assert result.tobytes() == rows.tobytes()


def test_big_endian_and_bool_become_native(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(9, 4)
    cli.ok("convert", write_npy(tmp_path / "a", rows.astype(">f4")), "b.npy", cwd=tmp_path)
    assert np.load(tmp_path / "b.npy").dtype == "<f4"
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows)
    cli.ok("convert", write_npy(tmp_path / "c", rows > 0), "d.npy", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "d.npy"), (rows > 0).astype(np.uint8))


SPECIAL = [65504, 65520, 1e5, 6e-8, 1e-8, 5.96e-8, -0.0, np.nan, 1 + 2**-11, 1 + 3 * 2**-11, 2049]


@pytest.mark.parametrize("source_dtype", ["float32", "float64"])
@pytest.mark.parametrize(("source", "target"), [("a.npy", "b.h5:/v"), ("a.h5:/v", "b.npy")])
def test_narrowing_rounds_to_nearest_even_and_reports(
    cli: Embermap, tmp_path: Path, source: str, target: str, source_dtype: str
) -> None:
    rows = np.array([SPECIAL], source_dtype)
    (write_npy if source.endswith(".npy") else write_h5)(tmp_path / "a", rows)
    if source.endswith("/v"):
        source = "a.h5:/g/rows"
    result = cli("convert", source, target, "--dtype", "float16", "--json", cwd=tmp_path)
    assert result.code == 0
    lines = result.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("embermap: warning: ")
    assert "2 values became infinite" in lines[0]
    assert "1 became zero" in lines[0]
    assert (result.json["became_infinite"], result.json["became_zero"]) == (2, 1)
    assert (result.json["source_dtype"], result.json["dtype"]) == (source_dtype, "float16")
    with np.errstate(over="ignore"):
        expected = rows.astype(np.float16)
    got = read(str(tmp_path / target))
    np.testing.assert_array_equal(got, expected)
    assert np.signbit(got[0, 6])


def test_bfloat16_there_and_back(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(40, 8)
    narrow = rows.astype(ml_dtypes.bfloat16)
    write_npy(tmp_path / "a", rows)
    for target in ["b.npy", "b.h5:/v"]:
        cli.ok("convert", "a.npy", target, "--dtype", "bfloat16", cwd=tmp_path)
    assert np.load(tmp_path / "b.npy").view(ml_dtypes.bfloat16).tobytes() == narrow.tobytes()
    # The bytes are named by --source-dtype, or by --dtype bfloat16.
    cli.fails("convert", "b.npy", "c.npy", cwd=tmp_path, says=["b.npy", "bfloat16"])
    cli.fails(*["convert", "b.npy", "c.npy", "--dtype", "float16"], cwd=tmp_path, says=["bfloat16"])
    assert not (tmp_path / "c.npy").exists()
    cli.ok("convert", "b.npy", "c.npy", "--dtype", "bfloat16", cwd=tmp_path)
    assert (tmp_path / "c.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    wide = ["--source-dtype", "bfloat16", "--dtype", "float32"]
    cli.ok("convert", "b.npy", "d.npy", *wide, cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "d.npy"), narrow.astype(np.float32))
    cli.ok("convert", "b.h5:/v", "e.npy", "--dtype", "float32", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "e.npy"), narrow.astype(np.float32))


@pytest.mark.parametrize("value", [-1, 256, 300.7, np.nan, np.inf])
def test_values_an_integer_cannot_hold_are_refused(
    cli: Embermap, tmp_path: Path, value: float
) -> None:
    rows = np.zeros((5, 3), np.float32)
    rows[3, 1] = value
    write_npy(tmp_path / "a", rows)
    for target in ["b.npy", "b.h5:/v"]:
        cli.fails(
            *["convert", "a.npy", target, "--dtype", "uint8"], cwd=tmp_path, says=["a.npy", "row 3"]
        )
    assert names(tmp_path) == ["a.npy"]


def test_structured_source_without_a_field_lists_the_fields(cli: Embermap, tmp_path: Path) -> None:
    write_npy_field(tmp_path / "a", random_rows(4, 3))
    cli.fails("convert", "a.npy", "b.npy", cwd=tmp_path, says=["id", "v", "a.npy"])
    cli.fails("convert", "a.npy:w", "b.npy", cwd=tmp_path, says=["'w'", "id", "v"])
    assert names(tmp_path) == ["a.npy"]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((), np.float32),
        np.zeros((3, 0), np.float32),
        np.zeros((3, 2), np.uint16),
        np.zeros((3, 2), np.complex64),
        np.zeros((3, 2), "M8[s]"),
        np.zeros((3, 2), "U5"),
        np.zeros((3, 2), "S3"),
    ],
    ids=lambda a: f"{a.dtype.str}-{a.shape}",
)
def test_what_is_no_table_is_refused_with_its_shape_or_dtype(
    cli: Embermap, tmp_path: Path, array: Array
) -> None:
    write_npy(tmp_path / "a", array)
    error = cli.fails("convert", "a.npy", "b.npy", cwd=tmp_path, says=["a.npy"]).error
    assert str(array.shape) in error or array.dtype.str in error
    assert names(tmp_path) == ["a.npy"]


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (7, 1, 2, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_are_the_first_dimension(
    cli: Embermap, tmp_path: Path, shape: tuple[int, ...], order: Any
) -> None:
    array = np.asarray(random_rows(shape[0], int(np.prod(shape[1:]))).reshape(shape), order=order)
    np.save(tmp_path / "a.npy", array)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["plain"] = array
        f.create_dataset(
            "packed", data=array, chunks=tuple(max(1, n // 2) for n in shape), compression=1
        )
    for source in ["a.npy", "a.h5:plain", "a.h5:packed"]:
        cli.ok("convert", source, "b.npy", "--overwrite", cwd=tmp_path)
        np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), array.reshape(shape[0], -1))


def test_what_rows_do_not_show_is_said(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random_rows(10, 24).reshape(10, 2, 3, 4))
    np.save(tmp_path / "one.npy", np.arange(5, dtype=np.float32))
    cube = "a.npy has shape (10, 2, 3, 4): read as 10 rows of 24 columns"
    for number, command in enumerate([["convert", "a.npy", "b.npy"], ["import", "a.npy", "s/t"]]):
        assert cli.ok(*command, cwd=tmp_path).out.splitlines()[1:] == [cube]
        again = [*command[:-1], f"s/again{number}" if number else "c.npy"]
        assert cli.ok(*again, "--json", cwd=tmp_path).json["remarks"] == [cube]
        again[-1] += "2" if number else ".npy"
        assert cli.ok(*again, "--quiet", cwd=tmp_path).out == ""
    line = cli.ok("convert", "one.npy", "d.npy", cwd=tmp_path).out.splitlines()[1]
    assert line == "one.npy has shape (5,): read as 5 rows of one column"
    assert "remarks" not in cli.ok("convert", "b.npy", "e.npy", "--json", cwd=tmp_path).json
    with h5py.File(tmp_path / "x.h5", "w") as f:
        lossy = f.create_dataset("lossy", (4, 2), "f4", chunks=(2, 2), scaleoffset=2)
        lossy[:2] = 1
    for target in ["f.npy", "s/f"]:
        command = "import" if "/" in target else "convert"
        result = cli(command, "x.h5:lossy", target, cwd=tmp_path)
        assert result.code == 0
        assert len(result.err.splitlines()) == 2
        assert "x.h5:/lossy went through a lossy filter, scaleoffset" in result.err
        assert "1 of 2 chunks never written" in result.err


def test_object_arrays_are_never_unpickled(cli: Embermap, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "a.npy", np.array([[Trap()]], object), allow_pickle=True)
    shutil.rmtree(tmp_path / "sprung", ignore_errors=True)
    for command in [["convert", "a.npy", "b.npy"], ["import", "a.npy", "t/x"], ["info", "a.npy"]]:
        error = cli.fails(*command, cwd=tmp_path, says=["a.npy"]).error
        assert "allow" not in error
    assert names(tmp_path) == ["a.npy"]


@pytest.mark.parametrize("keep", [0, 5, 100, 128, 1000, 128 + 16 * 8 * 4 - 5])
def test_truncated_source_is_refused_and_left_alone(
    cli: Embermap, tmp_path: Path, keep: int
) -> None:
    write_npy(tmp_path / "a", random_rows(1000, 8))
    data = (tmp_path / "a.npy").read_bytes()[:keep]
    (tmp_path / "a.npy").write_bytes(data)
    before = (tmp_path / "a.npy").stat().st_mtime_ns
    cli.fails("convert", "a.npy", "b.npy", cwd=tmp_path, says=["a.npy"])
    cli.fails("import", "a.npy", "t/x", cwd=tmp_path, says=["a.npy"])
    cli.fails("import", "a.npy", "t/x", "--in-place", cwd=tmp_path, says=["a.npy"])
    assert (tmp_path / "a.npy").read_bytes() == data
    assert (tmp_path / "a.npy").stat().st_mtime_ns == before
    assert names(tmp_path) == ["a.npy"]


def test_destination_is_only_replaced_when_told(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(10, 4)
    write_npy(tmp_path / "a", rows)
    (tmp_path / "b.npy").write_bytes(b"precious")
    cli.fails("convert", "a.npy", "b.npy", cwd=tmp_path, says=["b.npy", "--overwrite"])
    assert (tmp_path / "b.npy").read_bytes() == b"precious"
    # A failure in the middle leaves the old file.
    write_npy(tmp_path / "bad", np.full((10, 4), 300.0))
    cli.fails(*["convert", "bad.npy", "b.npy", "--overwrite", "--dtype", "uint8"], cwd=tmp_path)
    assert (tmp_path / "b.npy").read_bytes() == b"precious"
    cli.ok("convert", "a.npy", "b.npy", "--overwrite", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows)
    assert names(tmp_path) == ["a.npy", "b.npy", "bad.npy"]


@pytest.mark.parametrize("name", ["a.npy", "./a.npy", "d/../a.npy", "soft.npy", "hard.npy"])
def test_source_as_destination(cli: Embermap, tmp_path: Path, name: str) -> None:
    rows = random_rows(300, 4)
    (tmp_path / "d").mkdir()
    write_npy(tmp_path / "a", rows)
    (tmp_path / "soft.npy").symlink_to("a.npy")
    (tmp_path / "hard.npy").hardlink_to(tmp_path / "a.npy")
    before = (tmp_path / "a.npy").read_bytes()
    listing = names(tmp_path)
    cli.fails("convert", "a.npy", name, cwd=tmp_path, says=["source itself", "--overwrite"])
    assert (tmp_path / "a.npy").read_bytes() == before
    cli.ok("convert", "a.npy", name, "--overwrite", "--dtype", "float64", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / name), rows.astype(np.float64))
    assert names(tmp_path) == listing
    if name == "hard.npy":  # the other name keeps the old file
        assert (tmp_path / "a.npy").read_bytes() == before
    if name == "soft.npy":
        assert (tmp_path / "soft.npy").is_symlink()


def test_other_datasets_are_not_lost_with_the_file(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(10, 4)
    write_npy(tmp_path / "a", rows)
    with h5py.File(tmp_path / "b.h5", "w") as f:
        f["v"] = np.zeros((3, 2), np.float32)
        f["other"] = rows * 2
    before = (tmp_path / "b.h5").read_bytes()
    cli.fails("convert", "a.npy", "b.h5:/v", cwd=tmp_path, says=["b.h5:/v", "already exists"])
    cli.fails("convert", "a.npy", "b.h5", cwd=tmp_path, says=["b.h5", "already exists"])
    cli.fails(
        *["convert", "a.npy", "b.h5", "--overwrite"], cwd=tmp_path, says=["/other, /v", "be lost"]
    )
    assert (tmp_path / "b.h5").read_bytes() == before
    # Added beside the others, replaced by name, from a file and from the file itself.
    cli.ok("convert", "a.npy", "b.h5:/g/new", cwd=tmp_path)
    cli.ok("convert", "a.npy", "b.h5:/v", "--overwrite", cwd=tmp_path)
    half = ["--dtype", "float16", "--overwrite"]
    cli.ok("convert", "b.h5:/other", "b.h5:/copy", cwd=tmp_path)
    cli.ok("convert", "b.h5:/other", "b.h5:/other", *half, cwd=tmp_path)
    for name, expected in {
        "v": rows,
        "g/new": rows,
        "copy": rows * 2,
        "other": (rows * 2).astype(np.float16),
    }.items():
        result = read(f"{tmp_path}/b.h5:/{name}")
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    assert names(tmp_path) == ["a.npy", "b.h5"]


def test_a_broken_hdf5_file_is_left_alone_unless_replaced_as_a_whole(
    cli: Embermap, tmp_path: Path
) -> None:
    rows = random_rows(10, 4)
    write_npy(tmp_path / "a", rows)
    write_h5(tmp_path / "b", rows)
    cut = (tmp_path / "b.h5").read_bytes()[:-100]
    (tmp_path / "b.h5").write_bytes(cut)
    for target in ["b.h5", "b.h5:/v"]:
        cli.fails("convert", "a.npy", target, cwd=tmp_path, says=["b.h5"])
    cli.fails(*["convert", "a.npy", "b.h5:/v", "--overwrite"], cwd=tmp_path, says=["incomplete"])
    assert (tmp_path / "b.h5").read_bytes() == cut
    cli.ok("convert", "a.npy", "b.h5", "--overwrite", cwd=tmp_path)
    np.testing.assert_array_equal(read(f"{tmp_path}/b.h5:/data"), rows)


def test_an_hdf5_file_in_use_is_left_alone(cli: Embermap, tmp_path: Path) -> None:
    write_npy(tmp_path / "a", random_rows(10, 4))
    with h5py.File(tmp_path / "b.h5", "w") as f:
        f["v"] = random_rows(10, 4)
        f.flush()
        for command in [
            ["info", "b.h5"],
            ["convert", "b.h5:/v", "c.npy"],
            ["convert", "a.npy", "b.h5:/v", "--overwrite"],
        ]:
            cli.fails(*command, cwd=tmp_path, says=["b.h5", "open for writing"])
    cli.ok("info", "b.h5", cwd=tmp_path)
    assert names(tmp_path) == ["a.npy", "b.h5"]


@pytest.mark.parametrize("target", ["folder.npy", "pipe.npy", "/dev/null.npy", "gone/b.npy"])
def test_impossible_destinations(cli: Embermap, tmp_path: Path, target: str) -> None:
    write_npy(tmp_path / "a", random_rows(3, 2))
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "null.npy").symlink_to("/dev/null")
    before = names(tmp_path)
    target = "null.npy" if target == "/dev/null.npy" else target
    for options in [[], ["--overwrite"]]:
        cli.fails("convert", "a.npy", target, *options, cwd=tmp_path, says=[target], timeout=20)
    assert names(tmp_path) == before
    assert (tmp_path / "null.npy").is_char_device()


def test_a_file_of_a_store_is_never_replaced(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(100, 4)
    write_npy(tmp_path / "a", rows)
    cli.ok("import", "a.npy", "t/x", cwd=tmp_path)
    before = {p.name: p.read_bytes() for p in (tmp_path / "t").iterdir()}
    (tmp_path / "link.npy").symlink_to("t/x.npy")
    for target in ["t/x.npy", "link.npy"]:
        cli.fails(
            *["convert", "a.npy", target, "--overwrite"],
            cwd=tmp_path,
            says=["store", "not replaced"],
        )
        cli.fails("export", "t/x", target, "--overwrite", cwd=tmp_path, says=["not replaced"])
    assert {p.name: p.read_bytes() for p in (tmp_path / "t").iterdir()} == before


def test_rows_that_only_the_store_knows_are_not_read_as_zeros(
    cli: Embermap, tmp_path: Path
) -> None:
    shape = ["--rows", "100", "--dim", "8"]
    cli.ok("create", "t/ones", *shape, "--init", "constant:1", cwd=tmp_path)
    cli.ok("create", "t/zeros", *shape, "--optimizer", "adagrad", cwd=tmp_path)
    cli.fails(
        *["convert", "t/ones.npy", "b.npy"], cwd=tmp_path, says=["never written", "embermap export"]
    )
    cli.fails("import", "t/ones.npy", "u/x", cwd=tmp_path, says=["never written"])
    assert names(tmp_path) == ["t"]
    for field in ["weight", "sum"]:
        cli.ok("convert", f"t/zeros.npy:{field}", f"{field}.npy", cwd=tmp_path)
        np.testing.assert_array_equal(
            np.load(tmp_path / f"{field}.npy"), np.zeros((100, 8), np.float32)
        )
    cli.fails("convert", "t/zeros.npy", "b.npy", cwd=tmp_path, says=["weight", "sum"])
    # With a broken store the file is all there is: read, with a warning.
    manifest = tmp_path / "t" / "embermap.json"
    good = manifest.read_bytes()
    manifest.write_bytes(b"{")
    result = cli("convert", "t/ones.npy", "c.npy", cwd=tmp_path)
    assert result.code == 0
    assert result.err.startswith("embermap: warning: t/ones.npy")
    manifest.write_bytes(good)
    cli.ok("materialize", "t/ones", cwd=tmp_path)
    cli.ok("convert", "t/ones.npy", "b.npy", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), np.ones((100, 8), np.float32))


@pytest.mark.parametrize(
    "folder", [b"with space", "p\u00e4th \u0442".encode(), b"ff\xff", b"new\nline", b"co:lon.h5"]
)
def test_any_bytes_in_a_path(cli: Embermap, tmp_path: Path, folder: bytes) -> None:
    rows = random_rows(20, 3)
    base = tmp_path / os.fsdecode(folder)
    base.mkdir()
    np.save(base / "a:b.npy", rows)
    cli.ok("convert", "a:b.npy", "c.h5:/v", cwd=base)
    cli.ok("convert", f"{base}/c.h5:/v", base / "d.npy")
    np.testing.assert_array_equal(np.load(base / "d.npy"), rows)
    cli.ok("import", base / "d.npy", base / "t" / "x")
    assert cli.info(base / "t")["tables"][0]["rows"] == 20
    cli.ok("import", base / "d.npy", base / "t" / "y", "--in-place")
    for table in ["x", "y"]:
        cli.ok("export", base / "t" / table, base / f"{table}.npy")
        np.testing.assert_array_equal(np.load(base / f"{table}.npy"), rows)


def test_names_at_the_limit(cli: Embermap, tmp_path: Path) -> None:
    write_npy(tmp_path / "a", random_rows(3, 2))
    longest = "x" * 251 + ".npy"
    cli.ok("convert", "a.npy", longest, cwd=tmp_path)
    cli.fails("convert", "a.npy", "x" + longest, cwd=tmp_path, says=["File name too long"])
    cli.fails("info", "y/" * 2100 + "a.npy", cwd=tmp_path, says=["File name too long"])


def sparse_npy(path: Path, rows: int, dim: int) -> None:
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + rows * dim * 4)


def peak_memory(process: subprocess.Popen[bytes]) -> int:
    """The most memory that was resident in a program at once, in bytes; waits for its end."""
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.005)
    process.wait(60)
    return peak


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["convert", "a.npy", "b.npy"], 256),
        (["convert", "a.npy", "b.npy", "--memory", "16MiB", "--dtype", "float16"], 64),
        (["convert", "a.npy", "b.h5:/v"], 256),
        (["convert", "a.npy", "b.h5:/v", "--gzip", "1"], 256),
        (["import", "a.npy", "t/x"], 256),
        (["import", "a.npy", "t/x", "--memory", "32MiB", "--optimizer", "adagrad"], 96),
    ],
)
def test_memory_is_bounded(cli: Embermap, tmp_path: Path, arguments: list[str], limit: int) -> None:
    sparse_npy(tmp_path / "a.npy", 768 * 1024, 128)  # 384 MiB
    with subprocess.Popen(
        [cli.path, *arguments], cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as process:
        peak = peak_memory(process)
        assert process.returncode == 0
    assert 2**20 < peak < limit * 2**20
    if "--dtype" not in arguments and arguments[0] == "convert" and arguments[2] == "b.npy":
        assert (tmp_path / "b.npy").stat().st_size >= 384 * 2**20


def test_a_fortran_file_needs_no_more(cli: Embermap, tmp_path: Path) -> None:
    rows, dim = 400_000, 64
    with (tmp_path / "a.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": True, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        file.truncate(start + rows * dim * 4)
        for column in range(dim):
            file.seek(start + 4 * (column * rows + 123_456))
            file.write(np.float32(column + 1).tobytes())
    with subprocess.Popen(
        [cli.path, "convert", "a.npy", "b.npy", "--memory", "64MiB", "--quiet"], cwd=tmp_path
    ) as process:
        assert peak_memory(process) < 128 * 2**20
        assert process.returncode == 0
    result = np.load(tmp_path / "b.npy", mmap_mode="r")
    np.testing.assert_array_equal(result[123_456], np.arange(1, 65, dtype=np.float32))
    assert not result[123_455].any()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    "command",
    [
        ["convert", "a.npy", "b.npy"],
        ["convert", "a.npy", "b.h5:/v"],
        ["convert", "a.npy", "b.h5:/v", "--gzip", "4"],
        ["import", "a.npy", "t/x"],
    ],
)
def test_a_signal_stops_cleanly(
    cli: Embermap, tmp_path: Path, command: list[str], number: signal.Signals, code: int
) -> None:
    sparse_npy(tmp_path / "a.npy", 2**23, 128)  # 4 GiB: far from done when the signal comes
    process = subprocess.Popen(
        [cli.path, *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while len(names(tmp_path)) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(names(tmp_path)) == 2
    time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == b""
    assert err.decode() == f"embermap: error: stopped by {number.name}\n"
    assert names(tmp_path) == ["a.npy"]


def test_a_full_disk_names_the_file_and_leaves_nothing(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2**17, 128), np.float32))  # 64 MiB, none of it a hole
    (tmp_path / "small").mkdir()
    script = (
        "mount -t tmpfs -o size=8m tmpfs small || exit 77\n"
        '"$0" "$@" 2>err; code=$?; ls -A small >left; exit $code'
    )
    for command in [
        ["convert", "a.npy", "small/b.npy"],
        ["convert", "a.npy", "small/b.h5:/v"],
        ["import", "a.npy", "small/t/x"],
    ]:
        try:
            done = subprocess.run(
                ["unshare", "-m", "sh", "-c", script, cli.path, *command],
                cwd=tmp_path,
                capture_output=True,
                timeout=120,
                check=False,
            )
        except FileNotFoundError:
            pytest.skip("no unshare")
        if done.returncode not in (0, 1):
            pytest.skip("not allowed to mount")
        error = (tmp_path / "err").read_text()
        assert done.returncode == 1, error
        assert error.startswith("embermap: error: ")
        assert error.count("\n") == 1
        assert "No space left on device" in error
        assert "small/" in error
        assert (tmp_path / "left").read_text() == "", error


def test_a_file_size_limit_is_an_error(cli: Embermap, tmp_path: Path) -> None:
    sparse_npy(tmp_path / "a.npy", 2**16, 128)  # 32 MiB
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 1024; exec "$0" convert a.npy b.npy', cli.path],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done
    assert b"File too large" in done.stderr
    assert names(tmp_path) == ["a.npy"]


def test_exports_at_once_into_one_hdf5_file_are_all_kept(cli: Embermap, tmp_path: Path) -> None:
    rows = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    np.save(tmp_path / "a.npy", rows)
    for path in ["old.h5", "new.h5"]:
        if path == "old.h5":
            cli.ok("convert", "a.npy", f"{path}:/base", cwd=tmp_path)
        running = [
            subprocess.Popen([cli.path, "convert", "-q", "a.npy", f"{path}:/d{i}"], cwd=tmp_path)
            for i in range(8)
        ]
        assert [process.wait(timeout=60) for process in running] == [0] * 8
        with h5py.File(tmp_path / path) as f:
            assert len(f) == 8 + (path == "old.h5")
            for dataset in f.values():
                np.testing.assert_array_equal(dataset[:], rows)


@pytest.mark.parametrize("options", [[], ["--gzip", "1"]])
def test_a_failed_write_of_hdf5_ends_with_its_error_alone(
    cli: Embermap, tmp_path: Path, options: list[str]
) -> None:
    np.save(tmp_path / "big.npy", np.random.default_rng(0).random((50_000, 16)))
    done = subprocess.run(
        [
            *["bash", "-c", 'ulimit -f 8; trap "" XFSZ; exec "$0" "$@"', cli.path],
            *["convert", "big.npy", "e.h5:/x", *options],
        ],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, len(lines)) == (1, 1), done
    assert "e.h5" in lines[0]
    assert os.listdir(tmp_path) == ["big.npy"]
