# heed_add_op(<family>/<name>): what one line in heed/ops/CMakeLists.txt does.
#
# The suffix of a file says where it goes: _case to the harness, _test to heed_op_tests, _py to the Python module, the rest
# to the library. <name>.h is public. The two generated lists below are the only registration.
define_property(GLOBAL PROPERTY HEED_OPS BRIEF_DOCS "names of all mechanisms, in order")
foreach(kind case test py)
  define_property(GLOBAL PROPERTY HEED_OP_${kind} BRIEF_DOCS "sources of kind ${kind}")
endforeach()

function(heed_add_op op)
  cmake_path(GET op FILENAME name)
  set(dir ${PROJECT_SOURCE_DIR}/heed/ops/${op})
  file(GLOB sources CONFIGURE_DEPENDS ${dir}/*.cc)
  foreach(source IN LISTS sources)
    if(source MATCHES "_(case|test|py)\\.cc$")
      set_property(GLOBAL APPEND PROPERTY HEED_OP_${CMAKE_MATCH_1} ${source})
    else()
      target_sources(heed_objects PRIVATE ${source})
    endif()
  endforeach()
  if(EXISTS ${dir}/${name}.h)
    target_sources(heed PUBLIC FILE_SET HEADERS FILES ${dir}/${name}.h)
  endif()
  set_property(GLOBAL APPEND PROPERTY HEED_OPS ${name})
endfunction()
