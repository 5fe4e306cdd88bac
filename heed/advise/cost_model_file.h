// A cost model as a file of JSON: one object
//
//   heed_cost_model  1
//   cpu, version, target  texts: the machine of the measurements, and the version of heed
//   threads  integer     seconds  number: duration of the measurements
//   errors  list of numbers: |predicted - measured| / measured of held-out calls
//   fits  list of objects: work, dtype ("f32", "bf16", ...), threads, and seconds, an object of numbers by unit
#ifndef HEED_ADVISE_COST_MODEL_FILE_H_
#define HEED_ADVISE_COST_MODEL_FILE_H_

#include <string>
#include <string_view>

#include "heed/advise/cost_model.h"

namespace heed::advise {

// The file's name in a cache folder, from the CPU, the SIMD target, threads and version, each of which has its own
// model.
std::string ModelFileName(const std::string& cpu, const std::string& target, int threads, const std::string& version);

// Reads a file of SaveModel(). Throws FileError, "PATH: got, expected", for any other input, including malicious ones:
// larger than 4 MiB, other JSON, texts of more than 200 bytes or not in printable ASCII, numbers that are not finite or
// are negative.
CostModel LoadModel(const std::string& path);
CostModel ParseModel(const std::string& path, std::string_view text);

// Throws FileError with a remedy unless the model is for this CPU, SIMD target, number of threads and version.
void CheckFits(const std::string& path, const CostModel& model, const std::string& cpu, const std::string& target,
               int threads, const std::string& version);

// Writes the file atomically, in a folder that is created if missing. Throws FileError.
void SaveModel(const std::string& path, const CostModel& model);

}  // namespace heed::advise

#endif  // HEED_ADVISE_COST_MODEL_FILE_H_
