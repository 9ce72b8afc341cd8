"""What the numeric tests share."""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    import torch

    from tests.numeric.poison import poisoning

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))


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
