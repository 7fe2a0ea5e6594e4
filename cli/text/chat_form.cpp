#include "cli/text/chat_form.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>

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

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// ------------------------------------------------------------ Mistral and Gemma
// Their templates have many versions. One is known if all its tags are.

using Tags = std::vector<std::string>;

bool has(const Tags& tags, const std::string& tag) {
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

/// The tags that write nothing, in the templates that are known.
const std::set<std::string> kSilentTags{
    "for message in messages",
    "for message in loop_messages",
    "if (message['role'] == 'user') != (loop.index0 % 2 == 0)",
    "if (message['role'] == 'user') != (ns.index % 2 == 0)",
    "if (message['role'] == 'assistant')",
    "if message['role'] == 'user'",
    "elif message['role'] == 'assistant'",
    "if messages[0]['role'] == 'system'",
    "if messages[0]['content'] is string",
    "if message['content'] is string",
    "if loop.first and system_message is defined",
    "if loop.last and system_message is defined",
    "if add_generation_prompt",
    "if not tools is defined",
    "else",
    "endif",
    "endfor",
    "set system_message = messages[0]['content']",
    "set loop_messages = messages[1:]",
    "set loop_messages = messages",
    "set user_messages = loop_messages|selectattr('role', 'equalto', 'user')|list",
    "set tools = none",
    "set ns = namespace()",
    "set ns.index = 0",
    "set ns.index = ns.index+1",
    "set role = 'model'",
    "set role = message['role']",
    "set first_user_prefix = ''",
    "set first_user_prefix = messages[0]['content']+'\n\n'",
    "set first_user_prefix = messages[0]['content'][0]['text']+'\n\n'"};

bool is_silent(const std::string& tag) {
  return kSilentTags.contains(tag) || tag.starts_with("raise_exception(") ||
         tag.starts_with("if not (message.role == 'tool' ") ||
         tag.starts_with("for message in loop_messages|rejectattr('role', 'equalto', 'tool')");
}

/// Whether a template writes bos_token once: before all else, and in every conversation.
bool begins_with_bos(const Tags& tags) {
  int depth = 0;
  for (const auto& tag : tags) {
    if (!is_silent(tag)) {
      return tag == "bos_token" && depth == 0 && std::count(tags.begin(), tags.end(), tag) == 1;
    }
    depth += tag.starts_with("if ") || tag.starts_with("for ") ? 1 : 0;
    depth -= tag.starts_with("end") ? 1 : 0;
  }
  return false;
}

/// The tags that write turns. Not the one that asks for an answer.
std::multiset<std::string> written_by(const Tags& tags) {
  std::multiset<std::string> written;
  std::string before;
  for (const auto& tag : tags) {
    const bool asks = before == "if add_generation_prompt" && tag == "'<start_of_turn>model\n'";
    if (!is_silent(tag) && tag != "bos_token" && !asks) {
      written.insert(tag);
    }
    before = tag;
  }
  return written;
}

/// Whether a tag stands directly behind one of these.
bool is_behind(const Tags& tags, const std::string& tag, const Tags& before) {
  const auto found = std::find(tags.begin(), tags.end(), tag);
  return found != tags.begin() && found != tags.end() && has(before, *std::prev(found));
}

/// The templates of Gemma 1 and 2, and of Gemma 3, which knows a system.
std::optional<ChatForm> gemma_form_of(const Tags& tags) {
  using System = ChatForm::System;
  const std::string begin = "'<start_of_turn>'+role+'\n'+";
  const std::multiset<std::string> plain{begin + "message['content']|trim+'<end_of_turn>\n'"};
  const std::multiset<std::string> with_system{
      begin + "(first_user_prefix if loop.first else '')", "message['content']|trim",
      "'<end_of_turn>\n'"};
  const auto written = written_by(tags);
  if (!has(tags, "set role = 'model'")) {
    return std::nullopt;
  }
  if (written == plain) {
    return gemma_form(System::kRefused);
  }
  const bool has_prefix =
      has(tags, "set first_user_prefix = messages[0]['content']+'\n\n'") &&
      is_behind(tags, "message['content']|trim", {"if message['content'] is string"});
  return written == with_system && has_prefix ? std::optional(gemma_form(System::kFirstTurn))
                                              : std::nullopt;
}

/// How the templates of Mistral write an answer.
struct MistralAnswer {
  const char* tag;
  const char* begin;
  const char* before_end;
  const char* after;
  bool trims;
};

constexpr MistralAnswer kMistralAnswers[] = {
    {"' '+message['content']+eos_token", " ", "", "", /*trims=*/false},
    {"' '+message['content']|trim+eos_token", " ", "", "", /*trims=*/true},
    {"' '+message['content']+' '+eos_token", " ", " ", "", /*trims=*/false},
    {"message['content']+eos_token", "", "", "", /*trims=*/false},
    {"message['content']+eos_token+' '", "", "", " ", /*trims=*/false}};

/// The templates of Mistral and Mixtral with a tokenizer of SentencePiece: v0.1 to v0.3.
std::optional<ChatForm> mistral_form_of(const Tags& tags, const std::string& eos) {
  constexpr std::pair<const char*, const char*> kUsers[] = {
      {" [INST] ", " [/INST]"}, {"[INST] ", " [/INST]"}, {"[INST] ", "[/INST]"}};
  using System = ChatForm::System;
  ChatForm form;
  form.alternates = true;
  form.system_place = System::kRefused;
  auto written = written_by(tags);
  for (const std::pair<std::string, std::string> user : kUsers) {
    const auto open = "'" + user.first + "'+";
    const auto close = "message['content']+'" + user.second + "'";
    const auto with_system = open + "system_message+'\n\n'+" + close;
    if (form.user.begin.empty() &&
        is_behind(tags, open + close, {"if message['role'] == 'user'", "else"}) &&
        written.erase(open + close) == 1) {
      form.user = {.before = "", .begin = user.first, .end = user.second, .after = ""};
      const bool is_first =
          is_behind(tags, with_system, {"if loop.first and system_message is defined"});
      const bool is_last =
          is_behind(tags, with_system, {"if loop.last and system_message is defined"});
      if ((is_first || is_last) && has(tags, "set system_message = messages[0]['content']") &&
          written.erase(with_system) == 1) {
        form.system_place = is_first ? System::kFirstTurn : System::kLastTurn;
      }
    }
  }
  for (const auto& answer : kMistralAnswers) {
    if (form.assistant.end.empty() &&
        is_behind(tags, answer.tag, {"elif message['role'] == 'assistant'"}) &&
        written.erase(answer.tag) == 1) {
      form.assistant = {
          .before = "",
          .begin = answer.begin,
          .end = answer.before_end + eos,
          .after = answer.after,
          .trims = answer.trims};
    }
  }
  const bool is_known = written.empty() && !form.user.begin.empty() &&
                        !form.assistant.end.empty() && has(tags, "if message['role'] == 'user'");
  return is_known ? std::optional(form) : std::nullopt;
}

/// Whether the tokenizer puts bos_token before a text.
bool begins_with_bos(const Tokenizer& tokenizer) {
  const auto begin = special_text(tokenizer.folder(), "bos_token");
  const auto token = begin ? tokenizer.find(*begin) : std::nullopt;
  return token && tokenizer.prefix() == std::vector{*token};
}

/// The form of Mistral or Gemma. Nothing if the template is another one.
std::optional<ChatForm> family_form_of(const Tokenizer& tokenizer, const ChatTemplate& chat) {
  const auto tags = tags_of(chat.text);
  if (!begins_with_bos(tags) || !begins_with_bos(tokenizer) || writes_between_tags(chat.text)) {
    return std::nullopt;
  }
  if (has(chat.text, "<start_of_turn>")) {
    return gemma_form_of(tags);
  }
  const auto eos = special_text(tokenizer.folder(), "eos_token");
  return eos && tokenizer.find(*eos) ? mistral_form_of(tags, *eos) : std::nullopt;
}

/// What Python's str.strip removes.
constexpr std::string_view kSpaces[] = {"\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",
                                        "\x1d",   "\x1e",   "\x1f",   " ",      "\u0085", "\u00a0",
                                        "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004",
                                        "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                        "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};

std::string trimmed(std::string_view text) {
  for (size_t before = 0; before != text.size();) {
    before = text.size();
    for (const auto space : kSpaces) {
      if (text.starts_with(space)) {
        text.remove_prefix(space.size());
      }
      if (text.ends_with(space)) {
        text.remove_suffix(space.size());
      }
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
  const auto position = system_place == System::kFirstTurn ? first : last;
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
    if (has_system && i == position) {
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
