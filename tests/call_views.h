// The views of a call of a mechanism, which tests find by name.
#ifndef HEED_TESTS_CALL_VIEWS_H_
#define HEED_TESTS_CALL_VIEWS_H_

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

// The views of a call, in the order of its mechanism's table.
struct CallInputs {
  ConstTensorView& operator[](std::string_view name) {
    for (const Tensor& tensor : table.tensors) {
      if (name == tensor.name) return tensors[table.IndexOf(tensor)];
    }
    throw std::out_of_range(std::string(name));
  }
  ConstTensorView& operator[](Role role) { return tensors[table.IndexOf(*table.Find(role))]; }
  operator Arguments() const { return {tensors, initial, d_o, d_final}; }  // NOLINT: the same views

  Table table;
  std::vector<ConstTensorView> tensors = {}, initial = {}, d_final = {};
  ConstTensorView d_o = {};
};
struct CallResults {
  operator Results() const { return {o, states, gradients}; }  // NOLINT: the same views

  TensorView o = {};
  std::vector<TensorView> states = {}, gradients = {};
};

}  // namespace heed::mechanism

#endif  // HEED_TESTS_CALL_VIEWS_H_
