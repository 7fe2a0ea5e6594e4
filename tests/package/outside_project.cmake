# Installs the package into a fresh folder, builds examples/consumer against it
# as an outside project, and runs it; a part of it once more with the other compiler,
# where there is one. Variables: BUILD, SOURCE, WORK, CXX, OTHER_CXX.

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGN}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)

# An empty entry would have libraries loaded from the current folder.
file(GLOB binaries ${BUILD}/bin/* ${WORK}/prefix/bin/fsdp ${WORK}/prefix/lib*/libfsdp.so)
foreach(binary IN LISTS binaries)
  run(readelf -d ${binary})
  if(output MATCHES "path: \\[(:|[^]]*:(:|\\]))")
    message(FATAL_ERROR "${binary} has an empty entry in its RUNPATH:\n${output}")
  endif()
endforeach()

# configure_consumer(FOLDER compiler [arguments of CMake...])
function(configure_consumer folder compiler)
  run(${CMAKE_COMMAND} -S ${SOURCE}/examples/consumer -B ${folder} -G Ninja
      -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${compiler} ${ARGN})
endfunction()

# run_consumer(FOLDER)
function(run_consumer folder)
  run(${folder}/consumer)
  set(expected
      "DTensor(Float[7, 5], (S(0), S(1)) on DeviceMesh(cpu, dp=2, tp=2)), the ranks add up to 6")
  string(FIND "${output}" "${expected}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "the consumer printed:\n${output}")
  endif()
endfunction()

configure_consumer(${WORK}/build ${CXX})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run_consumer(${WORK}/build)
# Each checks itself what it shows.
foreach(example twenty_lines first_shard own_model hsdp tensor_parallel experts checkpoint_resume
                finetune_hf int8_gather)
  run(${WORK}/build/${example})
endforeach()
# The tool is installed beside the library and finds it.
run(${WORK}/prefix/bin/fsdp run -n 2 -- ${WORK}/build/consumer)

# A library that one compiler built serves a program that another one built.
if(OTHER_CXX)
  configure_consumer(${WORK}/other ${OTHER_CXX} -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON)
  run(${CMAKE_COMMAND} --build ${WORK}/other --target consumer twenty_lines)
  run_consumer(${WORK}/other)
  run(${WORK}/other/twenty_lines)
else()
  message(STATUS "there is no other compiler to try")
endif()
