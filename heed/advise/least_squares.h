// Least squares with non-negative unknowns.
#ifndef HEED_ADVISE_LEAST_SQUARES_H_
#define HEED_ADVISE_LEAST_SQUARES_H_

#include <vector>

namespace heed::advise {

// Returns the x >= 0 that minimises |A x - b|, where A has rows of equal length and b one number per row. Among
// linearly dependent columns, the first is used.
//
// Source: Lawson, Hanson, "Solving least squares problems", 1974, chapter 23: unknowns enter one by one, in order of
// the steepest descent of the sum of squares, and leave when they would become negative.
std::vector<double> NonNegativeLeastSquares(const std::vector<std::vector<double>>& A, const std::vector<double>& b);

}  // namespace heed::advise

#endif  // HEED_ADVISE_LEAST_SQUARES_H_
