"""Which machine and which versions a run had, and in what state the machine was."""

import importlib.metadata
import os
import platform
import subprocess

import torch

# nvidia-smi's fields. It answers all of a query or nothing: what not every driver knows is asked apart.
STATE = {
    "SM clock": "clocks.sm",
    "memory clock": "clocks.mem",
    "power": "power.draw",
    "power limit": "power.limit",
    "temperature": "temperature.gpu",
    "performance state": "pstate",
    "persistence": "persistence_mode",
}
CAPPED = {
    "slowed by power": "clocks_event_reasons_counters.sw_power_cap",
    "by heat": "clocks_event_reasons_counters.sw_thermal_slowdown",
}  # microseconds since the driver was loaded: the difference is the run's
# NVML's clock event reasons, from bit 0 on
REASONS = (
    "idle", "application clocks", "power cap", "hardware slowdown", "sync boost", "heat", "hardware heat", "power brake",
    "display clocks",
)  # fmt: skip


def name(device) -> str:
    """The GPU's, or the CPU's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_cpu()}, {torch.get_num_threads()} threads"


def machine(device) -> dict:
    """What is known of the hardware, by name."""
    known = {"CPU": _cpu(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {"GPU": properties.name, "multiprocessors": properties.multi_processor_count}
        gpu["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        gpu["L2"] = f"{properties.L2_cache_size / 2**20:.0f} MiB"
        known = gpu | _nvidia_smi(device, {"driver": "driver_version", "maximum clock": "clocks.max.sm"}) | known
    return known


def state(device) -> dict:
    """What a figure depends on besides, at this moment: others' work on the cores, the GPU's clocks and power."""
    known = {"load": f"{os.getloadavg()[0]:.1f}"} if hasattr(os, "getloadavg") else {}
    if device.type == "cuda":
        gpu = _nvidia_smi(device, STATE) | _nvidia_smi(device, CAPPED)
        throttled = _nvidia_smi(device, {"throttle reasons": "clocks_event_reasons.active"})
        known = gpu | {name: reasons(mask) for name, mask in throttled.items()} | known
    return known


def reasons(mask) -> str:
    """The names of the bits that are set in a mask of throttle reasons; what is no mask as it is."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return mask
    names = [name for bit, name in enumerate(REASONS) if bits >> bit & 1]
    return " + ".join(names + ["other"] * (bits >= 1 << len(REASONS))) or "none"


def versions() -> dict:
    """Of the software, by name."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for name in ("triton", "numba", "numba-cuda", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _nvidia_smi(device, fields) -> dict:
    """``fields`` of the GPU by their names here, or nothing where nvidia-smi does not know one of them."""
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.strip().split(",")), strict=False))
