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
from ._native import __version__

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
    # Weights
    "Weights",
    "load_safetensors",
]
