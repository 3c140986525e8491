"""Compiles native/cuda/ring_kernel.cu to PTX with NVRTC, which needs no GPU, and writes native/src/ring_kernel_ptx.inc.

    pip install nvidia-cuda-nvrtc-cu12 && python tools/ring_kernel.py        # after each change of the kernel

PTX of compute capability 7.5 runs on it and on all later ones: the driver makes machine code of it when a pool is
opened, in milliseconds, and keeps that in its own cache. So no machine that runs kvbm needs a compiler for it.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "native" / "cuda" / "ring_kernel.cu"
MADE = ROOT / "native" / "src" / "ring_kernel_ptx.inc"
OPTIONS = ("--gpu-architecture=compute_75", "--std=c++17", "--restrict", "-default-device")


def main() -> int:
    """Returns 0; 1 where NVRTC is not there or refuses the source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", metavar="FILE", help="libnvrtc.so (default: of the Python package)")
    library = parser.parse_args().library or _packaged()
    if library is None:
        print("ring_kernel: no NVRTC; pip install nvidia-cuda-nvrtc-cu12", file=sys.stderr)
        return 1
    try:
        MADE.write_text(included(compiled(SOURCE.read_text(), library)))
    except RuntimeError as error:
        print(f"ring_kernel: {error}", file=sys.stderr)
        return 1
    print(f"{MADE.relative_to(ROOT)} is of {SOURCE.relative_to(ROOT)}")
    return 0


def compiled(source: str, library: str) -> str:
    """PTX. Raises RuntimeError: NVRTC refuses; the message has its words."""
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"ring_kernel.cu", 0, None, None), "create")
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options):
        raise RuntimeError(_text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program))
    return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)


def digest() -> str:
    """Of the kernel's source, as the made file names it."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def included(ptx: str) -> str:
    """PTX without its comments, as C++ includes it."""
    lines = [line for line in ptx.splitlines() if line.strip() and not line.lstrip().startswith("//")]
    text = "\n".join(lines)
    return f'// Made by tools/ring_kernel.py of ring_kernel.cu, SHA-256 {digest()}\nR"ptx(\n{text}\n)ptx"\n'


def _packaged() -> str | None:
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (found.submodule_search_locations or ()) if found else ():
            if libraries := sorted(Path(folder).rglob("libnvrtc.so.*")):
                return str(libraries[0])
    return None


def _check(answer: int, what: str) -> None:
    if answer:
        raise RuntimeError(f"NVRTC answers {answer} to {what}")


def _text(size_of: object, get: object, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "size")  # type: ignore[operator]
    room = ctypes.create_string_buffer(size.value)
    _check(get(program, room), "text")  # type: ignore[operator]
    return room.value.decode()


if __name__ == "__main__":
    raise SystemExit(main())
