"""Uninitialised outputs are NaN here, so that an element nobody writes is seen."""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty`, with which backends allocate, filled with NaN."""
    import torch

    real_empty = torch.empty

    def empty(*args, **kwargs):
        tensor = real_empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)
