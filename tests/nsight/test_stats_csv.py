"""CSV files of nsys stats: the headings of versions, banners, units; what is no report."""

import pytest

from attnscope.nsight.stats_csv import Summary, read_summary, reports_of

NAME = "void gemm<float, 3>(Params, int)"
EXPECTED = [Summary(NAME, 3, 4500.0), Summary("b", 1, 10.0)]
HEADS = {
    "2025": ("Time (%),Total Time (ns),Instances,Avg (ns),Name", '99.8,4500,3,1500,"{}"'),
    "no spaces": ("Time(%),Total Time(ns),Instances,Average,Name", '99.8,4500,3,1500,"{}"'),
    "calls": ("Name,Calls,Total Time (ns)", '"{}",3,4500'),
    "microseconds": ("Total Time (us),Instances,Name", '4.5,3,"{}"'),
    "separators": ("Total Time (ns),Instances,New column,Name", '"4,500",3,x,"{}"'),
    "no unit": ("Total Time,Count,Name", '4500,3,"{}"'),
}


@pytest.mark.parametrize("version", HEADS)
def test_headings_of_versions_give_the_same_rows(tmp_path, version):
    head, row = HEADS[version]
    path = tmp_path / "a.csv"
    small = row.replace("4500", "10").replace("4.5", "0.01").replace("4,500", "10")
    small = small.replace(",3", ",1").format("b")
    lines = ["Processing [x.sqlite] with [stats.py]... ", "", head, row.format(NAME), small]
    path.write_text("\n".join(lines) + "\n")
    assert read_summary(path) == EXPECTED


def test_a_heading_alone_has_no_rows_and_other_files_are_errors(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADS["2025"][0] + "\n")
    assert read_summary(path) == []
    for text, message in (
        ("", "a heading, got an empty file"),
        (
            "Duration,Kernel\n1,a\n",
            "columns for name, total time and instances, got Duration, Kern",
        ),
        (HEADS["2025"][0] + "\n1,many,3,4,a\n", "numbers in each row, got 1, many, 3, 4, a"),
        (HEADS["2025"][0] + "\n1,2\n", "numbers in each row, got 1, 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_summary(path)
    with pytest.raises(ValueError, match="must be readable"):
        read_summary(tmp_path / "absent.csv")


def test_the_tool_is_asked_which_reports_it_has():
    new = "  cuda_gpu_kern_sum[:base] -- Kernels\n  nvtx_gpu_proj_sum -- NVTX\n"
    new += "  cuda_api_sum -- API\n"
    assert reports_of(new) == {
        "kernels": "cuda_gpu_kern_sum", "ranges": "nvtx_gpu_proj_sum", "calls": "cuda_api_sum",
    }  # fmt: skip
    assert reports_of("  gpukernsum -- Kernels\n") == {"kernels": "gpukernsum"}
    assert reports_of("usage: nsys stats\n") == {}
