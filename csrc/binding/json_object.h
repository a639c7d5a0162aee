// A JSON object, field by field.
#pragma once

#include <sstream>
#include <string>
#include <type_traits>

namespace attnscope::binding {

// Strings must need no escapes; a null pointer is null.
class JsonObject {
 public:
  template <class Value>
  JsonObject& add(const char* name, const Value& value) {
    json_ << (json_.tellp() > 0 ? ", " : "") << '"' << name << "\": ";
    if constexpr (std::is_same_v<Value, bool>) {
      json_ << (value ? "true" : "false");
    } else if constexpr (std::is_integral_v<Value>) {
      json_ << value;
    } else if constexpr (std::is_same_v<Value, JsonObject>) {
      json_ << value.text();
    } else {
      const char* const text = value;
      if (text == nullptr) {
        json_ << "null";
      } else {
        json_ << '"' << text << '"';
      }
    }
    return *this;
  }
  // Null if `value` is `none`.
  JsonObject& add_unless(const char* name, int value, int none) {
    return value == none ? add(name, static_cast<const char*>(nullptr)) : add(name, value);
  }
  std::string text() const { return "{" + json_.str() + "}"; }

 private:
  std::ostringstream json_;
};

}  // namespace attnscope::binding
