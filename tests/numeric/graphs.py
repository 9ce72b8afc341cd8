"""CUDA graphs: captures a step and replays it with other numbers."""

import torch


def replayed_and_direct(step, tensors):
    """Results of a captured `step`, replayed after every one of `tensors` has changed, and those of
    a plain call with the same numbers.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # compiles and loads outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    return captured, step()
