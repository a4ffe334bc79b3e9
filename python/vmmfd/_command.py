"""The console script `vmmfd`: executes the native command that the wheel carries."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process by the native `vmmfd`, with the same arguments. See execv(3)."""
    command = Path(__file__).with_name("_bin") / "vmmfd"
    try:
        os.execv(command, ["vmmfd", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"vmmfd: cannot execute {command}: {error.strerror}; install the package from a wheel")


if __name__ == "__main__":
    main()
