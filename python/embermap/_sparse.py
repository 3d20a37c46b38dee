"""Sparse tensors of torch as this package makes them: where their values are, and quietly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sparse_tensor(indices: Tensor, values: Tensor, size: Any, *, is_coalesced: bool) -> Tensor:
    """A sparse COO tensor over just this memory; indices are checked unless it is coalesced."""
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    with checks(checks.is_enabled()):  # torch warns where nobody has said whether to check
        return torch.sparse_coo_tensor(
            indices,
            values,
            size,
            device=values.device,  # else that of torch.set_default_device()
            check_invariants=None if is_coalesced else True,
            is_coalesced=True if is_coalesced else None,
        )
