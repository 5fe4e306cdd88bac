// Divided: formulas of bytes, messages, work and memory of a call that processes share.
#include "heed/advise/divided.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "heed/advise/candidates_internal.h"
#include "heed/core/error.h"

namespace heed::advise {
namespace {

constexpr int64_t kGrid = 64;  // tokens; parts begin at multiples of it

int64_t CountTokens(const std::vector<TokenPart>& parts) {
  int64_t count = 0;
  for (const TokenPart& part : parts) count += part.end - part.begin;
  return count;
}

int64_t MostTokens(int64_t tokens, int64_t ranks, bool zigzag = false) {
  int64_t most = 0;
  for (const std::vector<TokenPart>& parts : PartsOfRanks(tokens, ranks, zigzag)) {
    most = std::max(most, CountTokens(parts));
  }
  return most;
}

// Segments of a sequence: of the rank with most of them, and of all ranks.
struct Segments {
  int64_t most = 0, all = 0;
  Segments(int64_t tokens, int64_t ranks) {
    for (const std::vector<TokenPart>& parts : PartsOfRanks(tokens, ranks, false)) {
      const auto [begin, end] = parts[0];
      const int64_t own = begin == end ? 0 : (end - 1) / kSegmentTokens - begin / kSegmentTokens + 1;
      most = std::max(most, own);
      all += own;
    }
  }
};

// Bytes per token.
struct RowBytes {
  double q, o, kv, wide_kv, wide_o, lse;
  RowBytes(const Sizes& s, DType dtype) {
    const double size = SizeIn(dtype), wide = dtype == DType::kF64 ? 8 : 4;
    const auto D = static_cast<double>(s.D), Dv = static_cast<double>(s.Dv);
    const auto queries = static_cast<double>(s.B * s.Hq), keys = static_cast<double>(s.B * s.Hkv);
    q = queries * D * size;
    o = queries * Dv * size;
    kv = keys * (D + Dv) * size;
    wide_kv = keys * (D + Dv) * wide;
    wide_o = queries * Dv * wide;
    lse = queries * wide;
  }
};

// The sum of min(i, most) over i < n.
double SumOfMin(double n, double most) {
  return n <= most + 1 ? n * (n - 1) / 2 : most * (most + 1) / 2 + (n - 1 - most) * most;
}

// Visible pairs of one head's first n rows of T.
double PairsOfRows(const Division& division, int64_t tokens, int64_t n) {
  const double T = static_cast<double>(tokens), rows = static_cast<double>(n);
  const auto reach = [&](int64_t window) { return window < 0 ? T : std::min(T, static_cast<double>(window)); };
  const double left = reach(division.window.left), right = division.causal ? 0 : reach(division.window.right);
  return SumOfMin(rows, left) + SumOfMin(T, right) - SumOfMin(T - rows, right) + rows;
}

double ShareOfPairs(const Division& division, int64_t tokens, int64_t ranks, bool zigzag) {
  double most = 0;
  for (const std::vector<TokenPart>& parts : PartsOfRanks(tokens, ranks, zigzag)) {
    double own = 0;
    for (const auto& [begin, end] : parts) {
      own += PairsOfRows(division, tokens, end) - PairsOfRows(division, tokens, begin);
    }
    most = std::max(most, own);
  }
  return most / PairsOfRows(division, tokens, tokens);
}

double SumOf(const Memory& memory) { return memory.arguments + memory.workspace + memory.state; }

double MemoryOf(DividedMethod method, const Context& ctx, const Candidate& candidate, bool trains, const Sizes& sizes,
                double kept, const Division& division, int64_t ranks) {
  Sizes own = sizes;
  const int64_t n = std::max<int64_t>(MostTokens(sizes.Tk, ranks, method == DividedMethod::kZigzag), 1);
  own.Tq = own.Tk = n;
  const Memory local = candidate.MemoryAt(ctx, own, kept);
  const RowBytes row(sizes, candidate.dtype);
  const auto tokens = static_cast<double>(sizes.Tk), part = static_cast<double>(n);
  const double passes = trains ? 2 : 1;
  switch (method) {
    case DividedMethod::kUlysses: {
      Sizes heads = sizes;
      heads.Hq /= ranks;
      heads.Hkv /= ranks;
      const Memory whole = candidate.MemoryAt(ctx, heads, kept);
      return local.arguments + local.state + whole.arguments + whole.workspace;
    }
    case DividedMethod::kAllGather:
    case DividedMethod::kZigzag: {
      own.Tk = sizes.Tk;
      return local.arguments + local.state + candidate.MemoryAt(ctx, own, kept).workspace + passes * tokens * row.kv;
    }
    case DividedMethod::kRing: {
      const double gradients = trains ? 2 * part * row.wide_kv : 0;
      return SumOf(local) + part * (row.kv + row.wide_o) + gradients;
    }
    case DividedMethod::kComposed: {
      const StateBytes& of = division.states;
      const auto segments = static_cast<double>(Segments(sizes.Tk, ranks).all);
      return SumOf(local) + segments * (2 * of.states + of.transitions + (trains ? of.gradients : 0));
    }
    case DividedMethod::kRelay: return SumOf(local) + division.states.states;
  }
  return 0;
}

// The methods of a call, that of heed.torch first.
std::vector<DividedMethod> MethodsOf(const Division& division, const Sizes& sizes, int64_t ranks) {
  if (!division.is_attention) return {DividedMethod::kComposed, DividedMethod::kRelay};
  std::vector<DividedMethod> methods;
  if (sizes.Hq % ranks == 0 && sizes.Hkv % ranks == 0) methods.push_back(DividedMethod::kUlysses);
  methods.push_back(DividedMethod::kAllGather);
  if (division.causal) methods.push_back(DividedMethod::kZigzag);
  methods.push_back(DividedMethod::kRing);
  return methods;
}

}  // namespace

const char* Name(DividedMethod method) {
  switch (method) {
    case DividedMethod::kUlysses: return "ulysses";
    case DividedMethod::kAllGather: return "all_gather";
    case DividedMethod::kZigzag: return "all_gather, zigzag";
    case DividedMethod::kRing: return "ring";
    case DividedMethod::kComposed: return "composed";
    case DividedMethod::kRelay: return "relay";
  }
  return "";
}

std::vector<std::vector<TokenPart>> PartsOfRanks(int64_t tokens, int64_t ranks, bool zigzag) {
  const int64_t parts = zigzag ? 2 * ranks : ranks, grid = tokens >= kGrid * parts ? kGrid : 1;
  const auto begin = [&](int64_t part) { return part == parts ? tokens : tokens * part / parts / grid * grid; };
  std::vector<std::vector<TokenPart>> of_ranks;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<TokenPart>& own = of_ranks.emplace_back();
    own.push_back({begin(rank), begin(rank + 1)});
    if (zigzag) own.push_back({begin(parts - 1 - rank), begin(parts - rank)});
  }
  return of_ranks;
}

Traffic AttentionTraffic(DividedMethod method, Pass pass, const Sizes& sizes, DType dtype, int64_t ranks,
                         Caller caller) {
  if (ranks == 1) return {};
  const RowBytes row(sizes, dtype);
  const bool forward = pass == Pass::kForward, again = caller == Caller::kCpp;
  const double others = static_cast<double>(ranks - 1), R = static_cast<double>(ranks);
  const auto T = static_cast<double>(sizes.Tk);
  const double agreements = 1;  // both passes compare their calls
  const bool zigzag = method == DividedMethod::kZigzag;
  // Parts of an all-gather are padded to the largest.
  const double gathered = others * static_cast<double>(MostTokens(sizes.Tk, ranks, zigzag)) * row.kv;
  Traffic traffic;
  for (const std::vector<TokenPart>& parts : PartsOfRanks(sizes.Tk, ranks, zigzag)) {
    const auto n = static_cast<double>(CountTokens(parts));
    double bytes = 0;
    switch (method) {
      case DividedMethod::kAllGather:
      case DividedMethod::kZigzag: {
        bytes = forward ? gathered : others * n * row.kv + (again ? gathered : 0);
        traffic.messages = others * (agreements + (forward ? 2 : again ? 4 : 2));
        break;
      }
      case DividedMethod::kUlysses: {
        const double to_heads = (T - n) / R, to_tokens = n * others / R;
        if (forward) {
          bytes = to_heads * (row.q + row.kv) + to_tokens * (row.o + row.lse);
          traffic.messages = others * (agreements + 5);
        } else {
          bytes = to_heads * (row.o + (again ? row.q + row.kv + row.o + row.lse : 0)) + to_tokens * (row.q + row.kv);
          traffic.messages = others * (agreements + (again ? 9 : 4));
        }
        break;
      }
      case DividedMethod::kRing:
        bytes = (T - n) * row.kv + (forward ? 0 : T * row.wide_kv);
        traffic.messages = others * (agreements + 2) + (forward ? 0 : 2 * R);
        break;
      case DividedMethod::kComposed:
      case DividedMethod::kRelay: throw InternalError("AttentionTraffic: a method of states");
    }
    traffic.bytes = std::max(traffic.bytes, bytes);
  }
  return traffic;
}

StateBytes StateBytesOf(StateKind kind, std::span<const OutputSpec> outputs) {
  const auto has = [&](const char* name) { return std::ranges::count(outputs, name, &OutputSpec::name) > 0; };
  const bool relative = has("state_m");
  StateBytes bytes;
  for (const OutputSpec& spec : outputs) {
    if (!spec.name.starts_with("state")) continue;
    double own = SizeIn(spec.dtype);
    for (const int64_t size : spec.sizes) own *= static_cast<double>(size);
    bytes.states += own;
    const bool maximum = spec.name == "state_m";
    if (!maximum) bytes.gradients += own;
    if (maximum || (!relative && kind == StateKind::kElementwise && spec.name != "state_z")) {
      bytes.transitions += own;
    } else if (!relative && spec.name == "state" && spec.sizes.size() >= 2 && own > 0) {
      const auto rows = static_cast<double>(spec.sizes[spec.sizes.size() - 2]);
      bytes.transitions += own / static_cast<double>(spec.sizes.back()) * (kind == StateKind::kDelta ? rows : 1);
    }
  }
  return bytes;
}

Traffic StateTraffic(DividedMethod method, Pass pass, const StateBytes& states, int64_t tokens, int64_t ranks) {
  if (ranks == 1) return {};
  const double others = static_cast<double>(ranks - 1), agreements = others;  // both passes compare their calls
  const bool forward = pass == Pass::kForward;
  if (method == DividedMethod::kRelay) {
    return {forward ? states.states : states.gradients, agreements + others, others};
  }
  const Segments segments(tokens, ranks);
  if (segments.all <= 1) return {0, agreements};
  const double summaries = others * static_cast<double>(segments.most);
  return {summaries * (forward ? states.states + states.transitions : states.gradients), agreements + others};
}

double WorkShare(DividedMethod method, const Division& division, int64_t tokens, int64_t ranks) {
  if (ranks == 1) return 1;
  switch (method) {
    case DividedMethod::kUlysses: return 1 / static_cast<double>(ranks);
    case DividedMethod::kAllGather:
    case DividedMethod::kRing: return ShareOfPairs(division, tokens, ranks, false);
    case DividedMethod::kZigzag: return ShareOfPairs(division, tokens, ranks, true);
    case DividedMethod::kComposed: {
      const double share = static_cast<double>(MostTokens(tokens, ranks)) / static_cast<double>(tokens);
      return Segments(tokens, ranks).all <= 1 ? share : 2 * share;
    }
    case DividedMethod::kRelay: return 1;
  }
  return 1;
}

std::vector<Divided> Divide(const Context& ctx, const Candidate& candidate, Purpose purpose, const Sizes& sizes,
                            double kept, double seconds, const Cluster& cluster) {
  if (purpose == Purpose::kDecode) throw Unsupported(kOneTokenIsNotDivided);
  const Division division = candidate.DivisionAt(ctx, sizes);
  const int64_t ranks = cluster.ranks;
  if (ranks == 1) {
    Divided alone;
    alone.method = "one process";
    alone.computation_seconds = seconds;
    alone.memory_bytes = SumOf(candidate.MemoryAt(ctx, sizes, kept));
    return {alone};
  }
  const bool trains = purpose == Purpose::kTraining;
  std::vector<Divided> predictions;
  for (const DividedMethod method : MethodsOf(division, sizes, ranks)) {
    Divided& divided = predictions.emplace_back();
    divided.method = Name(method);
    const auto traffic = [&](Pass pass) {
      return division.is_attention ? AttentionTraffic(method, pass, sizes, candidate.dtype, ranks)
                                   : StateTraffic(method, pass, division.states, sizes.Tk, ranks);
    };
    divided.forward = traffic(Pass::kForward);
    if (trains) divided.backward = traffic(Pass::kBackward);
    divided.communication_seconds = divided.forward.Seconds(cluster) + divided.backward.Seconds(cluster);
    divided.computation_seconds = seconds * WorkShare(method, division, sizes.Tk, ranks);
    if (method == DividedMethod::kRing && cluster.overlaps) {
      const double parts = static_cast<double>(ranks);
      divided.overlapped_seconds =
          std::min(divided.communication_seconds, divided.computation_seconds * (parts - 1) / parts);
    }
    divided.memory_bytes = MemoryOf(method, ctx, candidate, trains, sizes, kept, division, ranks);
  }
  return predictions;
}

}  // namespace heed::advise
