// Rotary options of caches: checks, rotation of rows, storage in files.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/io/bytes_internal.h"
#include "heed/ops/positions/rotary_rows_internal.h"
#include "heed/state/cache_rotary_internal.h"

namespace heed {
namespace {

// A cache keeps a table of 256 bytes per channel, and a file may request any number.
constexpr int64_t kMaxRotated = 65536;

constexpr char kPairsKey[] = "rotary_pairs", kTypeKey[] = "rotary_type";
constexpr char kHalfSplit[] = "half_split", kInterleaved[] = "interleaved";

constexpr std::pair<const char*, RopeType> kTypes[] = {
    {"default", RopeType::kDefault},  {"linear", RopeType::kLinear}, {"ntk", RopeType::kNtk},
    {"dynamic", RopeType::kDynamic},  {"yarn", RopeType::kYarn},     {"llama3", RopeType::kLlama3},
    {"longrope", RopeType::kLongrope}};

std::string NameOf(RopeType type) {
  for (const auto& [name, known] : kTypes) {
    if (known == type) return name;
  }
  return "unknown";
}

// The fields that follow base, dim and truncate.
constexpr std::optional<double> RotaryScaling::* kFields[] = {&RotaryScaling::factor,
                                                              &RotaryScaling::original_max_position_embeddings,
                                                              &RotaryScaling::max_position_embeddings,
                                                              &RotaryScaling::attention_factor,
                                                              &RotaryScaling::beta_fast,
                                                              &RotaryScaling::beta_slow,
                                                              &RotaryScaling::mscale,
                                                              &RotaryScaling::mscale_all_dim,
                                                              &RotaryScaling::low_freq_factor,
                                                              &RotaryScaling::high_freq_factor};
static_assert(3 + std::size(kFields) == static_cast<size_t>(kRotaryNumbers));

RotaryFrequencies Frequencies(const CacheRotary& rotary, int64_t dim) {
  return ScaledRotaryFrequencies(rotary.options.dim.value_or(dim), rotary.options.base, rotary.options.scaling,
                                 /*length=*/0);
}

// Every low part of the table is prepared here, so that threads only read.
positions::PhaseTable MakeTable(const CacheRotary& rotary, int64_t dim) {
  const os::ScopedFloatControl control;
  RotaryFrequencies f = Frequencies(rotary, dim);
  positions::PhaseTable table(std::move(f.frequencies), f.attention_factor);
  for (int64_t low = 0; low < positions::kLowPositions; ++low) table.Prepare(low);
  return table;
}

// The number of doubles that fill this many bytes.
size_t DoublesOf(int64_t num_bytes) { return static_cast<size_t>(num_bytes) / sizeof(double); }

}  // namespace

void CheckCacheRotary(const std::string& name, const CacheRotary& rotary, int64_t dim) {
  const auto fail = [&](const std::string& what) { throw InvalidArgument(name + ": rotary " + what); };
  if (rotary.pairs != RotaryPairs::kHalfSplit && rotary.pairs != RotaryPairs::kInterleaved) {
    fail("pairs is unknown, expected half split or interleaved ones");
  }
  const int64_t rotated = rotary.options.dim.value_or(dim);
  const int64_t most = std::min(dim, kMaxRotated);
  if (rotated < 2 || rotated > most || rotated % 2 != 0) {
    fail("dim is " + std::to_string(rotated) + ", expected an even number from 2 to " + std::to_string(most));
  }
  if (rotary.options.inverse) fail("inverse is true, expected false");
  const RopeType type = rotary.options.scaling.rope_type;
  if (DependsOnLength(type)) {
    fail("scaling.rope_type is " + NameOf(type) +
         ", expected one that does not depend on the length: keys in the cache would not "
         "fit those that come later");
  }
  try {
    Frequencies(rotary, dim);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(name + ": " + error.what());
  }
}

KeyRotation::KeyRotation(const CacheRotary& rotary, int64_t dim)
    : pairs_(rotary.pairs), dim_(dim), rotated_(rotary.options.dim.value_or(dim)), table_(MakeTable(rotary, dim)) {}

KeyRotation::Worker::Worker(const KeyRotation& rotation)
    : rotation_(rotation),
      phase_memory_(DoublesOf(positions::PhaseRow::ScratchBytes(static_cast<int64_t>(rotation.table_.size())))),
      scratch_(DoublesOf(positions::RotateScratchBytes(rotation.rotated_ / 2))),
      phase_(rotation.table_, phase_memory_.data()) {}

void KeyRotation::Worker::Rotate(int64_t position, const Rows& rows) {
  phase_.MoveTo(position);
  positions::RotateRows(kAllTargets, rows.dtype, rotation_.pairs_,
                        {.x = rows.from,
                         .y = rows.to,
                         .num_rows = rows.heads,
                         .x_stride = rows.from_stride,
                         .y_stride = rows.to_stride,
                         .half = rotation_.rotated_ / 2,
                         .cos = phase_.cos(),
                         .sin = phase_.sin(),
                         .sign = 1,
                         .scratch = scratch_.data()});
  const auto size = static_cast<int64_t>(SizeOf(rows.dtype));
  const int64_t rest = rotation_.dim_ - rotation_.rotated_;
  for (int64_t h = 0; h < rows.heads && rest > 0; ++h) {
    std::memcpy(rows.to + (h * rows.to_stride + rotation_.rotated_) * size,
                rows.from + (h * rows.from_stride + rotation_.rotated_) * size, static_cast<size_t>(rest * size));
  }
}

RotaryInFile WriteRotary(const CacheRotary& rotary) {
  constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();
  const RotaryOptions& o = rotary.options;
  RotaryInFile file;
  file.metadata[kPairsKey] = rotary.pairs == RotaryPairs::kHalfSplit ? kHalfSplit : kInterleaved;
  file.metadata[kTypeKey] = NameOf(o.scaling.rope_type);
  file.numbers = {o.base, o.dim ? static_cast<double>(*o.dim) : kAbsent,
                  o.scaling.truncate ? static_cast<double>(*o.scaling.truncate) : kAbsent};
  for (const auto field : kFields) file.numbers.push_back((o.scaling.*field).value_or(kAbsent));
  return file;
}

bool HasRotary(const std::map<std::string, std::string>& metadata) {
  return metadata.contains(kPairsKey) || metadata.contains(kTypeKey);
}

CacheRotary ReadRotary(const std::map<std::string, std::string>& metadata, const double* numbers) {
  const auto text = [&](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string() : found->second;
  };
  const std::string pairs = text(kPairsKey), type = text(kTypeKey);
  if (pairs != kHalfSplit && pairs != kInterleaved) {
    throw InvalidArgument(std::string("metadata '") + kPairsKey + "' is " + Quote(pairs) +
                          ", expected half_split or interleaved");
  }
  CacheRotary rotary = {.pairs = pairs == kHalfSplit ? RotaryPairs::kHalfSplit : RotaryPairs::kInterleaved};
  RotaryOptions& o = rotary.options;
  o.scaling.rope_type = RopeTypeFromName(type);
  o.base = numbers[0];
  if (const double dim = numbers[1]; !std::isnan(dim)) {
    if (!(dim >= 2 && dim <= 0x1p53 && dim == std::floor(dim))) {
      throw InvalidArgument("rotary dim is " + std::to_string(dim) + ", expected an even number");
    }
    o.dim = static_cast<int64_t>(dim);
  }
  if (const double truncate = numbers[2]; !std::isnan(truncate)) {
    if (truncate != 0 && truncate != 1) {
      throw InvalidArgument("rotary truncate is " + std::to_string(truncate) + ", expected 0 or 1");
    }
    o.scaling.truncate = truncate == 1;
  }
  const double* number = numbers + 3;
  for (const auto field : kFields) {
    if (!std::isnan(*number)) o.scaling.*field = *number;
    ++number;
  }
  return rotary;
}

}  // namespace heed
