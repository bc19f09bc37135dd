"""The kernels in Numba's CUDA simulator, which must be chosen before Numba is imported: in another process."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_kernels_in_the_simulator(seed):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "simulator", "-p", "no:cacheprovider", str(HERE)]
    # No plug-ins: some refuse to start below another pytest, and these tests need none.
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "TEST_SEED": str(seed), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 100, done.stdout
