"""Uninitialised outputs are NaN here, so that an element nobody writes is seen."""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty`, with which backends allocate, filled with NaN."""
    import torch

    real_empty = torch.empty

    def empty(*args, **kwargs):
        tensor = real_empty(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.fill_(torch.nan)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
