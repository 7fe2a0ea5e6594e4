// Examples to learn from: prompts and answers, and conversations.
#include <fsdp/launch.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "cli/made_tokenizers.h"
#include "cli/text/examples.h"
#include "cli/train/trainer.h"
#include "support/tensors.h"

namespace fsdp::cli {
namespace {

using test::contains;
using test::json_of;
using test::made;
using test::message_of;
using Json = nlohmann::json;
using Tokens = std::vector<int64_t>;

std::string written(const std::string& text) {
  const auto path = test::temporary_folder() + "/e.jsonl";
  std::ofstream(path) << text;
  return path;
}

Tokenizer tokenizer_of(const std::string& name) {
  return Tokenizer::read(made().folder + "/" + name);
}

TEST(Examples, ConversationsAreThoseOfTransformers) {
  SKIP_WITHOUT_TOKENIZERS();
  for (const std::string name : {"qwen", "llama3"}) {
    SCOPED_TRACE(name);
    const auto chats = json_of(name + "/chats.json");
    std::string lines;
    for (const auto& chat : chats) {
      lines += Json{{"messages", chat.at("messages")}}.dump() + "\n";
    }
    const auto path = written(lines);
    EXPECT_TRUE(holds_examples(path));
    const auto examples = read_examples(tokenizer_of(name), path, {});
    ASSERT_EQ(examples.size(), chats.size());
    for (size_t i = 0; i < chats.size(); ++i) {
      EXPECT_EQ(examples[i].tokens, chats[i].at("ids").get<Tokens>()) << lines;
      EXPECT_EQ(
          Tokens(examples[i].learned.begin(), examples[i].learned.end()),
          chats[i].at("learned").get<Tokens>());
      EXPECT_EQ(examples[i].line, static_cast<int64_t>(i) + 1);
    }
  }
}

TEST(Examples, OnlyTheCompletionIsLearned) {
  SKIP_WITHOUT_TOKENIZERS();
  const auto tokenizer = tokenizer_of("llama3");
  const auto path = written(
      "{\"prompt\": \"2 + 2 =\", \"completion\": \" 4\"}\n\n{\"prompt\": \"\", \"completion\": "
      "\"a\"}");
  const auto examples = read_examples(tokenizer, path, 7);
  ASSERT_EQ(examples.size(), 2u);
  auto given = tokenizer.encode("2 + 2 =");
  given.insert(given.begin(), tokenizer.prefix()[0]);
  auto all = given;
  for (const auto token : tokenizer.encode(" 4")) {
    all.push_back(token);
  }
  all.push_back(7);
  EXPECT_EQ(examples[0].tokens, all);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(examples[0].learned[i], i >= given.size());
  }
  EXPECT_EQ(examples[1].line, 3);
  EXPECT_FALSE(holds_examples(written("{\"text\": \"a\"}\n")));
}

TEST(Examples, BadLinesAreNamed) {
  SKIP_WITHOUT_TOKENIZERS();
  const auto refused = [](const std::string& line, const std::string& part,
                          const std::string& name = "qwen") {
    const auto path = written("{\"prompt\": \"a\", \"completion\": \"b\"}\n" + line + "\n");
    const auto message =
        message_of<ConfigError>([&] { read_examples(tokenizer_of(name), path, 0); });
    EXPECT_TRUE(contains(message, path + " line 2 " + part)) << message;
  };
  refused("{", "cannot be read: ");
  refused("[]", "is not an object");
  refused("{\"text\": \"a\"}", "has neither \"messages\" nor \"prompt\" and \"completion\"");
  refused("{\"prompt\": \"a\"}", "has neither");
  refused("{\"prompt\": 1, \"completion\": \"b\"}", "cannot be read: ");
  refused("{\"messages\": []}", "has no messages");
  refused("{\"messages\": [\"a\"]}", "has a message without the texts \"role\" and \"content\"");
  refused("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", "has nothing to learn");
  refused("{\"messages\": [{\"role\": \"tool\", \"content\": \"a\"}]}", "has the role \"tool\"");
  refused(
      "{\"messages\": [{\"role\": \"user\", \"content\": \"a\", \"name\": \"b\"}]}",
      "has a message with \"name\", which is not supported");
  refused("{\"messages\": [{\"role\": \"user\", \"content\": null}]}", "has a message without");
  refused(
      "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", "is a conversation, but",
      "gpt2");
  const auto path = written("{\"prompt\": \"a\", \"completion\": \"b\"}\n");
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { read_examples(tokenizer_of("qwen"), path, {}); }),
      "names no eos_token"));
}

TEST(Examples, TheTemplateOfTheFolderDecidesTheForm) {
  SKIP_WITHOUT_TOKENIZERS();
  const auto path = written(
      "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
      "\"content\": \"b\"}]}\n");
  const auto folder = test::temporary_folder();
  std::filesystem::copy(made().folder + "/qwen/tokenizer.json", folder + "/tokenizer.json");
  const auto read = [&] { return read_examples(Tokenizer::read(folder), path, 0); };
  const auto refused = [&](const std::string& part) {
    const auto message = message_of<ConfigError>(read);
    const auto begin = path + " line 1 is a conversation, but the template in " + folder;
    EXPECT_TRUE(contains(message, begin)) << message;
    EXPECT_TRUE(contains(message, part)) << message;
  };
  const auto config = [&](const Json& chat_template) {
    std::ofstream(folder + "/tokenizer_config.json")
        << Json{{"eos_token", "<|im_end|>"}, {"chat_template", chat_template}};
  };
  const std::string chatml = "{{ '<|im_start|>' + m.role + '\n' }}";
  const auto expected = read();
  config(chatml);
  EXPECT_EQ(read()[0].tokens, expected[0].tokens);
  config(Json{
      {{"name", "tool_use"}, {"template", "[INST]"}}, {{"name", "default"}, {"template", chatml}}});
  EXPECT_EQ(read()[0].tokens, expected[0].tokens);
  config("{{ '<|im_start|>' + m.role + '<|im_sep|>' }}"); // as Phi 4 has it
  refused("/tokenizer_config.json writes <|im_sep|>");
  config("{{ m.role + ':' }}");
  refused("/tokenizer_config.json does not write <|im_start|>");
  std::ofstream(folder + "/chat_template.jinja") << "<start_of_turn>";
  refused("/chat_template.jinja writes <start_of_turn>");
  std::ofstream(folder + "/chat_template.jinja") << chatml; // comes before tokenizer_config.json
  EXPECT_EQ(read()[0].tokens, expected[0].tokens);
}

TEST(Examples, OtherNamesOfFieldsAreExplained) {
  SKIP_WITHOUT_TOKENIZERS();
  const auto path = written("{\"instruction\": \"a\", \"output\": \"b\"}\n");
  const auto message = message_of<ConfigError>([&] {
    Corpus::read(path, {.vocab = 2000, .tokenizer = tokenizer_of("qwen"), .documents = {.end = 3}});
  });
  EXPECT_TRUE(contains(message, "line 1 is not an object with the text \"text\": it lacks"))
      << message;
  EXPECT_TRUE(contains(message, "\"prompt\" and \"completion\", or \"messages\"")) << message;
  const auto broken = message_of<ConfigError>([&] {
    read_examples(tokenizer_of("qwen"), written("{\"prompt\": 1, \"completion\": \"b\"}"), 0);
  });
  EXPECT_FALSE(contains(broken, "json.exception")) << broken;
}

/// Examples of different lengths.
std::string some_examples() {
  std::string lines;
  for (int i = 0; i < 40; ++i) {
    lines +=
        Json{
            {"prompt", "Count to " + std::to_string(i % 9) + ":"},
            {"completion", std::string(static_cast<size_t>(i % 9), 'x') + " and done"}}
            .dump() +
        "\n";
  }
  return written(lines);
}

TEST(Examples, RowsHoldWholeExamples) {
  SKIP_WITHOUT_TOKENIZERS();
  const TokensOf tokens{
      .vocab = 2000, .tokenizer = tokenizer_of("qwen"), .documents = {.end = 3}, .context = 47};
  const auto path = some_examples();
  const auto corpus = Corpus::read(path, tokens);
  EXPECT_TRUE(corpus.has_flags());
  const auto rows_in = [](int64_t count) { return count / 48; };
  const auto all = torch::cat(
      {corpus.train_rows({1, 0, rows_in(corpus.num_train()), 47}, 0, rows_in(corpus.num_train())),
       corpus.held_out_rows(
           0, rows_in(corpus.num_held_out()), rows_in(corpus.num_held_out()), 47)});
  // Every example is in one row, once.
  std::multiset<Tokens> found;
  for (int64_t row = 0; row < all.size(0); ++row) {
    Tokens example;
    for (int64_t i = 0; i <= 48; ++i) {
      const auto token = i < 48 ? all[row][i].item<int64_t>() : kBegins;
      if ((token & kBegins) != 0 && !example.empty()) {
        found.insert(std::exchange(example, {}));
      }
      example.push_back(token & ~kBegins);
    }
  }
  for (const auto& example : read_examples(*tokens.tokenizer, path, 3)) {
    Tokens flagged = example.tokens;
    for (size_t i = 0; i < flagged.size(); ++i) {
      flagged[i] |= example.learned[i] ? 0 : kIsGiven;
    }
    const auto at = found.find(flagged);
    ASSERT_NE(at, found.end()) << "line " << example.line;
    found.erase(at);
  }
  for (const auto& padding : found) {
    EXPECT_EQ(padding, Tokens(padding.size(), kIsGiven));
  }

  auto narrow = tokens;
  narrow.context = 9;
  const auto message = message_of<ConfigError>([&] { Corpus::read(path, narrow); });
  EXPECT_TRUE(contains(message, "of 40 examples do not fit into --context 9; the longest, in line"))
      << message;
  narrow.context = 100000;
  const auto one_row = Corpus::read(path, narrow);
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { one_row.check_context(100000); }), "fills only one row"));
  auto few = tokens;
  few.vocab = 260;
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { Corpus::read(path, few); }), "but the model has only 260"));
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { Corpus::read(path, {.vocab = 2000}); }),
      "give a model with --from"));
}

/// The mean loss of what is learned in a batch, and the norm of its gradients. Each example goes
/// through the model alone.
std::pair<double, double> one_by_one(const TrainConfig& config, const torch::Tensor& rows) {
  Transformer model(config.model);
  init_weights(model, static_cast<uint64_t>(config.seed));
  auto sum = torch::zeros({});
  int64_t count = 0;
  for (int64_t row = 0; row < rows.size(0); ++row) {
    Tokens example;
    for (int64_t i = 0; i <= rows.size(1); ++i) {
      const auto token = i < rows.size(1) ? rows[row][i].item<int64_t>() : kBegins;
      if ((token & kBegins) != 0 && !example.empty()) {
        const auto all = torch::tensor(std::exchange(example, {}));
        const auto numbers = all.bitwise_and(kTokenNumber);
        const auto scores = model(numbers.unsqueeze(0))[0];
        for (int64_t at = 1; at < all.size(0); ++at) {
          if ((all[at].item<int64_t>() & kIsGiven) == 0) {
            sum = sum - scores[at - 1].log_softmax(-1)[numbers[at].item<int64_t>()];
            ++count;
          }
        }
      }
      example.push_back(token & ~kBegins);
    }
  }
  const auto loss = sum / count;
  loss.backward();
  double squares = 0;
  for (const auto& param : model->parameters()) {
    squares += param.grad().square().sum().item<double>();
  }
  return {loss.item<double>(), std::sqrt(squares)};
}

TEST(Examples, AStepIsThatOfEachExampleAlone) {
  SKIP_WITHOUT_TOKENIZERS();
  TrainConfig config;
  config.model = {.vocab = 1100, .dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .hidden = 48};
  config.context = 47;
  config.batch = 8;
  config.clip = 0;
  const auto corpus = Corpus::read(
      some_examples(),
      {.vocab = 1100, .tokenizer = tokenizer_of("qwen"), .documents = {.end = 3}, .context = 47});
  for (const int64_t window : {0, 5}) {
    config.model.window = window;
    const auto [loss, norm] = one_by_one(config, corpus.train_rows({1, 0, 8, 47}, 0, 8));
    for (const auto& [mesh, parts] : std::vector<std::pair<MeshShape, int64_t>>{
             {{}, 1},
             {{.shard = 3}, 1},
             {{.replicate = 2, .shard = 2}, 2},
             {{.shard = 2, .tensor = 2}, 4}}) {
      run_ranks(static_cast<int>(mesh.ranks()), [&](int) {
        SCOPED_TRACE(mesh.str() + ", window " + std::to_string(window));
        auto mine = config;
        mine.mesh = mesh;
        mine.accumulate = parts;
        Trainer trainer(mine, corpus);
        const auto result = trainer.step(0);
        EXPECT_NEAR(result.loss, loss, 1e-5);
        EXPECT_NEAR(result.grad_norm, norm, 1e-4 * norm);
        EXPECT_GT(trainer.validation_loss(), 1);
      });
    }
  }
}

TEST(Examples, DocumentsOfAStreamAreSeparate) {
  TrainConfig config;
  config.model = {.vocab = 256, .dim = 32, .layers = 2, .heads = 4, .kv_heads = 2, .hidden = 48};
  config.context = 40;
  config.batch = 6;
  config.clip = 0;
  std::string text;
  for (int i = 0; i < 400; ++i) {
    text += "line " + std::string(static_cast<size_t>(i % 7), 'x') + "\n";
  }
  Corpus corpus(text);
  corpus.separate_documents('\n');
  const auto rows = corpus.train_rows({1, 0, 6, 40}, 0, 6);
  EXPECT_TRUE(rows.bitwise_and(kTokenNumber)
                  .eq(Corpus(text).train_rows({1, 0, 6, 40}, 0, 6))
                  .all()
                  .item<bool>());
  const auto [loss, norm] = one_by_one(config, rows);
  for (const MeshShape& mesh : {MeshShape{}, MeshShape{.shard = 2, .tensor = 2}}) {
    run_ranks(static_cast<int>(mesh.ranks()), [&](int) {
      auto mine = config;
      mine.mesh = mesh;
      Trainer trainer(mine, corpus);
      const auto result = trainer.step(0);
      EXPECT_NEAR(result.loss, loss, 1e-5);
      EXPECT_NEAR(result.grad_norm, norm, 1e-4 * norm);
    });
  }
}

} // namespace
} // namespace fsdp::cli
