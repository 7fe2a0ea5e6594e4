#include "cli/text/bpe.h"

#include <queue>
#include <tuple>

namespace fsdp::cli {

namespace {

uint64_t pair_of(int64_t left, int64_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
}

/// A part of the word that is one token by now.
struct Part {
  int64_t token; // -1: it was joined to the part before it
  size_t previous;
  size_t next;
};

/// Two neighbours that can be merged.
struct Candidate {
  int64_t rank;
  size_t left;
  int64_t token;

  /// A priority queue returns the largest first: the lowest rank, and of equal ones the first.
  bool operator<(const Candidate& other) const {
    return std::tie(rank, left) > std::tie(other.rank, other.left);
  }
};

} // namespace

void Bpe::add_merge(int64_t left, int64_t right, int64_t merged) {
  merges_.try_emplace(pair_of(left, right), Merge{static_cast<int64_t>(merges_.size()), merged});
}

const Bpe::Merge* Bpe::find(int64_t left, int64_t right) const {
  const auto found = merges_.find(pair_of(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::append_tokens(std::string_view word, std::vector<int64_t>& tokens) const {
  const auto end = word.size();
  std::vector<Part> parts;
  parts.reserve(end);
  for (size_t i = 0; i < end; ++i) {
    parts.push_back({bytes_[static_cast<unsigned char>(word[i])], i - 1, i + 1});
  }
  std::priority_queue<Candidate> candidates;
  const auto consider = [&](size_t left) {
    const auto right = parts[left].next;
    if (right < end) {
      if (const auto* merge = find(parts[left].token, parts[right].token)) {
        candidates.push({merge->rank, left, merge->token});
      }
    }
  };
  for (size_t i = 0; i < end; ++i) {
    consider(i);
  }
  while (!candidates.empty()) {
    const auto [rank, left, token] = candidates.top();
    candidates.pop();
    auto& part = parts[left];
    if (part.token < 0 || part.next >= end) {
      continue;
    }
    auto& right = parts[part.next];
    const auto* merge = find(part.token, right.token);
    if (!merge || merge->rank != rank) { // one of the two has been merged in the meantime
      continue;
    }
    part.token = token;
    right.token = -1;
    part.next = right.next;
    if (part.next < end) {
      parts[part.next].previous = left;
    }
    if (left > 0) {
      consider(part.previous);
    }
    consider(left);
  }
  for (const auto& part : parts) {
    if (part.token >= 0) {
      tokens.push_back(part.token);
    }
  }
}

} // namespace fsdp::cli
