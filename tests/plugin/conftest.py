"""Unit tests of what runs inside SGLang, without SGLang: its requests and queues are stand-ins with the same attributes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
