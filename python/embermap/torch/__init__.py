"""Tables in PyTorch: modules that look rows up, and optimizers that update them.

    embedding = em.torch.Embedding(table)           # where nn.Embedding would stand
    optimizer = em.torch.Optimizer([embedding])     # beside the optimizer of the dense part
    optimizer.zero_grad()
    loss = criterion(model(embedding(ids)), target)
    loss.backward()
    optimizer.step()
    em.torch.save(model, "model.pt", optimizer=[dense, optimizer])    # commits the tables

Nothing of the size of the table is ever made: a backward pass keeps the ids and gradients of its
batch, step() gives them to `Table.update`, and zero_grad() drops them. Weights, optimizer state
and step count live in the table and are made durable by `store.commit()`; `state_dict()` of the
module or the optimizer does not hold them. `Swap` trains a table with any optimizer of torch.
"""

from __future__ import annotations

from ._checkpoint import Checkpoint, load, save
from ._modules import Embedding, EmbeddingBag, EmbeddingCollection
from ._optimizer import Optimizer
from ._swap import Swap
from ._weight import Weight

__all__ = [
    "Checkpoint",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Optimizer",
    "Swap",
    "Weight",
    "load",
    "save",
]

for _name in __all__:  # what tracebacks, repr and pickles show
    globals()[_name].__module__ = "embermap.torch"
