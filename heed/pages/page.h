// Pages: one HTML file each that needs no other file and no network.
//
// A page is a template of heed/pages/web/ with its style, its script and its data filled in. Content of a user's file
// is data and never code, and the page's content security policy runs only its own scripts.
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
  std::string_view name;                                   // name of the template, "view.html"
  std::vector<std::string_view> styles, scripts;           // files, in this order
  std::string title;                                       // plain text
  std::string body;                                        // HTML, for the slot @BODY@
  Json data;                                               // parsed by JSON.parse from the element "data"
  std::vector<std::pair<std::string, std::string>> blobs;  // id, base64
};

// Composes the whole page. Throws InternalError if it names a missing file.
std::string ComposePage(const Page& page);

// JSON for a script element: ASCII, without '<', '>' and '&'. Invalid UTF-8 becomes U+FFFD.
std::string InertJson(const Json& json);

// Text for HTML, including attribute values. Invalid UTF-8 becomes U+FFFD.
std::string EscapeHtml(const std::string& text);

std::string Base64(std::span<const uint8_t> bytes);

// Throws FileError if `path` cannot be written; called before any work is done for it.
void CheckWritable(const std::string& path);

// Writes the file atomically. Throws FileError.
void WriteText(const std::string& path, std::string_view text);

}  // namespace heed::pages

#endif  // HEED_PAGES_PAGE_H_
