// Crossover: the number of tokens from which a mechanism is cheaper than exact attention.
#ifndef BENCHMARKS_CROSSOVER_H_
#define BENCHMARKS_CROSSOVER_H_

#include <optional>
#include <string>
#include <vector>

#include "benchmarks/rows.h"

namespace heed::bench {

// One pass of a mechanism compared with attention's. A step is compared with one query against as many keys.
struct Crossover {
  double seconds_per_token = 0;  // per token and head, at 2048 tokens
  std::string from;              // "312", "<= 16", "> 8192"; empty for attention itself
};

struct CrossoverRow {
  std::string mechanism;
  std::optional<Crossover> forward, backward, step;
};

// Compares every mechanism with causal attention, f32, one thread. Throws std::runtime_error if a result is wrong.
// `rows` selects mechanisms.
std::vector<CrossoverRow> MeasureCrossover(const Rows& rows);

// Return the lines above the first row, and one row.
std::string CrossoverHeader();
std::string CrossoverText(const CrossoverRow& row);
std::string CrossoverJson(const std::vector<CrossoverRow>& rows);

}  // namespace heed::bench

#endif  // BENCHMARKS_CROSSOVER_H_
