"""Rows of files onto tables that are there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import embermap as em
import numpy as np
import pytest

ROWS, DIM = 400, 6


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def values(rng):
    return rng.standard_normal((ROWS, DIM)).astype(np.float32)


@pytest.fixture
def table(tmp_path, values):
    """STORE/t with state that is not initial."""
    with em.open(tmp_path / "s", memory="32MiB") as store:
        made = store.create("t", rows=ROWS, dim=DIM, optimizer=em.optim.Adagrad())
        made[:] = values
        made.scatter(range(ROWS), np.abs(values), field="sum")
    return tmp_path / "s" / "t"


def rows_of(table: Path, field: str = "weight") -> np.ndarray:
    with em.open(table.parent, mode="r") as store:
        return store[table.name].read(field=field)


def commits_of(table: Path) -> int:
    with em.open(table.parent, mode="r") as store:
        return store.commit_number


def test_rows_take_the_place_of_all_rows_and_state_stays(cli, tmp_path, table, values):
    np.save(tmp_path / "n.npy", values * 2)
    before = commits_of(table)
    found = cli.ok("import", tmp_path / "n.npy", table, "--into", "--check", "--json").json
    assert (found["rows"], found["first_row"], found["into"], found["checked"]) == (
        ROWS, 0, True, True,
    )  # fmt: skip
    assert np.array_equal(rows_of(table), values * 2)
    assert np.array_equal(rows_of(table, "sum"), np.abs(values))
    assert commits_of(table) == before + 1
    assert cli("verify", table).code == 0


@pytest.mark.parametrize("at", [0, 1, 37, ROWS - 5])
def test_some_rows_go_to_a_place(cli, tmp_path, table, values, at):
    np.save(tmp_path / "n.npy", values + 1)
    args = ("import", tmp_path / "n.npy", table, "--into", "--at", str(at), "--rows", "10:15")
    cli.ok(*args, "--check")
    want = values.copy()
    want[at : at + 5] = values[10:15] + 1
    assert np.array_equal(rows_of(table), want)


def test_rows_that_do_not_fit_change_nothing(cli, tmp_path, table, values):
    np.save(tmp_path / "n.npy", values + 1)
    np.save(tmp_path / "few.npy", values[:3] + 1)
    np.save(tmp_path / "wide.npy", np.ones((ROWS, DIM + 1), np.float32))
    np.save(tmp_path / "f8.npy", np.ones((ROWS, DIM)))
    before = commits_of(table)
    for says, args in {
        "3 rows for table 't' with 400": ("few.npy", "--into"),
        "reach past the end of table 't' with 400 rows": ("few.npy", "--into", "--at", "398"),
        "400 rows at row 1 ": ("n.npy", "--into", "--at", "1"),
        "7 columns, 'weight' of table 't' has 6": ("wide.npy", "--into"),
        "does not hold all of its values": ("f8.npy", "--into"),
        "dtype float16: 'weight' of table 't' is float32": (
            "n.npy", "--into", "--dtype", "float16",
        ),
    }.items():  # fmt: skip
        cli.fails("import", tmp_path / args[0], table, *args[1:], says=[says])
    cli.fails("import", tmp_path / "n.npy", tmp_path / "s/other", "--into", says=["other"])
    cli.fails("import", table.with_suffix(".npy"), table, "--into", says=["the table itself"])
    assert cli("import", tmp_path / "n.npy", table, "--at", "3").code == 2
    assert cli("import", tmp_path / "n.npy", table, "--into", "--append", "--at", "3").code == 2
    assert cli("import", tmp_path / "n.npy", table, "--into", "--optimizer", "sgd").code == 2
    assert np.array_equal(rows_of(table), values)
    assert commits_of(table) == before


def test_other_dtypes_are_converted_as_far_as_they_are_held(cli, tmp_path, values):
    half = tmp_path / "s" / "h"
    np.save(tmp_path / "h.npy", values.astype(np.float16))
    cli.ok("import", tmp_path / "h.npy", half)
    big = values.copy()
    big[3, 2], big[4, 1] = 1e6, 1e-12
    np.save(tmp_path / "n.npy", big)
    cli.fails("import", tmp_path / "n.npy", half, "--into", says=["float32", "float16"])
    done = cli(
        "import", tmp_path / "n.npy", half, "--into", "--dtype", "float16", "--check", "--json"
    )
    assert done.code == 0
    assert "1 values became infinite and 1 became zero" in done.err
    assert (done.json["became_infinite"], done.json["became_zero"]) == (1, 1)
    assert any("rounded to nearest even" in text for text in done.json["remarks"])
    with np.errstate(over="ignore"):
        assert np.array_equal(rows_of(half), big.astype(np.float16))
    np.save(tmp_path / "i.npy", np.full((ROWS, DIM), -7, np.int8))
    cli.ok("import", tmp_path / "i.npy", half, "--into", "--check")
    assert (rows_of(half) == -7).all()


def test_state_comes_by_its_name(cli, tmp_path, table, values):
    np.savez(tmp_path / "s.npz", weight=values + 3, sum=values**2, other=values[:5])
    cli.ok("import", tmp_path / "s.npz", table, "--into", "--field", "sum", "--check")
    assert np.array_equal(rows_of(table), values)
    assert np.array_equal(rows_of(table, "sum"), values**2)
    cli.ok("import", tmp_path / "s.npz:weight", f"{table}:sum", "--into")
    assert np.array_equal(rows_of(table, "sum"), values + 3)
    found = cli.ok(
        "import", tmp_path / "s.npz", table, "--into", "--field", "sum,weight", "--check", "--json"
    ).json
    assert [one["name"] for one in found["fields"]] == ["weight", "sum"]
    assert np.array_equal(rows_of(table), values + 3)
    assert np.array_equal(rows_of(table, "sum"), values**2)
    cli.fails(
        "import", tmp_path / "s.npz", table, "--into", "--field", "weight=other,sum",
        says=["5 rows for 'weight' and 400 for 'sum'"],
    )  # fmt: skip
    cli.fails("import", tmp_path / "s.npz", table, "--into", "--field", "speed", says=["speed"])


def test_rows_are_added_at_the_end_as_one(cli, tmp_path, table, values):
    np.savez(tmp_path / "s.npz", weight=values[:77] + 3, sum=values[:77] ** 2)
    found = cli.ok(
        "import", tmp_path / "s.npz:weight", table, "--into", "--append", "--check", "--json"
    ).json
    assert (found["first_row"], found["table"]["rows"]) == (ROWS, ROWS + 77)
    assert np.array_equal(rows_of(table), np.concatenate([values, values[:77] + 3]))
    assert (rows_of(table, "sum")[ROWS:] == 0).all()
    cli.ok(
        "import",
        tmp_path / "s.npz",
        table,
        "--into",
        "--append",
        "--field",
        "weight,sum",
        "--check",
    )
    assert np.array_equal(rows_of(table, "sum")[ROWS + 77 :], values[:77] ** 2)
    cli.fails(
        "import", tmp_path / "s.npz", table, "--into", "--append", "--field", "sum",
        says=["need their 'weight'"],
    )  # fmt: skip
    assert cli("verify", table).code == 0


def test_added_rows_with_one_that_does_not_fit_leave_the_table(cli, tmp_path, values):
    np.save(tmp_path / "i.npy", np.arange(ROWS * DIM).reshape(ROWS, DIM).astype(np.int32))
    table = tmp_path / "s" / "i"
    cli.ok("import", tmp_path / "i.npy", table)
    bad = np.ones((50_000, DIM), np.float32)
    bad[-1, 4] = 0.5
    np.save(tmp_path / "f.npy", bad)
    before = rows_of(table)
    for more in (("--append",), ("--at", "0", "--rows", "49900:")):
        cli.fails(
            "import", tmp_path / "f.npy", table, "--into", "--dtype", "int32", *more,
            says=["column 4"],
        )  # fmt: skip
        assert np.array_equal(rows_of(table), before)
        assert cli("verify", table).code == 0


def test_an_order_takes_any_rows(cli, tmp_path, table, values):
    np.save(tmp_path / "n.npy", values + 1)
    np.save(tmp_path / "o.npy", np.array([5, 5, 399, 0], np.uint64))
    cli.ok(
        "import", tmp_path / "n.npy", table, "--into", "--at", "7", "--order", tmp_path / "o.npy",
        "--check",
    )  # fmt: skip
    want = values.copy()
    want[7:11] = values[[5, 5, 399, 0]] + 1
    assert np.array_equal(rows_of(table), want)
    assert not (tmp_path / "s" / "t.order.npy").exists()


def vectors(path: Path, words: list[str], rows: np.ndarray) -> Path:
    lines = [f"{word} {' '.join(map(str, row))}" for word, row in zip(words, rows, strict=True)]
    path.write_text(f"{rows.shape[0]} {rows.shape[1]}\n" + "\n".join(lines) + "\n")
    return path


def test_words_have_to_be_those_of_the_table(cli, tmp_path, rng):
    rows = rng.integers(-9, 9, (5, 3)).astype(np.float32)
    words = ["a", "b", "c d".replace(" ", "_"), "é", "e"]
    table = tmp_path / "s" / "w"
    cli.ok("import", vectors(tmp_path / "w.vec", words, rows), table)
    cli.ok("import", vectors(tmp_path / "n.vec", words, rows + 1), table, "--into", "--check")
    assert np.array_equal(rows_of(table), rows + 1)
    part = vectors(tmp_path / "p.vec", words[2:4], rows[:2])
    cli.ok("import", part, table, "--into", "--at", "2")
    cli.fails(
        "import", part, table, "--into", "--at", "1",
        says=["row 0 is 'c_d'", "row 1 of table 'w' is 'b'"],
    )  # fmt: skip
    assert np.array_equal(rows_of(table)[1], rows[1] + 1)
    cli.ok("import", part, table, "--into", "--at", "1", "--vocab", "none")
    assert np.array_equal(rows_of(table)[1], rows[0])
    vocabulary = tmp_path / "s" / "w.vocab.txt"
    cli.ok("import", vectors(tmp_path / "m.vec", ["f", "g"], rows[:2]), table, "--into", "--append")
    assert vocabulary.read_text() == "a\nb\nc_d\né\ne\nf\ng\n"
    assert rows_of(table).shape == (7, 3)
    np.save(tmp_path / "x.npy", rows[:2])
    cli.fails(
        "import", tmp_path / "x.npy", table, "--into", "--append", says=["no words for it", "none"]
    )
    (tmp_path / "v.txt").write_text("h\ni\n")
    cli.ok("import", tmp_path / "x.npy", table, "--into", "--append", "--vocab", tmp_path / "v.txt")
    assert vocabulary.read_text().splitlines()[5:] == ["f", "g", "h", "i"]
    vocabulary.unlink()
    cli.fails("import", part, table, "--into", "--at", "1", says=["w.vocab.txt", "is not there"])


def test_more_than_the_log_holds_is_one_commit(cli, tmp_path):
    rows = np.random.default_rng(1).standard_normal((300_000, 32)).astype(np.float32)  # 37 MiB
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", rows + 1)
    table = tmp_path / "s" / "t"
    cli.ok("import", tmp_path / "x.npy", table)
    # The log of so little memory would hold 64 MiB of changes, and fewer pages.
    cli.ok("import", tmp_path / "y.npy", table, "--into", "--memory", "8MiB")
    assert np.array_equal(rows_of(table), rows + 1)
    cli.fails(
        "import", tmp_path / "x.npy", table, "--into", "--memory", "1MiB",
        says=["to be changed as one", "memory"],
    )  # fmt: skip
    cli.fails("import", tmp_path / "x.npy", table, "--into", "--log-limit", "2MiB", says=["log"])
    assert np.array_equal(rows_of(table), rows + 1)
    assert cli("verify", table).code == 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("more", [("--at", "0"), ("--append",)])
def test_stopped_in_the_middle_the_table_is_as_it_was(cli, tmp_path, stop, more):
    rows = np.random.default_rng(1).standard_normal((200_000, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", rows + 1)
    table = tmp_path / "s" / "t"
    cli.ok("import", tmp_path / "x.npy", table)
    child = subprocess.Popen(
        [cli.path, "import", tmp_path / "y.npy", table, "--into", *more, "--check"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = tmp_path / "s" / "redo.log"
    data = table.with_suffix(".npy")
    size = data.stat().st_size
    end = time.monotonic() + 30
    while child.poll() is None and time.monotonic() < end:
        if (log.exists() and log.stat().st_size > 4 << 20) or data.stat().st_size > size:
            break
        time.sleep(0.001)
    child.send_signal(stop)
    code = child.wait(60)
    now = rows_of(table)
    if code == 0 or (stop == signal.SIGKILL and not np.array_equal(now[: len(rows)], rows)):
        whole = np.concatenate([rows, rows + 1]) if more[0] == "--append" else rows + 1
        assert np.array_equal(now, whole)  # it was done
    elif len(now) > len(rows):
        assert stop == signal.SIGKILL  # committed, while it was checked
        assert np.array_equal(now, np.concatenate([rows, rows + 1]))
    else:
        assert np.array_equal(now, rows)
    cli.ok("import", tmp_path / "y.npy", table, "--into", "--at", "0", "--check")
    assert np.array_equal(rows_of(table)[: len(rows)], rows + 1)
    assert cli("verify", table).code == 0


def test_a_check_can_be_stopped(cli, tmp_path):
    rows = np.random.default_rng(1).integers(0, 9, (400_000, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    child = subprocess.Popen(
        [cli.path, "convert", tmp_path / "x.npy", tmp_path / "y.vec", "--vocab", "none", "--check"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not (tmp_path / "y.vec").exists() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    child.send_signal(signal.SIGINT)
    code = child.wait(60)
    assert code in (130, 0)
    if code == 130:  # what it had done is whole
        with em.io.open(tmp_path / "y.vec") as there:
            assert np.array_equal(there[-3:], rows[-3:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.vec"]


# --- the same kind of faults elsewhere ------------------------------------------------------------


def test_a_check_of_several_fields_compares_all(cli, tmp_path, values):
    np.savez(tmp_path / "s.npz", weight=values, sum=values**2)
    table = tmp_path / "s" / "t"
    args = ("import", tmp_path / "s.npz", table, "--optimizer", "adagrad", "--field", "weight,sum")
    found = cli.ok(*args, "--check", "--json").json
    assert found["checked"]
    assert [one["name"] for one in found["fields"]] == ["weight", "sum"]


def test_import_takes_some_rows(cli, tmp_path, values):
    np.save(tmp_path / "x.npy", values)
    cli.ok("import", tmp_path / "x.npy", tmp_path / "s/t", "--rows", "10:20", "--check")
    assert np.array_equal(rows_of(tmp_path / "s/t"), values[10:20])


def test_a_vocabulary_goes_into_no_store(cli, tmp_path):
    words = vectors(tmp_path / "w.vec", ["a", "b"], np.ones((2, 2), np.float32))
    cli.ok("import", words, tmp_path / "one" / "t")
    for name in (tmp_path / "one" / "x.txt", tmp_path / "two" / "x.txt"):
        cli.fails("import", words, tmp_path / "two" / "t", "--vocab", name, says=["x.txt", "store"])
        assert not name.exists()
    with em.open(tmp_path / "two") as store:
        with pytest.raises(ValueError, match="own directory"):
            store.import_file("t", words, vocab=tmp_path / "one" / "x.txt")
        assert store.tables() == []


def test_a_vocabulary_with_too_few_words_makes_no_table(cli, tmp_path):
    words = vectors(tmp_path / "w.vec", ["a", "b"], np.ones((2, 2), np.float32))
    cli.ok("import", words, tmp_path / "s" / "t")
    cli.ok("export", tmp_path / "s" / "t", tmp_path / "all.npz", "--all")
    arrays = dict(np.load(tmp_path / "all.npz"))
    arrays["vocabulary"] = arrays["vocabulary"][:2]
    np.savez(tmp_path / "few.npz", **arrays)
    cli.fails(
        "import", tmp_path / "few.npz", tmp_path / "s" / "u", "--all", says=["1 words for 2 rows"]
    )
    assert em.open(tmp_path / "s", mode="r").tables() == ["t"]
    (tmp_path / "v.txt").write_text("a\n")
    cli.fails(
        "export", tmp_path / "s/t", tmp_path / "b.npz", "--all", "--vocab", tmp_path / "v.txt",
        says=["1 words for 2 rows"],
    )  # fmt: skip
    assert not (tmp_path / "b.npz").exists()


def test_convert_says_where_words_went(cli, tmp_path):
    words = vectors(tmp_path / "w.vec", ["a", "b"], np.ones((2, 2), np.float32))
    out = cli.ok("convert", words, tmp_path / "y.npy").out
    assert f"words in {tmp_path / 'y.npy.vocab.txt'}" in out


def test_whole_numbers_that_text_would_change_are_counted(cli, tmp_path):
    (tmp_path / "w.vec").write_text("3 2\na 16777217 1\nb 3 -123456789\nc 16777216 0.5\n")
    done = cli("convert", tmp_path / "w.vec", tmp_path / "y.npy", "--vocab", "none")
    assert done.code == 0
    assert "2 whole numbers have more digits than float32 holds" in done.err
    assert "line 2" in done.err
    cli.ok(
        "convert", tmp_path / "w.vec", tmp_path / "z.npy", "--vocab", "none", "--dtype", "float64"
    )
    assert np.load(tmp_path / "z.npy").tolist() == [
        [16777217, 1], [3, -123456789], [16777216, 0.5],
    ]  # fmt: skip


def test_two_files_that_do_not_say_what_they_are_are_compared(cli, tmp_path, values):
    values.tofile(tmp_path / "x.raw")
    np.save(tmp_path / "x.npy", values)
    same = ("--dim", str(DIM), "--source-dtype", "float32")
    assert cli.ok("diff", tmp_path / "x.raw", tmp_path / "x.npy", *same).code == 0
    changed = values.copy()
    changed[3, 1] += 1
    changed.tofile(tmp_path / "z.raw")
    found = cli("diff", tmp_path / "x.raw", tmp_path / "z.raw", *same, "--json")
    assert (found.code, found.json["first"]) == (1, {"row": 3, "column": 1})


def test_files_are_one_by_whatever_name(cli, tmp_path, values):
    np.save(tmp_path / "x.npy", values)
    order = tmp_path / "o.npy"
    np.save(order, np.arange(ROWS))
    os.link(order, tmp_path / "hard.npy")
    (tmp_path / "soft.npy").symlink_to(order)
    before = order.read_bytes()
    for name in ("hard.npy", "soft.npy"):
        cli.fails(
            "convert", tmp_path / "x.npy", tmp_path / name, "--order", order, "--force",
            says=["is the order"],
        )  # fmt: skip
    assert order.read_bytes() == before
    (tmp_path / "words.vec").write_text("".join(f"w{i}\n" for i in range(ROWS)))
    cli.fails(
        "convert", tmp_path / "x.npy", tmp_path / "words.vec", "--vocab", tmp_path / "words.vec",
        "--force", says=["would be replaced"],
    )  # fmt: skip


def test_a_fifo_is_named(cli, tmp_path, values):
    np.save(tmp_path / "x.npy", values)
    os.mkfifo(tmp_path / "f.npy")
    os.mkfifo(tmp_path / "f.txt")
    cli.fails("convert", tmp_path / "f.npy", tmp_path / "y.npy", says=["FIFO"], timeout=20)
    for option, name in (("--order", "f.txt"), ("--order", "f.npy")):
        cli.fails(
            "convert", tmp_path / "x.npy", tmp_path / "y.npy", option, tmp_path / name,
            says=["FIFO"], timeout=20,
        )  # fmt: skip
    cli.fails(
        "convert", tmp_path / "x.npy", tmp_path / "y.vec", "--vocab", tmp_path / "f.txt",
        says=["FIFO"], timeout=20,
    )  # fmt: skip


def test_few_rows_into_a_table_whose_pages_are_many(cli, tmp_path):
    # What is changed is what the source has, however many rows of the table follow.
    table = tmp_path / "s" / "t"
    cli.ok("create", table, "--rows", "2e9", "--dim", "32")
    rows = np.arange(320, dtype=np.float32).reshape(10, 32)
    np.save(tmp_path / "n.npy", rows)
    np.save(tmp_path / "o.npy", [3, 1])
    cli.ok("import", tmp_path / "n.npy", table, "--into", "--at", "0")
    cli.ok("import", tmp_path / "n.npy", table, "--into", "--at", "100", "--rows", "4:")
    cli.ok(
        "import", tmp_path / "n.npy", table, "--into", "--at", "7", "--order", tmp_path / "o.npy"
    )
    np.savez(tmp_path / "n.npz", a=rows, b=rows + 1)
    cli.ok("import", tmp_path / "n.npz", table, "--into", "--at", "50", "--field", "weight=b")
    rows.tofile(tmp_path / "n.raw")
    cli.ok(
        *["import", tmp_path / "n.raw", table, "--into", "--at", "80"],
        *["--source-dtype", "float32", "--dim", "32"],
    )
    with em.open(tmp_path / "s", mode="r", memory="64MiB") as store:
        found = store["t"]
        assert np.array_equal(found[:7], rows[:7])
        assert np.array_equal(found[7:10], rows[[3, 1, 9]])
        assert np.array_equal(found[100:106], rows[4:])
        assert np.array_equal(found[50:60], rows + 1)
        assert np.array_equal(found[80:90], rows)


def test_the_page_size_of_a_table_that_is_there_is_not_chosen(cli, tmp_path, table, values):
    np.save(tmp_path / "n.npy", values)
    result = cli("import", tmp_path / "n.npy", table, "--into", "--page-size", "8KiB")
    assert result.code == 2
    assert "--page-size: the table has what it was made with" in result.err


def test_what_was_written_where_is_said(cli, tmp_path, table, values):
    np.save(tmp_path / "n.npy", values[:3])
    said = cli.ok("import", tmp_path / "n.npy", table, "--into", "--at", "5").out.splitlines()
    assert said[-1] == f"rows 5..7 of {table}"
    said = cli.ok("import", tmp_path / "n.npy", table, "--into", "--append").out.splitlines()
    assert said[-1] == f"rows {ROWS}..{ROWS + 2} of {table}"
    one = ("import", tmp_path / "n.npy", table, "--into", "--at", "0", "--rows", "1:2")
    assert cli.ok(*one).out.splitlines()[-1] == f"row 0 of {table}"
    assert cli.ok(*one, "--quiet").out == ""
    assert cli.ok(*one, "--json").json["first_row"] == 0


@pytest.mark.parametrize("options", [[], ["--resume"], ["--in-place"]])
def test_import_onto_a_table_that_is_there_names_into(cli, tmp_path, table, values, options):
    np.save(tmp_path / "n.npy", values)
    cli.fails(
        "import", tmp_path / "n.npy", table, *options, says=["already exists", "remove", "--into"]
    )


@pytest.mark.parametrize("option", ["--in-place", "--all", "--optimizer-state", "--into"])
def test_a_page_size_that_would_do_nothing_is_refused(cli, tmp_path, table, option):
    source = tmp_path / "n.npy"
    np.save(source, np.zeros((4, DIM), np.float32))
    target = table if option in ("--optimizer-state", "--into") else table.with_name("new")
    if option == "--all":
        cli.ok("export", table, tmp_path / "all.npz", "--all")
        source = tmp_path / "all.npz"
    elif option == "--optimizer-state":
        cli.ok("export", table, tmp_path / "state.pt", "--optimizer-state")
        source = tmp_path / "state.pt"
    before = sorted(table.parent.iterdir())
    refused = cli("import", source, target, option, "--page-size", "8KiB")
    assert refused.code == 2
    assert "--page-size" in refused.err
    assert sorted(table.parent.iterdir()) == before


def test_too_little_memory_is_told_in_words_of_the_option(cli, tmp_path, table, values):
    np.save(tmp_path / "n.npy", values)
    for target in (table.with_name("new"), tmp_path / "other" / "t"):
        cli.fails(
            "import", tmp_path / "n.npy", target, "--memory", "1", says=["--memory 1,", "half"]
        )
    args = ("import", tmp_path / "n.npy", table, "--into", "--memory", "1")
    cli.fails(*args, says=["--memory 1,", "half"])


def test_an_order_leaves_the_file_of_an_adopted_table(cli, tmp_path, table, values):
    np.save(tmp_path / "n.npy", values)
    np.save(tmp_path / "o.npy", np.arange(ROWS)[::-1])
    adopted = table.parent / "new.order.npy"
    np.save(adopted, values)
    with em.open(table.parent, memory="32MiB") as store:
        store.adopt("mine", adopted)
    bits = adopted.read_bytes()
    target = table.with_name("new")
    args = ("import", tmp_path / "n.npy", target, "--order", tmp_path / "o.npy")
    cli.fails(*args, says=["new.order.npy", "'mine'"])
    assert adopted.read_bytes() == bits
    with em.open(table.parent, mode="r") as store:
        assert "new" not in store
    with em.open(table.parent, memory="32MiB") as store:
        with pytest.raises(FileExistsError, match="mine"):
            store.import_file("new", tmp_path / "n.npy", order=tmp_path / "o.npy")
        assert "new" not in store
    assert adopted.read_bytes() == bits
