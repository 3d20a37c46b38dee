"""The optimizers of embermap against those of torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")


def _load_parity() -> ModuleType:
    """The script beside this file."""
    file = Path(__file__).with_name("optim_parity.py")
    spec = importlib.util.spec_from_file_location("optim_parity", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["optim_parity"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


parity = _load_parity()

KINDS = [kind for kind in em.optim.__all__ if kind != "Optimizer"]
HALVES = ["float16", "bfloat16"]


def one_of_each():
    """The last case of each kind, with most options."""
    return list({case.kind: case for case in parity.CASES}.values())


def case_name(case):
    return case.name


# --- parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", parity.CASES, ids=case_name)
def test_training_equals_torchs(tmp_path, case, dtype):
    """A hundred steps: all rows in every batch; rows as parameters of their own; rows that come
    late, with the table's count of steps.
    """
    for way in parity.ways_of(case):
        for name, (most, bad) in parity.compare(case, way, dtype, tmp_path).items():
            assert bad == 0, (way, name, most, bad)


def test_the_page_is_of_the_figures_that_are_kept_and_has_every_case():
    found = json.loads(parity.FIGURES.read_text(encoding="utf-8"))
    assert parity.page(found) == parity.PAGE.read_text(encoding="utf-8")
    names = {case.name for case in parity.CASES}
    for device, figures in found.items():
        assert device in parity.DEVICES
        assert set(figures["cases"]) == names
        for name, by_dtype in figures["cases"].items():
            for ways in by_dtype.values():
                assert all(bad == 0 for _, bad in ways.values()), (device, name)


@pytest.mark.gpu
@pytest.mark.parametrize("case", parity.CASES, ids=case_name)
def test_training_on_a_gpu_equals_torchs(tmp_path, case):
    for way in parity.ways_of(case):
        for name, (most, bad) in parity.compare(case, way, "float32", tmp_path, "cuda").items():
            assert bad == 0, (way, name, most, bad)


def test_every_optimizer_is_compared():
    assert {case.kind for case in parity.CASES} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_and_order_of_options_are_torchs(kind):
    made = parity.RowWiseAdagrad if kind == "RowWiseAdagrad" else getattr(torch.optim, kind)
    theirs = dict(list(inspect.signature(made.__init__).parameters.items())[2:])
    ours = inspect.signature(getattr(em.optim, kind)).parameters
    for name in ("foreach", "capturable", "differentiable", "fused"):
        theirs.pop(name, None)
    extra = {"step", "clip_value", "clip_row", "stochastic_rounding"}
    assert set(ours) - extra == set(theirs)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", one_of_each(), ids=case_name)
def test_half_precision_rows_have_state_in_float32(store, case, dtype):
    """A step is made in float32 and rounded once."""
    table = store.create(
        "t", rows=6, dim=9, dtype=dtype, optimizer=case.ours(), init=em.init.Normal()
    )
    half = getattr(torch, dtype)
    reference = parity.Reference(case, "dense", torch.from_numpy(table[:].astype(np.float32)))
    rng = np.random.default_rng(0)
    for _ in range(20):
        grads = rng.normal(size=(6, 9)).astype(np.float32)
        table.update(np.arange(6), grads)
        reference.step(dict(enumerate(torch.from_numpy(grads))))
        with torch.no_grad():
            for parameter in reference.parameters:
                parameter.copy_(parameter.to(half).float())
    expected = reference.values("weight").numpy()
    step = 2.0**-10 if dtype == "float16" else 2.0**-7
    off = np.abs(table[:].astype(np.float32) - expected) / np.abs(expected)
    assert (off <= step).all()  # neighbours
    assert (off == 0).mean() > 0.9
    for name, kind in table.fields.items():
        assert kind == (np.int32 if name == "step" else table.dtype if name == "weight" else "f4")


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", one_of_each(), ids=case_name)
def test_state_has_torchs_names_and_numpy_sees_it(path, case):
    for step in ("global", "row") if case.counts_steps else ("",):
        with em.open(path, memory="4MiB") as store:
            options = {"step": step} if step else {}
            optimizer = case.ours(**options)
            table = store.create(f"t{step}", rows=50, dim=4, optimizer=optimizer)
            table.update([3, 3, 40], np.ones((3, 4), np.float32))
            table.materialize()
            fields = {name: table.read(field=name) for name in table.fields}
            file = path / f"{table.name}.npy"
        reference = parity.Reference(case, "dense", torch.zeros(50, 4))
        reference.step({3: torch.ones(4)})
        theirs = set(next(iter(reference.optimizer.state.values()), {})) - {"step", "eta", "mu"}
        if step != "row":
            theirs -= {"mu_product"}
        mine = set(fields) - {"weight", "step"}
        assert mine == {name for name in theirs if name in mine or name != "momentum_buffer"}
        assert ("step" in fields) == (step == "row")
        whole = np.load(file, mmap_mode="r")
        if not whole.dtype.names:
            continue
        for name, values in fields.items():
            assert whole[name].tobytes() == values.tobytes(), name
            assert whole[name].shape == values.shape
        if step == "row":
            assert whole["step"].ravel()[[3, 40, 0]].tolist() == [1, 1, 0]
        with em.open(path, mode="r") as store:
            table = store[f"t{step}"]
            assert table.optimizer == optimizer
            for name, values in fields.items():
                assert table.read(field=name).tobytes() == values.tobytes()


def test_fields_of_one_number_a_row(store):
    table = store.create("t", rows=10, dim=4, optimizer=em.optim.RowWiseAdagrad(step="row"))
    table.update([1, 2, 1], np.full((3, 4), 2, np.float32))
    assert table.gather([1, 2, 0], field="sum").tolist() == [[16], [4], [0]]
    assert table.gather([[1], [0]], field="step").shape == (2, 1, 1)
    assert table.read(1, 3, field="step").tolist() == [[1], [1]]
    view = table.view("sum")
    assert view.shape == (10, 1)
    assert view[1:3].tolist() == [[16], [4]]
    assert view[1, 0] == 16
    assert view[[1, 2], [0, -1]].tolist() == [16, 4]
    with pytest.raises(IndexError):
        view[[1], [1]]
    assert np.asarray(view).shape == (10, 1)
    assert [row.tolist() for row in view][2] == [4]
    table.scatter([5], np.array([[7]], np.float32), field="sum")
    table.write(6, np.array([[8], [9]], np.float32), field="sum")
    assert table.read(5, 8, field="sum").tolist() == [[7], [8], [9]]
    with pytest.raises(ValueError, match=r"\(n, 1\)"):
        table.write(0, np.zeros((2, 4), np.float32), field="sum")
    with pytest.raises(ValueError, match="1"):
        table.scatter([5], np.zeros((1, 4), np.float32), field="sum")


def test_fields_of_one_number_a_row_are_exported(store, tmp_path):
    table = store.create(
        "t", rows=5, dim=4, optimizer=em.optim.RowWiseAdagrad(initial_accumulator_value=0.5)
    )
    table.export(tmp_path / "sum.npy", field="sum")
    assert np.load(tmp_path / "sum.npy").tolist() == [[0.5]] * 5


def test_rows_outside_of_the_batch_keep_their_bits(store):
    for case in parity.CASES:
        table = store.create(
            f"t{len(store.tables())}",
            rows=6,
            dim=5,
            optimizer=case.ours(),
            init=em.init.Normal(),
        )
        table.update([0, 1, 2, 3, 4, 5], np.ones((6, 5), np.float32))
        before = {name: table.read(2, 6, field=name) for name in table.fields}
        table.update([0, 1], np.ones((2, 5), np.float32))
        for name, values in before.items():
            assert table.read(2, 6, field=name).tobytes() == values.tobytes(), (case.name, name)


def test_training_goes_on_after_reopening(path):
    """Optimizers that count steps find the count again."""
    for case in one_of_each():
        name = case.kind.lower()
        finals = []
        for sessions in (1, 3):
            where = path.with_name(f"{name}{sessions}")
            rng = np.random.default_rng(4)
            for _ in range(sessions):
                with em.open(where, memory="4MiB") as store:
                    if name not in store:
                        store.create(name, rows=8, dim=3, optimizer=case.ours())
                    for _ in range(6 // sessions):
                        grads = rng.normal(size=(5, 3)).astype(np.float32)
                        store[name].update(rng.integers(0, 8, 5), grads)
            with em.open(where, mode="r") as store:
                table = store[name]
                finals.append([table.read(field=field).tobytes() for field in table.fields])
        assert finals[0] == finals[1], case.name


# --- clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
def test_clipped_gradients(store, maximize):
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(5, 6))
    ids, grads = np.array([0, 3, 0, 4]), rng.normal(size=(4, 6)) * 2
    grads[3] /= 100  # reaches no bound
    for clip_value, clip_row in ((0.5, None), (None, 1.5), (1.0, 1.5)):
        optimizer = em.optim.SGD(
            0.5, weight_decay=0.1, clip_value=clip_value, clip_row=clip_row, maximize=maximize
        )
        table = store.create(
            f"t{len(store.tables())}", rows=5, dim=6, dtype="float64", optimizer=optimizer
        )
        table[:] = weights
        table.update(ids, grads)
        expected = weights.copy()
        for row in (0, 3, 4):
            grad = grads[ids == row].sum(0)
            if clip_value is not None:
                grad = grad.clip(-clip_value, clip_value)
            if clip_row is not None:
                grad = grad * min(1, clip_row / np.linalg.norm(grad))
            expected[row] -= 0.5 * ((-grad if maximize else grad) + 0.1 * weights[row])
        np.testing.assert_allclose(table[:], expected, rtol=1e-12)


@pytest.mark.parametrize("case", one_of_each(), ids=case_name)
def test_clipping_is_that_of_clipped_gradients(store, case):
    """For every optimizer: what it makes of gradients that were clipped before."""
    rng = np.random.default_rng(2)
    clipped = store.create("a", rows=4, dim=6, optimizer=case.ours(clip_row=1.0, clip_value=0.7))
    plain = store.create("b", rows=4, dim=6, optimizer=case.ours())
    for _ in range(10):
        grads = rng.normal(size=(4, 6)).astype(np.float32)
        by_hand = grads.clip(-0.7, 0.7)
        by_hand = by_hand / np.maximum(1, np.linalg.norm(by_hand, axis=1, keepdims=True))
        clipped.update(np.arange(4), grads)
        plain.update(np.arange(4), by_hand.astype(np.float32))
    for name in plain.fields:
        np.testing.assert_allclose(
            clipped.read(field=name), plain.read(field=name), rtol=1e-4, atol=1e-6
        )


def test_a_gradient_that_is_not_a_number_reaches_the_row(store):
    for number, options in enumerate(({"clip_value": 1.0}, {"clip_row": 1.0})):
        table = store.create(f"t{number}", rows=2, dim=2, optimizer=em.optim.SGD(1.0, **options))
        table.update([0, 1], np.array([[np.nan, 1], [0.5, 0.5]], np.float32))
        assert np.isnan(table[0]).any()
        assert table[1].tolist() == [-0.5, -0.5]


# --- stochastic rounding --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_too_small_for_the_dtype_count_on_average(path, dtype):
    finals = {}
    for threads in (1, 2):
        with em.open(path.with_name(f"s{threads}"), memory="4MiB", threads=threads) as store:
            for chance in (False, True):
                optimizer = em.optim.SGD(1.0, stochastic_rounding=chance)
                table = store.create(
                    f"t{chance}", rows=64, dim=65, dtype=dtype, optimizer=optimizer, seed=8
                )
                table[:] = np.ones((64, 65), table.dtype)
                grads = np.full((64, 65), 2.0**-14, np.float32)  # a small part of a unit below 1
                for _ in range(256):
                    table.update(np.arange(64), grads)
                finals[threads, chance] = table[:].astype(np.float64)
    assert (finals[1, False] == 1).all()
    assert (finals[1, True] == finals[2, True]).all()
    # 256 steps go 2^-6 in all.
    assert abs(finals[1, True].mean() - (1 - 2.0**-6)) < 2.0**-10
    assert np.unique(finals[1, True]).size > 1


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_by_chance_is_for_every_optimizer_and_half_precision_alone(store, kind):
    optimizer = getattr(em.optim, kind)(stochastic_rounding=True)
    with pytest.raises(TypeError, match="stochastic_rounding.*float32"):
        store.create("t", rows=4, dim=2, optimizer=optimizer)
    table = store.create("t", rows=4, dim=300, dtype="bfloat16", optimizer=optimizer)
    other = store.create(
        "u", rows=4, dim=300, dtype="bfloat16", optimizer=getattr(em.optim, kind)()
    )
    for each in (table, other):
        each[:] = np.linspace(1, 2, 1200).reshape(4, 300).astype(each.dtype)
        for _ in range(3):
            each.update([0, 1], np.full((2, 300), 0.3, np.float32))
    assert (table[2:] == other[2:]).all()
    ours, theirs = table[:2].astype(np.float32), other[:2].astype(np.float32)
    assert (ours != theirs).any()
    assert np.abs(ours - theirs).max() <= 4 * 2.0**-7


# --- hyperparameters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": -1.0}),
        ("SGD", {"momentum": -0.5}),
        ("SGD", {"weight_decay": -0.5}),
        ("SGD", {"nesterov": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "nesterov": True}),
        ("Adagrad", {"lr_decay": -0.5}),
        ("Adagrad", {"initial_accumulator_value": -0.5}),
        ("Adagrad", {"eps": -0.5}),
        ("Adadelta", {"rho": 1.5}),
        ("Adam", {"lr": -0.5}),
        ("Adam", {"betas": (1.0, 0.9)}),
        ("AdamW", {"betas": (0.9, -0.5)}),
        ("Adam", {"eps": -0.5}),
        ("SparseAdam", {"lr": 0.0}),
        ("SparseAdam", {"eps": 0.0}),
        ("Adamax", {"weight_decay": -0.5}),
        ("NAdam", {"momentum_decay": -0.5}),
        ("RAdam", {"betas": (0.9, 1.5)}),
        ("ASGD", {"lr": -0.5}),
        ("RMSprop", {"alpha": -0.5}),
        ("Rprop", {"etas": (0.5, 0.9)}),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(kind, options):
    with pytest.raises(ValueError, match=".") as theirs:
        getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))], **options)
    with pytest.raises(ValueError, match=".") as ours:
        getattr(em.optim, kind)(**options)
    assert str(theirs.value) in str(ours.value)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: em.optim.Adam(betas=0.9), TypeError, "betas of Adam"),
        (lambda: em.optim.Adam(betas=(0.9, "0.9")), TypeError, "betas of Adam"),
        (lambda: em.optim.Adam(betas=(0.9, 0.9, 0.9)), TypeError, "betas of Adam"),
        (lambda: em.optim.Adam(betas=(0.9, float("nan"))), ValueError, "index 1"),
        (lambda: em.optim.Adam(amsgrad=1), TypeError, "amsgrad of Adam"),
        (lambda: em.optim.Adam(step="table"), ValueError, "step of Adam"),
        (lambda: em.optim.Adam(step=1), TypeError, "step of Adam"),
        (lambda: em.optim.SGD(clip_row=0), ValueError, "clip_row"),
        (lambda: em.optim.SGD(clip_row=float("inf")), ValueError, "clip_row"),
        (lambda: em.optim.SGD(clip_value=-1), ValueError, "clip_value"),
        (lambda: em.optim.SGD(clip_value="1"), TypeError, "clip_value of SGD"),
        (lambda: em.optim.Rprop(step_sizes=(2, 1)), ValueError, "step_sizes"),
        (lambda: em.optim.ASGD(t0=float("nan")), ValueError, "t0"),
        (lambda: em.optim.Adadelta(step="row"), TypeError, "step"),
    ],
)
def test_options_that_cannot_be(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_options_are_plain_numbers_and_pairs():
    optimizer = em.optim.Adam(np.float32(0.5), betas=[0.5, 0.75], eps=1)
    assert optimizer == em.optim.Adam(0.5, (0.5, 0.75), 1.0)
    assert hash(optimizer) == hash(em.optim.Adam(0.5, (0.5, 0.75), 1.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.lr = 1


@pytest.mark.parametrize("case", parity.CASES, ids=case_name)
def test_manifests_keep_all_options(path, case):
    options = {"clip_row": 0.125, "clip_value": 7, "stochastic_rounding": True}
    if case.counts_steps:
        options["step"] = "row"
    for number, optimizer in enumerate((case.ours(), case.ours(**options))):
        with em.open(path) as store:
            store.create(f"t{number}", rows=4, dim=2, dtype="float16", optimizer=optimizer)
        with em.open(path, mode="r") as store:
            assert store[f"t{number}"].optimizer == optimizer


def test_stores_of_before_open(path):
    """Manifests with the options there were at first."""
    with em.open(path) as store:
        store.create("s", rows=4, dim=2, optimizer=em.optim.SGD(0.5, momentum=0.5))
        store.create("a", rows=4, dim=2, optimizer=em.optim.Adagrad(0.5))
    manifest = json.loads((path / "embermap.json").read_text())
    old = {name: table["optimizer"] for name, table in manifest["tables"].items()}
    assert set(old["s"]) == {"name", "lr", "momentum", "weight_decay", "nesterov"}
    adagrad = {"name", "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}
    assert set(old["a"]) == adagrad
    with em.open(path) as store:
        assert store["s"].optimizer == em.optim.SGD(0.5, momentum=0.5)
        assert store["a"].optimizer == em.optim.Adagrad(0.5)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("betas", 0.9),
        ("betas", [0.9]),
        ("betas", [0.9, 2]),
        ("amsgrad", 1),
        ("step", "table"),
        ("step", 3),
        ("clip_row", "x"),
        ("clip_row", -1),
        ("name", "lion"),
    ],
)
def test_manifests_with_bad_options_are_refused(path, option, value):
    with em.open(path) as store:
        store.create("t", rows=4, dim=2, optimizer=em.optim.Adam())
    file = path / "embermap.json"
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    manifest["tables"]["t"]["optimizer"][option] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(em.FormatError, match="'t'"):
        em.open(path)


def test_assignment_changes_hyperparameters_but_not_state(store):
    table = store.create("t", rows=4, dim=2, optimizer=em.optim.Adam(1e-3))
    for same in (
        em.optim.Adam(1e-2, betas=(0.5, 0.9), weight_decay=0.1, clip_row=1.0),
        em.optim.Adam(decoupled_weight_decay=True, maximize=True),
    ):
        table.optimizer = same
        assert table.optimizer == same
    for other in (
        em.optim.AdamW(),
        em.optim.Adam(amsgrad=True),
        em.optim.Adam(step="row"),
        None,
    ):
        with pytest.raises(ValueError, match="state of 'adam'"):
            table.optimizer = other
    with pytest.raises(TypeError, match="stochastic_rounding"):
        table.optimizer = em.optim.Adam(stochastic_rounding=True)
    assert table.optimizer == same


def test_where_state_begins_cannot_be_changed(store):
    rprop = store.create("r", rows=4, dim=2, optimizer=em.optim.Rprop(0.5))
    rprop.optimizer = em.optim.Rprop(0.5, etas=(0.4, 1.3))
    with pytest.raises(ValueError, match="begin"):
        rprop.optimizer = em.optim.Rprop(0.25)
    with pytest.raises(ValueError, match="lr"):
        rprop.update([0], np.ones((1, 2), np.float32), lr=0.5)
    assert rprop.step == 0
    adagrad = store.create("a", rows=4, dim=2, optimizer=em.optim.Adagrad())
    with pytest.raises(ValueError, match="begin"):
        adagrad.optimizer = em.optim.Adagrad(initial_accumulator_value=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_learning_rate_for_one_step(store, kind):
    if kind == "Rprop":
        pytest.skip("its lr has no part in a step")
    made = getattr(em.optim, kind)
    once = store.create("once", rows=2, dim=3, optimizer=made(0.5))
    always = store.create("always", rows=2, dim=3, optimizer=made(0.125))
    for table, options in ((once, {"lr": 0.125}), (always, {})):
        table[:] = np.ones((2, 3), np.float32)
        table.update([0, 1], np.full((2, 3), 0.5, np.float32), **options)
    assert once[:].tobytes() == always[:].tobytes()
    assert once.optimizer == made(0.5)


@pytest.mark.parametrize("case", one_of_each(), ids=case_name)
def test_em_torch_optimizer_takes_every_optimizer(store, case):
    options = {"step": "row"} if case.counts_steps else {}
    table = store.create("t", rows=6, dim=3, optimizer=case.ours(**options), init=em.init.Normal())
    twin = store.create("u", rows=6, dim=3, optimizer=case.ours(**options), init=em.init.Normal())
    embedding = em.torch.Embedding(table)
    optimizer = em.torch.Optimizer([embedding])
    ids = torch.tensor([0, 2, 2, 5])
    for _ in range(3):
        optimizer.zero_grad()
        (embedding(ids) * 2).sum().backward()
        optimizer.step()
        twin.update(ids.numpy(), np.full((4, 3), 2, np.float32))
    for name in table.fields:
        assert table.read(field=name).tobytes() == twin.read(field=name).tobytes()
    assert table.optimizer == case.ours(**options)


# --- GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64", *HALVES])
@pytest.mark.parametrize("case", parity.CASES, ids=case_name)
def test_a_gpu_gives_the_same_bits(tmp_path, case, dtype):
    variants = [{}, {"clip_row": 1.0, "clip_value": 0.8}]
    if case.counts_steps:
        variants.append({"step": "row"})
    if dtype in HALVES:
        variants = [{**options, "stochastic_rounding": True} for options in variants] + variants
    stores = [em.open(tmp_path / str(d), memory="16MiB", device=d) for d in ("cuda", None)]
    try:
        for number, options in enumerate(variants):
            tables = [
                store.create(
                    f"t{number}",
                    rows=300,
                    dim=20,
                    dtype=dtype,
                    optimizer=case.ours(**options),
                    init=em.init.Normal(),
                    seed=3,
                )
                for store in stores
            ]
            rng = torch.Generator().manual_seed(number)
            for _ in range(6):
                ids = torch.randint(0, 300, (400,), generator=rng)
                ids[:300:3] = 7
                grads = torch.randn(400, 20, generator=rng).to(getattr(torch, dtype))
                tables[0].update(ids.cuda(), grads.cuda())
                tables[1].update(ids, grads)
            for name in tables[0].fields:
                ours, theirs = (table.read(field=name) for table in tables)
                assert not np.isnan(theirs.astype(np.float64)).any()
                assert ours.tobytes() == theirs.tobytes(), (options, name)
    finally:
        for store in stores:
            store.abandon()
