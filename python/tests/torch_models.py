"""PyTorch modules for the tests, and their comparison."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn


class Net(nn.Module):  # type: ignore[misc]
    """Tied parameters, both kinds of buffers, views, and a tensor as a plain attribute."""

    def __init__(self, seed: int = 0, device: str | None = None) -> None:
        super().__init__()
        generator = None if device == "meta" else torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.empty(*shape, device=device) if device == "meta" else torch.randn(*shape, generator=generator)

        self.embed = nn.Embedding(11, 8, _weight=random(11, 8), device=device)
        self.norm = nn.BatchNorm1d(8, device=device)
        self.head = nn.Linear(8, 11, bias=False, device=device)
        self.head.weight = self.embed.weight
        whole = random(4, 8)
        self.first = nn.Parameter(whole[:2])
        self.last = nn.Parameter(whole[2:])
        self.turned = nn.Parameter(random(8, 5).T)
        self.nothing = nn.Parameter(torch.empty(0, 3, device=device))
        self.register_buffer("cache", torch.zeros(3, 8, device=device), persistent=False)
        self.register_buffer("table", random(5).double())
        self.plain = random(8)
        self.norm.note = random(2)
        if device != "meta":
            with torch.no_grad():
                self.norm.weight.copy_(random(8))
                self.norm.running_mean.copy_(random(8))

    def forward(self, x: Any) -> Any:
        y = self.norm(self.embed(x)) + self.plain + self.cache[0] + self.table.sum().float()
        y = torch.cat([self.first, self.last]).sum(0) + y + self.turned.sum(0)
        return self.head(y)


X = torch.tensor([1, 2, 3, 10])


def everything(module: Any) -> dict[str, Any]:
    found = dict(module.named_parameters(remove_duplicate=False))
    found |= dict(module.named_buffers(remove_duplicate=False))
    for path, sub in module.named_modules():
        found |= {f"{path}.{leaf}".lstrip("."): value for leaf, value in vars(sub).items() if isinstance(value, torch.Tensor)}
    return found


def assert_same(module: Any, other: Any) -> None:
    one, two = everything(module), everything(other)
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key
        assert one[key].dtype == two[key].dtype and one[key].stride() == two[key].stride(), key


def is_mapped(tensor: Any, lease: Any) -> bool:
    pieces = [(piece.address, piece.nbytes) for piece in lease.memory()]
    return any(address <= tensor.data_ptr() < address + size for address, size in pieces)
