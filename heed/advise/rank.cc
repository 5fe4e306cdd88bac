// Ranking: order, Pareto frontier, reasons.
#include "heed/advise/rank.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "heed/advise/candidates_internal.h"
#include "heed/core/error.h"

namespace heed::advise {
namespace {

// "2.4".
std::string Two(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), value < 10 ? "%.2g" : "%.0f", value);
  return text;
}

// "1.3", "12", "4e+05": a ratio.
std::string Times(double ratio) {
  char text[32];
  std::snprintf(text, sizeof(text), ratio < 10 ? "%.2g" : ratio < 1e4 ? "%.0f" : "%.0e", ratio);
  return text;
}

// "attention causal in bf16".
std::string NameOf(const Row& row) { return row.mechanism + " " + row.options + " in " + Name(row.dtype); }

// The largest ratio of a row's cost to the budget, over the budgeted quantities; at most 1 is within it. Infinite if
// unknown.
double ExcessOf(const Budget& budget, const Row& row) {
  const auto ratio = [](double got, double most) {
    if (std::isnan(got)) return std::numeric_limits<double>::infinity();
    return got <= most ? 1.0 : got / most;
  };
  double excess = 1;
  if (budget.memory_bytes) excess = std::max(excess, ratio(row.memory_bytes(), *budget.memory_bytes));
  if (budget.relative_error) excess = std::max(excess, ratio(row.error.relative, *budget.relative_error));
  return excess;
}

bool Fits(const std::optional<double>& budget, double got) { return !budget || got <= *budget; }

template <class Measure>
const Row* Least(const std::vector<Row>& rows, const Measure& measure, const auto& among) {
  const Row* least = nullptr;
  for (const Row& row : rows) {
    if (std::isnan(measure(row)) || !among(row)) continue;
    if (least == nullptr || measure(row) < measure(*least)) least = &row;
  }
  return least;
}

// Throws with a remedy if no row is within the budget.
[[noreturn]] void FailNothingFits(const Budget& budget, const std::vector<Row>& rows) {
  const auto memory_of = [](const Row& row) { return row.memory_bytes(); };
  const auto error_of = [](const Row& row) { return row.error.relative; };
  const auto any = [](const Row&) { return true; };
  const Row* least = Least(rows, memory_of, any);
  const Row* closest = Least(rows, error_of, any);
  const bool fits_memory = budget.memory_bytes && Fits(budget.memory_bytes, least->memory_bytes());
  if (budget.memory_bytes && !fits_memory) {
    throw InvalidArgument("memory is " + BytesText(*budget.memory_bytes) + ", expected " +
                          BytesText(least->memory_bytes()) + " or more: " + NameOf(*least) +
                          " takes least at this length");
  }
  if (closest == nullptr) {
    throw InvalidArgument("error is " + NumberText(*budget.relative_error) +
                          ", expected none: no candidate has an error that is a number");
  }
  if (!Fits(budget.relative_error, closest->error.relative)) {
    throw InvalidArgument("error is " + NumberText(*budget.relative_error) + ", expected " +
                          Two(closest->error.relative) + " or more: " + NameOf(*closest) + " is closest");
  }
  const Row* small =
      Least(rows, memory_of, [&](const Row& row) { return Fits(budget.relative_error, row.error.relative); });
  const Row* near =
      Least(rows, error_of, [&](const Row& row) { return Fits(budget.memory_bytes, row.memory_bytes()); });
  std::string text = "error " + NumberText(*budget.relative_error) + " and memory " + BytesText(*budget.memory_bytes) +
                     " are met by no candidate together: raise the memory to " + BytesText(small->memory_bytes()) +
                     " for " + NameOf(*small);
  if (near != nullptr) text += ", or the error to " + Two(near->error.relative) + " for " + NameOf(*near);
  throw InvalidArgument(text);
}

// True if no other row is at least as fast and as accurate, and better in one of the two.
bool IsOnFrontier(const std::vector<Row>& rows, const Row& row) {
  if (std::isnan(row.error.relative)) return false;
  return std::ranges::none_of(rows, [&](const Row& other) {
    return other.seconds <= row.seconds && other.error.relative <= row.error.relative &&
           (other.seconds < row.seconds || other.error.relative < row.error.relative);
  });
}

// "the error of 0.01 and the memory of 2 GiB".
std::string TextOf(const Budget& budget) {
  std::string text;
  if (budget.relative_error) text = "the error of " + NumberText(*budget.relative_error);
  if (budget.memory_bytes) text += (text.empty() ? "" : " and ") + ("the memory of " + BytesText(*budget.memory_bytes));
  return text;
}

// For a row outside the budget: its excess.
std::string ExcessText(const Budget& budget, const Row& row) {
  std::string text;
  const auto add = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
  if (!Fits(budget.relative_error, row.error.relative)) {
    const double error = row.error.relative;
    add(std::isnan(error) ? "its error is no number"
                          : "error " + Two(error) + ", " + Times(error / *budget.relative_error) + " times the budget");
  }
  if (!Fits(budget.memory_bytes, row.memory_bytes())) {
    add("memory " + BytesText(row.memory_bytes()) + ", " + Times(row.memory_bytes() / *budget.memory_bytes) +
        " times the budget");
  }
  return text;
}

// For a row within the budget: its advantage over faster rows.
std::string BesideFaster(const std::vector<Row>& rows, size_t at) {
  const Row& row = rows[at];
  constexpr double kSame = 1.05;
  const double ratio = row.seconds / rows[0].seconds;
  std::string text = (ratio < kSame ? "about" : Times(ratio) + " times") + " the time of rank 1";
  if (row.frontier) return text + "; nothing faster is as close";
  const auto first = [&](const auto& condition) {
    size_t i = 0;
    while (i < at && !condition(rows[i])) ++i;
    return i;
  };
  const bool least = first([&](const Row& faster) { return faster.memory_bytes() <= row.memory_bytes(); }) == at;
  if (least) return text + "; nothing faster needs as little memory";
  const size_t closer = first([&](const Row& faster) { return faster.error.relative <= row.error.relative; });
  if (closer < at) text += "; rank " + std::to_string(closer + 1) + " is as close and faster";
  return text;
}

// Caveats that apply to a row.
std::string Caveats(const Row& row, bool is_causal) {
  std::string text;
  if (!row.is_softmax) text += "; another function than softmax attention, untrained here";
  if (row.is_causal && !is_causal) text += "; sees no later token";
  if (!row.is_causal && is_causal) text += "; sees later tokens";
  return text;
}

}  // namespace

std::string BytesText(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 || bytes >= 100 ? "%.0f" : "%.3g", bytes);
  return std::string(text) + " " + kUnits[unit];
}

void Rank(const Budget& budget, bool is_causal, std::vector<Row>& rows) {
  for (Row& row : rows) {
    row.within = ExcessOf(budget, row) <= 1;
    row.frontier = IsOnFrontier(rows, row);
  }
  if (std::ranges::none_of(rows, &Row::within)) FailNothingFits(budget, rows);
  std::ranges::stable_sort(rows, [&](const Row& a, const Row& b) {
    if (a.within != b.within) return a.within;
    if (a.within) return a.seconds < b.seconds;
    return ExcessOf(budget, a) < ExcessOf(budget, b);
  });
  const std::string limits = TextOf(budget);
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    row.rank = static_cast<int64_t>(i) + 1;
    if (!row.within) {
      row.reason = ExcessText(budget, row);
    } else if (i == 0) {
      row.reason = limits.empty() ? "fastest" : "fastest within " + limits;
    } else {
      row.reason = BesideFaster(rows, i);
    }
    row.reason += Caveats(row, is_causal);
  }
}

}  // namespace heed::advise
