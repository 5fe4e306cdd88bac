// Documentation of caches in Python: signatures for stubs and help(), and additions to the headers' comments.
#ifndef PYTHON_CACHES_KV_CACHE_SIGNATURE_PY_H_
#define PYTHON_CACHES_KV_CACHE_SIGNATURE_PY_H_

#include "python/docstring.h"

namespace heed::python {

// Arguments of all caches.
inline constexpr Said kCacheArguments[] = {
    {"batch", "sequences, at least 1"},
    {"heads", "heads of keys and values, at least 1"},
    {"dim", "channels of a key, at least 1"},
    {"value_dim", "channels of a value; default dim"},
    {"latent", "elements of a row that are the token's value too, at least 1"},
    {"rope", "elements of a row that only its key has"},
    {"capacity", "tokens that a sequence may have; None is a cache that grows"},
    {"page", "tokens of a page; None is one contiguous block per sequence, which needs a capacity"},
    {"dtype", "of rows and queries: 'f64', 'f32', 'bf16' or 'f16'"},
    {"quantize", "None, or 'int8': a byte per element and a scale per row, not with f64"},
    {"rotary",
     "None, or a dict of heed.rotary's keywords, with interleaved and without inverse: keys and queries are given "
     "without rotary encoding, and rotated here by their positions"},
    {"log_decay_heads",
     "query heads of forgetting attention, a multiple of heads, whose log decays "
     "append takes; None: no log decays"},
    {"sketch",
     "None, or 'int8': the cache also keeps a byte per channel of each key, bounds of errors and statistics of every "
     "64 "
     "tokens, which attend(epsilon=...) needs; not with f64, quantize or log_decay_heads"},
    {"window", "tokens that a row sees, itself included"},
    {"sink_tokens", "first tokens, which are always kept"},
    {"positions", "positions for the rotation of rows: 'absolute', or 'cache' for their places in the ring"},
    {"k", "[batch, T, heads, dim]: rows of keys in the cache's dtype, any strides"},
    {"v", "[batch, T, heads, value_dim]: rows of values"},
    {"rows", "[batch, T, latent + rope]: in the cache's dtype, any strides"},
    {"lengths", "[batch]: new rows of each sequence, from 0 to T; None: all T"},
    {"log_decay",
     "[batch, T, log_decay_heads]: if the cache has log_decay_heads, the log decay that each new token applies to "
     "all earlier ones, at most 0"},
    {"indices", "[batch]: for each sequence the one that it becomes a copy of"},
    {"path", "of the file: str, bytes or os.PathLike"},
    {"max_bytes", "most that the pages may occupy; None: 64 GiB or 8 times the file's rows"},
    {"prefix_cache", "a cache of one sequence, with which all begin"},
};

inline constexpr char kCacheInPython[] = R"(
Threads of Python may share a cache: calls that change it wait for each other. copy.copy and
copy.deepcopy are fork(). Errors are heed.InvalidArgument (a ValueError).

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
)";
inline constexpr char kRowsOfExample[] =
    R"(  >>> q, k, v = rng.standard_normal((3, 2, 5, 4, 16), np.float32)
  >>> cache.append(k, v)
  >>> cache.attend(q).shape, cache.lengths.tolist()
  ((2, 5, 4, 16), [5, 5]))";

// Arguments of attend and similar methods.
inline constexpr Said kAttendArguments[] = {
    {"q", "[batch, T, Hq, dim]: queries in the cache's dtype"},
    {"scale", "factor of the logits; default 1 / sqrt(dim), of a latent cache none"},
    {"causal", "whether a row sees no token after its own"},
    {"tree",
     "[T]: the parent of each row, an earlier one; -1 where it follows what was there "
     "before the last append"},
    {"comm",
     "a communicator of mpi4py, whose ranks have caches with parts of the keys of every sequence, in the order of "
     "ranks; all give the same q, the last tokens, whose keys are in the cache of the last rank, and each gets the "
     "merged result. Options are then scale, causal, softcap, sinks, precision and invariant"},
    {"options",
     "the other keywords of heed.attention that a cache does not know itself; a ring's "
     "window and sink_tokens are its own unless others are given"},
};

inline constexpr char kAttendInPython[] = R"(
Returns o, or (o, lse) with return_lse=True, as NumPy arrays; o is `out` where that is given.
heed.explain("attend", cache=cache, q=q, ...) says what would run.)";

inline constexpr char kCapacityDoc[] = "Tokens that a sequence may have; None: as many as there is memory for.";
inline constexpr char kLogDecayHeadsDoc[] =
    "Query heads whose log decays are kept, for forgetting attention; None: none are.";
inline constexpr char kSketchDoc[] =
    "'int8' where bounds of keys are kept, which attend(epsilon=...) needs; else None.";
inline constexpr char kPageDoc[] = "Tokens of a page; None: each sequence is contiguous.";

inline constexpr char kRotaryDoc[] =
    "Whether keys and queries are given without rotary encoding, which the cache applies.";

inline constexpr char kInitSignature[] =
    "def __init__(self, batch: int, heads: int, dim: int, value_dim: int | None = None, *, "
    "capacity: int | None = None, page: int | None = 64, "
    "dtype: FloatName = 'f32', "
    "quantize: typing.Literal['int8'] | None = None, "
    "rotary: CacheRotary | None = None, "
    "log_decay_heads: int | None = None, "
    "sketch: typing.Literal['int8'] | None = None) -> None";
inline constexpr char kRingInitSignature[] =
    "def __init__(self, batch: int, heads: int, dim: int, value_dim: int | None = None, *, "
    "window: int, sink_tokens: int = 0, "
    "dtype: FloatName = 'f32', "
    "rotary: CacheRotary | None = None, "
    "positions: typing.Literal['absolute', 'cache'] = 'absolute') -> None";
inline constexpr char kLatentInitSignature[] =
    "def __init__(self, batch: int, latent: int, rope: int, *, capacity: int | None = None, "
    "page: int | None = 64, dtype: FloatName = 'f32') -> None";

inline constexpr char kAppendSignature[] =
    "def append(self, k: Array, v: Array, lengths: Ints | None = None, *, log_decay: Array | None = None) -> None";
inline constexpr char kRingAppendSignature[] =
    "def append(self, k: Array, v: Array, lengths: Ints | None = None) -> None";
inline constexpr char kLatentAppendSignature[] = "def append(self, rows: Array, lengths: Ints | None = None) -> None";

inline constexpr char kAttendSignature[] =
    "def attend(self, q: Array, *, causal: bool = True, tree: Ints | None = None, "
    "return_lse: typing.Literal[False] = False, **options) -> Result";
inline constexpr char kAttendLseSignature[] =
    "def attend(self, q: Array, *, causal: bool = True, tree: Ints | None = None, "
    "return_lse: typing.Literal[True], **options) -> tuple[Result, Result]";
inline constexpr char kLatentAttendSignature[] =
    "def attend(self, q: Array, *, scale: float, causal: bool = True, tree: Ints | None = None, "
    "return_lse: typing.Literal[False] = False, **options) -> Result";
inline constexpr char kLatentAttendLseSignature[] =
    "def attend(self, q: Array, *, scale: float, causal: bool = True, tree: Ints | None = None, "
    "return_lse: typing.Literal[True], **options) -> tuple[Result, Result]";

inline constexpr char kForkSignature[] = "def fork(self) -> typing_extensions.Self";
inline constexpr char kShareSignature[] = "def share(prefix_cache: KVCache, batch: int) -> KVCache";
inline constexpr char kLatentShareSignature[] = "def share(prefix_cache: LatentKVCache, batch: int) -> LatentKVCache";
inline constexpr char kImportSignature[] =
    "def import_pages(k_pool: Array, v_pool: Array, indptr: Ints, "
    "indices: Ints, last_page_len: Ints, *, heads_first: bool = False, "
    "capacity: int | None = None, page: int | None = 64, "
    "quantize: typing.Literal['int8'] | None = None, "
    "sketch: typing.Literal['int8'] | None = None, "
    "rotary: CacheRotary | None = None) -> KVCache";

inline constexpr char kBoundSignature[] =
    "def quantization_bound(self, q: Array, *, causal: bool = True, **options) -> tuple[float, float]";

inline constexpr char kLengthsSignature[] = "def lengths(self) -> Result";
inline constexpr char kAppendedSignature[] = "def appended(self) -> Result";
inline constexpr char kTrimSignature[] = "def trim(self, lengths: Ints) -> None";
inline constexpr char kReorderSignature[] = "def reorder(self, indices: Ints) -> None";
inline constexpr char kSaveSignature[] = "def save(self, path: Path) -> None";
inline constexpr char kLoadSignature[] =
    "def load_cache(path: Path, *, max_bytes: int | None = None) -> "
    "KVCache | RingKVCache | LatentKVCache";

}  // namespace heed::python

#endif  // PYTHON_CACHES_KV_CACHE_SIGNATURE_PY_H_
