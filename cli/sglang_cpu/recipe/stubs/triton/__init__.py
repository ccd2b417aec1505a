"""Stub: SGLang defines `@triton.jit` kernels at import time; the CPU path launches none."""

import sys

import stub_modules

__version__ = "3.0.0"
__getattr__ = stub_modules.install("triton", stub_modules.StubDecorator, ("constexpr", "dtype", "tensor", "pointer_type"))


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


import triton.compiler.compiler  # noqa: E402
import triton.language  # noqa: E402
import triton.runtime  # noqa: E402,F401

sys.modules["triton.compiler.compiler"].triton_key = lambda: "stub"  # type: ignore[attr-defined]
