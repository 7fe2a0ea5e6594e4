# fsdp_add_test(NAME LABELS... [TIMEOUT seconds] SOURCES...): one GoogleTest
# binary of a room. Every test has a time limit and labels:
#   unit     no ranks            ranks    ranks as threads
#   process  ranks as processes  parity   against Python's torch
#   package  the installed package        cli  the command line tool
#   gpu      needs a GPU, skipped elsewhere

find_package(GTest REQUIRED)
include(GoogleTest)

function(fsdp_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "LABELS;SOURCES" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE fsdp_objects fsdp_test_support)
  fsdp_add_precompiled(${name})
  gtest_discover_tests(
    ${name}
    DISCOVERY_TIMEOUT 120
    PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
endfunction()
