"""What plain SGLang needs on a CPU, and nothing else: without it a prefill worker pins host memory and dies of it.

Never does anything where there is CUDA, nor in the HTTP process: an import there comes before SGLang's metrics are set up, and
would make them vanish.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def register() -> None:
    """What SGLang calls, early in each process. The scheduler inherits the variable; the HTTP process has yet to set it."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        conn: Any = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
        conn.MooncakeKVSender.supports_host_tensor_indices = False
