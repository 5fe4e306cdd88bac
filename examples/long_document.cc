// One long text, divided among the processes of mpiexec: two layers of gated linear attention and one of windowed
// attention see all of it, wherever it is held.
//
//   mpiexec -n 2 example_long_document [FILE | NUMBER OF TOKENS]
//
// Each byte is a token. Each rank has the vectors of its tokens alone; states and keys of the others come from
// heed_distributed. The checksum is over all bits of all outputs, and the same for every number of ranks: parts begin
// where a single process cuts the text too, at multiples of 4096 tokens.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "heed/distributed/distributed.h"
#include "heed/distributed/mpi.h"
#include "heed/heed.h"

namespace {

constexpr int64_t kHeads = 4, kChannels = 32, kWidth = kHeads * kChannels, kSegment = 4096, kWindow = 256;

// A hash of `number`, as a float in [-1, 1).
float Draw(uint64_t number) {
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9u;
  number = (number ^ (number >> 27)) * 0x94d049bb133111ebu;
  number ^= number >> 31;
  return static_cast<float>(static_cast<int64_t>(number >> 40) - (int64_t{1} << 23)) * 0x1p-23f;
}

std::string ReadText(const char* argument) {
  if (argument != nullptr && std::strspn(argument, "0123456789") != std::strlen(argument)) {
    std::ifstream file(argument, std::ios::binary);
    if (!file) throw heed::FileError(std::string(argument) + ": cannot be read");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string text(argument == nullptr ? 65536 : std::strtoul(argument, nullptr, 10), ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(97 + static_cast<int>(13 * (Draw(i) + 1)));
  return text;
}

// Vectors of tokens: [1, tokens, heads, channels].
struct Vectors {
  explicit Vectors(int64_t tokens) : count(tokens), values(static_cast<size_t>(tokens * kWidth)) {}
  heed::TensorView view() { return {values.data(), heed::DType::kF32, {1, count, kHeads, kChannels}}; }
  int64_t count;
  std::vector<float> values;
};

// x normalised per token, times a weight per channel that `layer` determines.
Vectors Projected(const Vectors& x, uint64_t layer) {
  Vectors y(x.count);
  for (int64_t t = 0; t < x.count; ++t) {
    const float* const row = x.values.data() + t * kWidth;
    float sum = 1e-6f;
    for (int64_t i = 0; i < kWidth; ++i) sum += row[i] * row[i];
    const float norm = std::sqrt(static_cast<float>(kWidth) / sum);
    for (int64_t i = 0; i < kWidth; ++i) {
      const int64_t from = (i + 37 * static_cast<int64_t>(layer)) % kWidth;  // channels mix by a rotation
      y.values[static_cast<size_t>(t * kWidth + i)] =
          row[from] * norm * Draw(layer * 1000003 + static_cast<uint64_t>(i));
    }
  }
  return y;
}

void AddTo(Vectors& x, const Vectors& y) {
  for (size_t i = 0; i < x.values.size(); ++i) x.values[i] += y.values[i];
}

void Run(const heed::distributed::Group& group, const std::string& text) {
  // Parts begin at multiples of a segment.
  const auto tokens = static_cast<int64_t>(text.size());
  const int64_t segments = (tokens + kSegment - 1) / kSegment;
  const auto first_of = [&](int64_t rank) { return std::min(tokens, segments * rank / group.size() * kSegment); };
  const int64_t begin = first_of(group.rank()), count = first_of(group.rank() + 1) - begin;

  const auto start = std::chrono::steady_clock::now();
  heed::Context ctx(1);
  Vectors x(count);
  for (int64_t t = 0; t < count; ++t) {
    const auto byte = static_cast<unsigned char>(text[static_cast<size_t>(begin + t)]);
    for (int64_t i = 0; i < kWidth; ++i) {
      x.values[static_cast<size_t>(t * kWidth + i)] = Draw(uint64_t{byte} * kWidth + static_cast<uint64_t>(i));
    }
  }
  for (uint64_t layer = 0; layer < 3; ++layer) {
    Vectors q = Projected(x, 4 * layer + 1), k = Projected(x, 4 * layer + 2), v = Projected(x, 4 * layer + 3), o(count);
    if (layer == 1) {
      heed::attention::Options options;
      options.causal = true;
      options.window.left = kWindow - 1;
      Forward(ctx, group, {q.view(), k.view(), v.view()}, options, {.o = o.view(), .lse = {}});
    } else {
      Vectors decay = Projected(x, 4 * layer + 4);
      for (float& g : decay.values) g = -0.05f * std::fabs(g);
      heed::gla::Inputs in;
      in.q = q.view();
      in.k = k.view();
      in.v = v.view();
      in.log_decay = decay.view();
      Forward(ctx, group, in, {}, {o.view(), {}}, {.segment = kSegment});
    }
    AddTo(x, o);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  // FNV-1a of each token's bits and its place; sums of them do not depend on who holds which.
  uint64_t checksum = 0;
  for (int64_t t = 0; t < count; ++t) {
    uint64_t hash = 14695981039346656037u ^ static_cast<uint64_t>(begin + t);
    const float* const row = x.values.data() + t * kWidth;
    for (int64_t i = 0; i < kWidth; ++i) {
      uint32_t bits;
      std::memcpy(&bits, row + i, sizeof(bits));
      hash = (hash ^ bits) * 1099511628211u;
    }
    checksum += hash;
  }
  uint64_t total = 0;
  MPI_Reduce(&checksum, &total, 1, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  double mine[2] = {seconds, static_cast<double>(usage.ru_maxrss) / 1024}, most[2];
  MPI_Reduce(mine, most, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (group.rank() != 0) return;
  std::printf("%lld tokens on %d ranks: %.2f s, %.0f MiB per rank at most, checksum %016llx\n",
              static_cast<long long>(tokens), group.size(), most[0], most[1], static_cast<unsigned long long>(total));
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    heed::distributed::MpiTransport mpi(MPI_COMM_WORLD);
    Run(heed::distributed::Group(mpi.transport()), ReadText(argc > 1 ? argv[1] : nullptr));
  } catch (const std::exception& error) {  // of a wrong file on all ranks; otherwise the others would wait
    std::fprintf(stderr, "%s\n", error.what());
    status = 1;
  }
  status == 0 ? MPI_Finalize() : MPI_Abort(MPI_COMM_WORLD, status);
  return status;
}
