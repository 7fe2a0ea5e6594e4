#include "cli/text/examples.h"

#include <algorithm>
#include <string_view>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/mapped_file.h"
#include "cli/text/lines.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::json;

/// How a turn of a conversation is written.
struct ChatForm {
  std::string before_role;
  std::string behind_role;
  std::string end;        // is learned if the assistant speaks
  std::string behind_end; // is never learned
  bool trims;             // the whitespace around what is said
};

const ChatForm kForms[] = {
    {"<|im_start|>", "\n", "<|im_end|>", "\n", /*trims=*/false},
    {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", /*trims=*/true}};

/// Null if the tokenizer has the special tokens of no form.
const ChatForm* form_of(const Tokenizer& tokenizer) {
  for (const auto& form : kForms) {
    if (tokenizer.find(form.before_role) && tokenizer.find(form.end)) {
      return &form;
    }
  }
  return nullptr;
}

std::string trimmed(const std::string& text) {
  constexpr const char* kSpaces = " \t\n\r\v\f";
  const auto first = text.find_first_not_of(kSpaces);
  return first == std::string::npos
             ? ""
             : text.substr(first, text.find_last_not_of(kSpaces) + 1 - first);
}

/// Makes the example of one line. The errors do not name the line yet.
class ExampleMaker {
 public:
  ExampleMaker(const Tokenizer& tokenizer, std::optional<int64_t> end)
      : tokenizer_(tokenizer), end_(end), form_(form_of(tokenizer)) {}

  Example make(const Json& json) const {
    check_config(json.is_object(), "is not an object");
    check_config(!json.contains("tools"), "has \"tools\", which are not supported");
    check_config(
        !json.contains("messages") || !json.contains("prompt"),
        "has both \"messages\" and \"prompt\"");
    Example example;
    add(example, tokenizer_.prefix(), /*learned=*/false);
    if (json.contains("messages")) {
      add_messages(example, json.at("messages"));
    } else {
      check_config(
          json.contains("prompt") && json.contains("completion"),
          "has neither \"messages\" nor \"prompt\" and \"completion\"");
      check_config(
          end_.has_value(),
          "has a completion, but tokenizer_config.json names no eos_token to put behind it");
      add(example, tokenizer_.encode(json.at("prompt").get<std::string>()), /*learned=*/false);
      add(example, tokenizer_.encode(json.at("completion").get<std::string>()), /*learned=*/true);
      add(example, {*end_}, /*learned=*/true);
    }
    example.learned.front() = false; // nothing comes before it
    check_config(
        std::find(example.learned.begin(), example.learned.end(), true) != example.learned.end(),
        "has nothing to learn");
    return example;
  }

 private:
  void add_messages(Example& example, const Json& messages) const {
    check_config(
        form_ != nullptr,
        "is a conversation, but the tokenizer has neither <|im_start|> and <|im_end|> nor "
        "<|start_header_id|> and <|eot_id|>");
    check_config(messages.is_array() && !messages.empty(), "has no messages");
    std::string given; // since the last answer
    for (const auto& message : messages) {
      check_config(
          message.is_object() && message.contains("role") && message.contains("content") &&
              message.at("role").is_string() && message.at("content").is_string(),
          "has a message without the texts \"role\" and \"content\"");
      for (const auto& [key, value] : message.items()) {
        check_config(
            key == "role" || key == "content", "has a message with \"", key,
            "\", which is not supported");
      }
      const auto role = message.at("role").get<std::string>();
      const auto content = message.at("content").get<std::string>();
      check_config(
          role == "system" || role == "user" || role == "assistant", "has the role \"", role,
          "\"; the roles are system, user and assistant");
      const auto said = (form_->trims ? trimmed(content) : content) + form_->end;
      given += form_->before_role + role + form_->behind_role;
      if (role == "assistant") {
        add(example, tokenizer_.encode(given), /*learned=*/false);
        add(example, tokenizer_.encode(said), /*learned=*/true);
        given.clear();
      } else {
        given += said;
      }
      given += form_->behind_end;
    }
    add(example, tokenizer_.encode(given), /*learned=*/false);
  }

  static void add(Example& example, const std::vector<int64_t>& tokens, bool learned) {
    example.tokens.insert(example.tokens.end(), tokens.begin(), tokens.end());
    example.learned.resize(example.tokens.size(), learned);
  }

  const Tokenizer& tokenizer_;
  const std::optional<int64_t> end_;
  const ChatForm* form_;
};

} // namespace

bool holds_examples(const std::string& path) {
  if (!path.ends_with(".jsonl")) {
    return false;
  }
  const MappedFile file(path, "--data: ");
  bool result = false;
  for_each_line(file.text(), [&](std::string_view line, int64_t) {
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    result = json.is_object() && !json.contains("text") &&
             (json.contains("messages") || json.contains("prompt") || json.contains("completion"));
    return false;
  });
  return result;
}

std::vector<Example> read_examples(
    const Tokenizer& tokenizer, const std::string& path, std::optional<int64_t> end) {
  const MappedFile file(path, "--data: ");
  const ExampleMaker maker(tokenizer, end);
  std::vector<Example> examples;
  for_each_line(file.text(), [&](std::string_view line, int64_t number) {
    try {
      examples.push_back(maker.make(Json::parse(line)));
    } catch (const Json::exception& error) {
      throw_config_error("--data: ", path, " line ", number, " cannot be read: ", error.what());
    } catch (const ConfigError& error) {
      throw_config_error("--data: ", path, " line ", number, " ", error.what_without_backtrace());
    }
    examples.back().line = number;
    return true;
  });
  return examples;
}

} // namespace fsdp::cli
