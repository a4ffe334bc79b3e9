"""The native half, internal but for `Array` and `Device`."""

__version__: str

# Arrays

# Broker

# PyTorch

# Weights
