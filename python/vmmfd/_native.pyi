"""The native half, internal but for `Array` and `Device`."""

__version__: str

# Arrays

# Broker

# PyTorch

# Weights

class Weights:
    def names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __getitem__(self, name: object, /) -> Array: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def metadata(self) -> str: ...
    @property
    def files(self) -> list[Path]: ...
    @property
    def digest(self) -> str | None: ...
    def entries(self) -> list[tuple[str, str, list[int], list[int] | None, int, int, str | None]]: ...

def load_safetensors(
    paths: Sequence[str],
    *,
    backend: str = "auto",
    device: int | str | Device | None = None,
    digest: bool = False,
    progress: Callable[[int, int], object] | None = None,
    threads: int | None = None,
) -> Weights: ...
