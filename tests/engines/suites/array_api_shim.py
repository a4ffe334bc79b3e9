"""NumPy's array API namespace, whose arrays give and take DLPack through vmmfd."""
import numpy
import vmmfd


class Array(numpy.ndarray):
    __dlpack__ = lambda self, **options: ours(self).__dlpack__(**options)
    __dlpack_device__ = lambda self: ours(self).__dlpack_device__()


def ours(array):
    return vmmfd.asarray(array.view(numpy.ndarray), backend="host")


def from_dlpack(array, **options):
    return numpy.from_dlpack(ours(array), **options)


asarray, empty, full, zeros = (lambda *a, of=of, **b: of(*a, **b).view(Array) for of in (numpy.asarray, numpy.empty, numpy.full, numpy.zeros))
__getattr__ = lambda name: getattr(numpy, name)
