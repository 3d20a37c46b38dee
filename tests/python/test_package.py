"""The package itself: its imports, its stub, its documentation."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import embermap as em
import numpy as np
import pytest
from embermap import _core

PACKAGE = Path(em.__file__).resolve().parent


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", em.__version__)


def test_the_import_needs_neither_torch_nor_cupy_nor_ml_dtypes(run_python, tmp_path):
    code = """
        import sys
        for name in ("torch", "cupy", "ml_dtypes", "h5py", "jax"):
            sys.modules[name] = None  # an import of it fails
        import numpy as np
        import embermap as em
        with em.open(sys.argv[1]) as store:
            table = store.create("t", rows=10, dim=2, optimizer=em.optim.Adagrad())
            table.update([1, 1], np.ones((2, 2), np.float32))
            table[3:5] = 1
            assert table.gather([3]).tolist() == [[1, 1]]
            half = store.create("b", rows=10, dim=2, dtype="bfloat16")
            try:
                half.gather([1])
            except ImportError as error:
                assert "ml_dtypes" in str(error)
            else:
                raise AssertionError
        try:
            em.torch
        except ImportError as error:
            assert "torch" in str(error)
        else:
            raise AssertionError
    """
    run_python(code, tmp_path / "store")


def test_torch_is_imported_when_it_is_first_used(run_python):
    pytest.importorskip("torch")
    run_python(
        """
        import sys, embermap as em
        assert "torch" not in sys.modules
        assert "torch" in dir(em)
        em.torch.Embedding
        assert "torch" in sys.modules
        import torch
        assert em.torch is not torch
        """
    )


def test_the_module_is_not_linked_to_cuda_or_torch():
    file = Path(_core.__file__)
    if not file.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
        pytest.skip("no extension module of its own")
    needed = subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"libcuda|libcudart|libtorch|libc10|libpython", needed)


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="colour"):
        em.colour  # noqa: B018


def test_everything_public_is_documented():
    bare = []
    for name in em.__all__:
        thing = getattr(em, name)
        if isinstance(thing, str):
            continue
        if not inspect.getdoc(thing):
            bare.append(name)
        if inspect.isclass(thing):
            bare += [
                f"{name}.{member}"
                for member, value in vars(thing).items()
                if not member.startswith("_")
                and (callable(value) or isinstance(value, property))
                and not inspect.getdoc(value)
            ]
    assert not bare


def test_the_stub_is_what_the_module_gives(tmp_path):
    nanobind = pytest.importorskip("nanobind", minversion="3")
    if nanobind.__version__.partition(".")[0] != "3":
        pytest.skip(f"the stub was written by nanobind 3, this is {nanobind.__version__}")
    made = tmp_path / "_core.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "embermap._core", "-o", made],
        check=True,
        timeout=120,
    )
    golden = PACKAGE / "_core.pyi"
    assert made.read_text() == golden.read_text(), (
        "the interface of _core has changed; write the stub anew: "
        "python -m nanobind.stubgen -m embermap._core -o python/embermap/_core.pyi"
    )
    assert (PACKAGE / "py.typed").exists()


def test_the_errors_are_also_the_builtin_ones():
    for error, builtin in (
        (em.RowIdError, IndexError),
        (em.NotFoundError, KeyError),
        (em.StoreNotFoundError, FileNotFoundError),
        (em.FormatError, ValueError),
        (em.CorruptError, OSError),
        (em.LockedError, OSError),
        (em.BudgetError, MemoryError),
        (em.CudaError, RuntimeError),
        (em.ForkError, ValueError),
    ):
        assert issubclass(error, builtin)
        assert issubclass(error, em.Error)
        assert str(error("what happened")) == "what happened"


def test_optimizers_and_initializers_are_values():
    assert em.optim.SGD(0.1) == em.optim.SGD(lr=0.1) != em.optim.SGD(0.2)
    assert len({em.optim.Adagrad(), em.optim.Adagrad(0.01)}) == 1
    assert em.init.Uniform(0, 1) == em.init.Uniform()
    with pytest.raises(AttributeError):
        em.optim.SGD(0.1).lr = 3
    assert repr(em.init.Normal(0, 0.02)) == "Normal(mean=0, std=0.02)"


def test_the_example_of_the_readme(tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "README.md"
    example = re.search(r"```python\n(.*?)```", readme.read_text(), re.S)[1]
    assert "em.open" in example
    example = example.replace('"8GiB"', '"128MiB"')  # what a small machine has
    if em.cuda_devices() == 0:
        example = example.replace('device="cuda"', "device=None")
    if importlib.util.find_spec("torch") is None:
        example = re.sub(r".*em\.torch.*", "", example)
    monkeypatch.chdir(tmp_path)
    grads = np.ones((4, 128), np.float32)
    names = {"ids": [3, 1, 4, 1], "next_ids": [5, 9], "grads": grads}
    exec(compile(example, readme, "exec"), names)
    assert names["rows"].shape == (4, 128)
    folder = re.search(r'em\.open\("([^"]+)"', example)[1]
    with em.open(folder, mode="r", memory="128MiB") as store:
        assert store["items"].step == 1
        assert store.commit_number >= 1


def test_the_example_of_the_package(tmp_path, monkeypatch):
    """What the interface is described by runs as it stands."""
    monkeypatch.chdir(tmp_path)
    ids, next_ids = [3, 1, 4, 1], [5, 9]
    grads = np.ones((4, 128), np.float32)
    with em.open("tables", memory="128MiB") as store:
        items = store.create(
            "items",
            rows=1_000_000_000,
            dim=128,
            optimizer=em.optim.Adagrad(lr=0.05),
            init=em.init.Normal(0, 0.02),
            seed=1,
        )
        rows = items.gather(ids)
        items.scatter(ids, rows)
        items.add(ids, rows)
        items.update(ids, grads)
        items.prefetch(next_ids)
        assert items[3:7].shape == (4, 128)
        assert items.view().shape == (1_000_000_000, 128)
        items.resize(2_000_000_000)
        assert items.stats()["rows_gathered"] >= 4
        store.commit()
    assert np.load("tables/items.npy", mmap_mode="r")["weight"].shape == (2_000_000_000, 128)
