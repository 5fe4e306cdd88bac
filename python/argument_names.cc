// The table of arguments whose names differ between Python and C++.
#include "python/argument_names.h"

#include <span>

#include "python/runtime.h"

namespace heed::python {
namespace {

// An argument whose name in C++ differs. The first matching row counts; a row without an operation holds for all.
struct Renamed {
  std::string_view operation, cpp, own;
};
constexpr Renamed kOfTorch[] = {{"merge_linear", "d_o", "the gradient of the result"},
                                {"", "d_o", "the gradient of o"},
                                {"", "d_u", "the gradient of u"},
                                {"", "d_lse", "the gradient of lse"},
                                {"", "d_state", "the gradient of the state"}};
constexpr Renamed kOfPython[] = {
    // These functions have an argument o.
    {"attention_backward", "o", "o"},
    {"compressed_attention_backward", "o", "o"},
    {"deltaformer_backward", "o", "o"},
    {"longformer_backward", "o", "o"},
    {"merge_linear", "o", "o"},
    {"merge_linear_backward", "o", "o"},
    {"parallax_attention_backward", "o", "o"},
    {"path_attention_backward", "o", "o"},
    {"wall_attention_backward", "o", "o"},
    {"", "o", "out"},
    {"s4d_kernel_backward", "d_o", "dkernel"},
    {"", "d_o", "do"},
    {"", "d_u", "du"},
    {"", "d_lse", "dlse"},
    {"", "d_state", "dstate"},
    {"", "query_starts", "align"},
    {"", "segments_q", "segments of q"},
    {"", "segments_k", "segments of k"},
    {"compressed_attention", "k_cmp", "k_cmp"},
    {"compressed_attention", "v_cmp", "v_cmp"},
    {"compressed_attention_backward", "k_cmp", "k_cmp"},
    {"compressed_attention_backward", "v_cmp", "v_cmp"},
    {"", "k_cmp", "compressed[0]"},
    {"", "v_cmp", "compressed[1]"},
    {"t5_bias", "buckets", "table.shape[0]"},
    {"indexer", "q", "q_index"},
    {"indexer", "k", "k_index"},
    {"certified", "cache", "k"},
    {"cumulative", "cache", "k"},
    {"top_blocks", "cache", "k"},
    {"KVCache.share", "prefix", "prefix_cache"},
    {"LatentKVCache.share", "prefix", "prefix_cache"},
};

std::string_view NameIn(std::span<const Renamed> table, std::string_view operation, std::string_view name) {
  for (const Renamed& row : table) {
    if (row.cpp == name && (row.operation.empty() || row.operation == operation)) return row.own;
  }
  return {};
}

}  // namespace

std::string_view NameInPython(std::string_view operation, std::string_view name) {
  const std::string_view own = NameIn(kOfPython, operation, name);
  return own.empty() ? name : own;
}

std::string Reworded(Caller caller, const std::string& operation, const std::string& message) {
  const size_t colon = message.find(": ");
  // The message does not begin with a function.
  if (colon == std::string::npos || message.find(' ') < colon) return message;
  std::string rest = message.substr(colon + 2);
  const std::string argument = rest.substr(0, rest.find_first_of(" :.["));
  std::string_view own = caller == Caller::kTorch ? NameIn(kOfTorch, operation, argument) : "";
  if (own.empty()) own = NameInPython(operation, argument);
  rest.replace(0, argument.size(), own);
  return operation + ": " + rest;
}

}  // namespace heed::python
