// Problems as sweeps over tokens, and their launches: the side of the host.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_SWEEPS_H_
#define HEED_ENGINES_RECURRENCE_CUDA_SWEEPS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/cuda/calls.h"
#include "heed/engines/recurrence/cuda/gradient_blocks.h"
#include "heed/engines/recurrence/cuda/launches.h"
#include "heed/engines/recurrence/cuda/params.h"
#include "heed/engines/recurrence/problem.h"

namespace heed::recurrence::cuda {

inline constexpr char kName[] = "recurrence_cuda";
inline constexpr int64_t kMostHeads = 65535;  // blocks of a grid on its second and third axes

// A sweep over all tokens: its tensors, and in `params` all that is none.
struct Sweep {
  Rows q, k, v, o, log_decay, value_decay, beta, read_key, skip, output_gate;
  States initial, final, initial_z, final_z;
  int64_t q_group = 1, k_group = 1, v_group = 1, read_group = 1;  // value heads that share a row
  bool into_memory = false;                                       // o is [token of all sequences][head][column], of f32
  bool q_in_memory = false, k_in_memory = false, v_in_memory = false, beta_in_memory = false;  // so are they
  ChunkParams params;
};

// What all sweeps of a problem have, and those of S that of one number per head.
Sweep SweepOf(const Problem& p);
// Of what tokens write.
Rows FactorsOf(const Problem& p);
// Whether a token reads the state before it decays: by its query, or by its read key.
inline bool ReadsBeforeDecay(const Problem& p) { return p.has_bonus || p.delta == Delta::kBeforeDecay; }
// Value heads that share a read key: none do where it has factors of its own.
inline int64_t ReadGroup(const Problem& p) { return p.erase.data != nullptr ? 1 : p.group(); }
Sweep ForwardSweep(const Problem& p, const States& initial, const States& initial_z);

Map MapOf(Feature feature);
States Transposed(States s);

// Why the device does not run it; empty if it does.
std::string Declines(Device device, const Sweep& w);

// What kernels of gradients read and write of a token.
struct GradientRows {
  Rows q = {}, k = {}, v = {}, d_o = {}, read_key = {}, beta = {}, log_decay = {}, to = {};
  States d_final = {};
  bool into_memory = false;  // `to` is [token of all sequences]...
};

// Memory of f32 on the device.
class Floats {
 public:
  Floats(const heed::cuda::Call& call, bool used, int64_t elements)
      : memory_(call, static_cast<size_t>(used && elements > 0 ? elements : 1) * sizeof(float)) {}
  float* data() const { return static_cast<float*>(memory_.data()); }

 private:
  heed::cuda::DeviceMemory memory_;
};

// The launches of a call.
class Launcher {
 public:
  Launcher(const Context& ctx, const Problem& p);

  const heed::cuda::Call& call() const { return call_; }
  const Launches& kernels() const { return *call_.library().recurrence; }
  int64_t tokens() const { return tokens_; }  // of all sequences
  int64_t blocks() const { return blocks_; }
  // [token of all sequences][value head][size]
  Rows InMemory(const Floats& memory, int64_t size) const {
    return {memory.data(), DType::kF32, 0, p_.value_heads * size, size};
  }
  // [write of a token of all sequences][value head][size]
  Rows WritesInMemory(const Floats& memory, int64_t size) const {
    Rows rows = InMemory(memory, size);
    rows.write_stride = rows.token_stride;
    rows.token_stride *= p_.writes;
    return rows;
  }

  // Keys of more channels than a sweep takes are several sweeps, whose outputs are summed. Without causality one sweep
  // sums over all tokens, and another reads that.
  void Run(const Sweep& w) const;
  // With what each token's own key means to it, if the problem has a bonus.
  void RunWithBonus(Sweep w) const;
  BonusParams BonusOf(const Problem& p) const;
  // [token or block][value head][size] over heads alone.
  void SumTokens(const Floats& from, int64_t tokens, int64_t size, const Rows& to) const;

  // Launches of kernels over blocks of 64 tokens of so many heads.
  template <class Params>
  void Run(const char* (*kernel)(const heed::cuda::Launch&, const Params&), const std::vector<Sequence>& sequences,
           const GradientRows& rows, int64_t heads, Params params) const {
    int64_t writes = 1;
    if constexpr (requires { params.writes; }) writes = params.writes;
    for (const GradientLaunch& launch : GradientLaunches(sequences, rows, writes)) {
      if (launch.blocks == 0) continue;
      std::ranges::copy(launch.sequences, params.sequences);
      call_.Check(kernel(call_.Of(launch.blocks, heads, launch.sequences.size()), params));
    }
  }

  // Of kernels that take a head of a sequence each, be it empty.
  template <class Params>
  void RunOnHeads(const char* (*kernel)(const heed::cuda::Launch&, const Params&), const GradientRows& rows,
                  Params params) const {
    for (const GradientLaunch& launch : GradientLaunches(p_.sequences, rows, 1)) {
      std::ranges::copy(launch.sequences, params.sequences);
      call_.Check(kernel(call_.Of(1, p_.value_heads, launch.sequences.size()), params));
    }
  }

  // Rows of a head, from f32 of value heads, or zeros.
  struct Gathered {
    const float *from = nullptr, *less = nullptr;
    Rows from_factors = {}, less_factors = {};
    int64_t factors_group = 1;  // value heads that share a row of factors
    Rows q = {}, beta = {};
    Feature feature = Feature::kIdentity;
    bool divides = false;
    const float* floors = nullptr;
    int64_t skipped = 0;          // elements of `from` behind each row
    int64_t writes = 1;           // of a token, which have rows of their own
    int64_t slots = 1, slot = 0;  // the writes of a token in `from`, of which one is taken
  };
  void Gather(const Gathered& what, const Rows& to, int64_t heads, int64_t size) const {
    Gather(p_.sequences, what, to, heads, size);
  }
  // Of tokens of no sequence.
  void Clear(const Rows& to, int64_t heads, int64_t size, int64_t writes = 1) const {
    Gather(p_.others, {.writes = writes}, to, heads, size);
  }

 private:
  struct GradientLaunch {
    std::vector<GradientSequence> sequences;
    int64_t blocks = 0;  // of the longest
  };
  std::vector<GradientLaunch> GradientLaunches(const std::vector<Sequence>& sequences, const GradientRows& rows,
                                               int64_t writes) const;
  void Gather(const std::vector<Sequence>& sequences, const Gathered& what, const Rows& to, int64_t heads,
              int64_t size) const;
  void RunCausal(Sweep w) const;
  void RunSlice(const Sweep& w) const;
  void Run(const Sweep& w, ChunkParams& params, size_t first, size_t num_sequences) const;
  int64_t SegmentTokens(int64_t column_blocks) const;

  const Problem& p_;
  const heed::cuda::Call call_;
  std::vector<int64_t> first_tokens_, first_blocks_;
  int64_t tokens_ = 0, blocks_ = 0, longest_ = 0;
};

DeviceRows OnDevice(const Rows& rows, int64_t group = 1, bool reversed = false);
DeviceStates OnDevice(const States& s);

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_SWEEPS_H_
