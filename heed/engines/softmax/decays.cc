// Fills the tables of sums of log decays: one pass over them, in parallel over heads.
#include "heed/engines/softmax/decays.h"

#include <algorithm>
#include <cstddef>

#include "heed/core/carver.h"

namespace heed::softmax {

double LogDecay(const Problem& p, const Sequence& s, int64_t head, int64_t key) {
  const Rows& rows = p.log_decay;
  if (s.pages == nullptr) {
    return LoadAsDouble(p.log_decay_dtype, rows.data,
                        s.batch * rows.batch_stride + (s.first_k + key) * rows.token_stride + head * rows.head_stride);
  }
  if (s.tail != nullptr && key >= s.tail_begin) key = s.tail[key - s.tail_begin];
  return LoadAsDouble(p.log_decay_dtype, s.pages[key / p.page_tokens] + rows.page_offset,
                      key % p.page_tokens * rows.token_stride + head / p.group() * rows.head_stride + head % p.group());
}

void LayOutDecays(Problem* p) {
  p->decays.entries = 0;
  for (Sequence& s : p->sequences) {
    s.first_decay = p->decays.entries;
    if (p->forgets) p->decays.entries += p->query_heads * DecayEntries(s);
  }
}

int64_t DecayBytes(const Problem& p) {
  DecayTables tables = p.decays;
  Carver carver(nullptr);
  carver.Next(tables.in_tile, tables.entries);
  carver.Next(tables.of_tiles, tables.entries / kTileKeys);
  return carver.bytes();
}

void SumDecays(Context& ctx, Problem* p) {
  if (!p->forgets) return;
  ctx.ReserveTables(DecayBytes(*p));
  Carver carver(ctx.Tables());
  double* in_tile;
  WideSum* of_tiles;
  carver.Next(in_tile, p->decays.entries);
  carver.Next(of_tiles, p->decays.entries / kTileKeys);
  p->decays.in_tile = in_tile;
  p->decays.of_tiles = of_tiles;
  const auto sequences = static_cast<int64_t>(p->sequences.size());
  ctx.ParallelFor(sequences * p->query_heads, [&](int64_t task, int) {
    const Sequence& s = p->sequences[static_cast<size_t>(task / p->query_heads)];
    const int64_t head = task % p->query_heads;
    double* sums = in_tile + FirstDecay(s, head);
    WideSum* total = of_tiles + FirstDecay(s, head) / kTileKeys;
    WideSum sum;  // the log decay of the first key precedes every key and is left out
    for (int64_t begin = s.key_begin; begin < s.key_end; begin += kTileKeys) {
      double decays[kTileKeys] = {};
      const int64_t count = std::min(kTileKeys, s.key_end - begin);
      for (int64_t i = begin == s.key_begin ? 1 : 0; i < count; ++i) {
        decays[i] = LogDecay(*p, s, head, begin + i);
        sum.Add(decays[i]);
      }
      double after = 0;
      for (int64_t i = kTileKeys; i-- > 0;) {
        sums[i] = after;
        after += decays[i];
      }
      sums += kTileKeys;
      *total++ = sum;
    }
  });
}

WideSum SumUntil(const Problem& p, const Sequence& s, int64_t head, int64_t end) {
  const int64_t first = FirstDecay(s, head) / kTileKeys;
  const int64_t tiles = std::min(end - s.key_begin + kTileKeys - 1, DecayEntries(s)) / kTileKeys;
  return tiles > 0 ? p.decays.of_tiles[first + tiles - 1] : WideSum();
}

}  // namespace heed::softmax
