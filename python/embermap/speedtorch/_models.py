"""Switchers of model weights: the rows of a batch come into a small weight and go back."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import _checks
from .. import init as initializers
from .._sparse import sparse_tensor
from .._store import Store
from .._table import Prefetch
from . import _files
from ._home import PathLike, Place
from ._rows import Variable, as_tensor, flat_ids
from ._switcher import Base, Custom, first_free, floating, fresh_seed, link_file


class Batch:
    """The rows that are in a weight now, and which of them are copies of one row."""

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        self.ids = ids
        self.rows = rows  # kept, so that no other batch gets the same memory meanwhile
        self._groups: tuple[Tensor, int] | None = None

    def groups(self, device: torch.device) -> tuple[Tensor, int] | None:
        """Number of each row's id among the distinct ones, and how many; None if all differ."""
        if self._groups is None:
            distinct, group = torch.unique(self.ids, return_inverse=True)
            self._groups = (group.to(device), distinct.numel())
        return None if self._groups[1] == self.ids.numel() else self._groups


def merge(grad: Tensor, group: Tensor, count: int) -> Tensor:
    """Give each copy of a row the sum of the gradients of all its copies.

    Summed in the order of the batch, halves in float32: the same bits each time.
    """
    if grad.layout != torch.sparse_coo:
        return _sums(grad, group, count)[group].to(grad.dtype)
    own = grad.coalesce()
    places = own.indices()[0]
    sums = _sums(own.values(), group[places], count)
    touched = torch.zeros(count, dtype=torch.bool, device=grad.device)
    touched[group[places]] = True
    copies = touched[group].nonzero().reshape(-1)
    return sparse_tensor(
        copies[None], sums[group[copies]].to(grad.dtype), grad.shape, is_coalesced=True
    )


def _sums(grads: Tensor, group: Tensor, count: int) -> Tensor:
    wide = grads.float() if grads.dtype in (torch.float16, torch.bfloat16) else grads
    sums = torch.zeros(count, *wide.shape[1:], dtype=wide.dtype, device=wide.device)
    if wide.device.type == "cpu":
        return sums.index_add_(0, group, wide)
    # Atomic additions of index_add_ would come in another order each time; this one sorts.
    return sums.index_put_((group,), wide, accumulate=True)


class ModelSwitcher(Base):
    """What the model factories have in common."""

    _first_steps: ClassVar[str] = (
        "zerosInit(), uniformDistributionInit(), normalDistributionInit(), customInit(), "
        "resume() or a load first"
    )
    _own_name: ClassVar[str] = "weight"

    def _begin(
        self,
        model_variable: Any,
        total_classes: Any,
        embed_dimension: Any,
        datatype: Any,
        *,
        directory: PathLike | None,
        memory: int | str | None,
        device: Any,
        store: Store | None,
        name: str | None,
        seed: int | None,
    ) -> None:
        weight = getattr(model_variable, "weight", None)
        if not isinstance(weight, Tensor):
            raise TypeError(
                "model_variable must be a module with a weight, such as nn.Embedding, not "
                f"{model_variable!r}"
            )
        self.model_variable = model_variable
        self.total_classes = _checks.integer(total_classes, "total_classes")
        self.embed_dimension = _checks.integer(embed_dimension, "embed_dimension")
        if self.embed_dimension == 0:
            raise ValueError("embed_dimension must be at least 1, not 0")
        self.datatype = self.dtype = datatype
        self._row_dtype = floating(datatype, "datatype")
        if seed is not None:
            _checks.integer(seed, "seed", most=2**64 - 1)
        if store is None and name is not None:
            raise ValueError("name= is for a store that is given: store=, name=")
        self._seed = seed
        self._name = name or self._own_name
        self._batch: Batch | None = None
        self._hook: Any = None
        self._hooked: weakref.ref[Tensor] | None = None
        self._settle(directory, memory, device, store)

    def _weight(self) -> Tensor:
        found: Tensor = self.model_variable.weight
        return found

    # --- first rows -------------------------------------------------------------------------------

    def zerosInit(self) -> None:
        """New rows of zeros."""
        self._make(initializers.Zeros())

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """New rows drawn evenly from [low, high); each is made when it is first needed."""
        low, high = _checks.number(low, "low"), _checks.number(high, "high")
        self._make(initializers.Uniform(low, high) if low != high else initializers.Constant(low))

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """New rows drawn from the normal distribution; each is made when it is first needed."""
        self._make(
            initializers.Normal(_checks.number(mean, "mean"), _checks.number(stdDev, "stdDev"))
        )

    def customInit(self, initFunction: Custom, *args: Any) -> None:
        """New rows by a function that fills a tensor in place, such as those of torch.nn.init.

        It is called once as initFunction(tensor, *args), with all rows as a CPU tensor of zeros
        over a temporary file: it takes disk and page cache, not the budget.
        """
        if not callable(initFunction):
            raise TypeError(f"initFunction must be callable, not {initFunction!r}")
        shape = (self.total_classes, self.embed_dimension)
        count = self.total_classes * self.embed_dimension
        with tempfile.TemporaryDirectory(
            prefix="embermap-speedtorch-", dir=self._directory_of_scratch()
        ) as folder:
            if count:
                flat = torch.from_file(
                    str(Path(folder) / "rows"),
                    shared=True,
                    size=count,
                    dtype=self._row_dtype,
                    device="cpu",
                )
                whole = flat.reshape(shape)
            else:
                whole = torch.zeros(shape, dtype=self._row_dtype, device="cpu")
            with torch.no_grad():
                initFunction(whole, *args)
            self._make(initializers.Zeros())
            self._variable().fill(whole)

    def _directory_of_scratch(self) -> Path | None:
        """Beside the rows, where there is room for as many bytes again."""
        if self._directory is None:
            return None
        parent = Path(self._directory).absolute().parent
        return parent if parent.is_dir() else None

    def resume(self) -> None:
        """Go on with the rows that `directory=`, or the table of `store=`, has from before.

        Raises NotFoundError (there are none), ValueError (of another shape or dtype).
        """
        self._make(initializers.Zeros(), resume=True)

    def _make(self, init: initializers.Initializer, *, resume: bool = False) -> None:
        seed = self._seed if self._seed is not None else fresh_seed()
        shape = (self.embed_dimension,)
        self._create(
            self.total_classes, {self._name: (shape, self._row_dtype, init)}, seed, resume=resume
        )

    def _variable(self) -> Variable:
        return self._live().variables[self._name]

    # --- batches ----------------------------------------------------------------------------------

    def variableTransformer(
        self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None
    ) -> Any:
        """The indexes that a model is called with: places in the batch, not ids.

        Returns an int64 array of shape (batchSize, posPerBatch); with negPerBatch a tuple of it and
        one of shape (batchSize, negPerBatch), whose places follow those of the first.
        """
        batch = _checks.integer(batchSize, "batchSize")
        positives = batch * _checks.integer(posPerBatch, "posPerBatch")
        first = np.arange(positives, dtype=np.int64).reshape(batch, int(posPerBatch))
        if negPerBatch is None:
            return first
        negatives = batch * _checks.integer(negPerBatch, "negPerBatch")
        second = np.arange(positives, positives + negatives, dtype=np.int64)
        return first, second.reshape(batch, int(negPerBatch))

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Replace the model's weight by the rows of a batch, of shape (n, embed_dimension).

        Row i is that of the i-th id: the positives in row-major order, then the negatives. Ids are
        integers of any shape in arrays, tensors or lists. The weight stays on its device; its
        gradient, which is of other rows, is dropped. Of ids given several times each has a copy,
        and in a backward pass each copy gets the sum of their gradients, so that all of them go
        through the optimizer's step alike.

        Raises RowIdError, an IndexError, which names the first bad id: nothing has changed then.
        """
        variable = self._variable()
        weight = self._weight()
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes, variable._reach())
        rows = variable.gather(ids).to(weight.device)
        self._watch(weight)
        with torch.no_grad():
            weight.grad = None
            if weight.shape != rows.shape:
                # A graph of the last batch, if one is alive, has a node that accumulates gradients
                # of the old shape. torch makes a new one for a new dtype only.
                other = torch.float64 if weight.dtype != torch.float64 else torch.float32
                weight.data = torch.empty(0, dtype=other, device=weight.device)
            weight.data = rows
        self._batch = Batch(ids, rows)

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Write the model's weight back to the rows of the same ids.

        Raises ValueError if there are not as many ids as rows in the weight, RowIdError: nothing
        has been written then.
        """
        variable = self._variable()
        rows = self._weight().detach()
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes, variable._reach())
        if rows.shape[0] != ids.numel():
            raise ValueError(
                f"{ids.numel()} ids, but the weight has {rows.shape[0]} rows: "
                "give afterOptimizerStep the ids that beforeForwardPass got"
            )
        variable.scatter(ids, rows.to(variable.dtype))

    def prefetch(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> Prefetch:
        """Read the rows of a batch to come into memory while this one computes. Returns at once.

        A hint, as Table.prefetch is, whose handle this returns; it may be ignored. Raises
        RowIdError.
        """
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes, torch.device("cpu"))
        return self._variable().table.prefetch(ids)

    def _watch(self, weight: Tensor) -> None:
        """Have gradients of copies of one row summed."""
        if not weight.requires_grad or (self._hooked is not None and self._hooked() is weight):
            return
        if self._hook is not None:
            self._hook.remove()
        switcher = weakref.ref(self)

        def gradient(grad: Tensor) -> Tensor | None:
            alive = switcher()
            return None if alive is None else alive._merged(grad)

        self._hook = weight.register_hook(gradient)  # type: ignore[no-untyped-call]
        self._hooked = weakref.ref(weight)

    def _merged(self, grad: Tensor) -> Tensor | None:
        batch = self._batch
        if batch is None or self._weight().data_ptr() != batch.rows.data_ptr():
            return None  # somebody else's rows are in the weight
        if grad.shape != batch.rows.shape:
            return None
        groups = batch.groups(grad.device)
        return None if groups is None else merge(grad, *groups)

    def close(self) -> None:
        super().close()
        if self._hook is not None:
            self._hook.remove()
            self._hook, self._hooked = None, None
        self._batch = None

    # --- all rows ---------------------------------------------------------------------------------

    def getNumpyVersion(self) -> NDArray[Any]:
        """All rows as a NumPy array in memory."""
        return self._variable().numpy()

    def _load(self, source: Any, file: Any) -> None:
        shape = (self.total_classes, self.embed_dimension)
        if tuple(source.shape) != shape:
            raise ValueError(
                f"{str(file)!r} has the shape {tuple(source.shape)}, the rows are {shape}"
            )
        kind = as_tensor(source[:0], "the file").dtype
        if kind != self._row_dtype:
            raise TypeError(
                f"{str(file)!r} is of {kind}, the rows are {self._row_dtype}: convert it first"
            )
        if self._tables is None:
            self._make(initializers.Zeros())
        self._variable().fill(source)


class _Numpy(ModelSwitcher):
    """Files of NumPy, as the families that were CuPy's have them."""

    def saveCupy(self, saveFileName: Any) -> None:
        """Write all rows to a .npy file, as numpy.save does, in blocks.

        The file appears under its name, to which ".npy" is added if it lacks it, when it is
        complete.
        """
        _files.save_npy(saveFileName, self._variable())

    def loadCupy(self, loadFileName: PathLike) -> None:
        """Take all rows from a .npy file, in blocks. Rows that were there before are replaced.

        Raises ValueError (shape), TypeError (dtype): nothing has changed then.
        """
        source = _files.open_npy(loadFileName)
        bfloat16 = source.dtype.kind == "V" and source.dtype.itemsize == 2  # as NumPy keeps it
        self._load(_Halves(source.view(np.int16)) if bfloat16 else source, loadFileName)


class _Halves:
    """bfloat16 rows of a file that NumPy knows no dtype for."""

    def __init__(self, bits: NDArray[Any]) -> None:
        self._bits = bits
        self.shape = bits.shape

    def __len__(self) -> int:
        return len(self._bits)

    def __getitem__(self, key: Any) -> Tensor:
        return torch.from_numpy(np.array(self._bits[key])).view(torch.bfloat16)


class _Torch(ModelSwitcher):
    """Files of torch, as the families of PyTorch tensors have them."""

    def saveTorch(self, saveFileName: Any) -> None:
        """torch.save() of all rows as one CPU tensor, which torch.load(weights_only=True) reads.

        Goes through a temporary file beside it, not through memory.
        """
        _files.save_torch(saveFileName, {"": self._variable()}, {})

    def loadTorch(self, loadFileName: PathLike) -> None:
        """Take all rows from what saveTorch(), or torch.save() of a tensor, wrote.

        Raises ValueError (shape), TypeError (dtype, no tensor): nothing has changed then.
        """
        found = _files.load_torch(loadFileName)
        if not isinstance(found, Tensor):
            raise TypeError(f"{str(loadFileName)!r} has no tensor, but a {type(found).__name__}")
        self._load(found, loadFileName)

    def getTorchVar(self) -> Variable:
        """A live handle of the rows: `variable[ids]` is a tensor."""
        return self._variable()


class ModelFactory(_Numpy):
    """Switches a module's weight between all rows and those of a batch; was CuPy's.

    Args:
        model_variable: the module, an nn.Embedding. Its number of rows does not matter.
        total_classes: rows in all.
        embed_dimension: elements of a row.
        datatype: float32, float64, float16 or bfloat16: a name, a NumPy dtype or torch's.
        CPUPinn: kept, and needed no more: rows lie in memory that kernels reach, in either case.
        directory: where the rows are kept; they are there the next time (`resume`). None: in a
            temporary directory, which is removed at the end.
        memory: bytes, or a text like "2GiB", for rows in memory; the others are on disk. None: for
            all of them, but at most an eighth of the memory that is available.
        device: "cuda", "cuda:1": kernels of that device move rows, "cpu": the CPU does. None: where
            the model's weight is.
        store: an open embermap.Store for the rows, instead of directory, memory and device.
        name: of the table in it; None: "weight".
        seed: of random first rows; None: from torch's generator, which torch.manual_seed() sets.
    """

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        CPUPinn: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.CPUPinn = CPUPinn
        self._begin(
            model_variable,
            total_classes,
            embed_dimension,
            datatype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            seed=seed,
        )

    def getCupyVar(self) -> Variable:
        """A live handle of the rows: `variable[ids]` is a tensor, np.asarray(variable) a copy."""
        return self._variable()

    @property
    def CUPYcorpus(self) -> Variable:
        """`getCupyVar()`."""
        return self._variable()


class PytorchModelFactory(_Torch):
    """Switches a module's weight between all rows and those of a batch; was torch tensors.

    Args:
        deviceType: "cuda" needs a device (CudaError without one), "cpu" does not. Either way the
            rows of a batch come to where the model's weight is.
        pinType: kept, and needed no more.
        model_variable, total_classes, embed_dimension, datatype, directory, memory, device, store,
            name, seed: as for ModelFactory.
    """

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        deviceType: str = "cuda",
        pinType: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.deviceType = deviceType
        self.pinType = pinType
        self._place, named = device_type(deviceType)
        self._begin(
            model_variable,
            total_classes,
            embed_dimension,
            datatype,
            directory=directory,
            memory=memory,
            device=named if device is None and store is None else device,
            store=store,
            name=name,
            seed=seed,
        )

    @property
    def pytorchGPUVar(self) -> Variable:
        """`getTorchVar()`."""
        return self._variable()


class GPUPytorchModelFactory(_Torch):
    """Switches a module's weight between all rows and those of a batch; was torch CUDA tensors.

    Needs a CUDA device (CudaError without one), unless it is given device="cpu". Rows lie in host
    memory that its kernels reach. The arguments are those of ModelFactory, without CPUPinn.
    """

    _place = "cuda"

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        self._begin(
            model_variable,
            total_classes,
            embed_dimension,
            datatype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            seed=seed,
        )

    @property
    def pytorchGPUVar(self) -> Variable:
        """`getTorchVar()`."""
        return self._variable()


class CPUPytorchModelFactory(_Torch):
    """Switches a module's weight between all rows and those of a batch; was pinned CPU tensors.

    Works with and without a GPU. The arguments are those of ModelFactory, without CPUPinn.
    """

    _place = "cpu"

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        self._begin(
            model_variable,
            total_classes,
            embed_dimension,
            datatype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            seed=seed,
        )

    @property
    def pytorchCPUVar(self) -> Variable:
        """`getTorchVar()`."""
        return self._variable()


class ModelFactoryMM(_Numpy):
    """Switches a module's weight between a file with all rows and those of a batch.

    The rows are in "DISKNAMEn.memmap/weight.npy", n the first number that is free, and, as a link,
    in "DISKNAMEn.memmap.cpy.npy", for numpy.load(..., mmap_mode="r"). The file has every row from
    the beginning, and what training did after `flush()`, `close()`, or the end of the process.

    Args:
        diskname: beginning of the name, with a directory or without.
        materialize: False leaves random first rows out of the file until they are first changed,
            which takes no time and no disk; it shows zeros there.
        directory: instead of diskname.
        model_variable, total_classes, embed_dimension, datatype, CPUPinn, memory, device, store,
            name, seed: as for ModelFactory.
    """

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        diskname: PathLike = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
        *,
        materialize: bool = True,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.diskname = diskname
        self.CPUPinn = CPUPinn
        self.fileName: str | None = None
        self._materialize = materialize
        self._numbered = directory is None and store is None
        self._begin(
            model_variable,
            total_classes,
            embed_dimension,
            datatype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            seed=seed,
        )

    def _make(self, init: initializers.Initializer, *, resume: bool = False) -> None:
        made = None
        if self._numbered and self._directory is None:
            if resume:
                raise ValueError(
                    "resume() needs directory=, the one whose rows are to be used: "
                    f"{str(self.diskname)!r} begins a new one"
                )
            made = first_free(str(self.diskname), ".memmap")
            self._directory = made
        try:
            super()._make(init, resume=resume)
        except BaseException:
            if made is not None:
                self._directory = None
                try_remove(made)
            raise
        table = self._variable().table
        if self._materialize and not isinstance(init, initializers.Zeros):
            table.materialize()
        if made is not None:
            self.fileName = str(made)
            link_file(table.path, Path(f"{made}.cpy.npy"))

    def getCupyMM(self) -> Variable:
        """A live handle of the rows: `variable[ids]` is a tensor, np.asarray(variable) a copy."""
        return self._variable()

    @property
    def CUPYmemmap(self) -> Variable:
        """`getCupyMM()`."""
        return self._variable()


def try_remove(folder: Path) -> None:
    """Remove a directory that was made for nothing."""
    shutil.rmtree(folder, ignore_errors=True)


def device_type(kind: Any) -> tuple[Place, Any]:
    """The place of a deviceType, and the device if it names one, as "cuda:1" does."""
    found = torch.device(kind)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"deviceType must be 'cuda' or 'cpu', not {kind!r}")
    place: Place = "cpu" if found.type == "cpu" else "cuda"
    return place, found if place == "cuda" and found.index is not None else None
