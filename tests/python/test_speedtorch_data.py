"""SpeedTorch's data gadgets and files: arrays of any rank and dtype, in memory and in place."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import embermap as em
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import embermap.speedtorch as SpeedTorch  # noqa: E402

nn = torch.nn
GADGETS = ["DataGadget", "DataGadgetMM"]
SHAPES = [(7,), (6, 3), (5, 2, 3), (4, 1, 2, 3)]
DTYPES = [
    *("float64", "float32", "float16", "complex64", "complex128", "bool"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
]


def numbers(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


@pytest.fixture
def gadget_of(tmp_path):
    """gadget_of(kind, array): the gadget of a file with the array."""
    made = []

    def make(kind, array, **options):
        file = tmp_path / f"{len(made)}.npy"
        np.save(file, array)
        gadget = getattr(SpeedTorch, kind)(file, **{"device": "cpu", **options})
        gadget.gadgetInit()
        made.append(gadget)
        return gadget

    yield make
    for gadget in made:
        gadget.close()


@pytest.mark.parametrize("kind", GADGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(gadget_of, kind, dtype):
    array = numbers((6, 3), dtype)
    gadget = gadget_of(kind, array)
    found = gadget.getData([4, 0, 4])
    assert found.numpy().dtype == array.dtype
    assert (found.numpy() == array[[4, 0, 4]]).all()
    assert gadget.getNumpyVersion().dtype == array.dtype
    gadget.insertData(torch.from_numpy(array[[1]]), [5])
    array[5] = array[1]
    assert (gadget.getNumpyVersion() == array).all()


@pytest.mark.parametrize("kind", GADGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_and_kind_of_index(gadget_of, kind, shape):
    array = numbers(shape)
    gadget = gadget_of(kind, array)
    keys = [
        *(0, -1, slice(1, 4), slice(None, None, 2), [2, 0], np.array([[1, 1], [0, 2]]), Ellipsis),
        *(np.arange(shape[0]) > 1, torch.tensor([3, 1])),
    ]
    if len(shape) > 1:
        keys += [(slice(0, 2), slice(0, 1)), (slice(None), -1), ([0, 2], [0, 0]), (1, 0)]
    if len(shape) > 2:
        keys += [(slice(1, 3), slice(None), slice(0, 2)), (Ellipsis, 1), ([3], 0, [0, 1])]
    for key in keys:
        plain = key.numpy() if isinstance(key, torch.Tensor) else key
        found = gadget.getData(key)
        assert isinstance(found, torch.Tensor)
        assert found.shape == array[plain].shape, key
        assert (found.numpy() == array[plain]).all(), key
        gadget.insertData(found + 1, key)
        array[plain] = array[plain] + 1
        assert (gadget.getNumpyVersion() == array).all(), key
    with pytest.raises(IndexError):
        gadget.getData(shape[0])
    with pytest.raises(IndexError):
        gadget.insertData(torch.zeros(()), [0, shape[0]])
    assert (gadget.getNumpyVersion() == array).all()


@pytest.mark.parametrize("kind", GADGETS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">i2"])
def test_files_of_either_order(gadget_of, kind, order, dtype):
    array = np.asarray(numbers((6, 3), dtype), order=order)
    gadget = gadget_of(kind, array)
    assert (gadget.getData(slice(2, 5)).numpy() == array[2:5]).all()
    gadget.insertData(torch.zeros(3), 4)
    array[4] = 0
    assert (gadget.getNumpyVersion() == array).all()
    if kind == "DataGadgetMM":
        gadget.flush()
        found = np.load(gadget.fileName)
        assert found.dtype == np.dtype(dtype)
        assert (found == array).all()


def test_a_gadget_in_memory_leaves_its_file_alone(gadget_of):
    array = numbers((6, 3))
    gadget = gadget_of("DataGadget", array, CPUPinn=True)
    gadget.insertData(torch.ones(3), 2)
    gadget.flush()
    gadget.close()
    assert (np.load(gadget.fileName) == array).all()


@pytest.mark.parametrize("shape", [(6, 3), (5, 2, 3)])
def test_a_gadget_in_place_changes_its_file(gadget_of, shape):
    array = numbers(shape)
    gadget = gadget_of("DataGadgetMM", array)
    size = os.path.getsize(gadget.fileName)  # noqa: PTH202
    gadget.insertData(torch.full(shape[1:], -1.0), 2)
    gadget.close()
    array[2] = -1
    assert (np.load(gadget.fileName) == array).all()
    assert os.path.getsize(gadget.fileName) == size  # noqa: PTH202
    gadget.gadgetInit()  # once more
    assert (gadget.getNumpyVersion() == array).all()


def test_what_is_known_of_a_file_in_place_can_be_kept(tmp_path):
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", numbers((6, 3)))
    for number in range(2):
        with SpeedTorch.DataGadgetMM(
            tmp_path / "x.npy", directory=tmp_path / "s", device="cpu"
        ) as gadget:
            gadget.gadgetInit()
            gadget.insertData(torch.full((3,), 7.0), number)
    assert (np.load(tmp_path / "x.npy")[:2] == 7).all()
    with pytest.raises(ValueError, match=r"x.npy', not of .*y.npy"):
        SpeedTorch.DataGadgetMM(tmp_path / "y.npy", directory=tmp_path / "s").gadgetInit()
    with em.open(tmp_path / "s"):  # not left open by the error
        pass


def test_a_gadget_in_place_gives_positives_then_negatives(gadget_of):
    array = numbers((9, 3))
    gadget = gadget_of("DataGadgetMM", array)
    found = gadget.getData(np.array([[1], [3]]), np.array([[0, 8], [2, 2]]))
    assert (found.numpy() == array[[1, 3, 0, 8, 2, 2]]).all()


def test_data_goes_to_the_weight_of_a_model_and_back(gadget_of):
    """The use it was made for."""
    array = numbers((1000, 16))
    gadget = gadget_of("DataGadget", array, device="cpu")
    module = nn.Embedding(64, 16)
    ids = np.random.default_rng(0).permutation(1000)[:64]
    module.weight.data = gadget.getData(ids)
    module.weight.data *= 2
    gadget.insertData(module.weight.data, ids)
    array[ids] *= 2
    assert (gadget.getNumpyVersion() == array).all()


def test_the_last_of_a_row_that_is_written_twice_stays(gadget_of):
    gadget = gadget_of("DataGadget", numbers((4, 2)))
    gadget.insertData(torch.tensor([[1.0, 1], [2, 2], [3, 3]]), [1, 1, 1])
    assert gadget.getData(1).tolist() == [3, 3]
    gadget.insertData(torch.tensor([7.0, 8]), ([1, 1], 0))
    assert gadget.getData(1).tolist() == [8, 3]


def test_any_array_can_be_written(gadget_of):
    gadget = gadget_of("DataGadget", numbers((4, 2)))

    class Dlpack:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

    for data in ([5, 6], np.array([5, 6], ">i2"), torch.tensor([5, 6]), Dlpack(np.array([5.0, 6]))):
        gadget.insertData(torch.zeros(2), 1)
        gadget.insertData(data, 1)
        assert gadget.getData(1).tolist() == [5, 6]
    for data in ("x", None, {}, np.array(["x"]), [[1], [1, 2]]):
        with pytest.raises(TypeError, match="dataObject"):
            gadget.insertData(data, 1)
    with pytest.raises(ValueError, match="do not fit"):
        gadget.insertData(torch.zeros(3), [1, 2])


@pytest.mark.parametrize("kind", GADGETS)
def test_files_that_cannot_be_used(tmp_path, kind):
    make = getattr(SpeedTorch, kind)
    with pytest.raises(FileNotFoundError):
        make(tmp_path / "none.npy").gadgetInit()
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    with pytest.raises(TypeError, match="torch has"):
        make(tmp_path / "text.npy").gadgetInit()
    np.save(tmp_path / "objects.npy", np.array([{}, None], object))
    with pytest.raises(ValueError, match="[Oo]bject|Python"):
        make(tmp_path / "objects.npy").gadgetInit()
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00{'descr'")
    with pytest.raises(ValueError):  # noqa: PT011
        make(tmp_path / "torn.npy").gadgetInit()
    np.savez(tmp_path / "x.npz", a=np.zeros(2))
    with pytest.raises(ValueError, match="no .npy file"):
        make(tmp_path / "x.npz").gadgetInit()
    with pytest.raises(RuntimeError, match="gadgetInit"):
        make(tmp_path / "x.npy").getData(0)


def test_empty_and_single_arrays(tmp_path):
    np.save(tmp_path / "single.npy", np.array(3.0))
    np.save(tmp_path / "empty.npy", np.zeros((0, 4)))
    for name in ("single", "empty"):
        with pytest.raises(ValueError, match="nothing to index"):
            SpeedTorch.DataGadget(tmp_path / f"{name}.npy").gadgetInit()


def test_a_gadget_larger_than_its_memory(tmp_path):
    """48 MiB through 4 MiB."""
    array = numbers((200_000, 64), "float32")
    np.save(tmp_path / "x.npy", array)
    for kind in GADGETS:
        with getattr(SpeedTorch, kind)(tmp_path / "x.npy", memory="4MiB", device="cpu") as gadget:
            gadget.gadgetInit()
            ids = np.random.default_rng(1).integers(0, 200_000, 5000)
            assert (gadget.getData(ids).numpy() == array[ids]).all()
            gadget.insertData(torch.from_numpy(array[ids] + 1), ids)
            expected = array.copy()
            expected[ids] += 1
            gadget.saveCupy(tmp_path / "y.npy")
            assert (np.load(tmp_path / "y.npy") == expected).all()


def test_another_file_for_the_same_gadget(gadget_of, tmp_path):
    gadget = gadget_of("DataGadget", numbers((4, 2)))
    other = numbers((3, 5, 2), "int16", seed=2)
    np.save(tmp_path / "other.npy", other)
    gadget.loadCupy(tmp_path / "other.npy")
    assert (gadget.getData(2).numpy() == other[2]).all()
    assert (np.asarray(gadget.getCupyVar()) == other).all()
    assert gadget.CUPYcorpus.ndim == 3


# --- files of the switchers -----------------------------------------------------------------------

V, D = 40, 6


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = nn.Module()
    made.u = nn.Embedding(3, D)
    return made


def test_npy_files_are_those_of_numpy(model, tmp_path):
    with SpeedTorch.ModelFactory(model.u, V, D) as switcher:
        switcher.uniformDistributionInit(-1, 1)
        whole = switcher.getNumpyVersion()
        switcher.saveCupy(str(tmp_path / "rows"))  # numpy.save adds the suffix
        found = np.load(tmp_path / "rows.npy", mmap_mode="r")
        assert (found == whole).all()
        assert found.dtype == whole.dtype
        expected = io.BytesIO()
        np.save(expected, whole)
        assert (tmp_path / "rows.npy").read_bytes() == expected.getvalue()
        target = io.BytesIO()
        switcher.saveCupy(target)
        assert target.getvalue() == expected.getvalue()
        np.save(tmp_path / "mine.npy", np.asfortranarray(whole * 2))
        switcher.loadCupy(tmp_path / "mine.npy")
        assert (switcher.getNumpyVersion() == whole * 2).all()
    with SpeedTorch.ModelFactory(model.u, V, D) as switcher:
        switcher.loadCupy(tmp_path / "rows.npy")  # without rows of its own first
        switcher.beforeForwardPass([4])
        assert (model.u.weight.detach().numpy() == whole[4]).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.npy", "rows.npy"]


def test_bfloat16_files_and_arrays(model, tmp_path):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    array = np.arange(V * D).reshape(V, D).astype(bfloat16)
    np.save(tmp_path / "x.npy", array)
    with SpeedTorch.ModelFactory(model.u, V, D, "bfloat16") as switcher:
        switcher.loadCupy(tmp_path / "x.npy")
        assert (switcher.getNumpyVersion() == array).all()
        switcher.getCupyVar()[2] = array[3]
        assert switcher.getCupyVar()[2].equal(switcher.getCupyVar()[3])
        switcher.saveCupy(tmp_path / "y.npy")
        assert (tmp_path / "y.npy").stat().st_size == (tmp_path / "x.npy").stat().st_size
        switcher.loadCupy(tmp_path / "y.npy")
    with pytest.raises(TypeError, match="is of torch.bfloat16"):
        SpeedTorch.ModelFactory(model.u, V, D).loadCupy(tmp_path / "x.npy")


def test_files_of_torch_are_those_of_torch(model, tmp_path):
    with SpeedTorch.CPUPytorchModelFactory(model.u, V, D) as switcher:
        switcher.normalDistributionInit(0, 1)
        whole = switcher.getNumpyVersion()
        switcher.saveTorch(tmp_path / "rows.pt")
        found = torch.load(tmp_path / "rows.pt", weights_only=True)
        assert (found.numpy() == whole).all()
        target = io.BytesIO()
        switcher.saveTorch(target)
        target.seek(0)
        assert (torch.load(target, weights_only=True).numpy() == whole).all()
        for new in (True, False):  # SpeedTorch's time had the old format
            torch.save(found * 2, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
            switcher.zerosInit()
            switcher.loadTorch(tmp_path / "x.pt")
            assert (switcher.getNumpyVersion() == whole * 2).all()
        torch.save({"a": found}, tmp_path / "x.pt")
        with pytest.raises(TypeError, match="no tensor, but a dict"):
            switcher.loadTorch(tmp_path / "x.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.pt", "x.pt"]


def test_nothing_of_a_file_is_executed(model, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    torch.save(Evil(), tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([Evil()], object), allow_pickle=True)
    with pytest.raises(Exception, match="[Ww]eights"):
        SpeedTorch.CPUPytorchModelFactory(model.u, V, D).loadTorch(tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="[Oo]bject"):
        SpeedTorch.ModelFactory(model.u, V, D).loadCupy(tmp_path / "evil.npy")
    assert not (tmp_path / "executed").exists()


def test_a_file_that_cannot_be_written_leaves_the_old_one(model, tmp_path, monkeypatch):
    with SpeedTorch.ModelFactory(model.u, V, D) as switcher:
        switcher.zerosInit()
        (tmp_path / "rows.npy").write_text("old")

        def blocks():
            yield 0, np.zeros((2, D), np.float32)
            raise OSError(28, "no space left on device")

        monkeypatch.setattr(switcher.getCupyVar(), "blocks", blocks)
        with pytest.raises(OSError, match="no space"):
            switcher.saveCupy(tmp_path / "rows.npy")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.npy"]
    assert (tmp_path / "rows.npy").read_text() == "old"


def test_a_file_that_rows_are_in_is_not_written_over(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optimizer = torch.optim.Adagrad([model.u.weight])
    with (
        SpeedTorch.ModelFactoryMM(model.u, V, D, "x") as rows,
        SpeedTorch.CPUPytorchModelFactory(model.u, V, D, directory="d") as tensors,
        SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u", directory="s") as state,
    ):
        rows.zerosInit()
        tensors.zerosInit()
        state.optInit()
        for save, name in (
            (rows.saveCupy, "x0.memmap/weight.npy"),
            (rows.saveCupy, "x0.memmap.cpy"),  # the link to it
            (tensors.saveTorch, "d/weight.npy"),
            (state.saveCupy, "s/sum.npz"),
        ):
            with pytest.raises(ValueError, match="own directory"):
                save(name)
    for shape in ((4, 3), (4, 3, 2)):
        np.save("a.npy", numbers(shape))
        with SpeedTorch.DataGadgetMM("a.npy", device="cpu") as gadget:
            gadget.gadgetInit()
            with pytest.raises(ValueError, match="is the file of"):
                gadget.saveCupy("a")
            gadget.saveCupy("b")
            assert (np.load("b.npy") == numbers(shape)).all()
            target = io.BytesIO()
            gadget.saveCupy(target)
            assert target.getvalue() == Path("b.npy").read_bytes()


@pytest.mark.parametrize("family", ["numpy", "torch"])
def test_optimizer_state_and_steps_are_saved_and_go_on(model, tmp_path, family):
    def make(module):
        optimizer = torch.optim.NAdam([module.u.weight], lr=0.1)
        if family == "numpy":
            return optimizer, SpeedTorch.OptimizerFactory(optimizer, V, D, module, "u")
        return optimizer, SpeedTorch.CPUPytorchOptimizerFactory(optimizer, V, D, module, "u")

    def step(module, optimizer, rows, state, number):
        ids = np.random.default_rng(number).integers(0, V, 9)
        rows.beforeForwardPass(ids)
        state.beforeForwardPass(ids)
        optimizer.zero_grad()
        module.u(torch.arange(9)).pow(3).sum().backward()
        optimizer.step()
        rows.afterOptimizerStep(ids)
        state.afterOptimizerStep(ids)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.u = nn.Embedding(3, D)

    first = Module()
    optimizer, state = make(first)
    rows = SpeedTorch.ModelFactory(first.u, V, D, seed=3)
    rows.uniformDistributionInit(-1, 1)
    state.optInit()
    for number in range(4):
        step(first, optimizer, rows, state, number)
    rows.saveCupy(tmp_path / "rows.npy")
    if family == "numpy":
        state.saveCupy(tmp_path / "state")
        found = np.load(tmp_path / "state.npz")
        assert sorted(found) == ["exp_avg", "exp_avg_sq", "mu_product", "step"]
        assert found["step"] == 4
    else:
        state.saveTorch(tmp_path / "state")
        found = torch.load(tmp_path / "state", weights_only=True)
    for name, expected in state.getNumpyVersion().items():
        assert (np.asarray(found[name]) == expected).all()
    for number in range(4, 8):
        step(first, optimizer, rows, state, number)

    second = Module()
    optimizer, again = make(second)
    with SpeedTorch.ModelFactory(second.u, V, D) as loaded:
        loaded.loadCupy(tmp_path / "rows.npy")
        (again.loadCupy if family == "numpy" else again.loadTorch)(tmp_path / "state")
        for number in range(4, 8):
            step(second, optimizer, loaded, again, number)
        assert (loaded.getNumpyVersion() == rows.getNumpyVersion()).all()
        for name, expected in state.getNumpyVersion().items():
            assert (again.getNumpyVersion()[name] == expected).all()
        assert optimizer.state[second.u.weight]["step"] == 8
    for part in (rows, state, again):
        part.close()


def test_state_of_another_optimizer_or_shape_is_refused(model, tmp_path):
    def make(kind, rows=V, dim=D):
        optimizer = kind([model.u.weight], lr=0.1)
        return SpeedTorch.OptimizerFactory(optimizer, rows, dim, model, "u")

    with make(torch.optim.Adam) as state:
        state.optInit()
        state.saveCupy(tmp_path / "adam.npz")
    with make(torch.optim.Adagrad) as state:
        state.optInit()
        with pytest.raises(ValueError, match="has no 'sum', which Adagrad keeps"):
            state.loadCupy(tmp_path / "adam.npz")
    with make(torch.optim.Adam, rows=V + 1) as state:
        with pytest.raises(ValueError, match=r"shape \(40, 6\), the state is \(41, 6\)"):
            state.loadCupy(tmp_path / "adam.npz")
        np.savez(tmp_path / "x.npz", exp_avg=np.zeros((V + 1, D)), exp_avg_sq=np.zeros((V + 1, D)))
        with pytest.raises(TypeError, match="float64"):
            state.loadCupy(tmp_path / "x.npz")
        with pytest.raises(FileNotFoundError):
            state.loadCupy(tmp_path / "none")
        (tmp_path / "y.npz").write_text("no archive")
        with pytest.raises(ValueError, match="no .npz file"):
            state.loadCupy(tmp_path / "y.npz")
    # An archive that numpy.savez_compressed wrote will do as well.
    with make(torch.optim.Adagrad) as state:
        rows = np.random.default_rng(0).random((V, D), np.float32)
        np.savez_compressed(tmp_path / "z.npz", sum=rows, step=np.array(7.0))
        state.loadCupy(tmp_path / "z.npz")
        assert (state.getNumpyVersion()["sum"] == rows).all()
        state.beforeForwardPass([1])
        assert state.given_optimizer.state[model.u.weight]["step"] == 7


def test_state_that_speedtorch_saved_as_a_list(model, tmp_path):
    optimizer = torch.optim.Adam([model.u.weight])
    torch.save([torch.ones(V, D), torch.full((V, D), 2.0)], tmp_path / "list.pt")
    with SpeedTorch.CPUPytorchOptimizerFactory(optimizer, V, D, model, "u") as state:
        state.loadTorch(tmp_path / "list.pt")
        assert [float(rows.numpy().mean()) for rows in state.getTorchVar()] == [1, 2]
        torch.save([torch.ones(V, D)], tmp_path / "list.pt")
        with pytest.raises(TypeError, match="state of 2 tensors"):
            state.loadTorch(tmp_path / "list.pt")


def test_an_archive_that_ends_early(model, tmp_path):
    optimizer = torch.optim.Adagrad([model.u.weight])
    with SpeedTorch.OptimizerFactory(optimizer, V, D, model, "u") as state:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f4", "fortran_order": False, "shape": (V, D)}
        )
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("sum.npy", header.getvalue() + b"\0" * 100)
        with pytest.raises(ValueError, match="ends before its last row"):
            state.loadCupy(tmp_path / "x.npz")


# --- tables that are files ------------------------------------------------------------------------


def test_the_memmap_family_is_in_files(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optimizer = torch.optim.Adagrad([model.u.weight], lr=0.1, initial_accumulator_value=0.25)
    rows = SpeedTorch.ModelFactoryMM(model.u, V, D, diskname="words")
    state = SpeedTorch.OptimizerFactoryMM(optimizer, V, D, model, "u")
    rows.uniformDistributionInit(-1, 1)
    state.optInit()
    assert rows.fileName == "words0.memmap"
    assert state.fileName == "uAdagrad0.memmap"
    first = rows.getNumpyVersion()
    # Every row is there from the beginning, and under its old name.
    assert (np.load("words0.memmap.cpy.npy", mmap_mode="r") == first).all()
    assert (np.load("uAdagrad0.memmapsum.cpy.npy", mmap_mode="r") == 0.25).all()
    rows.beforeForwardPass([3, 5])
    state.beforeForwardPass([3, 5])
    model.u(torch.arange(2)).sum().backward()
    optimizer.step()
    rows.afterOptimizerStep([3, 5])
    state.afterOptimizerStep([3, 5])
    rows.flush()
    found = np.load("words0.memmap.cpy.npy")
    assert (found != first).any(axis=1).nonzero()[0].tolist() == [3, 5]
    assert (found == rows.getNumpyVersion()).all()
    state.close()
    assert np.load("uAdagrad0.memmapsum.cpy.npy")[:, 0].tolist() == [
        1.25 if row in (3, 5) else 0.25 for row in range(V)
    ]
    # The next one takes the next number.
    with SpeedTorch.ModelFactoryMM(model.u, V, D, "words") as other:
        other.zerosInit()
        assert other.fileName == "words1.memmap"
    rows.close()
    assert not list(tmp_path.glob("embermap-speedtorch-*"))
    # What is there can be gone on with.
    with SpeedTorch.ModelFactoryMM(model.u, V, D, directory="words0.memmap") as again:
        again.resume()
        assert (again.getNumpyVersion() == found).all()
    with pytest.raises(ValueError, match="directory="):
        SpeedTorch.ModelFactoryMM(model.u, V, D, "words").resume()


def test_a_memmap_whose_rows_are_made_when_they_are_needed(model, tmp_path):
    options = {"materialize": False, "seed": 1}
    with SpeedTorch.ModelFactoryMM(model.u, 10**8, D, str(tmp_path / "big"), **options) as rows:
        rows.normalDistributionInit(0, 1)
        rows.beforeForwardPass([0, 10**8 - 1])
        assert model.u.weight.abs().sum() > 0
        blocks = sum(f.stat().st_blocks for f in rows.directory.iterdir())
        assert blocks * 512 < 64 << 20


def test_files_are_complete_when_a_program_ends_without_a_word(run_python, tmp_path):
    code = """
        import sys, torch
        import numpy as np
        import embermap.speedtorch as SpeedTorch
        module = torch.nn.Embedding(3, 4)
        rows = SpeedTorch.ModelFactoryMM(module, 10, 4, sys.argv[1] + "/x")
        rows.zerosInit()
        rows.beforeForwardPass([7])
        module.weight.data += 5
        rows.afterOptimizerStep([7])
        temporary = SpeedTorch.ModelFactory(module, 10, 4)
        temporary.zerosInit()
        np.save(sys.argv[1] + "/a.npy", np.zeros((5, 2)))
        gadget = SpeedTorch.DataGadgetMM(sys.argv[1] + "/a.npy")
        gadget.gadgetInit()
        gadget.insertData(torch.ones(2), 3)
        counts = SpeedTorch.COMMM(10, sys.argv[1] + "/com")
        counts.comInit()
        counts.add([1], [2])
        print(temporary.directory)
    """
    done = run_python(code, tmp_path)
    assert done.stderr == ""
    assert not os.path.lexists(done.stdout.strip())
    assert np.load(tmp_path / "x0.memmap.cpy.npy").sum(axis=1).tolist() == [0] * 7 + [20, 0, 0]
    assert np.load(tmp_path / "a.npy")[:, 0].tolist() == [0, 0, 0, 1, 0]
    with SpeedTorch.COM(10, directory=tmp_path / "com0.memmap") as counts:
        counts.resume()
        assert counts[1, 2] == 1


def test_a_file_in_use_elsewhere(model, tmp_path):
    with SpeedTorch.ModelFactory(model.u, V, D, directory=tmp_path / "x") as rows:
        rows.zerosInit()
        with pytest.raises(em.LockedError):
            SpeedTorch.ModelFactory(model.u, V, D, directory=tmp_path / "x").resume()
