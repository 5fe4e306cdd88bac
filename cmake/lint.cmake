# `lint`: layering, words, and format, the latter by clang-format and ruff.
find_package(Python3 QUIET COMPONENTS Interpreter)
set(commands "")
if(Python3_Interpreter_FOUND)
  list(APPEND commands COMMAND ${Python3_EXECUTABLE} tools/check_layering.py
    COMMAND ${Python3_EXECUTABLE} tools/check_words.py COMMAND ${Python3_EXECUTABLE} tools/check_format.py)
endif()
if(PROJECT_IS_TOP_LEVEL)
  add_custom_target(lint ${commands} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} VERBATIM)
endif()
