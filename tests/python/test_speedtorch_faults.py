"""What was wrong with SpeedTorch and is not here: a test for each fault.

Each says first what happened there.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from pathlib import Path

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import embermap.speedtorch as SpeedTorch  # noqa: E402

nn = torch.nn
V, D = 20, 4


class Model(nn.Module):
    def __init__(self, rows=4, **options):
        super().__init__()
        self.u_embeddings = nn.Embedding(rows, D, **options)
        self.v_embeddings = nn.Embedding(rows, D, **options)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def rows(model):
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as made:
        made.zerosInit()
        yield made


def state_of(optimizer, model, name="u_embeddings", **options):
    made = SpeedTorch.OptimizerFactory(optimizer, V, D, model, name, **options)
    made.optInit()
    return made


def step(optimizer, module, ids, *switchers, gradient=1.0):
    """One batch whose gradient is the same for every element of every row."""
    for switcher in switchers:
        switcher.beforeForwardPass(ids)
    optimizer.zero_grad()
    (module(torch.arange(len(ids))) * gradient).sum().backward()
    optimizer.step()
    for switcher in switchers:
        switcher.afterOptimizerStep(ids)


# --- wrong numbers --------------------------------------------------------------------------------


def test_repeated_ids_lost_the_gradients_of_all_copies_but_one(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step(optimizer, model.u_embeddings, [5, 5, 5, 6], rows)
    assert rows.getNumpyVersion()[5].tolist() == [-3] * D
    assert rows.getNumpyVersion()[6].tolist() == [-1] * D


def test_popular_ids_lost_most_of_their_updates(model):
    """16,384 negatives a step of a log-uniform sampler: the hottest id kept 1 of 61."""
    classes = 2_829_854
    rng = np.random.default_rng(0)
    ids = np.exp(rng.random(16_384) * math.log(classes + 1)).astype(np.int64) - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with SpeedTorch.ModelFactory(model.u_embeddings, classes, D) as rows:
        rows.zerosInit()
        step(optimizer, model.u_embeddings, ids, rows)
        distinct, counts = np.unique(ids, return_counts=True)
        assert counts.max() > 40
        assert len(distinct) < 12_000
        assert (rows.getCupyVar()[distinct][:, 0].numpy() == -counts).all()


@pytest.mark.parametrize("bad", [V, -1, 2**40])
def test_ids_out_of_range_trained_another_row(model, rows, bad):
    optimizer = torch.optim.Adam(model.parameters())
    with state_of(optimizer, model) as state:
        weight = model.u_embeddings.weight.detach().clone()
        for switcher in (rows, state):
            with pytest.raises(em.RowIdError, match=f"{bad} at position 2"):
                switcher.beforeForwardPass([1, 2], [bad])
        assert model.u_embeddings.weight.equal(weight)
        rows.beforeForwardPass([1, 2, 3])
        model.u_embeddings.weight.data += 1
        with pytest.raises(IndexError):
            rows.afterOptimizerStep([1, 2, bad])
        assert not rows.getNumpyVersion().any()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SparseAdam])
def test_the_step_of_a_row_that_comes_late_was_nobodys(kind, rows):
    """It is the optimizer's, as in torch: a row of an nn.Embedding whose gradient was zero until
    then moves by as much."""
    model = Model(sparse=kind is torch.optim.SparseAdam)
    whole = nn.Embedding(V, D, sparse=kind is torch.optim.SparseAdam)
    nn.init.zeros_(whole.weight)
    mine = kind([model.u_embeddings.weight], lr=0.1)
    theirs = kind([whole.weight], lr=0.1)
    with (
        SpeedTorch.ModelFactory(model.u_embeddings, V, D) as few,
        state_of(mine, model) as state,
    ):
        few.zerosInit()
        for ids in ([1, 2], [1, 3], [1, 2], [9]):
            step(mine, model.u_embeddings, ids, few, state)
            theirs.zero_grad()
            whole(torch.tensor(ids)).sum().backward()
            theirs.step()
        moved = few.getNumpyVersion()[9]
        np.testing.assert_allclose(moved, whole.weight[9].detach(), rtol=1e-5)
        assert mine.state[model.u_embeddings.weight]["step"] == 4


def test_rprop_step_sizes_belonged_to_places_in_the_batch(model, rows):
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)
    with state_of(optimizer, model) as state:
        for _ in range(4):
            step(optimizer, model.u_embeddings, [3], rows, state)
        step(optimizer, model.u_embeddings, [8], rows, state)
        sizes = state.getNumpyVersion()["step_size"][:, 0]
        np.testing.assert_allclose(sizes[3], 0.1 * 1.2**3, rtol=1e-5)
        np.testing.assert_allclose(np.delete(sizes, 3), 0.1, rtol=1e-5)
        np.testing.assert_allclose(rows.getNumpyVersion()[8], -0.1, rtol=1e-5)


def test_momentum_of_sgd_belonged_to_places_in_the_batch(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with state_of(optimizer, model) as state:
        step(optimizer, model.u_embeddings, [1, 2], rows, state)
        step(optimizer, model.u_embeddings, [2, 3], rows, state)
        found = rows.getNumpyVersion()[:4, 0].tolist()
        assert found == [0, -1, -1 - 1.5, -1]
        assert state.getNumpyVersion()["momentum_buffer"][:4, 0].tolist() == [0, 1, 1.5, 1]


def test_state_went_to_whatever_parameter_had_the_same_place():
    """In an optimizer made in another order, with groups, or without a frozen parameter."""
    for kind in ("order", "groups", "frozen"):
        model = nn.Module()
        model.dense = nn.Linear(2, 2)
        model.u_embeddings = nn.Embedding(2, D)
        parameters = {
            "order": lambda m: [m.u_embeddings.weight, m.dense.weight, m.dense.bias],
            "groups": lambda m: [
                {"params": [m.u_embeddings.weight]},
                {"params": m.dense.parameters()},
            ],
            "frozen": lambda m: [m.u_embeddings.weight],
        }[kind](model)
        optimizer = torch.optim.Adagrad(parameters)
        dense = {
            p: {k: v.clone() for k, v in optimizer.state[p].items()}
            for p in model.dense.parameters()
            if p in optimizer.state
        }
        with state_of(optimizer, model) as state:
            state.CUPYcorpi[0][[3, 4]] = 5.0
            state.beforeForwardPass([3, 4])
            assert (optimizer.state[model.u_embeddings.weight]["sum"] == 5).all()
            for p, before in dense.items():
                assert optimizer.state[p]["sum"].equal(before["sum"])


def test_the_first_accumulator_of_adagrad_was_ignored(model, rows):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1.0, initial_accumulator_value=3.0)
    with state_of(optimizer, model) as state:
        assert (state.getNumpyVersion()["sum"] == 3).all()
        step(optimizer, model.u_embeddings, [7], rows, state)
        np.testing.assert_allclose(rows.getNumpyVersion()[7], -0.5)


def test_options_were_those_of_the_last_group(model):
    optimizer = torch.optim.Adam(
        [
            {"params": model.u_embeddings.parameters(), "amsgrad": True},
            {"params": model.v_embeddings.parameters()},
        ]
    )
    with state_of(optimizer, model) as u, state_of(optimizer, model, "v_embeddings") as v:
        assert u.optVarList == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        assert v.optVarList == ["exp_avg", "exp_avg_sq"]


def test_any_file_was_loaded_into_any_table(rows, tmp_path):
    before = rows.getNumpyVersion()
    np.save(tmp_path / "x.npy", np.ones((5, 7)))
    with pytest.raises(ValueError, match=r"shape \(5, 7\), the rows are \(20, 4\)"):
        rows.loadCupy(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.ones((V, D)))
    with pytest.raises(TypeError, match="float64, the rows are torch.float32"):
        rows.loadCupy(tmp_path / "x.npy")
    with SpeedTorch.CPUPytorchModelFactory(Model().u_embeddings, V, D) as other:
        torch.save(torch.ones(5, 7), tmp_path / "x.pt")
        with pytest.raises(ValueError, match=r"shape \(5, 7\)"):
            other.loadTorch(tmp_path / "x.pt")
    assert (rows.getNumpyVersion() == before).all()


@pytest.mark.parametrize("classes", [123_456, 100_001])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_thousands_of_rows_of_a_memmap_stayed_zero(classes, kind, tmp_path):
    module = nn.Embedding(2, 2)
    with SpeedTorch.ModelFactoryMM(module, classes, 2, str(tmp_path / "x")) as rows:
        if kind == "uniform":
            rows.uniformDistributionInit(1, 2)
        else:
            rows.normalDistributionInit(10, 1)
        whole = np.load(f"{rows.fileName}.cpy.npy", mmap_mode="r")
        assert (whole > 0).all()


def test_training_never_reached_the_file_of_a_memmap(model, tmp_path):
    with SpeedTorch.ModelFactoryMM(model.u_embeddings, V, D, str(tmp_path / "x")) as rows:
        rows.zerosInit()
        rows.beforeForwardPass([3])
        model.u_embeddings.weight.data += 100.7
        rows.afterOptimizerStep([3])
        rows.flush()
        found = np.load(tmp_path / "x0.memmap.cpy.npy")
        np.testing.assert_allclose(found[3], 100.7)
        assert not np.delete(found, 3, axis=0).any()
    for dtype in ("float64", "float16"):  # and was float32 whatever was asked for
        with SpeedTorch.ModelFactoryMM(
            model.v_embeddings, V, D, str(tmp_path / dtype), datatype=dtype
        ) as rows:
            rows.zerosInit()
            assert np.load(tmp_path / f"{dtype}0.memmap.cpy.npy").dtype == dtype


def test_large_tables_were_left_zero_by_32_bit_counts():
    """14,886,545 x 188: more than 2**31 elements, which a program trained on as zeros for days."""
    classes, dim = 14_886_545, 188
    assert classes * dim > 2**31
    module = nn.Embedding(2, dim)
    spread = math.sqrt(2 / (classes + dim))
    with SpeedTorch.ModelFactory(module, classes, dim, memory="64MiB") as rows:
        rows.uniformDistributionInit(-spread, spread)
        first_beyond = 2**31 // dim
        ids = np.array([0, 1, first_beyond - 1, first_beyond, first_beyond + 1, classes - 1])
        ids = np.concatenate([ids, np.random.default_rng(0).integers(0, classes, 500)])
        rows.beforeForwardPass(ids)
        found = module.weight.detach()
        assert (found.abs() <= spread).all()
        assert ((found.abs().mean(1) / spread - 0.5).abs() < 0.15).all()
        module.weight.data[2:6] = torch.arange(4.0)[:, None]
        rows.afterOptimizerStep(ids)
        assert rows.getCupyVar()[ids[2:6]][:, 0].tolist() == [0, 1, 2, 3]
        # Is it learning? Scores of such rows are not all the same, as those of zeros are.
        scores = (found[:250] * found[250:500]).sum(1)
        assert scores.std() > 0


def test_copies_that_were_not_waited_for(monkeypatch, model, rows):
    """Rows of a batch are read as soon as the call has returned, and the whole device is never
    waited for, as it was twice in every call."""

    def never(*_):
        raise AssertionError("the whole device was waited for")

    monkeypatch.setattr(torch.cuda, "synchronize", never)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with state_of(optimizer, model) as state:
        for number in range(3):
            step(optimizer, model.u_embeddings, [number, 9], rows, state)
            assert rows.getNumpyVersion()[number].any()


# --- failures -------------------------------------------------------------------------------------


def test_rprop_needed_a_backward_pass_first_and_failed_after_it(model, rows):
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)
    with state_of(optimizer, model) as state:  # before any gradient
        step(optimizer, model.u_embeddings, [3, 4], rows, state)
    model.u_embeddings(torch.arange(2)).sum().backward()
    with state_of(optimizer, model) as state:  # after one
        step(optimizer, model.u_embeddings, [3, 4], rows, state)
        assert state.optVarList == ["prev", "step_size"]


def test_asgd_failed_for_the_second_variable(model):
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, t0=1)
    with (
        SpeedTorch.ModelFactory(model.u_embeddings, V, D) as u_rows,
        SpeedTorch.ModelFactory(model.v_embeddings, V, D) as v_rows,
        state_of(optimizer, model, "u_embeddings") as u,
        state_of(optimizer, model, "v_embeddings") as v,
    ):
        for rows in (u_rows, v_rows):
            rows.zerosInit()
        for ids in ([1, 2], [1, 2]):
            for switcher in (u_rows, v_rows, u, v):
                switcher.beforeForwardPass(ids)
            optimizer.zero_grad()
            places = torch.arange(2)
            (model.u_embeddings(places) + 2 * model.v_embeddings(places)).sum().backward()
            optimizer.step()
            for switcher in (u_rows, v_rows, u, v):
                switcher.afterOptimizerStep(ids)
        assert u.optVarList == v.optVarList == ["ax"]
        assert v.getNumpyVersion()["ax"][1, 0] < u.getNumpyVersion()["ax"][1, 0] < 0
        # What is one number for all rows is the optimizer's, and moves on.
        assert optimizer.state[model.u_embeddings.weight]["step"] == 2


def test_errors_were_printed_and_half_made_objects_returned(model, capsys):
    optimizer = torch.optim.Adam(model.u_embeddings.parameters())
    for arguments, text in (
        ((optimizer, V, D, model, "w_embeddings"), "no variable 'w_embeddings'; its parameters"),
        ((optimizer, V, D, model, "v_embeddings"), "'v_embeddings' is not one of those the Adam"),
        ((torch.optim.LBFGS(model.parameters()), V, D, model, "u_embeddings"), "LBFGS"),
    ):
        with pytest.raises(ValueError, match=text):
            SpeedTorch.OptimizerFactory(*arguments)
    for arguments in (
        ("Adam", V, D, model, "u_embeddings"),
        (optimizer, V, D, "model", "u_embeddings"),
        (optimizer, V, D, model, 3),
        (optimizer, V, D, model, "u_embeddings", "int32"),
    ):
        with pytest.raises(TypeError):
            SpeedTorch.OptimizerFactory(*arguments)
    assert capsys.readouterr().out == ""


def test_the_last_batch_of_an_epoch_could_not_be_smaller(model, rows):
    """Its graph and its gradient are alive while the next one, of another size, comes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with state_of(optimizer, model) as state:
        losses = []
        for count in (4, 4, 3, 1, 6):
            ids = np.arange(count)
            rows.beforeForwardPass(ids)
            state.beforeForwardPass(ids)
            losses.append(model.u_embeddings(torch.arange(count)).sum())
            losses[-1].backward()
            optimizer.step()
            rows.afterOptimizerStep(ids)
            state.afterOptimizerStep(ids)
        assert (rows.getNumpyVersion()[:6] < 0).all()
        assert not rows.getNumpyVersion()[6:].any()
        with pytest.raises(ValueError, match="3 ids, but the weight has 6 rows"):
            rows.afterOptimizerStep([1, 2, 3])
        with pytest.raises(ValueError, match="3 ids, but 'exp_avg' has 6 rows"):
            state.afterOptimizerStep([1, 2, 3])


def test_rows_on_the_cpu_turned_a_model_on_the_gpu_into_one_on_the_cpu(model):
    """Rows of a batch come to where the weight is, whatever the family is called."""
    for name, options in (
        ("ModelFactory", {"CPUPinn": True}),
        ("PytorchModelFactory", {"deviceType": "cpu", "pinType": True}),
        ("CPUPytorchModelFactory", {}),
        ("GPUPytorchModelFactory", {"device": "cpu"}),
    ):
        with getattr(SpeedTorch, name)(model.u_embeddings, V, D, **options) as rows:
            rows.zerosInit()
            rows.beforeForwardPass([1, 2])
            assert model.u_embeddings.weight.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ModelFactory", "PytorchModelFactory", "CPUPytorchModelFactory"])
def test_rows_come_to_the_gpu_of_the_model(name):
    model = Model().cuda()
    options = {"deviceType": "cpu"} if name == "PytorchModelFactory" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with (
        getattr(SpeedTorch, name)(model.u_embeddings, V, D, **options) as rows,
        state_of(optimizer, model) as state,
    ):
        rows.zerosInit()
        assert rows.store.device is not None  # kernels move the rows
        for kind in (np.array, torch.tensor, lambda ids: torch.tensor(ids).cuda()):
            ids = kind([1, 2, 2])
            for switcher in (rows, state):
                switcher.beforeForwardPass(ids)
            assert model.u_embeddings.weight.device.type == "cuda"
            optimizer.zero_grad()
            model.u_embeddings(torch.arange(3).cuda()).sum().backward()
            assert model.u_embeddings.weight.grad[:, 0].tolist() == [1, 2, 2]
            optimizer.step()
            for switcher in (rows, state):
                switcher.afterOptimizerStep(ids)
        np.testing.assert_allclose(rows.getNumpyVersion()[1:3], -0.3, rtol=1e-3)
        with pytest.raises(em.RowIdError):
            rows.beforeForwardPass(torch.tensor([V]).cuda())


@pytest.mark.gpu
def test_a_gadget_gives_tensors_on_the_gpu(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.save(tmp_path / "x.npy", array)
    for kind in ("DataGadget", "DataGadgetMM"):
        with getattr(SpeedTorch, kind)(tmp_path / "x.npy") as gadget:
            gadget.gadgetInit()
            for key in ([1, 2], torch.tensor([3, -1]).cuda(), slice(2, 5), (slice(2, 5), 1)):
                found = gadget.getData(key)
                assert found.device.type == "cuda"
                plain = key.cpu().numpy() if isinstance(key, torch.Tensor) else key
                assert (found.cpu().numpy() == array[plain]).all()
                gadget.insertData(found + 1, key)
                array[plain] += 1
            assert (gadget.getNumpyVersion() == array).all()
        array = np.arange(60, dtype=np.float32).reshape(20, 3)
        np.save(tmp_path / "x.npy", array)


def test_a_gpu_that_is_asked_for_and_not_there_is_one_clear_error(model, monkeypatch):
    from embermap.speedtorch import _home

    monkeypatch.setattr(_home._core, "cuda_devices", lambda: 0)
    monkeypatch.setattr(_home._core, "cuda_absence", lambda: "no driver")
    optimizer = torch.optim.Adam(model.parameters())
    needs = {
        "GPUPytorchModelFactory": (model.u_embeddings, V, D),
        "PytorchModelFactory": (model.u_embeddings, V, D),
        "GPUPytorchOptimizerFactory": (optimizer, V, D, model, "u_embeddings"),
        "PytorchOptimizerFactory": (optimizer, V, D, model, "u_embeddings"),
    }
    for name, arguments in needs.items():
        make = getattr(SpeedTorch, name)
        with pytest.raises(em.CudaError, match=rf"{name} needs the device 'cuda'.*no driver.*cpu"):
            make(*arguments)
        with pytest.raises(RuntimeError, match="cuda"):  # as torch has it
            make(*arguments, device="cuda:0")
        make(*arguments, device="cpu").close()
    # Where the model is on the CPU it has been said where rows go.
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as rows:
        rows.zerosInit()
        assert rows.store.device is None
    with pytest.raises(em.CudaError):
        SpeedTorch.ModelFactory(model.u_embeddings, V, D, device="cuda")


def test_classes_and_methods_that_failed_whatever_was_done(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("COM", "COMMM", "PytorchCOM", "GPUPytorchCOM", "CPUPytorchCOM"):
        with getattr(SpeedTorch, name)(V) as counts:
            counts.comInit()
            counts.add([1], [2])
            assert counts[1, 2] == 1
    with SpeedTorch.CPUPytorchModelFactory(model.u_embeddings, V, D) as rows:
        rows.zerosInit()
        assert rows.getTorchVar()[[1]].tolist() == [[0] * D]
        assert isinstance(rows.getNumpyVersion(), np.ndarray)  # was a tensor
    with SpeedTorch.ModelFactoryMM(model.u_embeddings, V, D, CPUPinn=True) as rows:
        rows.uniformDistributionInit(0, 1)
        rows.beforeForwardPass([1])
    np.save("x.npy", np.zeros((V, D)))
    with SpeedTorch.DataGadgetMM("x.npy", CPUPinn=True) as gadget:
        gadget.gadgetInit()
        assert gadget.getData([3]).tolist() == [[0] * D]
    optimizer = torch.optim.Adam(model.parameters())
    with state_of(optimizer, model) as state:
        state.saveCupy("state")
        state.loadCupy("state")
        state.beforeForwardPass([1])
        assert set(state.getNumpyVersion()) == {"exp_avg", "exp_avg_sq"}
        assert len(state.getCupyVar()) == 2


def test_pinned_memory_failed_at_the_end_of_the_process(run_python):
    """Everything that an ended program had open goes without a word."""
    done = run_python(
        """
        import torch
        import embermap.speedtorch as SpeedTorch
        model = torch.nn.Module()
        model.u = torch.nn.Embedding(2, 3)
        optimizer = torch.optim.Adam(model.parameters())
        rows = SpeedTorch.ModelFactory(model.u, 10, 3, CPUPinn=True)
        rows.uniformDistributionInit(0, 1)
        state = SpeedTorch.OptimizerFactory(optimizer, 10, 3, model, "u", CPUPinn=True)
        state.optInit()
        counts = SpeedTorch.COM(10)
        counts.comInit()
        if torch.cuda.is_available():
            memory = SpeedTorch.PMemory(1000)
            assert memory.ptr and memory.size == 1000
        rows.itself = rows  # a cycle, which only the collector takes apart
        print(rows.directory, state.directory, counts.directory)
        """
    )
    assert done.stderr == ""
    for folder in done.stdout.split():
        assert not Path(folder).exists()


def test_inserting_131072_rows_of_float64_into_a_million(tmp_path):
    """It was a SystemError."""
    file = tmp_path / "x.npy"
    whole = np.lib.format.open_memmap(file, mode="w+", dtype=np.float64, shape=(1_000_000, 16))
    del whole  # sparse: no disk yet
    ids = np.random.default_rng(0).integers(0, 1_000_000, 131_072)
    with SpeedTorch.DataGadgetMM(file, memory="64MiB") as gadget:
        gadget.gadgetInit()
        gadget.insertData(torch.ones(131_072, 16, dtype=torch.float64), ids)
        found = gadget.getData(ids)
        assert found.shape == (131_072, 16)
        assert (found == 1).all()
    assert np.load(file, mmap_mode="r")[:, 3].sum() == len(np.unique(ids))


def test_trees_that_did_not_even_import(tmp_path):
    """Every module compiles, and the import warns of nothing."""
    package = Path(SpeedTorch.__file__).parent
    for file in package.glob("*.py"):
        compile(file.read_text(), file, "exec")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import embermap.speedtorch"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


# --- memory, speed, limits ------------------------------------------------------------------------


def test_the_allocator_of_the_process_was_changed(monkeypatch, model, tmp_path):
    """For good, after the first pinned table; an error in between left all of it pinned."""
    cupy = types.ModuleType("cupy")

    def never(*_):
        raise AssertionError("an allocator was set")

    cupy.cuda = types.SimpleNamespace(set_allocator=never)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D, CPUPinn=True) as rows:
        rows.uniformDistributionInit(0, 1)
        rows.beforeForwardPass([1])
        rows.saveCupy(tmp_path / "x.npy")
    with SpeedTorch.DataGadget(tmp_path / "x.npy", CPUPinn=True) as gadget:
        gadget.gadgetInit()


def test_an_error_while_rows_are_made_leaves_nothing(model, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    rows = SpeedTorch.ModelFactory(model.u_embeddings, V, D)

    def fail(*_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(em.Store, "create", fail)
    with pytest.raises(MemoryError):
        rows.zerosInit()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="no rows yet"):
        rows.getNumpyVersion()
    monkeypatch.undo()
    rows.zerosInit()
    assert not rows.getNumpyVersion().any()
    rows.close()


def test_an_allocator_for_cupy_is_there_for_whoever_wants_it(monkeypatch):
    with pytest.raises(ImportError):
        monkeypatch.setitem(sys.modules, "cupy", None)
        SpeedTorch.my_pinned_allocator(10)
    if not torch.cuda.is_available():
        with pytest.raises(em.CudaError, match="pinned memory needs a CUDA device"):
            SpeedTorch.PMemory(10)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        empty = torch.empty
        monkeypatch.setattr(
            torch,
            "empty",
            lambda n, *, dtype, device, pin_memory: empty(n, dtype=dtype, device=device),
        )
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        UnownedMemory=lambda *arguments: arguments, MemoryPointer=lambda *arguments: arguments
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    (pointer, size, owner, device), offset = SpeedTorch.my_pinned_allocator(100)
    assert pointer == owner.ptr != 0
    assert (size, device, offset) == (100, 0, 0)
    assert SpeedTorch.PMemory(0).ptr == 0
    with pytest.raises(ValueError, match="size"):
        SpeedTorch.PMemory(-1)


def test_tables_took_their_memory_twice(run_python, tmp_path):
    """Made, saved and loaded, a table of 128 MiB takes no more than the 16 MiB it was given."""
    run_python(
        """
        import sys, torch
        import embermap.speedtorch as SpeedTorch

        def resident():
            for line in open("/proc/self/status"):
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) / 1024

        folder = sys.argv[1]
        module = torch.nn.Embedding(2, 128)
        small = SpeedTorch.CPUPytorchModelFactory(module, 10, 128, memory="16MiB")
        small.uniformDistributionInit(0, 1)
        small.saveTorch(folder + "/small.pt")
        small.loadTorch(folder + "/small.pt")
        small.close()
        before = resident()
        numpy = SpeedTorch.ModelFactory(module, 1 << 18, 128, memory="16MiB")
        numpy.uniformDistributionInit(0, 1)
        numpy.saveCupy(folder + "/x.npy")
        numpy.loadCupy(folder + "/x.npy")
        tensors = SpeedTorch.CPUPytorchModelFactory(module, 1 << 18, 128, memory="16MiB")
        tensors.uniformDistributionInit(0, 1)
        tensors.saveTorch(folder + "/x.pt")
        tensors.loadTorch(folder + "/x.pt")
        assert resident() - before < 80, resident() - before
        """,
        tmp_path,
    )


def test_all_of_a_table_had_to_be_in_memory(model):
    """And so had all of its state: 4.8 GB of rows and 9.6 GB of state, here through 64 MiB each."""
    classes, dim = 10_000_000, 128
    module = nn.Embedding(2, dim)
    model.u_embeddings = module
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    with (
        SpeedTorch.ModelFactory(module, classes, dim, memory="64MiB") as rows,
        SpeedTorch.OptimizerFactory(
            optimizer, classes, dim, model, "u_embeddings", memory="64MiB"
        ) as state,
    ):
        rows.normalDistributionInit(0, 1)
        state.optInit()
        rng = np.random.default_rng(0)
        for _ in range(2):
            step(optimizer, module, rng.integers(0, classes, 2048), rows, state)
        for each in (rows, state):
            stats = each.store.stats()
            assert stats["memory_bytes"] <= stats["memory"] + (4 << 20)


def test_every_buffer_sent_the_ids_again(model, monkeypatch):
    """Ids go to where the rows are once for a call, whatever the number of states."""
    from embermap.speedtorch import _optimizers

    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    with state_of(optimizer, model) as state:
        calls = []
        flat = _optimizers.flat_ids
        monkeypatch.setattr(_optimizers, "flat_ids", lambda *a: calls.append(1) or flat(*a))
        state.beforeForwardPass([1, 2])
        state.afterOptimizerStep([1, 2])
        assert len(calls) == 2


def test_small_tables_were_slower_than_plain_tensors(rows):
    """6 x 3 and the like: all rows are in memory, and one call reads nothing from the disk."""
    for _ in range(10):
        rows.beforeForwardPass([1, 2, 3])
        rows.afterOptimizerStep([1, 2, 3])
    stats = rows.store.stats()["total"]
    assert stats["read_requests"] == 0
    assert stats["evictions"] == 0
    assert stats["misses"] <= 2


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index % V


def test_workers_that_load_data_could_not_be_used(model, rows):
    """Forked ones leave the tables of their parent alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(
        Pairs(), batch_size=10, num_workers=2, multiprocessing_context="fork"
    )
    for ids in loader:
        step(optimizer, model.u_embeddings, ids, rows)
    assert rows.getNumpyVersion()[:, 0].tolist() == [-(64 // V) - (r < 64 % V) for r in range(V)]


def test_data_had_to_come_from_a_file_and_stayed_on_the_gpu(model, tmp_path):
    """Any array can be written, and what is read is NumPy's where NumPy is asked for."""
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as rows:
        rows.zerosInit()
        rows.getCupyVar()[:] = np.arange(V * D, dtype=np.float32).reshape(V, D)
        assert rows.getCupyVar()[3].numpy().tolist() == [12, 13, 14, 15]
        assert np.asarray(rows.getCupyVar())[-1].tolist() == [76, 77, 78, 79]
        with em.open(tmp_path / "s") as store:
            table = store.from_array("mine", np.ones((V, D), np.float32))
            with SpeedTorch.ModelFactory(
                model.v_embeddings, V, D, store=store, name="mine"
            ) as mine:
                mine.resume()
                mine.beforeForwardPass([1])
                model.v_embeddings.weight.data += 1
                mine.afterOptimizerStep([1])
            assert table[1].tolist() == [2] * D


def test_cupy_had_to_be_there(run_python):
    run_python(
        """
        import sys
        sys.modules["cupy"] = None  # an import of it fails
        import torch
        import embermap.speedtorch as SpeedTorch
        module = torch.nn.Embedding(2, 3)
        with SpeedTorch.ModelFactory(module, 10, 3) as rows:
            rows.zerosInit()
            rows.beforeForwardPass([1])
            rows.afterOptimizerStep([1])
        """
    )


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta"])
def test_torch_of_today_wants_steps_that_are_tensors(name, model, rows):
    """Optimizers that had not stepped yet failed at their first step."""
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    with state_of(optimizer, model) as state:
        state.beforeForwardPass([1, 2])
        made = optimizer.state[model.u_embeddings.weight]["step"]
        assert isinstance(made, torch.Tensor)
        assert made == 0
        step(optimizer, model.u_embeddings, [1, 2], rows, state)
        assert optimizer.state[model.u_embeddings.weight]["step"] == 1


def test_training_could_not_be_gone_on_with(tmp_path):
    """Rows, state and steps of one commit, or of the one before, whatever happens in between."""
    code = """
import os, sys
import numpy as np, torch
import embermap as em
import embermap.speedtorch as SpeedTorch
folder, last = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Module()
model.u = torch.nn.Embedding(2, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
store = em.open(folder, memory="16MiB")
new = "u" not in store
rows = SpeedTorch.ModelFactory(model.u, 50, 4, store=store, name="u", seed=1)
state = SpeedTorch.OptimizerFactory(optimizer, 50, 4, model, "u", store=store)
if new:
    rows.uniformDistributionInit(-1, 1)
    state.optInit()
    store.commit(note={"step": 0})
else:
    rows.resume()
    state.resume()
for step in range(store.note["step"], 12):
    if step == last:
        os.kill(os.getpid(), 9)
    ids = np.random.default_rng(step).integers(0, 50, 8)
    for switcher in (rows, state):
        switcher.beforeForwardPass(ids)
    optimizer.zero_grad()
    model.u(torch.arange(8)).pow(2).sum().backward()
    optimizer.step()
    for switcher in (rows, state):
        switcher.afterOptimizerStep(ids)
    if step % 3 == 2:
        store.commit(note={"step": step + 1})
print(optimizer.state[model.u.weight]["step"].item())
store.close()
"""

    def run(folder, last, status):
        done = subprocess.run(
            [sys.executable, "-c", code, folder, str(last)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    assert float(run(tmp_path / "whole", 99, 0)) == 12
    for last in (5, 10):
        run(tmp_path / "broken", last, -9)
    assert float(run(tmp_path / "broken", 99, 0)) == 12
    for name in ("u", "u.exp_avg", "u.exp_avg_sq", "u.numbers"):
        with (
            em.open(tmp_path / "whole", mode="r") as whole,
            em.open(tmp_path / "broken", mode="r") as broken,
        ):
            assert (whole[name][:] == broken[name][:]).all(), name
