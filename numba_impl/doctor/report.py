"""The command: the facts in rows, how the backends do, and the findings."""

import os
import platform
import tempfile
import warnings
from unittest import mock

from numba_impl.doctor.backends import check_backends, say
from numba_impl.doctor.findings import FIRST, errors, installation_findings
from numba_impl.doctor.probes import Facts, dotted, gather


def main() -> int:
    """Print what there is to say; gives the exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is said here, once
        facts = gather()
        for label, text in rows(facts):
            say(label, text)
        print()
        findings = installation_findings(facts)
        # No kernel that is kept: the compiler is to be checked.
        with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, NUMBA_CACHE_DIR=empty):
            findings += check_backends(facts, FIRST if errors(findings) else "")
    print()
    for finding in findings:
        print(f"{finding.level}: {finding.text}\n    {finding.remedy}")
    wrong = errors(findings)
    print(f"errors: {wrong}, warnings: {len(findings) - wrong}" if findings else "nothing is wrong")
    return 1 if wrong else 0


def rows(facts: Facts):
    """(label, text) of each fact."""
    yield "driver", driver_text(facts)
    for index, gpu in enumerate(facts.gpus):
        size = f"{gpu.memory / 2**30:.0f} GiB, {gpu.multiprocessors} multiprocessors"
        yield f"GPU {index}", f"{gpu.name}, compute capability {dotted(gpu.capability)}, {size}"
    yield "python", platform.python_version()
    built = f"for CUDA {dotted(facts.torch_cuda)}" if facts.torch_cuda else "without CUDA"
    for name, version in facts.packages.items():
        yield name, f"{version}, built {built}" if name == "torch" else version or "not installed"
    for name, library in facts.libraries.items():
        yield name, library.shown or ("cannot be loaded" if facts.gpus else "cannot be loaded, and only a GPU needs it")
    yield "simulator", "on" if facts.simulated else "off"
    if facts.caches and facts.gpus:
        yield "kernels' cache", facts.caches.kernels or "nowhere"
        yield "CUDA's cache", "switched off" if facts.caches.cuda is False else facts.caches.cuda or "nowhere"


def driver_text(facts) -> str:
    if facts.driver is None:
        return "none, and so no GPU: the CPU alone is checked"
    text = f"{facts.driver.release}, serves CUDA {dotted(facts.driver.cuda)}"
    return text if facts.gpus else f"{text}, but shows no GPU: the CPU alone is checked"
