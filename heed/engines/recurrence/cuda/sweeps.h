// Problems as sweeps over tokens, and their launches: host code.
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
inline constexpr int64_t kMostHeads = 65535;  // limit of a grid's second and third axes

// A sweep over all tokens: its tensors, and everything else in `params`.
struct Sweep {
  Rows q, k, v, o, log_decay, value_decay, beta, read_key, skip, output_gate;
  States initial, final, initial_z, final_z;
  int64_t q_group = 1, k_group = 1, v_group = 1, read_group = 1;  // value heads that share a row
  bool into_memory = false;                                       // o is [token of all sequences][head][column], of f32
  bool q_in_memory = false, k_in_memory = false, v_in_memory = false, beta_in_memory = false;  // likewise
  ChunkParams params;
};

// Returns what all sweeps of a problem have in common, with decays per head for sweeps over S.
Sweep SweepOf(const Problem& p);
// Factors of what tokens write.
Rows FactorsOf(const Problem& p);
// True if a token's query or read key reads the state before its decay.
inline bool ReadsBeforeDecay(const Problem& p) { return p.has_bonus || p.delta == Delta::kBeforeDecay; }
// Value heads that share a read key: 1 if read keys have factors per value head.
inline int64_t ReadGroup(const Problem& p) { return p.erase.data != nullptr ? 1 : p.group(); }
Sweep ForwardSweep(const Problem& p, const States& initial, const States& initial_z);

Map MapOf(Feature feature);
States Transposed(States s);

// Returns why the device cannot run the sweep; empty if it can.
std::string Declines(Device device, const Sweep& w);

// Tensors that gradient kernels read and write per token.
struct GradientRows {
  Rows q = {}, k = {}, v = {}, d_o = {}, read_key = {}, beta = {}, log_decay = {}, to = {};
  States d_final = {};
  bool into_memory = false;  // `to` is [token of all sequences]...
};

// A device array of floats.
class Floats {
 public:
  Floats(const heed::cuda::Call& call, bool used, int64_t elements)
      : memory_(call, static_cast<size_t>(used && elements > 0 ? elements : 1) * sizeof(float)) {}
  float* data() const { return static_cast<float*>(memory_.data()); }

 private:
  heed::cuda::DeviceMemory memory_;
};

// Launches the kernels of a call.
class Launcher {
 public:
  Launcher(const Context& ctx, const Problem& p);

  const heed::cuda::Call& call() const { return call_; }
  const Launches& kernels() const { return *call_.library().recurrence; }
  int64_t tokens() const { return tokens_; }  // over all sequences
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

  // Runs a sweep. More key channels than a sweep takes are several sweeps, whose outputs are summed. Without causality
  // one sweep sums over all tokens, and another reads the sum.
  void Run(const Sweep& w) const;
  // Runs a sweep with the u term, if the problem has one.
  void RunWithBonus(Sweep w) const;
  BonusParams BonusOf(const Problem& p) const;
  // Sums [token or block][value head][size] over tokens or blocks.
  void SumTokens(const Floats& from, int64_t tokens, int64_t size, const Rows& to) const;

  // Launches a kernel over blocks of 64 tokens of `heads` heads.
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

  // Launches a kernel with one block per head and sequence, also for empty sequences.
  template <class Params>
  void RunOnHeads(const char* (*kernel)(const heed::cuda::Launch&, const Params&), const GradientRows& rows,
                  Params params) const {
    for (const GradientLaunch& launch : GradientLaunches(p_.sequences, rows, 1)) {
      std::ranges::copy(launch.sequences, params.sequences);
      call_.Check(kernel(call_.Of(1, p_.value_heads, launch.sequences.size()), params));
    }
  }

  // Sources of Gather(), see GatherParams.
  struct Gathered {
    const float *from = nullptr, *less = nullptr;
    Rows from_factors = {}, less_factors = {};
    int64_t factors_group = 1;  // value heads that share a row of factors
    Rows q = {}, beta = {};
    Feature feature = Feature::kIdentity;
    bool divides = false;
    const float* floors = nullptr;
    int64_t skipped = 0;          // elements of `from` after each row
    int64_t writes = 1;           // writes per token, with rows of their own
    int64_t slots = 1, slot = 0;  // writes per token in `from`, and the one that is taken
  };
  void Gather(const Gathered& what, const Rows& to, int64_t heads, int64_t size) const {
    Gather(p_.sequences, what, to, heads, size);
  }
  // Writes zeros for tokens of no sequence.
  void Clear(const Rows& to, int64_t heads, int64_t size, int64_t writes = 1) const {
    Gather(p_.others, {.writes = writes}, to, heads, size);
  }

 private:
  struct GradientLaunch {
    std::vector<GradientSequence> sequences;
    int64_t blocks = 0;  // of the longest sequence
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
