"""The gate: is a result as close to the fp64 reference as its dtype allows?

The rule, row by row (a row is one query of one head; of dk and dv, one key of one KV head): the
largest error against fp64 may be a constant (C_FORWARD, C_BACKWARD) times the error of plain
same-dtype PyTorch nearby, plus a floor: a few ulps of the result's dtype at the row's magnitude,
and of gradients the rounding that fused kernels have and the baseline lacks. "Nearby" is within
NEARBY rows of the same head: one row's baseline can be exact by luck, and the whole tensor's is set
by the few rows with the fewest keys. docs/numerics.md gives the reasons and what is measured.
"""

from attnscope.inputs import KINDS, make_inputs, make_output_gradients
from attnscope.numerics.backward import (
    C_BACKWARD,
    BackwardFn,
    backward_truth,
    check_backward_fn,
    compare_backward,
)
from attnscope.numerics.forward import (
    C_FORWARD,
    ForwardFn,
    check_forward_fn,
    compare_forward,
)
from attnscope.numerics.gate import FLOOR_ULPS, FULL_SCORES, NEARBY, SCORE_ULPS, Errors, Verdict
from attnscope.numerics.locate import Location, locate_backward, locate_forward
from attnscope.numerics.training import TrainingFn, check_training_fn

__all__ = [
    "C_BACKWARD",
    "C_FORWARD",
    "FLOOR_ULPS",
    "FULL_SCORES",
    "KINDS",
    "NEARBY",
    "SCORE_ULPS",
    "BackwardFn",
    "Errors",
    "ForwardFn",
    "Location",
    "TrainingFn",
    "Verdict",
    "backward_truth",
    "check_backward_fn",
    "check_forward_fn",
    "check_training_fn",
    "compare_backward",
    "compare_forward",
    "locate_backward",
    "locate_forward",
    "make_inputs",
    "make_output_gradients",
]
