// What metrics.jsonl has, in the forms of other programs.
#include "cli/train/metric_copies.h"

#include <bit>
#include <chrono>
#include <ctime>
#include <string>

#include "cli/files.h"

namespace fsdp::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Metric {
  const char* column; // of metrics.csv
  const char* tag;    // in TensorBoard
  const char* field;  // of a line of metrics.jsonl
};

constexpr Metric kMetrics[] = {
    {"loss", "train/loss", "/loss"},
    {"validation_loss", "validation/loss", "/validation_loss"},
    {"grad_norm", "train/grad_norm", "/grad_norm"},
    {"lr", "train/lr", "/lr"},
    {"tokens", "train/tokens", "/tokens"},
    {"seconds", "speed/seconds", "/seconds"},
    {"tokens_per_s", "speed/tokens_per_s", "/tokens_per_s"},
    {"exposed_s", "speed/exposed_s", "/exposed_s"},
    {"flops_per_s", "speed/flops_per_s", "/flops_per_s"},
    {"mfu", "speed/mfu", "/mfu"},
    {"peak_bytes", "memory/peak_bytes", "/memory/peak"},
};

/// The number, or null if the line has none.
Json value_of(const Json& line, const Metric& metric) {
  const auto value = line.value(Json::json_pointer(metric.field), Json());
  return value.is_number() ? value : Json();
}

/// Calls `add` for the steps and validations in metrics.jsonl, not for what interruptions have
/// cost.
template <class Add>
void for_each_line(const std::filesystem::path& metrics, Add add) {
  std::ifstream file(metrics);
  for (std::string text; std::getline(file, text);) {
    const auto line = Json::parse(text);
    if (line.contains("loss") || line.contains("validation_loss")) {
      add(line);
    }
  }
}

// ------------------------------------------------------------ Protocol buffers

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) {
    bytes += static_cast<char>(value | 0x80);
  }
  return bytes + static_cast<char>(value);
}

/// The lowest byte first.
template <class Number>
std::string fixed_bytes(Number number) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(number); ++i, number >>= 8) {
    bytes += static_cast<char>(number & 0xff);
  }
  return bytes;
}

std::string field(int number, const std::string& bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + bytes;
}

std::string field(int number, double value) {
  return varint(number << 3 | 1) + fixed_bytes(std::bit_cast<uint64_t>(value));
}

std::string field(int number, float value) {
  return varint(number << 3 | 5) + fixed_bytes(std::bit_cast<uint32_t>(value));
}

std::string field(int number, int64_t value) {
  return varint(number << 3) + varint(static_cast<uint64_t>(value));
}

/// CRC-32C, bit by bit: a record is short.
uint32_t crc32c(const std::string& bytes) {
  uint32_t crc = ~0U;
  for (const auto byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78U : 0U);
    }
  }
  return ~crc;
}

/// A checksum of a record, masked as TensorFlow does it.
std::string checksum(const std::string& bytes) {
  return fixed_bytes(std::rotr(crc32c(bytes), 15) + 0xa282ead8U);
}

} // namespace

MetricsCsv::MetricsCsv(const std::filesystem::path& path, const std::filesystem::path& metrics)
    : path_(path) {
  std::string header = "step";
  for (const auto& metric : kMetrics) {
    header += std::string(",") + metric.column;
  }
  write_file(path, header + "\n");
  file_.open(path, std::ios::app);
  for_each_line(metrics, [this](const Json& line) { add(line); });
}

void MetricsCsv::add(const Json& line) {
  auto row = line.at("step").dump();
  for (const auto& metric : kMetrics) {
    const auto value = value_of(line, metric);
    row += "," + (value.is_null() ? "" : value.dump());
  }
  file_ << row << std::endl; // flushes, so that readers see the line at once
  if (!file_) {
    throw_cannot_write(path_);
  }
}

EventFile::EventFile(
    const std::filesystem::path& folder, const std::filesystem::path& metrics, int64_t before) {
  const bool is_first = !is_folder(folder);
  make_folders(folder);
  path_ = folder / ("events.out.tfevents." + std::to_string(std::time(nullptr)) + ".fsdp");
  file_.open(path_, std::ios::app | std::ios::binary); // a run may start twice in a second
  write(0, field(3, std::string("brain.Event:2")));
  constexpr int64_t kStart = 1;
  write(before + 1, field(7, field(1, kStart))); // a session begins with this step
  if (is_first) {
    for_each_line(metrics, [this](const Json& line) { add(line); });
  }
}

void EventFile::add(const Json& line) {
  std::string values;
  for (const auto& metric : kMetrics) {
    if (const auto value = value_of(line, metric); !value.is_null()) {
      values += field(1, field(1, std::string(metric.tag)) + field(2, value.get<float>()));
    }
  }
  write(line.at("step").get<int64_t>(), field(5, values));
}

/// Writes an event: `what` is its fields besides time and step.
void EventFile::write(int64_t step, const std::string& what) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto event = field(1, std::chrono::duration<double>(now).count()) + field(2, step) + what;
  const auto size = fixed_bytes(static_cast<uint64_t>(event.size()));
  file_ << size << checksum(size) << event << checksum(event) << std::flush;
  if (!file_) {
    throw_cannot_write(path_);
  }
}

} // namespace fsdp::cli
