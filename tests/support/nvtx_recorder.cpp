// An NVTX tool for test_nvtx.py that prints every range of every domain. NVTX loads it through
// NVTX_INJECTION64_PATH. The declarations are the used subset of NVTX 3's.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

struct EventAttributes {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  int64_t payload;
  int32_t message_type;
  const char* message;
};

using Function = void (*)();
using FunctionTable = Function**;
constexpr int kModuleCore2 = 5, kRangePush = 4, kRangePop = 5, kRegisterString = 10, kCreate = 12;
constexpr uint32_t kCallbacks = 1;
constexpr int32_t kRegistered = 3;

struct ExportTable {
  size_t struct_size;
  int (*get_module_function_table)(int module, FunctionTable* table, unsigned* size);
};

// The handle of a domain or a registered string is its name.
const void* name_it(const char* name) { return strdup(name); }
const void* register_string(const char*, const char* text) { return strdup(text); }

int push(const char* domain, const EventAttributes* event) {
  const bool registered = event->message_type == kRegistered;
  printf("push %s %s %s %lld\n", domain, registered ? "registered" : "plain",
         registered ? event->message : "?", static_cast<long long>(event->payload));
  return 0;
}

int pop(const char* domain) {
  printf("pop %s\n", domain);
  fflush(stdout);
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    const ExportTable* (*get_export_table)(uint32_t)) {
  FunctionTable table = nullptr;
  unsigned size = 0;
  get_export_table(kCallbacks)->get_module_function_table(kModuleCore2, &table, &size);
  *table[kCreate] = reinterpret_cast<Function>(name_it);
  *table[kRegisterString] = reinterpret_cast<Function>(register_string);
  *table[kRangePush] = reinterpret_cast<Function>(push);
  *table[kRangePop] = reinterpret_cast<Function>(pop);
  return 1;
}
