#include "base/check.h"

namespace fsdp::detail {

std::string current_exception_text() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    // c10d's own errors contain their backtrace in the text.
    return text.substr(0, text.find("\nException raised from"));
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

} // namespace fsdp::detail
