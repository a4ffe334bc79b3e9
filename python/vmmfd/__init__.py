"""Share GPU memory between processes without copies: arrays, a broker, and model weights that are loaded once."""

# Checked first: nothing else works in a sub-interpreter.
from ._native import _check_interpreter

_check_interpreter()
del _check_interpreter

# Broker
from . import records as records
from ._broker import Broker, connect
from ._buffers import Loan, Sample
from ._dtype import DType
from ._errors import (
    AlreadyExists,
    Crashed,
    Disconnected,
    Ended,
    Error,
    ExportError,
    Interrupted,
    Invalid,
    MismatchError,
    NoArray,
    NotFound,
    OutOfMemory,
    PermissionDenied,
    Timeout,
    Unsupported,
)
from ._follow import Follower
from ._handoff import serve, take
from ._lease import Claim, Lease, Prepared
from ._native import Array, Device, __version__, asarray, device_uuid, devices, empty, empty_like, same_device, share, zeros
from ._reduce import register_reducer
from ._order import Timeline
from ._streams import Publisher, Subscriber, publish, subscribe
from ._topics import TopicFollower, Update
from ._watch import Watch

# Weights
from ._weights import Weights, load_safetensors

__all__ = [
    # Broker
    "Broker",
    "Claim",
    "Follower",
    "Lease",
    "Prepared",
    "Watch",
    "connect",
    "register_reducer",
    # Errors
    "AlreadyExists",
    "Crashed",
    "Disconnected",
    "Ended",
    "Error",
    "ExportError",
    "Interrupted",
    "Invalid",
    "MismatchError",
    "NoArray",
    "NotFound",
    "OutOfMemory",
    "PermissionDenied",
    "Timeout",
    "Unsupported",
    "__version__",
    # Streams
    "Loan",
    "Publisher",
    "Sample",
    "Subscriber",
    "Timeline",
    "TopicFollower",
    "Update",
    "publish",
    "subscribe",
    # Weights
    "Weights",
    "load_safetensors",
    # Arrays
    "Array",
    "DType",
    "Device",
    "asarray",
    "device_uuid",
    "devices",
    "empty",
    "empty_like",
    "same_device",
    "serve",
    "share",
    "take",
    "zeros",
]

# Not imported from `typing`, whose import takes longer than this package's.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from . import torch as torch


def __getattr__(name: str) -> object:
    # Loaded on first use.
    if name == "torch":
        from importlib import import_module

        return import_module("vmmfd.torch")
    raise AttributeError(f"module 'vmmfd' has no attribute {name!r}")
