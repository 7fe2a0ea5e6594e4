// Tokenizers of Hugging Face folders, next to what the package tokenizers computes with them.
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/made_tokenizers.h"
#include "cli/text/tokenizer.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::expect_tokens;
using test::json_of;
using test::made;
using Json = nlohmann::json;
using Tokens = std::vector<int64_t>;

/// The message alone: a backtrace may hold the very word that a test looks for.
template <class Statement>
std::string refusal(Statement statement) {
  try {
    statement();
  } catch (const ConfigError& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no ConfigError was thrown";
  return "";
}

/// Calls `check(tokenizer, entry)` for every text of every folder.
template <class Check>
void for_every_text(Check check) {
  for (const auto& name : made().names) {
    const auto tokenizer = Tokenizer::read(made().folder + "/" + name);
    for (const auto& entry : json_of(name + "/expected.json")) {
      const auto text = entry.at("text").get<std::string>();
      SCOPED_TRACE(name + ": " + testing::PrintToString(text.substr(0, 60)));
      check(tokenizer, entry);
    }
  }
}

TEST(Tokenizer, TokensAreThoseOfThePackage) {
  SKIP_WITHOUT_TOKENIZERS();
  for_every_text([](const Tokenizer& tokenizer, const Json& entry) {
    auto tokens = tokenizer.encode(entry.at("text").get<std::string>());
    expect_tokens(tokens, entry.at("ids").get<Tokens>());
    tokens.insert(tokens.begin(), tokenizer.prefix().begin(), tokenizer.prefix().end());
    tokens.insert(tokens.end(), tokenizer.suffix().begin(), tokenizer.suffix().end());
    expect_tokens(tokens, entry.at("with_special").get<Tokens>());
  });
}

TEST(Tokenizer, BytesOfTokensAreTheText) {
  SKIP_WITHOUT_TOKENIZERS();
  for_every_text([](const Tokenizer& tokenizer, const Json& entry) {
    const auto decoded = entry.at("decoded").get<std::string>();
    if (decoded.find("\xef\xbf\xbd") != std::string::npos) {
      return; // U+FFFD stands for bytes that are lost
    }
    std::string bytes;
    for (const auto token : entry.at("ids").get<Tokens>()) {
      bytes += tokenizer.bytes_of(token);
    }
    EXPECT_TRUE(bytes == decoded) << testing::PrintToString(bytes.substr(0, 200));
  });
}

TEST(Tokenizer, TokensAreFoundByTheirBytes) {
  SKIP_WITHOUT_TOKENIZERS();
  for (const auto& name : made().names) {
    SCOPED_TRACE(name);
    const auto tokenizer = Tokenizer::read(made().folder + "/" + name);
    const auto json = json_of(name + "/tokenizer.json");
    int64_t largest = 0;
    for (const auto& token : json.at("model").at("vocab")) {
      largest = std::max(largest, token.get<int64_t>());
    }
    for (const auto& added : json.at("added_tokens")) {
      const auto text = added.at("content").get<std::string>();
      const auto token = added.at("id").get<int64_t>();
      EXPECT_EQ(tokenizer.find(text), token) << text;
      EXPECT_EQ(tokenizer.bytes_of(token), text);
      largest = std::max(largest, token);
    }
    EXPECT_EQ(tokenizer.vocab(), largest + 1);
    for (int64_t token = 0; token <= largest; ++token) {
      EXPECT_EQ(tokenizer.find(tokenizer.bytes_of(token)), token);
    }
    EXPECT_FALSE(tokenizer.find("no token is this text").has_value());
    EXPECT_ANY_THROW(tokenizer.bytes_of(-1));
    EXPECT_ANY_THROW(tokenizer.bytes_of(tokenizer.vocab()));
  }
}

TEST(Tokenizer, PartsOfATextHaveTheTokensOfTheWhole) {
  SKIP_WITHOUT_TOKENIZERS();
  using Parts = std::vector<std::string_view>;
  const std::string lines = "one\ntwo \n three\r\nfour\n\tfive\n\u3000six\u3002\n\u4e00\n\u4e8c";
  const std::string_view rest = "four\n\tfive\n\u3000six\u3002\n";
  for (const auto& name : made().names) {
    SCOPED_TRACE(name);
    const auto tokenizer = Tokenizer::read(made().folder + "/" + name);
    const bool is_gpt2 = name == "gpt2" || name == "old-merges";
    const auto expected =
        name == "no-pattern" ? Parts{lines}
        : is_gpt2
            ? Parts{"one\n", "two \n three\r\nfour\n\tfive\n\u3000six\u3002\n", "\u4e00\n", "\u4e8c"}
            : Parts{"one\n", "two \n three\r\n", rest, "\u4e00\n", "\u4e8c"};
    EXPECT_EQ(tokenizer.cut(lines, 1), expected);
    const auto long_text = json_of(name + "/expected.json").back().at("text").get<std::string>();
    for (const std::string& text : {lines, long_text}) {
      for (const size_t size : {1, 1000, 1 << 20}) {
        const auto parts = tokenizer.cut(text, size);
        const bool is_cut = text == long_text && size < text.size() && name != "no-pattern";
        EXPECT_EQ(parts.size() > 15, is_cut) << parts.size();
        Tokens tokens;
        for (const auto& part : parts) {
          const auto more = tokenizer.encode(part);
          tokens.insert(tokens.end(), more.begin(), more.end());
        }
        expect_tokens(tokens, tokenizer.encode(text));
      }
    }
  }
}

TEST(Tokenizer, BytesThatAreNotUtf8AreNamed) {
  SKIP_WITHOUT_TOKENIZERS();
  // NFC makes this shorter, and the end is a token: the offset is still that in the text.
  std::string before;
  for (int i = 0; i < 1000; ++i) {
    before += "e\xcc\x81";
  }
  before += "<|endoftext|>ab";
  for (const auto& name : made().names) {
    const auto tokenizer = Tokenizer::read(made().folder + "/" + name);
    // A character that is cut off, a surrogate, one that is too long, one above U+10FFFF.
    for (const std::string bad :
         {"\xff", "\x80", "\xe2\x82", "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80"}) {
      SCOPED_TRACE(name + ": " + testing::PrintToString(bad));
      const auto offset = std::to_string(before.size()); // of the character's first byte
      const auto end = refusal([&] { tokenizer.encode(before + bad); });
      EXPECT_TRUE(contains(end, offset)) << end;
      const auto middle = refusal([&] { tokenizer.encode(before + bad + " cd"); });
      EXPECT_TRUE(contains(middle, offset)) << middle;
      EXPECT_TRUE(contains(refusal([&] { tokenizer.encode(bad); }), "0"));
    }
    EXPECT_TRUE(contains(refusal([&] { tokenizer.encode("ab\xff"); }), "2"));
  }
}

TEST(Tokenizer, WhatIsNotSupportedIsNamed) {
  SKIP_WITHOUT_TOKENIZERS();
  const auto refused = json_of("refused.json");
  EXPECT_EQ(refused.size(), 15u);
  for (const auto& [name, word] : refused.items()) {
    SCOPED_TRACE(name);
    const auto folder = made().folder + "/" + name;
    auto message = refusal([&] { Tokenizer::read(folder); });
    const auto at = message.find(folder);
    ASSERT_NE(at, std::string::npos) << message;
    message.erase(at, folder.size()); // the name of the folder may hold the word
    EXPECT_TRUE(contains(message, word.get<std::string>())) << message;
  }
}

} // namespace
} // namespace fsdp::cli
