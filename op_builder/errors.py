"""Why a kernel could not be made ready. `deepspeed4science.errors` draws the whole tree."""


class EvoformerError(Exception):
    """Root of everything this project raises on purpose."""


class BuildError(EvoformerError, RuntimeError):
    """A kernel could not be made ready."""


class ToolchainError(BuildError):
    """A compiler, ninja or the CUTLASS headers are missing or unfit; the message says how to mend
    it.
    """


class UnfitToolkitError(ToolchainError):
    """A CUDA toolkit turned out not to compile. This is known from now on: ask again, and another
    one is taken if there is one.
    """


class CompileError(BuildError):
    """The compiler refused a source: its first error with its surroundings, the command, the log
    and a hint.
    """
