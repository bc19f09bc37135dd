"""Which machine and which versions a run had."""

import importlib.metadata
import os
import platform
import subprocess

import torch


def name(device) -> str:
    """The GPU's, or the CPU's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_cpu()}, {torch.get_num_threads()} threads"


def machine(device) -> dict:
    """What is known of the hardware, by name."""
    known = {"CPU": _cpu(), "threads": torch.get_num_threads()}
    if hasattr(os, "getloadavg"):
        known["load before"] = f"{os.getloadavg()[0]:.1f}"  # others' work on the same cores distorts a CPU's figures
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {"GPU": properties.name, "multiprocessors": properties.multi_processor_count}
        gpu["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        known = gpu | _nvidia_smi(properties) | known
    return known


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


def _nvidia_smi(properties) -> dict:
    """Driver, clocks and power limit, or nothing where nvidia-smi does not tell."""
    fields = {
        "driver": "driver_version", "clock": "clocks.sm", "maximum clock": "clocks.max.sm",
        "memory clock": "clocks.mem", "power limit": "power.limit",
    }  # fmt: skip
    query = ["nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.strip().split(",")), strict=False))
