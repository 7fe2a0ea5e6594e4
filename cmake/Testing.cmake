# fsdp_add_test(NAME LABELS... [TIMEOUT seconds] [COST number] SOURCES... [OBJECTS...]): adds a
# GoogleTest binary. Suites of a higher cost start earlier. Every suite has a time limit and labels:
#   unit     no ranks            ranks    ranks as threads
#   process  ranks as processes  parity   against Python's torch
#   package  the installed package        cli  the command line tool
#   gpu      needs a GPU, skipped elsewhere

find_package(GTest REQUIRED)

# Tests are not optimised, so that they compile in half the time. The library is optimised.
fsdp_add_header(fsdp_test_header <gtest/gtest.h> <fsdp/fsdp.h>)
target_compile_options(fsdp_test_header PRIVATE -O0)
target_include_directories(fsdp_test_header PRIVATE ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(fsdp_test_header PRIVATE GTest::gtest)

# Builds all tests, but no benchmarks; `./fsdp test` uses it.
add_custom_target(tests)

function(fsdp_link_test name)
  add_dependencies(tests ${name})
  target_compile_options(${name} PRIVATE -O0)
  target_link_libraries(${name} PRIVATE fsdp_objects fsdp_test_support)
  fsdp_use_header(${name} fsdp_test_header)
  if(FSDP_SANITIZE MATCHES thread)
    target_compile_definitions(${name} PRIVATE FSDP_TEST_TSAN)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:fsdp_tsan_allocator>)
  endif()
endfunction()

set(suites_file ${CMAKE_CURRENT_BINARY_DIR}/suites.cmake)
file(WRITE ${suites_file} "include(\"${PROJECT_SOURCE_DIR}/cmake/TestSuites.cmake\")\n")
set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${suites_file})
if(FSDP_SANITIZE MATCHES thread)
  add_library(fsdp_tsan_allocator OBJECT support/tsan_allocator.cpp)
  target_link_libraries(fsdp_tsan_allocator PRIVATE fsdp_objects)
  # A test asks for more memory than there is. The sanitizer would end the process. Without a
  # symbolizer it knows no names of functions, and so none of those in tsan.supp.
  find_program(FSDP_SYMBOLIZER NAMES llvm-symbolizer-19 llvm-symbolizer REQUIRED)
  file(APPEND ${suites_file}
       "set(sanitizer_options \"TSAN_OPTIONS=allocator_may_return_null=1 "
       "external_symbolizer_path='${FSDP_SYMBOLIZER}' "
       "suppressions='${CMAKE_CURRENT_SOURCE_DIR}/tsan.supp'\")\n")
endif()

function(fsdp_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT;COST" "LABELS;SOURCES;OBJECTS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(NOT arg_COST)
    set(arg_COST 0)
  endif()
  add_executable(${name} ${arg_SOURCES} ${arg_OBJECTS})
  fsdp_link_test(${name})
  string(REPLACE "_tests" "" room ${name})
  list(TRANSFORM arg_SOURCES REPLACE "(.+)" "\"${CMAKE_CURRENT_SOURCE_DIR}/\\1\"")
  list(JOIN arg_SOURCES " " sources)
  file(APPEND ${suites_file}
       "fsdp_add_suites(${room} \"${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name}\" "
       "LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT} COST ${arg_COST} SOURCES ${sources})\n")
endfunction()

# fsdp_also_over_gloo(NAME RANKS): runs the tests of the binary NAME that have so many ranks once
# more, with processes over gloo as ranks (tests/support/ranks.h). Death tests are left out, because
# they start processes that cannot join.
function(fsdp_also_over_gloo name ranks)
  add_test(NAME OverGloo.${name} COMMAND fsdp_cli run -n ${ranks} -- $<TARGET_FILE:${name}>
                                         --gtest_filter=-*DeathTest.*)
  set_tests_properties(
    OverGloo.${name}
    PROPERTIES LABELS process TIMEOUT 600 COST 4 PROCESSORS 2
               ENVIRONMENT "FSDP_TEST_BACKEND=gloo;OMP_NUM_THREADS=1")
endfunction()

# fsdp_add_whole_test(TEST binary arguments...): adds a whole binary as one test on a GPU, because
# opening the device takes longer than most cases. A few of these tests can run side by side.
function(fsdp_add_whole_test test binary)
  add_test(NAME ${test} COMMAND ${binary} ${ARGN})
  set_tests_properties(
    ${test}
    PROPERTIES LABELS gpu TIMEOUT 300 PROCESSORS 4
               SKIP_REGULAR_EXPRESSION "there is no GPU here")
endfunction()

# fsdp_add_gpu_test(NAME SOURCES...): adds a binary that needs a GPU. This test leaves out the suites of
# several ranks over NCCL, which run in tests of their own. No other test runs at the same time,
# because some cases measure time or all memory of the GPU.
function(fsdp_add_gpu_test name)
  cmake_parse_arguments(arg "" "" "SOURCES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  fsdp_link_test(${name})
  if(TORCH_CUDA_LIBRARIES)
    target_compile_definitions(${name} PRIVATE FSDP_TEST_CUDA)
  endif()
  fsdp_add_whole_test(${name} ${name} "--gtest_filter=-NcclRanks.*:NcclGraphs.*:NcclFaults.*")
  set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
endfunction()

# fsdp_add_nccl_test(TEST RANKS binary arguments...): adds a binary with processes over NCCL as ranks.
# They may share a GPU (tests/support/ranks.h), but only those of one test at a time.
function(fsdp_add_nccl_test test ranks binary)
  add_test(NAME ${test} COMMAND fsdp_cli run -n ${ranks} -- $<TARGET_FILE:${binary}> ${ARGN})
  set_tests_properties(
    ${test}
    PROPERTIES LABELS nccl TIMEOUT 600 RUN_SERIAL TRUE
               SKIP_REGULAR_EXPRESSION "there is no GPU here;NCCL cannot share a GPU here"
               ENVIRONMENT "FSDP_TEST_DEVICE=cuda;FSDP_TEST_BACKEND=nccl;OMP_NUM_THREADS=1")
endfunction()

# fsdp_also_on_gpu(NAME [PLACED] [EXCEPT patterns...] [NOT_OVER_NCCL patterns...]): if torch has
# CUDA, runs the tests of the binary NAME again with models and batches on a GPU, over threads and
# over NCCL with four ranks. With PLACED, runs them once more with FSDP_PLACED_GATHERS=always.
function(fsdp_also_on_gpu name)
  cmake_parse_arguments(arg "PLACED" "" "EXCEPT;NOT_OVER_NCCL" ${ARGN})
  list(JOIN arg_EXCEPT ":" except)
  if(TORCH_CUDA_LIBRARIES)
    fsdp_add_whole_test(OnGpu.${name} ${name} --gtest_filter=-${except})
    set_tests_properties(OnGpu.${name} PROPERTIES ENVIRONMENT FSDP_TEST_DEVICE=cuda)
    if(arg_PLACED)
      fsdp_add_whole_test(OnGpuPlaced.${name} ${name} --gtest_filter=-${except})
      set_tests_properties(
        OnGpuPlaced.${name}
        PROPERTIES ENVIRONMENT "FSDP_TEST_DEVICE=cuda;FSDP_PLACED_GATHERS=always")
    endif()
    if(FSDP_BUILD_CLI)
      list(JOIN arg_NOT_OVER_NCCL ":" not_over_nccl)
      fsdp_add_nccl_test(
        OverNccl.${name} 4 ${name} "--gtest_filter=-${except}:*DeathTest.*:${not_over_nccl}")
    endif()
  endif()
endfunction()
