// Pickles as values, without Python.
#include "checkpoint/pickle.h"

#include <fsdp/error.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp {
namespace {

using namespace test;
using detail::Pickle;
using Kind = detail::Pickle::Kind;

/// With what begins and ends all of them.
Pickle pickle_of(const std::string& instructions) {
  return {std::string("\x80\x02", 2) + instructions + ".", "file"};
}

std::string refusal(const std::string& bytes) {
  return message_of<CheckpointError>([&] { Pickle(bytes, "file"); });
}
std::string refusal_of(const std::string& instructions) {
  return refusal(std::string("\x80\x02", 2) + instructions + ".");
}

std::string bytes(std::initializer_list<int> all) {
  std::string text;
  for (const auto byte : all) {
    text.push_back(static_cast<char>(byte));
  }
  return text;
}

TEST(Pickles, HaveNumbersAndTexts) {
  EXPECT_TRUE(pickle_of("N").root().is(Kind::None));
  EXPECT_TRUE(pickle_of("\x88").root().boolean());
  EXPECT_FALSE(pickle_of("\x89").root().boolean());
  EXPECT_EQ(pickle_of(bytes({'K', 255})).root().integer(), 255);
  EXPECT_EQ(pickle_of(bytes({'M', 1, 255})).root().integer(), 0xff01);
  EXPECT_EQ(pickle_of(bytes({'J', 254, 255, 255, 255})).root().integer(), -2);
  EXPECT_EQ(pickle_of(bytes({0x8a, 0})).root().integer(), 0);
  EXPECT_EQ(pickle_of(bytes({0x8a, 1, 255})).root().integer(), -1);
  EXPECT_EQ(pickle_of(bytes({0x8a, 2, 255, 0})).root().integer(), 255);
  EXPECT_EQ(pickle_of(bytes({0x8a, 5, 0, 0, 0, 0, 255})).root().integer(), -(int64_t{1} << 32));
  EXPECT_TRUE(pickle_of(bytes({0x8a, 9, 0, 0, 0, 0, 0, 0, 0, 128, 0})).root().is(Kind::LargeInt));
  EXPECT_EQ(pickle_of(bytes({'G', 0xbf, 0xe0, 0, 0, 0, 0, 0, 0})).root().real(), -0.5);
  EXPECT_EQ(pickle_of(bytes({0x8c, 2, 'h', 'i'})).root().text(), "hi");
  EXPECT_EQ(pickle_of(bytes({'X', 2, 0, 0, 0, 'h', 'i'})).root().text(), "hi");
  EXPECT_EQ(pickle_of(bytes({'C', 1, 'h'})).root().text(), "h");
  EXPECT_TRUE(pickle_of(bytes({'C', 1, 'h'})).root().is(Kind::Bytes));
  EXPECT_EQ(pickle_of("N").root().text(), "");
}

TEST(Pickles, HaveContainers) {
  const auto list = pickle_of(
      "](K\x01K\x02"
      "eK\x03"
      "a");
  ASSERT_EQ(list.root().size(), 3u);
  EXPECT_EQ(list.root()[2].integer(), 3);
  const auto dict = pickle_of("}(X\x01" + bytes({0, 0, 0}) + "aK\x01K\x02Nu");
  ASSERT_EQ(dict.root().size(), 4u);
  EXPECT_EQ(dict.root().find("a")->integer(), 1);
  EXPECT_FALSE(dict.root().find("b"));
  EXPECT_FALSE(list.root().find("a"));
  EXPECT_EQ(pickle_of("K\x01K\x02\x86").root()[1].integer(), 2);
  EXPECT_EQ(pickle_of(")").root().size(), 0u);
}

TEST(Pickles, HaveObjectsThatAreNotMade) {
  const auto object = pickle_of(
      "cos\nsystem\n(K\x01tRK\x05"
      "b");
  EXPECT_EQ(object.root().global(), "os.system");
  EXPECT_EQ(object.root().arguments().size(), 1u);
  EXPECT_EQ(object.root().state()->integer(), 5);
  const auto plain = pickle_of("cos\nsystem\n)\x81");
  EXPECT_FALSE(plain.root().state());
  EXPECT_EQ(pickle_of("K\x01)R").root().global(), "") << "made by what is no class";
  EXPECT_EQ(pickle_of("K\x07Q").root()[0].integer(), 7);
}

TEST(Pickles, MayContainThemselves) {
  const auto cycle = pickle_of(bytes({']', 'q', 0, 'h', 0, 'a'}));
  EXPECT_EQ(cycle.root()[0][0][0].size(), 1u);
  std::string doubled = "]q" + bytes({0});
  for (int i = 0; i < 100; ++i) {
    doubled += bytes({'h', i, 'h', i, 0x86, 'q', i + 1, '0'});
  }
  const auto deep = pickle_of(doubled + bytes({'0', 'h', 100}));
  EXPECT_EQ(deep.root()[1][0].size(), 2u);
  EXPECT_TRUE(
      pickle_of(std::string(1'000'000, ']') + std::string(999'999, 'a')).root().is(Kind::List));
}

TEST(Pickles, AreRefusedIfTheyAreDamaged) {
  EXPECT_TRUE(contains(refusal(""), "file: the pickle is damaged, or not of torch, at byte 0"));
  EXPECT_TRUE(contains(refusal("(S'rm'\nios\nsystem\n."), "not a pickle of protocol 2 to 5"));
  EXPECT_TRUE(contains(refusal(bytes({0x80, 1, 'N', '.'})), "protocol 1 is not known"));
  EXPECT_TRUE(contains(refusal(bytes({0x80, 6, 'N', '.'})), "protocol 6 is not known"));
  EXPECT_TRUE(contains(refusal(bytes({0x80, 2, 'N'})), "it ends too early"));
  EXPECT_TRUE(contains(refusal(bytes({0x80, 2, 'N', '.', '.'})), "1 bytes follow its end"));
  for (const auto& [instructions, words] : std::vector<std::pair<std::string, std::string>>{
           {"", "its stack is empty"},
           {"NN", "it ends with several values"},
           {"(N", "it ends with several values"},
           {"N(0", "its stack is empty"},
           {"Nt", "its stack has no mark"},
           {"]q\x01", "its memo has a gap"},
           {bytes({'h', 0}), "its memo has no such value"},
           {bytes({']', 'r', 255, 255, 255, 255}), "its memo has a gap"},
           {"}(NNNu", "a key has no value"},
           {"}Na", "it adds to what is not a container"},
           {"]NNs", "it adds to what is not a container"},
           {"NNb", "it gives a state to what is not an object"},
           {"NN\x93", "a class has no name"},
           {"cos", "it ends too early"},
           {bytes({'X', 255, 255, 255, 255, 'a'}), "it ends too early"},
           {bytes({0x8d, 255, 255, 255, 255, 255, 255, 255, 255, 'a'}), "it ends too early"},
           {bytes({0x95, 255, 255, 255, 255, 255, 255, 255, 255, 'N'}), "it ends too early"},
           {bytes({0x8b, 255, 255, 255, 127, 1}), "it ends too early"},
           {"I1\n", "instruction 73 is not known"},
           {"\x82\x01", "instruction 130 is not known"}}) {
    EXPECT_TRUE(contains(refusal_of(instructions), words));
  }
}

} // namespace
} // namespace fsdp
