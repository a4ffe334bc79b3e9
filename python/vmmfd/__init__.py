"""GPU memory shared between processes, without copies: arrays, a broker, and model weights that are loaded once."""

from ._errors import (
    Denied,
    Differs,
    Disconnected,
    Error,
    Exists,
    ExportError,
    Interrupted,
    Invalid,
    NotFound,
    OutOfMemory,
    Timeout,
    Unsupported,
)
from ._native import Array, Device, __version__, asarray, device_uuid, devices, empty, same_device

# Weights
from ._weights import Weights, load_safetensors

__all__ = [
    "Denied",
    "Differs",
    "Disconnected",
    "Error",
    "Exists",
    "ExportError",
    "Interrupted",
    "Invalid",
    "NotFound",
    "OutOfMemory",
    "Timeout",
    "Unsupported",
    "__version__",
    # Arrays
    "Array",
    "Device",
    "asarray",
    "device_uuid",
    "devices",
    "empty",
    "same_device",
    # Weights
    "Weights",
    "load_safetensors",
]
