"""Context managers, also for asyncio, that close themselves."""

from __future__ import annotations

from . import _types as t


class Closing:
    """A context manager that yields itself and closes itself."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __reduce__(self) -> t.Any:
        raise TypeError(f"a {type(self).__name__} can't be copied or pickled: the copy would close the original")

    def __enter__(self) -> t.Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: t.TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> t.Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: t.TracebackType | None
    ) -> None:
        from ._async import in_thread

        await in_thread(self.close)
