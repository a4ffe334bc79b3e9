"""The calls of cuda.bindings that several scripts share. Import it inside a handler for ModuleNotFoundError."""

from __future__ import annotations

from typing import Any

import numpy
from cuda.bindings import driver


def call(answer: tuple[Any, ...]) -> Any:
    """Returns the results of a driver call, whose code must be success."""
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver says {code!r}")
    return values[0] if len(values) == 1 else values


def words_from(address: int, count: int) -> numpy.ndarray:
    """Copies words out of device memory."""
    words = numpy.empty(count, numpy.uint32)
    call(driver.cuMemcpyDtoH(words.ctypes.data, address, words.nbytes))
    return words


def put_words(address: int, words: numpy.ndarray) -> None:
    """Copies words into device memory. Blocks until the copy is complete."""
    call(driver.cuMemcpyHtoD(address, words.ctypes.data, words.nbytes))
    # A copy from pageable memory returns when the source is read, not when the data has arrived.
    call(driver.cuCtxSynchronize())
