"""Uninitialised outputs are NaN, so that an element nobody writes is seen, and a workspace's bytes
are all ones, which is NaN in every dtype: who reads before writing is seen too.
"""

import torch


def poison_memory(setattr=setattr):
    """Whatever this package allocates with is filled from now on."""
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(place, name, _poisoning(getattr(place, name)))


def _poisoning(real):
    def empty(*args, **kwargs):
        tensor = real(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.requires_grad:
            tensor.fill_(torch.nan)
        elif tensor.dtype == torch.uint8:
            tensor.fill_(255)
        return tensor

    return empty
