#include "cli/text/examples.h"

#include <algorithm>
#include <string_view>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/json_text.h"
#include "cli/mapped_file.h"
#include "cli/text/lines.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::json;

/// How a turn of a conversation is written.
struct ChatForm {
  std::string before_role;
  std::string after_role;
  std::string end;       // is learned if the assistant speaks
  std::string after_end; // is never learned
  bool trims;            // the whitespace around what is said
};

const ChatForm kForms[] = {
    {"<|im_start|>", "\n", "<|im_end|>", "\n", /*trims=*/false},
    {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", /*trims=*/true}};

/// What stands beside roles in other forms.
constexpr const char* kOtherMarkers[] = {"<|im_sep|>",    "<|im_user|>",      "<|user|>",
                                         "<|assistant|>", "<|header_start|>", "[INST]",
                                         "<|turn>",       "<start_of_turn>",  "<|start_of_role|>"};

/// The Jinja template of a folder, which says how conversations are written.
struct ChatTemplate {
  std::string file;
  std::string text; // empty: there is none
};

ChatTemplate chat_template_of(const std::string& folder) {
  const auto file = folder + "/chat_template.jinja";
  if (const auto text = read_file(file)) {
    return {file, *text};
  }
  const auto config = folder + "/tokenizer_config.json";
  auto json = read_object(config).value("chat_template", Json());
  if (json.is_array()) { // several, with names
    Json chosen;
    for (const auto& each : json) {
      if (each.is_object() && (chosen.is_null() || each.value("name", Json()) == "default")) {
        chosen = each.value("template", Json());
      }
    }
    json = chosen;
  }
  return {config, json.is_string() ? json.get<std::string>() : ""};
}

/// The form of conversations in which both a tokenizer and the template of its folder have the
/// special tokens.
struct FoundForm {
  const ChatForm* form = nullptr;
  std::string problem; // if there is no form
};

FoundForm form_of(const Tokenizer& tokenizer) {
  const auto chat = chat_template_of(tokenizer.folder());
  const auto has = [&](const std::string& part) { return chat.text.find(part) != chat.text.npos; };
  const auto refuse = [&](const std::string& why) {
    return FoundForm{
        nullptr, "is a conversation, but the template in " + chat.file + why +
                     "; only the forms of Qwen (<|im_start|>) and of Llama 3 "
                     "(<|start_header_id|>) are supported, so give \"prompt\" and \"completion\""};
  };
  for (const auto* marker : kOtherMarkers) {
    if (has(marker)) {
      return refuse(" writes " + std::string(marker));
    }
  }
  std::string lacks;
  for (const auto& form : kForms) {
    if (tokenizer.find(form.before_role) && tokenizer.find(form.end)) {
      if (chat.text.empty() || has(form.before_role)) {
        return {&form, ""};
      }
      lacks = form.before_role;
    }
  }
  return lacks.empty() ? FoundForm{nullptr,
                                   "is a conversation, but the tokenizer has neither <|im_start|> "
                                   "and <|im_end|> nor <|start_header_id|> and <|eot_id|>"}
                       : refuse(" does not write " + lacks);
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
      : tokenizer_(tokenizer), end_(end), found_(form_of(tokenizer)) {}

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
    const auto* const form = found_.form;
    check_config(form != nullptr, found_.problem);
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
      const auto said = (form->trims ? trimmed(content) : content) + form->end;
      given += form->before_role + role + form->after_role;
      if (role == "assistant") {
        add(example, tokenizer_.encode(given), /*learned=*/false);
        add(example, tokenizer_.encode(said), /*learned=*/true);
        given.clear();
      } else {
        given += said;
      }
      given += form->after_end;
    }
    add(example, tokenizer_.encode(given), /*learned=*/false);
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
