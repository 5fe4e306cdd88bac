// The Python signatures of attention for stubs and help(), and what its docstring adds to the header's comment.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_SIGNATURE_PY_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_SIGNATURE_PY_H_

#include "python/docstring.h"

namespace heed::attention {

// Arguments whose form differs in Python.
inline constexpr python::Said kArguments[] = {
    {"align", "position of query 0: 'bottom_right', Tk - Tq; 'top_left', 0; or positions [B]"},
    {"window",
     "(left, right): keys that a query sees before and after its position; -1 is "
     "unlimited"},
    {"chunk", "tokens per chunk; a query sees its own chunk only"},
    {"softcap", "soft cap of the logits, > 0"},
    {"segments",
     "[B, T], or a pair of them for queries and keys: ids; a query sees keys with the same "
     "id, if it is at least 0"},
    {"seed",
     "seed of the dropout mask, from 0 to 2^64 - 1; None draws one from NumPy's "
     "global generator, which attention_backward cannot know"},
    {"cu_seqlens_k", "offsets of the keys, by default cu_seqlens_q"},
    {"parts", "pairs (o, lse) of attention over disjoint sets of keys, computed without sinks"},
    {"dlse", "the gradient of lse, in its shape and dtype; absent: zero"},
    {"need_dbias", "whether the gradient of bias is computed"},
    {"comm",
     "a communicator of mpi4py: q, k, v, log_decay, segments, rows of mask and bias, and results are those of this "
     "rank's tokens of one sequence, other options those of the whole; gradients of arrays without tokens are this "
     "rank's part"},
    {"method",
     "with comm: 'all_gather' sends all keys and values to every rank; 'ulysses' exchanges tokens for heads, which "
     "'auto' does where ranks divide the heads and no option has heads or rows; 'ring' moves keys and values from rank "
     "to rank, two parts in memory at a time, and merges partial results"},
    {"order",
     "with comm: 'contiguous', parts of the sequence in the order of ranks; 'zigzag', rank r of R has parts r and "
     "2 R - 1 - r of 2 R, which begin at multiples of 64 tokens where there are enough"},
};

inline constexpr char kInPython[] = R"(
Vectors of lengths, slopes and sinks may be lists. An array whose last axis is not contiguous is
copied (heed.explain says so), others are read in place. Returns o, or (o, lse) with
return_lse=True, as NumPy arrays. Errors are heed.InvalidArgument (a ValueError) and
heed.Unsupported (a RuntimeError).

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q = rng.standard_normal((1, 6, 4, 16), np.float32)
  >>> k, v = rng.standard_normal((2, 1, 6, 2, 16), np.float32)
  >>> o, lse = heed.attention(q, k, v, causal=True, window=(3, 0), return_lse=True)
  >>> o.shape, lse.shape
  ((1, 6, 4, 16), (1, 4, 6)))";

inline constexpr char kMergeInPython[] = R"(
Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k, v = rng.standard_normal((3, 1, 6, 4, 16), np.float32)
  >>> parts = [heed.attention(q, k[:, i], v[:, i], return_lse=True)
  ...          for i in (slice(0, 2), slice(2, 6))]
  >>> o, lse = heed.merge_attention(parts)
  >>> bool(np.allclose(o, heed.attention(q, k, v), atol=1e-6))
  True)";

// Overloads by return_lse, for type checkers.
inline constexpr char kSignature[] = "def attention(q: Array, k: Array, v: Array, *, **options) -> Result";
inline constexpr char kLseSignature[] =
    "def attention(q: Array, k: Array, v: Array, *, return_lse: typing.Literal[True], **options) -> "
    "tuple[Result, Result]";

inline constexpr char kMergeSignature[] =
    "def merge_attention("
    "parts: collections.abc.Iterable[Part], *, "
    "sinks: Floats | None = None"
    ") -> tuple[Result, Result]";

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_SIGNATURE_PY_H_
