#define PCRE2_CODE_UNIT_WIDTH 8

#include "cli/text/splitter.h"

#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "cli/check.h"

namespace fsdp::cli {

namespace {

std::string error_text(int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

} // namespace

struct Splitter::Pattern {
  std::shared_ptr<pcre2_code> code;

  explicit Pattern(const std::string& text) {
    // The patterns are written for Oniguruma. ^ and $ mean lines there, and these mean other
    // things.
    for (const auto* word : {"\\h", "\\H", "&&", "(?m"}) {
      check_config(
          text.find(word) == std::string::npos, "the pattern ", text, " has ", word,
          ", which is not supported");
    }
    int error = 0;
    PCRE2_SIZE offset = 0;
    code.reset(
        pcre2_compile(
            reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
            PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset, nullptr),
        pcre2_code_free);
    check_config(
        code != nullptr, "the pattern ", text, " cannot be used: ", error_text(error),
        " at its byte ", offset);
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE); // where it cannot, matching takes longer
  }

  void split(std::string_view text, const std::function<void(std::string_view)>& visit) const {
    const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    // A run of blanks may be as long as it likes.
    const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> limits(
        pcre2_match_context_create(nullptr), pcre2_match_context_free);
    pcre2_set_match_limit(limits.get(), std::numeric_limits<uint32_t>::max());
    size_t done = 0; // what comes before was visited
    size_t at = 0;   // where to look for the next match
    while (at < text.size()) {
      const auto* begin = reinterpret_cast<PCRE2_SPTR>(text.data());
      auto found = pcre2_match(
          code.get(), begin, text.size(), at, PCRE2_NO_UTF_CHECK, match.get(), limits.get());
      if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
        found = pcre2_match(
            code.get(), begin, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match.get(),
            limits.get());
      }
      if (found == PCRE2_ERROR_NOMATCH) {
        break;
      }
      check_config(found >= 0, "a text cannot be divided into words: ", error_text(found));
      const auto* range = pcre2_get_ovector_pointer(match.get());
      if (range[0] > done) {
        visit(text.substr(done, range[0] - done));
      }
      if (range[1] > range[0]) {
        visit(text.substr(range[0], range[1] - range[0]));
      }
      done = range[1];
      at = range[1];
      if (range[1] == range[0]) { // an empty match: goes on after the next character
        do {
          ++at;
        } while (at < text.size() && (text[at] & 0xc0) == 0x80);
      }
    }
    if (done < text.size()) {
      visit(text.substr(done));
    }
  }
};

Splitter::Splitter(const std::vector<std::string>& patterns) {
  for (const auto& pattern : patterns) {
    patterns_.push_back(std::make_shared<Pattern>(pattern));
  }
}

void Splitter::split(
    std::string_view text, const std::function<void(std::string_view)>& visit) const {
  const std::function<void(size_t, std::string_view)> split_from = [&](size_t i,
                                                                       std::string_view part) {
    if (i == patterns_.size()) {
      visit(part);
    } else {
      patterns_[i]->split(part, [&](std::string_view piece) { split_from(i + 1, piece); });
    }
  };
  if (!text.empty()) {
    split_from(0, text);
  }
}

std::optional<size_t> first_not_utf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t at = 0; at < text.size();) {
    utf8proc_int32_t point = 0;
    const auto length =
        bytes[at] < 0x80
            ? 1
            : utf8proc_iterate(bytes + at, static_cast<utf8proc_ssize_t>(text.size() - at), &point);
    if (length < 1) {
      return at;
    }
    at += static_cast<size_t>(length);
  }
  return std::nullopt;
}

std::string composed(std::string_view text) {
  // Characters below U+0300 are composed already, and begin with a byte below 0xcc.
  if (std::all_of(
          text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0xcc; })) {
    return std::string(text);
  }
  utf8proc_uint8_t* result = nullptr;
  const auto length = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
      static_cast<utf8proc_ssize_t>(text.size()), &result,
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owned(result, std::free);
  check_config(length >= 0, "a text cannot be normalized: ", utf8proc_errmsg(length));
  return {reinterpret_cast<const char*>(result), static_cast<size_t>(length)};
}

} // namespace fsdp::cli
