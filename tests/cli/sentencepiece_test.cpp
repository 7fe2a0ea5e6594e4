// Tokenizers of SentencePiece's kind, next to what the package tokenizers computes with them.
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/made_tokenizers.h"
#include "cli/text/documents.h"
#include "cli/text/token_text.h"
#include "cli/text/tokenizer.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::expect_tokens;
using test::made_sentencepiece;
using test::message_of;
using Json = nlohmann::json;
using Tokens = std::vector<int64_t>;

Json made_json(const std::string& path) {
  return test::json_of(path, made_sentencepiece());
}

Tokenizer made_tokenizer(const std::string& name) {
  return Tokenizer::read(made_sentencepiece().folder + "/" + name);
}

/// Calls `check(tokenizer, entry)` for every entry of a file in every folder.
template <class Check>
void for_every_entry(const std::string& file, Check check) {
  for (const auto& name : made_sentencepiece().names) {
    const auto tokenizer = made_tokenizer(name);
    for (const auto& entry : made_json(name + "/" + file)) {
      const auto text = entry.at("text").get<std::string>();
      SCOPED_TRACE(name + ": " + testing::PrintToString(text.substr(0, 60)));
      check(tokenizer, entry);
    }
  }
}

std::string decoded(const Tokenizer& tokenizer, const Tokens& tokens, bool begins = true) {
  TokenText text(tokenizer, begins);
  std::string result;
  for (const auto token : tokens) {
    result += text.add(token);
  }
  return result + text.finish();
}

TEST(SentencePiece, TokensAreThoseOfThePackage) {
  SKIP_WITHOUT_SENTENCEPIECE();
  for_every_entry("expected.json", [](const Tokenizer& tokenizer, const Json& entry) {
    auto tokens = tokenizer.encode(entry.at("text").get<std::string>());
    expect_tokens(tokens, entry.at("ids").get<Tokens>());
    tokens.insert(tokens.begin(), tokenizer.prefix().begin(), tokenizer.prefix().end());
    tokens.insert(tokens.end(), tokenizer.suffix().begin(), tokenizer.suffix().end());
    expect_tokens(tokens, entry.at("with_special").get<Tokens>());
  });
}

TEST(SentencePiece, TextOfTokensIsThatOfThePackage) {
  SKIP_WITHOUT_SENTENCEPIECE();
  for_every_entry("expected.json", [](const Tokenizer& tokenizer, const Json& entry) {
    const auto text = decoded(tokenizer, entry.at("ids").get<Tokens>());
    EXPECT_TRUE(text == entry.at("decoded").get<std::string>()) << text.substr(0, 200);
  });
  for_every_entry("decoded.json", [](const Tokenizer& tokenizer, const Json& entry) {
    EXPECT_EQ(
        decoded(tokenizer, entry.at("ids").get<Tokens>()), entry.at("text").get<std::string>());
  });
}

TEST(SentencePiece, TextComesAsSoonAsItIsCertain) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const auto tokenizer = made_tokenizer("llama2");
  const auto token = [&](const std::string& entry) { return tokenizer.find(entry).value(); };
  TokenText text(tokenizer, /*begins=*/true);
  EXPECT_EQ(text.add(token("\u2581the")), "the");
  EXPECT_EQ(text.add(token("\u2581the")), " the");
  EXPECT_EQ(text.add(token("<0x0A>")), "");
  EXPECT_EQ(text.add(token("s")), "\ns");
  EXPECT_EQ(text.add(token("<0xC3>")), "");
  EXPECT_EQ(text.add(token("<0xA9>")), "");
  EXPECT_EQ(text.add(token("<0xC3>")), "");
  EXPECT_EQ(text.finish(), "\ufffd\ufffd\ufffd"); // as the package says, and not "é" and U+FFFD
  EXPECT_EQ(text.finish(), "");
  // The space before the first token is kept if a prompt lies before it.
  EXPECT_EQ(TokenText(tokenizer, /*begins=*/false).add(token("\u2581the")), " the");
  EXPECT_ANY_THROW(text.add(tokenizer.vocab()));
}

TEST(SentencePiece, TokensAreFoundByTheirEntries) {
  SKIP_WITHOUT_SENTENCEPIECE();
  for (const auto& name : made_sentencepiece().names) {
    SCOPED_TRACE(name);
    const auto tokenizer = made_tokenizer(name);
    const auto json = made_json(name + "/tokenizer.json");
    for (const auto& [entry, token] : json.at("model").at("vocab").items()) {
      EXPECT_EQ(tokenizer.find(entry), token.get<int64_t>()) << entry;
    }
    for (const auto& added : json.at("added_tokens")) {
      const auto token = added.at("id").get<int64_t>();
      EXPECT_EQ(tokenizer.find(added.at("content").get<std::string>()), token);
      EXPECT_EQ(tokenizer.bytes_of(token), added.at("content").get<std::string>());
      EXPECT_EQ(tokenizer.is_special(token), added.at("special").get<bool>());
    }
    const auto byte = tokenizer.find("<0x0A>").value();
    EXPECT_EQ(tokenizer.bytes_of(byte), "\n"); // also if the decoder does not say so
  }
  const auto llama = made_tokenizer("llama2");
  EXPECT_EQ(llama.bytes_of(llama.find("\u2581the").value()), " the");
  EXPECT_EQ(llama.prefix(), Tokens{1});
}

std::string longest_text(const Json& entries) {
  std::string result;
  for (const auto& entry : entries) {
    const auto text = entry.at("text").get<std::string>();
    result = text.size() > result.size() ? text : result;
  }
  return result;
}

TEST(SentencePiece, PartsOfATextHaveTheTokensOfTheWhole) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const std::string lines =
      "one\ntwo \n three\r\nfour\n\n\tfive\n\u3000six\u3002\n\u4e00\n<s>x\n "
      "<tool>\n\n\na\u2581\n\u2581b\n";
  const std::set<std::string> cannot_cut{"whole-words", "always"};
  for (const auto& name : made_sentencepiece().names) {
    const auto tokenizer = made_tokenizer(name);
    const auto long_text = longest_text(made_json(name + "/expected.json"));
    for (const std::string& text : {lines, long_text}) {
      for (const size_t size : {1, 1000, 1 << 20}) {
        SCOPED_TRACE(name + " " + std::to_string(size));
        Tokens tokens;
        std::string_view before;
        const auto parts = tokenizer.cut(text, size);
        for (const auto& part : parts) {
          const auto more = tokenizer.encode(part, before);
          tokens.insert(tokens.end(), more.begin(), more.end());
          before = part;
        }
        expect_tokens(tokens, tokenizer.encode(text));
        // One looks up whole words, the other has a line end among the normalized tokens.
        if (text == long_text && size == 1000) {
          EXPECT_EQ(parts.size() > 15, !cannot_cut.contains(name)) << parts.size();
        }
      }
    }
  }
}

TEST(SentencePiece, AllCoresMakeTheTokensOfOne) {
  SKIP_WITHOUT_SENTENCEPIECE();
  for (const std::string name : {"llama2", "mistral", "gemma", "marked"}) {
    SCOPED_TRACE(name);
    const auto tokenizer = made_tokenizer(name);
    const auto some = longest_text(made_json(name + "/expected.json"));
    std::string text;
    while (text.size() < 4 << 20) { // several parts
      text += some;
    }
    const auto path = test::temporary_folder() + "/text.txt";
    std::ofstream(path) << text;
    Tokens tokens;
    tokenize_documents(tokenizer, {path}, {}, [&](const Tokens& more) {
      tokens.insert(tokens.end(), more.begin(), more.end());
    });
    auto expected = tokenizer.encode(text);
    expected.insert(expected.begin(), tokenizer.prefix().begin(), tokenizer.prefix().end());
    expect_tokens(tokens, expected);
    EXPECT_GT(tokenizer.cut(text, 1 << 20).size(), 3u);
  }
}

TEST(SentencePiece, WhatLiesBeforeATextDecidesAboutItsFirstSpace) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const auto encoded = [](const std::string& name, const std::string& before) {
    const auto tokenizer = made_tokenizer(name);
    std::string result;
    for (const auto token : tokenizer.encode("the", before)) {
      result += tokenizer.bytes_of(token);
    }
    return result;
  };
  for (const std::string name : {"llama2", "always"}) {
    SCOPED_TRACE(name);
    EXPECT_EQ(encoded(name, ""), " the");
    EXPECT_EQ(encoded(name, "a"), "the");
    EXPECT_NE(encoded(name, "a</s>"), "the");
  }
  EXPECT_NE(encoded("always", "a<tool>"), "the");
  EXPECT_EQ(encoded("always", "a<tool>b"), "the");
  EXPECT_EQ(encoded("marked", "a <tool>"), "the"); // the normalizer ran before
  EXPECT_NE(encoded("mistral", ""), "the");
  EXPECT_EQ(encoded("mistral", "[INST]"), "the");
  EXPECT_EQ(encoded("gemma", ""), "the");
}

TEST(SentencePiece, BytesThatAreNotUtf8AreNamed) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const std::string before = "a\u0301 </s> \u2581b";
  for (const auto& name : made_sentencepiece().names) {
    const auto tokenizer = made_tokenizer(name);
    for (const std::string bad :
         {"\xff", "\x80", "\xe2\x82", "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80"}) {
      SCOPED_TRACE(name + ": " + testing::PrintToString(bad));
      const auto message = message_of<ConfigError>([&] { tokenizer.encode(before + bad + " c"); });
      EXPECT_TRUE(contains(message, "not UTF-8 at byte " + std::to_string(before.size())))
          << message;
    }
  }
}

TEST(SentencePiece, WhatIsNotSupportedIsNamed) {
  SKIP_WITHOUT_SENTENCEPIECE();
  const auto refused = made_json("refused.json");
  EXPECT_EQ(refused.size(), 20u);
  for (const auto& [name, word] : refused.items()) {
    SCOPED_TRACE(name);
    const auto path = made_sentencepiece().folder + "/" + name + "/tokenizer.json: ";
    const auto message = message_of<ConfigError>([&] { made_tokenizer(name); });
    const auto at = message.find(path);
    ASSERT_NE(at, std::string::npos) << message;
    const auto problem = message.substr(at + path.size());
    EXPECT_TRUE(contains(problem.substr(0, problem.find('\n')), word.get<std::string>()))
        << message;
  }
}

} // namespace
} // namespace fsdp::cli
