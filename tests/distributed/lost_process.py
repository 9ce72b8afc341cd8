"""A process ends in the middle of a call."""

import os

from deepspeed4science.distributed import ring_attention

from .sharded import Case, distribute, run_sharded


def rules(world):
    """The last process ends before dk, dv and dbias1 are added up."""
    inputs = Case("", ()).inputs(world.device)
    _, result = run_sharded(inputs, world.mesh(), ("Lq",))
    leave(world)
    result[2].full_tensor()
    raise AssertionError("nobody missed it")


def ring(world):
    """The last process ends before its keys have visited all others."""
    inputs = Case("", ()).inputs(world.device)
    mesh = world.mesh()
    q, k, v = (distribute(x, mesh, [2]) for x in (inputs.q, inputs.k, inputs.v))
    leave(world)
    ring_attention(q, k, v)
    raise AssertionError("nobody missed it")


def leave(world):
    if world.rank == world.size - 1:
        os._exit(3)


def of_rules(size):
    return {"end": rules}


def of_ring(size):
    return {"end": ring}
