"""Uninitialised outputs are NaN here, so that an element nobody writes is seen, and a workspace's
bytes are all ones, which is NaN in every dtype: who reads before writing is seen too.
"""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty`, with which backends allocate, filled."""
    import torch

    real_empty = torch.empty

    def empty(*args, **kwargs):
        tensor = real_empty(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.fill_(torch.nan)
        elif tensor.dtype == torch.uint8:
            tensor.fill_(255)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def ran(monkeypatch):
    """Names of the CUDA kernels that calls were given, in order."""
    from deepspeed4science import backend_cuda

    names = []
    real = backend_cuda.CudaBackend._kernel

    def note(self, *arguments):
        kernel = real(self, *arguments)
        names.append(kernel.name)
        return kernel

    monkeypatch.setattr(backend_cuda.CudaBackend, "_kernel", note)
    return names
