"""The op over many processes, on PyTorch's DTensor and process groups (docs/many-gpus.md). Nothing
here is loaded unless it is used.
"""
