#include "cli/text/documents.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>
#include <string_view>
#include <thread>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/json_text.h"
#include "cli/mapped_file.h"
#include "cli/text/lines.h"
#include "cli/text/splitter.h"

namespace fsdp::cli {

namespace {

constexpr size_t kPartBytes = 1 << 20; // what one thread takes at a time

/// A part of a file, and its tokens once they are there.
struct Work {
  std::string_view text;
  std::string_view before; // the part of the same document that lies before it
  bool begins = false;     // a document
  bool ends = false;
  std::vector<int64_t> tokens;
  int64_t documents = 0;
};

/// The parts of a file of lines: whole lines each.
std::vector<std::string_view> cut_lines(std::string_view text) {
  std::vector<std::string_view> parts;
  while (text.size() > kPartBytes) {
    const auto line_end = text.find('\n', kPartBytes - 1);
    if (line_end == std::string_view::npos) {
      break;
    }
    parts.push_back(text.substr(0, line_end + 1));
    text.remove_prefix(line_end + 1);
  }
  parts.push_back(text);
  return parts;
}

/// Tokenizes the parts of one file.
class FileTokens {
 public:
  FileTokens(const Tokenizer& tokenizer, const DocumentOptions& options, const std::string& path)
      : tokenizer_(tokenizer),
        options_(options),
        file_(path, options.about),
        of_lines_(path.ends_with(".jsonl")) {
    const auto parts =
        of_lines_ ? cut_lines(file_.text()) : tokenizer.cut(file_.text(), kPartBytes);
    std::string_view before;
    for (const auto& part : parts) {
      work_.push_back({.text = part, .before = before});
      before = part;
    }
    work_.front().begins = true;
    work_.back().ends = true;
  }

  template <class Write>
  void run(const Write& write) {
    const size_t num_threads = std::max(1U, std::thread::hardware_concurrency());
    const auto at_once = 4 * num_threads; // parts, so that quick threads take more of them
    for (size_t first = 0; first < work_.size(); first += at_once) {
      const auto last = std::min(first + at_once, work_.size());
      std::atomic<size_t> next = first;
      const auto take_parts = [&] {
        for (auto i = next++; i < last; i = next++) {
          tokenize(work_[i]);
        }
      };
      std::vector<std::future<void>> others;
      while (others.size() + 1 < std::min(num_threads, last - first)) {
        others.push_back(std::async(std::launch::async, take_parts));
      }
      take_parts();
      for (auto& other : others) {
        other.get(); // throws its error
      }
      for (auto i = first; i < last; ++i) {
        write(work_[i]);
        work_[i].tokens = {}; // frees the memory
      }
    }
  }

 private:
  void tokenize(Work& work) const {
    if (of_lines_) {
      for_each_line(work.text, [&](std::string_view line, int64_t) {
        add_line(work, line);
        return true;
      });
      return;
    }
    const auto bad = first_not_utf8(work.text);
    check_config(
        !bad, options_.about, file_.path(), " is not UTF-8 at byte ",
        work.text.data() - file_.data() + static_cast<ptrdiff_t>(bad.value_or(0)));
    if (work.begins) {
      begin_document(work);
    }
    append(work, encode(work.text, work.before));
    if (work.ends) {
      end_document(work);
    }
  }

  void add_line(Work& work, std::string_view line) const {
    const auto refuse = [&](const std::string& why) {
      const auto number = 1 + std::count(file_.data(), line.data(), '\n');
      throw_config_error(
          options_.about, file_.path(), " line ", number, " is not an object with the text \"",
          options_.field, "\": ", why);
    };
    nlohmann::json json;
    try {
      json = nlohmann::json::parse(line);
    } catch (const nlohmann::json::exception& error) {
      refuse(json_problem(error));
    }
    const bool is_object = json.is_object();
    if (!is_object || !json.contains(options_.field)) {
      refuse(
          is_object ? "it lacks that field; to learn from examples, give \"prompt\" and "
                      "\"completion\", or \"messages\""
                    : "it is something else");
    }
    if (!json.at(options_.field).is_string()) {
      refuse("the field is " + std::string(json.at(options_.field).type_name()));
    }
    const auto text = json.at(options_.field).get<std::string>();
    begin_document(work);
    append(work, encode(text));
    end_document(work);
  }

  void begin_document(Work& work) const {
    append(work, tokenizer_.prefix());
    ++work.documents;
  }

  void end_document(Work& work) const {
    append(work, tokenizer_.suffix());
    if (options_.end && (work.tokens.empty() || work.tokens.back() != *options_.end)) {
      work.tokens.push_back(*options_.end);
    }
  }

  std::vector<int64_t> encode(std::string_view text, std::string_view before = {}) const {
    try {
      return tokenizer_.encode(text, before);
    } catch (const ConfigError& error) {
      throw_config_error(options_.about, file_.path(), ": ", error.what_without_backtrace());
    }
  }

  static void append(Work& work, const std::vector<int64_t>& tokens) {
    work.tokens.insert(work.tokens.end(), tokens.begin(), tokens.end());
  }

  const Tokenizer& tokenizer_;
  const DocumentOptions& options_;
  const MappedFile file_;
  const bool of_lines_;
  std::vector<Work> work_;
};

} // namespace

DocumentCounts tokenize_documents(
    const Tokenizer& tokenizer,
    const std::vector<std::string>& paths,
    const DocumentOptions& options,
    const std::function<void(const std::vector<int64_t>& tokens)>& write) {
  for (const auto& path : paths) { // before the first one, which may take hours
    const MappedFile can_be_read(path, options.about);
  }
  DocumentCounts counts;
  for (const auto& path : paths) {
    FileTokens(tokenizer, options, path).run([&](const Work& work) {
      write(work.tokens);
      counts.documents += work.documents;
      counts.bytes += static_cast<int64_t>(work.text.size());
      counts.tokens += static_cast<int64_t>(work.tokens.size());
    });
  }
  return counts;
}

std::optional<std::string> special_text(const std::string& folder, const std::string& name) {
  auto token = read_object(folder + "/tokenizer_config.json").value(name, nlohmann::json());
  if (token.is_object()) {
    token = token.value("content", nlohmann::json());
  }
  return token.is_string() ? std::optional(token.get<std::string>()) : std::nullopt;
}

std::optional<int64_t> end_token(const Tokenizer& tokenizer, const std::string& folder) {
  const auto text = special_text(folder, "eos_token");
  return text ? tokenizer.find(*text) : std::nullopt;
}

int64_t document_end_token(const std::string& text, const std::string& folder, int64_t vocab) {
  if (text == "eos") {
    check_config(
        !folder.empty(), "--document-end eos: only the folder of a tokenizer has an eos_token");
    const auto token = end_token(Tokenizer::read(folder), folder);
    check_config(
        token.has_value(), "--document-end eos: tokenizer_config.json of ", folder,
        " names no eos_token of the tokenizer; give its number");
    check_config(
        *token < vocab, "--document-end eos: the eos_token of ", folder, " is ", *token,
        ", and the model has the tokens 0 to ", vocab - 1);
    return *token;
  }
  char* end = nullptr;
  const auto token = std::strtoll(text.c_str(), &end, 10);
  check_config(
      !text.empty() && *end == 0 && token >= 0 && token < vocab, "--document-end ", text,
      ": it must be none, eos or a token below ", vocab);
  return token;
}

} // namespace fsdp::cli
