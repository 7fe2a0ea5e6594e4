#include "cli/text/examples.h"

#include <algorithm>
#include <string_view>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/json_text.h"
#include "cli/mapped_file.h"
#include "cli/text/chat_form.h"
#include "cli/text/lines.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::json;

/// Makes the example of one line. The errors do not name the line yet.
class ExampleMaker {
 public:
  ExampleMaker(const Tokenizer& tokenizer, std::optional<int64_t> end)
      : tokenizer_(tokenizer), end_(end), found_(find_chat_form(tokenizer)) {}

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
          "has a completion, but tokenizer_config.json names no eos_token to put after it");
      const auto prompt = json.at("prompt").get<std::string>();
      const auto completion = json.at("completion").get<std::string>();
      add(example, tokenizer_.encode(prompt), /*learned=*/false);
      add(example, tokenizer_.encode(completion, prompt), /*learned=*/true);
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
    check_config(found_.form.has_value(), found_.problem);
    std::string before; // the whole conversation so far
    for (const auto token : tokenizer_.prefix()) {
      before += tokenizer_.bytes_of(token);
    }
    const auto add_text = [&](const std::string& text, bool learned) {
      add(example, tokenizer_.encode(text, before), learned);
      before += text;
    };
    std::string given; // since the last answer
    for (const auto& turn : found_.form->turns(read_messages(messages))) {
      given += turn.before;
      if (turn.is_answer) {
        add_text(given, /*learned=*/false);
        add_text(turn.said, /*learned=*/true);
        given.clear();
      } else {
        given += turn.said;
      }
      given += turn.after;
    }
    add_text(given, /*learned=*/false);
  }

  static std::vector<Message> read_messages(const Json& messages) {
    check_config(messages.is_array() && !messages.empty(), "has no messages");
    std::vector<Message> result;
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
      check_config(
          role == "system" || role == "user" || role == "assistant", "has the role \"", role,
          "\"; the roles are system, user and assistant");
      result.push_back({role, message.at("content").get<std::string>()});
    }
    return result;
  }

  static void add(Example& example, const std::vector<int64_t>& tokens, bool learned) {
    example.tokens.insert(example.tokens.end(), tokens.begin(), tokens.end());
    example.learned.resize(example.tokens.size(), learned);
  }

  const Tokenizer& tokenizer_;
  const std::optional<int64_t> end_;
  const FoundForm found_;
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
      throw_config_error(
          "--data: ", path, " line ", number, " cannot be read: ", json_problem(error));
    } catch (const ConfigError& error) {
      throw_config_error("--data: ", path, " line ", number, " ", error.what_without_backtrace());
    }
    examples.back().line = number;
    return true;
  });
  return examples;
}

} // namespace fsdp::cli
