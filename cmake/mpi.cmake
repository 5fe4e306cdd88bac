# HEED_WITH_MPI: the tests of several processes and the example, with the MPI that CMake finds. The library needs none.
set(MPI_CXX_SKIP_MPICXX ON)  # mpi.h without classes of MPI-2
find_package(MPI REQUIRED COMPONENTS CXX)
function(heed_add_mpi_program name source)
  add_executable(${name} ${PROJECT_SOURCE_DIR}/${source})
  target_link_libraries(${name} PRIVATE heed::distributed heed::heed MPI::MPI_CXX)
endfunction()
function(heed_add_mpi_test name program ranks)
  add_test(NAME ${name}_${ranks} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${MPIEXEC_PREFLAGS} $<TARGET_FILE:${program}> ${ARGN})
  # Open MPI runs neither as root nor with more ranks than cores unless it is told to.
  set_tests_properties(${name}_${ranks} PROPERTIES PROCESSORS ${ranks} TIMEOUT 300 ENVIRONMENT
    "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1;OMP_NUM_THREADS=1")
endfunction()
heed_add_mpi_program(example_long_document examples/long_document.cc)
if(HEED_BUILD_TESTS)
  heed_add_mpi_program(mpi_test tests/mpi/mpi_test.cc)
  foreach(ranks IN ITEMS 1 2 3)
    heed_add_mpi_test(mpi mpi_test ${ranks})
  endforeach()
  # The checksum of one rank is that of two.
  add_test(NAME mpi_example COMMAND ${CMAKE_COMMAND} "-DMPIEXEC=${MPIEXEC_EXECUTABLE};${MPIEXEC_NUMPROC_FLAG}"
    "-DPREFLAGS=${MPIEXEC_PREFLAGS}" -DPROGRAM=$<TARGET_FILE:example_long_document>
    -P ${PROJECT_SOURCE_DIR}/tests/mpi/example.cmake)
endif()
