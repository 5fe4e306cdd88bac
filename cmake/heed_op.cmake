# heed_add_op(<family>/<name>): what one line in heed/ops/CMakeLists.txt does.
#
# The suffix of a file says where it goes: _case to the harness, _test to heed_op_tests, _py to the Python module, the rest
# to the library, with the sources that its units.cmake describes (cmake/units.cmake). Headers without such a suffix are
# public, _internal and -inl ones are not. The lists generated below are the only registration: <name>_case.cc defines
# `OpEntry heed::<name>::Entry()`, <name>_py.cc defines `void heed::<name>::Bind(nanobind::module_&)`. A recurrence or a
# scan without options of its own needs neither: where <name>_internal.h declares DefinitionOf and the file is missing, it is
# written from cmake/mechanism_<kind>.cc.in.
foreach(kind case test py)
  define_property(GLOBAL PROPERTY HEED_OP_${kind} BRIEF_DOCS "sources of this kind of all mechanisms, in order")
  define_property(GLOBAL PROPERTY HEED_OPS_WITH_${kind} BRIEF_DOCS "mechanisms that have <name>_${kind}.cc, in order")
endforeach()

function(heed_add_op op)
  cmake_path(GET op FILENAME name)
  set(dir ${PROJECT_SOURCE_DIR}/heed/ops/${op})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${dir}/*.cc)
  foreach(source IN LISTS sources)
    if(source MATCHES "_(case|test|py)\\.cc$")
      set(kind ${CMAKE_MATCH_1})
      set_property(GLOBAL APPEND PROPERTY HEED_OP_${kind} ${source})
      if(source STREQUAL "${dir}/${name}_${kind}.cc")
        set_property(GLOBAL APPEND PROPERTY HEED_OPS_WITH_${kind} ${name})
      endif()
    else()
      target_sources(heed_objects PRIVATE ${source})
    endif()
  endforeach()
  if(EXISTS ${dir}/${name}_internal.h)
    file(STRINGS ${dir}/${name}_internal.h definition REGEX "^[a-z]+::Definition DefinitionOf\\(" LIMIT_COUNT 1)
    foreach(kind case py)
      if(definition AND NOT EXISTS ${dir}/${name}_${kind}.cc)
        cmake_path(GET op PARENT_PATH family)
        set(source ${PROJECT_BINARY_DIR}/mechanisms/${name}_${kind}.cc)
        configure_file(${PROJECT_SOURCE_DIR}/cmake/mechanism_${kind}.cc.in ${source} @ONLY)
        set_property(GLOBAL APPEND PROPERTY HEED_OP_${kind} ${source})
        set_property(GLOBAL APPEND PROPERTY HEED_OPS_WITH_${kind} ${name})
      endif()
    endforeach()
  endif()
  if(EXISTS ${dir}/units.cmake)
    include(${dir}/units.cmake)
  endif()
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${dir}/*.h)
  list(FILTER headers EXCLUDE REGEX "(_(internal|case|py|reference)|-inl)\\.h$")
  target_sources(heed PUBLIC FILE_SET HEADERS FILES ${headers})
  set_property(GLOBAL APPEND PROPERTY HEED_OP_HEADERS ${headers})
endfunction()

# heed/ops/mechanisms.h, which heed/heed.h includes: the public headers of all mechanisms.
function(heed_write_umbrella)
  get_property(headers GLOBAL PROPERTY HEED_OP_HEADERS)
  list(SORT headers)
  set(includes "")
  foreach(header IN LISTS headers)
    cmake_path(RELATIVE_PATH header BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    string(APPEND includes "#include \"${header}\"\n")
  endforeach()
  set(folder ${PROJECT_BINARY_DIR}/include)
  file(CONFIGURE OUTPUT ${folder}/heed/ops/mechanisms.h @ONLY CONTENT "// The headers of all mechanisms, generated from heed/ops/CMakeLists.txt.
#ifndef HEED_OPS_MECHANISMS_H_
#define HEED_OPS_MECHANISMS_H_

${includes}
#endif  // HEED_OPS_MECHANISMS_H_
")
  # A set of its own: base folders of one set may not contain each other.
  target_sources(heed PUBLIC FILE_SET generated_headers TYPE HEADERS BASE_DIRS ${folder}
    FILES ${folder}/heed/ops/mechanisms.h)
  target_include_directories(heed_flags INTERFACE ${folder})
endfunction()

# Writes `file`, a source that declares `declaration` for each mechanism with a source of `kind`, and defines `signature`
# with the body `before`, one `statement` for each of them, `after`. In `statement` NAME stands for the mechanism.
function(heed_write_list file kind include declaration signature before statement after)
  get_property(names GLOBAL PROPERTY HEED_OPS_WITH_${kind})
  set(declarations "")
  set(statements "")
  foreach(name IN LISTS names)
    string(REPLACE NAME ${name} line "${statement}")
    string(APPEND declarations "namespace heed::${name} { ${declaration} }\n")
    string(APPEND statements "  ${line}\n")
  endforeach()
  file(CONFIGURE OUTPUT ${file} @ONLY CONTENT "// All mechanisms, generated from heed/ops/CMakeLists.txt.
#include \"${include}\"

${declarations}
namespace heed {

${signature} {
  ${before}
${statements}  ${after}
}

}  // namespace heed
")
endfunction()
