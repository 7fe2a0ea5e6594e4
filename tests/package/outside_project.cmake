# Installs the package into a fresh folder, builds examples/consumer against it
# as an outside project, and runs it. Variables: BUILD, SOURCE, WORK.

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGN}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} -S ${SOURCE}/examples/consumer -B ${WORK}/build -G Ninja
    -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_BUILD_TYPE=Release)
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
set(expected "DTensor(Float[7, 5], (S(0), S(1)) on DeviceMesh(cpu, dp=2, tp=2)), the ranks add up to 6")
string(FIND "${output}" "${expected}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "the consumer printed:\n${output}")
endif()
# Each checks itself what it shows.
foreach(example twenty_lines first_shard own_model hsdp tensor_parallel checkpoint_resume finetune_hf
                int8_gather)
  run(${WORK}/build/${example})
endforeach()
# The tool is installed beside the library and finds it.
run(${WORK}/prefix/bin/fsdp run -n 2 -- ${WORK}/build/consumer)
