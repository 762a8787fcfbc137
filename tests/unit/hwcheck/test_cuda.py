"""The calls that reach the CUDA driver, on a stand-in of its C functions that keeps memory of its own."""

import ctypes

import pytest
from pdpool_connector.hwcheck.cuda import CudaError, DeviceMemory, device_count

BASE = 0x7F0000000000


class Driver:
    """cuda.h: each function returns a CUresult and writes through the pointers that it is given."""

    def __init__(self, devices: int = 2) -> None:
        self.devices, self.memory, self.calls = devices, bytearray(1 << 16), []

    def cuInit(self, flags):  # noqa: N802 - the driver's name
        self.calls.append(("cuInit", flags))
        return 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuDeviceGet(self, handle, ordinal):  # noqa: N802
        handle._obj.value = ordinal
        return 0 if ordinal < self.devices else 101  # CUDA_ERROR_INVALID_DEVICE

    def cuDevicePrimaryCtxRetain(self, context, handle):  # noqa: N802
        context._obj.value = 0xC0 + handle.value
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.calls.append(("cuCtxSetCurrent", context.value))
        return 0

    def cuMemAlloc_v2(self, address, nbytes):  # noqa: N802
        address._obj.value = BASE
        return 0 if nbytes.value <= len(self.memory) else 2  # CUDA_ERROR_OUT_OF_MEMORY

    def cuMemcpyHtoD_v2(self, target, source, nbytes):  # noqa: N802
        at = target.value - BASE
        self.memory[at : at + nbytes.value] = source
        return 0

    def cuMemcpyDtoH_v2(self, target, source, nbytes):  # noqa: N802
        at = source.value - BASE
        ctypes.memmove(target, bytes(self.memory[at : at + nbytes.value]), nbytes.value)
        return 0

    def cuMemFree_v2(self, address):  # noqa: N802
        self.calls.append(("cuMemFree_v2", address.value))
        return 0


def test_bytes_come_back_from_their_offset():
    memory = DeviceMemory(Driver(), 1, 4096)
    memory.write(100, b"pages")
    assert (memory.read(100, 5), memory.address, memory.device) == (b"pages", BASE, 1)


def test_calls_use_the_device_s_context():
    driver = Driver()
    DeviceMemory(driver, 1, 64).close()
    assert driver.calls == [("cuInit", 0), ("cuCtxSetCurrent", 0xC1), ("cuCtxSetCurrent", 0xC1), ("cuMemFree_v2", BASE)]


def test_out_of_bounds_is_refused():
    with pytest.raises(ValueError, match="offset=60 with 5 bytes leaves the 64 bytes"):
        DeviceMemory(Driver(), 0, 64).write(60, b"12345")


@pytest.mark.parametrize(("device", "nbytes", "result"), [(2, 64, 101), (0, 1 << 20, 2)])
def test_refused_call_is_an_error(device, nbytes, result):
    with pytest.raises(CudaError, match=f"CUresult {result}"):
        DeviceMemory(Driver(), device, nbytes)


def test_devices_are_counted():
    assert device_count(Driver(3)) == 3
