#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/text/tokenizer.h"

namespace fsdp::cli {

/// One message of a conversation.
struct Message {
  std::string role; // system, user or assistant
  std::string content;
};

/// One message as the model sees it: three texts, one after another.
struct Turn {
  std::string before;
  std::string said; // is learned if the assistant speaks
  std::string after;
  bool is_answer = false;
};

/// How a family of models writes conversations.
struct ChatForm {
  /// What stands around the words of one role.
  struct Speaker {
    std::string before;
    std::string begin; // the model learns it with the words
    std::string end;   // and it learns this
    std::string after;
    bool trims = false; // the whitespace around the words
  };
  /// Where the words of the system go.
  enum class System {
    kOwnTurn,   // anywhere
    kRefused,   // the form has none
    kFirstTurn, // before the first words of the user, if the system speaks first
    kLastTurn,  // before the last words, if they are the user's and the system speaks first
  };

  Speaker user;
  Speaker assistant;
  Speaker system;
  System system_place = System::kOwnTurn;
  bool alternates = false; // user and assistant speak in turn, and the user begins

  /// Throws ConfigError if the family does not write such a conversation.
  std::vector<Turn> turns(const std::vector<Message>& messages) const;
};

/// A form, or why there is none.
struct FoundForm {
  std::optional<ChatForm> form;
  std::string problem;
};

/// The form of the template in a tokenizer's folder. Without a template, it is the form whose
/// special tokens the tokenizer has.
FoundForm find_chat_form(const Tokenizer& tokenizer);

} // namespace fsdp::cli
