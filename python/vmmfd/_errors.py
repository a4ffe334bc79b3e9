"""The exceptions of this package: each derives from `Error` and from the built-in of its kind."""

from __future__ import annotations

from errno import EACCES, ECONNRESET, EEXIST, EINTR, ENOENT, ETIMEDOUT


class Error(Exception):
    """Everything that this package raises for reasons of its own.

    `kind` is the class that a program reacts to: `usage`, `unsupported`, `object`, `peer`, `system` or `interrupted`, as the commands'
    `--json` has it. `hint` says what to do, where that is known; it is a note of the exception too. A class that is an `OSError` has its
    `errno`, and the message as `strerror`.
    """

    kind: str
    hint: str | None
    # Of a class that is an `OSError`.
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
    """An argument, or a combination of them, makes no sense."""


class NotFound(Error, FileNotFoundError):
    """There is no such object, or no broker at the path."""

    _errno = ENOENT


class NoArray(NotFound, KeyError):
    """The object has no such array or part, or it was not asked for."""


class Exists(Error, FileExistsError):
    """There is an object of this name already."""

    _errno = EEXIST


class Differs(Error, ValueError):
    """The object is not as it was expected to be."""


class Denied(Error, PermissionError):
    """This user may not do it."""

    _errno = EACCES


class Timeout(Error, TimeoutError):
    """It did not happen in the time that the caller allowed."""

    _errno = ETIMEDOUT


class Disconnected(Error, ConnectionError):
    """The process at the other end is gone, silent, or does not speak the protocol."""

    _errno = ECONNRESET


class OutOfMemory(Error, MemoryError):
    """The device, or this process, has not as much memory free."""


class Unsupported(Error, NotImplementedError):
    """This machine, driver or device can't do it."""


class ExportError(Error, BufferError):
    """The memory can't be given to another library as asked."""


class Interrupted(Error, InterruptedError):
    """The connection was closed while the call waited."""

    _errno = EINTR
