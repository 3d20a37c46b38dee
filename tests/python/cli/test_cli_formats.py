"""npz, safetensors and torch files, with NumPy, safetensors and torch on the other side."""

from __future__ import annotations

import collections
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

if TYPE_CHECKING:
    from .conftest import Embermap

Array = np.ndarray[Any, Any]

DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64"]


def random_bits(rows: int, dim: int, dtype: str) -> Array:
    """Every bit pattern, NaN with payloads among them, and -0.0."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(rows * 1000 + dim)
    bits = rng.integers(0, 256, (rows, dim * kind.itemsize), np.uint8).view(kind)
    if kind.kind == "f" or dtype == "bfloat16":
        bits[0, 0] = -0.0
    return bits


def bits_of(rows: Array) -> Array:
    return np.ascontiguousarray(rows).view(np.uint8)


def as_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def as_torch(rows: Array) -> torch.Tensor:
    if rows.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(rows.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(rows.copy())


def read_npy(path: Path, dtype: str) -> Array:
    rows: Array = np.load(path)
    return rows.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else rows


def read_h5(path: Path, dtype: str) -> Array:
    with h5py.File(path) as f:
        rows = f["v"]
        if dtype != "bfloat16":
            return np.asarray(rows[:])
        raw: Array = np.empty(rows.shape, np.uint16)
        rows.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, rows.id.get_type())
        return raw.view(ml_dtypes.bfloat16)


def read_npz(path: Path, dtype: str) -> Array:
    with np.load(path) as f:
        rows: Array = f["v"]
    return rows.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else rows


# name of the destination, options, and how its own library reads it
TARGETS: dict[str, tuple[str, list[str], Callable[[Path, str], Array]]] = {
    "npy": ("x.npy", [], read_npy),
    "npz": ("x.npz:v", [], read_npz),
    "npz-gzip": ("x.npz:v", ["--gzip", "6"], read_npz),
    "hdf5": ("x.h5:/v", [], read_h5),
    "safetensors": (
        "x.safetensors:v",
        [],
        lambda path, _: as_numpy(safetensors.torch.load_file(path)["v"]),
    ),
    "torch": ("x.pt:v", [], lambda path, _: as_numpy(torch.load(path, weights_only=True)["v"])),
}


def file_of(location: str) -> str:
    return location.rsplit(":", 1)[0] if ":" in location else location


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_other_libraries_read_every_bit(
    cli: Embermap, tmp_path: Path, name: str, dtype: str
) -> None:
    rows = random_bits(57, 9, dtype)
    np.save(tmp_path / "in.npy", rows)
    target, options, reader = TARGETS[name]
    cli.ok("convert", tmp_path / "in.npy", tmp_path / target, "--dtype", dtype, *options)
    back = reader(tmp_path / file_of(target), dtype)
    assert back.shape == rows.shape
    np.testing.assert_array_equal(bits_of(back), bits_of(rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_every_pair_of_formats_keeps_every_bit(cli: Embermap, tmp_path: Path, dtype: str) -> None:
    rows = random_bits(1003, 7, dtype)
    np.save(tmp_path / "in.npy", rows)
    for first, (source, options, _) in TARGETS.items():
        folder = tmp_path / first
        folder.mkdir()
        cli.ok("convert", tmp_path / "in.npy", folder / source, "--dtype", dtype, *options)
        for second, (target, more, reader) in TARGETS.items():
            to = folder / second
            to.mkdir()
            cli.ok("convert", folder / source, to / target, "--dtype", dtype, *more)
            back = reader(to / file_of(target), dtype)
            np.testing.assert_array_equal(bits_of(back), bits_of(rows), f"{first} to {second}")


def test_ls_tells_what_is_in_a_file(cli: Embermap, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros((3, 4), np.float32), b=np.zeros(7, ">i2"))
    result = cli.ok("ls", tmp_path / "x.npz", "--json").json
    assert result["format"] == "npz"
    assert result["entries"] == [
        {"name": "a", "shape": [3, 4], "dtype": "float32", "bytes": 48, "layout": "stored"},
        {"name": "b", "shape": [7], "dtype": ">i2", "bytes": 14, "layout": "stored"},
    ]
    lines = cli.ok("ls", tmp_path / "x.npz").out.splitlines()
    assert [line.split()[-1] for line in lines] == ["a", "b"]
    only = cli.ok("ls", f"{tmp_path}/x.npz:b", "--json").json["entries"]
    assert [entry["name"] for entry in only] == ["b"]
    cli.fails("ls", f"{tmp_path}/x.npz:c", says=["nothing called 'c'"])
    cli.ok("create", tmp_path / "s/t", "--rows", "3", "--dim", "2")
    for name, says in ("s", "is a store"), ("s/t", "is no file"):
        result = cli("ls", tmp_path / name)
        assert result.code == 2
        assert says in result.error
        assert "'embermap info'" in result.error
    cli.fails("ls", tmp_path / "s/u.npy", says=["No such file"])
    cli.ok("ls", tmp_path / "s/t.npy")


# ---- npz ----


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_numpys_archives(cli: Embermap, tmp_path: Path, save: Any) -> None:
    rng = np.random.default_rng(1)
    arrays: dict[str, Array] = {
        "plain": rng.normal(size=(300, 5)).astype(np.float32),
        "fortran": np.asfortranarray(rng.normal(size=(300, 5))),
        "big": rng.normal(size=(10, 3)).astype(">f4"),
        "flag": rng.random((4, 4)) < 0.5,
        "one": np.arange(9),
        "cube": rng.normal(size=(4, 3, 2)),
        "wörter/eins": np.zeros((2, 2), np.int8),
        "empty": np.zeros((0, 3), np.float16),
    }
    save(tmp_path / "x.npz", **arrays)
    for name, rows in arrays.items():
        cli.ok("convert", f"{tmp_path}/x.npz:{name}", tmp_path / "out.npy", "--overwrite")
        back = np.load(tmp_path / "out.npy")
        wanted = rows.reshape(len(rows), int(np.prod(rows.shape[1:])))
        np.testing.assert_array_equal(back, wanted, name)
    cli.fails("convert", tmp_path / "x.npz", tmp_path / "y.npy", says=["could be meant", "plain"])


def test_records_and_objects_in_npz(cli: Embermap, tmp_path: Path) -> None:
    records = np.zeros(5, [("id", "<i8"), ("v", "<f4", (3,))])
    records["v"] = np.arange(15).reshape(5, 3)
    np.savez(tmp_path / "x.npz", r=records, o=np.array([{"a": 1}], object))
    cli.ok("convert", f"{tmp_path}/x.npz:r:v", tmp_path / "v.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), records["v"])
    cli.fails("convert", f"{tmp_path}/x.npz:r", tmp_path / "w.npy", says=["x.npz:r", "name the"])
    cli.fails("convert", f"{tmp_path}/x.npz:o", tmp_path / "w.npy", says=["runs no pickles"])
    entries = {e["name"]: e for e in cli.ok("ls", tmp_path / "x.npz", "--json").json["entries"]}
    assert entries["r:v"]["shape"] == [5, 3]
    assert "pickle" in entries["o"]["dtype"]


def test_a_member_is_added_to_an_archive_of_numpys(cli: Embermap, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(5), text=np.array(["words"]))
    np.save(tmp_path / "in.npy", np.ones((2, 3), np.float32))
    cli.ok("convert", tmp_path / "in.npy", f"{tmp_path}/x.npz:b")
    with np.load(tmp_path / "x.npz") as f:
        assert sorted(f.files) == ["a", "b", "text"]
        np.testing.assert_array_equal(f["a"], np.arange(5))
        np.testing.assert_array_equal(f["b"], np.ones((2, 3)))
        assert f["text"][0] == "words"
    cli.fails("convert", tmp_path / "in.npy", f"{tmp_path}/x.npz:a", says=["already exists"])
    cli.ok("convert", tmp_path / "in.npy", f"{tmp_path}/x.npz:a", "--overwrite")
    with np.load(tmp_path / "x.npz") as f:
        np.testing.assert_array_equal(f["a"], np.ones((2, 3)))
    cli.fails(
        "convert",
        tmp_path / "in.npy",
        tmp_path / "x.npz",
        "--overwrite",
        says=["3 arrays", "would be lost"],
    )
    assert zipfile.ZipFile(tmp_path / "x.npz").testzip() is None


def test_npz_without_a_name_is_numpys_first(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((2, 3), np.float32))
    cli.ok("convert", tmp_path / "in.npy", tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as f:
        assert f.files == ["arr_0"]
    again = tmp_path / "again.npz"
    cli.ok("convert", tmp_path / "in.npy", again)
    assert again.read_bytes() == (tmp_path / "x.npz").read_bytes()


def test_other_compression_is_named(cli: Embermap, tmp_path: Path) -> None:
    plain = io.BytesIO()
    np.save(plain, np.zeros((2, 2)))
    for method, name in [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")]:
        with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as f:
            f.writestr("a.npy", plain.getvalue())
        cli.fails("convert", f"{tmp_path}/x.npz:a", tmp_path / "y.npy", says=[name])


# ---- safetensors ----


def test_tensors_of_every_dtype(cli: Embermap, tmp_path: Path) -> None:
    tensors = {
        "f32": torch.randn(7, 3),
        "f64": torch.randn(7, 3, dtype=torch.float64),
        "f16": torch.randn(7, 3).half(),
        "bf16": torch.randn(7, 3).bfloat16(),
        "i8": torch.randint(-99, 99, (5, 1), dtype=torch.int8),
        "u8": torch.randint(0, 99, (3, 3), dtype=torch.uint8),
        "i32": torch.randint(-99, 99, (5, 1), dtype=torch.int32),
        "i64": torch.randint(-99, 99, (5, 1)),
        "flag": torch.randn(5, 5) > 0,
        "vector": torch.randn(9),
        "cube": torch.randn(4, 3, 2),
        "a.b.c: d": torch.randn(2, 2),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(
        tensors | {"scalar": torch.tensor(1.0), "short": torch.zeros(2, 2, dtype=torch.int16)}, path
    )
    for name, tensor in tensors.items():
        cli.ok("convert", f"{path}:{name}", tmp_path / "o.pt", "--overwrite")
        back = torch.load(tmp_path / "o.pt", weights_only=True)["weight"]
        wanted = tensor.reshape(len(tensor), -1) if len(tensor) else tensor
        assert torch.equal(back, wanted.byte() if name == "flag" else wanted), name
    cli.fails("convert", f"{path}:short", tmp_path / "y.npy", says=["int16", "cannot"])
    cli.fails("convert", f"{path}:scalar", tmp_path / "y.npy", says=["shape ()"])
    cli.fails(
        "convert", f"{path}:f33", tmp_path / "y.npy", says=["no tensor 'f33'", "f32: float32"]
    )
    listed = cli.ok("ls", path, "--json").json["entries"]
    assert {e["name"] for e in listed} == set(tensors) | {"scalar", "short"}
    assert {e["dtype"] for e in listed if e["name"] in ("short", "bf16")} == {"int16", "bfloat16"}


def test_adding_a_tensor_keeps_the_others_and_the_metadata(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    old = {"b": torch.randn(3, 5), "bytes": torch.arange(7, dtype=torch.uint8)}
    safetensors.torch.save_file(old, path, metadata={"format": "pt", "who": 'a "quoted" name'})
    rows = np.random.default_rng(1).normal(size=(4, 2))
    np.save(tmp_path / "in.npy", rows)
    cli.ok("convert", tmp_path / "in.npy", f"{path}:a")
    cli.ok("convert", tmp_path / "in.npy", f"{path}:z", "--dtype", "float16")
    with safetensors.safe_open(path, "pt") as f:
        assert f.metadata() == {"format": "pt", "who": 'a "quoted" name'}
        assert sorted(f.keys()) == ["a", "b", "bytes", "z"]
        assert torch.equal(f.get_tensor("b"), old["b"])
        assert torch.equal(f.get_tensor("bytes"), old["bytes"])
        assert torch.equal(f.get_tensor("a"), torch.from_numpy(rows))
        assert torch.equal(f.get_tensor("z"), torch.from_numpy(rows).half())
    # Every tensor begins at a multiple of its element's size.
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    widths = {"F64": 8, "F32": 4, "F16": 2, "U8": 1}
    for name, entry in header.items():
        if name != "__metadata__":
            assert (8 + size + entry["data_offsets"][0]) % widths[entry["dtype"]] == 0, name
    cli.fails("convert", tmp_path / "in.npy", f"{path}:a", says=["already exists"])
    cli.ok("convert", tmp_path / "in.npy", f"{path}:b", "--overwrite")
    assert torch.equal(safetensors.torch.load_file(path)["b"], torch.from_numpy(rows))


def test_sharded_safetensors(cli: Embermap, tmp_path: Path) -> None:
    shards = [{"a": torch.randn(3, 4), "b": torch.randn(2, 2)}, {"c": torch.randn(5, 1)}]
    where: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-00002.safetensors"
        safetensors.torch.save_file(shard, tmp_path / name)
        where |= dict.fromkeys(shard, name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    for name, tensor in (shards[0] | shards[1]).items():
        cli.ok("convert", f"{index}:{name}", tmp_path / "o.npy", "--overwrite")
        np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), tensor.numpy())
    assert [e["name"] for e in cli.ok("ls", index, "--json").json["entries"]] == ["a", "b", "c"]
    cli.fails("convert", f"{index}:d", tmp_path / "y.npy", says=["no tensor 'd'"])
    np.save(tmp_path / "in.npy", np.ones((2, 2)))
    cli.fails("convert", tmp_path / "in.npy", f"{index}:d", says=["only read"])
    for bad in ["../x.safetensors", "/etc/passwd", "..", ""]:
        index.write_text(json.dumps({"weight_map": {"a": bad}}))
        cli.fails("convert", f"{index}:a", tmp_path / "y.npy", says=["no file beside the index"])
    index.write_text(json.dumps({"weight_map": {"a": where["c"]}}))
    cli.fails("convert", f"{index}:a", tmp_path / "y.npy", says=["'a'", "where it is not"])
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    cli.fails(
        "convert", f"{index}:a", tmp_path / "y.npy", says=["gone.safetensors", "No such file"]
    )


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ((1 << 62).to_bytes(8, "little") + b'{"a"', "more than the 100000000"),
        ((99_999_999).to_bytes(8, "little") + b'{"a"', "truncated"),
        (safetensors_bytes(b'{"a": '), "no JSON"),
        (safetensors_bytes(b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"), "'a' is an array"),
        (
            safetensors_bytes(b'{"a":{"x":' + b"[" * 500 + b"]" * 500 + b',"dtype":"F32"}}'),
            "nested more than 64 deep",
        ),
        (safetensors_bytes({"a": 5}), "'a' is 5"),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": [1]}}), "no data_offsets"),
        (
            safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}),
            "truncated",
        ),
        (
            safetensors_bytes(
                {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"
            ),
            "has 8 bytes",
        ),
        (
            safetensors_bytes(
                {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"
            ),
            "shape of 'a' holds -1",
        ),
        (
            safetensors_bytes(
                {"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 4]}}, b"1234"
            ),
            "has 4 bytes",
        ),
        (
            safetensors_bytes(
                {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"
            ),
            "belong to no tensor",
        ),
        (
            safetensors_bytes(
                {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"
            ),
            "end at byte 4",
        ),
        (
            safetensors_bytes(
                {
                    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                    "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
                },
                b"12345678",
            ),
            "inside the one before",
        ),
        (
            safetensors_bytes(
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
                b"12345678",
            ),
            "'a' is there twice",
        ),
        (safetensors_bytes({"__metadata__": {"a": 1}}), "metadata 'a' is 1"),
        (b"", "truncated"),
        (b"\x93NUMPY\x01\x00" + b"x" * 20, "truncated header"),
    ],
)
def test_broken_safetensors(cli: Embermap, tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    cli.fails("convert", f"{tmp_path}/x.safetensors:a", tmp_path / "y.npy", says=[says])
    assert not (tmp_path / "y.npy").exists()


# ---- torch ----


def checkpoint() -> dict[Any, Any]:
    base = torch.randn(40, 12)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 6), torch.nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(20)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": {
            "whole": base,
            "rows": base[3:11],
            "columns": base[:, 2:7],
            "every_second": base[::2, ::3],
            "transposed": base.t(),
            "expanded": base[:1].expand(9, 12),
            "spread": base[:, :1].expand(40, 5),
            "cube": base.view(40, 3, 4),
            "turned": base.view(40, 3, 4).permute(2, 0, 1),
            "turned2": base.view(40, 3, 4).permute(0, 2, 1),
            "windows": base.flatten().unfold(0, 20, 4),
        },
        "list": [torch.randn(2, 2), (torch.randn(3, 1),)],
        "parameter": torch.nn.Parameter(torch.randn(4, 4)),
        "half": torch.randn(3, 3).half(),
        "bf16": torch.randn(3, 3).bfloat16(),
        "i32": torch.arange(6, dtype=torch.int32).view(2, 3),
        "flag": torch.randn(4, 4) > 0,
        "empty": torch.zeros(0, 3),
        "epoch": 3,
        "loss": 0.5,
        "name": "wörter",
        "big": 1 << 80,
        "nothing": None,
        7: torch.randn(2, 2),
    }


def walk(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list | tuple):
        entries = list(enumerate(value))
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, entry in entries:
        found |= walk(entry, f"{name}.{key}" if name else str(key))
    return found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_of_a_checkpoint(cli: Embermap, tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.pt"
    saved = checkpoint()
    torch.save(saved, path, pickle_protocol=protocol)
    wanted = walk(saved)
    listed = cli.ok("ls", path, "--json").json
    assert listed["format"] == "torch"
    shapes = {e["name"]: e["shape"] for e in listed["entries"]}
    assert shapes == {name: list(tensor.shape) for name, tensor in wanted.items()}
    for name, tensor in wanted.items():
        if tensor.dim() == 0:
            cli.fails("convert", f"{path}:{name}", tmp_path / "o.npy", says=["shape ()"])
            continue
        cli.ok("convert", f"{path}:{name}", tmp_path / "o.safetensors", "--overwrite")
        back = safetensors.torch.load_file(tmp_path / "o.safetensors")["weight"]
        rows = tensor.detach().reshape(len(tensor), -1) if len(tensor) else tensor
        assert torch.equal(back, rows.byte() if name == "flag" else rows), name
    cli.fails("convert", f"{path}:model.0.wieght", tmp_path / "y.npy", says=["model.0.weight"])


def test_a_tensor_alone_and_a_module(cli: Embermap, tmp_path: Path) -> None:
    rows = torch.randn(5, 3)
    torch.save(rows, tmp_path / "x.pth")
    cli.ok("convert", tmp_path / "x.pth", tmp_path / "o.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), rows.numpy())
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    cli.fails(
        "ls", tmp_path / "m.pt", says=["torch.nn.modules.linear.Linear", "nothing is executed"]
    )
    torch.save({"a": rows.to_sparse()}, tmp_path / "s.pt")
    cli.fails("ls", tmp_path / "s.pt", says=["torch._utils._rebuild_sparse_tensor"])
    torch.save({"a": np.zeros(3)}, tmp_path / "n.pt")
    cli.fails("ls", tmp_path / "n.pt", says=["numpy"])


def test_torch_reads_what_is_written(cli: Embermap, tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(300, 70)).astype(np.float32)
    np.save(tmp_path / "in.npy", rows)
    cli.ok("convert", tmp_path / "in.npy", f"{tmp_path}/x.pt:encoder.emb.weight")
    for mmap in (False, True):
        state = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
        assert isinstance(state, collections.OrderedDict)
        assert list(state) == ["encoder.emb.weight"]
        np.testing.assert_array_equal(state["encoder.emb.weight"].numpy(), rows)
    # Without a name, as the state of an Embedding.
    cli.ok("convert", tmp_path / "in.npy", tmp_path / "e.pth")
    embedding = torch.nn.Embedding(300, 70)
    embedding.load_state_dict(torch.load(tmp_path / "e.pth", weights_only=True))
    np.testing.assert_array_equal(embedding.weight.detach().numpy(), rows)
    np.save(tmp_path / "none.npy", rows[:0])
    cli.ok("convert", tmp_path / "none.npy", tmp_path / "none.pt")
    assert torch.load(tmp_path / "none.pt", weights_only=True)["weight"].shape == (0, 70)
    cli.fails("convert", tmp_path / "in.npy", tmp_path / "x.pt", says=["already exists"])


def test_legacy_files_of_torch_are_read_and_others_named(cli: Embermap, tmp_path: Path) -> None:
    rows = torch.randn(5, 3)
    torch.save({"a": rows}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    entries = cli.ok("ls", tmp_path / "old.pt", "--json").json["entries"]
    assert [(e["name"], e["shape"]) for e in entries] == [("a", [5, 3])]
    cli.ok("convert", tmp_path / "old.pt", tmp_path / "old.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "old.npy"), rows.numpy())
    (tmp_path / "p.pt").write_bytes(pickle.dumps({"a": 1}))
    cli.fails("ls", tmp_path / "p.pt", says=["pickle"])
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "s.pt")
    cli.fails("ls", tmp_path / "s.pt", says=["TorchScript"])


def rewrite(
    source: Path, to: Path, change: Callable[[str, bytes], bytes | None], **options: Any
) -> None:
    """A copy of a zip archive whose records are changed, or left out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(to, "w", **options) as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)


def test_big_endian_and_deflated_torch_files(cli: Embermap, tmp_path: Path) -> None:
    rows = torch.randn(50, 3)
    torch.save({"a": rows, "t": rows.t()}, tmp_path / "x.pt")

    def turn(name: str, content: bytes) -> bytes:
        if name.endswith("/byteorder"):
            return b"big"
        return (
            np.frombuffer(content, "<f4").astype(">f4").tobytes() if "/data/" in name else content
        )

    rewrite(tmp_path / "x.pt", tmp_path / "big.pt", turn, compression=zipfile.ZIP_DEFLATED)
    for name, wanted in [("a", rows), ("t", rows.t())]:
        cli.ok("convert", f"{tmp_path}/big.pt:{name}", tmp_path / "o.npy", "--overwrite")
        np.testing.assert_array_equal(np.load(tmp_path / "o.npy"), wanted.numpy())

    def bad(name: str, content: bytes) -> bytes:
        return b"middle" if name.endswith("/byteorder") else content

    rewrite(tmp_path / "x.pt", tmp_path / "bad.pt", bad)
    cli.fails("ls", tmp_path / "bad.pt", says=["byte order", "middle"])

    def gone(name: str, content: bytes) -> bytes | None:
        return None if "/data/" in name else content

    rewrite(tmp_path / "x.pt", tmp_path / "gone.pt", gone)
    cli.fails("convert", f"{tmp_path}/gone.pt:a", tmp_path / "y.npy", says=["storage '0'"])

    def short(name: str, content: bytes) -> bytes:
        return content[:-4] if "/data/" in name else content

    rewrite(tmp_path / "x.pt", tmp_path / "short.pt", short)
    cli.fails("convert", f"{tmp_path}/short.pt:a", tmp_path / "y.npy", says=["596 bytes"])


class Evil:
    """What runs when a pickle of it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (str(self.mark), "w"))


def torch_file(path: Path, code: bytes) -> None:
    with zipfile.ZipFile(path, "w") as f:
        f.writestr("archive/data.pkl", code)
        f.writestr("archive/data/0", bytes(64))
        f.writestr("archive/version", "3\n")


def test_nothing_in_a_pickle_is_executed(cli: Embermap, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for protocol in range(2, 6):
        torch_file(tmp_path / "x.pt", pickle.dumps({"a": Evil(mark)}, protocol))
        cli.fails("ls", tmp_path / "x.pt", says=["open"])
    torch_file(tmp_path / "x.pt", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    cli.fails("ls", tmp_path / "x.pt", says=["os.system"])
    assert not mark.exists()


STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ"
)


def rebuilt(offset: int, size: bytes, stride: bytes) -> bytes:
    """A dictionary with a tensor "a" over 16 floats."""
    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n("
        + STORAGE
        + b"K"
        + bytes([offset])
        + size
        + stride
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (rebuilt(0, b"K\x04K\x04\x86", b"K\x05K\x01\x86"), "leaves its storage"),
        (rebuilt(1, b"K\x04K\x04\x86", b"K\x04K\x01\x86"), "leaves its storage"),
        (rebuilt(0, b"K\x04\x85", b"K\x04K\x01\x86"), "1 sizes and 2 strides"),
        (rebuilt(0, b"J\xff\xff\xff\xff\x85", b"K\x01\x85"), "whole number of 0 or more"),
        (
            rebuilt(0, b"\x8a\x08" + b"\xff" * 7 + b"\x7f" + b"K\x04\x86", b"K\x04K\x01\x86"),
            "leaves its storage",
        ),
        (b"\x80\x02" + b"(" * 100 + b".", "values are left"),
        (b"\x80\x02" + b"]" * 3 + b"aa", "ends inside"),
        (b"\x80\x02.", "values are left"),
        (b"\x80\x02h\x05.", "slot 5"),
        (b"\x80\x02X\xff\xff\xff\xffabc", "truncated"),
        (b"\x80\x02\x8d" + b"\xff" * 8 + b"abc", "truncated"),
        (b"\x80\x01.", "protocol 1"),
        (b"\x80\x02]q\x00h\x00a.", "deep"),
        (b"\x80\x02]" + b"]" * 3000 + b"a" * 3000 + b".", "deep"),
        (b"\x80\x02I5\n.", "0x49"),
        (b"\x80\x02K\x05)R.", "a number is called"),
        (b"", "ends inside"),
    ],
)
def test_broken_pickles(cli: Embermap, tmp_path: Path, code: bytes, says: str) -> None:
    torch_file(tmp_path / "x.pt", code)
    cli.fails("ls", tmp_path / "x.pt", says=[says])


def test_pickles_that_grow_without_end(cli: Embermap, tmp_path: Path) -> None:
    # Lists of ten times the list before: 10^20 entries in some hundred bytes.
    nested = b"\x80\x02]q\x00"
    for i in range(20):
        nested += b"0](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1])
    torch_file(tmp_path / "y.pt", nested + b".")
    cli.fails("ls", tmp_path / "y.pt", says=["entries"], timeout=60)


# ---- damage ----


@pytest.mark.parametrize("name", ["x.npz:v", "x.safetensors:v", "x.pt:v"])
def test_cut_files_are_errors(cli: Embermap, tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "in.npy", np.ones((40, 3), np.float32))
    cli.ok("convert", tmp_path / "in.npy", tmp_path / name)
    path = tmp_path / file_of(name)
    whole = path.read_bytes()
    for size in [0, 1, 7, 9, 30, len(whole) // 3, len(whole) // 2, len(whole) - 20, len(whole) - 1]:
        path.write_bytes(whole[:size])
        cli.fails("convert", tmp_path / name, tmp_path / "o.npy")
    assert not (tmp_path / "o.npy").exists()
