// Least squares of unknowns that are not negative.
#ifndef HEED_ADVISE_LEAST_SQUARES_H_
#define HEED_ADVISE_LEAST_SQUARES_H_

#include <vector>

namespace heed::advise {

// The x >= 0 of the least |A x - b|, A being given by rows of one length, b by as many numbers as rows. Of columns that
// say the same, the first takes part.
//
// Source: Lawson, Hanson, "Solving least squares problems", 1974, chapter 23: unknowns enter one by one, the one first
// along which the sum of squares falls fastest, and leave where they would become negative.
std::vector<double> NonNegativeLeastSquares(const std::vector<std::vector<double>>& A, const std::vector<double>& b);

}  // namespace heed::advise

#endif  // HEED_ADVISE_LEAST_SQUARES_H_
