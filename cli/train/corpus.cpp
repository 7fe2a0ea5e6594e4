#include "cli/train/corpus.h"

#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iomanip>
#include <numeric>
#include <optional>
#include <ranges>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/files.h"
#include "cli/hash.h"
#include "cli/json_text.h"
#include "cli/text/documents.h"

namespace fsdp::cli {

namespace {

using Part = DataSet::Part;

constexpr int64_t kTurn = 10000; // rows

/// A pattern that finds only this path.
std::string escaped_pattern(const std::string& path) {
  std::string result;
  for (const char c : path) {
    result += (c == '*' || c == '?' || c == '[' ? "\\" : "") + std::string{c};
  }
  return result;
}

/// The weights in a .json file, by the paths of data sets, which begin at its folder. Empty if it
/// is another kind of file: text in JSON does not begin with an object.
std::vector<std::pair<std::string, double>> weights_in(const std::string& path) {
  std::vector<std::pair<std::string, double>> weights;
  const auto text = path.ends_with(".json") ? read_file(path) : std::nullopt;
  if (!text || text->find_first_not_of(" \t\r\n") == std::string::npos ||
      (*text)[text->find_first_not_of(" \t\r\n")] != '{') {
    return weights;
  }
  nlohmann::ordered_json json;
  try {
    json = nlohmann::ordered_json::parse(*text);
  } catch (const nlohmann::json::exception& error) {
    throw_config_error(
        "--data: ", path,
        " must hold weights of data sets, but it is not JSON: ", json_problem(error));
  }
  check_config(!json.empty(), "--data: ", path, " names no data set");
  const auto folder = std::filesystem::path(real_path(path)).parent_path();
  double sum = 0;
  for (const auto& [name, weight] : json.items()) {
    check_config(
        weight.is_number() && weight.get<double>() > 0, "--data: ", path, ": the weight of \"",
        name, "\" is ", weight.dump(), "; it must be a number above 0");
    check_config(
        !name.ends_with(".json"), "--data: ", path, " names \"", name,
        "\"; weights of weights are not supported");
    const bool exists = std::filesystem::exists(folder / name);
    const auto prefix = exists ? folder.string() : escaped_pattern(folder.string());
    weights.emplace_back(std::filesystem::path(prefix) / name, weight.get<double>());
    sum += weights.back().second;
  }
  check_config(std::isfinite(sum), "--data: ", path, ": the sum of the weights is not finite");
  for (auto& [name, weight] : weights) {
    weight /= sum;
    check_config(
        weight * kTurn >= 1, "--data: ", path, ": ", name, " has less than one row in ", kTurn,
        "; give it a larger weight, or leave it out");
  }
  return weights;
}

template <class Sets, class Of>
int64_t sum_over(const Sets& sets, const Of& of) {
  int64_t sum = 0;
  for (const auto& set : sets) {
    sum += of(set.data);
  }
  return sum;
}

/// In which part `index` is, if the parts have so many members, and its position there.
std::pair<size_t, int64_t> part_of(int64_t index, const std::vector<int64_t>& counts) {
  size_t part = 0;
  while (index >= counts[part]) {
    index -= counts[part++];
  }
  return {part, index};
}

} // namespace

bool Corpus::is_text(const std::string& path) {
  const auto weights = weights_in(path);
  return weights.empty() ? is_text_path(path)
                         : std::ranges::any_of(std::views::keys(weights), is_text_path);
}

Corpus Corpus::read(const std::string& path, const TokensOf& tokens) {
  const auto weights = weights_in(path);
  if (weights.empty()) {
    return Corpus(read_data_set(path, tokens));
  }
  std::vector<Weighted> sets;
  for (const auto& [part, share] : weights) {
    sets.push_back({read_data_set(part, tokens), share});
    check_config(
        sets.back().data.is_bytes() == sets[0].data.is_bytes(), "--data: ", path, " mixes ",
        sets[0].data.name(), ", which has ", sets[0].data.unit(), ", with ", part, ", which has ",
        sets.back().data.unit());
  }
  return {std::move(sets), path};
}

Corpus::Corpus(std::string text, std::string name)
    : Corpus(DataSet(std::move(text), std::move(name), 1)) {}

Corpus::Corpus(DataSet data) : name_(data.name()) {
  sets_.push_back({std::move(data)});
}

Corpus::Corpus(std::vector<Weighted> sets, std::string name)
    : sets_(std::move(sets)), name_(std::move(name)) {}

int64_t Corpus::num_files() const {
  return sum_over(sets_, [](const DataSet& data) { return data.num_files(); });
}

int64_t Corpus::num_train() const {
  return sum_over(sets_, [](const DataSet& data) { return data.size_of(Part::train); });
}

int64_t Corpus::num_held_out() const {
  return sum_over(sets_, [](const DataSet& data) { return data.size_of(Part::held_out); });
}

std::string Corpus::shares() const {
  std::ostringstream text;
  text << std::setprecision(3);
  for (const auto& [data, share] : sets_) {
    text << (&data == &sets_[0].data ? "" : ", ") << 100 * share << " % " << data.name();
  }
  return sets_.size() > 1 ? text.str() : "";
}

std::string Corpus::fingerprint() const {
  auto hash = sets_[0].data.fingerprint(); // one data set has the hash that it always had
  if (sets_.size() > 1) {
    hash = 0;
    for (const auto& [data, share] : sets_) {
      hash = splitmix64(hash ^ data.fingerprint());
      hash = splitmix64(hash ^ std::bit_cast<uint64_t>(share));
    }
  }
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016llx", static_cast<unsigned long long>(hash));
  return hex;
}

void Corpus::check_context(int64_t context) const {
  for (const auto& set : sets_) {
    set.data.check_context(context);
  }
}

void Corpus::separate_documents(int64_t end) {
  for (auto& set : sets_) {
    set.data.separate_documents(end);
  }
}

void Corpus::separate_documents(const std::string& end, const std::string& folder, int64_t vocab) {
  check_config(
      !has_flags(), "--document-end ", end, ": attention never crosses the examples of ", name_,
      "; leave it out");
  separate_documents(document_end_token(end, folder, vocab));
}

bool Corpus::has_flags() const {
  return std::ranges::any_of(sets_, [](const Weighted& set) { return set.data.has_flags(); });
}

std::vector<int64_t> Corpus::divided(int64_t total) const {
  std::vector<int64_t> counts;
  double end = 0;
  int64_t given = 0;
  for (const auto& set : sets_) { // rounds the ends, so that all together are `total`
    end += set.share * static_cast<double>(total);
    counts.push_back(std::llround(end) - given);
    given += counts.back();
  }
  const auto most = [&] { return std::max_element(counts.begin(), counts.end()); };
  *most() += total - given; // the shares may not be 1 to the last digit
  for (auto& count : counts) {
    while (count == 0 && *most() > 1) {
      *most() -= 1;
      count += 1;
    }
  }
  return counts;
}

torch::Tensor Corpus::train_rows(const BatchOf& batch, int64_t first, int64_t count) const {
  auto rows = torch::empty({count, batch.context + 1}, torch::kLong);
  std::optional<Turn> turn;
  for (int64_t row = 0; row < count; ++row) {
    const auto number = batch.step * batch.rows + first + row;
    auto drawn = Drawn{0, number};
    if (sets_.size() > 1) {
      if (!turn || turn->number != number / kTurn) {
        turn = make_turn(number / kTurn, batch.seed);
      }
      drawn = turn->rows[static_cast<size_t>(number % kTurn)];
    }
    sets_[drawn.set].data.train_row(
        batch, first + row, drawn.number, rows[row].data_ptr<int64_t>());
  }
  return rows;
}

Corpus::Turn Corpus::make_turn(int64_t number, uint64_t seed) const {
  const auto counts = divided(kTurn);
  const auto key = splitmix64(splitmix64(seed) + static_cast<uint64_t>(number));
  std::vector<int64_t> next; // row of each data set
  std::vector<size_t> sets;  // in their order, one for each row of the turn
  for (size_t set = 0; set < counts.size(); ++set) {
    next.push_back(number * counts[set]);
    sets.insert(sets.end(), static_cast<size_t>(counts[set]), set);
  }
  Turn turn{number, {}};
  for (int64_t position = 0; position < kTurn; ++position) {
    const auto set = sets[static_cast<size_t>(permuted(position, kTurn, key))];
    turn.rows.push_back({set, next[set]++});
  }
  return turn;
}

torch::Tensor Corpus::held_out_rows(
    int64_t first, int64_t count, int64_t total, int64_t context) const {
  auto rows = torch::empty({count, context + 1}, torch::kLong);
  const auto counts = divided(total);
  for (int64_t row = 0; row < count; ++row) {
    const auto [set, position] = part_of(first + row, counts);
    sets_[set].data.held_out_row(position, counts[set], context, rows[row].data_ptr<int64_t>());
  }
  return rows;
}

int64_t Corpus::num_rows(int64_t context) const {
  return sum_over(sets_, [&](const DataSet& data) { return data.num_rows(context); });
}

torch::Tensor Corpus::rows_of_all(int64_t first, int64_t count, int64_t context) const {
  auto rows = torch::full({count, context + 1}, kIsGiven, torch::kLong);
  std::vector<int64_t> counts;
  for (const auto& set : sets_) {
    counts.push_back(set.data.num_rows(context));
  }
  const auto end = std::min(count, num_rows(context) - first);
  for (int64_t row = 0; row < end; ++row) {
    const auto [set, position] = part_of(first + row, counts);
    sets_[set].data.row_of_all(position, context, rows[row].data_ptr<int64_t>());
  }
  return rows;
}

std::string Corpus::prompt() const {
  const auto text = sets_[0].data.held_out_text();
  for (size_t start = text.find('\n') + 1; start < text.size();) {
    const auto end = std::min(text.find('\n', start), text.size());
    if (end - start >= 16 && end - start < 64) {
      return text.substr(start, (end - start) / 2);
    }
    start = end + 1;
  }
  return text.substr(0, 16);
}

std::vector<double> Corpus::frequencies(DataSet::Part part) const {
  // One data set has its counts. Of several, each has its share of all counts.
  std::vector<std::vector<double>> counts;
  double all = 0;
  for (const auto& set : sets_) {
    counts.push_back(set.data.count_tokens(part));
    all += std::accumulate(counts.back().begin(), counts.back().end(), 0.0);
  }
  std::vector<double> result;
  for (size_t i = 0; i < sets_.size(); ++i) {
    const auto mine = std::accumulate(counts[i].begin(), counts[i].end(), 0.0);
    result.resize(std::max(result.size(), counts[i].size()));
    // Of examples, all that was sampled may be given.
    const auto factor = sets_.size() == 1 || mine == 0 ? 1 : sets_[i].share * all / mine;
    for (size_t token = 0; token < counts[i].size(); ++token) {
      result[token] += counts[i][token] * factor;
    }
  }
  return result;
}

double Corpus::frequency_loss() const {
  std::call_once(frequency_loss_->once, [&] { frequency_loss_->value = count_frequency_loss(); });
  return frequency_loss_->value;
}

double Corpus::count_frequency_loss() const {
  const auto known = frequencies(Part::train);
  const auto asked = frequencies(Part::held_out);
  const auto sum = [](const auto& counts) {
    return std::accumulate(counts.begin(), counts.end(), 0.0);
  };
  const auto num_known = sum(known);
  double loss = 0;
  for (size_t token = 0; token < asked.size(); ++token) {
    const auto count = token < known.size() ? known[token] : 0;
    // Adds one to each count, so that no token has probability 0.
    const auto probability = (count + 1) / (num_known + static_cast<double>(known.size()));
    loss -= asked[token] * std::log(probability);
  }
  return loss / std::max(sum(asked), 1.0);
}

} // namespace fsdp::cli
