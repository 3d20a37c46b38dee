"""The dense part of a model and the commits of its tables, kept together."""

from __future__ import annotations

import fractions
import os
import signal
import subprocess
import sys
import textwrap

import embermap as em
import pytest

torch = pytest.importorskip("torch")

ROWS, DIM = 200, 4


class Model(torch.nn.Module):
    def __init__(self, store):
        super().__init__()
        self.items = em.torch.Embedding(store["items"])
        self.users = em.torch.Swap(store["users"], lambda p: torch.optim.NAdam(p, lr=0.05))
        self.drop = torch.nn.Dropout(0.25)
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.head(self.drop(self.items(ids) * self.users(ids)))


def tables(store):
    for name in ("items", "users"):
        store.create(
            name, rows=ROWS, dim=DIM, optimizer=em.optim.Adagrad(0.1), init=em.init.Normal(0, 1)
        )
    store.commit()


class Run:
    """A model with its optimizers, and steps that depend on their number alone."""

    def __init__(self, store):
        torch.manual_seed(1)
        self.store = store
        self.model = Model(store)
        dense = torch.optim.AdamW(self.model.head.parameters(), lr=0.01)
        rows = em.torch.Optimizer(self.model.items)
        self.steppers = [dense, rows, self.model.users]
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(rows, 20)
        self.parts = {
            "dense": dense, "rows": rows, "users": self.model.users, "rate": self.scheduler,
        }  # fmt: skip

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, ROWS, (16,), generator=generator)
        for each in self.steppers:
            each.zero_grad()
        self.model(ids).square().sum().backward()
        for each in self.steppers:
            each.step()
        self.scheduler.step()

    def save(self, path, number):
        return em.torch.save(self.model, path, self.parts, note={"step": number})

    def load(self, path):
        return em.torch.load(self.model, path, self.parts, rng=True)

    def result(self):
        every = torch.arange(ROWS)
        rows = [self.store[name].gather(every) for name in self.store if name[0] in "iu"
                and self.store[name].rows == ROWS]  # fmt: skip
        return [*rows, *self.model.head.state_dict().values()]


@pytest.fixture
def store(path):
    opened = em.open(path, memory="16MiB", threads=1)
    tables(opened)
    yield opened
    opened.abandon()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.pt"


def test_what_is_saved_is_loaded(store, file):
    run = Run(store)
    for number in range(3):
        run.step(number)
    saved = run.save(file, 3)
    assert saved == ([store.commit_number], {"step": 3})
    assert store.note["step"] == 3
    other = Run(store)
    found = other.load(file)
    assert found == saved
    assert all(a.equal(b) for a, b in zip(run.result(), other.result(), strict=True))
    assert other.scheduler.last_epoch == 3
    assert other.parts["rows"].param_groups[0]["lr"] == run.parts["rows"].param_groups[0]["lr"]
    assert sorted(each.name for each in file.parent.iterdir()) == ["model.pt", "store"]


def test_the_file_is_one_of_torch_and_small(store, file):
    run = Run(store)
    run.step(0)
    run.save(file, 1)
    content = torch.load(file, weights_only=True)
    assert content["note"] == {"step": 1}
    assert content["stores"][0]["commit"] == store.commit_number
    assert content["stores"][0]["tables"]["items"] == {
        "rows": ROWS, "dim": DIM, "dtype": "float32", "step": 1,
    }  # fmt: skip
    assert sorted(content["model"]) == [
        "head.bias", "head.weight", "items.anchor", "users.module.anchor",
    ]  # fmt: skip
    assert file.stat().st_size < 40_000


def test_resumed_training_equals_unbroken_training(tmp_path):
    results = []
    for broken in (False, True):
        where, file = tmp_path / f"store{broken}", tmp_path / f"{broken}.pt"
        with em.open(where, memory="16MiB", threads=1) as store:
            tables(store)
            run = Run(store)
            for number in range(8):
                run.step(number)
                if number == 4:
                    run.save(file, 5)
                    if broken:
                        break
            if not broken:
                results.append(run.result())
                continue
            for number in range(20, 23):
                run.step(number)  # of no commit
            store.abandon()
        with em.open(where, memory="16MiB", threads=1) as store:
            run = Run(store)
            assert run.load(file).note == {"step": 5}
            for number in range(5, 8):
                run.step(number)
            results.append(run.result())
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch, embermap as em
torch.set_num_threads(1)
from test_torch_checkpoint import Run, tables
from embermap.torch import _checkpoint
where, file, moment = sys.argv[2:5]
saves = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

commit, write = em.Store.commit, _checkpoint._write

def dying_commit(self, note=None):
    if saves == 2 and moment == "before the commit":
        die()
    number = commit(self, note)
    if saves == 2 and moment == "after the commit":
        die()
    return number

def dying_write(content, path):
    write(content, path)
    if saves == 2 and moment == "the file is written":
        die()

em.Store.commit, _checkpoint._write = dying_commit, dying_write
with em.open(where, memory="16MiB", threads=1, log_limit="64MiB") as store:
    if "items" not in store:
        tables(store)
    run = Run(store)
    first = run.load(file).note["step"] if os.path.exists(file) else 0
    print("from", first, flush=True)
    for number in range(first, 12):
        run.step(number)
        if number % 3 == 2:
            saves += 1
            run.save(file, number + 1)
        if number == 7 and moment == "between":
            die()
    torch.save(run.result(), where + ".result")
"""

MOMENTS = ["between", "the file is written", "before the commit", "after the commit"]


def train_in_a_child(where, file, moment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), os.fspath(__file__).rsplit("/", 1)[0],
         str(where), str(file), moment],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    done = train_in_a_child(folder / "store", folder / "model.pt", "never")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "store.result", weights_only=True)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_run_again_it_ends_with_the_same_bits(tmp_path, unbroken, moment):
    where, file = tmp_path / "store", tmp_path / "model.pt"
    killed = train_in_a_child(where, file, moment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = train_in_a_child(where, file, "never")
    assert again.returncode == 0, again.stderr
    # Of the second save only that is kept whose commit was made.
    begun = {"between": 6, "after the commit": 6}.get(moment, 3)
    assert again.stdout.split() == ["from", str(begun)]
    result = torch.load(tmp_path / "store.result", weights_only=True)
    assert all(a.equal(b) for a, b in zip(unbroken, result, strict=True))
    assert not (tmp_path / "model.pt.part").exists()
    assert not (tmp_path / "model.pt.next").exists()


def test_a_save_after_a_kill_keeps_what_the_kill_left(tmp_path):
    """The file of the last commit has its other name; a save that fails must not lose it."""
    where, file = tmp_path / "store", tmp_path / "model.pt"
    assert train_in_a_child(where, file, "after the commit").returncode == -signal.SIGKILL
    assert (tmp_path / "model.pt.next").exists()
    with em.open(where, memory="16MiB", threads=1) as store:
        run = Run(store)
        assert run.load(file).note == {"step": 6}
        run.step(6)
        real = em.Store.commit
        em.Store.commit = failing
        try:
            with pytest.raises(OSError, match="full"):
                run.save(file, 7)
        finally:
            em.Store.commit = real
        store.abandon()
    with em.open(where, memory="16MiB", threads=1) as store:
        assert Run(store).load(file).note == {"step": 6}
        store.abandon()


def failing(self, note=None):
    raise OSError("disk full")


def test_a_store_that_has_gone_on_is_noticed(path, store, file):
    run = Run(store)
    run.step(0)
    number = run.save(file, 1).commits[0]
    run.step(1)
    with pytest.raises(ValueError, match="changes since commit"):
        run.load(file)
    store["items"].scatter([3], [[1.0] * DIM])
    store.commit()
    with pytest.raises(ValueError, match=f"commit {number + 1}.*commit {number}.*cannot go back"):
        Run(store).load(file)
    before = [value.clone() for value in run.model.head.state_dict().values()]
    other = torch.nn.Linear(DIM, 1)
    run.model.head.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="cannot go back"):
        run.load(file)
    # Nothing was changed.
    assert run.model.head.weight.equal(other.weight)
    assert not run.model.head.weight.equal(before[0])


def test_changes_that_no_commit_has_are_noticed(store, file):
    run = Run(store)
    run.save(file, 0)
    store["items"].scatter([3], [[1.0] * DIM])
    with pytest.raises(ValueError, match="changes since commit"):
        run.load(file)


def test_a_reader_at_the_commit_of_the_file(path, store, file):
    run = Run(store)
    run.step(0)
    run.save(file, 1)
    with em.open(path, mode="r") as reader:
        run.step(1)
        store.commit()
        model = Model(reader)
        assert em.torch.load(model, file).note == {"step": 1}
        assert model.head.weight.equal(torch.load(file, weights_only=True)["model"]["head.weight"])
        reader.refresh()
        with pytest.raises(ValueError, match="cannot go back"):
            em.torch.load(model, file)
        with pytest.raises(PermissionError):
            em.torch.save(model, file)


def test_another_store_is_noticed(tmp_path, store, file):
    run = Run(store)
    run.save(file, 1)
    with em.open(tmp_path / "other") as other:
        tables(other)
        other.commit(note={"step": 1})
        with pytest.raises(ValueError, match="none of its commits"):
            em.torch.load(Model(other), file)
    with pytest.raises(ValueError, match="of 1 stores.* 0"):
        em.torch.load(torch.nn.Linear(1, 1), file)


def test_several_stores(tmp_path, store, file):
    with em.open(tmp_path / "other") as other:
        more = other.create("more", rows=5, dim=2)
        aside = em.open(tmp_path / "aside")
        aside.create("rows", rows=2, dim=2)
        model = torch.nn.Sequential(em.torch.Embedding(store["items"]), em.torch.Embedding(more))
        saved = em.torch.save(model, file, store=[aside, other])
        assert saved.commits == [s.commit_number for s in (store, other, aside)]
        assert em.torch.load(model, file, store=aside) == saved
        with pytest.raises(ValueError, match="3 stores.* 2"):
            em.torch.load(model, file)
        more[0] = 1.0
        other.commit()
        with pytest.raises(ValueError, match="other.*cannot go back"):
            em.torch.load(model, file, store=aside)
        aside.abandon()


def test_a_model_without_tables_needs_a_store(store, file):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="store="):
        em.torch.save(model, file)
    saved = em.torch.save(model, file, store=store)
    weight = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert em.torch.load(model, file, store=store) == saved
    assert model.weight.equal(weight)


def test_optimizers_in_every_form(store, file):
    model = Model(store)
    dense = torch.optim.AdamW(model.head.parameters(), lr=0.5)
    rows = em.torch.Optimizer(model.items)
    for given in (dense, [dense, rows], (dense, rows, model.users), {"a": dense, "b": rows}):
        em.torch.save(model, file, given)
        dense.param_groups[0]["lr"] = 0.25
        em.torch.load(model, file)  # leaves it
        assert dense.param_groups[0]["lr"] == 0.25
        em.torch.load(model, file, given)
        assert dense.param_groups[0]["lr"] == 0.5
    for saved, given, text in (
        (None, dense, "no state"),
        (dense, [dense], "list of 1"),
        ([dense], dense, "list of 1"),
        ([dense], [dense, rows], "list of 2"),
        ({"a": dense}, {"b": dense}, r"\['a'\].*\['b'\]"),
        ([dense], {"b": dense}, r"\['b'\]"),
    ):
        em.torch.save(model, file, saved)
        with pytest.raises(ValueError, match=text):
            em.torch.load(model, file, given)
    with pytest.raises(TypeError, match="state_dict"):
        em.torch.save(model, file, "adam")


def test_what_cannot_be_saved_leaves_the_last_file(store, file):
    model = Model(store)
    saved = em.torch.save(model, file, note={"step": 1})

    class Holder:
        def state_dict(self):
            return {"x": fractions.Fraction(1, 2)}

        def load_state_dict(self, state):
            pass

    for call, error, text in (
        (
            lambda: em.torch.save(model, file, Holder()),
            TypeError,
            "weights_only=True.*: fractions.Fraction$",
        ),
        (lambda: em.torch.save(model, file, note={"x": float("nan")}), ValueError, "nan"),
        (lambda: em.torch.save(model, file, note={"embermap.torch": 1}), ValueError, "itself"),
        (lambda: em.torch.save("model", file), TypeError, "Module"),
        (lambda: em.torch.save(model, file, store="store"), TypeError, "Store"),
        (lambda: em.torch.save(model, file.parent / "no" / "x.pt"), OSError, "no"),
    ):
        with pytest.raises(error, match=text):
            call()
    assert em.torch.load(model, file) == saved
    assert store.commit_number == saved.commits[0]
    assert sorted(each.name for each in file.parent.iterdir()) == ["model.pt", "store"]


def test_a_full_disk_leaves_the_last_file(path, file, run_python):
    code = """
        import errno, os, resource, signal, sys, torch, embermap as em
        path, file = sys.argv[1:]
        with em.open(path, memory="16MiB", threads=1) as store:
            table = store.create("t", rows=20, dim=4)
            model = torch.nn.Sequential(em.torch.Embedding(table), torch.nn.Linear(4, 2000))
            saved = em.torch.save(model, file)
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (9000, unlimited[1]))
            try:
                em.torch.save(model, file)
            except OSError as error:
                assert error.errno == errno.EFBIG and error.filename == file + ".part", error
            else:
                raise AssertionError("no error")
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            assert store.commit_number == saved.commits[0]
            assert em.torch.load(model, file) == saved
    """
    run_python(code, path, file)
    assert sorted(each.name for each in file.parent.iterdir()) == ["model.pt", "store"]


def test_files_that_are_none(store, file):
    model = Model(store)
    with pytest.raises(FileNotFoundError, match="model.pt"):
        em.torch.load(model, file)
    torch.save({"model": {}}, file)
    with pytest.raises(ValueError, match="not a file of embermap"):
        em.torch.load(model, file)
    em.torch.save(model, file)
    content = torch.load(file, weights_only=True)
    torch.save({**content, "version": 99}, file)
    with pytest.raises(ValueError, match="99"):
        em.torch.load(model, file)


def test_random_numbers_go_on(store, file):
    model = Model(store)
    torch.manual_seed(3)
    torch.rand(5)
    em.torch.save(model, file)
    expected = torch.rand(4)
    em.torch.load(model, file)
    assert not torch.rand(4).equal(expected)
    em.torch.load(model, file, rng=True)
    assert torch.rand(4).equal(expected)


@pytest.mark.gpu
def test_training_on_a_gpu_goes_on(tmp_path, file):
    results = []
    for broken in (False, True):
        where = tmp_path / f"store{broken}"
        store = em.open(where, memory="16MiB", device="cuda")
        tables(store)
        for part in (range(4), range(4, 8)):
            torch.manual_seed(2)
            model = Model(store).cuda()
            rows = em.torch.Optimizer(model.items)
            dense = torch.optim.Adam(model.head.parameters(), lr=0.1)
            if part.start:
                em.torch.load(model, file, [rows, dense, model.users], rng=True)
            for number in part:
                generator = torch.Generator().manual_seed(number)
                ids = torch.randint(0, ROWS, (64,), generator=generator).cuda()
                for each in (rows, dense, model.users):
                    each.zero_grad()
                model(ids).square().sum().backward()
                for each in (rows, dense, model.users):
                    each.step()
            if not part.start:
                em.torch.save(model, file, [rows, dense, model.users])
                if broken:
                    store.abandon()
                    store = em.open(where, memory="16MiB", device="cuda")
        results.append([store[n].gather(torch.arange(ROWS)) for n in ("items", "users")])
        store.abandon()
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("junk", [b"", b"junk", b"PK\x03\x04" + bytes(100), b"\x80\x02}q\x00."])
def test_a_file_that_is_none_is_a_value_error(tmp_path, junk):
    with em.open(tmp_path / "s") as store:
        tables(store)
        model = Model(store)
        (tmp_path / "m.pt").write_bytes(junk)
        with pytest.raises(ValueError, match=r"m\.pt.*not a file of embermap"):
            em.torch.load(model, tmp_path / "m.pt")
        torch.save({"token": 1, "stores": 2}, tmp_path / "m.pt")
        with pytest.raises(ValueError, match="not a file of embermap"):
            em.torch.load(model, tmp_path / "m.pt")
        (tmp_path / "m.pt").unlink()
        (tmp_path / "m.pt.next").write_bytes(junk)
        with pytest.raises(ValueError, match=r"m\.pt\.next.*in the way"):
            em.torch.save(model, tmp_path / "m.pt")
        assert (tmp_path / "m.pt.next").read_bytes() == junk
        assert sorted(p.name for p in tmp_path.iterdir()) == ["m.pt.next", "s"]
