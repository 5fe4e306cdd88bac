// Calibrate: measures candidates on this machine once, for a cost model that predicts their cost at other sizes.
#ifndef HEED_ADVISE_CALIBRATE_H_
#define HEED_ADVISE_CALIBRATE_H_

#include <functional>
#include <string>
#include <vector>

#include "heed/advise/candidate.h"
#include "heed/advise/cost_model.h"

namespace heed::advise {

struct CalibrateOptions {
  int threads = 1;
  std::string isa;                           // limit of the SIMD target; empty: none
  std::vector<std::string> mechanisms = {};  // only these mechanisms, by name; empty: all
  double seconds = 90;                       // duration of all rounds after the first
  double most_seconds = 110;                 // time limit that ends even the first round, without the largest sizes
  // Called with the completed fraction, which never decreases, and the next step.
  std::function<void(double, const std::string&)> progress = {};
};

// One timed call.
struct Measured {
  std::string what;  // "gla prefill f32 B1_T256_H4_D64"
  bool held_out;     // excluded from the fit
  std::vector<Part> parts;
  std::vector<double> seconds;  // of each run
};

// A call excluded from the fit, and its prediction.
struct HeldOut {
  std::string what;
  double predicted = 0, measured = 0;  // seconds
};

struct Calibration {
  CostModel model;
  std::vector<HeldOut> held_out;
  int64_t calls = 0;  // timed calls, including these
};

// Fits a cost model to measurements: per kind of work over the parts of all calls that are not held out, with the
// prediction errors of the others.
Calibration FitOf(const std::vector<Measured>& measured);

// Times every candidate for every purpose at sizes that vary lengths, heads and channels, on generated tensors, and at
// further sizes that are held out. Each round runs all calls in turn, so that a disturbance affects a call in one round
// only; rounds continue as long as there is time, and the best time of each call counts.
Calibration Calibrate(const CalibrateOptions& options);

}  // namespace heed::advise

#endif  // HEED_ADVISE_CALIBRATE_H_
