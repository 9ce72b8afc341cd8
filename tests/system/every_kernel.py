"""Every kernel that a family has: all dtypes, head dimensions, biases and alignments."""

from collections.abc import Iterator

from op_builder.ops.instantiations import (
    CUDA_BIASES,
    CUDA_DTYPES,
    DIRECTIONS,
    FAMILIES,
    HEAD_DIM_TIERS,
    WIDE_TIER,
    CudaKernel,
    has_row,
)

BIASES = {"fwd": CUDA_BIASES, "bwd": ("none", "bias2")}


def every_kernel(family: str) -> Iterator[CudaKernel]:
    """For no architecture: their sources are the same for all. Those of float32 for compute
    capability 7.5 end at D = 96, as README says: 128 would need 67 KiB of shared memory.
    """
    for direction in DIRECTIONS:
        for dtype in CUDA_DTYPES:
            if not has_row(family, direction, dtype):
                continue
            wide = dtype in FAMILIES[family].wide.get(direction, ())
            for head_dim in (*HEAD_DIM_TIERS, *([WIDE_TIER] if wide else [])):
                if (family, direction, dtype, head_dim) == ("sm75", "bwd", "fp32", 128):
                    continue
                for bias in BIASES[direction]:
                    for aligned in (True,) if FAMILIES[family].aligned_only else (True, False):
                        yield CudaKernel(family, direction, dtype, head_dim, bias, aligned, arch="")
