"""`embermap info` on everything."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import ml_dtypes
import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap


def test_npy_facts(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 7), np.float16))
    facts = cli.info(tmp_path / "a.npy")
    size = (tmp_path / "a.npy").stat().st_size
    expected = {
        "kind": "npy",
        "version": "1.0",
        "dtype": "float16",
        "descr": "<f2",
        "fields": [],
        "shape": [5, 7],
        "fortran_order": False,
        "item_bytes": 2,
        "data_offset": size - 70,
        "data_bytes": 70,
        "file_bytes": size,
        "in_place": True,
        "in_place_obstacle": None,
    }
    assert {key: facts[key] for key in expected} == expected
    text = cli.ok("info", tmp_path / "a.npy").out
    assert "float16" in text
    assert "(5, 7)" in text


@pytest.mark.parametrize(
    ("array", "dtype", "obstacle"),
    [
        (np.asfortranarray(np.zeros((3, 4), np.float32)), "float32", "Fortran"),
        (np.zeros(3, np.float32), "float32", "1 dimensions"),
        (np.zeros((2, 3, 4), np.float32), "float32", "3 dimensions"),
        (np.zeros((3, 4), np.uint16), "<u2", "<u2"),
        (np.zeros((3, 4), np.complex64), "<c8", "<c8"),
        (np.zeros((3, 0), np.float32), "float32", "no elements"),
        (np.zeros(2, [("id", "<i8"), ("v", "<f4", (4,))]), "structured", "structured"),
    ],
)
def test_npy_that_cannot_be_used_in_place_says_why(
    cli: Embermap, tmp_path: Path, array: np.ndarray, dtype: str, obstacle: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    facts = cli.info(tmp_path / "a.npy")
    assert facts["dtype"] == dtype
    assert facts["shape"] == list(array.shape)
    assert facts["in_place"] is False
    assert obstacle in facts["in_place_obstacle"]
    assert obstacle in cli.ok("info", tmp_path / "a.npy").out


def test_structured_npy_lists_its_fields(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(2, [("id", "<i8"), ("v", "<f4", (4,))]))
    fields = cli.info(tmp_path / "a.npy")["fields"]
    assert [(f["name"], f["dtype"], f["shape"], f["offset"]) for f in fields] == [
        ("id", "int64", [], 0),
        ("v", "float32", [4], 8),
    ]
    assert [f["name"] for f in cli.info(f"{tmp_path}/a.npy:v")["fields"]] == ["v"]
    cli.fails("info", f"{tmp_path}/a.npy:w", says=["'w'", "a.npy"])


def test_bfloat16_npy(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), ml_dtypes.bfloat16))
    assert cli.info(tmp_path / "a.npy")["in_place"] is True


def test_sparse_file_is_looked_at_without_reading_it(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "huge.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (2**33, 64)}
        )
        file.truncate(file.tell() + 2**41)
    facts = cli.info(path)
    assert facts["data_bytes"] == 2**41
    assert facts["allocated_bytes"] < 2**20


def test_hdf5_facts(cli: Embermap, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        f["plain"] = np.zeros((6, 4), np.float32)
        f.create_dataset(
            "g/packed",
            (1003, 300),
            "<f4",
            chunks=(64, 128),
            compression="gzip",
            shuffle=True,
            fletcher32=True,
            maxshape=(None, 300),
        )
        f.create_dataset("lossy", (1000, 8), "<f4", chunks=(100, 8), scaleoffset=1)
        f["big"] = np.zeros((2, 2), ">f8")
        f["half"] = np.zeros((2, 2), np.float16)
        f["yes"] = np.array([[True, False]])
        f["words"] = ["a", "bc"]
        f["fixed"] = np.array([b"ab", b"c"])
        f["scalar"] = 3.0
        f["nothing"] = h5py.Empty("f4")
        f["records"] = np.zeros(3, [("id", "<i8"), ("v", "<f4", (4,))])
        f.create_dataset("arrays", (3,), np.dtype(("<f4", (4,))))
        f.create_dataset("lists", (3,), h5py.vlen_dtype(np.float32))
        f["opaque"] = np.zeros((3, 2), "V2")
        f["soft"] = h5py.SoftLink("/plain")
        f["far"] = h5py.ExternalLink("other.h5", "/v")
        f["same"] = f["plain"]
    facts = cli.info(path)
    assert facts["kind"] == "hdf5"
    sets = {d["path"]: d for d in facts["datasets"]}
    assert sorted(sets) == [d["path"] for d in facts["datasets"]]
    plain = sets["/plain"]
    assert (plain["shape"], plain["dtype"], plain["layout"], plain["stored_bytes"]) == (
        [6, 4],
        "float32",
        "contiguous",
        96,
    )
    assert sets["/same"]["shape"] == [6, 4]
    packed = sets["/g/packed"]
    assert packed["layout"] == "chunked"
    assert packed["chunk"] == [64, 128]
    assert packed["max_shape"] == [None, 300]
    assert [(f["id"], f["name"], f["available"]) for f in packed["filters"]] == [
        (2, "shuffle", True),
        (1, "gzip", True),
        (3, "fletcher32", True),
    ]
    assert sets["/lossy"]["filters"][0]["lossy"] is True
    types = {name: sets[name]["dtype"] for name in sets}
    assert types["/big"] == "big-endian float64"
    assert types["/half"] == "float16"
    assert types["/yes"] == "bool"
    assert types["/words"] == "variable-length string"
    assert types["/fixed"] == "string"
    assert types["/records"] == "{id: int64, v: float32 (4,)}"
    assert types["/arrays"] == "float32 (4,)"
    assert types["/lists"] == "variable-length rows"
    assert types["/opaque"].startswith("opaque, 2 bytes")
    assert sets["/scalar"]["space"] == "scalar"
    assert sets["/nothing"]["space"] == "null"
    assert {d["path"] for d in facts["datasets"] if d["rows"]} == {
        "/plain",
        "/same",
        "/g/packed",
        "/lossy",
        "/big",
        "/half",
        "/yes",
        "/arrays",
    }
    assert {(link["path"], link["target"]) for link in facts["links"]} == {
        ("/soft", "/plain"),
        ("/far", "other.h5:/v"),
    }
    text = cli.ok("info", path).out
    for part in ["/g/packed", "gzip (1)", "(1,003, 300)", "lossy", "other.h5:/v"]:
        assert part in text


def test_one_dataset_of_an_hdf5_file(cli: Embermap, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["g/v"] = np.zeros((6, 4))
        f["w"] = np.zeros(3)
    assert [d["path"] for d in cli.info(f"{tmp_path}/a.h5:/g/v")["datasets"]] == ["/g/v"]
    assert [d["path"] for d in cli.info(f"{tmp_path}/a.h5:w")["datasets"]] == ["/w"]
    cli.fails("info", f"{tmp_path}/a.h5:/x", says=["/x", "/g/v", "/w"])


def test_hdf5_filters_are_listed_though_they_are_not_installed(
    cli: Embermap, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        # Optional, so that the library lets a dataset be made without the filter.
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4, 4))
        properties.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, (1, 2, 3))
        space = h5py.h5s.create_simple((16, 4))
        h5py.h5d.create(f.id, b"v", h5py.h5t.IEEE_F32LE, space, properties)
    found = cli.info(tmp_path / "a.h5")["datasets"][0]["filters"]
    assert [(f["id"], f["name"], f["available"]) for f in found] == [(32001, "blosc", False)]
    assert "not available" in cli.ok("info", tmp_path / "a.h5").out


def test_hdf5_names_other_files_without_opening_them(cli: Embermap, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "raw.bin")  # would hang if it were opened
    with h5py.File(tmp_path / "a.h5", "w") as f:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_external(b"raw.bin", 0, 64)
        space = h5py.h5s.create_simple((4, 4))
        h5py.h5d.create(f.id, b"ext", h5py.h5t.IEEE_F32LE, space, properties)
        layout = h5py.VirtualLayout((4, 4), "<f4")
        layout[:] = h5py.VirtualSource("other.h5", "v", (4, 4))
        f.create_virtual_dataset("virt", layout)
    sets = {d["path"]: d for d in cli.info(tmp_path / "a.h5")["datasets"]}
    assert (sets["/ext"]["layout"], sets["/ext"]["other_files"]) == ("external", ["raw.bin"])
    assert (sets["/virt"]["layout"], sets["/virt"]["other_files"]) == ("virtual", ["other.h5"])


@pytest.mark.parametrize("name", ["x.npy", "x.h5", "x.dat"])
@pytest.mark.parametrize("content", [b"", b"\x93NUM", b"<html>not found</html>" * 20])
def test_what_is_no_such_file_is_refused(
    cli: Embermap, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    error = cli.fails("info", tmp_path / name).error
    assert str(tmp_path / name) in error
    assert "pickle" not in error


def test_the_content_tells_the_format(cli: Embermap, tmp_path: Path) -> None:
    with (tmp_path / "rows.bin").open("wb") as file:
        np.save(file, np.zeros((2, 2)))
    with h5py.File(tmp_path / "model.keras", "w") as f:
        f["v"] = np.zeros((2, 2))
    assert cli.info(tmp_path / "rows.bin")["kind"] == "npy"
    assert cli.info(tmp_path / "model.keras")["kind"] == "hdf5"


def test_cut_hdf5_file_is_an_error(cli: Embermap, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["v"] = np.zeros((100, 8))
    data = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "cut.h5").write_bytes(data[:-100])
    cli.fails("info", tmp_path / "cut.h5", says=["cut.h5"])
    (tmp_path / "tail.h5").write_bytes(data + b"x" * 400)
    assert cli.info(tmp_path / "tail.h5")["datasets"][0]["shape"] == [100, 8]


def test_things_that_are_no_files(cli: Embermap, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    cli.fails("info", tmp_path / "pipe.npy", says=["pipe.npy", "FIFO"], timeout=20)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "s.npy"))
        cli.fails("info", tmp_path / "s.npy", says=["socket"], timeout=20)
    cli.fails("info", "/dev/null", says=["/dev/null", "device"])
    (tmp_path / "folder.npy").mkdir()
    cli.fails("info", tmp_path / "folder.npy", says=["folder.npy", "not a store"])
    (tmp_path / "dangling").symlink_to("nowhere")
    cli.fails("info", tmp_path / "dangling", says=["No such file"])
    cli.fails("info", tmp_path / "no" / "such.npy", says=["such.npy", "No such file"])


def test_optimizers_with_options(cli: Embermap, tmp_path: Path) -> None:
    shape = ["--rows", "100", "--dim", "4"]
    adam = "adam:betas=0.9:0.99,amsgrad=true,step=row,clip_row=2.5,clip_value=none"
    cli.ok("create", "t/a", *shape, "--optimizer", adam, "--lr", "0.25", cwd=tmp_path)
    info = cli.info(tmp_path / "t" / "a")
    assert info["optimizer"] == {
        "name": "adam",
        "lr": 0.25,
        "betas": [0.9, 0.99],
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": True,
        "step": "row",
        "clip_row": 2.5,
    }
    assert [(f["name"], f["dtype"], f["bytes"]) for f in info["fields"]] == [
        ("weight", "float32", 16),
        ("exp_avg", "float32", 16),
        ("exp_avg_sq", "float32", 16),
        ("max_exp_avg_sq", "float32", 16),
        ("step", "int32", 4),
    ]
    text = cli.ok("info", "t/a", cwd=tmp_path).out
    assert "adam lr=0.25 betas=[0.9,0.99]" in text
    assert "step=row" in text.replace('"', "")
    cli.ok("create", "t/r", *shape, "--optimizer", "rowwise_adagrad", "--eps", "1", cwd=tmp_path)
    cli.ok("export", "t/r:sum", "sum.npy", cwd=tmp_path)
    assert np.load(tmp_path / "sum.npy").shape == (100, 1)
    for name in ["adadelta", "adamw", "sparse_adam", "adamax", "nadam", "radam", "asgd", "rmsprop"]:
        cli.ok("create", f"t/{name}", *shape, "--optimizer", name, cwd=tmp_path)
        assert cli.info(tmp_path / "t" / name)["optimizer"]["name"] == name


def test_store_and_table_facts(cli: Embermap, tmp_path: Path) -> None:
    cli.ok(
        *["create", "t/items", "--rows", "1000", "--dim", "16", "--optimizer", "adagrad"],
        *["--lr", "0.05", "--eps", "1e-8", "--init", "normal:0:0.02", "--seed", "7"],
        cwd=tmp_path,
    )
    cli.ok("create", "t/counts", "--rows", "0", "--dim", "4", "--dtype", "int64", cwd=tmp_path)
    store = cli.info(tmp_path / "t")
    assert store["kind"] == "store"
    assert [t["name"] for t in store["tables"]] == ["counts", "items"]
    assert store["writer"] == {"held": False, "process": None, "host": None}
    assert (store["uncommitted"], store["unclean"]) == (False, False)
    items = cli.info(tmp_path / "t" / "items")
    expected = {
        "kind": "table",
        "rows": 1000,
        "dim": 16,
        "dtype": "float32",
        "optimizer": {
            "name": "adagrad",
            "lr": 0.05,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-8,
        },
        "init": {"kind": "normal", "mean": 0.0, "std": 0.02, "text": "normal:0:0.02"},
        "seed": 7,
        "step": 0,
        "page_bytes": 4096,
        "stride": 128,
        "rows_per_page": 32,
        "pages": 32,
        "written_pages": 0,
        "materialised": 0.0,
        "adopted": False,
        "data_offset": 4096,
        "file_bytes": 4096 + 1000 * 128,
    }
    assert {key: items[key] for key in expected} == expected
    assert [(f["name"], f["dtype"]) for f in items["fields"]] == [
        ("weight", "float32"),
        ("sum", "float32"),
    ]
    assert items["allocated_bytes"] < items["file_bytes"]
    for path in ["t", "t/items"]:
        text = cli.ok("info", path, cwd=tmp_path).out
        for part in ["1,000 x 16", "adagrad lr=0.05", "normal:0:0.02, seed 7", "0 of 32 pages"]:
            assert part in text
    for path in ["t/", "./t", str(tmp_path / "t"), "t/.", "t/../t"]:
        assert cli.info(path, tmp_path)["kind"] == "store"
    for path in ["t/items/", "t//items", "./t/items"]:
        assert cli.info(path, tmp_path)["name"] == "items"
    cli.fails("info", "t/other", cwd=tmp_path, says=["'other'", "items"])


def test_info_beside_a_writer_names_it(cli: Embermap, tmp_path: Path) -> None:
    em = pytest.importorskip("embermap")
    del em
    cli.ok("create", tmp_path / "t" / "x", "--rows", "100", "--dim", "4")
    program = (
        "import embermap, sys, time\n"
        f"store = embermap.open({str(tmp_path / 't')!r}, memory='64MiB')\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        facts = cli.info(tmp_path / "t")
        writer.stdin.close()
    assert facts["writer"]["held"] is True
    assert facts["writer"]["process"] == writer.pid
    assert facts["tables"][0]["rows"] == 100
    assert cli.info(tmp_path / "t")["writer"]["held"] is False
