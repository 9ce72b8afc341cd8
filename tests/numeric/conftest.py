"""Fixtures of the numeric tests."""

import sys

import pytest


@pytest.fixture(autouse=True)
def memory_for_other_processes():
    """Gives back what a large test leaves in PyTorch's cache: tests in parallel share one GPU."""
    yield
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    from tests.numeric.poison import poison_memory

    poison_memory(monkeypatch.setattr)


@pytest.fixture
def one_thread():
    """One thread, for many small calls: threads would spend most of the time waiting for each
    other.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def kernels_only(monkeypatch):
    """Kernels compute calls of few scores too, on a GPU as well."""
    from deepspeed4science import few_scores

    monkeypatch.setattr(few_scores, "MOST_SCORES", 0)


@pytest.fixture
def ran(monkeypatch, kernels_only):
    """Names of the kernels that ran, in order."""
    from deepspeed4science.backends.cpu import CpuBackend
    from deepspeed4science.backends.cuda import CudaBackend

    names = []
    for backend in (CpuBackend, CudaBackend):

        def note(self, kernel, *arguments, launch=backend.launch):
            names.append(kernel.name)
            return launch(self, kernel, *arguments)

        monkeypatch.setattr(backend, "launch", note)
    return names


@pytest.fixture
def only_sm90_runs(ran):
    """A forward and a backward run, and only kernels of Hopper's own."""
    yield
    assert {name[:8] for name in ran} == {"sm90_fwd", "sm90_bwd"}


@pytest.fixture
def plans(monkeypatch):
    """The plans of the CUDA kernels that ran, in order, each as a mapping by name."""
    from deepspeed4science.backends.cuda import CudaBackend

    found, launch = [], CudaBackend.launch

    def note(self, kernel, packed, device):
        words = kernel.plan(packed).split()
        found.append(dict(word.split("=") for word in words if "=" in word))
        return launch(self, kernel, packed, device)

    monkeypatch.setattr(CudaBackend, "launch", note)
    return found
