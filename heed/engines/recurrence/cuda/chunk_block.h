// Chunked recurrences on a GPU: a block holds 64 columns of a head's state in registers and sweeps chunks of 16 tokens.
//
// Let G_t be the sum of log decays from the chunk's first token to token t, and L its last token.
//
//   o_t = scale (exp(G_t) S^T q_t + sum_{j <= t} exp(G_t - G_j) (q_t . k_j) w_j)
//   S   = exp(G_L) S + sum_j k_j (exp(G_L - G_j) w_j)^T
//
// w_j is v_j or, for a delta rule with read keys r, the solution by forward substitution of
//
//   w_t = beta_t (v_t - exp(G_t) S^T r_t) - sum_{j < t} beta_t exp(G_t - G_j) (r_t . k_j) w_j
//
// With decays per channel, queries and keys contain the decays (channel_operands.h); with decays per column, values and
// outputs do.
//
// Each of four warps owns 16 columns as S^T, in result fragments that are operands of the next product in place. Warps
// share only the tiles that the block copies. States and weights are split into three bf16 (3xBF16), so that results
// are as exact as in f32. 16-bit outputs replace the 16-bit values in shared memory until the tile is stored.
//
// Long sequences are cut into segments: a first pass without outputs computes the segments' states. Tokens have the
// same bits in both passes, whatever the number of segments.
//
// Gradients are sweeps too. With D_t the gradient of the state after token t, and g the log decay,
//
//   D_t  = exp(g_{t+1}) D_{t+1} + scale q_t d_o_t^T
//   dq_t = scale S_t d_o_t,  dv_t = D_t^T k_t,  dk_t = D_t v_t
//
// dq is a sweep over S^T with (d_o, v, k) for (q, k, v). dv and dk are reversed sweeps, whose decay comes after the
// update, over D with (k, q, d_o) and over D^T with (v, d_o, q).
//
// With a delta rule, tokens write beta_t x_t with x_t = v_t - exp(g_t) S_{t-1}^T r_t, and erase in the reversed sweep:
//
//   D_t  = exp(g_{t+1}) (D_{t+1} - beta_{t+1} r_{t+1} dx_{t+1}^T) + scale q_t d_o_t^T,  dx_t = D_t^T k_t
//   dq_t = scale S_t d_o_t,  dr_t = -beta_t exp(g_t) S_{t-1} dx_t,  dk_t = beta_t D_t x_t,  dv_t = beta_t dx_t
//
// If queries (u term) or read keys (RWKV-7) read the state before the decay, their updates of D come after the decay:
//
//   D_t = exp(g_{t+1}) D_{t+1} + scale q_{t+1} d_o_{t+1}^T,  or, of read keys,  - beta_{t+1} r_{t+1} dx_{t+1}^T
//
// Reversed sweeps then decay in the token's own step, and reads before that have the decays up to the token before
// (channel_operands.h). A query's update of D after a read key would be an exception; it belongs to another write,
// which has no decay (problem_on_device.h).
//
// A sweep computes x, and a reversed sweep with a substitution of its own computes dx. The others are sweeps as above
// whose keys or queries are x and dx, in f32.
#ifndef HEED_ENGINES_RECURRENCE_CUDA_CHUNK_BLOCK_H_
#define HEED_ENGINES_RECURRENCE_CUDA_CHUNK_BLOCK_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/bf16_split.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/recurrence/cuda/channel_operands.h"
#include "heed/engines/recurrence/cuda/chunk_rows.h"
#include "heed/engines/recurrence/cuda/chunk_stage.h"
#include "heed/engines/recurrence/cuda/params.h"

namespace heed::recurrence::cuda {

template <class M, int kKeys, bool kByChannel, Form kForm>
class ChunkBlock : ChunkRows<M, kKeys, kByChannel, kForm> {
  using Base = ChunkRows<M, kKeys, kByChannel, kForm>;
  using Base::m_, Base::p_, Base::s_, Base::column_block_, Base::segment_, Base::lane_, Base::warp_, Base::state_,
      Base::columns, Base::RowOf, Base::ColumnOf, Base::RowAt, Base::NumberAt;
  using Base::kDelta, Base::kErases, Base::kGeneral, Base::kHasReadKeys, Base::has_read_key_, Base::by_column_,
      Base::reads_before_decay_, Base::has_factors_, Base::decays_after_update_, Base::tokens_, Base::shift_,
      Base::stage_bytes_;
  using Base::BeginOf, Base::TileEnd, Base::Existing, Base::StageAt, Base::CopyTile, Base::NumbersOf, Base::PutNumbers,
      Base::ShuffleSum, Base::DecayedTokens, Base::LogDecayOf, Base::ColumnLogDecay;
  using Base::wide_outputs, Base::of_outputs, Base::of_values, Base::wide_values, Base::normalizes, Base::write_scale,
      Base::value_map, Base::has_outputs, Base::finds, Base::outputs_replace_values, Base::has_queries,
      Base::has_output, Base::has_value;
  using typename Base::Pairs, typename Base::Stage, typename Base::Numbers;
  using Operands = ChannelOperands<M, kKeys, kForm == Form::kPlain>;
  static constexpr int kSplitTerms = heed::cuda::kSplitTerms;
  static constexpr int kOfRow = kByChannel ? kSplitTerms : 1;  // terms of queries and keys

 public:
  HEED_DEVICE ChunkBlock(M& m, const ChunkParams& p)
      : Base(m, p), strict_(kForm == Form::kGeneral && p.strict), decays_(!kByChannel && p.decay != DecayKind::kNone),
        operands_(m.shared() + 2 * stage_bytes_, kHasReadKeys) {}

  HEED_DEVICE void Run() {
    if (segment_ > 0 && BeginOf(segment_) >= tokens_) return;
    const int own_columns = p_.value_size - (normalizes() ? 1 : 0);
    if (segment_ == 0) {
      this->LoadState(this->OfHead(p_.initial, s_.initial), own_columns);
      if (normalizes()) this->LoadNormalizer(this->OfHead(p_.initial_z, s_.initial_z));
    } else if (!kGeneral || p_.start == Start::kSegments) {
      this->LoadState(this->SegmentState(segment_ - 1), p_.value_size);
    } else if (p_.start == Start::kBlockStates) {
      this->LoadState(this->StartState((s_.tokens - BeginOf(segment_)) / kBlock - 1), p_.value_size);
    }
    if (kGeneral && segment_ == 0 && p_.products != nullptr && s_.tokens > 0) {
      this->StoreProducts((s_.tokens - 1) / kBlock, [](int) { return 0.0f; });
    }
    for (int64_t segment = segment_;; ++segment) {
      const int64_t end = BeginOf(segment + 1);
      if (p_.states_only && end == tokens_) return;  // no boundary
      Sweep(BeginOf(segment), end);
      if (p_.states_only) {
        this->StoreState(this->SegmentState(segment), p_.value_size);
        continue;
      }
      if (end != tokens_) return;
      this->StoreState(this->OfHead(p_.final, s_.final), own_columns);
      if (normalizes()) this->StoreNormalizer(this->OfHead(p_.final_z, s_.final_z));
      return;
    }
  }

 private:
  // Sweeps the tokens [begin, end) of a segment.
  HEED_DEVICE void Sweep(int64_t begin, int64_t end) {
    if (begin >= end) return;
    const auto count_at = [&](int64_t first) { return static_cast<int>(TileEnd(first, end) - first); };
    m_.Sync();  // all threads have read the previous segment
    CopyTile(StageAt(0), begin, count_at(begin));
    PutNumbers(StageAt(0), NumbersOf(begin, count_at(begin)));
    int64_t tile = 0;
    for (int64_t first = begin, after; first < end; first = after, ++tile) {
      const Stage stage = StageAt(tile), next = StageAt(tile + 1);
      after = TileEnd(first, end);
      const int count = count_at(first);
      m_.template WaitCopies<0>();
      m_.Sync();
      Numbers numbers;
      if (after < end) {
        CopyTile(next, after, count_at(after));
        numbers = NumbersOf(after, count_at(after));
      }
      const bool works = 16 * warp_ < columns();
      if constexpr (kByChannel) {
        ChunkOfChannels(stage, first, count, works);
      } else if (works) {
        for (int row = 0; row < count; row += kChunk) ChunkOfTile(stage, first, row, count - row);
      }
      if (after < end) PutNumbers(next, numbers);
      if (p_.states_only) continue;
      if ((kGeneral || kDelta) && p_.block_states != nullptr && ((after + shift_) % kBlock == 0 || after >= s_.tokens))
        StoreBlockState(after);
      if (!has_outputs() || !outputs_replace_values()) continue;
      m_.Sync();
      stage.values().Store(m_, p_.aligned, columns(), Existing(first, count), [&](int i) {
        return has_output(first + i) ? RowAt(p_.o, s_.o, first + i, column_block_ * kColumnBlock) : nullptr;
      });
    }
  }
  // Stores the state after a block of tokens, in reverse where the previous block ends; or stores its products with the
  // state stored there.
  HEED_DEVICE void StoreBlockState(int64_t after) {
    if (!p_.reversed) return this->StoreState(this->BlockState((after - 1) / kBlock), p_.value_size);
    const int64_t block = (s_.tokens - after) / kBlock - 1;
    if (after >= s_.tokens) return;
    if (p_.products == nullptr) return this->StoreState(this->BlockState(block), p_.value_size);
    this->StoreProducts(block, [&](int column) { return decays_after_update_ ? LogDecayOf(after - 1, column) : 0; });
  }

  HEED_DEVICE void ChunkOfTile(const Stage& stage, int64_t first, int row, int count) {
    const int end = count < kChunk ? count : kChunk;
    const int step = by_column_ && TooStrong(stage, first, row, end) ? 1 : end;
    for (int t = 0; t < end; t += step) Chunk(stage, first, row, t, t + step);
  }

  // Computes a chunk of a sweep by channel, whose tile is one chunk.
  HEED_DEVICE void ChunkOfChannels(const Stage& stage, int64_t first, int count, bool works) {
    const typename Operands::Source source = {.queries = stage.queries(),
                                              .keys = stage.keys(),
                                              .read_keys = stage.read_keys(),
                                              .log_decays = stage.log_decays(),
                                              .log_decays_of_heads = stage.sums(),
                                              .decayed = DecayedTokens(first),
                                              .has_queries = has_queries(),
                                              .erases = kErases,
                                              .tokens = Existing(first, count)};
    int step = count;
    for (int t = 0; t < count;) {
      bool mine = operands_.Make(m_, p_, source, t, t + step);
      if (works && by_column_) mine |= TooStrong(stage, first, 0, step);
      if (m_.SyncOr(mine) && step > 1) {
        step = 1;  // decays overflow: one token at a time
        m_.Sync();
        continue;
      }
      if (works) {
        DecayChannels();
        Chunk(stage, first, 0, t, t + step);
        DecayChannels();
      }
      t += step;
      if (t < count) m_.Sync();  // all threads have read the operands
    }
  }
  HEED_DEVICE void DecayChannels() {
    if (p_.decay == DecayKind::kNone) return;
    heed::cuda::Unrolled<kKeys / 8>([&](auto e) {
      const float* decays = operands_.decays() + 8 * e + lane_ % 4 * 2;
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 4; ++i) state_[e][i] = Decayed(state_[e][i], decays[i % 2]);
    });
  }

  // Log decays of a thread's two columns: G_t is the sum to token t, H half of the sum over all tokens.
  struct ColumnDecays {
    Sum later[2][4];  // G_t - H for the elements of Pairs
    Sum half[2];      // H
  };
  HEED_DEVICE ColumnDecays ColumnDecaysOf(const Stage& stage, int64_t first, int row, int begin, int end) const {
    const auto log_decay = [&](int t, int column) -> float {
      return t < begin || t >= end ? 0 : ColumnLogDecay(stage, first, row + t, column);
    };
    ColumnDecays decays;
    HEED_DEVICE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int column = 16 * warp_ + lane_ / 4 + 8 * r;
      Sum before;
      HEED_DEVICE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int t = 8 * half + lane_ % 4 * 2;
        const Sum own = {log_decay(t, column), 0};
        Sum sum = own + Sum{log_decay(t + 1, column), 0};  // over the tokens of the quad's threads up to this one
        HEED_DEVICE_UNROLL
        for (int distance = 1; distance < 4; distance *= 2) {
          const Sum other = ShuffleSum(sum, lane_ - distance);
          if (lane_ % 4 >= distance) sum = other + sum;
        }
        const Sum others = ShuffleSum(sum, lane_ - 1);
        decays.later[half][2 * r] = before + (lane_ % 4 == 0 ? own : others + own);
        decays.later[half][2 * r + 1] = before + sum;
        before = before + ShuffleSum(sum, lane_ - lane_ % 4 + 3);
      }
      decays.half[r] = Half(before);
    }
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) decays.later[i / 4][i % 4] = decays.later[i / 4][i % 4] - decays.half[i % 4 / 2];
    return decays;
  }
  // True in a warp if the decays of these tokens overflow when they are computed together.
  HEED_DEVICE bool TooStrong(const Stage& stage, int64_t first, int row, int count) const {
    const ColumnDecays decays = ColumnDecaysOf(stage, first, row, 0, count);
    return m_.Any(!(2 * decays.half[0].high >= kMinLogDecay && 2 * decays.half[1].high >= kMinLogDecay));
  }
  HEED_DEVICE void DecayColumns(const ColumnDecays& decays) {
    const float of_rows[2] = {DecayOf<M>(decays.half[0]), DecayOf<M>(decays.half[1])};
    heed::cuda::Unrolled<kKeys / 2>(
        [&](auto i) { state_[i / 4][i % 4] = Decayed(state_[i / 4][i % 4], of_rows[i % 4 / 2]); });
  }

  // Computes tokens [begin, end) of the 16 from row `row` of the tile on, whose first token is `first`.
  HEED_DEVICE void Chunk(const Stage& stage, int64_t first, int row, int begin, int end) {
    ColumnDecays column_decays = {};
    if (by_column_) {
      column_decays = ColumnDecaysOf(stage, first, row, begin, end);
      DecayColumns(column_decays);
    }
    const Sum* sums = stage.sums() + row;
    const float* betas = stage.betas() + row;
    const auto queries_of = [&](int term) { return operands_.queries(term); };
    const auto keys_of = [&](int term) { return operands_.keys(term); };
    const auto read_keys_of = [&](int term) { return operands_.read_keys(term); };
    Pairs pairs = {}, errors = {}, o = {}, found = {};
    heed::cuda::Unrolled<kKeys / 16>([&](auto e) {
      if (16 * e >= p_.key_size) return;
      uint32_t state[kSplitTerms][4], keys[kOfRow][4];
      heed::cuda::SplitResults<M>(state_[2 * e], state_[2 * e + 1], state);
      RowsOf(stage.keys(), keys_of, row, 16 * e, keys);
      if (has_queries()) {
        uint32_t queries[kOfRow][4];
        RowsOf(stage.queries(), queries_of, row, 16 * e, queries);
        MultiplyRows(queries, keys, pairs);
        MultiplyRows(state, queries, o);
        if constexpr (kErases) {
          RowsOf(stage.read_keys(), read_keys_of, row, 16 * e, keys);
          MultiplyRows(queries, keys, errors);
        }
      }
      if constexpr (kDelta) {
        uint32_t read_keys[kOfRow][4];
        RowsOf(stage.read_keys(), read_keys_of, row, 16 * e, read_keys);
        MultiplyRows(read_keys, keys, errors);
        MultiplyRows(state, read_keys, found);
      }
    });
    Pairs written;
    uint32_t values[1][4];
    LoadValues(stage, first, row, begin, end, column_decays, written, values);
    if constexpr (kDelta) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) {
        written[i / 4][i % 4] -= (decays_ ? Exp<M>(sums[ColumnOf(i)]) : 1) * found[i / 4][i % 4];
      }
      Substitute(sums, betas, errors, written);
      if (finds() && has_outputs()) StoreOutputs(stage, first, row, begin, end, written);
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int t = ColumnOf(i);
        written[i / 4][i % 4] = t < begin || t >= end ? 0 : betas[t] * written[i / 4][i % 4];
      }
    }
    if (has_queries()) {
      DecayScores(sums, write_scale(), pairs, has_own() ? betas : nullptr);
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) o[i / 4][i % 4] *= decays_ ? Exp<M>(sums[ColumnOf(i)]) : 1;
      AddWritten(pairs, written, values, o);
      if constexpr (kErases) Substitute(sums, betas, errors, o);
      if (has_outputs()) {
        Finish(stage, first, row, begin, end, column_decays, o);
        StoreOutputs(stage, first, row, begin, end, o);
      }
    }
    DecayState(sums);
    if (as_they_are() && !decays_ && write_scale() == 1) {
      AddProducts(stage.keys(), keys_of, row, values);
    } else {
      AddRows(stage.keys(), keys_of, row, sums, write_scale(), written);
    }
    if constexpr (kErases) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 8; ++i) o[i / 4][i % 4] *= betas[ColumnOf(i)];
      AddRows(stage.read_keys(), read_keys_of, row, sums, -1, o);
    }
    if (by_column_) DecayColumns(column_decays);
  }
  // Loads what tokens [begin, end) write, before the state's part is subtracted, and values as they are, unless they
  // are f32.
  HEED_DEVICE void LoadValues(const Stage& stage, int64_t first, int row, int begin, int end,
                              const ColumnDecays& column_decays, Pairs& written, uint32_t (&values)[1][4]) const {
    uint32_t r[4] = {};
    if (!wide_values()) stage.values().LoadTransposed(m_, row, 16 * warp_, r);
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 4; ++i) values[0][i] = r[i % 2 * 2 + i / 2];
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int t = ColumnOf(i), column = 16 * warp_ + RowOf(i);
      const bool exists = t >= begin && t < end && has_value(first + row + t);
      if (!exists) values[0][i / 2] &= 0xFFFF0000u >> (i % 2 * 16);  // holds outputs
      const auto bits = static_cast<uint16_t>(values[0][i / 2] >> (i % 2 * 16));
      float x =
          of_values() == DType::kF16 ? M::template Widen<DType::kF16>(bits) : M::template Widen<DType::kBF16>(bits);
      if (wide_values()) x = exists ? ElementOf<M>(stage.wide_values(), DType::kF32, row + t, column) : 0;
      if (normalizes() && column_block_ * kColumnBlock + column == p_.value_size - 1)
        x = exists && first + row + t < s_.tokens ? 1 : 0;
      if (value_map() == Map::kComplement) {
        x = exists && first + row + t < s_.tokens && column < columns()
                ? Mapped<M>(Map::kComplement,
                            ElementOf<M>(stage.column_decays(), p_.value_decay.dtype, row + t, column))
                : 0;
      } else if (value_map() != Map::kIdentity) {
        x = exists ? Mapped<M>(value_map(), x) : 0;
      }
      if (has_factors_) x *= stage.betas()[row + t];
      written[i / 4][i % 4] = by_column_ ? x * Exp<M>(Sum() - column_decays.later[i / 4][i % 4]) : x;
    }
  }
  // x_t -= sum_{j < t} beta_j exp(G_t - G_j) products_tj x_j: the forward substitution of a delta rule.
  HEED_DEVICE void Substitute(const Sum* sums, const float* betas, Pairs& products, Pairs& x) const {
    DecayScores(sums, 1, products);
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) products[i / 4][i % 4] *= -betas[ColumnOf(i)];
    this->AddCausally(true, products, x, x);
  }
  // Finishes outputs: scale, column decays, skip and output gate.
  HEED_DEVICE void Finish(const Stage& stage, int64_t first, int row, int begin, int end,
                          const ColumnDecays& column_decays, Pairs& o) const {
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) {
      float& x = o[i / 4][i % 4];
      x *= p_.scale;
      const int t = ColumnOf(i), in_block = 16 * warp_ + RowOf(i), column = column_block_ * kColumnBlock + in_block;
      if (by_column_) {
        const Sum own = {
            reads_before_decay_ && t >= begin && t < end ? ColumnLogDecay(stage, first, row + t, in_block) : 0, 0};
        x *= Exp<M>(column_decays.later[i / 4][i % 4] - own);
      }
      if constexpr (kForm != Form::kGeneral) continue;
      if (t < begin || t >= end || first + row + t >= s_.tokens || column >= p_.value_size) continue;
      if (p_.skip.data != nullptr) {
        const float v = wide_values() ? ElementOf<M>(stage.wide_values(), DType::kF32, row + t, in_block)
                                      : ElementOf<M>(stage.values(), of_values(), row + t, in_block);
        x += NumberAt(p_.skip, 0, 0, column) * v;
      }
      if (p_.output_gate.data != nullptr) {
        const float z = NumberAt(p_.output_gate, s_.output_gate, first + row + t, column);
        x *= z / (1 + Exp<M>(-z));
      }
    }
  }
  HEED_DEVICE void StoreOutputs(const Stage& stage, int64_t first, int row, int begin, int end, const Pairs& o) const {
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int t = ColumnOf(i), column = 16 * warp_ + RowOf(i);
      const float x = o[i / 4][i % 4];
      if (t < begin || t >= end) continue;
      const uint32_t pair =
          of_outputs() == DType::kF16 ? M::template Pack<DType::kF16>(x, 0) : M::template Pack<DType::kBF16>(x, 0);
      if (outputs_replace_values()) {
        stage.values().Put(row + t, column, static_cast<uint16_t>(pair));
      } else if (column < columns() && first + row + t < s_.tokens && has_output(first + row + t)) {
        void* const outputs = const_cast<void*>(p_.o.data);
        const int64_t place = this->Place(p_.o, s_.o, first + row + t, column_block_ * kColumnBlock + column);
        if (!wide_outputs()) {
          static_cast<uint16_t*>(outputs)[place] = static_cast<uint16_t>(pair);
          continue;
        }
        float& to = static_cast<float*>(outputs)[place];
        to = (kGeneral && p_.adds ? to : 0) + x;
      }
    }
  }
  // True if values enter products as they are.
  HEED_DEVICE bool as_they_are() const {
    return !kDelta && !by_column_ && !has_factors_ && !normalizes() && of_values() == DType::kBF16 &&
           value_map() == Map::kIdentity;
  }

  // Loads 16 rows of a tile, or of its split operands.
  template <class Tile, class OperandOf>
  HEED_DEVICE void RowsOf(const Tile& tile, const OperandOf& operand, int row, int column,
                          uint32_t (&split)[kOfRow][4]) const {
    if constexpr (kByChannel) {
      HEED_DEVICE_UNROLL
      for (int term = 0; term < kSplitTerms; ++term) operand(term).LoadRows(m_, row, column, split[term]);
    } else {
      tile.LoadRows(m_, row, column, split[0]);
    }
  }
  // products += a b^T, of 16 rows each.
  template <int kA, int kB>
  HEED_DEVICE void MultiplyRows(const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][4], Pairs& products) const {
    heed::cuda::MmaSplit(m_, a, heed::cuda::WordsOf(b, 0, 2).at, products[0]);
    heed::cuda::MmaSplit(m_, a, heed::cuda::WordsOf(b, 1, 3).at, products[1]);
  }

  HEED_DEVICE bool has_own() const { return reads_before_decay_ && p_.beta.data != nullptr; }
  // Multiplies pairs (t, j) by factor and by the decay from token j to t. Pairs with j > t, with `strict_` also j = t,
  // are 0; if `own` is present, pairs j = t are own[t].
  HEED_DEVICE void DecayScores(const Sum* sums, float factor, Pairs& pairs, const float* own = nullptr) const {
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int t = RowOf(i), j = ColumnOf(i);
      float& x = pairs[i / 4][i % 4];
      if (own != nullptr && j == t) x = own[t];
      x = j > t || (strict_ && own == nullptr && j == t) ? 0 : factor * (decays_ ? x * Exp<M>(sums[t] - sums[j]) : x);
    }
  }

  // o^T += W^T P^T. Tokens with values that are not finite are added in order, so that 0 NaN does not reach earlier
  // tokens.
  HEED_DEVICE void AddWritten(const Pairs& pairs, const Pairs& written, const uint32_t (&values)[1][4],
                              Pairs& o) const {
    bool finite = true;
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) finite &= fabsf(written[i / 4][i % 4]) <= 3.4028234e38f;
    if (m_.Any(!finite)) return this->AddCausally(strict_ && !has_own(), pairs, written, o);
    uint32_t weights[kSplitTerms][4];
    heed::cuda::SplitResults<M>(pairs[0], pairs[1], weights);
    if (as_they_are()) return MultiplyRows(values, weights, o);
    uint32_t rows[kSplitTerms][4];
    heed::cuda::SplitResults<M>(written[0], written[1], rows);
    MultiplyRows(rows, weights, o);
  }

  HEED_DEVICE void DecayState(const Sum* sums) {
    if (!decays_) return;
    const float decay = DecayOf<M>(sums[kChunk - 1]);
    heed::cuda::Unrolled<kKeys / 2>([&](auto i) { state_[i / 4][i % 4] = Decayed(state_[i / 4][i % 4], decay); });
  }
  // S += sum_j k_j (factor exp(G_L - G_j) x_j)^T.
  template <class Tile, class OperandOf>
  HEED_DEVICE void AddRows(const Tile& tile, const OperandOf& operand, int row, const Sum* sums, float factor,
                           const Pairs& x) {
    Pairs decayed;
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float decay = decays_ ? Exp<M>(sums[kChunk - 1] - sums[ColumnOf(i)]) : 1;
      decayed[i / 4][i % 4] = factor * decay * x[i / 4][i % 4];
    }
    uint32_t rows[kSplitTerms][4];
    heed::cuda::SplitResults<M>(decayed[0], decayed[1], rows);
    AddProducts(tile, operand, row, rows);
  }
  template <class Tile, class OperandOf, int kCount>
  HEED_DEVICE void AddProducts(const Tile& tile, const OperandOf& operand, int row, const uint32_t (&rows)[kCount][4]) {
    heed::cuda::Unrolled<kKeys / 16>([&](auto e) {
      if (16 * e >= p_.key_size) return;
      uint32_t keys[kOfRow][4];
      if constexpr (kByChannel) {
        HEED_DEVICE_UNROLL
        for (int term = 0; term < kSplitTerms; ++term) operand(term).LoadTransposed(m_, row, 16 * e, keys[term]);
      } else {
        tile.LoadTransposed(m_, row, 16 * e, keys[0]);
      }
      heed::cuda::MmaSplit(m_, rows, heed::cuda::WordsOf(keys, 0, 1).at, state_[2 * e]);
      heed::cuda::MmaSplit(m_, rows, heed::cuda::WordsOf(keys, 2, 3).at, state_[2 * e + 1]);
    });
  }

  const bool strict_;
  const bool decays_;  // one decay per token
  const Operands operands_;
};

}  // namespace heed::recurrence::cuda

#endif  // HEED_ENGINES_RECURRENCE_CUDA_CHUNK_BLOCK_H_
