"""The CUDA kernels, one a file: config, device helpers, kernel, launcher."""
