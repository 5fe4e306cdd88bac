// A cost model as a file of JSON: one object
//
//   heed_cost_model  1
//   cpu, version, target  texts: where it was measured, and by which heed
//   threads  integer     seconds  number: that measuring took
//   errors  list of numbers: |predicted - measured| / measured of calls that were not fitted
//   fits  list of objects: work, dtype ("f32", "bf16", ...), threads, and seconds, an object of numbers by unit
#ifndef HEED_ADVISE_COST_MODEL_FILE_H_
#define HEED_ADVISE_COST_MODEL_FILE_H_

#include <string>
#include <string_view>

#include "heed/advise/cost_model.h"

namespace heed::advise {

// The file's name in a folder of caches: it says the CPU, the SIMD target, threads and version, of which each has a
// model of its own.
std::string ModelFileName(const std::string& cpu, const std::string& target, int threads, const std::string& version);

// Reads what SaveModel() wrote. Throws FileError, "PATH: got, expected", for anything else, however hostile: larger
// than 4 MiB, no such JSON, texts of more than 200 bytes or other than printable ASCII, numbers that are not finite or
// are negative.
CostModel LoadModel(const std::string& path);
CostModel ParseModel(const std::string& path, std::string_view text);

// Throws FileError that says what to do unless the model is of this CPU, SIMD target, number of threads and version.
void CheckFits(const std::string& path, const CostModel& model, const std::string& cpu, const std::string& target,
               int threads, const std::string& version);

// The file appears complete, in a folder that is made if it is missing, or not at all. Throws FileError.
void SaveModel(const std::string& path, const CostModel& model);

}  // namespace heed::advise

#endif  // HEED_ADVISE_COST_MODEL_FILE_H_
