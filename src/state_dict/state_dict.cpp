#include <fsdp/state_dict.h>

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp {

void StateDict::insert(std::string key, Value value) {
  const bool is_new = index_.emplace(key, items_.size()).second;
  TORCH_CHECK_VALUE(
      is_new, "[StateDict] there is a '", key,
      "' already; set() replaces, and a prefix keeps two apart");
  items_.emplace_back(std::move(key), std::move(value));
}

void StateDict::set(const std::string& key, Value value) {
  if (contains(key)) {
    at(key) = std::move(value);
  } else {
    insert(key, std::move(value));
  }
}

void StateDict::insert_all(const StateDict& other, const std::string& prefix) {
  for (const auto& [key, value] : other) { // first, so that all keys are inserted or none
    TORCH_CHECK_VALUE(
        !contains(prefix + key), "[StateDict] there is a '", prefix, key,
        "' already; give another prefix");
  }
  const auto items = other.items_; // a copy: `other` may be this state dict
  for (const auto& [key, value] : items) {
    insert(prefix + key, value);
  }
}

StateDict StateDict::below(std::string_view prefix) const {
  StateDict found;
  for (const auto& [key, value] : items_) {
    if (key.starts_with(prefix)) {
      found.insert(key.substr(prefix.size()), value);
    }
  }
  return found;
}

bool StateDict::contains(std::string_view key) const {
  return index_.contains(std::string(key));
}

const StateDict::Value& StateDict::at(std::string_view key) const {
  const auto found = index_.find(std::string(key));
  TORCH_CHECK_VALUE(
      found != index_.end(), "[StateDict] there is no '", key, "' among its ", size(), " keys");
  return items_[found->second].second;
}

StateDict::Value& StateDict::at(std::string_view key) {
  return const_cast<Value&>(std::as_const(*this).at(key));
}

std::vector<std::string> StateDict::keys() const {
  std::vector<std::string> keys;
  keys.reserve(size());
  for (const auto& item : items_) {
    keys.push_back(item.first);
  }
  return keys;
}

} // namespace fsdp
