#!/bin/sh
# Imitates ncu for tests: FAKE_NCU names what happens, FAKE_NCU_CSV is the raw page of its report,
# FAKE_NCU_SURVEY of a run with --log-file.
echo "$*" >> "${FAKE_NCU_CALLS:-/dev/null}"
case " $* " in
  *" --version "*)
    echo "NVIDIA (R) Nsight Compute Command Line Profiler"
    echo "Version 2025.3.1.0 (build 36398880) (public-release)"
    exit 0 ;;
  *" --import "*)
    [ "$FAKE_NCU" = "bad-import" ] && { echo "==ERROR== Failed to load report file"; exit 1; }
    cat "$FAKE_NCU_CSV"
    exit 0 ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    -o) report="$2.ncu-rep"; shift 2; break ;;
    --log-file) log="$2"; shift 2; break ;;
    *) shift ;;
  esac
done
"$@"
code=$?
if [ -n "$log" ]; then
  cat "$FAKE_NCU_SURVEY" > "$log"
  exit 0
fi
echo "==PROF== Connected to process 17 (/usr/bin/python3)"
case "$FAKE_NCU" in
  permission)
    echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0."
    exit 1 ;;
  busy)
    echo "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like DCGM) is concurrently collecting profiling data."
    exit 1 ;;
  unknown)
    echo "==ERROR== Unknown Error on device 0."
    exit 1 ;;
  prepare)
    echo "==ERROR== Failed to prepare kernel for profiling"
    exit 1 ;;
  lock)
    echo "==ERROR== Failed to open/create lock file /tmp/nsight-compute-lock. Please check that the process has write permissions on it."
    exit 1 ;;
  metric)
    echo "==ERROR== Failed to find metric dram__byte.sum"
    exit 1 ;;
  disk)
    echo "==ERROR== Failed to write report: No space left on device"
    exit 1 ;;
  driver)
    echo "==ERROR== The installed driver version is insufficient for this tool"
    exit 1 ;;
  none)
    echo "==WARNING== No kernels were profiled." >&2
    exit 0 ;;
  section)
    echo "==WARNING== No metrics to collect found in sections." >&2
    echo "==WARNING== No kernels were profiled." >&2
    exit 0 ;;
  silent)
    exit 0 ;;
  hang)
    sleep 60 ;;
esac
echo "report" > "$report"
if [ "$code" -ne 0 ]; then
  echo "==ERROR== The application returned an error code ($code)."
  exit "$code"
fi
echo "==PROF== Report: $report"
