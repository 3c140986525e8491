"""CUDA: the driver, its devices, torch, and whether memory of the host can be pinned."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.doctor.deadline import run_probe
from kvbm.doctor.finding import DoctorFinding, ok, problem, size, unused, warning
from kvbm.doctor.plan import MachinePlan

_ANY_PROCESS, _PROHIBITED = 0, 2
_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive process"}
_INSTALL_TORCH = (
    "pip install 'kvbm-ledger[engine]' for the torch of your CUDA, or set pools.hbm.device=memory (no tensors)"
)


class Torch(NamedTuple):
    """An installed torch, not imported, for that takes seconds. `cuda`: that it was built for, "" for none."""

    version: str
    cuda: str


def look_at_cuda() -> dict[str, Any]:
    """See `probes/cuda.py`. Raises LateProbe."""
    return run_probe("cuda")


def look_at_torch() -> Torch | None:
    """What is installed; None for nothing."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return Torch("unknown", "")
    return torch_of(text)


def torch_of(text: str) -> Torch:
    """What torch/version.py says."""
    found = {
        name: match[1]
        for name in ("__version__", "cuda")
        if (match := re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    }
    return Torch(found.get("__version__", "unknown"), found.get("cuda", ""))


def judge_gpu(cuda: dict[str, Any], torch: Torch | None, plan: MachinePlan) -> list[DoctorFinding]:
    """Driver, devices, torch, pinned memory."""
    device = plan.settings.pools.hbm.device
    needed = bool(plan.hbm) and device == "cuda"
    welcome = bool(plan.hbm) and device == "auto"
    driver = _judge_driver(cuda, needed, welcome)
    findings = [driver, _judge_torch(cuda, torch, plan)]
    if cuda["devices"] and not cuda["error"]:
        findings.insert(1, _judge_devices(cuda, needed or welcome))
        findings.append(_judge_pinned(cuda, plan))
    return findings


def _judge_driver(cuda: dict[str, Any], needed: bool, welcome: bool) -> DoctorFinding:
    check = "CUDA driver"
    if not cuda["library"] and not cuda["error"] and cuda["devices"]:
        module = f" ({cuda['module']})" if cuda["module"] else ""
        return ok(check, f"CUDA {_cuda(cuda['version'])}{module}")
    if cuda["library"]:
        found = "no driver library (libcuda.so.1)"
        if cuda["module"]:
            found += f", though the kernel's module {cuda['module']} is loaded"
            fix = "start the container with the GPU (docker run --gpus all; nvidia-container-toolkit)"
        elif cuda["cards"]:
            found += f", though {cuda['cards']} NVIDIA cards are on the bus"
            fix = "install NVIDIA's driver and load its module (modprobe nvidia)"
        else:
            fix = "use a machine with an NVIDIA GPU, or set pools.hbm.device=cpu"
    elif cuda["error"]:
        found = f"the driver does not start: {cuda['error']}"
        fix = "compare nvidia-smi; the library and the kernel's module must be of one version, /dev/nvidia* readable"
    else:
        found = "the driver sees no device"
        fix = "check CUDA_VISIBLE_DEVICES and the devices given to the container"
    if needed:
        return problem(check, f"{found}; pools.hbm.device is cuda", fix)
    if cuda["cards"] or cuda["module"] or cuda["error"]:
        return warning(check, f"{found}; HBM would be on the CPU" if welcome else found, fix)
    return unused(check, f"{found}; HBM is on the CPU" if welcome else found)


def _judge_devices(cuda: dict[str, Any], wanted: bool) -> DoctorFinding:
    devices = cuda["devices"]
    words = [
        f"{one['name']}, {size(one['total_bytes'])}, sm_{one['capability'].replace('.', '')}, compute mode "
        f"{_MODES.get(one['compute_mode'], one['compute_mode'])}"
        for one in devices
    ]
    counted = [f"{words.count(word)} x {word}" if words.count(word) > 1 else word for word in dict.fromkeys(words)]
    found = f"{len(devices)}: {'; '.join(counted)}"
    modes = {one["compute_mode"] for one in devices}
    if modes == {_PROHIBITED}:
        judged = problem if wanted else warning
        return judged("CUDA devices", found, "nvidia-smi -c 0 lets processes use the GPU")
    if modes != {_ANY_PROCESS}:
        return warning("CUDA devices", found, "nvidia-smi -c 0, where engine and other processes are to share a GPU")
    return ok("CUDA devices", found)


def _judge_torch(cuda: dict[str, Any], torch: Torch | None, plan: MachinePlan) -> DoctorFinding:
    device, check = plan.settings.pools.hbm.device, "torch"
    if torch is None:
        if not plan.hbm or device == "memory":
            return unused(check, "not installed; kvbm works without it, with pools.hbm.device=memory")
        return problem(check, f"not installed, and pools.hbm.device is {device}", _INSTALL_TORCH)
    found = f"{torch.version}, {f'built for CUDA {torch.cuda}' if torch.cuda else 'without CUDA'}"
    if not plan.hbm or device in ("cpu", "memory"):
        return ok(check, found) if plan.hbm and device == "cpu" else unused(check, found)
    if not torch.cuda:
        if device == "cuda":
            return problem(
                check, f"{found}, and pools.hbm.device is cuda", "install torch's CUDA build (see pytorch.org)"
            )
        if cuda["devices"]:
            fix = "install torch's CUDA build (see pytorch.org), or set pools.hbm.device=cpu"
            return warning(check, f"{found}, though there is a GPU", fix)
        return ok(check, found)
    major = int(torch.cuda.split(".")[0])
    if cuda["version"] and cuda["version"] // 1000 < major:
        fix = f"upgrade the driver to one of CUDA {major}, or install a torch built for CUDA {cuda['version'] // 1000}"
        return problem(check, f"{found}; the driver has CUDA {_cuda(cuda['version'])}", fix)
    return ok(check, found)


def _judge_pinned(cuda: dict[str, Any], plan: MachinePlan) -> DoctorFinding:
    if not cuda["pinned"]:
        return ok("pinned memory", "4 MiB of mapped memory pinned and given back")
    found = f"refused: {cuda['pinned']}"
    if plan.host or plan.hbm:
        fix = "free memory of the host and the GPU, end processes that hold it alone; see nvidia-smi and dmesg"
        return warning("pinned memory", f"{found}; copies to the GPU would be slow", fix)
    return unused("pinned memory", found)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
