"""create, import, export, verify, materialize, recover, resize, remove."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import ml_dtypes
import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap

Array = np.ndarray[Any, Any]
SHAPE = ["--rows", "1000", "--dim", "16"]


def random_rows(rows: int, dim: int) -> Array:
    return np.random.default_rng(rows).normal(0, 1, (rows, dim)).astype(np.float32)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_create_makes_store_and_table(cli: Embermap, tmp_path: Path) -> None:
    made = cli.ok("create", "t/x", *SHAPE, "--json", cwd=tmp_path).json
    assert (made["rows"], made["dim"], made["name"]) == (1000, 16, "x")
    assert cli.ok("create", "t/y", *SHAPE, cwd=tmp_path).out == (
        "t/y: 1,000 x 16 float32, no optimizer\n"
    )
    np.testing.assert_array_equal(np.load(tmp_path / "t" / "x.npy"), np.zeros((1000, 16), "f4"))
    assert [t["name"] for t in cli.info(tmp_path / "t")["tables"]] == ["x", "y"]


def test_a_billion_rows_take_no_room(cli: Embermap, tmp_path: Path) -> None:
    cli.ok(
        *["create", "t/x", "--rows", "1e9", "--dim", "128", "--optimizer", "adagrad"], cwd=tmp_path
    )
    facts = cli.info(tmp_path / "t" / "x")
    assert facts["rows"] == 10**9
    assert facts["file_bytes"] >= 10**9 * 1024
    assert sum(p.stat().st_blocks * 512 for p in (tmp_path / "t").iterdir()) < 10**7


@pytest.mark.parametrize(
    ("init", "check"),
    [
        ("zeros", lambda a: not a.any()),
        ("constant:0.5", lambda a: (a == 0.5).all()),
        ("uniform:-2:3", lambda a: a.min() >= -2 and a.max() < 3 and abs(a.mean() - 0.5) < 0.05),
        ("uniform", lambda a: a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.02),
        ("normal:1:0.1", lambda a: abs(a.mean() - 1) < 0.01 and abs(a.std() - 0.1) < 0.01),
    ],
)
def test_initial_rows(cli: Embermap, tmp_path: Path, init: str, check: Any) -> None:
    cli.ok("create", "t/x", *SHAPE, "--init", init, "--seed", "3", cwd=tmp_path)
    cli.ok("export", "t/x", "x.npy", cwd=tmp_path)
    rows = np.load(tmp_path / "x.npy")
    assert rows.shape == (1000, 16)
    assert check(rows)
    # The same seed and another page size give the same rows.
    page = ["--page-size", "64KiB"]
    cli.ok("create", "t/y", *SHAPE, "--init", init, "--seed", "3", *page, cwd=tmp_path)
    cli.ok("export", "t/y", "y.npy", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), rows)
    assert (
        cli.info(tmp_path / "t" / "y")["page_bytes"] > cli.info(tmp_path / "t" / "x")["page_bytes"]
    )


def test_create_never_overwrites(cli: Embermap, tmp_path: Path) -> None:
    cli.ok("create", "t/x", *SHAPE, cwd=tmp_path)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("precious")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = tree(tmp_path)
    cli.fails("create", "t/x", *SHAPE, cwd=tmp_path, says=["t/x", "already exists", "remove"])
    cli.fails("create", "file/x", *SHAPE, cwd=tmp_path, says=["file"])
    cli.fails("create", "full/x", *SHAPE, cwd=tmp_path, says=["full", "not a store"])
    cli.fails("create", "dangling/x", *SHAPE, cwd=tmp_path, says=["dangling"])
    cli.fails("create", "no/such/x", *SHAPE, cwd=tmp_path, says=["no/such", "No such file"])
    assert tree(tmp_path) == before
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    cli.ok("create", "empty/x", *SHAPE, cwd=tmp_path)


@pytest.mark.parametrize("name", ["-x", ".x", "a b", "a:b", "x" * 201, "n\u00e4\u200b" + "\n"])
def test_a_bad_name_leaves_no_store(cli: Embermap, tmp_path: Path, name: str) -> None:
    result = cli("create", f"t/{name}", *SHAPE, cwd=tmp_path)
    assert result.code == 1
    assert "name" in result.error
    assert names(tmp_path) == []
    (tmp_path / "t").mkdir()  # an empty folder stays an empty folder
    assert cli("create", f"t/{name}", *SHAPE, cwd=tmp_path).code == 1
    assert names(tmp_path / "t") == []


def test_import_and_export_round_trip(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(5003, 12)
    np.save(tmp_path / "a.npy", rows)
    report = cli.ok("import", "a.npy", "t/x", "--json", cwd=tmp_path).json
    assert (report["rows"], report["dim"], report["table"]["materialised"]) == (5003, 12, 1.0)
    assert report["in_place"] is False
    np.testing.assert_array_equal(np.load(tmp_path / "t" / "x.npy"), rows)
    for target in ["b.npy", "b.h5:/x"]:
        cli.ok("export", "t/x", target, cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows)
    with h5py.File(tmp_path / "b.h5") as f:
        np.testing.assert_array_equal(f["x"][:], rows)
        assert f["x"].chunks is None
    cli.ok("import", "b.h5", "t/y", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "t" / "y.npy"), rows)
    with (tmp_path / "b.h5").open("rb") as file:
        assert file.read(9)[8] == 0  # the oldest superblock


def test_fields_of_a_trained_table(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(300, 8)
    np.save(tmp_path / "a.npy", rows)
    adagrad = ["--optimizer", "adagrad", "--initial-accumulator-value", "0.1", "--lr", "0.5"]
    cli.ok("import", "a.npy", "t/x", *adagrad, cwd=tmp_path)
    records = np.load(tmp_path / "t" / "x.npy", mmap_mode="r")
    assert records.dtype.names is not None
    assert records.dtype.names[:2] == ("weight", "sum")
    for field, expected in [("weight", rows), ("sum", np.full((300, 8), 0.1, np.float32))]:
        np.testing.assert_array_equal(records[field], expected)
        cli.ok("export", f"t/x:{field}", f"{field}.npy", cwd=tmp_path)
        np.testing.assert_array_equal(np.load(tmp_path / f"{field}.npy"), expected)
        cli.ok("convert", f"t/x.npy:{field}", f"{field}.h5:/v", cwd=tmp_path)
        with h5py.File(tmp_path / f"{field}.h5") as f:
            np.testing.assert_array_equal(f["v"][:], expected)
    cli.ok("export", "t/x", "w.npy", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), rows)
    cli.fails("export", "t/x:exp_avg", "e.npy", cwd=tmp_path, says=["exp_avg", "weight", "sum"])
    assert not (tmp_path / "e.npy").exists()
    assert cli.info(tmp_path / "t" / "x")["optimizer"]["lr"] == 0.5


def test_import_takes_a_field_of_records(cli: Embermap, tmp_path: Path) -> None:
    records = np.zeros(50, [("id", "<i8"), ("v", "<f4", (6,))])
    records["v"] = random_rows(50, 6)
    np.save(tmp_path / "a.npy", records)
    cli.fails("import", "a.npy", "t/x", cwd=tmp_path, says=["id", "v"])
    assert not (tmp_path / "t").exists()
    cli.ok("import", "a.npy:v", "t/x", cwd=tmp_path)
    cli.ok("import", "a.npy", "t/y", "--field", "v", cwd=tmp_path)
    for name in ["x", "y"]:
        np.testing.assert_array_equal(np.load(tmp_path / "t" / f"{name}.npy"), records["v"])


def test_import_converts_and_reports(cli: Embermap, tmp_path: Path) -> None:
    rows = np.array([[1e5, 1e-9, 1.0], [2.0, -1e5, 0.0]], np.float32)
    np.save(tmp_path / "a.npy", rows)
    result = cli("import", "a.npy", "t/x", "--dtype", "float16", "--json", cwd=tmp_path)
    assert result.code == 0
    assert result.err.startswith("embermap: warning: ")
    assert "2 values became infinite and 1 became zero" in result.err
    assert (result.json["became_infinite"], result.json["became_zero"]) == (2, 1)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.load(tmp_path / "t" / "x.npy"), rows.astype(np.float16))
    cli.fails("import", "a.npy", "t/y", "--dtype", "int8", cwd=tmp_path, says=["row 0", "a.npy"])
    assert [t["name"] for t in cli.info(tmp_path / "t")["tables"]] == ["x"]
    assert not (tmp_path / "t" / "y.npy").exists()


def test_import_of_bfloat16(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(64, 8).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "a.npy", rows)
    cli.fails("import", "a.npy", "t/x", cwd=tmp_path, says=["bfloat16"])
    cli.ok("import", "a.npy", "t/x", "--dtype", "bfloat16", cwd=tmp_path)
    assert cli.info(tmp_path / "t" / "x")["dtype"] == "bfloat16"
    cli.ok("export", "t/x", "b.npy", "--dtype", "float32", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows.astype(np.float32))
    cli.ok("export", "t/x", "c.npy", cwd=tmp_path)
    assert np.load(tmp_path / "c.npy").tobytes() == rows.tobytes()


def test_import_never_replaces_a_table(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random_rows(30, 4))
    np.save(tmp_path / "b.npy", random_rows(40, 5))
    cli.ok("import", "a.npy", "t/x", cwd=tmp_path)
    before = tree(tmp_path / "t")
    for options in [[], ["--in-place"]]:
        cli.fails(
            *["import", "b.npy", "t/x", *options], cwd=tmp_path, says=["t/x", "already", "remove"]
        )
    assert tree(tmp_path / "t") == before


def test_a_failed_import_leaves_neither_table_nor_store(cli: Embermap, tmp_path: Path) -> None:
    rows = np.zeros((200_000, 16), np.float32)
    rows[-1, -1] = 1e9  # found at the very end
    np.save(tmp_path / "a.npy", rows)
    cli.fails("import", "a.npy", "t/x", "--dtype", "int8", cwd=tmp_path, says=["row 199999"])
    cli.fails("import", "gone.npy", "t/x", cwd=tmp_path, says=["gone.npy"])
    cli.fails("import", "a.npy", "t/bad name", cwd=tmp_path)
    assert names(tmp_path) == ["a.npy"]
    (tmp_path / "t").mkdir()
    cli.fails("import", "a.npy", "t/x", "--dtype", "int8", cwd=tmp_path)
    assert names(tmp_path / "t") == []
    cli.ok("create", "t/y", *SHAPE, cwd=tmp_path)
    before = tree(tmp_path / "t")
    cli.fails("import", "a.npy", "t/x", "--dtype", "int8", cwd=tmp_path)
    assert tree(tmp_path / "t") == before


def test_in_place_uses_the_file_itself(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(500, 8)
    np.save(tmp_path / "a.npy", rows)
    before = (tmp_path / "a.npy").read_bytes()
    report = cli.ok("import", "a.npy", "t/x", "--in-place", "--json", cwd=tmp_path).json
    assert (report["in_place"], report["writable"]) == (True, True)
    facts = cli.info(tmp_path / "t" / "x")
    assert facts["adopted"] is True
    assert Path(facts["file"]) == (tmp_path / "a.npy").resolve()
    assert not (tmp_path / "t" / "x.npy").exists()
    cli.ok("export", "t/x", "b.npy", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), rows)
    cli.ok("import", "b.npy", "t/y", "--in-place", "--read-only", cwd=tmp_path)
    cli.fails("resize", "t/x", "--rows", "10", cwd=tmp_path, says=["in place"])
    assert "stays" in cli.ok("remove", "t/x", cwd=tmp_path).out
    assert (tmp_path / "a.npy").read_bytes() == before


@pytest.mark.parametrize("name", ["a.npy", "./a.npy", "soft.npy", "hard.npy"])
def test_export_over_the_file_in_use_is_refused(cli: Embermap, tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "a.npy", random_rows(500, 8))
    (tmp_path / "soft.npy").symlink_to("a.npy")
    (tmp_path / "hard.npy").hardlink_to(tmp_path / "a.npy")
    before = (tmp_path / "a.npy").read_bytes()
    cli.ok("import", "a.npy", "t/x", "--in-place", cwd=tmp_path)
    for options in [[], ["--overwrite"]]:
        cli.fails("export", "t/x", name, *options, cwd=tmp_path, says=[name])
    assert (tmp_path / "a.npy").read_bytes() == before


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(random_rows(5, 4)),
        np.zeros((5, 4), np.uint16),
        np.zeros(5, np.float32),
        np.zeros((5, 4), bool),
    ],
    ids=["fortran", "uint16", "1-d", "bool"],
)
def test_in_place_refuses_what_info_says_it_will(
    cli: Embermap, tmp_path: Path, array: Array
) -> None:
    np.save(tmp_path / "a.npy", array)
    assert cli.info(tmp_path / "a.npy")["in_place"] is False
    cli.fails("import", "a.npy", "t/x", "--in-place", cwd=tmp_path, says=["a.npy"])
    assert names(tmp_path) == ["a.npy"]


def test_verify_finds_a_changed_byte(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(1000, 16)  # 64 rows a page
    np.save(tmp_path / "a.npy", rows)
    cli.ok("import", "a.npy", "t/x", cwd=tmp_path)
    cli.ok("create", "t/y", *SHAPE, cwd=tmp_path)
    good = cli.ok("verify", "t", "--json", cwd=tmp_path).json
    assert good["ok"] is True
    by_name = {t["name"]: t for t in good["tables"]}
    assert by_name["x"]["verified_pages"] == by_name["x"]["written_pages"] == 16
    assert by_name["y"]["written_pages"] == 0
    assert "0 bad" in cli.ok("verify", "t/x", cwd=tmp_path).out

    with (tmp_path / "t" / "x.npy").open("r+b") as file:
        for row in [130, 200, 999]:  # pages 2, 3 and the last, short one
            file.seek(4096 + row * 64)
            file.write(b"\xff")
    for path in ["t", "t/x", "t/", str(tmp_path / "t" / "x")]:
        result = cli.fails("verify", path, "--json", cwd=tmp_path, says=["3 bad pages"])
        assert "128-255, 960-999" in result.error
        assert result.json["ok"] is False
        bad = next(t for t in result.json["tables"] if t["name"] == "x")["bad"]
        assert bad == [
            {"page": 2, "pages": 2, "first_row": 128, "last_row": 255},
            {"page": 15, "pages": 1, "first_row": 960, "last_row": 999},
        ]
    cli.ok("verify", "t/y", cwd=tmp_path)
    assert "bad rows 128-255" in cli("verify", "t/x", cwd=tmp_path).out


def test_verify_repairs_from_a_backup_and_accepts(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random_rows(1000, 16))
    cli.ok("import", "a.npy", "t/x", cwd=tmp_path)
    cli.ok("create", "t/y", *SHAPE, cwd=tmp_path)
    shutil.copytree(tmp_path / "t", tmp_path / "backup")
    good = (tmp_path / "t" / "x.npy").read_bytes()

    def damage() -> None:
        with (tmp_path / "t" / "x.npy").open("r+b") as file:
            file.seek(4096 + 130 * 64)
            file.write(b"\xff")

    damage()
    out = cli.ok("verify", "t", "--repair-from", "backup", cwd=tmp_path).out
    assert "x: 1 page bad, 1 repaired: rows 128-191" in out
    assert "x: 16 of 16 pages written, 16 verified, 0 bad" in out
    assert (tmp_path / "t" / "x.npy").read_bytes() == good
    damage()
    assert "1 page accepted" in cli.ok("verify", "t/x", "--accept", cwd=tmp_path).out
    assert (tmp_path / "t" / "x.npy").read_bytes() != good
    cli.ok("verify", "t", cwd=tmp_path)
    assert cli("verify", "t", "--repair-from", "backup/x", cwd=tmp_path).code == 2
    assert cli("verify", "t", "--repair-from", "backup", "--accept", cwd=tmp_path).code == 2


def test_verify_accepts_an_adopted_file_that_was_changed(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((1000, 16), np.float32))
    cli.ok("import", "a.npy", "t/x", "--in-place", cwd=tmp_path)
    cli.ok("verify", "t", cwd=tmp_path)
    time.sleep(0.02)  # times of files move in steps
    np.save(tmp_path / "a.npy", np.full((1000, 16), 2, np.float32))
    for command in (["verify", "t"], ["export", "t/x", "b.npy"], ["verify", "t/x"]):
        cli.fails(*command, cwd=tmp_path, says=["a.npy", "other than embermap", "verify --accept"])
    out = cli.ok("verify", "t/x", "--accept", cwd=tmp_path).out
    assert "x: 16 pages accepted that had no checksum" in out
    assert "did not match" not in out
    out = cli.ok("verify", "t/x", "--accept", cwd=tmp_path).out
    assert "x: all 16 pages match, nothing to accept" in out
    assert "16 verified, 0 bad" in cli.ok("verify", "t", cwd=tmp_path).out
    cli.ok("export", "t/x", "b.npy", cwd=tmp_path)
    assert np.all(np.load(tmp_path / "b.npy") == 2)


def test_materialize_writes_initial_rows(cli: Embermap, tmp_path: Path) -> None:
    options = ["--init", "normal", "--seed", "5"]
    cli.ok("create", "t/x", *SHAPE, *options, "--optimizer", "adagrad", cwd=tmp_path)
    cli.ok("create", "t/y", *SHAPE, *options, cwd=tmp_path)
    cli.ok("export", "t/y", "y.npy", cwd=tmp_path)
    assert not np.load(tmp_path / "t" / "y.npy").any()
    done = cli.ok("materialize", "t", "--json", cwd=tmp_path).json
    assert [(t["name"], t["pages_made"]) for t in done["tables"]] == [("x", 32), ("y", 16)]
    assert cli.info(tmp_path / "t" / "x")["materialised"] == 1.0
    np.testing.assert_array_equal(np.load(tmp_path / "t" / "y.npy"), np.load(tmp_path / "y.npy"))
    np.testing.assert_array_equal(
        np.load(tmp_path / "t" / "x.npy")["weight"], np.load(tmp_path / "y.npy")
    )
    assert "0 pages written" in cli.ok("materialize", "t/x", cwd=tmp_path).out
    cli.ok("verify", "t", cwd=tmp_path)


def test_a_stopped_materialize_can_go_on(cli: Embermap, tmp_path: Path) -> None:
    shape = ["--rows", "20_000_000", "--dim", "64"]  # 5 GB: far from done when the signal comes
    cli.ok("create", "t/x", *shape, "--init", "normal", cwd=tmp_path)
    process = subprocess.Popen(
        [cli.path, "materialize", "t/x"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    file = tmp_path / "t" / "x.npy"
    deadline = time.monotonic() + 60
    while file.stat().st_blocks * 512 < 10_000_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"embermap: error: stopped by SIGINT\n")
    facts = cli.info(tmp_path / "t" / "x")
    assert facts["unclean"] is False
    assert 0 < facts["materialised"] < 1
    assert cli.ok("verify", "t/x", "--json", cwd=tmp_path).json["ok"] is True
    # What was written is what would have been generated.
    cli.ok("create", "t/y", "--rows", "1000", "--dim", "64", "--init", "normal", cwd=tmp_path)
    cli.ok("materialize", "t/y", cwd=tmp_path)
    np.testing.assert_array_equal(
        np.load(file, mmap_mode="r")[:1000], np.load(tmp_path / "t" / "y.npy")
    )


def test_a_stopped_export_leaves_nothing(cli: Embermap, tmp_path: Path) -> None:
    cli.ok("create", "t/x", "--rows", "12_000_000", "--dim", "64", cwd=tmp_path)
    process = subprocess.Popen(
        [cli.path, "export", "t/x", "b.npy"], cwd=tmp_path, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while len(names(tmp_path)) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, b"embermap: error: stopped by SIGTERM\n")
    assert names(tmp_path) == ["t"]


def test_import_asks_for_the_room_first(cli: Embermap, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    rows = (free * 2) // 512
    with (tmp_path / "a.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, 128)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + rows * 512)
    # In formats that keep holes as holes there would be room.
    for command in [["import", "a.npy", "t/x"], ["convert", "a.npy", "b.pt"]]:
        cli.fails(*command, cwd=tmp_path, says=["No space left on device"], timeout=30)
    assert names(tmp_path) == ["a.npy"]


def test_resize(cli: Embermap, tmp_path: Path) -> None:
    rows = random_rows(100, 4)
    np.save(tmp_path / "a.npy", rows)
    cli.ok("import", "a.npy", "t/x", cwd=tmp_path)
    assert (
        cli.ok("resize", "t/x", "--rows", "1_000", "--json", cwd=tmp_path).json["rows_before"]
        == 100
    )
    grown = np.load(tmp_path / "t" / "x.npy")
    assert grown.shape == (1000, 4)
    np.testing.assert_array_equal(grown[:100], rows)
    assert not grown[100:].any()
    cli.ok("resize", "t/x", "--rows", "7", cwd=tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "t" / "x.npy"), rows[:7])
    cli.ok("resize", "t/x", "--rows", "100", cwd=tmp_path)
    cli.ok("export", "t/x", "b.npy", cwd=tmp_path)
    assert not np.load(tmp_path / "b.npy")[7:].any()
    cli.fails("resize", "t/y", "--rows", "1", cwd=tmp_path, says=["'y'"])


def test_remove(cli: Embermap, tmp_path: Path) -> None:
    cli.ok("create", "t/x", *SHAPE, cwd=tmp_path)
    cli.ok("create", "t/y", *SHAPE, cwd=tmp_path)
    removed = cli.ok("remove", "t/x", "--json", cwd=tmp_path).json
    assert (removed["rows"], removed["file_kept"], removed["error"]) == (1000, False, None)
    assert [t["name"] for t in cli.info(tmp_path / "t")["tables"]] == ["y"]
    assert not any(p.name.startswith("x.") for p in (tmp_path / "t").iterdir())
    cli.fails("remove", "t/x", cwd=tmp_path, says=["'x'"])
    cli.fails("remove", "u/x", cwd=tmp_path, says=["u"])
    assert not (tmp_path / "u").exists()


def break_table(folder: Path, how: str) -> str:
    """Breaks the table b of the store t; returns what an error about it names."""
    if how == "no data":
        (folder / "t" / "b.npy").unlink()
        return "b.npy"
    if how == "cut data":
        os.truncate(folder / "t" / "b.npy", 4096 + 100)
        return "b.npy"
    if how == "no pages":
        (folder / "t" / "b.pages").unlink()
        return "b.pages"
    assert how == "no adopted file"
    (folder / "own.npy").unlink()
    return "own.npy"


@pytest.mark.parametrize("how", ["no data", "cut data", "no pages", "no adopted file"])
def test_a_broken_table_leaves_the_others_usable_and_can_be_removed(
    cli: Embermap, tmp_path: Path, how: str
) -> None:
    rows = random_rows(1000, 16)
    np.save(tmp_path / "own.npy", rows)
    cli.ok("create", "t/a", *SHAPE, "--init", "normal", cwd=tmp_path)
    place = ["--in-place"] if how == "no adopted file" else []
    cli.ok("import", "own.npy", "t/b", *place, cwd=tmp_path)
    cli.ok("create", "t/c", *SHAPE, "--init", "normal", cwd=tmp_path)
    names_it = break_table(tmp_path, how)

    def check(tables: Any) -> None:
        assert [t["name"] for t in tables] == ["a", "b", "c"]
        assert names_it in tables[1]["error"]
        assert not any("error" in t for t in (tables[0], tables[2]))

    check(cli.info("t", cwd=tmp_path)["tables"])
    assert names_it in cli.ok("info", "t", cwd=tmp_path).out
    cli.fails("info", "t/b", cwd=tmp_path, says=[names_it])

    result = cli.fails("verify", "t", "--json", cwd=tmp_path, says=["'b'", names_it])
    assert (result.json["ok"], result.json["bad_pages"]) == (False, 0)
    check(result.json["tables"])
    lines = cli.fails("verify", "t", cwd=tmp_path, says=[names_it]).out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["a", "b", "c"]
    assert names_it in lines[1]
    cli.fails("verify", "t/b", cwd=tmp_path, says=[names_it])
    cli.ok("verify", "t/c", cwd=tmp_path)

    result = cli.fails("materialize", "t", "--json", cwd=tmp_path, says=["'b'", names_it])
    assert result.json["ok"] is False
    check(result.json["tables"])
    assert [t["pages_made"] for t in result.json["tables"] if "error" not in t] == [16, 16]
    lines = cli.fails("materialize", "t", cwd=tmp_path, says=[names_it]).out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["a", "b", "c"]
    cli.fails("materialize", "t/b", cwd=tmp_path, says=[names_it])
    for name in "ac":
        assert cli.info(tmp_path / "t" / name)["materialised"] == 1.0
        assert np.load(tmp_path / "t" / f"{name}.npy").all()

    removed = cli.ok("remove", "t/b", "--json", cwd=tmp_path).json
    assert (removed["name"], removed["rows"], removed["file"]) == ("b", None, None)
    assert names_it in removed["error"]
    assert not any(p.name.startswith("b.") for p in (tmp_path / "t").iterdir())
    assert [t["name"] for t in cli.info("t", cwd=tmp_path)["tables"]] == ["a", "c"]
    assert cli.ok("verify", "t", "--json", cwd=tmp_path).json["ok"] is True
    assert cli.ok("materialize", "t", "--json", cwd=tmp_path).json["ok"] is True
    cli.ok("import", "t/a.npy", "t/b", cwd=tmp_path)
    assert break_table(tmp_path, "no pages") in cli.ok("remove", "t/b", cwd=tmp_path).out


@pytest.mark.parametrize("command", ["verify", "materialize", "recover", "info"])
def test_what_is_no_store_is_named(cli: Embermap, tmp_path: Path, command: str) -> None:
    (tmp_path / "folder").mkdir()
    cli.ok("create", "t/x", *SHAPE, cwd=tmp_path)
    for path in ["folder", "gone", "folder/x", "t/x/y"]:
        cli.fails(command, path, cwd=tmp_path, says=[path.split("/")[0]])
    assert names(tmp_path / "folder") == []


def test_a_newer_or_broken_manifest_is_refused(cli: Embermap, tmp_path: Path) -> None:
    cli.ok("create", "t/x", *SHAPE, cwd=tmp_path)
    manifest = tmp_path / "t" / "embermap.json"
    good = manifest.read_text()
    for bad in ["", "{", "[]", good.replace('"version": 2', '"version": 99')]:
        manifest.write_text(bad)
        if bad == good:
            pytest.fail("the manifest's version is written otherwise")
        for command in [["info", "t"], ["export", "t/x", "a.npy"], ["create", "t/y", *SHAPE]]:
            cli.fails(*command, cwd=tmp_path, says=["embermap.json"])
        assert manifest.read_text() == bad
    manifest.write_text(good)
    cli.ok("info", "t", cwd=tmp_path)


def test_recover_accepts_an_unclean_end(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random_rows(100, 4))
    cli.ok("import", "a.npy", "t/x", cwd=tmp_path)
    assert cli.ok("recover", "t", "--json", cwd=tmp_path).json["recovered"] is False
    # As a writer leaves it that dies with pages written and not committed.
    commit = cli.info(tmp_path / "t")["commit"]
    (tmp_path / "t" / "UNCOMMITTED").write_text(f"{commit}\n")
    with (tmp_path / "t" / "x.npy").open("r+b") as file:
        file.seek(4096)
        file.write(np.float32(7).tobytes())
    facts = cli.info(tmp_path / "t")
    assert (facts["uncommitted"], facts["unclean"]) == (True, True)
    assert "recover" in cli.ok("info", "t", cwd=tmp_path).out
    cli.fails("export", "t/x", "b.npy", cwd=tmp_path, says=["last commit", "accept_unclean"])
    cli.fails("create", "t/y", *SHAPE, cwd=tmp_path, says=["last commit"])
    assert cli.ok("recover", "t", "--json", cwd=tmp_path).json["recovered"] is True
    assert cli.info(tmp_path / "t")["unclean"] is False
    cli.ok("verify", "t", cwd=tmp_path)
    cli.ok("export", "t/x", "c.npy", cwd=tmp_path)
    assert np.load(tmp_path / "c.npy")[0, 0] == 7


def test_memory_too_small_says_what_would_do(cli: Embermap, tmp_path: Path) -> None:
    cli.fails(
        *["create", "t/x", "--rows", "1e11", "--dim", "64", "--memory", "16MiB"],
        cwd=tmp_path,
        says=["16.00 MiB", "too small"],
    )
    assert names(tmp_path) == []
    np.save(tmp_path / "a.npy", np.zeros((2, 100_000), np.float64))
    cli.fails(
        *["convert", "a.npy", "b.npy", "--memory", "64KiB"], cwd=tmp_path, says=["row", "memory"]
    )
    assert names(tmp_path) == ["a.npy"]


@pytest.fixture
def as_nobody(embermap_cli: Path) -> Iterator[Any]:
    """A folder and a way to run the program as a user without rights; skips if not root."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="embermap-nobody-"))
    folder.chmod(0o755)
    program = folder / "program"
    shutil.copy(embermap_cli, program)
    program.chmod(0o755)
    (folder / "own").mkdir()
    os.chown(folder / "own", 65534, 65534)

    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [program, *arguments],
            cwd=folder,
            capture_output=True,
            user=65534,
            group=65534,
            extra_groups=[],
            timeout=60,
            check=False,
        )
        lines = done.stderr.decode().splitlines()
        assert len(lines) <= 1, lines
        return done.returncode, lines[0] if lines else ""

    yield folder, run
    shutil.rmtree(folder)


def test_permissions_are_told_as_such(cli: Embermap, as_nobody: Any) -> None:
    folder, run = as_nobody
    np.save(folder / "secret.npy", random_rows(10, 4))
    (folder / "secret.npy").chmod(0o600)
    (folder / "closed").mkdir(0o700)
    np.save(folder / "closed" / "a.npy", random_rows(10, 4))
    np.save(folder / "a.npy", random_rows(10, 4))
    cli.ok("import", folder / "a.npy", folder / "t" / "x")
    cli.ok("import", folder / "a.npy", folder / "closed" / "t" / "x")
    denied = [
        (["info", "secret.npy"], "secret.npy"),
        (["convert", "secret.npy", "own/b.npy"], "secret.npy"),
        (["import", "secret.npy", "own/t/x"], "secret.npy"),
        (["info", "closed/a.npy"], "closed/a.npy"),
        (["info", "closed/t"], "closed/t"),
        (["info", "closed/t/x"], "closed/t"),
        (["verify", "closed/t"], "closed/t"),
        (["convert", "closed/a.npy", "own/b.npy"], "closed/a.npy"),
        (["convert", "a.npy", "b.npy"], "b.npy"),
        (["create", "u/x", *SHAPE], "u"),
        (["create", "t/y", *SHAPE], "t"),
        (["resize", "t/x", "--rows", "3"], "t"),
        (["remove", "t/x"], "t"),
    ]
    before = tree(folder / "t")
    for arguments, name in denied:
        code, line = run(*arguments)
        assert code == 1, arguments
        assert "Permission denied" in line, (arguments, line)
        assert name in line, (arguments, line)
    assert names(folder / "own") == []
    assert tree(folder / "t") == before
    # Reading needs no right to write: not to the folder, not to the lock.
    for path in ["t", "t/x", "a.npy"]:
        assert run("info", path) == (0, "")
    assert run("verify", "t") == (0, "")
    assert run("export", "t/x", "own/b.npy") == (0, "")
    # A file that may only be read is used in place for reading.
    assert run("import", "a.npy", "own/t/x", "--in-place") == (0, "")


def test_read_only_file_system(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random_rows(10, 4))
    cli.ok("import", "a.npy", "t/x", cwd=tmp_path)
    script = "mount --bind t t && mount -o remount,ro,bind t || exit 77\n" + "\n".join(
        f'"$0" {command} >/dev/null || exit 70'
        for command in ["info t", "info t/x", "info t/x.npy", "verify t", "export t/x b.npy"]
    )
    script += '\n"$0" create t/y --rows 1 --dim 1 2>err && exit 71\nexit 0'
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, cli.path],
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode in (77, 1):
        pytest.skip("not allowed to mount")
    assert done.returncode == 0, done
    assert "Read-only file system" in (tmp_path / "err").read_text()


def test_nothing_is_written_into_the_directory_of_a_store(cli: Embermap, tmp_path: Path) -> None:
    cli.ok("create", "t/x", "--rows", "4", "--dim", "2", cwd=tmp_path)
    np.save(tmp_path / "a.npy", random_rows(4, 2))
    (tmp_path / "link.npy").symlink_to("t/new.npy")
    before = names(tmp_path / "t")
    for target in ["t/new.npy", "t/new.h5:/v", "t/../t/new.npy", "link.npy"]:
        for command in [["convert", "a.npy"], ["export", "t/x"]]:
            cli.fails(
                *command, target, "--overwrite", cwd=tmp_path, says=["store", "another place"]
            )
    options = ["--rows", "4", "--dim", "2"]
    cli.fails("create", "t/a/b", *options, cwd=tmp_path, says=["t/a", "store"])
    cli.fails("import", "a.npy", "t/a/b", cwd=tmp_path, says=["t/a", "store"])
    assert names(tmp_path / "t") == before


def test_small_memory_is_named_as_given_and_is_enough_to_describe(
    cli: Embermap, tmp_path: Path
) -> None:
    cli.ok("create", "t/x", "--rows", "100", "--dim", "4", cwd=tmp_path)
    cli.fails("export", "t/x", "a.npy", "--memory", "3000", cwd=tmp_path, says=["memory 2.93 KiB"])
    cli.ok("export", "t/x", "a.npy", "--memory", "5000", "--quiet", cwd=tmp_path)
    assert cli.ok("info", "t", "--memory", "1", cwd=tmp_path).out
    assert cli.ok("info", "t/x", "--memory", "1", cwd=tmp_path).out
