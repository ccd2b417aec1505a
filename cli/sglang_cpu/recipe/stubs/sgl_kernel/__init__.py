"""Stub: SGLang checks the version of its CUDA kernels at import time; no kernel runs on a CPU."""

import stub_modules

__version__ = "0.4.10"
__getattr__ = stub_modules.install("sgl_kernel")
