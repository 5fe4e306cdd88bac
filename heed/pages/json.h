// Json: objects whose members keep their order.
#ifndef HEED_PAGES_JSON_H_
#define HEED_PAGES_JSON_H_

#include "nlohmann/json.hpp"

namespace heed {

using Json = nlohmann::ordered_json;

}  // namespace heed

#endif  // HEED_PAGES_JSON_H_
