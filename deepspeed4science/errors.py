"""Every exception this project raises on purpose.

EvoformerError
├── InvalidInputError (ValueError)          wrong tensors or arguments: expected, got, what to do
├── NoBackendError (NotImplementedError)    no kernel takes this call: the reasons of every backend
├── DoubleBackwardError (NotImplementedError)  the gradient was differentiated again
├── ForwardModeError (NotImplementedError)  forward-mode derivatives (jvp, dual tensors) were asked
├── DropInError (RuntimeError)              a model or library is not as its drop-in expects it
├── KernelError (RuntimeError)              a kernel was launched and reported a failure
└── BuildError (RuntimeError)               a kernel could not be made ready
    ├── ToolchainError                      a compiler, ninja or CUTLASS is missing or unfit
    └── CompileError                        the compiler refused the source

`BuildError` and its children live in `op_builder.errors`, which knows nothing of torch; they are
re-exported here.
"""

from op_builder.errors import BuildError, CompileError, EvoformerError, ToolchainError

__all__ = [
    "BuildError",
    "CompileError",
    "DoubleBackwardError",
    "DropInError",
    "EvoformerError",
    "ForwardModeError",
    "InvalidInputError",
    "KernelError",
    "NoBackendError",
    "ToolchainError",
]


class InvalidInputError(EvoformerError, ValueError):
    """A tensor or argument breaks the contract; the message says expected, got and what to do."""


class NoBackendError(EvoformerError, NotImplementedError):
    """No backend takes this call; the message lists each backend's reasons."""


class DoubleBackwardError(EvoformerError, NotImplementedError):
    """The op's gradient was differentiated again; only first derivatives exist."""


class ForwardModeError(EvoformerError, NotImplementedError):
    """Forward-mode derivatives were asked for; only reverse-mode ones exist."""


class DropInError(EvoformerError, RuntimeError):
    """A model in whose code this op is to run is missing, of another version or has changed."""


class KernelError(EvoformerError, RuntimeError):
    """A kernel was launched and reported a failure; the message names the kernel."""
