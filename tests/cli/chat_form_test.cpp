// Conversations in the forms of Mistral and Gemma, next to what transformers makes of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/made_tokenizers.h"
#include "cli/text/chat_form.h"
#include "cli/text/chat_template.h"
#include "cli/text/examples.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::expect_tokens;
using test::made_sentencepiece;
using test::message_of;
using Json = nlohmann::json;
using Tokens = std::vector<int64_t>;

std::string line_file(const Json& line) {
  const auto path = test::temporary_folder() + "/chat.jsonl";
  std::ofstream(path) << line.dump() << "\n";
  return path;
}

TEST(ChatForm, ConversationsAreThoseOfTransformers) {
  SKIP_WITHOUT_SENTENCEPIECE();
  int num_families = 0;
  int num_refused = 0;
  for (const auto& entry : std::filesystem::directory_iterator(made_sentencepiece().folder)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with("chat-")) {
      continue;
    }
    ++num_families;
    const auto tokenizer = Tokenizer::read(entry.path());
    for (const auto& chat : test::json_of(name + "/chats.json", made_sentencepiece())) {
      SCOPED_TRACE(name + ": " + chat.at("messages").dump());
      const auto path = line_file({{"messages", chat.at("messages")}});
      if (chat.contains("refused")) {
        ++num_refused;
        const auto message = message_of<ConfigError>([&] { read_examples(tokenizer, path, {}); });
        EXPECT_TRUE(contains(message, "template")) << message;
        continue;
      }
      const auto learned = chat.at("learned").get<Tokens>();
      if (std::count(learned.begin(), learned.end(), 1) == 0) {
        continue;
      }
      const auto example = read_examples(tokenizer, path, {})[0];
      expect_tokens(example.tokens, chat.at("ids").get<Tokens>());
      EXPECT_EQ(Tokens(example.learned.begin(), example.learned.end()), learned);
    }
  }
  EXPECT_EQ(num_families, 10);
  EXPECT_GT(num_refused, 40);
}

TEST(ChatForm, OtherTemplatesAreRefused) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const auto path = line_file(
      {{"messages",
        {{{"role", "user"}, {"content", "a"}}, {{"role", "assistant"}, {"content", "b"}}}}});
  const auto folder = test::temporary_folder();
  std::filesystem::copy(
      made_sentencepiece().folder + "/mistral/tokenizer.json", folder + "/tokenizer.json");
  const auto config = [&](const std::string& chat_template) {
    std::ofstream(folder + "/tokenizer_config.json")
        << Json{{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"chat_template", chat_template}};
  };
  const auto read = [&] { return read_examples(Tokenizer::read(folder), path, {}); };
  const std::string asks = "{% if message['role'] == 'user' %}";
  const std::string user = asks + "{{ '[INST] ' + message['content'] + ' [/INST]' }}";
  const std::string answers = "{% elif message['role'] == 'assistant' %}";
  const std::string answer = answers + "{{ message['content'] + eos_token }}{% endif %}";
  const std::string loop = "{% for message in messages %}";
  const std::string end = "{% endfor %}";
  config("{{ bos_token }}" + loop + user + answer + end);
  EXPECT_EQ(read().size(), 1u);
  // A loop that only checks, and parts for tools, in which nothing is looked at.
  config(
      "{%- for message in loop_messages | rejectattr(\"role\", \"equalto\", \"tool\") %}"
      "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('') }}"
      "{% endif %}{% endfor %}{{ bos_token }}" +
      loop + asks + "{% if tools is not none and (message == user_messages[-1]) %}{{ 'x' }}" +
      "{% endif %}" + user.substr(asks.size()) + answer + end);
  EXPECT_EQ(read().size(), 1u);
  for (const auto& other :
       {loop + user + answer + end,                       // no bos_token
        "{{ bos_token }}\n" + loop + user + answer + end, // a line end is written
        "{{ bos_token }}" + loop + user + " " + answer + end,
        "{{ bos_token }}" + loop + user + answers +
            "{{ message['content'] | upper + eos_token }}{% endif %}" + end,
        "{{ bos_token }}" + loop + user + "{% endif %}" + end,
        "{{ bos_token }}" + loop + asks + "{{ '[INST]' + message['content'] + '[/INST]' }}" +
            answer + end,
        "{{ bos_token }}" + loop + user + answer + "{{ '<<SYS>>[INST]' }}" + end,
        "{{ bos_token }}{{ 'Today is Monday.' }}" + loop + user + answer + end,
        "{{ bos_token }}" + loop + user + answers + "{{ '<think>' }}{{ message['content'] + " +
            "eos_token }}{% endif %}" + end,
        loop + "{{ bos_token }}" + user + answer + end,
        "{{ bos_token }}" + loop + user + "{{ bos_token }}" + answer + end,
        "{% set system_message = 'Be kind.' %}{{ bos_token }}" + loop + user + answer + end,
        "{{ bos_token }}{% if tools is none %}{{ 'x' }}{% endif %}" + loop + user + answer + end,
        "{% if add_generation_prompt %}{{ bos_token }}{% endif %}" + loop + user + answer + end,
        "{{ bos_token }}" + loop + asks + "{{ message['content'] + eos_token }}" + answers +
            "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}" + end,
        "{{ bos_token }}" + loop + user + answer + answer.substr(answers.size()) + end,
        "{{ bos_token }}{% for message in messages[1:] %}" + user + answer + end,
        "{{ bos_token }}" + loop + "{{ '[INST] ' + message['content'] + ' [/INST]' }}" +
            "{{ message['content'] + eos_token }}" + end}) {
    SCOPED_TRACE(other);
    config(other);
    const auto message = message_of<ConfigError>(read);
    EXPECT_TRUE(contains(message, "[INST] in a way that is not known")) << message;
  }
  config(""); // the tokens [INST] alone do not say where spaces are
  EXPECT_TRUE(contains(message_of<ConfigError>(read), "no template of Mistral or Gemma"));
}

TEST(ChatForm, ACompletionContinuesThePrompt) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const auto tokenizer = Tokenizer::read(made_sentencepiece().folder + "/llama2");
  const auto text_of = [&](const Json& line) {
    const auto example = read_examples(tokenizer, line_file(line), 2)[0];
    std::string text;
    for (const auto token : example.tokens) {
      text += tokenizer.bytes_of(token);
    }
    return text;
  };
  EXPECT_EQ(text_of({{"prompt", "a"}, {"completion", "b c"}}), "<s> ab c</s>");
  EXPECT_EQ(text_of({{"prompt", ""}, {"completion", "b"}}), "<s> b</s>");
  EXPECT_EQ(text_of({{"prompt", "a</s>"}, {"completion", "b"}}), "<s> a</s> b</s>");
}

TEST(ChatForm, GemmaNeedsNoTemplate) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const auto tokenizer = Tokenizer::read(made_sentencepiece().folder + "/gemma");
  const auto chats = test::json_of("chat-gemma-2/chats.json", made_sentencepiece());
  const auto path = line_file({{"messages", chats[0].at("messages")}});
  expect_tokens(read_examples(tokenizer, path, {})[0].tokens, chats[0].at("ids").get<Tokens>());
}

TEST(ChatForm, TextBetweenTagsIsFound) {
  EXPECT_FALSE(writes_between_tags(""));
  EXPECT_FALSE(writes_between_tags("{{ a }}{% if b %}\n  {% endif %}\n"));
  EXPECT_FALSE(writes_between_tags("{{ a }}\n  {%- if b %}{{ '}}' }}{% endif -%}  \n {{ c }}\n"));
  EXPECT_FALSE(writes_between_tags("{# don't #}\n{{ a }}"));
  EXPECT_TRUE(writes_between_tags("a"));
  EXPECT_TRUE(writes_between_tags("{{ a }} {{ b }}"));
  EXPECT_TRUE(writes_between_tags("{{ a }}\n{% if b %}{% endif %}"));
  EXPECT_TRUE(writes_between_tags("{% if a %}\n\n{{ b }}{% endif %}"));
  EXPECT_TRUE(writes_between_tags("{{ a }} {% if b %}{% endif %}"));
  EXPECT_TRUE(writes_between_tags("{{ a }}\n\n"));
}

} // namespace
} // namespace fsdp::cli
