"""Workloads: shapes, their exact FLOPs and bytes, and the suites that name sets of them."""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from attnscope.attention_flops import visible_pairs

SUITES = Path(__file__).parent / "suites"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
DTYPE_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
# A mode's matrix products with the inner or outer dimension head_dim, and with head_dim_v. Forward:
# the scores; P v. Backward: the scores again, dq, dk; dP, dv.
MODES = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call: a forward, the backward of one, or both as in a training step.

    Dense: q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim],
    v [.., head_dim_v]. Packed (`seqlens` given, one (query length, key length) a segment):
    q [sum, heads_q, head_dim] and so on; batch is then the number of segments, seqlen_q and
    seqlen_k the longest. `window` is (left, right) aligned to the bottom right, -1 unbounded.
    `deterministic` asks for gradients that are the same bits in every call.
    `label` names the workload for readers (a model and its layer) and does not change the
    computation: workloads that differ only in it are equal and share an id.
    Raises ValueError that names the field, its value and what is allowed.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    mode: str = "forward"
    deterministic: bool = False
    seqlens: tuple[tuple[int, int], ...] | None = None
    label: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q must be a multiple of heads_kv ({self.heads_kv}), got {self.heads_q}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        for name in ("causal", "deterministic"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        if self.deterministic and self.mode == "forward":
            raise ValueError("deterministic must be used with mode backward or both, got forward")
        if len(self.window) != 2 or not all(isinstance(w, int) and w >= -1 for w in self.window):
            raise ValueError(f"window must be (left, right), each >= -1, got {self.window!r}")
        if not 0.0 <= self.softcap < float("inf"):
            raise ValueError(f"softcap must be finite and >= 0, got {self.softcap!r}")
        if self.label is not None and (not isinstance(self.label, str) or not self.label.strip()):
            raise ValueError(f"label must be text, got {self.label!r}")
        if self.seqlens is not None:
            self._check_seqlens(self.seqlens)

    def _check_seqlens(self, seqlens: tuple[tuple[int, int], ...]) -> None:
        if not all(len(pair) == 2 and min(pair) >= 0 for pair in seqlens):
            raise ValueError(f"seqlens must be (q, k) lengths, each >= 0, got {seqlens!r}")
        longest = (max((q for q, _ in seqlens), default=0), max((k for _, k in seqlens), default=0))
        got = (self.batch, self.seqlen_q, self.seqlen_k)
        if got != (len(seqlens), *longest):
            raise ValueError(
                f"batch, seqlen_q, seqlen_k must be {(len(seqlens), *longest)}, as in seqlens, "
                f"got {got}"
            )

    @classmethod
    def of(cls, **options: Any) -> "Workload":
        """Build from the short forms suites and the command line use.

        `seqlen` sets both lengths, `heads` both head counts, `tokens` the batch (tokens /
        seqlen_q), `hidden` the heads (hidden / head_dim); head_dim_v defaults to head_dim, batch
        to 1. `seqlens` entries are a length, a (q, k) pair, or "NxL" for N segments of length L.
        """
        opts = dict(options)
        if "seqlens" in opts and opts["seqlens"] is not None:
            opts["seqlens"] = _segments(opts["seqlens"])
            q_lens, k_lens = zip(*opts["seqlens"], strict=True) if opts["seqlens"] else ((), ())
            opts |= {"batch": len(q_lens)}
            opts |= {"seqlen_q": max(q_lens, default=0), "seqlen_k": max(k_lens, default=0)}
        for short, longs in (("seqlen", ("seqlen_q", "seqlen_k")), ("heads", _HEADS)):
            if short in opts:
                value = opts.pop(short)
                for name in longs:
                    opts.setdefault(name, value)
        if "hidden" in opts:
            heads = _quotient(opts.pop("hidden"), opts["head_dim"], "hidden", "head_dim")
            opts.setdefault("heads_q", heads)
            opts.setdefault("heads_kv", heads)
        if "tokens" in opts:
            opts["batch"] = _quotient(opts.pop("tokens"), opts["seqlen_q"], "tokens", "seqlen")
        opts.setdefault("batch", 1)
        opts.setdefault("heads_kv", opts.get("heads_q"))
        opts.setdefault("head_dim_v", opts.get("head_dim"))
        if "window" in opts:
            opts["window"] = tuple(opts["window"])
        if "softcap" in opts:
            opts["softcap"] = float(opts["softcap"])
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(opts) - known):
            raise ValueError(
                f"field must be one of {', '.join(sorted(known | _SHORT_FORMS))}, "
                f"got {unknown[0]!r}"
            )
        missing = [name for name in _LEAST if opts.get(name) is None]
        if missing:
            raise ValueError(f"{missing[0]} must be given, got none")
        return cls(**opts)

    @cached_property
    def id(self) -> str:
        """A short name, stable between runs and versions."""
        parts = [self.mode, DTYPE_SHORT[self.dtype], f"b{self.batch}"]
        parts += [f"q{self.seqlen_q}", f"k{self.seqlen_k}", f"h{self.heads_q}"]
        parts += [f"kv{self.heads_kv}", f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts.append(f"dv{self.head_dim_v}")
        if self.causal:
            parts.append("causal")
        if self.window != (-1, -1):
            parts.append(f"w{self.window[0]},{self.window[1]}")
        if self.softcap:
            parts.append(f"cap{self.softcap:g}")
        if self.seqlens is not None:
            parts.append(f"packed{zlib.crc32(repr(self.seqlens).encode()):08x}")
        if self.deterministic:
            parts.append("deterministic")
        return "-".join(parts)

    @property
    def phase(self) -> str:
        """The mode for readers: nothing for a forward, otherwise such as "backward"."""
        name = {"forward": "", "both": "forward and backward"}.get(self.mode, self.mode)
        return f"{name}, deterministic" if self.deterministic else name

    def segments(self) -> tuple[tuple[int, int], ...]:
        """(query length, key length) of every sequence of the batch."""
        return self.seqlens or ((self.seqlen_q, self.seqlen_k),) * self.batch

    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask lets through, over the batch, for one head."""
        left, right = self.window
        right = 0 if self.causal else right
        return sum(visible_pairs(*lengths, left, right) for lengths in self.segments())

    def flops(self) -> float:
        """Exact floating-point operations of the two products (five for a backward pass)."""
        return float(self._flops_per_pair() * self.visible_pairs())

    def flops_half_convention(self) -> float:
        """4*B*H*Sq*Sk*D as papers count it, 10 of a backward: a causal mask halves it, exactly."""
        pairs = sum(len_q * len_k for len_q, len_k in self.segments())
        return self._flops_per_pair() * pairs * (0.5 if self.causal else 1.0)

    def _flops_per_pair(self) -> int:
        over_dim, over_dim_v = MODES[self.mode]
        return 2 * self.heads_q * (over_dim * self.head_dim + over_dim_v * self.head_dim_v)

    def flops_reported(self) -> tuple[float, str]:
        """The work TFLOP/s are counted from, and the name of the rule.

        "full" without a mask, "causal=half" for a causal mask over equal lengths (the convention
        of the published figures), "visible pairs" where neither describes the mask.
        """
        square = all(len_q == len_k for len_q, len_k in self.segments())
        if self.window != (-1, -1) or (self.causal and not square):
            return self.flops(), "visible pairs"
        return self.flops_half_convention(), "causal=half" if self.causal else "full"

    def bytes(self) -> int:
        """Least traffic; K and V once per KV head.

        Forward: q, k, v in, out and lse out. Backward: those five and dout in, dq, dk and dv out.
        """
        tokens_q = sum(q for q, _ in self.segments())
        tokens_k = sum(k for _, k in self.segments())
        queries, keys = tokens_q * self.heads_q, tokens_k * self.heads_kv
        # How often tensors of the size of q, k, v and out move, and the lse.
        units, of_lse = {"forward": (1, 1), "backward": (2, 1), "both": (3, 2)}[self.mode]
        elements = units * (queries + keys) * (self.head_dim + self.head_dim_v)
        return elements * DTYPE_BYTES[self.dtype] + of_lse * queries * 4

    def inputs(self, device: Any, seed: int, kind: str = "normal") -> Any:
        """Input tensors on `device`, the same for the same seed (`numerics.make_inputs`)."""
        from attnscope import numerics

        return numerics.make_inputs(self, kind, seed, device)

    def output_gradient(self, device: Any, seed: int, kind: str = "normal") -> Any:
        """The gradient of out (`numerics.make_output_gradients`)."""
        from attnscope import numerics

        return numerics.make_output_gradients(self, kind, seed, device)[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` takes them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Workload":
        """Inverse of `to_dict`, also after a round trip through JSON.

        Raises ValueError for values that are no workload.
        """
        own = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        try:
            own["window"] = tuple(own.get("window", (-1, -1)))
            if own.get("seqlens") is not None:
                own["seqlens"] = tuple((q, k) for q, k in own["seqlens"])
            return cls(**own)
        except TypeError as error:
            raise ValueError(f"a row must describe a workload, got {error}") from None


_LEAST = {
    "batch": 0, "seqlen_q": 0, "seqlen_k": 0,
    "heads_q": 1, "heads_kv": 1, "head_dim": 1, "head_dim_v": 1,
}  # fmt: skip
_HEADS = ("heads_q", "heads_kv")
_SHORT_FORMS = {"seqlen", "heads", "tokens", "hidden"}
# Fields whose value is itself a list: a plain list is one value, a list of lists a choice.
_LIST_VALUED = {"window": 1, "seqlens": 2}


def load_suite(suite: str, device_type: str) -> list[Workload]:
    """The workloads of a suite: a name of `suite_names()` or the path of a YAML file.

    The file holds a `description` and lists of cases under `cuda`, `cpu` or `any`; a case is a
    mapping of fields (see `Workload.of`), and lists of values are multiplied out, the field
    written first varying slowest. Raises ValueError that names what is wrong.
    """
    import yaml

    path = SUITES / f"{suite}.yaml" if suite in suite_names() else Path(suite)
    if not path.is_file():
        raise ValueError(
            f"suite must be one of {', '.join(suite_names())}, or a YAML file, got {suite!r}"
        )
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"suite must be YAML, got {path}: {error}") from None
    allowed = {"description", "cuda", "cpu", "any"}
    if not isinstance(content, dict) or not set(content) <= allowed:
        raise ValueError(f"suite must be a mapping with {', '.join(sorted(allowed))}, got {path}")
    cases = content.get(device_type, content.get("any"))
    if cases is None:
        here = ", ".join(sorted(set(content) - {"description"}))
        raise ValueError(f"suite must have cases for {device_type}, got {suite!r} with {here}")
    found: dict[Workload, None] = {}
    for number, case in enumerate(cases, start=1):
        try:
            found |= dict.fromkeys(expand(case))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"suite: {path}, {device_type} case {number}: {error}") from None
    return list(found)


def suite_names() -> list[str]:
    """Names of the suites that come with the package."""
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def expand(case: Mapping[str, Any]) -> list[Workload]:
    """All workloads of a mapping whose values may be lists of choices."""
    choices = [_choices(name, value) for name, value in case.items()]
    return [
        Workload.of(**dict(zip(case, values, strict=True)))
        for values in itertools.product(*choices)
    ]


def _choices(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        return [value]
    depth = 0
    inner: Any = value
    while isinstance(inner, list):
        depth, inner = depth + 1, inner[0] if inner else None
    return value if depth > _LIST_VALUED.get(name, 0) else [value]


def _segments(entries: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    segments: list[tuple[int, int]] = []
    for entry in entries:
        if isinstance(entry, str):
            times, _, length = entry.partition("x")
            segments += [(int(length), int(length))] * int(times)
        elif isinstance(entry, int):
            segments.append((entry, entry))
        elif len(entry) == 2:
            segments.append((entry[0], entry[1]))
        else:
            raise ValueError(f'seqlens must be lengths, (q, k) pairs or "NxL", got {entry!r}')
    return tuple(segments)


def _quotient(value: int, by: int, name: str, by_name: str) -> int:
    if by < 1 or value % by:
        raise ValueError(f"{name} must be a multiple of {by_name} ({by}), got {value}")
    return value // by
