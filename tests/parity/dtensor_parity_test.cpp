// Our layouts against those of the installed torch's Python DTensor.
#include <torch/torch.h>

#include <sstream>

#include "layout/shard_layout.h"
#include "support/processes.h"
#include "support/tensors.h"

namespace fsdp::detail {
namespace {

std::vector<int64_t> read(std::istream& row, int64_t count) {
  std::vector<int64_t> numbers(count);
  for (auto& number : numbers) {
    row >> number;
  }
  return numbers;
}

Placement decode(int64_t kind, int64_t dim, int64_t split_factor) {
  if (kind == 2) {
    return StridedShard{dim, split_factor};
  }
  return kind == 1 ? Placement(Shard{dim}) : Placement(Replicate{});
}

TEST(DTensorParity, LayoutsEqualPythons) {
  if (std::string(FSDP_TEST_PYTHON).empty()) {
    GTEST_SKIP() << "built without FSDP_PYTHON";
  }
  const auto ended =
      test::run_commands({{{FSDP_TEST_PYTHON, FSDP_TEST_DIR "/parity/dtensor_layouts.py"}, {}}});
  ASSERT_EQ(ended[0].exit_code, 0) << ended[0].output;
  std::istringstream lines(ended[0].output);
  int64_t compared = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream row(line);
    const auto mesh = read(row, read(row, 1)[0]);
    const auto sizes = read(row, read(row, 1)[0]);
    std::vector<Placement> placements;
    for (size_t axis = 0; axis < mesh.size(); ++axis) {
      const auto code = read(row, 3);
      placements.push_back(decode(code[0], code[1], code[2]));
    }
    const auto coordinate = read(row, static_cast<int64_t>(mesh.size()));
    const auto shape = read(row, static_cast<int64_t>(sizes.size()));
    const auto offset = read(row, static_cast<int64_t>(sizes.size()));
    ASSERT_TRUE(row) << line; // the output is not ours: a warning?
    EXPECT_EQ(local_sizes(sizes, placements, mesh, coordinate), shape) << line;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      const auto runs = local_runs(
          sizes[dim], shard_steps(placements, mesh, static_cast<int64_t>(dim)), coordinate);
      if (!runs.empty()) { // Python gives an empty part the tensor's end
        EXPECT_EQ(runs[0].offset, offset[dim]) << line;
      }
    }
    ++compared;
  }
  EXPECT_GT(compared, 1000);
}

} // namespace
} // namespace fsdp::detail
