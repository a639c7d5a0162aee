"""How well the GPU was used, in a terminal: steps, efficiency figures, findings with evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.common.console import say
from attnscope.profile.breakdown import PARTS
from attnscope.profile.terminal import Column, duration, percent, plain, print_table

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
    columns += [(part, f"{part}_us", duration) for part in PARTS if steps[f"{part}_us"].any()]
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
        say(plain(f"{finding.kind}: {finding.title}"), "bold yellow")
        for row in finding.evidence[:EVIDENCE]:
            say("  " + ", ".join(_said(key, value) for key, value in row.items()))
        if len(finding.evidence) > EVIDENCE:
            say(f"  and {len(finding.evidence) - EVIDENCE} more", "dim")
        say(f"  try: {finding.advice}")


def _said(key: str, value: object) -> str:
    if key.endswith("_us") and isinstance(value, int | float):
        return f"{key.removesuffix('_us')} {duration(value)}"
    text = f"{value:.4g}" if isinstance(value, float) else plain(str(value))
    return f"{key} {text if len(text) <= 60 else text[:59] + '…'}"
