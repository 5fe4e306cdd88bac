// Divided: predicts a call on a sequence whose tokens the processes of a group share, from the prediction for one
// process and the formulas of docs/distributed.md.
//
// Letters: R ranks, T tokens, n the most tokens of a rank, s the seconds of one process, and rows in bytes per token:
// q, k, v and o of all heads, dtype of the call; lse [B, Hq], f64 for f64, else f32.
#ifndef HEED_ADVISE_DIVIDED_H_
#define HEED_ADVISE_DIVIDED_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/advise/candidate.h"

namespace heed::advise {

// Processes and what connects them. A message takes latency + bytes / bandwidth; messages of a rank come one after the
// other.
struct Cluster {
  // Defaults: Ethernet of 10 Gbit/s, and the time of a small message by TCP in one data centre.
  static constexpr double kBandwidth = 1.25e9, kLatency = 50e-6;
  static constexpr int64_t kMostRanks = 4096;
  int64_t ranks = 1;              // 1 to kMostRanks
  double bandwidth = kBandwidth;  // bytes per second that a rank receives, above 0
  double latency = kLatency;      // seconds per message, 0 or more
  // True if messages of a ring move while ranks compute, as those of heed.torch, MPI and mpi4py do. A transport without
  // `start` and `finish` (heed/distributed/group.h) moves them between the steps.
  bool overlaps = true;
};

// The methods by which ranks divide a call: attention has the first four, mechanisms with states the last two.
enum class DividedMethod { kUlysses, kAllGather, kZigzag, kRing, kComposed, kRelay };
const char* Name(DividedMethod method);  // "ulysses"; kZigzag is "all_gather, zigzag", all_gather in zigzag order

// The messages of one pass to the rank that receives most. The comparison of calls, which is one all-gather
// of less than 100 bytes from each rank, counts as messages alone.
struct Traffic {
  double bytes = 0;
  double messages = 0;  // in sequence; of an all-gather or all-to-all R - 1
  double hops = 1;      // transfers of `bytes` in sequence: with relay R - 1, as each rank waits for the one before it
  double Seconds(const Cluster& cluster) const { return hops * bytes / cluster.bandwidth + messages * cluster.latency; }
};

// The passes of heed.torch keep what they received for the backward pass. Those of C++ (heed::distributed) without
// AttentionReceived receive q, k, v, and with ulysses o and lse, again. Forward writes lse, as training needs it.
enum class Caller { kPyTorch, kCpp };
enum class Pass { kForward, kBackward };

// Attention. Sources: heed/distributed/attention.cc and ring_attention.cc.
//
//                forward                                   backward
//   all_gather   (R - 1) n (k + v)                         (R - 1) n (k + v): gradients, from each rank to its own
//   ulysses      (T - n) / R (q + k + v)                   (T - n) / R o: dO, tokens for heads
//                + n (R - 1) / R (o + lse): to tokens      + n (R - 1) / R (q + k + v): back to tokens
//   ring         (T - n) (k + v)                           (T - n) (k + v) + T (k + v) in f32 (f64): gradients
//
// C++ adds in the backward pass (R - 1) n (k + v) for all_gather and (T - n) / R (q + k + v + o + lse) for ulysses.
// Here n are the tokens of each rank in turn, and the largest result counts.
Traffic AttentionTraffic(DividedMethod method, Pass pass, const Sizes& sizes, DType dtype, int64_t ranks,
                         Caller caller = Caller::kPyTorch);

// Kinds of mechanisms, by what a segment of tokens does to a state (docs/distributed.md, "What is sent").
enum class StateKind { kDecays, kDelta, kElementwise };

// The states of a mechanism: bytes of the states, of their transitions, and of gradients, which a maximum has not.
//
//   kDecays       recurrences with decays: transitions are one number per row, B H K for a state [B, H, K, V]
//   kDelta        delta rules: a matrix, B H K K
//   kElementwise  scans, short convolutions, recurrences whose value channels decay too: as many numbers as the state
//
// A normaliser (state_z) has no transition of its own. Where there is a maximum (state_m), the other states are
// relative to it, and its numbers are the only transition. Numbers are f64 for f64, else f32. `outputs` are those of a
// call; names that do not begin with "state" are not read.
StateBytes StateBytesOf(StateKind kind, std::span<const OutputSpec> outputs);

// Mechanisms with states. Source: heed/distributed/sequence.cc. A sequence is cut at multiples of kSegmentTokens and
// between ranks; m is the most segments of a rank.
//
//              forward                            backward
//   composed   (R - 1) m (states + transitions)   (R - 1) m gradients
//   relay      states, R - 1 times in sequence    gradients, likewise
//
// Nothing is sent of a sequence that is one segment. States are assumed to be kept (SequenceStates), as in
// heed.torch.
inline constexpr int64_t kSegmentTokens = 4096;
Traffic StateTraffic(DividedMethod method, Pass pass, const StateBytes& states, int64_t tokens, int64_t ranks);

// The share of the work of one process that the rank with most of it does.
//
//   ulysses                  1 / R: whole heads
//   all_gather, ring         visible pairs of a rank's rows over all: the last of R contiguous parts of causal
//                            attention has (2 R - 1) / R^2 of them, zigzag parts have 1 / R each
//   composed                 2 n / T: a pass for the summaries and one for the outputs, and gradients likewise, as
//                            measured with two processes (docs/distributed.md); composing itself is not counted
//   relay                    1: one rank after the other
double WorkShare(DividedMethod method, const Division& division, int64_t tokens, int64_t ranks);

// The prediction of one method.
struct Divided {
  std::string method;
  Traffic forward, backward;  // `backward` in training
  double communication_seconds = 0, computation_seconds = 0;
  // Seconds in which a ring does both. At each of its R steps a rank computes a part, and at all but the last it
  // receives the next: at most (R - 1) / R of the computation overlaps.
  double overlapped_seconds = 0;
  // The rank with most tokens has its part of the arguments, workspace and state, and what it receives and keeps during
  // the call: keys and values of all ranks (all_gather), all tokens of its heads (ulysses), a second part of keys and
  // values (ring), the summaries of all segments and the states before them (composed), the states before its part
  // (relay). Training adds gradients of these. Buffers of single messages are not counted.
  double memory_bytes = 0;
  double seconds() const { return communication_seconds + computation_seconds - overlapped_seconds; }
};

// Predictions for a candidate whose call on one process takes `seconds`, the first one by the method that heed.torch
// chooses: ulysses where R divides the heads of q and of k, else all_gather; composed for states. Communication
// overlaps with computation in rings alone. One rank is one process: nothing is sent. Throws Unsupported, with the
// reason, for a candidate that a group refuses.
std::vector<Divided> Divide(const Context& ctx, const Candidate& candidate, Purpose purpose, const Sizes& sizes,
                            double kept, double seconds, const Cluster& cluster);

// Tokens of each rank, as heed::distributed::ShardRanges: parts of nearly the same size that begin at multiples of 64
// where there are enough tokens. In zigzag order rank r has parts r and 2 R - 1 - r of 2 R.
struct TokenPart {
  int64_t begin = 0, end = 0;
};
std::vector<std::vector<TokenPart>> PartsOfRanks(int64_t tokens, int64_t ranks, bool zigzag);

}  // namespace heed::advise

#endif  // HEED_ADVISE_DIVIDED_H_
