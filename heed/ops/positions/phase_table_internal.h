// cos and sin of position * frequency, for many integer positions.
//
// A position is 32 high + low. The rows of the low parts are computed once, the
// row of a high part when it changes, and the angles are added by
//
//   cos(a + b) = cos a cos b - sin a sin b,  sin(a + b) = sin a cos b + cos a sin b
//
// so that consecutive positions cost a few calls of cos and sin per 32 rows. All in f64. A row depends on its position
// only, not on the others of a call. Error of an entry: |position * frequency| 2^-52 from the angle, plus 2^-51.
#ifndef HEED_OPS_POSITIONS_PHASE_TABLE_INTERNAL_H_
#define HEED_OPS_POSITIONS_PHASE_TABLE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace heed::positions {

inline constexpr int64_t kLowPositions = 32;

class PhaseTable {
 public:
  // Entries are `amplitude` times cos and sin.
  PhaseTable(std::vector<double> frequencies, double amplitude);

  const std::vector<double>& frequencies() const { return frequencies_; }
  size_t size() const { return frequencies_.size(); }

  // Must be called for every position before a PhaseRow moves to it.
  void Prepare(int64_t position);

 private:
  friend class PhaseRow;
  std::vector<double> frequencies_;
  double amplitude_;
  std::vector<double> low_;  // [kLowPositions][cos, sin][size]
  bool prepared_[kLowPositions] = {};
};

// One row of a table, for one thread.
class PhaseRow {
 public:
  static int64_t ScratchBytes(int64_t size) { return 4 * size * int64_t{sizeof(double)}; }

  PhaseRow(const PhaseTable& table, void* scratch);

  void MoveTo(int64_t position);
  const double* cos() const { return row_; }
  const double* sin() const { return row_ + table_->size(); }

 private:
  const PhaseTable* table_;
  double* high_;  // [cos, sin][size]
  double* row_;
  int64_t high_position_ = std::numeric_limits<int64_t>::min();  // none yet
};

}  // namespace heed::positions

#endif  // HEED_OPS_POSITIONS_PHASE_TABLE_INTERNAL_H_
