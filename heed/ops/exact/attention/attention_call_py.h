// Arguments of a Python call of attention, common to every function that takes them.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "heed/distributed/attention.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"
#include "python/arguments.h"
#include "python/communicator.h"
#include "python/numpy_array.h"
#include "python/tensor_caster.h"

namespace heed::attention {

// The arguments of one call.
struct Call {
  python::Arrays arrays;
  Inputs in;
  Options options;
  bool seed_given = false;
  bool describe = false;  // for explain, which ignores `out`
  bool return_lse = false;
  nanobind::handle out;
  TensorView out_view;
  int num_threads = 0;

  // For attention and attention_backward, whose arrays are then those of this rank, and for a cache's attend.
  std::optional<python::Communicator> communicator;
  distributed::AttentionOptions divided;

  ConstTensorView lse;  // for attention_weights, attention_map, attention_backward

  // For attention_backward.
  ConstTensorView d_o, o, d_lse;
  bool need_dbias = false;

  ConstTensorView tree;  // for a cache's attend: i64

  // For heed.torch.
  TensorView out_lse;
  Gradients gradients;
  bool heads_first = false;
  Tile tile;

  nanobind::handle tokens;  // for view

  // For attention_weights and attention_map.
  ConstTensorView rows, heads;
  int64_t map_rows = 64, map_columns = 64;
  Reduce reduce = Reduce::kMean;
};

// Draws a seed from NumPy's global generator, so that numpy.random.seed() repeats it.
uint64_t FreshSeed();

// Readers of one argument: 'highest' or 'high'; (first, second), ints of at least `least`; the bits of a seed in a
// tensor of PyTorch. They throw InvalidArgument for any other value.
Precision ToPrecision(const python::Argument& argument);
std::pair<int64_t, int64_t> ToPair(const python::Argument& argument, const char* first, const char* second,
                                   int64_t least);
uint64_t ToSeedBits(python::Arrays& arrays, const python::Argument& argument);

// Memory for the results of a call: o, or the given output, and lse if requested, [B, Hq, Tq] or packed [Hq, Tq_total].
struct Results {
  nanobind::object o, lse;
  Outputs views;
  nanobind::object Returned() const;  // returns o, or (o, lse)
};
Results NewResults(const char* operation, const Call& call, const ConstTensorView& q, int64_t value_channels);

// Keywords that functions similar to attention share: return_lse and out, threads, the results of an operator (out,
// lse).
using Keywords = std::vector<python::Keyword<Call>>;
using Table = std::span<const python::Keyword<Call>>;
Keywords Joined(std::initializer_list<Table> parts);
Table ResultKeywords();
Table ThreadsKeyword();
Table TorchResults();

// Reads q, k, v (by position or keyword), all options and those of a communicator into `call`. Throws
// InvalidArgument for a wrong value, a Python TypeError for a wrong keyword.
void ReadCall(const char* operation, PyObject* args, PyObject* kwargs, Call& call);

// Reads the call of a function of q and k only that takes the keywords in `more`: lse, rows, heads, size, reduce,
// tokens. Throws also if q or k is missing or has another rank or dtype.
void ReadWeightsCall(const char* operation, std::span<const char* const> more, PyObject* args, PyObject* kwargs,
                     Call& call);

// Reads a call of attention_backward: do, q, k, v, o, lse by position or keyword, dlse,
// need_dbias, all options and those of a communicator.
void ReadBackwardCall(const char* operation, PyObject* args, PyObject* kwargs, Call& call);

// Reads a call of a cache's `attend`: q by position or keyword, tree, a communicator and all options; the cache refuses
// some of them later. Reads `lse` too for heed.torch. A required scale may not be None.
struct AttendArguments {
  bool needs_scale = false, for_torch = false;
};
void ReadAttendCall(const char* operation, AttendArguments which, PyObject* args, PyObject* kwargs, Call& call);

// Readers of the arguments of heed.torch's operators, all by position: q, k, v (or do, dlse, q, k, v, o, lse; or q, k,
// lse, the tile's sequence, first head, row and key, and whether dropout applies), the memory of the results (o and
// lse, or the gradients, or the tile), then options in the order of the schema; trailing options may be omitted.
void ReadTorchCall(const char* operation, PyObject* args, Call& call);
void ReadTorchBackwardCall(const char* operation, PyObject* args, Call& call);
void ReadTorchWeightsCall(const char* operation, PyObject* args, Call& call);

// Reads the communicator of a call of heed.torch, with its method and order.
void ReadProcesses(const char* operation, nanobind::handle comm, nanobind::handle method, nanobind::handle order,
                   Call& call);

// Throws unless q, k and v are present and have ranks and a dtype that determine the results; the C++ interface checks
// the rest.
void CheckForResults(const char* operation, const Call& call);

// Binds attention_weights and attention_map.
void BindWeights(nanobind::module_& m);

// Binds attention_backward.
void BindBackward(nanobind::module_& m);

// Binds the functions that heed.torch's operators call.
void BindTorch(nanobind::module_& m);

// Registers `attend` of caches with heed.explain.
void BindAttend(nanobind::module_& m);

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_CALL_PY_H_
