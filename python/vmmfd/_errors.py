"""The exceptions of this package: each derives from `Error` and from the matching built-in exception.

A name says what went wrong, as an adjective, or as a noun; a noun that does not say so alone ends in `Error`.
"""

from __future__ import annotations

from errno import EACCES, ECONNRESET, EEXIST, EINTR, ENOENT, ETIMEDOUT

from . import records


class Error(Exception):
    """The base of all exceptions that this package defines.

    `kind` is the class of error for programs: `usage`, `unsupported`, `object`, `peer`, `system` or `interrupted`, as in the commands'
    `--json`. `hint` is the suggested next step, or None; it is also a note of the exception. Subclasses of `OSError` have their `errno`,
    and the message as `strerror`.
    """

    kind: str
    hint: str | None
    # Set by subclasses of `OSError`.
    _errno: int | None = None

    def __init__(self, message: str = "", *, kind: str = "usage", hint: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint
        if self._errno is not None:
            for name, value in (("errno", self._errno), ("strerror", message)):
                setattr(self, name, value)
        if hint:
            self.add_note(hint)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Invalid(Error, ValueError):
    """An argument or a combination of arguments is invalid."""


class NotFound(Error, FileNotFoundError):
    """There is no such object, or no broker at the path of a first connection."""

    _errno = ENOENT


class NoArray(NotFound, KeyError):
    """The object has no such array or part, or it was not requested."""


class AlreadyExists(Error, FileExistsError):
    """The name is taken."""

    _errno = EEXIST


class MismatchError(Error, ValueError):
    """The object differs from the expected one."""


class PermissionDenied(Error, PermissionError):
    """This user lacks permission."""

    _errno = EACCES


class Timeout(Error, TimeoutError):
    """The caller's timeout expired."""

    _errno = ETIMEDOUT


class Disconnected(Error, ConnectionError):
    """The process at the other end is gone, silent, or does not speak the protocol."""

    _errno = ECONNRESET


class Crashed(Disconnected):
    """The publisher of a stream died, or closed the stream without finishing it. `peer` is its process."""

    peer: records.Peer | None

    def __init__(
        self, message: str = "", *, kind: str = "usage", hint: str | None = None, peer: records.Peer | None = None
    ) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.peer = peer


class Ended(Error, EOFError):
    """The publisher has finished the stream, and this subscriber has received the last buffer that it gets."""


class OutOfMemory(Error, MemoryError):
    """The device or this process has not enough free memory."""


class Unsupported(Error, NotImplementedError):
    """This machine, driver or device does not support the operation."""


class ExportError(Error, BufferError):
    """The memory cannot be exported to another library as requested."""


class Interrupted(Error, InterruptedError):
    """The connection was closed while the call waited."""

    _errno = EINTR


# Tracebacks name the public module.
for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, Error):
        _class.__module__ = __name__.partition(".")[0]
del _class
