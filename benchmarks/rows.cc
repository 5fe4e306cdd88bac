// Rows: the filter, and output to the terminal.
#include "benchmarks/rows.h"

#include <unistd.h>

#include <cstdio>

namespace heed::bench {
namespace {

// Replaces the line that a terminal shows.
void Show(const std::string& text) {
  if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

}  // namespace

Rows::Rows(const std::string& filter, bool print) : filter_(filter, std::regex::extended), print_(print) {}

bool Rows::Begin(const std::string& name) const {
  if (!std::regex_search(name, filter_)) return false;
  Show(name);
  return true;
}

void Rows::Print(const std::string& text) const {
  Show("");
  if (!print_) return;
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace heed::bench
