// Any bytes as a command line, one argument per line: every option that the verbs share is parsed, and used as far as
// possible without a file.
#include <cstdint>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"

#include "cli/options.h"
#include "heed/core/error.h"
#include "heed/harness/tensor_file.h"
#include "heed/io/safetensors_header_internal.h"
#include "tests/fuzz/input.h"

namespace heed::fuzz {
namespace {

using cli::MachineOptions;
using cli::MathOptions;
using cli::TensorOptions;

// Four query heads over two key heads, two layers, all zeros.
std::string SmallFile() {
  std::vector<SafetensorsFile::Entry> entries;
  int64_t end = 0;
  for (const char* name : {"a.0.k", "a.0.q", "a.0.v", "a.1.k", "a.1.q", "a.1.v"}) {
    const int64_t heads = std::string_view(name).ends_with("q") ? 4 : 2;
    entries.push_back({name, "F32", {1, heads, 1}, end, 4 * heads});
    end += 4 * heads;
  }
  return MakeSafetensorsHeader(entries, {{"a.1.window", "3,0"}}) + std::string(static_cast<size_t>(end), '\0');
}

std::vector<std::string> Lines(std::span<const uint8_t> bytes) {
  std::vector<std::string> lines;
  std::string line;
  for (const uint8_t byte : bytes) {
    if (byte == '\n') {
      lines.push_back(std::move(line));
      line.clear();
    } else {
      line += static_cast<char>(byte);
    }
  }
  lines.push_back(std::move(line));
  return {lines.rbegin(), lines.rend()};  // reversed, because CLI11 takes a vector in that order
}

struct CommandLine {
  CommandLine() {
    machine.Register(app);
    tensors.Register(app);
    math.Register(app);
    cli::AddText(app, "--mechanisms", mechanisms, "names", "A,B");
  }

  void Run(std::span<const uint8_t> bytes) {
    machine = MachineOptions();
    tensors = TensorOptions();
    math = MathOptions();
    mechanisms.clear();
    try {
      app.parse(Lines(bytes));
      math.Check();
      const int threads = machine.Threads();
      Require(threads >= 1 && threads <= 4096, "threads are out of range");
      machine.Apply(ctx);
      if (!mechanisms.empty()) cli::ChooseOps(cli::SplitAtCommas(mechanisms));
      TensorChoice choice{tensors.layer, tensors.heads, {}};
      if (!tensors.dtype.empty()) choice.dtype = cli::ParseDType(tensors.dtype);
      const TensorSet set = LoadTensors("F", {reinterpret_cast<const uint8_t*>(file.data()), file.size()}, choice);
      Require(tensors.heads.empty() || set.q.size(2) == set.k.size(2), "chosen heads come without their key heads");
      std::vector<std::string> notes;
      math.Resolve(set, notes);
    } catch (const CLI::Error&) {
    } catch (const cli::UsageError&) {
    } catch (const InvalidArgument&) {
    }
  }

  const std::string file = SmallFile();
  CLI::App app;
  MachineOptions machine;
  TensorOptions tensors;
  MathOptions math;
  std::string mechanisms;
  Context ctx{1};
};

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static heed::fuzz::CommandLine& command_line = *new heed::fuzz::CommandLine;
  command_line.Run({data, size});
  return 0;
}
