"""Names of the phases of a training step and of the parts of a model."""

from __future__ import annotations

FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")
ATTENTION, CORE, ADD_NORM, MLP = "Self-Attention", "Attention Core", "Add & Norm", "MLP"
EMBEDDING, LOSS = "Embedding", "Output & Loss"
PARTS = (EMBEDDING, ATTENTION, CORE, ADD_NORM, MLP, LOSS)  # CORE is inside ATTENTION
OUTSIDE = "(outside)"  # no phase, or no part
