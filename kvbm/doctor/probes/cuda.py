"""What the CUDA driver says and can do, without torch. Run as a script; prints JSON."""

from __future__ import annotations

import ctypes
import json
import mmap
import re
from pathlib import Path
from typing import Any

_COMPUTE_MODE, _MAJOR, _MINOR = 20, 75, 76  # CUdevice_attribute
_PINNED_BYTES = 4 << 20
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of graphics and 3D controllers


def probe(driver: Any = None) -> dict[str, Any]:
    """What was found.

    Keys: `cards` NVIDIA cards on the PCI bus, `module` version of the kernel's module, `library` and `error` what went
        wrong, `version`
    the newest CUDA of the driver (13020 is 13.2), `devices` each with name, total_bytes, free_bytes, compute_mode (0:
    any process), capability, `pinned` "" or why memory of the host could not be pinned.

    Args:
        driver: the driver's library; None for the machine's.
    """
    found: dict[str, Any] = {
        "cards": _cards(),
        "module": _module(),
        "library": "",
        "error": "",
        "version": 0,
        "devices": [],
        "pinned": "",
    }
    if driver is None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return found | {"library": str(error)}
    version, count = ctypes.c_int(), ctypes.c_int()
    if status := driver.cuInit(0):
        return found | {"error": _words(driver, status)}
    driver.cuDriverGetVersion(ctypes.byref(version))
    found["version"] = version.value
    if status := driver.cuDeviceGetCount(ctypes.byref(count)):
        return found | {"error": _words(driver, status)}
    for index in range(count.value):
        found["devices"].append(_device(driver, index))
    if found["devices"]:
        found["pinned"] = _pin(driver)
    return found


def _device(driver: Any, index: int) -> dict[str, Any]:
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, 256, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    values = []
    for attribute in (_COMPUTE_MODE, _MAJOR, _MINOR):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return {
        "name": name.value.decode(errors="replace"),
        "total_bytes": total.value,
        "compute_mode": values[0],
        "capability": f"{values[1]}.{values[2]}",
    }


def _pin(driver: Any) -> str:
    """Pin memory that was mapped before, as the HOST pool does; "" when it works. Uses the first device."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    if status := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return f"no context: {_words(driver, status)}"
    try:
        if status := driver.cuCtxSetCurrent(context):
            return f"no context: {_words(driver, status)}"
        with mmap.mmap(-1, _PINNED_BYTES) as memory:
            held = ctypes.c_char.from_buffer(memory)
            address = ctypes.c_void_p(ctypes.addressof(held))
            try:
                if status := driver.cuMemHostRegister_v2(address, ctypes.c_size_t(_PINNED_BYTES), 0):
                    return _words(driver, status)
                driver.cuMemHostUnregister(address)
            finally:
                del held
        return ""
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _words(driver: Any, status: int) -> str:
    name = ctypes.c_char_p()
    known = driver.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value is not None
    return f"{name.value.decode()} ({status})" if known and name.value is not None else f"error {status}"


def _cards() -> int:
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            is_card = (device / "vendor").read_text().strip() == _NVIDIA
            count += is_card and (device / "class").read_text().startswith(_DISPLAY)
        except OSError:
            continue
    return count


def _module() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    print(json.dumps(probe()))
