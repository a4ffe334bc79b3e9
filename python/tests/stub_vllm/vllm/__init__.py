"""Stand-in for vLLM in the tests: the names that the load format uses, with vLLM's signatures, and as little behind them as works."""

__version__ = "0.33.0"
