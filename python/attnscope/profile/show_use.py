"""How well the GPU was used, in a terminal: steps, efficiency figures, findings with evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas

from attnscope.bench.show import say
from attnscope.profile.breakdown import PARTS
from attnscope.profile.terminal import Column, duration, percent, print_table

if TYPE_CHECKING:
    from attnscope.profile.result import Profile

FIGURES = {
    "gpu_utilisation": "GPU utilisation",
    "sm_efficiency": "SM efficiency (estimate)",
    "occupancy": "achieved occupancy (estimate)",
    "tensor_core_time_share": "time in kernels with tensor cores",
}
EVIDENCE = 3  # rows shown of a finding


def print_use(profile: Profile, top: int) -> None:
    """Print the step breakdown, the efficiency figures and the findings. Nothing without events."""
    if profile.empty:
        return
    _print_steps(profile, top)
    if profile.trace.kernels:
        _print_efficiency(profile)
        _print_findings(profile)


def _print_steps(profile: Profile, top: int) -> None:
    steps = profile.steps()
    columns: list[Column] = [("step", "step", str), ("wall", "wall_us", duration)]
    columns += [(part, f"{part}_us", duration) for part in PARTS]
    note = f"steps: {steps.attrs['steps']}; each instant counts once, in the leftmost part"
    if steps.attrs["setup_us"] is not None:
        note += f"; set-up in the first step: {duration(max(steps.attrs['setup_us'], 0.0))}"
    print_table("Steps", steps, columns, top, note)


def _print_efficiency(profile: Profile) -> None:
    found = profile.efficiency()
    for key, label in FIGURES.items():
        value = getattr(found, key)
        text = percent(value) if value is not None else f"missing: {found.reasons.get(key)}"
        if key == "occupancy" and found.occupancy_from:
            text += f" ({found.occupancy_from})"
        say(f"{label:34} {text}")


def _print_findings(profile: Profile) -> None:
    for finding in profile.findings():
        say("")
        say(f"{finding.kind}: {finding.title}", "bold yellow")
        evidence = pandas.DataFrame(finding.evidence[:EVIDENCE])
        for row in evidence.to_dict("records"):
            say("  " + ", ".join(f"{key} {_short(value)}" for key, value in row.items()))
        if len(finding.evidence) > EVIDENCE:
            say(f"  and {len(finding.evidence) - EVIDENCE} more", "dim")
        say(f"  try: {finding.advice}")


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:59] + "…"
