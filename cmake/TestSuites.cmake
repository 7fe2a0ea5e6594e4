# ctest runs this file, so that it finds a new suite without configuring again.

# fsdp_add_suites(ROOM binary LABELS... TIMEOUT seconds COST number SOURCES...): adds a ctest test
# for every suite that the sources define. Starting a process that loads LibTorch takes longer than
# most cases, so the cases of a suite share a process. The process has one OpenMP thread, because
# ranks are already threads, and no GPU: tests that need a GPU are whole binaries. It also gets the
# variables in sanitizer_options.
function(fsdp_add_suites room binary)
  cmake_parse_arguments(arg "" "TIMEOUT;COST" "LABELS;SOURCES" ${ARGN})
  set(suites)
  foreach(source IN LISTS arg_SOURCES)
    file(READ ${source} text)
    string(REGEX MATCHALL "\n *(TYPED_)?TEST(_F|_P)? *\\([ \n]*[A-Za-z0-9_]+" found "\n${text}")
    list(TRANSFORM found REPLACE "^[^(]*\\([ \n]*" "")
    list(APPEND suites ${found})
  endforeach()
  list(REMOVE_DUPLICATES suites)
  set(environment OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= ${sanitizer_options})
  foreach(suite IN LISTS suites)
    add_test(${room}.${suite} ${binary}
             "--gtest_filter=${suite}.*:*/${suite}.*:${suite}/*.*:*/${suite}/*.*")
    set_tests_properties(
      ${room}.${suite} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} COST ${arg_COST}
                                  ENVIRONMENT "${environment}"
                                  FAIL_REGULAR_EXPRESSION "0 tests from 0 test suites ran")
  endforeach()
endfunction()
