// Calibrate: measures candidates on this machine once, so that a cost model can tell what they cost at other sizes.
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
  std::string isa;                           // cap of the SIMD target; empty: none
  std::vector<std::string> mechanisms = {};  // only these, by name; empty: all
  double seconds = 90;                       // that rounds go on for, the first one aside
  double most_seconds = 110;                 // after which even the first one ends, with the largest sizes left out
  // Called with the share that is done, which never falls, and what comes.
  std::function<void(double, const std::string&)> progress = {};
};

// One call that was timed.
struct Measured {
  std::string what;  // "gla prefill f32 B1_T256_H4_D64"
  bool held_out;     // not fitted
  std::vector<Part> parts;
  std::vector<double> seconds;  // of each
};

// A call that was not fitted beside its prediction.
struct HeldOut {
  std::string what;
  double predicted = 0, measured = 0;  // seconds
};

struct Calibration {
  CostModel model;
  std::vector<HeldOut> held_out;
  int64_t calls = 0;  // that were timed, these included
};

// The fits of these: of each kind of work the parts of all calls that are not held out, and the errors of those that
// are.
Calibration FitOf(const std::vector<Measured>& measured);

// Times every candidate for every purpose at sizes that spread over lengths, heads and channels, on numbers of its own,
// and at others that are held out. A round takes every one of them in turn, so that a busy second spoils a call in one
// round alone; rounds go on as long as there is time, and the best time of each call counts.
Calibration Calibrate(const CalibrateOptions& options);

}  // namespace heed::advise

#endif  // HEED_ADVISE_CALIBRATE_H_
