from contextlib import contextmanager

_is_processed = False


@contextmanager
def weights_already_processed():
    global _is_processed
    _is_processed = True
    try:
        yield
    finally:
        _is_processed = False


def is_weights_pre_processed() -> bool:
    return _is_processed
