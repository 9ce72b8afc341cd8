"""This op in models that were written for another one, by one line.

    drop_in.switch("boltz")            boltz, boltzgen, protenix, openfold3, intellifold: functions
                                       of their own
    drop_in.use_as_deepspeed()         whatever imports DeepSpeed's function
    drop_in.use_as_cuequivariance()    whatever imports cuEquivariance's functions

Each switches at once and returns a context manager that switches back. For command lines there is
`python -m deepspeed4science run CLIENT ...`.
"""

from deepspeed4science.drop_in.clients import switch
from deepspeed4science.drop_in.import_hook import Switch
from deepspeed4science.drop_in.libraries import use_as_cuequivariance, use_as_deepspeed

__all__ = ["Switch", "switch", "use_as_cuequivariance", "use_as_deepspeed"]
