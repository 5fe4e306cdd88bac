# The extension module heed._core and its type stubs, and the program, where the wheel wants them.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/*.cc ${PROJECT_SOURCE_DIR}/python/caches/*.cc
  ${PROJECT_SOURCE_DIR}/python/mechanism/*.cc ${PROJECT_SOURCE_DIR}/heed/patterns/*_py.cc)
get_property(bindings GLOBAL PROPERTY HEED_OP_py)

heed_write_list(${PROJECT_BINARY_DIR}/bind_all_ops.cc py nanobind/nanobind.h "void Bind(nanobind::module_& m);"
  "void BindAllOps(nanobind::module_& m)" "" "NAME::Bind(m);" "")

# Docstrings come from the headers' comments: heed/ops/f/x/x.h gives docstrings/x.h.
get_target_property(headers heed HEADER_SET)
list(FILTER headers INCLUDE REGEX "/heed/(ops|state)/")
set(docstrings "")
foreach(header IN LISTS headers)
  cmake_path(GET header STEM name)
  set(output ${PROJECT_BINARY_DIR}/docstrings/${name}.h)
  add_custom_command(OUTPUT ${output} VERBATIM
    COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/docstrings.py ${output} ${header}
    DEPENDS ${PROJECT_SOURCE_DIR}/tools/docstrings.py ${header} ${PROJECT_SOURCE_DIR}/heed/mechanism/recurrent.h
      ${PROJECT_SOURCE_DIR}/heed/mechanism/scanning.h)
  list(APPEND docstrings ${output})
endforeach()

if(sources)
  # nanobind's split mode: the module uses Python's limited API alone, so that one serves every Python from 3.10 on, and
  # finds what nanobind has per Python in the package nanobind-backend.
  nanobind_add_module(_core BACKEND_MODULE nanobind_backend STABLE_ABI_VERSION 3.10 NOMINSIZE NB_SUPPRESS_WARNINGS
    NB_DOMAIN heed ${sources} ${bindings} ${PROJECT_BINARY_DIR}/bind_all_ops.cc ${docstrings})
  target_include_directories(_core PRIVATE ${PROJECT_BINARY_DIR})
  target_link_libraries(_core PRIVATE heed_advise heed_pages heed_distributed_internal ${CMAKE_DL_LIBS})
  target_compile_options(_core PRIVATE $<$<CONFIG:Release>:-O1>)  # it converts arguments; the library computes
  target_precompile_headers(_core PRIVATE ${HEED_STANDARD_HEADERS} <nanobind/nanobind.h> <nanobind/stl/string.h>)
  if(UNIX AND NOT APPLE)
    set(map ${CMAKE_CURRENT_LIST_DIR}/module.map)
    target_link_options(_core PRIVATE LINKER:--version-script=${map})
    set_property(TARGET _core APPEND PROPERTY LINK_DEPENDS ${map})
  endif()
  # nanobind's stub is the source of those that type checkers read: heed._core's and heed.torch's. It is made by importing
  # the module: a cross build has one where HEED_TARGET_PYTHON runs the other machine's Python.
  if(NOT CMAKE_CROSSCOMPILING)
    set(HEED_TARGET_PYTHON ${Python_EXECUTABLE})
  endif()
  if(HEED_TARGET_PYTHON)
    set(stubs ${PROJECT_BINARY_DIR}/_core.pyi ${PROJECT_BINARY_DIR}/torch.pyi)
    set(tool ${PROJECT_SOURCE_DIR}/tools/stubs.py)
    set(package ${PROJECT_SOURCE_DIR}/python/heed)
    block()
      set(Python_EXECUTABLE ${HEED_TARGET_PYTHON})
      nanobind_add_stub(_core_functions MODULE _core OUTPUT ${PROJECT_BINARY_DIR}/stub/_core.pyi
        PYTHON_PATH $<TARGET_FILE_DIR:_core> DEPENDS _core)
    endblock()
    add_custom_command(OUTPUT ${stubs} VERBATIM
      COMMAND ${Python_EXECUTABLE} ${tool} ${PROJECT_BINARY_DIR}/stub/_core.pyi ${package} ${stubs}
      DEPENDS ${PROJECT_BINARY_DIR}/stub/_core.pyi ${tool} ${package}/_typing.py ${package}/_signatures.py
        ${package}/torch/__init__.py)
    add_custom_target(_core_stub ALL DEPENDS ${stubs})
  endif()
  # For the wheel, which asks for this component: the paths are those of a package, and of where it was built last.
  set(of_wheel COMPONENT python EXCLUDE_FROM_ALL)
  install(TARGETS _core LIBRARY DESTINATION heed ${of_wheel})
  if(HEED_TARGET_PYTHON)
    install(FILES ${PROJECT_BINARY_DIR}/_core.pyi DESTINATION heed ${of_wheel})
    install(FILES ${PROJECT_BINARY_DIR}/torch.pyi DESTINATION heed/torch RENAME __init__.pyi ${of_wheel})
  endif()
  if(HEED_WITH_CUDA AND NOT HEED_CUDA_FAST_COMPILE)
    install(TARGETS heed_cuda LIBRARY DESTINATION heed ${of_wheel})
  endif()
  if(TARGET heed_cli AND SKBUILD_SCRIPTS_DIR)
    install(TARGETS heed_cli RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} ${of_wheel})  # stripped, as every target
  endif()
endif()
