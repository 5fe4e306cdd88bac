// Outputs of every mechanism have the bits that tests/golden stores: on each SIMD target, in each dtype and pass.
//
// tests/golden/TARGET.txt has a line per mechanism and pass: the first digits of the SHA-256 of its outputs in f64,
// f32, bf16 and f16, and "-" for a dtype that the target has no kernels for. Inputs are random numbers, some of which
// go through functions of the C library. Its functions differ between versions, so that each file has a digest of these
// too, and a machine with another one skips the test.
//
// A change that is meant to change bits writes the files anew, one per target that the CPU has, and beside each the
// outputs themselves, which tools/compare_golden.py compares:
//   HEED_TEST_WRITE_GOLDEN=FOLDER build/release/bin/golden_test
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/io/safetensors.h"
#include "heed/pages/sha256.h"
#include "tests/environment.h"

namespace heed {

void PrintTo(const OpEntry& op, std::ostream* os) { *os << op.name; }

namespace {

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
constexpr Sizes kSizes[] = {
    {1, 70, 300, 4, 2, 40, 24},   // no multiples of vectors
    {1, 200, 260, 2, 1, 64, 64},  // chunks, and several tiles of keys
};

const char* FolderToWrite() { return std::getenv("HEED_TEST_WRITE_GOLDEN"); }

std::string Digest(std::span<const uint8_t> bytes) { return pages::Sha256(bytes).substr(0, 16); }

template <class T>
std::span<const uint8_t> BytesOf(const std::vector<T>& numbers) {
  return {reinterpret_cast<const uint8_t*>(numbers.data()), numbers.size() * sizeof(T)};
}

// A digest of the functions that make inputs.
const std::string& DigestOfCLibrary() {
  static const std::string digest = [] {
    Random random(1);
    std::vector<double> values;
    for (int i = 0; i < 10000; ++i) {
      const double x = random.Uniform(-8, 8), positive = random.Uniform();
      for (const double y : {std::exp(x), std::expm1(x), std::log(positive), std::log1p(positive), std::cos(x)}) {
        values.push_back(y);
      }
    }
    return Digest(BytesOf(values));
  }();
  return digest;
}

template <class T, class U>
bool Has(const std::vector<T>& list, const U& x) {
  return std::find(list.begin(), list.end(), x) != list.end();
}

struct Output {
  std::string name;
  Buffer values;
};

std::vector<Output> Compute(const OpEntry& op, DType dtype, const std::string& pass, const std::string& target) {
  const ScopedIsa cap(target.c_str());  // of contexts that make inputs too
  Context ctx(2);
  std::vector<Output> all;
  for (const Sizes& sizes : kSizes) {
    for (const std::string variant : {"", "causal"}) {
      if (!variant.empty() && !Has(op.variants, variant)) continue;
      const Case c = op.make_case({.sizes = sizes, .dtype = dtype, .seed = 42, .pass = pass, .variant = variant});
      const std::string problem = op.name + " " + pass + " " + Name(dtype) + " " + ToString(sizes) + variant;
      std::vector<TensorView> views;
      for (const OutputSpec& spec : c.outputs) {
        const std::string name =
            op.name + " " + pass + " " + Name(dtype) + " " + ToString(sizes) + variant + " " + spec.name;
        views.push_back(all.emplace_back(name, Buffer(spec.dtype, spec.sizes)).values.view());
      }
      c.run(ctx, views);
    }
  }
  return all;
}

std::string DigestOf(const std::vector<Output>& outputs) {
  std::vector<uint8_t> bytes;
  for (const Output& output : outputs) {
    const std::span<const uint8_t> more = output.values.bytes();
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  return Digest(bytes);
}

// One file. Its lines are digests by "mechanism pass", in the order of kDTypes.
struct Golden {
  std::string c_library;
  std::map<std::string, std::vector<std::string>> digests;
};

std::optional<Golden> Read(const std::string& target) {
  std::ifstream file("tests/golden/" + target + ".txt");
  if (!file) return std::nullopt;
  Golden golden;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, pass;
    words >> name >> pass;
    if (name == "c_library") {
      golden.c_library = pass;
      continue;
    }
    std::vector<std::string>& digests = golden.digests[name + " " + pass];
    for (std::string digest; words >> digest;) digests.push_back(digest);
  }
  return golden;
}

// A target's file as it will be written.
struct Written {
  std::string lines;
  std::vector<Output> outputs;
};
std::map<std::string, Written>& ToWrite() {
  static std::map<std::string, Written> written;
  return written;
}

class WriteFiles : public testing::Environment {
 public:
  void TearDown() override {
    for (const auto& [target, written] : ToWrite()) {
      const std::string path = (std::filesystem::path(FolderToWrite()) / target).string();
      std::ofstream file(path + ".txt");
      file << "c_library " << DigestOfCLibrary() << "\n" << written.lines;
      ASSERT_TRUE(file.flush()) << path;
      std::vector<NamedTensor> tensors;
      for (const Output& output : written.outputs) tensors.push_back({output.name, output.values.view()});
      WriteSafetensors(path + ".safetensors", tensors);
    }
  }
};
const testing::Environment* const write_files = testing::AddGlobalTestEnvironment(new WriteFiles);

class GoldenOutputs : public testing::TestWithParam<OpEntry> {
 protected:
  // The digests of a pass on each target, in the order of kDTypes.
  static std::map<std::string, std::vector<std::string>> DigestsOf(const std::string& pass) {
    std::map<std::string, std::vector<std::string>> digests;
    for (size_t i = 0; i < std::size(kDTypes); ++i) {
      if (!Has(GetParam().dtypes, kDTypes[i])) continue;
      const std::vector<std::string> targets = AvailableTargets(kDTypes[i]);
      for (const std::string& target : targets) {
        if (target == "tiles" && !Has(targets, "AVX3")) continue;  // the vectors beside AMX are others
        std::vector<Output> outputs = Compute(GetParam(), kDTypes[i], pass, target);
        digests[target].resize(std::size(kDTypes), "-");
        digests[target][i] = DigestOf(outputs);
        if (FolderToWrite() == nullptr) continue;
        std::move(outputs.begin(), outputs.end(), std::back_inserter(ToWrite()[target].outputs));
      }
    }
    return digests;
  }
};

TEST_P(GoldenOutputs, HaveTheStoredBits) {
  std::set<std::string> compared, others;
  for (const std::string& pass : GetParam().passes) {
    const std::string key = GetParam().name + " " + pass;
    for (const auto& [target, digests] : DigestsOf(pass)) {
      if (FolderToWrite() != nullptr) {
        std::string& lines = ToWrite()[target].lines;
        lines += key;
        for (const std::string& digest : digests) lines += " " + digest;
        lines += "\n";
        continue;
      }
      const std::optional<Golden> golden = Read(target);
      if (!golden || golden->c_library != DigestOfCLibrary()) {
        others.insert(target);
        continue;
      }
      compared.insert(target);
      const auto found = golden->digests.find(key);
      ASSERT_NE(found, golden->digests.end()) << "tests/golden/" << target << ".txt has no line of " << key;
      EXPECT_EQ(digests, found->second) << key << " in f64, f32, bf16, f16 on " << target;
    }
  }
  if (compared.empty() && FolderToWrite() == nullptr) {
    GTEST_SKIP() << "no golden outputs of these targets with this C library: " << testing::PrintToString(others);
  }
}

std::string NameOf(const testing::TestParamInfo<OpEntry>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(AllOps, GoldenOutputs, testing::ValuesIn(AllOps()), NameOf);

}  // namespace
}  // namespace heed
