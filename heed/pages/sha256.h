// SHA-256, for comparing two runs by one line of text.
//
// Source: FIPS 180-4, "Secure Hash Standard", sections 4.1.2, 4.2.2, 5 and 6.2.
#ifndef HEED_PAGES_SHA256_H_
#define HEED_PAGES_SHA256_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace heed::pages {

// 64 lowercase hexadecimal digits.
std::string Sha256(std::span<const uint8_t> bytes);

}  // namespace heed::pages

#endif  // HEED_PAGES_SHA256_H_
