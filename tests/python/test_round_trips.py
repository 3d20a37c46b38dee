"""Every bit goes through every pair of formats that keep them: all dtypes, both byte orders."""

from __future__ import annotations

import io
import itertools
import shutil
import tempfile
import zipfile
from pathlib import Path

import embermap as em
import numpy as np
import pytest

h5py = pytest.importorskip("h5py")
ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64"]
ROWS, DIM = 41, 7
# Formats: the file's name, and options of writing it.
ARRAYS = {
    "npy": ("x.npy", {}),
    "npz": ("x.npz", {}),
    "npz, deflated": ("x.npz:v", {"gzip": 6}),
    "hdf5": ("x.h5", {}),
    "hdf5, gzip": ("x.h5:/g/v", {"gzip": 1}),
    "safetensors": ("x.safetensors:v", {}),
    "torch": ("x.pt:v", {}),
    "raw": ("x.raw", {}),
    "vecs": ("x.vecs", {"dst_format": "vecs"}),
    "bin": ("x.anybin", {"dst_format": "bin"}),
}
# Formats of some dtypes.
SOME = {
    "word2vec binary": ("x.w2v", {"dst_format": "word2vec-binary", "vocab": "none"}, ["float32"]),
    "fvecs": ("x.fvecs", {}, ["float32"]),
    "bvecs": ("x.bvecs", {}, ["uint8"]),
    "ivecs": ("x.ivecs", {}, ["int32"]),
    "fbin": ("x.fbin", {}, ["float32"]),
    "u8bin": ("x.u8bin", {}, ["uint8"]),
    "i8bin": ("x.i8bin", {}, ["int8"]),
    "ibin": ("x.ibin", {}, ["int32"]),
    "f16bin": ("x.f16bin", {}, ["float16"]),
    "parquet": ("x.parquet:v", {}, [d for d in DTYPES if d != "bfloat16"]),
    "arrow": ("x.arrow:v", {}, [d for d in DTYPES if d != "bfloat16"]),
}


def formats_of(dtype):
    found = dict(ARRAYS)
    for name, (file, options, dtypes) in SOME.items():
        if dtype in dtypes:
            found[name] = (file, options)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        for name in ("parquet", "arrow"):  # of some dtypes alone
            found.pop(name, None)
    return found


def kind_of(dtype):
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def rows_of(dtype, rows=ROWS, dim=DIM):
    """Random bits: NaN with payloads, quiet or not, among them; and what is most often lost."""
    kind = kind_of(dtype)
    random = np.random.default_rng(DTYPES.index(dtype))
    bits = random.integers(0, 256, (rows, dim * kind.itemsize), np.uint8)
    out = bits.view(kind)
    if dtype in ("float32", "float16", "bfloat16", "float64"):
        unsigned = out.view(f"u{kind.itemsize}")
        sign = 1 << (8 * kind.itemsize - 1)
        infinity = int(np.array(np.inf, kind).view(f"u{kind.itemsize}"))
        special = [0, sign, 1, sign | 1, infinity, sign | infinity, infinity | 1]
        unsigned.reshape(-1)[: len(special)] = (
            special  # zeros, subnormals, infinities, a signalling NaN
        )
    else:
        limits = np.iinfo(kind)
        out.reshape(-1)[:3] = (limits.min, limits.max, 0)
    return out


def reading(name, dtype, dim=DIM):
    """What has to be said of a file of this format."""
    out = {}
    if name in ("raw", "vecs", "bin") or dtype == "bfloat16":
        out["source_dtype"] = dtype
    if name == "raw":
        out["dim"] = dim
    if name in ("vecs", "bin"):
        out["src_format"] = name
    if name == "word2vec binary":
        out["src_format"], out["vocab"] = name.replace(" ", "-"), "none"
    return out


def convert(source, how, target, options):
    em.convert(source, target, overwrite=True, **{**how, **options})


def same_bits(path, wanted, dtype):
    got = np.load(path)
    kind = kind_of(dtype)
    return got.shape == wanted.shape and got.view(kind).tobytes() == wanted.tobytes()


@pytest.fixture
def quick(tmp_path):
    """A folder in memory where there is one: here is much to sync, and nothing of it counts."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="embermap-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def named(folder, location):
    return f"{folder}/{location}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_formats_keeps_every_bit(quick, dtype):
    wanted = rows_of(dtype)
    start = quick / "start.npy"
    np.save(start, wanted)
    formats = formats_of(dtype)
    assert len(formats) >= 10
    how = {"source_dtype": dtype} if dtype == "bfloat16" else {}
    for name, (file, options) in formats.items():
        (quick / name).mkdir()
        convert(start, how, named(quick / name, file), options)
    back = quick / "back.npy"
    for (source, (file, _)), (target, (other, options)) in itertools.product(
        formats.items(), formats.items()
    ):
        folder = quick / "target"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if target == "npy":
            convert(named(quick / source, file), reading(source, dtype), back, {})
        else:
            made = named(folder, other)
            convert(named(quick / source, file), reading(source, dtype), made, options)
            convert(made, reading(target, dtype), back, {})
        assert same_bits(back, wanted, dtype), f"{source} to {target}"


def big_endian_files(folder, wanted):
    """Of other libraries: (file, array), and one in Fortran order."""
    big = wanted.astype(wanted.dtype.newbyteorder(">"))
    np.save(folder / "big.npy", big)
    np.save(folder / "fortran.npy", np.asfortranarray(big))
    np.savez(folder / "big.npz", v=big)
    with h5py.File(folder / "big.h5", "w") as file:
        file["v"] = big
        file.create_dataset("chunked", data=big, chunks=(5, 3), shuffle=True, compression="gzip")
    yield from ("big.npy", "fortran.npy", "big.npz:v", "big.h5:/v", "big.h5:/chunked")
    torch = pytest.importorskip("torch")
    plain = io.BytesIO()
    torch.save({"v": torch.from_numpy(wanted.copy())}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(folder / "big.pt", "w") as new:
        for entry in old.namelist():
            content = old.read(entry)
            if entry.endswith("/byteorder"):
                content = b"big"
            elif "/data/" in entry:
                content = big.tobytes()
            new.writestr(entry, content)
    yield "big.pt:v"


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in ("int8", "uint8", "bfloat16")])
def test_every_bit_of_big_endian_sources_comes_through(quick, dtype):
    wanted = rows_of(dtype)
    back = quick / "back.npy"
    for source in big_endian_files(quick, wanted):
        for target, (file, options) in formats_of(dtype).items():
            folder = quick / "target"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            made = named(folder, file)
            convert(named(quick, source), {}, made, options)
            convert(made, reading(target, dtype), back, {})
            assert same_bits(back, wanted, dtype), f"{source} to {target}"


LARGE = {
    "npy": "x.npy",
    "npz": "x.npz:v",
    "hdf5": "x.h5:/v",
    "safetensors": "x.safetensors:v",
    "torch": "x.pt:v",
    "raw": "x.raw",
    "fbin": "x.fbin",
}


# Large enough that rows are read ahead and written behind: bytes that are the same in both files
# then take another way, by blocks whose ends are no ends of rows.
def test_rows_that_are_streamed_keep_every_bit(tmp_path):
    dim = 389
    wanted = rows_of("float32", 12_007, dim)
    start = tmp_path / "start.npy"
    np.save(start, wanted)
    for number, (name, file) in enumerate(LARGE.items()):
        folder = tmp_path / name
        folder.mkdir()
        em.convert(start, named(folder, file))
        # Each goes to two others and they back, so that every format is both sides of others.
        for step in (1, 3):
            other, other_file = list(LARGE.items())[(number + step) % len(LARGE)]
            how = {**reading(name, "float32", dim)}
            target = tmp_path / f"{name}-{other}"
            target.mkdir()
            em.convert(named(folder, file), named(target, other_file), **how)
            back = target / "back.npy"
            em.convert(named(target, other_file), back, **reading(other, "float32", dim))
            assert same_bits(back, wanted, "float32"), f"{name} to {other}"
            shutil.rmtree(target)


@pytest.mark.parametrize(
    ("dtype", "to", "small", "large"),
    [
        ("float32", "float16", 1e-9, 1e9),
        ("float64", "float16", 1e-9, 1e9),
        ("float64", "float32", 1e-60, 1e60),
        ("float64", "bfloat16", 1e-60, 1e60),
    ],
)
@pytest.mark.parametrize("rows", [1, 4096, 9001])
def test_what_became_zero_or_infinite_is_counted_on_both_sides(
    quick, dtype, to, small, large, rows
):
    row = [small, -small, 0.0, -0.0, large, -large, np.inf, -np.inf, np.nan, 1.0]
    np.save(quick / "x.npy", np.tile(np.array(row, dtype), (rows, 1)))
    found = em.convert(quick / "x.npy", quick / "y.npy", dtype=to)
    assert (found["became_zero"], found["became_infinite"]) == (2 * rows, 2 * rows)


# 512 KiB are deflated at a time; the last piece may be empty, small or whole.
@pytest.mark.parametrize("rows", [0, 1, 1023, 1024, 1025, 9001])
def test_numpy_inflates_what_is_deflated_in_pieces(quick, rows):
    wanted = rows_of("float32", rows, 128) if rows else np.empty((0, 128), np.float32)
    wanted[rows // 2 :] = 1
    np.save(quick / "x.npy", wanted)
    em.convert(quick / "x.npy", quick / "x.npz", gzip=6)
    with np.load(quick / "x.npz") as file:
        assert file["arr_0"].tobytes() == wanted.tobytes()
    em.convert(quick / "x.npz", quick / "y.npy")
    assert np.load(quick / "y.npy").tobytes() == wanted.tobytes()
