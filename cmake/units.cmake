# heed_add_unit(<name> <about> ...), in the file units.cmake of a folder: a source of heed_objects that only instantiates
# templates, for every SIMD target of core/targets.h. CMake writes it into the build folder. Kernels have one such source
# per operand type, so that these compile in parallel. The folder's name is the namespace, headers are relative to it.
#
#   TARGETS <macro>       a macro of core/targets.h, for sources that are for some SIMD targets only
#   DECLARED <header>     declares the passes
#   TEMPLATES <header>... define what is instantiated
#   INSTANCES <line>...   explicit instantiations
#   PASSES <pass>...      "Type Name = expression", for a function Type Name(const Context&) (engines/export_passes.h)
#
# The global property <macro>_UNITS lists the sources with TARGETS <macro>, for tests that compile them once more.
function(heed_add_unit name about)
  cmake_parse_arguments(PARSE_ARGV 2 unit "" "TARGETS;DECLARED" "TEMPLATES;INSTANCES;PASSES")
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_LIST_DIR BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE folder)
  cmake_path(GET folder FILENAME namespace)
  foreach(text only_targets declared templates instances passes exports)
    set(${text} "")
  endforeach()
  if(unit_TARGETS)
    set(only_targets "#define ${unit_TARGETS}\n")
  endif()
  # These add to what the functions after them are compiled for.
  if(unit_TARGETS STREQUAL "HEED_BYTE_PRODUCTS")
    set(templates "#include \"heed/simd/dot_products-inl.h\"\n")
  elseif(unit_TARGETS STREQUAL "HEED_BF16_PAIRS")
    set(templates "#include \"heed/simd/pair_products-inl.h\"\n")
  endif()
  if(unit_DECLARED)
    set(declared "#include \"${folder}/${unit_DECLARED}\"\n")
  endif()
  foreach(header IN LISTS unit_TEMPLATES)
    string(APPEND templates "#include \"${folder}/${header}\"\n")
  endforeach()
  foreach(line IN LISTS unit_INSTANCES)
    string(APPEND instances "${line}\n")
  endforeach()
  foreach(pass IN LISTS unit_PASSES)
    if(NOT pass MATCHES "^([A-Za-z]+) ([A-Za-z0-9]+) = (.+)$")
      message(FATAL_ERROR "${folder}/${name}: a pass is \"Type Name = expression\", not \"${pass}\"")
    endif()
    string(APPEND passes "${CMAKE_MATCH_1} ${CMAKE_MATCH_2}() { return ${CMAKE_MATCH_3}; }\n")
    string(APPEND exports "HEED_EXPORT(${CMAKE_MATCH_1}, ${CMAKE_MATCH_2})\n")
  endforeach()
  # Where generated headers are, so that HWY_TARGET_INCLUDE finds it.
  set(source ${PROJECT_BINARY_DIR}/include/${folder}/${name}.cc)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/unit.cc.in ${source} @ONLY)
  target_sources(heed_objects PRIVATE ${source})
  if(unit_TARGETS)
    set_property(GLOBAL APPEND PROPERTY ${unit_TARGETS}_UNITS ${source})
  endif()
endfunction()
