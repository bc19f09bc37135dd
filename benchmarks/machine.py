"""The machine and the versions that a run had, and the state that the machine was in."""

import importlib.metadata
import os
import platform

import torch

try:
    import pynvml  # NVIDIA's bindings of NVML, the driver's library that nvidia-smi prints from
except ImportError:
    pynvml = None  # without the extra bench a run does not know its GPU's clocks and power

REASONS = (  # why a GPU's clocks are below the highest: NVML's names of the bits of a mask, from bit 0 on
    "idle", "application clocks", "power cap", "hardware slowdown", "sync boost", "heat", "hardware heat", "power brake",
    "display clocks",
)  # fmt: skip
HARDWARE = {
    "driver": lambda gpu: pynvml.nvmlSystemGetDriverVersion(),
    "maximum clock": lambda gpu: f"{pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)} MHz",
}
STATE = {
    "SM clock": lambda gpu: f"{pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)} MHz",
    "memory clock": lambda gpu: f"{pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)} MHz",
    "power": lambda gpu: f"{pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3:.2f} W",
    "power limit": lambda gpu: f"{pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3:.2f} W",
    "temperature": lambda gpu: str(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    "performance state": lambda gpu: f"P{pynvml.nvmlDeviceGetPerformanceState(gpu)}",
    "persistence": lambda gpu: "Enabled" if pynvml.nvmlDeviceGetPersistenceMode(gpu) else "Disabled",
    # Counted since the driver was loaded: the difference is the run's.
    "slowed by power": lambda gpu: _counter(gpu, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP),
    "by heat": lambda gpu: _counter(gpu, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN),
    "throttle reasons": lambda gpu: reasons(pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)),
}


def name(device) -> str:
    """The GPU's name, or the CPU's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_cpu()}, {torch.get_num_threads()} threads"


def machine(device) -> dict:
    """The hardware: {what: value}."""
    known = {"CPU": _cpu(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {"GPU": properties.name, "multiprocessors": properties.multi_processor_count}
        gpu["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        gpu["L2"] = f"{properties.L2_cache_size / 2**20:.0f} MiB"
        known = gpu | _nvml(device, HARDWARE) | known
    return known


def state(device) -> dict:
    """What figures depend on at this moment: the load of the cores, the GPU's clocks and power; {what: value}."""
    load = {"load": f"{os.getloadavg()[0]:.1f}"} if hasattr(os, "getloadavg") else {}
    return _nvml(device, STATE) | load if device.type == "cuda" else load


def reasons(mask: int) -> str:
    """The names of the bits that are set in a mask of throttle reasons."""
    names = [name for bit, name in enumerate(REASONS) if mask >> bit & 1]
    return " + ".join(names + ["other"] * (mask >= 1 << len(REASONS))) or "none"


def versions() -> dict:
    """The software: {what: version}."""
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


def _nvml(device, facts) -> dict:
    """``facts`` of a GPU, {what: function of NVML's handle}, without those that the driver or the GPU does not know."""
    known = {}
    if pynvml is None:
        return known
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return known
    for what, fact in facts.items():
        try:
            known[what] = fact(gpu)
        except pynvml.NVMLError:
            continue
    return known


def _counter(gpu, field) -> str:
    """A counter that NVML keeps in nanoseconds."""
    (found,) = pynvml.nvmlDeviceGetFieldValues(gpu, [field])
    if found.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(found.nvmlReturn)
    return f"{found.value.ullVal // 1000} us"
