"""One line that makes a model, written for another op, use this one.

    drop_in.switch("boltz")            boltz, boltzgen, protenix, openfold3, intellifold: replaces
                                       functions of theirs
    drop_in.use_as_deepspeed()         for all that import DeepSpeed's function
    drop_in.use_as_cuequivariance()    for all that import cuEquivariance's functions

Each switches at once and returns a context manager that switches back. For command lines there is
`python -m deepspeed4science run CLIENT ...`.
"""

from deepspeed4science.drop_in.clients import switch
from deepspeed4science.drop_in.import_hook import Switch
from deepspeed4science.drop_in.libraries import use_as_cuequivariance, use_as_deepspeed

__all__ = ["Switch", "switch", "use_as_cuequivariance", "use_as_deepspeed"]
