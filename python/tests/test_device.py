"""Devices: by ordinal, by UUID, and their comparison."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

import vmmfd


def test_host_device() -> None:
    (host,) = vmmfd.devices(backend="host")
    assert (host.ordinal, host.backend) == (0, "host")
    assert "no GPU" in host.name and host.uuid.startswith("HOST-")
    assert vmmfd.device_uuid(0, backend="host") == host.uuid == vmmfd.device_uuid(backend="host")
    assert host == vmmfd.devices(backend="host")[0] and hash(host) == hash(vmmfd.devices(backend="host")[0])
    assert host != host.uuid
    for named in (0, host, host.uuid, host.uuid.lower(), host.uuid[:14]):
        assert vmmfd.empty(1, "u1", device=named, backend="host").device == host


@pytest.mark.parametrize("named", [True, -1, "gpu0", 1.5, "", b"x", object()])
def test_invalid_device_is_refused(named: Any) -> None:
    with pytest.raises(vmmfd.Invalid if named in (-1, "gpu0", "") else TypeError, match="not a device"):
        vmmfd.empty(1, "u1", device=named, backend="host")


def test_missing_device_is_named() -> None:
    with pytest.raises(vmmfd.Error, match="HOST-"):
        vmmfd.empty(1, "u1", device=7, backend="host")
    with pytest.raises(vmmfd.Error):
        vmmfd.device_uuid(3, backend="host")
    with pytest.raises(vmmfd.Invalid, match="auto, cuda, host"):
        vmmfd.devices(backend="gpu")


def test_same_device() -> None:
    bare = "53e9a7d2-1f0c-5b7e-9c55-0123456789ab"
    same = [bare, f"GPU-{bare}", f"gpu-{bare.upper()}", f"MIG-{bare}", "GPU-53e9a7d2", "GPU-53e9a7d2-1f", uuid.UUID(bare), uuid.UUID(bare).bytes]
    for a in same:
        for b in same:
            assert vmmfd.same_device(a, b), (a, b)
    for other in ("GPU-53e9a7d3", "GPU-0", "12345678-1f0c-5b7e-9c55-0123456789ab", bytes(16)):
        for a in same:
            assert not vmmfd.same_device(a, other) and not vmmfd.same_device(other, a)
    (host,) = vmmfd.devices(backend="host")
    array = vmmfd.empty(1, "u1", backend="host")
    assert vmmfd.same_device(host, array) and vmmfd.same_device(array, host.uuid) and not vmmfd.same_device(array, bare)
    for nonsense in ("", "xyz", None, True, -1, "MIG-GPU-53e9a7d2-1f0c-5b7e-9c55-0123456789ab/1/0", "GPU-"):
        with pytest.raises(vmmfd.Invalid, match="names no device"):
            vmmfd.same_device(nonsense, bare)


@pytest.mark.fake
def test_ordinals_on_emulated_driver() -> None:
    (device,) = vmmfd.devices()
    assert device.backend == "cuda" and device.uuid.startswith("GPU-")
    assert vmmfd.same_device(0, device) and vmmfd.same_device("0", device.uuid) and vmmfd.same_device(device.uuid[:12], 0)
    assert not vmmfd.same_device(0, vmmfd.devices(backend="host")[0])
    with pytest.raises(vmmfd.Error):
        vmmfd.same_device(1, device)


@pytest.mark.cuda
def test_visible_devices_are_respected(child: Any) -> None:
    devices = vmmfd.devices(backend="cuda")
    last = devices[-1]
    for visible in (str(last.ordinal), last.uuid, last.uuid[:14]):
        output = child(
            "import vmmfd; (device,) = vmmfd.devices(); print(device.ordinal, device.uuid)", env={"CUDA_VISIBLE_DEVICES": visible}
        ).end()
        assert output.split() == ["0", last.uuid]
    torch = pytest.importorskip("torch")
    for device in devices:
        assert vmmfd.same_device(torch.cuda.get_device_properties(device.ordinal).uuid, device)
