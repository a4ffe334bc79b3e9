"""The log of a broker's outage."""

from __future__ import annotations

import logging


def report(path: object, waited: float, limit: float) -> None:
    """Logs, on behalf of a call that waits, that no broker answers. Called once for each outage of a `Broker`."""
    logging.getLogger(__name__.partition(".")[0]).warning(
        "no broker answers at %s for %.1f s: the call waits up to %g s for one (wait= and timeout= of vmmfd.connect); see "
        "`systemctl status vmmfd`, or start one with `vmmfd serve --socket %s`",
        path,
        waited,
        limit,
        path,
    )
