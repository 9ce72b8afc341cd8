"""Uninitialised outputs are NaN here, so that an element nobody writes is seen."""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty` filled with NaN, through the function that backends allocate with."""
    import torch

    real_empty = torch.empty

    def empty(*args, **kwargs):
        tensor = real_empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr("deepspeed4science.backends.torch.empty", empty)
