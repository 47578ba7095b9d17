"""Errors of the portable engine: each is one line that names the operation, value, input or file it is about.

They derive from RuntimeError or ValueError. coremltools turns a RuntimeError of its native module into the warning
"you will not be able to run predict()", and hands the error to the caller at the first prediction.
"""


class PortableError(RuntimeError):
    """Base of every error while a model is read, compiled, loaded or run."""


class ProgramError(PortableError):
    """A model file that is damaged, inconsistent or not an ML Program."""


class UnsupportedOp(PortableError):
    """An operation for which the portable engine has no kernel."""


class ExecutionError(PortableError):
    """An operation that failed while it ran."""


class InputError(PortableError, ValueError):
    """A prediction's input or state that does not fit the model's description."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the error's type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
