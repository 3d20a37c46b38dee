"""SpeedTorch's classes: names, batches, optimizers, against plain torch."""

from __future__ import annotations

import copy
import inspect
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn
import embermap.speedtorch as SpeedTorch  # noqa: E402

V, D = 23, 5


class Model(nn.Module):
    """Two embeddings and something dense between, as the programs of old have them."""

    def __init__(self, rows=7, dim=D, sparse=False, dtype=torch.float32):
        super().__init__()
        self.dense = nn.Linear(2, 2, dtype=dtype)
        self.u_embeddings = nn.Embedding(rows, dim, sparse=sparse, dtype=dtype)
        self.v_embeddings = nn.Embedding(rows, dim, sparse=sparse, dtype=dtype)


@pytest.fixture
def model():
    return Model()


def device_of(module):
    return module.weight.device


# --- names ----------------------------------------------------------------------------------------

MODEL = ["model_variable", "total_classes", "embed_dimension"]
STATE = ["given_optimizer", "total_classes", "embed_dimension", "model", "variable_name"]
REQUIRED = inspect.Parameter.empty
OLD = {
    "ModelFactory": (MODEL, {"datatype": "float32", "CPUPinn": False}),
    "ModelFactoryMM": (
        MODEL,
        {"diskname": "variable", "datatype": "float32", "CPUPinn": False},
    ),
    "PytorchModelFactory": (
        MODEL,
        {"datatype": torch.float, "deviceType": "cuda", "pinType": False},
    ),
    "GPUPytorchModelFactory": (MODEL, {"datatype": torch.float}),
    "CPUPytorchModelFactory": (MODEL, {"datatype": torch.float}),
    "OptimizerFactory": (STATE, {"dtype": "float32", "CPUPinn": False}),
    "OptimizerFactoryMM": (STATE, {"dtype": "float32", "CPUPinn": False}),
    "PytorchOptimizerFactory": (
        STATE,
        {"dtype": torch.float, "deviceType": "cuda", "pinType": False},
    ),
    "GPUPytorchOptimizerFactory": (STATE, {"dtype": torch.float}),
    "CPUPytorchOptimizerFactory": (STATE, {"dtype": torch.float}),
    "DataGadget": (["fileName"], {"CPUPinn": False}),
    "DataGadgetMM": (["fileName"], {"CPUPinn": False}),
    "COM": (["total_classes"], {"datatype": "uint32", "CPUPinn": False}),
    "COMMM": (["total_classes"], {"diskname": "COM", "datatype": "uint32", "CPUPinn": False}),
    "PytorchCOM": (["total_classes"], {"datatype": torch.int32}),
    "GPUPytorchCOM": (["total_classes"], {"datatype": torch.int32}),
    "CPUPytorchCOM": (["total_classes"], {"datatype": torch.int32}),
}

METHODS = {
    "zerosInit": {},
    "uniformDistributionInit": {"low": REQUIRED, "high": REQUIRED},
    "normalDistributionInit": {"mean": REQUIRED, "stdDev": REQUIRED},
    "customInit": {"initFunction": REQUIRED, "args": REQUIRED},
    "variableTransformer": {"batchSize": REQUIRED, "posPerBatch": REQUIRED, "negPerBatch": None},
    "beforeForwardPass": {"retrievedPosIndexes": REQUIRED, "retrievedNegIndexes": None},
    "afterOptimizerStep": {"retrievedPosIndexes": REQUIRED, "retrievedNegIndexes": None},
    "getNumpyVersion": {},
    "saveCupy": {"saveFileName": REQUIRED},
    "loadCupy": {"loadFileName": REQUIRED},
    "saveTorch": {"saveFileName": REQUIRED},
    "loadTorch": {"loadFileName": REQUIRED},
    "getCupyVar": {},
    "getCupyMM": {},
    "getTorchVar": {},
    "optInit": {},
    "gadgetInit": {},
    "insertData": {"dataObject": REQUIRED, "indexes": REQUIRED},
    "comInit": {"CPUPinn": False},
}

NUMPY_FILES = {"saveCupy", "loadCupy"}
TORCH_FILES = {"saveTorch", "loadTorch", "getTorchVar"}
SWITCH = {"beforeForwardPass", "afterOptimizerStep", "getNumpyVersion"}
FIRST_ROWS = {
    "zerosInit",
    "uniformDistributionInit",
    "normalDistributionInit",
    "variableTransformer",
} | SWITCH
HAS = {
    "ModelFactory": FIRST_ROWS | NUMPY_FILES | {"getCupyVar"},
    "ModelFactoryMM": FIRST_ROWS | {"saveCupy", "getCupyMM"},
    "PytorchModelFactory": FIRST_ROWS | TORCH_FILES | {"customInit"},
    "GPUPytorchModelFactory": FIRST_ROWS | TORCH_FILES | {"customInit"},
    "CPUPytorchModelFactory": FIRST_ROWS | {"saveTorch", "getTorchVar", "customInit"},
    "OptimizerFactory": SWITCH | NUMPY_FILES | {"optInit", "getCupyVar"},
    "OptimizerFactoryMM": SWITCH | {"optInit", "saveCupy", "getCupyMM"},
    "PytorchOptimizerFactory": SWITCH | TORCH_FILES | {"optInit"},
    "GPUPytorchOptimizerFactory": SWITCH | TORCH_FILES | {"optInit"},
    "CPUPytorchOptimizerFactory": SWITCH | {"optInit", "saveTorch", "getTorchVar"},
    "DataGadget": NUMPY_FILES | {"gadgetInit", "insertData", "getNumpyVersion", "getCupyVar"},
    "DataGadgetMM": {"gadgetInit", "getNumpyVersion", "getCupyMM", "saveCupy"},
    "COM": NUMPY_FILES | {"comInit", "getNumpyVersion", "getCupyVar"},
    "COMMM": {"comInit", "getNumpyVersion", "getCupyMM", "saveCupy"},
    "PytorchCOM": TORCH_FILES | {"comInit", "getNumpyVersion"},
    "GPUPytorchCOM": TORCH_FILES | {"comInit", "getNumpyVersion"},
    "CPUPytorchCOM": {"saveTorch", "getTorchVar", "comInit", "getNumpyVersion"},
}


@pytest.mark.parametrize("name", OLD)
def test_arguments_have_their_old_names_order_and_defaults(name):
    required, optional = OLD[name]
    parameters = inspect.signature(getattr(SpeedTorch, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*required, *optional]
    assert {p.name: p.default for p in positional if p.default is not REQUIRED} == optional
    # What is new is by keyword, and may be left out.
    added = [p for p in parameters if p not in positional]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not REQUIRED for p in added)


@pytest.mark.parametrize("name", HAS)
def test_methods_have_their_old_names_and_arguments(name):
    for method in sorted(HAS[name]):
        parameters = inspect.signature(getattr(getattr(SpeedTorch, name), method)).parameters
        found = {p.name: p.default for p in parameters.values() if p.name != "self"}
        assert found == METHODS[method], method


def test_everything_that_speedtorch_exported_is_there():
    for name in (
        *OLD,
        *("PMemory", "my_pinned_allocator", "PMemoryMM", "my_pinned_allocatorMM"),
        *("_Common", "_CommonMM", "_GPUPytorchCommon", "_CPUPytorchCommon", "_PytorchCommon"),
    ):
        assert hasattr(SpeedTorch, name), name


def test_everything_public_is_documented():
    for name in SpeedTorch.__all__:
        thing = getattr(SpeedTorch, name)
        assert inspect.getdoc(thing), name
        for member in dir(thing) if inspect.isclass(thing) else ():
            if not member.startswith("_"):
                assert inspect.getdoc(getattr(thing, member)), f"{name}.{member}"


def test_the_ways_to_import_it(run_python):
    run_python(
        """
        import sys, embermap as em
        assert "torch" not in sys.modules and "speedtorch" in dir(em)
        from embermap import speedtorch
        import embermap.speedtorch as SpeedTorch
        assert em.speedtorch is speedtorch is SpeedTorch
        assert "cupy" not in sys.modules
        """
    )


# --- indexes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "positives", "negatives"), [(3, 2, 4), (1, 1, 1), (4, 3, 0)])
def test_the_indexes_of_a_model(model, batch, positives, negatives):
    switcher = SpeedTorch.ModelFactory(model.u_embeddings, V, D)
    alone = switcher.variableTransformer(batch, positives)
    assert alone.dtype == np.int64
    assert alone.tolist() == np.arange(batch * positives).reshape(batch, positives).tolist()
    both = switcher.variableTransformer(batch, positives, negPerBatch=negatives)
    assert isinstance(both, tuple)
    assert both[0].tolist() == alone.tolist()
    assert both[1].dtype == np.int64
    assert both[1].shape == (batch, negatives)
    assert both[1].reshape(-1).tolist() == [batch * positives + k for k in range(batch * negatives)]


def kinds_of_ids():
    yield "list", lambda ids: ids.tolist()
    yield "tensor", torch.from_numpy
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        yield name, lambda ids, name=name: ids.astype(name)
    yield "big-endian", lambda ids: ids.astype(">i4")
    yield "strided", lambda ids: np.repeat(ids, 2, axis=1)[:, ::2]
    yield "DLPack", lambda ids: Foreign(ids)


class Foreign:
    """An array of some other library."""

    def __init__(self, array):
        self._array = array
        self.shape = array.shape

    def __dlpack__(self, **options):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize(
    ("kind", "make"), list(kinds_of_ids()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_rows_come_in_the_order_of_positives_then_negatives(model, kind, make):
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
        switcher.uniformDistributionInit(-1, 1)
        whole = switcher.getNumpyVersion()
        positives = np.array([[3, 1], [22, 0], [1, 9]])
        negatives = np.array([[5, 6, 7], [3, 3, 8], [0, 2, 4]])
        switcher.beforeForwardPass(make(positives), make(negatives))
        weight = model.u_embeddings.weight
        assert weight.shape == (6 + 9, D)
        first, second = switcher.variableTransformer(3, 2, 3)
        found = model.u_embeddings(torch.from_numpy(first)).detach().numpy()
        assert (found == whole[positives]).all()
        found = model.u_embeddings(torch.from_numpy(second)).detach().numpy()
        assert (found == whole[negatives]).all()
        with torch.no_grad():
            weight.mul_(2)
        switcher.afterOptimizerStep(make(positives), make(negatives))
        touched = np.union1d(positives, negatives)
        whole[touched] *= 2
        assert (switcher.getNumpyVersion() == whole).all()


def test_a_batch_may_be_of_any_shape_and_size(model):
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
        switcher.normalDistributionInit(0, 1)
        whole = switcher.getNumpyVersion()
        for ids in (np.array(4), np.arange(3), np.ones((2, 0), int), np.arange(8).reshape(2, 2, 2)):
            switcher.beforeForwardPass(ids)
            assert (model.u_embeddings.weight.detach().numpy() == whole[ids.reshape(-1)]).all()
            assert model.u_embeddings.weight.shape == (ids.size, D)
            switcher.afterOptimizerStep(ids)
        assert (switcher.getNumpyVersion() == whole).all()


@pytest.mark.parametrize(
    "ids", [[1.0], ["a"], None, [True], torch.tensor([0.5]), np.array([1 + 0j])], ids=repr
)
def test_indexes_that_are_no_integers(model, ids):
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
        switcher.zerosInit()
        before = model.u_embeddings.weight.detach().clone()
        with pytest.raises(TypeError, match="indexes"):
            switcher.beforeForwardPass(ids)
        assert model.u_embeddings.weight.equal(before)


# --- first rows -----------------------------------------------------------------------------------

FAMILIES = ["ModelFactory", "ModelFactoryMM", "CPUPytorchModelFactory", "PytorchModelFactory"]


def make_switcher(name, module, rows=V, dim=D, **options):
    if name == "PytorchModelFactory":
        options.setdefault("deviceType", "cpu")
    return getattr(SpeedTorch, name)(module, rows, dim, **options)


@pytest.fixture(params=FAMILIES)
def switcher(request, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = make_switcher(request.param, model.u_embeddings)
    yield made
    made.close()


def test_first_rows(switcher):
    switcher.zerosInit()
    whole = switcher.getNumpyVersion()
    assert whole.shape == (V, D)
    assert whole.dtype == np.float32
    assert not whole.any()
    switcher.uniformDistributionInit(low=2, high=3)
    assert (switcher.getNumpyVersion() >= 2).all()
    assert (switcher.getNumpyVersion() < 3).all()
    assert np.unique(switcher.getNumpyVersion()).size > V * D * 0.9
    switcher.normalDistributionInit(mean=100, stdDev=1)
    assert abs(switcher.getNumpyVersion().mean() - 100) < 1
    assert 0.5 < switcher.getNumpyVersion().std() < 1.5
    switcher.customInit(nn.init.constant_, 7.0)
    assert (switcher.getNumpyVersion() == 7).all()


def test_a_custom_function_sees_the_whole_shape(switcher):
    torch.manual_seed(5)
    expected = nn.init.xavier_uniform_(torch.empty(V, D)).numpy()
    torch.manual_seed(5)
    switcher.customInit(nn.init.xavier_uniform_)
    assert (switcher.getNumpyVersion() == expected).all()

    def fill(tensor, first, second):
        assert tensor.shape == (V, D)
        tensor.copy_(torch.arange(V * D).reshape(V, D) * first + second)

    switcher.customInit(fill, 2, 1)
    assert switcher.getNumpyVersion()[-1].tolist() == [2 * k + 1 for k in range(V * D - D, V * D)]
    with pytest.raises(ZeroDivisionError):
        switcher.customInit(lambda tensor: 1 / 0)
    assert switcher.getNumpyVersion()[0, 0] == 1  # as it was
    with pytest.raises(TypeError, match="callable"):
        switcher.customInit(3)


def test_random_rows_are_those_of_the_seed(model):
    def rows(**options):
        with SpeedTorch.ModelFactory(model.u_embeddings, V, D, **options) as switcher:
            switcher.uniformDistributionInit(-1, 1)
            return switcher.getNumpyVersion()

    torch.manual_seed(1)
    first, second = rows(), rows()
    torch.manual_seed(1)
    assert (rows() == first).all()
    assert (first != second).any()
    assert (rows(seed=4) == rows(seed=4)).all()


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "bfloat16"])
def test_dtypes(kind, tmp_path):
    if kind == "bfloat16":
        pytest.importorskip("ml_dtypes")
    for given in (kind, getattr(torch, kind)):
        model = Model(dtype=getattr(torch, kind))
        with (
            SpeedTorch.ModelFactory(model.u_embeddings, V, D, given) as cupy,
            SpeedTorch.CPUPytorchModelFactory(model.v_embeddings, V, D, given) as tensors,
        ):
            for switcher in (cupy, tensors):
                switcher.uniformDistributionInit(-1, 1)
                switcher.beforeForwardPass([3, 4])
                weight = switcher.model_variable.weight
                assert weight.dtype == getattr(torch, kind)
                whole = switcher.getNumpyVersion()
                assert whole.dtype.name == kind
                assert (whole[3:5].astype(float) == weight.detach().double().numpy()).all()
            cupy.saveCupy(tmp_path / "x.npy")
            cupy.zerosInit()
            cupy.loadCupy(tmp_path / "x.npy")
            assert cupy.getNumpyVersion().any()
            tensors.saveTorch(tmp_path / "x.pt")
            whole = tensors.getNumpyVersion()
            tensors.zerosInit()
            tensors.loadTorch(tmp_path / "x.pt")
            assert (tensors.getNumpyVersion() == whole).all()


@pytest.mark.parametrize("kind", ["int32", "bool", "complex64", "nonsense", None])
def test_dtypes_that_cannot_be_trained(model, kind):
    with pytest.raises(TypeError, match="datatype"):
        SpeedTorch.ModelFactory(model.u_embeddings, V, D, kind)


def test_arguments_that_cannot_be(model):
    with pytest.raises(TypeError, match="model_variable"):
        SpeedTorch.ModelFactory(nn.ReLU(), V, D)
    with pytest.raises(TypeError, match="total_classes"):
        SpeedTorch.ModelFactory(model.u_embeddings, 1.5, D)
    with pytest.raises(ValueError, match="embed_dimension"):
        SpeedTorch.ModelFactory(model.u_embeddings, V, 0)
    with pytest.raises(ValueError, match="deviceType"):
        SpeedTorch.PytorchModelFactory(model.u_embeddings, V, D, deviceType="meta")
    with pytest.raises(ValueError, match="device"):
        SpeedTorch.ModelFactory(model.u_embeddings, V, D, device="meta")
    with pytest.raises(ValueError, match="store="):
        SpeedTorch.ModelFactory(model.u_embeddings, V, D, name="x")
    with pytest.raises(TypeError, match="store"):
        SpeedTorch.ModelFactory(model.u_embeddings, V, D, store="x")


# --- optimizers -----------------------------------------------------------------------------------


def adam(**options):
    return lambda parameters: torch.optim.Adam(parameters, lr=0.1, **options)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad options": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5
    ),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adam": adam(),
    "Adam amsgrad": adam(amsgrad=True, weight_decay=0.01),
    "Adam maximize": adam(maximize=True),
    "Adam foreach": adam(foreach=True),
    "Adam fused": adam(fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=3),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}
SPARSE = {"SparseAdam"}
TABLES = {
    "SGD": [],
    "SGD momentum": ["momentum_buffer"],
    "Adagrad": ["sum"],
    "Adadelta": ["square_avg", "acc_delta"],
    "Adam": ["exp_avg", "exp_avg_sq"],
    "Adam amsgrad": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "Adamax": ["exp_avg", "exp_inf"],
    "RMSprop": ["square_avg"],
    "RMSprop centered": ["square_avg", "momentum_buffer", "grad_avg"],
    "Rprop": ["prev", "step_size"],
    "ASGD": ["ax"],
    "SparseAdam": ["exp_avg", "exp_avg_sq"],
}


def loss_of(rows, targets):
    """Gradients of different sizes and signs for each element."""
    return ((rows - targets).pow(2) * 0.5 + torch.sin(3 * rows)).sum()


class Trainer:
    """A model of two variables trained through switchers, each with state of its own."""

    def __init__(self, make, *, dtype=torch.float32, sparse=False, device="cpu", **options):
        self.device = device
        self.model = Model(rows=3, sparse=sparse, dtype=dtype).to(device)
        parameters = (p for n, p in self.model.named_parameters() if "embeddings" in n)
        self.optimizer = make(parameters)
        self.modules = {"u": self.model.u_embeddings, "v": self.model.v_embeddings}
        self.rows = {
            k: SpeedTorch.ModelFactory(m, V, D, dtype, **options) for k, m in self.modules.items()
        }
        self.state = {
            k: SpeedTorch.OptimizerFactory(
                self.optimizer, V, D, self.model, f"{k}_embeddings", dtype, **options
            )
            for k in self.modules
        }

    def start(self, first):
        for key, switcher in self.rows.items():
            switcher.customInit(lambda t, key=key: t.copy_(first[key]))
            self.state[key].optInit()

    def step(self, ids, targets):
        for key in ids:
            self.rows[key].beforeForwardPass(ids[key])
            self.state[key].beforeForwardPass(ids[key])
        self.optimizer.zero_grad()
        loss = 0
        for key, module in self.modules.items():
            places = torch.arange(ids[key].size, device=self.device)
            loss = loss + loss_of(module(places), targets[key].to(self.device))
        loss.backward()
        self.optimizer.step()
        for key in ids:
            self.state[key].afterOptimizerStep(ids[key])
            self.rows[key].afterOptimizerStep(ids[key])
        return loss  # alive while the next batch is put in, with its graph


class Whole:
    """The same model with all of its rows in an nn.Embedding, by torch alone."""

    def __init__(self, make, first, *, sparse=False):
        self.modules = {
            k: nn.Embedding.from_pretrained(t.clone(), freeze=False, sparse=sparse)
            for k, t in first.items()
        }
        self.optimizer = make([m.weight for m in self.modules.values()])

    def step(self, ids, targets):
        self.optimizer.zero_grad()
        loss = sum(
            loss_of(m(torch.from_numpy(ids[k])), targets[k]) for k, m in self.modules.items()
        )
        loss.backward()
        self.optimizer.step()

    def compare(self, trainer, tolerance):
        for key, module in self.modules.items():
            expected = module.weight.detach().double().numpy()
            found = trainer.rows[key].getNumpyVersion()
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
            state = self.optimizer.state[module.weight]
            for name, rows in trainer.state[key].getNumpyVersion().items():
                expected = state[name].double().numpy()
                np.testing.assert_allclose(rows, expected, rtol=tolerance, atol=tolerance)


def batches(steps, rng, *, every_row, dtype=torch.float32):
    for _ in range(steps):
        ids = {}
        for key in ("u", "v"):
            some = rng.integers(0, V, int(rng.integers(1, 30)))
            ids[key] = np.concatenate([rng.permutation(V), some]) if every_row else some
        yield (
            ids,
            {k: torch.from_numpy(rng.normal(size=(i.size, D))).to(dtype) for k, i in ids.items()},
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_torch_where_every_row_is_in_every_batch(name, dtype):
    """With repeated ids, batches of changing sizes, and two variables of one optimizer."""
    rng = np.random.default_rng(3)
    sparse = name in SPARSE
    first = {k: torch.from_numpy(rng.normal(size=(V, D))).to(dtype) for k in "uv"}
    trainer = Trainer(OPTIMIZERS[name], dtype=dtype, sparse=sparse)
    if name in TABLES:
        assert trainer.state["u"].optVarList == TABLES[name]
    trainer.start(first)
    whole = Whole(OPTIMIZERS[name], first, sparse=sparse)
    for ids, targets in batches(20, rng, every_row=True, dtype=dtype):
        trainer.step(ids, targets)
        whole.step(ids, targets)
    whole.compare(trainer, 1e-4 if dtype == torch.float32 else 1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_a_gpu_equals_torch(name):
    rng = np.random.default_rng(6)
    sparse = name in SPARSE
    first = {k: torch.from_numpy(rng.normal(size=(V, D))) for k in "uv"}
    trainer = Trainer(OPTIMIZERS[name], dtype=torch.float64, sparse=sparse, device="cuda")
    trainer.start(first)
    assert trainer.rows["u"].store.device is not None
    whole = Whole(OPTIMIZERS[name], first, sparse=sparse)
    for ids, targets in batches(12, rng, every_row=True, dtype=torch.float64):
        trainer.step(ids, targets)
        whole.step(ids, targets)
    assert trainer.model.u_embeddings.weight.device.type == "cuda"
    # torch keeps ASGD's eta as a float32 tensor, and rounds it elsewhere on a GPU than on the CPU.
    whole.compare(trainer, 1e-5 if name == "ASGD" else 1e-9)


class Rows:
    """Rows and state in dicts: each step a new parameter of the distinct rows of the batch."""

    def __init__(self, make, first, initial):
        self.make, self.initial = make, initial
        self.weights = {k: t.clone() for k, t in first.items()}
        self.state = {k: {} for k in first}
        self.numbers = {k: {} for k in first}

    def step(self, ids, targets, sparse):
        params, groups = {}, {}
        for key, some in ids.items():
            distinct, groups[key] = np.unique(some, return_inverse=True)
            params[key] = (
                distinct,
                nn.Embedding.from_pretrained(
                    self.weights[key][distinct].clone(), freeze=False, sparse=sparse
                ),
            )
        optimizer = self.make([m.weight for _, m in params.values()])
        for key, (distinct, module) in params.items():
            state = optimizer.state[module.weight]
            for name, rows in self.state[key].items():
                state[name] = rows[distinct].clone()
            state.update(copy.deepcopy(self.numbers[key]))
        sum(
            loss_of(m(torch.from_numpy(groups[k])), targets[k]) for k, (_, m) in params.items()
        ).backward()
        optimizer.step()
        for key, (distinct, module) in params.items():
            self.weights[key][distinct] = module.weight.detach()
            for name, value in optimizer.state[module.weight].items():
                if isinstance(value, torch.Tensor) and value.ndim == 2:
                    whole = torch.full((V, D), self.initial.get(name, 0.0), dtype=value.dtype)
                    self.state[key].setdefault(name, whole)[distinct] = value
                elif value is not None:
                    self.numbers[key][name] = value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_torch_on_the_rows_of_each_batch(name):
    rng = np.random.default_rng(4)
    sparse = name in SPARSE
    first = {k: torch.from_numpy(rng.normal(size=(V, D))).float() for k in "uv"}
    trainer = Trainer(OPTIMIZERS[name], sparse=sparse)
    trainer.start(first)
    initial = {"step_size": 0.1, "sum": 0.5 if "options" in name else 0.0}
    rows = Rows(OPTIMIZERS[name], first, initial)
    for ids, targets in batches(25, rng, every_row=False):
        trainer.step(ids, targets)
        rows.step(ids, targets, sparse)
    for key in "uv":
        np.testing.assert_allclose(
            trainer.rows[key].getNumpyVersion(), rows.weights[key], rtol=1e-4, atol=1e-5
        )
        for state, found in trainer.state[key].getNumpyVersion().items():
            np.testing.assert_allclose(found, rows.state[key][state], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adagrad options"])
def test_sparse_gradients_train_as_dense_ones(name):
    """And as an nn.Embedding(sparse=True) of all rows, of which rows outside of a batch rest."""
    if "options" in name:
        make = lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5)  # noqa: E731
    else:
        make = OPTIMIZERS[name]
    rng = np.random.default_rng(5)
    first = {k: torch.from_numpy(rng.normal(size=(V, D))).float() for k in "uv"}
    dense, sparse = Trainer(make), Trainer(make, sparse=True)
    dense.start(first)
    sparse.start(first)
    whole = Whole(make, first, sparse=True)
    for ids, targets in batches(20, rng, every_row=False):
        for each in (dense, sparse, whole):
            each.step(ids, targets)
    whole.compare(dense, 1e-5)
    whole.compare(sparse, 1e-5)


def test_halves_sum_gradients_of_repeated_ids_in_float32():
    model = Model(dtype=torch.float16)
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D, "float16") as switcher:
        switcher.zerosInit()
        ids = [4] * 4000
        switcher.beforeForwardPass(ids)
        model.u_embeddings(torch.arange(4000)).sum().backward()
        assert (model.u_embeddings.weight.grad == 4000).all()  # ones in float16 end at 2048


def test_repeated_ids_get_the_same_bits_every_time():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 3, 500)
    values = torch.from_numpy(rng.normal(size=(500, D))).float()
    found = []
    for _ in range(2):
        model = Model()
        with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
            switcher.zerosInit()
            switcher.beforeForwardPass(ids)
            (model.u_embeddings(torch.arange(500)) * values).sum().backward()
            found.append(model.u_embeddings.weight.grad.clone())
    assert found[0].equal(found[1])


def test_sparse_gradients_of_a_part_of_a_batch():
    """A model that looks only some of the rows up: all copies of those move, and no others."""
    model = Model(sparse=True)
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
        switcher.zerosInit()
        switcher.beforeForwardPass([3, 5, 3, 8, 5])
        model.u_embeddings(torch.tensor([0, 3, 3])).sum().backward()
        grad = model.u_embeddings.weight.grad
        assert grad.is_sparse
        assert grad.coalesce().indices()[0].tolist() == [0, 2, 3]
        assert grad.to_dense()[:, 0].tolist() == [1, 0, 1, 2, 0]


def test_gradients_accumulate_over_backward_passes():
    model = Model()
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
        switcher.zerosInit()
        switcher.beforeForwardPass([3, 5, 3])
        for _ in range(2):
            model.u_embeddings(torch.tensor([0, 1, 2])).sum().backward()
        assert model.u_embeddings.weight.grad[:, 0].tolist() == [4, 2, 4]


def test_two_tables_for_one_module():
    """What is in the weight decides whose ids are repeated."""
    model = Model()
    with (
        SpeedTorch.ModelFactory(model.u_embeddings, V, D) as one,
        SpeedTorch.ModelFactory(model.u_embeddings, V, D) as other,
    ):
        for switcher in (one, other):
            switcher.zerosInit()
        one.beforeForwardPass([1, 1, 2])
        other.beforeForwardPass([1, 2, 2])
        model.u_embeddings(torch.arange(3)).sum().backward()
        assert model.u_embeddings.weight.grad[:, 0].tolist() == [1, 2, 2]
        one.beforeForwardPass([1, 1, 2])
        model.u_embeddings(torch.arange(3)).sum().backward()
        assert model.u_embeddings.weight.grad[:, 0].tolist() == [2, 2, 1]


def test_a_module_that_is_frozen_or_loaded_anew():
    model = Model()
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
        switcher.zerosInit()
        model.u_embeddings.requires_grad_(False)
        switcher.beforeForwardPass([1, 1])
        model.u_embeddings.requires_grad_(True)
        model.u_embeddings.weight = nn.Parameter(torch.ones(4, D))
        switcher.beforeForwardPass([1, 1])
        model.u_embeddings(torch.arange(2)).sum().backward()
        assert (model.u_embeddings.weight.grad == 2).all()


class Plain(torch.optim.Optimizer):
    """An optimizer nobody has heard of: state for elements, for rows, and one number for all."""

    def __init__(self, params, lr=0.1, start=2.0):
        super().__init__(params, {"lr": lr, "start": start})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mass"] = torch.full_like(p, group["start"])
                    state["visits"] = torch.zeros(p.shape[0], dtype=torch.int64)
                    state["norm"] = torch.zeros(p.shape[0], 1)
                    state["calls"] = 100
                state["calls"] += 1
                state["visits"] += 1
                state["norm"] += p.grad.norm(dim=1, keepdim=True)
                state["mass"] += p.grad
                p -= group["lr"] * state["mass"]


BY_ROWS = {
    "SGD": {"lr": 0.1},
    "SGD, dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.4},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "Adadelta": {},
    "Adam": {"lr": 0.05, "amsgrad": True},
    "AdamW": {"lr": 0.05},
    "Adamax": {"lr": 0.05},
    "NAdam": {"lr": 0.05},
    "RAdam": {"lr": 0.05},
    "ASGD": {"lr": 0.05, "t0": 1, "lambd": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.02},
    "SparseAdam": {"lr": 0.05},
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_that_count_their_own_steps_train_as_parameters_of_their_own(name, tmp_path):
    kind, options = getattr(torch.optim, name.split(",")[0]), BY_ROWS[name]
    torch.manual_seed(0)
    model = Model()
    weight = model.u_embeddings.weight
    other = torch.nn.Parameter(torch.ones(2, 2))  # of the same optimizer, stepped by itself
    sparse = kind is torch.optim.SparseAdam
    optimizer = kind([weight] if sparse else [weight, other], **options)
    batches = [[1, 2], [2, 3, 4], [4], [1, 2, 3, 4, 5], [2, 5], [0, 1, 2]]
    gradients = [torch.randn(len(ids), D) for ids in batches]

    alone = [torch.nn.Parameter(torch.full((1, D), 0.5)) for _ in range(V)]
    steppers = [kind([row], **options) for row in alone]
    for ids, grads in zip(batches, gradients, strict=True):
        for row, grad in zip(ids, grads, strict=True):
            alone[row].grad = grad[None].to_sparse(1) if sparse else grad[None].clone()
            steppers[row].step()
    kept = torch.nn.Parameter(torch.ones(2, 2))
    if not sparse:
        twin = kind([kept], **options)
        for _ in batches:
            kept.grad = torch.ones(2, 2)
            twin.step()

    def opened():
        rows = SpeedTorch.ModelFactory(model.u_embeddings, V, D, directory=tmp_path / "rows")
        state = SpeedTorch.OptimizerFactory(
            optimizer, V, D, model, "u_embeddings", directory=tmp_path / "state", step="row"
        )
        return rows, state

    rows, state = opened()
    rows.zerosInit()
    rows.getCupyVar()[:] = torch.full((V, D), 0.5)
    state.optInit()
    for number, (ids, grads) in enumerate(zip(batches, gradients, strict=True)):
        if number == 3:  # another session goes on with the steps of each row
            for each in (rows, state):
                each.close()
            optimizer.state.pop(weight, None)
            rows, state = opened()
            rows.resume()
            state.resume()
        rows.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        weight.grad = grads.to_sparse(1) if sparse else grads.clone()
        other.grad = torch.ones(2, 2)
        optimizer.step()
        assert weight.grad is not None
        rows.afterOptimizerStep(ids)
        state.afterOptimizerStep(ids)
    expected = torch.cat([row.detach() for row in alone]).numpy()
    np.testing.assert_allclose(rows.getNumpyVersion(), expected, rtol=1e-5, atol=1e-6)
    counts = [sum(row in ids for ids in batches) for row in range(V)]
    assert state.getNumpyVersion()["row_steps"].tolist() == counts
    if not sparse:
        assert torch.equal(other, kept)
    for each in (rows, state):
        each.close()


def test_steps_of_rows_that_cannot_be(model):
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match='"global" or "row", not \'own\''):
        SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings", step="own")
    with SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings", step="row") as state:
        state.optInit()
        with pytest.raises(RuntimeError, match="no closure"):
            optimizer.step(lambda: 0.0)


def test_an_optimizer_of_somebody_else():
    torch.manual_seed(0)
    model = Model()
    optimizer = Plain([model.u_embeddings.weight])
    with (
        SpeedTorch.ModelFactory(model.u_embeddings, V, D) as rows,
        SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings") as state,
    ):
        rows.zerosInit()
        state.optInit()
        assert state.optVarList == ["mass", "visits", "norm"]
        for ids in ([3, 4], [4, 5, 6], [4]):
            rows.beforeForwardPass(ids)
            state.beforeForwardPass(ids)
            model.u_embeddings(torch.arange(len(ids))).sum().backward()
            optimizer.step()
            rows.afterOptimizerStep(ids)
            state.afterOptimizerStep(ids)
        found = state.getNumpyVersion()
        visits = np.zeros(V, int)
        visits[[3, 4, 5, 6]] = [1, 3, 1, 1]
        assert found["visits"].tolist() == visits.tolist()
        assert found["mass"][:, 0].tolist() == (2 + visits).tolist()
        assert found["norm"].shape == (V, 1)
        np.testing.assert_allclose(found["norm"][:, 0], visits * math.sqrt(D), rtol=1e-6)
        assert optimizer.state[model.u_embeddings.weight]["calls"] == 103


def test_an_optimizer_that_keeps_more_than_numbers():
    """It makes its own state in the first step, as always."""

    class Logging(Plain):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if not self.state[p]:
                        self.state[p]["log"] = []
                        self.state[p]["last"] = torch.zeros_like(p)
                    self.state[p]["log"].append(len(p))
                    self.state[p]["last"].copy_(p.grad)

    model = Model()
    optimizer = Logging([model.u_embeddings.weight])
    with SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings") as state:
        state.optInit()
        assert state.optVarList == ["last"]
        for ids in ([1, 2], [2, 3, 4]):
            model.u_embeddings.weight.grad = None
            model.u_embeddings.weight.data = torch.zeros(len(ids), D)
            state.beforeForwardPass(ids)
            model.u_embeddings.weight.grad = torch.tensor(ids).float()[:, None].expand(-1, D)
            optimizer.step()
            state.afterOptimizerStep(ids)
        assert state.getNumpyVersion()["last"][:6, 0].tolist() == [0, 1, 2, 3, 4, 0]
        assert optimizer.state[model.u_embeddings.weight]["log"] == [2, 3]


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
def test_optimizers_that_mix_rows_are_refused(name, model):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    optimizer = getattr(torch.optim, name)([model.u_embeddings.weight])
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings")


def test_an_optimizer_of_somebody_else_that_mixes_rows_is_refused(model):
    class Trust(Plain):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data -= group["lr"] * p.data.norm() / p.grad.norm() * p.grad

    with pytest.raises(ValueError, match="Trust is not supported: .* other rows"):
        SpeedTorch.OptimizerFactory(Trust([model.u_embeddings.weight]), V, D, model, "u_embeddings")


def test_state_that_no_row_has_for_itself_is_refused(model):
    class Odd(Plain):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["columns"] = torch.zeros(1, p.shape[1])

    with pytest.raises(ValueError, match=r"'columns' of shape \(1, 5\)"):
        SpeedTorch.OptimizerFactory(Odd([model.u_embeddings.weight]), V, D, model, "u_embeddings")


def test_other_variables_of_the_optimizer_keep_their_state():
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings") as state:
        assert not optimizer.state[model.dense.weight]
        state.optInit()
        state.beforeForwardPass([1, 2])
        assert list(optimizer.state) == [model.dense.weight, model.u_embeddings.weight]


def test_the_state_of_a_batch_is_where_the_optimizer_looks(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings") as state:
        state.optInit()
        state.CUPYcorpi[1][4] = 3.0
        state.beforeForwardPass([[1], [4]])
        index = [n for n, _ in model.named_parameters()].index("u_embeddings.weight")
        found = optimizer.state_dict()["state"][index]
        assert found["exp_avg_sq"].tolist() == [[0] * D, [3] * D]
        assert found["step"] == 0
        optimizer.state_dict()["state"][index]["exp_avg"].fill_(2)
        state.afterOptimizerStep([[1], [4]])
        assert state.getNumpyVersion()["exp_avg"][:, 0].tolist() == [
            2 if row in (1, 4) else 0 for row in range(V)
        ]


def test_schedulers_change_the_rate():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    with (
        SpeedTorch.ModelFactory(model.u_embeddings, V, D) as rows,
        SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings") as state,
    ):
        rows.zerosInit()
        state.optInit()
        for _ in range(2):
            rows.beforeForwardPass([1])
            state.beforeForwardPass([1])
            model.u_embeddings(torch.arange(1)).sum().backward()
            optimizer.step()
            scheduler.step()
            rows.afterOptimizerStep([1])
            state.afterOptimizerStep([1])
        np.testing.assert_allclose(rows.getNumpyVersion()[1], -1 - 0.15)


# --- handles --------------------------------------------------------------------------------------


def test_live_handles(model):
    with SpeedTorch.ModelFactory(model.u_embeddings, V, D) as switcher:
        switcher.customInit(lambda t: t.copy_(torch.arange(V * D).reshape(V, D)))
        whole = np.arange(V * D, dtype=np.float32).reshape(V, D)
        handle = switcher.getCupyVar()
        assert handle.shape == (V, D)
        assert handle.dtype == torch.float32
        assert len(handle) == V
        keys = (
            *(0, -1, slice(3, 9), slice(None, None, -2), [1, -2], np.array([[2, 3], [2, 0]])),
            *((slice(None), 1), ([3, 3, 4], 0), ([3, 4], [0, 1]), (Ellipsis, slice(1, 3))),
            *(np.arange(V) % 3 == 0, torch.tensor([5, 6]), torch.arange(V) > 20, range(4)),
            *((2, 3), (slice(1, 3), [4, 0]), np.int32(7), whole > 50, [], None),
        )
        for key in keys:
            plain = key.numpy() if isinstance(key, torch.Tensor) else key
            plain = list(plain) if isinstance(plain, range | list) else plain
            plain = np.array(plain, int) if isinstance(plain, list) else plain
            found = handle[key]
            assert isinstance(found, torch.Tensor), key
            assert found.shape == whole[plain].shape, key
            assert (found.numpy() == whole[plain]).all(), key
        for key, value in (
            (3, 5.0),
            ([4, 5], torch.full((2, D), 9.0)),
            (([6, 7], 1), np.array([1.0, 2.0])),
            ((slice(8, 10), slice(0, 2)), torch.zeros(2)),
            (whole > 100, -1.0),
            (slice(12, 15), torch.full((3, D), 4.0)),
            (slice(15, 3), 1.0),
            (slice(16, 20, 2), [[1.0], [2.0]]),
            (slice(20, None), np.arange(D)),
            (np.array([-1, -1]), [[1.0] * D, [2.0] * D]),
        ):
            handle[key] = value
            whole[key] = value.numpy() if isinstance(value, torch.Tensor) else value
            assert (np.asarray(handle) == whole).all(), key
            assert (handle.get() == whole).all()
            assert (switcher.getNumpyVersion() == whole).all()
        for key in (V, -V - 1, [0, V], (0, D), np.ones(V - 1, bool)):
            with pytest.raises(IndexError):
                handle[key]
            with pytest.raises(IndexError):
                handle[key] = 1.0
        wide = SpeedTorch.ModelFactory(model.v_embeddings, V, D, "float64")
        wide.zerosInit()
        wide.getCupyVar()[3] = [0.1] * D
        assert wide.getCupyVar()[3].tolist() == [0.1] * D  # not that of float32
        wide.close()
        with pytest.raises(ValueError, match="do not fit"):
            handle[[1, 2]] = torch.zeros(3, D)
        assert (switcher.getNumpyVersion() == whole).all()


# --- where rows live ------------------------------------------------------------------------------


def test_temporary_rows_go_with_the_object(model):
    switcher = SpeedTorch.ModelFactory(model.u_embeddings, V, D)
    switcher.zerosInit()
    folder = switcher.directory
    assert folder.is_dir()
    alive = weakref.ref(switcher)
    del switcher
    assert alive() is None
    assert not folder.exists()


def test_use_before_and_after(model):
    switcher = SpeedTorch.ModelFactory(model.u_embeddings, V, D)
    for use in (switcher.getNumpyVersion, switcher.getCupyVar, switcher.flush):
        with pytest.raises(RuntimeError, match="ModelFactory has no rows yet: call zerosInit"):
            use()
    with pytest.raises(RuntimeError, match="no rows yet"):
        switcher.beforeForwardPass([1])
    switcher.close()
    switcher.zerosInit()
    switcher.close()
    switcher.close()
    with pytest.raises(ValueError, match="closed"):
        switcher.beforeForwardPass([1])
    optimizer = torch.optim.Adam(model.parameters())
    state = SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u_embeddings")
    with pytest.raises(RuntimeError, match="call optInit"):
        state.beforeForwardPass([1])


def test_rows_and_state_in_a_directory_go_on(tmp_path):
    def open_all(first):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.Adam([model.u_embeddings.weight], lr=0.1)
        rows = SpeedTorch.ModelFactory(model.u_embeddings, V, D, directory=tmp_path / "rows")
        state = SpeedTorch.OptimizerFactory(
            optimizer, V, D, model, "u_embeddings", directory=tmp_path / "state"
        )
        if first:
            rows.uniformDistributionInit(-1, 1)
            state.optInit()
        else:
            rows.resume()
            state.resume()
        return model, optimizer, rows, state

    def train(model, optimizer, rows, state, steps):
        for step in steps:
            ids = np.random.default_rng(step).integers(0, V, 6)
            rows.beforeForwardPass(ids)
            state.beforeForwardPass(ids)
            optimizer.zero_grad()
            loss_of(model.u_embeddings(torch.arange(6)), step).backward()
            optimizer.step()
            rows.afterOptimizerStep(ids)
            state.afterOptimizerStep(ids)

    parts = open_all(True)
    train(*parts, range(5))
    middle = parts[2].getNumpyVersion()
    parts[2].close()
    parts[3].close()
    assert (np.load(tmp_path / "rows" / "weight.npy")[:1] == middle[:1]).all()
    parts = open_all(False)
    assert (parts[2].getNumpyVersion() == middle).all()
    train(*parts, range(5, 9))
    assert parts[1].state[parts[0].u_embeddings.weight]["step"] == 9
    broken = [parts[2].getNumpyVersion(), parts[3].getNumpyVersion()]
    for part in parts[2:]:
        part.close()
    with pytest.raises(FileExistsError, match="resume"):
        open_all(True)
    with pytest.raises(em.StoreNotFoundError):
        SpeedTorch.ModelFactory(Model().u_embeddings, V, D, directory=tmp_path / "new").resume()
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="directory= or store="):
        SpeedTorch.ModelFactory(Model().u_embeddings, V, D).resume()
    for name in ("rows", "state"):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    parts = open_all(True)
    train(*parts, range(9))
    assert (parts[2].getNumpyVersion() == broken[0]).all()
    for name, rows in parts[3].getNumpyVersion().items():
        assert (rows == broken[1][name]).all()
    for part in parts[2:]:
        part.close()
    with pytest.raises(ValueError, match="has 23 x 5 elements of float32, not 24 x 5"):
        SpeedTorch.ModelFactory(
            Model().u_embeddings, V + 1, D, directory=tmp_path / "rows"
        ).resume()


def test_rows_and_state_in_one_store_commit_together(tmp_path):
    model = Model()
    optimizer = torch.optim.Adagrad([model.u_embeddings.weight], initial_accumulator_value=0.5)
    with em.open(tmp_path / "s", memory="16MiB") as store:
        rows = SpeedTorch.ModelFactory(model.u_embeddings, V, D, store=store, name="u")
        state = SpeedTorch.OptimizerFactory(
            optimizer, V, D, model, "u_embeddings", store=store, name="u"
        )
        rows.zerosInit()
        state.optInit()
        assert store.tables() == ["u", "u.numbers", "u.sum"]
        assert (store["u.sum"][:] == 0.5).all()
        rows.close()
        state.close()
        assert not store.closed
        with pytest.raises(ValueError, match="not both"):
            SpeedTorch.ModelFactory(model.u_embeddings, V, D, store=store, memory="1MiB")
        with pytest.raises(FileExistsError, match="resume"):
            SpeedTorch.ModelFactory(model.u_embeddings, V, D, store=store, name="u").zerosInit()


def test_tables_larger_than_their_memory(model):
    """A billion rows are made at once, trained through 16 MiB, and take no disk to speak of."""
    rows = 1_000_000_000
    ids = np.random.default_rng(0).integers(0, rows, 2000)
    ids[:3] = [0, rows - 1, rows // 2]
    optimizer = torch.optim.Adam([model.u_embeddings.weight], lr=0.1)
    with (
        SpeedTorch.ModelFactory(model.u_embeddings, rows, 128, memory="160MiB") as switcher,
        SpeedTorch.OptimizerFactory(
            optimizer, rows, 128, model, "u_embeddings", memory="320MiB"
        ) as state,
    ):
        switcher.uniformDistributionInit(-1, 1)
        state.optInit()
        assert switcher.store.memory == 160 << 20
        switcher.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        before = model.u_embeddings.weight.detach().clone()
        assert before.abs().mean() > 0.4
        assert before[1].abs().sum() > 0
        model.u_embeddings(torch.arange(2000)).sum().backward()
        optimizer.step()
        switcher.afterOptimizerStep(ids)
        state.afterOptimizerStep(ids)
        moved = switcher.getCupyVar()[ids]
        np.testing.assert_allclose(moved, before - 0.1, atol=1e-5)
        disk = sum(f.stat().st_blocks * 512 for f in switcher.directory.iterdir())
        assert disk < 200 << 20


def test_the_rows_of_the_next_batch_can_be_read_ahead(model):
    optimizer = torch.optim.Adam(model.parameters())
    ids = np.arange(0, 200_000, 1000)
    with (
        SpeedTorch.ModelFactory(model.u_embeddings, 200_000, 64, memory="4MiB") as rows,
        SpeedTorch.OptimizerFactory(
            optimizer, 200_000, 64, model, "u_embeddings", memory="4MiB"
        ) as state,
    ):
        rows.uniformDistributionInit(0, 1)
        state.optInit()
        assert rows.prefetch(ids[:100], ids[100:]).wait(30)
        assert [handle.wait(30) for handle in state.prefetch(ids)] == [True, True]
        for each in (rows, state):
            misses = each.store.stats()["total"]["misses"]
            assert misses > 0
            each.beforeForwardPass(ids)
            assert each.store.stats()["total"]["misses"] == misses
            with pytest.raises(em.RowIdError):
                each.prefetch([200_000])


def test_the_default_memory_is_bounded_by_the_machine(model, monkeypatch):
    from embermap.speedtorch import _home

    monkeypatch.setattr(_home, "_available", lambda: 800 << 20)
    assert _home.default_memory(4, 10) == 53 + (16 << 20)
    assert _home.default_memory(512, 100_000) == 51_200_000 * 4 // 3 + (16 << 20)
    assert _home.default_memory(512, 10**9) == 100 << 20
    monkeypatch.undo()
    assert _home._available() > 1 << 20
    with pytest.raises(ValueError, match="memory"):
        SpeedTorch.ModelFactory(model.u_embeddings, V, D, memory=-1)
    with pytest.raises(em.BudgetError):
        SpeedTorch.ModelFactory(model.u_embeddings, V, D, memory=10).zerosInit()


def test_a_child_leaves_the_rows_of_its_parent_alone(run_python):
    run_python(
        """
        import os, sys, torch
        import embermap.speedtorch as SpeedTorch
        module = torch.nn.Embedding(3, 4)
        switcher = SpeedTorch.ModelFactory(module, 10, 4)
        switcher.zerosInit()
        counts = SpeedTorch.COM(10)
        counts.comInit()
        child = os.fork()
        if child == 0:
            switcher.close()
            counts.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert switcher.directory.is_dir() and counts.directory.is_dir()
        switcher.beforeForwardPass([1, 2])
        counts.add([1], [2])
        """
    )


# --- the programs of old --------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "python" / "examples" / "speedtorch_word2vec.py"


def test_the_example_differs_from_the_old_program_by_one_line():
    lines = EXAMPLE.read_text().splitlines()
    found = [line for line in lines if "embermap" in line and not line.lstrip().startswith("#")]
    found = [line for line in found if "import" in line]
    assert found == ["import embermap.speedtorch as SpeedTorch  # was: import SpeedTorch"]


def test_the_example_learns_and_saves_what_it_learned(tmp_path):
    file = tmp_path / "words.npy"
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "300", "--save", file],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "learned"
    words = np.load(file, mmap_mode="r")
    assert words.shape == (20_000, 64)
    assert 0 < np.abs(words[:1000]).max() < 100
