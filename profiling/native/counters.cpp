// Hardware counters of a piece of work in this process, through CUPTI's range profiler.
//
// The hardware counts only a few quantities at a time. So the caller repeats its work between
// begin() and end() until end() returns true: one pass each time. values() then evaluates the
// metrics over all kernels of the range. One collector at a time per context, and no other
// profiler beside it. Built on first use by attnscope.counters; docs/benchmarking.md explains it.
#include <cuda.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_range_profiler.h>
#include <cupti_target.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// The message of a failure starts with the name of CUPTI's result, which Python translates.
void check(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return;
  const char* name = nullptr;
  if (cuptiGetResultString(result, &name) != CUPTI_SUCCESS || name == nullptr) name = "unknown";
  throw std::runtime_error(std::string(name) + " (" + std::to_string(result) + ") from " + what);
}

#define CUPTI_CHECK(function, params) check(function(&(params)), #function)
// Every CUPTI parameter struct begins with its size; all other fields start as zero.
#define CUPTI_PARAMS(type, name) \
  type name{};                   \
  name.structSize = type##_STRUCT_SIZE

class Collector {
 public:
  // `context` is a CUcontext, `device` the index of its device. Throws where a metric is unknown
  // to the chip, where counters are restricted, or where another profiler holds them.
  Collector(std::uintptr_t context, std::size_t device, std::vector<std::string> metrics)
      : metrics_(std::move(metrics)) {
    for (const std::string& metric : metrics_) names_.push_back(metric.c_str());
    try {
      create_host(reinterpret_cast<CUcontext>(context), device);
      enable(reinterpret_cast<CUcontext>(context));
    } catch (...) {
      close();
      throw;
    }
  }
  Collector(const Collector&) = delete;
  Collector& operator=(const Collector&) = delete;
  ~Collector() { close(); }

  std::size_t passes() const { return passes_; }

  void begin() {
    require_open();
    CUPTI_PARAMS(CUpti_RangeProfiler_Start_Params, start);
    start.pRangeProfilerObject = profiler_;
    CUPTI_CHECK(cuptiRangeProfilerStart, start);
    CUPTI_PARAMS(CUpti_RangeProfiler_PushRange_Params, push);
    push.pRangeProfilerObject = profiler_;
    push.pRangeName = "call";
    CUPTI_CHECK(cuptiRangeProfilerPushRange, push);
  }

  // The work of the pass must have finished on the device. Returns whether it was the last pass.
  bool end() {
    require_open();
    CUPTI_PARAMS(CUpti_RangeProfiler_PopRange_Params, pop);
    pop.pRangeProfilerObject = profiler_;
    CUPTI_CHECK(cuptiRangeProfilerPopRange, pop);
    CUPTI_PARAMS(CUpti_RangeProfiler_Stop_Params, stop);
    stop.pRangeProfilerObject = profiler_;
    CUPTI_CHECK(cuptiRangeProfilerStop, stop);
    return stop.isAllPassSubmitted != 0;
  }

  std::map<std::string, double> values() {
    require_open();
    CUPTI_PARAMS(CUpti_RangeProfiler_DecodeData_Params, decode);
    decode.pRangeProfilerObject = profiler_;
    CUPTI_CHECK(cuptiRangeProfilerDecodeData, decode);
    CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataInfo_Params, info);
    info.pCounterDataImage = data_.data();
    info.counterDataImageSize = data_.size();
    CUPTI_CHECK(cuptiRangeProfilerGetCounterDataInfo, info);
    if (decode.numOfRangeDropped != 0 || info.numTotalRanges != 1) {
      throw std::runtime_error("the counters must hold one range, got " +
                               std::to_string(info.numTotalRanges) + ", and " +
                               std::to_string(decode.numOfRangeDropped) + " dropped");
    }
    std::vector<double> numbers(names_.size());
    CUPTI_PARAMS(CUpti_Profiler_Host_EvaluateToGpuValues_Params, evaluate);
    evaluate.pHostObject = host_;
    evaluate.pCounterDataImage = data_.data();
    evaluate.counterDataImageSize = data_.size();
    evaluate.rangeIndex = 0;
    evaluate.ppMetricNames = names_.data();
    evaluate.numMetrics = names_.size();
    evaluate.pMetricValues = numbers.data();
    CUPTI_CHECK(cuptiProfilerHostEvaluateToGpuValues, evaluate);
    std::map<std::string, double> result;
    for (std::size_t i = 0; i < metrics_.size(); ++i) result[metrics_[i]] = numbers[i];
    return result;
  }

  // Gives the counters back, so that another profiler can have them. Launches of this process are
  // slower while CUPTI's hooks are in place.
  void close() noexcept {
    if (profiler_ != nullptr) {
      CUPTI_PARAMS(CUpti_RangeProfiler_Disable_Params, disable);
      disable.pRangeProfilerObject = profiler_;
      cuptiRangeProfilerDisable(&disable);
      profiler_ = nullptr;
    }
    if (host_ != nullptr) {
      CUPTI_PARAMS(CUpti_Profiler_Host_Deinitialize_Params, deinitialize);
      deinitialize.pHostObject = host_;
      cuptiProfilerHostDeinitialize(&deinitialize);
      host_ = nullptr;
    }
    if (initialized_) {
      CUPTI_PARAMS(CUpti_Profiler_DeInitialize_Params, deinitialize);
      cuptiProfilerDeInitialize(&deinitialize);
      initialized_ = false;
    }
  }

 private:
  // The host object schedules the metrics into passes and evaluates them.
  void create_host(CUcontext context, std::size_t device) {
    CUPTI_PARAMS(CUpti_Profiler_Initialize_Params, initialize);
    CUPTI_CHECK(cuptiProfilerInitialize, initialize);
    initialized_ = true;
    CUPTI_PARAMS(CUpti_Device_GetChipName_Params, chip);
    chip.deviceIndex = device;
    CUPTI_CHECK(cuptiDeviceGetChipName, chip);

    CUPTI_PARAMS(CUpti_Profiler_GetCounterAvailability_Params, available);
    available.ctx = context;
    CUPTI_CHECK(cuptiProfilerGetCounterAvailability, available);
    std::vector<std::uint8_t> image(available.counterAvailabilityImageSize);
    available.pCounterAvailabilityImage = image.data();
    CUPTI_CHECK(cuptiProfilerGetCounterAvailability, available);

    CUPTI_PARAMS(CUpti_Profiler_Host_Initialize_Params, host);
    host.profilerType = CUPTI_PROFILER_TYPE_RANGE_PROFILER;
    host.pChipName = chip.pChipName;
    host.pCounterAvailabilityImage = image.data();
    CUPTI_CHECK(cuptiProfilerHostInitialize, host);
    host_ = host.pHostObject;

    for (const char* name : names_) {  // adding an unknown metric fails without naming it
      CUPTI_PARAMS(CUpti_Profiler_Host_GetMetricProperties_Params, properties);
      properties.pHostObject = host_;
      properties.pMetricName = name;
      check(cuptiProfilerHostGetMetricProperties(&properties), name);
    }
    CUPTI_PARAMS(CUpti_Profiler_Host_ConfigAddMetrics_Params, add);
    add.pHostObject = host_;
    add.ppMetricNames = names_.data();
    add.numMetrics = names_.size();
    CUPTI_CHECK(cuptiProfilerHostConfigAddMetrics, add);
    CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImageSize_Params, size);
    size.pHostObject = host_;
    CUPTI_CHECK(cuptiProfilerHostGetConfigImageSize, size);
    config_.resize(size.configImageSize);
    CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImage_Params, config);
    config.pHostObject = host_;
    config.configImageSize = config_.size();
    config.pConfigImage = config_.data();
    CUPTI_CHECK(cuptiProfilerHostGetConfigImage, config);
    CUPTI_PARAMS(CUpti_Profiler_Host_GetNumOfPasses_Params, passes);
    passes.configImageSize = config_.size();
    passes.pConfigImage = config_.data();
    CUPTI_CHECK(cuptiProfilerHostGetNumOfPasses, passes);
    passes_ = passes.numOfPasses;
  }

  void enable(CUcontext context) {
    CUPTI_PARAMS(CUpti_RangeProfiler_Enable_Params, enable);
    enable.ctx = context;
    CUPTI_CHECK(cuptiRangeProfilerEnable, enable);
    profiler_ = enable.pRangeProfilerObject;

    CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataSize_Params, size);
    size.pRangeProfilerObject = profiler_;
    size.pMetricNames = names_.data();
    size.numMetrics = names_.size();
    size.maxNumOfRanges = 1;
    size.maxNumRangeTreeNodes = 1;
    CUPTI_CHECK(cuptiRangeProfilerGetCounterDataSize, size);
    data_.resize(size.counterDataSize);
    CUPTI_PARAMS(CUpti_RangeProfiler_CounterDataImage_Initialize_Params, initialize);
    initialize.pRangeProfilerObject = profiler_;
    initialize.counterDataSize = data_.size();
    initialize.pCounterData = data_.data();
    CUPTI_CHECK(cuptiRangeProfilerCounterDataImageInitialize, initialize);

    CUPTI_PARAMS(CUpti_RangeProfiler_SetConfig_Params, config);
    config.pRangeProfilerObject = profiler_;
    config.configSize = config_.size();
    config.pConfig = config_.data();
    config.counterDataImageSize = data_.size();
    config.pCounterDataImage = data_.data();
    config.range = CUPTI_UserRange;
    config.replayMode = CUPTI_UserReplay;
    config.maxRangesPerPass = 1;
    config.numNestingLevels = 1;
    config.minNestingLevel = 1;
    config.passIndex = 0;
    config.targetNestingLevel = 1;
    CUPTI_CHECK(cuptiRangeProfilerSetConfig, config);
  }

  void require_open() const {
    if (profiler_ == nullptr)
      throw std::runtime_error("the collector must be open, got a closed one");
  }

  std::vector<std::string> metrics_;
  std::vector<const char*> names_;  // of metrics_, for CUPTI
  std::vector<std::uint8_t> config_, data_;
  CUpti_Profiler_Host_Object* host_ = nullptr;
  CUpti_RangeProfiler_Object* profiler_ = nullptr;
  std::size_t passes_ = 0;
  bool initialized_ = false;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  py::class_<Collector>(module, "Collector")
      .def(py::init<std::uintptr_t, std::size_t, std::vector<std::string>>(), py::arg("context"),
           py::arg("device"), py::arg("metrics"))
      .def_property_readonly("passes", &Collector::passes)
      .def("begin", &Collector::begin)
      .def("end", &Collector::end)
      .def("values", &Collector::values)
      .def("close", &Collector::close);
}
