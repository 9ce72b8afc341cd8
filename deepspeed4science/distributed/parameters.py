"""Gradients of parameters that every process has whole, while it has only a part of the inputs."""

# No `from __future__ import annotations`: DDP reads the annotations of a hook.
import torch
import torch.distributed as dist


def sum_gradients(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """A hook for `DistributedDataParallel.register_comm_hook(group, sum_gradients)`: gradients of
    parameters are summed over the processes of `group`, all if it is None; by default DDP takes
    their mean. The group is that of the dimensions of the mesh that shard the input. With FSDP2
    call `set_gradient_divide_factor(1.0)` instead.
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: future.value()[0]
    )
    return summed
