from contextlib import contextmanager


@contextmanager
def set_default_torch_dtype(dtype: "torch.dtype"):
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
