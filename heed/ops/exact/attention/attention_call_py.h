// The arguments of a Python call of attention, for every function that has
// them.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"
#include "python/arguments.h"
#include "python/numpy_array.h"
#include "python/tensor_caster.h"

namespace heed::attention {

// What one call was given.
struct Call {
  python::Arrays arrays;
  Inputs in;
  Options options;
  bool seed_given = false;
  bool describe = false;  // explain: `out` is of no interest
  bool return_lse = false;
  nanobind::handle out;
  TensorView out_view;
  int num_threads = 0;

  ConstTensorView lse;  // attention_weights, attention_map, attention_backward

  // attention_backward
  ConstTensorView d_o, o, d_lse;
  bool need_dbias = false;

  ConstTensorView tree;  // attend of a cache: i64

  // heed.torch
  TensorView out_lse;
  Gradients gradients;
  bool heads_first = false;

  nanobind::handle tokens;  // view

  // attention_weights and attention_map
  ConstTensorView rows, heads;
  int64_t map_rows = 64, map_columns = 64;
  Reduce reduce = Reduce::kMean;
};

// From NumPy's global generator, so that numpy.random.seed() repeats it.
uint64_t FreshSeed();

// Each throws InvalidArgument for another value: 'highest' or 'high'; (first, second), ints of at least `least`; the
// bits of a seed in a tensor of PyTorch.
Precision ToPrecision(const python::Argument& argument);
std::pair<int64_t, int64_t> ToPair(const python::Argument& argument, const char* first, const char* second,
                                   int64_t least);
uint64_t ToSeedBits(python::Arrays& arrays, const python::Argument& argument);

// Memory for the results of a call: o, or what is to be written, and lse where it is asked for, [B, Hq, Tq] or packed
// [Hq, Tq_total].
struct Results {
  nanobind::object o, lse;
  Outputs views;
  nanobind::object Returned() const;  // o, or (o, lse)
};
Results NewResults(const char* operation, const Call& call, const ConstTensorView& q, int64_t value_channels);

// Keywords that functions like attention have too: return_lse and out, threads, the results of an operator (out, lse).
using Keywords = std::vector<python::Keyword<Call>>;
using Table = std::span<const python::Keyword<Call>>;
Keywords Joined(std::initializer_list<Table> parts);
Table ResultKeywords();
Table ThreadsKeyword();
Table TorchResults();

// Reads q, k, v (by position or keyword) and all options into `call`. Throws
// InvalidArgument for a wrong value, a Python TypeError for a wrong keyword.
void ReadCall(const char* operation, PyObject* args, PyObject* kwargs, Call& call);

// Reads the call of a function of q and k alone that takes `more` keywords of these: lse,
// rows, heads, size, reduce, tokens. Throws too if q or k is missing or has another rank or dtype.
void ReadWeightsCall(const char* operation, std::span<const char* const> more, PyObject* args, PyObject* kwargs,
                     Call& call);

// Reads a call of attention_backward: do, q, k, v, o, lse by position or keyword, dlse,
// need_dbias and all options.
void ReadBackwardCall(const char* operation, PyObject* args, PyObject* kwargs, Call& call);

// Reads a call of a cache's `attend`: q by position or keyword, tree and all options, of which
// the cache may refuse some; for heed.torch `lse` too. A scale that is needed may not be None.
struct AttendArguments {
  bool needs_scale = false, for_torch = false;
};
void ReadAttendCall(const char* operation, AttendArguments which, PyObject* args, PyObject* kwargs, Call& call);

// Each reads the arguments of an operator of heed.torch, all by position: q, k, v (or do, dlse, q, k, v, o, lse), the
// results' memory (o and lse, or the gradients), then options in the order of the schema, of which trailing ones may be
// left away.
void ReadTorchCall(const char* operation, PyObject* args, Call& call);
void ReadTorchBackwardCall(const char* operation, PyObject* args, Call& call);

// Throws unless q, k and v are there and have the ranks and the dtype that decide what
// the results are; the C++ surface checks the rest.
void CheckForResults(const char* operation, const Call& call);

// Binds attention_weights and attention_map.
void BindWeights(nanobind::module_& m);

// Binds attention_backward.
void BindBackward(nanobind::module_& m);

// Binds what the operators of heed.torch call.
void BindTorch(nanobind::module_& m);

// Makes `attend` of caches known to heed.explain.
void BindAttend(nanobind::module_& m);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_
