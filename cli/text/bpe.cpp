#include "cli/text/bpe.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>

#include "cli/text/characters.h"

namespace fsdp::cli {

namespace {

uint64_t pair_of(int64_t left, int64_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
}

/// The bytes of a character as a number.
uint32_t number_of(std::string_view character) {
  uint32_t result = 0;
  for (const char byte : character) {
    result = result << 8 | static_cast<unsigned char>(byte);
  }
  return result;
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

void Bpe::add_character(std::string_view character, int64_t token) {
  characters_[number_of(character)] = token;
}

void Bpe::add_merge(int64_t left, int64_t right, int64_t merged) {
  merges_.insert_or_assign(pair_of(left, right), Merge{num_added_++, merged});
}

const Bpe::Merge* Bpe::find(int64_t left, int64_t right) const {
  const auto found = merges_.find(pair_of(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

std::vector<int64_t> Bpe::first_tokens(std::string_view word) const {
  std::vector<int64_t> tokens;
  tokens.reserve(word.size());
  for (size_t at = 0; at < word.size();) {
    const auto length =
        characters_.empty() ? 1 : std::min(character_length(word[at]), word.size() - at);
    const auto character = word.substr(at, length);
    const auto found =
        characters_.empty() ? characters_.end() : characters_.find(number_of(character));
    if (found != characters_.end()) {
      tokens.push_back(found->second);
    } else {
      for (const char byte : character) {
        tokens.push_back(bytes_[static_cast<unsigned char>(byte)]);
      }
    }
    at += length;
  }
  return tokens;
}

void Bpe::append_tokens(std::string_view word, std::vector<int64_t>& tokens) const {
  const auto first = first_tokens(word);
  const auto end = first.size();
  std::vector<Part> parts;
  parts.reserve(end);
  for (size_t i = 0; i < end; ++i) {
    parts.push_back({first[i], i - 1, i + 1});
  }
  std::vector<Candidate> neighbours;
  neighbours.reserve(end);
  for (size_t i = 0; i + 1 < end; ++i) {
    if (const auto* merge = find(first[i], first[i + 1])) {
      neighbours.push_back({merge->rank, i, merge->token});
    }
  }
  std::priority_queue<Candidate> candidates(std::less<Candidate>(), std::move(neighbours));
  const auto consider = [&](size_t left) {
    const auto right = parts[left].next;
    if (right < end) {
      if (const auto* merge = find(parts[left].token, parts[right].token)) {
        candidates.push({merge->rank, left, merge->token});
      }
    }
  };
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
