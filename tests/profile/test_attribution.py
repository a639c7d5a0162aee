"""Owners of GPU time: each kernel has one op, range and module, or is reported as unowned."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trace import (
    RECORDED,
    RECORDINGS,
    check_tables,
    cpu,
    kernel,
    launch,
    named,
    op,
    write_trace,
)

from attnscope.profile.analysis.flops import FlopCounts
from attnscope.profile.analysis.tables import (
    NO_OP,
    NO_RANGE,
    REPLAY,
    copies_table,
    kernel_table,
    memory_table,
    module_table,
    operator_table,
    stage_table,
)
from attnscope.profile.attribution.audit import audit
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.render.terminal import attribution_line
from attnscope.profile.trace.events import GpuEvent, Trace
from attnscope.profile.trace.markers import SENTINEL, WAIT
from attnscope.profile.trace.reader import read_trace
from attnscope.studies.ops.kineto import comparison


def recording(name: str) -> Attribution:
    return Attribution(read_trace(RECORDED / f"{name}.json.gz"))


def made(path: Path, *events: dict) -> Attribution:
    return Attribution(read_trace(write_trace(path / "made.json", *events)))


def operators(owners: Attribution) -> dict[str, dict]:
    table = operator_table(owners, FlopCounts(owners), None, "no card")
    return {row["name"]: row for row in table.to_dict("records")}


def stages(owners: Attribution) -> dict[str, dict]:
    table = stage_table(owners, FlopCounts(owners), None, "no card")
    return {row["path"]: row for row in table.to_dict("records")}


def tables(owners: Attribution) -> tuple:
    counts = FlopCounts(owners)
    return (
        operator_table(owners, counts, None, "no card"),
        kernel_table(owners),
        stage_table(owners, counts, None, "no card"),
    )


# Recordings


@pytest.mark.parametrize("name", RECORDINGS)
def test_tables_of_a_recording_add_up_to_its_kernels(name: str) -> None:
    owners = recording(name)
    made_of = tables(owners)
    check_tables(owners, *made_of)
    total = sum(k.duration for k in owners.trace.kernels) / 1e3
    assert made_of[0]["self_gpu_us"].sum() == pytest.approx(total)
    assert made_of[1]["total_us"].sum() == pytest.approx(total)
    assert made_of[2]["gpu_self_us"].sum() == pytest.approx(total)
    assert made_of[0].iloc[-1]["name"] == NO_OP
    assert copies_table(owners)["calls"].sum() == len(owners.trace.copies)


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_join_by_time_agrees_with_the_external_ids(name: str) -> None:
    owners = recording(name)
    assert owners.disagreements == []
    by_id = {e.external_id: e for e in owners.trace.cpu if e.kind == "op"}
    for work in owners.trace.gpu:
        assert owners.op(work) is by_id.get(work.external_id)


def test_threads_with_one_pthread_id_own_what_they_launched() -> None:
    """Two threads run in turn; PyTorch records the calls of both under a third thread's id."""
    owners = recording("threads")
    numbers = {e.thread for e in owners.trace.cpu if e.kind == "range"}
    with gzip.open(RECORDED / "threads.json.gz", "rt") as file:
        raw = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "cuda_runtime"]
    assert len(numbers) == 2 and not numbers & {e["tid"] for e in raw}
    # Each thread ends with a launch outside PyTorch. Its thread is unknown, so it is unowned.
    past = [k for k in owners.trace.kernels if "spin_kernel" in k.name]
    assert [(owners.op(k), owners.ranges(k)) for k in past] == [(None, ())] * 2
    assert owners.unowned == past
    others = [k for k in owners.trace.kernels if k not in past]
    around = [(len(owners.ranges(k)), owners.ranges(k)[-1].thread) for k in others]
    assert {depth for depth, _ in around} == {1} and len(around) == 18
    assert Counter(thread for _, thread in around) == dict.fromkeys(numbers, 9)


def test_every_op_of_the_ops_recording_has_its_kernels_and_all_of_them() -> None:
    owners = recording("ops")
    assert owners.share == 1.0 and owners.unowned == []
    assert attribution_line(owners) == "100.00 % of 150.9 us GPU time owned by ops"
    symbols = {
        "aten::mm": ["nvjet"],
        "attnscope::forward": ["attnscope::sm90"],
        "attnscope_triton::forward": ["attnscope_triton_forward"],
        "aten::_scaled_dot_product_flash_attention": ["pytorch_flash"],
        "fa3_fwd::fwd": ["flash::enable_sm90", "FillFunctor"],
    }
    rows = operators(owners)
    for name, parts in symbols.items():
        kernels = [k for k in owners.trace.kernels if any(part in k.name for part in parts)]
        assert rows[name]["gpu_us"] == pytest.approx(sum(k.duration for k in kernels) / 1e3)
        assert rows[name]["calls"] == 3 and rows[name]["kernels"] == len(kernels)
        assert rows[name]["gpu_mean_us"] == pytest.approx(rows[name]["gpu_us"] / 3)


def test_backward_belongs_to_the_range_around_the_call_of_backward() -> None:
    owners = recording("train")
    autograd = [e for e in owners.trace.cpu if e.name.startswith("autograd::engine")]
    threads = {e.thread for e in autograd}
    assert len(threads) == 1
    for kernel_ in owners.trace.kernels:
        path = [r.name for r in owners.ranges(kernel_)]
        if owners.trace.cpu[kernel_.launch].thread in threads:
            assert path == ["backward"]
        else:
            assert path[0] in ("forward", "optimizer", "backward")
    found = stages(owners)
    assert [found[p]["kernels"] for p in ("forward", "backward", "optimizer")] == [46, 102, 16]
    assert found["forward/attention"]["gpu_us"] < found["forward"]["gpu_us"]
    assert found["forward"]["gpu_self_us"] == pytest.approx(
        found["forward"]["gpu_us"]
        - found["forward/attention"]["gpu_us"]
        - found["forward/mlp"]["gpu_us"]
    )


def test_backward_belongs_to_the_forward_op_with_its_sequence_number() -> None:
    """Compare with Kineto's "fwdbwd" arrows, which the trace reader does not read."""
    owners = recording("train")
    arrows = json.loads(_unpacked("train"))["traceEvents"]
    arrows = [e for e in arrows if e.get("cat") == "fwdbwd"]
    origin = min(e["ts"] for e in json.loads(_unpacked("train"))["traceEvents"] if "dur" in e)
    ends = {e["id"]: round((e["ts"] - origin) * 1e3) for e in arrows if e["ph"] == "f"}
    starts = {e["id"]: round((e["ts"] - origin) * 1e3) for e in arrows if e["ph"] == "s"}
    assert len(ends) == 114
    linked = 0
    for event in owners.trace.cpu:
        for number, end in ends.items():
            if event.forward_thread and event.kind == "op" and abs(event.start - end) <= 1:
                if event.name.startswith("autograd::engine"):
                    continue
                forward = owners.forward_op(event)
                assert forward is not None and abs(forward.start - starts[number]) <= 1
                linked += 1
    assert linked >= 100


def _unpacked(name: str) -> bytes:
    import gzip

    return gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes())


def test_backward_time_stands_on_the_row_of_the_forward_op() -> None:
    rows = operators(recording("train"))
    assert rows["aten::addmm"]["backward_gpu_us"] == pytest.approx(
        rows["autograd::engine::evaluate_function: AddmmBackward0"]["gpu_us"]
    )
    assert rows["Sq"]["backward_gpu_us"] >= rows["SqBackward"]["gpu_us"] > 0
    assert rows["aten::mm"]["backward_gpu_us"] == 0


def test_modules_own_their_forward_and_their_backward() -> None:
    owners = recording("stack")
    table = module_table(owners).set_index("module")
    block = table.loc["Sequential_0/Block_0"]
    assert block.forward_gpu_us > 0 and block.backward_gpu_us > block.forward_gpu_us
    blocks = table.loc["Sequential_0/Block_1"].gpu_us + block.gpu_us
    assert blocks == pytest.approx(table.loc["Sequential_0"].gpu_us)
    linear = table.loc["Sequential_0/Block_0/Linear_0"]
    assert (linear.kernels, linear.depth) == (8, 2)
    assert module_table(recording("train")).empty


def test_stacks_lead_to_the_line_that_called() -> None:
    owners = recording("stack")
    kernels = [k for k in owners.trace.kernels if "flash" in k.name or "sdpa" in k.name]
    assert kernels
    for one in kernels:
        stack = owners.stack(one)
        assert stack[-1] == "<built-in function scaled_dot_product_attention>"
        assert stack[-2].startswith("traces.py(") and stack[-2].endswith("): forward")
    assert owners.stack(kernels[0])[0].startswith("traces.py(")
    train = recording("train")
    assert train.stack(train.trace.kernels[0]) == ()


def test_allocations_belong_to_the_op_that_made_them() -> None:
    table = memory_table(recording("stack"))
    mm = table[(table.op == "aten::mm") & (table.device == "cuda:0")].iloc[0]
    assert (mm.allocations, mm.allocated_bytes) == (32, 5242880)
    assert memory_table(recording("train")).empty


def test_plain_triton_launches_are_listed_with_their_range_and_the_total_is_kept() -> None:
    owners = recording("raw")
    assert [k.name for k in owners.unowned] == ["raw_add"] * 3
    paths = [tuple(r.name for r in owners.ranges(k)) for k in owners.unowned]
    assert sorted(paths) == [(), ("outer",), ("outer", "inner")]
    rows = operators(owners)
    assert rows[NO_OP]["kernels"] == 3 and rows[NO_OP]["calls"] == 3
    assert rows[NO_OP]["self_gpu_us"] == pytest.approx(3.327)
    assert sum(row["self_gpu_us"] for row in rows.values()) == pytest.approx(6.016)
    line = attribution_line(owners)
    assert line.startswith("44.7 % of 6.016 us GPU time owned by ops; not owned: ")
    assert line.count("raw_add") == 3 and "in range outer/inner" in line and "in no range" in line


def test_replayed_kernels_belong_to_the_replay_where_the_capture_was_not_recorded() -> None:
    owners = recording("graph")
    replayed = [k for k in owners.trace.kernels if owners.replay(k)]
    assert len(replayed) == 9 and owners.unowned == [] and owners.share == 1.0
    assert owners.replayed_ns == sum(k.duration for k in replayed) and owners.captured_ns == 0
    assert {r.name for k in replayed for r in owners.ranges(k)} == {"replay"}
    row = operators(owners)[REPLAY]
    assert row["kernels"] == 9 and row["calls"] == 3
    assert row["self_gpu_us"] == pytest.approx(owners.replayed_ns / 1e3)
    assert "replays of CUDA graphs (the trace does not show which" in attribution_line(owners)


def test_streams_that_overlap_are_busy_once() -> None:
    owners = recording("streams")
    row = stages(owners)["streams"]
    assert row["gpu_us"] > 1.3 * row["gpu_busy_us"]
    assert row["gpu_busy_us"] <= row["gpu_span_us"]
    assert busy_ns(owners.trace.gpu) < owners.trace.end - owners.trace.start
    tiny = stages(owners)["tiny"]
    assert tiny["kernels"] == 10 and 0 < tiny["gpu_us"] / 10 < 2


def test_module_loading_is_no_device_time() -> None:
    owners = recording("cold")
    row = operators(owners)["aten::mm"]
    assert row["gpu_us"] == pytest.approx(6.88)  # key_averages() reports 41.28
    rows = json.loads((RECORDED / "cold.averages.json").read_text())
    table = comparison(owners, rows).set_index("name")
    mm = table.loc["aten::mm"]
    assert (mm.kineto_us, mm.ours_us) == (pytest.approx(41.28), pytest.approx(6.88))
    assert mm.explanation.startswith("34.40 us of overhead counted as device time")
    assert "overhead of the driver" in table.loc["Lazy Function Loading"].explanation
    cold = table.loc["cold"].set_index("row")
    assert cold.loc["CUDA"].explanation.startswith("annotation row")
    assert table.loc["nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT"].explanation.startswith("double row")


def test_kinetos_table_is_explained_row_by_row() -> None:
    for name in ("ops", "raw", "cold"):
        rows = json.loads((RECORDED / f"{name}.averages.json").read_text())
        table = comparison(recording(name), rows)
        assert not table.explanation.str.contains("not explained|kineto has less").any()
        assert len(table) == sum(row["dev_total"] > 0 for row in rows)
    table = comparison(recording("raw"), json.loads((RECORDED / "raw.averages.json").read_text()))
    copy = table.set_index("name").loc["aten::copy_"]
    assert copy.ours_us == 0 and copy.explanation.startswith("copies and fills")


def test_rows_that_are_no_ops_are_marked(tmp_path: Path) -> None:
    owners = made(
        tmp_path, named("a", 0, 9), op("a", 1, 8), cpu("python_function", "f.py(1): f", 2, 7),
        launch(1, 3), kernel(1, 5, 6, "a"),
    )  # fmt: skip
    about = {"count": 1, "self_dev": 1.0, "dev_total": 1.0, "cpu": 1.0}
    rows = [
        {"key": key, "dev": f"DeviceType.{device}", "ua": annotation} | about
        for key, device, annotation in (
            ("a", "CPU", False), ("a", "CPU", True), ("a", "CUDA", True), ("a", "CUDA", False),
            ("f.py(1): f", "CPU", False), ("cudaLaunchKernel", "CPU", False),
        )
    ]  # fmt: skip
    said = [text.split(":")[0] for text in comparison(owners, rows)["explanation"]]
    assert said == [
        "same", "a range", "annotation row", "double row", "a Python frame", "a CUDA call",
    ]  # fmt: skip


# Made traces


def test_annotations_on_the_gpu_are_not_counted(tmp_path: Path) -> None:
    """A range of 100 us with an op whose kernel takes 60 us: each has 60 us, counted once."""
    annotation = kernel(0, 0, 100, "step") | {"cat": "gpu_user_annotation"}
    owners = made(
        tmp_path,
        named("step", 0, 100), op("attn", 10, 50), launch(1, 20), kernel(1, 30, 90), annotation,
        {**kernel(9, 0, 50, "Stream Synchronize"), "cat": "cuda_sync"},
    )  # fmt: skip
    assert owners.total_ns == 60_000
    assert operators(owners)["attn"]["gpu_us"] == 60 == operators(owners)["attn"]["self_gpu_us"]
    step = stages(owners)["step"]
    assert (step["gpu_us"], step["gpu_busy_us"], step["gpu_span_us"]) == (60, 60, 60)


def test_every_kind_of_launch_call_is_joined_to_its_op(tmp_path: Path) -> None:
    calls = ["cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC"]
    events = []
    for at, (name, call) in enumerate(zip("abcd", calls, strict=True)):
        # External ids differ from correlation ids: a mix-up would lose the time.
        events += [
            op(name, 100 * at, 100 * at + 50, **{"External id": 7 - at}),
            launch(at + 1, 100 * at + 10, call),
            kernel(at + 1, 100 * at + 60, 100 * at + 70, **{"External id": 7 - at}),
        ]
    events.append(kernel(99, 1000, 1010, "lonely"))
    owners = made(tmp_path, *events)
    rows = operators(owners)
    assert [rows[name]["gpu_us"] for name in "abcd"] == [10] * 4
    assert rows[NO_OP]["self_gpu_us"] == 10 and owners.total_ns == 50_000
    assert "1 x lonely, 10 us, launch not in the trace" in attribution_line(owners)
    assert [k.name for k in audit(owners.trace).orphans] == ["lonely"]


def test_an_external_id_is_enough_where_the_launch_is_missing(tmp_path: Path) -> None:
    owners = made(
        tmp_path,
        named("r", 0, 60), op("a", 0, 50, **{"External id": 3}),
        kernel(8, 60, 70, **{"External id": 3}),
    )  # fmt: skip
    assert operators(owners)["a"]["gpu_us"] == 10
    assert [r.name for r in owners.ranges(owners.trace.kernels[0])] == ["r"]


def test_an_op_inside_one_of_its_own_name_counts_once(tmp_path: Path) -> None:
    owners = made(
        tmp_path, op("a", 0, 100), op("b", 10, 90), op("a", 20, 80), launch(1, 30),
        kernel(1, 40, 50),
    )  # fmt: skip
    row = operators(owners)["a"]
    assert (row["gpu_us"], row["cpu_us"], row["self_cpu_us"], row["calls"]) == (10, 100, 80, 1)


def test_overlapping_ranges_both_hold_what_ran_in_both(tmp_path: Path) -> None:
    owners = made(
        tmp_path,
        named("a", 0, 100), named("b", 50, 150), op("x", 60, 70), launch(1, 61), kernel(1, 65, 75),
        op("y", 110, 120), launch(2, 111), kernel(2, 115, 125),
    )  # fmt: skip
    paths = [[r.name for r in owners.ranges(k)] for k in owners.trace.kernels]
    assert paths == [["a", "b"], ["b"]]
    check_tables(owners, *tables(owners))


def test_a_range_on_another_thread_owns_nothing_here(tmp_path: Path) -> None:
    owners = made(
        tmp_path, named("other", 0, 100, tid=2), op("x", 10, 20), launch(1, 11), kernel(1, 30, 40)
    )
    assert owners.ranges(owners.trace.kernels[0]) == ()
    assert stages(owners)[NO_RANGE]["kernels"] == 1


def test_a_backward_whose_forward_is_not_in_the_window_has_none(tmp_path: Path) -> None:
    owners = made(tmp_path, op("Back", 0, 5, **{"Sequence number": 5, "Fwd thread id": 1}))
    assert owners.forward_op(owners.trace.cpu[0]) is None


def test_a_range_first_entered_late_stands_under_the_one_around_it(tmp_path: Path) -> None:
    owners = made(
        tmp_path,
        named("forward", 0, 10), named("backward", 20, 30), named("forward", 40, 60),
        named("late", 45, 50), op("x", 46, 47), launch(1, 46), kernel(1, 48, 49),
    )  # fmt: skip
    assert list(stages(owners)) == ["forward", "forward/late", "backward"]


# Audit and checks


def test_a_launch_without_a_kernel_is_lost_and_reported(tmp_path: Path) -> None:
    events = [
        e
        for at in range(20)
        for e in (launch(at + 1, 10 * at), kernel(at + 1, 10 * at + 5, 10 * at + 6))
    ]
    whole = audit(made(tmp_path, *events).trace)
    assert (whole.launches, whole.lost, whole.problem) == (20, [], None)
    events = [e for e in events if not (e["cat"] == "kernel" and e["args"]["correlation"] < 4)]
    lost = audit(made(tmp_path, *events).trace)
    assert len(lost.lost) == 3
    assert "3 of 20 launches have no kernel (3 cudaLaunchKernel)" in str(lost.problem)


def test_captured_launches_are_not_lost() -> None:
    found = audit(recording("graph_both").trace)
    assert (found.launches, found.captured, found.problem) == (5, 3, None)
    assert all(audit(recording(name).trace).problem is None for name in RECORDINGS)


def test_a_capture_may_end_on_another_thread(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json",
        launch(1, 10, "cudaStreamBeginCapture_v10000"), launch(2, 12),
        launch(3, 20, "cudaStreamEndCapture_v10000", tid=2), launch(4, 30),
    )  # fmt: skip
    found = audit(read_trace(path))
    assert (found.captured, found.launches, len(found.lost)) == (1, 1, 1)


def test_launches_of_autograd_are_captured_too(tmp_path: Path) -> None:
    events = [
        launch(1, 0, "cudaStreamBeginCapture_v10000"), launch(2, 10), launch(3, 20, tid=9),
        launch(4, 30, "cudaStreamEndCapture_v10000"), launch(5, 40),
    ]  # fmt: skip
    found = audit(made(tmp_path, *events).trace)
    assert (found.captured, found.launches, len(found.lost)) == (2, 1, 1)


def test_ops_that_cross_inside_another_leave_it_no_negative_time(tmp_path: Path) -> None:
    rows = operators(made(tmp_path, op("a", 0, 20), op("x", 1, 15), op("y", 2, 16), op("z", 3, 17)))
    assert (rows["a"]["cpu_us"], rows["a"]["self_cpu_us"]) == (20, 4)


def test_kernels_without_a_launch_count_one_by_one(tmp_path: Path) -> None:
    owners = made(tmp_path, op("a", 0, 5), kernel(7, 10, 20), kernel(8, 20, 20), kernel(9, 30, 40))
    row = operators(owners)[NO_OP]
    assert (row["calls"], row["kernels"], row["self_gpu_us"]) == (3, 3, 20)


def test_missing_sentinels_are_a_problem_with_a_cause() -> None:
    trace = Trace(sentinels=[3, 0])
    assert "no kernel of 1 of the 2 sentinels" in str(audit(trace).problem)
    assert "another profiler is attached" in str(audit(Trace(sentinels=[0, 0])).problem)
    assert audit(Trace(sentinels=[1, 3])).problem is None


@settings(deadline=None)  # other tests may keep the processor busy
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_is_the_number_of_instants_covered(spans: list[tuple[int, int]]) -> None:
    events = [GpuEvent("kernel", "k", start, start + length, 0, 7) for start, length in spans]
    covered = {at for start, length in spans for at in range(start, start + length)}
    assert busy_ns(events) == len(covered)


def test_a_trace_without_gpu_work_has_no_share(tmp_path: Path) -> None:
    owners = made(tmp_path, op("a", 0, 10), cpu("python_function", "f", 2, 3))
    assert owners.share is None
    assert attribution_line(owners) == "no GPU time: no kernel ran in the region"
    check_tables(owners, *tables(owners))


def test_a_thread_with_the_number_of_one_that_ended_owns_its_kernels(tmp_path: Path) -> None:
    """The profiler keeps the first thread id seen for a pthread id, so all calls have id 1."""
    path = write_trace(
        tmp_path / "t.json",
        op("old", 0, 20, **{"External id": 1}), launch(1, 5, **{"External id": 1}),
        kernel(1, 8, 10, "a", **{"External id": 1}),
        named("loop", 100, 200, tid=2),
        op("new", 110, 120, tid=2, **{"External id": 2}),
        launch(2, 112, **{"External id": 2}), kernel(2, 115, 118, "b", **{"External id": 2}),
        launch(3, 130), kernel(3, 132, 134, "raw"),
        op("live", 100, 200, tid=3, **{"External id": 3}),
        launch(4, 131, tid=3, **{"External id": 3}), kernel(4, 135, 139, "c"),
    )  # fmt: skip
    owners = Attribution(read_trace(path))
    found = {
        work.name: (getattr(owners.op(work), "name", None), [r.name for r in owners.ranges(work)])
        for work in owners.trace.gpu
    }
    assert found == {
        "a": ("old", []), "b": ("new", ["loop"]), "raw": (None, []), "c": ("live", [])
    }  # fmt: skip
    assert not owners.disagreements


def test_the_profilers_own_work_is_known_by_its_kernel_where_the_thread_is_not(
    tmp_path: Path,
) -> None:
    spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    path = write_trace(
        tmp_path / "t.json",
        named(WAIT, 0, 5, tid=2), launch(9, 1, "cudaDeviceSynchronize"),
        named(SENTINEL, 10, 20, tid=2), launch(1, 12), kernel(1, 14, 15, spin),
        op("mine", 30, 40, tid=2, **{"External id": 5}), launch(2, 32, **{"External id": 5}),
        kernel(2, 36, 38, "k", **{"External id": 5}),
        named(WAIT, 50, 55, tid=2), named(SENTINEL, 60, 70, tid=2), launch(3, 62),
        kernel(3, 64, 65, spin), launch(10, 80, "cudaDeviceSynchronize"),
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.sentinels == [1, 1] and (trace.start, trace.end) == (20_000, 60_000)
    assert [(e.kind, e.name, e.thread) for e in trace.cpu] == [
        ("op", "mine", 2), ("call", "cudaLaunchKernel", 2)
    ]  # fmt: skip
    owner = Attribution(trace).op(trace.gpu[0])
    assert owner is not None and owner.name == "mine"


def test_a_wait_of_another_thread_meanwhile_is_not_the_profilers(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json",
        named(WAIT, 0, 5), named(SENTINEL, 10, 40), launch(1, 12), kernel(1, 14, 15, "spin_kernel"),
        op("add", 20, 90, tid=2, **{"External id": 1}), named("mine", 5, 95, tid=2),
        launch(2, 30, tid=2), kernel(2, 45, 50, "spin_kernel"),
        launch(3, 60, tid=2), kernel(3, 65, 70, "raw"),
        named(WAIT, 100, 105), named(SENTINEL, 110, 120), launch(4, 112),
        kernel(4, 114, 115, "spin_kernel"),
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.sentinels == [1, 1] and [k.name for k in trace.gpu] == ["raw"]
    assert [r.name for r in Attribution(trace).ranges(trace.gpu[0])] == ["mine"]


def test_ranges_are_those_of_the_op_where_clocks_differ(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json",
        named("forward", 10, 50), op("mm", 10, 50, **{"External id": 1}),
        launch(1, 9.8, **{"External id": 1}), kernel(1, 60, 70, **{"External id": 1}),
    )  # fmt: skip
    owners = Attribution(read_trace(path))
    (work,) = owners.trace.gpu
    assert [r.name for r in owners.ranges(work)] == ["forward"]
    assert tables(owners)[2].set_index("range")["gpu_us"]["forward"] == 10.0


def test_what_a_region_cuts_is_no_capture_that_began_before_it(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json",
        named(WAIT, 0, 5), launch(1, 2, "cudaStreamBeginCapture_v10000", tid=2),
        launch(2, 12, tid=2), launch(3, 20, "cudaStreamEndCapture_v10000", tid=2),
        op("mine", 30, 40), kernel(0, 2, 3), kernel(0, 33, 35), named(WAIT, 50, 55),
        named("CaptureBatch", 1, 4, tid=2), launch(9, 60, "cudaStreamIsCapturing", tid=2),
        kernel(0, 80, 81),
    )  # fmt: skip
    trace = read_trace(path)
    found = audit(trace)
    assert (found.captured, found.launches, found.problem) == (1, 0, None)
    assert [work.start for work in trace.gpu] == [33_000]  # no correlation id: found by its time
    names = [event.name for event in trace.cpu if event.kind != "call"]
    assert names == ["mine"] and len(trace.cpu) == 4
