"""Checkpoints as they go wrong for people with other tools: docs/bug-corpus.md, section E."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def rows_of(tensor):
    return tensor.detach().reshape(len(tensor), -1).numpy()


# --- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_views_are_the_rows_that_they_show(store, tmp_path, legacy):
    whole = torch.arange(200_000.0).reshape(2000, 100)
    views = {
        "ten": whole[50:60],
        "transposed": whole[:30].t(),
        "second": whole[::2],
        "left": whole[10:30, :60],
        "right": whole[20:40, 40:],
        "column": whole[:, 5:6],
        "expanded": whole[3:4].expand(7, 100),
    }
    path = tmp_path / "x.pt"
    torch.save(views, path, _use_new_zipfile_serialization=not legacy)
    for name, view in views.items():
        table = store.import_file(name, f"{path}:{name}")
        assert table.shape == tuple(view.shape)
        assert np.array_equal(table[:], view.numpy()), name
    store["ten"].export(tmp_path / "ten.pt")
    assert (tmp_path / "ten.pt").stat().st_size < 20_000
    assert torch.equal(torch.load(tmp_path / "ten.pt", weights_only=True)["weight"], views["ten"])


def test_some_rows_of_a_large_table_are_a_small_file(store, tmp_path):
    store.create("t", rows=1_000_000, dim=300)
    store["t"].scatter([999_999], np.full((1, 300), 3, np.float32))
    part = store.from_array("part", store["t"][999_990:])
    for name in ("x.pt", "x.safetensors", "x.npz", "x.npy", "x.h5"):
        part.export(tmp_path / name)
        assert (tmp_path / name).stat().st_size < 20_000, name
        assert em.io.open(tmp_path / name)[-1].tolist() == [3] * 300


def test_tensors_that_are_not_contiguous_or_share_memory(store, tmp_path):
    whole = torch.arange(120.0).reshape(10, 12)
    for name, view in {
        "t": whole.t(),
        "step": whole[:, ::3],
        "flipped": whole.flip(0),
        "slice": whole[2:5, 1:7],
    }.items():
        table = store.from_array(name, view)
        for target in (f"{name}.safetensors", f"{name}.pt"):
            table.export(tmp_path / target)
        back = safetensors_torch.load_file(tmp_path / f"{name}.safetensors")["weight"]
        assert torch.equal(back, view)
        assert torch.equal(torch.load(tmp_path / f"{name}.pt", weights_only=True)["weight"], view)
    torch.save({"A": whole, "B": whole[:1], "C": whole}, tmp_path / "shared.pt")
    for name, wanted in {"A": whole, "B": whole[:1], "C": whole}.items():
        em.convert(f"{tmp_path}/shared.pt:{name}", f"{tmp_path}/apart.safetensors:{name}")
        assert np.array_equal(em.io.open(f"{tmp_path}/shared.pt:{name}")[:], wanted.numpy())
    back = safetensors_torch.load_file(tmp_path / "apart.safetensors")
    assert {name: tuple(t.shape) for name, t in back.items()} == {
        "A": (10, 12),
        "B": (1, 12),
        "C": (10, 12),
    }
    assert torch.equal(back["B"], whole[:1])


# --- kinds of files -------------------------------------------------------------------------------


def saved(tensor):
    model = torch.nn.Embedding.from_pretrained(tensor.clone())
    return {
        "alone": tensor,
        "dictionary": {"a": torch.zeros(3, 2), "w": tensor, "c": torch.ones(4)},
        "ordered": collections.OrderedDict(w=tensor),
        "state": {"model": {"encoder.weight": tensor}, "epoch": 3},
        "model": model.state_dict(),
        "parameter": {"w": torch.nn.Parameter(tensor)},
        "list": [torch.zeros(2, 2), {"w": tensor}],
    }


NAMES = {
    "alone": "",
    "dictionary": ":w",
    "ordered": ":w",
    "state": ":model.encoder.weight",
    "model": ":weight",
    "parameter": ":w",
    "list": ":1.w",
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_files_of_every_age(store, tmp_path, kind, legacy):
    tensor = torch.randn(1000, 8)
    path = tmp_path / "x.pt"
    torch.save(saved(tensor)[kind], path, _use_new_zipfile_serialization=not legacy)
    assert len(em.io.ls(path)) >= 1
    table = store.import_file("t", f"{path}{NAMES[kind]}")
    assert np.array_equal(table[:], tensor.numpy())


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool"],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_dtypes_of_every_age(store, tmp_path, dtype, legacy):
    tensor = (torch.randn(30, 7) * 20).to(getattr(torch, dtype))
    path = tmp_path / "x.pt"
    torch.save(
        {"first": torch.zeros(3, dtype=torch.int16), "w": tensor, "last": torch.ones(2)},
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    table = store.import_file("t", f"{path}:w")
    assert torch.equal(table.gather(torch.arange(30)), tensor.byte() if dtype == "bool" else tensor)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("legacy", [False, True])
def test_every_protocol_of_pickle(store, tmp_path, protocol, legacy):
    tensor = torch.randn(30, 7)
    torch.save(
        {
            "w": tensor,
            "epoch": 3,
            "loss": 0.5,
            "name": "x",
            "size": torch.Size([1]),
            "big": 1 << 80,
        },
        tmp_path / "x",  # told by its content
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=not legacy,
    )
    assert np.array_equal(store.import_file("t", tmp_path / "x")[:], tensor.numpy())


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tensor_of_a_gpu_is_read_without_one(store, tmp_path, legacy):
    tensor = torch.randn(50, 4)
    path = tmp_path / "x.pt"
    torch.save({"w": tensor}, path, _use_new_zipfile_serialization=not legacy)
    old, new = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"
    if legacy:
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))
    else:
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                archive.writestr(
                    name, content.replace(old, new, 1) if name.endswith("data.pkl") else content
                )
    assert np.array_equal(store.import_file("t", path)[:], tensor.numpy())


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_that_are_no_tables_are_refused(store, tmp_path, legacy):
    path = tmp_path / "x.pt"
    for name, tensor in {
        "sparse": torch.eye(4).to_sparse(),
        "csr": torch.eye(4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.randn(3, 3), 0.1, 0, torch.qint8),
    }.items():
        torch.save({"w": tensor}, path, _use_new_zipfile_serialization=not legacy)
        with pytest.raises((em.FormatError, TypeError), match="rebuild_|qint8") as caught:
            store.import_file("t", path)
        assert "x.pt" in str(caught.value), name
    for dtype in ("complex64", "int16"):
        torch.save(
            {"w": torch.zeros(3, 2, dtype=getattr(torch, dtype))},
            path,
            _use_new_zipfile_serialization=not legacy,
        )
        with pytest.raises(TypeError, match=dtype):
            store.import_file("t", path)
    assert store.tables() == []


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_is_executed_whatever_the_age(store, tmp_path, legacy):
    mark = tmp_path / "ran"
    path = tmp_path / "x.pt"
    torch.save(
        {"w": torch.zeros(2, 2), "x": Evil(mark)}, path, _use_new_zipfile_serialization=not legacy
    )
    for call in (em.io.open, em.io.ls, lambda src: store.import_file("t", src)):
        with pytest.raises(em.FormatError, match="mkdir"):
            call(path)
    assert not mark.exists()


def test_files_before_1_6_that_are_cut_or_lie(store, tmp_path):
    tensor = torch.randn(300, 5)
    path = tmp_path / "x.pt"
    torch.save({"a": torch.zeros(7), "w": tensor}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for size in [*range(0, 900, 7), len(whole) - 6001, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises((em.FormatError, ValueError, em.NotFoundError), match=r"x\.pt"):
            em.io.open(f"{path}:w")
    path.write_bytes(whole + b"more")  # torch reads it as well
    assert np.array_equal(em.io.open(f"{path}:w")[:], tensor.numpy())
    # The number of elements before a storage is not the pickle's.
    place = whole.rindex((1500).to_bytes(8, "little"))
    for count in (1499, 1 << 62, (1 << 64) - 1, 0):
        path.write_bytes(whole[:place] + count.to_bytes(8, "little") + whole[place + 8 :])
        with pytest.raises(em.FormatError, match=r"x\.pt.*storage"):
            em.io.open(f"{path}:w")


# --- large files ----------------------------------------------------------------------------------


def big_safetensors(path, rows, dim, others):
    """A table of (rows, dim) among `others` tensors of 1 GiB each, none of which is on disk."""
    header, at = {}, 0
    for i in range(others):
        header[f"layer.{i}.weight"] = {
            "dtype": "F32",
            "shape": [1 << 28],
            "data_offsets": [at, at + (1 << 30)],
        }
        at += 1 << 30
    size = rows * dim * 4
    header["embed.weight"] = {"dtype": "F32", "shape": [rows, dim], "data_offsets": [at, at + size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + at + size)
        file.seek(-dim * 4, os.SEEK_END)
        file.write(np.full(dim, 3, np.float32).tobytes())


def big_torch(path, rows, dim, others):
    """The same as torch.save() lays it out, storages as holes."""
    torch.save(
        {
            **{f"layer.{i}.weight": torch.zeros(1) for i in range(others)},
            "embed.weight": torch.zeros(rows, dim),
        },
        path,
    )


READ = """
    import sys
    import embermap as em
    def read():
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("rchar"))
    em.io.ls(sys.argv[1])
    before = read()
    with em.open(sys.argv[2], memory="16MiB") as store:
        table = store.import_file("t", sys.argv[1] + ":embed.weight")
        assert table[table.rows - 1].tolist() == [3] * table.dim
        print(read() - before)
"""


def test_one_tensor_is_read_without_the_others(store, tmp_path, run_python):
    rows, dim = 50_000, 100  # 20 MB
    path = tmp_path / "x.safetensors"
    big_safetensors(path, rows, dim, 5)
    assert path.stat().st_size > 5 << 30
    read = int(run_python(READ, path, tmp_path / "s").stdout)
    assert read < 1.2 * rows * dim * 4 + (4 << 20)
    assert [entry.name for entry in em.io.ls(path)][-1] == "embed.weight"
    with pytest.raises(em.NotFoundError, match=r"'embed.wieght'; it holds embed.weight"):
        store.import_file("t", f"{path}:embed.wieght")


@pytest.mark.parametrize("name", ["x.pt", "old.pt", "x.h5", "x.npz"])
def test_one_array_of_other_formats_is_read_without_the_others(store, tmp_path, run_python, name):
    table = torch.zeros(20_000, 100)
    table[-1] = 3
    arrays = {f"layer.{i}.weight": torch.randn(200_000, 10) for i in range(5)}  # 8 MB each
    arrays = {**arrays, "embed.weight": table, "tail": torch.randn(1_000_000)}
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save(arrays, path, _use_new_zipfile_serialization=name == "x.pt")
    elif name == "x.h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            for key, value in arrays.items():
                file[key] = value.numpy()
    else:
        np.savez(path, **{key: value.numpy() for key, value in arrays.items()})
    assert path.stat().st_size > 50_000_000
    read = int(run_python(READ, path, tmp_path / "s").stdout)
    assert read < 1.2 * 8_000_000 + (4 << 20)
    with pytest.raises(em.NotFoundError, match="embed.wieght.*embed.weight"):
        store.import_file("t", f"{path}:embed.wieght")


# --- saving ---------------------------------------------------------------------------------------


EXPORT = """
    import sys
    import embermap as em
    with em.open(sys.argv[1], mode="r", memory="4MiB") as store:
        print("begun", flush=True)
        for i in range(1000):
            for name in sys.argv[2:]:
                store["t"].export(name, overwrite=True)
"""


def test_kills_leave_an_old_or_a_new_file(path, tmp_path):
    rows = np.arange(200_000, dtype=np.float32).reshape(50_000, 4)
    with em.open(path) as store:
        store.from_array("t", rows)
    targets = [tmp_path / f"out.{end}" for end in ("npy", "pt", "safetensors", "npz", "h5")]
    for target in targets:
        em.convert(path / "t.npy", target)
    rng = np.random.default_rng(0)
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(EXPORT), str(path), *map(str, targets)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"begun\n"
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for target in targets:
            assert np.array_equal(em.io.open(target)[:], rows), target
    # What a kill leaves is not taken for what it was to become, and is in nobody's way.
    left = [
        p.name for p in tmp_path.iterdir() if p.name not in {t.name for t in targets} | {"store"}
    ]
    assert all(name.startswith(".") or ".tmp" in name or "part" in name for name in left), left
    with em.open(path, mode="r") as store:
        for target in targets:
            store["t"].export(target, overwrite=True)


def test_a_failure_in_the_middle_leaves_the_old_file(store, tmp_path):
    table = store.create("t", rows=300_000, dim=4)
    table[:] = 1
    table[299_999] = 300

    class Stop(Exception):
        pass

    def stop(done, total):
        if done > total // 2:
            raise Stop

    for end in ("npy", "pt", "safetensors", "npz", "h5", "raw"):
        target = tmp_path / f"out.{end}"
        target.write_bytes(b"old")
        with pytest.raises(Stop):
            table.export(target, overwrite=True, progress=stop)
        with pytest.raises(TypeError, match="300"):
            table.export(target, overwrite=True, dtype="uint8")
        assert target.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 7
