// Pages: one HTML file each that needs no other file and no network.
//
// A page is a template of heed/pages/web/ with its style, its script and its data put
// in. What comes from a user's file is data: it is never code, whatever it
// holds, and the page's own policy runs no script but ours.
#ifndef HEED_PAGES_PAGE_H_
#define HEED_PAGES_PAGE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/pages/json.h"

namespace heed::pages {

struct Page {
  std::string_view name;                                   // of the template, "view.html"
  std::vector<std::string_view> styles, scripts;           // files, in this order
  std::string title;                                       // plain text
  std::string body;                                        // HTML, where it says @BODY@
  Json data;                                               // JSON.parse of element "data"
  std::vector<std::pair<std::string, std::string>> blobs;  // id, base64
};

// The whole page. Throws InternalError if it names a file that is not there.
std::string ComposePage(const Page& page);

// JSON to stand inside a script element: ASCII, without '<', '>' and '&'. What
// is not UTF-8 becomes U+FFFD.
std::string InertJson(const Json& json);

// Text to stand in HTML, attribute values included. What is not UTF-8 becomes
// U+FFFD.
std::string EscapeHtml(const std::string& text);

std::string Base64(std::span<const uint8_t> bytes);

// Throws FileError if `path` cannot be written, before any work is done for it.
void CheckWritable(const std::string& path);

// The file appears complete or not at all. Throws FileError.
void WriteText(const std::string& path, std::string_view text);

}  // namespace heed::pages

#endif  // HEED_PAGES_PAGE_H_
