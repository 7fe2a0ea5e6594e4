#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp {

/// Finds the tensors inside a value: `Tree<T>::visit(value, f)` calls `f` with a reference to
/// each tensor. `visit` exists only for types that can hold a tensor. For your own struct, write
/// FSDP_TREE(Type, members...) or specialise Tree.
template <class T>
struct Tree {};

template <class T>
concept HasTree = requires(T& value) { Tree<T>::visit(value, [](at::Tensor&) {}); };

/// Calls `f` with every tensor in `value`, if there are any.
template <class T, class F>
void visit_tensors(T& value, F&& f) {
  if constexpr (HasTree<T>) {
    Tree<T>::visit(value, f);
  }
}

template <>
struct Tree<at::Tensor> {
  static void visit(at::Tensor& tensor, auto&& f) {
    f(tensor);
  }
};

template <HasTree T>
struct Tree<std::optional<T>> {
  static void visit(std::optional<T>& value, auto&& f) {
    if (value) {
      visit_tensors(*value, f);
    }
  }
};

namespace detail {

/// For types that a range-based for loop can iterate over.
template <class Range>
struct TreeOfElements {
  static void visit(Range& range, auto&& f) {
    for (auto& element : range) {
      visit_tensors(element, f);
    }
  }
};

/// For types with keys and values.
template <class Map>
struct TreeOfValues {
  static void visit(Map& map, auto&& f) {
    for (auto& [key, value] : map) {
      visit_tensors(value, f);
    }
  }
};

} // namespace detail

template <HasTree T>
struct Tree<std::vector<T>> : detail::TreeOfElements<std::vector<T>> {};
template <HasTree T, size_t N>
struct Tree<std::array<T, N>> : detail::TreeOfElements<std::array<T, N>> {};
template <class K, HasTree V>
struct Tree<std::map<K, V>> : detail::TreeOfValues<std::map<K, V>> {};
template <class K, HasTree V>
struct Tree<std::unordered_map<K, V>> : detail::TreeOfValues<std::unordered_map<K, V>> {};

template <class K, HasTree V>
struct Tree<torch::OrderedDict<K, V>> {
  static void visit(torch::OrderedDict<K, V>& dict, auto&& f) {
    for (auto& item : dict) {
      visit_tensors(item.value(), f);
    }
  }
};

template <class... T>
  requires(HasTree<T> || ...)
struct Tree<std::tuple<T...>> {
  static void visit(std::tuple<T...>& tuple, auto&& f) {
    std::apply([&](auto&... elements) { (visit_tensors(elements, f), ...); }, tuple);
  }
};

template <class A, class B>
  requires(HasTree<A> || HasTree<B>)
struct Tree<std::pair<A, B>> {
  static void visit(std::pair<A, B>& pair, auto&& f) {
    visit_tensors(pair.first, f);
    visit_tensors(pair.second, f);
  }
};

template <class... T>
  requires(HasTree<T> || ...)
struct Tree<std::variant<T...>> {
  static void visit(std::variant<T...>& variant, auto&& f) {
    std::visit([&](auto& value) { visit_tensors(value, f); }, variant);
  }
};

/// Types that hold no tensor. A hooked forward may return these, and types that have a Tree.
template <class T>
inline constexpr bool tensor_free = std::is_void_v<T> || std::is_arithmetic_v<T> ||
                                    std::is_enum_v<T> || std::is_same_v<T, std::string>;
template <class T>
inline constexpr bool tensor_free<std::optional<T>> = tensor_free<T>;
template <class T>
inline constexpr bool tensor_free<std::vector<T>> = tensor_free<T>;
template <class... T>
inline constexpr bool tensor_free<std::tuple<T...>> = (tensor_free<T> && ...);
template <class A, class B>
inline constexpr bool tensor_free<std::pair<A, B>> = tensor_free<A> && tensor_free<B>;

} // namespace fsdp

/// FSDP_TREE(Output, logits, loss) tells fsdp which members of a struct may hold tensors. Write
/// it at global scope, before the first use. List all members in order: a forgotten member is a
/// compile error.
#define FSDP_TREE(Type, ...)                                                 \
  template <>                                                                \
  struct fsdp::Tree<Type> {                                                  \
    static void visit(Type& value, auto&& f) {                               \
      auto& [__VA_ARGS__] = value;                                           \
      std::apply(                                                            \
          [&](auto&... members) { (fsdp::visit_tensors(members, f), ...); }, \
          std::tie(__VA_ARGS__));                                            \
    }                                                                        \
  }
