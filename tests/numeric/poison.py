"""Uninitialised outputs are NaN, so that an element nobody writes is seen, and a workspace's bytes
are all ones, which is NaN in every dtype: who reads before writing is seen too.
"""

import torch


def poisoning(real_empty):
    """`torch.empty`, with which backends allocate, filled."""

    def empty(*args, **kwargs):
        tensor = real_empty(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.fill_(torch.nan)
        elif tensor.dtype == torch.uint8:
            tensor.fill_(255)
        return tensor

    return empty
