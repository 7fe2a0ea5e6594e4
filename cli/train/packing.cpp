#include "cli/train/packing.h"

#include <algorithm>

#include "cli/check.h"
#include "cli/train/token_source.h"

namespace fsdp::cli {

std::vector<int32_t> pack_examples(
    const std::vector<Example>& examples, const std::string& path, int64_t context) {
  const auto row = static_cast<size_t>(context) + 1;
  const auto is_too_long = [&](const Example& example) { return example.tokens.size() > row; };
  const auto longest = std::max_element(
      examples.begin(), examples.end(),
      [](const auto& a, const auto& b) { return a.tokens.size() < b.tokens.size(); });
  check_config(
      longest == examples.end() || !is_too_long(*longest), "--data: ", path, ": ",
      std::count_if(examples.begin(), examples.end(), is_too_long), " of ", examples.size(),
      " examples do not fit into --context ", context, "; the longest, in line ", longest->line,
      ", has ", longest->tokens.size(), " tokens");
  std::vector<int32_t> all;
  const auto add = [&](int64_t token, bool begins, bool given) {
    all.push_back(static_cast<int32_t>(token | (begins ? kBegins : 0) | (given ? kIsGiven : 0)));
  };
  const auto fill_row = [&] {
    for (bool begins = true; all.size() % row != 0; begins = false) {
      add(0, begins, /*given=*/true); // padding sees padding only
    }
  };
  for (const auto& example : examples) {
    if (all.size() % row + example.tokens.size() > row) {
      fill_row();
    }
    for (size_t i = 0; i < example.tokens.size(); ++i) {
      add(example.tokens[i], /*begins=*/i == 0, /*given=*/!example.learned[i]);
    }
  }
  fill_row();
  return all;
}

} // namespace fsdp::cli
