"""What is installed, what does not fit together and what mends it, and whether each backend computes what it should.

``python -m numba_impl doctor`` prints it and exits 1 after an error: a backend that fails or is wrong, or an installation
that keeps a GPU's kernels from running. A warning is what works all the same, slower or by eager PyTorch: no directory for a
cache, a GPU too old for the kernels. It leaves the status at 0, as does a backend that declines, for the reason it gives to
dispatch, and all that concerns a GPU alone on a machine without one.
"""
