// What Python shows of attention: signatures for stubs and help(), and what its
// docstring adds to the header's comment.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_SIGNATURE_PY_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_SIGNATURE_PY_H_

namespace heed::attention {

inline constexpr char kInPython[] = R"(

In Python. Every argument but q, k, v is by keyword. Arrays are anything on the
CPU with DLPack or the buffer protocol; vectors of lengths, slopes and sinks may
be lists. An array whose last axis is not contiguous is copied (heed.explain says
so), others are read in place. align is 'bottom_right', 'top_left' or
query_starts; window is (left, right); segments is one array for both sides or a
pair; precision is 'highest' or 'high'. With dropout, seed=None draws one from
NumPy's global generator; attention_backward needs it given. Returns o, or (o, lse) with
return_lse=True, as NumPy arrays; o is `out` where that is given. threads=None is
heed.set_num_threads, else one per CPU that the process may use. Errors are
heed.InvalidArgument (a ValueError) and heed.Unsupported (a RuntimeError).)";

#define HEED_QKV            \
  "q: Array, " \
  "k: Array, " \
  "v: Array, *, "

inline constexpr char kSignature[] =
    "def attention(" HEED_QKV
    "scale: float | None = None, "
    "causal: bool = False, "
    "align: Align = 'bottom_right', "
    "window: tuple[int, int] | None = None, "
    "sink_tokens: int = 0, "
    "prefix: Ints | None = None, "
    "chunk: int | None = None, "
    "segments: Segments | None = None, "
    "key_lengths: Ints | None = None, "
    "key_starts: Ints | None = None, "
    "query_lengths: Ints | None = None, "
    "mask: Array | None = None, "
    "bias: Array | None = None, "
    "alibi: Floats | None = None, "
    "softcap: float | None = None, "
    "sinks: Floats | None = None, "
    "dropout: float = 0.0, "
    "seed: int | None = None, "
    "dropout_offset: int = 0, "
    "cu_seqlens_q: Ints | None = None, "
    "cu_seqlens_k: Ints | None = None, "
    "precision: typing.Literal['highest', 'high'] = 'highest', "
    "invariant: bool = False, "
    "return_lse: typing.Literal[False] = False, "
    "out: OutArray | None = None, "
    "threads: int | None = None"
    ") -> Result";

// The same with an lse; type checkers choose between the two by return_lse.
inline constexpr char kLseSignature[] =
    "def attention(" HEED_QKV
    "return_lse: typing.Literal[True], "
    "**options: typing_extensions.Unpack[AttentionOptions]"
    ") -> tuple[Result, Result]";

inline constexpr char kMergeSignature[] =
    "def merge_attention("
    "parts: collections.abc.Iterable[Part], *, "
    "sinks: Floats | None = None"
    ") -> tuple[Result, Result]";

#undef HEED_QKV

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_SIGNATURE_PY_H_
