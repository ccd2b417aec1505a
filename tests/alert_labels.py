"""The labels by which each alert is told apart, beside its name, severity and cluster: the same whoever raises it.

Not the built-in engine's word and not the shipped rules': both are compared with this.
"""

from __future__ import annotations

RAISED_BY_BOTH: dict[str, set[str]] = {
    "FluidPDErrorBudgetBurn": {"model", "slo"},
    "FluidPDTelemetryStale": set(),
    "FluidPDTransitionStuck": {"worker"},
    "FluidPDTransitionFailing": set(),
    "FluidPDWorkerUnrecoverable": {"worker"},
    "FluidPDPoolAtMinimum": {"role"},
    "FluidPDRoleEmpty": {"role"},
    "FluidPDPairBroken": set(),
    "FluidPDRoleFlapping": {"worker"},
    "FluidPDAutomationPausedTooLong": set(),
    "FluidPDDatabaseUnavailable": set(),
    "FluidPDSamplesDropped": set(),
    "FluidPDNotificationsFailing": {"receiver"},
    "Watchdog": set(),
}
