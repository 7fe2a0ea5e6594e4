# Makes compiling quick. A compiler takes seconds to read torch's headers, so they are precompiled,
# and the files of a room are compiled together.

option(FSDP_UNITY "Compile the files of a room as one unit" ON)

# fsdp_add_header(NAME headers...): adds precompiled headers. A compiler uses them only with the
# flags that they were compiled with.
function(fsdp_add_header name)
  add_library(${name} OBJECT ${PROJECT_SOURCE_DIR}/cmake/precompiled.cpp)
  target_link_libraries(${name} PRIVATE fsdp_build_flags ${TORCH_LIBRARIES})
  target_precompile_headers(
    ${name} PRIVATE <torch/torch.h> <torch/csrc/distributed/c10d/Backend.hpp>
            ${PROJECT_SOURCE_DIR}/cmake/precompiled.h ${ARGN})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
endfunction()

# fsdp_use_header(TARGET NAME): gives TARGET the flags of this project and the precompiled headers.
function(fsdp_use_header target name)
  target_link_libraries(${target} PRIVATE fsdp_build_flags)
  target_precompile_headers(${target} REUSE_FROM ${name})
  set_target_properties(
    ${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF DEFINE_SYMBOL "" UNITY_BUILD ${FSDP_UNITY}
                         UNITY_BUILD_MODE GROUP)
endfunction()

fsdp_add_header(fsdp_header)

# fsdp_add_unit(TARGET UNIT [IN folder] FILES...): adds sources that are compiled together. Divide a
# unit that takes longer than half a minute to compile.
function(fsdp_add_unit target unit)
  cmake_parse_arguments(arg "" "IN" "FILES" ${ARGN})
  if(arg_IN)
    list(TRANSFORM arg_FILES PREPEND ${arg_IN}/)
  endif()
  target_sources(${target} PRIVATE ${arg_FILES})
  set_source_files_properties(${arg_FILES} PROPERTIES UNITY_GROUP ${unit})
endfunction()
