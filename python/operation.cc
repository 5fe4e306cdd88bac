// The check of arrays that a call of an operation needs.
#include "python/operation.h"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace heed::python {

void CheckNeeded(const char* operation, Pass pass, std::initializer_list<Needed> arrays) {
  for (const Needed& array : arrays) {
    if (!array.view.present()) FailMissing(operation, array.name);
    if (array.axes == nullptr) continue;
    std::string axes = array.axes;
    if (pass == Pass::kStep) axes.erase(axes.find("T, "), 3);
    if (array.view.rank() == 1 + std::count(axes.begin(), axes.end(), ',')) continue;
    Fail(operation, array.name, "has shape " + array.view.ShapeString(), axes);
  }
}

}  // namespace heed::python
