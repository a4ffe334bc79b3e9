"""The followers of topics, and their updates."""

from __future__ import annotations

from . import _errors
from ._buffers import Sample
from ._closing import Closing
from ._errors import Error
from ._native import Buffer as NativeBuffer
from ._native import TopicFollower as NativeFollower
from ._streams import Receiver
from .records import Peer


class Update(Closing):
    """What happened in a topic: `TopicFollower.receive`. A context manager that gives its sample back, if it has one."""

    __slots__ = ("__weakref__", "_native")

    _native: tuple[str, int, str, NativeBuffer | None, tuple[int, int] | None, tuple[str, str, str, str | None] | None]

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self._native[0]

    @property
    def epoch(self) -> int:
        """The publisher's run. The next publisher of the topic has another epoch, and numbers its publications anew."""
        return self._native[1]

    @property
    def kind(self) -> str:
        """`joined` (the first publisher of the topic), `reset` (a later one, whose format may differ), `sample`, `ended` (the publisher has
        finished), `crashed` (it died, or closed the stream without finishing it), or `failed`: it can't be joined, or has ended this
        subscription. If it is full or does not answer, it is tried again without another report."""
        return self._native[2]

    @property
    def sample(self) -> Sample | None:
        """The sample, if the kind is `sample`."""
        return None if self._native[3] is None else Sample(self._native[3])

    @property
    def peer(self) -> Peer | None:
        """The publisher's process, if the kind is `crashed`."""
        return None if self._native[4] is None else Peer(*self._native[4])

    @property
    def error(self) -> Error | None:
        """The error, if the kind is `failed`."""
        if self._native[5] is None:
            return None
        name, message, kind, hint = self._native[5]
        found: Error = getattr(_errors, name)(message, kind=kind, hint=hint)
        return found

    def close(self) -> None:
        """Closes the sample, if there is one. Closing twice does nothing."""
        if self._native[3] is not None:
            self._native[3].close()

    def __repr__(self) -> str:
        return f"<vmmfd.Update {self.topic}: {self.kind}>"


class TopicFollower(Receiver[Update]):
    """Receives from the publishers of topics: `Broker.follow_topics`. Stays through the ends of publishers and of the broker. Threads and
    tasks may share it: each update goes to one of them. A context manager that closes it.

    An iterable of `Update`, also for `async for`: the iteration ends only when another thread closes the follower. Each step closes the
    sample of the step before; its arrays remain valid. Raises `Invalid` after `close` and in a fork. An interrupted or cancelled call loses
    no update.
    """

    __slots__ = ()

    _native: NativeFollower
    _class = Update

    def topics(self) -> list[str]:
        """The topics whose publishers are joined now. Does not wait."""
        return self._native.topics()
