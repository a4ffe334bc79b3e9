"""The types in this package's annotations. They are imported when `typing.get_type_hints` looks them up: importing `typing` alone takes
longer than this package."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from datetime import datetime as datetime
    from datetime import timedelta as timedelta
    from socket import socket
    from types import TracebackType as TracebackType
    from typing import Any as Any
    from typing import ClassVar as ClassVar
    from typing import Literal as Literal
    from typing import Self as Self
    from typing import TypeAlias, TypeVar
    from typing import Unpack as Unpack

    from torch import Tensor as Tensor
    from torch.nn import Module as Module

    from ._native import Device
    from ._options import ClaimOptions as ClaimOptions
    from ._options import GetOptions as GetOptions
    from ._options import PrepareOptions as PrepareOptions
    from ._options import UnparkOptions as UnparkOptions

    Path: TypeAlias = str | os.PathLike[str]
    Time: TypeAlias = float | timedelta
    DeviceName: TypeAlias = int | str | Device
    Digest: TypeAlias = str | Mapping[str, str]
    Json: TypeAlias = Mapping[str, Any]
    Rdma: TypeAlias = bool | Literal["auto"]
    Socket: TypeAlias = socket

    Result = TypeVar("Result")
else:
    _MODULES = {
        "Any": "typing",
        "ClaimOptions": "vmmfd._options",
        "ClassVar": "typing",
        "GetOptions": "vmmfd._options",
        "Literal": "typing",
        "Module": "torch.nn",
        "PrepareOptions": "vmmfd._options",
        "Self": "typing",
        "Tensor": "torch",
        "TracebackType": "types",
        "Unpack": "typing",
        "UnparkOptions": "vmmfd._options",
        "datetime": "datetime",
        "timedelta": "datetime",
    }

    def _aliases() -> dict[str, object]:
        import os
        from collections.abc import Mapping
        from datetime import timedelta
        from socket import socket
        from typing import Any, Literal

        from ._native import Device

        return {
            "DeviceName": int | str | Device,
            "Digest": str | Mapping[str, str],
            "Json": Mapping[str, Any],
            "Path": str | os.PathLike[str],
            "Rdma": bool | Literal["auto"],
            "Socket": socket,
            "Time": float | timedelta,
        }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        module = _MODULES.get(name)
        if module is None:
            found = _aliases().get(name)
            if found is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            return found
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError:
            if module.partition(".")[0] != "torch":
                raise
            # PyTorch is not installed.
            return import_module("typing").Any
