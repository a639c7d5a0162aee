"""A Llama model of Hugging Face transformers, its logits checked and its passes measured.

Each attention implementation has JSON records. A failure is a record with the reason; an
implementation with wrong logits has no times.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope.common.console import explain
from attnscope.integrations.transformers import NAME, register
from attnscope.numerics import compare_forward
from attnscope.profile.api import Profile
from attnscope.profile.record.session import annotate, profile, synchronize
from attnscope.profile.render.document import rows_of
from attnscope.profile.render.terminal import attribution_line
from attnscope.studies.parts import ATTENTION, BACKWARD, CORE, EMBEDDING, FORWARD, LOSS, MLP
from attnscope.studies.records import Row
from attnscope.studies.summary import NO_GPU, gpu_work

EAGER = "eager"
IMPLS = (EAGER, "sdpa", NAME)
TRAINING = f"{FORWARD} + {BACKWARD}"
MODES = (FORWARD, TRAINING)
PASSES = 5  # in one sample, and in the profiled region
SAMPLES = 7
# Limit of the logits' RMS error over eager's; another order of rounding stays below it.
RMS_BAR = 1.25
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The shape of the model and of its batch. Raises ValueError for an impossible shape."""

    layers: int = 8
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 32_000
    batch: int = 4
    context: int = 1024

    def __post_init__(self) -> None:
        for name, of in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, name) % getattr(self, of):
                divisor, value = getattr(self, of), getattr(self, name)
                raise ValueError(f"{name} must be a multiple of {of} ({divisor}), got {value}")
        if self.hidden // self.heads % 2:  # rotary angles turn pairs
            raise ValueError(
                f"hidden must be an even multiple of heads ({self.heads}), got {self.hidden}"
            )

    @property
    def intermediate(self) -> int:
        return self.hidden * 11 // 4

    @property
    def parameters(self) -> int:
        """Trained numbers: matrices, norms, the embedding and the output matrix."""
        d = self.hidden
        projections = 2 * d * d + 2 * d * (d // self.heads * self.kv_heads)
        block = projections + 3 * d * self.intermediate + 2 * d
        return self.layers * block + d + 2 * d * self.vocabulary


def build(shape: Llama, device: torch.device) -> tuple[Any, Tensor]:
    """The model with random bf16 weights, and tokens int64 [batch, context]."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
    )
    torch.manual_seed(SEED)
    # A model that is cast afterwards would have its rotary frequencies in bf16.
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=EAGER
    )
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context))
    return model.eval().to(device), tokens.to(device)


def run_all(
    shape: Llama,
    device: torch.device,
    impls: Sequence[str] = IMPLS,
    on_done: Callable[[Row], None] = lambda record: None,
) -> list[Row]:
    """Check and measure each implementation in each mode: records in that order.

    If the model or the reference cannot be built (out of memory, say), all of them fail.
    """
    register()
    model: Any = None
    tokens: Any = None
    try:
        model, tokens = build(shape, device)
        checks = check_logits(model, tokens, impls)
    except Exception as error:
        checks = dict.fromkeys(impls, {"status": "failed", "reason": explain(error)})
    records = []
    for mode in MODES:
        for impl in impls:
            key = {"impl": impl, "mode": mode, **asdict(shape), "parameters": shape.parameters}
            found = checks[impl]
            record = key | {"check": found, "status": found["status"], "reason": found["reason"]}
            if found["status"] == "ok":
                record |= _attempt(model, tokens, impl, mode)
            on_done(record)
            records.append(record)
    return records


# Logits


def logits(model: Any, tokens: Tensor, impl: str) -> Tensor:
    """[batch, context, vocabulary], by an attention implementation."""
    model.set_attn_implementation(impl)
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def check_logits(model: Any, tokens: Tensor, impls: Sequence[str]) -> dict[str, Row]:
    """Compare the logits of each implementation with fp64 logits of the same weights. Eager's error
    is the baseline of bf16. Each row must pass the gate of an attention row (see numerics), and the
    RMS error of all rows must be within RMS_BAR.

    In fp64 transformers itself keeps norms, softmax and rotary angles in fp32.
    """
    reference = logits(copy.deepcopy(model).double(), tokens, EAGER)
    baseline = logits(model, tokens, EAGER)
    found = {}
    for impl in impls:
        try:
            got = logits(model, tokens, impl)
        except Exception as error:
            found[impl] = {"status": "failed", "reason": explain(error)}
        else:
            found[impl] = compare_logits(got, reference, baseline)
    return found


def compare_logits(got: Tensor, reference: Tensor, baseline: Tensor) -> Row:
    """Logits [B, S, V] against fp64's, with the baseline's error as the measure."""
    # As if they were the output of an attention with one head, [B, S, 1, V].
    out, want, usual = (t.unsqueeze(2) for t in (got, reference, baseline))
    no_lse = reference.new_zeros((len(reference), 1, reference.shape[1]))
    verdict = compare_forward(out, None, want, no_lse, usual, no_lse)
    rms, usual_rms = (float((t - reference).square().mean().sqrt()) for t in (got, baseline))
    ratio = rms / usual_rms if usual_rms else None
    reason = f"logits: {verdict.reason}" if not verdict.passed else None
    if reason is None and ratio is not None and ratio > RMS_BAR:
        reason = f"logits must have at most {RMS_BAR} times eager's error, got {ratio:.3g} times"
    return {
        "status": "wrong" if reason else "ok",
        "reason": reason,
        "max_abs_err": verdict.max_abs_err,
        "baseline_err": verdict.baseline_err,
        "margin": verdict.margin,
        "rms_ratio": ratio,
    }


# Passes


def _attempt(model: Any, tokens: Tensor, impl: str, mode: str) -> Row:
    """The record of `measure`, or why it failed."""
    try:
        return measure(model, tokens, impl, mode)
    except NotImplementedError as error:
        return {"status": "skipped", "reason": str(error).partition(";")[0]}
    except Exception as error:
        return {"status": "failed", "reason": explain(error)}
    finally:
        model.zero_grad()


def measure(model: Any, tokens: Tensor, impl: str, mode: str) -> Row:
    """Wall times of PASSES passes without the profiler and with it, and the profile's tables.

    Raises NotImplementedError where the implementation has no backward.
    """
    model.set_attn_implementation(impl)
    step = functools.partial(_train if mode == TRAINING else _infer, model, tokens)

    def region() -> None:
        for _ in range(PASSES):
            step()
        synchronize()

    cuda = tokens.device.type == "cuda"
    region()
    if cuda:
        torch.cuda.reset_peak_memory_stats(tokens.device)
    walls = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        region()
        walls.append((time.perf_counter() - start) * 1e3 / PASSES)
    peak = torch.cuda.max_memory_allocated(tokens.device) / 2**30 if cuda else None
    recorded = profile(f"{impl} {mode}", warmup=1)(region)
    with ranges(model, impl):
        recorded()
    return {
        "passes": PASSES,
        "wall_ms": walls,
        "peak_memory_gib": peak,
        **tables(recorded.profile),
    }


def tables(found: Profile) -> Row:
    """A profile as part of a record: times in microseconds, of all passes together.

    Raises ProfileError for tables that contradict themselves.
    """
    assert found.wall_s is not None
    record: Row = {
        "profiled_ms": found.wall_s * 1e3 / PASSES,
        "attribution": attribution_line(found.attribution),
        "no_kernels": None if found.trace.kernels else NO_GPU,
        "sm_clock_mhz": found.sm_clock_mhz,
        "operators": rows_of(found.operators()),
        "symbols": rows_of(found.kernels()),
        "stages": rows_of(found.stages()),
    }
    return record | (asdict(gpu_work(found)) if found.trace.kernels else {})


def _infer(model: Any, tokens: Tensor) -> None:
    with annotate(FORWARD), torch.no_grad():
        model(input_ids=tokens, use_cache=False)


def _train(model: Any, tokens: Tensor) -> None:
    with annotate(FORWARD):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    with annotate(BACKWARD):
        loss.backward()
    model.zero_grad()


@contextmanager
def ranges(model: Any, impl: str) -> Iterator[None]:
    """Ranges around the parts of a Llama model meanwhile.

    The attention core is the attention function, and the function that makes its mask.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    parts = [(EMBEDDING, model.model.embed_tokens), (LOSS, model.lm_head)]
    for layer in model.model.layers:
        parts += [(ATTENTION, layer.self_attn), (MLP, layer.mlp)]
    with ExitStack() as restore:
        for name, module in parts:
            module.forward = _in_range(name, module.forward)
            restore.callback(delattr, module, "forward")
        for functions, default in ((FUNCTIONS, eager_attention_forward), (MASKS, None)):
            # An entry of this object hides the one that is registered for all of them.
            functions[impl] = _in_range(CORE, functions.get(impl, default))
            restore.callback(functions.__delitem__, impl)
        yield


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with annotate(name):
            return function(*args, **kwargs)

    return call
