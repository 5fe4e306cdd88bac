// Shell completion: scripts for bash and zsh, made from the options that the
// program has, so that none can be forgotten.
#ifndef CLI_COMPLETION_H_
#define CLI_COMPLETION_H_

#include <string>

#include "CLI/App.hpp"

namespace heed::cli {

std::string BashCompletion(const CLI::App& app);
std::string ZshCompletion(const CLI::App& app);

}  // namespace heed::cli

#endif  // CLI_COMPLETION_H_
