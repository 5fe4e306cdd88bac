// cos and sin of position * frequency, for many integer positions.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "heed/ops/positions/phase_table_internal.h"

namespace heed::positions {
namespace {

// [cos, sin] of one position. The angle is one f64 product; the library's functions reduce it exactly.
void Fill(const std::vector<double>& frequencies, int64_t position, double amplitude, double* row) {
  const size_t n = frequencies.size();
  for (size_t i = 0; i < n; ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    row[i] = amplitude * std::cos(angle);
    row[n + i] = amplitude * std::sin(angle);
  }
}

// Floor and remainder, for negative positions too.
int64_t Low(int64_t position) { return position & (kLowPositions - 1); }
int64_t High(int64_t position) { return position - Low(position); }

}  // namespace

PhaseTable::PhaseTable(std::vector<double> frequencies, double amplitude)
    : frequencies_(std::move(frequencies)), amplitude_(amplitude),
      low_(2 * frequencies_.size() * static_cast<size_t>(kLowPositions)) {}

void PhaseTable::Prepare(int64_t position) {
  const auto low = static_cast<size_t>(Low(position));
  if (prepared_[low]) return;
  prepared_[low] = true;
  Fill(frequencies_, Low(position), 1, low_.data() + low * 2 * size());
}

PhaseRow::PhaseRow(const PhaseTable& table, void* scratch)
    : table_(&table), high_(static_cast<double*>(scratch)), row_(high_ + 2 * table.size()) {}

void PhaseRow::MoveTo(int64_t position) {
  const size_t n = table_->size();
  if (High(position) != high_position_) {
    high_position_ = High(position);
    Fill(table_->frequencies_, high_position_, table_->amplitude_, high_);
  }
  const double* low = table_->low_.data() + static_cast<size_t>(Low(position)) * 2 * n;
  for (size_t i = 0; i < n; ++i) {
    const double c = high_[i], s = high_[n + i];
    row_[i] = c * low[i] - s * low[n + i];
    row_[n + i] = s * low[i] + c * low[n + i];
  }
}

}  // namespace heed::positions
