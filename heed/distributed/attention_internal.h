// Attention of some rows to some keys of a sequence that ranks hold in parts.
#ifndef HEED_DISTRIBUTED_ATTENTION_INTERNAL_H_
#define HEED_DISTRIBUTED_ATTENTION_INTERNAL_H_

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/distributed/attention.h"
#include "heed/distributed/group.h"
#include "heed/distributed/group_internal.h"
#include "heed/distributed/shards.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::distributed {

// The axes of tokens and heads of q, k, v and o, and of lse, packed or not.
inline int TokenAxis(const ConstTensorView& t) { return t.rank() - 3; }
inline int HeadAxis(const ConstTensorView& t) { return t.rank() - 2; }
inline int LseTokenAxis(const ConstTensorView& lse) { return lse.rank() - 1; }
inline int LseHeadAxis(const ConstTensorView& lse) { return lse.rank() - 2; }

// Rows [first, first + count) of a mask or a bias, or its keys; whole where one is for all.
template <class View>
View SliceUnlessOne(const View& t, int axis_from_end, int64_t first, int64_t count) {
  const int axis = t.rank() - axis_from_end;
  return !t.present() || axis < 0 || t.size(axis) <= 1 ? t : t.Slice(axis, first, first + count);
}

// Absent tensors have not been received.
struct AttentionReceived::Content {
  Owned q, k, v, o, lse;                    // all tokens of this rank's heads; or k and v of all heads
  Owned log_decay, segments_q, segments_k;  // of all tokens
};

// The options of a call on some rows and keys.
struct PartOptions {
  attention::Options options;
  std::list<std::vector<int64_t>> memory = {};  // of its tensors of integers
};

// The options of a sequence of `total` tokens, of which a rank has the rows of mask, bias and segments_q, one range
// after the other. segments_k and log_decay have all tokens.
class WholeOptions {
 public:
  // Throws InvalidArgument for lengths, starts and offsets that are not those of `total` tokens. `batch` is not read of
  // a packed sequence.
  WholeOptions(const std::string& op, const attention::Options& options, int64_t batch, int64_t total);

  // Returns the options of a call on a range of rows, the first of which is row `first` here, and on a range of keys.
  // With chunks, log decays, patterns, dropout, or sink tokens and key_starts, these are all keys.
  PartOptions Of(const TokenRange& rows, int64_t first, const TokenRange& keys) const;

  // False if it is certain that none of the rows sees one of the keys.
  bool Sees(const TokenRange& rows, const TokenRange& keys) const;

 private:
  bool is_packed() const { return !cu_q_.empty(); }
  // The numbers per sequence of an option, which is absent or one of `low` to `high`.
  std::vector<int64_t> Load(const char* name, const ConstTensorView& t, int64_t size, int64_t low, int64_t high) const;

  std::string op_;
  const attention::Options& options_;
  int64_t num_sequences_ = 0, total_ = 0;
  std::vector<int64_t> query_starts_, key_lengths_, key_starts_, query_lengths_, prefix_, cu_q_, cu_k_;
};

// Method::kRing of calls on which all ranks agree. `ranges` are the tokens of each rank. Options have neither chunks,
// log decays, patterns nor dropout, nor sink tokens with key_starts; segments_k has all tokens. Views of packed
// sequences have no axis B.
void RingForward(Context& ctx, const Group& group, const std::vector<std::vector<TokenRange>>& ranges,
                 const WholeOptions& whole, const attention::Inputs& in, const attention::Options& options,
                 const attention::Outputs& out);
void RingBackward(Context& ctx, const Group& group, const std::vector<std::vector<TokenRange>>& ranges,
                  const WholeOptions& whole, const attention::BackwardInputs& in, const attention::Gradients& out);

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_ATTENTION_INTERNAL_H_
