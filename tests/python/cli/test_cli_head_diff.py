"""embermap head, embermap diff, and --rows and --check of convert and export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from .conftest import Embermap


@pytest.fixture
def values() -> np.ndarray:
    return (np.arange(60, dtype=np.float32) / 4).reshape(20, 3)


@pytest.fixture
def file(tmp_path: Path, values: np.ndarray) -> Path:
    np.save(tmp_path / "x.npy", values)
    return tmp_path / "x.npy"


def test_head_shows_rows(cli: Embermap, file: Path, values: np.ndarray) -> None:
    lines = cli.ok("head", file, "-n", "2").out.splitlines()
    assert lines == ["20 x 3 float32", "0: 0 0.25 0.5", "1: 0.75 1 1.25"]
    assert len(cli.ok("head", file).out.splitlines()) == 11
    assert len(cli.ok("head", file, "-n", "100").out.splitlines()) == 21
    found = cli.ok("head", file, "--rows", "5:8", "--json").json
    assert (found["rows"], found["dim"], found["dtype"], found["first"]) == (20, 3, "float32", 5)
    assert found["values"] == values[5:8].tolist()


@pytest.mark.parametrize("kind", ["float64", "float16", "int8", "uint8", "int32", "int64"])
def test_head_of_every_dtype(cli: Embermap, tmp_path: Path, kind: str) -> None:
    some = np.array([[1, 2], [100, 0]], kind)
    np.save(tmp_path / "y.npy", some)
    assert cli.ok("head", tmp_path / "y.npy", "--json").json["values"] == some.tolist()


def test_head_of_what_json_has_no_number_for(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.array([[np.nan, np.inf, -np.inf]], np.float32))
    assert cli.ok("head", tmp_path / "y.npy", "--json").json["values"] == [["nan", "inf", "-inf"]]


def test_head_of_tables_and_words(cli: Embermap, tmp_path: Path, file: Path) -> None:
    store = tmp_path / "tables"
    cli.ok("import", file, f"{store}/t", "--optimizer", "adagrad", "--quiet")
    assert cli.ok("head", f"{store}/t", "-n", "1").out.splitlines()[1] == "0: 0 0.25 0.5"
    assert cli.ok("head", f"{store}/t:sum", "-n", "1").out.splitlines()[1] == "0: 0 0 0"
    (tmp_path / "w.vec").write_text("2 2\nred 1 2\nblue 3 4\n")
    assert cli.ok("head", tmp_path / "w.vec").out.splitlines()[1:] == ["0 red: 1 2", "1 blue: 3 4"]
    cli.fails("head", f"{store}/none", says=["none"])
    cli.fails("head", tmp_path / "none.npy", says=["none.npy"])


def test_diff_of_equal_rows(cli: Embermap, tmp_path: Path, file: Path) -> None:
    cli.ok("convert", file, tmp_path / "y.h5:/v", "--quiet")
    assert cli.ok("diff", file, tmp_path / "y.h5:/v").out == "20 rows are the same\n"
    cli.ok("import", file, f"{tmp_path}/tables/t", "--quiet")
    assert cli.ok("diff", f"{tmp_path}/tables/t", file, "--json").json["same"] is True
    cli.ok("convert", file, tmp_path / "wide.npy", "--dtype", "float64", "--quiet")
    assert cli.ok("diff", file, tmp_path / "wide.npy", "--json").json["same"] is True


def test_diff_says_where_rows_differ(
    cli: Embermap, tmp_path: Path, file: Path, values: np.ndarray
) -> None:
    other = values.copy()
    other[4, 1] += 0.5
    other[9] -= 3
    np.save(tmp_path / "y.npy", other)
    result = cli("diff", file, tmp_path / "y.npy", "--json")
    assert (result.code, result.err) == (1, "")
    found = result.json
    assert (found["same"], found["different_rows"], found["different_elements"]) == (False, 2, 4)
    assert found["first"] == {"row": 4, "column": 1}
    assert (found["largest"]["difference"], found["largest"]["row"]) == (3, 9)
    text = cli("diff", file, tmp_path / "y.npy")
    assert text.code == 1
    assert "2 of 20 rows differ" in text.out


def test_diff_of_bits_and_values(cli: Embermap, tmp_path: Path) -> None:
    one = np.array([[0.0, np.nan]], np.float32)
    other = np.array([[-0.0, np.nan]], np.float32)
    other.view(np.uint32)[0, 1] += 1
    np.save(tmp_path / "a.npy", one)
    np.save(tmp_path / "b.npy", other)
    assert cli("diff", tmp_path / "a.npy", tmp_path / "b.npy").code == 1
    cli.ok("diff", tmp_path / "a.npy", tmp_path / "b.npy", "--values")


def test_diff_of_large_integers_is_exact(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[2**60]], np.int64))
    np.save(tmp_path / "b.npy", np.array([[2**60 + 1]], np.int64))
    assert cli("diff", tmp_path / "a.npy", tmp_path / "b.npy").code == 1


def test_diff_of_whole_numbers_and_floats_is_exact(cli: Embermap, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[2**53 + 1, 2**53, 2**63 - 1, -(2**63)]], np.int64))
    np.save(tmp_path / "b.npy", np.array([[2.0**53, 2.0**53, 2.0**63, -(2.0**63)]]))
    found = cli("diff", tmp_path / "a.npy", tmp_path / "b.npy", "--json").json
    assert (found["different_elements"], found["largest"]["difference"]) == (2, 1)


def test_diff_of_other_shapes_is_an_error(cli: Embermap, tmp_path: Path, file: Path) -> None:
    np.save(tmp_path / "y.npy", np.zeros((20, 4), np.float32))
    result = cli("diff", file, tmp_path / "y.npy")
    assert (result.code, "20 x 3" in result.error, "20 x 4" in result.error) == (2, True, True)
    assert cli("diff", file, tmp_path / "none.npy").code == 2


@pytest.mark.parametrize(
    ("text", "part"),
    [("5:8", slice(5, 8)), (":3", slice(3)), ("18:", slice(18, None)), ("4:4", slice(0))],
)
def test_some_rows(
    cli: Embermap, tmp_path: Path, file: Path, values: np.ndarray, text: str, part: slice
) -> None:
    found = cli.ok("convert", file, tmp_path / "y.npy", f"--rows={text}", "--json").json
    assert found["rows"] == len(values[part])
    assert np.array_equal(np.load(tmp_path / "y.npy"), values[part])
    cli.ok("import", file, f"{tmp_path}/tables/t", "--quiet")
    cli.ok("export", f"{tmp_path}/tables/t", tmp_path / "z.npy", f"--rows={text}", "--quiet")
    assert np.array_equal(np.load(tmp_path / "z.npy"), values[part])


def test_rows_that_are_not_there(cli: Embermap, tmp_path: Path, file: Path) -> None:
    cli.fails("convert", file, tmp_path / "y.npy", "--rows", "5:21", says=["5:21", "20"])
    for text in ("5", "a:b", "8:5", "1:2:3"):
        assert cli("convert", file, tmp_path / "y.npy", f"--rows={text}").code == 2
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize(
    "name",
    ["y.npy", "y.npz", "y.h5", "y.safetensors", "y.pt", "y.fvecs", "y.fbin", "y.raw", "y.vec"],
)
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_what_was_written_is_read_back(
    cli: Embermap, tmp_path: Path, file: Path, name: str, kind: str
) -> None:
    if kind == "float16" and name.endswith((".fvecs", ".fbin")):
        pytest.skip("the extension says float32")
    options = ["--dtype", kind, "--check", "--json"]
    if name.endswith(".vec"):
        options += ["--vocab", "none"]
        np.save(tmp_path / "i.npy", np.array([[2**24 + 1, -5]], np.int32))
        cli.ok("convert", tmp_path / "i.npy", tmp_path / "i.vec", "--vocab", "none", "--check")
        np.save(tmp_path / "n.npy", np.array([[np.nan, -0.0]], np.float32))
        cli.ok("convert", tmp_path / "n.npy", tmp_path / "n.vec", "--vocab", "none", "--check")
    assert cli.ok("convert", file, tmp_path / name, *options).json["checked"] is True
