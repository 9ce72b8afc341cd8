"""Small calls of the CUDA op for compute-sanitizer: `compute-sanitizer --tool memcheck python
tests/sanitize.py`.

Every dtype that the family has, aligned and ragged, forward and backward; without gradients too,
since a forward for nobody's backward writes no lse. Memory comes straight from CUDA so that a read
past a tensor's end is seen.
"""

import torch

from deepspeed4science import DS4Sci_EvoformerAttention
from op_builder import EvoformerAttnBuilder
from op_builder.instantiations import has_row

CALLS = (
    # N, Lq, Lk, H, D
    (2, 40, 40, 2, 32),
    (2, 37, 71, 1, 32),
    (1, 130, 130, 1, 16),
)
SM90_CALLS = ((3, 65, 200, 1, 128),)  # its wide tiles are made of several boxes
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}


def main():
    family = EvoformerAttnBuilder().family(torch.cuda.get_device_capability())
    dtypes = [dtype for name, dtype in DTYPES.items() if has_row(family, "fwd", name)]
    calls = CALLS + SM90_CALLS * (family == "sm90")
    for dtype in dtypes:
        for N, Lq, Lk, H, D in calls:
            q, k, v, bias1, bias2 = (
                torch.randn(*shape, device="cuda").to(dtype).requires_grad_()
                for shape in (
                    (1, N, Lq, H, D),
                    (1, N, Lk, H, D),
                    (1, N, Lk, H, D),
                    (1, N, 1, 1, Lk),
                    (1, 1, H, Lq, Lk),
                )
            )
            o = DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2])
            with torch.no_grad():
                assert torch.equal(DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2]), o)
            o.backward(torch.randn_like(o))
            torch.cuda.synchronize()
            assert all(t.grad.isfinite().all() for t in (q, k, v, bias1, bias2))
    print(f"sanitize: {len(dtypes) * len(calls)} calls of {family} done")


if __name__ == "__main__":
    main()
