#include "cli/train/data_set.h"

#include <algorithm>
#include <utility>

#include "cli/check.h"
#include "cli/hash.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kLongestBlock = 64 << 10;
constexpr int64_t kSampledTokens = 1 << 22; // to count them

} // namespace

// A Feistel network permutes the next power of four. Numbers beyond `size` are permuted again until
// one is inside.
int64_t permuted(int64_t index, int64_t size, uint64_t key) {
  int bits = 1; // of each half
  while ((int64_t{1} << (2 * bits)) < size) {
    ++bits;
  }
  const auto mask = (uint64_t{1} << bits) - 1;
  auto number = static_cast<uint64_t>(index);
  do {
    auto left = number >> bits;
    auto right = number & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      left = std::exchange(right, left ^ (splitmix64(key + 4 * right + round) & mask));
    }
    number = left << bits | right;
  } while (number >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(number);
}

DataSet::DataSet(std::string text, std::string name, int64_t num_files)
    : DataSet(std::make_shared<TextSource>(std::move(text)), std::move(name), num_files) {
  is_bytes_ = true;
}

DataSet::DataSet(
    std::shared_ptr<TokenSource> tokens, std::string name, int64_t num_files, int64_t row)
    : name_(std::move(name)), num_files_(num_files), source_(std::move(tokens)), row_(row) {
  const auto size = source_->size();
  if (row > 0) {
    block_ = row;
    held_out_every_ = std::min(held_out_every_, size / row);
  } else {
    block_ = std::clamp<int64_t>(size / held_out_every_, 1, kLongestBlock);
  }
  for (auto start = (held_out_every_ - 1) * block_; start < size;
       start += held_out_every_ * block_) {
    num_held_out_ += std::min(block_, size - start);
  }
}

void DataSet::read_part(Part part, int64_t start, int64_t count, int64_t* out) const {
  while (count > 0) {
    const auto number = start / block_;
    // Of `held_out_every_` blocks, all but the last are for training.
    const auto block = part == Part::train ? number + number / (held_out_every_ - 1)
                                           : held_out_every_ * number + held_out_every_ - 1;
    const auto here = std::min(count, block_ - start % block_);
    source_->read(block * block_ + start % block_, here, out);
    start += here;
    count -= here;
    out += here;
  }
}

void DataSet::sample(
    Part part,
    int64_t most,
    const std::function<void(const std::vector<int64_t>& tokens)>& visit) const {
  constexpr int64_t kStretch = 1 << 12;
  const auto num_stretches = (size_of(part) + kStretch - 1) / kStretch;
  const auto wanted = std::max<int64_t>(1, (most + kStretch - 1) / kStretch);
  const auto step = std::max<int64_t>(1, (num_stretches + wanted - 1) / wanted);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < num_stretches; i += step) {
    tokens.resize(static_cast<size_t>(std::min(kStretch, size_of(part) - i * kStretch)));
    read_part(part, i * kStretch, std::ssize(tokens), tokens.data());
    visit(tokens);
  }
}

uint64_t DataSet::fingerprint() const {
  uint64_t hash = 0;
  for (const auto part : {Part::train, Part::held_out}) {
    hash = splitmix64(hash ^ static_cast<uint64_t>(size_of(part)));
    const auto most = is_bytes() ? size_of(part) : kSampledTokens;
    const size_t in_word = is_bytes() ? 8 : 1; // tokens
    sample(part, most, [&](const std::vector<int64_t>& tokens) {
      for (size_t at = 0; at < tokens.size(); at += in_word) {
        uint64_t word = 0;
        for (size_t i = 0; i < in_word && at + i < tokens.size(); ++i) {
          word |= static_cast<uint64_t>(tokens[at + i]) << (8 * i);
        }
        hash = splitmix64(hash ^ word);
      }
    });
  }
  return hash;
}

void DataSet::check_context(int64_t context) const {
  const auto num_train = size_of(Part::train);
  const auto least = std::min(num_train, num_held_out_);
  check_config(
      row_ == 0 || least > 0, "--data: ", name_, " fills only one row of --context ", context,
      ", and one more is needed, to be held out; give more examples, or a smaller --context");
  check_config(
      least > 1, "--data: ", name_, " is too short: it has ", source_->size(), " ", unit(),
      ", and --context ", context, " needs about ", held_out_every_ * (context + 1));
  check_config(
      least > context, "--context ", context, ": ", name_, " has too little text for it (",
      num_train, " ", unit(), " to train on, ", num_held_out_,
      " held out); give more with --data, or a --context below ", least);
}

void DataSet::train_row(const BatchOf& batch, int64_t row, int64_t number, int64_t* out) const {
  const auto context = batch.context;
  const auto num_train = size_of(Part::train);
  int64_t start = 0;
  if (is_bytes()) {
    const auto key = splitmix64(splitmix64(batch.seed) + static_cast<uint64_t>(batch.step));
    const auto draw = splitmix64(key + static_cast<uint64_t>(row));
    start = static_cast<int64_t>(draw % static_cast<uint64_t>(num_train - context));
  } else {
    // A row's last token begins the next one, unless they are rows of examples.
    const auto stride = row_ > 0 ? row_ : context;
    const auto rows_per_epoch = (num_train - context - 1) / stride + 1;
    const auto epoch = static_cast<uint64_t>(number / rows_per_epoch);
    const auto key = splitmix64(splitmix64(batch.seed) ^ epoch);
    start = stride * permuted(number % rows_per_epoch, rows_per_epoch, key);
  }
  read_part(Part::train, start, context + 1, out);
  mark_documents(out, context);
}

void DataSet::held_out_row(int64_t number, int64_t total, int64_t context, int64_t* out) const {
  const auto last_start = num_held_out_ - context - 1;
  const auto start = row_ > 0 ? row_ * (num_held_out_ / row_ * number / total)
                              : last_start * number / std::max<int64_t>(1, total - 1);
  read_part(Part::held_out, start, context + 1, out);
  mark_documents(out, context);
}

int64_t DataSet::num_rows(int64_t context) const {
  const auto size = source_->size();
  return row_ > 0 ? size / row_ : (std::max<int64_t>(size, 1) - 1 + context - 1) / context;
}

void DataSet::row_of_all(int64_t number, int64_t context, int64_t* out) const {
  const auto start = std::min(number * (row_ > 0 ? row_ : context), source_->size());
  const auto count = std::min(context + 1, source_->size() - start);
  source_->read(start, count, out);
  std::fill(out + count, out + context + 1, kIsGiven);
  mark_documents(out, context);
}

void DataSet::mark_documents(int64_t* row, int64_t context) const {
  for (auto i = context; separator_ && i > 0; --i) { // backwards: a flag hides the number
    row[i] |= row[i - 1] == *separator_ ? kBegins | kIsGiven : 0;
  }
}

std::string DataSet::held_out_text() const {
  std::string text;
  sample(Part::held_out, num_held_out_, [&](const std::vector<int64_t>& tokens) {
    text.append(tokens.begin(), tokens.end());
  });
  return text;
}

std::vector<double> DataSet::count_tokens(Part part) const {
  std::vector<double> counts(256);
  sample(part, is_bytes() ? size_of(part) : kSampledTokens, [&](const auto& tokens) {
    for (const auto token : tokens) {
      if ((token & kIsGiven) != 0) { // of examples
        continue;
      }
      const auto number = static_cast<size_t>(token & kTokenNumber);
      counts.resize(std::max(counts.size(), number + 1));
      ++counts[number];
    }
  });
  return counts;
}

} // namespace fsdp::cli
