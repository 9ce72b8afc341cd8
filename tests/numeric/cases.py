"""The cases of the error law, as data with readable ids, and the devices to run them on."""

from dataclasses import dataclass

import pytest
import torch

from tests.numeric.law import Inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cuda_reason():
    """Why GPU cases are skipped here; None where they run."""
    if not torch.cuda.is_available():
        return "no CUDA device (torch.cuda.is_available() is False)"
    return None


def cuda_family():
    """The template family that runs on the GPU here."""
    from op_builder import EvoformerAttnBuilder

    return EvoformerAttnBuilder().family(torch.cuda.get_device_capability())


def sm90_marks():
    """Marks for modules about Hopper's own kernels, which are skipped where these do not run."""
    reason = _sm90_reason()
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(reason is not None, reason=reason or ""),
        pytest.mark.usefixtures("seed", "kernels_only"),
    ]


def _sm90_reason():
    """Why tests of Hopper's own kernels are skipped here; None where they run."""
    if reason := cuda_reason():
        return reason
    family = cuda_family()
    return None if family == "sm90" else f"the family here is {family}"


DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(cuda_reason() is not None, reason=cuda_reason() or ""),
        ],
    ),
]


@dataclass(frozen=True)
class Case:
    id: str
    B: int = 1
    N: int = 3
    Lq: int = 40
    Lk: int = 0  # 0: Lq
    H: int = 2
    D: int = 32
    Dv: int = 0  # 0: D
    bias1: bool = True
    bias2: bool = True
    by_chance: bool = False  # one draw breaks the law now and then: law.check_often

    def inputs(self, dtype, device):
        Lk, Dv = self.Lk or self.Lq, self.Dv or self.D

        def random(*shape):
            return torch.randn(*shape, device=device).to(dtype)

        return Inputs(
            random(self.B, self.N, self.Lq, self.H, self.D),
            random(self.B, self.N, Lk, self.H, self.D),
            random(self.B, self.N, Lk, self.H, Dv),
            random(self.B, self.N, 1, 1, Lk) if self.bias1 else None,
            random(self.B, 1, self.H, self.Lq, Lk) if self.bias2 else None,
        )


# Hopper: delta of most (b, n, h) is computed beside the kernel that needs it (later_delta.h).
LATER_DELTA = Case("later-delta", N=26, Lq=512, Lk=768, H=8, D=128)

SHAPES = [
    Case("typical", B=2, N=5, Lq=130, H=4),
    Case("one-key", Lq=1),
    Case("one-query-many-keys", N=40, Lq=1, Lk=77, by_chance=True),
    Case("one-key-many-queries", N=40, Lq=77, Lk=1),
    Case("L16", Lq=16),
    Case("L17", Lq=17),
    Case("L64", Lq=64),
    Case("L65", Lq=65),
    Case("L129", Lq=129, N=2),
    Case("L389", Lq=389, N=1, H=1),
    Case("Lq<Lk", Lq=50, Lk=150),
    Case("Lq>Lk", Lq=150, Lk=50),
    Case("no-bias", bias1=False, bias2=False),
    Case("bias1-only", bias2=False),
    Case("bias2-only", bias1=False),
    Case("D1", D=1, by_chance=True),
    *(Case(f"D{D}", D=D) for D in (7, 8, 15, 16, 17, 24, 31, 33, 48, 64, 80, 96, 100, 128)),
    Case("Dv>D", D=16, Dv=64),
    Case("Dv<D", D=64, Dv=24),
    Case("Dv-odd", D=32, Dv=13),
    Case("many-heads", H=9, Lq=20),
    Case("many-batches", B=7, N=1, H=1, Lq=20),
    Case("all-one", B=1, N=1, H=1, Lq=1, D=1),
]
