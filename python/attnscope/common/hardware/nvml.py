"""Clocks, power, temperature and throttle reasons of a CUDA device, by NVML where it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Reasons that do not disturb a measurement: the GPU is idle, or the clock is at its setting.
_HARMLESS = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks", "DisplayClockSetting")
_PREFIX = "nvmlClocksEventReason"


class Nvml:
    """Readings of one device; `reason`: why there are none, or None."""

    def __init__(self, device: torch.device) -> None:
        self.reason: str | None = None
        if device.type != "cuda":
            self.reason = "no CUDA device"
            return
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._nvml: Any = pynvml
            # By UUID: NVML ignores CUDA_VISIBLE_DEVICES.
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        except ImportError:
            self.reason = "package nvidia-ml-py is not installed"
        except Exception as error:  # NVML's errors are one class per code, all plain Exceptions
            self.reason = f"NVML: {error}"

    def constants(self) -> dict[str, Any]:
        """`driver` and `power_limit_w`; None if NVML does not report them."""
        if self.reason:
            return {"driver": None, "power_limit_w": None}
        n = self._nvml
        return {
            "driver": self._ask(n.nvmlSystemGetDriverVersion),
            "power_limit_w": self._ask(n.nvmlDeviceGetEnforcedPowerLimit, self._handle, scale=1e-3),
        }

    def read(self) -> dict[str, Any]:
        """Now: sm_clock_mhz, memory_clock_mhz, power_w, temperature_c, throttle (names)."""
        if self.reason:
            return {"reason": self.reason}
        n, h = self._nvml, self._handle
        return {
            "sm_clock_mhz": self._ask(n.nvmlDeviceGetClockInfo, h, n.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask(n.nvmlDeviceGetClockInfo, h, n.NVML_CLOCK_MEM),
            "power_w": self._ask(n.nvmlDeviceGetPowerUsage, h, scale=1e-3),
            "temperature_c": self._ask(n.nvmlDeviceGetTemperature, h, n.NVML_TEMPERATURE_GPU),
            "throttle": self._throttle(),
        }

    def _throttle(self) -> list[str] | None:
        ask = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = self._ask(ask, self._handle)
        if bits is None:
            return None
        names = [name for name in dir(self._nvml) if name.startswith(_PREFIX)]
        reasons = {name.removeprefix(_PREFIX): getattr(self._nvml, name) for name in names}
        return sorted(
            name
            for name, bit in reasons.items()
            if name not in (*_HARMLESS, "All", "None") and bits & bit
        )

    def _ask(self, function: Any, *arguments: Any, scale: float | None = None) -> Any:
        try:
            value = function(*arguments)
        except Exception:  # this device does not have this reading
            return None
        return value if scale is None else round(value * scale, 1)
