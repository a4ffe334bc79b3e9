"""Loading a lease into a module: whether it fits, and the installation of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .. import _arguments
from .._errors import MismatchError
from ._base import _listed, _torch
from ._get import _Mapped, _Row, _warn_of_copies
from ._guard import _guard_module, _note
from ._items import _items, _written


class _Installed(NamedTuple):
    """A tensor installed in a module."""

    name: str
    owner: Any
    leaf: str
    kind: str
    address: int
    is_mapped: bool


def _held(owner: Any, kind: str) -> dict[str, Any]:
    """Returns the dict in which a module keeps its tensors of a kind."""
    held: dict[str, Any] = {"parameter": owner._parameters, "buffer": owner._buffers}.get(kind, owner.__dict__)
    return held


class _Filled(NamedTuple):
    """The result of loading a lease into a module."""

    # The names of the private copies.
    private: list[str]
    # Each private copy and its mapped source.
    copies: list[tuple[Any, Any]]
    installed: list[_Installed]


def _check_moved(installed: list[_Installed]) -> None:
    """Raises `MismatchError` if installed tensors of a module were replaced."""
    addresses = {each.address for each in installed}
    names = []
    for each in installed:
        if each.kind == "attribute":
            continue
        now = _held(each.owner, each.kind).get(each.leaf)
        if now is not None and now.numel() and now.data_ptr() not in addresses:
            names.append(each.name)
    if names:
        raise MismatchError(
            "the module's tensors were replaced, as by half(), to() or an assignment, and a new version would not reach them: "
            "load it again, or give ignore_moved=True. Replaced:" + _listed(names)
        )


def _refresh(copies: list[tuple[Any, Any]]) -> None:
    """Copies the mapped bytes into the private copies again, ordered on PyTorch's current stream."""
    torch = _torch()
    # One call copies all tensors of a type. It lacks some types of one byte.
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    with torch.no_grad():
        for private, source in copies:
            if private.dtype.is_floating_point and private.dtype.itemsize > 1:
                privates, sources = groups.setdefault((private.device, private.dtype), ([], []))
                privates.append(private)
                sources.append(source)
            else:
                private.copy_(source)
        for privates, sources in groups.values():
            torch._foreach_copy_(privates, sources)


def _owner(module: Any, name: str) -> tuple[Any, str]:
    path, _, leaf = name.rpartition(".")
    return (module.get_submodule(path) if path else module), leaf


class _Fit(NamedTuple):
    # The module's tensors by name: kind, tensor, and whether it is persistent.
    targets: dict[str, tuple[str, Any, bool]]
    # The array for each name, and its kind in the module.
    chosen: dict[str, tuple[_Row, str]]
    # Names of the module tied to another name, which the object has.
    follows: dict[str, str]
    problems: list[str]


def _fit(rows: list[_Row], module: Any, strict: bool) -> _Fit:
    """Compares an object with a module."""
    torch = _torch()
    targets = {item.name: (item.kind, item.tensor, item.persistent) for item in _items(module)}
    chosen: dict[str, tuple[_Row, str]] = {}
    problems: list[str] = []
    for row in rows:
        target = targets.get(row.name)
        if target is None:
            if strict and row.kind != "attribute":
                problems.append(f"{row.name}: the object has it ({row.kind}), but the module does not")
            continue
        if row.name in chosen:
            problems.append(f"{row.name}: the parts {chosen[row.name][0].part!r} and {row.part!r} have it: select one with parts=")
            continue
        kind, tensor, _ = target
        chosen[row.name] = (row, kind)
        if row.dtype is None:
            problems.append(f"{row.name}: PyTorch lacks its type {row.array.dtype}")
        elif not (row.kind == kind == "attribute") and not torch.nn.parameter.is_lazy(tensor):
            if tuple(tensor.shape) != tuple(row.array.shape):
                problems.append(f"{row.name}: shape {tuple(row.array.shape)}, but {tuple(tensor.shape)} in the module")
            if tensor.dtype != row.dtype:
                problems.append(f"{row.name}: type {row.dtype}, but {tensor.dtype} in the module")
    tied: dict[int, list[str]] = {}
    for name, (_, tensor, _) in targets.items():
        tied.setdefault(id(tensor), []).append(name)
    follows: dict[str, str] = {}
    for name, (kind, tensor, persistent) in targets.items():
        if name in chosen:
            continue
        leader = next((other for other in tied[id(tensor)] if other in chosen), None)
        if leader is not None:
            follows[name] = leader
        elif tensor.device.type == "meta" and not (strict and persistent):
            problems.append(f"{name}: it is on the meta device, and the object does not have it ({kind})")
        elif strict and persistent:
            problems.append(f"{name}: the module has it ({kind}), but the object does not")
    return _Fit(targets, chosen, follows, problems)


def _load(
    lease: Any, module: Any, *, strict: bool = True, writable_buffers: bool = True, private: Iterable[str] = ()
) -> _Filled:
    """Installs a lease's tensors in a module. Returns the state that a switch needs.

    Everything is checked first: one `MismatchError` lists all mismatches, and the module is then unchanged.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"into= takes a torch.nn.Module, not a {type(module).__name__}")
    named = set(_arguments.names(private, "private"))
    _arguments.flag(strict, "strict")
    _arguments.flag(writable_buffers, "writable_buffers")
    # Inside inference_mode, PyTorch would make them inference tensors.
    with torch.inference_mode(False):
        return _fill(lease, module, strict, writable_buffers, named)


def _fill(lease: Any, module: Any, strict: bool, writable_buffers: bool, named: set[str]) -> _Filled:
    mapped = _Mapped(lease)
    fit = _fit(mapped.rows, module, strict)
    problems = fit.problems + [
        f"{name}: private= names it, but it is not loaded" for name in sorted(named - fit.chosen.keys() - fit.follows.keys())
    ]
    if problems:
        of = f"version {lease.version} of {lease.name!r}"
        # The exception keeps this frame alive, which must not hold the lease.
        del mapped, fit
        raise MismatchError(f"{of} does not fit into the {type(module).__name__}:{_listed(problems)}")
    # Names tied only in the module share the bytes.
    chosen = fit.chosen | {name: (fit.chosen[leader][0], fit.targets[name][0]) for name, leader in fit.follows.items()}
    written = set() if mapped.copy_on_write else _written(module)
    # Tied names share a tensor as copies too.
    identities = {chosen[name][0].identity for name in named | written if name in chosen}
    writable_buffers = writable_buffers and not mapped.copy_on_write
    unasked = [name for name, (_, kind) in chosen.items() if writable_buffers and kind != "parameter" and name not in named]
    copies = [name for name, (row, kind) in chosen.items() if row.identity in identities or (writable_buffers and kind != "parameter")]
    remedy = "map them read-only with writable_buffers=False, if the module does not write to them"
    _warn_of_copies(lease, (chosen[name][0] for name in unasked), remedy)
    private_names = set(copies)
    mapped.will_copy(chosen[name][0] for name in copies)
    made: dict[str, Any] = {}
    tensors: dict[tuple[Any, ...], Any] = {}
    for name, (row, kind) in chosen.items():
        old = fit.targets[name][1]
        # Tied names share one tensor, except parameters that differ in the module: they become two with the same memory. A tensor without
        # elements has no memory: the module decides which are tied.
        tied = id(old) if 0 in row.array.shape else row.identity, name in private_names, _class(old) if kind == "parameter" else None
        if tied not in tensors:
            tensor = mapped.tensor(row, name in private_names)
            tensors[tied] = _parameter(tensor, old) if kind == "parameter" else tensor
        made[name] = tensors[tied]
    installed = _install(module, made, fit, private_names)
    if not mapped.copy_on_write:
        guarded = [each for each in installed if each.is_mapped]
        _note((_held(each.owner, each.kind)[each.leaf] for each in guarded), writable_buffers=writable_buffers)
        # Guard the module itself too: it refuses before any copy.
        for owner in {id(owner): owner for owner in (module, *(each.owner for each in guarded))}.values():
            _guard_module(owner)
    return _Filled(copies, list(mapped.private.values()), installed)


def _class(parameter: Any) -> tuple[Any, ...]:
    """Returns a parameter's class and attributes, to compare."""

    def value(of: Any) -> Any:
        try:
            hash(of)
        except Exception:
            return id(of)
        return type(of), of

    return type(parameter), frozenset((key, value(of)) for key, of in parameter.__dict__.items())


def _parameter(tensor: Any, old: Any) -> Any:
    """Returns a tensor as a parameter that replaces another: of the same class if possible, with its attributes."""
    base = _torch().nn.Parameter
    kind = type(old)
    # A class with its own dispatch may keep its bytes elsewhere, and a lazy parameter changes its class once it has a shape.
    if not issubclass(kind, base) or kind.__torch_dispatch__ is not base.__torch_dispatch__ or _torch().nn.parameter.is_lazy(old):
        kind = base
    # Without the constructor, whose arguments only the module's author knows.
    parameter = _torch().Tensor._make_subclass(kind, tensor, False)
    parameter.__dict__.update(old.__dict__)
    return parameter


def _install(module: Any, made: dict[str, Any], fit: _Fit, copies: set[str]) -> list[_Installed]:
    """Gives a module its tensors: all, or none if the module refuses one."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    installed: list[_Installed] = []
    name = ""
    try:
        for name, tensor in made.items():
            owner, leaf = _owner(module, name)
            kind, old, _ = fit.targets[name]
            held = _held(owner, kind)
            before.append((held, leaf, old))
            setattr(owner, leaf, tensor)
            is_there = held.get(leaf) is tensor
            if is_there and tensor.numel():
                installed.append(_Installed(name, owner, leaf, kind, tensor.data_ptr(), name not in copies))
    except BaseException as error:
        for held, leaf, old in before:
            held[leaf] = old
        if not isinstance(error, Exception):
            raise
        raise MismatchError(f"the {type(module).__name__} refuses to set {name!r}, and is unchanged: {error}") from error
    return installed
