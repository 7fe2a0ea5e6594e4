#include "cli/text/chat_form.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "cli/check.h"
#include "cli/text/chat_template.h"
#include "cli/text/documents.h"

namespace fsdp::cli {

namespace {

/// ChatML and Llama 3 write the role of each turn between special tokens.
struct RoleForm {
  std::string before_role;
  std::string after_role;
  std::string end;
  std::string after;
  bool trims;
};

const RoleForm kRoleForms[] = {
    {"<|im_start|>", "\n", "<|im_end|>", "\n", /*trims=*/false},
    {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", /*trims=*/true}};
const RoleForm kGemma = {"<start_of_turn>", "\n", "<end_of_turn>", "\n", /*trims=*/true};

ChatForm chat_form_of(const RoleForm& form, const std::string& assistant = "assistant") {
  const auto speaker = [&](const std::string& role) {
    return ChatForm::Speaker{
        .before = form.before_role + role + form.after_role,
        .begin = "",
        .end = form.end,
        .after = form.after,
        .trims = form.trims};
  };
  ChatForm result;
  result.user = speaker("user");
  result.assistant = speaker(assistant);
  result.system = speaker("system");
  return result;
}

ChatForm gemma_form(ChatForm::System system) {
  auto form = chat_form_of(kGemma, "model");
  form.system_place = system;
  form.alternates = true;
  return form;
}

/// What stands beside roles in other forms.
constexpr const char* kOtherMarkers[] = {"<|im_sep|>",       "<|im_user|>",      "<|user|>",
                                         "<|assistant|>",    "<|header_start|>", "<|turn>",
                                         "<|start_of_role|>"};

/// Removes a part of a template wherever it is. Returns whether it was there.
bool take(std::string& code, const std::string& part) {
  bool result = false;
  for (auto at = code.find(part); at != code.npos; at = code.find(part, at)) {
    code.erase(at, part.size());
    result = true;
  }
  return result;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

/// The templates of Gemma 1 and 2, and of Gemma 3, which knows a system.
std::optional<ChatForm> gemma_form_of(std::string code) {
  using System = ChatForm::System;
  const std::string begin = "{{'<start_of_turn>'+role+'\n'+";
  take(code, "{{'<start_of_turn>model\n'}}"); // asks the model for an answer
  auto system = System::kRefused;
  if (take(code, begin + "(first_user_prefix if loop.first else '')}}")) {
    if (!take(code, "{{message['content']|trim}}") || !take(code, "{{'<end_of_turn>\n'}}") ||
        !has(code, "first_user_prefix = messages[0]['content']+'\n\n'")) {
      return std::nullopt;
    }
    system = System::kFirstTurn;
  } else if (!take(code, begin + "message['content']|trim+'<end_of_turn>\n'}}")) {
    return std::nullopt;
  }
  const bool is_known =
      has(code, "'model'") && !has(code, "<start_of_turn>") && !has(code, "<end_of_turn>");
  return is_known ? std::optional(gemma_form(system)) : std::nullopt;
}

/// How the templates of Mistral write an answer.
struct MistralAnswer {
  const char* code;
  const char* begin;
  const char* before_end;
  const char* after;
  bool trims;
};

constexpr MistralAnswer kMistralAnswers[] = {
    {"{{' '+message['content']+eos_token}}", " ", "", "", /*trims=*/false},
    {"{{' '+message['content']|trim+eos_token}}", " ", "", "", /*trims=*/true},
    {"{{' '+message['content']+' '+eos_token}}", " ", " ", "", /*trims=*/false},
    {"{{message['content']+eos_token}}", "", "", "", /*trims=*/false},
    {"{{message['content']+eos_token+' '}}", "", "", " ", /*trims=*/false}};

/// The templates of Mistral and Mixtral with a tokenizer of SentencePiece: v0.1 to v0.3.
std::optional<ChatForm> mistral_form_of(std::string code, const std::string& eos) {
  constexpr std::pair<const char*, const char*> kUsers[] = {
      {" [INST] ", " [/INST]"}, {"[INST] ", " [/INST]"}, {"[INST] ", "[/INST]"}};
  using System = ChatForm::System;
  ChatForm form;
  form.alternates = true;
  form.system_place = System::kRefused;
  for (const std::pair<std::string, std::string> user : kUsers) {
    const auto open = "{{'" + user.first + "'+";
    const auto close = "message['content']+'" + user.second + "'}}";
    if (take(code, open + close)) {
      form.user = {.before = "", .begin = user.first, .end = user.second, .after = ""};
    }
    if (take(code, open + "system_message+'\n\n'+" + close)) {
      const bool is_first = has(code, "loop.first and system_message is defined");
      if (!is_first && !has(code, "loop.last and system_message is defined")) {
        return std::nullopt;
      }
      form.system_place = is_first ? System::kFirstTurn : System::kLastTurn;
    }
  }
  for (const auto& answer : kMistralAnswers) {
    if (take(code, answer.code)) {
      form.assistant = {
          .before = "",
          .begin = answer.begin,
          .end = answer.before_end + eos,
          .after = answer.after,
          .trims = answer.trims};
    }
  }
  const bool is_known = !form.user.begin.empty() && !form.assistant.end.empty() &&
                        !has(code, "INST]") && !has(code, "message['content']");
  return is_known ? std::optional(form) : std::nullopt;
}

/// Whether the tokenizer puts the same token before a text as a template that begins with
/// bos_token.
bool begins_alike(const Tokenizer& tokenizer, const std::string& code) {
  const auto begin = special_text(tokenizer.folder(), "bos_token");
  const auto token = begin ? tokenizer.find(*begin) : std::nullopt;
  return has(code, "{{bos_token}}") && token && tokenizer.prefix() == std::vector{*token};
}

/// The form of Mistral or Gemma. Nothing if the template is another one.
std::optional<ChatForm> family_form_of(const Tokenizer& tokenizer, const ChatTemplate& chat) {
  const auto code = compact_code(chat.text);
  if (!begins_alike(tokenizer, code) || writes_between_tags(chat.text)) {
    return std::nullopt;
  }
  if (has(code, "<start_of_turn>")) {
    return gemma_form_of(code);
  }
  const auto eos = special_text(tokenizer.folder(), "eos_token");
  return eos && tokenizer.find(*eos) ? mistral_form_of(code, *eos) : std::nullopt;
}

/// What Python's str.strip removes.
constexpr std::string_view kSpaces[] = {"\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",
                                        "\x1d",   "\x1e",   "\x1f",   " ",      "\u0085", "\u00a0",
                                        "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004",
                                        "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                        "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};

std::string trimmed(std::string_view text) {
  for (const auto* space = std::begin(kSpaces); space != std::end(kSpaces);) {
    if (text.starts_with(*space)) {
      text.remove_prefix(space->size());
      space = std::begin(kSpaces);
    } else if (text.ends_with(*space)) {
      text.remove_suffix(space->size());
      space = std::begin(kSpaces);
    } else {
      ++space;
    }
  }
  return std::string(text);
}

} // namespace

std::vector<Turn> ChatForm::turns(const std::vector<Message>& messages) const {
  const bool merges = system_place == System::kFirstTurn || system_place == System::kLastTurn;
  const bool has_system = merges && !messages.empty() && messages[0].role == "system";
  const auto first = static_cast<size_t>(has_system);
  const auto last = messages.size() - 1;
  const auto place = system_place == System::kFirstTurn ? first : last;
  check_config(
      !has_system || system_place != System::kLastTurn || messages[last].role != "assistant",
      "has a message of the system, which the template of the model leaves out unless the last "
      "message is the user's; put its text into a message of the user");
  std::vector<Turn> result;
  for (auto i = first; i < messages.size(); ++i) {
    const auto& [role, content] = messages[i];
    check_config(
        role != "system" || system_place == System::kOwnTurn, "has a message of the system",
        merges ? " that is not the first one" : "",
        ", and the model's template has no place for it");
    check_config(
        !alternates || role == ((i - first) % 2 == 0 ? "user" : "assistant"), "has the role \"",
        role, "\" in message ", i + 1,
        ", but in this model's template user and assistant speak in turn, and the user begins");
    const auto& speaker = role == "user" ? user : role == "system" ? system : assistant;
    auto words = speaker.trims ? trimmed(content) : content;
    if (has_system && i == place) {
      words = messages[0].content + "\n\n" + words;
    }
    result.push_back(
        {.before = speaker.before,
         .said = speaker.begin + words + speaker.end,
         .after = speaker.after,
         .is_answer = role == "assistant"});
  }
  return result;
}

FoundForm find_chat_form(const Tokenizer& tokenizer) {
  const auto chat = chat_template_of(tokenizer.folder());
  const auto refuse = [&](const std::string& why) {
    return FoundForm{
        std::nullopt, "is a conversation, but the template in " + chat.file + why +
                          "; only the forms of Qwen (<|im_start|>), Llama 3 (<|start_header_id|>), "
                          "Mistral ([INST]) and Gemma (<start_of_turn>) are supported, so give "
                          "\"prompt\" and \"completion\""};
  };
  for (const auto* marker : kOtherMarkers) {
    if (has(chat.text, marker)) {
      return refuse(" writes " + std::string(marker));
    }
  }
  for (const std::string marker : {"[INST]", "<start_of_turn>"}) {
    if (has(chat.text, marker)) {
      const auto form = family_form_of(tokenizer, chat);
      return form ? FoundForm{form, ""}
                  : refuse(" writes " + marker + " in a way that is not known");
    }
  }
  std::string lacks;
  for (const auto& form : kRoleForms) {
    if (tokenizer.find(form.before_role) && tokenizer.find(form.end)) {
      if (chat.text.empty() || has(chat.text, form.before_role)) {
        return {chat_form_of(form), ""};
      }
      lacks = form.before_role;
    }
  }
  if (chat.text.empty() && tokenizer.find(kGemma.before_role) && tokenizer.find(kGemma.end)) {
    return {gemma_form(ChatForm::System::kRefused), ""};
  }
  return lacks.empty()
             ? FoundForm{std::nullopt,
                         "is a conversation, but the tokenizer has neither <|im_start|> and "
                         "<|im_end|> nor <|start_header_id|> and <|eot_id|>, and its folder has no "
                         "template of Mistral or Gemma"}
             : refuse(" does not write " + lacks);
}

} // namespace fsdp::cli
