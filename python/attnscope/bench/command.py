"""The commands `bench` and `export`, and the options of `check` too."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnscope.bench import show
from attnscope.bench.workloads import DTYPE_SHORT, MODES, Workload, expand, load_suite, suite_names
from attnscope.common.console import console, say
from attnscope.common.forms import TERMINAL, AsJson, Form, form_of, printed
from attnscope.common.options import Device, bad_input, integers, pick_device, split

if TYPE_CHECKING:
    import torch

    from attnscope.bench.impls import Impl

# Defaults of the options that describe a shape.
SHAPE = {
    "cuda": {"batch": 8, "heads_q": 16, "head_dim": 128, "dtype": "bfloat16"},
    "cpu": {"batch": 1, "heads_q": 8, "head_dim": 64, "dtype": "float32"},
}
# Defaults of the sampling options.
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {"l2": "cold", "budget_s": 2.0, "layouts": "both"},
    "cpu": {"l2": "warm", "budget_s": 1.0, "layouts": "bshd"},
}
_DEFAULTS = "; ".join(
    f"on {device}: " + ", ".join(f"{key} {value}" for key, value in shape.items())
    for device, shape in SHAPE.items()
)

Suite = Annotated[
    str | None, typer.Option(help=f"{', '.join(suite_names())}, or a YAML file of that form.")
]
SeqLengths = Annotated[
    str | None,
    typer.Option(
        help=f"Instead of a suite: lengths, such as 128,256,512. What is left out is {_DEFAULTS}."
    ),
]
HeadDim = Annotated[str | None, typer.Option(help="With --seq-lengths: head dims.")]
Heads = Annotated[int | None, typer.Option(help="With --seq-lengths: query heads.")]
KvHeads = Annotated[int | None, typer.Option(help="With --seq-lengths: key and value heads.")]
Batch = Annotated[int | None, typer.Option(help="With --seq-lengths: batch.")]
Dtype = Annotated[str | None, typer.Option(help="With --seq-lengths: dtypes, such as bf16,fp16.")]
Causal = Annotated[
    bool | None, typer.Option("--causal/--no-causal", help="With --seq-lengths; left out: both.")
]
Mode = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(MODES)}: backward alone, or both as in a training step. Left out: the"
        " mode of the suite, usually forward."
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="Ask for gradients that are the same bits in every call, and check."
    ),
]
Impls = Annotated[
    str | None, typer.Option(help="Impls or aliases, such as cuda,triton,flash; see --list.")
]
Baseline = Annotated[str | None, typer.Option(help="What ratios are to; left out, sdpa-flash.")]
Budget = Annotated[
    float | None,
    typer.Option(
        help="Seconds of timing for each workload, all impls together (10 to 50 samples of"
        " each; 5 of calls that take 10 s in all). Left out: 2 on a GPU, 1 on a CPU."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the inputs and of the order of timing.")]
Layouts = Annotated[
    str | None,
    typer.Option(
        help="Inputs contiguous as [B, S, H, D] (bshd), as [B, H, S, D] (bhsd), or both, of which"
        " the faster one counts for each impl. Left out: both on a GPU, bshd on a CPU."
    ),
]
Counters = Annotated[
    bool,
    typer.Option(
        "--counters",
        help="Put hardware counters into each row: tensor pipe, DRAM bytes, L2 hits, FLOPs.",
    ),
]
ListThem = Annotated[bool, typer.Option("--list", help="List suites and impls, and stop.")]


def bench_command(
    suite: Suite = None,
    seq_lengths: SeqLengths = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    batch: Batch = None,
    dtype: Dtype = None,
    causal: Causal = None,
    mode: Mode = None,
    deterministic: Deterministic = False,
    impl: Impls = None,
    baseline: Baseline = None,
    output: Annotated[Path, typer.Option(help="Result file.")] = Path("benchmark_results.json"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the result file; failed rows again.")
    ] = False,
    l2: Annotated[
        str | None, typer.Option(help="cold (left out, on a GPU), rotate or warm (on a CPU).")
    ] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Time replays of a CUDA graph of each call.")
    ] = False,
    time_budget: Budget = None,
    rest: Annotated[
        float,
        typer.Option(
            help="Idle time after each sample, as a multiple of the sample's time; 0.1 s at most."
            " 0: none; back-to-back samples may reach the power limit and throttle."
        ),
    ] = 2.0,
    layouts: Layouts = None,
    counters: Counters = False,
    seed: Seed = 0,
    device: Device = None,
    list_: ListThem = False,
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Time impls on a suite: check outputs, verify kernel names, time, check outputs again.

    Rows are saved after every workload; --resume goes on after an interruption. A file of the same
    name that is not resumed is kept as .bak. Exit codes: 1 the sweep could not finish, 2 bad input.
    """
    with bad_input("bench"):
        where, form = pick_device(device), form_of(form, as_json)
    if list_:
        list_choices(where)
        return
    with bad_input("bench"):
        from attnscope.bench.impls import BASELINES, resolve
        from attnscope.bench.timing import Settings, make_timer
        from attnscope.common.environment import environment
        from attnscope.common.results import Results

        shape = dict(head_dim=head_dim, heads=heads, kv_heads=kv_heads, batch=batch, dtype=dtype)
        works = pick_works(suite, seq_lengths, shape, causal, where.type, default="quick")
        works = in_mode(works, mode, deterministic, graph)
        (base,) = resolve([baseline or BASELINES[where.type]])
        impls = pick_impls(impl, where.type)
        if base not in impls:
            impls.append(base)
        asked = dict(l2=l2, budget_s=time_budget, layouts=layouts)
        chosen = USUAL[where.type] | {k: v for k, v in asked.items() if v is not None}
        settings = Settings(graph=graph, rest=rest, seed=seed, counters=counters, **chosen)
        make_timer(where, settings)
        results = Results.create(output, environment(where, asdict(settings)), resume)
    lost = _sweep(works, impls, base, results, where, settings)
    ids = {work.id for work in works}
    with printed(form, "bench") as facts:
        facts["env"] = results.env
        facts["rows"] = rows = [row for row in results.rows if row["workload"] in ids]
        show.print_bench(rows, results.env)
        say(f"{len(results.rows)} rows in {output}")
    if lost:
        say(f"bench: not finished: {lost}; go on with --resume", "red", stderr=True)
        raise typer.Exit(1)


def _sweep(
    works: list[Workload],
    impls: list[Impl],
    base: Impl,
    results: Any,
    device: torch.device,
    settings: Any,
) -> str | None:
    from attnscope.bench.counting import count_rows
    from attnscope.bench.runner import run_sweep

    with _progress() as progress:
        task = progress.add_task("", total=len(works))

        def advance(work: Workload, rows: list[dict[str, Any]]) -> None:
            done = ", ".join(f"{row['impl']} {row['status']}" for row in rows) or "was there"
            progress.update(task, advance=1, description=work.id)
            if not progress.console.is_terminal:
                progress.console.print(f"{work.id}: {done}", markup=False, soft_wrap=True)

        try:
            lost = run_sweep(works, impls, base, results, device, settings, advance)
            if settings.counters and lost is None:
                count_rows(works, impls, results, device, settings)
            return lost
        except KeyboardInterrupt:
            progress.stop()
            text = f"bench: stopped; {results.path} is whole, go on with --resume"
            say(text, "red", stderr=True)
            raise typer.Exit(130) from None


def export_command(
    results: Annotated[Path, typer.Argument(help="Result file.")],
    target: Annotated[Path, typer.Argument(help="File to write: .csv or .parquet.")],
    form: Form = TERMINAL,
    as_json: AsJson = False,
) -> None:
    """Write the rows of a result file as a table; lists become JSON text."""
    with bad_input("export"), printed(form_of(form, as_json), "export") as facts:
        from attnscope.common.results import export

        count = export(results, target)
        facts |= {"files": [str(target)], "rows": count}
        say(f"{target}: {count} rows of {results}")


def pick_impls(names: str | None, device_type: str) -> list[Impl]:
    """The impls named, or the default ones of the device."""
    from attnscope.bench.impls import ALIASES, DEFAULTS, resolve

    if names is None:
        return resolve(DEFAULTS[device_type])
    for name in split(names):
        if name in ALIASES:
            say(f"{name} is {ALIASES[name]}", stderr=True)
    return resolve(split(names))


def pick_works(
    suite: str | None,
    seq_lengths: str | None,
    shape: dict[str, Any],
    causal: bool | None,
    device_type: str,
    default: str,
) -> list[Workload]:
    """Workloads from a suite, or from lengths and a shape, never both."""
    given = {key: value for key, value in shape.items() if value is not None}
    given |= {} if causal is None else {"causal": causal}
    if seq_lengths is None:
        if given:
            option = f"--{next(iter(given)).replace('_', '-')}"
            raise ValueError(f"{option} must be given with --seq-lengths, got none")
        return load_suite(suite or default, device_type)
    if suite is not None:
        raise ValueError("suite or seq-lengths must be given, and one only, got both")
    case: dict[str, Any] = SHAPE[device_type] | {
        "causal": [False, True] if causal is None else causal
    }
    names = {"heads": "heads_q", "kv_heads": "heads_kv"}
    case |= {names.get(key, key): value for key, value in given.items()}
    if head_dim := given.get("head_dim"):
        case["head_dim"] = integers(head_dim, "--head-dim")
    if dtype := given.get("dtype"):
        long = {short: name for name, short in DTYPE_SHORT.items()}
        case["dtype"] = [long.get(name, name) for name in split(dtype)]
    return expand(case | {"seqlen": integers(seq_lengths, "--seq-lengths")})


def in_mode(
    works: list[Workload], mode: str | None, deterministic: bool, graph: bool = False
) -> list[Workload]:
    """The workloads in a mode; None keeps theirs. Workloads that become equal count once.

    Raises ValueError for an unknown mode, or one that a CUDA graph (`graph`) cannot capture.
    """
    if graph and "backward" in (mode, *(work.mode for work in works if mode is None)):
        raise ValueError(
            "mode must be forward or both with --graph, got backward: a graph cannot capture a "
            "backward without its forward"
        )
    changes: dict[str, Any] = {} if mode is None else {"mode": mode}
    changes |= {"deterministic": True} if deterministic else {}
    return list(dict.fromkeys(replace(work, **changes) for work in works))


def list_choices(device: torch.device) -> None:
    """Print suites, impls with what they need, aliases."""
    from attnscope.bench.impls import ALIASES, IMPLS

    say("suites: " + ", ".join(suite_names()))
    say(f"impls, on {device}:")
    for impl in IMPLS.values():
        why = impl.absent() if device.type in impl.ran else f"runs on {' and '.join(impl.ran)}"
        say(f"  {impl.name:15} {impl.about}" + (f" [{why}]" if why else ""))
    say("aliases: " + ", ".join(f"{short} is {name}" for short, name in ALIASES.items()))


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}")
    return Progress(*columns, text, console=console(stderr=True))
