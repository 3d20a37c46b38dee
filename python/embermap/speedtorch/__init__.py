"""SpeedTorch's classes over embermap's tables: old programs run with one import changed.

    import embermap.speedtorch as SpeedTorch      # was: import SpeedTorch

    switcher = SpeedTorch.ModelFactory(model.u_embeddings, 50_000, 128)
    switcher.uniformDistributionInit(-0.1, 0.1)
    state = SpeedTorch.OptimizerFactory(optimizer, 50_000, 128, model, "u_embeddings")
    state.optInit()

    switcher.beforeForwardPass(ids)               # rows and state of a batch come in,
    state.beforeForwardPass(ids)
    ...                                           # any optimizer of torch steps,
    switcher.afterOptimizerStep(ids)              # and they go back
    state.afterOptimizerStep(ids)

Names, order of arguments and defaults are SpeedTorch's. Every class takes more, by keyword:
`directory=` keeps the rows, `memory=` bounds how many are in memory at once, `store=` puts them
into an open store. Rows live in files and hot pages instead of arrays, so that they may be more
than memory; CuPy is not needed. docs/speedtorch.md has every name, and what is different.
"""

from __future__ import annotations

from ._counts import COM, COMMM, CountTable, CPUPytorchCOM, GPUPytorchCOM, PytorchCOM
from ._gadgets import DataGadget, DataGadgetMM
from ._models import (
    CPUPytorchModelFactory,
    GPUPytorchModelFactory,
    ModelFactory,
    ModelFactoryMM,
    PytorchModelFactory,
)
from ._optimizers import (
    CPUPytorchOptimizerFactory,
    GPUPytorchOptimizerFactory,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchOptimizerFactory,
)
from ._pinned import PMemory, my_pinned_allocator
from ._rows import Variable
from ._switcher import Base as _Common

# What were base classes and doubles of the same thing.
_CommonMM = _GPUPytorchCommon = _CPUPytorchCommon = _PytorchCommon = _Common
PMemoryMM = PMemory
my_pinned_allocatorMM = my_pinned_allocator

__all__ = [
    "COM",
    "COMMM",
    "CPUPytorchCOM",
    "CPUPytorchModelFactory",
    "CPUPytorchOptimizerFactory",
    "CountTable",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchCOM",
    "GPUPytorchModelFactory",
    "GPUPytorchOptimizerFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PMemory",
    "PMemoryMM",
    "PytorchCOM",
    "PytorchModelFactory",
    "PytorchOptimizerFactory",
    "Variable",
    "my_pinned_allocator",
    "my_pinned_allocatorMM",
]
