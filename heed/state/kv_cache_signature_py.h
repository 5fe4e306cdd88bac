// What Python shows of caches: signatures for stubs and help(), and what their docstrings
// add to the headers' comments.
#ifndef HEED_STATE_KV_CACHE_SIGNATURE_PY_H_
#define HEED_STATE_KV_CACHE_SIGNATURE_PY_H_

namespace heed::python {

inline constexpr char kOptionsInPython[] = R"(

In Python. capacity=None is a cache that grows; page=None is one contiguous piece per
sequence, which needs a capacity; dtype is 'f64', 'f32', 'bf16' or 'f16'; quantize is None
or 'int8'; rotary is None or a dict of heed.rotary's keywords, of which interleaved is needed
and inverse is none; positions is 'absolute' or 'cache'. Threads of Python may share a cache: calls that change it wait for each other.
copy.copy and copy.deepcopy are fork(). Errors are heed.InvalidArgument (a ValueError).)";

inline constexpr char kAttendInPython[] = R"(

In Python. q is [B, T, Hq, dim], anything that heed.attention takes, in the cache's dtype.
causal is True unless it is said otherwise; a ring's window and sink_tokens are its own
unless others are given; a latent cache has no default of scale. tree has the parents of the
T rows, -1 where a row follows what was there before the last append. Returns o, or (o, lse)
with return_lse=True, as NumPy arrays; o is `out` where that is given. threads is as in
heed.attention. heed.explain("attend", cache=cache, q=q, ...) says what would run.)";

inline constexpr char kCapacityDoc[] =
    "Tokens that a sequence may have; None: as many as there is memory for.";
inline constexpr char kPageDoc[] = "Tokens of a page; None: each sequence is one piece.";

inline constexpr char kRotaryDoc[] =
    "Whether keys and queries are given without rotary encoding, which is done here.";

#define HEED_INTS "Ints"
#define HEED_ROWS "Array"

inline constexpr char kInitSignature[] =
    "def __init__(self, batch: int, heads: int, dim: int, value_dim: int | None = None, *, "
    "capacity: int | None = None, page: int | None = 64, "
    "dtype: FloatName = 'f32', "
    "quantize: typing.Literal['int8'] | None = None, "
    "rotary: CacheRotary | None = None) -> None";
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
    "def append(self, k: " HEED_ROWS ", v: " HEED_ROWS ", lengths: " HEED_INTS
    " | None = None) -> None";
inline constexpr char kLatentAppendSignature[] =
    "def append(self, rows: " HEED_ROWS ", lengths: " HEED_INTS " | None = None) -> None";

#define HEED_ATTEND "causal: bool = True, tree: " HEED_INTS " | None = None, "
inline constexpr char kAttendSignature[] =
    "def attend(self, q: " HEED_ROWS ", *, " HEED_ATTEND
    "return_lse: typing.Literal[False] = False, "
    "**options: typing_extensions.Unpack[AttendOptions]) -> Result";
inline constexpr char kAttendLseSignature[] =
    "def attend(self, q: " HEED_ROWS ", *, " HEED_ATTEND
    "return_lse: typing.Literal[True], "
    "**options: typing_extensions.Unpack[AttendOptions]"
    ") -> tuple[Result, Result]";
inline constexpr char kLatentAttendSignature[] =
    "def attend(self, q: " HEED_ROWS ", *, scale: float, " HEED_ATTEND
    "return_lse: typing.Literal[False] = False, "
    "**options: typing_extensions.Unpack[LatentAttendOptions]"
    ") -> Result";
inline constexpr char kLatentAttendLseSignature[] =
    "def attend(self, q: " HEED_ROWS ", *, scale: float, " HEED_ATTEND
    "return_lse: typing.Literal[True], "
    "**options: typing_extensions.Unpack[LatentAttendOptions]"
    ") -> tuple[Result, Result]";
#undef HEED_ATTEND

inline constexpr char kForkSignature[] = "def fork(self) -> typing_extensions.Self";
inline constexpr char kShareSignature[] =
    "def share(prefix_cache: KVCache, batch: int) -> KVCache";
inline constexpr char kLatentShareSignature[] =
    "def share(prefix_cache: LatentKVCache, batch: int) -> LatentKVCache";
inline constexpr char kImportSignature[] =
    "def import_pages(k_pool: " HEED_ROWS ", v_pool: " HEED_ROWS ", indptr: " HEED_INTS
    ", indices: " HEED_INTS ", last_page_len: " HEED_INTS ", *, heads_first: bool = False, "
    "capacity: int | None = None, page: int | None = 64, "
    "quantize: typing.Literal['int8'] | None = None, "
    "rotary: CacheRotary | None = None) -> KVCache";

inline constexpr char kBoundSignature[] =
    "def quantization_bound(self, q: " HEED_ROWS ", *, causal: bool = True, "
    "**options: typing_extensions.Unpack[AttendOptions]) -> tuple[float, float]";

inline constexpr char kLengthsSignature[] = "def lengths(self) -> Result";
inline constexpr char kAppendedSignature[] = "def appended(self) -> Result";
inline constexpr char kTrimSignature[] = "def trim(self, lengths: " HEED_INTS ") -> None";
inline constexpr char kReorderSignature[] =
    "def reorder(self, indices: " HEED_INTS ") -> None";
inline constexpr char kSaveSignature[] = "def save(self, path: Path) -> None";
inline constexpr char kLoadSignature[] =
    "def load_cache(path: Path, *, max_bytes: int | None = None) -> "
    "KVCache | RingKVCache | LatentKVCache";

#undef HEED_INTS
#undef HEED_ROWS

}  // namespace heed::python

#endif  // HEED_STATE_KV_CACHE_SIGNATURE_PY_H_
