"""cuda.core's pool by vmmfd's memory: vmmfd.serve hands its buffers over. MEMORY: empty, pool, or share of cuda.core's virtual memory."""
import cuda.core, os, tempfile, threading, vmmfd.pool


class Buffer(cuda.core.Buffer):
    is_mapped = property(lambda self: self.memory_resource.is_mapped)

    def __reduce__(self):
        path, array = tempfile.mktemp(), self.memory_resource.arrays[int(self.handle)]
        threading.Thread(target=vmmfd.serve, args=(path, array), daemon=True).start()
        return received, (self.memory_resource, path)


class DeviceMemoryResource(cuda.core.MemoryResource):
    is_device_accessible, is_host_accessible, is_ipc_enabled, device_id, memory = True, False, True, 0, os.environ["MEMORY"]
    __init__ = lambda self, device=0, options=None, is_mapped=False: self.__dict__.update(arrays={}, is_mapped=is_mapped)
    __reduce__ = lambda self: (DeviceMemoryResource, (0, None, True))
    deallocate = lambda self, address, size, *, stream: self.arrays.pop(int(address), None)
    close = lambda self: self.arrays.clear()

    def allocate(self, size, *, stream):
        if self.memory != "share":
            return self.hold((vmmfd if self.memory == "empty" else vmmfd.pool.Pool()).empty(size, "uint8"))
        whole = cuda.core.VirtualMemoryResource(cuda.core.Device()).allocate(size)
        return self.hold(vmmfd.share(whole, neighbours=True)[:size], int(whole.handle))

    def hold(self, array, address=None):
        cuda.core.Device().set_current()
        address = address or array.__cuda_array_interface__["data"][0]
        self.arrays[address] = array
        return Buffer._init(address, array.nbytes, self)


def received(resource, path):
    return resource.hold(vmmfd.take(path, readonly=resource.memory == "share"))


cuda.core.DeviceMemoryResource = DeviceMemoryResource
