"""ncu's raw pages: a real one of attention kernels on an H200, and the ways its form drifts."""

import csv
import io
from pathlib import Path

import pytest

from attnscope.nsight import evaluator, metrics, models, ncu_compare, roofline
from attnscope.nsight.diagnosis import findings, limit, residency, stalls
from attnscope.nsight.ncu_document import document
from attnscope.nsight.ncu_reader import Kernel, demangle, read_csv, to_base

FOLDER = Path(__file__).parents[1] / "support/ncu"
TEXT = (FOLDER / "attention.csv").read_text()
H200 = {"capability": (9, 0), "device": "NVIDIA H200"}


def read(text: str) -> list[Kernel]:
    return read_csv(text.splitlines(), "raw.csv")


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    return read(TEXT)


def rows(text: str = TEXT) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def written(table: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows(table)
    return out.getvalue()


def kernel(**values: float) -> Kernel:
    return Kernel(0, "k", values={metrics.NAMES[key]: v for key, v in values.items()}, **H200)


def test_a_real_page(kernels: list[Kernel]) -> None:
    assert [k.function for k in kernels] == [
        "forward_kernel", "backward_preprocess_kernel", "backward_kernel",
        "backward_postprocess_kernel", "flash_fwd_kernel",
    ]  # fmt: skip
    first = kernels[0]
    assert (first.grid, first.block) == ("(132, 1, 1)", "(512, 1, 1)")
    assert (first.device, first.capability) == ("NVIDIA H200", (9, 0))
    assert set(first.ranges) == {
        "attnscope::forward@attnscope", "measure@attnscope", "cuda-forward@attnscope",
    }  # fmt: skip
    # The page has us, Mbyte, Ghz and Kbyte/block, and commas in the FLOPs.
    assert first.get("time_ns") == pytest.approx(66464)
    assert first.get("dram_bytes") == pytest.approx(79.854592e6)
    assert first.get("clock_hz") == pytest.approx(1.702125e9)
    assert first.get("shared_dynamic") == pytest.approx(230400)
    assert first.get("tensor_bf16") == 35_433_480_192
    assert first.values["launch__cluster_size"] == 0, "unknown columns are kept"
    assert "derived_tempMetric4" in first.not_finite


@pytest.mark.parametrize(
    "drift", ["banner", "reordered", "extra", "no units", "plain numbers", "trailing lines"]
)
def test_pages_of_other_versions_give_the_same_kernels(drift: str, kernels: list[Kernel]) -> None:
    table = rows()
    if drift == "banner":
        text = f"loss: 1.0\n==PROF== Connected to process 1\n{TEXT}"
    elif drift == "reordered":
        text = written([[*row[::-1]] for row in table])
    elif drift == "extra":
        text = written([[*row, cell] for row, cell in zip(table, "xyzzyab", strict=True)])
    elif drift == "plain numbers":
        text = written([[cell.replace(",", "") if cell[:1].isdigit() and "," in cell else cell
                         for cell in row] for row in table])  # fmt: skip
    elif drift == "trailing lines":
        text = f"{TEXT}\n==PROF== Disconnected from process 1\n"
    else:
        names = ("launch__grid_size", "ID", "Kernel Name")
        at = [table[0].index(name) for name in names]
        text = written([[row[i] for i in at] for row in (table[0], *table[2:])])
        assert [k.get("grid_size") for k in read(text)] == [k.get("grid_size") for k in kernels]
        return
    found = read(text)
    assert [k.symbol for k in found] == [k.symbol for k in kernels]
    assert [k.get("time_ns") for k in found] == [k.get("time_ns") for k in kernels]
    assert [k.get("tensor_bf16") for k in found] == [k.get("tensor_bf16") for k in kernels]


def test_a_page_with_a_header_only_has_no_kernels() -> None:
    assert read(written(rows()[:1])) == []
    assert read(written(rows()[:2])) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got 'an empty file'"),
        ("Time (%),Total Time (ns)\n1,2\n", "got 'Time \\(%\\),Total Time \\(ns\\)'"),
        ("ID,Process ID\n0,1\n", "must have the column 'Kernel Name', got the columns ID, Process"),
        (TEXT[: len(TEXT) // 2].rsplit(",", 3)[0], "must have 99 cells, as the header, got"),
    ],
)
def test_a_page_that_is_none_is_refused_with_what_it_has(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        ("ns", 1), ("nsecond", 1), ("us", 1e3), ("msecond", 1e6), ("s", 1e9), ("Mbyte", 1e6),
        ("byte", 1), ("Kbyte/block", 1e3), ("Tbyte/s", 1e12), ("Gbyte/second", 1e9), ("Ghz", 1e9),
        ("cycle/nsecond", 1e9), ("sector/us", 1e6), ("%", 1), ("block", 1), ("inst", 1), ("", 1),
        ("cycle", 1), ("Kbyte/cycle", 1e3), ("warp", 1),
    ],
)  # fmt: skip
def test_units_become_base_units(unit: str, factor: float) -> None:
    assert to_base(unit) == factor


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ('7  "<default domain>:timed:none:none:none:none:none:none" ', ("timed",)),
        ('7  "d:a::b:Int64:5:none:none:REGISTERED:a::b"  "d:x:none:none:RGB:0xff:ASCII:x" ',
         ("a::b@d", "x@d")),
        ("", ()),
    ],
)  # fmt: skip
def test_ranges_of_a_launch(text: str, ranges: tuple[str, ...]) -> None:
    name = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
    page = written([["ID", name, "Kernel Name"], ["0", text, "k"]])
    assert read(page)[0].ranges == ranges


def test_names_of_kernels() -> None:
    symbol = demangle("_ZN9attnscope4sm9014forward_kernelINS0_13ForwardConfigI13__nv_bfloat16Li128E"
                      "Li192EEEEEvNS_16ForwardArgumentsE")  # fmt: skip
    assert Kernel(0, symbol).name == "attnscope sm90 forward bf16 D128 M192"
    assert Kernel(0, symbol).function == "forward_kernel"
    plain = (
        "void at::native::<unnamed>::distribution_kernel<float, 4>(int, (anonymous namespace)::T)"
    )
    assert Kernel(0, plain).function == "distribution_kernel"
    assert Kernel(0, demangle("nvjet_hsh_128x256")).function == "nvjet_hsh_128x256"


def test_the_limits_of_real_kernels(kernels: list[Kernel]) -> None:
    lines = [limit(k).line for k in kernels]
    assert lines[0].startswith(
        "latency-bound: the busiest unit is tensor pipe 64 %; warps wait for"
    )
    assert lines[1] == ("memory-bound: DRAM 62 %, 2,969 GB/s of DRAM traffic, L2 hit rate 51 %")
    assert lines[3].startswith("memory-bound: DRAM 69 %")
    assert [stall.name for stall in stalls(kernels[0])][:2] == ["long_scoreboard", "wait"]
    room = residency(kernels[0])
    assert room.limiter == "registers and shared memory"
    assert room.lift.startswith("at most 64 registers a thread, now 128; at most 113.0 KiB")
    seen = [text for text, _ in findings(kernels[4])]
    assert any("988,544 local-memory instructions" in text for text in seen)
    assert not list(findings(kernels[0])), "advice needs numbers that support it"


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({"tensor_pct": 95, "dram_pct": 20}, "compute", "tensor pipe 95 %"),
        ({"mufu_pct": 80, "tensor_pct": 60}, "compute", "MUFU (exp) 80 %"),
        ({"tensor_pct": 60, "mufu_pct": 58, "dram_pct": 5}, "overlap", "tensor pipe 60 % and MUFU"),
        ({"dram_pct": 85, "l2_pct": 70, "tensor_pct": 30}, "memory", "DRAM 85 %"),
        ({"l2_pct": 80, "dram_pct": 20}, "memory", "L2 80 %"),
        ({"l2_pct": 72, "dram_pct": 70}, "memory", "DRAM 70 %"),
        ({"tensor_pct": 20, "grid_size": 32, "sms": 132}, "launch", "32 on 132 SMs"),
        ({"tensor_pct": 20, "stall_barrier": 3, "stall_wait": 1}, "latency", "barrier (75 %)"),
        ({}, "unknown", "no utilisation"),
    ],
)  # fmt: skip
def test_the_limit_follows_from_the_counters(
    values: dict[str, float], kind: str, words: str
) -> None:
    found = limit(kernel(**values))
    assert found.kind == kind and words in found.line and found.advice


def test_findings_have_their_numbers() -> None:
    bad = kernel(
        bank_conflicts=50, shared_wavefronts=100, local_loads=7, l2_bytes=3200, load_sectors=50,
        load_bytes_per_sector=8, store_sectors=1, store_bytes_per_sector=4, occupancy_pct=20,
        occupancy_limit_pct=50,
    )  # fmt: skip
    seen = " / ".join(text for text, _ in findings(bad))
    assert "bank conflicts in 50 % of 100 wavefronts" in seen
    assert "7 local-memory instructions" in seen
    assert "global loads use 8 of 32 bytes" in seen
    assert "global stores" not in seen, "one sector of a hundred does not matter"
    assert "occupancy 20 % of 50 % possible" in seen


def test_the_roofline_of_real_kernels(kernels: list[Kernel]) -> None:
    forward, before, _, _, flash = (roofline.point_of(k) for k in kernels)
    assert forward and before and flash
    assert forward.dtype == "bfloat16" and before.dtype == "float32"
    assert forward.rate == pytest.approx(35_433_480_192 / 66.464e-6)
    assert forward.intensity == pytest.approx(35_433_480_192 / 79.854592e6)
    # 132 SMs, 4096 FLOPs a cycle; 1504 bytes a memory cycle.
    assert forward.compute_peak == pytest.approx(132 * 4096 * 1.702125e9)
    assert forward.dram_peak == pytest.approx(1504 * 3.198925e9)
    assert forward.lowest == ("compute", forward.compute_peak)
    assert before.lowest and before.lowest[0] == "DRAM"
    row = roofline.table([before])[0]
    assert row["of roof %"] == pytest.approx(kernels[1].get("dram_pct"), abs=0.1)
    no_card = Kernel(0, "k", values=dict(kernels[0].values), device="Unknown GPU")
    assert roofline.point_of(no_card).compute_peak is None  # type: ignore[union-attr]
    assert roofline.point_of(kernel(time_ns=1)) is None


def test_kernels_without_a_counted_flop_are_not_on_the_roofline(kernels: list[Kernel]) -> None:
    peaks = {"dram_peak": 1504.0, "memory_clock_hz": 3e9}
    copy = kernel(time_ns=1e3, dram_bytes=1e6, tensor_bf16=0.0, **peaks)
    assert copy.flops == (0, 0) and roofline.point_of(copy) is None
    section = next(one for one in document([copy, kernels[0]], "t", []).sections
                   if one.title == "Roofline")  # fmt: skip
    assert len(section.rows) == 1 and "without a counted FLOP are left out: 1" in section.notes[0]


def test_models_against_counters(kernels: list[Kernel], tmp_path: Path) -> None:
    known = models.read_models(FOLDER / "models.json")
    found = {row["range"]: row for row in models.table(kernels, known)}
    assert set(found) == {
        "cuda-forward@attnscope", "cuda-backward@attnscope", "sdpa-flash-forward@attnscope",
    }  # fmt: skip
    forward = found["cuda-forward@attnscope"]
    pairs = 2 * 16 * 2048 * 2049 / 2
    assert forward["FLOP ratio"] == pytest.approx(35_433_480_192 / (4 * 128 * pairs))
    assert forward["why"].startswith("extra FLOPs: parts of tiles that are masked or past the end;")
    assert found["cuda-backward@attnscope"]["kernels"] == 3
    assert models.read_models(tmp_path / "none.json") == {}
    (tmp_path / "bad.json").write_text('{"a": {"flops": 1}}')
    with pytest.raises(ValueError, match=r"must map each range to flops, bytes and calls, got"):
        models.read_models(tmp_path / "bad.json")


def test_a_comparison_has_what_moved(kernels: list[Kernel]) -> None:
    faster = [
        Kernel(**vars(one) | {"values": {
            name: value / 2 if name == metrics.NAMES["time_ns"] else value
            for name, value in one.values.items()
        }})
        for one in kernels
    ]  # fmt: skip
    moved = ncu_compare.changes(kernels[0], faster[0])
    assert [row["metric"] for row in moved] == ["time_ns", "clock_hz"]
    assert moved[0]["change"] == "-50.0 %" and moved[1]["change"] == "+0.0 %"
    made = ncu_compare.document(kernels, faster[:2], ("a", "b"))
    times = made.sections[0]
    assert [row["speed-up"] for row in times.rows] == [2.0, 2.0]
    assert "only in a:" in times.notes[0]
    renamed = Kernel(**vars(kernels[0]) | {"symbol": "void other<1>()"})
    assert ncu_compare.pair_kernels(kernels[:1], [renamed])[0] == [(kernels[0], renamed)]
    with pytest.raises(ValueError, match="must have kernels in common, got 1 and 0"):
        ncu_compare.document(kernels[:1], [], ("a", "b"))


def test_the_document_fits_and_its_page_has_the_roofline(
    kernels: list[Kernel], tmp_path: Path
) -> None:
    from attnscope.nsight.output import short_markdown

    known = models.read_models(FOLDER / "models.json")
    made = document(kernels, "ncu: test", ["five kernels"], known)
    titles = [section.title for section in made.sections]
    assert titles[:4] == [
        "What limits each kernel", "Speed of light", "Roofline", "Model against counters",
    ]  # fmt: skip
    assert len(short_markdown(made).splitlines()) <= 60
    made.write_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "TFLOP/s at the measured clock" in page


@pytest.mark.parametrize("chip", metrics.CHIPS)
def test_metric_names_exist_on_every_chip(chip: str) -> None:
    names = metrics.names_on(chip, list(metrics.NAMES))
    names = [name for name in names if not name.startswith(metrics.ONLY_IN_NCU)]
    try:
        assert evaluator.unknown(chip, names) == {}
        chips = evaluator.Evaluator.of(chip)
    except LookupError as reason:
        pytest.skip(str(reason))
    assert len(names) > 50
    missing = [metrics.NAMES[key] for key in metrics.MISSING[chip]]
    assert not any(chips.has(name) for name in missing), "the table leaves out what exists"
    assert "dram__bytes" in chips.similar("dram__byte.sum")
    assert chips.has("dram__bytes.sum") and not chips.has("dram__bytes.summ")


def test_an_unknown_chip_gets_the_names_that_all_have() -> None:
    common = set(metrics.names_on(None, list(metrics.NAMES)))
    for chip in metrics.CHIPS:
        assert common <= set(metrics.names_on(chip, list(metrics.NAMES)))
    assert metrics.chip_of((9, 0)) == "GH100" and metrics.chip_of((7, 0)) is None
