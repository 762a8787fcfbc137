"""Device memory by the CUDA driver API, without torch: allocate, copy in, copy out.

The functions and their signatures are those of the CUDA driver API reference (cuda.h, `cuMemAlloc_v2` and the like).
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final, Protocol

SUCCESS: Final = 0
LIBRARY: Final = "libcuda.so.1"


class CudaError(Exception):
    """The driver is missing, or refused a call."""


class Driver(Protocol):
    """The driver's shared library: each attribute is a C function that returns a CUresult."""

    def __getattr__(self, name: str) -> Callable[..., int]: ...


def load() -> Driver:
    """The driver of this machine. Raises CudaError where there is none."""
    try:
        library: Any = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaError(f"{LIBRARY} cannot be loaded: {error}") from error
    return library  # type: ignore[no-any-return]


class DeviceMemory:
    """`nbytes` bytes in the memory of CUDA device `device`; freed by `close`. Raises CudaError."""

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self._driver, self.device, self.nbytes = driver, device, nbytes
        _call(driver.cuInit, 0)
        handle, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        _call(driver.cuDeviceGet, ctypes.byref(handle), device)
        _call(driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), handle)
        self._context = context
        _call(driver.cuCtxSetCurrent, context)
        _call(driver.cuMemAlloc_v2, ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.address = address.value

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes of the host to `offset`."""
        self._check(offset, len(data))
        _call(self._driver.cuCtxSetCurrent, self._context)
        _call(self._driver.cuMemcpyHtoD_v2, ctypes.c_uint64(self.address + offset), data, ctypes.c_size_t(len(data)))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy `nbytes` bytes from `offset` to the host."""
        self._check(offset, nbytes)
        into = ctypes.create_string_buffer(nbytes)
        _call(self._driver.cuCtxSetCurrent, self._context)
        _call(self._driver.cuMemcpyDtoH_v2, into, ctypes.c_uint64(self.address + offset), ctypes.c_size_t(nbytes))
        return into.raw

    def close(self) -> None:
        """Free the memory."""
        _call(self._driver.cuCtxSetCurrent, self._context)
        _call(self._driver.cuMemFree_v2, ctypes.c_uint64(self.address))

    def _check(self, offset: int, nbytes: int) -> None:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"offset={offset} with {nbytes} bytes leaves the {self.nbytes} bytes of device memory")


def device_count(driver: Driver) -> int:
    """How many CUDA devices this process sees. Raises CudaError."""
    _call(driver.cuInit, 0)
    count = ctypes.c_int()
    _call(driver.cuDeviceGetCount, ctypes.byref(count))
    return count.value


def _call(function: Callable[..., int], *arguments: object) -> None:
    result = function(*arguments)
    if result != SUCCESS:
        raise CudaError(f"{getattr(function, '__name__', 'a CUDA call')} returned CUresult {result}")
