// Ranks of mpiexec, over heed/distributed/mpi.h and what an installed heed offers: each checks its part of the results
// against the call of one process, and messages that are divided. The last line is `ok`, from rank 0.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "heed/distributed/distributed.h"
#include "heed/distributed/mpi.h"
#include "heed/heed.h"

namespace {

using heed::DType;
using heed::TensorView;
namespace distributed = heed::distributed;

constexpr int64_t B = 2, T = 300, H = 4, K = 16;
int failures = 0;

void Expect(bool good, const std::string& what, int rank) {
  if (good) return;
  ++failures;
  std::fprintf(stderr, "rank %d: %s\n", rank, what.c_str());
}

// A tensor [B, T, H, K] or shorter, with values that every rank draws alike.
struct Array {
  explicit Array(std::vector<int64_t> of, double low = 0, double high = 0, uint64_t seed = 0) : sizes(std::move(of)) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    values.resize(static_cast<size_t>(count));
    uint64_t state = seed;
    for (double& x : values) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      x = low + (high - low) * static_cast<double>(state >> 11) * 0x1p-53;
    }
  }
  TensorView view() { return {values.data(), DType::kF64, sizes}; }
  TensorView Tokens(int64_t begin, int64_t end) { return view().Slice(1, begin, end); }
  std::vector<int64_t> sizes;
  std::vector<double> values;
};

// The largest difference of tokens [begin, end) of arrays [sequences, tokens, H, K], over the largest element of b.
double Difference(const Array& a, const Array& b, int64_t begin, int64_t end) {
  double most = 1e-30, difference = 0;
  const int64_t row = a.sizes[2] * a.sizes[3];
  for (int64_t i = 0; i < static_cast<int64_t>(a.values.size()); ++i) {
    const int64_t token = i / row % a.sizes[1];
    if (token < begin || token >= end) continue;
    most = std::max(most, std::fabs(b.values[static_cast<size_t>(i)]));
    difference = std::max(difference, std::fabs(a.values[static_cast<size_t>(i)] - b.values[static_cast<size_t>(i)]));
  }
  return difference / most;
}

void TestMechanisms(const distributed::Group& group, int64_t begin, int64_t end) {
  heed::Context ctx(1);
  Array q({B, T, H, K}, -1, 1, 1), k({B, T, H, K}, -.3, .3, 2), v({B, T, H, K}, -1, 1, 3), g({B, T, H, K}, -.2, 0, 4);
  Array d_o({B, T, H, K}, -1, 1, 5);
  for (const bool relay : {false, true}) {
    const distributed::SequenceOptions how = {.segment = 64, .relay = relay};
    Array o({B, T, H, K}), expected({B, T, H, K}), dk({B, T, H, K}), expected_dk({B, T, H, K});
    heed::gla::Forward(ctx, {{q.view(), k.view(), v.view(), g.view()}, {}}, {}, {expected.view(), {}});
    heed::gla::Inputs in;
    in.q = q.Tokens(begin, end), in.k = k.Tokens(begin, end), in.v = v.Tokens(begin, end);
    in.log_decay = g.Tokens(begin, end);
    Forward(ctx, group, in, {}, {o.Tokens(begin, end), {}}, how);
    Expect(Difference(o, expected, begin, end) < 1e-12, "gla", group.rank());
    heed::gla::BackwardInputs whole;
    whole.q = q.view(), whole.k = k.view(), whole.v = v.view(), whole.log_decay = g.view(), whole.d_o = d_o.view();
    heed::gla::Gradients to, to_here;
    to.k = expected_dk.view(), to_here.k = dk.Tokens(begin, end);
    heed::gla::Backward(ctx, whole, {}, to);
    heed::gla::BackwardInputs here;
    static_cast<heed::gla::Inputs&>(here) = in;
    here.d_o = d_o.Tokens(begin, end);
    Backward(ctx, group, here, {}, to_here, how);
    Expect(Difference(dk, expected_dk, begin, end) < 1e-12, "gradients of gla", group.rank());
  }
}

void TestAttention(const distributed::Group& group, int64_t begin, int64_t end) {
  heed::Context ctx(1);
  Array q({B, T, H, K}, -1, 1, 6), k({B, T, H, K}, -1, 1, 7), v({B, T, H, K}, -1, 1, 8), d_o({B, T, H, K}, -1, 1, 9);
  heed::attention::Options options;
  options.causal = true;
  Array o({B, T, H, K}), lse({B, H, T, 1}), dk({B, T, H, K});
  const TensorView of_lse(lse.values.data(), DType::kF64, {B, H, T});
  heed::attention::Forward(ctx, {q.view(), k.view(), v.view()}, options, {o.view(), of_lse});
  heed::attention::Gradients gradients;
  gradients.dk = dk.view();
  heed::attention::Backward(ctx, {q.view(), k.view(), v.view(), o.view(), of_lse, d_o.view(), {}}, options, gradients);
  using enum distributed::Method;
  for (const auto method : {kAuto, kAllGather, kRing}) {
    Array mine({B, T, H, K}), my_lse({B, H, T, 1}), my_dk({B, T, H, K});
    const TensorView my_lse_view = TensorView(my_lse.values.data(), DType::kF64, {B, H, T}).Slice(2, begin, end);
    const heed::attention::Inputs in = {q.Tokens(begin, end), k.Tokens(begin, end), v.Tokens(begin, end)};
    Forward(ctx, group, in, options, {mine.Tokens(begin, end), my_lse_view}, {.method = method});
    const double difference = Difference(mine, o, begin, end);
    if (method == kRing) {
      Expect(difference < 1e-12, "attention on a ring", group.rank());
    } else {
      Expect(difference == 0, "attention has the bits of one process", group.rank());
    }
    heed::attention::Gradients to;
    to.dk = my_dk.Tokens(begin, end);
    Backward(ctx, group, {in.q, in.k, in.v, mine.Tokens(begin, end), my_lse_view, d_o.Tokens(begin, end), {}}, options,
             to, {.method = method});
    Expect(Difference(my_dk, dk, begin, end) < 1e-12, "gradients of attention", group.rank());
  }
}

// Sequences that ranks cut anywhere, one of them empty.
void TestPackedSequences(const distributed::Group& group, int64_t begin, int64_t end) {
  heed::Context ctx(1);
  const std::vector<int64_t> sizes = {1, T, H, K};
  Array q(sizes, -1, 1, 11), k(sizes, -1, 1, 12), v(sizes, -1, 1, 13), d_o(sizes, -1, 1, 14);
  const int32_t offsets[] = {0, 90, 90, 250, T};
  heed::attention::Options options;
  options.causal = true;
  options.window.left = 70;
  options.cu_seqlens_q = heed::ConstTensorView(offsets, DType::kI32, {5});
  Array o(sizes), lse({1, H, T, 1}), dv(sizes);
  const auto packed = [](Array& x, int64_t first, int64_t last) {
    return TensorView(x.values.data(), DType::kF64, {T, H, K}).Slice(0, first, last);
  };
  const auto rows_of = [](Array& x, int64_t first, int64_t last) {
    return TensorView(x.values.data(), DType::kF64, {H, T}).Slice(1, first, last);
  };
  const auto inputs = [&](int64_t first, int64_t last) {
    return heed::attention::Inputs{packed(q, first, last), packed(k, first, last), packed(v, first, last)};
  };
  const heed::attention::Inputs whole = inputs(0, T), in = inputs(begin, end);
  heed::attention::Forward(ctx, whole, options, {packed(o, 0, T), rows_of(lse, 0, T)});
  heed::attention::Gradients gradients;
  gradients.dv = packed(dv, 0, T);
  heed::attention::Backward(
      ctx, {whole.q, whole.k, whole.v, packed(o, 0, T), rows_of(lse, 0, T), packed(d_o, 0, T), {}}, options, gradients);
  using enum distributed::Method;
  for (const auto method : {kAuto, kAllGather, kRing}) {
    Array mine(sizes), my_lse({1, H, T, 1}), my_dv(sizes);
    const TensorView my_o = packed(mine, begin, end), my_rows = rows_of(my_lse, begin, end);
    Forward(ctx, group, in, options, {my_o, my_rows}, {.method = method});
    const double difference = Difference(mine, o, begin, end);
    Expect(method == kRing ? difference < 1e-12 : difference == 0, "packed sequences", group.rank());
    heed::attention::Gradients to;
    to.dv = packed(my_dv, begin, end);
    Backward(ctx, group, {in.q, in.k, in.v, my_o, my_rows, packed(d_o, begin, end), {}}, options, to,
             {.method = method});
    Expect(Difference(my_dv, dv, begin, end) < 1e-12, "gradients of packed sequences", group.rank());
  }
}

// Each rank's cache has the keys of its tokens; the rows are the last tokens.
void TestCaches(const distributed::Group& group, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 5;
  heed::Context ctx(1);
  Array q({B, kRows, H, K}, -1, 1, 15), k({B, T, H, K}, -1, 1, 16), v({B, T, H, K}, -1, 1, 17);
  const auto append = [&](heed::KVCache& cache, int64_t first, int64_t last) {
    const int64_t rows = std::clamp(T - kRows, first, last);
    if (rows > first) cache.Append(k.Tokens(first, rows), v.Tokens(first, rows));
    if (last > rows) cache.Append(k.Tokens(rows, last), v.Tokens(rows, last));
  };
  const heed::KVCache::Options sizes{.batch = B, .heads = H, .dim = K, .dtype = DType::kF64};
  heed::KVCache whole(sizes), own(sizes);
  append(whole, 0, T);
  append(own, begin, end);
  heed::attention::Options options;
  options.causal = true;
  Array expected({B, kRows, H, K}), o({B, kRows, H, K});
  heed::attention::Attend(ctx, whole.view(), q.view(), options, {expected.view(), {}});
  Attend(ctx, group, own.view(), q.view(), options, {o.view(), {}});
  Expect(Difference(o, expected, 0, kRows) < 1e-13, "caches", group.rank());
}

// A message that moves while the rank does something else, of more bytes than one message of MPI may have.
void TestStartedMessages(const distributed::Group& group) {
  const distributed::Transport& t = group.transport();
  const int to = (group.rank() + 1) % group.size(), from = (group.rank() + group.size() - 1) % group.size();
  std::vector<int32_t> sent(2501, group.rank()), received(2501, -1), later(1, -1);
  const int32_t last = 1000 + group.rank();
  void* const first = t.start(t.self, sent.data(), 2501 * 4, to, received.data(), 2501 * 4, from);
  void* const second = t.start(t.self, &last, 4, to, later.data(), 4, from);
  void* const empty = t.start(t.self, nullptr, 0, to, nullptr, 0, from);
  for (void* const started : {empty, second, first}) t.finish(t.self, started);
  Expect(std::ranges::count(received, from) == 2501, "a started message", group.rank());
  Expect(later[0] == 1000 + from, "messages arrive in the order of their starts", group.rank());
}

void TestErrors(const distributed::Group& group) {
  const distributed::Transport& t = group.transport();
  try {
    char byte = 0;
    t.broadcast(t.self, &byte, 1, group.size() + 7);
    Expect(false, "no error for a rank that does not exist", group.rank());
  } catch (const distributed::MpiError& error) {
    Expect(std::string(error.what()).find("MPI_Bcast: ") == 0, error.what(), group.rank());
  }
  if (group.size() == 1) return;
  Array x({B, T, H, K}, -1, 1, 10), o({B, T, H, K});
  heed::Context ctx(1);
  heed::gla::Inputs in;
  in.q = in.k = in.v = x.view();
  in.log_decay = group.rank() == 1 ? x.Tokens(0, 7) : x.view();
  try {
    Forward(ctx, group, in, {}, {o.view(), {}});
    Expect(false, "no error for arguments that rank 1 refuses", group.rank());
  } catch (const heed::InvalidArgument& error) {
    Expect(std::string(error.what()).find("log_decay") != std::string::npos, error.what(), group.rank());
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    for (const int64_t max_bytes : {int64_t{1} << 30, int64_t{1000}}) {  // the second one divides messages
      const MPI_Comm world = distributed::MpiTransport::OfFortran(MPI_Comm_c2f(MPI_COMM_WORLD));
      distributed::MpiTransport mpi(world, max_bytes);
      const distributed::Group group(mpi.transport());
      // Uneven parts, which do not begin at multiples of the segments; of three or more ranks one has no tokens.
      const int size = group.size();
      const auto first_of = [&](int r) {
        return r == 0 ? 0 : r == size ? T : T * (r / 2 * 2) / size + (size == 2 ? 107 : 0);
      };
      const int64_t begin = first_of(rank), end = first_of(rank + 1);
      TestMechanisms(group, begin, end);
      TestAttention(group, begin, end);
      TestPackedSequences(group, begin, end);
      TestCaches(group, begin, end);
      TestStartedMessages(group);
      TestErrors(group);
    }
  } catch (const std::exception& error) {
    Expect(false, error.what(), rank);
  }
  int all = 0;
  MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0 && all == 0) std::printf("ok\n");
  MPI_Finalize();
  return all == 0 ? 0 : 1;
}
