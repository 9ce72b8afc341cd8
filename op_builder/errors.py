"""Exceptions for kernels that cannot be compiled or loaded. `deepspeed4science.errors` has the
whole tree.
"""


class EvoformerError(Exception):
    """Root of everything this project raises on purpose."""


class BuildError(EvoformerError, RuntimeError):
    """A kernel could not be compiled or loaded."""


class ToolchainError(BuildError):
    """A compiler, ninja or the CUTLASS headers are missing or unfit; the message has the remedy."""


class UnfitToolkitError(ToolchainError):
    """A CUDA toolkit turned out not to compile. It is remembered: a second attempt chooses another
    one, if there is one.
    """


class CompileError(BuildError):
    """The compiler refused a source: its first error with its surroundings, the command, the log
    and a hint.
    """
