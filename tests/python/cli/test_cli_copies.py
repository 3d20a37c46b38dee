"""Copies in another order, gone on with, of several arrays, by several threads; whole tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import embermap as em
import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")

ROWS, DIM = 500, 6


@pytest.fixture
def values():
    return np.random.default_rng(3).standard_normal((ROWS, DIM)).astype(np.float32)


@pytest.fixture
def file(tmp_path, values):
    np.save(tmp_path / "x.npy", values)
    return tmp_path / "x.npy"


@pytest.fixture
def order():
    return np.random.default_rng(4).permutation(ROWS)


def store_of(tmp_path, optimizer, dtype="float32", words=False):
    """A trained table, STORE/t."""
    with em.open(tmp_path / "tables", memory="32MiB") as store:
        table = store.create(
            "t", rows=ROWS, dim=DIM, dtype=dtype, optimizer=optimizer, init=em.init.Normal(0, 1)
        )
        for step in range(3):
            ids = np.arange(step, ROWS - 7, 3)
            grads = np.random.default_rng(step).standard_normal((len(ids), DIM)).astype(np.float32)
            table.update(ids, grads)
        store.commit()
    if words:
        (tmp_path / "tables" / "t.vocab.txt").write_text("".join(f"w{i}\n" for i in range(ROWS)))
    return tmp_path / "tables" / "t"


# --- what a copy must not replace -----------------------------------------------------------------


def test_words_and_orders_replace_no_file_of_a_store_or_of_the_copy(cli, tmp_path, file, order):
    table = store_of(tmp_path, em.optim.SGD())
    words = tmp_path / "v.vec"
    words.write_text("2 2\na 1 2\nb 3 4\n")
    manifest = tmp_path / "tables" / "embermap.json"
    before = manifest.read_bytes()
    for name in (manifest, tmp_path / "tables" / "new.txt"):
        args = ("convert", words, tmp_path / "y.npy", "--vocab", name, "--overwrite")
        cli.fails(*args, says=["tables"])
        with pytest.raises(ValueError, match="tables"):
            em.convert(words, tmp_path / "y.npy", vocab=name, overwrite=True)
    assert manifest.read_bytes() == before
    assert not (tmp_path / "y.npy").exists()
    own = tmp_path / "y.npy.order.npy"
    np.save(own, order)
    rows = own.read_bytes()
    args = ("convert", file, tmp_path / "y.npy", "--order", own, "--force")
    cli.fails(*args, says=["y.npy.order.npy", "is what the copy reads"])
    assert own.read_bytes() == rows
    assert table.with_suffix(".npy").exists()


def test_an_import_that_fails_at_its_end_leaves_no_table(cli, tmp_path):
    words = tmp_path / "v.vec"
    words.write_text("2 2\na 1 2\nb 3 4\n")
    store = tmp_path / "s"
    cli.fails("import", words, store / "x", "--vocab", store / "x.npy", says=["x.npy"])
    assert not store.exists() or em.open(store, mode="r").tables() == []


def test_an_export_of_another_table_of_the_name_is_not_gone_on_with(cli, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((40_000, 8), np.float32))
    ones = np.ones((40_000, 8), np.float32)
    ones[-1] = np.inf
    np.save(tmp_path / "b.npy", ones)
    table = tmp_path / "s" / "t"
    cli.ok("import", tmp_path / "b.npy", table)
    out = ("export", table, tmp_path / "y.npy", "--resume", "--dtype", "int32", "--memory", "1MiB")
    cli.fails(*out, says=["row 39999"])
    assert json.loads((tmp_path / ".y.npy.resume.json").read_text())["done"] > 0
    cli.ok("remove", table)
    cli.ok("import", tmp_path / "a.npy", table)
    cli.fails(*out, says=["another file of the table"])


def test_a_copy_of_several_files_is_not_gone_on_with(cli, tmp_path, file):
    with h5py.File(tmp_path / "x.h5", "w") as made:
        made["v"] = np.ones((3, 2), np.float32)
    args = ("convert", tmp_path / "x.h5:v", tmp_path / "y.npy", "--resume", "--allow-external")
    cli.fails(*args, says=["other files"])


def test_the_head_of_a_raw_file(cli, tmp_path):
    np.arange(6, dtype=np.float16).tofile(tmp_path / "x.raw")
    out = cli.ok("head", tmp_path / "x.raw", "--source-dtype", "float16", "--dim", "2").out
    assert "3 x 2 float16" in out
    assert "2: 4 5" in out


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u2", "i2", "<u4", ">u4", "i4", "i8", ">i8", "u8"])
def test_an_order_of_any_integer_dtype(cli, tmp_path, file, values, order, dtype):
    np.save(tmp_path / "o.npy", order.astype(dtype))
    found = cli.ok(
        "convert", file, tmp_path / "y.npy", "--order", tmp_path / "o.npy", "--check", "--json"
    ).json
    assert np.array_equal(np.load(tmp_path / "y.npy"), values[order])
    back = np.load(tmp_path / "y.npy.order.npy")
    assert (found["order"], back.dtype, back.shape) == (
        str(tmp_path / "y.npy.order.npy"), np.int64, (ROWS,),
    )  # fmt: skip
    assert np.array_equal(np.load(tmp_path / "y.npy")[back], values)


def test_orders_of_other_formats(cli, tmp_path, file, values, order):
    (tmp_path / "o.txt").write_text("\n".join(map(str, order)) + "\n")
    np.savez(tmp_path / "o.npz", order=order.reshape(1, -1))
    with h5py.File(tmp_path / "o.h5", "w") as f:
        f["order"] = order.astype(np.int32).reshape(-1, 1)
    for name in ("o.txt", "o.npz", "o.h5:/order"):
        out = tmp_path / f"{name[:4].replace('.', '_')}.h5"
        cli.ok("convert", file, out, "--order", tmp_path / name, "--memory", "64KiB")
        with h5py.File(out) as f:
            assert np.array_equal(f["data"], values[order])


def test_an_order_that_is_none_is_refused_by_place_and_number(cli, tmp_path, file, order):
    def refuse(numbers, *says):
        np.save(tmp_path / "o.npy", numbers)
        before = sorted(os.listdir(tmp_path))
        cli.fails("convert", file, tmp_path / "y.npy", "--order", tmp_path / "o.npy", says=says)
        assert sorted(os.listdir(tmp_path)) == before

    refuse(order[:-1], "499 numbers for 500 rows")
    twice = order.copy()
    twice[9] = twice[2]
    refuse(twice, "row", "twice", "entries 2 and 9")
    beyond = order.copy()
    beyond[7] = ROWS
    refuse(beyond, "entry 7 is row 500", "500 rows")
    below = order.copy()
    below[8] = -1
    refuse(below, "entry 8", "negative")
    refuse(order.astype(np.float64), "integers")
    refuse(order.reshape(2, -1), "shape")
    (tmp_path / "o.txt").write_text("1 2 x3")
    cli.fails(
        "convert", file, tmp_path / "y.npy", "--order", tmp_path / "o.txt", says=["entry 2", "x3"]
    )


def test_an_export_takes_any_rows(cli, tmp_path, values):
    with em.open(tmp_path / "tables") as store:
        store.create("t", rows=ROWS, dim=DIM)[:] = values
        store.commit()
    chosen = np.array([7, 3, 7, 499])
    np.save(tmp_path / "o.npy", chosen)
    cli.ok("export", tmp_path / "tables/t", tmp_path / "y.npy", "--order", tmp_path / "o.npy")
    assert np.array_equal(np.load(tmp_path / "y.npy"), values[chosen])
    back = np.full(ROWS, -1)
    back[[7, 3, 499]] = [0, 1, 3]
    assert np.array_equal(np.load(tmp_path / "y.npy.order.npy"), back)


def test_words_go_with_their_rows(cli, tmp_path, file, values, order):
    np.save(tmp_path / "o.npy", order)
    (tmp_path / "x.npy.vocab.txt").write_text("".join(f"w{i}\n" for i in range(ROWS)))
    cli.ok("convert", file, tmp_path / "y.vec", "--order", tmp_path / "o.npy")
    lines = (tmp_path / "y.vec").read_text().splitlines()[1:]
    assert [line.split()[0] for line in lines] == [f"w{i}" for i in order]
    np.save(tmp_path / "back.npy", np.load(tmp_path / "y.vec.order.npy"))
    cli.ok("convert", tmp_path / "y.vec", tmp_path / "z.npy", "--order", tmp_path / "back.npy")
    assert np.array_equal(np.load(tmp_path / "z.npy"), values)
    assert (tmp_path / "z.npy.vocab.txt").read_text() == (tmp_path / "x.npy.vocab.txt").read_text()
    cli.ok("import", tmp_path / "y.vec", tmp_path / "tables/t", "--order", tmp_path / "back.npy")
    with em.open(tmp_path / "tables", mode="r") as store:
        assert np.array_equal(store["t"][:], values)
    assert (tmp_path / "tables/t.vocab.txt").read_text().splitlines()[5] == "w5"
    assert np.array_equal(np.load(tmp_path / "tables/t.order.npy"), order)
    cli.ok("remove", tmp_path / "tables/t")
    assert not list((tmp_path / "tables").glob("t.*"))
    cli.ok("convert", file, tmp_path / "part.vec", "--rows", "3:5")
    assert (tmp_path / "part.vec").read_text().splitlines()[1].startswith("w3 ")


# --- resume ---------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("name", ["y.npy", "y.raw", "y.safetensors", "y.h5", "y.npz", "y.pt"])
def test_a_copy_is_gone_on_with_and_ends_the_same(cli, tmp_path, name):
    rows = np.random.default_rng(5).standard_normal((40_000, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    file = tmp_path / "x.npy"
    cli.ok("convert", file, tmp_path / f"whole_{name}", "--memory", "64KiB")
    if Path(name).suffix in (".npy", ".raw", ".safetensors"):
        # Room for the rows is asked for first, so that only a signal can come half-way.
        process = subprocess.Popen(
            [cli.path, "convert", file, tmp_path / name, "--resume", "--memory", "2KiB"]
        )
        partial = tmp_path / f".{name}.resume"
        while process.poll() is None and size_of(partial) < 200_000:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        if process.wait() == 0:
            pytest.skip("it was too quick to be stopped")
        record = json.loads((tmp_path / f".{name}.resume.json").read_text())
        assert 0 < record["done"] <= len(rows)  # all of them: it was stopped before the last step
        assert not (tmp_path / name).exists()
    found = cli.ok("convert", file, tmp_path / name, "--resume", "--check", "--json").json
    assert found.get("resumed_rows", 0) <= len(rows)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"whole_{name}").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_copy_of_something_else_is_not_gone_on_with(cli, tmp_path, file):
    record = tmp_path / ".y.npy.resume.json"
    process = cli("convert", file, tmp_path / "y.npy", "--resume", "--dtype", "int32")
    assert process.code == 1  # values are not whole: nothing of it is there
    assert not list(tmp_path.glob(".*"))
    rows = np.zeros((40_000, 8), np.float32)
    rows[-1, -1] = 0.5
    np.save(tmp_path / "big.npy", rows)
    big = tmp_path / "big.npy"
    args = ["convert", big, tmp_path / "y.npy", "--resume", "--dtype", "int32", "--memory", "64KiB"]
    cli.fails(*args, says=["row 39999, column 7", "0.5"])
    assert 0 < json.loads(record.read_text())["done"] < 40_000
    cli.fails(*args[:4], says=["another dtype", "float32 to int32"])
    rows[-1, -1] = 1
    time.sleep(0.01)
    np.save(big, rows)
    cli.fails(*args, says=["another source", ".y.npy.resume"])
    record.write_text("{}")
    cli.fails(*args, says=["no record of a copy"])
    record.unlink()
    cli.ok(*args)
    assert np.array_equal(np.load(tmp_path / "y.npy"), rows)


def test_an_import_is_gone_on_with(cli, tmp_path):
    rows = np.zeros((40_000, 8), np.float32)
    rows[-1, -1] = 0.5
    np.save(tmp_path / "x.npy", rows)
    args = ["import", tmp_path / "x.npy", tmp_path / "tables/t", "--resume", "--dtype", "int32"]
    cli.fails(*args, "--memory", "1MiB", says=["row 39999"])
    assert sorted(p.name for p in tmp_path.glob(".*")) == [
        ".tables.t.resume", ".tables.t.resume.json",
    ]  # fmt: skip
    assert not (tmp_path / "tables").exists()
    (tmp_path / ".tables.t.resume.json").unlink()
    rows[-1, -1] = 2
    np.save(tmp_path / "x.npy", rows)
    cli.ok(*args, "--check")
    with em.open(tmp_path / "tables", mode="r") as store:
        assert np.array_equal(store["t"][:], rows)
    assert not list(tmp_path.glob(".*"))


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", ["1", "2", "5"])
def test_threads_read_what_one_reads(cli, tmp_path, jobs):
    rows = np.random.default_rng(6).standard_normal((70_001, 5)).astype(np.float32)
    rows[5, 3] = 1e30
    with h5py.File(tmp_path / "x.h5", "w") as f:
        f.create_dataset("v", data=rows, chunks=(100, 5), compression="gzip")
    done = cli(
        *["convert", tmp_path / "x.h5", tmp_path / "y.npy", "--dtype", "float16"],
        *["--jobs", jobs, "--memory", "1MiB", "--check", "--json"],
    )
    assert done.code == 0, done
    found = done.json
    assert (found["became_infinite"], found["rows"]) == (1, 70_001)
    with np.errstate(over="ignore"):
        assert np.array_equal(np.load(tmp_path / "y.npy"), rows.astype(np.float16))
    assert cli("convert", tmp_path / "x.h5", tmp_path / "z.npy", "--jobs", "0").code == 2


# --- several arrays, whole tables -----------------------------------------------------------------


def read_all(path):
    if path.suffix == ".npz":
        with np.load(path) as found:
            return {name: found[name] for name in found.files}
    if path.suffix == ".h5":
        with h5py.File(path) as found:
            return {name: found[name][:] for name in found}
    if path.suffix == ".pt":
        return {k: v.numpy() for k, v in torch.load(path, weights_only=True).items()}
    return load_file(path)


@pytest.mark.parametrize("name", ["y.npz", "y.h5", "y.pt", "y.safetensors"])
def test_fields_are_arrays_of_one_file(cli, tmp_path, name):
    table = store_of(tmp_path, em.optim.Adam())
    found = cli.ok(
        "export",
        table,
        tmp_path / name,
        "--field",
        "weight=w,exp_avg,exp_avg_sq",
        "--check",
        "--json",
    ).json
    assert [each["name"] for each in found["fields"]] == ["w", "exp_avg", "exp_avg_sq"]
    arrays = read_all(tmp_path / name)
    with em.open(tmp_path / "tables", mode="r") as store:
        assert set(arrays) == {"w", "exp_avg", "exp_avg_sq"}
        assert np.array_equal(arrays["w"], store["t"][:])
        for field in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(arrays[field], store["t"].read(0, ROWS, field=field))
    if name == "y.h5":
        with h5py.File(tmp_path / name) as file:
            assert file["w"].attrs["source"] == str(table).encode()
            assert file["exp_avg"].attrs["source_dtype"] == b"float32"
    cli.fails("export", table, tmp_path / name, "--field", "weight,exp_avg", says=["exists"])
    cli.ok("export", table, tmp_path / name, "--field", "weight,exp_avg", "--overwrite")
    assert set(read_all(tmp_path / name)) == {"weight", "exp_avg"}
    cli.fails("export", table, tmp_path / "z.npy", "--field", "weight,exp_avg", says=["one array"])
    cli.ok("convert", tmp_path / name, tmp_path / "again.npz", "--field", "exp_avg,b=weight")
    assert set(read_all(tmp_path / "again.npz")) == {"exp_avg", "b"}
    cli.ok(
        *[
            "import",
            tmp_path / "again.npz",
            tmp_path / "tables/u",
            "--optimizer",
            "sgd:momentum=0.5",
        ],
        *["--field", "weight=b,momentum_buffer=exp_avg"],
    )
    with em.open(tmp_path / "tables", mode="r") as store:
        assert np.array_equal(store["u"].read(0, ROWS, field="momentum_buffer"), arrays["exp_avg"])
        assert np.array_equal(store["u"][:], arrays["w"])
    assert not list(tmp_path.glob(".*"))


OPTIMIZERS = [
    None,
    em.optim.Adagrad(0.1, initial_accumulator_value=0.5),
    em.optim.RowWiseAdagrad(0.1),
    em.optim.Adam(0.01, betas=(0.8, 0.99), amsgrad=True, step="row"),
    em.optim.RMSprop(momentum=0.5, centered=True),
]


@pytest.mark.parametrize("name", ["y.npz", "y.h5", "y.pt", "y.safetensors"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_a_whole_table_goes_and_comes_back(cli, tmp_path, name, optimizer):
    if optimizer is None:
        with em.open(tmp_path / "tables") as store:
            store.create("t", rows=ROWS, dim=DIM, dtype="int8", init=em.init.Constant(3))
            store.commit()
        table = tmp_path / "tables/t"
    else:
        table = store_of(tmp_path, optimizer, dtype="float16", words=True)
    cli.ok("export", table, tmp_path / name, "--all", "--check")
    cli.ok("import", tmp_path / name, tmp_path / "other/t", "--all")
    with (
        em.open(tmp_path / "tables", mode="r") as a,
        em.open(tmp_path / "other", mode="r") as b,
    ):
        left, right = a["t"], b["t"]
        assert (left.optimizer, left.step, left.dtype) == (right.optimizer, right.step, right.dtype)
        for field in left.fields:
            one, two = left.read(0, ROWS, field=field), right.read(0, ROWS, field=field)
            assert one.dtype == two.dtype
            assert np.array_equal(one.view(np.uint8), two.view(np.uint8))
    if optimizer is not None:
        words = (tmp_path / "tables/t.vocab.txt").read_text()
        assert (tmp_path / "other/t.vocab.txt").read_text() == words
        # Both go on in the same way.
        for path in ("tables", "other"):
            with em.open(tmp_path / path) as store:
                store["t"].update(np.arange(10), np.ones((10, DIM), np.float32))
                store.commit()
        cli.ok("diff", tmp_path / "tables/t", tmp_path / "other/t")


def test_a_whole_table_that_was_changed_is_refused(cli, tmp_path):
    table = store_of(tmp_path, em.optim.Adagrad())
    cli.ok("export", table, tmp_path / "y.npz", "--all")
    arrays = dict(read_all(tmp_path / "y.npz"))
    settings = json.loads(bytes(arrays["embermap"].reshape(-1)))

    def refuse(changes, *says):
        np.savez(tmp_path / "z.npz", **{**arrays, **changes})
        cli.fails("import", tmp_path / "z.npz", tmp_path / "other/t", "--all", says=says)
        assert not (tmp_path / "other").exists()

    refuse({"sum": arrays["sum"][:-1]}, "'sum'", "499 x 6")
    refuse({"weight": arrays["weight"].astype(np.float64)}, "'weight'", "float64")
    refuse({"embermap": np.frombuffer(b"{}", np.uint8)}, "embermap")
    settings["optimizer"]["name"] = "adamantium"
    text = np.frombuffer(json.dumps(settings).encode(), np.uint8)
    refuse({"embermap": text}, "adamantium")
    np.savez(tmp_path / "z.npz", weight=arrays["weight"])
    cli.fails("import", tmp_path / "z.npz", tmp_path / "other/t", "--all", says=["embermap"])


# --- torch.optim ----------------------------------------------------------------------------------

TORCH = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "sgd:momentum=0.5"),
    (torch.optim.Adagrad, {"lr": 0.2, "lr_decay": 0.1}, "adagrad"),
    (torch.optim.Adam, {"lr": 0.02, "amsgrad": True, "betas": (0.8, 0.9)}, "adam:amsgrad=true"),
    (torch.optim.AdamW, {"lr": 0.02}, "adamw"),
    (
        torch.optim.RMSprop,
        {"momentum": 0.5, "centered": True},
        "rmsprop:momentum=0.1,centered=true",
    ),
    (torch.optim.Adadelta, {}, "adadelta"),
    (torch.optim.Adamax, {}, "adamax"),
    (torch.optim.NAdam, {}, "nadam"),
    (torch.optim.RAdam, {}, "radam"),
    (torch.optim.Rprop, {}, "rprop"),
]


def steps(optimizer, parameters, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options", "ours"), TORCH, ids=lambda v: getattr(v, "__name__", "")
)
def test_state_of_torch_comes_and_goes(cli, tmp_path, kind, options, ours):
    weight = torch.nn.Parameter(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)))
    other = torch.nn.Parameter(torch.zeros(7))
    optimizer = kind([{"params": [other]}, {"params": [weight]}], **options)
    steps(optimizer, [other, weight], 4, seed=2)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    np.save(tmp_path / "w.npy", weight.detach().numpy())
    table = tmp_path / "tables/t"
    cli.ok("import", tmp_path / "w.npy", table, "--optimizer", ours)
    found = cli.ok("import", tmp_path / "optimizer.pt", table, "--optimizer-state", "--json").json
    assert found["parameter"] == "state.1"
    assert kind is torch.optim.SGD or found["step"] == 4
    cli.ok("export", table, tmp_path / "back.pt", "--optimizer-state")
    again = torch.load(tmp_path / "back.pt", weights_only=True)
    was = optimizer.state_dict()["state"][1]
    assert set(again["state"][0]) == {k for k, v in was.items() if v is not None}
    for name, value in again["state"][0].items():
        torch.testing.assert_close(value, was[name], rtol=1e-6, atol=0)
    # Both go on in the same way: the table, and torch from what the table exported.
    copy = torch.nn.Parameter(weight.detach().clone())
    restored = kind([copy], **options)
    restored.load_state_dict(again)
    steps(restored, [copy], 1, seed=9)
    grad = torch.randn(40, 3, generator=torch.Generator().manual_seed(9)).numpy()
    with em.open(tmp_path / "tables") as store:
        store["t"].update(np.arange(40), grad)
        np.testing.assert_allclose(store["t"][:], copy.detach().numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "before", "after", "ours", "name"),
    [
        (torch.optim.NAdam, {"betas": (0.5, 0.9)}, {"betas": (0.9, 0.99)}, "nadam", "mu_product"),
        (torch.optim.ASGD, {"lr": 0.5, "lambd": 0.1}, {"lr": 0.05}, "asgd", "eta"),
    ],
    ids=["nadam", "asgd"],
)
def test_what_a_step_takes_over_from_the_last_one_comes_and_goes(
    cli, tmp_path, kind, before, after, ours, name
):
    # Hyperparameters changed on the way: what torch keeps is of the steps as they were made.
    weight = torch.nn.Parameter(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)))
    optimizer = kind([weight], **before)
    steps(optimizer, [weight], 3, seed=2)
    optimizer.param_groups[0].update(after)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    np.save(tmp_path / "w.npy", weight.detach().numpy())
    table = tmp_path / "tables/t"
    cli.ok("import", tmp_path / "w.npy", table, "--optimizer", ours)
    cli.ok("import", tmp_path / "optimizer.pt", table, "--optimizer-state")
    cli.ok("export", table, tmp_path / "back.pt", "--optimizer-state")
    again = torch.load(tmp_path / "back.pt", weights_only=True)["state"][0][name]
    was = optimizer.state_dict()["state"][0][name]
    torch.testing.assert_close(again, was, rtol=1e-6, atol=0)
    cli.ok("export", table, tmp_path / "all.npz", "--all")
    cli.ok("import", tmp_path / "all.npz", tmp_path / "other/t")
    steps(optimizer, [weight], 2, seed=9)
    for path in ("tables", "other"):
        generator = torch.Generator().manual_seed(9)
        with em.open(tmp_path / path) as store:
            for _ in range(2):
                grads = torch.randn(40, 3, generator=generator).numpy()
                store["t"].update(np.arange(40), grads)
            want = weight.detach().numpy()
            np.testing.assert_allclose(store["t"][:], want, rtol=2e-5, atol=1e-6)
            store.commit()
    cli.ok("diff", table, tmp_path / "other/t")


def test_state_that_does_not_fit_is_refused_before_anything_changes(cli, tmp_path):
    weight = torch.nn.Parameter(torch.zeros(40, 3))
    optimizer = torch.optim.Adam([weight])
    steps(optimizer, [weight], 1, seed=1)
    torch.save(optimizer.state_dict(), tmp_path / "adam.pt")
    np.save(tmp_path / "w.npy", np.zeros((40, 3), np.float32))
    for name, says in [
        ("adagrad", ["state.0.sum"]),
        ("adam:amsgrad=true", ["max_exp_avg_sq"]),
        ("adamw", ["not decoupled"]),
        ("radam", []),
    ]:
        table = tmp_path / f"tables_{name[:6]}/t"
        cli.ok("import", tmp_path / "w.npy", table, "--optimizer", name)
        before = (table.with_suffix(".npy")).read_bytes()
        if says:
            cli.fails("import", tmp_path / "adam.pt", table, "--optimizer-state", says=says)
            assert (table.with_suffix(".npy")).read_bytes() == before
    cli.ok("import", tmp_path / "w.npy", tmp_path / "plain/t")
    cli.fails(
        "import",
        tmp_path / "adam.pt",
        tmp_path / "plain/t",
        "--optimizer-state",
        says=["no optimizer"],
    )
    two = [torch.nn.Parameter(torch.zeros(40, 3)) for _ in range(2)]
    optimizer = torch.optim.Adam(two)
    steps(optimizer, two, 1, seed=1)
    torch.save(optimizer.state_dict(), tmp_path / "two.pt")
    table = tmp_path / "adam/t"
    cli.ok("import", tmp_path / "w.npy", table, "--optimizer", "adam")
    says = ["several", "0, 1", "--param"]
    cli.fails("import", tmp_path / "two.pt", table, "--optimizer-state", says=says)
    cli.ok("import", tmp_path / "two.pt", table, "--optimizer-state", "--param", "1")
    cli.fails(
        "import",
        tmp_path / "two.pt",
        table,
        "--optimizer-state",
        "--param",
        "2",
        says=["no parameter 2"],
    )
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    cli.fails("import", tmp_path / "model.pt", table, "--optimizer-state", says=["param_groups"])


def test_state_in_a_checkpoint_is_named(cli, tmp_path):
    weight = torch.nn.Parameter(torch.zeros(40, 3))
    adam, other = torch.optim.Adam([weight], lr=0.25), torch.optim.Adam([weight], lr=0.5)
    steps(adam, [weight], 2, seed=1)
    steps(other, [weight], 3, seed=2)
    parts = {"model": {"weight": weight.detach()}, "optimizer": adam.state_dict()}
    torch.save({**parts, "optimizers": {"rows": other.state_dict()}}, tmp_path / "ckpt.pt")
    np.save(tmp_path / "w.npy", np.zeros((40, 3), np.float32))
    table = tmp_path / "tables/t"
    cli.ok("import", tmp_path / "w.npy", table, "--optimizer", "adam")

    def fails(name, says):
        cli.fails("import", f"{tmp_path / 'ckpt.pt'}{name}", table, "--optimizer-state", says=says)

    fails("", ["param_groups", "ckpt.pt:optimizer,", "ckpt.pt:optimizers.rows"])
    fails(":optimizers", ["'optimizers'", "param_groups", "ckpt.pt:optimizers.rows"])
    fails(":model", ["'model'", "param_groups"])
    fails(":optim", ["'optim'", "param_groups"])
    cli.ok("import", f"{tmp_path / 'ckpt.pt'}:optimizer", table, "--optimizer-state")
    with em.open(tmp_path / "tables") as store:
        rows = store["t"]
        assert (rows.step, rows.optimizer.lr) == (2, 0.25)
        state = adam.state_dict()["state"][0]
        assert np.array_equal(rows.view("exp_avg")[:], state["exp_avg"].numpy())
        found = rows.import_optimizer_state(f"{tmp_path / 'ckpt.pt'}:optimizers.rows")
        assert found == {"parameter": "state.0", "fields": ["exp_avg", "exp_avg_sq"], "step": 3}
        assert (rows.step, rows.optimizer.lr) == (3, 0.5)
        state = other.state_dict()["state"][0]
        assert np.array_equal(rows.view("exp_avg_sq")[:], state["exp_avg_sq"].numpy())


@pytest.mark.parametrize("number", [-1, 0.5, float("nan"), float("inf"), 1e300, 2**62])
def test_a_parameter_without_a_number_is_named(cli, tmp_path, number):
    np.save(tmp_path / "w.npy", np.zeros((40, 3), np.float32))
    cli.ok("import", tmp_path / "w.npy", tmp_path / "s/t", "--optimizer", "adam")
    torch.save({"state": {}, "param_groups": [{"params": [number]}]}, tmp_path / "o.pt")
    cli.fails(
        "import",
        tmp_path / "o.pt",
        tmp_path / "s/t",
        "--optimizer-state",
        says=["o.pt", "param_groups.0.params.0", "no number of a parameter"],
    )


def test_a_group_without_parameters_hides_none_behind_it(cli, tmp_path):
    weight = torch.nn.Parameter(torch.zeros(40, 3))
    optimizer = torch.optim.Adam([{"params": []}, {"params": [weight], "lr": 0.125}])
    steps(optimizer, [weight], 1, seed=1)
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    np.save(tmp_path / "w.npy", np.zeros((40, 3), np.float32))
    table = tmp_path / "s/t"
    cli.ok("import", tmp_path / "w.npy", table, "--optimizer", "adam")
    cli.ok("import", tmp_path / "o.pt", table, "--optimizer-state")
    with em.open(tmp_path / "s", mode="r") as store:
        assert store["t"].optimizer.lr == 0.125
        want = optimizer.state[weight]["exp_avg"].numpy()
        np.testing.assert_array_equal(store["t"].read(field="exp_avg"), want)


# --- what a copy says and leaves ------------------------------------------------------------------


def test_bytes_behind_an_array_are_told_of(cli, tmp_path, file, values):
    with file.open("ab") as out:
        out.write(b"junk")
    done = cli("convert", file, tmp_path / "y.npy")
    assert (done.code, "4 bytes follow its array" in done.err) == (0, True)
    assert np.array_equal(np.load(tmp_path / "y.npy"), values)


def test_what_cannot_be_a_file_is_refused(cli, tmp_path, file):
    for args in (("-", "y.npy"), (file, "-")):
        done = cli("convert", *args, "--from", "npy", "--to", "npy", cwd=tmp_path)
        assert (done.code, "a pipe" in done.error) == (2, True)
    for args in ((tmp_path / "x.parquet", "y.npy"), (file, "y.feather")):
        done = cli("convert", *args, cwd=tmp_path)
        assert (done.code, "em.convert" in done.error, "pyarrow" in done.error) == (2, True, True)
    os.link(file, tmp_path / "hard.npy")
    (tmp_path / "soft.npy").symlink_to(file)
    for name in ("hard.npy", "soft.npy"):
        cli.fails("convert", file, tmp_path / name, says=["the source itself"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hard.npy", "soft.npy", "x.npy"]


@pytest.mark.parametrize("name", ["a b.npy", "déjà vu.npy", "a:b.npy", "x.npz:a:b", "-x.npy"])
def test_names_of_all_kinds(cli, tmp_path, file, name):
    cli.ok("convert", "--check", file, f"./{name}", cwd=tmp_path)
    assert cli.ok("head", f"./{name}", "--json", cwd=tmp_path).json["rows"] == ROWS


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_place_of_the_rows_so_far_is_not_followed(cli, tmp_path, file, link):
    other = tmp_path / "other"
    other.write_text("what somebody else has")
    partial = tmp_path / ".y.npy.resume"
    link(other, partial)
    args = ("convert", file, tmp_path / "y.npy", "--resume")
    cli.fails(*args, says=[partial.name, "symbolic link" if link is os.symlink else "other names"])
    assert other.read_text() == "what somebody else has"
    assert not (tmp_path / "y.npy").exists()
    partial.unlink()
    cli.ok(*args)
    assert not (tmp_path / "y.npy").is_symlink()
