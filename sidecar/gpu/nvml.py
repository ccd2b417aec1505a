"""GPU readings through NVML, where there is a GPU. Absent readings are left out, never zero.

Never imports NVML before it is asked, and never raises: a machine without a driver is a normal machine.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


class Nvml:
    """Reads one device. `available` is False, with a reason, where NVML or the device is not there."""

    def __init__(self, index: int | None = 0) -> None:
        self._nvml: Any = None
        self._device: Any = None
        self.why_absent = ""
        if index is None:
            self.why_absent = "no GPU index is configured"
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._nvml = pynvml
        except Exception as error:  # a missing library, driver or device all mean the same here
            self.why_absent = f"no GPU readings: {error}"

    @property
    def available(self) -> bool:
        return self._nvml is not None

    def read(self) -> dict[str, float]:
        """What the device answers now; each reading fails alone."""
        if self._nvml is None:
            return {}
        n, device, found = self._nvml, self._device, {}
        readings: dict[str, Any] = {
            "gpu_busy_share": lambda: n.nvmlDeviceGetUtilizationRates(device).gpu / 100.0,
            "gpu_memory_used_bytes": lambda: float(n.nvmlDeviceGetMemoryInfo(device).used),
            "gpu_memory_total_bytes": lambda: float(n.nvmlDeviceGetMemoryInfo(device).total),
            "gpu_power_w": lambda: n.nvmlDeviceGetPowerUsage(device) / 1000.0,
            "gpu_temperature_c": lambda: float(n.nvmlDeviceGetTemperature(device, n.NVML_TEMPERATURE_GPU)),
            "gpu_sm_clock_hz": lambda: n.nvmlDeviceGetClockInfo(device, n.NVML_CLOCK_SM) * 1e6,
        }
        for name, reading in readings.items():
            try:
                found[name] = float(reading())
            except Exception:  # a device may lack any one of them
                log.debug("NVML does not answer %s", name)
        return found

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
