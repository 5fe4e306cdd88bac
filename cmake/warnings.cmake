# How every file of this project is compiled: the interface target heed_flags.
add_library(heed_flags INTERFACE)
target_compile_features(heed_flags INTERFACE cxx_std_20)
# Products and sums are fused where the code says so and nowhere else: results do not depend on the compiler's mood.
target_compile_options(heed_flags INTERFACE $<$<CXX_COMPILER_ID:GNU,Clang,AppleClang>:-ffp-contract=off>)
if(PROJECT_IS_TOP_LEVEL)
  target_compile_options(heed_flags INTERFACE $<$<CXX_COMPILER_ID:GNU,Clang,AppleClang>:-Wall -Wextra -Wshadow>)
  # gcc 12 reports string concatenation itself (its bug 105651), of precompiled headers under a second name.
  target_compile_options(heed_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict -Wno-stringop-overflow>)
endif()
target_include_directories(heed_flags INTERFACE ${PROJECT_SOURCE_DIR})

# What nearly every file includes, parsed once per target by those that have many small files: it was a third of their time.
set(HEED_STANDARD_HEADERS <algorithm> <array> <cmath> <cstddef> <cstdint> <cstring> <functional> <limits> <map> <memory> <numeric>
  <optional> <span> <string> <string_view> <utility> <variant> <vector>)
